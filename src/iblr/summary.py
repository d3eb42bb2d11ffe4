"""A posterior in plain words: the fit, and a table of the parameters."""

from typing import Any

import numpy as np

from iblr.families.base import marginals
from iblr.verdict import is_heavy_tailed, is_usable


def summary(posterior: Any, rows: int) -> str:
    """The verdict, what it cost, why it ended; mean, sd and 90 % interval of so many parameters."""
    if posterior.is_batch:
        runs = [
            f"run {i}: ELBO {_elbo_words(posterior[i])}; {_judged_words(posterior[i])}"
            for i in range(len(posterior))
        ]
        return "\n".join([f"{len(posterior)} runs of {_words(posterior)}", *runs])
    structure = posterior.family.structure
    trees = marginals(posterior.family, 0.9)
    columns = [np.asarray(structure.ravel_point(tree, "summary")) for tree in trees]
    labels = structure.labels()
    width = max(len(label) for label in ["parameter", *labels[:rows]])
    head = f"{'parameter':<{width}} {'mean':>11} {'sd':>11} {'5 %':>11} {'95 %':>11}"
    verdict = [posterior.verdict] if posterior.has_verdict else []
    told = bool(verdict) and posterior.diagnosis is None  # by the verdict
    message = f" {posterior.message}" if bool(is_usable(posterior.status)) and not told else ""
    elbo = f"ELBO {_elbo_words(posterior)} nats.{message}"
    lines = [*verdict, _words(posterior), elbo, *_ending_words(posterior), "", head]
    for label, m, s, low, high in list(zip(labels, *columns, strict=True))[:rows]:
        lines.append(f"{label:<{width}} {m:>11.4g} {s:>11.4g} {low:>11.4g} {high:>11.4g}")
    if len(labels) > rows:
        lines.append(f"... and {len(labels) - rows} more")
    return "\n".join(lines)


def _words(posterior: Any) -> str:
    family = posterior.family
    counts = f"{posterior.num_steps} steps, {posterior.num_gradients} gradients"
    found = posterior.diagnosis
    if found is not None and found.climbs:
        counts += f" ({found.climb_gradients} of them from {found.climbs} dispersed starts)"
    number = family.structure.point_dim
    plural = "" if number == 1 else "s"
    text = f"{family.name} over {number} parameter{plural}, {counts}, {posterior.seconds:.1f} s"
    refused, limited = int(np.sum(posterior.refused)), int(np.sum(posterior.limited))
    if refused:
        text += f", {refused} steps refused"
    if limited:
        text += f", {limited} changes or draws limited by the precision"
    if np.any(posterior.halvings):
        text += f", {int(np.sum(posterior.halvings))} halvings"
    if np.any(posterior.excluded):
        text += f", {int(np.sum(posterior.excluded))} draws left out"
    return text


def _ending_words(posterior: Any) -> list[str]:
    """Why it ended, how near to the best member that is, and the evidence; each where known."""
    found, parts = posterior.diagnosis, []
    if np.isfinite(posterior.gap_bound):
        near = " near this one" if found is not None and found.modes else ""
        parts.append(
            f"Stopped by {posterior.stopped_by}, at most {posterior.gap_bound:.2g} nats below the "
            f"best {posterior.family.name}{near} (95 %)."
        )
    if found is not None and np.isfinite(found.importance.log_evidence):
        value, error = posterior.log_evidence, posterior.log_evidence_se
        seen = " of what draws of q have seen" if is_heavy_tailed(found) else ""
        parts.append(f"Log evidence {value:.4f} ± {error:.4f}{seen}.")
    return [" ".join(parts)] if parts else []


def _judged_words(posterior: Any) -> str:
    return str(posterior.message) if posterior.diagnosis is None else posterior.verdict


def _elbo_words(posterior: Any) -> str:
    return f"{float(posterior.elbo):.4f} ± {float(posterior.elbo_se):.4f}"

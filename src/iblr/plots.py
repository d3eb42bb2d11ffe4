"""Pictures of a posterior, by matplotlib (the extra `iblr[plot]`)."""

import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.posterior import Posterior
from iblr.structure import Structure
from iblr.support import AbstractEntrywise

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#6b6b6b"  # told apart by colour-blind readers
MOST_PARAMETERS = 8
SMALLEST_MARGIN = 0.005  # nats, so that rounding does not look like a way
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#222222",
    "axes.grid": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "font.size": 9,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def plot_trace(posterior: Posterior, tol: float | None = None) -> Any:
    """The ELBO with a band of two standard errors, and where it is known the gap left.

    The first looks of a fit may be thousands of nats below the last: the axis shows the end of the
    way, and what is further below leaves it.

    Args:
        posterior: one run.
        tol: the gap that was asked for, drawn as a line.
    """
    pyplot, style = _pyplot("plot_trace"), _style()
    trace = posterior.trace
    if len(trace.step) == 0:
        raise ValueError(
            "`plot_trace` needs a fit that took at least one step, but this took none."
        )
    x = trace.num_gradients
    known = np.isfinite(trace.gap) & (trace.gap > 0)
    line = {"linewidth": 1.6, "marker": "o" if len(x) <= 60 else "", "markersize": 3}
    with style:
        rows = 2 if known.any() else 1
        figure, axes = pyplot.subplots(
            rows, 1, figsize=(7.0, 2.9 * rows), sharex=True, squeeze=False, layout="constrained"
        )
        top = axes[0, 0]
        elbo, noise = np.asarray(trace.elbo, float), 2 * np.asarray(trace.elbo_se, float)
        top.fill_between(x, elbo - noise, elbo + noise, color=BLUE, alpha=0.2, linewidth=0)
        top.plot(x, elbo, color=BLUE, **line)
        last = float(posterior.elbo)
        top.axhline(last, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        text = f"ELBO {last:.3f} ± {float(posterior.elbo_se):.3f}"
        top.set_title(text, loc="right", fontsize=9, color=GREY)
        top.set_ylim(*_end_of_the_way(elbo, noise))
        top.set_ylabel("ELBO, nats")
        if known.any():
            below = axes[1, 0]
            below.plot(x[known], trace.gap[known], color=ORANGE, **line)
            below.set_yscale("log")
            below.set_ylabel("estimated gap, nats")
            if tol is not None:
                below.axhline(tol, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
                below.annotate(
                    f"tol {tol:g}",
                    (0, tol),
                    (2, 3),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    color=GREY,
                )
        axes[-1, 0].set_xlabel("gradients of the target")
        _title(figure, posterior, 90)
    return figure


def plot_pairs(
    posterior: Posterior,
    parameters: str | int | Sequence[str | int] | None = None,
    *,
    key: Key[Array, ""],
    draws: int = 1000,
) -> Any:
    """Draws of every pair of parameters, and the distribution of each.

    Blue are draws of q, with ellipses (bent by the map onto a support) at one and two standard
    deviations where q is a Gaussian. Orange, after `iblr.diagnose` and where k-hat allows it, are
    draws of `posterior.corrected`: where the two colours differ, q is wrong.

    Args:
        posterior: one run.
        parameters: labels such as `"tau"` or `"theta[2]"`, names of whole leaves, or positions in
            the summary; None takes the first eight scalars, and says so where there are more.
        key: for the draws; `posterior.plot_pairs()` may leave it out where there is a verdict, and
            then derives one from the verdict's.
        draws: how many of each kind.
    """
    pyplot, style = _pyplot("plot_pairs"), _style()
    structure = posterior.family.structure
    labels = structure.labels()
    chosen = _chosen(parameters, labels)
    left_out = parameters is None and len(chosen) < len(labels)
    first, second = jax.random.split(key)
    kinds = [("draws of q", BLUE, _scalars(posterior.sample(first, draws), structure, chosen))]
    if posterior.diagnosis is not None and posterior.diagnosis.importance.usable:
        points = posterior.corrected.sample(second, draws)
        kinds.append(("corrected draws", ORANGE, _scalars(points, structure, chosen)))
    n = len(chosen)
    size = min(max(1.6, 5.0 / n), 3.2)
    with style:
        figure, axes = pyplot.subplots(
            n,
            n,
            figsize=(max(size * n, 4.2) + 0.4, max(size * n, 3.6) + 0.6),
            squeeze=False,
            sharex="col",
            layout="constrained",
        )
        ranges = [_range(np.concatenate([x[:, i] for _, _, x in kinds])) for i in range(n)]
        for i in range(n):
            for j in range(n):
                axis = axes[i, j]
                if j > i:
                    axis.set_axis_off()
                elif i == j:
                    _distribution(axis, kinds, i, ranges[i])
                else:
                    _pair(axis, posterior, kinds, chosen, i, j, ranges)
                if j <= i:
                    axis.set_xlim(*ranges[j])
                    axis.locator_params(axis="x", nbins=4)
                    axis.tick_params(labelbottom=i == n - 1, length=2.5)
                if i == n - 1:
                    axis.set_xlabel(labels[chosen[j]])
            if i > 0:
                axes[i, 0].set_ylabel(labels[chosen[i]])
        handles = [
            pyplot.Line2D([], [], color=color, marker="o", linestyle="", markersize=5, label=name)
            for name, color, _ in kinds
        ]
        place = {"loc": "upper right", "fontsize": 9}
        (figure.legend if n > 1 else axes[0, 0].legend)(handles=handles, **place)
        if left_out:
            figure.supxlabel(f"the first {n} of {len(labels)} parameters", fontsize=9, color=GREY)
        _title(figure, posterior, int(22 * max(size * n, 4.2) / 2.0), left=True)
    return figure


def _distribution(axis: Any, kinds: list, i: int, ends: tuple[float, float]) -> None:
    bins = np.linspace(*ends, 31)
    for name, color, x in kinds:
        filled = name == kinds[0][0]
        axis.hist(
            x[:, i],
            bins=bins,
            density=True,
            color=color,
            histtype="stepfilled" if filled else "step",
            alpha=0.3 if filled else 1.0,
            linewidth=1.2,
        )
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)


def _pair(
    axis: Any,
    posterior: Posterior,
    kinds: list,
    chosen: list[int],
    i: int,
    j: int,
    ranges: list[tuple[float, float]],
) -> None:
    for name, color, x in kinds:
        axis.scatter(
            x[:, j],
            x[:, i],
            s=4,
            color=color,
            alpha=0.22 if name == kinds[0][0] else 0.3,
            linewidth=0,
            rasterized=True,
        )
    for radius in (1.0, 2.0):
        curve = _ellipse(posterior, chosen[j], chosen[i], radius)
        if curve is not None:
            axis.plot(*curve, color=BLUE, linewidth=1.1)
    axis.set_ylim(*ranges[i])
    axis.locator_params(axis="y", nbins=4)
    axis.tick_params(labelleft=j == 0)


def _ellipse(posterior: Posterior, j: int, i: int, radius: float) -> np.ndarray | None:
    """The points of scalars j and i at a Mahalanobis distance from the mean, if q is a Gaussian.

    Drawn in real coordinates and mapped, which is right where the map works number by number.
    """
    family = posterior.family
    structure = family.structure
    supports = [_support_of(structure, k) for k in (j, i)]
    by_number = all(isinstance(s, AbstractEntrywise) for s in supports)
    if not isinstance(family, AbstractGaussian) or not by_number:
        return None
    if structure.dim != structure.point_dim:  # positions of coordinates are not those of scalars
        return None
    angle = jnp.linspace(0, 2 * jnp.pi, 181)
    circle = radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    at = jnp.asarray([j, i])
    root = jnp.linalg.cholesky(family.covariance[at][:, at])
    rows = jnp.tile(family.mean, (len(angle), 1)).at[:, at].add((root @ circle).T)
    points = structure.ravel_point(structure.unravel(rows), "plot_pairs")
    return np.asarray(points[:, at]).T


def _support_of(structure: Structure, scalar: int) -> Any:
    ends = np.cumsum([int(np.prod(shape)) for shape in structure.shapes])
    return structure.supports[int(np.searchsorted(ends, scalar, side="right"))]


def _chosen(parameters: str | int | Sequence[str | int] | None, labels: list[str]) -> list[int]:
    """Positions of the scalars that a user named."""
    if parameters is None:
        return list(range(min(len(labels), MOST_PARAMETERS)))
    if isinstance(parameters, str | int):
        parameters = [parameters]
    chosen: list[int] = []
    for name in parameters:
        if isinstance(name, str):
            found = [k for k, label in enumerate(labels) if name in (label, label.split("[")[0])]
        else:
            found = [int(name)] if -len(labels) <= name < len(labels) else []
        if not found:
            shown = ", ".join(labels[:MOST_PARAMETERS]) + (", ..." if len(labels) > 8 else "")
            raise ValueError(
                f"`plot_pairs(parameters=...)` names {name!r}, which is not a parameter; there are "
                f"{shown}."
            )
        chosen += [k % len(labels) for k in found]
    if not chosen:
        raise ValueError("`plot_pairs(parameters=...)` needs at least one parameter, but got none.")
    return list(dict.fromkeys(chosen))


def _scalars(points: Any, structure: Structure, chosen: list[int]) -> np.ndarray:
    return np.asarray(structure.ravel_point(points, "plot_pairs"))[:, chosen].astype(float)


def _range(values: np.ndarray) -> tuple[float, float]:
    """What holds all draws but the most extreme two in a thousand, with a margin."""
    low, high = np.quantile(values[np.isfinite(values)], [0.001, 0.999])
    margin = 0.06 * (high - low) or 0.5
    return float(low - margin), float(high + margin)


def _end_of_the_way(elbo: np.ndarray, noise: np.ndarray) -> tuple[float, float]:
    finite = np.isfinite(elbo)
    if not finite.any():
        return -1.0, 1.0
    elbo, noise = elbo[finite], np.nan_to_num(noise[finite])
    low, high = float(np.quantile(elbo - noise, 0.1)), float(np.max(elbo + noise))
    margin = max(0.06 * (high - low), SMALLEST_MARGIN)
    return low - margin, high + margin


def _title(figure: Any, posterior: Posterior, width: int, left: bool = False) -> None:
    if posterior.diagnosis is None:
        return
    text = textwrap.fill(posterior.verdict.replace("`", ""), width)
    place = {"x": 0.01, "ha": "left"} if left else {}
    figure.suptitle(text, fontsize=9, color="#222222", **place)


def _pyplot(call: str) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            f"`posterior.{call}` needs matplotlib, which is not installed. Install it: "
            "`pip install 'iblr[plot]'`."
        ) from error
    return pyplot


def _style() -> Any:
    from matplotlib import rc_context

    return rc_context(STYLE)

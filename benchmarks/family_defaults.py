"""`iblr.fit(target, start, key=key)` without settings in every family but the full Gaussian.

    python benchmarks/family_defaults.py [--only NAME ...] [--seeds 5] [--out FILE]

Every target has a best member that is known: itself where the family holds it, by coordinate ascent
for the product, by quadrature elsewhere. A row is the worst of all seeds: nats that the ELBO lacks
of the best member's when the fit stops, the bound it gave, the evaluations of the target by the
fit and its verdict, seconds (the median), why it ended, and how many verdicts were Good, Fair and
Bad. Where the family holds the target that gap is KL(q || p): exact for positive families and
Gaussians, else from 10^5 draws, within some 0.002 nats. The full Gaussian has benchmarks of its
own, `gaussian_quality.py` and `automatic_fit.py`.

Bar: every seed ends by `tol` or the default budget, with a gap of at most 0.1 nats. The exit status
is 1 where one does not.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import positive_defaults
from reporting import Report, versions, whole_number

import iblr

DRAWS = 100_000
LARGEST_GAP = 0.1


class Problem(NamedTuple):
    """A start of every key, and the gap of what a fit made of it."""

    name: str
    log_density: Callable
    start: Callable[[jax.Array], Any]
    gap: Callable[[Any], float]


def inside(name: str, target: Any, start: Callable[[jax.Array], Any]) -> Problem:
    """A target that is a member of the family, so that the best ELBO is 0."""
    whole = iblr.Target(target.log_prob)

    def gap(q) -> float:
        return -float(iblr.elbo(whole, q, jax.random.key(99), draws=DRAWS).value)

    return Problem(name, target.log_prob, start, gap)


def correlated(dim: int) -> Problem:
    """The best diagonal Gaussian of a Gaussian has its mean and the diagonal of its precision."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    precision = jnp.asarray((basis * np.logspace(-1, 1, dim)) @ basis.T, jnp.float32)
    centre = jnp.asarray(rng.normal(size=dim), jnp.float32)
    best = iblr.DiagonalGaussian.from_variances(centre, 1 / jnp.diagonal(precision))

    def log_density(z):
        return -0.5 * (z - centre) @ precision @ (z - centre)

    def gap(q) -> float:
        """KL(q || best), and what the correlations take away from a mean that is off."""
        off = np.asarray(q.mean - centre, float)
        rest = off @ (np.asarray(precision, float) - np.diag(1 / np.asarray(best.variances))) @ off
        return float(q.kl(best)) + 0.5 * float(rest)

    name = f"diagonal Gaussian, d = {dim}"
    return Problem(name, log_density, lambda key: iblr.DiagonalGaussian.standard(dim), gap)


def problems() -> Iterator[Problem]:
    for name, log_density, start, optimum in positive_defaults.problems():
        yield Problem(
            name, log_density, lambda key, q=start: q, lambda q, p=optimum: float(q.kl(p))
        )
    for dim in (10, 100):
        yield correlated(dim)
    lower = jnp.array([[1.0, 0, 0], [0.5, 1, 0], [-0.3, 0.4, 0.5]])
    skew = iblr.SkewGaussian.from_parameters(
        jnp.array([1.0, -2.0, 0.5]), lower @ lower.T, jnp.array([3.0, 0.0, -1.0])
    )
    yield inside("skew Gaussian, d = 3", skew, lambda key: iblr.SkewGaussian.standard(3))
    places = 3 * jnp.array([[1.0, 0], [-0.5, 0.87], [-0.5, -0.87]])
    covariances = jnp.stack([jnp.eye(2), jnp.diag(jnp.array([2.0, 0.3])), 0.5 * jnp.eye(2)])
    mixture = iblr.GaussianMixture.from_moments(places, covariances, jnp.array([0.5, 0.3, 0.2]))
    for components in (6, "auto"):
        yield inside(
            f"mixture of {components}, d = 2",
            mixture,
            lambda key, number=components: iblr.GaussianMixture.init(key, number, 2, spread=3.0),
        )


def measure(problem: Problem, seeds: int) -> tuple[str, bool]:
    """A row of the table, and whether it keeps the bar."""
    gaps, fits, seconds = [], [], []
    for seed in range(seeds):
        start = problem.start(jax.random.key(1000 + seed))
        begun = time.perf_counter()
        fits.append(iblr.fit(problem.log_density, start, key=jax.random.key(seed), throw=False))
        seconds.append(time.perf_counter() - begun)
        gaps.append(problem.gap(fits[-1].family))
    ended = sorted({fit.stopped_by for fit in fits})
    grades = " ".join(
        f"{grade} {sum(fit.verdict.startswith(grade) for fit in fits)}"
        for grade in ("Good", "Fair", "Bad")
    )
    row = (
        f"{problem.name:28s}{np.max(gaps):10.1e}{np.max([fit.gap_bound for fit in fits]):10.1e}"
        f"{max(fit.num_gradients for fit in fits):11d}{np.median(seconds):9.1f}  "
        f"{', '.join(ended):14s} {grades}"
    )
    return row, bool(np.max(gaps) <= LARGEST_GAP) and set(ended) <= {"tol", "max_gradients"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names as printed")
    parser.add_argument("--seeds", type=whole_number, default=5)
    parser.add_argument("--out", type=Path, help="a file to write what is printed to")
    options = parser.parse_args()
    report, missed = Report(), []
    report(versions())
    report(f"Nats below the best member at the stop, the worst of {options.seeds} seeds\n")
    columns = f"{'gap':>10}{'at most':>10}{'gradients':>11}{'seconds':>9}"
    report(f"{'':28s}{columns}  {'ended by':14s} verdicts")
    for problem in problems():
        if options.only and problem.name not in options.only:
            continue
        row, kept = measure(problem, options.seeds)
        report(row)
        missed += [] if kept else [problem.name]
        report.save(options.out)
    report(f"\nwithin {LARGEST_GAP} nats: {'FAIL: ' + ', '.join(missed) if missed else 'PASS'}")
    report.save(options.out)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

"""What the experiments with mixtures of Student t share: the problem, its metrics and marginals.

MMD^2 is unbiased with one Gaussian kernel of h^2 = 1000; the authors state none. At their start it
is 0.14 here, and 0.19 in their picture. KL(q || p) is from draws; a mode
counts as found where q has one percent of its mass within a Mahalanobis distance of 3 sqrt(d).
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import iblr
from iblr.metrics import mmd2
from iblr.reproduce.methods import Arrays, Problem
from iblr.reproduce.pictures import Marginals, Series
from iblr.reproduce.student_mixture import DF, StudentMixture, authors_start, quality
from iblr.reproduce.trajectory import member

BANDWIDTH = 1000**0.5
MMD_DRAWS = 2000
KL_DRAWS = 4000
SMALLEST_KL = -0.1


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of the problem.

    Attributes:
        dim: d.
        components: K of the approximation.
        modes: C of the target.
        side: modes are uniform in (-side, side)^d.
        bins: of a marginal.
    """

    dim: int
    components: int
    modes: int
    side: float
    bins: int

    def target(self) -> StudentMixture:
        """The same for all methods and seeds."""
        return _target(self)

    def problem(self, mmd: bool = True) -> Problem:
        """From the authors' start."""
        target = self.target()
        reference = draws(target, jax.random.key(1), MMD_DRAWS) if mmd else None

        def start(key: Any) -> iblr.GaussianMixture:
            return authors_start(key, self.components, self.dim, learn_weights=False)

        def metrics(family: Any) -> Arrays:
            rows = []
            for run in range(family.log_weights.shape[0]):
                q = _with_exact_inverses(member(family, run))
                found = quality(target, q, jax.random.key(2), KL_DRAWS)
                # Less than zero but for noise: roots so ill-conditioned that log q has no digits.
                row = [found.kl if found.kl > SMALLEST_KL else np.inf, found.modes]
                if reference is not None:
                    z = _sample(q, jax.random.key(3))
                    finite = bool(jnp.isfinite(z).all())
                    row.append(mmd2(z, reference, bandwidth=BANDWIDTH) if finite else np.nan)
                rows.append(row)
            return dict(zip(("kl", "modes", "mmd2"), np.array(rows, float).T, strict=False))

        def keep(family: Any) -> Arrays:
            variances = jax.vmap(lambda q: q.variances)(family.components)
            return {
                "weights": np.asarray(family.weights),
                "means": np.asarray(family.components.mean),
                "variances": np.asarray(variances),
            }

        return Problem(target.log_density, start, metrics, "kl", keep)

    def marginals(self, title: str, found: dict[str, Arrays], shown: int) -> Marginals:
        """Exact marginals beside those of the first seed of methods, averaged over bins."""
        target = self.target()
        edges = np.linspace(-1.25 * self.side, 1.25 * self.side, self.bins + 1)
        width, centres = edges[1] - edges[0], (edges[1:] + edges[:-1]) / 2
        exact = np.stack([target.marginal_masses(i, edges) for i in range(self.dim)]) / width
        series = [Series("exact", exact)]
        for name, arrays in found.items():
            weights, means, variances = (
                arrays[f"final_{part}"][0] for part in ("weights", "means", "variances")
            )
            series.append(Series(name, _marginals(weights, means, variances, edges) / width))
        return Marginals(
            title, np.tile(centres, (self.dim, 1)), tuple(series), shown, "Averaged over bins."
        )


@cache
def _target(case: Case) -> StudentMixture:
    return StudentMixture.make(jax.random.key(0), case.dim, case.modes, case.side)


@jax.jit
def _with_exact_inverses(mixture: Any) -> Any:
    """With the stored inverse of every root recomputed: what a method left there may be off."""
    components = jax.vmap(
        lambda q: dataclasses.replace(
            q, inverse=jnp.linalg.inv(q.factor), log_det=2 * jnp.linalg.slogdet(q.factor)[1]
        )
    )(mixture.components)
    return dataclasses.replace(mixture, components=components)


@jax.jit
def _sample(mixture: iblr.GaussianMixture, key: Any) -> jax.Array:
    return mixture.draw(key, MMD_DRAWS).rows


def draws(target: StudentMixture, key: Any, num: int) -> jax.Array:
    """From the target: a Gaussian over the root of a chi-square over its degrees of freedom."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).astype(np.uint64))
    modes, roots = np.asarray(target.modes, float), np.asarray(target.roots, float)
    which = rng.integers(len(modes), size=num)
    noise = rng.standard_normal((num, target.dim)) / np.sqrt(rng.chisquare(DF, (num, 1)) / DF)
    inverse = np.linalg.inv(roots)
    z = modes[which] + np.einsum("nj,nji->ni", noise, inverse[which])
    return jnp.asarray(z, jnp.float32)


def _marginals(
    weights: np.ndarray, means: np.ndarray, variances: np.ndarray, edges: np.ndarray
) -> np.ndarray:
    """Masses between edges of every coordinate of a mixture."""
    scale = np.sqrt(np.asarray(variances, float))
    masses = [
        weights @ np.diff(stats.norm.cdf(edges, means[:, i, None], scale[:, i, None]), axis=1)
        for i in range(means.shape[1])
    ]
    return np.stack(masses)

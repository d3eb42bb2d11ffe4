"""Equal mixtures of multivariate Student t: the targets of the mixture benchmarks, [LSK20] sec. 5.

    p(z) = (1/C) sum_k T_nu(z | u_k, Q_k),   u_k uniform in (-s, s)^d,
    V_k = W'W + I,   W_ij ~ N(0, (d/10)^2)

with V_k as the precision Q_k, as the authors' code has it, or as the shape matrix Q_k^-1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from scipy import stats

import iblr

DF = 2.0


class StudentMixture(NamedTuple):
    """Modes u_k, roots R_k of the precisions (Q = R R'), and the logarithm of each peak."""

    modes: jax.Array
    roots: jax.Array
    log_peaks: jax.Array

    @staticmethod
    def make(key, dim: int, modes: int, side: float, shape_matrices: bool = False):
        """The target of a key; linear algebra in double precision."""
        mode_key, matrix_key = jax.random.split(key)
        u = jax.random.uniform(mode_key, (modes, dim), minval=-side, maxval=side)
        W = np.asarray(0.1 * dim * jax.random.normal(matrix_key, (modes, dim, dim)), float)
        root = np.linalg.cholesky(np.swapaxes(W, 1, 2) @ W + np.eye(dim))
        if shape_matrices:
            root = np.swapaxes(np.linalg.inv(root), 1, 2)
        log_dets = np.log(np.abs(np.diagonal(root, axis1=1, axis2=2))).sum(1)
        constant = gammaln((DF + dim) / 2) - gammaln(DF / 2) - dim / 2 * np.log(DF * np.pi)
        return StudentMixture(
            u, jnp.asarray(root, u.dtype), jnp.asarray(log_dets, u.dtype) + constant
        )

    @property
    def dim(self) -> int:
        """d."""
        return self.modes.shape[1]

    def squares(self, z: jax.Array) -> jax.Array:
        """The squared Mahalanobis distances of one point from all modes."""
        scaled = jnp.einsum("ki,kij->kj", z - self.modes, self.roots, precision="highest")
        return (scaled**2).sum(-1)

    def log_density(self, z: jax.Array) -> jax.Array:
        """Of one point, normalised."""
        tails = 0.5 * (DF + self.dim) * jnp.log1p(self.squares(z) / DF)
        return logsumexp(self.log_peaks - tails) - jnp.log(len(self.modes))

    def marginal_masses(self, coordinate: int, edges: np.ndarray) -> np.ndarray:
        """The exact probabilities of the intervals between edges, in one coordinate."""
        masses = np.zeros(len(edges) - 1)
        for mode, root in zip(
            np.asarray(self.modes, float), np.asarray(self.roots, float), strict=True
        ):
            row = np.zeros(self.dim)
            row[coordinate] = 1
            scale = np.linalg.norm(np.linalg.solve(root, row))
            masses += np.diff(stats.t(DF, mode[coordinate], scale).cdf(edges))
        return masses / len(self.modes)


class Quality(NamedTuple):
    """KL(q || p), its standard error, and the modes within which q has one percent of its mass."""

    kl: float
    kl_se: float
    modes: int


def quality(target: StudentMixture, mixture, key, draws: int) -> Quality:
    """Of a mixture, from draws; a mode reaches as far as a Mahalanobis distance of 3 sqrt(d)."""
    near, kl, kl_se = (np.asarray(value) for value in _quality(target, mixture, key, draws))
    return Quality(float(kl), float(kl_se), int((near >= 0.01).sum()))


@partial(jax.jit, static_argnums=3)
def _quality(target: StudentMixture, mixture, key, draws: int):
    def batch(key):
        z, log_q = mixture.sample_with_log_prob(key, 1000)
        log_p = jax.vmap(target.log_density)(z)
        near = jax.vmap(target.squares)(z) < 9 * target.dim
        return near.mean(0), log_q - log_p

    near, ratios = jax.lax.map(batch, jax.random.split(key, draws // 1000))
    return near.mean(0), ratios.mean(), ratios.std() / np.sqrt(draws)


def authors_start(key, components: int, dim: int, **options) -> iblr.GaussianMixture:
    """Means from N(0, 100^2 I), covariances 300 I."""
    return iblr.GaussianMixture.init(key, components, dim, scale=300**0.5, spread=100.0, **options)

"""Bayesian logistic regression: the target, and its exact Gaussian variational optimum.

With labels y = +-1, rows x and the prior N(0, I / delta), the negative ELBO of N(m, Sigma) is

    L = sum_n E[softplus(-(a_n + s_n eps))] + KL(N(m, Sigma) || N(0, I / delta)),
    a_n = y_n x_n'm,   s_n^2 = x_n' Sigma x_n,   eps standard normal:

integrals in one dimension, here by 400 Gauss-Legendre nodes on (-9, 9) in double precision. L is
convex in m and the Cholesky factor of Sigma, so that L-BFGS finds its minimum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

import iblr
from iblr.reproduce.trajectory import moments

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(400)
EPS = 9 * _NODES
DENSITY = 9 * _WEIGHTS * np.exp(-(EPS**2) / 2) / np.sqrt(2 * np.pi)


def log_likelihood(w: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The sum over rows (x, y)."""
    return jax.nn.log_sigmoid(rows[1] * (rows[0] @ w)).sum()


def round_gaussian(mean: np.ndarray, variance: float, diagonal: bool = False) -> Any:
    """N(mean, variance I), of a full or a diagonal covariance."""
    centre, d = jnp.asarray(mean, jnp.float32), len(mean)
    if diagonal:
        return iblr.DiagonalGaussian.from_variances(centre, jnp.full(d, variance))
    return iblr.Gaussian.from_covariance(centre, variance * jnp.eye(d))


class Gaussian(NamedTuple):
    """A mean and a covariance in double precision."""

    mean: np.ndarray
    covariance: np.ndarray


class Regression(NamedTuple):
    """Rows, labels +-1, and the precision of the prior."""

    x: np.ndarray
    y: np.ndarray
    precision: float

    @property
    def target(self) -> iblr.Target:
        """All rows, in single precision, and the exact prior."""
        return self.minibatches(None)

    def minibatches(self, rows: int | None, replacement: bool = False) -> iblr.Target:
        """The target with minibatches of so many rows."""
        data = jnp.asarray(self.x, jnp.float32), jnp.asarray(self.y, jnp.float32)
        return iblr.Target(
            log_likelihood=log_likelihood,
            data=data,
            batch_size=rows,
            replacement=replacement,
            prior=round_gaussian(np.zeros(self.x.shape[1]), 1 / self.precision),
        )

    def losses(self, family: Any) -> np.ndarray:
        """L of every member of a stack of Gaussians."""
        return np.array(
            [self.negative_elbo(Gaussian(*q)) for q in zip(*moments(family), strict=True)]
        )

    def negative_elbo(self, q: Gaussian) -> float:
        """L, by quadrature."""
        slopes = self.x * self.y[:, None]
        a, s = slopes @ q.mean, np.sqrt(np.einsum("ni,ij,nj->n", slopes, q.covariance, slopes))
        loss = np.logaddexp(0, -(a[:, None] + s[:, None] * EPS)) @ DENSITY
        d = len(q.mean)
        square = np.trace(q.covariance) + q.mean @ q.mean
        sign, log_det = np.linalg.slogdet(q.covariance)
        kl = 0.5 * (self.precision * square - d - d * np.log(self.precision) - log_det)
        return float(loss.sum() + kl) if sign > 0 else np.nan

    def optimum(self, diagonal: bool = False) -> Gaussian:
        """The Gaussian of the smallest L, of full or diagonal covariance."""
        d = self.x.shape[1]
        slopes = self.x * self.y[:, None]
        rows, columns = (np.arange(d), np.arange(d)) if diagonal else np.tril_indices(d)
        on_diagonal = rows == columns

        def unpacked(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            C = np.zeros((d, d))
            C[rows, columns] = np.where(on_diagonal, np.exp(theta[d:]), theta[d:])
            return theta[:d], C

        def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            m, C = unpacked(theta)
            spread = slopes @ C
            a, s = slopes @ m, np.linalg.norm(spread, axis=1)
            at = a[:, None] + s[:, None] * EPS
            value = np.logaddexp(0, -at) @ DENSITY
            slope = -expit(-at)
            of_a, of_s = slope @ DENSITY, slope @ (DENSITY * EPS)
            of_C = (slopes * (of_s / s)[:, None]).T @ spread + self.precision * C
            of_theta = of_C[rows, columns]
            of_theta = np.where(on_diagonal, of_theta * C[rows, columns] - 1, of_theta)
            kl = 0.5 * self.precision * (m @ m + np.sum(C**2)) - np.log(np.diagonal(C)).sum()
            gradient = np.concatenate([slopes.T @ of_a + self.precision * m, of_theta])
            return value.sum() + kl, gradient

        start = np.concatenate([np.zeros(d), np.zeros(len(rows))])
        options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-8, "maxcor": 50}
        found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        m, C = unpacked(found.x)
        return Gaussian(m, C @ C.T)

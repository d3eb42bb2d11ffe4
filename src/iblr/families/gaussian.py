"""Full-covariance Gaussian q(z) = N(z | mu, S^-1) in square-root form; [LSK20] App. E.

Block-coordinate natural parameters: mu and the precision S. With lbar = -log p(z, D),

    natural gradients     S^-1 E[grad lbar]  and  G = S - E[hess lbar]             App. E.2
    improved rule         mu <- mu - t S^-1 E[grad lbar]                           eq. ivon_1
                          S  <- S - tG + (t^2/2) G S^-1 G                          eq. ivon_2

Neither S nor its Cholesky factor is stored. Any A with Sigma = S^-1 = A'A does, and A <- T A keeps
the new covariance when T'T = (I - t Ghat + t^2 Ghat^2 / 2)^-1 with Ghat = A G A'. Estimated from M
samples, Ghat is a multiple of the identity plus rank 2M, so with Q its 2M eigenvectors as rows

    T A = c A + Q' (m - c) (Q A),     m = f(t Ghat)^(-1/2) on Q,     c on the complement,

which costs O(M d^2) and no Cholesky factor, no solve: Theorem 1 holds because f >= 1/2. The entropy
is free, since log|Sigma| changes by 2 sum log m + 2 (d - 2M) log c.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PyTree

from iblr.families import arguments
from iblr.families.curvature import RootChange
from iblr.families.dense_gaussian import AbstractDenseGaussian
from iblr.linalg import matmul
from iblr.structure import Structure


class Gaussian(AbstractDenseGaussian):
    """A Gaussian with a full covariance.

    Attributes:
        mean: mu, flat.
        factor: A, any root of the covariance: Sigma = A'A.
        log_det: log|Sigma|, kept up to date by every step.

    Example:
        >>> import iblr, jax.numpy as jnp
        >>> q = iblr.Gaussian.from_covariance(jnp.zeros(2), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
        >>> q.covariance.round(3).tolist()
        [[2.0, 0.5], [0.5, 1.0]]
    """

    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    log_det: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    structure: Structure

    @staticmethod
    def standard(
        dim: int | None = None, *, like: PyTree = None, dtype: Any = None, support: Any = None
    ) -> "Gaussian":
        """N(0, I) over vectors of length `dim`, or over pytrees of the structure of `like`.

        With `support`, such as `{"tau": iblr.positive}`, the leaves named are mapped onto it, and
        `like` is a template of the points.
        """
        call = "Gaussian.standard"
        structure, dtype = arguments.start_structure(call, dim, like, dtype, support)
        d = structure.dim
        return Gaussian(
            mean=jnp.asarray(np.zeros(d, dtype)),
            factor=jnp.asarray(np.eye(d, dtype=dtype)),
            log_det=jnp.asarray(np.zeros((), dtype)),
            structure=structure,
        )

    @staticmethod
    def from_covariance(mean: PyTree, covariance: ArrayLike) -> "Gaussian":
        """N(mean, covariance); a pytree as `mean` gives its structure to the draws."""
        call, dtype = "Gaussian.from_covariance", arguments.floating(mean, covariance)
        mean, structure = arguments.flat_mean(call, mean, dtype)
        matrix = arguments.square(call, "covariance", covariance, structure.dim).astype(dtype)
        factor = arguments.cholesky(call, "covariance", matrix).T
        log_det = 2 * jnp.log(jnp.diagonal(factor)).sum()
        return Gaussian(mean=mean, factor=factor, log_det=log_det, structure=structure)

    @staticmethod
    def from_precision(mean: PyTree, precision: ArrayLike) -> "Gaussian":
        """N(mean, precision^-1); a pytree as `mean` gives its structure to the draws."""
        call, dtype = "Gaussian.from_precision", arguments.floating(mean, precision)
        mean, structure = arguments.flat_mean(call, mean, dtype)
        matrix = arguments.square(call, "precision", precision, structure.dim).astype(dtype)
        L = arguments.cholesky(call, "precision", matrix)
        identity = jnp.eye(structure.dim, dtype=dtype)
        factor = jax.scipy.linalg.solve_triangular(L, identity, lower=True)
        log_det = -2 * jnp.log(jnp.diagonal(L)).sum()
        return Gaussian(mean=mean, factor=factor, log_det=log_det, structure=structure)

    def standardise(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows x to x A^-1, by a solve."""
        return jnp.linalg.solve(self.factor.T, rows.T).T

    def unwhiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows y to y A^-T, by a solve."""
        return jnp.linalg.solve(self.factor, rows.T).T

    def with_root(
        self,
        mean: Float[Array, " d"],
        factor: Float[Array, "d d"],
        log_det: Float[Array, ""],
        change: RootChange,
    ) -> "Gaussian":
        """Nothing else is stored."""
        return Gaussian(mean=mean, factor=factor, log_det=log_det, structure=self.structure)

    def refreshed(self) -> tuple["Gaussian", Float[Array, ""]]:
        """`log_det` recomputed from the factor, and how far it had drifted."""
        log_det = 2 * jnp.linalg.slogdet(self.factor)[1]
        family = dataclasses.replace(self, log_det=log_det)
        return family, jnp.abs(log_det - self.log_det)

    def from_free(self, theta: tuple[Float[Array, " d"], Float[Array, "d d"]]) -> "Gaussian":
        """A = C'."""
        mean, C = theta
        log_det = 2 * jnp.log(jnp.abs(jnp.diagonal(C))).sum()
        return Gaussian(mean=mean, factor=C.T, log_det=log_det, structure=self.structure)

    def marginal(self, indices: ArrayLike | Sequence[int]) -> "Gaussian":
        """The distribution of the flat coordinates `indices`, in that order."""
        indices = arguments.check_indices("marginal", indices, self.dim)
        factor = jnp.linalg.qr(self.factor[:, indices], mode="r")
        log_det = 2 * jnp.log(jnp.abs(jnp.diagonal(factor))).sum()
        structure = Structure.flat(indices.size)
        return Gaussian(
            mean=self.mean[indices], factor=factor, log_det=log_det, structure=structure
        )

    def conditional(
        self, indices: ArrayLike | Sequence[int], values: ArrayLike | Sequence[float]
    ) -> "Gaussian":
        """The distribution of the other flat coordinates, given those at `indices`.

        With A_I = Q R, the rows of Q'A below R are a root of the conditional covariance.
        """
        indices, others, values = arguments.split_indices(indices, values, self.dim)
        k = indices.size
        Q, R = jnp.linalg.qr(self.factor[:, indices], mode="complete")
        rotated = matmul(Q.T, self.factor[:, others])
        noise = jnp.linalg.solve(R[:k].T, values - self.mean[indices])
        factor = rotated[k:]
        return Gaussian(
            mean=self.mean[others] + matmul(noise, rotated[:k]),
            factor=factor,
            log_det=2 * jnp.linalg.slogdet(factor)[1],
            structure=Structure.flat(others.size),
        )

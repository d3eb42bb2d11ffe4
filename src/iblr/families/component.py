"""A Gaussian that keeps its root's inverse too: a component of a mixture.

A mixture evaluates the density of every component at every draw of all, eps = (z - mu) B with
B = A^-1. A solve would cost O(d^3) a step, so B is stored and moves with A: where A <- T A,

    B <- B T^-1,    T^-1 = I/c + Q' (1/m - 1/c) Q    for    T = c I + Q' (m - c) Q

with orthonormal rows Q. Rounding lets the two drift apart; `refreshed` brings them together by one
step of Newton and Schulz, B <- B (2 I - A B), and says how far they had come.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from iblr.families.curvature import RootChange
from iblr.families.dense_gaussian import AbstractDenseGaussian
from iblr.linalg import add_low_rank, matmul
from iblr.structure import Structure


class Component(AbstractDenseGaussian):
    """A full Gaussian with both roots.

    Attributes:
        mean: mu, flat.
        factor: A, any root of the covariance: Sigma = A'A.
        inverse: B = A^-1.
        log_det: log|Sigma|.
    """

    mean: Float[Array, " d"]
    factor: Float[Array, "d d"]
    inverse: Float[Array, "d d"]
    log_det: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    structure: Structure

    needs_inverse: ClassVar[bool] = True

    @staticmethod
    def from_roots(
        mean: Float[Array, " d"], factor: Float[Array, "d d"], inverse: Float[Array, "d d"]
    ) -> "Component":
        """The component with root A = `factor` and B = `inverse`, over flat points."""
        return Component(
            mean=mean,
            factor=factor,
            inverse=inverse,
            log_det=2 * jnp.linalg.slogdet(factor)[1],
            structure=Structure.flat(mean.size),
        )

    def standardise(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows x to x B."""
        return matmul(rows, self.inverse)

    def unwhiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows y to y B'."""
        return matmul(rows, self.inverse.T)

    def scaled(self, size: float, mean: Float[Array, " d"]) -> "Component":
        """With `size` times the standard deviations, at another mean."""
        log_det = self.log_det + 2 * self.dim * jnp.log(size).astype(self.dtype)
        factor, inverse = size * self.factor, self.inverse / size
        return dataclasses.replace(self, mean=mean, factor=factor, inverse=inverse, log_det=log_det)

    def with_root(
        self,
        mean: Float[Array, " d"],
        factor: Float[Array, "d d"],
        log_det: Float[Array, ""],
        change: RootChange,
    ) -> "Component":
        """B <- B T^-1."""
        assert change.rows is not None
        undo = change.inverse()
        left = matmul(change.rows, self.inverse.T)
        inverse = add_low_rank(undo.rest, self.inverse, left, undo.times_core(change.rows))
        return Component(
            mean=mean, factor=factor, inverse=inverse, log_det=log_det, structure=self.structure
        )

    def from_free(self, theta: tuple[Float[Array, " d"], Float[Array, "d d"]]) -> "Component":
        """A = C' and B = C^-T."""
        mean, C = theta
        inverse = solve_triangular(C, jnp.eye(self.dim, dtype=C.dtype), lower=True).T
        log_det = 2 * jnp.log(jnp.abs(jnp.diagonal(C))).sum()
        return Component(
            mean=mean, factor=C.T, inverse=inverse, log_det=log_det, structure=self.structure
        )

    def refreshed(self) -> tuple["Component", Float[Array, ""]]:
        """B corrected and `log_det` recomputed, and how far they had drifted."""
        residual = jnp.eye(self.dim, dtype=self.dtype) - matmul(self.factor, self.inverse)
        inverse = self.inverse + matmul(self.inverse, residual)
        log_det = 2 * jnp.linalg.slogdet(self.factor)[1]
        drift = jnp.maximum(jnp.abs(log_det - self.log_det), jnp.abs(residual).max())
        return dataclasses.replace(self, inverse=inverse, log_det=log_det), drift

"""Two pieces of dense linear algebra that the Gaussian families stand on."""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

_WELL_CONDITIONED = 0.03
_UNTHREADED_LAPACK = 9000


def orthonormal_rows(rows: Float[Array, "r d"]) -> Float[Array, "r d"]:
    """An orthonormal basis of a space that contains the given rows, r <= d, in any precision.

    Small problems take Householder's QR. Large ones take two rounds of Cholesky's QR on the Gram
    matrix of the normalised rows, which is nothing but matrix products and an r-by-r Cholesky
    factor, and fall back to Householder when the rows are nearly dependent (a Cholesky pivot below
    0.03), where squaring the condition would cost the basis its orthogonality.
    """
    if rows.size <= _UNTHREADED_LAPACK:
        return householder_rows(rows)
    basis, pivot = gram_rows(rows)
    return jax.lax.cond(pivot > _WELL_CONDITIONED, lambda: basis, lambda: householder_rows(rows))


def householder_rows(rows: Float[Array, "r d"]) -> Float[Array, "r d"]:
    """Orthonormal rows by Householder reflections: right for every input, dependent rows too."""
    return jnp.linalg.qr(rows.T)[0].T


def gram_rows(rows: Float[Array, "r d"]) -> tuple[Float[Array, "r d"], Float[Array, ""]]:
    """Orthonormal rows by Cholesky's QR, twice, and the smallest pivot of the first round."""
    largest = jnp.abs(rows).max(axis=1, keepdims=True)
    rows = rows / jnp.where(largest > 0, largest, 1)  # first, so that no square overflows
    rows = rows / jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1)
    identity = jnp.eye(rows.shape[0], dtype=rows.dtype)
    factor = jnp.linalg.cholesky(rows @ rows.T)
    rows = solve_triangular(factor, identity, lower=True) @ rows
    again = jnp.linalg.cholesky(rows @ rows.T)
    rows = solve_triangular(again, identity, lower=True) @ rows
    return rows, jnp.nan_to_num(jnp.diagonal(factor).min(), nan=0.0)

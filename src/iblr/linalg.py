"""The dense linear algebra that the Gaussian families stand on."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

# Float32 products in full: accelerators would round their inputs to fewer bits by default.
matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

_WELL_CONDITIONED = 0.03
_UNTHREADED_LAPACK = 9000
_FUSED_RANK = 4


def orthonormal_rows(
    rows: Float[Array, "r d"],
) -> tuple[Float[Array, "r d"], Float[Array, "r r"]]:
    """An orthonormal basis whose span contains the rows, r <= d, and their coordinates in it.

    Small problems take Householder's QR. Large ones take two rounds of Cholesky's QR on the Gram
    matrix of the normalised rows, which is nothing but matrix products and an r-by-r Cholesky
    factor, and fall back to Householder when the rows are nearly dependent (a Cholesky pivot below
    0.03), where squaring the condition would cost the basis its orthogonality.
    """
    if rows.size <= _UNTHREADED_LAPACK:
        return householder_rows(rows)
    return _gram_or_householder_rows(rows)


@custom_vmap
def _gram_or_householder_rows(rows):
    basis, coordinates, pivot = gram_rows(rows)
    return jax.lax.cond(
        pivot > _WELL_CONDITIONED,
        lambda: (basis, coordinates),
        lambda: householder_rows(rows),
    )


@_gram_or_householder_rows.def_vmap
def _batched_rows(axis_size, in_batched, rows):
    """Householder alone: under `vmap` both branches of the `cond` would be computed."""
    del axis_size, in_batched
    return jax.vmap(householder_rows)(rows), (True, True)


def householder_rows(
    rows: Float[Array, "r d"],
) -> tuple[Float[Array, "r d"], Float[Array, "r r"]]:
    """By Householder reflections: right for every input, dependent rows too."""
    Q, R = jnp.linalg.qr(rows.T)
    return Q.T, R.T


def gram_rows(
    rows: Float[Array, "r d"],
) -> tuple[Float[Array, "r d"], Float[Array, "r r"], Float[Array, ""]]:
    """By Cholesky's QR, twice; also the smallest pivot of the first round, 0 if it failed."""
    rows, lengths = unit_rows(rows)
    first, rows = _cholesky_round(rows)
    second, rows = _cholesky_round(rows)
    pivot = jnp.nan_to_num(jnp.diagonal(first).min(), nan=0.0)
    return rows, lengths * matmul(first, second), pivot


def unit_rows(
    rows: Float[Array, "r d"],
) -> tuple[Float[Array, "r d"], Float[Array, "r 1"]]:
    """Rows scaled to length one, and their lengths; a row of zeros keeps the length 1."""
    largest = jnp.abs(rows).max(axis=1, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    rows = rows / largest  # first, so that no square overflows
    lengths = jnp.maximum(jnp.linalg.norm(rows, axis=1, keepdims=True), 1)
    return rows / lengths, largest * lengths


def _cholesky_round(
    rows: Float[Array, "r d"],
) -> tuple[Float[Array, "r r"], Float[Array, "r d"]]:
    factor = jnp.linalg.cholesky(matmul(rows, rows.T))
    identity = jnp.eye(rows.shape[0], dtype=rows.dtype)
    return factor, matmul(solve_triangular(factor, identity, lower=True), rows)


def add_low_rank(
    scale: Float[Array, ""],
    matrix: Float[Array, "d d"],
    left: Float[Array, "r d"],
    right: Float[Array, "r d"],
) -> Float[Array, "d d"]:
    """`scale * matrix + left' right`; for a small rank in one pass, as a sum of outer products."""
    if left.shape[0] > _FUSED_RANK:
        return scale * matrix + matmul(left.T, right)
    outer = [a[:, None] * b for a, b in zip(left, right, strict=True)]
    return scale * matrix + sum(outer[1:], outer[0])


def symmetric_eigen(
    matrix: Float[Array, "d d"],
) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Eigenvalues, ascending, and eigenvectors as columns; only the lower triangle is read."""
    U, values = jax.lax.linalg.eigh(matrix, symmetrize_input=False)
    return values, U

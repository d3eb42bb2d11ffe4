"""How far two distributions are apart, from draws.

The maximum mean discrepancy of p and q for a kernel k is the distance of their mean embeddings,

    MMD^2 = E k(x, x') + E k(y, y') - 2 E k(x, y),     x, x' ~ p,  y, y' ~ q,

estimated without bias by leaving the terms of a draw with itself out (Gretton et al. 2012, Lemma
6); so it is zero on average where p = q, and half of the time negative there. The kernel is
Gaussian, k(x, y) = exp(-|x - y|^2 / (2 h^2)), or the mean of several of them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from iblr.linalg import matmul

ROWS_AT_ONCE = 500
MEDIAN_ROWS = 1000


def mmd2(
    x: ArrayLike, y: ArrayLike, *, bandwidth: float | Sequence[float] | None = None
) -> Float[Array, ""]:
    """The unbiased estimate of the squared maximum mean discrepancy, with Gaussian kernels.

    Args:
        x: draws, one a row.
        y: draws of the other distribution.
        bandwidth: h in exp(-|x - y|^2 / (2 h^2)); of several the mean of the kernels is taken. None
            is the median distance between the first 1000 draws of both together. It decides what
            is seen: a small h the shape of single modes, a large one where the mass is.

    Example:
        >>> import iblr, jax
        >>> x, y = jax.random.normal(jax.random.key(0), (2, 1000, 3))
        >>> bool(iblr.mmd2(x, y, bandwidth=1.0) < 0.01 < iblr.mmd2(x, y + 1, bandwidth=1.0))
        True
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1] or min(len(x), len(y)) < 2:
        raise ValueError(
            "`mmd2(x, y)` needs two or more draws of each, one a row, of one dimension, but got "
            f"shapes {x.shape} and {y.shape}."
        )
    if bandwidth is None:
        bandwidth = _median_distance(np.asarray(x), np.asarray(y))
        if not 0 < bandwidth < np.inf:
            raise ValueError(
                f"`mmd2(bandwidth=None)` takes the median distance of the draws, which is "
                f"{bandwidth}. Give a bandwidth, or look at the draws."
            )
    try:
        widths = np.atleast_1d(np.asarray(bandwidth, float))
    except (TypeError, ValueError):
        widths = np.zeros(0)
    if widths.ndim != 1 or widths.size == 0 or not (np.isfinite(widths) & (widths > 0)).all():
        raise ValueError(
            f"`mmd2(bandwidth=...)` must be positive numbers, or None for the median distance, but "
            f"got {bandwidth!r}."
        )
    return _mmd2(x, y, jnp.asarray(widths, jnp.result_type(x.dtype, y.dtype)))


@jax.jit
def _mmd2(
    x: Float[Array, "m d"], y: Float[Array, "n d"], widths: Float[Array, " k"]
) -> Float[Array, ""]:
    m, n = len(x), len(y)
    centre = x.mean(0)
    x, y = x - centre, y - centre  # squares of differences then lose fewer digits
    within = (_kernel_sum(x, x, widths) - m) / (m * (m - 1))
    within = within + (_kernel_sum(y, y, widths) - n) / (n * (n - 1))
    return within - 2 * _kernel_sum(x, y, widths) / (m * n)


def _kernel_sum(
    x: Float[Array, "m d"], y: Float[Array, "n d"], widths: Float[Array, " k"]
) -> Float[Array, ""]:
    """The sum of the kernel over all pairs, some rows at once."""
    blocks = -(-len(x) // ROWS_AT_ONCE)
    rows = jnp.zeros((blocks * ROWS_AT_ONCE, x.shape[1]), x.dtype).at[: len(x)].set(x)
    used = jnp.arange(len(rows)) < len(x)
    squares = jnp.sum(y**2, axis=1)

    def one(block: tuple[Float[Array, "b d"], Array]) -> Float[Array, ""]:
        part, real = block
        apart = jnp.sum(part**2, axis=1)[:, None] + squares - 2 * matmul(part, y.T)
        apart = jnp.maximum(apart, 0)[..., None] / (2 * widths**2)
        return jnp.where(real[:, None], jnp.exp(-apart).mean(-1), 0).sum()

    shaped = rows.reshape(blocks, ROWS_AT_ONCE, -1), used.reshape(blocks, ROWS_AT_ONCE)
    return jax.lax.map(one, shaped).sum()


def _median_distance(x: np.ndarray, y: np.ndarray) -> float:
    both = np.concatenate([x[:MEDIAN_ROWS], y[:MEDIAN_ROWS]]).astype(float)
    squares = np.sum(both**2, axis=1)
    apart = squares[:, None] + squares - 2 * both @ both.T
    return float(np.sqrt(np.median(np.maximum(apart[np.triu_indices(len(both), 1)], 0))))

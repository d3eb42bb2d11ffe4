"""The Gaussians of a mixture, stacked along a first axis: how they are made."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from iblr.families.component import Component
from iblr.families.diagonal import DiagonalGaussian
from iblr.structure import Structure

full = jax.vmap(Component.from_roots)


def diagonal(means: Float[Array, "K d"], scales: Float[Array, "K d"]) -> DiagonalGaussian:
    """With diagonal covariances."""
    make = partial(DiagonalGaussian, structure=Structure.flat(means.shape[1]))
    return jax.vmap(lambda mean, scale: make(mean=mean, scale=scale))(means, scales)


def scattered(
    key: Key[Array, ""],
    shape: tuple[int, int],
    scale: float,
    spread: float,
    is_diagonal: bool,
    dtype: Any,
) -> Component | DiagonalGaussian:
    """K Gaussians of covariance scale^2 I, their means drawn from N(0, spread^2 I)."""
    return _isotropic(spread * jax.random.normal(key, shape, dtype), scale, is_diagonal)


def centred(dim: int, scale: float, is_diagonal: bool, dtype: Any) -> Component | DiagonalGaussian:
    """One Gaussian around the origin."""
    return _isotropic(jnp.zeros((1, dim), dtype), scale, is_diagonal)


def _isotropic(
    means: Float[Array, "K d"], scale: float, is_diagonal: bool
) -> Component | DiagonalGaussian:
    deviations = jnp.full_like(means, scale)
    if is_diagonal:
        return diagonal(means, deviations)
    matrix = jax.vmap(jnp.diag)
    return full(means, matrix(deviations), matrix(1 / deviations))


def marginal(
    components: Component | DiagonalGaussian, indices: np.ndarray
) -> Component | DiagonalGaussian:
    """Of the coordinates `indices`."""
    means = components.mean[:, indices]
    if isinstance(components, DiagonalGaussian):
        return diagonal(means, components.scale[:, indices])
    R = jax.vmap(lambda A: jnp.linalg.qr(A, mode="r"))(components.factor[:, :, indices])
    return full(means, R, jnp.linalg.inv(R))

"""Standard normal numbers as a function of a seed and an index, made by `iblr.counter_noise`.

In JAX these cost an eighth of its own normals, and compile in a fraction of their time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int32, Key, UInt32

from iblr.counter_noise import (
    PERIOD,
    quantile_denominator,
    quantile_numerator,
    scrambled,
)


def standard_normals(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: Any
) -> Float[Array, "..."]:
    """Standard normals of a key, in the place of `jax.random.normal`."""
    return normals(seed_of_step(key, jnp.int32(0)), 0, shape, dtype)


def seed_of_step(key: Key[Array, ""], step: Int[Array, ""]) -> UInt32[Array, "2"]:
    """Two words made of a typed key, whatever its kind, and the index of a step."""
    words = lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32).reshape(-1)
    first, second = step.astype(jnp.int32), jnp.int32(0)
    for i in range(words.size):
        first, second = scrambled(first ^ words[i], second, i), scrambled(second, first, words[i])
    return lax.bitcast_convert_type(jnp.stack([first, second]), jnp.uint32)


def normals(
    seed: UInt32[Array, "2"], stream: int, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> Float[Array, "..."]:
    """Standard normals, those of one stream of a seed; up to 2^32 of them.

    Computed in `dtype`: beyond float32 they are no finer, but free of rounding.
    """
    first, second = lax.bitcast_convert_type(seed, jnp.int32)
    key, offset, m, n = (scrambled(first + (4 * stream + j), second, 0) for j in range(4))
    bits = scrambled(_indices(shape) * (key | 1) + offset, m, n)
    p = ((bits & 0x7FFFFFFF).astype(dtype) + 0.5) * 2.0**-32
    t = jnp.sqrt(-2.0 * jnp.log(p))
    size = quantile_numerator(t) / quantile_denominator(t)
    return jnp.where(bits < 0, -size, size)


def _indices(shape: tuple[int, ...]) -> Int32[Array, "..."]:
    """Those of entries, modulo 2^32, axis by axis: sharded as the array is."""
    index = jnp.zeros((), jnp.int32)
    for axis in range(len(shape)):
        place = lax.broadcasted_iota(jnp.int32, shape, axis)
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % PERIOD).astype(jnp.int32)
        index = index + place * stride
    return index

"""The noise of a sample: a function of a seed and of a leaf's index, made anew wherever it is used.

`sample_params` and `update` both call `leaf_noise`, so the noise is in no state and no checkpoint.
The generator is that of `iblr.counter_noise`, whatever the user's keys are: an eighth of the cost
of JAX's own on a CPU. A number depends on its index alone, not on how the leaf is sharded, and
every replica of data-parallel training draws the same.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Key, UInt32

from iblr.counter_noise import (
    PERIOD,
    quantile_denominator,
    quantile_numerator,
    scrambled,
)


def seeds(key: Key[Array, ""], state_index: int, samples: int) -> UInt32[Array, "S 2"]:
    """One seed a sample, different for every optimiser state that a call of sampling fills."""
    return jax.random.bits(jax.random.fold_in(key, state_index), (samples, 2), jnp.uint32)


def leaf_noise(
    seed: UInt32[Array, "2"], leaf_index: int, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Standard normals in float32 for one leaf of the parameters."""
    if math.prod(shape) > PERIOD:
        raise ValueError(
            f"`iblr.optax` draws noise for leaves of up to 2^32 entries, but got one of the shape "
            f"{shape}. Split it."
        )
    first, second = lax.bitcast_convert_type(seed, jnp.int32)
    key, offset, m, n = (scrambled(first + (4 * leaf_index + j), second, 0) for j in range(4))
    bits = scrambled(_indices(shape) * (key | 1) + offset, m, n)
    p = ((bits & 0x7FFFFFFF).astype(jnp.float32) + 0.5) * 2.0**-32
    t = jnp.sqrt(-2.0 * jnp.log(p))
    size = quantile_numerator(t) / quantile_denominator(t)
    return jnp.where(bits < 0, -size, size)


def _indices(shape: tuple[int, ...]) -> Int32[Array, "..."]:
    """Those of entries, modulo 2^32, axis by axis: sharded as the leaf is."""
    index = jnp.zeros((), jnp.int32)
    for axis in range(len(shape)):
        place = lax.broadcasted_iota(jnp.int32, shape, axis)
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % PERIOD).astype(jnp.int32)
        index = index + place * stride
    return index

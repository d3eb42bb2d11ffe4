"""The noise of a sample: a function of a seed and of a leaf's index, made anew wherever it is used.

`sample_params` and `update` both call `leaf_noise`, so the noise is in no state and no checkpoint.
The generator is that of `iblr.noise`, whatever the user's keys are. A number depends on its index
alone, not on how the leaf is sharded, and every replica of data-parallel training draws the same.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from iblr.counter_noise import PERIOD
from iblr.noise import normals


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
    return normals(seed, leaf_index, shape)

"""The noise of a sample: a function of a seed and of a leaf's index, made anew wherever it is used.

`sample_params` and `update` both call `leaf_noise`, so the noise is in no state and no checkpoint.
The generator is threefry, whatever the user's keys are: its numbers do not depend on how the leaf
is sharded, and every replica of data-parallel training draws the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32


def seeds(key: Key[Array, ""], state_index: int, samples: int) -> UInt32[Array, "S 2"]:
    """One seed a sample, different for every optimiser state that a call of sampling fills."""
    return jax.random.bits(jax.random.fold_in(key, state_index), (samples, 2), jnp.uint32)


def leaf_noise(
    seed: UInt32[Array, "2"], leaf_index: int, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Standard normals in float32 for one leaf of the parameters."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.normal(jax.random.fold_in(key, leaf_index), shape, jnp.float32)

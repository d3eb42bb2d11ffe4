"""What a key serves beside steps: every purpose has random numbers of its own.

The noise of step k is that of `fold_in(key, k)`, and `split(key, n)` gives the first n of those.
Purposes have the numbers from 2^31 on, which no step reaches.
"""

import enum

import jax
import numpy as np
from jaxtyping import Array, Key


class Purpose(enum.IntEnum):
    """What random numbers are for, other than a step."""

    CHECK = 2**31  # the target tried out before a fit
    ELBO = CHECK + 1  # after a chunk or a round
    ROUND = CHECK + 2  # the next one, of its own noise
    GROWTH = CHECK + 3  # places for more components
    GAIN = CHECK + 4  # of a round on the one before
    DIAGNOSIS = CHECK + 5
    TAILS = CHECK + 6
    CLIMBS = CHECK + 7
    MOMENTS = CHECK + 8  # of a family whose own are not known
    HELD = CHECK + 9  # the mass that q has in a region
    OWN_DRAWS = CHECK + 10  # those that a posterior makes without being given a key


def key_for(key: Key[Array, ""], purpose: Purpose) -> Key[Array, ""]:
    """The key of a purpose, apart from those of all steps and of other purposes."""
    return jax.random.fold_in(key, np.uint32(purpose))

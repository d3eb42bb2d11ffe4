"""How the original rule's step is cut so that it stays in the set of valid parameters.

A search for feasibility only: no objective is looked at. Let x be the longest way that any part of
the step goes towards the boundary, in units of the distance: the step is inside where x < 1. It is
multiplied by one number,

    share           min(1, share / x)                           where the boundary is known
    backtracking    factor^k, k the smallest with factor^k x < 1

which is what a loop that multiplies the step by `factor` until a Cholesky factor exists ends with.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class LineSearch(NamedTuple):
    """A search for the largest step of a kind that stays inside.

    Attributes:
        share: of the way to the boundary, where that is known in closed form; None backtracks.
        factor: of one backtrack.
    """

    share: float | None = None
    factor: float = 0.5

    def cut(self, longest: Float[Array, ""]) -> Float[Array, ""]:
        """What the step is multiplied by, for x = `longest`."""
        if self.share is not None:
            return jnp.minimum(1, self.share / jnp.maximum(longest, self.share))
        # The logarithm may be off by a rounding, so its neighbours are tried too; what rounds to
        # the boundary is outside.
        log_x = jnp.log(jnp.maximum(longest, 1))
        counts = jnp.floor(log_x / -math.log(self.factor)) + jnp.arange(-1, 3)
        cuts = jnp.asarray(self.factor, longest.dtype) ** jnp.maximum(counts, 0)
        inside = cuts * longest < 1 - 4 * jnp.finfo(longest.dtype).eps
        return cuts[jnp.where(inside.any(), jnp.argmax(inside), -1)]

    def most_backtracks(self, halvings: int) -> int:
        """As many backtracks as make a step as small as so many halvings."""
        return math.ceil(halvings * math.log(2) / -math.log(self.factor))

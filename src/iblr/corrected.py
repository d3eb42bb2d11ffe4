"""Answers of the target itself, from weighted draws of q."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from iblr.families.base import AbstractFamily, count_draws
from iblr.importance import LARGEST_KHAT, Importance
from iblr.structure import Structure


class Corrected(eqx.Module):
    """Moments and draws of the target by importance weights; `posterior.corrected`.

    Moments are those of q moved by what the weights change of them over the same draws, so that
    they are exactly those of q where the weights are constant.

    Attributes:
        family: q.
        importance: the weights.
    """

    family: AbstractFamily
    importance: Importance

    def __check_init__(self):
        if not self.importance.usable:
            raise ValueError(
                "`posterior.corrected` needs weights whose averages converge, k-hat below "
                f"{LARGEST_KHAT}, but k-hat is {self.importance.khat:.2f}: a few draws would "
                "decide everything. Fit a richer family, such as `iblr.GaussianMixture`, or "
                "sample from here by NUTS (`posterior.to_nuts()`)."
            )

    @property
    def ess(self) -> float:
        """How many independent draws of the target the weighted ones are worth."""
        return self.importance.ess

    @property
    def mean(self) -> PyTree:
        """Mean of the target, in the structure of the parameters."""
        return self._moments()[0]

    @property
    def standard_deviation(self) -> PyTree:
        """Marginal standard deviations of the target, in the structure of the parameters."""
        return self._moments()[1]

    def sample(self, key: Key[Array, ""], num: int) -> PyTree:
        """`num` draws, stacked along a first axis: those of q, picked in proportion to weights.

        Picked from as many as the weights were made of, so that some come more than once; `ess`
        tells how many are worth having. One is picked from every num-th part of the weights, which
        is less noisy than picking each from all of them, and the order is random.
        """
        num = count_draws("sample", num)
        place, order = jax.random.split(key)
        strata = np.asarray(jax.random.permutation(order, num) + jax.random.uniform(place, (num,)))
        summed = np.cumsum(np.exp(self.importance.log_weights))
        picked = np.searchsorted(summed, strata.astype(np.float64) / num * summed[-1], side="right")
        rows = self.importance.rows(self.family)
        return self.family.structure.unravel(rows[np.minimum(picked, len(summed) - 1)])

    def _moments(self) -> tuple[PyTree, PyTree]:
        structure, moved = self.family.structure, self.importance.moved
        mean, deviation = (structure.ravel_point(x, "corrected") for x in self.family.moments())
        points = Structure(structure.treedef, structure.shapes)
        shift, spread = (jnp.asarray(x, mean.dtype) for x in (moved.shift, moved.spread))
        return points.unravel(mean + deviation * shift), points.unravel(deviation * jnp.exp(spread))

"""Draws of a function of the parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


class Prediction(NamedTuple):
    """Draws of a function of the parameters, with the moments of each of its outputs."""

    draws: PyTree
    mean: PyTree
    standard_deviation: PyTree

    def interval(self, probability: float = 0.9) -> tuple[PyTree, PyTree]:
        """Lower and upper ends of the central interval of that probability."""
        if not 0 < probability < 1:
            raise ValueError(
                f"`interval(probability)` must be between 0 and 1, but got {probability}."
            )
        tail = 0.5 * (1 - probability)
        ends = jax.tree.map(
            lambda x: jnp.quantile(x, jnp.array([tail, 1 - tail]), axis=0), self.draws
        )
        return jax.tree.map(lambda x: x[0], ends), jax.tree.map(lambda x: x[1], ends)

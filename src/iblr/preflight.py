"""Looks at a target before a fit: cheap, and with errors that say what to do."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from iblr.compiling import quickly_compiled
from iblr.families.base import AbstractFamily
from iblr.purposes import Purpose, key_for
from iblr.target import Target

POINTS = 8


def check_target(target: Target, family: AbstractFamily, key: Key[Array, "*runs"]) -> None:
    """Raise unless it can be fitted from the start (the first, in a batch) and draws around it."""
    if key.ndim:
        key = key[0]
    if family.batch_shape:
        family = jax.tree.map(lambda x: x[0], family)
    starts = 0 if family.leaves_out_draws else len(family.centres)
    target.check(family.structure, _first_points(family, key), starts)
    prior = target.exact_prior
    if prior is not None and family.entropy() is not None:
        expected = prior.expected_log_prob(family)
        if not bool(jnp.isfinite(expected)):
            raise ValueError(
                f"`Target(prior=...)` has an expected log density of {expected} under the start. "
                "Start where it is finite (an inverse Gaussian prior needs Gamma shapes above 1)."
            )


@functools.partial(quickly_compiled, once=True)
def _first_points(family: AbstractFamily, key: Key[Array, ""]) -> Float[Array, "n d"]:
    rows = family.draw(key_for(key, Purpose.CHECK), POINTS - 1).rows
    return jnp.concatenate([family.centres, rows])

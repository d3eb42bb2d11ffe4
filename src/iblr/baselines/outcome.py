"""What a step of a baseline comes to: the family it proposes, if that is one."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from iblr.families.abstract_gaussian import all_finite
from iblr.families.base import AbstractFamily, StepInfo
from iblr.status import Status


def is_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every number of a pytree is finite."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return all_finite(*leaves)


def choose(ok: Bool[Array, ""], new: Any, old: Any) -> Any:
    """One of two pytrees of the same shapes."""
    return jax.tree.map(lambda after, before: jnp.where(ok, after, before), new, old)


def outcome(family: AbstractFamily, tangent: Any, ok: Bool[Array, ""]) -> StepInfo:
    """That of a whole step, taken or refused for what is not finite."""
    limited, excluded = family.losses(tangent)
    whole, status = jnp.ones((), family.dtype), Status.where(ok, Status.ok, Status.nonfinite)
    return StepInfo(status, limited, whole, whole, jnp.zeros((), jnp.int32), excluded)

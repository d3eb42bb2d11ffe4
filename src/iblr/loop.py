"""One step of the loop: keys, schedules and momentum; no family's mathematics.

`init` and `step` are pure and may be used under `jit`, `vmap` and `scan`. The noise of step k is a
function of (key, k) alone.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from iblr.estimators import AbstractEstimator
from iblr.families.base import AbstractFamily, StepInfo
from iblr.rule import AbstractMemoryRule, improved_step
from iblr.target import Target, as_target

Schedule = Callable[[Any], Any]


class State(eqx.Module):
    """Where a fit stands: everything the next step needs."""

    family: AbstractFamily
    momentum: Float[Array, " p"]
    momentum_weight: Float[Array, ""]
    step: Int[Array, ""]
    key: Key[Array, ""]
    memory: Any = ()

    def __getitem__(self, run: int) -> "State":
        """That of one run of a batch."""
        return jax.tree.map(lambda leaf: leaf[run], self)


def init(family: AbstractFamily, key: Key[Array, ""], rule: Callable = improved_step) -> State:
    """The state before the first step, with the memory of a rule that has one."""
    return State(
        family=family,
        momentum=jnp.zeros(family.gradient_size, family.dtype),
        momentum_weight=jnp.zeros((), family.dtype),
        step=jnp.zeros((), jnp.int32),
        key=key,
        memory=rule.init(family) if isinstance(rule, AbstractMemoryRule) else (),
    )


def step(
    state: State,
    target: Target | Callable,
    *,
    estimator: AbstractEstimator,
    step_size: ArrayLike | Schedule,
    momentum: ArrayLike | None = None,
    trust_region: bool = False,
    rule: Callable = improved_step,
) -> tuple[State, StepInfo]:
    """One step, for people who write their own loop.

    Args:
        state: from `init` or the last `step`.
        target: a log density or a `Target`.
        estimator: how the natural gradient is estimated.
        step_size: a number, or a schedule of the step index (any of optax's).
        momentum: r of the natural momentum, [LSK20] appendix E.3, in [0, 1); None for none.
        trust_region: see `improved_step`.
        rule: `improved_step`, `natural_gradient_step`, `line_search_step`, `geodesic_step`, or one
            of `iblr.baselines`; one with a memory must have been given to `init` too.

    Example:
        >>> import iblr, jax
        >>> state = iblr.init(iblr.Gaussian.standard(2), jax.random.key(0))
        >>> for _ in range(3):
        ...     state, info = iblr.step(state, lambda z: -0.5 * (z**2).sum(),
        ...                             estimator=iblr.Stl(pairs=4), step_size=0.1)
        >>> int(state.step)
        3
    """
    target, family = as_target(target, "step"), state.family
    tangent = estimator(family, target, jax.random.fold_in(state.key, state.step))
    buffer, weight = state.momentum, state.momentum_weight
    if momentum is not None:
        # mu <- mu - t1 ghat + t2 Sigma_k Sigma_{k-1}^-1 (mu_k - mu_{k-1}) in the form of a running
        # mean of gradients, which needs no transport from one metric to the next.
        r = jnp.asarray(momentum, family.dtype)
        buffer = r * buffer + (1 - r) * tangent.gradient
        weight = r * weight + (1 - r)
        tangent = family.with_gradient(tangent, buffer / weight)
    t = step_size(state.step) if callable(step_size) else step_size
    options = {"trust_region": True} if trust_region else {}
    memory = state.memory
    if isinstance(rule, AbstractMemoryRule):
        if not jax.tree.leaves(memory):
            raise ValueError(
                f"`step(rule=...)` got {type(rule).__name__}, which has a memory, but a state "
                "without one. Make the state with the same rule: `iblr.init(family, key, rule)`."
            )
        family, info, memory = rule(family, tangent, t, memory, **options)
    else:
        family, info = rule(family, tangent, t, **options)
    before = (state.momentum, state.momentum_weight, state.memory)
    buffer, weight, memory = jax.tree.map(
        lambda old, new: jnp.where(info.refused, old, new), before, (buffer, weight, memory)
    )
    return State(family, buffer, weight, state.step + 1, state.key, memory), info

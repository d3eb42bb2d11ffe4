"""A fit with settings: it takes the steps it is told to, of the method it is told."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Key

from iblr.checks import check_method, check_options, check_state
from iblr.estimators import AbstractEstimator, Stl
from iblr.families.base import AbstractFamily
from iblr.history import Watch
from iblr.loop import Schedule, State, init
from iblr.posterior import Posterior
from iblr.preflight import check_target
from iblr.rounds import LEAST_GAIN, Rounds, fit_in_rounds
from iblr.rule import improved_step
from iblr.steps import take_steps
from iblr.target import Target

NUM_STEPS = 2000


class Settings(NamedTuple):
    """The method, see `iblr.fit`; None where nothing was said."""

    estimator: AbstractEstimator | None = None
    step_size: ArrayLike | Schedule | None = None
    num_steps: int | None = None
    momentum: float = 0.0
    trust_region: bool | None = None
    rule: Callable = improved_step

    @property
    def say_nothing(self) -> bool:
        """Whether every one is left to the fit."""
        named = (self.estimator, self.step_size, self.num_steps, self.trust_region)
        unnamed = all(setting is None for setting in named)
        return unnamed and self.momentum == 0 and self.rule is improved_step


def fit_as_told(
    target: Target,
    family: AbstractFamily,
    key: Key[Array, "*runs"],
    settings: Settings,
    state: Any,
    watch: Watch,
    chunk_size: int,
    elbo_draws: int,
    least_gain: float = LEAST_GAIN,
) -> Posterior:
    """Steps of a method; for a mixture that adapts its size, rounds of them that gain enough."""
    estimator, step_size, num_steps, momentum, trust_region, rule = settings
    num_steps = NUM_STEPS if num_steps is None else num_steps
    defaults = family.defaults
    if step_size is None:
        pairs = estimator.pairs if isinstance(estimator, Stl) else defaults.pairs
        step_size = defaults.step_size(num_steps, pairs)
    if trust_region is None:
        trust_region = rule is improved_step and defaults.trust_region
    check_options(step_size, num_steps, momentum, chunk_size, elbo_draws)
    check_method(estimator, rule, trust_region)
    if momentum and family.gradient_size == 0:
        raise ValueError(
            f"`fit(momentum=...)` averages gradients of the means of Gaussians, but got a "
            f"{family.name}. Leave it out, or give the estimator more draws."
        )
    start = _start(family, key, rule)
    now = start if state is None else check_state(state, start)
    reached = now.state if isinstance(now, Rounds) else now
    if int(jnp.max(reached.step)) >= num_steps:
        raise ValueError(
            f"`fit(state=..., num_steps=...)` counts steps from the start of the state's run, "
            f"which has taken {int(jnp.max(reached.step))} of {num_steps}. Pass a larger "
            "`num_steps`."
        )
    check_target(target, reached.family, key)
    options = {
        "estimator": Stl(pairs=defaults.pairs) if estimator is None else estimator,
        "step_size": step_size if callable(step_size) else jnp.asarray(step_size, float),
        "momentum": None if momentum == 0 else jnp.asarray(momentum, float),
        "trust_region": trust_region,
        "rule": rule,
    }

    def run(state: State) -> Posterior:
        return take_steps(
            state,
            target,
            options,
            num_steps,
            chunk_size=chunk_size,
            elbo_draws=elbo_draws,
            watch=watch,
        )

    if family.growth is None:
        return run(reached)
    return fit_in_rounds(run, now, target, num_steps, rule, least_gain)


def _start(family: AbstractFamily, key: Key[Array, "*runs"], rule: Callable) -> State:
    if key.ndim == 0:
        return init(family, key, rule)
    starts = 0 if family.batch_shape else None
    return jax.vmap(lambda family, key: init(family, key, rule), in_axes=(starts, 0))(family, key)

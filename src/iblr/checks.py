"""The arguments of `fit`: what is wrong with one, and what to do."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Key

from iblr.estimators import AbstractEstimator
from iblr.families.arguments import check_count, is_typed_key
from iblr.families.base import AbstractFamily
from iblr.loop import Schedule, State
from iblr.rounds import Rounds
from iblr.rule import improved_step
from iblr.steps import CHUNK, ELBO_DRAWS

TOL = 0.01  # nats, of a fit without settings


def refuse_traced(key: Any) -> None:
    """Raise where a fit is inside of a transformation: it decides by what it finds."""
    if isinstance(key, Tracer):
        raise ValueError(
            "`fit` cannot be traced by `jax.jit` or `jax.vmap`, but got a traced `key`. For many "
            "fits pass an array of keys; a loop of your own takes `iblr.step`."
        )


def check_key(family: AbstractFamily, key: Key[Array, "*runs"]) -> bool:
    """Whether the fit is a batch of runs; raises where key and family do not go together."""
    if not isinstance(family, AbstractFamily):
        raise ValueError(
            f"`fit(target, family)` needs a family such as `iblr.Gaussian.standard(10)`, but got "
            f"{family!r}. A point to start from is `init=`."
        )
    if not is_typed_key(key):
        raise ValueError(
            "`fit(key=...)` needs a typed key, `jax.random.key(0)`, or a batch of them, "
            f"`jax.random.split(key, 4)`, but got {key!r}."
        )
    if key.size == 0:
        raise ValueError("`fit(key=...)` needs at least one key, but got none.")
    if key.ndim > 1:
        raise ValueError(f"`fit(key=...)` takes one axis of keys, but got shape {key.shape}.")
    if family.batch_shape not in ((), key.shape):
        starts = family.batch_shape[0]
        raise ValueError(
            f"`fit(target, family, key=...)` got {starts} starts and keys of shape {key.shape}. "
            f"Pass one key a start: `jax.random.split(key, {starts})`."
        )
    return key.ndim == 1


def described(value: Any) -> str:
    """What came, in a line."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def check_state(state: Any, start: State) -> State | Rounds:
    """The state, if it is one of a fit from a start like this."""
    grows = start.family.growth is not None
    reached = state.state if isinstance(state, Rounds) else state
    same = isinstance(reached, State) and _alike(reached, start, grows)
    if not same or grows != isinstance(state, Rounds):
        raise ValueError(
            "`fit(state=...)` needs the `posterior.state` of a fit of the same "
            f"family, rule and number of keys, but got {described(state)}."
        )
    return state


def _alike(state: State, start: State, grows: bool) -> bool:
    """Whether all arrays have the same shapes; but for the number of components where it grows."""
    if jax.tree.structure(state) != jax.tree.structure(start):
        return False
    if grows:
        parts = (lambda s: s.key.shape, lambda s: s.family.dtype, lambda s: s.family.structure)
        return all(part(state) == part(start) for part in parts)
    return jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)


def _is_positive(step_size: Any) -> bool:
    is_number = isinstance(step_size, int | float | np.number | np.ndarray | jax.Array)
    return is_number and jnp.shape(step_size) == () and 0 < float(step_size) < jnp.inf


def check_method(estimator: Any, rule: Callable, trust_region: bool) -> None:
    """Raise unless estimator and rule are such, and the rule takes a trust region if asked to."""
    if estimator is not None and not isinstance(estimator, AbstractEstimator):
        raise ValueError(
            f"`fit(estimator=...)` needs an estimator such as `iblr.Stl(pairs=8)`, but got "
            f"{estimator!r}."
        )
    if not callable(rule) or isinstance(rule, type):
        raise ValueError(
            f"`fit(rule=...)` needs a rule such as `iblr.improved_step`, but got {rule!r}."
        )
    if trust_region and rule is not improved_step:
        raise ValueError(
            "`fit(trust_region=True)` belongs to the improved rule, but got another `rule=`. Leave "
            "one of the two out."
        )


def check_options(
    step_size: ArrayLike | Schedule,
    num_steps: int,
    momentum: float,
    chunk_size: int,
    elbo_draws: int,
) -> None:
    """Raise unless counts are counts and the step size is positive, or a schedule of such."""
    check_count("fit", "num_steps", num_steps)
    check_count("fit", "chunk_size", chunk_size)
    check_count("fit", "elbo_draws", elbo_draws, least=3)
    ends = [step_size(jnp.asarray(k)) for k in (0, num_steps - 1)] if callable(step_size) else []
    if any(jnp.shape(t) != () or not 0 <= float(t) < jnp.inf for t in ends) or not (
        callable(step_size) or _is_positive(step_size)
    ):
        raise ValueError(
            "`fit(step_size=...)` must be a positive number or a schedule of the step index, but "
            f"got {step_size!r}{f' with the values {ends}' if ends else ''}."
        )
    if not isinstance(momentum, int | float | np.number) or not 0 <= momentum < 1:
        raise ValueError(f"`fit(momentum=...)` must be in [0, 1), but got {momentum}.")


def check_budget(tol: Any, max_gradients: int | None, max_seconds: float | None) -> None:
    """Raise unless the ends of an automatic fit are such."""
    seconds: Any = math.inf if max_seconds is None else max_seconds
    for name, value, largest in (("tol", tol, 1e30), ("max_seconds", seconds, math.inf)):
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        is_scalar = isinstance(value, jax.Array | np.ndarray) and value.shape == ()
        if not (is_number or is_scalar) or not 0 < value <= largest:
            raise ValueError(f"`fit({name}=...)` must be a positive number, but got {value!r}.")
    if max_gradients is not None:
        check_count("fit", "max_gradients", max_gradients)


def refuse_budget(tol: float, max_gradients: int | None, max_seconds: float | None) -> None:
    """Raise where a fit with settings is given the ends of one without."""
    ends = {"tol": None if tol == TOL else tol}
    ends |= {"max_gradients": max_gradients, "max_seconds": max_seconds}
    for name, value in ends.items():
        if value is not None:
            raise ValueError(
                f"`fit({name}={value})` ends a fit without settings, but got settings too. Give "
                "`num_steps=`, or stop from a `callback=`; or leave the settings out."
            )


def refuse_looks(chunk_size: int, elbo_draws: int) -> None:
    """Raise where a fit without settings is told when to look at the ELBO."""
    for name, value, usual in (
        ("chunk_size", chunk_size, CHUNK),
        ("elbo_draws", elbo_draws, ELBO_DRAWS),
    ):
        if value != usual:
            raise ValueError(
                f"`fit({name}={value})` belongs to a fit with settings, but got none. Leave it "
                "out, or give a setting, such as `num_steps=2000`."
            )

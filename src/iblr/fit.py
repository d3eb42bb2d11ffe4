"""Fitting: chunks of steps, progress, interrupts and checks; no family's mathematics.

`fit` runs chunks of steps as one compiled program, looks at the ELBO after each, and compiles
nothing after the first.
The noise of step k is a function of (key, k) alone, so chunks, interrupts and resumptions do not
change the bits of a run.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

from iblr.checks import check_key, check_method, check_options, check_state
from iblr.diagnostics import elbo
from iblr.estimators import AbstractEstimator, Stl
from iblr.families.base import AbstractFamily
from iblr.history import History, Progress, ProgressLine, Report
from iblr.loop import Schedule, State, init, step
from iblr.posterior import Posterior
from iblr.rounds import Rounds, fit_in_rounds
from iblr.rule import improved_step
from iblr.status import Status
from iblr.target import Target, as_target

CHUNK = 100
ELBO_DRAWS = 200
ELBO_TAG = 2  # not 0 or 1, which are the two keys that a step splits off
REFRESH_UP_TO = 2048


class FitError(RuntimeError):
    """A fit failed numerically; `error.posterior` is what it had reached."""

    def __init__(self, message: str, posterior: Posterior):
        super().__init__(message)
        self.posterior = posterior


@eqx.filter_jit
def _chunk(
    state: State,
    span: Int[Array, "2"],
    target: Target,
    options: dict,
    length: int,
    elbo_draws: int,
    batched: bool,
) -> tuple[State, Report]:
    """`length` steps from index `span[0]`, none from `span[1]` on, and the ELBO after them."""

    def one_run(state: State) -> tuple[State, Report]:
        def body(state: State, index: Int[Array, ""]):
            def advance():
                after, info = step(state, target, **options)
                counts = jnp.stack(
                    [
                        info.refused.astype(jnp.int32),
                        (info.status == Status.left_set).astype(jnp.int32),
                        info.limited,
                        info.halvings,
                        (info.status == Status.out_of_range).astype(jnp.int32),
                        info.excluded,
                    ]
                )
                return after, counts

            idle = lambda: (state, jnp.zeros(6, jnp.int32))  # noqa: E731
            return jax.lax.cond(index < span[1], advance, idle)

        state, counts = jax.lax.scan(body, state, span[0] + jnp.arange(length))
        family, drift = state.family, jnp.zeros((), state.family.dtype)
        if family.dim <= REFRESH_UP_TO:
            family, drift = family.refreshed()
        state = dataclasses.replace(state, family=family)
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), ELBO_TAG)
        value, standard_error = elbo(target, family, key, draws=elbo_draws)
        refused, left_set, limited, halvings, out_of_range, excluded = counts.sum(0)
        return state, Report(
            value,
            standard_error,
            refused,
            left_set,
            out_of_range,
            limited,
            halvings,
            excluded,
            drift,
        )

    return jax.vmap(one_run)(state) if batched else one_run(state)


def fit(
    target: Target | Callable,
    family: AbstractFamily,
    *,
    key: Key[Array, "*runs"],
    support: Any = None,
    estimator: AbstractEstimator | None = None,
    step_size: ArrayLike | Schedule | None = None,
    num_steps: int = 2000,
    momentum: float = 0.0,
    trust_region: bool | None = None,
    rule: Callable = improved_step,
    callback: Callable[[Progress], Any] | None = None,
    progress: bool | None = None,
    throw: bool = True,
    state: State | Rounds | None = None,
    chunk_size: int = CHUNK,
    elbo_draws: int = ELBO_DRAWS,
) -> Posterior:
    """Fit `family` to `target` by natural-gradient variational inference.

    Args:
        target: unnormalised log density of one point, or an `iblr.Target`.
        family: the start; its type fixes the approximation and its structure the points'.
        key: a typed key. An array of keys runs as many fits as one program; then `family` may
            hold a batch of starts, stacked along a first axis.
        support: where leaves of a Gaussian live, such as `{"tau": iblr.positive}`; short for
            `family.with_support(support)`.
        estimator: how the natural gradient is estimated; None is `Stl(pairs=8)`, for a mixture in d
            dimensions `Stl(pairs=d/20)`.
        step_size: t, a number or a schedule of the step index (any of optax's). None is
            min(1/10, 2 / (10 + k)) for a Gaussian over real parameters, 0.15 (or 3 pairs / d, if
            that is smaller) for two fifths of all steps and then linearly to zero for a mixture,
            min(1/2, 5 / (10 + k)) for other families.
        num_steps: steps to take; for a mixture of `components="auto"` those of every round.
        momentum: r of the natural momentum of a Gaussian's mean, in [0, 1).
        trust_region: bound the change of one step, see `improved_step`. For a Gaussian worth it far
            from the target or with `Secant`; with a decaying step size it can delay the approach.
            None is off for a Gaussian over real parameters, on for other families with the improved
            rule.
        rule: `improved_step`, `natural_gradient_step`, `line_search_step`, `geodesic_step`, or one
            of `iblr.baselines`.
        callback: called with a `Progress` after every chunk; return True to stop.
        progress: show a line of progress; None shows it in a terminal.
        throw: raise `FitError` when the fit fails (in a batch: when every run fails). If False,
            read `posterior.status`.
        state: `posterior.state` of a fit to go on with; `num_steps` then counts from its start.
        chunk_size: steps between two looks at the ELBO.
        elbo_draws: draws for each of those looks.

    Returns:
        A `Posterior`. Interrupted from the keyboard, the best approximation reached.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: -0.5 * ((z - 3.0) ** 2 / jnp.array([1.0, 4.0])).sum()
        >>> posterior = iblr.fit(log_density, iblr.Gaussian.standard(2), key=jax.random.key(0),
        ...                      estimator=iblr.Stl(pairs=4), step_size=0.1, num_steps=500)
        >>> posterior.mean.round(2).tolist(), posterior.standard_deviation.round(2).tolist()
        ([3.0, 3.0], [1.0, 2.0])
    """
    started = time.perf_counter()
    target = as_target(target, "fit")
    batched = check_key(family, key)
    if support is not None:
        family = family.with_support(support)
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
    start: State = _start(family, key, batched, rule)
    now = start if state is None else check_state(state, start)
    reached = now.state if isinstance(now, Rounds) else now
    if int(jnp.max(reached.step)) >= num_steps:
        raise ValueError(
            f"`fit(state=..., num_steps=...)` counts steps from the start of the state's run, "
            f"which has taken {int(jnp.max(reached.step))} of {num_steps}. Pass a larger "
            "`num_steps`."
        )
    _preflight(target, reached.family, key, batched)
    options = {
        "estimator": Stl(pairs=defaults.pairs) if estimator is None else estimator,
        "step_size": step_size if callable(step_size) else jnp.asarray(step_size, float),
        "momentum": None if momentum == 0 else jnp.asarray(momentum, float),
        "trust_region": trust_region,
        "rule": rule,
    }
    line = ProgressLine(progress)

    def run(state: State) -> Posterior:
        def chunk(state: State, span: Int[Array, "2"]) -> tuple[State, Report]:
            return _chunk(state, span, target, options, chunk_size, elbo_draws, batched)

        return _run(state, chunk, options, num_steps, chunk_size, callback, line, started)

    try:
        grows = family.growth is not None
        posterior = fit_in_rounds(run, now, target, num_steps, rule) if grows else run(reached)
    finally:
        line.close()
    posterior = dataclasses.replace(posterior, seconds=time.perf_counter() - started)
    return _raise_if_failed(posterior) if throw else posterior


def _run(
    now: State,
    chunk: Callable[[State, Int[Array, "2"]], tuple[State, Report]],
    options: dict,
    num_steps: int,
    chunk_size: int,
    callback: Callable[[Progress], Any] | None,
    line: ProgressLine,
    started: float,
) -> Posterior:
    """Chunks of steps from a state up to `num_steps`, an interrupt, or the callback's word."""
    step_size = options["step_size"]
    history = History(now.family, int(jnp.max(now.step)), now.step.ndim > 0)
    interrupted = stopped = False
    try:
        while history.step < num_steps and not stopped:
            span = jnp.asarray([history.step, num_steps], jnp.int32)
            after, report = chunk(now, span)
            now = jax.block_until_ready(after)
            done = min(history.step + chunk_size, num_steps)
            t = float(jnp.asarray(step_size(done - 1) if callable(step_size) else step_size))
            history.add(done, t, report, now.family)
            seconds = time.perf_counter() - started
            told = Progress(
                done, num_steps, history.elbo, history.elbo_se, t, now.family, seconds, now
            )
            line.show(told)
            stopped = bool(callback(told)) if callback is not None else False
            stopped = stopped or history.hopeless
    except KeyboardInterrupt:
        interrupted = True
    num_gradients = options["estimator"].num_gradients(now.family)
    return history.posterior(
        now.family,
        now,
        interrupted,
        (history.step - history.first_step) * num_gradients,
        time.perf_counter() - started,
    )


def _raise_if_failed(posterior: Posterior) -> Posterior:
    fine = (posterior.status == Status.ok) | (posterior.status == Status.interrupted)
    fine = fine | (posterior.status == Status.refused_steps)
    if bool(jnp.any(fine)):
        return posterior
    message = posterior[0].message if posterior.is_batch else posterior.message
    raise FitError(
        f"`iblr.fit` failed. {message}\nWhat it had reached is in `error.posterior`; pass "
        "`throw=False` to get it returned.",
        posterior,
    )


def _start(
    family: AbstractFamily, key: Key[Array, "*runs"], batched: bool, rule: Callable
) -> State:
    if not batched:
        return init(family, key, rule)
    starts = 0 if _is_batch(family) else None
    return jax.vmap(lambda family, key: init(family, key, rule), in_axes=(starts, 0))(family, key)


def _is_batch(family: AbstractFamily) -> bool:
    return len(family.batch_shape) > 0


def _preflight(target: Target, family: AbstractFamily, key: Key[Array, "*runs"], batched: bool):
    """Check the target at the mean of the start (the first, in a batch) and at draws around it."""
    if batched:
        family, key = jax.tree.map(lambda x: x[0], (family, key))
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


@eqx.filter_jit
def _first_points(family: AbstractFamily, key: Key[Array, ""]) -> Float[Array, "n d"]:
    return jnp.concatenate([family.centres, family.draw(key, 7).rows])

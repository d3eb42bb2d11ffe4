"""Fitting: the one door to every way of it; no family's mathematics.

Without settings a fit chooses its method and its end and judges its result (`iblr.unattended`);
with an estimator, a step size, a number of steps or any other setting it does as it is told
(`iblr.told`).
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Key, PyTree

from iblr.budgets import Task
from iblr.checks import (
    TOL,
    check_budget,
    check_key,
    refuse_budget,
    refuse_looks,
    refuse_traced,
)
from iblr.estimators import AbstractEstimator
from iblr.families.base import AbstractFamily
from iblr.history import Progress, ProgressLine, Watch
from iblr.loop import Schedule, State
from iblr.posterior import Posterior
from iblr.regression import Regression
from iblr.rounds import Rounds
from iblr.rule import improved_step
from iblr.settling import Settling
from iblr.starts import starting_family
from iblr.status import Status
from iblr.steps import CHUNK, ELBO_DRAWS
from iblr.target import Target, as_target
from iblr.told import Settings, fit_as_told
from iblr.unattended import fit_unattended
from iblr.verdict import is_usable


class FitError(RuntimeError):
    """A fit failed numerically; `error.posterior` is what it had reached."""

    def __init__(self, message: str, posterior: Posterior):
        super().__init__(message)
        self.posterior = posterior


def fit(
    target: Target | Callable,
    family: AbstractFamily | type[AbstractFamily] | None = None,
    *,
    key: Key[Array, "*runs"],
    init: PyTree | Posterior | AbstractFamily = None,
    support: Any = None,
    tol: float = TOL,
    max_gradients: int | None = None,
    max_seconds: float | None = None,
    estimator: AbstractEstimator | None = None,
    step_size: ArrayLike | Schedule | None = None,
    num_steps: int | None = None,
    momentum: float = 0.0,
    trust_region: bool | None = None,
    rule: Callable = improved_step,
    callback: Callable[[Progress], Any] | None = None,
    progress: bool | None = None,
    throw: bool = True,
    state: Any = None,
    chunk_size: int = CHUNK,
    elbo_draws: int = ELBO_DRAWS,
) -> Posterior:
    """Fit a posterior approximation to `target` by natural-gradient variational inference.

    Without settings (the arguments from `estimator` to `rule`) the fit chooses its method, stops by
    itself when it is within `tol` of the best member of the family, and says whether to trust the
    result: see `posterior.verdict`. With any of them it does what it is told.

    Args:
        target: unnormalised log density of one point, or an `iblr.Target`.
        family: the start; its type fixes the approximation and its structure the points'. Or
            `iblr.Gaussian` or `iblr.DiagonalGaussian`, to be put around `init`. None is a full
            Gaussian as far as the memory goes, then a diagonal one, with a warning.
        key: a typed key. An array of keys gives as many fits; then `family` may hold a batch of
            starts, stacked along a first axis.
        init: a point to start from, an array or a pytree; or, as a warm start, a posterior (such as
            that of `iblr.laplace`) or a family.
        support: where leaves of a Gaussian live, such as `{"tau": iblr.positive}`; `init` is then a
            point there.
        tol: nats that the ELBO may lack of that of the best member of the family: the fit ends
            when `posterior.gap_bound` is below.
        max_gradients: evaluations of the target or its gradient to spend at most (each run, in a
            batch), those of the verdict included; None is 20 000 for a full Gaussian of up to 1000
            coordinates (100 000 with minibatches), 400 000 else, or 200 d, if that is more.
        max_seconds: time after which to stop, compilation included (all runs of a batch together).
            A full Gaussian of up to 1000 coordinates leaves up to half for the verdict; what that
            takes more, comes on top.
        estimator: how the natural gradient is estimated; None is `Stl(pairs=8)`, for a mixture in d
            dimensions `Stl(pairs=d/20)`.
        step_size: t, a number or a schedule of the step index (any of optax's). None is
            min(1/10, 2 / (10 + k)) for a Gaussian over real parameters, 0.15 (or 3 pairs / d, if
            that is smaller) for two fifths of all steps and then linearly to zero for a mixture,
            min(1/2, 5 / (10 + k)) for other families.
        num_steps: steps to take, 2000 if another setting is given; for a mixture of
            `components="auto"` those of every round.
        momentum: r of the natural momentum of a Gaussian's mean, in [0, 1).
        trust_region: bound the change of one step, see `improved_step`. For a Gaussian worth it far
            from the target or with `Secant`; with a decaying step size it can delay the approach.
            None is off for a Gaussian over real parameters, on for other families with the improved
            rule.
        rule: `improved_step`, `natural_gradient_step`, `line_search_step`, `geodesic_step`, or one
            of `iblr.baselines`.
        callback: called with a `Progress` now and then; return True to stop.
        progress: show a line of progress; None shows it in a terminal.
        throw: raise `FitError` when the fit fails (in a batch: when every run fails). If False,
            read `posterior.status`.
        state: `posterior.state` of a fit to go on with; `num_steps` then counts from its start.
            A `family` or `init` beside it must be alike, and is not gone to again; without
            settings it may be left out.
        chunk_size: with settings, steps between two looks at the ELBO.
        elbo_draws: with settings, draws for each of those looks.

    Returns:
        A `Posterior`. Interrupted from the keyboard, the best approximation reached (of a batch
        without settings, the runs so far).

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: -0.5 * ((z - 3.0) ** 2 / jnp.array([1.0, 4.0])).sum()
        >>> posterior = iblr.fit(log_density, init=jnp.zeros(2), key=jax.random.key(0))
        >>> posterior.mean.round(2).tolist(), posterior.standard_deviation.round(2).tolist()
        ([3.0, 3.0], [1.0, 2.0])
        >>> posterior.stopped_by, posterior.verdict[:4]
        ('tol', 'Good')

        The same with a method and its settings:

        >>> posterior = iblr.fit(log_density, iblr.Gaussian.standard(2), key=jax.random.key(0),
        ...                      estimator=iblr.Stl(pairs=4), step_size=0.1, num_steps=500)
        >>> posterior.mean.round(2).tolist(), posterior.standard_deviation.round(2).tolist()
        ([3.0, 3.0], [1.0, 2.0])
    """
    started = time.perf_counter()
    refuse_traced(key)
    target = as_target(target, "fit")
    if isinstance(state, tuple):
        raise ValueError(
            "`fit(state=...)` without settings goes on with one run, but got the states of a "
            "batch. Index the posterior and resume its runs one by one: "
            "`fit(..., state=posterior[0].state, key=keys[0])`."
        )
    if isinstance(state, Posterior):
        raise ValueError(
            "`fit(state=...)` needs the state of a posterior, but got a posterior: pass "
            "`posterior.state`."
        )
    if family is None and init is None and isinstance(state, Regression | Settling | Rounds):
        family = state.family
    start = starting_family(family, init, support)
    check_key(start, key)
    check_budget(tol, max_gradients, max_seconds)
    tol = float(tol)
    if callback is not None and not callable(callback):
        raise ValueError(f"`fit(callback=...)` needs a function, but got {callback!r}.")
    settings = Settings(estimator, step_size, num_steps, momentum, trust_region, rule)
    watch = Watch(callback, ProgressLine(progress), started)
    try:
        resumed_batch = key.ndim > 0 and isinstance(state, Rounds)  # which came from settings
        if settings.say_nothing and not resumed_batch and not isinstance(state, State):
            refuse_looks(chunk_size, elbo_draws)
            posterior = fit_unattended(
                Task(target, start, key, state, tol, max_gradients, max_seconds, watch)
            )
        else:
            refuse_budget(tol, max_gradients, max_seconds)
            posterior = fit_as_told(
                target, start, key, settings, state, watch, chunk_size, elbo_draws
            )
    finally:
        watch.line.close()
    posterior = dataclasses.replace(posterior, seconds=watch.seconds)
    return _raise_if_failed(posterior) if throw else posterior


def _raise_if_failed(posterior: Posterior) -> Posterior:
    fine = is_usable(posterior.status) | (posterior.status == Status.not_converged)
    if bool(jnp.any(fine)):
        return posterior
    message = posterior[0].message if posterior.is_batch else posterior.message
    raise FitError(
        f"`iblr.fit` failed. {message}\nWhat it had reached is in `error.posterior`; pass "
        "`throw=False` to get it returned.",
        posterior,
    )

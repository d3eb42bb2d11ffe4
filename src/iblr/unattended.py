"""A fit without settings: which engine serves a family, and the verdict on what it found."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from iblr import automatic, regression, rounds, settling
from iblr.budgets import Limits, Task, check_cost
from iblr.checks import described
from iblr.diagnose import evaluations
from iblr.estimators import Stl
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.judging import failed, first_family, judged, named_if_improper
from iblr.loop import State
from iblr.posterior import Posterior, stacked
from iblr.preflight import check_target
from iblr.regression import Regression
from iblr.settling import Settling
from iblr.status import Status
from iblr.steps import CHUNK, ELBO_DRAWS, take_steps
from iblr.told import Settings, fit_as_told

FEWEST_BATCHES = 8
WIDEST = 1e5  # times the first standard deviations in a fit that failed, else its square: improper


def fit_unattended(task: Task) -> Posterior:
    """One fit, or one a key."""
    family, key = task.family, task.key
    if family.growth is None:  # else it is checked where it is told
        resumed = isinstance(task.state, Regression | Settling)
        check_target(task.target, task.state.family if resumed else family, key)
    with jax.debug_nans(False):  # what is not finite is left out, and nan says that it was
        return _fit_all(task)


def _fit_all(task: Task) -> Posterior:
    family, key = task.family, task.key
    if key.ndim == 0:
        return _fit_one(task, check_cost(family))
    if task.state is not None:
        raise ValueError(
            "`fit(state=...)` without settings goes on with one run, but got a batch of keys. "
            "Index the posterior and resume its runs one by one."
        )
    if family.growth is not None:
        raise ValueError(
            "`fit` without settings takes a mixture that adapts its size with one key, as every "
            "run ends with components of its own, but got a batch of keys. Fit one key after the "
            "other, or give a setting, such as `num_steps=2000`, for runs that share their number."
        )
    starts = [
        jax.tree.map(lambda x, run=run: x[run], family) if family.batch_shape else family
        for run in range(len(key))
    ]
    runs: list[Posterior] = []
    for start, one in zip(starts, key, strict=True):
        begun = time.perf_counter()
        checked = 0 if runs else check_cost(start)  # at the first start only
        run = _fit_one(task._replace(family=start, key=one), checked)
        runs.append(dataclasses.replace(run, seconds=time.perf_counter() - begun))
        if runs[-1].stopped_by == "interrupt":
            break
    return stacked(runs)


def _fit_one(task: Task, checked: int) -> Posterior:
    """A fit and its verdict, after so many evaluations for a check of the target."""
    left = task.left(checked)
    if task.regresses:
        posterior = _by_regression(task, left)
    elif task.family.growth is not None:
        posterior = _in_rounds(task, left)
    else:
        posterior = _by_settling(task, left)
    posterior = dataclasses.replace(posterior, num_gradients=posterior.num_gradients + checked)
    if posterior.stopped_by == "interrupt":
        return posterior
    try:
        posterior = named_if_improper(posterior, task)
        if posterior.stopped_by == "failure":
            return failed(posterior, posterior.status)
        return judged(posterior, task)
    except KeyboardInterrupt:
        if posterior.stopped_by == "failure":
            return failed(posterior, posterior.status)
        return dataclasses.replace(
            posterior, status=Status.interrupted, stopped_by="interrupt", diagnosis=None
        )


def _resumed(task: Task, kind: type) -> Any:
    """The state to go on with, if it is that of such a fit."""
    state = task.state
    same = isinstance(state, kind) and type(state.family) is type(task.family)
    if not same or state.family.structure != task.family.structure:
        raise ValueError(
            "`fit(state=...)` without settings needs the `posterior.state` of such a fit of the "
            f"same family, but got {described(state)}."
        )
    return state


def _by_regression(task: Task, left: int) -> Posterior:
    family: Gaussian = task.family
    per_step = 2 * regression.num_pairs(family.dim)
    task.refuse_if_below(left, FEWEST_BATCHES * per_step)
    fresh = task.state is None
    now = regression.begin(family, task.key) if fresh else _resumed(task, Regression)
    spare = evaluations(family, task.num_draws)
    budget = automatic.Budget(task.tol, left // per_step, task.watch.started, task.deadline, spare)
    return automatic.fit_by_regression(now, task.target, budget, task.watch)


def _in_rounds(task: Task, left: int) -> Posterior:
    """A mixture that adapts its size ends by itself, when more components gain less than `tol`."""
    between = rounds.ELBO_DRAWS + rounds.GROWTH_DRAWS
    pairs = task.family.defaults.pairs
    first_chunk = CHUNK * Stl(pairs=pairs).num_gradients(task.family) + ELBO_DRAWS
    task.refuse_if_below(left, first_chunk)
    limits = Limits(task.deadline, left, task.watch.callback, between)
    posterior = fit_as_told(
        task.target,
        task.family,
        task.key,
        Settings(),
        task.state,
        task.watch._replace(callback=limits),
        CHUNK,
        ELBO_DRAWS,
        least_gain=task.tol,
    )
    if limits.reason or posterior.stopped_by != "num_steps":
        stopped_by = limits.reason or posterior.stopped_by
        return _ended(posterior, first_family(task), stopped_by, limits.spent)
    return _ended(posterior, first_family(task), "tol", limits.spent + rounds.ELBO_DRAWS)


def _by_settling(task: Task, left: int) -> Posterior:
    target, family = task.target, task.family
    limits = Limits(task.deadline, math.inf, task.watch.callback)
    task.refuse_if_below(left, settling.first_cost(family))

    def run(state: State, options: dict, num_steps: int) -> Posterior:
        posterior = take_steps(
            state,
            target,
            options,
            num_steps,
            chunk_size=CHUNK,
            elbo_draws=ELBO_DRAWS,
            watch=task.watch._replace(callback=limits),
        )
        looks = ELBO_DRAWS * len(posterior.trace.step)
        return dataclasses.replace(posterior, num_gradients=posterior.num_gradients + looks)

    if task.state is None:
        now = settling.begin(family, task.key)
    else:
        now = _resumed(task, Settling)
        now = dataclasses.replace(now, reached=rounds.without_counts(now.reached))
    posterior = settling.settle(run, now, target, task.tol, left, task.key)
    reason = limits.reason or posterior.stopped_by
    return _ended(posterior, first_family(task), reason, posterior.num_gradients)


def _ended(
    posterior: Posterior, start: AbstractFamily, stopped_by: str, num_gradients: int
) -> Posterior:
    """With why it ended, and a status that says so where a budget was spent or q widened."""
    wider = jnp.max(posterior.family.standard_deviations / start.standard_deviations)
    if float(wider) > (WIDEST if stopped_by == "failure" else WIDEST**2):
        stopped_by, status = "failure", Status.improper
    elif stopped_by == "callback" and math.isnan(posterior.gap_bound):
        status = Status.not_converged
    elif stopped_by in ("max_gradients", "max_seconds"):
        ended_well = posterior.status == Status.ok
        status = Status.where(jnp.asarray(ended_well), Status.out_of_budget, posterior.status)
    else:
        status = posterior.status
    return dataclasses.replace(
        posterior, stopped_by=stopped_by, num_gradients=num_gradients, status=status
    )

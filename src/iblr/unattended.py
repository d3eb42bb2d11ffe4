"""A fit without settings: which engine serves a family, what it may spend, and the verdict."""

import dataclasses
import itertools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from iblr import automatic, regression, rounds, settling
from iblr.checks import described
from iblr.climbs import is_one_point, look_around, over_points, surroundings
from iblr.diagnose import evaluations, examine
from iblr.estimators import Stl
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.history import Progress, Watch
from iblr.improper import MOST_EVALUATIONS, has_endless_ridge, largest_growth
from iblr.loop import State
from iblr.posterior import Posterior, stacked
from iblr.preflight import POINTS, check_target
from iblr.regression import Regression
from iblr.settling import Settling
from iblr.status import Status
from iblr.steps import CHUNK, ELBO_DRAWS, take_steps
from iblr.target import Target
from iblr.told import Settings, fit_as_told
from iblr.verdict import LARGEST_MODE, Mode

REGRESSION_UP_TO = 1000  # coordinates: a batch takes O(d^3)
MAX_GRADIENTS, MAX_GRADIENTS_EACH, MAX_GRADIENTS_SETTLING = 20_000, 200, 400_000
DRAWS, FEWEST_DRAWS = 1000, 100  # of the diagnosis
FEWEST_BATCHES = 8
MINIBATCH_FACTOR = 5  # gradients of few rows are cheap, and their noise takes more of them
CLIMB_GRADIENTS = 2000  # at most, kept back for a look at other modes
WIDEST = 1e5  # times the first standard deviations in a fit that failed, else its square: improper
DIAGNOSIS_TAG, CLIMB_TAG = 8, 9


class Task(NamedTuple):
    """What to fit from where, and when to stop; see `iblr.fit`."""

    target: Target
    family: Any
    key: Key[Array, "*runs"]
    state: Any
    tol: float
    max_gradients: int | None
    max_seconds: float | None
    watch: Watch

    @property
    def deadline(self) -> float:
        """By the clock."""
        return self.watch.started + (math.inf if self.max_seconds is None else self.max_seconds)


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
        return _fit_one(task, _looked(family))
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
        looked = 0 if runs else _looked(start)  # at the first start only
        run = _fit_one(task._replace(family=start, key=one), looked)
        runs.append(dataclasses.replace(run, seconds=time.perf_counter() - begun))
        if runs[-1].stopped_by == "interrupt":
            break
    return stacked(runs)


class _Limits:
    """A callback that ends a fit in steps when its budget is spent, or when the user's says so.

    Args:
        deadline: by the clock.
        max_gradients: what may be spent.
        callback: the user's.
        between: what is spent between two rounds.
    """

    def __init__(
        self, deadline: float, max_gradients: int | float, callback: Any, between: int = 0
    ):
        self.deadline, self.max_gradients, self.callback = deadline, max_gradients, callback
        self.between, self.reason = between, None
        self.before = self.latest = self.looks = self.step = 0

    @property
    def spent(self) -> int:
        """Gradients of all rounds, what was spent between them, and looks at the ELBO."""
        return self.before + self.latest + self.looks

    def __call__(self, told: Progress) -> bool:
        """Whether to stop; the steps and gradients told of start anew with every round."""
        if told.step <= self.step:
            self.before += self.latest + self.between
            self.latest = 0
        self.step = told.step
        needed = told.num_gradients - self.latest + ELBO_DRAWS  # by the next chunk
        if self.between and told.step + CHUNK >= told.num_steps:
            needed += self.between + 2 * needed  # it ends a round; chunks of the next cost twice
        self.latest = told.num_gradients
        self.looks += ELBO_DRAWS
        if time.perf_counter() >= self.deadline:
            self.reason = "max_seconds"
        elif self.spent + needed > self.max_gradients:
            self.reason = "max_gradients"
        elif self.callback is not None and self.callback(told):
            self.reason = "callback"
        return self.reason is not None


def _fit_one(task: Task, looked: int) -> Posterior:
    """A fit and its verdict, after so many evaluations for a check of the target."""
    family = task.family
    regresses = isinstance(family, Gaussian) and family.dim <= REGRESSION_UP_TO
    limit = int(task.max_gradients or _default_limit(task.target, family, regresses))
    left = _left(limit - looked, family)
    if regresses:
        posterior = _by_regression(task, left, limit)
    elif family.growth is not None:
        posterior = _in_rounds(task, left)
    else:
        posterior = _by_settling(task, left)
    posterior = dataclasses.replace(posterior, num_gradients=posterior.num_gradients + looked)
    if posterior.stopped_by == "interrupt":
        return posterior
    try:
        posterior = _named_if_improper(posterior, task, limit)
        if posterior.stopped_by == "failure":
            return _failed(posterior, posterior.status)
        return _judged(posterior, task, limit)
    except KeyboardInterrupt:
        if posterior.stopped_by == "failure":
            return _failed(posterior, posterior.status)
        return dataclasses.replace(
            posterior, status=Status.interrupted, stopped_by="interrupt", diagnosis=None
        )


def _default_limit(target: Target, family: AbstractFamily, regresses: bool) -> int:
    each = MAX_GRADIENTS_EACH * family.dim
    if not regresses:
        return max(MAX_GRADIENTS_SETTLING, each)
    return max(MAX_GRADIENTS, each) * (MINIBATCH_FACTOR if target.is_stochastic else 1)


def _looked(family: AbstractFamily) -> int:
    """Evaluations by the check of a target."""
    return POINTS - 1 + len(family.centres)


def _num_draws(limit: int) -> int:
    """Draws of the diagnosis within a budget of gradients."""
    return min(DRAWS, max(limit // 4, FEWEST_DRAWS))


def _left(limit: int, family: AbstractFamily) -> int:
    """What a budget leaves for the fit itself."""
    climbs = min(limit // 10, CLIMB_GRADIENTS)
    return limit - evaluations(family, _num_draws(limit)) - climbs


def _refuse_if_below(left: int, steps: int, family: AbstractFamily) -> None:
    """Raise where a budget of gradients does not suffice for the first steps."""
    if left < steps:
        limits = itertools.count(steps)
        least = _looked(family) + next(n for n in limits if _left(n, family) >= steps)
        raise ValueError(
            f"`fit(max_gradients=...)` is too small for a {family.name} over {family.dim} "
            f"parameters: it takes at least {least} gradients to see anything, and some thousands "
            "to finish."
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


def _by_regression(task: Task, left: int, limit: int) -> Posterior:
    family: Gaussian = task.family
    per_step = 2 * regression.num_pairs(family.dim)
    _refuse_if_below(left, FEWEST_BATCHES * per_step, family)
    fresh = task.state is None
    now = regression.begin(family, task.key) if fresh else _resumed(task, Regression)
    spare = evaluations(family, _num_draws(limit))
    budget = automatic.Budget(task.tol, left // per_step, task.watch.started, task.deadline, spare)
    return automatic.fit_by_regression(now, task.target, budget, task.watch)


def _named_if_improper(posterior: Posterior, task: Task, limit: int) -> Posterior:
    """A fit that did not settle may have an endless way to go."""
    q = posterior.family
    settled = posterior.status in (Status.ok, Status.improper)
    if settled or q.dim > REGRESSION_UP_TO or not _is_finite(q):
        return posterior
    spent = posterior.num_gradients + evaluations(q, _num_draws(limit))
    around = surroundings(q, jax.random.fold_in(task.key, CLIMB_TAG))
    first = _first_variances(posterior, task)
    if around is None or first is None or limit - spent < MOST_EVALUATIONS:
        return posterior
    improper, evaluated = has_endless_ridge(over_points(task.target, q, around), first, around)
    posterior = dataclasses.replace(posterior, num_gradients=posterior.num_gradients + evaluated)
    return _failed(posterior, Status.improper) if improper else posterior


def _is_finite(q: AbstractFamily) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(q))


def _first_variances(posterior: Posterior, task: Task) -> Float[Array, " d"] | None:
    """Those of the start in real coordinates, where there are any."""
    if isinstance(posterior.state, Regression):
        return posterior.state.first
    start = surroundings(_start(task), jax.random.fold_in(task.key, CLIMB_TAG))
    return None if start is None else start.variances


def _start(task: Task) -> AbstractFamily:
    """Where the fit began, before it was gone on with."""
    return task.state.start if isinstance(task.state, Settling) else task.family


def _failed(posterior: Posterior, status: Status) -> Posterior:
    """Without all that is said of targets which have a mass and a best member."""
    return dataclasses.replace(
        posterior,
        status=status,
        stopped_by="failure",
        gap_estimate=math.nan,
        gap_bound=math.nan,
        diagnosis=None,
    )


def _in_rounds(task: Task, left: int) -> Posterior:
    """A mixture that adapts its size ends by itself, when more components gain less than `tol`."""
    between = rounds.ELBO_DRAWS + rounds.GROWTH_DRAWS
    pairs = task.family.defaults.pairs
    first_chunk = CHUNK * Stl(pairs=pairs).num_gradients(task.family) + ELBO_DRAWS
    _refuse_if_below(left, first_chunk, task.family)
    limits = _Limits(task.deadline, left, task.watch.callback, between)
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
        return _ended(posterior, task.family, stopped_by, limits.spent)
    return _ended(posterior, task.family, "tol", limits.spent + rounds.ELBO_DRAWS)


def _by_settling(task: Task, left: int) -> Posterior:
    target, family = task.target, task.family
    limits = _Limits(task.deadline, math.inf, task.watch.callback)
    _refuse_if_below(left, settling.first_cost(family), family)

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
    return _ended(posterior, _start(task), reason, posterior.num_gradients)


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


def _large_enough(modes: tuple[Mode, ...], q: AbstractFamily) -> list[Mode]:
    """Those that would matter if they went on as far as a target may before it is improper."""
    wider = math.log(largest_growth(q.dtype))
    return [mode for mode in modes if mode.log_mass + wider > math.log(LARGEST_MODE)]


def _judged(posterior: Posterior, task: Task, limit: int) -> Posterior:
    """With a diagnosis, and a look for other modes, one of which may have an endless way to go."""
    target, key = task.target, task.key
    q, draws = posterior.family, _num_draws(limit)
    diagnosis = examine(target, q, jax.random.fold_in(key, DIAGNOSIS_TAG), draws)
    spent = posterior.num_gradients + evaluations(q, draws)
    climb_key = jax.random.fold_in(key, CLIMB_TAG)
    is_small = q.dim <= REGRESSION_UP_TO
    around = surroundings(q, climb_key) if is_small else None
    endless = False
    if around is None:
        many = f"{q.dim} coordinates are too many to look for them, so "
        unlooked = f"{'' if is_small else many}compare fits from other starts"
        diagnosis = dataclasses.replace(diagnosis, unlooked=unlooked)
    else:
        elbo = diagnosis.importance.elbo
        left = limit - spent
        left -= MOST_EVALUATIONS if left > 3 * MOST_EVALUATIONS else 0
        seen = look_around(target, q, around, elbo, climb_key, left, task.deadline)
        diagnosis = dataclasses.replace(
            diagnosis,
            modes=seen.modes,
            climbs=seen.climbs,
            left_out=seen.left_out,
            climb_gradients=seen.gradients,
            unlooked="give a larger `max_gradients=` or `max_seconds=`",
        )
        spent += seen.gradients
        affordable = max(limit - spent, 0) // MOST_EVALUATIONS
        modes = _large_enough(seen.modes, q)[:affordable]
        first = _first_variances(posterior, task) if modes else None
        if first is not None:
            known = over_points(target, q, around)
            for mode in modes:
                on, evaluated = has_endless_ridge(known, first, mode.family)
                endless, spent = endless or on, spent + evaluated
    found = diagnosis.importance
    status = posterior.status
    if not math.isfinite(found.elbo):
        status = Status.diverged
    elif around is None and is_one_point(q, climb_key):
        status = Status.inaccurate
    posterior = dataclasses.replace(
        posterior,
        elbo=jnp.asarray(found.elbo),
        elbo_se=jnp.asarray(found.elbo_se),
        status=status,
        num_gradients=spent,
        diagnosis=diagnosis,
    )
    return _failed(posterior, Status.improper) if endless else posterior

"""The verdict on a fit without settings: weights, other regions, and ways without end."""

import dataclasses
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from iblr.budgets import REGRESSION_UP_TO, Task
from iblr.climbs import is_one_point, look_around, over_points, surroundings
from iblr.diagnose import evaluations, examine
from iblr.diagnosis import COARSE, LARGEST_MODE, Diagnosis, Mode
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.improper import (
    MOST_EVALUATIONS,
    WIDENED_REGION,
    axis_evaluations,
    has_endless_axis,
    has_endless_ridge,
    largest_growth,
)
from iblr.posterior import Posterior
from iblr.purposes import Purpose, key_for
from iblr.regression import Regression
from iblr.rounds import Rounds
from iblr.settling import Settling
from iblr.status import Status
from iblr.verdict import is_usable

AXES_FROM = 3  # times their evaluations must be left to look along coordinates
DEARER = "give a larger `max_gradients=` or `max_seconds=`"


def named_if_improper(posterior: Posterior, task: Task) -> Posterior:
    """A fit that did not settle may have an endless way to go."""
    q = posterior.family
    settled = posterior.status in (Status.ok, Status.improper)
    if settled or q.dim > REGRESSION_UP_TO or not _is_finite(q):
        return posterior
    spent = posterior.num_gradients + evaluations(q, task.num_draws)
    around = surroundings(q, key_for(task.key, Purpose.CLIMBS))
    first = _first_variances(posterior, task)
    if around is None or first is None or task.limit - spent < MOST_EVALUATIONS:
        return posterior
    improper, evaluated = has_endless_ridge(over_points(task.target, q, around), first, around)
    posterior = dataclasses.replace(posterior, num_gradients=posterior.num_gradients + evaluated)
    return failed(posterior, Status.improper) if improper else posterior


def judged(posterior: Posterior, task: Task) -> Posterior:
    """With a diagnosis, and a look for other modes, one of which may have an endless way to go."""
    target, q = task.target, posterior.family
    key = key_for(task.key, Purpose.CLIMBS)
    diagnosis = examine(target, q, key_for(task.key, Purpose.DIAGNOSIS), task.num_draws)
    spent = posterior.num_gradients + evaluations(q, task.num_draws)
    is_small = q.dim <= REGRESSION_UP_TO
    around = surroundings(q, key) if is_small else None
    if around is None:
        many = f"{q.dim} coordinates are too many to look for them, so "
        advice = f"{'' if is_small else many}compare fits from other starts"
        seen = _Surveyed(dataclasses.replace(diagnosis, unlooked=advice), spent, False)
    else:
        seen = _surveyed(posterior, task, diagnosis, around, spent)
    found, status = diagnosis.importance, posterior.status
    if not math.isfinite(found.elbo):
        status = Status.diverged
    elif around is None and is_one_point(q, key):
        status = Status.inaccurate
    if not bool(is_usable(status)):  # not a best member that it could be near to
        posterior = dataclasses.replace(posterior, gap_estimate=math.nan, gap_bound=math.nan)
    posterior = dataclasses.replace(
        posterior,
        elbo=jnp.asarray(found.elbo),
        elbo_se=jnp.asarray(found.elbo_se),
        status=status,
        num_gradients=seen.spent,
        diagnosis=seen.diagnosis,
    )
    return failed(posterior, Status.improper) if seen.is_endless else posterior


def failed(posterior: Posterior, status: Status) -> Posterior:
    """Without all that is said of targets which have a mass and a best member."""
    return dataclasses.replace(
        posterior,
        status=status,
        stopped_by="failure",
        gap_estimate=math.nan,
        gap_bound=math.nan,
        diagnosis=None,
    )


def first_family(task: Task) -> AbstractFamily:
    """Where the fit began, before it was gone on with."""
    return task.state.start if isinstance(task.state, Settling | Rounds) else task.family


class _Surveyed(NamedTuple):
    """A diagnosis with other modes, all that was spent, and whether one goes on without end."""

    diagnosis: Diagnosis
    spent: int
    is_endless: bool


def _surveyed(
    posterior: Posterior, task: Task, diagnosis: Diagnosis, around: Gaussian, spent: int
) -> _Surveyed:
    """A look around q, and along the ways from what was found there."""
    target, q, key = task.target, posterior.family, key_for(task.key, Purpose.CLIMBS)
    found, known, is_endless = diagnosis.importance, over_points(target, q, around), False
    affordable = task.limit - spent >= AXES_FROM * axis_evaluations(q.dim)
    tells = math.isfinite(found.elbo) and found.resolution <= COARSE
    if tells and affordable and time.perf_counter() < task.deadline:
        is_endless = has_endless_axis(known, around, found.log_evidence)
        spent += axis_evaluations(q.dim)
    if is_endless:
        return _Surveyed(diagnosis, spent, True)
    left = task.limit - spent
    left -= MOST_EVALUATIONS if left > 3 * MOST_EVALUATIONS else 0
    seen = look_around(target, q, around, found.elbo, key, left, task.deadline)
    spent += seen.gradients
    modes = _large_enough(seen.modes, q)[: max(task.limit - spent, 0) // MOST_EVALUATIONS]
    first = _first_variances(posterior, task) if modes else None
    if first is not None:
        for mode in modes:
            endless, evaluated = has_endless_ridge(known, first, mode.family, WIDENED_REGION)
            is_endless, spent = is_endless or endless, spent + evaluated
    diagnosis = dataclasses.replace(
        diagnosis,
        modes=seen.modes,
        climbs=seen.climbs,
        left_out=seen.left_out,
        climb_gradients=seen.gradients,
        unlooked=DEARER,
    )
    return _Surveyed(diagnosis, spent, is_endless)


def _large_enough(modes: tuple[Mode, ...], q: AbstractFamily) -> list[Mode]:
    """Those that would matter if they went on as far as a target may before it is improper."""
    wider = math.log(largest_growth(q.dtype))
    return [mode for mode in modes if mode.log_mass + wider > math.log(LARGEST_MODE)]


def _is_finite(q: AbstractFamily) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(q))


def _first_variances(posterior: Posterior, task: Task) -> Float[Array, " d"] | None:
    """Those of the start in real coordinates, where there are any."""
    if isinstance(posterior.state, Regression):
        return posterior.state.first
    start = surroundings(first_family(task), key_for(task.key, Purpose.CLIMBS))
    return None if start is None else start.variances

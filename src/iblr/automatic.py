"""Full Gaussians without settings: `iblr.regression` run until the gap is known to be small.

A stretch of batches is one compiled program that stops by itself; between two of them the host
looks at the clock, the callback and the keyboard. The bits of a run do not depend on where
stretches end. A fit ends when the 95 % bound on its gap is below `tol`, when a budget is spent, or
when something is wrong: an approximation that widens without end has an improper target.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from iblr import regression
from iblr.compiling import quickly_compiled
from iblr.history import Progress, Watch
from iblr.improper import largest_growth
from iblr.posterior import Posterior, Trace
from iblr.regression import Regression
from iblr.status import Status
from iblr.target import Target

FIRST_STRETCH, STRETCH = 4, 32
SECONDS = 0.5  # that a stretch should take
MOST_NARROWINGS = 100


class Found(NamedTuple):
    """What every batch of a stretch found, an array of each; on the device, then on the host."""

    elbo: Any
    elbo_se: Any
    gap: Any
    excluded: Any


class Standing(NamedTuple):
    """Where a fit stands, see `Regression`; on the device, then on the host."""

    step: Any
    gap: Any
    bound: Any
    done: Any
    broken: Any
    narrowed: Any


class Budget(NamedTuple):
    """When to stop.

    Attributes:
        tol: the accuracy in nats.
        num_steps: the batches.
        started: by the clock.
        deadline: by the clock.
        spare: evaluations that come after the fit, for which to leave up to half of the time.
    """

    tol: float
    num_steps: int
    started: float
    deadline: float
    spare: int

    def deadline_at(self, rate: float) -> float:
        """Where an evaluation takes so many seconds."""
        return self.deadline - min(self.spare * rate, 0.5 * (self.deadline - self.started))


def _broken(state: Regression) -> Bool[Array, ""]:
    """Whether the target is improper, not finite anywhere near, or beyond the precision."""
    limit = largest_growth(state.family.dtype)
    finite = jnp.isfinite(state.family.log_det) & jnp.isfinite(state.family.mean).all()
    return (state.growth > limit) | (state.narrowed > MOST_NARROWINGS) | ~finite


def _standing(state: Regression, tol: Any) -> Standing:
    """Where it stands; the one place, as it takes long to compile."""
    bound = state.bound
    return Standing(state.step, state.gap, bound, bound <= tol, _broken(state), state.narrowed)


_known = quickly_compiled(_standing)


@quickly_compiled
def stretch(
    state: Regression, target: Target, tol: Any, limit: Any
) -> tuple[Regression, Found, Standing]:
    """Up to `limit` batches, at least one; fewer where the fit is done."""
    dtype = state.family.dtype
    blank = jnp.full(STRETCH, jnp.nan, dtype)
    found = Found(blank, blank, blank, jnp.zeros(STRETCH, jnp.int32))
    infinite, no = jnp.full((), jnp.inf, dtype), jnp.zeros((), bool)
    unknown = Standing(state.step, infinite, infinite, no, no, state.narrowed)

    def goes_on(carry: tuple[Regression, Found, Standing, Int[Array, ""]]):
        _, _, now, taken = carry
        return (taken < limit) & ~(now.done | now.broken)

    def batch(carry: tuple[Regression, Found, Standing, Int[Array, ""]]):
        state, found, _, taken = carry
        state, seen = regression.advance(state, target)
        now = _standing(state, tol)
        number = jnp.maximum(seen.fine.sum(), 1)
        elbo = jnp.nanmean(seen.elbo)
        error = jnp.sqrt(jnp.nansum((seen.elbo - elbo) ** 2) / jnp.maximum(number - 1, 1) / number)
        new = Found(elbo, error, now.gap, jnp.sum(~seen.fine, dtype=jnp.int32))
        found = jax.tree.map(lambda old, one: old.at[taken].set(one), found, new)
        return state, found, now, taken + 1

    begun = (state, found, unknown, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(goes_on, batch, begun)[:3]


def fit_by_regression(state: Regression, target: Target, budget: Budget, watch: Watch) -> Posterior:
    """Stretches of batches from a state until the fit is done."""
    per_step = 2 * regression.num_pairs(state.family.dim)
    first = step = int(state.step)
    last = first + budget.num_steps
    tol = np.asarray(budget.tol, state.family.dtype)
    none = np.zeros(0)
    history, standing = [Found(none, none, none, none)], None
    limit, reason, rate = FIRST_STRETCH, None, 0.0
    if first:  # gone on with: it may be done already
        standing = jax.device_get(_known(state, tol))
        reason = _reason(standing, last, False)
    try:
        while reason is None:
            begun = time.perf_counter()
            limit = min(limit, last - step)
            after = stretch(state, target, tol, np.int32(limit))
            found, now = jax.device_get(after[1:])
            rows = Found(*(part[: now.step - step] for part in found))
            state, standing, step = after[0], now, int(now.step)
            history.append(rows)
            ended = time.perf_counter()
            if len(history) > 2:  # the first stretch may have been compiled
                rate = (ended - begun) / max(len(rows.elbo) * per_step, 1)
            deadline = budget.deadline_at(rate)
            told = Progress(
                step=step,
                num_steps=last,
                elbo=_latest(history[-1].elbo),
                elbo_se=_latest(history[-1].elbo_se),
                step_size=np.nan,
                family=state.family,
                seconds=watch.seconds,
                state=state,
                num_gradients=(step - first) * per_step,
                gap=float(standing.gap),
            )
            stopped = watch.tell(told)
            reason = _reason(standing, last, ended >= deadline)
            reason = reason or ("callback" if stopped else None)
            limit = _next_limit(limit, ended - begun, deadline - ended)
    except KeyboardInterrupt:
        reason = "interrupt"
    found = Found(*(np.concatenate(parts) for parts in zip(*history, strict=True)))
    return _posterior(state, standing, found, first, reason or "interrupt", watch.seconds)


def _latest(values: np.ndarray) -> Any:
    return values[-1] if len(values) else np.nan


def _reason(standing: Standing, last: int, is_late: bool) -> str | None:
    """Why the fit is over, if it is."""
    if standing.broken:
        return "failure"
    if standing.done:
        return "tol"
    if standing.step >= last:
        return "max_gradients"
    return "max_seconds" if is_late else None


def _next_limit(limit: int, took: float, left: float) -> int:
    """Batches of the next stretch: as many as fit into the time, at most twice those before."""
    affordable = limit * min(SECONDS, left) / max(took, 1e-6)
    return max(1, min(int(affordable), 2 * limit, STRETCH))


def _posterior(
    state: Regression,
    standing: Standing | None,
    found: Found,
    first: int,
    stopped_by: str,
    seconds: float,
) -> Posterior:
    per_step = 2 * regression.num_pairs(state.family.dim)
    steps = first + 1 + np.arange(len(found.elbo))
    gap = bound = np.inf
    if standing is not None and stopped_by != "failure":
        gap, bound = standing.gap, standing.bound
    none = np.zeros((), int)
    status = _status(standing, stopped_by)
    if status == Status.not_converged and _is_ill_conditioned(state):
        status = Status.inaccurate
    unsettled = status in (Status.not_converged, Status.inaccurate)
    best = state.trusted.family if unsettled else state.family
    log_det = 2 * np.linalg.slogdet(np.asarray(best.factor))[1]  # without what rounding did
    family = dataclasses.replace(best, log_det=jnp.asarray(log_det))
    return Posterior(
        family=family,
        elbo=jnp.asarray(_latest(found.elbo)),
        elbo_se=jnp.asarray(_latest(found.elbo_se)),
        status=status,
        trace=Trace(
            steps,
            found.elbo,
            found.elbo_se,
            np.full(len(steps), np.nan),
            (steps - first) * per_step,
            np.where(np.isfinite(found.gap), found.gap, np.nan),
        ),
        refused=none,
        limited=none,
        halvings=none,
        excluded=np.asarray(2 * found.excluded.sum(), int),
        num_steps=first + len(steps),
        num_gradients=len(steps) * per_step,
        seconds=seconds,
        state=state,
        stopped_by=stopped_by,
        gap_estimate=float(gap) if np.isfinite(gap) else np.nan,
        gap_bound=float(bound) if np.isfinite(bound) else np.nan,
    )


def _is_ill_conditioned(state: Regression) -> bool:
    """Whether correlations of q are beyond what numbers of its precision resolve."""
    factor = np.asarray(state.family.factor, np.float64)
    if not np.isfinite(factor).all():
        return True
    correlations = factor / np.maximum(np.linalg.norm(factor, axis=0), np.finfo(float).tiny)
    eps = float(jnp.finfo(state.family.dtype).eps)
    return bool(np.linalg.cond(correlations) ** 2 * eps > 1)


def _status(standing: Standing | None, stopped_by: str) -> Status:
    if stopped_by == "interrupt" or standing is None:
        return Status.interrupted
    if stopped_by == "failure":
        nowhere_finite = standing.narrowed > MOST_NARROWINGS
        return Status.nonfinite if nowhere_finite else Status.improper
    if not np.isfinite(standing.bound):
        return Status.not_converged
    return Status.ok if stopped_by in ("tol", "callback") else Status.out_of_budget

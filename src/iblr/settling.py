"""Families without settings: rounds of steps, each twice as long as the last, until none gains.

A round starts where the one before ended, with the family's own schedule of step sizes from its
beginning; that of a Gaussian keeps its longest step for a quarter of a round, so that a slow way is
walked for longer in every round. Once noise is what keeps q from the best member, averaging over
twice as many steps halves its gap, so that what a round gained on the one before, measured with the
same noise in both, is what is still missing. Where gains fall more slowly, by a factor r from round
to round, r / (1 - r) times as much is missing, and nobody knows how much where they do not fall.
The fit ends when that and 1.645 standard errors are below `tol` twice in a row: once could be a
saddle, such as the symmetric start of a skew Gaussian.

No member is better than q by more than KL(q || p), which the same draws tell. Where q is so near to
the target itself that this is below `tol`, one round is enough; but not to a mixture, whose best
member may well have the modes that draws of q never see.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from iblr.diagnostics import look
from iblr.estimators import Stl
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import AbstractFamily, Defaults, bold_steps
from iblr.families.gaussian import Gaussian
from iblr.families.mixture import GaussianMixture
from iblr.loop import State, init
from iblr.posterior import Posterior
from iblr.purposes import Purpose, key_for
from iblr.regression import num_pairs
from iblr.rounds import joined
from iblr.rule import improved_step
from iblr.status import Status
from iblr.steps import CHUNK, ELBO_DRAWS
from iblr.target import Target

CALM = 2
DRAWS = 500
RESERVE = 2 * DRAWS + ELBO_DRAWS  # evaluations kept back for the end of a round
MOST_BATCHES = 16
QUANTILE = 1.645  # of the normal distribution, at 95 %
LARGEST_DIVERGENCE = 0.1  # nats; of a larger one a few draws may decide
LARGEST_RATIO = 10.0  # nats above the mean of log p / q: beyond that one draw decides
CLEAR = 2.0  # standard errors of a gain that is more than noise


class PatientSteps(eqx.Module):
    """`bold_steps` of at most `largest` after a quarter of all steps, which are as long."""

    largest: Float[Array, ""]
    delay: Float[Array, ""]

    def __init__(self, largest: float, num_steps: int, dtype: Any):
        self.largest, self.delay = (jnp.asarray(x, dtype) for x in (largest, num_steps / 4))

    def __call__(self, step: ArrayLike) -> Float[Array, ""]:
        """t at a step."""
        return jnp.minimum(self.largest, bold_steps(jnp.maximum(step - self.delay, 0)))


def _defaults(family: AbstractFamily) -> Defaults:
    """Those of the family; for a full Gaussian as many pairs as its size asks for.

    With P pairs the estimated curvature has eigenvalues of d / P from noise alone.
    """
    if not isinstance(family, AbstractGaussian):
        return family.defaults
    is_full = isinstance(family, Gaussian)
    pairs = num_pairs(family.dim) if is_full else 8
    largest = min(0.5, 3 * pairs / family.dim) if is_full else 0.5
    schedule = lambda num_steps, pairs: PatientSteps(largest, num_steps, family.dtype)  # noqa: E731
    return Defaults(schedule, True, pairs)


class Settling(eqx.Module):
    """Where such a fit stands.

    Attributes:
        state: that of the round under way.
        length: its steps.
        reached: what the rounds before it reached.
        start: before all of them.
        bounds: on the gap after each of them, but the first.
        gain: of the last of them on the one before.
    """

    state: State
    length: int
    reached: Posterior | None
    start: AbstractFamily
    bounds: tuple[float, ...] = ()
    gain: "Gain | None" = None

    @property
    def family(self) -> AbstractFamily:
        """Where the round under way is."""
        return self.state.family


class Gain(NamedTuple):
    """Nats by which one member is better than another, its standard error, and its rounding."""

    value: float
    standard_error: float
    rounding: float = 0.0

    @property
    def is_clear(self) -> bool:
        """Whether it is more than noise."""
        return self.value > CLEAR * self.standard_error

    def missing_per_gain(self, before: "Gain | None") -> float:
        """What is still missing in units of this gain, by its ratio to the one before."""
        if before is None or not (before.is_clear and self.is_clear):
            return 1.0
        ratio = self.value / before.value
        return max(1.0, ratio / (1 - ratio)) if ratio < 1 else math.inf

    def gap(self, before: "Gain | None") -> "Gap":
        """What is still missing."""
        times = self.missing_per_gain(before)
        estimate = times * abs(self.value)
        return Gap(estimate, estimate + times * (QUANTILE * self.standard_error + self.rounding))


class Gap(NamedTuple):
    """Nats that are missing to the best member: an estimate, and what it is at most, at 95 %."""

    estimate: float
    bound: float


UNKNOWN = Gap(math.inf, math.inf)


class Looked(NamedTuple):
    """What draws at the end of a round tell.

    Attributes:
        gain: on the round before; None where there is none, or nobody needs it.
        divergence: KL(q || p) as a gap; unknown unless it is small.
        evaluations: of the target.
    """

    gain: Gain | None
    divergence: Gap
    evaluations: int


def begin(family: AbstractFamily, key: Key[Array, ""]) -> Settling:
    """Before the first round."""
    return Settling(init(family, key), _defaults(family).first_round, None, family)


def method(family: AbstractFamily, num_steps: int) -> dict[str, Any]:
    """Keywords of `iblr.step` for a round."""
    defaults = _defaults(family)
    return {
        "estimator": Stl(pairs=defaults.pairs),
        "step_size": defaults.step_size(num_steps, defaults.pairs),
        "momentum": None,
        "trust_region": defaults.trust_region,
        "rule": improved_step,
    }


def cost(family: AbstractFamily, steps: int) -> int:
    """Evaluations of the target by a round."""
    each = method(family, steps)["estimator"].num_gradients(family)
    return steps * each + math.ceil(steps / CHUNK) * ELBO_DRAWS


def first_cost(family: AbstractFamily) -> int:
    """Those of the first round, and what is kept back in it."""
    return cost(family, _defaults(family).first_round) + RESERVE


def settle(
    run: Callable[[State, dict, int], Posterior],
    now: Settling,
    target: Target,
    tol: float,
    max_gradients: int,
    key: Key[Array, ""],
) -> Posterior:
    """Rounds of `run`, which takes a number of steps with a method unless it is stopped."""
    spent = 0
    while True:
        options = method(now.state.family, now.length)
        per_step = options["estimator"].num_gradients(now.state.family) + ELBO_DRAWS / CHUNK
        left = max_gradients - spent - RESERVE
        steps = min(now.length, int(now.state.step) + max(int(left // per_step), 1))
        last = run(now.state, options, steps)
        whole = joined(now.reached, last)
        whole = dataclasses.replace(whole, state=dataclasses.replace(now, state=last.state))
        if last.stopped_by != "num_steps" or steps < now.length:
            ended = last.stopped_by if last.stopped_by != "num_steps" else "max_gradients"
            return dataclasses.replace(_before_the_cut(now.reached, whole), stopped_by=ended)
        after = max_gradients - whole.num_gradients
        ahead = cost(last.family, 2 * now.length) + RESERVE
        after = min(after - ahead if after > ahead else after, cost(last.family, now.length))
        batches = after // (2 * DRAWS)  # what a look costs more than a round tells less than one
        before = None if now.reached is None else now.reached.family
        try:
            seen = _look(target, before, last.family, key, now.length, tol, batches)
        except KeyboardInterrupt:
            return dataclasses.replace(whole, status=Status.interrupted, stopped_by="interrupt")
        by_gain = UNKNOWN if seen.gain is None else seen.gain.gap(now.gain)
        gap = min(by_gain, seen.divergence, key=lambda gap: gap.bound)
        whole = dataclasses.replace(
            whole,
            gap_estimate=gap.estimate if math.isfinite(gap.estimate) else math.nan,
            gap_bound=gap.bound if math.isfinite(gap.bound) else math.nan,
            num_gradients=whole.num_gradients + seen.evaluations,
        )
        bounds = now.bounds if before is None else (*now.bounds, by_gain.bound)
        settled = len(bounds) >= CALM and max(bounds[-CALM:]) <= tol
        if settled or seen.divergence.bound <= tol:
            return dataclasses.replace(whole, stopped_by="tol")
        spent = whole.num_gradients
        if max_gradients - spent < cost(last.family, 2 * now.length) + RESERVE:
            return dataclasses.replace(whole, stopped_by="max_gradients")
        fresh = init(last.family, jax.random.fold_in(key_for(key, Purpose.ROUND), now.length))
        now = Settling(fresh, 2 * now.length, whole, now.start, bounds, seen.gain)


def _before_the_cut(reached: Posterior | None, whole: Posterior) -> Posterior:
    """A fit whose last round was cut short: with what the rounds before reached.

    A round begins with long steps, and only its end is better than the end of the one before.
    """
    if reached is None:
        return whole
    return dataclasses.replace(
        whole,
        family=reached.family,
        elbo=reached.elbo,
        elbo_se=reached.elbo_se,
        gap_estimate=reached.gap_estimate,
        gap_bound=reached.gap_bound,
    )


def _look(
    target: Target,
    before: AbstractFamily | None,
    after: AbstractFamily,
    key: Key[Array, ""],
    length: int,
    tol: float,
    batches: int,
) -> Looked:
    """From as many draws as it takes to tell the gain from `tol`, or to a quarter of that."""
    key = jax.random.fold_in(key_for(key, Purpose.GAIN), length)
    ratios, gains, evaluations, largest = np.zeros(0), np.zeros(0), 0, 0.0
    while True:
        part = jax.random.fold_in(key, len(ratios) // DRAWS)
        new, size = _log_ratios(target, after, part)
        largest = np.fmax(largest, float(size))
        ratios, evaluations = np.append(ratios, np.asarray(new, np.float64)), evaluations + DRAWS
        rounding = float(jnp.finfo(after.dtype).eps) * largest / math.sqrt(len(ratios))
        divergence = UNKNOWN if _has_mixture(after) else _divergence(ratios, rounding)
        if before is None or divergence.bound <= tol:
            return Looked(None, divergence, evaluations)
        old = np.asarray(_log_ratios(target, before, part)[0], np.float64)
        gains, evaluations = np.append(gains, new - old), evaluations + DRAWS
        values = gains[np.isfinite(gains)]
        count = max(len(values), 2)
        error = float(values.std() / np.sqrt(count - 1)) if len(values) else np.inf
        mean = float(values.mean()) if len(values) else np.inf
        told = error <= tol / 4 or abs(mean) - QUANTILE * error > tol
        done = len(ratios) >= DRAWS * min(MOST_BATCHES, batches)
        if told or done or not len(values):
            return Looked(Gain(mean, error, rounding), divergence, evaluations)


def _has_mixture(family: AbstractFamily) -> bool:
    is_mixture = lambda part: isinstance(part, GaussianMixture)  # noqa: E731
    return any(map(is_mixture, jax.tree.leaves(family, is_leaf=is_mixture)))


@eqx.filter_jit
def _log_ratios(
    target: Target, family: AbstractFamily, key: Key[Array, ""]
) -> tuple[Float[Array, " n"], Float[Array, ""]]:
    """log p - log q at draws, of the same noise for the same key, and the largest of both."""
    seen = look(target, family, key, DRAWS)
    log_p = seen.sampled + seen.prior
    largest = jnp.maximum(jnp.abs(log_p), jnp.abs(seen.log_q))
    return log_p - seen.log_q, jnp.nanmax(jnp.where(jnp.isfinite(largest), largest, jnp.nan))


def _divergence(log_ratios: Float[np.ndarray, " n"], rounding: float) -> Gap:
    """KL(q || p) = log E[p / q] - E[log p / q], with what rounding may hide."""
    if not np.isfinite(log_ratios).all():
        return UNKNOWN
    centred = log_ratios - log_ratios.mean()
    if centred.max() > LARGEST_RATIO:
        return UNKNOWN
    weights = np.exp(centred)
    value = math.log(weights.mean())
    error = np.sqrt(np.sum((weights / weights.mean() - 1 - centred) ** 2)) / len(weights)
    bound = value + QUANTILE * float(error) + rounding
    return Gap(value, bound) if bound <= LARGEST_DIVERGENCE else UNKNOWN

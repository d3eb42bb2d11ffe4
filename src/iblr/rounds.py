"""Fits of a mixture that adapts its size: rounds of steps, components deleted and added in between.

A round is a fit of its own, with all its steps and its own schedule. After it negligible components
are deleted and the ELBO is taken from many draws; a round that did not raise it is undone, and the
second in a row ends the fit. The number of components doubles from round to round, to powers of
two, so that programs are compiled for few sizes. In a batch of runs all have the same number, that
of the run which needs most, and the ELBO of the best run counts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from iblr.diagnostics import Elbo, elbo
from iblr.families.base import AbstractFamily
from iblr.families.mixture import GaussianMixture
from iblr.families.mixture_growth import CANDIDATES, NEGLIGIBLE_WEIGHT
from iblr.loop import State, init
from iblr.posterior import COUNTS, Posterior, Trace
from iblr.purposes import Purpose, key_for
from iblr.status import Status
from iblr.target import Target

ELBO_DRAWS = 4096
GROWTH_DRAWS = 3 * CANDIDATES
LEAST_GAIN = 0.01
PATIENCE = 1


class Rounds(eqx.Module):
    """Where a fit in rounds stands: the round under way, what was reached before, the start."""

    state: State
    reached: Posterior | None
    start: AbstractFamily
    failures: int = 0

    @property
    def family(self) -> Any:
        """Where the round under way is."""
        return self.state.family

    def __getitem__(self, run: int) -> "Rounds":
        """That of one run of a batch."""
        reached = None if self.reached is None else self.reached[run]
        start = jax.tree.map(lambda leaf: leaf[run], self.start)
        return Rounds(self.state[run], reached, start, self.failures)


def fit_in_rounds(
    run: Callable[[State], Posterior],
    now: State | Rounds,
    target: Target,
    num_steps: int,
    rule: Callable,
    least_gain: float,
) -> Posterior:
    """Rounds of `run`, which takes `num_steps` steps by `rule` unless it is stopped."""
    rounds = _resumed(now) if isinstance(now, Rounds) else Rounds(now, None, now.family)
    while True:
        last = run(rounds.state)
        stopped = last.stopped_by != "num_steps" or last.num_steps < num_steps
        try:
            after = last if stopped else _refined(last, target)
            kept, better = _judged(rounds.reached, after, least_gain)
            failures = 0 if better else rounds.failures + 1
            more = _room(kept)
            hopeless = failures > PATIENCE or not np.any(kept.status == Status.ok)
            if stopped or more < 1 or hopeless:
                return dataclasses.replace(
                    kept, state=dataclasses.replace(rounds, state=last.state)
                )
            grown = _grown(kept.family, last.state, target, more, rule)
            rounds = Rounds(grown, kept, rounds.start, failures)
        except KeyboardInterrupt:  # the state is that before this round, which is taken again
            last = joined(rounds.reached, last)
            status = jax.tree.map(jnp.full_like, last.status, Status.interrupted)
            return dataclasses.replace(last, status=status, state=rounds, stopped_by="interrupt")


def _resumed(rounds: Rounds) -> Rounds:
    return dataclasses.replace(rounds, reached=without_counts(rounds.reached))


def without_counts(reached: Posterior | None) -> Posterior | None:
    """With the counts of an earlier call at zero; the number of steps is that since the start."""
    if reached is None:
        return None
    zeros = {name: np.zeros_like(getattr(reached, name)) for name in COUNTS}
    trace = Trace(*(values[:0] for values in reached.trace))
    return dataclasses.replace(reached, trace=trace, num_gradients=0, **zeros)


def _judged(
    before: Posterior | None, after: Posterior, least_gain: float
) -> tuple[Posterior, bool]:
    """The better of both with the history of both, and whether the later one is."""
    whole = joined(before, after)
    if before is None or _gains(before, after, least_gain):
        return whole, True
    interrupted = np.any(after.status == Status.interrupted)
    return dataclasses.replace(
        whole,
        family=before.family,
        elbo=before.elbo,
        elbo_se=before.elbo_se,
        status=after.status if interrupted else before.status,
    ), False


def _room(posterior: Posterior) -> int:
    """Components to add: up to the power of two that is twice as many or next to it."""
    mixture: Any = posterior.family
    size = mixture.num_components
    return min(2 ** math.ceil(math.log2(2 * size)), mixture.growth.most) - size


def _gains(before: Posterior, after: Posterior, least_gain: float) -> bool:
    """Whether the best run rose, by what matters and by what its noise allows to say."""
    (old, old_se), (new, new_se) = _best(before), _best(after)
    return new - old >= max(least_gain, 2 * math.hypot(old_se, new_se))


def _best(posterior: Posterior) -> tuple[float, float]:
    """The ELBO of the best run, and its standard error."""
    values = np.nan_to_num(np.atleast_1d(posterior.elbo), nan=-np.inf, posinf=-np.inf)
    best = int(values.argmax())
    return float(values[best]), float(np.nan_to_num(np.atleast_1d(posterior.elbo_se)[best]))


def _refined(posterior: Posterior, target: Target) -> Posterior:
    """Without negligible components, and with an ELBO fit to be compared."""
    mixture: Any = posterior.family
    counts = (mixture.weights >= NEGLIGIBLE_WEIGHT).sum(-1)
    num = max(int(np.max(counts)), 1)
    family, estimate = _pruned(mixture, posterior.state, target, num)
    return dataclasses.replace(
        posterior, family=family, elbo=estimate.value, elbo_se=estimate.standard_error
    )


@eqx.filter_jit
def _pruned(
    family: GaussianMixture, state: State, target: Target, num: int
) -> tuple[GaussianMixture, Elbo]:
    def one_run(family: GaussianMixture, key: Any):
        family = family.heaviest(num)
        return family, elbo(target, family, key_for(key, Purpose.ELBO), draws=ELBO_DRAWS)

    return _over_runs(one_run, family, state)


@eqx.filter_jit
def _grown(family: Any, state: State, target: Target, num: int, rule: Callable) -> State:
    def one_run(family: GaussianMixture, key: Any):
        grown = family.grown(target, key_for(key, Purpose.GROWTH), num)
        return init(grown, key_for(key, Purpose.ROUND), rule)

    return _over_runs(one_run, family, state)


def _over_runs(function: Callable, family: GaussianMixture, state: State) -> Any:
    return (jax.vmap(function) if state.key.ndim else function)(family, state.key)


def joined(before: Posterior | None, after: Posterior) -> Posterior:
    """The later posterior with the history of both."""
    if before is None:
        return after
    sums = {name: np.asarray(getattr(before, name) + getattr(after, name)) for name in COUNTS}
    spent = before.trace.num_gradients[-1] if len(before.trace.step) else 0
    later = after.trace._replace(
        step=after.trace.step + before.num_steps, num_gradients=after.trace.num_gradients + spent
    )
    trace = Trace(*(np.concatenate(pair) for pair in zip(before.trace, later, strict=True)))
    return dataclasses.replace(
        after,
        trace=trace,
        num_steps=before.num_steps + after.num_steps,
        num_gradients=before.num_gradients + after.num_gradients,
        **sums,
    )

"""Steps with a given method: chunks of them as one compiled program, with a look at the ELBO.

The noise of step k is a function of (key, k) alone, so chunks, interrupts and resumptions do not
change the bits of a run.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from iblr.diagnostics import elbo
from iblr.history import History, Progress, Report, Watch
from iblr.loop import State, step
from iblr.posterior import Posterior
from iblr.purposes import Purpose, key_for
from iblr.status import Status
from iblr.target import Target

CHUNK = 100
ELBO_DRAWS = 200
REFRESH_UP_TO = 2048


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
        key = key_for(jax.random.fold_in(state.key, state.step), Purpose.ELBO)
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


def take_steps(
    now: State,
    target: Target,
    options: dict,
    num_steps: int,
    *,
    chunk_size: int,
    elbo_draws: int,
    watch: Watch,
) -> Posterior:
    """Chunks of steps from a state up to `num_steps`, an interrupt, or the callback's word.

    Args:
        now: the state; with leading axes for a batch of runs.
        target: what to fit.
        options: keywords of `iblr.step`.
        num_steps: steps since the start of the run.
        chunk_size: steps between two looks at the ELBO.
        elbo_draws: draws for each of those looks.
        watch: is told after every chunk.
    """
    step_size = options["step_size"]
    batched = now.step.ndim > 0
    history = History(now.family, int(jnp.max(now.step)), batched)
    per_step = options["estimator"].num_gradients(now.family)
    interrupted = stopped = False
    try:
        while history.step < num_steps and not stopped:
            span = jnp.asarray([history.step, num_steps], jnp.int32)
            after, report = _chunk(now, span, target, options, chunk_size, elbo_draws, batched)
            now = jax.block_until_ready(after)
            done = min(history.step + chunk_size, num_steps)
            t = float(jnp.asarray(step_size(done - 1) if callable(step_size) else step_size))
            spent = (done - history.first_step) * per_step
            history.add(done, t, report, now.family, spent)
            elbo_now, seconds = (history.elbo, history.elbo_se), watch.seconds
            told = Progress(done, num_steps, *elbo_now, t, now.family, seconds, now, spent)
            stopped = watch.tell(told) or history.hopeless
    except KeyboardInterrupt:
        interrupted = True
    stopped_by = "num_steps"
    if interrupted or history.hopeless:
        stopped_by = "interrupt" if interrupted else "failure"
    elif stopped:
        stopped_by = "callback"
    return history.posterior(
        now.family,
        now,
        interrupted,
        (history.step - history.first_step) * per_step,
        watch.seconds,
        stopped_by,
    )

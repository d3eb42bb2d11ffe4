"""How fits without settings end and go on: budgets, time, callbacks, interrupts, states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from automatic_helpers import KEY, curved, fit, separable
from helpers import assert_same_bits, no_type_hook, slow

import iblr
from iblr import Status, automatic, judging, regression, unattended
from iblr.history import ProgressLine, Watch


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.mark.parametrize("limit", [500, 1200])
def test_a_budget_of_gradients_is_kept(limit):
    posterior = fit(max_gradients=limit, tol=1e-5)
    assert posterior.stopped_by == "max_gradients" and posterior.num_gradients <= limit
    assert posterior.status == Status.out_of_budget or np.isnan(posterior.gap_bound)
    assert posterior.num_gradients > 0.5 * limit


@pytest.mark.parametrize("limit", [slow(460), 800, slow(3000)])
def test_a_budget_is_kept_where_a_widened_gaussian_asks_for_a_look_along_its_axes(limit):
    calls, widths = [], jnp.array([2e4, 3e4, 4e4, 5e4, 1.0])

    def wide(z):
        jax.debug.callback(lambda _: calls.append(1), z[0])
        return -0.5 * ((z / widths) ** 2).sum()

    posterior = fit(wide, init=jnp.zeros(5), max_gradients=limit, tol=1e-9, throw=False)
    jax.effects_barrier()
    assert len(calls) == posterior.num_gradients <= limit
    assert posterior.status != Status.improper


def test_a_budget_that_is_too_small_to_see_anything_is_refused():
    with pytest.raises(
        ValueError, match=r"`fit\(max_gradients=...\)` is too small for a Gaussian over 2.*\d"
    ):
        fit(max_gradients=50)


def test_a_budget_may_be_a_number_of_numpys(fitted):
    with no_type_hook():
        assert fit(max_gradients=np.int64(3000)).num_gradients <= 3000


def test_a_budget_does_not_go_with_settings():
    with pytest.raises(ValueError, match=r"`fit\(max_seconds=1.0\)` ends a fit without settings"):
        fit(num_steps=10, max_seconds=1.0)


def test_a_budget_of_time_is_kept(fitted):  # and has compiled
    posterior = fit(tol=1e-7, max_seconds=0.5, max_gradients=10**9)
    assert posterior.stopped_by == "max_seconds" and posterior.seconds < 5


def test_time_is_left_for_the_verdict():
    budget = automatic.Budget(0.01, 100, started=10.0, deadline=20.0, spare=1000)
    assert budget.deadline_at(1e-3) == 19.0 and budget.deadline_at(1.0) == 15.0
    assert budget._replace(deadline=np.inf).deadline_at(1.0) == np.inf


def test_compiling_is_not_taken_for_the_price_of_the_verdict(monkeypatch):
    """The first stretch does not count, in which the program is compiled."""
    now, stretch, target = [0.0], automatic.stretch, iblr.Target(curved)

    def on_a_clock(*arguments):
        now[0] += 12.0 if now[0] == 0 else 1e-3
        return stretch(*arguments)

    monkeypatch.setattr(automatic, "stretch", on_a_clock)
    monkeypatch.setattr(automatic.time, "perf_counter", lambda: now[0])
    budget = automatic.Budget(0.01, 1000, started=0.0, deadline=20.0, spare=1000)
    watch = Watch(None, ProgressLine(False), 0.0)
    state = regression.begin(iblr.Gaussian.standard(2), KEY)
    assert automatic.fit_by_regression(state, target, budget, watch).stopped_by == "tol"


def test_a_fit_that_did_not_settle_says_so():
    far = fit(init=jnp.array([60.0, -1e5]), max_gradients=420)
    assert far.stopped_by == "max_gradients" and far.status == Status.not_converged
    assert far.verdict.startswith("Bad") and np.isnan(far.gap_bound)
    assert_same_bits(far.family.mean, far.state.trusted.family.mean)


def test_the_same_key_gives_the_same_bits_wherever_stretches_end(fitted, monkeypatch):
    monkeypatch.setattr(automatic, "FIRST_STRETCH", 1)
    monkeypatch.setattr(automatic, "SECONDS", 1e-9)  # one batch at a time
    assert_same_bits(fit().state, fitted.state)


def test_a_fit_stopped_by_a_callback_goes_on_with_the_same_bits(fitted):
    part = fit(callback=lambda told: told.num_gradients > 40)
    assert part.stopped_by == "callback" and part.num_steps < fitted.num_steps
    assert part.status == Status.not_converged and "did not settle" in part.verdict
    whole = fit(state=part.state)
    assert_same_bits(whole.state, fitted.state)
    assert whole.num_steps == fitted.num_steps and whole.num_gradients < fitted.num_gradients


def test_a_target_is_tried_where_a_state_goes_on(fitted):
    part = fit(callback=lambda told: told.num_gradients > 40)
    nowhere = iblr.Gaussian.from_covariance(jnp.full(2, 200.0), jnp.eye(2))  # exp overflows there
    again = iblr.fit(curved, nowhere, state=part.state, key=KEY)
    assert_same_bits(again.state, fitted.state)


def test_the_states_of_a_batch_are_resumed_one_by_one():
    with pytest.raises(ValueError, match="resume its runs one by one"), no_type_hook():
        fit(state=(1, 2), key=jax.random.split(KEY, 2))


def test_a_state_needs_no_other_start(fitted):
    part = fit(callback=lambda told: told.num_gradients > 40)
    assert_same_bits(iblr.fit(curved, state=part.state, key=KEY).state, fitted.state)


def test_an_interrupt_returns_what_was_reached():
    def interrupt(told):
        if told.step > 8:
            raise KeyboardInterrupt

    posterior = fit(callback=interrupt)
    assert posterior.stopped_by == "interrupt" and posterior.status == Status.interrupted
    assert posterior.num_steps > 8 and posterior.diagnosis is None
    assert_same_bits(fit(state=posterior.state).state, fit().state)


def test_an_interrupt_during_the_verdict_keeps_the_fit(fitted, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "look_around", interrupt)
    posterior = fit()
    assert posterior.stopped_by == "interrupt" and posterior.status == Status.interrupted
    assert_same_bits(posterior.state, fitted.state)
    assert posterior.verdict.startswith("Bad: the fit did not end well, interrupted")
    assert str(posterior).startswith(posterior.verdict) and posterior


def test_an_interrupt_while_rays_are_followed_keeps_the_fit(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "has_endless_ridge", interrupt)
    posterior = fit(separable, max_gradients=4000)
    assert posterior.stopped_by == "interrupt" and posterior.num_gradients > 2000


def test_an_interrupt_while_results_are_fetched_leaves_whole_rows(monkeypatch):
    fetch, stretches = jax.device_get, []

    def interrupt(x):
        stretches.extend([x] if isinstance(x[-1], automatic.Standing) else [])
        if len(stretches) == 2:
            raise KeyboardInterrupt
        return fetch(x)

    monkeypatch.setattr(automatic.jax, "device_get", interrupt)
    posterior = fit(tol=1e-5)
    per_batch = 2 * regression.num_pairs(2)
    assert posterior.stopped_by == "interrupt"
    assert posterior.num_steps == len(posterior.trace.step) == int(posterior.state.step) == 4
    assert posterior.trace.num_gradients[-1] == 4 * per_batch


def test_an_interrupt_after_a_failure_leaves_it_one(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(unattended, "named_if_improper", interrupted)
    fitted = fit(lambda z: z.sum(), throw=False)
    assert fitted.status == Status.improper and fitted.stopped_by == "failure"

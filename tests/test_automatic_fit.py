"""Fits without settings: what they reach, count, promise, refuse, and say of themselves."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import agrees, assert_same_bits, no_type_hook, slow

import iblr
from iblr import Status, automatic, climbs, regression, settling, starts, unattended, verdict
from iblr.families.base import bold_steps
from iblr.history import Progress, ProgressLine, Watch
from iblr.improper import has_endless_ridge
from iblr.regression import machine, radial
from iblr.regression.finish import finish
from iblr.regression.pairs import Look, Pairs, Whitened, look

KEY = jax.random.key(0)


def curved(z):
    """The logarithms of exponential numbers: the best Gaussian is N(-1/2, I)."""
    return (z - jnp.exp(z)).sum()


def gap(q):
    m, v = np.asarray(q.mean, float), np.diag(np.asarray(q.covariance, float))
    elbo = (m - np.exp(m + v / 2)).sum() + 0.5 * np.linalg.slogdet(np.asarray(q.covariance, float))[
        1
    ]
    return -1.5 * len(m) - elbo


def fit(target=curved, **options):
    return iblr.fit(target, **({"init": jnp.zeros(2), "key": KEY} | options))


@pytest.fixture(scope="module")
def fitted():
    return fit()


def test_it_stops_by_itself_within_the_bound(fitted):
    assert fitted.stopped_by == "tol" and fitted.status == Status.ok
    assert 0 < fitted.gap_estimate <= fitted.gap_bound <= 0.01
    assert 0 <= gap(fitted.family) <= fitted.gap_bound
    np.testing.assert_allclose(fitted.mean, -0.5, atol=0.1)
    np.testing.assert_allclose(fitted.standard_deviation, 1.0, atol=0.1)


def test_the_elbo_and_the_evidence_are_those_of_the_target(fitted):
    exact = -1.5 * 2 + 1 + np.log(2 * np.pi)  # the entropy of N(-1/2, I) included
    assert abs(fitted.elbo - exact) < 5 * fitted.elbo_se + 0.01
    assert abs(fitted.log_evidence) < 5 * fitted.log_evidence_se + 0.05  # the integral is 1


def test_the_summary_says_why_it_ended_and_what_was_found(fitted):
    said = str(fitted).split("\n")
    assert said[0] == fitted.verdict
    assert f"Stopped by tol, at most {fitted.gap_bound:.2g} nats below the best Gaussian" in said[3]
    assert f"Log evidence {fitted.log_evidence:.4f} ± {fitted.log_evidence_se:.4f}." in said[3]


def test_a_smaller_tolerance_takes_more_gradients_and_is_kept(fitted):
    closer = fit(tol=0.003)
    assert closer.num_gradients > fitted.num_gradients
    assert gap(closer.family) <= closer.gap_bound <= 0.003


def test_the_trace_counts_gradients_and_has_the_gap(fitted):
    spent, known = fitted.trace.num_gradients, np.isfinite(fitted.trace.gap)
    per_batch = 2 * regression.num_pairs(2)
    np.testing.assert_array_equal(spent, per_batch * np.arange(1, len(spent) + 1))
    assert not known[0] and known[-1] and fitted.trace.gap[-1] == np.float32(fitted.gap_estimate)
    assert spent[-1] < fitted.num_gradients


def test_every_evaluation_of_the_target_counts():
    calls = []

    def counting(z):
        jax.debug.callback(lambda _: calls.append(1), z[0])
        return curved(z)

    posterior = fit(counting, tol=0.1)
    jax.effects_barrier()
    assert len(calls) == posterior.num_gradients


def compilations(call):
    seen = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return seen


def test_a_second_fit_compiles_nothing(fitted):
    assert compilations(lambda: fit(key=jax.random.key(1))) == []
    assert compilations(lambda: jax.jit(lambda x: x + 3.25)(1.0))  # one that is seen


def test_a_second_fit_with_minibatches_compiles_nothing():
    rows = jax.random.normal(KEY, (50, 2))
    likelihood = lambda z, rows: -0.5 * ((rows - z) ** 2).sum()  # noqa: E731
    target = iblr.Target(log_likelihood=likelihood, data=rows, batch_size=5)
    options = {"max_gradients": 600, "throw": False}
    fit(target, **options)
    assert compilations(lambda: fit(target, key=jax.random.key(1), **options)) == []


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


def test_an_interrupt_returns_what_was_reached():
    def interrupt(told):
        if told.step > 8:
            raise KeyboardInterrupt

    posterior = fit(callback=interrupt)
    assert posterior.stopped_by == "interrupt" and posterior.status == Status.interrupted
    assert posterior.num_steps > 8 and posterior.diagnosis is None
    assert_same_bits(fit(state=posterior.state).state, fit().state)


@pytest.mark.parametrize("limit", [500, 1200])
def test_a_budget_of_gradients_is_kept(limit):
    posterior = fit(max_gradients=limit, tol=1e-5)
    assert posterior.stopped_by == "max_gradients" and posterior.num_gradients <= limit
    assert posterior.status == Status.out_of_budget or np.isnan(posterior.gap_bound)
    assert posterior.num_gradients > 0.5 * limit


@pytest.mark.parametrize("limit", [460, 800, 3000])
def test_a_budget_is_kept_where_a_widened_gaussian_asks_for_a_look_along_its_axes(limit):
    calls, widths = [], jnp.array([2e4, 3e4, 4e4, 5e4, 1.0])

    def wide(z):
        jax.debug.callback(lambda _: calls.append(1), z[0])
        return -0.5 * ((z / widths) ** 2).sum()

    posterior = fit(wide, init=jnp.zeros(5), max_gradients=limit, tol=1e-9, throw=False)
    jax.effects_barrier()
    assert len(calls) == posterior.num_gradients <= limit
    assert posterior.status != Status.improper


@pytest.mark.parametrize("width", [1e6, 1e7])
def test_a_wide_target_is_not_called_improper_on_the_way_to_it(width):
    wide = lambda z: -0.5 * (z[0] / width) ** 2 - 0.5 * z[1] ** 2  # noqa: E731
    assert fit(wide, max_gradients=600).status == Status.not_converged
    assert fit(wide).verdict.startswith("Good")


def test_a_budget_that_is_too_small_to_see_anything_is_refused():
    with pytest.raises(
        ValueError, match=r"`fit\(max_gradients=...\)` is too small for a Gaussian over 2.*\d"
    ):
        fit(max_gradients=50)


def test_a_budget_of_time_is_kept(fitted):  # and has compiled
    posterior = fit(tol=1e-7, max_seconds=0.5, max_gradients=10**9)
    assert posterior.stopped_by == "max_seconds" and posterior.seconds < 5


@pytest.mark.parametrize(
    "options, says",
    [
        ({"tol": None}, r"`fit\(tol=...\)` must be a positive number, but got None"),
        ({"tol": float("inf")}, "must be a positive number"),
        ({"tol": True}, "must be a positive number"),
        ({"max_seconds": 0}, "must be a positive number"),
        ({"key": jax.random.split(KEY, 0)}, "needs at least one key"),
        ({"callback": 3}, r"`fit\(callback=...\)` needs a function"),
        ({"family": 3, "init": iblr.Gaussian.standard(2)}, "needs the class of a family"),
        ({"family": jnp.zeros(2), "init": None, "support": iblr.positive}, "needs a family"),
    ],
)
def test_bad_arguments_are_refused_in_words(options, says):
    with no_type_hook(), pytest.raises(ValueError, match=says):
        fit(**options)


def test_a_budget_may_be_a_number_of_numpys(fitted):
    with no_type_hook():
        assert fit(max_gradients=np.int64(3000)).num_gradients <= 3000


def test_a_budget_does_not_go_with_settings():
    with pytest.raises(ValueError, match=r"`fit\(max_seconds=1.0\)` ends a fit without settings"):
        fit(num_steps=10, max_seconds=1.0)


def test_an_interrupt_during_the_verdict_keeps_the_fit(fitted, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(unattended, "look_around", interrupt)
    posterior = fit()
    assert posterior.stopped_by == "interrupt" and posterior.status == Status.interrupted
    assert_same_bits(posterior.state, fitted.state)
    assert posterior.verdict.startswith("Bad: the fit did not end well, interrupted")
    assert str(posterior).startswith(posterior.verdict) and posterior


def test_an_interrupt_while_rays_are_followed_keeps_the_fit(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(unattended, "has_endless_ridge", interrupt)
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


def test_a_second_look_keeps_the_modes_that_were_found():
    posterior = fit(two_modes, init=jnp.full(1, 8.0))
    again = iblr.diagnose(posterior, two_modes, key=jax.random.key(5), draws=2000)
    assert posterior.verdict.startswith("Bad: another region")
    assert again.verdict.startswith("Bad: another region")
    assert again.diagnosis.climbs == posterior.diagnosis.climbs and again.diagnosis.modes


def test_a_fit_works_while_nans_are_hunted(fitted):
    with jax.debug_nans(True):
        assert_same_bits(fit().state, fitted.state)


def test_starts_that_cannot_be_computed_with_are_refused():
    with jax.enable_x64(True):
        precise = iblr.Gaussian.standard(2)
    with pytest.raises(ValueError, match="start in float64, but float64 is switched off"):
        iblr.fit(curved, precise, key=KEY)
    nowhere = dataclasses.replace(iblr.Gaussian.standard(2), mean=jnp.full(2, jnp.nan))
    with pytest.raises(ValueError, match="parameters that are nan"):
        iblr.fit(curved, nowhere, key=KEY)
    flat = iblr.Gaussian.standard(2)
    flat = dataclasses.replace(flat, factor=flat.factor.at[1].set(0))
    with pytest.raises(ValueError, match="covariance is positive definite"):
        iblr.fit(curved, flat, key=KEY)


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


def test_a_fit_that_did_not_settle_says_so():
    far = fit(init=jnp.array([60.0, -1e5]), max_gradients=420)
    assert far.stopped_by == "max_gradients" and far.status == Status.not_converged
    assert far.verdict.startswith("Bad") and np.isnan(far.gap_bound)
    assert_same_bits(far.family.mean, far.state.trusted.family.mean)


def test_a_batch_whose_gradients_are_too_large_to_square_is_not_used():
    steep = iblr.Target(lambda z: -1e24 * (z**2).sum())
    state = regression.begin(iblr.Gaussian.standard(2), KEY)
    after, found = eqx.filter_jit(machine.advance)(state, steep)
    assert bool(found.fine.all()) and int(after.narrowed) == 1
    np.testing.assert_allclose(after.family.factor, 0.5 * state.family.factor)


def test_fewer_pairs_leave_more_noise(fitted):
    """The mean over half of the pairs has twice the variance."""
    state = dataclasses.replace(fitted.state, noise=jnp.zeros(2))
    target = iblr.Target(lambda z: -jnp.log(jnp.cosh(z)).sum())

    def noises(step):
        found = look(state.family, target, KEY, step, jnp.zeros(2), 8)
        seen = found.seen
        half = jnp.arange(8)[:, None] % 2 == 0
        mean = seen.gradients[::2].mean(0)
        kept = jnp.where(half, seen.gradients, mean)
        fewer = Whitened(seen.noise * half, seen.excess * half, kept)
        return [finish(state, found.pairs, s, jnp.ones(()))[0].noise for s in (seen, fewer)]

    whole, fewer = (np.mean(x, axis=0) for x in jax.lax.map(jax.jit(noises), jnp.arange(400)))
    np.testing.assert_allclose(fewer / whole, 2, rtol=0.2)


# Targets that are none.


def separable(z):
    """Logistic regression with a flat prior on one direction, in which the data are separable."""
    along, across = z[0] + z[1], z[0] - z[1]
    return jax.nn.log_sigmoid(5 * along) + jax.nn.log_sigmoid(2 * along) - 0.5 * across**2


@pytest.mark.parametrize("improper", [separable, slow(lambda z: -jnp.exp(z).sum())])
def test_a_target_that_is_flat_on_one_side_is_named(improper):
    with pytest.raises(iblr.FitError, match="improper"):
        fit(improper)


def test_an_endless_ridge_is_told_from_a_wide_gaussian():
    first = jnp.ones(2)
    wide = iblr.Gaussian.from_covariance(jnp.zeros(2), 1e6 * jnp.array([[1.0, 0.9], [0.9, 1.0]]))
    tilted = iblr.Target(lambda z: jax.nn.log_sigmoid(z[0] + z[1]) - 1e-5 * (z[0] - z[1]) ** 2)
    rays = 2 * 2 * 2  # two axes of q and two of coordinates, both ways
    assert has_endless_ridge(tilted, first, wide) == (True, 3 * 6 * rays)
    assert has_endless_ridge(iblr.Target(wide.log_prob), first, wide) == (False, 3 * 6 * rays)
    student = iblr.Target(lambda z: -1.5 * jnp.log1p((z**2).sum() / 1e6))  # Cauchy's
    assert has_endless_ridge(student, first, wide) == (False, 3 * 6 * rays)
    assert has_endless_ridge(tilted, wide.variances, wide) == (False, 0)


def test_an_endless_ridge_is_followed_from_a_gaussian_that_is_off():
    """Rays of its axes leave the ridge, and Newton's steps with its precision fall short."""
    tilt, across = 2e-3, 1.3  # beside 1 / sqrt(2)
    axes = jnp.array([[1.0, 1.0 + tilt], [1.0 + tilt, -1.0]]) / jnp.sqrt(2 + 2 * tilt)
    covariance = (axes.T * jnp.array([2000.0, across]) ** 2) @ axes
    q = iblr.Gaussian.from_covariance(jnp.full(2, 4000.0), covariance)
    assert has_endless_ridge(iblr.Target(separable), jnp.ones(2), q)[0]
    proper = iblr.Target(lambda z: separable(z) - 0.5 * (z**2).sum() / 4000**2)
    assert not has_endless_ridge(proper, jnp.ones(2), q)[0]


def test_rounding_does_not_hide_an_endless_ridge():
    """At 3e8 a sum of two float32 numbers is off by 16."""
    data = jnp.linspace(2.0, 4.0, 20)
    target = lambda z: -0.5 * ((data - z[0] - z[1]) ** 2).sum()  # noqa: E731
    axes = jnp.array([[1.0, 1.0], [1.0, -1.0]]) / jnp.sqrt(2)
    factor = jnp.array([0.16, 3e5])[:, None] * axes
    log_det = 2 * jnp.log(0.16 * 3e5)
    q = eqx.tree_at(lambda q: (q.factor, q.log_det), iblr.Gaussian.standard(2), (factor, log_det))
    q = dataclasses.replace(q, mean=jnp.array([2.0, 1.0]))
    assert has_endless_ridge(iblr.Target(target), jnp.ones(2), q)[0]
    proper = iblr.Target(lambda z: target(z) - 0.5 * (z**2).sum() / 3e5**2)
    assert not has_endless_ridge(proper, jnp.ones(2), q)[0]


def test_an_improper_region_that_only_a_climb_has_found_is_named():
    """A Gaussian beside a plateau that begins five standard deviations away and never ends."""

    def plateau(z):
        far = -12.0 + jax.nn.log_sigmoid(z[0] - 5) - 0.5 * z[1] ** 2
        return jnp.logaddexp(-0.5 * (z**2).sum(), far)

    posterior = fit(plateau, throw=False)
    assert posterior.status == Status.improper and posterior.stopped_by == "failure"
    assert posterior.verdict.startswith("Bad") and np.isnan(posterior.gap_bound)
    np.testing.assert_allclose(posterior.mean, 0, atol=0.1)


def test_a_target_that_is_constant_on_a_support_is_refused():
    with pytest.raises(ValueError, match="over the real numbers that are mapped onto it"):
        fit(lambda z: -jnp.log(z["tau"]), init={"tau": 2.0}, support={"tau": iblr.positive})
    uniform = fit(lambda z: 0.0 * z, init=jnp.array(0.5), support=iblr.interval(0.0, 1.0), tol=0.1)
    assert abs(uniform.log_evidence) < 0.05


def test_draws_that_rounding_has_made_one_point_are_noticed():
    assert climbs.is_one_point(iblr.Gamma(jnp.array([1e-6]), 1.0), KEY)
    assert not climbs.is_one_point(iblr.Gamma.standard(2), KEY)
    assert not climbs.is_one_point(iblr.DiagonalGaussian.standard(50_000), KEY)  # in little memory


def test_an_improper_target_is_named():
    improper = lambda z: -0.5 * z[0] ** 2 + 0 * z[1]  # noqa: E731
    with pytest.raises(iblr.FitError, match="improper"):
        fit(improper)
    posterior = fit(improper, throw=False)
    assert posterior.status == Status.improper and posterior.stopped_by == "failure"
    assert posterior.verdict.startswith("Bad") and "improper" in str(posterior)
    assert bool(jnp.isfinite(posterior.family.mean).all())


@pytest.mark.parametrize(
    "target, init, says",
    [
        (lambda z: jnp.zeros(()), jnp.zeros(2), "the same everywhere it was tried"),
        (lambda z: jnp.round(z).sum(), jnp.zeros(2), "is not differentiable"),
        (lambda z: (z > 0).sum(), jnp.zeros(2), "is not differentiable"),
        (lambda z: -(z**2).sum(), jnp.zeros(0), "at least one number"),
        (lambda z: -(z**2).sum(), jnp.array([0.0, jnp.nan]), "must be a finite point"),
        (lambda z: -(z**2).sum(), None, "needs a start"),
        (lambda z: -(z**2).sum(), jnp.zeros(2, jnp.bfloat16), "float32 or float64.*bfloat16"),
        (lambda z: -(z**2).sum(), "abc", "needs numbers, a posterior or a family"),
        (lambda z: jnp.log(-1 - z[0] ** 2), jnp.zeros(2), "is not finite at the start"),
    ],
)
def test_bad_input_is_refused_at_once(target, init, says):
    with pytest.raises(ValueError, match=says):
        fit(target, init=init)


# Starts.


def test_a_warm_start_is_where_the_last_fit_ended(fitted):
    for start in (fitted, fitted.family):
        assert starts.starting_family(None, start, None) is fitted.family
    laplace = iblr.laplace(curved, init=jnp.ones(2), key=KEY)
    assert starts.starting_family(None, laplace, None) is laplace.family
    np.testing.assert_allclose(laplace.family.mean, 0, atol=1e-3)
    again = fit(init=laplace, tol=0.1)
    assert gap(again.family) < 0.1


def test_a_pytree_on_supports_is_a_start():
    def log_density(z):  # tau is log-normal
        return -0.5 * (jnp.log(z["tau"]) - 1) ** 2 - jnp.log(z["tau"]) - 0.5 * (z["w"] ** 2).sum()

    init = {"tau": jnp.asarray(2.0), "w": jnp.zeros(2)}
    posterior = fit(log_density, init=init, support={"tau": iblr.positive})
    np.testing.assert_allclose(posterior.family.mean, [1, 0, 0], atol=1e-3)
    np.testing.assert_allclose(posterior.family.covariance, np.eye(3), atol=1e-3)
    assert posterior.verdict.startswith("Good")


def test_a_start_is_given_once(fitted):
    with pytest.raises(ValueError, match="got two starts"):
        iblr.fit(curved, iblr.Gaussian.standard(2), init=jnp.zeros(2), key=KEY)
    with pytest.raises(ValueError, match="another family"):
        iblr.fit(curved, iblr.DiagonalGaussian, init=fitted, key=KEY)
    with no_type_hook(), pytest.raises(ValueError, match="puts `iblr.Gaussian` or"):
        iblr.fit(curved, iblr.Gamma, init=jnp.zeros(2), key=KEY)


def test_what_does_not_fit_into_the_memory_is_diagonal_and_said(monkeypatch):
    monkeypatch.setattr(starts, "_memory", lambda: 1e6)
    with pytest.warns(UserWarning, match="takes a diagonal Gaussian: a full one over 200"):
        start = starts.starting_family(None, jnp.zeros(200), None)
    assert isinstance(start, iblr.DiagonalGaussian)
    assert isinstance(starts.starting_family(None, jnp.zeros(50), None), iblr.Gaussian)


def test_a_batch_of_keys_gives_as_many_fits(fitted):
    batch = fit(key=jax.random.split(KEY, 2), tol=0.1)
    assert len(batch) == 2 and batch[0].num_gradients != batch[1].num_gradients
    assert batch.num_gradients == batch[0].num_gradients + batch[1].num_gradients
    alone = fit(key=jax.random.split(KEY, 2)[1], tol=0.1)  # the target is checked once
    assert alone.num_gradients == batch[1].num_gradients + 8
    with pytest.raises(ValueError, match="is one run's.*posterior.best.verdict"):
        _ = batch.verdict
    for run in (batch[0], batch[1], batch.best):
        assert run.stopped_by == "tol" and gap(run.family) <= run.gap_bound <= 0.1
        assert run.diagnosis is not None and run.trace.elbo.ndim == 1
    assert "2 runs" in str(batch) and batch[1].verdict in str(batch)


# Hard targets.


def test_where_the_target_is_nan_is_avoided(fitted):
    half = fit(lambda z: jnp.where(z[0] > 1.5, jnp.nan, curved(z)), tol=0.1)
    assert half.stopped_by == "tol"
    np.testing.assert_allclose(half.family.mean, -0.5, atol=0.3)  # as without that region
    np.testing.assert_allclose(half.family.standard_deviations, 1.0, atol=0.15)
    assert half.verdict.startswith("Bad: the target is nan or +inf at")


@pytest.mark.slow
def test_minibatches_are_fitted():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = np.sign(x @ [1.0, -1, 0.5] + 0.5 * rng.normal(size=200))
    data = jnp.asarray(x * y[:, None], jnp.float32)
    options = {
        "log_likelihood": lambda w, rows: jax.nn.log_sigmoid(rows @ w).sum(),
        "data": data,
        "prior": lambda w: -0.5 * w @ w,
    }
    whole = fit(iblr.Target(**options), init=jnp.zeros(3))
    part = fit(iblr.Target(**options, batch_size=20), init=jnp.zeros(3), tol=0.1)
    assert float(part.family.kl(whole.family)) < 0.2


def two_modes(z):
    return jnp.logaddexp(-0.5 * ((z - 8) ** 2).sum(), -0.5 * ((z + 8) ** 2).sum())


def test_a_diagonal_family_names_an_improper_target_too():
    with pytest.raises(iblr.FitError, match="improper"):
        iblr.fit(lambda z: -0.5 * z[0] ** 2 + 0 * z[1], iblr.DiagonalGaussian.standard(2), key=KEY)


@pytest.mark.slow
def test_the_bound_holds_in_one_dimension():
    ends = [fit(init=jnp.zeros(1), key=jax.random.key(seed)) for seed in range(20)]
    assert sum(gap(end.family) <= end.gap_bound for end in ends) >= 17


def test_a_second_mode_far_away_is_found_and_makes_the_verdict_bad():
    posterior = fit(two_modes)
    (mode,) = posterior.diagnosis.modes
    assert abs(mode.log_mass) < 0.2 and abs(mode.distance - 16 * np.sqrt(2)) < 0.1
    np.testing.assert_allclose(mode.family.mean, -posterior.mean, atol=0.1)
    assert posterior.verdict.startswith("Bad: another region") and "50 %" in posterior.verdict
    found = posterior.diagnosis
    assert found.climb_gradients > 0
    assert f"({found.climb_gradients} of them from {found.climbs} dispersed starts)" in str(
        posterior
    )


def test_dispersed_starts_lie_in_orthogonal_directions_on_both_sides():
    q = iblr.Gaussian.from_covariance(jnp.ones(5), 4 * jnp.eye(5))
    ways = (np.stack(climbs._starts(q, KEY)) - 1) / 2
    lengths = np.linalg.norm(ways, axis=1) / np.sqrt(5)
    np.testing.assert_allclose(lengths, [10] * 6 + [3] * 2 + [40] * 4, rtol=1e-5)
    np.testing.assert_allclose(ways[::2], -ways[1::2], rtol=1e-4)
    np.testing.assert_allclose(ways[[0, 2, 4]] @ ways[[0, 2, 4]].T / 500, np.eye(3), atol=1e-5)


def test_in_many_dimensions_there_are_fewer_starts():
    assert len(climbs._starts(iblr.Gaussian.standard(201), KEY)) == 4


@pytest.mark.parametrize(
    "dim, apart, width",
    [(2, 0.0, 8.0), slow(10, 0.0, 5.0), slow(50, 7.0, 1.0), slow(100, 9.5, 1.0)],
)
def test_neither_a_wider_region_nor_one_that_is_near_is_missed(dim, apart, width):
    def log_density(z):
        far = z.at[0].add(-apart)
        other = -0.5 * (far**2).sum() / width**2 - dim * jnp.log(width)
        return jnp.logaddexp(-0.5 * (z**2).sum(), other)

    posterior = fit(log_density, init=jnp.zeros(dim))
    assert posterior.verdict.startswith("Bad") and "region" in posterior.verdict


def test_the_middle_of_two_modes_is_left():
    """There the gradients of a pair cancel to the last bit, and the mean would never move."""
    exactly = lambda z: jnp.logaddexp(-0.5 * (jnp.abs(z[0]) - 9) ** 2, -1e9)  # noqa: E731
    posterior = fit(exactly, init=jnp.zeros(1), tol=0.1)
    assert abs(float(posterior.mean[0])) == pytest.approx(9, abs=0.1)


# The engine's parts.


def test_the_scale_of_a_heavy_tailed_target_is_solved_by_newtons_step(x64):
    """Student's t in 20 dimensions: kappa and its slope against their integrals."""
    d, df, rng = 20, 5.0, np.random.default_rng(0)

    def excess(noise, s):
        weight = (df + d) / (df + s**2 * (noise**2).sum(1, keepdims=True))
        return s**2 * weight * noise - noise

    def kappa(s, noise):
        return (noise * excess(noise, s)).sum(1).mean() / d

    many = rng.normal(size=(400_000, d))
    slope = (kappa(1.01, many) - kappa(0.99, many)) / 0.02
    few = jnp.asarray(rng.normal(size=(4000, d)))
    seen = Whitened(few, jnp.asarray(excess(np.asarray(few), 1.0)), jnp.zeros_like(few))
    zero = jnp.zeros(())
    means = radial.with_batch(radial.nothing(zero), seen, zero, jnp.ones(()))
    found = radial.scale(means, zero, d, jnp.asarray(4000.0))
    assert bool(found.known) and slope < 1
    np.testing.assert_allclose(found.change, kappa(1.0, many) / (slope / 2), rtol=0.15)
    gaussian = Whitened(few, 0.01 * few, jnp.zeros_like(few))  # a Hessian of 1.01
    means = radial.with_batch(radial.nothing(zero), gaussian, zero, jnp.ones(()))
    assert not bool(radial.scale(means, zero, d, jnp.asarray(4000.0)).known)


@pytest.mark.parametrize("dtype", ["float32", slow("float64")])
def test_students_t_in_many_dimensions_is_fitted(dtype, x64):
    """The best Gaussian has a scale that solves one equation; other methods take forever there."""
    d, df = 30, 5.0
    init = jnp.zeros(d, dtype)
    target = lambda z: -0.5 * (df + d) * jnp.log1p((z**2).sum() / df)  # noqa: E731
    posterior = iblr.fit(target, init=init, key=KEY, tol=0.1, throw=False)
    radii = np.random.default_rng(0).chisquare(d, size=200_000)
    scales = np.linspace(0.5, 3.0, 501)
    elbos = [-0.5 * (df + d) * np.log1p(s**2 * radii / df).mean() + d * np.log(s) for s in scales]
    best = scales[int(np.argmax(elbos))]
    found = float(np.exp(posterior.family.log_det / (2 * d)))
    assert posterior.stopped_by == "tol" and abs(found / best - 1) < 0.05


def test_tails_lighter_than_a_gaussians_are_not_overshot():
    """The best Gaussian of exp(-z^4) has the variance 1/sqrt(12); 1/v = 12 v flips to and fro."""
    quartic = lambda z: -(z**4).sum()  # noqa: E731
    for seed in range(6):
        end = fit(quartic, key=jax.random.key(seed))
        np.testing.assert_allclose(end.family.variances, 12**-0.5, rtol=0.15)


@pytest.mark.parametrize("seed", [1, slow(2), slow(9)])
def test_one_curvature_of_thousands_beside_small_ones_is_no_trap(seed):
    """Leaps along the one used to end far out in the others, where exponentials overflow."""
    start = jnp.zeros(10).at[0].set(8.0)
    posterior = fit(curved, init=start, key=jax.random.key(seed), tol=0.1)
    assert posterior.stopped_by == "tol" and gap(posterior.family) < 0.1


def test_a_q_that_moves_is_not_at_rest(fitted):
    moving = dataclasses.replace(fitted.state, moved=jnp.asarray(0.3))
    rest = dataclasses.replace(fitted.state, moved=jnp.asarray(0.0))
    np.testing.assert_allclose(moving.gap, rest.gap + 0.3, rtol=1e-5)
    assert float(fitted.state.moved) < 0.2 * fitted.gap_estimate


@pytest.mark.slow
@pytest.mark.parametrize("power, start", [(4, -3.0), (6, -3.0), (6, 0.0)])
def test_the_bound_holds_in_one_dimension_with_light_tails(power, start):
    """The best N(0, v) of exp(-z^p) has p (p - 1)!! v^(p/2) = 1."""
    factorial = {4: 3, 6: 15}[power]
    moment = lambda v: factorial * v ** (power / 2)  # noqa: E731
    best = (power * factorial) ** (-2 / power)
    inside = 0
    for seed in range(20):
        end = fit(lambda z: -(z**power).sum(), init=jnp.full(1, start), key=jax.random.key(seed))
        m, v = float(end.family.mean[0]), float(end.family.variances[0])
        missed = moment(v) - moment(best) - 0.5 * np.log(v / best) + 0.5 * power * m**2 * v
        inside += not missed > end.gap_bound
    assert inside >= 17


def look_with(elbo):
    rows = jnp.zeros((2, 2))
    pairs = Pairs(rows, rows, jnp.zeros(2), jnp.zeros(2))
    return Look(pairs, Whitened(rows, rows, rows), jnp.ones(2, bool), jnp.asarray(elbo))


def test_a_fit_that_is_lost_goes_back_to_where_it_was_best():
    state = regression.begin(iblr.Gaussian.standard(2), KEY)
    state = eqx.tree_at(lambda s: s.trusted, state, machine._trusted(state, look_with([1.0, 1.2])))
    np.testing.assert_allclose(state.trusted.elbo, 1.1)
    astray = dataclasses.replace(state.family, mean=jnp.full(2, 1e6))
    lost = eqx.tree_at(lambda s: s.family, state, astray)
    for doubts in (1, 2):
        trusted = machine._trusted(lost, look_with([-1e9, jnp.nan]))
        lost = eqx.tree_at(lambda s: s.trusted, lost, trusted)
        assert int(lost.trusted.doubts) == doubts
    back = machine._reverted(lost)
    assert_same_bits(back.family, state.family)
    assert int(back.count) == 0 and not bool(back.finishing)
    fine = machine._trusted(state, look_with([0.9, 0.8]))  # lower, but not by much
    assert int(fine.doubts) == 0 and float(fine.elbo) == float(state.trusted.elbo)


def test_the_best_of_many_noisy_batches_does_not_say_how_noisy_they_are():
    """With minibatches a record is a lucky one, and its spread would throw good fits back."""
    state = regression.begin(iblr.Gaussian.standard(2), KEY)
    state = eqx.tree_at(lambda s: s.trusted, state, machine._trusted(state, look_with([-9.0, 9.0])))
    state = dataclasses.replace(state, finishing=jnp.ones((), bool))
    nothing = machine._trusted(state, look_with([jnp.nan, jnp.nan]))
    assert float(nothing.spread) == 9 and int(nothing.doubts) == 1
    lucky = machine._trusted(state, look_with([12.0, 12.0]))
    assert float(lucky.elbo) == 12 and float(lucky.spread) == pytest.approx(0.9 * 9)
    state = eqx.tree_at(lambda s: s.trusted, state, lucky)
    assert int(machine._trusted(state, look_with([-18.0, 0.0])).doubts) == 0
    assert int(machine._trusted(state, look_with([-50.0, -20.0])).doubts) == 1


# Other families.


def gamma(z):
    return (3 * jnp.log(z) - 2 * z).sum()


def log_normal(z):
    return (-jnp.log(z) - 2 * jnp.log(z) ** 2).sum()


def test_another_family_settles_in_rounds_that_double():
    posterior = iblr.fit(log_normal, iblr.Gamma.standard(2), key=KEY)
    assert posterior.stopped_by == "tol" and posterior.gap_bound <= 0.01
    assert posterior.num_steps == 100 + 200 + 400  # two gains are the least
    np.testing.assert_array_equal(posterior.trace.num_gradients, 16 * posterior.trace.step)
    looks = settling.ELBO_DRAWS * posterior.num_steps // settling.CHUNK
    assert posterior.num_gradients > 16 * posterior.num_steps + looks
    rough = iblr.fit(log_normal, iblr.Gamma.standard(2), key=KEY, tol=0.1)
    closer = iblr.fit(log_normal, iblr.Gamma.standard(2), key=KEY, tol=0.005)
    again = iblr.fit(log_normal, state=rough.state, key=KEY, tol=0.005)
    assert rough.num_steps < closer.num_steps == again.num_steps
    assert_same_bits(again.family, closer.family)
    assert again.gap_bound == closer.gap_bound <= 0.005


def test_a_target_that_a_family_holds_takes_one_round():
    posterior = iblr.fit(gamma, iblr.Gamma.standard(2), key=KEY)
    assert posterior.stopped_by == "tol" and posterior.num_steps == 100
    np.testing.assert_allclose(posterior.mean, 2.0, rtol=1e-4)
    assert posterior.gap_bound <= 1e-5
    assert posterior.verdict.startswith("Good")
    assert "no other mode found from 10 dispersed starts" in posterior.verdict
    with pytest.raises(ValueError, match=r"`fit\(max_gradients=...\)` is too small for a Gamma"):
        iblr.fit(gamma, iblr.Gamma.standard(2), key=KEY, max_gradients=1000)
    bounded = iblr.fit(gamma, iblr.Gamma.standard(2), key=KEY, max_gradients=6000, tol=1e-9)
    assert 3000 < bounded.num_gradients <= 6000 and bounded.stopped_by == "max_gradients"
    assert bounded.status == Status.out_of_budget and "budget" in bounded.message


@pytest.mark.slow
def test_positive_numbers_are_looked_around_from_by_their_logarithms():
    q = iblr.Product({"a": iblr.Gamma(jnp.array([4.0, 9.0]), 2.0), "b": iblr.Gaussian.standard(1)})
    around = climbs.surroundings(q, KEY)
    points = q.sample(jax.random.key(1), 4000)
    rows = np.concatenate([np.log(points["a"]), points["b"]], axis=1)
    np.testing.assert_allclose(around.mean, rows.mean(0), atol=0.2)
    np.testing.assert_allclose(around.covariance, np.cov(rows.T), atol=0.2)
    drawn = around.sample(KEY, 5)
    assert drawn["a"].shape == (5, 2) and bool((drawn["a"] > 0).all())


@pytest.mark.slow
def test_a_prior_that_is_a_family_is_seen_from_the_logarithms_too():
    counts = jnp.array([7.0, 3.0])
    prior = iblr.Gamma(jnp.ones(2), 0.5)
    target = iblr.Target(
        log_likelihood=lambda rate: (counts * jnp.log(rate) - 4.0 * rate).sum(), prior=prior
    )
    posterior = iblr.fit(target, iblr.Gamma.standard(2), key=KEY)
    np.testing.assert_allclose(posterior.family.shape, counts + 1, rtol=1e-3)
    assert posterior.verdict.startswith("Good") and posterior.diagnosis.climbs == 10


@pytest.mark.slow
@pytest.mark.parametrize("means, misses", [([[-8.0]], True), ([[-8.0], [8.0]], False)])
def test_a_mixture_is_bad_only_if_it_misses_a_mode(means, misses):
    means = jnp.asarray(means)
    start = iblr.GaussianMixture.from_moments(means, jnp.ones((len(means), 1, 1)))
    posterior = iblr.fit(two_modes, start, key=KEY)
    assert posterior.verdict.startswith("Bad: another region" if misses else "Good")
    if misses:
        (mode,) = posterior.diagnosis.modes
        np.testing.assert_allclose(mode.family.mean, 8.0, atol=0.1)
        assert abs(mode.log_mass) < 0.2


def test_a_mode_is_what_q_lacks_there():
    mode = verdict.Mode(5.0, np.log(0.4))
    assert mode.without(-np.inf) == mode
    assert mode.without(np.log(0.1)).log_mass == pytest.approx(np.log(0.3))
    assert mode.without(np.log(0.3)) is None and mode.without(np.log(0.9)) is None


@pytest.mark.slow
@pytest.mark.parametrize("limit", [40_000, 60_000, 110_000])
def test_a_mixture_that_grows_counts_and_keeps_its_budget(limit):
    calls = []

    def counting(z):
        jax.debug.callback(lambda _: calls.append(1), z[0])
        return -(z[0] ** 2) / 200 - 0.5 * (z[1] + 0.1 * z[0] ** 2 - 10) ** 2

    start = iblr.GaussianMixture.init(jax.random.key(1), "auto", 2, spread=9.0)
    posterior = iblr.fit(counting, start, key=KEY, max_gradients=limit)
    jax.effects_barrier()
    assert len(calls) == posterior.num_gradients <= limit
    assert posterior.stopped_by == "max_gradients" and posterior.num_gradients > 0.5 * limit


def correlated(z):
    return -0.5 * (z**2).sum() - 0.9 * z[0] * z[1]


def test_a_round_that_is_cut_short_leaves_what_was_reached_before():
    calls = []

    def stop(told):
        calls.append(told)
        return len(calls) == 5  # in the third round: a call every 100 steps

    start = iblr.DiagonalGaussian.standard(2)
    end = iblr.fit(correlated, start, key=KEY, callback=stop, tol=1e-9)
    assert end.stopped_by == "callback" and end.num_steps == 100 + 200 + 200
    assert_same_bits(end.family, end.state.reached.family)
    assert end.gap_bound == end.state.reached.gap_bound
    on = iblr.fit(correlated, state=end.state, key=KEY, max_gradients=20_000, tol=1e-9)
    assert on.num_steps == 700 and on.num_gradients <= 20_000 and on.stopped_by == "max_gradients"


def test_a_state_is_of_one_family(fitted):
    state = iblr.fit(correlated, iblr.DiagonalGaussian.standard(2), key=KEY, tol=0.5).state
    with pytest.raises(ValueError, match="of the same family"):
        iblr.fit(correlated, iblr.SkewGaussian.standard(2), key=KEY, state=state)


def test_mixtures_that_grow_are_fitted_one_key_at_a_time_without_settings():
    start = iblr.GaussianMixture.init(jax.random.key(1), "auto", 2)
    with pytest.raises(ValueError, match="takes a mixture that adapts its size with one key"):
        iblr.fit(curved, start, key=jax.random.split(KEY, 2))


@pytest.mark.slow
def test_a_mixture_that_grows_goes_on_and_is_judged():
    start = iblr.GaussianMixture.init(jax.random.key(1), "auto", 2, spread=9.0)
    part = iblr.fit(two_modes, start, key=KEY, max_gradients=20_000)
    assert part.stopped_by == "max_gradients" and "is not known" in part.verdict
    whole = iblr.fit(two_modes, state=part.state, key=KEY, max_gradients=200_000)
    assert whole.num_steps > part.num_steps and whole.diagnosis is not None
    with pytest.raises(ValueError, match="too small for a GaussianMixture"):
        iblr.fit(two_modes, start, key=KEY, max_gradients=1000)


def test_an_interrupt_while_a_gain_is_measured_keeps_the_fit(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(settling, "_look", interrupt)
    posterior = iblr.fit(correlated, iblr.DiagonalGaussian.standard(2), key=KEY)
    assert posterior.stopped_by == "interrupt" and posterior.num_steps == 100


def test_what_is_missing_follows_from_how_gains_fall():
    gains = {value: settling.Gain(value, 0.01) for value in (1.0, 0.5, 0.25, 0.01)}
    assert gains[0.5].missing_per_gain(None) == 1
    assert gains[0.25].missing_per_gain(gains[1.0]) == 1  # 1/4 + 1/16 + ... would be less
    assert gains[0.5].missing_per_gain(gains[1.0]) == 1
    slow = settling.Gain(0.9, 0.01)
    assert slow.missing_per_gain(gains[1.0]) == pytest.approx(9)  # 0.9 + 0.81 + ... over 0.9
    assert gains[1.0].missing_per_gain(gains[0.5]) == np.inf
    assert gains[0.01].missing_per_gain(gains[1.0]) == 1  # noise


def test_patient_steps_are_long_for_a_quarter_of_a_round():
    steps = settling.PatientSteps(0.3, 400, jnp.float32)
    assert float(steps(0)) == float(steps(100)) == pytest.approx(0.3)
    assert float(steps(350)) == pytest.approx(float(bold_steps(250)))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.99, 0.999])
def test_a_slow_way_is_not_taken_for_its_end(correlation):
    """The best diagonal Gaussian of a Gaussian has the conditional variances, in closed form."""
    covariance = jnp.array([[1.0, correlation], [correlation, 1.0]])
    target = iblr.Gaussian.from_covariance(jnp.full(2, 3.0), covariance)
    end = iblr.fit(target.log_prob, iblr.DiagonalGaussian.standard(2), key=KEY)
    precision = np.linalg.inv(np.asarray(covariance, float))
    off = np.asarray(end.family.mean, float) - 3
    ratio = np.asarray(end.family.variances, float) * np.diag(precision)
    gap = 0.5 * off @ precision @ off + 0.5 * (ratio - 1 - np.log(ratio)).sum()
    assert gap <= end.gap_bound
    assert end.stopped_by == "max_gradients" or end.gap_bound <= 0.01


def test_a_round_is_a_new_one_even_where_it_is_longer():
    told = lambda step, spent: Progress(  # noqa: E731
        step, 1000, 0.0, 0.0, 0.1, None, 0.0, None, spent, np.nan
    )
    limits = unattended._Limits(np.inf, np.inf, None)
    for step, spent in ((100, 500), (200, 1000), (100, 2000)):
        assert not limits(told(step, spent))
    assert limits.spent == 1000 + 2000 + 3 * unattended.ELBO_DRAWS


def test_the_gain_is_measured_with_the_same_noise():
    target, before = iblr.Target(curved), iblr.Gaussian.standard(2)
    after = iblr.Gaussian.from_covariance(jnp.full(2, -0.5), jnp.eye(2))
    seen = settling._look(target, before, after, KEY, 1, 0.2, 16)
    gain = seen.gain
    lowest = gain.value - settling.QUANTILE * gain.standard_error
    assert gain.standard_error <= 0.2 / 4 or lowest > 0.2  # it is told from `tol`
    assert seen.evaluations % 1000 == 0
    assert abs(gain.value - gap(before)) < 5 * gain.standard_error
    values = [settling._log_ratios(target, q, KEY) for q in (after, before)]
    values = np.asarray(values[0] - values[1])
    assert agrees(values[:, None], np.array([gap(before)]))


@pytest.mark.parametrize("off", [0.0, 0.05, 0.12])
def test_the_divergence_from_the_target_bounds_the_gap(off):
    target = iblr.Target(lambda z: -0.5 * (z**2).sum())
    q = iblr.DiagonalGaussian.from_variances(jnp.full(2, off), jnp.ones(2))
    seen = [settling._look(target, None, q, jax.random.key(i), 1, 0.01, 16) for i in range(100)]
    assert {look.evaluations for look in seen} == {settling.DRAWS}
    assert np.mean([look.divergence.bound >= off**2 for look in seen]) >= 0.9
    assert np.mean([look.divergence.estimate for look in seen]) == pytest.approx(
        off**2, rel=0.1, abs=1e-6
    )


def test_a_divergence_says_nothing_where_it_cannot():
    ratios = np.zeros(500)
    assert settling._divergence(ratios, jnp.float32).bound == 0
    assert settling._divergence(ratios + 1e6, jnp.float32) == settling.UNKNOWN  # of float32
    assert settling._divergence(ratios + 1e6, jnp.float64).bound < 1e-8
    spread = np.random.default_rng(0).normal(size=500)
    assert settling._divergence(spread, jnp.float64) == settling.UNKNOWN
    for bad in (np.nan, -np.inf, 1e3):
        assert settling._divergence(np.append(ratios, bad), jnp.float64) == settling.UNKNOWN


def test_a_mixture_that_may_have_missed_a_mode_takes_more_than_one_round():
    start = iblr.GaussianMixture.from_moments(jnp.zeros((2, 2)), jnp.stack([jnp.eye(2)] * 2))
    parts = {"a": start, "b": iblr.Gamma.standard(1)}
    assert settling._has_mixture(start) and settling._has_mixture(iblr.Product(parts))
    assert not settling._has_mixture(iblr.Product({"b": parts["b"]}))
    posterior = iblr.fit(lambda z: -0.5 * (z**2).sum(), start, key=KEY)
    assert posterior.num_steps > settling._defaults(start).first_round


SCORES = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def schools(z):
    """Eight schools, centred: mu, log tau and theta."""
    mu, log_tau, theta = z[0], z[1], z[2:]
    likelihood = -0.5 * (((SCORES - theta) / ERRORS) ** 2).sum()
    prior = -0.5 * (((theta - mu) * jnp.exp(-log_tau)) ** 2).sum() - 7 * log_tau
    return likelihood + prior - 0.02 * (mu**2 + jnp.exp(2 * log_tau))


def gap_of_schools(q):
    """In closed form; the best ELBO, 6.8315, is that of quasi-Newton steps on the same formula."""
    m, C = np.asarray(q.mean, float), np.asarray(q.covariance, float)
    second = np.exp(2 * (m[1] + C[1, 1]))  # E tau^2
    elbo = -0.5 * (((SCORES - m[2:]) ** 2 + np.diag(C)[2:]) / ERRORS**2).sum() - 7 * m[1]
    elbo -= 0.02 * (m[0] ** 2 + C[0, 0] + second)
    for j in range(8):
        a = np.eye(10)[2 + j] - np.eye(10)[0]
        inverse = np.exp(2 * (C[1, 1] - m[1]))  # E tau^-2; it tilts the mean by -2 C
        elbo -= 0.5 * inverse * ((a @ (m - 2 * C[:, 1])) ** 2 + a @ C @ a)
    return 6.8315 - elbo - 0.5 * np.linalg.slogdet(C)[1] - 5 * np.log(2 * np.pi * np.e)


def test_a_slow_drift_is_not_taken_for_rest(x64):
    """Few draws see the curvature of a centred hierarchy: residuals alone told 0.01 at 0.5."""
    for seed in range(3):
        fitted = fit(schools, init=jnp.zeros(10), key=jax.random.key(seed), throw=False)
        assert fitted.stopped_by == "max_gradients" and fitted.gap_bound > 0.01
        assert gap_of_schools(fitted.family) > 0.1 and fitted.verdict.startswith("Bad")


@pytest.mark.parametrize("family", [iblr.DiagonalGaussian, slow(iblr.Gaussian)])
@pytest.mark.parametrize(
    "target", [lambda z: -0.45 * jnp.log1p(z**2).sum(), lambda z: -jnp.exp(z).sum()]
)
def test_nothing_is_promised_of_a_target_without_an_integral(family, target):
    fitted = fit(target, family=family, throw=False)
    assert fitted.status == Status.improper and fitted.stopped_by == "failure"
    assert np.isnan(fitted.gap_bound) and np.isnan(fitted.gap_estimate)
    assert "nats below the best" not in str(fitted)


def test_a_bound_is_on_what_is_near_where_there_is_another_mode():
    fitted = fit(
        lambda z: jnp.logaddexp(-0.5 * (z[0] - 8) ** 2, -0.5 * (z[0] + 8) ** 2), init=jnp.zeros(1)
    )
    assert fitted.diagnosis.modes and "nats below the best Gaussian near this one" in str(fitted)


def test_a_look_around_ends_in_time(fitted):
    around = climbs.surroundings(fitted.family, KEY)
    seen = climbs.look_around(iblr.Target(curved), fitted.family, around, 0.0, KEY, 10**6, 0.0)
    assert (seen.climbs, seen.left_out, seen.gradients) == (0, 10, 0)


def test_a_climb_that_may_still_come_back_is_given_time(monkeypatch):
    log_density = lambda z: -jnp.sqrt(1 + z**2).sum()  # noqa: E731
    fitted = fit(log_density)
    around, target = climbs.surroundings(fitted.family, KEY), iblr.Target(log_density)
    far = lambda: climbs.look_around(target, fitted.family, around, -1e3, KEY, 10**6)  # noqa: E731
    monkeypatch.setattr(climbs, "PATIENCE", 4)
    assert far().modes == ()
    monkeypatch.setattr(climbs, "AGAIN", 0)
    assert far().modes


def test_time_is_left_for_the_verdict():
    budget = automatic.Budget(0.01, 100, started=10.0, deadline=20.0, spare=1000)
    assert budget.deadline_at(1e-3) == 19.0 and budget.deadline_at(1.0) == 15.0
    assert budget._replace(deadline=np.inf).deadline_at(1.0) == np.inf


def test_conditions_beyond_the_precision_are_named():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    precision = jnp.asarray((basis * np.logspace(-4.5, 4.5, 10)) @ basis.T, jnp.float32)
    fitted = fit(lambda z: -0.5 * z @ (precision @ z), init=jnp.ones(10), throw=False)
    assert fitted.status == Status.inaccurate and "float64" in fitted.verdict


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"init": jnp.array([1.0, 2.0, 3.0]), "support": iblr.simplex}, "inside its support"),
        ({"init": KEY}, "needs numbers, a posterior or a family"),
        ({"state": [0.0] * 1000}, "but got a list"),
    ],
)
def test_starts_that_are_none_are_refused_in_words(options, says):
    with pytest.raises(ValueError, match=says):
        fit(**options)


def test_a_posterior_is_not_its_state(fitted):
    with pytest.raises(ValueError, match="pass `posterior.state`"):
        fit(state=fitted)


def test_a_fit_is_not_traced():
    with pytest.raises(ValueError, match="cannot be traced .* array of keys"):
        jax.jit(lambda x: fit(init=x).mean)(jnp.zeros(2))


def test_a_second_look_counts(fitted):
    again = iblr.diagnose(fitted, curved, key=KEY, draws=500)
    assert again.num_gradients == fitted.num_gradients + 500 + 128


def test_rays_see_a_prior_that_is_a_family_by_its_points():
    """A Gamma family with a Gamma prior and a likelihood that outgrows it."""
    prior = iblr.Gamma(jnp.ones(1), 1.0)
    target = iblr.Target(log_likelihood=lambda z: 1.2 * z.sum(), prior=prior)
    fitted = fit(target, family=prior, init=None, throw=False)
    assert fitted.status == Status.improper and np.isnan(fitted.gap_bound)


def test_where_a_fit_began_is_kept_when_it_goes_on():
    """A way is known to be endless by how much wider q is than at the start."""
    first = iblr.DiagonalGaussian.from_variances(jnp.zeros(2), 0.01 * jnp.ones(2))
    part = fit(family=first, init=None, max_gradients=12000)
    assert isinstance(part.state, settling.Settling)
    watch = Watch(None, ProgressLine(False), 0.0)
    task = unattended.Task(curved, part.family, KEY, part.state, 0.01, None, None, watch)
    variances = unattended._first_variances(part, task)
    np.testing.assert_allclose(variances, 0.01, rtol=1e-5)


def test_an_interrupt_after_a_failure_leaves_it_one(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(unattended, "_named_if_improper", interrupted)
    fitted = fit(lambda z: z.sum(), throw=False)
    assert fitted.status == Status.improper and fitted.stopped_by == "failure"


def test_compiling_is_not_taken_for_the_price_of_the_verdict():
    """The first stretch does not count, in which the program is compiled."""
    fitted = fit(lambda z: curved(z) - 0.1 * (z**2).sum(), max_seconds=8.0)
    assert fitted.stopped_by == "tol"

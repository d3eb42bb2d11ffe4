"""Fits without settings: what they give, count, choose, start from and refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from automatic_helpers import KEY, curved, fit, gap
from helpers import assert_same_bits, no_type_hook

import iblr
from iblr import Status, preflight, regression, starts
from iblr.noise import standard_normals
from iblr.purposes import Purpose, key_for


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
    assert f"Log evidence {fitted.log_evidence:.4f} ± {fitted.log_evidence_se:.4f}" in said[3]
    assert said[3].endswith("of what draws of q have seen.")  # its left tail is heavier
    light = str(fit(lambda z: -0.5 * (z**2).sum()))
    assert "Log evidence" in light and "have seen" not in light


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


def test_a_fit_works_while_nans_are_hunted(fitted):
    with jax.debug_nans(True):
        assert_same_bits(fit().state, fitted.state)


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
    assert (batch.gap_estimate <= batch.gap_bound).all() and (batch.gap_bound <= 0.1).all()


def test_a_second_look_counts(fitted):
    again = iblr.diagnose(fitted, curved, key=KEY, draws=500)
    assert again.num_gradients == fitted.num_gradients + 500 + 128


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


@pytest.mark.parametrize(
    "options, named",
    [
        ({"num_steps": 50, "tol": 1e-9}, r"fit\(tol=1e-09\)` ends a fit without settings"),
        ({"num_steps": 50, "max_seconds": 1.0}, r"fit\(max_seconds=1.0\)` ends a fit without"),
        ({"chunk_size": 7}, r"fit\(chunk_size=7\)` belongs to a fit with settings"),
        ({"elbo_draws": 3}, r"fit\(elbo_draws=3\)` belongs to a fit with settings"),
    ],
)
def test_what_the_other_way_of_fitting_takes_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        fit(**options)


@pytest.mark.parametrize("traced", [jax.jit, jax.vmap])
def test_a_fit_says_that_it_cannot_be_traced(traced):
    of_keys = traced(lambda key: iblr.fit(curved, init=np.zeros(2), key=key).mean)
    with pytest.raises(ValueError, match="cannot be traced"):
        of_keys(KEY if traced is jax.jit else jax.random.split(KEY, 2))


def test_every_purpose_of_a_key_has_random_numbers_of_its_own():
    """Apart from those of steps, and of the keys that a step splits off."""
    steps = [jax.random.fold_in(KEY, k) for k in range(64)]
    keys = [KEY, *steps, *jax.random.split(KEY, 64), *(key_for(KEY, p) for p in Purpose)]
    words = {tuple(jax.random.key_data(key).tolist()) for key in keys}
    assert len(words) == 1 + 64 + len(Purpose)  # a split gives the first steps again
    drawn = preflight._first_points(iblr.Gaussian.standard(2), KEY)[1:]
    assert not jnp.isin(drawn, standard_normals(KEY, drawn.shape, drawn.dtype)).any()

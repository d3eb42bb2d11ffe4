"""The loop: what it converges to, compiles, repeats, resumes, reports and refuses."""

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import LARGEST_Z, agrees, assert_same_bits, moments, no_type_hook, stacked
from scipy import stats

import iblr
from iblr import AtMean, DiagonalGaussian, FitError, Gaussian, Rep, Status, Stl, Target, steps
from iblr.noise import standard_normals

MEAN = np.array([1.0, -2.0])
COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.8]])
PRECISION = np.linalg.inv(COVARIANCE)
LOG_Z = np.log(2 * np.pi) + 0.5 * np.linalg.slogdet(COVARIANCE)[1]

CHUNK = 20


def log_density(z):
    """An unnormalised Gaussian, whose evidence is LOG_Z."""
    x = z - jnp.asarray(MEAN, z.dtype)
    return -0.5 * x @ jnp.asarray(PRECISION, z.dtype) @ x


def curved(z):
    """A target with no Gaussian posterior: the noise of a fit to it never vanishes."""
    return log_density(z) - 0.2 * (z**4).sum()


def fit(target=log_density, start=None, **options):
    """A short fit; tests that share target, start and options share one compiled program."""
    start = DiagonalGaussian.standard(2) if start is None else start
    options = {
        "key": jax.random.key(0),
        "estimator": Stl(pairs=2),
        "step_size": 0.1,
        "num_steps": 5 * CHUNK,
        "chunk_size": CHUNK,
        "elbo_draws": 50,
    } | options
    return iblr.fit(target, start, **options)


def kl_to_target(q):
    """KL(q || target) in NumPy's float64."""
    mean, _, covariance = moments(q)
    log_dets = np.linalg.slogdet(COVARIANCE)[1] - np.linalg.slogdet(covariance)[1]
    x = mean - MEAN
    return 0.5 * (np.trace(PRECISION @ covariance) + x @ PRECISION @ x - 2 + log_dets)


@pytest.fixture(scope="module")
def fitted():
    """The example of the README, on a target with a known answer."""
    return iblr.fit(
        log_density,
        Gaussian.standard(2),
        key=jax.random.key(0),
        estimator=Stl(pairs=8),
        step_size=0.05,
        num_steps=500,
    )


# What a fit finds.


def test_the_fit_converges_to_a_known_gaussian_and_its_evidence(fitted):
    assert kl_to_target(fitted.family) < 1e-4
    assert fitted.status == Status.ok and fitted.num_steps == 500
    assert fitted.num_gradients == 500 * 16 and fitted.seconds > 0
    assert fitted.refused == 0 and fitted.limited == 0
    np.testing.assert_allclose(fitted.mean, MEAN, atol=1e-3)
    np.testing.assert_allclose(fitted.covariance, COVARIANCE, atol=1e-3)
    np.testing.assert_allclose(fitted.precision, PRECISION, atol=1e-2)
    np.testing.assert_allclose(fitted.standard_deviation, np.sqrt(np.diag(COVARIANCE)), atol=1e-3)
    np.testing.assert_allclose(fitted.elbo, LOG_Z, atol=1e-4)
    assert 0 <= fitted.elbo_se < 1e-4


def test_the_trace_has_one_row_a_chunk_and_climbs_to_the_evidence(fitted):
    np.testing.assert_array_equal(fitted.trace.step, [100, 200, 300, 400, 500])
    np.testing.assert_allclose(fitted.trace.step_size, 0.05)
    assert fitted.trace.elbo.shape == fitted.trace.elbo_se.shape == (5,)
    assert fitted.trace.elbo[-1] == fitted.elbo
    start = iblr.elbo(Target(log_density), Gaussian.standard(2), jax.random.key(0))
    assert start.value < fitted.trace.elbo[0] - 0.1  # higher is better
    noise = LARGEST_Z * fitted.trace.elbo_se
    assert (fitted.trace.elbo < LOG_Z + noise + 1e-5).all()  # a lower bound


def test_the_elbo_is_the_evidence_less_the_divergence():
    q = Gaussian.from_covariance(jnp.array([0.5, -1.0]), jnp.array([[2.0, -0.3], [-0.3, 0.5]]))
    keys = jax.random.split(jax.random.key(1), 100)
    target = Target(log_density)
    values, errors = jax.jit(jax.vmap(lambda key: iblr.elbo(target, q, key)))(keys)
    assert agrees(values, LOG_Z - kl_to_target(q))
    assert errors.min() > 1e-3  # so that the comparison was one of noisy numbers


def quadrature_elbo(q, log_p):
    """E_q[log p - log q] by Gauss-Hermite quadrature in two dimensions."""
    x, w = np.polynomial.hermite_e.hermegauss(30)
    noise = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / w.sum() ** 2
    mean, A, covariance = moments(q)
    log_q = stats.multivariate_normal(mean, covariance)
    return weights @ log_p(mean + noise @ A) + log_q.entropy()


def numpy_curved(rows, quartic):
    x = rows - MEAN
    return -0.5 * np.einsum("ni,ij,nj->n", x, PRECISION, x) - quartic * (rows**4).sum(axis=1)


# Small, so that the tails are thin enough for 200 draws to have a normal mean.
QUARTICS = np.array([0.0, 0.02, 0.06, 0.12], np.float32)


@pytest.mark.parametrize("minibatches", [False, True], ids=["all-data", "minibatches"])
def test_the_standard_error_of_the_elbo_is_honest(minibatches):
    q = DiagonalGaussian.from_variances(jnp.array([0.5, -0.5]), jnp.array([0.5, 0.3]))
    target = Target(
        log_likelihood=lambda z, rows: -(rows * (z**4).sum()).sum(),
        data=jnp.asarray(QUARTICS),
        batch_size=2 if minibatches else None,
        prior=log_density,
    )
    expected = quadrature_elbo(q, lambda z: numpy_curved(z, QUARTICS.sum()))
    keys = jax.random.split(jax.random.key(2), 200)
    estimate = jax.jit(jax.vmap(lambda key: iblr.elbo(target, q, key, draws=200)))(keys)
    z = (np.asarray(estimate.value, float) - expected) / np.asarray(estimate.standard_error, float)
    # Over 200 keys the mean of z has a standard error of 0.07, its standard deviation one of 0.05.
    assert abs(z.mean()) < LARGEST_Z / np.sqrt(200)
    assert 1 - LARGEST_Z / np.sqrt(400) < z.std() < 1 + LARGEST_Z / np.sqrt(400)


def test_the_elbo_of_a_fit_is_that_of_its_family():
    posterior = fit(curved)
    expected = quadrature_elbo(posterior.family, lambda z: numpy_curved(z, 0.2))
    assert abs(float(posterior.elbo) - expected) < LARGEST_Z * float(posterior.elbo_se)


def test_the_elbo_is_that_of_a_plain_function_too():
    q, key = DiagonalGaussian.standard(2), jax.random.key(0)
    assert iblr.elbo(log_density, q, key) == iblr.elbo(Target(log_density), q, key)


@pytest.mark.parametrize("draws", [0, 1])
def test_an_elbo_without_a_standard_error_is_refused(draws):
    with pytest.raises(ValueError, match=r"`elbo\(.*draws"):
        iblr.elbo(Target(log_density), DiagonalGaussian.standard(2), jax.random.key(0), draws=draws)


# Compilation.


class Counted:
    """A log density that counts how often it is traced, and how often inside a chunk."""

    def __init__(self, monkeypatch):
        self.traces, self.in_chunks, chunk = 0, [], steps._chunk

        def watched(*arguments):
            before = self.traces
            result = chunk(*arguments)
            self.in_chunks.append(self.traces - before)
            return result

        monkeypatch.setattr(steps, "_chunk", watched)

    def __call__(self, z):
        self.traces += 1
        return log_density(z)


def test_nothing_is_traced_after_the_first_chunk_nor_in_a_second_fit(monkeypatch):
    counted = Counted(monkeypatch)
    posterior = fit(counted, num_steps=4 * CHUNK + 7, momentum=0.5)
    assert counted.in_chunks[0] > 0 and counted.in_chunks[1:] == [0, 0, 0, 0]
    assert counted.traces - counted.in_chunks[0] <= 2  # by the check before the fit
    counted.in_chunks.clear()
    # Another key, start, step size, momentum and number of steps; then a resumption.
    start = DiagonalGaussian.from_variances(jnp.ones(2), jnp.array([2.0, 3.0]))
    fit(counted, start, key=jax.random.key(1), step_size=0.02, num_steps=CHUNK + 1, momentum=0.9)
    fit(
        counted, num_steps=6 * CHUNK, state=posterior.state, step_size=np.float32(0.1), momentum=0.5
    )
    assert counted.in_chunks == [0] * 4


def test_a_batch_of_keys_is_one_program(monkeypatch):
    single, batch = Counted(monkeypatch), Counted(monkeypatch)
    fit(single, num_steps=CHUNK)
    fit(batch, num_steps=2 * CHUNK, key=jax.random.split(jax.random.key(0), 5))
    # Both functions watch the same calls: the first fit's chunk, then the batch's two.
    assert batch.in_chunks == [0, single.in_chunks[0], 0]


# The same bits.


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_the_same_key_gives_the_same_bits_and_another_key_others(family):
    a, b, c = (fit(curved, family.standard(2), key=jax.random.key(seed)) for seed in (0, 0, 1))
    assert_same_bits(a.state, b.state)
    assert a.elbo == b.elbo and a.elbo_se == b.elbo_se
    assert (a.family.mean != c.family.mean).all()


def test_the_size_of_the_chunks_does_not_change_the_bits():
    a, b = fit(curved), fit(curved, chunk_size=7)
    assert_same_bits(a.state, b.state)
    assert a.elbo == b.elbo


def test_the_size_of_the_chunks_changes_nothing_but_the_refreshed_log_det_of_a_full_family():
    a, b = fit(curved, Gaussian.standard(2)), fit(curved, Gaussian.standard(2), chunk_size=30)
    np.testing.assert_array_equal(a.family.mean, b.family.mean)
    np.testing.assert_array_equal(a.family.factor, b.family.factor)
    np.testing.assert_allclose(a.family.log_det, b.family.log_det, atol=1e-5)


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_a_resumed_fit_has_the_bits_of_one_that_was_not_stopped(family):
    options = {"momentum": 0.5}
    whole = fit(curved, family.standard(2), num_steps=6 * CHUNK, **options)
    part = fit(curved, family.standard(2), num_steps=2 * CHUNK, **options)
    assert part.num_steps == 2 * CHUNK
    rest = fit(curved, family.standard(2), num_steps=6 * CHUNK, state=part.state, **options)
    assert_same_bits(whole.state, rest.state)
    assert_same_bits(whole.family, rest.family)
    assert whole.elbo == rest.elbo and whole.num_steps == rest.num_steps == 6 * CHUNK
    np.testing.assert_array_equal(rest.trace.step, [60, 80, 100, 120])
    np.testing.assert_array_equal(rest.trace.elbo, whole.trace.elbo[2:])


def test_a_fit_resumed_within_a_chunk_has_the_same_bits_too():
    whole = fit(curved)
    part = fit(curved, num_steps=CHUNK + 7)
    assert_same_bits(whole.state, fit(curved, state=part.state).state)


def test_a_resumed_fit_counts_its_steps_from_the_start_and_its_own_gradients():
    part = fit(num_steps=2 * CHUNK)
    rest = fit(num_steps=5 * CHUNK, state=part.state)
    assert rest.num_steps == 5 * CHUNK
    assert part.num_gradients == 2 * CHUNK * 4 and rest.num_gradients == 3 * CHUNK * 4


def test_a_fit_that_has_nothing_left_to_do_is_refused():
    part = fit(num_steps=2 * CHUNK)
    for num_steps in (CHUNK, 2 * CHUNK):
        with pytest.raises(ValueError, match=r"`fit\(.*num_steps=...\)` .*taken 40 of .*larger"):
            fit(num_steps=num_steps, state=part.state)


# Batches of runs.


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_every_run_of_a_batch_is_the_fit_with_its_key(family):
    keys = jax.random.split(jax.random.key(3), 3)
    batch = fit(start=family.standard(2), key=keys)
    assert batch.is_batch and len(batch) == 3
    assert (batch.status == Status.ok).tolist() == [True, True, True]
    assert batch.elbo.shape == batch.elbo_se.shape == batch.refused.shape == (3,)
    assert batch.trace.elbo.shape == (5, 3) and batch.trace.step.shape == (5,)
    assert batch.covariance.shape == (3, 2, 2) and batch.mean.shape == (3, 2)
    for i, key in enumerate(keys):
        single = fit(start=family.standard(2), key=key)
        np.testing.assert_allclose(batch[i].family.mean, single.family.mean, atol=1e-5)
        np.testing.assert_allclose(batch[i].covariance, single.covariance, atol=1e-5)
        np.testing.assert_allclose(batch[i].elbo, single.elbo, atol=1e-4)
        assert batch[i].trace.elbo.shape == (5,)
        assert_same_bits(batch[i].state.key, key)


@pytest.fixture(scope="module")
def starts():
    """A fit from three starts, one of them where the gradient is nan and stays so."""
    means = jnp.array([[0.0, 0.0], [100.0, 0.0], [2.0, 1.0]])
    begin = stacked([DiagonalGaussian.from_variances(mean, 0.5 * jnp.ones(2)) for mean in means])
    keys = jax.random.split(jax.random.key(4), 3)
    nan_beyond_50 = lambda z: log_density(z) + jnp.where(z[0] > 50, jnp.nan, 0.0) * z[0]  # noqa: E731
    return begin, fit(nan_beyond_50, begin, key=keys, num_steps=3 * CHUNK)


def test_one_failing_run_of_a_batch_keeps_its_own_status(starts):
    begin, batch = starts
    assert (batch.status == Status.ok).tolist() == [True, False, True]
    assert batch[1].status == Status.nonfinite
    assert batch.refused.tolist() == [0, 3 * CHUNK, 0]
    assert jnp.isfinite(batch.elbo).tolist() == [True, False, True]
    np.testing.assert_array_equal(batch[1].family.mean, begin.mean[1])
    assert [text.split(":")[0] for text in batch.message] == ["ok", "nonfinite", "ok"]


def test_every_run_of_a_batch_begins_at_its_own_start(starts):
    begin, batch = starts
    single = fit(
        start=jax.tree.map(lambda leaf: leaf[2], begin), key=batch.state.key[2], num_steps=3 * CHUNK
    )
    np.testing.assert_allclose(batch[2].family.mean, single.family.mean, atol=1e-5)
    np.testing.assert_allclose(batch[2].elbo, single.elbo, atol=1e-4)


def test_the_best_run_of_a_batch_is_a_good_one_with_the_highest_elbo(starts):
    _, batch = starts
    good = [0, 2]
    best = good[int(np.argmax(np.asarray(batch.elbo)[good]))]
    assert batch.best.elbo == batch.elbo[best]
    assert_same_bits(batch.best.family, batch[best].family)


def test_a_run_that_failed_is_the_best_only_where_none_is_of_use(starts):
    _, batch = starts
    kinds = (Status.improper, Status.out_of_budget, Status.not_converged)
    status = jax.tree.map(lambda *codes: jnp.stack(codes), *kinds)
    batch = dataclasses.replace(batch, status=status, elbo=jnp.array([9.0, 1.0, 5.0]))
    assert batch.best.elbo == 1
    assert dataclasses.replace(batch, elbo=jnp.array([9.0, jnp.nan, 5.0])).best.elbo == 9


def test_the_runs_of_a_batch_are_indexed_like_a_list(starts):
    _, batch = starts
    assert_same_bits(batch[-1].family, batch[2].family)
    for run in (3, -4):
        with pytest.raises(IndexError, match="batch of 3"):
            batch[run]
    assert [run.num_steps for run in batch] == [3 * CHUNK] * 3
    for call in (len, lambda posterior: posterior[0]):
        with pytest.raises(TypeError, match="this is one run"):
            call(batch[0])
    assert batch[0].best is not batch[1] and batch[0].best.elbo == batch[0].elbo


def test_the_summary_of_a_batch_has_a_line_a_run(starts):
    _, batch = starts
    lines = batch.summary().splitlines()
    assert lines[0].startswith("3 runs of DiagonalGaussian over 2 parameters, 60 steps")
    assert "60 steps refused" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["run 0", "run 1", "run 2"]
    assert "ok: " in lines[1] and "nonfinite: The log density" in lines[2]


def test_draws_and_densities_of_a_batch_have_an_axis_of_runs(starts):
    _, batch = starts
    draws = batch.sample(jax.random.key(0), 4)
    assert draws.shape == (3, 4, 2) and batch.sample(jax.random.key(0)).shape == (3, 2)
    log_prob = batch.log_prob(draws)
    for i in range(3):
        np.testing.assert_allclose(log_prob[i], batch[i].log_prob(draws[i]), rtol=1e-5)
    with pytest.raises(ValueError, match=r"`predict` needs one run.*posterior.best"):
        batch.predict(lambda z: z, jax.random.key(0))


def test_one_run_of_a_batch_can_be_resumed(starts):
    _, batch = starts
    one = batch[2]
    longer = fit(key=one.state.key, num_steps=4 * CHUNK, state=one.state)
    assert longer.num_steps == 4 * CHUNK and not longer.is_batch
    assert kl_to_target(longer.family) < kl_to_target(one.family)


def test_a_batch_fails_only_where_every_run_fails(starts):
    begin, batch = starts
    nan_everywhere = lambda z: log_density(z) + jnp.where(z[0] != 0, jnp.nan, 0.0) * z[0]  # noqa: E731
    with pytest.raises(FitError, match="nonfinite") as error:
        fit(nan_everywhere, begin, key=batch.state.key)
    assert len(error.value.posterior) == 3


def test_starts_and_keys_must_be_equally_many(starts):
    begin, _ = starts
    with pytest.raises(ValueError, match=r"`fit\(target, family, key=...\)` got 3 starts.*\(2,\)"):
        fit(start=begin, key=jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ValueError, match=r"got 3 starts and keys of shape \(\).*one key a start"):
        fit(start=begin)


# Momentum, schedules, rules.


def trajectory(target, start, num_steps, **options):
    """The families after every step, by chunks of one."""
    families = []
    fit(
        target, start, num_steps=num_steps, chunk_size=1, elbo_draws=3,
        callback=lambda told: families.append(moments(told.family)) and None, **options,
    )  # fmt: skip
    return families


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_momentum_is_the_natural_momentum_of_the_paper(family, x64):
    # mu_{k+1} = mu_k - t1 ghat + t2 Sigma_k Sigma_{k-1}^-1 (mu_k - mu_{k-1}), k = 1, 2, ...
    t, r, num = 0.3, 0.7, 8
    found = trajectory(
        log_density, family.standard(2), num, estimator=AtMean(), step_size=t, momentum=r
    )
    mu, S = np.zeros(2), np.eye(2)
    last_mu, last_S = mu, S
    for k in range(1, num + 1):
        Sigma = np.linalg.inv(S)
        t1 = t * (1 - r) / (1 - r**k)
        t2 = r * (1 - r ** (k - 1)) / (1 - r**k)
        G = S - (PRECISION if family is Gaussian else np.diag(np.diag(PRECISION)))
        new = mu - t1 * Sigma @ PRECISION @ (mu - MEAN) + t2 * Sigma @ last_S @ (mu - last_mu)
        last_mu, last_S = mu, S
        mu, S = new, S - t * G + 0.5 * t**2 * G @ Sigma @ G
        np.testing.assert_allclose(found[k - 1].mean, mu, atol=1e-12)
        np.testing.assert_allclose(found[k - 1].covariance, np.linalg.inv(S), atol=1e-12)


def test_no_momentum_is_a_momentum_of_zero():
    options = {"estimator": Stl(2), "step_size": 0.1}
    state = without = iblr.init(DiagonalGaussian.standard(2), jax.random.key(0))
    for _ in range(3):
        state, _ = iblr.step(state, curved, momentum=0.0, **options)
        without, _ = iblr.step(without, curved, **options)
    np.testing.assert_allclose(state.family.mean, without.family.mean, rtol=1e-6)
    np.testing.assert_allclose(state.family.scale, without.family.scale, rtol=1e-6)
    fitted = fit(curved, num_steps=3, momentum=0.0)
    assert_same_bits(fitted.family, fit(curved, num_steps=3).family)
    np.testing.assert_allclose(fitted.family.mean, without.family.mean, rtol=1e-5)


@pytest.mark.parametrize(
    "schedule",
    [optax.exponential_decay(0.4, transition_steps=5, decay_rate=0.5), lambda k: 0.3 / (1.0 + k)],
    ids=["optax", "own"],
)
def test_a_schedule_of_the_step_index_is_followed(schedule):
    # q has the width of the target, so the curvature is zero and mu contracts by 1 - t_k.
    start = DiagonalGaussian.standard(2)
    unit = lambda z: -0.5 * ((z - 1) ** 2).sum()  # noqa: E731
    posterior = fit(unit, start, estimator=AtMean(), step_size=schedule, num_steps=10, chunk_size=4)
    sizes = np.array([float(schedule(k)) for k in range(10)])
    np.testing.assert_allclose(posterior.mean, 1 - np.prod(1 - sizes), rtol=1e-5)
    np.testing.assert_allclose(posterior.standard_deviation, 1.0, rtol=1e-5)
    np.testing.assert_allclose(posterior.trace.step_size, sizes[[3, 7, 9]], rtol=1e-6)


def test_the_default_step_size_decays():
    posterior = iblr.fit(
        log_density, DiagonalGaussian.standard(2), key=jax.random.key(0), num_steps=200
    )
    np.testing.assert_allclose(
        posterior.trace.step_size, [2 / (10 + 99), 2 / (10 + 199)], rtol=1e-5
    )
    assert iblr.Gaussian.standard(1).defaults.step_size(100, 8)(0) == pytest.approx(0.1)


def test_a_trust_region_bounds_the_first_step():
    narrow = lambda z: -0.5 * 1e4 * ((z - 30.0) ** 2).sum()  # noqa: E731
    wide = DiagonalGaussian.standard(2)
    options = {"estimator": AtMean(), "step_size": 0.5, "num_steps": 1}
    free, bound = (
        fit(narrow, wide, trust_region=trust_region, **options).family
        for trust_region in (False, True)
    )
    assert np.linalg.norm(free.mean) > 1e5
    np.testing.assert_allclose(np.linalg.norm(bound.mean), np.sqrt(2), rtol=1e-5)
    # Gains of precision stop at x = -3: f(-3) = 1 + 3 + 9/2. Without the region one step may
    # still not change a direction by more than a factor of 100 in float32.
    np.testing.assert_allclose(bound.scale, (1 + 3 + 4.5) ** -0.5, rtol=1e-5)
    np.testing.assert_allclose(free.scale, 0.01, rtol=1e-5)


def test_directions_cut_to_what_the_precision_can_hold_are_counted():
    narrow = lambda z: -0.5 * jnp.array([1e5, 1.0]) @ z**2  # noqa: E731
    posterior = fit(narrow, estimator=AtMean(), step_size=1.0, num_steps=1)
    assert posterior.limited == 1 and "1 changes or draws limited" in posterior.summary()


def test_a_trust_region_is_for_the_improved_rule_only():
    with pytest.raises(ValueError, match="trust_region"):
        fit(trust_region=True, rule=iblr.natural_gradient_step)


def test_the_original_rule_leaving_the_set_at_every_step_is_reported_as_such():
    upwards = lambda z: 4.0 * (z**2).sum()  # noqa: E731
    options = {"rule": iblr.natural_gradient_step, "step_size": 0.5, "estimator": AtMean()}
    posterior = fit(upwards, throw=False, **options)
    assert posterior.status == Status.left_set
    assert "smaller step size, `line_search_step`, or `improved_step`" in posterior.message
    assert_same_bits(posterior.family, DiagonalGaussian.standard(2))
    with pytest.raises(FitError, match="left_set"):
        fit(upwards, **options)


def test_the_original_rule_leaving_the_set_now_and_then_is_reported_as_such():
    options = {"rule": iblr.natural_gradient_step, "step_size": 1.1, "estimator": Rep(1)}
    posterior = fit(throw=False, num_steps=CHUNK, **options)
    assert 0 < posterior.refused < CHUNK
    assert posterior.status == Status.left_set
    assert jnp.isfinite(posterior.elbo) and (posterior.family.scale > 0).all()


def test_steps_under_vmap_equal_a_loop():
    keys = jax.random.split(jax.random.key(5), 3)
    starts = [
        DiagonalGaussian.from_variances(m * jnp.ones(2), jnp.ones(2)) for m in (0.0, 1.0, 2.0)
    ]
    options = {"estimator": Stl(2), "step_size": lambda k: 0.5 / (1.0 + k), "momentum": 0.5}
    step = jax.jit(lambda state: iblr.step(state, curved, **options))
    batch = jax.vmap(iblr.init)(stacked(starts), keys)
    for _ in range(3):
        batch, info = jax.jit(jax.vmap(lambda state: iblr.step(state, curved, **options)))(batch)
    assert info.refused.shape == (3,) and not info.refused.any()
    np.testing.assert_array_equal(batch.step, [3, 3, 3])
    for i, start in enumerate(starts):
        state = iblr.init(start, keys[i])
        for _ in range(3):
            state, _ = step(state)
        one = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
        np.testing.assert_allclose(one.family.mean, state.family.mean, rtol=1e-5)
        np.testing.assert_allclose(one.family.scale, state.family.scale, rtol=1e-5)
        np.testing.assert_allclose(one.momentum, state.momentum, rtol=1e-4)


def test_steps_of_the_users_own_loop_are_those_of_a_fit():
    state = iblr.init(DiagonalGaussian.standard(2), jax.random.key(0))
    for _ in range(3):
        state, _ = iblr.step(state, curved, estimator=Stl(2), step_size=0.1)
    np.testing.assert_allclose(fit(curved, num_steps=3).family.mean, state.family.mean, rtol=1e-5)


# Callbacks, interrupts, progress.


def test_the_callback_is_told_of_every_chunk():
    told = []
    posterior = fit(num_steps=2 * CHUNK + 5, callback=told.append)
    assert [t.step for t in told] == [CHUNK, 2 * CHUNK, 2 * CHUNK + 5]
    assert all(t.num_steps == 2 * CHUNK + 5 and t.step_size == pytest.approx(0.1) for t in told)
    np.testing.assert_array_equal([t.elbo for t in told], posterior.trace.elbo)
    np.testing.assert_array_equal([t.elbo_se for t in told], posterior.trace.elbo_se)
    assert_same_bits(told[-1].family, posterior.family)
    assert 0 < told[0].seconds < told[1].seconds < posterior.seconds


def test_the_callback_can_stop_a_fit():
    posterior = fit(callback=lambda told: told.step >= 2 * CHUNK)
    assert posterior.status == Status.ok and posterior.num_steps == 2 * CHUNK
    assert posterior.num_gradients == 2 * CHUNK * 4
    assert_same_bits(posterior.state, fit(num_steps=2 * CHUNK).state)


def test_an_error_in_the_callback_is_the_users_to_see():
    def broken(told):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(callback=broken)


def test_an_interrupt_returns_the_best_so_far_which_resumes_to_the_same_bits():
    def stop(told):
        if told.step == 3 * CHUNK:
            raise KeyboardInterrupt

    part = fit(curved, callback=stop)
    assert part.status == Status.interrupted and part.num_steps == 3 * CHUNK
    assert "Pass `state=`" in part.message
    best = int(np.argmax(part.trace.elbo))
    assert part.elbo == part.trace.elbo[best]
    best_fit = fit(curved, num_steps=(best + 1) * CHUNK)
    assert_same_bits(part.family, best_fit.family)
    assert_same_bits(fit(curved, state=part.state).state, fit(curved).state)


def test_the_standard_error_of_an_interrupted_fit_is_that_of_its_elbo():
    seen = []

    def stop(told):
        seen.append(float(told.elbo))
        if told.elbo < max(seen):  # the best chunk is not the last one
            raise KeyboardInterrupt

    part = fit(curved, num_steps=50 * CHUNK, callback=stop)
    assert part.status == Status.interrupted
    best = int(np.argmax(part.trace.elbo))
    assert best < len(part.trace.elbo) - 1 and part.elbo == part.trace.elbo[best]
    assert part.elbo_se == part.trace.elbo_se[best]


def interrupted_in_chunk(monkeypatch, number, *arguments, **options):
    """A fit whose chunk of that number, counted from one, is interrupted before it ends."""
    chunk, calls = steps._chunk, []

    def interrupted(*chunk_arguments):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return chunk(*chunk_arguments)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_chunk", interrupted)
        return fit(*arguments, **options)


def test_an_interrupt_within_a_chunk_loses_only_that_chunk(monkeypatch):
    part = interrupted_in_chunk(monkeypatch, 3, curved)
    assert part.status == Status.interrupted and part.num_steps == 2 * CHUNK
    assert part.trace.elbo.shape == (2,) and jnp.isfinite(part.elbo)
    assert_same_bits(fit(curved, state=part.state).state, fit(curved).state)


def test_an_interrupt_within_the_first_chunk_returns_the_start(monkeypatch):
    part = interrupted_in_chunk(monkeypatch, 1, curved)
    assert part.status == Status.interrupted and part.num_steps == 0
    assert part.trace.elbo.shape == (0,) and part.num_gradients == 0
    assert_same_bits(part.family, DiagonalGaussian.standard(2))
    assert "interrupted" in part.summary()
    assert_same_bits(fit(curved, state=part.state).state, fit(curved).state)


def test_an_interrupt_within_the_first_chunk_of_a_batch_returns_the_starts(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    part = interrupted_in_chunk(monkeypatch, 1, curved, key=keys)
    assert bool((part.status == Status.interrupted).all()) and part.num_steps == 0
    assert all(text.startswith("interrupted") for text in part.message)
    assert len(part.summary().splitlines()) == 4
    assert part[1].trace.elbo.shape == (0,)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_progress_is_one_line_that_is_rewritten(capsys):
    fit(num_steps=3 * CHUNK, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1
    lines = err.strip("\r\n").split("\r")
    assert [line.split()[1] for line in lines] == ["20/60", "40/60", "60/60"]
    for line in lines:
        assert "ELBO" in line and "±" in line and "step size 0.1" in line and "steps/s" in line


def test_a_fit_is_quiet_where_there_is_no_terminal(capsys):
    fit(num_steps=CHUNK)
    fit(num_steps=CHUNK, progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("progress, shown", [(None, True), (False, False)])
def test_a_terminal_shows_progress_unless_told_not_to(progress, shown, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    fit(num_steps=CHUNK, progress=progress)
    assert ("ELBO" in terminal.getvalue()) == shown


def test_progress_of_a_batch_is_that_of_its_best_run(capsys):
    batch = fit(num_steps=CHUNK, key=jax.random.split(jax.random.key(3), 3), progress=True)
    err = capsys.readouterr().err
    assert f"ELBO {float(batch.elbo.max()):.4f}" in err and "(best of 3)" in err


def test_the_line_of_progress_is_ended_where_a_fit_is_interrupted(capsys):
    def stop(told):
        raise KeyboardInterrupt

    fit(progress=True, callback=stop)
    assert capsys.readouterr().err.endswith("\n")


# Failure.


def nan_but_at_the_start(z):
    return log_density(z) + jnp.where(jnp.abs(z).max() > 1e-6, jnp.nan, 0.0) * z[0]


def test_a_fit_whose_every_step_is_refused_raises_with_what_it_had_reached():
    with pytest.raises(FitError, match=r"(?s)`iblr.fit` failed. nonfinite.*throw=False") as error:
        fit(nan_but_at_the_start)
    posterior = error.value.posterior
    assert isinstance(error.value, RuntimeError)
    assert posterior.status == Status.nonfinite
    assert posterior.refused == posterior.num_steps == CHUNK  # it stops where it is hopeless
    assert_same_bits(posterior.family, DiagonalGaussian.standard(2))


def test_a_failed_fit_is_returned_where_that_is_asked_for():
    posterior = fit(nan_but_at_the_start, throw=False)
    assert posterior.status == Status.nonfinite
    assert "nonfinite: The log density" in posterior.summary()
    assert "20 steps refused" in posterior.summary()


def test_steps_that_are_refused_are_counted_and_reported():
    # At the standard normal Stl has no noise, so the family stays and the draws are known. The
    # value is finite everywhere, the gradient nan beyond one.
    def target(z):
        return -0.5 * (z**2).sum() + jnp.sqrt(jnp.where(z[0] > 1, 0.0 * z[0], 1.0))

    posterior = fit(target)
    expected = 0
    for k in range(5 * CHUNK):
        draw_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), k))
        expected += bool((np.abs(standard_normals(draw_key, (2, 2), float)[:, 0]) > 1).any())
    assert 10 < expected < 90
    assert posterior.refused == expected
    assert posterior.status == Status.refused_steps
    assert f"{expected} steps refused" in posterior.summary()


def test_a_fit_that_diverges_returns_the_best_it_had():
    # Narrow at first, q widens until one draw in a hundred falls off the cliff: few of the steps,
    # of four draws each, but every ELBO.
    def cliff(z):
        return -0.5 * (z**2).sum() + jnp.where(jnp.abs(z[0]) > 2.6, -jnp.inf, 0.0)

    start = DiagonalGaussian.from_variances(jnp.zeros(2), 1e-2 * jnp.ones(2))
    posterior = fit(cliff, start, elbo_draws=1000, throw=False)
    finite = np.isfinite(posterior.trace.elbo)
    assert finite[0] and not finite[-1] and posterior.refused < 10
    assert posterior.status == Status.diverged
    best = int(np.argmax(np.where(finite, posterior.trace.elbo, -np.inf)))
    assert posterior.elbo == posterior.trace.elbo[best]
    assert posterior.elbo_se == posterior.trace.elbo_se[best]
    assert_same_bits(posterior.family, fit(cliff, start, num_steps=(best + 1) * CHUNK).family)
    with pytest.raises(FitError, match="diverged: The fit moved away"):
        fit(cliff, start, elbo_draws=1000)


def test_a_log_density_of_minus_infinity_refuses_the_step_though_its_gradient_is_zero():
    def cliff(z):
        return -0.5 * (z**2).sum() + jnp.where(jnp.abs(z[0]) > 1.0, -jnp.inf, 0.0)

    posterior = fit(cliff, num_steps=CHUNK, throw=False)
    expected = 0
    for k in range(CHUNK):
        draw_key, _ = jax.random.split(jax.random.fold_in(jax.random.key(0), k))
        expected += bool((np.abs(standard_normals(draw_key, (2, 2), float)[:, 0]) > 1).any())
    assert 0 < expected < CHUNK and posterior.refused == expected
    assert posterior.status == Status.nonfinite


# Bad arguments.


@pytest.mark.parametrize(
    "options, says",
    [
        ({"key": "legacy"}, r"`fit\(key=...\)` needs a typed key"),
        ({"key": 0}, r"`fit\(key=...\)` needs a typed key"),
        ({"key": None}, r"`fit\(key=...\)` needs a typed key"),
        ({"key": "matrix"}, r"`fit\(key=...\)` takes one axis of keys.*\(2, 2\)"),
        ({"num_steps": 0}, r"`fit\(num_steps=...\)` must be a whole number of at least 1.*0"),
        ({"num_steps": -5}, r"`fit\(num_steps=...\)` must be a whole number"),
        ({"num_steps": 2.5}, r"`fit\(num_steps=...\)` must be a whole number"),
        ({"num_steps": True}, r"`fit\(num_steps=...\)` must be a whole number"),
        ({"num_steps": float("nan")}, r"`fit\(num_steps=...\)` must be a whole number"),
        ({"chunk_size": 0}, r"`fit\(chunk_size=...\)` must be a whole number of at least 1"),
        ({"elbo_draws": 1}, r"`fit\(elbo_draws=...\)` must be a whole number of at least"),
        ({"step_size": 0.0}, r"`fit\(step_size=...\)` must be a positive number or a schedule"),
        ({"step_size": -0.1}, r"`fit\(step_size=...\)` must be a positive number"),
        ({"step_size": float("nan")}, r"`fit\(step_size=...\)` must be a positive number"),
        ({"step_size": float("inf")}, r"`fit\(step_size=...\)` must be a positive number"),
        ({"step_size": np.ones(2)}, r"`fit\(step_size=...\)` must be a positive number"),
        ({"step_size": "0.1"}, r"`fit\(step_size=...\)` must be a positive number"),
        ({"momentum": 1.0}, r"`fit\(momentum=...\)` must be in \[0, 1\), but got 1.0"),
        ({"momentum": -0.1}, r"`fit\(momentum=...\)` must be in"),
        ({"momentum": float("nan")}, r"`fit\(momentum=...\)` must be in"),
        ({"start": 3}, r"`fit\(target, family\)` needs a family such as"),
        ({"start": Gaussian}, r"`fit\(target, family\)` needs a family such as"),
        ({"tol": 0.0}, r"`fit\(tol=...\)` must be a positive number"),
        ({"max_gradients": 0}, r"`fit\(max_gradients=...\)` must be a whole number"),
        ({"max_seconds": -1.0}, r"`fit\(max_seconds=...\)` must be a positive number"),
        ({"estimator": "stl"}, r"`fit\(estimator=...\)`"),
        ({"estimator": Stl}, r"`fit\(estimator=...\)`"),
        ({"rule": "improved"}, r"`fit\(rule=...\)`"),
        ({"state": "something"}, r"`fit\(state=...\)`"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, says, monkeypatch):
    def never(*arguments):
        raise AssertionError("a chunk was run")

    monkeypatch.setattr(steps, "_chunk", never)
    keys = {"legacy": jax.random.PRNGKey(0), "matrix": jax.random.split(jax.random.key(0), (2, 2))}
    if isinstance(options.get("key"), str):
        options = options | {"key": keys[options["key"]]}
    with no_type_hook(), pytest.raises(ValueError, match=says):
        fit(**options)


def test_there_is_no_default_key():
    with pytest.raises(TypeError, match="key"):
        iblr.fit(log_density, DiagonalGaussian.standard(2))


def test_a_state_must_go_with_the_family_and_the_key():
    state = fit(num_steps=CHUNK).state
    with pytest.raises(ValueError, match=r"`fit\(.*state"):
        fit(start=Gaussian.standard(2), state=state)
    with pytest.raises(ValueError, match=r"`fit\(.*state"):
        fit(start=DiagonalGaussian.standard(3), state=state)
    with pytest.raises(ValueError, match=r"`fit\(.*state"):
        fit(key=jax.random.split(jax.random.key(0), 3), state=state)


# The posterior.


def test_predictions_push_draws_through_a_function(fitted):
    A = np.array([[1.0, 0.0], [1.0, -1.0], [2.0, 1.0]])
    prediction = fitted.predict(
        lambda z: {"linear": jnp.asarray(A, jnp.float32) @ z, "square": z[0] ** 2},
        jax.random.key(6),
        draws=4000,
    )
    draws = np.asarray(prediction.draws["linear"], float)
    variances = np.diag(A @ COVARIANCE @ A.T)
    assert draws.shape == (4000, 3) and prediction.draws["square"].shape == (4000,)
    assert agrees(draws, A @ MEAN)
    assert agrees((draws - A @ MEAN) ** 2, variances)
    assert agrees(prediction.draws["square"], MEAN[0] ** 2 + COVARIANCE[0, 0])
    np.testing.assert_allclose(prediction.mean["linear"], draws.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(
        prediction.standard_deviation["linear"], draws.std(axis=0), rtol=1e-4
    )


def test_intervals_have_their_probability(fitted):
    prediction = fitted.predict(lambda z: z, jax.random.key(7), draws=20_000)
    sd = np.sqrt(np.diag(COVARIANCE))
    for probability in (0.5, 0.9):
        lower, upper = prediction.interval(probability)
        end = stats.norm.ppf(0.5 + 0.5 * probability)
        # Standard error of a quantile: sqrt(p (1 - p) / n) over the density there.
        tail = 0.5 * (1 - probability)
        error = sd * np.sqrt(tail * (1 - tail) / 20_000) / stats.norm.pdf(end)
        assert (np.abs(lower - (MEAN - end * sd)) < LARGEST_Z * error).all()
        assert (np.abs(upper - (MEAN + end * sd)) < LARGEST_Z * error).all()
    for probability in (0.0, 1.0, -1.0, 90.0, float("nan")):
        with pytest.raises(ValueError, match=r"`interval\(probability\)` must be between 0 and 1"):
            prediction.interval(probability)


def test_the_posterior_samples_and_scores_like_its_family(fitted):
    draws = fitted.sample(jax.random.key(8), 5)
    np.testing.assert_array_equal(draws, fitted.family.sample(jax.random.key(8), 5))
    np.testing.assert_array_equal(fitted.log_prob(draws), fitted.family.log_prob(draws))
    assert fitted.sample(jax.random.key(8)).shape == (2,)


def test_the_summary_says_how_the_fit_went_and_what_it_found(fitted):
    text = fitted.summary()
    assert str(fitted) == text
    assert "Gaussian over 2 parameters, 500 steps, 8000 gradients" in text
    assert f"ELBO {float(fitted.elbo):.4f} ±" in text
    assert "ok: Finished without trouble." in text and "refused" not in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[4:]}
    assert list(rows) == ["z[0]", "z[1]"]
    sd = np.sqrt(np.diag(COVARIANCE))
    expected = np.stack([MEAN, sd, MEAN - 1.6449 * sd, MEAN + 1.6449 * sd], axis=1)
    np.testing.assert_allclose(np.array([*rows.values()], float), expected, atol=2e-3)


@pytest.mark.parametrize("rows", [0, 1])
def test_the_summary_can_be_cut(fitted, rows):
    assert fitted.summary(rows=rows).endswith(f"... and {2 - rows} more")


def test_parameters_keep_their_structure_and_names():
    params = {"bias": jnp.zeros(()), "weights": (jnp.zeros((1, 2)),)}
    target = lambda z: -0.5 * ((z["weights"][0] ** 2).sum() + (z["bias"] - 1) ** 2)  # noqa: E731
    posterior = fit(target, DiagonalGaussian.standard(like=params))
    assert jax.tree.structure(posterior.mean) == jax.tree.structure(params)
    assert posterior.standard_deviation["weights"][0].shape == (1, 2)
    assert posterior.sample(jax.random.key(0), 3)["weights"][0].shape == (3, 1, 2)
    np.testing.assert_allclose(posterior.mean["bias"], 1.0, atol=1e-3)
    for name in ("bias", "weights.0[0, 0]", "weights.0[0, 1]"):
        assert f"\n{name} " in posterior.summary()

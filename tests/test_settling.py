"""Fits without settings of other families: rounds, gains, divergences, mixtures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from automatic_helpers import KEY, curved, fit, gap, two_modes
from helpers import agrees, assert_same_bits, slow

import iblr
from iblr import Status, budgets, judging, settling
from iblr.families.base import bold_steps
from iblr.history import Progress, ProgressLine, Watch


@pytest.fixture(scope="module")
def fitted():
    return fit()


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
def test_a_prior_that_is_a_family_is_seen_from_the_logarithms_too():
    counts = jnp.array([7.0, 3.0])
    prior = iblr.Gamma(jnp.ones(2), 0.5)
    target = iblr.Target(
        log_likelihood=lambda rate: (counts * jnp.log(rate) - 4.0 * rate).sum(), prior=prior
    )
    posterior = iblr.fit(target, iblr.Gamma.standard(2), key=KEY)
    np.testing.assert_allclose(posterior.family.shape, counts + 1, rtol=1e-3)
    assert posterior.verdict.startswith("Good") and posterior.diagnosis.climbs == 10


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


def test_an_interrupt_while_a_gain_is_measured_keeps_the_fit(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(settling, "_look", interrupt)
    posterior = iblr.fit(correlated, iblr.DiagonalGaussian.standard(2), key=KEY)
    assert posterior.stopped_by == "interrupt" and posterior.num_steps == 100


def test_a_state_is_of_one_family(fitted):
    state = iblr.fit(correlated, iblr.DiagonalGaussian.standard(2), key=KEY, tol=0.5).state
    with pytest.raises(ValueError, match="of the same family"):
        iblr.fit(correlated, iblr.SkewGaussian.standard(2), key=KEY, state=state)


def test_where_a_fit_began_is_kept_when_it_goes_on():
    """A way is known to be endless by how much wider q is than at the start."""
    first = iblr.DiagonalGaussian.from_variances(jnp.zeros(2), 0.01 * jnp.ones(2))
    part = fit(family=first, init=None, max_gradients=12000)
    assert isinstance(part.state, settling.Settling)
    watch = Watch(None, ProgressLine(False), 0.0)
    task = budgets.Task(curved, part.family, KEY, part.state, 0.01, None, None, watch)
    variances = judging._first_variances(part, task)
    np.testing.assert_allclose(variances, 0.01, rtol=1e-5)


def test_a_round_is_a_new_one_even_where_it_is_longer():
    told = lambda step, spent: Progress(  # noqa: E731
        step, 1000, 0.0, 0.0, 0.1, None, 0.0, None, spent, np.nan
    )
    limits = budgets.Limits(np.inf, np.inf, None)
    for step, spent in ((100, 500), (200, 1000), (100, 2000)):
        assert not limits(told(step, spent))
    assert limits.spent == 1000 + 2000 + 3 * budgets.ELBO_DRAWS


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


def test_the_gain_is_measured_with_the_same_noise():
    target, before = iblr.Target(curved), iblr.Gaussian.standard(2)
    after = iblr.Gaussian.from_covariance(jnp.full(2, -0.5), jnp.eye(2))
    seen = settling._look(target, before, after, KEY, 1, 0.2, 16)
    gain = seen.gain
    lowest = gain.value - settling.QUANTILE * gain.standard_error
    assert gain.standard_error <= 0.2 / 4 or lowest > 0.2  # it is told from `tol`
    assert seen.evaluations % 1000 == 0
    assert abs(gain.value - gap(before)) < 5 * gain.standard_error
    values = [settling._log_ratios(target, q, KEY)[0] for q in (after, before)]
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
    assert settling._divergence(ratios, 0.0).bound == 0
    assert settling._divergence(ratios + 1e6, 1e-3).bound == pytest.approx(1e-3)
    assert settling._divergence(ratios, 2 * settling.LARGEST_DIVERGENCE) == settling.UNKNOWN
    spread = np.random.default_rng(0).normal(size=500)
    assert settling._divergence(spread, 0.0) == settling.UNKNOWN
    for bad in (np.nan, -np.inf, 1e3):
        assert settling._divergence(np.append(ratios, bad), 0.0) == settling.UNKNOWN


@pytest.mark.parametrize("offset", [0.0, 1e6, 1e8])
def test_a_gain_is_no_surer_than_the_rounding_of_log_p(offset):
    """A constant of 1e8 leaves 8 nats between neighbouring values in float32."""
    target = iblr.Target(lambda z: offset - 0.5 * (z**2).sum())
    q = iblr.DiagonalGaussian.standard(2)
    seen = settling._look(target, q, q, KEY, 1, 1e-9, 2)
    expected = np.finfo(np.float32).eps * offset / np.sqrt(settling.DRAWS)
    assert seen.gain.rounding == pytest.approx(expected, rel=0.01, abs=1e-7)
    assert seen.gain.gap(None).bound >= expected


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


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_slow_drift_is_not_taken_for_rest(seed, x64):
    """Few draws see the curvature of a centred hierarchy: residuals alone told 0.01 at 0.5."""
    fitted = fit(schools, init=jnp.zeros(10), key=jax.random.key(seed), throw=False)
    assert fitted.stopped_by == "max_gradients" and fitted.gap_bound > 0.01
    assert gap_of_schools(fitted.family) > 0.1 and fitted.verdict.startswith("Bad")


@pytest.mark.slow
def test_a_mixture_that_may_have_missed_a_mode_takes_more_than_one_round():
    start = iblr.GaussianMixture.from_moments(jnp.zeros((2, 2)), jnp.stack([jnp.eye(2)] * 2))
    parts = {"a": start, "b": iblr.Gamma.standard(1)}
    assert settling._has_mixture(start) and settling._has_mixture(iblr.Product(parts))
    assert not settling._has_mixture(iblr.Product({"b": parts["b"]}))
    posterior = iblr.fit(lambda z: -0.5 * (z**2).sum(), start, key=KEY)
    assert posterior.num_steps > settling._defaults(start).first_round


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

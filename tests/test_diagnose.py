"""Importance weights, corrected answers and the verdict, against known answers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import no_type_hook, slow
from scipy import stats

import iblr
from iblr import importance
from iblr.corrected import Corrected
from iblr.diagnose import examine
from iblr.importance import Importance, Moved, smoothed, weigh
from iblr.status import Status
from iblr.tails import mass_outside
from iblr.verdict import Diagnosis, Mode, judge

KEY = jax.random.key(0)


def gaussian(mean, sd):
    return iblr.Gaussian.from_covariance(jnp.array([mean]), jnp.array([[sd**2]]))


# k-hat.


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_the_shape_of_a_pareto_tail_is_found(shape):
    uniform = np.random.default_rng(0).uniform(size=100_000)
    _, khat = smoothed(-shape * np.log(uniform))
    assert khat == pytest.approx(shape, abs=0.08)  # (1 + k) / sqrt(950) is 0.04 to 0.06


def test_a_narrow_gaussian_has_the_shape_that_theory_gives():
    # w = exp((1 - s^2) x^2 / (2 s^2)) under N(0, s^2) has the tail index 1 / (1 - s^2).
    found = weigh(lambda z: -0.5 * (z**2).sum(), gaussian(0.0, 0.6), KEY, draws=20_000)
    assert found.khat == pytest.approx(1 - 0.6**2, abs=0.12)
    assert found.khat_se == pytest.approx((1 + found.khat) / math.sqrt(3 * math.sqrt(20_000)))


def test_a_wide_gaussian_has_bounded_weights():
    assert weigh(lambda z: -0.5 * (z**2).sum(), gaussian(0.0, 1.5), KEY).khat < 0.3


def test_constant_weights_are_perfect():
    found = weigh(lambda z: -0.5 * (z**2).sum() + 3.0, gaussian(0.0, 1.0), KEY)
    assert found.khat == -math.inf and found.usable
    assert found.ess == pytest.approx(1000)
    assert found.log_evidence == pytest.approx(3.0 + 0.5 * math.log(2 * math.pi), abs=1e-5)
    assert found.kl == pytest.approx(0, abs=1e-6) and found.elbo_se < 1e-5
    judged = judge(diagnosis(found, climbs=3))
    assert judged.startswith("Good: constant weights") and "3 dispersed starts" in judged


def test_equal_weights_beside_zeros_have_no_tail():
    ratios = np.where(np.arange(400) < 300, 0.5, -np.inf)
    weights, khat = smoothed(ratios)
    assert khat == -math.inf
    np.testing.assert_allclose(np.exp(weights[:300]), 1 / 300)


def test_ties_among_the_largest_weights_have_no_tail():
    ratios = np.concatenate([np.linspace(-3, 0, 900), np.full(100, 0.5)])
    assert smoothed(ratios)[1] == -math.inf


def test_too_few_finite_weights_tell_nothing():
    ratios = np.concatenate([np.linspace(-3, 0, 20), np.full(100, -np.inf)])
    assert math.isnan(smoothed(ratios)[1])
    assert math.isnan(smoothed(np.full(100, -np.inf))[1])


# Evidence and divergence.


def conjugate(batch_size=None):
    """y_i ~ N(z, 1) with z ~ N(0, 1), and log p(y)."""
    y = np.array([0.3, 1.1, -0.4, 2.0, 0.9])
    covariance = np.eye(5) + 1.0
    evidence = -0.5 * (
        y @ np.linalg.solve(covariance, y)
        + np.linalg.slogdet(covariance)[1]
        + 5 * math.log(2 * math.pi)
    )
    target = iblr.Target(
        log_likelihood=lambda z, y: (-0.5 * (y - z) ** 2 - 0.5 * math.log(2 * math.pi)).sum(),
        data=jnp.asarray(y, float),
        prior=iblr.Gaussian.standard(1),
        batch_size=batch_size,
    )
    return target, evidence, (y.sum() / 6, 6**-0.5)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_evidence_of_a_conjugate_model_is_exact_and_minibatches_take_no_part(batch_size):
    target, evidence, posterior = conjugate(batch_size)
    exact = weigh(target, gaussian(*posterior), KEY)
    assert exact.log_evidence == pytest.approx(evidence, abs=1e-5)
    assert exact.log_evidence_se < 1e-4


def test_the_evidence_has_its_standard_error_and_the_divergence_its_value():
    target, evidence, (mean, sd) = conjugate()
    q = gaussian(mean + 0.3 * sd, 1.3 * sd)
    found = [weigh(target, q, jax.random.key(seed), draws=500) for seed in range(40)]
    errors = np.array([one.log_evidence - evidence for one in found])
    spread = np.mean([one.log_evidence_se for one in found])
    assert abs(errors.mean()) < 4.5 * spread / math.sqrt(40)
    assert errors.std() == pytest.approx(spread, rel=0.5)
    kl = 0.5 * (1.3**2 + 0.3**2 - 1) - math.log(1.3)
    kls = np.array([one.kl for one in found])
    spread = np.mean([one.kl_se for one in found])
    assert abs(kls.mean() - kl) < 4.5 * spread / math.sqrt(40)
    assert kls.std() == pytest.approx(spread, rel=0.5)
    elbos = np.array([one.elbo for one in found])
    assert abs(elbos.mean() - (evidence - kl)) < 4.5 * elbos.std() / math.sqrt(40)


def test_a_support_brings_its_jacobian():
    # z ~ Exponential(1), so that log z is a Gumbel variable; the evidence is 1.
    q = gaussian(-0.4, 1.2).with_support(iblr.positive)
    found = weigh(lambda z: -z.sum(), q, KEY, draws=4000)
    assert abs(found.log_evidence) < 4.5 * found.log_evidence_se < 0.2


# Draws at which the target is not finite.


def test_draws_outside_the_support_weigh_nothing_and_are_counted():
    half_normal = lambda z: jnp.where(z[0] > 0, -0.5 * z[0] ** 2, -jnp.inf)  # noqa: E731
    found = weigh(half_normal, gaussian(0.0, 1.0), KEY)
    share = 1 - found.excluded / 1000
    assert 400 < found.excluded < 600 and found.undefined == 0
    assert found.khat == -math.inf
    assert found.log_evidence == pytest.approx(0.5 * math.log(2 * math.pi) + math.log(share))
    assert found.elbo == pytest.approx(found.log_evidence, abs=1e-5)
    assert np.isneginf(found.log_weights).sum() == found.excluded
    judged = judge(diagnosis(found, climbs=3))
    assert judged.startswith("Bad") and "outside the support" in judged


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_values_that_no_density_has_are_named(value):
    broken = lambda z: jnp.where(z[0] > 2.8, value, -0.5 * z[0] ** 2)  # noqa: E731
    found = weigh(broken, gaussian(0.0, 1.0), KEY)
    assert 0 < found.undefined == found.excluded < 10
    assert math.isfinite(found.elbo) and math.isfinite(found.log_evidence)
    judged = judge(diagnosis(found, climbs=3))
    assert judged.startswith("Fair: the target is nan or +inf at")


def test_a_target_that_is_nan_everywhere_is_bad():
    found = weigh(lambda z: jnp.nan * z.sum(), gaussian(0.0, 1.0), KEY, draws=100)
    assert found.excluded == found.undefined == 100 and not found.usable
    assert judge(diagnosis(found)).startswith("Bad: the target is not finite")


# Corrected answers.


def skewed(z):
    """The skew normal density of slope 3, but for a factor 2."""
    return (jax.scipy.stats.norm.logpdf(z) + jax.scipy.stats.norm.logcdf(3 * z)).sum()


SKEWED_MEAN = 3 / math.sqrt(10) * math.sqrt(2 / math.pi)
SKEWED_SD = math.sqrt(1 - SKEWED_MEAN**2)
SKEWNESS = 0.5 * (4 - math.pi) * (SKEWED_MEAN / SKEWED_SD) ** 3


def test_corrected_moments_of_a_skewed_target_are_right_and_uncorrected_are_not():
    q = gaussian(0.5, 1.1)
    found = weigh(skewed, q, KEY, draws=10_000)
    corrected = Corrected(q, found)
    mean, sd, moved = SKEWED_MEAN, SKEWED_SD, found.moved
    assert corrected.mean[0] == pytest.approx(mean, abs=4.5 * 1.1 * moved.shift_se[0])
    assert corrected.standard_deviation[0] == pytest.approx(sd, rel=4.5 * moved.spread_se[0])
    assert moved.shift_se[0] < 0.02 and moved.spread_se[0] < 0.03
    draws = corrected.sample(jax.random.key(1), 20_000)
    noise = sd / math.sqrt(min(corrected.ess, 20_000))
    assert draws.shape == (20_000, 1)
    assert draws.mean() == pytest.approx(mean, abs=4.5 * noise)
    skewness = float(jnp.mean(((draws - draws.mean()) / draws.std()) ** 3))
    assert skewness == pytest.approx(SKEWNESS, abs=0.15)  # that of q is 0


def test_corrected_answers_have_the_structure_of_points():
    target = lambda z: -0.5 * (z["a"] ** 2).sum() - z["b"].sum()  # noqa: E731
    start = iblr.Gaussian.standard(
        like={"a": jnp.zeros((2, 1)), "b": jnp.ones(2)}, support={"b": iblr.positive}
    )
    corrected = Corrected(start, weigh(target, start, KEY, draws=4000))
    for tree in (corrected.mean, corrected.standard_deviation):
        assert jax.tree.map(jnp.shape, tree) == {"a": (2, 1), "b": (2,)}
    moved = corrected.importance.moved
    mean, deviation = corrected.mean["b"], corrected.standard_deviation["b"]
    q_deviation = start.moments()[1]["b"]
    assert bool((jnp.abs(mean - 1) < 4.5 * moved.shift_se[2:] * q_deviation).all())
    assert bool((jnp.abs(jnp.log(deviation)) < 4.5 * moved.spread_se[2:]).all())
    assert moved.shift_se.max() < 0.1 and moved.spread_se.max() < 0.25
    assert bool((corrected.sample(KEY, 50)["b"] > 0).all())


def test_the_difference_of_distribution_functions_is_found():
    q = gaussian(
        0.0, 1.5
    )  # against N(0, 1): the functions differ most at sqrt(log(1.5^2) / (1 - 1.5^-2))
    moved = weigh(lambda z: -0.5 * (z**2).sum(), q, KEY, draws=10_000).moved
    x = math.sqrt(math.log(1.5**2) / (1 - 1.5**-2))
    normal = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))  # noqa: E731
    assert moved.shape[0] == pytest.approx(normal(x) - normal(x / 1.5), abs=3 * moved.shape_se[0])
    shift, spread, shape = moved.beyond_noise()
    assert shift == 0.0 and 0.3 < spread < math.log(1.5) and 0.05 < shape < moved.shape[0]


def test_what_noise_alone_does_is_not_called_a_difference():
    beyond = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        points, log_weights = rng.normal(size=(500, 8)), rng.normal(size=500)  # independent
        weights = np.exp(log_weights) / np.exp(log_weights).sum()
        beyond.append(importance._moved(points, weights).beyond_noise())
    assert np.mean(np.array(beyond).max(axis=1) > 0) <= 0.15


def test_a_number_that_is_the_same_in_all_draws_is_not_called_wrong():
    points = np.stack([np.full(500, 3.0), np.random.default_rng(0).normal(size=500)], axis=1)
    moved = importance._moved(points, np.full(500, 1 / 500))
    assert max(moved.beyond_noise()) < 1e-9


def test_heavy_weights_correct_nothing():
    with pytest.raises(ValueError, match="k-hat below 0.7, but k-hat is .*to_nuts"):
        Corrected(gaussian(0.0, 0.4), weights(khat=1.2))


# The verdict.

NO_MOVES = Moved(*np.zeros((6, 1)))


def weights(**changes):
    values = dict(
        elbo=-1.0, elbo_se=0.01, khat=0.2, resolution=1e-6, log_evidence=-0.95,
        log_evidence_se=0.01, kl=0.05, kl_se=0.01, ess=900.0,
        log_weights=np.full(1000, -math.log(1000)), excluded=0, undefined=0, moved=NO_MOVES,
        key=KEY,
    )  # fmt: skip
    return Importance(**values | changes)


def diagnosis(found=None, **changes):
    values = dict(importance=found or weights(), dim=1, shift=0.0, spread=0.0, shape=0.0, climbs=0)
    return Diagnosis(**values | changes)


@pytest.mark.parametrize(
    "expected, said, seen, rest",
    [
        ("Good", "k-hat 0.20", {}, {}),
        ("Good", "k-hat 0.50", {"khat": 0.5}, {}),
        ("Fair", "heavy tail", {"khat": 0.6}, {}),
        ("Fair", "draws=10000", {"khat": 0.75}, {}),
        ("Bad", "do not use the variances; ", {"khat": 0.75, "kl": 0.3}, {}),
        ("Bad", "try `iblr.GaussianMixture` or NUTS from here", {"khat": 1.2, "ess": 600.0}, {}),
        ("Bad", "do not use the variances", {"khat": 1.2, "kl": 0.2, "ess": 900.0}, {}),
        ("Fair", "heavier tails than q", {"khat": 0.95, "ess": 900.0}, {}),
        ("Bad", "do not use the variances", {"khat": 1.05, "ess": 900.0}, {}),
        ("Bad", "cannot be told", {"khat": math.nan}, {}),
        ("Bad", "cannot be told", {"khat": math.nan, "ess": math.nan}, {}),
        ("Fair", "not very near", {"kl": 0.2}, {}),
        ("Good", "KL 0.2", {"kl": 0.2, "ess": 650.0}, {"dim": 30}),
        ("Fair", "not very near", {"kl": 0.2, "ess": 350.0}, {"dim": 30}),
        ("Fair", "not very near", {"kl": 0.2, "ess": 800.0}, {"dim": 30}),
        ("Bad", "far from the target", {"kl": 0.6}, {}),
        ("Fair", "not very near", {"kl": 0.6, "ess": 300.0}, {"dim": 30}),
        ("Bad", "far from the target", {"kl": math.nan}, {}),
        ("Fair", "a mean is off by at least 0.30 sd", {}, {"shift": 0.3}),
        ("Bad", "a mean is off by at least 0.80 sd", {}, {"shift": 0.8}),
        ("Bad", "a mean is off", {}, {"shift": math.nan}),
        ("Fair", "an sd is off by at least 22 %", {}, {"spread": 0.2}),
        ("Bad", "use `posterior.corrected`", {}, {"spread": 0.5}),
        ("Fair", "probability is off by at least 0.10", {}, {"shape": 0.1}),
        ("Bad", "16.0 sd away, holds about 50 %", {}, {"modes": (Mode(16.0, 0.0),)}),
        ("Bad", "holds about 100 %", {}, {"modes": (Mode(16.0, 800.0), Mode(3.0, -9.0))}),
        ("Good", "k-hat", {}, {"modes": (Mode(9.0, -7.0),)}),
        ("Bad", "mass that cannot be told", {}, {"modes": (Mode(9.0, math.nan),)}),
        ("Bad", "a wider region around q holds about 50 %", {}, {"modes": (Mode(0.1, 0.0),)}),
        ("Good", "k-hat", {}, {"modes": (Mode(1e6, -2000.0, width=1e3),)}),
        ("Fair", "0.2 % of the mass, so that an sd is up to 1.3", {},
         {"modes": (Mode(16.0, -6.0),)}),
        ("Bad", "a wider region around q holds about 0.5 % of the mass, so that an sd is up to 7.1",
         {}, {"modes": (Mode(0.1, -5.3, width=100.0),)}),
        ("Fair", "be larger 69.0 sd away, but is rounded to 6e+07 nats there", {},
         {"modes": (Mode(69.0, 4e14, resolution=6e7),)}),
        ("Good", "k-hat", {}, {"modes": (Mode(69.0, -4e14, resolution=6e7),)}),
        ("Bad", "another region", {"resolution": 0.04},
         {"modes": (Mode(5.0, 1e6, resolution=1.5),)}),
        ("Fair", "be larger 5.0 sd away", {"resolution": 0.04},
         {"modes": (Mode(5.0, 1.0, resolution=10.0),)}),
        ("Bad", "16.0 sd away, holds", {},
         {"modes": (Mode(9.0, 4e14, resolution=6e7), Mode(16.0, 0.0))}),
        ("Bad", "another region, 5.3e+14 sd away", {}, {"modes": (Mode(5.3e14, 0.0),)}),
        ("Fair", "were not looked for", {}, {"climbs": 0}),
        ("Fair", "looked for from 4 of 12 starts only", {}, {"left_out": 8}),
        ("Fair", "heavier tails than q", {"khat": 1.5, "ess": 960.0}, {"outside": 0.0005}),
        ("Fair", "heavier tails than q", {"khat": 1.5, "ess": 990.0}, {}),
        ("Bad", "do not use the variances", {"khat": 1.5, "ess": 960.0}, {}),
        ("Fair", "nan or +inf at 3", {"excluded": 3, "undefined": 3}, {}),
        ("Bad", "nan or +inf at 30", {"excluded": 30, "undefined": 30}, {}),
        ("Fair", "30 of 1000 draws are outside", {"excluded": 30}, {}),
        ("Bad", "200 of 1000 draws are outside", {"excluded": 200}, {}),
        ("Bad", "not finite", {"elbo": math.nan}, {}),
        ("Good", "k-hat 0.65", {"khat": 0.65, "ess": 985.0}, {}),
        ("Fair", "0.4 % of its mass where q has 0.01 %", {}, {"outside": 0.004}),
        ("Fair", "heavy tail", {"khat": 0.65, "ess": 985.0}, {"outside": 0.004}),
        ("Bad", "do not use the variances", {"khat": 1.2, "ess": 900.0}, {"outside": 0.004}),
        ("Fair", "little mass", {"khat": 0.9, "ess": 850.0}, {"outside": 0.004}),
        ("Bad", "do not use the variances", {"khat": 0.9, "ess": 700.0}, {"outside": 0.004}),
        ("Bad", "do not use the variances: the target has heavier", {}, {"outside": 0.02}),
        ("Fair", "rounded to 8 nats", {"resolution": 8.0, "kl": 0.7, "khat": 1.2}, {}),
        ("Bad", "far from the target", {"resolution": 0.1, "kl": 50.0}, {}),
    ],
)  # fmt: skip
def test_the_verdict_follows_its_criteria(expected, said, seen, rest):
    text = judge(diagnosis(weights(**seen), **{"climbs": 4} | rest), gap_bound=0.02)
    assert text.startswith(f"{expected}: ") and said in text, text


def test_the_mass_outside_is_that_of_the_tails():
    q = iblr.Gaussian.from_covariance(jnp.array([1.0, -1.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    assert mass_outside(iblr.Target(q.log_prob), q, 0.0, KEY) == pytest.approx(1e-4, rel=1e-3)
    shifted = iblr.Target(lambda z: q.log_prob(z) + 3.0)
    assert mass_outside(shifted, q, 3.0, KEY) == pytest.approx(1e-4, rel=1e-3)
    wide = iblr.Gaussian.from_covariance(q.mean, 4 * q.covariance)
    squared_radius = stats.chi2.isf(1e-4, 2)
    weight = np.exp(0.5 * squared_radius * (1 - 1 / 4)) / 4
    found = mass_outside(iblr.Target(wide.log_prob), q, 0.0, KEY)
    assert found == pytest.approx(1e-4 * weight, rel=1e-3)


def test_the_error_of_the_kl_is_right_where_draws_are_left_out():
    half = iblr.Target(lambda z: jnp.where(z[0] > 0, -0.5 * (z**2).sum(), -jnp.inf))
    found = [weigh(half, gaussian(0.3, 1.1), jax.random.key(seed)) for seed in range(200)]
    actual, told = np.std([f.kl for f in found]), np.mean([f.kl_se for f in found])
    assert told == pytest.approx(actual, rel=0.2)


def test_points_outside_at_which_the_target_is_nan_are_left_out():
    q = gaussian(0.0, 1.0)
    half = iblr.Target(lambda z: jnp.where(z[0] > 0, jnp.nan, q.log_prob(z)))
    assert mass_outside(half, q, 0.0, KEY) == pytest.approx(1e-4, rel=1e-3)
    assert math.isnan(mass_outside(iblr.Target(lambda z: z[0] * jnp.nan), q, 0.0, KEY))


@pytest.mark.parametrize("seed", [0, slow(1), slow(2), slow(3), slow(4)])
def test_heavy_tails_in_few_dimensions_are_never_good(seed):
    def student(z):
        return -0.5 * (3 + z.size) * jnp.log1p((z**2).sum() / 3)

    posterior = iblr.fit(student, init=jnp.zeros(3), key=jax.random.key(seed))
    assert not posterior.verdict.startswith("Good") and posterior.diagnosis.outside > 0.003


def test_a_constant_that_eats_the_digits_is_named():
    found = weigh(lambda z: -0.5 * (z**2).sum() + 1e8, gaussian(0.0, 1.0), KEY)
    assert found.resolution == pytest.approx(1e8 * np.finfo(np.float32).eps, rel=1e-3)


@pytest.mark.parametrize(
    "status, expected",
    [
        (Status.diverged, "Bad"),
        (Status.nonfinite, "Bad"),
        (Status.inaccurate, "Bad"),
        (Status.not_converged, "Bad"),
        (Status.interrupted, "Fair"),
        (Status.refused_steps, "Fair"),
    ],
)
def test_a_fit_that_failed_is_bad_whatever_the_weights_say(status, expected):
    assert judge(diagnosis(climbs=4), status).startswith(f"{expected}: the fit did not end well")


def test_a_gap_that_may_be_large_is_at_most_fair():
    assert judge(diagnosis(climbs=4), gap_bound=0.05).startswith("Good")
    assert judge(diagnosis(climbs=4), gap_bound=0.5).startswith("Fair: the best member")
    assert judge(diagnosis(climbs=4), gap_bound=math.inf).startswith("Fair: the best member")


def two_modes(distance):
    def log_density(z):
        return jnp.logaddexp(-0.5 * (z[0] - distance / 2) ** 2, -0.5 * (z[0] + distance / 2) ** 2)

    return log_density


def test_one_gaussian_over_two_modes_is_not_called_good_though_its_weights_are_bounded():
    seen = examine(two_modes(4.0), gaussian(0.0, 1.98), KEY)  # the best Gaussian
    assert seen.importance.khat < 0
    judged = judge(dataclasses.replace(seen, climbs=4))
    assert judged.startswith("Fair") and "a marginal probability is off by at least 0.1" in judged


def test_one_direction_with_two_modes_among_many_is_not_called_good():
    u = jnp.full(31, 31**-0.5)  # no marginal shows it
    covariance = jnp.eye(31) + (1.98**2 - 1) * jnp.outer(u, u)
    q = iblr.Gaussian.from_covariance(jnp.zeros(31), covariance)
    log_density = lambda z: -0.5 * z @ z + jnp.logaddexp(2 * z @ u, -2 * z @ u)  # noqa: E731
    seen = examine(log_density, q, KEY)
    assert seen.importance.khat < 0 and seen.importance.kl < 0.31 and seen.shape < 0.05
    assert judge(dataclasses.replace(seen, climbs=4)).startswith("Fair: q is not very near")


def test_only_a_look_from_elsewhere_sees_the_mode_that_q_never_visits():
    seen = examine(two_modes(16.0), gaussian(8.0, 1.0), KEY)
    assert judge(seen).startswith("Fair: other modes were not looked for")
    looked = dataclasses.replace(seen, climbs=4, modes=(Mode(16.0, 0.0),))
    assert judge(looked).startswith("Bad: another region")


# The posterior.


def light(z):
    return (-0.5 * z**2 - 0.02 * z**4).sum()


@pytest.fixture(scope="module")
def posterior():
    return iblr.fit(light, gaussian(0.0, 1.0), key=KEY, num_steps=200)


def test_a_posterior_shows_its_diagnosis(posterior):
    assert posterior.diagnosis is None and str(posterior).startswith("Gaussian over 1")
    judged = iblr.diagnose(posterior, light, key=KEY)
    assert str(judged).startswith(judged.verdict)
    assert judged.khat == judged.diagnosis.importance.khat < 0.7
    grid = np.linspace(-8, 8, 2001)
    evidence = np.log(np.sum(np.exp(-0.5 * grid**2 - 0.02 * grid**4)) * (grid[1] - grid[0]))
    assert judged.log_evidence == pytest.approx(evidence, abs=5 * judged.log_evidence_se)
    assert judged.log_evidence_se < 0.01
    assert judged.corrected.ess > 900


@pytest.mark.parametrize(
    "name", ["verdict", "khat", "log_evidence", "log_evidence_se", "corrected"]
)
def test_what_needs_a_diagnosis_says_so(posterior, name):
    with pytest.raises(ValueError, match=f"`posterior.{name}` needs a look.*iblr.diagnose"):
        getattr(posterior, name)


def test_bad_arguments_are_named(posterior):
    with pytest.raises(ValueError, match="draws=...\\)` must be a whole number of at least 100"):
        iblr.diagnose(posterior, light, key=KEY, draws=50)
    batch = iblr.fit(
        light, gaussian(0.0, 1.0), key=jax.random.split(KEY, 2), num_steps=2, chunk_size=2
    )
    with pytest.raises(ValueError, match="posterior.best"):
        iblr.diagnose(batch, light, key=KEY)
    with pytest.raises(ValueError, match=r"posterior\[i\].verdict"):
        batch.verdict  # noqa: B018
    with pytest.raises(ValueError, match="`to_nuts` is one run's"):
        batch.to_nuts()


def test_a_second_look_of_the_same_shape_compiles_nothing():
    count = []

    def counted(z):
        count.append(1)
        return -0.5 * (z**2).sum()

    weigh(counted, gaussian(0.0, 1.0), KEY, draws=100)
    traced = len(count)
    weigh(counted, gaussian(0.5, 2.0), jax.random.key(5), draws=100)
    assert len(count) == traced


@pytest.mark.parametrize(
    "options, named",
    [
        ({"key": None}, r"`diagnose\(key=...\)` needs a typed key"),
        ({"draws": "many"}, r"`diagnose\(draws=...\)` must be a whole number"),
        ({"draws": 10}, r"`diagnose\(draws=...\)` must be a whole number of at least 100"),
        ({"posterior": iblr.Gaussian.standard(2)}, "needs the posterior of a fit, but got a Gauss"),
    ],
)
def test_a_bad_argument_of_diagnose_is_named(options, named):
    log_density = lambda z: -0.5 * (z**2).sum()  # noqa: E731
    start = iblr.Gaussian.standard(2)
    posterior = iblr.fit(log_density, start, key=jax.random.key(0), num_steps=50)
    given = {"posterior": posterior, "key": jax.random.key(1)} | options
    with no_type_hook(), pytest.raises(ValueError, match=named):
        iblr.diagnose(given.pop("posterior"), log_density, **given)

"""Fits on supports: one density in the coordinates, whichever way the support was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LARGEST_Z, agrees, assert_same_bits, no_type_hook, quick_fit, slow
from scipy import integrate, stats

import iblr
from iblr import DiagonalGaussian, Gamma, Gaussian, Product, Status, Target

KEY = jax.random.key(0)
LIKE = {"tau": 1.0, "w": jnp.zeros(2)}
SUPPORT = {"tau": iblr.positive}


def log_density(z):
    """A target that couples a positive number with two real ones."""
    x = z["w"] - jnp.log(z["tau"])
    return 3 * jnp.log(z["tau"]) - 2 * z["tau"] - 0.5 * z["tau"] * x @ x - 0.1 * (z["w"] ** 4).sum()


# The ways to give a support.


def test_all_ways_to_give_a_support_have_the_same_bits():
    plain = Gaussian.standard(like=LIKE)
    one = quick_fit(log_density, plain, support=SUPPORT)
    assert one.status == Status.ok and (one.sample(KEY, 100)["tau"] > 0).all()
    for start in (plain.with_support(SUPPORT), Gaussian.standard(like=LIKE, support=SUPPORT)):
        other = quick_fit(log_density, start)
        assert start.structure == one.family.structure
        assert_same_bits((other.family, other.elbo), (one.family, one.elbo))


@pytest.mark.slow
def test_all_ways_to_give_a_product_a_support_have_the_same_bits():
    part = {name: Gaussian.standard(like=LIKE[name]) for name in LIKE}
    one = quick_fit(log_density, Product(part), support=SUPPORT)
    given = Product({**part, "tau": Gaussian.standard(like=1.0, support=iblr.positive)})
    for start in (Product(part, support=SUPPORT), Product(part).with_support(SUPPORT), given):
        other = quick_fit(log_density, start)
        assert_same_bits((other.family, other.elbo), (one.family, one.elbo))


def by_hand(log_density, structure):
    """The same target over coordinates, with its Jacobian."""

    def of_coordinates(x):
        vector = structure.coordinates.ravel(x, "by_hand")
        return log_density(structure.unravel(vector)) + structure.log_jacobian(vector)

    return of_coordinates


def simplex_target(z):
    return (jnp.array([2.0, 5.0, 1.5]) - 1) @ jnp.log(z)


def ordered_target(z):
    return -0.5 * ((z - jnp.array([0.0, 1.0, 1.5])) ** 2).sum() + jnp.log(z[1] - z[0])


def interval_target(z):
    return (2 * jnp.log(z + 1) + jnp.log(3 - z)).sum()


ON_SUPPORTS = {
    "simplex": (iblr.simplex, simplex_target, jnp.full(3, 1 / 3)),
    "ordered": (iblr.ordered, ordered_target, jnp.arange(3.0)),
    "interval": (iblr.interval(-1, 3), interval_target, jnp.zeros(2)),
    "positive": (iblr.positive, lambda z: (2 * jnp.log(z) - z).sum(), jnp.ones(2)),
}
every_support = pytest.mark.parametrize(
    "support, target, like",
    [
        pytest.param(*ON_SUPPORTS[name], id=name, marks=marks)
        for name, marks in (
            ("simplex", ()),
            ("ordered", pytest.mark.slow),
            ("interval", pytest.mark.slow),
            ("positive", pytest.mark.slow),
        )
    ],
)


@pytest.mark.slow
@every_support
def test_a_fit_on_a_support_is_the_fit_done_by_hand_over_coordinates(support, target, like):
    start = DiagonalGaussian.standard(like=like, support=support)
    hand = by_hand(target, start.structure)
    one, other = quick_fit(target, start), quick_fit(hand, DiagonalGaussian.standard(start.dim))
    np.testing.assert_allclose(one.family.mean, other.family.mean, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.family.variances, other.family.variances, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.elbo, other.elbo, rtol=0, atol=1e-4)
    assert bool(jnp.all(support.contains(one.sample(KEY, 100))))
    assert np.abs(one.family.mean).max() > 0.1
    # Without the Jacobian it would be another target.
    slope = jax.grad(start.structure.log_jacobian)(one.family.mean)
    assert np.abs(slope).max() > 0.1


# The density of a Gaussian on a support.


def normal_1d(support, mean=0.3, variance=0.5):
    q = Gaussian.from_covariance(jnp.asarray(mean, float), jnp.array([[variance]], float))
    return q.with_support(support)


ONE_DIMENSION = {
    "positive": (iblr.positive, (0, np.inf)),
    "interval": (iblr.interval(-1, 3), (-1, 3)),
}


@pytest.mark.parametrize("support, ends", ONE_DIMENSION.values(), ids=ONE_DIMENSION)
def test_the_density_of_points_integrates_to_one(support, ends, x64):
    q = normal_1d(support)
    density = jax.jit(lambda z: jnp.exp(q.log_prob(z)))
    mass, _ = integrate.quad(lambda z: float(density(z)), *ends, limit=200)
    assert abs(mass - 1) < 1e-6
    mean, _ = integrate.quad(lambda z: z * float(density(z)), *ends, limit=200)
    assert agrees(np.asarray(q.sample(KEY, 20_000)), mean)


def test_on_positive_numbers_it_is_a_lognormal(x64):
    z = np.array([0.1, 0.7, 1.0, 4.0])
    expected = stats.lognorm.logpdf(z, np.sqrt(0.5), scale=np.exp(0.3))
    np.testing.assert_allclose(normal_1d(iblr.positive).log_prob(z), expected, rtol=1e-12)


def test_on_an_interval_it_is_a_logit_normal(x64):
    z = np.array([-0.9, 0.2, 1.0, 2.7])
    x = np.log((z + 1) / (3 - z))
    jacobian = np.log(4 / ((z + 1) * (3 - z)))
    expected = stats.norm.logpdf(x, 0.3, np.sqrt(0.5)) + jacobian
    np.testing.assert_allclose(normal_1d(iblr.interval(-1, 3)).log_prob(z), expected, rtol=1e-12)


def test_the_entropy_of_coordinates_and_the_divergence_do_not_know_the_support():
    p, q = normal_1d(iblr.positive), normal_1d(iblr.positive, mean=-0.2, variance=1.5)
    plain = normal_1d(None, mean=-0.2, variance=1.5)
    assert p.kl(q) == normal_1d(None).kl(plain)
    assert q.entropy() == plain.entropy()


# Targets whose posterior is in the family.

MEAN, VARIANCES = np.array([0.4, -1.0]), np.array([0.3, 0.8])
LOG_EVIDENCE = 1.7


def lognormal(z):
    """Two lognormals, with an evidence that is not one."""
    x = jnp.log(z)
    density = -0.5 * ((x - jnp.asarray(MEAN, x.dtype)) ** 2 / jnp.asarray(VARIANCES, x.dtype)).sum()
    return density - x.sum() - 0.5 * np.log(2 * np.pi * VARIANCES).sum() + LOG_EVIDENCE


def exact(dtype=float):
    return DiagonalGaussian.from_variances(jnp.asarray(MEAN, dtype), jnp.asarray(VARIANCES, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_a_lognormal_target_is_fitted_exactly(family):
    posterior = iblr.fit(lognormal, family.standard(2), key=KEY, support=iblr.positive)
    assert posterior.family.kl(exact()) < 1e-6
    assert abs(float(posterior.elbo) - LOG_EVIDENCE) < 1e-4
    assert posterior.elbo_se < 1e-4
    start = iblr.elbo(lognormal, family.standard(2, support=iblr.positive), KEY)
    assert abs(float(start.value) - LOG_EVIDENCE) > 0.1


ESTIMATORS = {
    "Rep": (iblr.Rep(samples=16), 2e-2),
    "Stl": (iblr.Stl(pairs=4), 1e-5),
    "Secant": (iblr.Secant(pairs=4), 1e-5),
    "Hess": (iblr.Hess(samples=4), 1e-3),
    "AtMean": (iblr.AtMean(), 1e-5),
}


@pytest.mark.parametrize(
    "estimator, divergence",
    [
        pytest.param(*case, id=name, marks=() if name in ("Rep", "Hess") else pytest.mark.slow)
        for name, case in ESTIMATORS.items()
    ],
)
def test_every_estimator_serves_a_gaussian_on_a_support(estimator, divergence):
    start = DiagonalGaussian.standard(2, support=iblr.positive)
    schedule = lambda k: jnp.minimum(0.1, 2 / (10.0 + k))  # noqa: E731
    posterior = quick_fit(
        lognormal, start, estimator=estimator, step_size=schedule, num_steps=600, chunk_size=100
    )
    assert posterior.family.kl(exact()) < divergence


def test_laplace_finds_the_mode_of_the_coordinates():
    posterior = iblr.laplace(lognormal, Gaussian.standard(2, support=iblr.positive), key=KEY)
    np.testing.assert_allclose(posterior.family.mean, MEAN, atol=1e-4)
    np.testing.assert_allclose(posterior.covariance, np.diag(VARIANCES), atol=1e-4)


def test_a_hessian_of_points_is_refused():
    estimator = iblr.Hess(hessian=lambda z: -jnp.eye(2))
    with pytest.raises(ValueError, match="`hessian=`.*support"):
        quick_fit(lognormal, Gaussian.standard(2, support=iblr.positive), estimator=estimator)


# Targets made of data, priors and a temperature.

ROWS = jnp.asarray(np.random.default_rng(0).gamma(3.0, size=12), float)


def log_likelihood(tau, rows):
    """Rows from Ga(3, tau)."""
    return (3 * jnp.log(tau) - tau * rows).sum()


def log_prior(tau):
    return jnp.log(tau) - 0.5 * tau


def over_coordinates(function, *, jacobian):
    def wrapped(x, *rest):
        return function(jnp.exp(x), *rest) + (x if jacobian else 0.0)

    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch_size, temperature", [pytest.param(None, 1.0, marks=pytest.mark.slow), (4, 2.5)]
)
def test_a_target_of_data_is_that_by_hand(batch_size, temperature):
    options = {"data": ROWS, "batch_size": batch_size, "temperature": temperature}
    target = Target(log_likelihood=log_likelihood, prior=log_prior, **options)
    # The Jacobian is no part of what is tempered, so by hand it is multiplied first.
    hand = Target(
        log_likelihood=over_coordinates(log_likelihood, jacobian=False),
        prior=lambda x: log_prior(jnp.exp(x)) + temperature * x,
        **options,
    )
    start = DiagonalGaussian.standard(like=1.0)
    one, other = quick_fit(target, start, support=iblr.positive), quick_fit(hand, start)
    np.testing.assert_allclose(one.family.mean, other.family.mean, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.covariance, other.covariance, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.elbo, other.elbo, rtol=1e-5)


def test_a_tempered_density_is_that_of_points():
    # p(z)^(1/T) for a lognormal is a lognormal: x^2 is divided by T, and so is the density of z
    # but not the Jacobian, which moves the mean.
    temperature = 2.0
    target = Target(lognormal, temperature=temperature)
    posterior = iblr.fit(target, DiagonalGaussian.standard(2, support=iblr.positive), key=KEY)
    variances = temperature * VARIANCES
    mean = MEAN + variances * (1 - 1 / temperature)
    np.testing.assert_allclose(posterior.family.mean, mean, atol=1e-3)
    np.testing.assert_allclose(posterior.family.variances, variances, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [iblr.Stl(pairs=4), iblr.Rep(samples=4), iblr.Hess()])
def test_a_prior_on_the_same_support_is_exact(estimator):
    prior = normal_1d(iblr.positive, mean=-0.5, variance=2.0)
    options = {"data": ROWS, "temperature": 2.5}
    exact = Target(log_likelihood=log_likelihood, prior=prior, **options)
    sampled = Target(log_likelihood=log_likelihood, prior=prior.log_prob, **options)
    q = normal_1d(iblr.positive, mean=0.1, variance=0.2)
    points = np.linspace(-1, 1, 5)[:, None]
    whole = [
        jax.vmap(target.whole(q.structure, ROWS))(jnp.asarray(points, float))
        for target in (exact, sampled)
    ]
    np.testing.assert_allclose(*whole, rtol=1e-5)
    keys = jax.random.split(KEY, 300)
    both = lambda key: [estimator(q, target, key).gradient for target in (exact, sampled)]  # noqa: E731
    gradients = jax.jit(jax.vmap(both))(keys)
    assert agrees(np.asarray(gradients[0]) - np.asarray(gradients[1]), 0.0, rounding=1e-4)
    elbos = [iblr.elbo(target, q, KEY) for target in (exact, sampled)]
    error = np.hypot(*(float(e.standard_error) for e in elbos))
    assert abs(float(elbos[0].value - elbos[1].value)) < LARGEST_Z * error + 1e-4


def test_an_elbo_with_a_prior_on_a_support_is_exact_where_all_is_prior():
    prior, q = normal_1d(iblr.positive, mean=-0.5, variance=2.0), normal_1d(iblr.positive)
    estimate = iblr.elbo(Target(log_likelihood=lambda z: 0.0 * z, prior=prior), q, KEY)
    np.testing.assert_allclose(estimate.value, -q.kl(prior), rtol=1e-5)
    assert estimate.standard_error < 1e-5


def test_a_prior_on_another_support_is_refused():
    target = Target(log_likelihood=log_likelihood, data=ROWS, prior=normal_1d(None))
    with pytest.raises(ValueError, match=r"Target\(prior=\.\.\.\)"):
        quick_fit(target, normal_1d(iblr.positive))


# What a posterior on a support shows.


@pytest.fixture(scope="module")
def fitted():
    start = Gaussian.standard(like={"scale": jnp.ones(2), "shift": 0.0})
    target = lambda z: lognormal(z["scale"]) - 0.5 * (z["shift"] - 2) ** 2  # noqa: E731
    return iblr.fit(target, start, key=KEY, support={"scale": iblr.positive})


def test_moments_are_of_the_points(fitted):
    mean = np.exp(MEAN + 0.5 * VARIANCES)
    deviation = mean * np.sqrt(np.expm1(VARIANCES))
    fourth = stats.lognorm.stats(np.sqrt(VARIANCES), scale=np.exp(MEAN), moments="k") + 3
    error = deviation / np.sqrt(4000)
    assert (np.abs(fitted.mean["scale"] - mean) < LARGEST_Z * error).all()
    spread = 0.5 * deviation * np.sqrt((fourth - 1) / 4000)
    found = fitted.standard_deviation["scale"]
    assert (np.abs(found - deviation) < LARGEST_Z * spread).all()
    assert abs(float(fitted.mean["shift"]) - 2) < LARGEST_Z / np.sqrt(4000)
    # The same would not do for the moments of the coordinates.
    assert (np.abs(np.exp(fitted.family.mean[:2]) - mean) > LARGEST_Z * error).all()


def test_moments_are_the_same_at_every_call(fitted):
    assert_same_bits(fitted.mean, fitted.mean)
    np.testing.assert_allclose(
        fitted.mean["scale"], fitted.family.sample(KEY, 4000)["scale"].mean(0), rtol=1e-5
    )


def test_intervals_are_of_the_points(fitted):
    low, high = fitted.family.intervals(0.9)
    normal = stats.lognorm(np.sqrt(VARIANCES), scale=np.exp(MEAN))
    for found, probability in ((low, 0.05), (high, 0.95)):
        exact = normal.ppf(probability)
        error = np.sqrt(probability * (1 - probability) / 4000) / normal.pdf(exact)
        assert (np.abs(found["scale"] - exact) < LARGEST_Z * error).all()


def test_a_summary_has_a_row_for_every_number_of_a_point(fitted):
    text = fitted.summary()
    for label in ("scale[0]", "scale[1]", "shift"):
        assert f"\n{label} " in text
    row = next(line for line in text.splitlines() if line.startswith("scale[1]"))
    mean, deviation, low, high = map(float, row.split()[1:])
    assert abs(mean - float(fitted.mean["scale"][1])) < 1e-3 and 0 < low < mean < high
    on_simplex = quick_fit(simplex_target, DiagonalGaussian.standard(2), support=iblr.simplex)
    assert "DiagonalGaussian over 3 parameters" in str(on_simplex) and "\nz[2] " in str(on_simplex)
    np.testing.assert_allclose(on_simplex.mean.sum(), 1, rtol=1e-5)


def test_draws_predictions_and_densities_are_of_the_points(fitted):
    z = fitted.sample(jax.random.key(1), 20_000)
    assert agrees(np.log(z["scale"]), np.asarray(fitted.family.mean[:2]))
    prediction = fitted.predict(lambda z: z["scale"].sum(), KEY, draws=4000)
    assert agrees(prediction.draws, np.exp(MEAN + 0.5 * VARIANCES).sum())
    few = jax.tree.map(lambda leaf: leaf[:5], z)
    normal = stats.lognorm.logpdf(few["scale"], np.sqrt(VARIANCES), scale=np.exp(MEAN)).sum(-1)
    expected = normal + stats.norm.logpdf(few["shift"], 2)
    np.testing.assert_allclose(fitted.log_prob(few), expected, atol=1e-2)


@pytest.mark.slow
def test_runs_of_a_batch_have_moments_of_the_points():
    keys = jax.random.split(KEY, 2)
    batch = quick_fit(lognormal, DiagonalGaussian.standard(2), support=iblr.positive, key=keys)
    assert batch.mean.shape == (2, 2) and (batch.mean > 0).all()
    np.testing.assert_allclose(batch[1].mean, batch.mean[1], rtol=1e-5)
    assert (batch.sample(KEY, 5) > 0).all()


def test_a_fit_on_a_support_resumes_with_the_same_bits():
    start = DiagonalGaussian.standard(2, support=iblr.positive)
    whole, half = quick_fit(lognormal, start), quick_fit(lognormal, start, num_steps=20)
    resumed = quick_fit(
        lognormal, DiagonalGaussian.standard(2), support=iblr.positive, state=half.state
    )
    assert_same_bits(resumed.family, whole.family)


# What is refused.


def test_a_family_with_a_support_of_its_own_takes_none():
    with pytest.raises(ValueError, match=r"`support=` .*a Gamma lives where"):
        iblr.fit(lognormal, Gamma.standard(2), key=KEY, support=iblr.positive)
    q = Product({"a": Gaussian.standard(1), "b": Gamma(1.0, 1.0)})
    with pytest.raises(ValueError, match=r"support=\.\.\.\).*part 'b'.*a Gamma lives"):
        iblr.fit(lambda z: -z["b"], q, key=KEY, support={"b": iblr.positive})


UNKNOWN = {
    "fit": lambda where: iblr.fit(
        log_density, Gaussian.standard(like=LIKE), key=KEY, support=where
    ),
    "with_support": lambda where: Gaussian.standard(like=LIKE).with_support(where),
    "standard": lambda where: Gaussian.standard(like=LIKE, support=where),
    "diagonal": lambda where: DiagonalGaussian.standard(like=LIKE, support=where),
    "product": lambda where: Product({"tau": Gaussian.standard(1)}, support=where),
}


@pytest.mark.parametrize("call", UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_is_refused_by_name(call):
    with pytest.raises(ValueError, match="'nope'"):
        call({"nope": iblr.positive})


@pytest.mark.parametrize("call", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_no_support_is_refused(call):
    with no_type_hook(), pytest.raises(ValueError, match="support"):
        call({"tau": "positive"})


def test_a_leaf_keeps_its_support():
    q = Gaussian.standard(like=LIKE, support=SUPPORT)
    assert q.with_support(SUPPORT).structure == q.structure
    with pytest.raises(ValueError, match="already has positive"):
        q.with_support({"tau": iblr.interval(0, 1)})


# Problems on which a start is far from its target, and points off the support.


@pytest.mark.parametrize("count", [slow(100), 1000])
def test_a_rate_of_many_counts_is_found_without_options(count):
    posterior = iblr.fit(
        lambda z: count * (3.5 * jnp.log(z) - z),
        iblr.Gaussian.standard(like=0.0),
        key=jax.random.key(0),
        support=iblr.positive,
    )
    assert abs(posterior.mean - 3.5) < 0.02
    assert abs(posterior.standard_deviation - np.sqrt(3.5 / count)) < 0.01


@pytest.mark.parametrize("x", [-1e3, 1e3])
@pytest.mark.parametrize("support", [iblr.positive, iblr.simplex])
def test_slopes_are_finite_where_the_map_is_at_its_end(support, x):
    def log_density(x):
        z = support.forward(x)
        return 1e6 * (jnp.log(z) - z).sum() + support.log_jacobian(x).sum()

    value, slope = jax.value_and_grad(log_density)(jnp.array([x, 0.5 * x]))
    assert jnp.isfinite(value) and jnp.isfinite(slope).all()


@pytest.mark.parametrize(
    "support, outside",
    [
        (iblr.positive, [-1.0, 0.5, 0.5]),
        (iblr.interval(0, 1), [0.5, 0.5, 2.0]),
        (iblr.simplex, [0.2, 0.3, 0.9]),
        (iblr.ordered, [2.0, 1.0, 3.0]),
    ],
)
def test_the_density_off_the_support_is_zero_and_nan_stays_nan(support, outside):
    q = iblr.DiagonalGaussian.standard(like=jnp.zeros(3), support=support)
    inside = q.sample(jax.random.key(0))
    points = jnp.stack([jnp.array(outside), inside, inside.at[0].set(jnp.nan)])
    log_prob = q.log_prob(points)
    assert log_prob[0] == -jnp.inf and jnp.isfinite(log_prob[1]) and jnp.isnan(log_prob[2])

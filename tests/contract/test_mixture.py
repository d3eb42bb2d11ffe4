"""What users of a mixture of Gaussians may rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import agrees, assert_same_bits, no_type_hook, quick_fit, slow, stacked
from scipy import stats
from scipy.special import logsumexp

import iblr
from iblr import Gaussian, GaussianMixture, Product, Status, Target

KEY = jax.random.key(0)
MEANS = np.array([[0.0, 0.0], [3.0, -1.0], [-2.0, 4.0]])
COVARIANCES = np.array(
    [[[1.0, 0.3], [0.3, 0.5]], [[0.2, 0.0], [0.0, 2.0]], [[1.0, -0.9], [-0.9, 1.0]]]
)
WEIGHTS = np.array([0.5, 0.2, 0.3])


def example(**options):
    arrays = (jnp.asarray(x, float) for x in (MEANS, COVARIANCES, WEIGHTS))
    return GaussianMixture.from_moments(*arrays, **options)


def log_density(z):
    """Two modes of equal weight."""
    squares = [((z - m) ** 2).sum() / 0.5 for m in (jnp.array([2.0, 0.0]), jnp.array([-2.0, 1.0]))]
    return jnp.logaddexp(-0.5 * squares[0], -0.5 * squares[1])


@pytest.mark.slow
def test_density_responsibilities_and_moments_are_those_of_scipy():
    q = example()
    z = np.asarray(q.sample(KEY, 20_000), float)
    each = [
        np.log(w) + stats.multivariate_normal(m, C).logpdf(z)
        for w, m, C in zip(WEIGHTS, MEANS, COVARIANCES, strict=True)
    ]
    log_q = logsumexp(each, axis=0)
    np.testing.assert_allclose(q.log_prob(jnp.asarray(z)), log_q, rtol=1e-3, atol=1e-4)
    shares = np.exp(np.array(each) - log_q).T
    np.testing.assert_allclose(q.responsibilities(jnp.asarray(z)), shares, atol=1e-4)
    mean = WEIGHTS @ MEANS
    apart = MEANS - mean
    covariance = np.einsum("k,kij->ij", WEIGHTS, COVARIANCES + apart[:, :, None] * apart[:, None])
    np.testing.assert_allclose(q.mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(q.covariance, covariance, rtol=1e-5)
    np.testing.assert_allclose(q.standard_deviations, np.sqrt(np.diag(covariance)), rtol=1e-5)
    assert agrees(z, mean)
    entropy, error = q.entropy_estimate(KEY, draws=4000)
    assert abs(float(entropy) + log_q.mean()) < 5 * float(error)
    assert q.entropy() is None


def test_components_marginals_and_pruning():
    q = example()
    assert q.num_components == 3 and q.dim == 2 and q.groups == 3 and q.name == "GaussianMixture"
    np.testing.assert_allclose(q[2].covariance, COVARIANCES[2], rtol=1e-5)
    np.testing.assert_allclose(q[-1].mean, MEANS[2])
    with pytest.raises(IndexError, match="component 3 of 3"):
        q[3]
    second = q.marginal([1])
    x = np.linspace(-3, 6, 7)
    expected = sum(
        w * stats.norm(m[1], np.sqrt(C[1, 1])).pdf(x)
        for w, m, C in zip(WEIGHTS, MEANS, COVARIANCES, strict=True)
    )
    np.testing.assert_allclose(
        jnp.exp(second.log_prob(jnp.asarray(x)[:, None])), expected, rtol=1e-4
    )
    less = q.pruned(0.25)
    np.testing.assert_allclose(less.weights, [0.625, 0.375], rtol=1e-5)
    assert q.pruned(2.0).num_components == 1


def test_a_diagonal_mixture_is_the_full_one_with_diagonal_covariances():
    variances = jnp.array([[1.0, 2.0], [0.5, 3.0], [2.0, 0.1]])
    arrays = jnp.asarray(MEANS, float), jnp.asarray(WEIGHTS, float)
    plain = GaussianMixture.from_moments(arrays[0], variances, arrays[1])
    full = GaussianMixture.from_moments(arrays[0], jax.vmap(jnp.diag)(variances), arrays[1])
    z = full.sample(KEY, 5)
    np.testing.assert_allclose(plain.log_prob(z), full.log_prob(z), rtol=1e-5)
    np.testing.assert_allclose(plain.covariance, full.covariance, rtol=1e-5)
    assert plain.marginal([1, 0]).sample(KEY).shape == (2,)
    assert isinstance(plain[0], iblr.DiagonalGaussian)


def test_init_spreads_the_means_and_scales_the_components():
    q = GaussianMixture.init(KEY, 400, 5, scale=0.1, spread=3.0)
    np.testing.assert_allclose(q.weights, 1 / 400, rtol=1e-5)
    np.testing.assert_allclose(q.components.mean.std(), 3.0, rtol=0.1)
    np.testing.assert_allclose(q[7].covariance, 0.01 * np.eye(5), rtol=1e-5, atol=1e-8)
    tree = GaussianMixture.init(KEY, 2, like={"a": 0.0, "b": jnp.zeros(2)}, diagonal=True)
    assert jax.tree.map(jnp.shape, tree.sample(KEY, 3)) == {"a": (3,), "b": (3, 2)}


@pytest.mark.slow
def test_a_fit_without_options_finds_both_modes():
    start = GaussianMixture.init(KEY, 4, 2, spread=2.0)
    posterior = iblr.fit(log_density, start, key=KEY, num_steps=500)
    q = posterior.family
    assert posterior.status == Status.ok and posterior.num_gradients == 500 * 8
    right = float(q.weights @ (q.components.mean[:, 0] > 0))
    assert abs(right - 0.5) < 0.05
    exact = np.log(2) + np.log(2 * np.pi * 0.5)
    assert abs(float(posterior.elbo) - exact) < 0.05
    assert "GaussianMixture over 2 parameters" in str(posterior)


@pytest.mark.slow
def test_weights_stay_where_they_are_not_learned():
    posterior = quick_fit(log_density, example(learn_weights=False))
    np.testing.assert_array_equal(posterior.family.log_weights, example().log_weights)
    assert (quick_fit(log_density, example()).family.weights != posterior.family.weights).all()


@pytest.mark.slow
def test_an_interrupted_fit_goes_on_with_the_same_bits():
    options = {"momentum": 0.5, "trust_region": True}
    whole = quick_fit(log_density, example(), **options)
    half = quick_fit(log_density, example(), num_steps=20, **options)
    assert_same_bits(
        quick_fit(log_density, example(), state=half.state, **options).state, whole.state
    )


@pytest.mark.slow
def test_several_starts_are_one_fit():
    keys = jax.random.split(KEY, 3)
    starts = stacked([GaussianMixture.init(key, 2, 2) for key in keys])
    runs = quick_fit(log_density, starts, key=keys)
    assert len(runs) == 3 and runs.best.elbo == runs.elbo.max()
    assert runs.family.log_weights.shape == (3, 2)
    assert runs[1].sample(KEY, 4).shape == (4, 2)


def half_defined(z):
    """A log density that does not exist where the first coordinate is negative."""
    return jnp.where(z[0] > 0, -0.5 * ((z - 2.0) ** 2).sum(), jnp.nan)


@pytest.mark.parametrize("reuse", [slow(False), True])
def test_draws_where_the_target_is_nan_are_left_out_and_counted(reuse):
    start = GaussianMixture.from_moments(jnp.array([[1.0, 1.0], [0.5, 0.0]]), jnp.ones((2, 2)))
    posterior = quick_fit(half_defined, start, estimator=iblr.Stl(pairs=2, reuse=reuse))
    assert posterior.status == Status.ok and np.isfinite(posterior.elbo)
    assert posterior.excluded > 0 and posterior.refused == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(posterior.family))
    assert (posterior.family.components.mean[:, 0] > start.components.mean[:, 0]).all()
    assert "draws left out" in str(posterior)


@pytest.mark.slow
def test_the_elbo_is_that_of_the_draws_at_which_the_target_is_finite():
    """Where q = p but for a half of q's mass at which p is nan: log(1/2)."""
    q = GaussianMixture.from_moments(jnp.full((1, 2), 0.0), jnp.ones((1, 2)))
    nowhere, half = (
        iblr.elbo(lambda z: jnp.where(z[0] > edge, q.log_prob(z), jnp.nan), q, KEY, draws=3000)  # noqa: B023
        for edge in (jnp.inf, 0.0)
    )
    assert abs(half.value - np.log(0.5)) < 4 * half.standard_error
    np.testing.assert_allclose(half.standard_error, 3000**-0.5, rtol=0.1)  # that of log(share)
    assert np.isnan(nowhere.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator", [iblr.Stl(pairs=1), iblr.Rep(samples=4), iblr.Hess(samples=4)]
)
def test_a_step_without_a_usable_draw_is_refused_with_a_status(estimator):
    q = example()
    tangent = estimator(q, Target(lambda z: jnp.nan * z.sum()), KEY)
    new, info = iblr.improved_step(q, tangent, 0.1)
    assert info.status == Status.nonfinite and info.excluded > 0
    assert_same_bits(new, q)


@pytest.mark.slow
def test_a_target_that_is_nan_everywhere_ends_with_a_status():
    posterior = quick_fit(lambda z: jnp.nan * z.sum(), example(), throw=False)
    assert posterior.status == Status.nonfinite and posterior.excluded > 0
    assert_same_bits(posterior.family.components.mean, example().components.mean)


@pytest.mark.slow
def test_a_mixture_takes_a_prior_a_support_and_a_place_in_a_product():
    prior = Gaussian.from_covariance(jnp.zeros(2), 4 * jnp.eye(2))
    target = Target(log_likelihood=log_density, prior=prior)
    sampled = Target(log_likelihood=log_density, prior=prior.log_prob)
    q = example()
    exact, estimate = (iblr.Rep(samples=2000)(q, t, KEY) for t in (target, sampled))
    np.testing.assert_allclose(exact.log_weights, estimate.log_weights, atol=0.5)
    np.testing.assert_allclose(exact.gradient, estimate.gradient, atol=0.5)
    positive = example().with_support(iblr.positive)
    assert (positive.sample(KEY, 50) > 0).all()
    both = Product({"m": example(), "s": Gaussian.standard(1)})
    posterior = quick_fit(lambda z: log_density(z["m"]) - 0.5 * (z["s"] ** 2).sum(), both)
    assert posterior.status == Status.ok and posterior.sample(KEY, 3)["m"].shape == (3, 2)


BAD = {
    "components": lambda: GaussianMixture.init(KEY, 0, 2),
    "components=...": lambda: GaussianMixture.init(KEY, 2.5, 2),
    "dim": lambda: GaussianMixture.init(KEY, 2),
    "scale": lambda: GaussianMixture.init(KEY, 2, 2, scale=-1.0),
    "spread": lambda: GaussianMixture.init(KEY, 2, 2, spread=float("nan")),
    "means": lambda: GaussianMixture.from_moments(jnp.zeros(3), jnp.ones((3, 1))),
    "means, covariances": lambda: GaussianMixture.from_moments(jnp.zeros((3, 2)), jnp.ones((3, 4))),
    "covariances": lambda: GaussianMixture.from_moments(jnp.zeros((1, 2)), -jnp.ones((1, 2))),
    "weights=...": lambda: GaussianMixture.from_moments(MEANS, COVARIANCES, [0.5, 0.5, 0.5]),
    "weights": lambda: GaussianMixture.from_moments(MEANS, COVARIANCES, [0.5, 0.5]),
}


@pytest.mark.parametrize("names", BAD)
def test_bad_input_is_named(names):
    with no_type_hook(), pytest.raises(ValueError, match=names.split("=")[0]):
        BAD[names]()


def test_what_has_no_closed_form_says_so():
    q = example()
    with pytest.raises(ValueError, match="closed form"):
        q.kl(q)
    with no_type_hook(), pytest.raises(ValueError, match="no exact term under a mixture"):
        iblr.Rep(4)(q, Target(log_likelihood=log_density, prior=q), KEY)


def test_fewer_pairs_than_the_default_have_smaller_steps():
    """Their noise, of relative size d / pairs, would not be stable with the same ones."""
    defaults = GaussianMixture.init(KEY, 2, 60).defaults
    assert defaults.pairs == 3
    assert np.isclose(defaults.step_size(100, 3)(0), 0.15)
    assert np.isclose(defaults.step_size(100, 1)(0), 0.05)
    assert np.isclose(GaussianMixture.init(KEY, 2, 2).defaults.step_size(100, 1)(0), 0.15)

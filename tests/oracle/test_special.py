"""The special functions of the positive families against mpmath and SciPy.

Derivatives of draws are held to finite differences of quantile functions, in both precisions.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from scipy import special as ss
from scipy import stats

import iblr
from iblr import special

pytestmark = pytest.mark.usefixtures("x64")

both_precisions = pytest.mark.parametrize("dtype", [np.float32, np.float64])
DIGITS = 50

log_slopes = eqx.filter_jit(lambda q, ratios: q.log_slopes(ratios))


def unit(dtype):
    return float(np.finfo(dtype).eps)


def oracle(function, points):
    """An mpmath function of one number at every point, rounded to float64 at the end."""
    with mp.workdps(DIGITS):
        return np.array([float(function(mp.mpf(float(x)))) for x in points])


def holds(function, expected, points, dtype, relative, absolute=0.0):
    """`function` is `expected` up to so many roundings of the value, or of one."""
    points = np.asarray(points, dtype)
    actual = np.asarray(jax.jit(function)(jnp.asarray(points)))
    assert actual.dtype == dtype
    eps = unit(dtype)
    np.testing.assert_allclose(
        actual, oracle(expected, points), rtol=relative * eps, atol=absolute * eps
    )


SHAPES = np.concatenate([np.geomspace(1e-4, 1e8, 150), np.linspace(0.5, 14, 60), [1, 10]])


def log_gamma_rest(a):
    return mp.loggamma(a) - (a - 0.5) * mp.log(a) + a - mp.log(2 * mp.pi) / 2


def digamma_rest(a):
    return mp.digamma(a) - mp.log(a)


def trigamma_rest(a):
    return mp.polygamma(1, a) - 1 / a


def tetragamma_rest(a):
    return mp.polygamma(2, a) + 1 / a**2


def scaled_exp1(x):
    return mp.exp(x) * mp.e1(x)


def mills(s):
    return mp.sqrt(mp.pi / 2) * mp.exp(s**2 / 2) * mp.erfc(s / mp.sqrt(2))


@both_precisions
def test_the_rest_of_the_log_gamma_function(dtype):
    # It is added to terms of the order of one, and below 10 it is exact on that scale.
    holds(special.log_gamma_rest, log_gamma_rest, SHAPES, dtype, relative=4, absolute=4)
    large = SHAPES[SHAPES >= 10]
    holds(special.log_gamma_rest, log_gamma_rest, large, dtype, relative=32)


@both_precisions
def test_the_rests_of_the_polygamma_functions_keep_all_digits(dtype):
    holds(special.digamma_rest, digamma_rest, SHAPES, dtype, relative=8)
    # The series is cut after seven terms, of which float64 sees the last digits at a = 10.
    loose = 8 if dtype == np.float32 else 500
    holds(special.trigamma_rest, trigamma_rest, SHAPES, dtype, relative=loose)
    holds(special.tetragamma_rest, tetragamma_rest, SHAPES, dtype, relative=loose)


@both_precisions
def test_the_scaled_exponential_integral(dtype):
    points = np.concatenate([np.geomspace(1e-6, 1e8, 150), np.linspace(0.5, 2.5, 41)])
    holds(special.scaled_exp1, scaled_exp1, points, dtype, relative=8)


@both_precisions
def test_the_rest_of_the_mills_ratio(dtype):
    # It is multiplied by numbers below two and added to a tanh.
    points = np.concatenate([np.geomspace(1e-6, 1e6, 150), np.linspace(3, 5, 41)])
    holds(special.mills_rest, lambda s: 1 - s * mills(s), points, dtype, relative=4, absolute=16)
    large = points[points >= 4]
    holds(special.mills_rest, lambda s: 1 - s * mills(s), large, dtype, relative=8)


@both_precisions
def test_the_rest_of_the_exponential_function(dtype):
    points = np.concatenate([np.geomspace(1e-12, 80, 150), [0.999, 1.0, 1.001]])
    points = np.concatenate([-points, points])
    holds(special.expm1_rest, lambda x: mp.expm1(x) - x, points, dtype, relative=4)


@both_precisions
def test_derivatives_keep_all_digits(dtype):
    loose = 8 if dtype == np.float32 else 500

    def slope(function):
        return jax.vmap(jax.grad(function))

    # R' = D + 1/(2a) is small where a is large: D = -1/(2a) - 1/(12 a^2) + ...
    moderate = SHAPES[SHAPES <= 10]
    expected = lambda a: mp.digamma(a) - mp.log(a) + 1 / (2 * a)  # noqa: E731
    holds(slope(special.log_gamma_rest), expected, moderate, dtype, relative=loose, absolute=8)
    holds(slope(special.digamma_rest), trigamma_rest, SHAPES, dtype, relative=loose)
    holds(slope(special.trigamma_rest), tetragamma_rest, SHAPES, dtype, relative=loose)
    # d(e^x E1)/dx = e^x E1 - 1/x, of the order of -1/x^2: exact on the scale of 1/x.
    holds(
        lambda x: x * slope(special.scaled_exp1)(x),
        lambda x: x * scaled_exp1(x) - 1,
        np.geomspace(1e-6, 1e8, 100),
        dtype,
        relative=8,
        absolute=4,
    )


def test_a_small_number_beside_a_large_one_does_not_slow_the_exponential_integral():
    # Every entry takes the same number of operations; a loop until convergence would not end here.
    actual = jax.jit(special.scaled_exp1)(jnp.array([1e-12, 1e-3, 1.5, 1e3]))
    np.testing.assert_allclose(actual, oracle(scaled_exp1, [1e-12, 1e-3, 1.5, 1e3]), rtol=1e-14)


# The implicit derivative of a Gamma draw.


def slope_by_hypergeometric_function(a, u):
    """-a (dP/da) / (z p), by the derivative of the lower incomplete gamma function."""
    with mp.workdps(40 + int(a / 1.5)):
        a, z = mp.mpf(a), mp.mpf(a) * mp.exp(mp.mpf(u))
        lower = mp.gammainc(a, 0, z)
        moved = lower * mp.log(z) - z**a / a**2 * mp.hyp2f2(a, a, a + 1, a + 1, -z)
        return float(-a * (moved - mp.digamma(a) * lower) / (z**a * mp.exp(-z)))


def slope_by_quadrature(a, u):
    """-a int_0^z (log t - psi(a)) p(t) dt / (z p(z)) in s = log(t/z), for large shapes."""
    with mp.workdps(40):
        a, z = mp.mpf(a), mp.mpf(a) * mp.exp(mp.mpf(u))
        k, width = mp.log(z) - mp.digamma(a), 1 / mp.sqrt(a)
        density = lambda s: (k + s) * mp.exp(a * s - z * mp.expm1(s))  # noqa: E731
        return float(-a * mp.quad(density, [-w * width for w in (16, 12, 8, 6, 4, 2, 0)]))


def log_ratios(a):
    """u = log(z/a) at quantiles from 1e-6 to 1 - 1e-6, near enough."""
    if a < 0.05:
        return np.log([1e-30, 0.4, 3.0, 10.0]) * [0.1 / a, 1, 1, 1] - np.log(a)
    p = np.array([1e-6, 0.01, 0.5, 0.99, 1 - 1e-6])
    return np.log(ss.gammaincinv(a, p) / a) if a < 100 else ss.ndtri(p) / np.sqrt(a)


@both_precisions
@pytest.mark.parametrize("a", [0.05, 0.3, 1.0, 4.0, 30.0, 100.0, 1e4, 1e8])
def test_the_slope_of_a_gamma_draw_is_that_of_mpmath(a, dtype):
    a = float(dtype(a))
    u = log_ratios(a).astype(dtype)
    exact = slope_by_hypergeometric_function if a <= 100 else slope_by_quadrature
    expected = np.array([exact(a, float(x)) for x in u])
    shapes, unit = jnp.full(u.shape, a, dtype), float(np.finfo(dtype).eps)
    rtol = 8e-7 if dtype == np.float32 else 2e-13
    ratio_slope = np.asarray(special.gamma_ratio_slope(shapes, jnp.asarray(u)), float)
    np.testing.assert_allclose(1 + ratio_slope, expected, rtol=rtol, atol=2 * unit)
    # The slope of log(z / a), one less, keeps its digits where that is small.
    off_median = np.abs(expected - 1) > 0.1 / np.sqrt(a)
    np.testing.assert_allclose(
        ratio_slope[off_median], (expected - 1)[off_median], rtol=10 * rtol + 1e-11
    )


def log_quantile(a, log_p, q):
    """log z with P(Z < z) = p = 1 - q, by SciPy; where z is tiny P = z^a / Ga(a + 1) is exact."""
    with np.errstate(under="ignore", divide="ignore"):
        z = np.where(q > 0.5, ss.gammaincinv(a, np.exp(log_p)), ss.gammainccinv(a, q))
        return np.where(z > 1e-17, np.log(z), (log_p + ss.gammaln(a + 1)) / a)


def quantile_slope(a, log_z, h=1e-3):
    """dlog z / dlog a by fourth-order finite differences of the quantile function."""
    z = np.exp(np.maximum(log_z, -700.0))
    with np.errstate(under="ignore", divide="ignore"):
        log_p = np.where(z > 1e-17, np.log(ss.gammainc(a, z)), a * log_z - ss.gammaln(a + 1))
        q = np.where(z > 1e-17, ss.gammaincc(a, z), -np.expm1(log_p))
    at = [log_quantile(a * np.exp(k * h), log_p, q) for k in (-2, -1, 1, 2)]
    return (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * h)


@both_precisions
@pytest.mark.parametrize("a", 10.0 ** np.arange(-4, 9))
def test_the_slope_of_a_gamma_draw_is_that_of_scipys_quantile_function(a, dtype):
    a = float(dtype(a))
    u = log_ratios(a).astype(dtype)
    log_z = np.log(a) + u.astype(float)
    expected = quantile_slope(np.full(u.shape, a), log_z)
    q = iblr.Gamma(jnp.asarray(a, dtype), jnp.asarray(1, dtype))
    in_shape, in_inverse_mean = q.log_slopes(jnp.asarray(u)[:, None])
    # dlog z / dlog b is -1, and b = a lambda_2.
    np.testing.assert_allclose(in_shape[:, 0] - in_inverse_mean[:, 0], expected, rtol=1e-5)
    np.testing.assert_array_equal(in_inverse_mean, -1)


# The implicit derivatives of an inverse Gaussian draw.


def inverse_gaussian_cdf(z, mean, shape):
    normal = lambda x: mp.erfc(-x / mp.sqrt(2)) / 2  # noqa: E731
    root = mp.sqrt(shape / z)
    far = mp.exp(2 * shape / mean) * normal(-root * (z / mean + 1))
    return normal(root * (z / mean - 1)) + far


def inverse_gaussian_log_quantile(p, mean, shape, start):
    """By Newton's method in log z on the distribution function, from nearby."""
    x = mp.log(start)
    for _ in range(4):
        z = mp.exp(x)
        exponent = -shape * (z - mean) ** 2 / (2 * mean**2 * z)
        density = mp.sqrt(shape / (2 * mp.pi * z)) * mp.exp(exponent)  # of log z
        x -= (inverse_gaussian_cdf(z, mean, shape) - p) / density
    return x


def by_finite_differences(log_quantile, mean, shape, h):
    """dlog z / dlog of mean and of shape."""
    up, down = 1 + h, 1 / (1 + h)
    along_mean = log_quantile(mean * up, shape) - log_quantile(mean * down, shape)
    along_shape = log_quantile(mean, shape * up) - log_quantile(mean, shape * down)
    return [float(change / (2 * mp.log1p(h))) for change in (along_mean, along_shape)]


def inverse_gaussian_slopes(mean, shape, log_z, dtype):
    """The library's, as derivatives in log mean and log shape: lambda_1 = mean^-2."""
    q = iblr.InverseGaussian(jnp.asarray(mean, dtype), jnp.asarray(shape, dtype))
    in_first, in_shape = log_slopes(q, jnp.asarray([[log_z - np.log(mean)]], dtype))
    return np.array([-2 * in_first[0, 0], in_shape[0, 0]], float)


QUANTILES = [1e-4, 0.1, 0.5, 0.9, 0.9999]


@both_precisions
@pytest.mark.parametrize(
    ("mean", "shape"),
    [(1, 1e-3), (2, 0.1), (0.5, 1), (3, 10), (1e3, 1e3), (1, 1e3), (1e-3, 10.0), (1, 1e6)],
)
def test_the_slopes_of_an_inverse_gaussian_draw_are_those_of_its_quantile_function(
    mean, shape, dtype
):
    mean, shape = float(dtype(mean)), float(dtype(shape))
    for p in QUANTILES if shape < 1e6 else [0.1, 0.9999]:
        z = float(stats.invgauss.ppf(p, mean / shape, scale=shape))
        with mp.workdps(40):
            m, a = mp.mpf(mean), mp.mpf(shape)
            p = inverse_gaussian_cdf(mp.mpf(z), m, a)
            quantile = lambda m, a, p=p, z=z: inverse_gaussian_log_quantile(p, m, a, z)  # noqa: E731
            expected = by_finite_differences(quantile, m, a, mp.mpf("1e-8"))
        actual = inverse_gaussian_slopes(mean, shape, np.log(z), dtype)
        np.testing.assert_allclose(actual, expected, atol=1e-5 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize(("mean", "shape"), [(1, 1e-3), (2, 0.1), (0.5, 1), (3, 10), (1, 1e3)])
def test_scipys_quantile_function_of_the_inverse_gaussian_says_the_same(mean, shape):
    for p in QUANTILES:

        def log_quantile(mean, shape, p=p):
            return np.log(stats.invgauss.ppf(p, mean / shape, scale=shape))

        expected = by_finite_differences(log_quantile, mean, shape, 1e-4)
        actual = inverse_gaussian_slopes(mean, shape, log_quantile(mean, shape), np.float64)
        np.testing.assert_allclose(actual, expected, atol=1e-6)


# Derivatives through `sample`.


@both_precisions
@pytest.mark.parametrize("family", ["Gamma", "InverseGaussian", "Exponential"])
def test_differentiating_through_sample_gives_these_slopes(family, dtype):
    first = jnp.array([0.3, 0.7, 3.0, 50.0], dtype)
    second = jnp.array([2.0, 0.5, 1.0, 10.0], dtype)
    q = {
        "Gamma": lambda: iblr.Gamma(first, second),
        "InverseGaussian": lambda: iblr.InverseGaussian(second, first),
        "Exponential": lambda: iblr.Exponential(first),
    }[family]()
    key, n = jax.random.key(3), 5
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, n, q.dim)), dtype)

    def weighted(blocks):
        moved = q.with_blocks(blocks)
        draws = moved.draw(key, n)
        return jnp.sum(weights[0] * draws.rows + weights[1] * moved.sample_log(key, n)), draws

    @jax.jit
    def both(blocks):
        gradients, draws = jax.grad(weighted, has_aux=True)(blocks)
        along_log = weights[0] * draws.rows + weights[1]
        slopes = q.with_blocks(blocks).log_slopes(draws.noise)
        return gradients, [(along_log * slope).sum(0) for slope in slopes]

    for block, actual, expected in zip(q.blocks, *both(q.blocks), strict=True):
        assert actual.dtype == dtype
        rtol = 2e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(block * actual, expected, rtol=rtol)


@pytest.mark.slow
def test_the_gradient_of_an_expectation_through_sample_is_that_of_the_moment():
    # E z^2 = (1 + 1/a) / lambda_2^2.
    def second_moment(blocks, key):
        return (iblr.Gamma.standard(1).with_blocks(blocks).sample(key, 40_000) ** 2).mean()

    blocks = (jnp.array([2.5]), jnp.array([0.5]))
    keys = jax.random.split(jax.random.key(0), 8)
    gradients = jax.jit(jax.vmap(jax.grad(second_moment), (None, 0)))(blocks, keys)
    for actual, expected in zip(gradients, (-4 / 2.5**2, -2 / 0.5**3 * (1 + 1 / 2.5)), strict=True):
        error = actual.std(ddof=1) / np.sqrt(8)
        assert abs(float(actual.mean() - expected)) < 4.5 * error
        assert error < 0.02 * abs(expected)

"""Gamma, Exponential and InverseGaussian against SciPy, mpmath, quadrature and the generic rule."""

from functools import cache

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from helpers import no_type_hook, slow
from hypothesis import strategies as st
from scipy import integrate, optimize, stats
from scipy import special as ss

import iblr
from iblr import Status, geometry
from iblr.families.base import Draws
from iblr.families.positive import PositiveTangent

FAMILIES = {
    "gamma": iblr.Gamma,
    "exponential": iblr.Exponential,
    "inverse gaussian": iblr.InverseGaussian,
}
NUM_BLOCKS = {"gamma": 2, "exponential": 1, "inverse gaussian": 2}
SMALLEST_FACTORS = {"gamma": (0.5, 0.5), "exponential": (0.5,), "inverse gaussian": (1 / 3, 0.5)}

every_family = pytest.mark.parametrize("name", FAMILIES)
both_precisions = pytest.mark.parametrize("dtype", [np.float32, np.float64])
x64 = pytest.mark.usefixtures("x64")


def member(name, blocks, dtype=None):
    """The family at given blocks, each a vector."""
    blocks = tuple(jnp.asarray(block, dtype) for block in blocks)
    return FAMILIES[name].standard(blocks[0].size, dtype=blocks[0].dtype).with_blocks(blocks)


def tangent_of(q, directions):
    """A tangent of given relative natural gradients, one array a block."""
    directions = tuple(jnp.asarray(d, q.dtype) for d in directions)
    parts = [w * d for w, d in zip(q.weights, directions, strict=True)]
    return PositiveTangent(jnp.concatenate(parts), directions)


def unit(dtype):
    return float(np.finfo(dtype).eps)


def same_blocks(q, r):
    return all(bool((b == c).all()) for b, c in zip(q.blocks, r.blocks, strict=True))


# The formulas of the paper, written again.


def log_partition(name, blocks):
    """A of one number, as appendices F, G and H print it."""
    if name == "gamma":
        a, inverse_mean = blocks
        return jax.scipy.special.gammaln(a) - a * (jnp.log(a) + jnp.log(inverse_mean))
    if name == "exponential":
        return -jnp.log(blocks[0])
    return -0.5 * jnp.log(blocks[1]) - blocks[1] * jnp.sqrt(blocks[0])


def log_density(name, z, blocks):
    if name == "gamma":
        exponent = blocks[0] * jnp.log(z) - z * blocks[0] * blocks[1] - jnp.log(z)
    elif name == "exponential":
        exponent = -z * blocks[0]
    else:
        exponent = -0.5 * (z * blocks[1] * blocks[0] + blocks[1] / z + jnp.log(2 * jnp.pi * z**3))
    return exponent - log_partition(name, blocks)


def statistics(name, z, blocks):
    """The sufficient statistic of every block, the others fixed."""
    if name == "gamma":
        return jnp.log(z) - z * blocks[1], -z * blocks[0]
    if name == "exponential":
        return (-z,)
    return -0.5 * z * blocks[1], -0.5 * (z * blocks[0] + 1 / z)


# Draws.


def kolmogorov_smirnov(probabilities):
    """The p-value of numbers that should be uniform."""
    return stats.kstest(np.asarray(probabilities, float), "uniform").pvalue


def log_gamma_probability(a, log_z):
    """P(log Z < log_z), also where z underflows."""
    z = np.exp(np.clip(log_z, -600, 600))
    small = np.exp(np.minimum(a * log_z - ss.gammaln(a + 1), 0))
    return np.where(log_z < -40, small, ss.gammainc(a, z))


DRAWS = 20_000
draw = eqx.filter_jit(lambda q, key, num: (q.draw(key, num), q.sample_log(key, num)))


@x64
@both_precisions
def test_gamma_draws_have_their_distribution(dtype):
    shapes = np.array([1e-3, 0.05, 0.5, 0.99, 1.0, 3.0, 50.0, 1e3, 1e6], dtype)
    q = iblr.Gamma(jnp.asarray(shapes), jnp.full(shapes.shape, 2, dtype))
    draws, log_draws = draw(q, jax.random.key(0), DRAWS)
    assert draws.rows.dtype == log_draws.dtype == dtype
    assert (draws.rows > 0).all() and jnp.isfinite(log_draws).all()
    for j, a in enumerate(shapes.astype(float)):
        log_z = np.log(a) + np.asarray(draws.noise[:, j], float)  # of z b
        assert kolmogorov_smirnov(log_gamma_probability(a, log_z)) > 1e-3
        # A shape five per cent off is told apart.
        assert kolmogorov_smirnov(log_gamma_probability(1.05 * a, log_z)) < 1e-3
        at_draws = np.asarray(log_draws[:, j], float) + np.log(2)
        np.testing.assert_allclose(at_draws, log_z, rtol=4 * unit(dtype), atol=4 * unit(dtype))
    # At a shape of 10^-3 most numbers are below what is handed out, yet none is zero.
    tiny = float(np.finfo(dtype).tiny) / float(np.finfo(dtype).eps)
    assert 0.3 < float((log_draws[:, 0] < np.log(tiny)).mean()) < 0.95
    assert float(draws.rows[:, 0].min()) == pytest.approx(tiny)
    expected = np.exp(np.maximum(np.asarray(log_draws, float), np.log(tiny)))
    np.testing.assert_allclose(draws.rows, expected, rtol=200 * unit(dtype))
    logs = stats.loggamma(1e-3, loc=-np.log(2))
    assert kolmogorov_smirnov(logs.cdf(np.asarray(log_draws[:, 0], float))) > 1e-3


@x64
@both_precisions
def test_inverse_gaussian_draws_have_their_distribution(dtype):
    means = np.array([1.0, 2.0, 0.5, 3.0, 1e3, 1.0], dtype)
    shapes = np.array([1e-3, 0.1, 1.0, 10.0, 1e3, 1e4], dtype)
    q = iblr.InverseGaussian(jnp.asarray(means), jnp.asarray(shapes))
    draws, log_draws = draw(q, jax.random.key(1), DRAWS)
    assert draws.rows.dtype == log_draws.dtype == dtype
    np.testing.assert_allclose(log_draws, jnp.log(draws.rows), rtol=1e-5, atol=4 * unit(dtype))
    for j, (mean, shape) in enumerate(zip(means.astype(float), shapes.astype(float), strict=True)):
        z = mean * np.exp(np.asarray(draws.noise[:, j], float))
        assert kolmogorov_smirnov(stats.invgauss.cdf(z, mean / shape, scale=shape)) > 1e-3
        off = 1.1 * shape
        assert kolmogorov_smirnov(stats.invgauss.cdf(z, mean / off, scale=off)) < 1e-3


@x64
@both_precisions
def test_exponential_draws_have_their_distribution(dtype):
    rates = np.array([1e-3, 1.0, 1e4], dtype)
    draws, log_draws = draw(iblr.Exponential(jnp.asarray(rates)), jax.random.key(2), DRAWS)
    assert draws.rows.dtype == log_draws.dtype == dtype
    for j, rate in enumerate(rates.astype(float)):
        z = np.asarray(draws.rows[:, j], float)
        np.testing.assert_allclose(log_draws[:, j], np.log(z), rtol=1e-5, atol=1e-5)
        assert kolmogorov_smirnov(-np.expm1(-rate * z)) > 1e-3
        assert kolmogorov_smirnov(-np.expm1(-1.1 * rate * z)) < 1e-3


def test_no_exponential_draw_has_an_infinite_logarithm():
    # One float32 uniform in 2^23 is zero: 2^25 draws hold several.
    smallest = jax.jit(lambda key: iblr.Exponential(1.0).sample_log(key, 2**25).min())
    value = float(smallest(jax.random.key(0)))
    assert -17 < value < -15.5  # log(2^-24) or so


# Densities, moments, divergences.


def scipy_members():
    for a, b in ((0.3, 2.0), (1.0, 0.5), (7.0, 3.0), (1e3, 10.0)):
        yield iblr.Gamma(a, b), stats.gamma(a, scale=1 / b)
    for rate in (1e-2, 3.0):
        yield iblr.Exponential(rate), stats.expon(scale=1 / rate)
    for mean, shape in ((1.0, 0.1), (2.0, 3.0), (0.5, 40.0)):
        yield iblr.InverseGaussian(mean, shape), stats.invgauss(mean / shape, scale=shape)


@eqx.filter_jit
def summary(q, z):
    draws = q.draw(jax.random.key(0), 4)
    at_draws = q.log_prob_of_draws(draws) - q.log_prob_rows(draws.rows)
    moments = (q.mean, q.variances, q.standard_deviations, q.entropy())
    return jnp.hstack(moments), q.log_prob(z), at_draws


@both_precisions
def test_log_prob_and_moments_are_those_of_scipy(dtype):
    with jax.enable_x64(dtype == np.float64):
        for q, reference in scipy_members():
            assert q.dtype == dtype
            points = reference.ppf([1e-3, 0.1, 0.5, 0.9, 0.999]).astype(dtype)
            z = jnp.asarray(np.concatenate([points, [0.0, -1.0]]), dtype)
            moments, log_prob, at_draws = summary(q, z)
            rtol = 3e-5 if dtype == np.float32 else 1e-11
            expected = [f() for f in (reference.mean, reference.var, reference.std)]
            expected.append(float(reference.entropy()))
            np.testing.assert_allclose(moments, expected, rtol=rtol)
            expected = reference.logpdf(points.astype(float))
            np.testing.assert_allclose(log_prob[:-2], expected, rtol=rtol, atol=rtol)
            assert (log_prob[-2:] == -np.inf).all()
            np.testing.assert_allclose(at_draws, 0, atol=10 * rtol)


def gamma_entropy(a, b):
    return a - mp.log(b) + mp.loggamma(a) + (1 - a) * mp.digamma(a)


def gamma_kl(a, b, c, d):
    """KL(Ga(a, b) || Ga(c, d))."""
    constant = mp.loggamma(c) - mp.loggamma(a) + c * (mp.log(b) - mp.log(d))
    return (a - c) * mp.digamma(a) + constant + a * (d - b) / b


def inverse_gaussian_entropy(mean, shape):
    phi = shape / mean
    return (1 - mp.log(phi / (2 * mp.pi)) - 3 * mp.exp(2 * phi) * mp.e1(2 * phi)) / 2 + mp.log(mean)


@eqx.filter_jit
def entropy_and_gradients(q):
    """The entropy, and its derivatives in the logarithms of the blocks."""
    entropy, gradients = jax.value_and_grad(lambda b: q.with_blocks(b).entropy())(q.blocks)
    return entropy, jnp.hstack([b * g for b, g in zip(q.blocks, gradients, strict=True)])


def exactly(q):
    """The blocks of one number as mpmath's numbers: what is stored, not what was asked for."""
    return [mp.mpf(float(block[0])) for block in q.blocks]


@x64
@both_precisions
@pytest.mark.parametrize("a", [1e-3, 0.1, 1.0, 7.0, 1e3, 1e6, 1e8])
def test_the_entropy_of_a_gamma_is_exact_to_rounding(a, dtype):
    with mp.workdps(40):
        q = iblr.Gamma(dtype(a), dtype(2))
        shape, inverse_mean = exactly(q)
        expected = float(gamma_entropy(shape, shape * inverse_mean))
        entropy, in_logs = entropy_and_gradients(q)
        assert abs(float(entropy) - expected) < 8 * unit(dtype) * max(1, abs(expected))
        # With the mean fixed a dH/da is 1/2 at infinity; 1/lambda_2 is a scale.
        in_shape = float(shape - 1 + shape * (1 - shape) * mp.polygamma(1, shape))
        tolerance = 16 * unit(dtype)
        np.testing.assert_allclose(in_logs, [in_shape, -1], rtol=tolerance, atol=tolerance)


@x64
@both_precisions
@pytest.mark.parametrize("a", [1e-3, 0.1, 1.0, 7.0, 1e3, 1e6, 1e8])
def test_the_divergence_from_a_conjugate_prior_is_exact_to_rounding(a, dtype):
    with mp.workdps(40):
        q = iblr.Gamma(dtype(a), dtype(2))
        shape, inverse_mean = exactly(q)
        for other in (
            iblr.Gamma(dtype(1), dtype(1)),
            iblr.Gamma(dtype(1.01 * a), dtype(2.02)),
            iblr.Gamma(dtype(1.5 * a), dtype(2.9)),
        ):
            c, d = exactly(other)
            expected = gamma_kl(shape, shape * inverse_mean, c, c * d)
            # A rounding of the ratio of the means alone changes it by c |ratio - 1| roundings.
            entropy = abs(gamma_entropy(shape, shape * inverse_mean))
            size = max(1, entropy, expected, c * abs(d / inverse_mean - 1))
            assert abs(float(q.kl(other)) - float(expected)) < 8 * unit(dtype) * float(size)
        assert abs(float(q.kl(q))) < 8 * unit(dtype) * max(1, float(entropy))


@x64
@both_precisions
@pytest.mark.parametrize(
    ("mean", "shape"), [(1, 1e-3), (2, 0.1), (1, 1), (0.2, 200), (3, 1e3), (1, 1e6), (1, 1e8)]
)
def test_the_entropy_of_an_inverse_gaussian_and_its_gradients_are_those_of_appendix_h(
    mean, shape, dtype
):
    q = iblr.InverseGaussian(dtype(mean), dtype(shape))  # alpha beta = 10^3 is among them
    with mp.workdps(40):
        lambda_1, alpha = exactly(q)
        beta = mp.sqrt(lambda_1)
        phi = alpha * beta
        scaled = mp.exp(2 * phi) * mp.e1(2 * phi)
        expected = float(inverse_gaussian_entropy(1 / beta, alpha))
        in_alpha = 1 / alpha - 3 * beta * scaled
        in_beta = -3 * alpha * scaled
        in_logs = [float(beta * in_beta / 2), float(alpha * in_alpha)]  # lambda_1 = beta^2
    entropy, actual = entropy_and_gradients(q)
    assert abs(float(entropy) - expected) < 8 * unit(dtype) * max(1, abs(expected))
    np.testing.assert_allclose(actual, in_logs, rtol=0, atol=16 * unit(dtype))


ALL = [
    lambda: iblr.Gamma(2.5, 1.5),
    lambda: iblr.Gamma(1.2, 0.4),
    lambda: iblr.Exponential(0.7),
    lambda: iblr.InverseGaussian(1.5, 2.0),
    lambda: iblr.InverseGaussian(0.6, 9.0),
]


@x64
@pytest.mark.parametrize("i", range(len(ALL)))
def test_divergences_between_all_positive_families_are_those_of_quadrature(i):
    q = ALL[i]()
    for make in ALL:
        p = make()
        if isinstance(p, iblr.InverseGaussian) and isinstance(q, iblr.Exponential):
            assert float(q.kl(p)) == np.inf  # E 1/z is infinite
            continue
        v = jnp.linspace(-140, 12, 20_001)  # log z
        z = jnp.exp(v)[:, None]
        log_q, log_p = q.log_prob_rows(z), p.log_prob_rows(z)
        terms = jnp.where(log_q > -600, jnp.exp(log_q + v) * (log_q - log_p), 0)
        expected = terms.sum() * (v[1] - v[0])
        np.testing.assert_allclose(q.kl(p), expected, rtol=1e-8, atol=1e-10)
        cross = jnp.where(log_q > -600, jnp.exp(log_q + v) * log_p, 0).sum() * (v[1] - v[0])
        np.testing.assert_allclose(p.expected_log_prob(q), cross, rtol=1e-8)


def test_a_gamma_whose_inverse_has_no_mean_diverges_from_an_inverse_gaussian():
    assert float(iblr.Gamma(0.9, 1.0).kl(iblr.InverseGaussian(1.0, 1.0))) == np.inf
    assert np.isfinite(float(iblr.Gamma(1.1, 1.0).kl(iblr.InverseGaussian(1.0, 1.0))))


# Geometry.

GRID = np.geomspace(1e-3, 1e5, 81)


def grid_blocks(name):
    """All of the grid in every block, with other values in the other one."""
    if NUM_BLOCKS[name] == 1:
        return (jnp.asarray(GRID),)
    shuffled = np.random.default_rng(0).permutation(GRID)
    return jnp.asarray(GRID), jnp.asarray(shuffled)


@x64
@every_family
def test_weights_and_bends_are_those_of_the_generic_rule(name):
    q = member(name, grid_blocks(name))
    partition = lambda blocks: log_partition(name, [b[0] for b in blocks])  # noqa: E731

    def generic(*numbers):
        blocks = tuple(number[None] for number in numbers)
        rows = []
        for i, b in enumerate(blocks):
            F = geometry.fisher_block(partition, blocks, i)[0, 0]
            bend = -geometry.correction(partition, blocks, i, b)[0] / b[0]
            rows.append((b[0] ** 2 * F, bend))
        return rows

    expected = jax.jit(jax.vmap(generic))(*q.blocks)
    for i in range(NUM_BLOCKS[name]):
        np.testing.assert_allclose(q.weights[i], expected[i][0], rtol=1e-8)
        np.testing.assert_allclose(q.bends[i], expected[i][1], rtol=1e-8)


@x64
@every_family
def test_a_step_of_the_family_is_a_step_of_the_generic_rule(name):
    rng = np.random.default_rng(1)
    q = member(name, grid_blocks(name))
    relative = [jnp.asarray(rng.normal(size=q.dim)) for _ in q.blocks]
    partition = lambda blocks: log_partition(name, [b[0] for b in blocks])  # noqa: E731

    def generic(t, numbers, relative):
        blocks = tuple(number[None] for number in numbers)
        directions = tuple(b * r for b, r in zip(blocks, relative, strict=True))
        return geometry.improved_blocks(partition, blocks, directions, t)

    step = eqx.filter_jit(iblr.improved_step)
    generic = jax.jit(jax.vmap(generic, (None, 0, 0)))
    for t in (0.01, 0.3, 1.0, 4.0):
        new, info = step(q, tangent_of(q, relative), t)
        assert bool(info.status == Status.ok)
        expected = generic(t, q.blocks, tuple(relative))
        for actual, wanted in zip(new.blocks, expected, strict=True):
            np.testing.assert_allclose(actual, wanted[:, 0], rtol=1e-8)


@x64
@both_precisions
def test_weight_and_bend_of_a_gamma_are_those_of_mpmath(dtype):
    shapes = np.concatenate([GRID, [1e-4, 1e6, 1e7, 1e8]]).astype(dtype)
    q = member("gamma", (shapes, np.ones_like(shapes)))
    with mp.workdps(50):
        exact = [mp.mpf(float(a)) for a in shapes]
        T = [mp.polygamma(1, a) - 1 / a for a in exact]
        U = [mp.polygamma(2, a) + 1 / a**2 for a in exact]
        weight = [float(a**2 * x) for a, x in zip(exact, T, strict=True)]
        symbol = [u / (2 * x) for u, x in zip(U, T, strict=True)]
        bend = [float(-a * x) for a, x in zip(exact, symbol, strict=True)]
        assert all(x < -1 / a for a, x in zip(exact, symbol, strict=True))  # Lemma chris_gamma
    rtol = 1e-12 if dtype == np.float64 else 16 * unit(dtype)
    np.testing.assert_allclose(q.weights[0], weight, rtol=rtol)
    np.testing.assert_allclose(q.bends[0], bend, rtol=rtol)
    if dtype == np.float64:
        assert (q.bends[0][: GRID.size] > 1).all()
    assert (q.bends[0] > 1 - 4 * unit(dtype)).all()
    np.testing.assert_array_equal(q.bends[1], 1)


# A target outside of all three families, and expectations by the trapezoidal rule in log z, which
# converges faster than any power of the spacing.


def neg_log_target(name, z):
    inverse = 0.2 / z if name == "inverse gaussian" else 0.0
    return 0.7 * z - 1.3 * jnp.log(z) + 0.1 * jnp.sin(z) + inverse


NODES = np.exp(np.linspace(-45, 9, 2_001))
SPACING = 54 / 2_000


@cache
def density(name):
    """log q as a function of a point and of the parameters, the same object at every call."""
    return lambda z, params: log_density(name, z, params)


def quadrature(name, params):
    """Nodes and weights of q; nodes without weight are moved to one."""
    weights = jnp.exp(log_density(name, jnp.asarray(NODES), params)) * NODES * SPACING
    kept = weights > 1e-25
    return jnp.where(kept, NODES, 1.0), jnp.where(kept, weights, 0.0)


def expectation(name, function, params):
    """E_q f(z), as a function of the parameters that can be differentiated."""
    z, weights = quadrature(name, params)
    return weights @ function(z)


def loss(name, params):
    """The negative ELBO."""
    return expectation(
        name, lambda z: neg_log_target(name, z) + log_density(name, z, params), params
    )


CASES = [
    ("gamma", (2.5, 0.6)),
    ("gamma", (0.8, 1.7)),
    ("gamma", (40.0, 0.5)),
    ("exponential", (0.6,)),
    ("exponential", (3.0,)),
    ("inverse gaussian", (0.5, 2.0)),
    ("inverse gaussian", (4.0, 0.7)),
]
every_case = pytest.mark.parametrize(("name", "params"), CASES)

fisher = jax.jit(geometry.fisher, static_argnums=0)
christoffel = jax.jit(geometry.christoffel, static_argnums=0)


@x64
@every_case
def test_the_fisher_matrix_is_block_diagonal_and_the_symbols_are_the_bends(name, params):
    q, params = member(name, [[b] for b in params]), jnp.array(params)
    rule = quadrature(name, params)
    F = fisher(density(name), params, *rule)
    second_kind = geometry.raise_index(F, christoffel(density(name), params, *rule))
    scaled = params[:, None] * F * params
    np.testing.assert_allclose(scaled, jnp.diag(jnp.concatenate(q.weights)), rtol=1e-8, atol=1e-8)
    for i in range(NUM_BLOCKS[name]):
        np.testing.assert_allclose(-params[i] * second_kind[i, i, i], q.bends[i][0], rtol=1e-7)


@eqx.filter_jit
def expected_directions(name, params, estimator):
    """The expectation of an estimator's ghat: its value at every node, one draw each."""
    q = member(name, params[:, None])
    z, weights = quadrature(name, params)

    @jax.vmap
    def at(z):
        slope = jax.grad(lambda z: neg_log_target(name, z))(z)
        draws = Draws(z[None, None], jnp.log(z / q.mean)[None])
        return jnp.concatenate(
            getattr(q, estimator)(draws, slope[None, None], jnp.zeros(1)).directions
        )

    return params * (weights @ at(z))


@eqx.filter_jit
def expected_directions_of_two(name, params, estimator):
    """The same from two draws a time, at every pair of nodes."""
    q = member(name, params[:, None])
    z, weights = quadrature(name, params)

    def at(first, second):
        rows = jnp.stack([first, second])[:, None]
        slopes = jax.vmap(jax.grad(lambda z: neg_log_target(name, z[0])))(rows)
        draws = Draws(rows, jnp.log(rows / q.mean))
        return jnp.concatenate(getattr(q, estimator)(draws, slopes, jnp.zeros(2)).directions)

    each = jax.vmap(jax.vmap(at, (None, 0)), (0, None))(z, z)
    return params * jnp.einsum("i,j,ijk->k", weights, weights, each)


@eqx.filter_jit
def gradients(name, params):
    """dL/dlambda, and dm/dlambda of every block with the other one fixed."""

    def expected_statistics(moved):
        return expectation(name, lambda z: jnp.stack(statistics(name, z, params), 1), moved)

    slopes = jnp.diagonal(jax.jacfwd(expected_statistics)(params))
    return jax.grad(lambda params: loss(name, params))(params), slopes


@x64
@every_case
def test_expected_tangents_are_natural_gradients(name, params):
    params = jnp.array(params)
    gradient, slopes = gradients(name, params)
    F = fisher(density(name), params, *quadrature(name, params))
    natural = np.linalg.solve(F, gradient)
    # Theorem 3: the gradient in m = E[statistic].
    np.testing.assert_allclose(gradient / slopes, natural, rtol=1e-6)
    for estimator in ("rep", "stl"):
        actual = expected_directions(name, params, estimator)
        np.testing.assert_allclose(actual, natural, rtol=1e-6)


@pytest.mark.slow
@x64
@pytest.mark.parametrize("name, params", [("gamma", (2.5, 0.6)), ("inverse gaussian", (0.7, 1.3))])
def test_the_covariance_of_two_draws_is_as_good_as_the_mean_of_one(name, params):
    params = jnp.array(params)
    one, two = (f(name, params, "stl") for f in (expected_directions, expected_directions_of_two))
    np.testing.assert_allclose(one, two, rtol=1e-6)


# Theorem 2, and the lemmas of appendices F, G and H: no step leaves the set.

NUM_CASES = 10_000


def random_cases(name, dtype, seed, largest=15):
    """Blocks, relative steps x and step sizes, all log-uniform; directions are x / t."""
    rng = np.random.default_rng(seed)
    n = NUM_BLOCKS[name]
    blocks = 10 ** rng.uniform(-3, 5, size=(n, NUM_CASES))
    t = 10 ** rng.uniform(-6, 3, size=NUM_CASES)
    x = 10 ** rng.uniform(-15, largest, size=(n, NUM_CASES))
    x = x * rng.choice([-1, 1], size=x.shape)
    half = NUM_CASES // 2  # half of the cases around the minimum of the factor
    x[:, :half] = rng.uniform(0, 3, size=(n, half))
    return [jnp.asarray(value, dtype) for value in (blocks, x / t, t)]


@eqx.filter_jit
def many_steps(name, blocks, directions, t):
    def one(blocks, directions, t):
        q = member(name, [b[None] for b in blocks])
        new, info = iblr.improved_step(q, tangent_of(q, [d[None] for d in directions]), t)
        return jnp.concatenate(new.blocks), info.status

    return jax.vmap(one, (1, 1, 0), (1, 0))(blocks, directions, t)


@x64
@every_family
@both_precisions
def test_no_improved_step_leaves_the_set(name, dtype):
    blocks, directions, t = random_cases(name, dtype, seed=0)
    new, status = many_steps(name, blocks, directions, t)
    assert new.dtype == dtype
    assert (status == Status.ok).all()
    assert jnp.isfinite(new).all() and (new > 0).all()
    for i, smallest in enumerate(SMALLEST_FACTORS[name]):
        factors = np.asarray(new[i], float) / np.asarray(blocks[i], float)
        assert factors.min() > smallest * (1 - 8 * unit(dtype))
        assert factors.min() < smallest * 1.01  # the bound is reached


@x64
@every_family
@both_precisions
def test_a_step_beyond_the_precision_is_refused_and_the_family_kept(name, dtype):
    huge = 1e25 if dtype == np.float32 else 1e170
    for value, expected in (
        (huge, Status.out_of_range),
        (-huge, Status.out_of_range),
        (np.nan, Status.nonfinite),
        (np.inf, Status.nonfinite),
        (-np.inf, Status.nonfinite),
    ):
        for bad in range(NUM_BLOCKS[name]):
            q = member(name, [[2.0, 3.0]] * NUM_BLOCKS[name], dtype)
            directions = [[0.1, value if i == bad else 0.2] for i in range(NUM_BLOCKS[name])]
            tangent = PositiveTangent(
                jnp.zeros(NUM_BLOCKS[name] * q.dim, dtype),
                tuple(jnp.asarray(d, dtype) for d in directions),
            )
            new, info = iblr.improved_step(q, tangent, 1.0)
            assert bool(info.status == expected)
            assert bool(info.refused)
            assert same_blocks(new, q)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(
    log_blocks=st.lists(st.floats(-3, 5), min_size=2, max_size=2),
    log_steps=st.lists(st.floats(-15, 15), min_size=2, max_size=2),
    signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=2, max_size=2),
    log_t=st.floats(-6, 3),
)
@every_family
def test_hypothesis_finds_no_step_that_leaves_the_set(name, log_blocks, log_steps, signs, log_t):
    n, t = NUM_BLOCKS[name], 10**log_t
    blocks = np.power(10.0, log_blocks[:n])[:, None]
    directions = (np.power(10.0, log_steps[:n]) * signs[:n] / t)[:, None]
    cases = [jnp.asarray(value, np.float32) for value in (blocks, directions, [t])]
    new, status = many_steps(name, *cases)
    assert (status == Status.ok).all()
    smallest = np.array(SMALLEST_FACTORS[name])[:, None]
    assert (np.asarray(new) >= smallest * np.asarray(cases[0]) * (1 - 1e-5)).all()


# The other rules.


def exact_tangent(q, truth):
    """The natural gradient of KL(q || truth), without sampling."""
    gradients = jax.grad(lambda blocks: q.with_blocks(blocks).kl(truth))(q.blocks)
    parts = [block * g for block, g in zip(q.blocks, gradients, strict=True)]
    return q.tangent(jnp.concatenate(parts))


def pair(name, far=False):
    """A member, and the target of the same family that it should move to."""
    shrink = 0.1 if far else 1.0
    if name == "gamma":
        return iblr.Gamma([2.0, 0.5], [1.0, 4.0]), iblr.Gamma([7.0, 3.0 * shrink], [4.0, shrink])
    if name == "exponential":
        return iblr.Exponential([2.0, 5.0]), iblr.Exponential([3.0, shrink])
    start = iblr.InverseGaussian([1.0, 0.5], [2.0, 3.0])
    return start, iblr.InverseGaussian([1.0, 2.0], [2.5, shrink])


@x64
@every_family
def test_the_original_rule_averages_natural_parameters(name):
    # eta <- eta + t (eta_0 + statistics of the data - eta) for a conjugate target.
    q, truth = pair(name)
    tangent = exact_tangent(q, truth)
    eta, wanted = q.to_natural(q.blocks), truth.to_natural(truth.blocks)
    for t in (0.1, 0.5, 1.0):
        new, info = iblr.natural_gradient_step(q, tangent, t)
        assert bool(info.status == Status.ok)
        for actual, old, goal in zip(new.to_natural(new.blocks), eta, wanted, strict=True):
            np.testing.assert_allclose(actual, old + t * (goal - old), rtol=1e-10)


@x64
@every_family
def test_the_original_rule_leaves_the_set_where_the_improved_one_does_not(name):
    q, truth = pair(name, far=True)
    tangent = exact_tangent(q, truth)
    for t in (1.3, 10.0):
        new, info = iblr.natural_gradient_step(q, tangent, t)
        assert bool(info.status == Status.left_set)
        assert same_blocks(new, q)
        new, info = iblr.improved_step(q, tangent, t)
        assert bool(info.status == Status.ok)
        assert not same_blocks(new, q)


@x64
@every_family
def test_the_line_search_takes_one_step_size_for_all_entries(name):
    q, truth = pair(name, far=True)
    tangent = exact_tangent(q, truth)
    eta, goal = (np.stack(f.to_natural(f.blocks)) for f in (q, truth))
    floor = np.array([[0.01], [0.0]]) if name == "gamma" else np.zeros((len(eta), 1))
    decrease = eta - goal
    rooms = np.where(
        decrease > 0, 0.8 * (eta - floor) / np.where(decrease > 0, decrease, 1), np.inf
    )
    for t in (0.2, 1.0, 5.0, 1e6):
        expected = min(t, rooms.min())
        new, info = iblr.line_search_step(q, tangent, t)
        assert bool(info.status == Status.ok)
        np.testing.assert_allclose(info.shrunk, expected / t, rtol=1e-10)
        actual = np.stack(new.to_natural(new.blocks))
        np.testing.assert_allclose(actual, eta - expected * decrease, rtol=1e-9)
        assert (actual > 0.19 * eta * (decrease > 0)).all()
    assert rooms.min() < 1.2  # so that some of those steps were cut


@x64
@pytest.mark.parametrize(("shape", "room"), [(0.05, 0.04), (0.5, 0.49), (0.005, 0.005)])
def test_the_line_search_keeps_a_floor_under_the_shape_of_a_gamma(shape, room):
    q = iblr.Gamma([3.0, shape], 2.0)
    tangent = exact_tangent(q, iblr.Gamma([3.0, 0.1 * shape], 2.0))
    new, info = iblr.line_search_step(q, tangent, 10.0)
    np.testing.assert_allclose(info.shrunk, 0.8 * room / (0.9 * shape) / 10, rtol=1e-10)
    np.testing.assert_allclose(new.shape, [3.0, shape - 0.8 * room], rtol=1e-9)
    np.testing.assert_allclose(new.rate, 2.0, rtol=1e-9)


@x64
@every_family
@both_precisions
def test_no_step_of_the_line_search_leaves_the_set(name, dtype):
    blocks, directions, t = random_cases(name, dtype, seed=1, largest=10)

    @eqx.filter_jit
    @eqx.filter_vmap(in_axes=(1, 1, 0))
    def step(blocks, directions, t):
        q = member(name, [b[None] for b in blocks])
        new, info = iblr.line_search_step(q, tangent_of(q, [d[None] for d in directions]), t)
        return jnp.concatenate(new.blocks), info.status

    new, status = step(blocks, directions, t)
    assert (status == Status.ok).all()
    assert jnp.isfinite(new).all() and (new > 0).all()


@x64
@pytest.mark.parametrize("name", ["exponential", "inverse gaussian"])
def test_the_improved_rule_is_the_geodesic_to_second_order_and_the_original_to_first(name):
    q = member(name, [[0.7]] * NUM_BLOCKS[name])
    tangent = tangent_of(q, [[0.9], [-0.6]][: NUM_BLOCKS[name]])

    def distances(rule):
        errors = []
        for t in (2e-2, 1e-2, 5e-3):
            new, exact = rule(q, tangent, t)[0], iblr.geodesic_step(q, tangent, t)[0]
            errors.append(np.abs(np.stack(new.blocks) - np.stack(exact.blocks))[:, 0])
        return np.log2(np.array(errors[:-1]) / np.array(errors[1:]))

    np.testing.assert_allclose(distances(iblr.improved_step), 3, atol=0.05)
    np.testing.assert_allclose(distances(iblr.natural_gradient_step), 2, atol=0.05)


@x64
def test_the_geodesics_solve_their_equation():
    # lambda'' = -Gamma lambda'^2 = (c / lambda) lambda'^2, from lambda' = -ghat.
    for name, x in (("exponential", (1.5,)), ("inverse gaussian", (1.5, -0.8))):
        q = member(name, [[0.7]] * len(x))
        new, info = iblr.geodesic_step(q, tangent_of(q, [[value] for value in x]), 1.0)
        assert bool(info.status == Status.ok)
        for i, value in enumerate(x):
            c, start = float(q.bends[i][0]), float(q.blocks[i][0])
            solved = integrate.solve_ivp(
                lambda _, y, c=c: [y[1], c * y[1] ** 2 / y[0]],
                (0, 1),
                [start, -value * start],
                rtol=1e-11,
                atol=1e-13,
            )
            np.testing.assert_allclose(new.blocks[i][0], solved.y[0, -1], rtol=1e-8)


@x64
@both_precisions
def test_the_geodesic_of_an_inverse_gaussian_reaches_the_boundary_in_finite_time(dtype):
    q = member("inverse gaussian", [[0.7], [1.2]], dtype)
    for x, fine in ((3.9, True), (4.0, False), (4.1, False), (100.0, False)):
        tangent = tangent_of(q, [[x], [0.0]])
        new, info = iblr.geodesic_step(q, tangent, 1.0)
        assert bool(info.status == Status.ok) == fine
        assert bool(info.status == Status.left_set) != fine
        assert same_blocks(new, q) != fine
        new, info = iblr.improved_step(q, tangent, 1.0)
        assert bool(info.status == Status.ok)
        assert float(new.blocks[0][0]) > 0.7 / 3


def test_a_gamma_has_no_geodesic_and_no_family_a_parameterisation():
    q = iblr.Gamma.standard(2)
    with pytest.raises(ValueError, match="geodesic_step.*improved_step"):
        iblr.geodesic_step(q, tangent_of(q, [[0.1, 0.1]] * 2), 0.1)
    for name in FAMILIES:
        q = member(name, [[1.0]] * NUM_BLOCKS[name])
        tangent = tangent_of(q, [[0.1]] * NUM_BLOCKS[name])
        for rule in (iblr.improved_step, iblr.natural_gradient_step, iblr.line_search_step):
            with pytest.raises(ValueError, match="parameterisation=covariance"):
                rule(q, tangent, 0.1, parameterisation=iblr.Parameterisation.covariance)


@x64
@every_family
def test_the_trust_region_bounds_every_step(name):
    n = NUM_BLOCKS[name]
    q = member(name, [[0.7, 1.5, 2.0]] * n)
    bends = np.stack(q.bends)
    for x in ([-10.0, 2.0, 0.4], [-2.9, 0.4, -0.1], [0.0, 1e3, -1e3]):
        new, info = iblr.improved_step(q, tangent_of(q, [x] * n), 1.0, trust_region=True)
        shrunk = 0.5 / max(0.5, *x)
        cut = np.where(np.array(x) < 0, np.maximum(x, -3), shrunk * np.array(x))
        np.testing.assert_allclose(info.shrunk, shrunk, rtol=1e-12)
        factors = np.stack(new.blocks) / np.stack(q.blocks)
        np.testing.assert_allclose(factors, 1 - cut + 0.5 * bends * cut**2, rtol=1e-12)


@x64
@every_family
def test_the_curvature_step_size_is_that_of_the_shape(name):
    n = NUM_BLOCKS[name]
    q = member(name, [[0.7, 1.5]] * n)
    tangent = tangent_of(q, [[0.5, -0.4]] * n)
    both, _ = iblr.improved_step(q, tangent, 0.3, curvature_step_size=0.05)
    small, large = (iblr.improved_step(q, tangent, t)[0] for t in (0.05, 0.3))
    shape = {"gamma": 0, "exponential": None, "inverse gaussian": 1}[name]
    for i in range(n):
        np.testing.assert_array_equal(both.blocks[i], (small if i == shape else large).blocks[i])


# Fits.


def gamma_distance(q, shapes, rates):
    """The largest KL to the true Gamma posteriors, in float64 and more."""
    a, inverse_mean = (np.asarray(b, float) for b in q.blocks)
    numbers = zip(a, a * inverse_mean, shapes, rates, strict=True)
    return max(float(gamma_kl(*map(mp.mpf, row))) for row in numbers)


COUNTS = np.array([3.0, 0.0, 21.0])


def poisson_log_likelihood(z):
    return (COUNTS * jnp.log(z) - 2.0 * z).sum()


@pytest.mark.parametrize("start", [(1.0, 1.0), slow((100.0, 0.1)), slow((0.05, 30.0))])
def test_a_fit_without_options_reaches_a_conjugate_posterior(start):
    prior = iblr.Gamma(jnp.array([1.5, 2.0, 0.5]), 0.5)
    target = iblr.Target(log_likelihood=poisson_log_likelihood, prior=prior)
    family = iblr.Gamma(jnp.full(3, start[0]), start[1])
    posterior = iblr.fit(target, family, key=jax.random.key(0))
    assert gamma_distance(posterior.family, COUNTS + [1.5, 2.0, 0.5], np.full(3, 2.5)) < 1e-6


@pytest.mark.slow
def test_a_fit_without_options_reaches_posteriors_of_large_counts():
    # Far from such a target its slopes in log z are large and nearly constant.
    counts = np.array([1e3, 3e3, 3e4])
    posterior = iblr.fit(
        lambda z: (counts * jnp.log(z) - 0.1 * z).sum(),
        iblr.Gamma.standard(3),
        key=jax.random.key(0),
    )
    assert gamma_distance(posterior.family, counts + 1, np.full(3, 0.1)) < 1e-6


def test_the_reparameterisation_estimator_comes_near_a_conjugate_posterior():
    prior = iblr.Gamma(jnp.array([1.5, 2.0, 0.5]), 0.5)
    target = iblr.Target(log_likelihood=poisson_log_likelihood, prior=prior)
    family = iblr.Gamma(jnp.ones(3), 1.0)
    estimator = iblr.Rep(samples=50)
    posterior = iblr.fit(target, family, key=jax.random.key(0), estimator=estimator)
    assert gamma_distance(posterior.family, COUNTS + [1.5, 2.0, 0.5], np.full(3, 2.5)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("start", [1.0, 1e3, 1e-3])
def test_a_fit_without_options_reaches_an_exponential(start):
    rates = np.array([0.2, 40.0])
    family = iblr.Exponential(jnp.full(2, start))
    posterior = iblr.fit(lambda z: -(rates * z).sum(), family, key=jax.random.key(1))
    ratio = np.asarray(posterior.family.rate, float) / rates
    assert (1 / ratio - 1 + np.log(ratio)).max() < 1e-6  # KL(q || target)


@pytest.mark.slow
@pytest.mark.parametrize("start", [(1.0, 1.0), (20.0, 0.5), (0.1, 50.0)])
def test_a_fit_without_options_reaches_an_inverse_gaussian(start):
    truth = iblr.InverseGaussian(jnp.array([2.0, 0.3]), jnp.array([3.0, 5.0]))
    family = iblr.InverseGaussian(jnp.full(2, start[0]), jnp.full(2, start[1]))
    posterior = iblr.fit(truth.log_prob, family, key=jax.random.key(2))
    with jax.enable_x64(True):
        q, p = (member("inverse gaussian", f.blocks, float) for f in (posterior.family, truth))
        assert float(q.kl(p)) < 1e-6


def best_inverse_gaussian(log_target):
    """The minimum of the negative ELBO by quadrature and Nelder and Mead's method."""
    v = np.linspace(-25, 8, 4001)
    z = np.exp(v)

    def neg_elbo(log_parameters):
        mean, shape = np.exp(log_parameters)
        log_q = stats.invgauss.logpdf(z, mean / shape, scale=shape)
        density = np.exp(log_q + v)
        return np.sum(np.where(density > 0, density * (log_q - log_target(z)), 0)) * (v[1] - v[0])

    found = optimize.minimize(
        neg_elbo, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}
    )
    return np.exp(found.x), neg_elbo


@pytest.mark.parametrize("estimator", [slow(None), slow(iblr.Rep(samples=50))], ids=["Stl", "Rep"])
def test_a_fit_reaches_the_best_inverse_gaussian_for_a_target_of_another_family(estimator):
    def log_target(z, log=np.log):
        return 1.5 * log(z) - 2 * z - 0.3 / z

    best, neg_elbo = best_inverse_gaussian(log_target)
    target = iblr.Target(lambda z: log_target(z, jnp.log))
    start = iblr.InverseGaussian(1.0, 1.0)
    q = iblr.fit(target, start, key=jax.random.key(3), estimator=estimator).family
    found = np.log([float(q.mean[0]), float(q.shape)])
    excess = neg_elbo(found) - neg_elbo(np.log(best))
    assert -1e-12 < excess < 2e-4
    assert neg_elbo(np.log(best)) < neg_elbo(np.log(1.1 * best)) - 2e-4  # ten per cent off is seen


# Shapes, structures, batches.


sample = eqx.filter_jit(lambda q, num=None: q.sample(jax.random.key(0), num))


def test_numbers_may_come_in_any_shape():
    shape, rate = jnp.arange(1.0, 13.0).reshape(3, 4), jnp.array([1.0, 2.0, 3.0, 4.0])
    q = iblr.Gamma(shape, rate)
    assert q.dim == 12 and q.shape.shape == q.rate.shape == (3, 4)
    np.testing.assert_allclose(q.rate, jnp.broadcast_to(rate, (3, 4)), rtol=1e-6)
    draws = sample(q, 5)
    assert draws.shape == (5, 3, 4)
    expected = stats.gamma(np.asarray(shape), scale=1 / np.asarray(rate)).logpdf(draws).sum((1, 2))
    np.testing.assert_allclose(
        jax.jit(lambda z: q.log_prob(z))(draws), expected, rtol=2e-5, atol=2e-5
    )

    single = iblr.InverseGaussian(2.0, 3.0)
    assert single.shape.shape == sample(single).shape == ()
    assert sample(single, 5).shape == (5,)


def test_numbers_may_come_in_a_pytree():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.full((2, 1), 3.0)}
    shapes = {"a": (2,), "b": (2, 1)}
    for q in (iblr.Exponential(tree), iblr.InverseGaussian(tree, tree)):
        assert jax.tree.map(jnp.shape, sample(q)) == shapes
        assert jax.tree.map(jnp.shape, sample(q, 5)) == {"a": (5, 2), "b": (5, 2, 1)}
        assert jax.tree.map(jnp.shape, q.sample_log(jax.random.key(0))) == shapes
    np.testing.assert_array_equal(iblr.Exponential(tree).rate["a"], tree["a"])
    for q in (iblr.Gamma(tree, 2.0), iblr.InverseGaussian(2.0, tree)):
        assert jax.tree.map(jnp.shape, q.shape) == shapes
        np.testing.assert_array_equal(q.shape["b"], tree["b"])
    np.testing.assert_allclose(iblr.Gamma(tree, 2.0).rate["a"], 2, rtol=1e-6)
    for make in FAMILIES.values():
        assert jax.tree.map(jnp.shape, make.standard(like=tree).moments()[0]) == shapes


@pytest.mark.slow
def test_fits_run_in_batches_of_keys_and_of_starts():
    log_density = lambda z: (-1.5 * jnp.log(z) - z - 1 / z).sum()  # noqa: E731
    keys, options = jax.random.split(jax.random.key(0), 3), {"num_steps": 800}
    target = iblr.Target(log_density)  # inverse Gaussians of mean 1 and shape 2
    make = lambda a: iblr.InverseGaussian(jnp.full((2, 2), a), a)  # noqa: E731
    starts = jax.vmap(make)(jnp.array([0.5, 1.0, 5.0]))
    assert starts.batch_shape == (3,)
    batch = iblr.fit(target, starts, key=keys, **options).family
    assert batch.blocks[1].shape == (3, 4)
    np.testing.assert_allclose(batch.blocks[1], 2, rtol=1e-2)
    alone = iblr.fit(target, make(1.0), key=keys[1], **options).family
    np.testing.assert_allclose(batch.blocks[1][1], alone.blocks[1], rtol=1e-4)


@every_family
def test_families_pass_through_jit_and_vmap(name):
    n = NUM_BLOCKS[name]
    blocks = [jnp.array([[0.5, 2.0], [1.0, 3.0], [4.0, 0.2]])] * n

    def all_of(q):
        key = jax.random.key(0)
        return q.sample(key, 4), q.log_prob(jnp.ones(2)), q.entropy(), q.kl(q), q.mean

    template = FAMILIES[name].standard(2)
    one = lambda *blocks: all_of(template.with_blocks(blocks))  # noqa: E731
    batched, single = jax.jit(jax.vmap(one))(*blocks), jax.jit(one)
    for i in range(3):
        for stacked, alone in zip(batched, single(*[b[i] for b in blocks]), strict=True):
            np.testing.assert_allclose(stacked[i], alone, rtol=1e-5, atol=1e-6)


# Arguments.


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (iblr.Gamma, ("shape", "rate")),
        (iblr.InverseGaussian, ("mean", "shape")),
        (iblr.Exponential, ("rate",)),
    ],
)
def test_bad_parameters_are_named(make, names):
    call = make.__name__
    for i, name in enumerate(names):
        for value in (0.0, -1.0, np.nan, np.inf, jnp.array([1.0, -2.0])):
            arguments = [jnp.ones(2)] * len(names)
            arguments[i] = value
            with pytest.raises(ValueError, match=rf"`{call}\({name}=\.\.\.\)` must be"):
                make(*arguments)
    empty = [jnp.ones(0)] * len(names)
    with pytest.raises(ValueError, match=rf"`{call}\({', '.join(names)}\)` needs at least one"):
        make(*empty)
    with pytest.raises(ValueError, match=rf"`{call}\(dtype=\.\.\.\)` needs a floating"):
        make(*[1.0] * len(names), dtype=int)
    if len(names) == 2:
        joined = ", ".join(names)
        with pytest.raises(ValueError, match=rf"`{call}\({joined}\)` needs shapes that broadcast"):
            make(jnp.ones(2), jnp.ones(3))
        with pytest.raises(ValueError, match=rf"`{call}\({joined}\)` needs parameters of one str"):
            make({"a": jnp.ones(2)}, {"b": jnp.ones(2)})
    with pytest.raises(ValueError, match=rf"{call}\.standard"):
        make.standard()
    with pytest.raises(ValueError, match=rf"{call}\.standard"):
        make.standard(0)


def test_families_over_other_points_are_refused_by_kl():
    with pytest.raises(ValueError, match=r"kl\(other\).*3"):
        iblr.Gamma.standard(3).kl(iblr.Gamma.standard(2))
    with no_type_hook(), pytest.raises(ValueError, match="needs a positive family.*got Gaussian"):
        iblr.Gamma.standard(2).expected_log_prob(iblr.Gaussian.standard(2))


def test_the_density_off_the_support_is_zero_and_nan_stays_nan():
    for q in (iblr.Gamma(1.0, 1.0), iblr.InverseGaussian(1.0, 1.0), iblr.Exponential(1.0)):
        log_prob = q.log_prob(jnp.array([-1.0, 0.0, jnp.inf, jnp.nan, 1.0]))
        assert (log_prob[:3] == -jnp.inf).all()
        assert jnp.isnan(log_prob[3]) and jnp.isfinite(log_prob[4])


def test_parameters_that_make_blocks_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"Gamma\(rate=.*does not fit into float32"):
        iblr.Gamma(1e30, 1e-30)
    with pytest.raises(ValueError, match=r"InverseGaussian\(mean=.*does not fit into float32"):
        iblr.InverseGaussian(1e25, 1.0)


@pytest.mark.slow
def test_a_vague_prior_is_a_start():
    prior, counts = iblr.Gamma(jnp.full(3, 0.01), 0.01), jnp.array([7.0, 0.0, 30.0])
    target = iblr.Target(log_likelihood=lambda z: (counts * jnp.log(z) - 3 * z).sum(), prior=prior)
    posterior = iblr.fit(target, prior, key=jax.random.key(0))
    assert posterior.refused == 0 and posterior.limited > 0
    truth = iblr.Gamma(counts + 0.01, 3.01)
    assert abs(posterior.family.kl(truth)) < 1e-5

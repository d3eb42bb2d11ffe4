"""Parameters without constraints: the same distribution, and the gradient of the negative ELBO."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, gaussian_mixture, no_type_hook, slow

import iblr
from iblr import Gamma, Gaussian, InverseGaussian, Product, SkewGaussian, geometry
from iblr.families.abstract_gaussian import GaussianTangent
from iblr.families.base import AbstractFamily
from iblr.families.custom import Custom
from iblr.families.definition import define
from iblr.structure import Structure

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)
GAUSSIAN = {case.name: case.make for case in FAMILIES}
COVARIANCE = np.array([[2.0, 0.6, -0.2], [0.6, 1.0, 0.3], [-0.2, 0.3, 0.5]])
PRIOR = lambda: Gaussian.from_covariance(jnp.array([1.0, -2.0, 0.5]), 1.5 * COVARIANCE)  # noqa: E731


def skew():
    alpha = jnp.array([0.7, -0.4, 1.2])
    return SkewGaussian.from_parameters(jnp.array([0.3, 0.1, -0.5]), COVARIANCE, alpha)


def positive():
    return Gamma(jnp.array([0.4, 3.0]), jnp.array([2.0, 0.7]))


# A member, and a prior whose term is exact: with no likelihood so is the whole tangent of `Rep`.
EXACT = {
    "gaussian": lambda: (GAUSSIAN["gaussian-3"](KEY), PRIOR()),
    "diagonal": lambda: (GAUSSIAN["diagonal-3"](KEY), PRIOR()),
    "skew": lambda: (skew(), PRIOR()),
    "gamma": lambda: (positive(), Gamma(jnp.array([1.0, 2.0]), 1.0)),
    "inverse gaussian": lambda: (
        InverseGaussian(jnp.array([0.5, 2.0]), jnp.array([1.0, 4.0])),
        InverseGaussian(jnp.array([1.0, 1.5]), 2.0),
    ),
    "exponential": lambda: (iblr.Exponential(jnp.array([0.3, 2.0])), Gamma(jnp.ones(2) * 3, 1.0)),
    "product": lambda: (
        Product({"w": GAUSSIAN["diagonal-3"](KEY), "tau": iblr.Exponential(jnp.array([0.3]))}),
        Product({"w": PRIOR(), "tau": iblr.Exponential(jnp.array([2.0]))}),
    ),
}


def no_likelihood(z):
    return 0.0 * sum(leaf.sum() for leaf in jax.tree.leaves(z))


QUICK = ("gaussian", "diagonal", "exponential")


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in EXACT])
def test_the_gradient_is_that_of_the_negative_elbo(name):
    q, prior = EXACT[name]()
    target = iblr.Target(log_likelihood=no_likelihood, prior=prior)

    @eqx.filter_jit
    def both(q):
        def neg_elbo(theta):
            after = q.from_free(theta)
            return -after.entropy() - prior.expected_log_prob(after)

        theta, tangent, rows = q.free(), iblr.Rep()(q, target, KEY), q.draw(KEY, 5).rows
        actual, expected = q.free_gradient(tangent, theta), jax.grad(neg_elbo)(theta)
        return actual, expected, q.from_free(theta).log_prob_rows(rows), q.log_prob_rows(rows)

    actual, expected, log_prob, same = both(q)
    lower = lambda leaf: jnp.tril(leaf) if leaf.ndim == 2 else leaf  # noqa: E731
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, lower(b), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(log_prob, same, rtol=1e-8)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_curvature_of_low_rank_gives_the_gradient_of_the_same_matrix(shift):
    q = GAUSSIAN["gaussian-7"](KEY)
    left, right = jax.random.normal(KEY, (2, 2, 7))

    @jax.jit
    def gradients(q):
        low = GaussianTangent(q.mean, q.mean, q.low_rank(shift, left, right))
        dense = GaussianTangent(q.mean, q.mean, low.curvature.dense())
        return q.free_gradient(low, q.free())[1], q.free_gradient(dense, q.free())[1]

    np.testing.assert_allclose(*gradients(q), rtol=1e-10, atol=1e-12)


def test_the_diagonal_of_a_cholesky_factor_may_have_any_sign():
    q, flip = GAUSSIAN["gaussian-3"](KEY), np.array([1.0, -1.0, -1.0])

    @jax.jit
    def both(q):
        mean, C = q.free()
        tangent = GaussianTangent(q.mean, q.mean, q.from_hessian(jnp.diag(jnp.arange(1.0, 4.0))))
        straight, turned = (q.free_gradient(tangent, (mean, D))[1] for D in (C, C * flip))
        return C, straight, turned, q.from_free((mean, C * flip))

    C, straight, turned, flipped = both(q)
    assert (np.diagonal(C) > 0).all() and (np.triu(C, 1) == 0).all()
    np.testing.assert_allclose(C @ C.T, q.covariance, rtol=1e-12)
    np.testing.assert_allclose(flipped.covariance, q.covariance, rtol=1e-12)
    np.testing.assert_allclose(flipped.log_det, q.log_det, rtol=1e-12)
    np.testing.assert_allclose(turned, straight * flip, rtol=1e-12)
    d = iblr.DiagonalGaussian.standard(2)
    assert d.from_free((d.mean, jnp.array([-2.0, 3.0]))).scale.tolist() == [2.0, 3.0]
    assert bool(jnp.isnan(d.from_free((d.mean, jnp.array([0.0, 3.0]))).scale[0]))


@pytest.mark.parametrize("shape", [0.01, 0.004, 0.010001])
def test_a_start_at_its_floor_is_put_just_above_it(shape):
    q = Gamma(jnp.array([shape, 2.0]), 1.0)
    theta = q.free()
    after = q.from_free(theta)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in theta)
    assert float(after.shape[0]) == pytest.approx(max(shape, 0.01), rel=1e-6)
    gradient = q.free_gradient(q.tangent(jnp.ones(4)), theta)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in gradient)


def test_a_positive_parameter_that_underflows_is_no_member():
    q = Gamma(jnp.ones(2), 1.0)
    assert bool(jnp.isnan(q.from_free((jnp.zeros(2), jnp.array([-1e4, 0.0]))).blocks[1][0]))


def log_density(z):
    return -0.5 * (z[0] - 1.0) ** 2 + jnp.sin(z[0])


def test_the_gradient_of_a_mixture_is_that_of_its_negative_elbo_by_quadrature():
    q = gaussian_mixture([[-1.0], [1.5]], [[[0.5]], [[1.2]]], [0.3, 0.7])
    x, w = map(jnp.asarray, np.polynomial.hermite_e.hermegauss(80))
    target = iblr.Target(log_density)

    @eqx.filter_jit
    def both(q):
        def neg_elbo(theta):
            after = q.from_free(theta)
            mean, scale = after.components.mean[:, 0], after.components.factor[:, 0, 0]
            rows = (mean[:, None] + scale[:, None] * x).reshape(-1, 1)
            b = after.log_prob_rows(rows) - jax.vmap(log_density)(rows)
            return after.weights @ (b.reshape(2, -1) @ w) / w.sum()

        theta, tangent = q.free(), iblr.Stl(pairs=100_000)(q, target, KEY)
        held = dataclasses.replace(q, learn_weights=False).free_gradient(tangent, theta)
        return q.free_gradient(tangent, theta), jax.grad(neg_elbo)(theta), held, q.from_free(theta)

    actual, expected, held, same = both(q)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)
    assert held["logits"].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(same.log_weights, q.log_weights)
    np.testing.assert_allclose(same.components.inverse, q.components.inverse)


def test_the_gradient_of_a_mixture_is_made_of_its_draws():
    d, means = 2, [[-1.0, 0.0], [1.5, 0.5]]
    covariances = [[[0.5, 0.1], [0.1, 0.4]], [[1.2, -0.3], [-0.3, 0.8]]]
    q = gaussian_mixture(means, covariances, [0.3, 0.7])
    slopes, values = jax.random.normal(KEY, (12, d)), jnp.arange(12.0)

    @eqx.filter_jit
    def evaluated(q):
        draws = q.draw_pairs(KEY, 3)
        actual = q.free_gradient(q.stl(draws, slopes, values), q.free())
        terms = q.terms(draws.rows)
        return actual, draws, slopes + terms.score(), terms.log_q - values

    actual, draws, W, b = evaluated(q)
    W, b = np.asarray(W).reshape(2, 6, d), np.asarray(b).reshape(2, 6)
    for c, (pi, mean, covariance) in enumerate(zip([0.3, 0.7], means, covariances, strict=True)):
        centred = np.asarray(draws.rows).reshape(2, 6, d)[c] - mean
        half = np.linalg.inv(covariance) @ centred.T @ W[c] / 6
        of_C = np.tril((half + half.T) / 2 @ np.linalg.cholesky(covariance))
        np.testing.assert_allclose(actual["components"][0][c], pi * W[c].mean(0), rtol=1e-10)
        np.testing.assert_allclose(actual["components"][1][c], pi * of_C, rtol=1e-9, atol=1e-12)
    expected = np.array([0.3, 0.7]) * (b.mean(1) - [0.3, 0.7] @ b.mean(1))
    np.testing.assert_allclose(actual["logits"], expected, rtol=1e-10)


def test_a_mixture_without_a_finite_draw_has_no_gradient():
    q = gaussian_mixture([[0.0], [1.0]], [[[1.0]], [[2.0]]])

    @jax.jit
    def gradient(q):
        tangent = q.stl(q.draw_pairs(KEY, 1), jnp.full((4, 1), jnp.nan), jnp.full(4, jnp.nan))
        return q.free_gradient(tangent, q.free())

    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(gradient(q)))


def user_gaussian():
    """Mean, precision and, apart from them, an exponential rate; two copies, not checked."""

    def log_partition(b):
        quadratic = b["mean"] @ b["precision"] @ b["mean"]
        return 0.5 * (quadratic - jnp.linalg.slogdet(b["precision"])[1]) - jnp.log(b["rate"])

    start = {"mean": jnp.array([1.0, 2.0]), "precision": COVARIANCE[:2, :2], "rate": 0.7}
    constraints = {"precision": iblr.positive_definite, "rate": iblr.positive}
    unused = lambda *_: None  # noqa: E731
    start = define(start, unused, log_partition, unused, constraints, None, "Custom")
    vectors = tuple(jnp.stack([v, 1.2 * v]) for v in start[1])
    return Custom(vectors, start[0], (2,), Structure.flat(6))


def test_the_gradient_of_a_users_family_goes_through_its_constraints():
    q = user_gaussian()
    H = jnp.array([[1.5, 0.4], [0.4, 0.8]])

    def loss(vectors):
        def one(mean, triangle, rate):
            S = geometry.unpack_symmetric(triangle)
            square = jnp.sum(H * jnp.linalg.inv(S)) + mean @ H @ mean + jnp.linalg.slogdet(S)[1]
            return 0.5 * square + 3.0 / rate[0] + jnp.log(rate[0])

        return jax.vmap(one)(*vectors).sum()

    @eqx.filter_jit
    def both(q):
        theta, tangent = q.free(), q._tangent(jax.grad(loss)(q.vectors))
        back = q.from_free(theta).vectors
        expected = jax.grad(lambda theta: loss(q.from_free(theta).vectors))(theta)
        return q.free_gradient(tangent, theta), expected, back

    actual, expected, back = both(q)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)
    for a, b in zip(back, q.vectors, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def test_a_family_without_free_parameters_says_so():
    q = iblr.DiagonalGaussian.standard(1)
    for call in (
        lambda: AbstractFamily.free(q),
        lambda: AbstractFamily.from_free(q, ()),
        lambda: AbstractFamily.free_gradient(q, None, ()),
    ):
        with no_type_hook(), pytest.raises(ValueError, match="`free`, `from_free` and `free_grad"):
            call()

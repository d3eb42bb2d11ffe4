"""The skew Gaussian against SciPy, quadrature, the joint Fisher matrix and the paper's update."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from scipy import integrate, stats

import iblr
from iblr import Gaussian, Hess, Rep, SkewGaussian, Status, Stl, Target, geometry
from iblr.families.base import Draws
from iblr.families.skew_gaussian import Noise, entropy_of_skew

KEY = jax.random.key(0)
HALF_NORMAL_MEAN = np.sqrt(2 / np.pi)

improved_step = eqx.filter_jit(iblr.improved_step)


def member(seed, d, length=1.0):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(d, d))
    covariance = root @ root.T / d + 0.4 * np.eye(d)
    arrays = rng.normal(size=d), covariance, length * rng.normal(size=d)
    return SkewGaussian.from_parameters(*(jnp.asarray(x, float) for x in arrays))


def lbar(z):
    """Minus a log density that is not skew Gaussian."""
    return 0.1 * (z**4).sum() + jnp.sin(z).sum() + 0.3 * z[0] * z[-1]


@eqx.filter_jit
def estimated(estimator, q):
    return estimator(q, Target(lambda z: -lbar(z)), KEY)


@pytest.mark.parametrize(
    "mu, variance, alpha", [(0.3, 0.5, 2.0), (-1.0, 2.0, -0.1), (0.0, 1e-4, 3.0)]
)
def test_in_one_dimension_it_is_the_skew_normal_of_scipy(mu, variance, alpha, x64):
    q = SkewGaussian.from_parameters(jnp.array([mu]), jnp.array([[variance]]), jnp.array([alpha]))
    exact = stats.skewnorm(alpha / np.sqrt(variance), mu, np.sqrt(variance + alpha**2))
    z = exact.ppf([1e-6, 0.01, 0.3, 0.9, 1 - 1e-6])
    np.testing.assert_allclose(q.log_prob(jnp.asarray(z)[:, None]), exact.logpdf(z), rtol=1e-9)
    np.testing.assert_allclose(q.mean[0], exact.mean(), rtol=1e-12)
    np.testing.assert_allclose(q.standard_deviations[0], exact.std(), rtol=1e-12)
    assert abs(float(q.entropy()) - float(exact.entropy())) < 1e-6
    draws = np.asarray(q.sample(KEY, 20_000))[:, 0]
    assert stats.kstest(draws, exact.cdf).pvalue > 1e-3


@pytest.mark.parametrize("k", [1e-6, 1e-2, 0.5, 3.0, 50.0, 1e4, 1e8])
def test_the_skew_part_of_the_entropy_and_its_slope_are_those_of_quadrature(k, x64):
    reach = 12 * min(1.0, k**0.5)

    def integrand(y):
        double = 2 * stats.norm.cdf(y)
        return stats.norm.pdf(y, scale=k**0.5) * double * np.log(double)

    expected = integrate.quad(integrand, -reach, reach, epsabs=1e-15, limit=400)[0]
    expected += 2 * np.log(2) * stats.norm.sf(reach / k**0.5)
    np.testing.assert_allclose(entropy_of_skew(jnp.asarray(k)), expected, rtol=1e-8)
    h = 1e-4 * k
    up, down = (float(entropy_of_skew(jnp.asarray(k + s))) for s in (h, -h))
    slope = jax.grad(entropy_of_skew)(jnp.asarray(k))
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-5, atol=1e-12)


@pytest.mark.slow
def test_without_skew_it_is_a_gaussian():
    plain = Gaussian.from_covariance(jnp.ones(2), jnp.array([[2.0, 0.3], [0.3, 0.5]]))
    q = SkewGaussian.from_parameters(jnp.ones(2), plain.covariance, jnp.zeros(2))
    z = plain.sample(KEY, 5)
    np.testing.assert_allclose(q.log_prob(z), plain.log_prob(z), rtol=1e-5)
    np.testing.assert_allclose(q.entropy(), plain.entropy(), rtol=1e-6)
    np.testing.assert_allclose(q.kl(plain), 0, atol=1e-6)


# The joint Fisher matrix; blocks [mu; alpha] and S, S as its lower triangle.


def nodes():
    """Of |w| and of a standard normal variable, with their weights, by Gauss's rule."""
    x, v = np.polynomial.legendre.leggauss(100)
    w, e = 4.5 * (x + 1), 9 * x
    of_w, of_e = v * np.exp(-0.5 * w**2), v * np.exp(-0.5 * e**2)
    grid = np.stack(np.meshgrid(w, e, indexing="ij"), -1).reshape(-1, 2)
    weights = np.outer(of_w / of_w.sum(), of_e / of_e.sum()).reshape(-1)
    return jnp.asarray(grid[:, 0]), jnp.asarray(grid[:, 1]), jnp.asarray(weights)


def log_partition(blocks, w):
    mu, alpha = jnp.split(blocks[0], 2)
    S, x = geometry.unpack_symmetric(blocks[1]), mu + w * alpha
    return 0.5 * (x @ S @ x - jnp.linalg.slogdet(S / (2 * jnp.pi))[1])


def of_blocks(blocks):
    mu, alpha = jnp.split(blocks[0], 2)
    covariance = jnp.linalg.inv(geometry.unpack_symmetric(blocks[1]))
    return SkewGaussian.from_parameters(mu, covariance, alpha)


def neg_elbo(blocks):
    """E_q[lbar + log q] by quadrature, in one dimension."""
    q = of_blocks(blocks)
    w, e, weights = nodes()
    Z = (q.base.mean + w[:, None] * q.alpha) + q.base.colour(e[:, None])
    return weights @ (jax.vmap(lbar)(Z) + q.log_prob_rows(Z))


@eqx.filter_jit
def by_definition(q):
    blocks = (
        jnp.concatenate([q.base.mean, q.alpha]),
        geometry.pack_symmetric(q.base.precision),
    )
    w, _, weights = nodes()
    A = geometry.averaged(log_partition, w, weights)
    gradients = jax.grad(neg_elbo)(blocks)
    return tuple(geometry.natural_gradient(A, blocks, i, g) for i, g in enumerate(gradients))


def from_tangent(q, tangent):
    means = q.base.colour(jnp.stack([tangent.mu.whitened, tangent.alpha]))
    B = q.base.inverse
    G = B @ tangent.mu.curvature.dense().matrix @ B.T
    return means.reshape(-1), geometry.pack_symmetric(G)


@eqx.filter_jit
def averaged_tangent(q, kind):
    """The expectation of an estimator, one draw (or pair) at a quadrature node at a time."""
    w, e, weights = nodes()

    @jax.vmap
    def at(w, e):
        E = e[None, None]
        centre, X = q.base.mean + w * q.alpha, q.base.colour(E)
        rows = jnp.concatenate([centre + X, centre - X]) if kind == "stl" else centre + X
        draws, slopes = Draws(rows, Noise(w[None], E)), jax.vmap(jax.grad(lbar))(rows)
        values = -jax.vmap(lbar)(rows)
        if kind == "hess":
            return from_tangent(q, q.hess(draws, slopes, values, jax.vmap(jax.hessian(lbar))(rows)))
        return from_tangent(q, getattr(q, kind)(draws, slopes, values))

    return jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), at(w, e))


@pytest.mark.parametrize("kind", ["stl", slow("rep"), slow("hess")])
def test_every_estimator_averages_to_the_natural_gradient(kind, x64):
    q = member(0, 1)
    for actual, expected in zip(averaged_tangent(q, kind), by_definition(q), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_term_of_a_gaussian_prior_is_exact(x64):
    q, prior = member(1, 2), Gaussian.from_covariance(0.3 * jnp.ones(2), 2 * jnp.eye(2) + 0.5)
    flat = Target(log_likelihood=lambda z: 0.0 * z.sum(), prior=prior)
    tangent = Rep(samples=1)(q, flat, KEY)
    # KL(q || prior) is in closed form, and its natural gradient is this.
    loss = lambda mu, alpha: SkewGaussian.from_parameters(  # noqa: E731
        mu, q.base.covariance, alpha
    ).kl(prior)
    of_mu, of_alpha = jax.grad(loss, (0, 1))(q.base.mean, q.alpha)
    np.testing.assert_allclose(tangent.gradient, jnp.concatenate([of_mu, of_alpha]), rtol=1e-8)
    by_covariance = jax.grad(
        lambda C: SkewGaussian.from_parameters(q.base.mean, C, q.alpha).kl(prior)
    )(q.base.covariance)
    A = np.asarray(q.base.factor)
    np.testing.assert_allclose(
        tangent.mu.curvature.dense().matrix, -2 * A @ by_covariance @ A.T, atol=1e-8
    )


@pytest.mark.slow
def test_the_joint_fisher_matrix_is_block_diagonal_and_that_of_theorem_4(x64):
    q = member(2, 2)
    blocks = jnp.concatenate([q.base.mean, q.alpha]), geometry.pack_symmetric(q.base.precision)

    def log_joint(point, params):
        w, z = point[0], point[1:]
        x = z - params[:2] - w * params[2:4]
        S = geometry.unpack_symmetric(params[4:])
        return 0.5 * (jnp.linalg.slogdet(S / (2 * jnp.pi))[1] - x @ S @ x)

    # Derivatives of log q(w, z) are polynomials: nodes of |w| from its moments, of z by Gauss.
    w = np.arange(0.005, 9, 0.01)
    share = np.exp(-0.5 * w**2) / np.exp(-0.5 * w**2).sum()
    few_w, few_share = _gauss_of(w, share, 4)
    x, v = np.polynomial.hermite_e.hermegauss(4)
    E = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    of_e = np.outer(v, v).reshape(-1) / v.sum() ** 2
    points = np.concatenate(
        [
            np.column_stack([np.full(len(E), w), q.base.mean + w * q.alpha + E @ q.base.factor])
            for w in few_w
        ]
    )
    weights = np.outer(few_share, of_e).reshape(-1)
    points, weights, params = jnp.asarray(points), jnp.asarray(weights), jnp.concatenate(blocks)
    F = jax.jit(geometry.fisher, static_argnums=0)(log_joint, params, points, weights)
    np.testing.assert_allclose(F[:4, 4:], 0, atol=1e-10)
    assert np.abs(F[:2, 2:4]).max() > 0.1  # mu and alpha are not blocks by themselves
    symbols = jax.jit(geometry.christoffel, static_argnums=0)(log_joint, params, points, weights)
    A = geometry.averaged(log_partition, jnp.asarray(few_w), jnp.asarray(few_share))
    rng = np.random.default_rng(0)
    for i, own in enumerate((np.arange(4), np.arange(4, 7))):
        metric = F[np.ix_(own, own)]
        np.testing.assert_allclose(geometry.fisher_block(A, blocks, i), metric, atol=1e-9)
        ghat = jnp.asarray(rng.normal(size=own.size))
        lowered = jnp.einsum("dab,a,b->d", symbols[np.ix_(own, own, own)], ghat, ghat)
        np.testing.assert_allclose(
            geometry.correction(A, blocks, i, ghat), jnp.linalg.solve(metric, lowered), atol=1e-8
        )


def _gauss_of(points, weights, count):
    """Gauss's rule of a discrete measure, by the Lanczos process."""
    vector, before, beta = np.sqrt(weights), np.zeros_like(weights), 0.0
    diagonal, off = [], []
    for _ in range(count):
        product = points * vector
        diagonal.append(vector @ product)
        product = product - diagonal[-1] * vector - beta * before
        beta = np.linalg.norm(product)
        off.append(beta)
        before, vector = vector, product / beta
    matrix = np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1)
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors[0] ** 2


# The step.


@pytest.mark.parametrize("estimator", [Stl(pairs=2), Rep(samples=3), Hess(samples=2)])
def test_a_step_is_the_papers_by_brute_force(estimator, x64):
    q = member(3, 5)
    tangent = estimated(estimator, q)
    S, Sigma = np.asarray(q.base.precision), np.asarray(q.base.covariance)
    of_mu, of_alpha = np.split(np.asarray(tangent.gradient), 2)
    c = HALF_NORMAL_MEAN
    B = np.asarray(q.base.inverse)
    G = B @ np.asarray(tangent.mu.curvature.dense().matrix) @ B.T
    for t in (0.01, 0.7, 5.0):
        new, info = improved_step(q, tangent, jnp.asarray(t))
        assert not info.refused
        mu = q.base.mean - t * Sigma @ (of_mu - c * of_alpha) / (1 - c**2)
        alpha = q.alpha - t * Sigma @ (of_alpha - c * of_mu) / (1 - c**2)
        np.testing.assert_allclose(new.base.mean, mu, rtol=1e-9)
        np.testing.assert_allclose(new.alpha, alpha, rtol=1e-9)
        expected = S - t * G + 0.5 * t**2 * G @ Sigma @ G
        np.testing.assert_allclose(
            new.base.precision, expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max()
        )


@pytest.mark.parametrize("dtype", ["float32", slow("float64")])
def test_no_step_leaves_the_set(dtype):
    with jax.enable_x64(dtype == "float64"):
        q = member(4, 3, length=3.0)

        @jax.jit
        @jax.vmap
        def stepped(key):
            keys = jax.random.split(key, 3)
            size, t = 10 ** jax.random.uniform(keys[0], (2,), q.dtype, -3, jnp.array([6, 3]))
            draws = q.draw(keys[1], 4, antithetic=True)
            slopes = size * jax.random.normal(keys[2], draws.rows.shape, q.dtype)
            new, info = iblr.improved_step(q, q.stl(draws, slopes, jnp.zeros(4, q.dtype)), t)
            smallest = jnp.linalg.svd(new.base.factor, compute_uv=False).min()
            finite = jnp.isfinite(new.alpha).all() & jnp.isfinite(new.base.inverse).all()
            return info.status == Status.ok, finite, smallest

        ok, finite, smallest = stepped(jax.random.split(KEY, 3000))
        assert ok.all() and finite.all() and (smallest > 0).all()


@pytest.mark.slow
def test_a_fit_reaches_a_skew_gaussian_and_beats_the_gaussian():
    truth = SkewGaussian.from_parameters(jnp.array([1.0]), jnp.array([[0.3]]), jnp.array([2.0]))
    posterior = iblr.fit(truth.log_prob, SkewGaussian.standard(1), key=KEY)
    assert posterior.elbo > -1e-3
    np.testing.assert_allclose(posterior.family.alpha, truth.alpha, rtol=0.02)
    np.testing.assert_allclose(posterior.family.base.mean, truth.base.mean, atol=0.05)
    plain = iblr.fit(truth.log_prob, Gaussian.standard(1), key=KEY)
    assert plain.elbo < posterior.elbo - 0.02

"""The mixture of Gaussians against quadrature, the joint Fisher matrix and the paper's update."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax.scipy.special import logsumexp

import iblr
from iblr import GaussianMixture, Hess, Rep, Status, Stl, Target, geometry
from iblr.families.base import Draws
from iblr.families.mixture_gradients import Own, Pooled
from iblr.geometry import pack_symmetric, unpack_symmetric

KEY = jax.random.key(0)


# Compiled, since operations one by one would take minutes.


@eqx.filter_jit
def estimated(estimator, q):
    return estimator(q, Target(lambda z: -lbar(z)), KEY)


improved_step = eqx.filter_jit(iblr.improved_step)


def mixture(seed, K, d, diagonal=False, dtype=float, apart=1.0):
    """A random mixture whose components overlap."""
    rng = np.random.default_rng(seed)
    means = apart * rng.normal(size=(K, d))
    if diagonal:
        spread = rng.uniform(0.3, 1.5, (K, d))
    else:
        roots = rng.normal(size=(K, d, d))
        spread = roots @ roots.swapaxes(1, 2) / d + 0.4 * np.eye(d)
    weights = rng.dirichlet(np.full(K, 3.0))
    arrays = [np.asarray(x, dtype) for x in (means, spread, weights)]
    return GaussianMixture.from_moments(*arrays)


def lbar(z):
    """Minus a log density that no mixture has."""
    return 0.1 * (z**4).sum() + jnp.sin(z).sum() + 0.3 * z[0] * z[-1]


def nodes_of_noise(d):
    """Nodes of a standard normal variable and their weights, by the trapezoidal rule.

    log q has poles near the real axis, which spoil Gauss's rule for polynomials.
    """
    x = np.arange(-8, 8, 0.02 if d == 1 else 0.1)
    w = np.exp(-0.5 * x**2)
    grid = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    weights = np.stack(np.meshgrid(*[w / w.sum()] * d, indexing="ij"), -1).reshape(-1, d).prod(1)
    return jnp.asarray(grid), jnp.asarray(weights)


# The parameters of the paper: log(pi_c / pi_K), mu_c, S_c as its lower triangle.


def blocks_of(q):
    precisions = [pack_symmetric(q[c].precision) for c in range(q.num_components)]
    logits = q.log_weights[:-1] - q.log_weights[-1]
    return (logits, *q.components.mean, *precisions)


def log_components(blocks, z):
    K = len(blocks) // 2
    means, precisions = blocks[1 : 1 + K], [unpack_symmetric(b) for b in blocks[1 + K :]]
    return jnp.stack(
        [
            -0.5 * ((z - m) @ S @ (z - m) - jnp.linalg.slogdet(S / (2 * jnp.pi))[1])
            for m, S in zip(means, precisions, strict=True)
        ]
    )


def log_weights(blocks):
    return jax.nn.log_softmax(jnp.append(blocks[0], 0.0))


def neg_elbo(blocks, noise, weights):
    """E_q[lbar + log q] by quadrature."""
    K = len(blocks) // 2
    total = 0.0
    for c in range(K):
        covariance = jnp.linalg.inv(unpack_symmetric(blocks[1 + K + c]))
        Z = blocks[1 + c] + noise @ jnp.linalg.cholesky(covariance).T
        log_q = jax.vmap(lambda z: logsumexp(log_components(blocks, z) + log_weights(blocks)))(Z)
        terms = weights @ (jax.vmap(lbar)(Z) + log_q)
        total = total + jnp.exp(log_weights(blocks))[c] * terms
    return total


def joint_log_partition(blocks, w):
    """A of the component w, and that of its distribution, which does not depend on w."""
    K = len(blocks) // 2
    means = jnp.stack(blocks[1 : 1 + K])
    precisions = jnp.stack([unpack_symmetric(b) for b in blocks[1 + K :]])
    m, S = means[w], precisions[w]
    of_z = 0.5 * (m @ S @ m - jnp.linalg.slogdet(S / (2 * jnp.pi))[1])
    return of_z + jnp.logaddexp(0.0, logsumexp(blocks[0]))


def by_definition(q):
    """F^-1 grad L of every block with the joint Fisher matrix, and the log-partition."""
    blocks = blocks_of(q)
    noise, weights = nodes_of_noise(q.dim)
    A = geometry.averaged(joint_log_partition, jnp.arange(q.num_components), q.weights)
    gradients = jax.grad(neg_elbo)(blocks, noise, weights)
    natural = tuple(geometry.natural_gradient(A, blocks, i, g) for i, g in enumerate(gradients))
    return A, blocks, natural


def from_tangent(q, tangent):
    """The same blocks from the library's whitened tangent."""
    logits = tangent.log_weights[:-1] - tangent.log_weights[-1]
    means = jax.vmap(lambda p, y: p.colour(y[None])[0])(q.components, tangent.components.whitened)
    dense = jax.vmap(lambda c: c.dense().matrix)(tangent.components.curvature)
    B = jax.vmap(lambda p: jnp.linalg.inv(p.root()))(q.components)
    precisions = jax.vmap(lambda B, G: pack_symmetric(B @ G @ B.T))(B, dense)
    return (logits, *means, *precisions)


def averaged_tangent(q, kind):
    """The expectation of an estimator, one draw (or pair) at a quadrature node at a time."""
    noise, weights = nodes_of_noise(q.dim)
    K = q.num_components
    slopes_at = jax.vmap(jax.grad(lbar))

    def own(e):
        E = jnp.broadcast_to(e, (K, 1, q.dim))
        X = jax.vmap(lambda p, E: p.colour(E))(q.components, E)
        centres = q.components.mean[:, None]
        rows = jnp.concatenate([centres + X, centres - X], axis=1).reshape(-1, q.dim)
        return q.stl(Draws(rows, Own(E)), slopes_at(rows), -jax.vmap(lbar)(rows))

    def shared(z, proportions):
        draws, values = Draws(z[None], Pooled(proportions)), -jax.vmap(lbar)(z[None])
        if kind == "hess":
            return q.hess(draws, slopes_at(z[None]), values, jax.hessian(lbar)(z)[None])
        return getattr(q, "rep" if kind == "rep" else "stl")(draws, slopes_at(z[None]), values)

    if kind == "own":
        tangents = jax.vmap(lambda e: from_tangent(q, own(e)))(noise)
        return jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), tangents)
    proportions = jnp.full(K, -np.log(K)) if kind == "reuse" else q.log_weights
    total = None
    for c in range(K):
        Z = q.components.mean[c] + q[c].colour(noise)
        each = jax.vmap(lambda z: from_tangent(q, shared(z, proportions)))(Z)
        part = jax.tree.map(
            lambda x, c=c: jnp.exp(proportions[c]) * jnp.tensordot(weights, x, 1), each
        )
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    return total


@pytest.mark.parametrize("kind", [slow("own"), "reuse", slow("shared"), slow("rep"), slow("hess")])
@pytest.mark.parametrize(("K", "d"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_every_estimator_averages_to_the_natural_gradient(kind, K, d, x64):
    q = mixture(K + d, K, d)
    _, _, natural = eqx.filter_jit(by_definition)(q)
    found = eqx.filter_jit(averaged_tangent)(q, kind)
    for actual, expected in zip(found, natural, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.slow
def test_a_diagonal_mixture_has_the_diagonal_of_the_natural_gradient(x64):
    q = mixture(0, 2, 2, diagonal=True)
    full = GaussianMixture.from_moments(
        q.components.mean, jax.vmap(jnp.diag)(q.components.scale**2), q.weights
    )
    rows, same = estimated(Stl(pairs=3), q), estimated(Stl(pairs=3), full)
    np.testing.assert_allclose(rows.components.gradient, same.components.gradient, rtol=1e-9)
    np.testing.assert_allclose(rows.log_weights, same.log_weights, rtol=1e-9)
    dense = jax.vmap(lambda c: c.dense().diagonal())(same.components.curvature)
    np.testing.assert_allclose(rows.components.curvature.values, dense, rtol=1e-9)


@pytest.mark.slow
def test_the_joint_fisher_matrix_is_block_diagonal_and_that_of_theorem_4(x64):
    q = mixture(1, 2, 2)
    blocks, A = blocks_of(q), geometry.averaged(joint_log_partition, jnp.arange(2), q.weights)
    sizes = [b.size for b in blocks]
    ends = np.cumsum(sizes)[:-1]

    def log_joint(point, params):
        own = tuple(jnp.split(params, ends))
        w = point[0].astype(int)
        return log_weights(own)[w] + log_components(own, point[1:])[w]

    # Third derivatives of log q(w, z) are polynomials of low degree in z.
    x, v = np.polynomial.hermite_e.hermegauss(4)
    noise = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
    share = np.outer(v, v).reshape(-1) / v.sum() ** 2
    points, weights = [], []
    for c in range(2):
        Z = q.components.mean[c] + q[c].colour(jnp.asarray(noise))
        points.append(jnp.concatenate([jnp.full((len(Z), 1), float(c)), Z], axis=1))
        weights.append(q.weights[c] * share)
    points, weights = jnp.concatenate(points), jnp.concatenate(weights)
    params = jnp.concatenate(blocks)
    F = jax.jit(geometry.fisher, static_argnums=0)(log_joint, params, points, weights)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_allclose(jnp.where(labels[:, None] == labels, 0, F), 0, atol=1e-10)
    symbols = jax.jit(geometry.christoffel, static_argnums=0)(log_joint, params, points, weights)
    rng = np.random.default_rng(0)
    for i in range(len(blocks)):
        own = np.flatnonzero(labels == i)
        metric = F[np.ix_(own, own)]
        np.testing.assert_allclose(geometry.fisher_block(A, blocks, i), metric, atol=1e-9)
        ghat = jnp.asarray(rng.normal(size=own.size))
        lowered = jnp.einsum("dab,a,b->d", symbols[np.ix_(own, own, own)], ghat, ghat)
        expected = jnp.linalg.solve(metric, lowered)
        np.testing.assert_allclose(
            geometry.correction(A, blocks, i, ghat), expected, rtol=1e-7, atol=1e-9
        )


# The step.


@pytest.mark.parametrize("estimator", [Stl(pairs=2), Stl(pairs=2, reuse=True), Rep(5), Hess(5)])
def test_a_step_is_the_papers_by_brute_force(estimator, x64):
    q = mixture(2, 3, 5)
    tangent = estimated(estimator, q)
    for t in (0.01, 0.7, 5.0):
        assert_is_the_papers_step(q, tangent, t)


def assert_is_the_papers_step(q, tangent, t):
    new, info = improved_step(q, tangent, jnp.asarray(t))
    assert not info.refused
    ghat = np.asarray(tangent.log_weights)
    np.testing.assert_allclose(
        new.log_weights[:-1] - new.log_weights[-1],
        q.log_weights[:-1] - q.log_weights[-1] - t * (ghat[:-1] - ghat[-1]),
        rtol=1e-9,
    )
    for c in range(3):
        part = jax.tree.map(lambda x, c=c: x[c], tangent.components)
        S, Sigma = np.asarray(q[c].precision), np.asarray(q[c].covariance)
        B = np.linalg.inv(q[c].factor)
        G = B @ np.asarray(part.curvature.dense().matrix) @ B.T
        np.testing.assert_allclose(new[c].mean, q[c].mean - t * Sigma @ part.gradient, rtol=1e-9)
        expected = S - t * G + 0.5 * t**2 * G @ Sigma @ G
        np.testing.assert_allclose(
            new[c].precision, expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max()
        )
        A, B = (np.asarray(getattr(new.components, name)[c]) for name in ("factor", "inverse"))
        np.testing.assert_allclose(A @ B, np.eye(5), atol=1e-10)


@pytest.mark.slow
def test_the_second_order_term_of_the_weights_is_that_of_geometry(x64):
    q = dataclasses.replace(mixture(3, 4, 1), curved_weights=True)
    new, _ = improved_step(q, tangent := estimated(Stl(pairs=1), q), jnp.asarray(0.3))
    logits = (q.log_weights[:-1] - q.log_weights[-1],)
    ghat = (tangent.log_weights[:-1] - tangent.log_weights[-1],)
    A = lambda blocks: jnp.logaddexp(0.0, logsumexp(blocks[0]))  # noqa: E731
    expected = geometry.improved_blocks(A, logits, ghat, 0.3)[0]
    np.testing.assert_allclose(new.log_weights[:-1] - new.log_weights[-1], expected, rtol=1e-9)


FAR = pytest.param(1e6, marks=pytest.mark.slow)


@pytest.mark.parametrize("apart", [pytest.param(0.0, marks=pytest.mark.slow), 1.0, FAR])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_components_stay_positive_definite_at_any_step_size(dtype, apart):
    """K up to 10, step sizes 1e-3 to 1e3, curvatures up to 1e6 in whitened units."""
    cases = 1200
    with jax.enable_x64(dtype == "float64"):
        for K, d in ((1, 3), (4, 2), (10, 4)):
            q = mixture(K, K, d, dtype=dtype, apart=apart)

            @jax.jit
            @jax.vmap
            def stepped(key, q=q):
                keys = jax.random.split(key, 4)
                exponents = jax.random.uniform(keys[1], (2,), q.dtype, -3, jnp.array([6, 3]))
                size, t = 10**exponents
                draws = q.draw_pairs(keys[0], 2)
                slopes = size * jax.random.normal(keys[2], draws.rows.shape, q.dtype)
                values = size * jax.random.normal(keys[3], draws.rows.shape[:1], q.dtype)
                tangent = q.stl(draws, slopes, values)
                new, info = iblr.improved_step(q, tangent, t)
                A, B = new.components.factor, new.components.inverse
                product = jnp.matmul(A, B, precision="highest") - jnp.eye(q.dim)
                logs = jnp.isfinite(new.log_weights).all() & (new.log_weights <= 1e-6).all()
                finite = jnp.isfinite(A).all() & jnp.isfinite(B).all()
                singular = jnp.linalg.svd(A, compute_uv=False).min(-1)
                scale = jnp.abs(A).max((1, 2)) * jnp.abs(B).max((1, 2))
                residual = jnp.abs(product).max((1, 2)) / scale
                return info.status == Status.ok, logs & finite, singular.min(), residual.max()

            ok, finite, smallest, residual = stepped(jax.random.split(KEY, cases))
            assert ok.all() and finite.all()
            assert (smallest > 0).all()
            assert residual.max() < 200 * np.finfo(dtype).eps


def test_coincident_components_move_alike_and_far_ones_do_not_disturb(x64):
    one = iblr.Gaussian.from_covariance(jnp.array([0.3, -0.2]), jnp.array([[1.0, 0.2], [0.2, 0.5]]))
    twin = GaussianMixture.from_moments(
        jnp.stack([one.mean] * 2 + [one.mean + 1e6]), jnp.stack([one.covariance] * 3)
    )
    terms = twin.terms(one.mean[None])
    np.testing.assert_allclose(terms.responsibilities[:, 0], [0.5, 0.5, 0.0], atol=1e-12)
    draws = twin.draw_pairs(KEY, 2)
    slopes = jax.vmap(jax.grad(lbar))(draws.rows)
    tangent = eqx.filter_jit(twin.stl)(draws, slopes, -jax.vmap(lbar)(draws.rows))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tangent))
    assert np.isfinite(twin.log_prob(jnp.array([1e8, -1e8])))

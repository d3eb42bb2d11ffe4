"""The two routes of `iblr.geometry` against each other, against the paper, and against the rule."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import iblr
from iblr import geometry
from iblr.geometry import pack_symmetric, unpack_symmetric

pytestmark = pytest.mark.usefixtures("x64")

DIMS = [1, 2, pytest.param(3, marks=pytest.mark.slow)]
STEP_SIZES = np.array([0.01, 0.3, 1.0, 4.0])

# Compiled, since operations one by one would take minutes.
fisher = jax.jit(geometry.fisher, static_argnums=0)
christoffel = jax.jit(geometry.christoffel, static_argnums=0)
fisher_block = jax.jit(geometry.fisher_block, static_argnums=(0, 2))
correction = jax.jit(geometry.correction, static_argnums=(0, 2))
natural_gradient = jax.jit(geometry.natural_gradient, static_argnums=(0, 2))
raise_index = jax.jit(geometry.raise_index)
improved_step = eqx.filter_jit(iblr.improved_step)


def close(actual, expected, tolerance):
    """Equal up to `tolerance` times the largest entry expected, or times one if that is larger."""
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerance * max(1.0, float(np.abs(expected).max()))
    )


def quadrature(mean, covariance, order=5):
    """Nodes and weights of N(mean, covariance), exact for polynomials of degree 2 order - 1."""
    x, w = np.polynomial.hermite_e.hermegauss(order)
    d = len(mean)
    noise = np.stack(np.meshgrid(*[x] * d, indexing="ij"), -1).reshape(-1, d)
    weights = np.stack(np.meshgrid(*[w / w.sum()] * d, indexing="ij"), -1).reshape(-1, d).prod(1)
    points = np.asarray(mean) + noise @ np.linalg.cholesky(covariance).T
    return jnp.asarray(points), jnp.asarray(weights)


# The Gaussian with blocks mu and S, S as its lower triangle.


def member(d):
    rng = np.random.default_rng(d)
    root = rng.normal(size=(d, d))
    return jnp.asarray(rng.normal(size=d)), jnp.asarray(root @ root.T + 0.5 * np.eye(d))


def log_partition(blocks):
    mu, S = blocks[0], unpack_symmetric(blocks[1])
    return 0.5 * (mu @ S @ mu - jnp.linalg.slogdet(S / (2 * jnp.pi))[1])


def log_prob(z, params):
    mu, S = params[: len(z)], unpack_symmetric(params[len(z) :])
    return -0.5 * ((z - mu) @ S @ (z - mu) - jnp.linalg.slogdet(S / (2 * jnp.pi))[1])


def log_prob_covariance(z, params):
    mu, Sigma = params[: len(z)], unpack_symmetric(params[len(z) :])
    x = z - mu
    return -0.5 * (x @ jnp.linalg.solve(Sigma, x) + jnp.linalg.slogdet(2 * jnp.pi * Sigma)[1])


@pytest.mark.parametrize("d", DIMS)
def test_a_symmetric_matrix_survives_packing(d):
    matrix = member(d)[1]
    block = pack_symmetric(matrix)
    assert block.shape == (d * (d + 1) // 2,)
    np.testing.assert_array_equal(unpack_symmetric(block), matrix)


@pytest.mark.parametrize("d", DIMS)
def test_fisher_blocks_equal_the_fisher_matrix_by_quadrature(d):
    mu, S = member(d)
    blocks = (mu, pack_symmetric(S))
    F = fisher(log_prob, jnp.concatenate(blocks), *quadrature(mu, np.linalg.inv(S)))
    close(fisher_block(log_partition, blocks, 0), F[:d, :d], 1e-8)
    close(fisher_block(log_partition, blocks, 1), F[d:, d:], 1e-8)
    close(F[:d, d:], np.zeros((d, d * (d + 1) // 2)), 1e-8)


def test_draws_serve_as_quadrature():
    mu, S = member(2)
    q = iblr.Gaussian.from_precision(mu, S)
    n = 20_000
    draws = q.sample(jax.random.key(0), n)
    params = jnp.concatenate([mu, pack_symmetric(S)])
    F = fisher(log_prob, params, draws, jnp.full(n, 1 / n))
    exact = fisher(log_prob, params, *quadrature(mu, q.covariance))
    close(F, exact, 0.02)


@pytest.mark.parametrize("d", DIMS)
def test_half_the_third_derivatives_of_the_log_partition_are_the_symbols(d):
    # Theorem 3 against eq. chris, and `correction` against the contraction of the tensor.
    mu, S = member(d)
    blocks = (mu, pack_symmetric(S))
    params, nodes = jnp.concatenate(blocks), quadrature(mu, np.linalg.inv(S))
    symbols = christoffel(log_prob, params, *nodes)
    second_kind = raise_index(fisher(log_prob, params, *nodes), symbols)
    direction = jnp.asarray(np.random.default_rng(0).normal(size=len(params)))
    for i, at in enumerate([slice(0, d), slice(d, None)]):
        third = jax.jit(jax.jacfwd(lambda b, i=i: fisher_block(log_partition, b, i)))(blocks)[i]
        close(symbols[at, at, at], 0.5 * third, 1e-8)
        ghat = direction[at]
        expected = jnp.einsum("cab,a,b->c", second_kind[at, at, at], ghat, ghat)
        close(correction(log_partition, blocks, i, ghat), expected, 1e-8)


@pytest.mark.parametrize("d", DIMS)
def test_the_correction_of_a_precision_is_minus_G_S_inverse_G(d):
    # Lemma gauss_s_chris, and lemma gauss_gamma1 for the mean.
    mu, S = member(d)
    blocks = (mu, pack_symmetric(S))
    G = member(d + 3)[1][:d, :d] - 2 * S
    close(correction(log_partition, blocks, 0, mu + 1), np.zeros(d), 1e-12)
    actual = unpack_symmetric(correction(log_partition, blocks, 1, pack_symmetric(G)))
    close(actual, -G @ np.linalg.solve(S, G), 1e-10)


def quartic(z):
    return 0.25 * (z @ z) ** 2 + 0.3 * jnp.sum(jnp.arange(1.0, len(z) + 1) * z)


def quartic_loss(mu, S):
    """E_q[quartic + log q], the negative ELBO, in closed form."""
    Sigma = jnp.linalg.inv(S)
    fourth = (jnp.trace(Sigma) + mu @ mu) ** 2 + 2 * jnp.sum(Sigma**2) + 4 * mu @ Sigma @ mu
    linear = 0.3 * jnp.sum(jnp.arange(1.0, len(mu) + 1) * mu)
    return 0.25 * fourth + linear + 0.5 * jnp.linalg.slogdet(S / (2 * jnp.pi * jnp.e))[1]


@pytest.mark.parametrize("d", DIMS)
def test_natural_gradients_are_gradients_in_the_expectation_parameters(d):
    mu, S = member(d)
    blocks = (mu, pack_symmetric(S))

    def mu_of(m):  # m = E[S z]
        return jnp.linalg.solve(S, m)

    def S_of(m):  # m pairs with the lower triangle of S, so that it counts off-diagonals twice
        M = unpack_symmetric(m)
        M = 0.5 * (M + jnp.diag(jnp.diagonal(M)))  # M = E[-zz'/2 + (mu z' + z mu')/2]
        return jnp.linalg.inv(jnp.outer(mu, mu) - 2 * M)

    m_mu, m_S = jax.jit(jax.grad(log_partition))(blocks)
    close(mu_of(m_mu), mu, 1e-10)
    close(S_of(m_S), S, 1e-10)

    gradients = jax.jit(jax.grad(lambda b: quartic_loss(b[0], unpack_symmetric(b[1]))))(blocks)
    ghat_mu, ghat_S = (natural_gradient(log_partition, blocks, i, gradients[i]) for i in (0, 1))
    close(ghat_mu, jax.jit(jax.grad(lambda m: quartic_loss(mu_of(m), S)))(m_mu), 1e-8)
    close(ghat_S, jax.jit(jax.grad(lambda m: quartic_loss(mu, S_of(m))))(m_S), 1e-8)

    # Appendix E.2: S^-1 E[grad lbar] and S - E[hess lbar].
    z, w = quadrature(mu, np.linalg.inv(S))
    gradient = w @ jax.jit(jax.vmap(jax.grad(quartic)))(z)
    hessian = jnp.tensordot(w, jax.jit(jax.vmap(jax.hessian(quartic)))(z), 1)
    close(ghat_mu, np.linalg.solve(S, gradient), 1e-8)
    close(unpack_symmetric(ghat_S), S - hessian, 1e-8)


estimators = pytest.mark.parametrize("estimator", [iblr.Hess(), iblr.Rep()], ids=["Hess", "Rep"])


@pytest.mark.parametrize("d", DIMS)
@estimators
def test_the_rule_of_the_gaussian_is_the_generic_rule(d, estimator):
    mu, S = member(d)
    q = iblr.Gaussian.from_precision(mu, S)
    tangent = eqx.filter_jit(estimator)(q, iblr.Target(lambda z: -quartic(z)), jax.random.key(d))

    @jax.jit
    def both(t):
        A_inverse = jnp.linalg.inv(q.root())
        G = A_inverse @ tangent.curvature.dense().matrix @ A_inverse.T
        ghat = (jnp.linalg.solve(S, tangent.gradient), pack_symmetric(G))
        generic = geometry.improved_blocks(log_partition, (mu, pack_symmetric(S)), ghat, t)
        new, _ = iblr.improved_step(q, tangent, t)
        actual = jnp.concatenate([new.mean, pack_symmetric(new.precision)])
        return actual, jnp.concatenate(generic)

    for t in STEP_SIZES:
        close(*both(t), 1e-9)


@pytest.mark.parametrize("d", DIMS)
@estimators
def test_the_rule_of_the_diagonal_gaussian_is_the_generic_rule(d, estimator):
    mu, S = member(d)
    q = iblr.DiagonalGaussian.from_variances(mu, jnp.diagonal(S))
    tangent = eqx.filter_jit(estimator)(q, iblr.Target(lambda z: -quartic(z)), jax.random.key(d))

    def split(x):
        return tuple(jnp.split(x, 2 * d))

    def partition(blocks):
        mu, s = jnp.concatenate(blocks[:d]), jnp.concatenate(blocks[d:])
        return 0.5 * jnp.sum(s * mu**2 - jnp.log(s / (2 * jnp.pi)))

    @jax.jit
    def both(t):
        s = q.precision_diagonal
        ghat = jnp.concatenate([tangent.gradient / s, tangent.curvature.values * s])
        blocks = jnp.concatenate([mu, s])
        generic = geometry.improved_blocks(partition, split(blocks), split(ghat), t)
        new, _ = iblr.improved_step(q, tangent, t)
        actual = jnp.concatenate([new.mean, new.precision_diagonal])
        return actual, jnp.concatenate(generic)

    for t in STEP_SIZES:
        close(*both(t), 1e-9)


# Appendix A: the univariate Gaussian in {mu, sigma} and {mu, v}.


class Coordinates(NamedTuple):
    parameterisation: iblr.Parameterisation
    of_variance: Callable
    to_variance: Callable
    fisher: Callable
    symbols: Callable  # second kind, as the appendix prints them

    def log_prob(self, z, params):
        v = self.to_variance(params[1])
        return -0.5 * ((z - params[0]) ** 2 / v + jnp.log(2 * jnp.pi * v))

    def quadrature(self, params, order=5):
        x, w = np.polynomial.hermite_e.hermegauss(order)
        return params[0] + jnp.sqrt(self.to_variance(params[1])) * x, jnp.asarray(w / w.sum())


SIGMA = Coordinates(
    iblr.Parameterisation.standard_deviation,
    lambda v: v**0.5,
    lambda sigma: sigma**2,
    lambda sigma: np.diag([1 / sigma**2, 2 / sigma**2]),
    lambda sigma: np.array(
        [[[0, -1 / sigma], [-1 / sigma, 0]], [[1 / (2 * sigma), 0], [0, -1 / sigma]]]
    ),
)
V = Coordinates(
    iblr.Parameterisation.covariance,
    lambda v: v,
    lambda v: v,
    lambda v: np.diag([1 / v, 1 / (2 * v**2)]),
    lambda v: np.array([[[0, -1 / (2 * v)], [-1 / (2 * v), 0]], [[1, 0], [0, -1 / v]]]),
)
both = pytest.mark.parametrize("coordinates", [SIGMA, V], ids=["sigma", "v"])


class Case(NamedTuple):
    """q = N(mean, variance), the target exp(-curvature (z - centre)^2 / 2), and a step size."""

    mean: jax.Array
    variance: jax.Array
    centre: jax.Array
    curvature: jax.Array
    step_size: jax.Array


class Steps(NamedTuple):
    song: jax.Array
    block: jax.Array
    library: jax.Array


def steps(coordinates, case):
    """The new {mu, theta} by the full symbols, by the block-restricted ones, and by `iblr`."""
    params = jnp.stack([case.mean, coordinates.of_variance(case.variance)])
    nodes = coordinates.quadrature(params)
    F = fisher(coordinates.log_prob, params, *nodes)
    first_kind = christoffel(coordinates.log_prob, params, *nodes)
    symbols = raise_index(F, first_kind)

    def loss(params):
        v = coordinates.to_variance(params[1])
        square = v + (params[0] - case.centre) ** 2
        return 0.5 * (case.curvature * square - jnp.log(v))

    ghat, t = jnp.linalg.solve(F, jax.grad(loss)(params)), case.step_size
    song = geometry.second_order_step(symbols, params, ghat, t)
    block = geometry.second_order_step(symbols, params, ghat, t, blocks=[[0], [1]])

    q = iblr.DiagonalGaussian.from_variances(case.mean[None], case.variance[None])
    target = iblr.Target(lambda z: -0.5 * case.curvature * ((z - case.centre) ** 2).sum())
    tangent = iblr.AtMean()(q, target, jax.random.key(0))  # exact: the target is quadratic
    new, _ = iblr.improved_step(q, tangent, t, parameterisation=coordinates.parameterisation)
    theta = coordinates.of_variance(new.variances[0])
    return Steps(song, block, jnp.stack([new.mean[0], theta]))


@both
@pytest.mark.parametrize("theta", [0.3, 1.0, 2.5])
def test_the_tables_of_appendix_a(coordinates, theta):
    params = jnp.array([0.7, theta])
    nodes = coordinates.quadrature(params)
    F = fisher(coordinates.log_prob, params, *nodes)
    close(F, coordinates.fisher(theta), 1e-8)
    first_kind = christoffel(coordinates.log_prob, params, *nodes)
    close(raise_index(F, first_kind), coordinates.symbols(theta), 1e-8)


@both
def test_eq_chris_is_the_derivative_of_the_metric(coordinates):
    # Its definition, 1/2 (d_a F_bd + d_b F_ad - d_d F_ab), with nodes that move with q.
    params = jnp.array([0.7, 1.3])
    metric = lambda x: fisher(coordinates.log_prob, x, *coordinates.quadrature(x))  # noqa: E731
    D = jax.jit(jax.jacfwd(metric))(params)  # D[b, d, a] = d_a F_bd
    expected = 0.5 * (
        jnp.einsum("bda->dab", D) + jnp.einsum("adb->dab", D) - jnp.einsum("abd->dab", D)
    )
    actual = christoffel(coordinates.log_prob, params, *coordinates.quadrature(params))
    close(actual, expected, 1e-8)


@both
def test_the_full_christoffel_step_leaves_the_set_and_the_block_step_does_not(coordinates):
    # The target has the width of q already and lies ten standard deviations away: the natural
    # gradient is (-10, 0), and the full step turns the speed of the mean into a loss of width.
    case = Case(*jnp.array([0.0, 1.0, 10.0, 1.0, 0.3]))
    song, block, library = jax.jit(steps, static_argnums=0)(coordinates, case)
    close(song, [3.0, {SIGMA: -1.25, V: -3.5}[coordinates]], 1e-10)
    close(block, [3.0, 1.0], 1e-10)
    close(library, [3.0, 1.0], 1e-10)


@both
def test_the_block_step_is_always_valid_and_the_full_step_often_not(coordinates):
    n, keys = 20_000, jax.random.split(jax.random.key(0), 5)
    mean, log_variance, centre, curvature, log_t = (jax.random.normal(key, (n,)) for key in keys)
    cases = Case(mean, jnp.exp(log_variance), 3 * centre, 2 * curvature, jnp.exp(log_t))
    song, block, library = jax.jit(jax.vmap(lambda case: steps(coordinates, case)))(cases)
    assert (library[:, 1] > 0).all() and (block[:, 1] > 0).all()
    np.testing.assert_allclose(library, block, rtol=1e-10, atol=1e-10)
    assert 0.25 < float((song[:, 1] < 0).mean()) < 0.75


# Appendix E.4: {mu, Sigma} in two dimensions.


def quadratic():
    """q, its tangent for a quadratic target (exact at the mean), and dL/dSigma, symmetric."""
    mu, S = member(2)
    H, centre = jnp.array([[1.5, 0.4], [0.4, -2.0]]), jnp.array([0.3, -1.0])
    q = iblr.Gaussian.from_precision(mu, S)
    target = iblr.Target(lambda z: -0.5 * (z - centre) @ H @ (z - centre))
    tangent = eqx.filter_jit(iblr.AtMean())(q, target, jax.random.key(0))
    loss = lambda Sigma: 0.5 * (jnp.sum(H * Sigma) - jnp.linalg.slogdet(Sigma)[1])  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(q.covariance)
    return q, tangent, 0.5 * (gradient + gradient.T)


def test_the_covariance_parameterisation_is_appendix_e4():
    q, tangent, gradient = quadratic()
    Sigma = q.covariance
    params, nodes = jnp.concatenate([q.mean, pack_symmetric(Sigma)]), quadrature(q.mean, Sigma)
    F = fisher(log_prob_covariance, params, *nodes)
    symbols = raise_index(F, christoffel(log_prob_covariance, params, *nodes))
    weight = 2 - pack_symmetric(jnp.eye(2))  # an off-diagonal coordinate moves two entries
    euclidean = jnp.concatenate([tangent.gradient, weight * pack_symmetric(gradient)])
    ghat = jnp.asarray(np.linalg.solve(F, euclidean))
    g = 2 * Sigma @ gradient @ Sigma
    close(unpack_symmetric(ghat[2:]), g, 1e-8)

    for t in STEP_SIZES:
        expected = Sigma - t * g + 0.5 * t**2 * g @ np.linalg.solve(Sigma, g)
        new, _ = improved_step(q, tangent, t, parameterisation=iblr.Parameterisation.covariance)
        close(new.covariance, expected, 1e-10)
        close(new.mean, q.mean - t * Sigma @ tangent.gradient, 1e-10)
        step = geometry.second_order_step(symbols, params, ghat, t, blocks=[[0, 1], [2, 3, 4]])
        close(step, jnp.concatenate([new.mean, pack_symmetric(new.covariance)]), 1e-8)


def test_the_printed_update_of_tran_et_al_is_half_the_curvature_step():
    q, tangent, gradient = quadratic()
    Sigma = q.covariance
    g = Sigma @ gradient @ Sigma  # their Algorithm 2, without the factor 2
    for t in STEP_SIZES:
        expected = Sigma - t * g + 0.5 * t**2 * g @ np.linalg.solve(Sigma, g)
        new, _ = improved_step(
            q,
            tangent,
            t,
            curvature_step_size=t / 2,
            parameterisation=iblr.Parameterisation.covariance,
        )
        close(new.covariance, expected, 1e-10)
        close(new.mean, q.mean - t * Sigma @ tangent.gradient, 1e-10)


# Controls: what must not hold, and what must be refused.


def test_half_third_derivatives_are_not_the_symbols_outside_a_bcn_parameterisation():
    params = jnp.array([0.7, 1.3])
    symbols = christoffel(SIGMA.log_prob, params, *SIGMA.quadrature(params))

    def partition(blocks):
        return 0.5 * jnp.sum(blocks[0] ** 2 / blocks[1] ** 2) + jnp.sum(jnp.log(blocks[1]))

    blocks = (params[:1], params[1:])
    metric = lambda x: fisher_block(partition, (blocks[0], x), 1)  # noqa: E731
    third = 0.5 * jax.jit(jax.jacfwd(metric))(blocks[1])[0, 0, 0]
    assert abs(float(symbols[1, 1, 1] + 2 / 1.3**3)) < 1e-8  # F = 2 / sigma^2
    assert abs(float(symbols[1, 1, 1] - third)) > 0.5
    assert abs(float(metric(blocks[1])[0, 0] - 2 / 1.3**2)) > 0.5


def test_the_natural_parameters_of_a_gaussian_are_not_block_coordinates():
    mu, s = 0.7, 1.3

    def natural(z, params):
        eta, s = params
        return -0.5 * (s * (z - eta / s) ** 2 - jnp.log(s / (2 * jnp.pi)))

    nodes = V.quadrature(jnp.array([mu, 1 / s]))
    F = fisher(natural, jnp.array([s * mu, s]), *nodes)
    assert abs(float(F[0, 1] + mu / s)) < 1e-8  # the cross block is -mu / s, not zero


def test_an_indefinite_fisher_block_gives_nan():
    blocks = (jnp.zeros(2), pack_symmetric(jnp.diag(jnp.array([1.0, -1.0]))))
    assert jnp.isnan(natural_gradient(log_partition, blocks, 1, jnp.ones(3))).any()


def test_the_last_block_may_be_counted_from_the_end():
    mu, S = member(2)
    blocks = (mu, pack_symmetric(S))
    last = fisher_block(log_partition, blocks, -1)
    np.testing.assert_array_equal(last, fisher_block(log_partition, blocks, 1))


def test_single_precision_stays_single():
    blocks = tuple(block.astype(jnp.float32) for block in (jnp.zeros(1), jnp.ones(1)))
    new = jax.jit(lambda b: geometry.improved_blocks(log_partition, b, b, 0.5))(blocks)
    assert [block.dtype for block in new] == [jnp.float32, jnp.float32]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="unpack_symmetric.* 4 numbers"):
        unpack_symmetric(jnp.ones(4))
    with pytest.raises(ValueError, match="improved_blocks.* 1 for 2 blocks"):
        geometry.improved_blocks(log_partition, (jnp.zeros(1), jnp.ones(1)), (jnp.ones(1),), 0.1)
    for blocks in ([[0]], [[0, 1], [1]], [[0], [2]]):
        with pytest.raises(ValueError, match=r"second_order_step\(blocks"):
            geometry.second_order_step(jnp.zeros((2, 2, 2)), jnp.ones(2), jnp.ones(2), 0.1, blocks)

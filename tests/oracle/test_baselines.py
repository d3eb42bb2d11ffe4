"""Every method that the paper compares with, against its definition written the slow way."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from helpers import FAMILIES, gaussian_mixture, no_type_hook, slow

import iblr
from iblr import DiagonalGaussian, Gaussian, Parameterisation, Status, geometry
from iblr.baselines import Bbvi, Salimbeni, Vadam, Vogn, blr_step, song_step, tran_step, vadam_step
from iblr.baselines.salimbeni import natural_direction
from iblr.families.abstract_gaussian import GaussianTangent
from iblr.families.curvature import Dense, Diagonal
from iblr.families.line_search import LineSearch
from iblr.families.mixture_gradients import MixtureTangent

pytestmark = pytest.mark.usefixtures("x64")

KEY = jax.random.key(0)
MAKE = {case.name: case.make for case in FAMILIES}
STEP_SIZES = (0.05, 0.3, 1.0)


def close(actual, expected, rtol=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


def tangent_of(q, gradient, G):
    """The tangent of a gradient in the mean and a natural gradient G in the precision."""
    gradient, A = jnp.asarray(gradient), np.asarray(q.root())
    curvature = A @ G @ A.T
    is_diagonal = isinstance(q, DiagonalGaussian)
    operator = Diagonal(jnp.diagonal(curvature)) if is_diagonal else Dense(jnp.asarray(curvature))
    return GaussianTangent(gradient, jnp.asarray(A @ gradient), operator)


def random_tangent(q, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(q.dim, q.dim))
    return tangent_of(q, rng.normal(size=q.dim), scale * (root + root.T))


# BBVI.


def test_bbvi_is_adam_on_the_mean_and_a_cholesky_factor():
    q, rule, t = MAKE["gaussian-3"](KEY), Bbvi(), 0.1
    memory, theta = rule.init(q), jax.tree.map(np.asarray, q.free())
    first, second = [[np.zeros_like(x) for x in theta] for _ in range(2)]
    step = eqx.filter_jit(rule)
    for k in range(1, 4):
        tangent = random_tangent(q, k)
        Ghat, A = np.asarray(tangent.curvature.matrix), np.asarray(q.factor)
        G = np.linalg.inv(A) @ Ghat @ np.linalg.inv(A).T
        gradients = [np.asarray(tangent.gradient), np.tril(-G @ theta[1])]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, gradients, strict=True)]
        moments = zip(theta, first, second, strict=True)
        theta = [
            x - t * (m / (1 - 0.9**k)) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8) for x, m, v in moments
        ]
        q, info, memory = step(q, tangent, t, memory)
        assert info.status == Status.ok
        close(q.mean, theta[0])
        close(q.covariance, theta[1] @ theta[1].T)
        close(q.log_det, np.linalg.slogdet(theta[1] @ theta[1].T)[1])


def test_bbvi_keeps_everything_where_a_gradient_is_not_finite():
    q, rule = DiagonalGaussian.standard(2), Bbvi(optax.trace(0.9))
    tangent = random_tangent(q, 0)
    bad = dataclasses.replace(tangent, gradient=jnp.array([0.0, jnp.nan]))
    kept, info, memory = rule(q, bad, 0.1, rule.init(q))
    assert info.status == Status.nonfinite
    assert eqx.tree_equal(kept, q)
    assert eqx.tree_equal(memory, rule.init(q))
    zero = tangent_of(q, [0.0, 0.0], np.diag([10.0, 0.0]))
    kept, info, _ = rule(q, zero, -0.1, rule.init(q))  # sigma = 1 - 0.1 * 10
    assert info.status == Status.nonfinite and eqx.tree_equal(kept, q)


# The original rule with a line search.


def backtracked(S, G, t, factor):
    """A loop with Cholesky factors: the step that is left, and the new precision."""
    while True:
        try:
            np.linalg.cholesky(S - t * G)
            return t, S - t * G
        except np.linalg.LinAlgError:
            t *= factor


@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])
@pytest.mark.parametrize("factor", [None, 0.5, 0.93])
def test_the_original_rule_backtracks_as_a_loop_of_cholesky_factors_does(name, factor):
    step = jax.jit(lambda q, tangent, t: blr_step(q, tangent, t, backtrack=factor))
    for seed in range(4):
        q = MAKE[name](jax.random.key(seed))
        tangent = random_tangent(q, seed)
        A = np.linalg.inv(np.asarray(q.root()))
        G = A @ np.asarray(tangent.curvature.dense().matrix) @ A.T
        for t in (0.01, 0.3, 2.0, 70.0):
            left, S = backtracked(np.asarray(q.precision), G, t, factor or 0.8)
            new, info = step(q, tangent, t)
            close(info.shrunk, left / t)
            close(new.precision, S, 1e-7)
            close(new.mean, q.mean - left * np.linalg.solve(S, tangent.gradient), 1e-6)


def test_a_step_onto_the_boundary_is_outside():
    search = LineSearch(factor=0.8)
    for x, count in ((0.5, 0), (1.0, 1), (1.1, 1), (1.25, 2), (1 / 0.8**7, 8), (1e9, 93)):
        close(search.cut(jnp.asarray(x)), 0.8**count)
    for x in np.random.default_rng(0).uniform(0, 1000, size=50):
        expected = next(k for k in range(60) if 0.8**k * x < 1)
        close(search.cut(jnp.asarray(x)), 0.8**expected)
    assert float(search.cut(jnp.asarray(jnp.inf))) == 0
    assert float(search.cut(jnp.asarray(-3.0))) == 1


def test_the_components_of_a_mixture_backtrack_together_by_halving():
    means = [[-2.0, 0.0], [2.0, 1.0], [0.0, 5.0]]
    q = gaussian_mixture(means, [np.eye(2) * v for v in (0.5, 1.0, 2.0)])
    roots = np.random.default_rng(0).normal(size=(3, 2, 2))
    Ghat = roots + roots.swapaxes(1, 2)
    components = jax.vmap(lambda G: GaussianTangent(jnp.zeros(2), jnp.zeros(2), Dense(G)))(Ghat)
    none = jnp.zeros((), jnp.int32)
    tangent = MixtureTangent(components, jnp.arange(3.0), jnp.asarray(True), none)
    largest = np.linalg.eigvalsh(Ghat).max()
    for t in (0.1, 3.0, 40.0):
        new, info = eqx.filter_jit(blr_step)(q, tangent, t)
        cut = next(0.5**k for k in range(60) if 0.5**k * t * largest < 1)
        close(info.shrunk, cut)
        assert info.status == Status.ok
        for c, v in enumerate((0.5, 1.0, 2.0)):
            A = np.asarray(new.components.factor[c])
            close(np.linalg.inv(A.T @ A), (np.eye(2) - cut * t * Ghat[c]) / v, 1e-7)
        close(np.diff(new.log_weights), -cut * t)


def test_the_step_of_gammas_goes_to_four_fifths_of_the_way():
    q = iblr.Gamma(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.5]))
    tangent = q.tangent(jnp.array([3.0, -1.0, 2.0, 0.5]))
    expected = iblr.line_search_step(q, tangent, 5.0)
    assert eqx.tree_equal(blr_step(q, tangent, 5.0), expected)
    assert 0 < float(expected[1].shrunk) < 1
    new, info = blr_step(q, tangent, 5.0, backtrack=0.5)
    assert info.status == Status.ok and np.log2(float(info.shrunk)) % 1 == 0


# VOGN and Vadam, on logistic regression.

N, B, D, T = 12, 5, 3, 1.7
X = np.random.default_rng(1).normal(size=(N, D))
LABELS = np.sign(np.random.default_rng(2).normal(size=N))


def log_likelihood(z, rows):
    return jax.nn.log_sigmoid(rows[1] * (rows[0] @ z)).sum()


def logistic(prior, **options):
    return iblr.Target(
        log_likelihood=log_likelihood,
        data=(jnp.asarray(X), jnp.asarray(LABELS)),
        batch_size=B,
        prior=prior,
        temperature=T,
        **options,
    )


def row_gradients(z, rows):
    """Of minus the log likelihood, row by row."""
    x, y = map(np.asarray, rows)
    return -(y / (1 + np.exp(y * (x @ z))))[:, None] * x


def sampled(q, target, samples):
    """What an estimator draws from KEY."""
    draw_key, batch_key = jax.random.split(KEY)
    return np.asarray(q.draw(draw_key, samples).rows), target.batch(batch_key)


def projected(q, matrix):
    return np.diag(np.diag(matrix)) if isinstance(q, DiagonalGaussian) else matrix


@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])
def test_vogn_squares_the_gradients_of_single_rows(name):
    q, prior, samples, t = MAKE[name](KEY), MAKE["diagonal-3"](jax.random.key(1)), 2, 0.4
    target = logistic(prior)
    step = eqx.filter_jit(lambda q: iblr.natural_gradient_step(q, Vogn(samples)(q, target, KEY), t))
    new, info = step(q)
    draws, rows = sampled(q, target, samples)
    g = [row_gradients(z, rows) for z in draws]
    P0, m0 = np.asarray(prior.precision) / T, np.asarray(prior.mean)
    H = np.mean([(N / B / T) * x.T @ x for x in g], axis=0)
    gradient = np.mean([(N / B / T) * x.sum(0) for x in g], axis=0) + P0 @ (q.mean - m0)
    S = projected(q, (1 - t) * np.asarray(q.precision) + t * (H + P0))
    assert info.status == Status.ok
    close(new.precision, S, 1e-8)
    close(new.mean, q.mean - t * np.linalg.solve(S, gradient), 1e-8)


def vadam_in_its_own_terms(q, prior, target, samples, t):
    """mu and s, with squares and the root entry by entry or as those of a matrix."""
    count = N / T
    P0, m0 = np.asarray(prior.precision) / T, np.asarray(prior.mean)
    s = projected(q, np.asarray(q.precision) - P0) / count
    draws, rows = sampled(q, target, samples)
    g = [row_gradients(z, rows).mean(0) for z in draws]
    s = (1 - t) * s + t * projected(q, np.mean([np.outer(x, x) for x in g], axis=0))
    gradient = np.mean(g, axis=0) + P0 @ (np.asarray(q.mean) - m0) / count
    mu = q.mean - t * np.linalg.solve(scipy.linalg.sqrtm(s).real + P0 / count, gradient)
    return mu, count * s + P0


@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])
def test_vadam_is_adam_with_the_square_root_of_s(name):
    q, samples, t = MAKE[name](KEY), 2, 0.4
    prior = DiagonalGaussian.from_variances(jnp.array([0.3, -1.0, 0.5]), jnp.array([9.0, 8.0, 7.0]))
    target = logistic(prior)
    tangent = eqx.filter_jit(Vadam(samples))(q, target, KEY)
    step = eqx.filter_jit(vadam_step)
    new, info = step(q, tangent, t)
    mu, S = vadam_in_its_own_terms(q, prior, target, samples, t)
    assert info.status == Status.ok
    close(new.precision, S, 1e-8)
    close(new.mean, mu, 1e-7)
    if name == "diagonal-3":
        averaged = q.with_gradient(tangent, 0 * tangent.gradient)  # momentum keeps N and P0
        close(step(q, averaged, t)[0].mean, q.mean)
        kept, info = step(q, dataclasses.replace(tangent, gradient=jnp.full(3, jnp.nan)), t)
        assert info.status == Status.nonfinite and eqx.tree_equal(kept, q)
        kept, info = step(q, tangent, 50.0)
        assert info.status == Status.left_set and eqx.tree_equal(kept, q)


# Salimbeni et al.


@pytest.mark.slow
def test_the_direction_of_salimbeni_et_al_is_the_natural_gradient_of_their_parameters():
    d, q = 2, MAKE["gaussian-3"](KEY).marginal(jnp.array([0, 2]))
    tangent, rule, t = random_tangent(q, 3), Salimbeni(), 0.1
    xi = rule.init(q)
    lower = np.tril_indices(d)
    pack = lambda xi: jnp.concatenate([xi[0], xi[1][lower]])  # noqa: E731
    unpack = lambda flat: (flat[:d], jnp.zeros((d, d)).at[lower].set(flat[d:]))  # noqa: E731

    @jax.jit
    def definition(q, gradient):
        divergence = lambda flat: q.kl(q.from_free(unpack(flat)))  # noqa: E731
        fisher = jax.hessian(divergence)(pack(xi))
        return jnp.linalg.solve(fisher, pack(gradient))

    gradient = q.free_gradient(tangent, xi)
    expected = definition(q, gradient)
    close(pack(jax.jit(natural_direction)(xi, gradient)), expected)
    new, info, memory = eqx.filter_jit(rule)(q, tangent, t, xi)
    mean, C = unpack(pack(xi) - t * expected)
    assert info.status == Status.ok
    close(new.mean, mean)
    close(new.covariance, C @ C.T)
    assert bool((jnp.diagonal(memory[1]) > 0).all())
    new, info, memory = eqx.filter_jit(rule)(q, tangent, 20.0, xi)  # beyond a change of sign
    mean, C = unpack(pack(xi) - 20.0 * expected)
    assert bool((jnp.diagonal(C) < 0).any()) and bool((jnp.diagonal(memory[1]) > 0).all())
    close(new.covariance, C @ C.T)


# Tran et al.


@pytest.mark.parametrize("as_printed", [slow(False), True])
def test_the_step_of_tran_et_al_is_their_retraction(as_printed):
    q = MAKE["gaussian-3"](KEY)
    tangent = random_tangent(q, 5)
    Sigma, A = np.asarray(q.covariance), np.linalg.inv(np.asarray(q.factor))
    of_Sigma = -0.5 * A @ np.asarray(tangent.curvature.matrix) @ A.T
    xi = -(1 if as_printed else 2) * Sigma @ of_Sigma @ Sigma
    for t in STEP_SIZES:
        new, info = tran_step(q, tangent, t, as_printed=as_printed)
        close(new.covariance, Sigma + t * xi + 0.5 * t**2 * xi @ np.linalg.solve(Sigma, xi))
        close(new.mean, q.mean - t * Sigma @ tangent.gradient)
        assert info.status == Status.ok


# Song et al.


def coordinates(power, d):
    """log N(z) in the mean and the lower triangle of Sigma^-power, and how to get there."""

    def matrix(params):
        theta = geometry.unpack_symmetric(params[d:])
        return theta if power == -1 else jnp.linalg.inv(theta)

    def log_prob(z, params):
        Sigma = matrix(params)
        x = z - params[:d]
        log_det = jnp.linalg.slogdet(2 * jnp.pi * Sigma)[1]
        return -0.5 * (x @ jnp.linalg.solve(Sigma, x) + log_det)

    return log_prob, matrix


@pytest.mark.slow
@pytest.mark.parametrize("parameterisation", ["covariance", "precision"])
def test_the_step_of_song_et_al_contracts_all_christoffel_symbols(parameterisation):
    d, choice = 2, Parameterisation[parameterisation]
    q = Gaussian.from_covariance(jnp.array([0.3, -1.0]), jnp.array([[1.5, 0.4], [0.4, 0.8]]))
    tangent = random_tangent(q, 1)
    Sigma, A = np.asarray(q.covariance), np.linalg.inv(np.asarray(q.factor))
    G = A @ np.asarray(tangent.curvature.matrix) @ A.T
    power = choice.value
    theta, along = (Sigma, -Sigma @ G @ Sigma) if power == -1 else (np.linalg.inv(Sigma), G)
    log_prob, matrix = coordinates(power, d)
    pack = lambda m, M: jnp.concatenate(  # noqa: E731
        [jnp.asarray(m), geometry.pack_symmetric(jnp.asarray(M))]
    )
    params, ghat = pack(q.mean, theta), pack(Sigma @ tangent.gradient, along)
    x, w = np.polynomial.hermite_e.hermegauss(5)
    noise = np.stack(np.meshgrid(x, x), -1).reshape(-1, d)
    nodes, weights = (
        q.mean + noise @ q.factor,
        jnp.asarray(np.outer(w, w).reshape(-1) / w.sum() ** 2),
    )

    @jax.jit
    def symbols(params):
        metric = geometry.fisher(log_prob, params, nodes, weights)
        first_kind = geometry.christoffel(log_prob, params, nodes, weights)
        return geometry.raise_index(metric, first_kind)

    full = symbols(params)
    for t in (0.05, 0.2):
        expected = geometry.second_order_step(full, params, ghat, t)
        new, info = song_step(q, tangent, t, parameterisation=choice)
        assert info.status == Status.ok
        close(new.mean, expected[:d], 1e-7)
        close(new.covariance, matrix(expected), 1e-7)
        close(new.log_det, np.linalg.slogdet(np.asarray(new.covariance))[1])


def appendix_a(parameterisation, mean, theta, g_mean, g_theta, t):
    """The right-hand sides that [LSK20] prints for (mu, sigma) and (mu, v), and S by the rule."""
    if parameterisation is Parameterisation.standard_deviation:
        return (
            mean - t * g_mean + t**2 * g_mean * g_theta / theta,
            theta - t * g_theta + t**2 / 2 * (g_theta**2 / theta - g_mean**2 / (2 * theta)),
        )
    if parameterisation is Parameterisation.covariance:
        return (
            mean - t * g_mean + t**2 / 2 * g_mean * g_theta / theta,
            theta - t * g_theta + t**2 / 2 * (g_theta**2 / theta - g_mean**2),
        )
    return (
        mean - t * g_mean - t**2 / 2 * g_mean * g_theta / theta,
        theta - t * g_theta + t**2 / 2 * (g_theta**2 / theta + theta**2 * g_mean**2),
    )


@pytest.mark.parametrize("parameterisation", Parameterisation)
def test_the_step_of_song_et_al_in_one_dimension_is_that_of_appendix_a(parameterisation):
    q = DiagonalGaussian.from_variances(jnp.array([0.5, -1.0]), jnp.array([0.49, 2.25]))
    tangent = GaussianTangent(
        jnp.array([0.4, -0.3]), q.scale * jnp.array([0.4, -0.3]), Diagonal(jnp.array([0.6, -0.9]))
    )
    v, ghat = np.asarray(q.variances), np.array([0.6, -0.9])
    power = parameterisation.value
    theta = v**-power  # of the precision to that power, so its natural gradient is power ghat theta
    for t in STEP_SIZES:
        mean, after = appendix_a(
            parameterisation,
            np.asarray(q.mean),
            theta,
            v * np.array([0.4, -0.3]),
            power * ghat * theta,
            t,
        )
        new, info = song_step(q, tangent, t, parameterisation=parameterisation)
        close(new.mean, mean)
        close(new.variances, after ** (-1 / power))
        assert info.status == Status.ok


@pytest.mark.parametrize("family", [DiagonalGaussian, Gaussian])
def test_song_et_al_leave_the_set_where_the_improved_rule_stays(family):
    q = family.standard(1)  # of the target's own width, ten standard deviations away
    tangent = tangent_of(q, [-10.0], np.zeros((1, 1)))
    choices = [Parameterisation.covariance]
    choices += [Parameterisation.standard_deviation] if family is DiagonalGaussian else []
    for choice in choices:
        kept, info = song_step(q, tangent, 0.3, parameterisation=choice)
        assert info.status == Status.left_set and eqx.tree_equal(kept, q)
        new, info = iblr.improved_step(q, tangent, 0.3, parameterisation=choice)
        assert info.status == Status.ok
        close(new.mean, 3.0)
        close(new.covariance, 1.0)
    new, info = song_step(q, tangent, 0.3, parameterisation=Parameterisation.precision)
    assert info.status == Status.ok
    close(new.precision, 1 + 0.045 * 100)


# What is refused, in words.

FLAT = lambda z: 0.0 * z.sum()  # noqa: E731


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Bbvi(optax.adam), "`Bbvi\\(optimiser=...\\)` needs a transformation"),
        (lambda: blr_step(None, None, 0.1, backtrack=1.0), "must be between 0 and 1, but got 1.0"),
        (lambda: Vogn(0), "`Vogn\\(samples=...\\)` must be a whole number"),
        (lambda: Vadam(True), "`Vadam\\(samples=...\\)` must be a whole number"),
        (
            lambda: Vogn()(Gaussian.standard(1), iblr.Target(FLAT), KEY),
            "the target has no `data`. Give `Target\\(log_likelihood",
        ),
        (
            lambda: Vadam()(DiagonalGaussian.standard(3), logistic(FLAT), KEY),
            "needs the precision of a Gaussian prior, but `Target\\(prior=...\\)` is a function",
        ),
        (
            lambda: Vogn()(DiagonalGaussian.standard(3), logistic(iblr.Gamma.standard(3)), KEY),
            "is a Gamma. Give a family, such as `prior=iblr.DiagonalGaussian",
        ),
        (lambda: Vogn()(iblr.Gamma.standard(3), logistic(None), KEY), "but got a Gamma"),
        (
            lambda: Vogn()(
                DiagonalGaussian.standard(3).with_support(iblr.positive), logistic(None), KEY
            ),
            "`Vogn` needs real parameters",
        ),
        (
            lambda: vadam_step(
                DiagonalGaussian.standard(1), random_tangent(DiagonalGaussian.standard(1), 0), 0.1
            ),
            "got a GaussianTangent. Pass `estimator=iblr.baselines.Vadam",
        ),
        (lambda: Salimbeni().init(DiagonalGaussian.standard(1)), "full Gaussians, but got a Diag"),
        (lambda: tran_step(iblr.Gamma.standard(1), None, 0.1), "`tran_step` is a rule of the Gau"),
        (lambda: song_step(iblr.Gamma.standard(1), None, 0.1), "`song_step` is a rule of the Gau"),
        (
            lambda: song_step(
                Gaussian.standard(1),
                None,
                0.1,
                parameterisation=Parameterisation.standard_deviation,
            ),
            "Take `covariance` or `precision`",
        ),
    ],
)
def test_bad_arguments_are_named(call, says):
    with no_type_hook(), pytest.raises(ValueError, match=says):
        call()

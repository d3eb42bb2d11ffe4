"""Every estimator on both families, against closed forms, quadrature and Monte Carlo."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, agrees, close, members, moments, no_type_hook, slow

import iblr
from iblr import AtMean, Hess, Rep, Secant, Stl, Target
from iblr.families.curvature import Dense, Diagonal, LowRank
from iblr.noise import standard_normals

KEYS = 4000

CASES = {case.name: case for case in FAMILIES}
both_families = pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])


def member(name, seed=0):
    return members(CASES[name], seed)[0]


def quadratic(d, seed=0):
    """log p(z) = -(z - m)'H(z - m)/2, and H and m in NumPy."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(d, d))
    H, m = root @ root.T / d + 0.5 * np.eye(d), rng.normal(size=d)

    def log_density(z):
        x = z - jnp.asarray(m, z.dtype)
        return -0.5 * x @ jnp.asarray(H, z.dtype) @ x

    return log_density, H, m


def curvature_of(tangent, q):
    """Ghat of a tangent, or of a batch of them, in NumPy: a matrix, or a vector if diagonal."""
    c = tangent.curvature
    if isinstance(c, Diagonal):
        assert isinstance(q, iblr.DiagonalGaussian)
        return np.asarray(c.values, float)
    assert isinstance(q, iblr.Gaussian)
    if isinstance(c, Dense):
        return np.asarray(c.matrix, float)
    left, right, shift = (np.asarray(x, float) for x in (c.left, c.right, c.shift))
    half = 0.5 * np.einsum("...md,...me->...de", left, right)
    return shift[..., None, None] * np.eye(q.dim) - half - np.swapaxes(half, -1, -2)


def expected_curvature(q, H):
    """I - A H A', or its diagonal, for an expected Hessian H of -log p."""
    A = moments(q).root
    full = np.eye(q.dim) - A @ H @ A.T
    return np.diag(full) if isinstance(q, iblr.DiagonalGaussian) else full


def over_keys(estimator, q, target, num=KEYS, seed=0):
    """Tangents from `num` keys, one program, no LAPACK but what the estimator itself calls."""
    keys = jax.random.split(jax.random.key(seed), num)
    return eqx.filter_jit(lambda q, keys: jax.vmap(lambda key: estimator(q, target, key))(keys))(
        q, keys
    )


def assert_unbiased(tangents, q, gradient, H):
    A, eps = moments(q).root, 1e-5
    assert agrees(tangents.gradient, gradient, rounding=eps * np.abs(gradient).max())
    assert agrees(tangents.whitened, A @ gradient, rounding=eps * np.abs(A @ gradient).max())
    curvature = expected_curvature(q, H)
    assert agrees(curvature_of(tangents, q), curvature, rounding=eps * np.abs(curvature).max())


# Expectations.


@pytest.mark.parametrize("estimator", [Rep(2), Stl(2), Hess(2)], ids=["rep", "stl", "hess"])
@both_families
def test_on_a_quadratic_the_expectation_is_the_exact_natural_gradient(name, estimator):
    q = member(name)
    log_density, H, m = quadratic(3)
    tangents = over_keys(estimator, q, Target(log_density))
    assert_unbiased(tangents, q, H @ (moments(q).mean - m), H)


W = np.array([1.5, -1.0])


def curved(z):
    """A target with a quartic and a logistic term."""
    return -0.1 * (z**4).sum() - jnp.log(jnp.cosh(z @ jnp.asarray(W[: z.size], z.dtype)))


def curved_derivatives(q):
    """Expected gradient and Hessian of -log p under q, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    d, w = q.dim, W[: q.dim]
    noise = np.array(list(itertools.product(nodes, repeat=d)))
    weight = np.array([np.prod(x) for x in itertools.product(weights / weights.sum(), repeat=d)])
    mean, A, _ = moments(q)
    z = mean + noise @ A
    u = np.tanh(z @ w)
    gradient = weight @ (0.4 * z**3 + u[:, None] * w)
    fourth = 1.2 * np.einsum("n,ni->i", weight, z**2)
    return gradient, np.diag(fourth) + (weight @ (1 - u**2)) * np.outer(w, w)


@pytest.mark.parametrize("estimator", [Rep(2), Stl(2), Hess(2)], ids=["rep", "stl", "hess"])
@pytest.mark.parametrize("family, d", [("full", 2), slow("diagonal", 1)])
def test_off_the_quadratics_the_expectation_is_that_of_quadrature(family, d, estimator):
    mean = jnp.array([0.7, -0.4])[:d]
    covariance = jnp.array([[0.5, 0.3], [0.3, 0.8]])[:d, :d]
    if family == "full":
        q = iblr.Gaussian.from_covariance(mean, covariance)
    else:
        q = iblr.DiagonalGaussian.from_variances(mean, jnp.diagonal(covariance))
    gradient, hessian = curved_derivatives(q)
    tangents = over_keys(estimator, q, Target(curved))
    assert np.std(curvature_of(tangents, q), axis=0).min() > 0.01  # there is noise to average out
    assert_unbiased(tangents, q, gradient, hessian)


def test_a_wrong_expectation_would_be_noticed():
    q = member("gaussian-3")
    log_density, H, m = quadratic(3)
    tangents = over_keys(Rep(2), q, Target(log_density))
    with pytest.raises(AssertionError):
        assert_unbiased(tangents, q, H @ (moments(q).mean - m), 1.1 * H)
    with pytest.raises(AssertionError):
        assert_unbiased(tangents, q, 1.1 * H @ (moments(q).mean - m), H)


@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3", slow("gaussian-1")])
def test_at_mean_is_the_gradient_and_the_hessian_at_the_mean(name, x64):
    q = member(name)
    w = np.array([1.5, -1.0, 0.5])[: q.dim]
    log_density = lambda z: -0.1 * (z**4).sum() - jnp.log(jnp.cosh(z @ jnp.asarray(w)))  # noqa: E731
    z = moments(q).mean
    u = np.tanh(z @ w)
    gradient = 0.4 * z**3 + u * w
    H = np.diag(1.2 * z**2) + (1 - u**2) * np.outer(w, w)
    for seed in (0, 1):  # the key does not matter: nothing is sampled
        tangent = AtMean()(q, Target(log_density), jax.random.key(seed))
        close(tangent.gradient, gradient, jnp.float64)
        close(tangent.whitened, moments(q).root @ gradient, jnp.float64)
        close(curvature_of(tangent, q), expected_curvature(q, H), jnp.float64)


# The noise of Stl.


@both_families
@pytest.mark.parametrize("dtype", ["float32", slow("float64")])
def test_stl_has_no_noise_at_the_optimum_of_a_gaussian_target_and_rep_does(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        q = member(name)
        mean, _, covariance = moments(q)
        H = np.linalg.inv(covariance)

        def log_density(z):
            x = z - jnp.asarray(mean, z.dtype)
            return -0.5 * x @ jnp.asarray(H, z.dtype) @ x

        for seed in range(3):
            stl = Stl(2)(q, Target(log_density), jax.random.key(seed))
            for value in (stl.gradient, stl.whitened, curvature_of(stl, q)):
                close(value, np.zeros(value.shape), jnp.dtype(dtype))
            rep = Rep(4)(q, Target(log_density), jax.random.key(seed))
            for value in (rep.gradient, rep.whitened, curvature_of(rep, q)):
                assert np.abs(value).max() > 0.1


@both_families
def test_antithetic_pairs_make_the_gradient_of_a_quadratic_exact(name, x64):
    q = member(name)
    log_density, H, m = quadratic(3)
    tangents = over_keys(Stl(1), q, Target(log_density), num=20)
    gradient = np.tile(H @ (moments(q).mean - m), (20, 1))
    close(tangents.gradient, gradient, jnp.float64)


# Secant.


def noise_of(estimator, q, key):
    """The noise rows that an estimator with pairs draws from a key."""
    draw_key, _ = jax.random.split(key)
    return np.asarray(standard_normals(draw_key, (estimator.pairs, q.dim), q.dtype), float)


@pytest.mark.parametrize("pairs", [1, 3])
def test_secant_solves_its_equations_as_the_ridge_vanishes(pairs, x64):
    q = member("gaussian-7")
    log_density, H, _ = quadratic(7)
    estimator = Secant(pairs, ridge=1e-12)
    tangent = estimator(q, Target(log_density), jax.random.key(5))
    A, E = moments(q).root, noise_of(estimator, q, jax.random.key(5))
    D = E @ (A @ H @ A.T - np.eye(7))
    K = -curvature_of(tangent, q)
    np.testing.assert_allclose(K @ E.T, D.T, atol=1e-9)
    np.testing.assert_array_equal(K, K.T)
    # The smallest such matrix: it vanishes between directions orthogonal to all of the noise.
    complement = np.linalg.svd(E)[2][pairs:]
    np.testing.assert_allclose(complement @ K @ complement.T, 0.0, atol=1e-9)


@pytest.mark.parametrize("pairs", [7, slow(10)])
def test_secant_with_enough_pairs_finds_the_curvature_of_a_quadratic(pairs, x64):
    q = member("gaussian-7")
    log_density, H, _ = quadratic(7)
    tangent = Secant(pairs, ridge=1e-12)(q, Target(log_density), jax.random.key(6))
    np.testing.assert_allclose(curvature_of(tangent, q), expected_curvature(q, H), atol=1e-8)


def test_secant_of_a_diagonal_family_finds_the_curvature_of_a_separable_quadratic(x64):
    q = member("diagonal-7")
    h = np.linspace(0.5, 3.0, 7)
    log_density = lambda z: -0.5 * (jnp.asarray(h) * z**2).sum()  # noqa: E731
    tangent = Secant(1, ridge=1e-14)(q, Target(log_density), jax.random.key(7))
    np.testing.assert_allclose(
        curvature_of(tangent, q), expected_curvature(q, np.diag(h)), atol=1e-9
    )


@both_families
def test_a_ridge_shrinks_the_secants_curvature(name):
    q = member(name)
    log_density, _, _ = quadratic(3)
    sizes = [
        np.linalg.norm(
            curvature_of(Secant(2, ridge=r)(q, Target(log_density), jax.random.key(8)), q)
        )
        for r in (1e-3, 0.3, 30.0)
    ]
    assert sizes[0] > sizes[1] > 10 * sizes[2] > 0


# Hessians that the user gives.

ROWS = np.random.default_rng(2).normal(size=(11, 3)).astype(np.float32)
LABELS = np.where(np.random.default_rng(3).normal(size=11) > 0, 1.0, -1.0).astype(np.float32)


def log_likelihood(z, rows):
    x, y = rows
    return jax.nn.log_sigmoid(y * (x @ z)).sum()


def likelihood_hessian(z, rows):
    x, _ = rows
    p = jax.nn.sigmoid(x @ z)
    return -(x * (p * (1 - p))[:, None]).T @ x


def log_prior(z):
    return -0.05 * (z**4).sum()


TARGETS = {
    "exact-prior": {"prior": "family"},
    "minibatches-and-function-prior": {"batch_size": 4, "prior": log_prior, "temperature": 3.0},
}


@pytest.mark.parametrize("options", TARGETS.values(), ids=TARGETS.keys())
@both_families
def test_a_given_hessian_equals_the_one_differentiated(name, options, x64):
    q = member(name)
    if options.get("prior") == "family":
        options = options | {"prior": member(name, 1)}
    data = (jnp.asarray(ROWS, float), jnp.asarray(LABELS, float))
    target = Target(log_likelihood=log_likelihood, data=data, **options)

    given = likelihood_hessian
    pairs = [(Hess(3), Hess(3, hessian=given)), (AtMean(), AtMean(hessian=given))]

    @eqx.filter_jit
    def tangents(key):
        return [[estimator(q, target, key) for estimator in pair] for pair in pairs]

    for automatic, from_user in tangents(jax.random.key(9)):
        close(automatic.gradient, from_user.gradient, jnp.float64)
        close(curvature_of(automatic, q), curvature_of(from_user, q), jnp.float64)


def test_a_given_hessian_of_a_log_density_is_used(x64):
    q = member("gaussian-3")
    log_density, _, _ = quadratic(3)
    other = np.diag([1.0, 2.0, 3.0])
    tangent = Hess(hessian=lambda z: -jnp.asarray(other))(q, Target(log_density), jax.random.key(0))
    close(curvature_of(tangent, q), expected_curvature(q, other), jnp.float64)


def test_a_given_hessian_of_the_wrong_shape_is_refused():
    q = member("gaussian-3")
    log_density, _, _ = quadratic(3)
    for estimator in (Hess(hessian=lambda z: jnp.eye(2)), AtMean(hessian=lambda z: z)):
        with pytest.raises(ValueError, match=r"`hessian=` must return .*\(3, 3\), but"):
            estimator(q, Target(log_density), jax.random.key(0))


# Low rank and dense.


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [Rep(2), Stl(2), Secant(2)], ids=["rep", "stl", "secant"])
def test_the_low_rank_and_the_dense_path_take_the_same_step(estimator, x64):
    q = member("gaussian-7")
    log_density, _, _ = quadratic(7)
    tangent = estimator(q, Target(log_density), jax.random.key(10))
    assert isinstance(tangent.curvature, LowRank) and 2 * len(tangent.curvature.left) < 7
    dense = tangent.curvature.dense()
    close(dense.matrix, curvature_of(tangent, q), jnp.float64)

    spectrum = tangent.curvature.spectrum()
    assert spectrum.rest_dim == 3
    values = np.concatenate([spectrum.values, np.full(3, spectrum.rest)])
    close(np.sort(values), np.linalg.eigvalsh(curvature_of(tangent, q)), jnp.float64)

    dense_tangent = dataclasses.replace(tangent, curvature=dense)
    for step in (iblr.improved_step, iblr.geodesic_step):
        (a, _), (b, _) = (step(q, direction, 0.3) for direction in (tangent, dense_tangent))
        close(a.mean, b.mean, jnp.float64)
        close(moments(a).covariance, moments(b).covariance, jnp.float64)
        close(a.log_det, b.log_det, jnp.float64)


def test_with_as_many_draws_as_dimensions_the_spectrum_is_complete(x64):
    q = member("gaussian-3")
    log_density, _, _ = quadratic(3)
    tangent = Rep(5)(q, Target(log_density), jax.random.key(11))
    spectrum = tangent.curvature.spectrum()
    assert spectrum.rest_dim == 0 and spectrum.values.shape == (3,)
    basis, values = np.asarray(spectrum.basis), np.asarray(spectrum.values)
    close((basis.T * values) @ basis, curvature_of(tangent, q), jnp.float64)


# Priors and temperature.


def nothing(z):
    """The log likelihood of no data."""
    return 0.0 * z.sum()


@pytest.mark.parametrize("prior", ["gaussian-3", slow("diagonal-3")])
@both_families
def test_an_exact_prior_without_data_gives_the_exact_gradient_of_the_kl(name, prior, x64):
    q, p = member(name), member(prior, 1)
    precision = np.linalg.inv(moments(p).covariance)
    gradient = precision @ (moments(q).mean - moments(p).mean)
    target = Target(log_likelihood=nothing, prior=p)
    tangents = over_keys(Rep(2), q, target, num=5)
    close(tangents.gradient, np.tile(gradient, (5, 1)), jnp.float64)
    curvature = curvature_of(tangents, q)
    close(curvature, np.stack(5 * [expected_curvature(q, precision)]), jnp.float64)
    for value in (tangents.gradient, tangents.whitened, curvature):
        assert np.ptp(value, axis=0).max() < 1e-14  # no variance over keys
    # The gradient of the family's own KL, in the mean, by automatic differentiation.
    moved = lambda mean: eqx.tree_at(lambda q: q.mean, q, mean).kl(p)  # noqa: E731
    close(jax.grad(moved)(q.mean), gradient, jnp.float64)


@pytest.mark.parametrize(
    "name, estimator",
    [slow("gaussian-3", Rep(2)), ("gaussian-3", Stl(2)), slow("diagonal-3", Stl(2))],
    ids=["gaussian-rep", "gaussian-stl", "diagonal-stl"],
)
def test_a_prior_as_a_family_and_as_a_function_agree_in_expectation(name, estimator):
    q, p = member(name), member("diagonal-3", 1)
    log_density, H, m = quadratic(3)
    precision = np.linalg.inv(moments(p).covariance)
    gradient = H @ (moments(q).mean - m) + precision @ (moments(q).mean - moments(p).mean)
    for prior in (p, p.log_prob):
        target = Target(log_likelihood=log_density, prior=prior)
        assert_unbiased(over_keys(estimator, q, target), q, gradient, H + precision)


@both_families
def test_a_prior_as_a_family_and_as_a_function_are_the_same_to_secant(name, x64):
    q, p = member(name), member("diagonal-3", 1)
    log_density, _, _ = quadratic(3)
    a, b = (
        Secant(2)(q, Target(log_likelihood=log_density, prior=prior), jax.random.key(12))
        for prior in (p, p.log_prob)
    )
    close(a.gradient, b.gradient, jnp.float64)
    close(curvature_of(a, q), curvature_of(b, q), jnp.float64)


@pytest.mark.parametrize("prior", ["function", "family"])
@both_families
def test_temperature_divides_the_gradient_and_the_hessian(name, prior, x64):
    q, p = member(name), member("diagonal-3", 1)
    log_density, _, _ = quadratic(3)
    prior = {"function": p.log_prob, "family": p}[prior]
    for estimator in (Rep(2), Hess(1)):
        cold, hot = (
            estimator(
                q,
                Target(log_likelihood=log_density, prior=prior, temperature=temperature),
                jax.random.key(13),
            )
            for temperature in (1.0, 4.0)
        )
        close(hot.gradient, np.asarray(cold.gradient) / 4, jnp.float64)
        one = expected_curvature(q, np.zeros((3, 3)))
        close(one - curvature_of(hot, q), (one - curvature_of(cold, q)) / 4, jnp.float64)


# Minibatches, structures, counts.


@both_families
def test_minibatches_change_with_the_key_and_average_to_all_of_the_data(name):
    q = member(name)
    data = (jnp.asarray(ROWS), jnp.asarray(LABELS))
    target = Target(log_likelihood=log_likelihood, data=data, batch_size=4)
    tangents = over_keys(AtMean(), q, target)
    assert np.std(np.asarray(tangents.gradient), axis=0).min() > 0.01
    z = moments(q).mean
    s = 1 / (1 + np.exp(LABELS * (ROWS @ z)))
    gradient = -(LABELS * s) @ ROWS
    H = (ROWS * (s * (1 - s))[:, None]).T @ ROWS
    assert_unbiased(tangents, q, gradient, H)


@pytest.mark.parametrize(
    "estimator", [Rep(2), Stl(2), Secant(2), Hess(2), AtMean()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("name", ["gaussian", "diagonal"])
def test_a_pytree_of_parameters_gives_the_tangent_of_the_flat_family(name, estimator, x64):
    tree = member(f"{name}-tree")
    flat = dataclasses.replace(tree, structure=member(f"{name}-7").structure)
    log_density, _, _ = quadratic(7)
    of_tree = lambda z: log_density(  # noqa: E731
        jnp.concatenate([z["bias"][None], z["weights"][0], z["weights"][1].reshape(-1)])
    )
    a = estimator(tree, Target(of_tree), jax.random.key(14))
    b = estimator(flat, Target(log_density), jax.random.key(14))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(x, y, jnp.float64)


@pytest.mark.parametrize(
    "estimator, num",
    [
        (Rep(3), 3),
        (Stl(3), 6),
        (Secant(3), 6),
        (Hess(3, lambda z: -jnp.eye(2)), 3),
        (AtMean(lambda z: -jnp.eye(2)), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_num_gradients_counts_the_evaluations_of_the_gradient(estimator, num):
    evaluations = []

    @jax.custom_vjp
    def log_density(z):
        return -0.5 * (z**2).sum()

    def backwards(z, cotangent):
        jax.debug.callback(lambda z: evaluations.append(z), z)
        return (-z * cotangent,)

    log_density.defvjp(lambda z: (log_density(z), z), backwards)
    q = iblr.DiagonalGaussian.standard(2)
    estimator(q, Target(log_density), jax.random.key(0))
    jax.effects_barrier()
    assert len(evaluations) == estimator.num_gradients(q) == num


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
@pytest.mark.parametrize(
    "make, call",
    [(Rep, "Rep(samples=...)"), (Stl, "Stl(pairs=...)"), (Secant, "Secant(pairs=...)"),
     (Hess, "Hess(samples=...)")],
)  # fmt: skip
def test_a_count_that_is_none_is_refused(make, call, count):
    with no_type_hook(), pytest.raises(ValueError, match="whole number of at least 1") as error:
        make(count)
    assert f"`{call}`" in str(error.value) and repr(count) in str(error.value)


@pytest.mark.parametrize("ridge", [-0.1, float("nan")])
def test_a_negative_ridge_is_refused(ridge):
    with pytest.raises(ValueError, match=r"`Secant\(ridge=...\)` must not be negative"):
        Secant(2, ridge=ridge)

"""What every family promises, checked against NumPy and SciPy, in float32 and in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    FAMILIES,
    agrees,
    close,
    every_family,
    members,
    moments,
    no_type_hook,
    stacked,
    z_scores,
)
from scipy import stats

import iblr
from iblr import DiagonalGaussian, Gaussian, Parameterisation, Status
from iblr.structure import Structure

DRAWS = 20_000


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """The precision of the world in which a test runs."""
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


def flat(q, tree):
    """Draws of any structure as rows, without the library: leaves in order, each flattened."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    batch = [leaf.ndim - len(shape) for leaf, shape in zip(leaves, q.structure.shapes, strict=True)]
    rows = [leaf.reshape(leaf.shape[:n] + (-1,)) for leaf, n in zip(leaves, batch, strict=True)]
    return np.concatenate(rows, axis=-1)


def scipy_normal(q):
    return stats.multivariate_normal(moments(q).mean, moments(q).covariance)


def numpy_kl(q, p):
    """KL(q || p) from the textbook formula."""
    (m, _, V), (n, _, W) = moments(q), moments(p)
    inverse = np.linalg.inv(W)
    log_dets = np.linalg.slogdet(W)[1] - np.linalg.slogdet(V)[1]
    return 0.5 * (np.trace(inverse @ V) + (n - m) @ inverse @ (n - m) - len(m) + log_dets)


def target_for(q):
    """A quadratic target that is not q: precision I + 1/2, mode at one."""
    H = 0.5 * np.ones((q.dim, q.dim)) + np.eye(q.dim)

    def log_density(z):
        x = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(z)]) - 1
        return -0.5 * x @ jnp.asarray(H, x.dtype) @ x

    return iblr.Target(log_density)


# Sampling.


@every_family
def test_draws_have_the_shape_structure_and_dtype_of_the_points(case, dtype):
    (q,) = members(case, 0)
    point = q.structure.unravel(q.mean)
    one, many = q.sample(jax.random.key(1)), q.sample(jax.random.key(1), 5)
    assert jax.tree.structure(one) == jax.tree.structure(many) == jax.tree.structure(point)
    for single, batch, leaf in zip(*map(jax.tree.leaves, (one, many, point)), strict=True):
        assert single.shape == leaf.shape and batch.shape == (5, *leaf.shape)
        assert single.dtype == batch.dtype == dtype
    assert q.dim == case.dim and q.dtype == dtype
    assert sum(leaf.size for leaf in jax.tree.leaves(point)) == case.dim


@every_family
def test_draws_are_a_function_of_the_key(case, dtype):
    (q,) = members(case, 0)
    a, b, c = (flat(q, q.sample(jax.random.key(seed), 5)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).all()


@every_family
def test_draws_have_the_mean_and_the_covariance_of_the_family(case, dtype):
    (q,) = members(case, 0)
    rows = flat(q, q.sample(jax.random.key(3), DRAWS))
    x = rows - np.asarray(q.mean, float)
    assert agrees(x, 0.0)
    assert agrees(x[:, :, None] * x[:, None, :], np.asarray(q.covariance, float))


@every_family
def test_draws_come_with_their_log_prob(case, dtype):
    (q,) = members(case, 0)
    rows, log_prob = q.sample_with_log_prob(jax.random.key(4), 5)
    assert rows.shape == (5, case.dim) and rows.dtype == log_prob.dtype == dtype
    np.testing.assert_array_equal(rows, flat(q, q.sample(jax.random.key(4), 5)))
    close(log_prob, q.log_prob(q.structure.unravel(rows)), dtype)


# Densities.


@every_family
def test_log_prob_equals_scipys(case, dtype):
    (q,) = members(case, 0)
    rows = np.asarray(q.mean, float) + 2 * np.random.default_rng(0).normal(size=(6, 5, case.dim))
    log_prob = q.log_prob(q.structure.unravel(jnp.asarray(rows)))
    assert log_prob.dtype == dtype
    close(log_prob, scipy_normal(q).logpdf(rows).reshape(6, 5), dtype)


@every_family
def test_log_prob_of_one_point_is_a_scalar(case, dtype):
    (q,) = members(case, 0)
    log_prob = q.log_prob(q.structure.unravel(q.mean))
    assert log_prob.shape == ()
    close(log_prob, scipy_normal(q).logpdf(moments(q).mean), dtype)


@every_family
def test_the_density_integrates_to_one(case, dtype):
    (q,) = members(case, 0)
    if case.dim == 1:
        width = float(q.standard_deviations[0])
        x = float(q.mean[0]) + width * np.linspace(-10, 10, 1001)
        density = np.exp(np.asarray(q.log_prob(jnp.asarray(x[:, None])), float))
        close(np.sum(density) * (x[1] - x[0]), 1.0, dtype)
    else:  # by importance sampling from a wider density that SciPy normalised
        wider = stats.multivariate_normal(moments(q).mean, 1.5 * moments(q).covariance)
        rows = wider.rvs(DRAWS, random_state=0)
        log_prob = np.asarray(q.log_prob(q.structure.unravel(jnp.asarray(rows))), float)
        assert agrees(np.exp(log_prob - wider.logpdf(rows)), 1.0)


@every_family
def test_entropy_equals_scipys_and_the_mean_of_minus_log_prob(case, dtype):
    (q,) = members(case, 0)
    assert q.entropy().shape == () and q.entropy().dtype == dtype
    close(q.entropy(), scipy_normal(q).entropy(), dtype)
    _, log_prob = q.sample_with_log_prob(jax.random.key(5), DRAWS)
    assert agrees(-np.asarray(log_prob, float), float(q.entropy()))


# Divergences, full and diagonal mixed.


def partners(case):
    """Members of all families with as many dimensions, to be compared with one of this family."""
    return [members(other, 1)[0] for other in FAMILIES if other.dim == case.dim]


@every_family
def test_kl_equals_the_textbook_formula_against_full_and_diagonal_gaussians(case, dtype):
    (q,) = members(case, 0)
    for p in partners(case):
        kl = q.kl(p)
        assert kl.shape == () and kl.dtype == dtype and kl > 0
        close(kl, numpy_kl(q, p), dtype)


@every_family
def test_kl_equals_the_mean_of_the_log_ratio(case, dtype):
    (q,) = members(case, 0)
    rows, log_q = q.sample_with_log_prob(jax.random.key(6), DRAWS)
    for p in partners(case):
        log_p = p.log_prob(p.structure.unravel(rows))
        assert agrees(np.asarray(log_q, float) - np.asarray(log_p, float), float(q.kl(p)))


@every_family
def test_kl_of_a_family_from_itself_is_zero(case, dtype):
    (q,) = members(case, 0)
    close(q.kl(q), 0.0, dtype)


@every_family
def test_expected_log_prob_equals_a_closed_form_and_monte_carlo(case, dtype):
    (p,) = members(case, 0)
    for q in partners(case):
        value = p.expected_log_prob(q)
        assert value.shape == () and value.dtype == dtype
        close(value, -numpy_kl(q, p) - scipy_normal(q).entropy(), dtype)
        rows, _ = q.sample_with_log_prob(jax.random.key(7), DRAWS)
        assert agrees(np.asarray(p.log_prob(p.structure.unravel(rows)), float), float(value))


# Moments, marginals and conditionals.


@every_family
def test_moments_equal_those_of_the_root(case, dtype):
    (q,) = members(case, 0)
    covariance = moments(q).covariance
    close(q.covariance, covariance, dtype)
    close(q.precision, np.linalg.inv(covariance), dtype)
    close(q.precision_diagonal, np.diag(np.linalg.inv(covariance)), dtype)
    close(q.variances, np.diag(covariance), dtype)
    close(q.standard_deviations, np.sqrt(np.diag(covariance)), dtype)
    close(q.log_det, np.linalg.slogdet(covariance)[1], dtype)
    close(q.root(), moments(q).root, dtype)
    for value in (q.covariance, q.precision, q.variances, q.standard_deviations, q.log_det):
        assert value.dtype == dtype


@every_family
def test_the_five_verbs_of_the_root_are_products_with_it(case, dtype):
    (q,) = members(case, 0)
    rows = np.random.default_rng(1).normal(size=(4, case.dim))
    _, A, covariance = moments(q)
    given = jnp.asarray(rows, dtype)
    close(q.colour(given), rows @ A, dtype)
    close(q.whiten(given), rows @ A.T, dtype)
    close(q.standardise(given), rows @ np.linalg.inv(A), dtype)
    close(q.times_precision(given[0]), np.linalg.solve(covariance, rows[0]), dtype)


@every_family
def test_a_marginal_takes_rows_and_columns_of_the_covariance(case, dtype):
    (q,) = members(case, 0)
    indices = np.random.default_rng(case.dim).permutation(case.dim)[: max(1, case.dim // 2)]
    m = q.marginal(indices)
    assert type(m) is type(q) and m.structure == Structure.flat(len(indices)) and m.dtype == dtype
    close(m.mean, np.asarray(q.mean)[indices], dtype)
    close(m.covariance, moments(q).covariance[np.ix_(indices, indices)], dtype)
    close(m.log_det, np.linalg.slogdet(moments(m).covariance)[1], dtype)


@pytest.mark.parametrize("case", [c for c in FAMILIES if c.dim > 1], ids=lambda case: case.name)
def test_a_conditional_follows_the_schur_complement(case, dtype):
    (q,) = members(case, 0)
    indices = np.random.default_rng(case.dim).permutation(case.dim)[: case.dim // 2]
    others = np.setdiff1d(np.arange(case.dim), indices)
    values = np.linspace(-1, 1, len(indices))
    m, _, V = moments(q)
    gain = V[np.ix_(others, indices)] @ np.linalg.inv(V[np.ix_(indices, indices)])
    c = q.conditional(indices, jnp.asarray(values))
    assert type(c) is type(q) and c.structure == Structure.flat(len(others)) and c.dtype == dtype
    close(c.mean, m[others] + gain @ (values - m[indices]), dtype)
    close(c.covariance, V[np.ix_(others, others)] - gain @ V[np.ix_(indices, others)], dtype)
    close(c.log_det, np.linalg.slogdet(moments(c).covariance)[1], dtype)


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_lists_of_indices_and_values_are_accepted(family):
    q = family.standard(3)
    with no_type_hook():
        assert q.marginal([2, 0]).dim == 2
        np.testing.assert_array_equal(q.conditional([0, 2], [1.0, 2.0]).mean, [0.0])


# Constructors.


@every_family
def test_a_family_is_rebuilt_from_its_moments(case, dtype):
    (q,) = members(case, 0)
    mean = q.structure.unravel(q.mean)
    if isinstance(q, Gaussian):
        rebuilt = [
            Gaussian.from_covariance(mean, q.covariance),
            Gaussian.from_precision(mean, q.precision),
        ]
    else:
        rebuilt = [DiagonalGaussian.from_variances(mean, q.structure.unravel(q.variances))]
    for p in rebuilt:
        assert type(p) is type(q) and p.structure == q.structure and p.dtype == dtype
        np.testing.assert_array_equal(p.mean, q.mean)
        close(moments(p).covariance, moments(q).covariance, dtype)
        close(p.log_det, q.log_det, dtype)


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_the_standard_member_is_the_standard_normal(family, dtype):
    like = {"a": jnp.ones(2), "b": jnp.ones((1, 3))}
    for q, shapes in ((family.standard(5), ((5,),)), (family.standard(like=like), ((2,), (1, 3)))):
        assert q.structure.shapes == shapes and q.dtype == dtype and q.log_det == 0
        np.testing.assert_array_equal(moments(q).mean, np.zeros(5))
        np.testing.assert_array_equal(moments(q).covariance, np.eye(5))
    assert jax.tree.structure(q.sample(jax.random.key(0))) == jax.tree.structure(like)


@pytest.mark.parametrize("family", [Gaussian, DiagonalGaussian])
def test_the_standard_member_takes_its_dtype_from_the_argument_or_from_like(family, x64):
    assert family.standard(2).dtype == jnp.float64
    assert family.standard(2, dtype=jnp.float32).dtype == jnp.float32
    assert family.standard(like=jnp.zeros(2, jnp.float32)).dtype == jnp.float32
    mixed = (jnp.zeros(2, jnp.float32), jnp.zeros(1, jnp.float64))
    assert family.standard(like=mixed).dtype == jnp.float64


def test_a_plain_number_as_mean_is_a_family_over_scalars(dtype):
    full = Gaussian.from_covariance(1.0, jnp.array([[4.0]]))
    diagonal = DiagonalGaussian.from_variances(1.0, 4.0)
    for q in (full, diagonal):
        assert q.dim == 1 and q.sample(jax.random.key(0)).shape == ()
        close(q.log_prob(jnp.asarray(2.0)), stats.norm(1, 2).logpdf(2.0), dtype)


# A family is a pytree of arrays.


@every_family
def test_a_family_is_a_pytree_of_arrays(case, dtype):
    (q,) = members(case, 0)
    leaves, treedef = jax.tree.flatten(q)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == dtype for leaf in leaves)
    again = jax.tree.unflatten(treedef, leaves)
    assert type(again) is type(q) and again.structure == q.structure
    doubled = jax.tree.map(lambda leaf: 2 * leaf, q)
    np.testing.assert_array_equal(doubled.mean, 2 * q.mean)
    assert hash(treedef) == hash(jax.tree.structure(members(case, 1)[0]))


def drawn(q, key):
    """Draws, their log density and the entropy: one chain of linear algebra."""
    z = q.sample(key, 5)
    return z, q.log_prob(z), q.entropy()


def assert_drawn(found, q, key, dtype):
    z, log_prob, entropy = found
    close(flat(q, z), flat(q, q.sample(key, 5)), dtype)
    close(log_prob, scipy_normal(q).logpdf(flat(q, z)), dtype)
    close(entropy, scipy_normal(q).entropy(), dtype)


@every_family
def test_methods_work_under_jit_with_the_family_as_an_argument(case):
    (q,) = members(case, 0)
    assert_drawn(jax.jit(drawn)(q, jax.random.key(1)), q, jax.random.key(1), jnp.float32)


@every_family
def test_a_batch_of_families_is_handled_by_vmap(case):
    singles = members(case, 0, 1, 2)
    batch, keys = stacked(singles), jax.random.split(jax.random.key(2), 3)
    found = jax.jit(jax.vmap(drawn))(batch, keys)
    for i, q in enumerate(singles):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], found)
        assert_drawn(one, q, keys[i], jnp.float32)


# Steps.

RULES = {
    "improved": iblr.improved_step,
    "improved-in-covariance": lambda q, g, t: iblr.improved_step(
        q, g, t, parameterisation=Parameterisation.covariance
    ),
    "improved-in-standard-deviation": lambda q, g, t: iblr.improved_step(
        q, g, t, parameterisation=Parameterisation.standard_deviation
    ),
    "improved-in-a-trust-region": lambda q, g, t: iblr.improved_step(q, g, t, trust_region=True),
    "natural-gradient": iblr.natural_gradient_step,
    "geodesic": iblr.geodesic_step,
}


def all_steps(q):
    tangent = iblr.Stl(pairs=2)(q, target_for(q), jax.random.key(8))
    return {name: rule(q, tangent, 0.05) for name, rule in RULES.items()}


@every_family
def test_every_step_returns_the_same_type_structure_and_dtype(case, dtype):
    (q,) = members(case, 0)
    for name, (new, _) in eqx.filter_eval_shape(all_steps, q).items():
        assert type(new) is type(q) and jax.tree.structure(new) == jax.tree.structure(q), name
        for before, after in zip(jax.tree.leaves(q), jax.tree.leaves(new), strict=True):
            assert after.shape == before.shape and after.dtype == before.dtype == dtype, name


@every_family
def test_every_step_goes_to_another_valid_member(case):
    (q,) = members(case, 0)
    for name, (new, info) in eqx.filter_jit(all_steps)(q).items():
        assert info.status == Status.ok and not info.refused and info.limited == 0, name
        assert (new.mean != q.mean).all(), name
        covariance = moments(new).covariance
        assert np.linalg.eigvalsh(covariance)[0] > 0, name
        assert not np.allclose(covariance, moments(q).covariance), name
        close(new.log_det, np.linalg.slogdet(covariance)[1], jnp.float32)


@pytest.mark.parametrize("name", ["gaussian-7", "diagonal-7"])
def test_a_float32_family_stays_float32_where_float64_is_enabled(name):
    (case,) = (case for case in FAMILIES if case.name == name)
    (q,) = members(case, 0)
    log_likelihood = target_for(q).log_density

    def everything(q):
        key = jax.random.key(0)
        target = iblr.Target(log_likelihood=log_likelihood, prior=q, temperature=2.0)
        yield iblr.elbo(target, q, key, draws=20)
        yield (
            q.entropy(),
            q.kl(q),
            q.sample(key),
            q.sample_with_log_prob(key, 3),
            q.log_prob(q.mean),
        )
        for estimator in (iblr.Rep(2), iblr.Stl(2), iblr.Secant(2), iblr.Hess(2), iblr.AtMean()):
            tangent = estimator(q, target, key)
            yield tangent
            for rule in RULES.values():
                yield rule(q, tangent, 0.1)[0]

    with jax.enable_x64(True):
        assert q.dtype == jnp.float32
        shapes = eqx.filter_eval_shape(lambda q: list(everything(q)), q)
        assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])
def test_a_step_along_nan_is_refused_and_says_so(name, rule):
    (case,) = (case for case in FAMILIES if case.name == name)
    (q,) = members(case, 0)
    tangent = iblr.Stl(pairs=2)(q, target_for(q), jax.random.key(8))
    for leaf in range(len(jax.tree.leaves(tangent))):
        bad = eqx.tree_at(lambda t, i=leaf: jax.tree.leaves(t)[i], tangent, replace_fn=_with_nan)
        if leaf == 0:  # the gradient that `whitened` was made of: a step reads only the latter
            continue
        new, info = rule(q, bad, 0.1)
        assert info.status == Status.nonfinite and info.refused
        for before, after in zip(jax.tree.leaves(q), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(before, after)


def _with_nan(leaf):
    return jnp.full_like(leaf, jnp.nan)


@pytest.mark.parametrize("name", ["gaussian-3", "diagonal-3"])
def test_the_original_rule_says_when_it_would_leave_the_set(name):
    (case,) = (case for case in FAMILIES if case.name == name)
    (q,) = members(case, 0)
    upwards = iblr.Target(lambda z: 4.0 * (z**2).sum())
    tangent = iblr.AtMean()(q, upwards, jax.random.key(0))
    new, info = iblr.natural_gradient_step(q, tangent, 1.0)
    assert info.status == Status.left_set and info.refused
    for before, after in zip(jax.tree.leaves(q), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(before, after)
    new, info = iblr.improved_step(q, tangent, 1.0)
    assert info.status == Status.ok and np.linalg.eigvalsh(moments(new).covariance)[0] > 0


@every_family
def test_refreshing_restores_a_wrong_log_det(case, dtype):
    (q,) = members(case, 0)
    wrong = q
    if isinstance(q, Gaussian):  # the only one that stores it
        wrong = eqx.tree_at(lambda q: q.log_det, q, q.log_det + 0.5)
    fresh, drift = wrong.refreshed()
    close(drift, 0.5 if isinstance(q, Gaussian) else 0.0, dtype)
    close(fresh.log_det, np.linalg.slogdet(moments(q).covariance)[1], dtype)
    assert jax.tree.structure(fresh) == jax.tree.structure(q) and fresh.dtype == dtype
    np.testing.assert_array_equal(fresh.mean, q.mean)
    np.testing.assert_array_equal(moments(fresh).root, moments(q).root)


# Bad arguments.

NAN, INF = float("nan"), float("inf")
INDEFINITE = np.array([[1.0, 2.0], [2.0, 1.0]])
BOTH = [Gaussian, DiagonalGaussian]
MATRIX_CALLS = [Gaussian.from_covariance, Gaussian.from_precision]


def raises(call, says):
    """Expect a `ValueError` that names the call and says what is wrong."""
    return pytest.raises(ValueError, match=rf"`{call}\b[^`]*`.*{says}")


@pytest.mark.parametrize("call", MATRIX_CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize(
    "matrix, says",
    [
        (np.ones((2, 3)), "shape"),
        (np.eye(3), "shape"),
        (np.ones(2), "shape"),
        (np.ones((1, 2, 2)), "shape"),
        (INDEFINITE, "positive-definite.*eigenvalue is -1"),
        (np.zeros((2, 2)), "positive-definite"),
        (np.array([[1.0, 0.5], [0.0, 1.0]]), "symmetric"),
        (np.array([[1.0, NAN], [NAN, 1.0]]), "finite"),
        (np.array([[INF, 0.0], [0.0, 1.0]]), "finite"),
    ],
)
def test_a_matrix_that_is_no_covariance_is_refused(call, matrix, says):
    with raises(f"Gaussian.{call.__name__}", says):
        call(jnp.zeros(2), jnp.asarray(matrix))


@pytest.mark.parametrize(
    "variances, says",
    [
        (np.array([1.0, -1.0]), "positive.*-1"),
        (np.array([1.0, 0.0]), "positive.*0"),
        (np.array([1.0, NAN]), "finite"),
        (np.array([1.0, INF]), "finite"),
        (np.ones(3), "shape"),
        (np.ones((2, 2, 1)), "shape"),
        (np.ones((5, 2)), "shape"),
        (np.ones(()), "shape"),
        ({"a": np.ones(2)}, "structure"),
    ],
)
def test_variances_that_are_none_are_refused(variances, says):
    with no_type_hook(), raises("DiagonalGaussian.from_variances", says):
        DiagonalGaussian.from_variances(jnp.zeros(2), jax.tree.map(jnp.asarray, variances))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_mean_that_is_not_finite_is_refused(bad):
    mean = jnp.array([0.0, bad])
    with raises("Gaussian.from_covariance", "finite"):
        Gaussian.from_covariance(mean, jnp.eye(2))
    with raises("Gaussian.from_precision", "finite"):
        Gaussian.from_precision(mean, jnp.eye(2))
    with raises("DiagonalGaussian.from_variances", "finite"):
        DiagonalGaussian.from_variances(mean, jnp.ones(2))


def test_a_mean_without_numbers_is_refused():
    for empty in (jnp.zeros(0), {}):
        with pytest.raises(ValueError, match="at least one|no leaves"):
            Gaussian.from_covariance(empty, jnp.eye(0))
        with pytest.raises(ValueError, match="at least one|no leaves"):
            DiagonalGaussian.from_variances(empty, empty)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("dim", [0, -1])
def test_a_dimension_below_one_is_refused(family, dim):
    with raises(f"{family.__name__}.standard", f"at least one dimension.*{dim}"):
        family.standard(dim)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("dim", [2.0, "2", True, (2,)])
def test_a_dimension_that_is_no_integer_is_refused(family, dim):
    with no_type_hook(), raises(f"{family.__name__}.standard", "integer"):
        family.standard(dim)


@pytest.mark.parametrize("family", BOTH)
def test_exactly_one_of_dim_and_like_is_needed(family):
    with raises(f"{family.__name__}.standard", "exactly one"):
        family.standard()
    with raises(f"{family.__name__}.standard", "exactly one"):
        family.standard(2, like=jnp.zeros(2))


@pytest.mark.parametrize("family", BOTH)
def test_like_needs_floating_point_leaves(family):
    with raises(f"{family.__name__}.standard", "floating-point leaves.*count.*int32"):
        family.standard(like={"count": jnp.zeros(2, jnp.int32), "w": jnp.zeros(2)})
    with raises(f"{family.__name__}.standard", "floating-point leaves.*bool"):
        family.standard(like=jnp.zeros(2, bool))
    with raises(f"{family.__name__}.standard", "no leaves"):
        family.standard(like={})
    with raises(f"{family.__name__}.standard", "at least one dimension"):
        family.standard(like=jnp.zeros(0))


@pytest.mark.parametrize("family", BOTH)
def test_the_dtype_must_be_a_floating_point_type(family):
    with raises(f"{family.__name__}.standard", "floating-point type.*int32"):
        family.standard(2, dtype=jnp.int32)


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize(
    "indices",
    [np.array([0, 0]), np.array([3]), np.array([-1]), np.array([]), np.array([0.0]),
     np.array([[0]]), np.array([True, False, True])],
    ids=["repeated", "too-large", "negative", "none", "float", "matrix", "mask"],
)  # fmt: skip
def test_bad_indices_are_refused(family, indices):
    q = family.standard(3)
    with raises("marginal", "distinct integers from 0 to 2"):
        q.marginal(indices)
    with raises("conditional", "distinct integers from 0 to 2"):
        q.conditional(indices, np.zeros(indices.shape, np.float32))


@pytest.mark.parametrize("family", BOTH)
def test_a_conditional_needs_one_value_an_index_and_a_free_coordinate(family):
    q = family.standard(3)
    with raises("conditional", "one value an index"):
        q.conditional(np.array([0, 1]), np.zeros(1, np.float32))
    with raises("conditional", "leave one free"):
        q.conditional(np.arange(3), np.zeros(3, np.float32))


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize(
    "z",
    [jnp.zeros(3), {"a": jnp.zeros(2)}, {"a": jnp.zeros(3), "b": jnp.zeros(())},
     {"a": jnp.zeros(()), "b": jnp.zeros(())}, {"a": jnp.zeros((5, 2)), "b": jnp.zeros(4)}],
    ids=["flat", "a-leaf-missing", "a-leaf-too-long", "a-leaf-too-short", "unequal-batches"],
)  # fmt: skip
def test_log_prob_refuses_points_of_another_structure(family, z):
    q = family.standard(like={"a": jnp.zeros(2), "b": jnp.zeros(())})
    with raises("log_prob", "got"):
        q.log_prob(z)


@pytest.mark.parametrize("family", BOTH)
def test_kl_refuses_what_is_no_gaussian_of_the_same_dimension(family):
    q = family.standard(3)
    with no_type_hook():
        for other in (3.0, None, jnp.zeros(3), Gaussian.standard(2), DiagonalGaussian.standard(4)):
            with raises("kl", "dimension 3"):
                q.kl(other)


def test_the_monte_carlo_checks_of_this_file_can_fail():
    rows = np.random.default_rng(0).normal(size=(DRAWS, 2))
    assert agrees(rows, 0.0) and not agrees(rows, 0.04) and not agrees(rows * np.nan, 0.0)
    assert np.all(z_scores(rows, 1.0) > 100)

"""The target: what is refused before a fit, and minibatches that are unbiased."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import agrees, no_type_hook
from scipy import stats

import iblr
from iblr import DiagonalGaussian, Gaussian, Target
from iblr.structure import Structure

ROWS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
LABELS = np.random.default_rng(1).normal(size=6).astype(np.float32)
FLAT = Structure.flat(2)
Z = jnp.array([0.3, -0.7])


def log_likelihood(z, rows):
    """A Gaussian regression, the sum over the rows of a batch."""
    return -0.5 * ((rows["y"] - rows["x"] @ z) ** 2).sum()


def numpy_log_likelihood(z, rows):
    return -0.5 * ((LABELS[rows] - ROWS[rows] @ np.asarray(z, float)) ** 2).sum()


def regression(**options):
    data = {"x": jnp.asarray(ROWS), "y": jnp.asarray(LABELS)}
    return Target(log_likelihood=log_likelihood, data=data, **options)


# Before a fit.


def fit_two(log_density, start=None, **options):
    """A fit of two dimensions that must not get as far as its first step."""
    start = DiagonalGaussian.standard(2) if start is None else start
    return iblr.fit(log_density, start, key=jax.random.key(0), num_steps=1, **options)


PREFLIGHT = {
    "the wrong number of parameters": (
        lambda z: -(z @ jnp.ones(3)),
        r"`log_density` called with an array of shape \(2,\) raised TypeError.*"
        r"has the dimension the function expects",
    ),
    "a vector": (
        lambda z: -(z**2),
        r"`log_density` .* must return a scalar, but returned shape \(2,\)\. Sum the terms",
    ),
    "a row of one": (
        lambda z: -(z**2).sum(keepdims=True),
        r"must return a scalar, but returned shape \(1,\)\. Sum the terms",
    ),
    "a pytree": (
        lambda z: {"log_prob": -(z**2).sum()},
        r"must return a scalar, but returned .*dict.*Sum the terms",
    ),
    "an integer": (
        lambda z: jnp.sum(z > 0).astype(jnp.int32),
        r"is not differentiable: it returned int32\. Return a real number",
    ),
    "a complex number": (
        lambda z: -(z**2).sum() + 0j,
        r"is not differentiable: it returned complex64\. Return a real number",
    ),
    "a rounded number": (
        lambda z: jnp.floor(10 * z).sum(),
        r"is not differentiable: it varies, but its gradient is zero.*Remove rounding",
    ),
    "a number that NumPy computed": (
        lambda z: jax.pure_callback(
            lambda z: np.float32(-np.sum(z**2)), jax.ShapeDtypeStruct((), jnp.float32), z
        ),
        r"is not differentiable: .*Replace the operation by one that JAX differentiates, or give it"
        r" a `jax.custom_vjp`",
    ),
    "a number that left JAX": (
        lambda z: -float(z @ z),
        r"raised ConcretizationTypeError.*uses `jax.numpy` only",
    ),
    "nan at the start": (
        lambda z: jnp.sqrt(z[0] - 1.0) - (z**2).sum(),
        r"is not finite at the start: it returned nan\. Start the family inside the support",
    ),
    "minus infinity at the start": (
        lambda z: jnp.where(z[0] > 1, -(z**2).sum(), -jnp.inf),
        r"is not finite at the start: it returned -inf\. Start the family inside the support",
    ),
    "a gradient that is nan at the start": (
        lambda z: -jnp.sqrt((z**2).sum()),
        r"is not finite at the start: its gradient is nan or infinite\. .*reparameterise",
    ),
}


@pytest.mark.parametrize("log_density, says", PREFLIGHT.values(), ids=PREFLIGHT.keys())
def test_a_log_density_that_cannot_be_fitted_is_refused(log_density, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        fit_two(log_density)


def test_the_refusal_names_the_function_at_fault():
    vector = lambda z, *rest: -(z**2)  # noqa: E731
    scalar = lambda z, *rest: -(z**2).sum()  # noqa: E731
    with pytest.raises(ValueError, match="`log_likelihood` called with .* must return a scalar"):
        fit_two(Target(log_likelihood=vector, data=jnp.ones(3), prior=scalar))
    with pytest.raises(ValueError, match="`prior` called with .* must return a scalar"):
        fit_two(Target(log_likelihood=scalar, data=jnp.ones(3), prior=vector))


def test_the_refusal_describes_a_pytree_of_parameters():
    start = DiagonalGaussian.standard(like={"a": jnp.zeros(2), "b": jnp.zeros(())})
    with pytest.raises(
        ValueError, match=r"called with a pytree of shapes \(2,\), \(\) must return"
    ):
        fit_two(lambda z: -(z["a"] ** 2) - z["b"] ** 2, start)


def test_a_target_that_is_sound_passes_the_check():
    points = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    sound = lambda z: -jnp.abs(z).sum() - (z**2).sum()  # noqa: E731
    Target(sound).check(FLAT, points)
    bounded = FLAT.with_support(iblr.interval(0.0, 1.0))
    Target(lambda z: jnp.zeros(())).check(bounded, points)  # flat, where that is a density
    regression(batch_size=2, prior=Gaussian.standard(2)).check(FLAT, points)
    # What happens away from the start is for the fit to report, not for the check to forbid.
    Target(lambda z: jnp.sqrt(1 - z[0] ** 2)).check(FLAT, points.at[1, 0].set(2.0))


def test_a_density_that_is_the_same_everywhere_is_refused_over_unbounded_parameters():
    points = jnp.array([[0.0, 0.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="the same everywhere it was tried.*a prior or a support"):
        Target(lambda z: jnp.zeros(())).check(FLAT, points)


def test_a_prior_over_other_points_is_refused():
    log_density = lambda z: -(z**2).sum()  # noqa: E731
    tree = Gaussian.standard(like={"a": jnp.zeros(2)})
    for prior in (Gaussian.standard(3), DiagonalGaussian.standard(1), tree, 3.0):
        with no_type_hook(), pytest.raises(ValueError, match=r"`Target\(prior=...\)` must be a"):
            fit_two(Target(log_likelihood=log_density, prior=prior))


# Arguments of `Target`.

LOG_DENSITY = {"log_density": lambda z: -(z**2).sum()}
LIKELIHOOD = {"log_likelihood": log_likelihood}
DATA = {"data": jnp.ones(4)}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({}, "exactly one of .* neither"),
        (LOG_DENSITY | LIKELIHOOD, "exactly one of .* both"),
        ({"log_density": 3.0}, r"`Target\(log_density=...\)` must be a function, but got 3.0"),
        ({"log_likelihood": "x"}, r"`Target\(log_likelihood=...\)` must be a function"),
        (LOG_DENSITY | DATA, "already holds its data and prior"),
        (LOG_DENSITY | {"prior": Gaussian.standard(2)}, "already holds its data and prior"),
        (
            LIKELIHOOD | {"data": (jnp.ones(3), jnp.ones(4))},
            r"share one leading axis.*\(3,\).*\(4,\)",
        ),
        (LIKELIHOOD | {"data": jnp.ones(())}, "share one leading axis"),
        (LIKELIHOOD | {"data": jnp.ones((0, 3))}, "at least one row"),
        (LIKELIHOOD | {"data": {}}, "share one leading axis"),
        (LIKELIHOOD | DATA | {"batch_size": 0}, "whole number from 1 to the 4 rows.*got 0"),
        (LIKELIHOOD | DATA | {"batch_size": 5}, "whole number from 1 to the 4 rows.*got 5"),
        (LIKELIHOOD | DATA | {"batch_size": 1.5}, "whole number from 1 to the 4 rows.*got 1.5"),
        (LIKELIHOOD | {"batch_size": 2}, "the no rows"),
        (LOG_DENSITY | {"temperature": 0.0}, r"`Target\(temperature=...\)` must be positive"),
        (LOG_DENSITY | {"temperature": -1.0}, r"`Target\(temperature=...\)` must be positive"),
        (LOG_DENSITY | {"temperature": float("nan")}, r"temperature=...\)` must be positive"),
    ],
)
def test_bad_arguments_of_a_target_are_refused(arguments, says):
    with no_type_hook(), pytest.raises(ValueError, match=rf"`Target\(.*{says}|{says}"):
        Target(**arguments)


@pytest.mark.parametrize("call", ["fit", "elbo", "step", "laplace"])
def test_what_is_neither_a_function_nor_a_target_is_refused(call):
    q, key = DiagonalGaussian.standard(2), jax.random.key(0)
    calls = {
        "fit": lambda target: iblr.fit(target, q, key=key),
        "elbo": lambda target: iblr.elbo(target, q, key),
        "laplace": lambda target: iblr.laplace(target, q, key=key),
        "step": lambda target: iblr.step(
            iblr.init(q, key), target, estimator=iblr.Stl(), step_size=0.1
        ),
    }
    with no_type_hook(), pytest.raises(ValueError, match=rf"`{call}\(target, ...\)` needs a log"):
        calls[call](jnp.ones(2))


# Values.


def test_the_parts_of_a_target_add_up():
    p = Gaussian.from_covariance(jnp.ones(2), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    likelihood = numpy_log_likelihood(Z, np.arange(6))
    prior = stats.multivariate_normal([1, 1], [[2, 0.5], [0.5, 1]]).logpdf(np.asarray(Z))
    for temperature in (1.0, 4.0):
        exact = regression(prior=p, temperature=temperature)
        sampled = regression(prior=p.log_prob, temperature=temperature)
        batch = exact.batch(jax.random.key(0))
        both = (likelihood + prior) / temperature
        np.testing.assert_allclose(exact.sampled(FLAT, batch)(Z), likelihood / temperature, 1e-6)
        np.testing.assert_allclose(exact.whole(FLAT, batch)(Z), both, 1e-6)
        np.testing.assert_allclose(sampled.sampled(FLAT, batch)(Z), both, 1e-6)
        np.testing.assert_allclose(sampled.whole(FLAT, batch)(Z), both, 1e-6)
    assert exact.exact_prior is p and sampled.exact_prior is None


@pytest.mark.parametrize("chosen, taken", [(None, "HIGHEST"), ("bfloat16", "DEFAULT")])
def test_products_are_in_full_precision_unless_the_user_says_otherwise(chosen, taken):
    """An accelerator would take three digits: half a nat of a Gaussian in 500 dimensions."""
    target = iblr.Target(lambda z: z @ jnp.eye(3) @ z)
    with jax.default_matmul_precision(chosen):
        found = jax.make_jaxpr(target.whole(Structure.flat(3), None))(jnp.ones(3))
    products = [e.params["precision"] for e in found.eqns if e.primitive.name == "dot_general"]
    assert products and all(p[0].name == taken for p in products)


def test_temperature_divides_a_log_density():
    log_density = lambda z: -(z**2).sum() + 3.0  # noqa: E731
    cold, hot = (Target(log_density, temperature=t).sampled(FLAT, None)(Z) for t in (1.0, 2.0))
    np.testing.assert_allclose(hot, cold / 2, 1e-6)


def test_a_likelihood_without_data_is_called_with_the_point_alone():
    target = Target(log_likelihood=lambda z: -(z**2).sum(), prior=lambda z: z.sum())
    assert target.num_data == 0 and not target.is_stochastic
    np.testing.assert_allclose(target.whole(FLAT, None)(Z), -(Z**2).sum() + Z.sum(), 1e-6)


# Minibatches.


def test_all_rows_are_used_where_no_batch_size_or_the_full_one_is_given():
    for target in (regression(), regression(batch_size=6)):
        assert target.num_data == 6 and not target.is_stochastic and target.weight == 1
        np.testing.assert_array_equal(target.batch(jax.random.key(0))["x"], ROWS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_replacement_the_mean_over_all_batches_is_the_value_on_all_data(size):
    target = regression(batch_size=size, prior=lambda z: z.sum())
    values = []
    for rows in itertools.combinations(range(6), size):
        batch = {"x": jnp.asarray(ROWS[list(rows)]), "y": jnp.asarray(LABELS[list(rows)])}
        values.append(float(target.sampled(FLAT, batch)(Z)))
    expected = numpy_log_likelihood(Z, np.arange(6)) + float(Z.sum())
    assert np.std(values) > 0.1
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-6)


@pytest.mark.parametrize("replacement", [False, True])
def test_the_mean_over_drawn_batches_is_the_value_on_all_data(replacement):
    target = regression(batch_size=2, replacement=replacement, temperature=2.0)
    keys = jax.random.split(jax.random.key(1), 20_000)
    values = jax.jit(jax.vmap(lambda key: target.sampled(FLAT, target.batch(key))(Z)))(keys)
    expected = numpy_log_likelihood(Z, np.arange(6)) / 2.0
    assert np.std(values) > 0.1
    assert agrees(values, expected)
    assert not agrees(values, 1.05 * expected)  # the check would notice


def drawn_rows(replacement, size, num=6000):
    """Which rows come out of `num` keys, told from an index that travels with the data."""
    target = Target(
        log_likelihood=lambda z, rows: 0.0 * z.sum(),
        data={"x": jnp.asarray(ROWS), "index": jnp.arange(6)},
        batch_size=size,
        replacement=replacement,
    )
    keys = jax.random.split(jax.random.key(2), num)
    batch = jax.jit(jax.vmap(target.batch))(keys)
    rows = np.asarray(batch["index"])
    np.testing.assert_array_equal(np.asarray(batch["x"]), ROWS[rows])  # leaves stay together
    return rows


def test_without_replacement_a_batch_has_distinct_rows_and_every_row_its_turn():
    rows = drawn_rows(replacement=False, size=3)
    assert rows.shape == (6000, 3)
    assert (np.diff(np.sort(rows, axis=1), axis=1) > 0).all()
    # Every set of three rows is as likely as every other.
    sets, counts = np.unique(np.sort(rows, axis=1), axis=0, return_counts=True)
    assert len(sets) == 20 and stats.chisquare(counts).pvalue > 1e-4


def test_with_replacement_a_batch_can_repeat_a_row_as_often_as_chance_has_it():
    rows = drawn_rows(replacement=True, size=3)
    repeats = (np.diff(np.sort(rows, axis=1), axis=1) == 0).any(axis=1)
    assert agrees(repeats, 1 - (5 / 6) * (4 / 6))
    assert stats.chisquare(np.bincount(rows.ravel(), minlength=6)).pvalue > 1e-4


def test_batches_are_drawn_inside_a_compiled_program():
    target = regression(batch_size=2)

    @eqx.filter_jit
    def rows(target, key):
        return target.batch(key)["y"]

    keys = jax.random.split(jax.random.key(3), 8)
    compiled = np.stack([rows(target, key) for key in keys])
    np.testing.assert_array_equal(compiled, np.stack([target.batch(key)["y"] for key in keys]))
    assert len(np.unique(compiled, axis=0)) > 4  # they differ with the key
    np.testing.assert_array_equal(rows(target, keys[0]), rows(target, keys[0]))


def test_data_may_be_any_pytree_of_arrays():
    data = [jnp.asarray(ROWS), (np.asarray(LABELS), {"weight": jnp.ones(6)})]
    target = Target(
        log_likelihood=lambda z, rows: (rows[1][1]["weight"] * rows[1][0] * (rows[0] @ z)).sum(),
        data=data,
        batch_size=2,
    )
    batch = target.batch(jax.random.key(0))
    assert target.num_data == 6 and jax.tree.structure(batch) == jax.tree.structure(data)
    assert [leaf.shape for leaf in jax.tree.leaves(batch)] == [(2, 2), (2,), (2,)]
    assert jnp.isfinite(target.sampled(FLAT, batch)(Z))


def test_a_minibatch_fit_of_a_regression_finds_the_exact_posterior():
    precision = ROWS.T @ ROWS + np.eye(2)
    mean = np.linalg.solve(precision, ROWS.T @ LABELS)
    posterior = iblr.fit(
        regression(batch_size=3, prior=DiagonalGaussian.standard(2)),
        Gaussian.standard(2),
        key=jax.random.key(4),
        num_steps=2000,
        chunk_size=500,
        elbo_draws=20,
        step_size=lambda step: 1 / (10.0 + step),
    )
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert np.abs((np.asarray(posterior.mean) - mean) / sd).max() < 0.1
    np.testing.assert_allclose(posterior.precision, precision, rtol=0.1)

"""What the tests share: the table of families, NumPy's view of a member, a quick fit."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import iblr
from iblr.families.component import Component
from iblr.structure import Structure

# With fixed seeds nothing here is random; by chance one z-score in 150 000 would be larger.
LARGEST_Z = 4.5


class Case(NamedTuple):
    """One family of the table: `make(key)` is a random member over points of `dim` scalars."""

    name: str
    make: Callable[[Any], Any]
    dim: int


def _flat(vector):
    return vector


def _tree(vector):
    """Seven numbers as a pytree, in the order in which the leaves are laid out."""
    return {"bias": vector[0], "weights": (vector[1:3], vector[3:].reshape(2, 2))}


def _random_arrays(key, dim):
    """A vector and a matrix of standard normals, and a rotation that is not the identity."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    return rng.normal(size=dim), rng.normal(size=(dim, dim)), rotation


# Members are made in NumPy, so that nothing is compiled for them, and in the default precision.


def _gaussian(dim, layout=_flat):
    def make(key):
        mean, root, rotation = _random_arrays(key, dim)
        covariance = root @ root.T / dim + 0.3 * np.eye(dim)
        # Any root of the covariance is allowed, so take one that is not triangular.
        factor = rotation @ np.linalg.cholesky(covariance).T
        log_det = np.linalg.slogdet(covariance)[1]
        arrays = (jnp.asarray(value, float) for value in (2 * mean, factor, log_det))
        return iblr.Gaussian(*arrays, Structure.like(layout(mean)))

    return make


def _diagonal(dim, layout=_flat):
    def make(key):
        mean, root, _ = _random_arrays(key, dim)
        arrays = (jnp.asarray(value, float) for value in (2 * mean, np.sqrt(0.2 + root[0] ** 2)))
        return iblr.DiagonalGaussian(*arrays, Structure.like(layout(mean)))

    return make


def gaussian_mixture(means, covariances, weights=None):
    """A mixture with full covariances."""
    means, covariances = np.asarray(means, float), np.asarray(covariances, float)
    K, d = means.shape
    factors = np.linalg.cholesky(covariances).swapaxes(1, 2)
    log_dets = np.linalg.slogdet(covariances)[1]
    arrays = (jnp.asarray(x, float) for x in (means, factors, np.linalg.inv(factors), log_dets))
    components = jax.vmap(lambda *parts: Component(*parts, Structure.flat(d)))(*arrays)
    log_weights = np.log(np.full(K, 1 / K) if weights is None else np.asarray(weights))
    return iblr.GaussianMixture(components, jnp.asarray(log_weights, float), Structure.flat(d))


FAMILIES = [
    Case("gaussian-1", _gaussian(1), 1),
    Case("gaussian-3", _gaussian(3), 3),
    Case("gaussian-7", _gaussian(7), 7),
    Case("gaussian-tree", _gaussian(7, _tree), 7),
    Case("diagonal-1", _diagonal(1), 1),
    Case("diagonal-3", _diagonal(3), 3),
    Case("diagonal-7", _diagonal(7), 7),
    Case("diagonal-tree", _diagonal(7, _tree), 7),
]

# The smallest and the largest are left to the slow tests.
every_family = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.slow] if case.name.endswith(("-1", "-7")) else [],
        )
        for case in FAMILIES
    ],
)


def members(case, *seeds):
    """One member of the family for every seed."""
    return [case.make(jax.random.key(seed)) for seed in seeds]


def stacked(trees):
    """Pytrees of one structure as one, with a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


class Moments(NamedTuple):
    """A Gaussian in NumPy's float64."""

    mean: np.ndarray
    root: np.ndarray
    covariance: np.ndarray


def moments(q) -> Moments:
    """Mean, root A and covariance A'A of a Gaussian, computed outside JAX from its parameters."""
    is_full = isinstance(q, iblr.Gaussian)
    root = np.asarray(q.factor, float) if is_full else np.diag(np.asarray(q.scale, float))
    return Moments(np.asarray(q.mean, float), root, root.T @ root)


def close(actual, expected, dtype, units=100):
    """Equal up to `units` roundings of the largest entry expected, or of one if that is larger."""
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    assert actual.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=units * float(jnp.finfo(dtype).eps) * scale
    )


def z_scores(samples, expected, rounding=0.0):
    """How many standard errors the mean over the first axis is from what was expected.

    `rounding` is forgiven, for entries that do not vary.
    """
    samples = np.asarray(samples, float)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    distance = np.maximum(np.abs(samples.mean(axis=0) - expected) - rounding, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance == 0, 0.0, distance / error)


def agrees(samples, expected, rounding=0.0):
    """Whether the mean over the first axis is what was expected, within Monte Carlo error."""
    return bool(np.all(z_scores(samples, expected, rounding) < LARGEST_Z))


def quick_fit(target, start, **options):
    """A fit of 40 small steps in two chunks."""
    options = {
        "key": jax.random.key(0),
        "estimator": iblr.Stl(pairs=2),
        "step_size": 0.05,
        "num_steps": 40,
        "chunk_size": 20,
        "elbo_draws": 50,
    } | options
    return iblr.fit(target, start, **options)


def assert_same_bits(a, b):
    """Every leaf of two pytrees equal, keys too."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


@contextlib.contextmanager
def no_type_hook() -> Iterator[None]:
    """The library as its users have it, without the types being checked: its own errors show."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def slow(*values):
    """A row of `parametrize` that is left to the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def counter_bits(index, key, offset, m, n):
    """`iblr.counter_noise` in Python's integers: triple32, with words added between rounds."""
    high, low = divmod(index, 2**32)
    x = (low * key + offset) % 2**32
    x = ((x ^ x >> 17) * 0xED5AD4BB + m + high * 0x9E3779B9) % 2**32
    x = ((x ^ x >> 11) * 0xAC4C1B51 + n) % 2**32
    x = (x ^ x >> 15) * 0x31848BAB % 2**32
    return x ^ x >> 14

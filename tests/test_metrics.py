"""Discrepancies from draws, and the rows of a minibatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import no_type_hook

import iblr
from iblr.target import distinct_rows


def exact_mmd2(mean, h):
    """Of N(0, I) and N(mean, I): the kernel of width h, spread by the two unit variances."""
    d = len(mean)
    peak = (h**2 / (h**2 + 2)) ** (d / 2)
    return 2 * peak * (1 - np.exp(-(mean @ mean) / (2 * (h**2 + 2))))


def test_mmd2_is_that_of_two_gaussians():
    mean = np.array([1.0, 0.5, 0.0])
    x, y = jax.random.normal(jax.random.key(0), (2, 4000, 3))
    for h in (0.7, 2.0):
        assert abs(iblr.mmd2(x, y + mean, bandwidth=h) - exact_mmd2(mean, h)) < 0.01
    both = (exact_mmd2(mean, 0.7) + exact_mmd2(mean, 2.0)) / 2
    assert abs(iblr.mmd2(x, y + mean, bandwidth=[0.7, 2.0]) - both) < 0.01


def test_mmd2_is_the_sum_over_pairs_of_different_draws():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 2)), rng.normal(size=(5, 2)) + 1

    def kernel(a, b):
        return np.exp(-((a[:, None] - b) ** 2).sum(-1) / (2 * 1.5**2))

    def apart(a):
        return (kernel(a, a).sum() - len(a)) / (len(a) * (len(a) - 1))

    expected = apart(x) + apart(y) - 2 * kernel(x, y).mean()
    assert iblr.mmd2(x, y, bandwidth=1.5) == pytest.approx(expected, abs=1e-6)


def test_mmd2_has_no_bias():
    keys = jax.random.split(jax.random.key(1), 200)
    draws = jax.vmap(lambda key: jax.random.normal(key, (2, 20, 2)))(keys)
    values = np.array([iblr.mmd2(x, y, bandwidth=1.0) for x, y in draws])
    assert abs(values.mean()) < 3 * values.std() / np.sqrt(len(values))
    assert values.min() < 0


def test_the_default_bandwidth_is_the_median_distance():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(30, 2)), rng.normal(size=(40, 2)) * 3
    both = np.concatenate([x, y])
    distances = np.linalg.norm(both[:, None] - both, axis=-1)[np.triu_indices(70, 1)]
    expected = iblr.mmd2(x, y, bandwidth=float(np.median(distances)))
    assert iblr.mmd2(x, y) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros(3), np.zeros((3, 1)), {}, "one a row"),
        (np.zeros((3, 2)), np.zeros((3, 1)), {}, "one dimension"),
        (np.zeros((1, 2)), np.zeros((3, 2)), {}, "two or more"),
        (np.zeros((3, 2)), np.zeros((3, 2)), {"bandwidth": 0.0}, "positive"),
        (np.zeros((3, 2)), np.zeros((3, 2)), {"bandwidth": []}, "positive"),
    ],
)
def test_mmd2_says_what_is_wrong(x, y, options, message):
    with no_type_hook(), pytest.raises(ValueError, match=message):
        iblr.mmd2(x, y, **options)


def test_rows_of_a_minibatch_are_distinct_and_every_set_is_as_likely():
    keys = jax.random.split(jax.random.key(2), 30_000)
    rows = np.sort(jax.vmap(lambda key: distinct_rows(key, 5, 3))(keys), axis=1)
    sets, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(sets) == 10
    assert (np.diff(sets, axis=1) > 0).all()
    assert np.abs(counts - 3000).max() < 5 * np.sqrt(3000)
    assert sorted(np.asarray(distinct_rows(keys[0], 6, 6))) == list(range(6))
    assert jnp.asarray(rows).max() == 4

"""What a regression remembers: when it goes back, begins anew, and what bounds its gap."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import iblr
from iblr import regression

advance = eqx.filter_jit(regression.advance)
DIM = 8  # four pairs


def gaussian(z, data):
    centre, reach = data[0]
    value = -0.5 * (jnp.arange(1, DIM + 1) * (z - centre) ** 2).sum()
    return jnp.where(jnp.abs(z[0]) < reach[0], value, jnp.nan)


def gaussian_at(shift, reach=np.inf):
    """One program for all of them: nan where the first coordinate is beyond `reach`."""
    rows = np.stack([np.full(DIM, shift), np.full(DIM, reach)])
    return iblr.Target(log_likelihood=gaussian, data=jnp.asarray(rows[None], float))


def curved(z):
    """The best Gaussian is N(-1/2, I)."""
    return (z - jnp.exp(z)).sum()


def gap(q):
    mean, covariance = np.asarray(q.mean, float), np.asarray(q.covariance, float)
    elbo = (mean - np.exp(mean + np.diag(covariance) / 2)).sum()
    return -1.5 * len(mean) - elbo - 0.5 * np.linalg.slogdet(covariance)[1]


def run(target, dim, steps, seed=0):
    state = regression.begin(iblr.Gaussian.standard(dim), jax.random.key(seed))
    for _ in range(steps):
        state, _ = advance(state, target)
    return state


@pytest.mark.parametrize("radius, batches", [(1.0, 4), (2.0, 1)])
def test_a_leap_is_taken_back_at_once_and_other_steps_after_sixteen_doubtful_pairs(radius, batches):
    target = gaussian_at(0.0)
    state = run(target, DIM, 20)
    best = state.trusted.family
    for number in range(1, batches + 1):
        astray = dataclasses.replace(state.family, mean=jnp.full(DIM, 100.0))
        state = dataclasses.replace(state, family=astray, radius=jnp.full((), radius))
        state, _ = advance(state, target)
        is_back = bool((state.family.mean == best.mean).all())
        assert is_back == (number == batches)
        assert int(state.trusted.doubts) == (0 if is_back else number)
    np.testing.assert_array_equal(state.family.factor, best.factor)
    assert int(state.count) == 0 and not bool(state.finishing)


def test_batches_enter_with_known_weights_and_are_worth_as_many(x64):
    """(sum w)^2 / sum w^2 of the weights that also give the average of all means of q."""
    target, weights, centres = iblr.Target(curved), None, []
    state = regression.begin(iblr.Gaussian.standard(3), jax.random.key(1))
    for _ in range(30):
        was_finishing, age = bool(state.finishing), float(state.older.age)
        state, found = advance(state, target)
        centres.append(np.asarray(found.pairs.centre))
        if was_finishing:
            assert state.older.age == age + 1  # no younger average took its place
            rate = 2 / (2 + age + 1)
            weights = np.append((1 - rate) * weights, rate)
        elif state.finishing:
            weights = np.full(int(state.older.age), 1 / int(state.older.age))
        if state.finishing:
            average = weights @ np.stack(centres[-len(weights) :])
            np.testing.assert_allclose(state.older.centre, average, rtol=1e-9)
            expected = weights.sum() ** 2 / (weights**2).sum()
            np.testing.assert_allclose(state.effective, expected, rtol=1e-9)
    assert len(weights) > 20


def test_a_younger_average_takes_the_place_of_one_that_began_too_early(x64):
    target = iblr.Target(curved)
    state = run(target, 3, 20)
    assert bool(state.finishing) and gap(state.family) < 0.1
    wrong = state.older._replace(
        gradient=state.older.gradient + 1.0,
        change_offset=2 * state.older.change_offset,
        age=jnp.full((), 200.0),
    )
    younger, told = jax.tree.map(jnp.zeros_like, (state.younger, state.advantage))
    state = dataclasses.replace(
        state, older=wrong, younger=younger, advantage=told, effective=jnp.full((), 150.0)
    )
    state, _ = advance(state, target)
    assert gap(state.family) > 0.3
    ages = []
    for _ in range(12):
        state, _ = advance(state, target)
        ages.append(float(state.older.age))
        assert bool(state.finishing)
    swapped = int(np.argmin(ages))
    assert 4 <= ages[swapped] <= 10 and ages[-1] == ages[swapped] + 11 - swapped
    assert float(state.effective) <= ages[-1]
    assert gap(state.family) < 0.1


def test_a_target_that_jumps_is_approached_anew_after_two_batches_in_a_row():
    here, there = gaussian_at(0.0), gaussian_at(0.5)
    state = run(here, DIM, 25)
    for target, stays in ((there, True), (here, True), (there, True), (there, False)):
        calm = int(state.calm)
        state, _ = advance(state, target)
        assert bool(state.finishing) == stays and int(state.calm) == (calm + 1 if stays else 0)
    assert int(state.trusted.doubts) == 0 and int(state.count) == 0
    assert np.isinf(state.gap)
    for _ in range(20):
        state, _ = advance(state, there)
    assert bool(state.finishing)
    np.testing.assert_allclose(state.family.mean, 0.5, atol=1e-3)


def finished(dim, calm, extremes=None):
    """A state with a gap of 1/8 and so many batches since the approach."""
    extremes = np.ones(64) if extremes is None else np.sort(extremes)
    state = regression.begin(iblr.Gaussian.standard(dim), jax.random.key(0))
    return dataclasses.replace(
        state,
        calm=jnp.asarray(calm + 3),
        extremes=jnp.asarray(extremes, state.extremes.dtype),
        noise=jnp.asarray([0.25, 0.0]) * regression.num_pairs(dim),
        moved=jnp.zeros(()),
    )


def largest(index, number):
    """The 64 largest of so many exact quantiles of a Pareto."""
    return stats.pareto(index).isf((np.arange(64) + 0.5) / number)


@pytest.mark.parametrize("index", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("batches, rtol", [(20, 0.03), (500, 0.01)])
def test_the_tail_is_that_of_a_pareto(index, batches, rtol):
    state = finished(2, batches, largest(index, 8 * batches))
    np.testing.assert_allclose(state.tail, 1 / index, rtol=rtol)


def test_the_bound_grows_with_the_tail():
    light, *heavy = (finished(2, 500, largest(index, 4000)) for index in (2, 1, 0.8, 0.6, 0.4))
    assert float(light.bound) == float(finished(2, 500).bound)  # all tails below 0.9 are light
    ratios = [float(state.bound / light.bound) for state in heavy]
    assert 1 < ratios[0] < ratios[1] < ratios[2] < ratios[3]
    np.testing.assert_allclose(ratios[1], np.exp(3 * (1 / 0.8 - 0.9)), rtol=0.05)
    np.testing.assert_allclose(ratios[3], np.exp(3.0), rtol=1e-5)  # and no more


@pytest.mark.parametrize("dim", [1, 3, 20])
def test_the_bound_falls_with_the_pairs_to_a_quantile_of_the_gap(dim):
    assert np.isinf(finished(dim, 2).gap) and np.isinf(finished(dim, 2).bound)
    bounds = []
    for batches in (3, 10, 100, 10**6):
        state = finished(dim, batches)
        assert float(state.gap) == 0.125
        bounds.append(float(state.bound))
    assert np.all(np.diff(bounds) < 0)
    free = dim * (dim + 3) // 2
    quantile = stats.chi2(free).ppf(0.95) / free
    np.testing.assert_allclose(bounds[-1], 1.5 * quantile * 0.125, rtol=0.02)
    pairs = 10 * regression.num_pairs(dim)
    few = 1 + 200 * (1 + 4 / dim) / pairs
    np.testing.assert_allclose(bounds[1] / bounds[-1], few, rtol=0.01)


def narrow_at(state, fine):
    """A target of which the next batch has so many pairs that are finite."""
    _, found = advance(state, gaussian_at(0.0))
    reach = np.abs(state.family.mean[0]) + np.abs(found.pairs.offset[:, 0])
    return gaussian_at(0.0, np.sort(np.append(reach, 0.0))[fine : fine + 2].mean())


def test_where_most_pairs_are_not_finite_q_is_narrowed_and_nothing_promised_of_it():
    state = run(gaussian_at(0.0), DIM, 20)
    assert np.isfinite(state.gap)
    half, found = advance(state, narrow_at(state, 2))
    assert int(found.fine.sum()) == 2 and int(half.narrowed) == 0 and np.isfinite(half.gap)
    for times in (1, 2):
        after, found = advance(state, narrow_at(state, 1))
        assert int(found.fine.sum()) == 1 and int(after.narrowed) == times
        assert int(after.step) == int(state.step) + 1
        np.testing.assert_array_equal(after.family.factor, 0.5 * state.family.factor)
        np.testing.assert_array_equal(after.inverse, 2 * state.inverse)
        np.testing.assert_array_equal(after.family.mean, state.family.mean)
        log_det = 2 * np.linalg.slogdet(np.asarray(after.family.factor, float))[1]
        np.testing.assert_allclose(after.family.log_det, log_det, rtol=1e-5)
        assert np.isinf(after.gap)
        state = after
    state, _ = advance(state, gaussian_at(0.0))
    assert int(state.narrowed) == 0 and 1 < float(state.gap) < np.inf  # nats of the way back

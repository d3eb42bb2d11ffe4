"""Gaussians from regressions of gradients: the models, exact targets, and an honest gap."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

import iblr
from iblr import regression
from iblr.regression import drift, finish
from iblr.regression.drift import Drift, Past
from iblr.regression.models import least_squares, quasi_newton
from iblr.regression.pairs import Pairs, Whitened

advance = eqx.filter_jit(regression.advance)


def spectrum(rng, values):
    basis = np.linalg.qr(rng.normal(size=(len(values), len(values))))[0]
    return (basis * values) @ basis.T


def moments(E, D):
    gram, cross = jnp.asarray(E @ E.T), jnp.asarray(D @ E.T)
    return *jnp.linalg.eigh(gram), cross


def test_least_squares_solves_its_normal_equations(x64):
    rng = np.random.default_rng(0)
    E, D, ridge = rng.normal(size=(6, 9)), rng.normal(size=(6, 9)), 0.7
    K = np.asarray(least_squares(*moments(E, D), ridge))
    slope = (K @ E - D) @ E.T + ridge * K  # of half the objective, for any K
    np.testing.assert_allclose(slope + slope.T, 0, atol=1e-12)
    np.testing.assert_allclose(K, K.T, atol=1e-14)


def test_both_models_are_exact_for_a_quadratic_with_enough_pairs(x64):
    rng = np.random.default_rng(1)
    H = spectrum(rng, np.logspace(-1, 2, 5))
    E = rng.normal(size=(5, 7))
    found = moments(E, (H - np.eye(5)) @ E)
    np.testing.assert_allclose(least_squares(*found, 0.0), H - np.eye(5), atol=1e-9)
    np.testing.assert_allclose(quasi_newton(*found), H - np.eye(5), atol=1e-9)


def test_the_quasi_newton_model_is_exact_where_it_looked_and_positive_definite(x64):
    rng = np.random.default_rng(2)
    H = spectrum(rng, np.logspace(0, 4, 8))
    E = rng.normal(size=(8, 3))
    model = np.asarray(quasi_newton(*moments(E, (H - np.eye(8)) @ E))) + np.eye(8)
    np.testing.assert_allclose(model @ E, H @ E, rtol=1e-9)
    assert np.linalg.eigvalsh(model).min() > 0
    Q = np.linalg.qr(E)[0]
    gamma = np.exp(np.log(np.linalg.eigvalsh(Q.T @ H @ Q)).mean())
    outside = np.linalg.svd(np.concatenate([E, H @ E], 1).T)[2][6:]  # the span of neither
    np.testing.assert_allclose(model @ outside.T, gamma * outside.T, rtol=1e-9)


def test_directions_without_positive_curvature_do_not_make_it_indefinite(x64):
    rng = np.random.default_rng(3)
    H = spectrum(rng, np.array([-1.0, 0.5, 1.0, 2.0]))
    E = rng.normal(size=(4, 4))
    model = np.asarray(quasi_newton(*moments(E, (H - np.eye(4)) @ E))) + np.eye(4)
    assert np.linalg.eigvalsh(model).min() > 0.1


def run(target, family, steps, seed=0):
    state = regression.begin(family, jax.random.key(seed))
    for _ in range(steps):
        state, _ = advance(state, target)
    return state


@pytest.mark.parametrize("scale", [slow(1.0), 1e4, slow(1e-4)])
def test_a_gaussian_is_solved_by_little_more_than_its_dimension(scale, x64):
    rng = np.random.default_rng(4)
    H = jnp.asarray(spectrum(rng, np.logspace(-2, 2, 20) * scale**2))
    centre = jnp.asarray(rng.normal(size=20) / scale)
    target = iblr.Target(lambda z: -0.5 * (z - centre) @ H @ (z - centre))
    exact = iblr.Gaussian.from_precision(centre, H)
    state = run(target, iblr.Gaussian.standard(20), 18)
    assert 2 * 18 * regression.num_pairs(20) == 144  # gradients
    assert float(state.family.kl(exact)) < 1e-6
    state = run(target, iblr.Gaussian.standard(20), 30)
    assert bool(state.finishing) and float(state.gap) < 1e-6


def test_float32_is_enough_for_a_condition_of_a_million():
    H = jnp.asarray(spectrum(np.random.default_rng(5), np.logspace(-3, 3, 12)), jnp.float32)
    target = iblr.Target(lambda z: -0.5 * (z - 1) @ H @ (z - 1))
    state = run(target, iblr.Gaussian.standard(12), 25)
    exact = iblr.Gaussian.from_precision(jnp.ones(12), H)
    assert float(state.family.kl(exact)) < 0.01


def test_the_gap_is_what_the_noise_has_left(x64):
    """sum z - exp(z): the best Gaussian is N(-1/2, I), and the ELBO is known."""
    target = iblr.Target(lambda z: (z - jnp.exp(z)).sum())

    def gap(family):
        m, v = family.mean, jnp.diagonal(family.covariance)
        elbo = (m - jnp.exp(m + v / 2)).sum() + 0.5 * family.log_det
        return -1.5 * 5 - elbo

    true, estimated = [], []
    for seed in range(8):
        state = run(target, iblr.Gaussian.standard(5), 120, seed)
        assert bool(state.finishing)
        true.append(float(gap(state.family)))
        estimated.append(float(state.gap))
    assert min(true) > 0 and max(true) < 0.05
    assert 0.4 < np.mean(estimated) / np.mean(true) < 2.5


def test_the_start_may_be_far_away(x64):
    target = iblr.Target(lambda z: jax.nn.log_sigmoid(z).sum() - 0.5 * (z**2).sum())
    start = iblr.Gaussian.from_covariance(1000 * jnp.ones(4), jnp.eye(4))
    near, far = run(target, iblr.Gaussian.standard(4), 60), run(target, start, 60)
    np.testing.assert_allclose(far.family.mean, near.family.mean, atol=0.02)


def test_where_the_target_is_not_finite_is_left_out_or_left(x64):
    """nan beyond 6 standard deviations of the optimum; the start lies half in it."""

    def log_density(z):
        value = jax.nn.log_sigmoid(z).sum() - 0.5 * (z**2).sum()
        return jnp.where(z[0] > 6.5, jnp.nan, value)

    start = iblr.Gaussian.from_covariance(6 * jnp.ones(4), 100 * jnp.eye(4))
    state = run(iblr.Target(log_density), start, 60)
    smooth = iblr.Target(lambda z: jax.nn.log_sigmoid(z).sum() - 0.5 * (z**2).sum())
    expected = run(smooth, iblr.Gaussian.standard(4), 60)
    np.testing.assert_allclose(state.family.mean, expected.family.mean, atol=0.02)
    np.testing.assert_allclose(state.family.covariance, expected.family.covariance, atol=0.02)


def test_a_rare_pair_counts_for_no_more_than_its_share(x64):
    state = regression.begin(iblr.Gaussian.standard(3), jax.random.key(0))
    state = eqx.tree_at(lambda s: (s.noise, s.effective), state, (jnp.ones(2), jnp.array(40.0)))
    rows = jnp.eye(3)
    excess = jnp.array([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 1000.0]])
    batch = Pairs(rows, excess + rows, jnp.zeros(3), jnp.ones(3))
    seen = Whitened(rows, excess, jnp.array([[1.0] * 3, [2.0] * 3, [9.0] * 3]))
    trimmed = finish._trimmed(state, batch, seen)
    weight = jnp.sum(trimmed.offset**2, axis=1)  # the bound is 40 * 3 / 20 = 6, on 1, 4 and 1e6
    np.testing.assert_allclose(weight, [1, 1, np.sqrt(6e-6)])
    np.testing.assert_allclose(trimmed.change, jnp.sqrt(weight)[:, None] * batch.change)
    expected = np.average([1, 2, 9], weights=weight)
    np.testing.assert_allclose(trimmed.gradient, expected)


AGES = (3, 7, 9, 13, 15, 23, 31, 47, 63, 99, 127, 199)  # one less than the ages looked at


def nowhere(d):
    none = Past(jnp.zeros(d), jnp.zeros((d, d)), jnp.zeros(()))
    return Drift(none, none, jnp.zeros(()))


def test_the_way_of_a_noisy_average_is_what_its_noise_still_costs(x64):
    """Averages of normal numbers with the weights of the finish: half their square is the gap."""
    d, n = 400, 200
    noise, average, seen = np.random.default_rng(6).normal(size=(n, d)), np.zeros(d), nowhere(d)
    step = jax.jit(drift.with_q)
    for k, new in enumerate(noise):
        average = average + min(1.0, 2 / (2 + k + 1)) * (new - average) if k else new
        q = iblr.Gaussian.from_covariance(jnp.asarray(average), jnp.eye(d)) if k in AGES else None
        if q is not None:
            seen = step(seen, q, jnp.eye(d), jnp.asarray(k + 1.0), jnp.ones(()))
            if k + 1 >= 24:
                assert 0.8 < float(seen.gap) / (0.5 * average @ average) < 1.25


def test_a_q_that_goes_on_is_seen_and_one_that_begins_anew_is_not():
    q, seen, gaps = iblr.Gaussian.standard(3), nowhere(3), []
    for age in range(1, 20):
        moved = eqx.tree_at(lambda q: q.mean, q, q.mean + 0.1 * age)
        seen = drift.with_q(seen, moved, jnp.eye(3), jnp.asarray(float(age)), jnp.ones(()))
        gaps.append(float(seen.gap))
    assert gaps[6] == 0 and seen.earlier.age == 8 and seen.later.age == 16
    share, way = 8 / 19, 0.5 * 3 * (0.1 * 11) ** 2
    np.testing.assert_allclose(gaps[-1], way / ((1 - share**2) ** 2 / share + 1 - share**3), 1e-5)
    seen = drift.with_q(seen, q, jnp.eye(3), jnp.asarray(0.0), jnp.ones(()))
    assert seen.gap == 0 and seen.earlier.age == 0 and seen.later.age == 0


def test_a_change_of_scale_costs_what_it_is_told_to():
    q = iblr.Gaussian.standard(4)
    wide = iblr.Gaussian.from_covariance(jnp.zeros(4), 1.02 * jnp.eye(4))
    past = Past(q.mean, jnp.eye(4), jnp.asarray(8.0))
    plain, flat = (float(drift._way(wide, past, jnp.asarray(c))) for c in (1.0, 0.1))
    np.testing.assert_allclose(plain, 0.25 * 4 * 0.02**2, rtol=1e-3)
    np.testing.assert_allclose(flat, 0.1 * plain, rtol=1e-3)

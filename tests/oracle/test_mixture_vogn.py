"""VOGN's idea does not carry over to mixtures: the end of [LSK20] appendix J, with numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import gaussian_mixture, no_type_hook

import iblr
from iblr import Gaussian, Status
from iblr.baselines import MixtureVogn

KEY = jax.random.key(0)
GRID = jnp.linspace(-12.0, 12.0, 2001)[:, None]


def mixture(means, deviations, weights=None):
    means, variances = np.array(means), np.square(deviations)
    return gaussian_mixture(means[:, None], variances[:, None, None], weights)


def wide_between_narrow(deviation, distance):
    return mixture([-distance, 0.0, distance], [0.5, deviation, 0.5], [0.45, 0.1, 0.45])


@eqx.filter_jit
def entropy_part(q):
    """-E_c[hess log q] of every component, by quadrature."""
    x, w = np.polynomial.hermite_e.hermegauss(120)
    rows = q.components.mean + q.components.factor[:, :, 0] * jnp.asarray(x, float)
    hessians = q.terms(rows.reshape(-1, 1)).log_hessians().reshape(q.num_components, -1)
    return -hessians @ jnp.asarray(w / w.sum(), float)


@eqx.filter_jit
def step(q, estimator, t, rule=iblr.natural_gradient_step):
    flat = iblr.Target(lambda z: -0.5 * (z @ z) * 1e-4)
    return rule(q, estimator(q, flat, KEY), t)


def test_the_part_of_log_q_is_not_positive_definite():
    one = mixture([0.0, 0.0, 0.0], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(entropy_part(one), 4.0, rtol=1e-4)  # S, as it is a Gaussian
    assert float(entropy_part(wide_between_narrow(1.0, 2.0))[1]) < -0.5


def test_squared_gradients_of_the_target_leave_the_set():
    q, t = wide_between_narrow(2.0, 1.5), 0.9
    assert float(entropy_part(q)[1]) > 1.5 / 2.0**2
    kept, info = step(q, MixtureVogn(pairs=500, of_b=False), t)
    assert info.status == Status.left_set and eqx.tree_equal(kept, q)
    _, info = step(q, iblr.Stl(pairs=500), t, iblr.improved_step)
    assert info.status == Status.ok


@pytest.mark.slow
def test_squared_gradients_of_both_never_leave_it():
    q = wide_between_narrow(2.0, 1.5)
    new, info = step(q, MixtureVogn(pairs=50), 1.0)
    assert info.status == Status.ok
    assert bool((new.components.log_det < q.components.log_det).all())


@jax.jit
def divergence(q, p):
    """KL(q || p) on a grid."""
    log_q, log_p = q.log_prob_rows(GRID), p.log_prob_rows(GRID)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p)) * (GRID[1, 0] - GRID[0, 0])


@pytest.mark.slow
def test_squared_gradients_of_both_fit_much_worse():
    target = mixture([-2.0, 1.5], [0.6, 1.2])  # a member of the family
    start = mixture([-1.0, 1.0], [1.0, 1.0])
    options = {"key": KEY, "num_steps": 600, "elbo_draws": 20}
    log_density = lambda z: target.log_prob_rows(z[None])[0]  # noqa: E731
    ours = iblr.fit(log_density, start, estimator=iblr.Stl(pairs=8), **options).family
    assert divergence(ours, target) < 1e-3
    theirs = iblr.fit(
        log_density,
        start,
        estimator=MixtureVogn(pairs=8),
        rule=iblr.natural_gradient_step,
        step_size=lambda k: 0.5 / (10.0 + k),
        **options,
    ).family
    assert divergence(theirs, target) > 0.1
    assert bool((theirs.components.log_det < jnp.log(jnp.array([0.36, 1.44])) - 0.3).all())


def test_it_is_for_mixtures():
    with no_type_hook(), pytest.raises(ValueError, match="needs a GaussianMixture, but got a Gau"):
        MixtureVogn()(Gaussian.standard(1), iblr.Target(lambda z: -(z @ z)), KEY)
    with no_type_hook(), pytest.raises(ValueError, match="`MixtureVogn\\(pairs=...\\)` must be"):
        MixtureVogn(pairs=0)

"""Targets without a finite integral, and those that only look like it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from automatic_helpers import KEY, fit, separable
from helpers import slow

import iblr
from iblr import Status
from iblr.importance import weigh
from iblr.improper import has_endless_axis, has_endless_ridge


@pytest.mark.parametrize("improper", [separable, slow(lambda z: -jnp.exp(z).sum())])
def test_a_target_that_is_flat_on_one_side_is_named(improper):
    with pytest.raises(iblr.FitError, match="improper"):
        fit(improper)


def test_a_diagonal_family_names_an_improper_target_too():
    with pytest.raises(iblr.FitError, match="improper"):
        iblr.fit(lambda z: -0.5 * z[0] ** 2 + 0 * z[1], iblr.DiagonalGaussian.standard(2), key=KEY)


def test_an_improper_target_is_named():
    improper = lambda z: -0.5 * z[0] ** 2 + 0 * z[1]  # noqa: E731
    with pytest.raises(iblr.FitError, match="improper"):
        fit(improper)
    posterior = fit(improper, throw=False)
    assert posterior.status == Status.improper and posterior.stopped_by == "failure"
    assert posterior.verdict.startswith("Bad") and "improper" in str(posterior)
    assert bool(jnp.isfinite(posterior.family.mean).all())


def test_an_improper_region_that_only_a_climb_has_found_is_named():
    """A Gaussian beside a plateau that begins five standard deviations away and never ends."""

    def plateau(z):
        far = -12.0 + jax.nn.log_sigmoid(z[0] - 5) - 0.5 * z[1] ** 2
        return jnp.logaddexp(-0.5 * (z**2).sum(), far)

    posterior = fit(plateau, throw=False)
    assert posterior.status == Status.improper and posterior.stopped_by == "failure"
    assert posterior.verdict.startswith("Bad") and np.isnan(posterior.gap_bound)
    np.testing.assert_allclose(posterior.mean, 0, atol=0.1)


@pytest.mark.parametrize("family", [iblr.DiagonalGaussian, slow(iblr.Gaussian)])
@pytest.mark.parametrize(
    "target", [lambda z: -0.45 * jnp.log1p(z**2).sum(), lambda z: -jnp.exp(z).sum()]
)
def test_nothing_is_promised_of_a_target_without_an_integral(family, target):
    fitted = fit(target, family=family, throw=False)
    assert fitted.status == Status.improper and fitted.stopped_by == "failure"
    assert np.isnan(fitted.gap_bound) and np.isnan(fitted.gap_estimate)
    assert "nats below the best" not in str(fitted)


@pytest.mark.parametrize("width", [slow(1e6), 1e7])
def test_a_wide_target_is_not_called_improper_on_the_way_to_it(width):
    wide = lambda z: -0.5 * (z[0] / width) ** 2 - 0.5 * z[1] ** 2  # noqa: E731
    assert fit(wide, max_gradients=600).status == Status.not_converged
    assert fit(wide).verdict.startswith("Good")


def test_a_target_that_is_constant_on_a_support_is_refused():
    with pytest.raises(ValueError, match="over the real numbers that are mapped onto it"):
        fit(lambda z: -jnp.log(z["tau"]), init={"tau": 2.0}, support={"tau": iblr.positive})
    uniform = fit(lambda z: 0.0 * z, init=jnp.array(0.5), support=iblr.interval(0.0, 1.0), tol=0.1)
    assert abs(uniform.log_evidence) < 0.05


def test_an_endless_ridge_is_told_from_a_wide_gaussian():
    first = jnp.ones(2)
    wide = iblr.Gaussian.from_covariance(jnp.zeros(2), 1e6 * jnp.array([[1.0, 0.9], [0.9, 1.0]]))
    tilted = iblr.Target(lambda z: jax.nn.log_sigmoid(z[0] + z[1]) - 1e-5 * (z[0] - z[1]) ** 2)
    rays = 2 * 2 * 2  # two axes of q and two of coordinates, both ways
    assert has_endless_ridge(tilted, first, wide) == (True, 3 * 6 * rays)
    assert has_endless_ridge(iblr.Target(wide.log_prob), first, wide) == (False, 3 * 6 * rays)
    student = iblr.Target(lambda z: -1.5 * jnp.log1p((z**2).sum() / 1e6))  # Cauchy's
    assert has_endless_ridge(student, first, wide) == (False, 3 * 6 * rays)
    assert has_endless_ridge(tilted, wide.variances, wide) == (False, 0)


def test_an_endless_ridge_is_followed_from_a_gaussian_that_is_off():
    """Rays of its axes leave the ridge, and Newton's steps with its precision fall short."""
    tilt, across = 2e-3, 1.3  # beside 1 / sqrt(2)
    axes = jnp.array([[1.0, 1.0 + tilt], [1.0 + tilt, -1.0]]) / jnp.sqrt(2 + 2 * tilt)
    covariance = (axes.T * jnp.array([2000.0, across]) ** 2) @ axes
    q = iblr.Gaussian.from_covariance(jnp.full(2, 4000.0), covariance)
    assert has_endless_ridge(iblr.Target(separable), jnp.ones(2), q)[0]
    proper = iblr.Target(lambda z: separable(z) - 0.5 * (z**2).sum() / 4000**2)
    assert not has_endless_ridge(proper, jnp.ones(2), q)[0]


def test_rounding_does_not_hide_an_endless_ridge():
    """At 3e8 a sum of two float32 numbers is off by 16."""
    data = jnp.linspace(2.0, 4.0, 20)
    target = lambda z: -0.5 * ((data - z[0] - z[1]) ** 2).sum()  # noqa: E731
    axes = jnp.array([[1.0, 1.0], [1.0, -1.0]]) / jnp.sqrt(2)
    factor = jnp.array([0.16, 3e5])[:, None] * axes
    log_det = 2 * jnp.log(0.16 * 3e5)
    q = eqx.tree_at(lambda q: (q.factor, q.log_det), iblr.Gaussian.standard(2), (factor, log_det))
    q = dataclasses.replace(q, mean=jnp.array([2.0, 1.0]))
    assert has_endless_ridge(iblr.Target(target), jnp.ones(2), q)[0]
    proper = iblr.Target(lambda z: target(z) - 0.5 * (z**2).sum() / 3e5**2)
    assert not has_endless_ridge(proper, jnp.ones(2), q)[0]


@pytest.mark.slow
def test_rays_see_a_prior_that_is_a_family_by_its_points():
    """A Gamma family with a Gamma prior and a likelihood that outgrows it."""
    prior = iblr.Gamma(jnp.ones(1), 1.0)
    target = iblr.Target(log_likelihood=lambda z: 1.2 * z.sum(), prior=prior)
    fitted = fit(target, family=prior, init=None, throw=False)
    assert fitted.status == Status.improper and np.isnan(fitted.gap_bound)


def floored(height):
    """A robust likelihood of one parameter without a prior: a floor in one coordinate."""
    return lambda z: jnp.logaddexp(-0.5 * z[0] ** 2, height) - 0.5 * (z[1:] ** 2).sum()


@pytest.mark.parametrize("dim, seed", [slow(50, 0), slow(20, 4), (5, 3)])
def test_a_floor_without_end_is_named_though_the_fit_settles(dim, seed):
    posterior = fit(floored(-15.0), init=jnp.zeros(dim), key=jax.random.key(seed), throw=False)
    assert posterior.status == Status.improper and np.isnan(posterior.gap_bound)


def along_axes(log_density, dim=3):
    q = iblr.Gaussian.standard(dim)
    found = weigh(iblr.Target(log_density), q, KEY)
    return has_endless_axis(iblr.Target(log_density), q, found.log_evidence)


def test_coordinates_without_end_are_told_from_wide_ones():
    slab = lambda z: jnp.logaddexp(-0.5 * z[0] ** 2, -15 - 0.5 * (z[0] / 1e5) ** 2)  # noqa: E731
    assert along_axes(floored(-15.0))
    assert along_axes(floored(-15.0), 200)  # more coordinates than are looked along
    assert along_axes(lambda z: jnp.cos(z[0]) - 0.5 * (z[1:] ** 2).sum())  # a free angle
    assert along_axes(lambda z: jnp.exp(z[0] - 6) - 0.5 * (z**2).sum())  # beyond all bounds
    assert along_axes(lambda z: -0.5 * jnp.log1p(z**2).sum())
    assert not along_axes(lambda z: slab(z) - 0.5 * (z[1:] ** 2).sum())
    assert not along_axes(floored(-50.0))  # which nobody would ever see
    assert not along_axes(lambda z: -0.65 * jnp.log1p(z**2 / 0.3).sum())  # Student's t
    assert not along_axes(lambda z: jnp.where(z[0] > 15, jnp.nan, -0.5 * (z**2).sum()))


def test_looking_along_coordinates_is_counted():
    calls = []

    def counted(z):
        jax.debug.callback(lambda z: calls.append(1), z)
        return -0.5 * (z**2).sum()

    posterior = fit(counted, init=jnp.zeros(3))
    jax.effects_barrier()
    assert len(calls) == posterior.num_gradients

"""Other regions: where they are looked for, and what is said of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from automatic_helpers import KEY, curved, fit, two_modes
from helpers import slow

import iblr
from iblr import climbs, diagnosis, regression


@pytest.fixture(scope="module")
def fitted():
    return fit()


def test_a_second_mode_far_away_is_found_and_makes_the_verdict_bad():
    posterior = fit(two_modes)
    (mode,) = posterior.diagnosis.modes
    assert abs(mode.log_mass) < 0.2 and abs(mode.distance - 16 * np.sqrt(2)) < 0.1
    np.testing.assert_allclose(mode.family.mean, -posterior.mean, atol=0.1)
    assert posterior.verdict.startswith("Bad: another region") and "50 %" in posterior.verdict
    found = posterior.diagnosis
    assert found.climb_gradients > 0
    assert f"({found.climb_gradients} of them from {found.climbs} dispersed starts)" in str(
        posterior
    )


def test_a_second_look_keeps_the_modes_that_were_found():
    posterior = fit(two_modes, init=jnp.full(1, 8.0))
    again = iblr.diagnose(posterior, two_modes, key=jax.random.key(5), draws=2000)
    assert posterior.verdict.startswith("Bad: another region")
    assert again.verdict.startswith("Bad: another region")
    assert again.diagnosis.climbs == posterior.diagnosis.climbs and again.diagnosis.modes


@pytest.mark.parametrize(
    "dim, apart, width",
    [(2, 0.0, 8.0), slow(10, 0.0, 5.0), slow(50, 7.0, 1.0), slow(100, 9.5, 1.0)],
)
def test_neither_a_wider_region_nor_one_that_is_near_is_missed(dim, apart, width):
    def log_density(z):
        far = z.at[0].add(-apart)
        other = -0.5 * (far**2).sum() / width**2 - dim * jnp.log(width)
        return jnp.logaddexp(-0.5 * (z**2).sum(), other)

    posterior = fit(log_density, init=jnp.zeros(dim))
    assert posterior.verdict.startswith("Bad") and "region" in posterior.verdict


def test_the_middle_of_two_modes_is_left():
    """There the gradients of a pair cancel to the last bit, and the mean would never move."""
    exactly = lambda z: jnp.logaddexp(-0.5 * (jnp.abs(z[0]) - 9) ** 2, -1e9)  # noqa: E731
    posterior = fit(exactly, init=jnp.zeros(1), tol=0.1)
    assert abs(float(posterior.mean[0])) == pytest.approx(9, abs=0.1)


def test_a_bound_is_on_what_is_near_where_there_is_another_mode():
    fitted = fit(
        lambda z: jnp.logaddexp(-0.5 * (z[0] - 8) ** 2, -0.5 * (z[0] + 8) ** 2), init=jnp.zeros(1)
    )
    assert fitted.diagnosis.modes and "nats below the best Gaussian near this one" in str(fitted)


def test_a_mode_is_what_q_lacks_there():
    mode = diagnosis.Mode(5.0, np.log(0.4))
    assert mode.without(-np.inf) == mode
    assert mode.without(np.log(0.1)).log_mass == pytest.approx(np.log(0.3))
    assert mode.without(np.log(0.3)) is None and mode.without(np.log(0.9)) is None


def test_dispersed_starts_lie_in_orthogonal_directions_on_both_sides():
    q = iblr.Gaussian.from_covariance(jnp.ones(5), 4 * jnp.eye(5))
    ways = (np.stack(climbs._starts(q, KEY)) - 1) / 2
    lengths = np.linalg.norm(ways, axis=1) / np.sqrt(5)
    np.testing.assert_allclose(lengths, [10] * 6 + [3] * 2 + [40] * 4, rtol=1e-5)
    np.testing.assert_allclose(ways[::2], -ways[1::2], rtol=1e-4)
    np.testing.assert_allclose(ways[[0, 2, 4]] @ ways[[0, 2, 4]].T / 500, np.eye(3), atol=1e-5)


def test_in_many_dimensions_there_are_fewer_starts():
    assert len(climbs._starts(iblr.Gaussian.standard(201), KEY)) == 4


def test_draws_that_rounding_has_made_one_point_are_noticed():
    assert climbs.is_one_point(iblr.Gamma(jnp.array([1e-6]), 1.0), KEY)
    assert not climbs.is_one_point(iblr.Gamma.standard(2), KEY)
    assert not climbs.is_one_point(iblr.DiagonalGaussian.standard(50_000), KEY)  # in little memory


@pytest.mark.slow
def test_positive_numbers_are_looked_around_from_by_their_logarithms():
    q = iblr.Product({"a": iblr.Gamma(jnp.array([4.0, 9.0]), 2.0), "b": iblr.Gaussian.standard(1)})
    around = climbs.surroundings(q, KEY)
    points = q.sample(jax.random.key(1), 4000)
    rows = np.concatenate([np.log(points["a"]), points["b"]], axis=1)
    np.testing.assert_allclose(around.mean, rows.mean(0), atol=0.2)
    np.testing.assert_allclose(around.covariance, np.cov(rows.T), atol=0.2)
    drawn = around.sample(KEY, 5)
    assert drawn["a"].shape == (5, 2) and bool((drawn["a"] > 0).all())


def test_a_look_around_ends_in_time(fitted):
    around = climbs.surroundings(fitted.family, KEY)
    seen = climbs.look_around(iblr.Target(curved), fitted.family, around, 0.0, KEY, 10**6, 0.0)
    assert (seen.climbs, seen.left_out, seen.gradients) == (0, 10, 0)


def test_a_climb_ends_in_time_and_does_not_count(fitted, monkeypatch):
    target = iblr.Target(lambda z: -0.5 * ((z - 1e3) ** 2).sum())  # no climb comes back
    around = climbs.surroundings(fitted.family, KEY)
    monkeypatch.setattr(climbs.time, "perf_counter", map(float, itertools.count()).__next__)
    seen = climbs.look_around(target, fitted.family, around, -1e3, KEY, 10**6, 2.5)
    stretches = 2  # one look at the clock before the climb, one before each stretch
    per_batch = 2 * regression.num_pairs(2)
    assert seen.modes == () and (seen.climbs, seen.left_out) == (0, 10)
    assert seen.gradients == stretches * climbs.AT_ONCE * per_batch


def test_a_climb_that_may_still_come_back_is_given_time(monkeypatch):
    log_density = lambda z: -jnp.sqrt(1 + z**2).sum()  # noqa: E731
    fitted = fit(log_density)
    around, target = climbs.surroundings(fitted.family, KEY), iblr.Target(log_density)
    far = lambda: climbs.look_around(target, fitted.family, around, -1e3, KEY, 10**6)  # noqa: E731
    monkeypatch.setattr(climbs, "PATIENCE", 4)
    assert far().modes == ()
    monkeypatch.setattr(climbs, "AGAIN", 0)
    assert far().modes

"""A posterior in pictures and in other libraries' hands."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from matplotlib import pyplot

import iblr

KEY = jax.random.key(0)


def target(z):
    """a ~ N(1, 1) twice, and log tau with tails lighter than a Gaussian's."""
    t = jnp.log(z["tau"])
    return -0.5 * ((z["a"] - 1) ** 2).sum() - 0.5 * t**2 - 0.02 * t**4 - t


@pytest.fixture(scope="module")
def posterior():
    start = iblr.Gaussian.standard(
        like={"a": jnp.zeros(2), "tau": 1.0}, support={"tau": iblr.positive}
    )
    return iblr.fit(target, start, key=KEY, num_steps=200)


@pytest.fixture(scope="module")
def diagnosed(posterior):
    return iblr.diagnose(posterior, target, key=jax.random.key(4))


@pytest.fixture(autouse=True)
def no_window():
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


# Pictures.


def test_the_trace_shows_every_look_at_the_elbo(posterior):
    figure = posterior.plot_trace()
    (axis,) = figure.axes
    np.testing.assert_allclose(axis.lines[0].get_ydata(), posterior.trace.elbo)
    low, high = axis.get_ylim()
    assert low < float(posterior.elbo) < high


def test_pairs_have_ellipses_that_hold_what_a_gaussian_says(posterior):
    figure = posterior.plot_pairs(key=KEY, draws=4000)
    assert len(figure.axes) == 9
    axis = figure.axes[3]  # the second row, the first column
    inner, outer = (np.stack(line.get_data(), 1) for line in axis.lines)
    points = np.asarray(axis.collections[0].get_offsets())
    for curve, radius in ((inner, 1.0), (outer, 2.0)):
        inside = matplotlib.path.Path(curve).contains_points(points).mean()
        assert inside == pytest.approx(1 - np.exp(-(radius**2) / 2), abs=0.035)
    bent = figure.axes[6].lines[1].get_ydata()  # tau against a[0]: all of it is positive
    assert bent.min() > 0 and bent.max() > 5


def test_corrected_draws_are_shown_where_weights_allow(diagnosed):
    overlaid = diagnosed.plot_pairs(["a[1]", "tau"], key=KEY, draws=200)
    assert len(overlaid.axes[2].collections) == 2
    assert overlaid.axes[2].get_xlabel() == "a[1]" and overlaid.axes[3].get_xlabel() == "tau"


def test_parameters_are_named_by_leaves_labels_or_positions(posterior):
    assert len(posterior.plot_pairs(["a"], key=KEY, draws=50).axes) == 4
    assert len(posterior.plot_pairs([-1], key=KEY, draws=50).axes) == 1
    with pytest.raises(ValueError, match="names 'b', which is not a parameter; there are a.0"):
        posterior.plot_pairs(["b"], key=KEY)


def test_a_posterior_with_a_verdict_needs_no_key_for_its_pictures(posterior, diagnosed):
    ones = [diagnosed.plot_pairs(["tau"], draws=50).axes[0] for _ in range(2)]
    heights = [[patch.get_path().vertices for patch in axis.patches] for axis in ones]
    np.testing.assert_array_equal(heights[0][0], heights[1][0])
    for call in (posterior.plot_pairs, posterior.to_arviz):
        with pytest.raises(ValueError, match=r"needs a key: `\w+\(key=...\)`"):
            call()


# NUTS.


def test_a_warm_start_has_the_coordinates_and_the_metric_of_q(posterior):
    warm = posterior.to_nuts(target, key=KEY, chains=5)
    flat, _ = ravel_pytree(warm.position)
    np.testing.assert_allclose(flat, posterior.family.mean)
    np.testing.assert_allclose(warm.inverse_mass_matrix, posterior.covariance, rtol=1e-5)
    assert {name: x.shape for name, x in warm.positions.items()} == {"a": (5, 2), "tau": (5,)}
    assert float(warm.positions["tau"].min()) < 1  # coordinates, not points
    assert bool((warm.constrain(warm.positions)["tau"] > 0).all())
    at = {"a": jnp.array([1.0, 1.0]), "tau": jnp.array(0.7)}  # the Jacobian takes away the -t
    assert warm.log_density(at) == pytest.approx(-0.5 * 0.7**2 - 0.02 * 0.7**4, rel=1e-5)


def test_a_warm_start_without_a_target_or_chains(posterior):
    warm = posterior.to_nuts()
    assert warm.log_density is None and warm.positions is None
    assert warm.step_size == pytest.approx(1.5 * 3**-0.25)
    with pytest.raises(ValueError, match="needs both or neither, but got only `chains`"):
        posterior.to_nuts(chains=3)


def test_a_family_of_positive_numbers_is_no_start_for_nuts(posterior):
    with pytest.raises(ValueError, match="real coordinates.*but got a Gamma"):
        dataclasses.replace(posterior, family=iblr.Gamma.standard(2)).to_nuts()


# ArviZ.


def test_without_arviz_the_error_says_what_to_install(posterior, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="iblr.arviz"):
        posterior.to_arviz(KEY, draws=2)


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("arviz_base", "arviz")),
    reason="needs the extra iblr[arviz], over 100 MB with pandas and xarray",
)
def test_arviz_gets_named_draws_and_the_verdict(diagnosed):
    group = diagnosed.to_arviz(KEY, draws=50, chains=2)["posterior"]
    assert group["a"].shape == (2, 50, 2) and group["tau"].shape == (2, 50)
    assert float(group["tau"].min()) > 0
    assert group.attrs["verdict"] == diagnosed.verdict and group.attrs["khat"] == diagnosed.khat
    np.testing.assert_array_equal(
        diagnosed.to_arviz()["posterior"]["tau"], diagnosed.to_arviz()["posterior"]["tau"]
    )

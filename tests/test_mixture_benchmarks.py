"""The targets of the mixture benchmarks are what they say, and the scripts print their bars."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import betaln, logsumexp
from scipy.stats import multivariate_t
from test_benchmarks import BENCHMARKS, run


@pytest.fixture(scope="module", autouse=True)
def found_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["banana-0.03", "banana-0.1", "double-banana", "bnn", "laplace", "star", "beta-binomial"],
)
def test_the_quadrature_of_a_plane_target_gives_its_constant(name):
    target = importlib.import_module("iblr.reproduce.plane_targets").TARGETS[name]
    points, weights = target.nodes()
    log_z = logsumexp(target.evaluate(points), b=weights)
    assert abs(log_z - target.log_z) < 1e-5


@pytest.mark.slow
def test_the_beta_binomial_has_the_digits_of_double_precision():
    module = importlib.import_module("iblr.reproduce.plane_targets")
    target, y, n = module.TARGETS["beta-binomial"], module.DEATHS, module.PEOPLE
    z = np.random.default_rng(0).uniform(*np.array(target.box).T, size=(200, 2))
    logit, log_precision = (z + module.CITIES).T[:, :, None]
    m, M = 1 / (1 + np.exp(-logit)), np.exp(log_precision)
    exact = (betaln(M * m + y, M * (1 - m) + n - y) - betaln(M * m, M * (1 - m))).sum(1)
    exact = exact + (log_precision - 2 * np.log1p(M))[:, 0]
    single = jax.vmap(target.log_density)(jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(single, exact, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shape_matrices", [False, True])
def test_the_mixture_of_t_is_that_of_scipy(shape_matrices):
    make = importlib.import_module("iblr.reproduce.student_mixture").StudentMixture.make
    target = make(jax.random.key(0), 5, 3, 4.0, shape_matrices)
    z = np.random.default_rng(0).uniform(-4, 4, size=(20, 5))
    each = []
    for mode, root in zip(np.asarray(target.modes), np.asarray(target.roots, float), strict=True):
        each.append(multivariate_t(mode, np.linalg.inv(root @ root.T), df=2).logpdf(z))
    exact = logsumexp(each, axis=0) - np.log(3)
    np.testing.assert_allclose(jax.vmap(target.log_density)(jnp.asarray(z)), exact, rtol=1e-4)


@pytest.mark.slow
def test_the_loop_in_numpy_takes_the_same_step():
    status, text, errors = run("mixtures.py", "--only", "speed", "--rounds", "1")
    assert status in (0, 1), errors  # the other bar is a time
    line = next(line for line in text.splitlines() if "difference of the two steps" in line)
    assert line.endswith("PASS")


@pytest.mark.slow
def test_the_benchmark_of_the_plane_judges_its_bars(tmp_path):
    out = tmp_path / "plane.txt"
    options = ["--targets", "laplace", "--seeds", "2", "--steps", "100", "--out", str(out)]
    status, text, errors = run("plane.py", *options, "--picture", str(tmp_path))
    assert status in (0, 1), errors
    assert "grown non-increasing within 0.01" in text and out.read_text() == text
    assert (tmp_path / "laplace.png").stat().st_size > 0

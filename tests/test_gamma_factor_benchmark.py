"""The Gamma factor benchmark: its reader, model, metric and verdict, and one quick run."""

import importlib
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import digamma, gammaln
from scipy import stats

import iblr

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def factor():
    return importlib.import_module("gamma_factor")


def test_log_likelihood_and_loss_are_those_of_a_gaussian(factor):
    rng = np.random.default_rng(1)
    W, rows = rng.gamma(1.0, size=(5, 5)), rng.normal(size=(7, 5))
    covariance = W @ W.T + 0.1 * np.eye(5)
    expected = stats.multivariate_normal(np.zeros(5), covariance).logpdf(rows)
    with jax.enable_x64(True):
        got = factor.of_rows(jnp.asarray(W), jnp.asarray(rows))
        root = jnp.asarray(np.linalg.cholesky(rows.T @ rows / 7))
        full = factor.Full(root, jnp.asarray(7.0))(jnp.asarray(W))
    assert float(got) == pytest.approx(expected.sum())
    assert float(full) == pytest.approx(expected.sum())
    loss = factor.log_loss(W @ W.T, rows.T @ rows / 7)
    assert loss == pytest.approx(-expected.mean())
    assert math.isnan(factor.log_loss(np.full((5, 5), np.nan), np.eye(5)))


@pytest.mark.slow
def test_gradients_at_the_papers_size_are_exact_enough_in_float32(factor):
    rng = np.random.default_rng(2)
    W = rng.gamma(1.0, size=(39, 39))
    root = np.linalg.cholesky(np.eye(39) + 0.5)

    def gradients(dtype):
        full = factor.Full(jnp.asarray(root, dtype), jnp.asarray(3e5, dtype))
        return np.asarray(jax.grad(full)(jnp.asarray(W, dtype)), np.float64)

    single = gradients(jnp.float32)
    with jax.enable_x64(True):
        double = gradients(jnp.float64)
    assert np.linalg.norm(single - double) < 1e-3 * np.linalg.norm(double)


def test_the_expected_outer_product_is_that_of_draws(factor):
    rng = np.random.default_rng(3)
    shape, rate = rng.uniform(0.3, 3, (4, 4)), rng.uniform(0.5, 2, (4, 4))
    W = rng.gamma(shape, 1 / rate, (20_000, 4, 4))
    products = W @ W.transpose(0, 2, 1)
    error = products.std(0) / math.sqrt(len(W))
    exact = factor.expected_outer(shape, rate)
    assert (np.abs(products.mean(0) - exact) < 4.5 * error).all()
    without_variances = (shape / rate) @ (shape / rate).T
    assert (np.abs(products.mean(0) - without_variances) > 4.5 * error).any()


@pytest.mark.slow
def test_the_gradient_of_adam_is_that_of_the_elbo(factor):
    """With a likelihood linear in W the ELBO is known: sum(C a / b) - KL."""
    rng = np.random.default_rng(4)
    C = jnp.asarray(rng.normal(size=(2, 3)), jnp.float32)
    prior = iblr.Gamma(jnp.ones((2, 3)), jnp.ones((2, 3)))
    target = iblr.Target(log_likelihood=lambda W: (C * W).sum(), prior=prior)
    shape, rate = (jnp.asarray(rng.uniform(0.5, 3, (2, 3)), jnp.float32) for _ in range(2))
    parameters = factor.unconstrain(shape, rate)
    for got, expected in zip(factor.constrain(parameters), (shape, rate), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)

    def exact(parameters):
        a, b = factor.constrain(parameters)
        kl = (a - 1) * digamma(a) - gammaln(a) + jnp.log(b) + a * (1 - b) / b
        return (kl - C * a / b).sum()

    function = jax.grad(partial(factor.neg_elbo, target=target, samples=20))
    keys = jax.random.split(jax.random.key(0), 200)
    gradients = jax.jit(jax.vmap(lambda key: function(parameters, key=key)))(keys)
    for noisy, expected in zip(gradients, jax.grad(exact)(parameters), strict=True):
        error = noisy.std(0) / math.sqrt(len(keys))
        assert (jnp.abs(noisy.mean(0) - expected) < 4 * error).all()


def test_the_synthetic_data_are_of_the_model(factor):
    data = factor.synthetic(seed=0, num_train=20_000, num_test=10_000)
    covariance = data.known_W @ data.known_W.T + 0.1 * np.eye(39)
    np.testing.assert_allclose(np.diag(covariance), 1)
    assert data.rows.shape == (20_000, 39) and data.rows.dtype == np.float32
    rows = np.float64(data.rows)
    np.testing.assert_allclose(data.train, rows.T @ rows / 20_000, rtol=1e-9)
    for moment, count in ((data.train, 20_000), (data.test, 10_000)):
        assert np.abs(moment - covariance).max() < 6 * math.sqrt(2 / count)


def made_up(factor, losses):
    """An outcome whose methods have these held-out losses after 100 iterations."""

    class Run:
        def __init__(self, loss):
            self.records = [factor.Record(100, 1.0, loss)]

        def at_iteration(self, iteration):
            return self.records[0] if iteration == 100 else None

    problem = factor.Problem("made up", None, None, None)
    return factor.Outcome(problem, {name: Run(x) for name, x in losses.items()}, {}, {})


@pytest.mark.parametrize(
    ("losses", "passed"),
    [((50.0, 51.0, 52.0), True), ((51.5, 51.0, 52.0), False), ((math.nan, 51.0, 52.0), False)],
)
def test_the_verdict_is_that_iblr_is_first(factor, losses, passed):
    outcome = made_up(factor, dict(zip(("iBLR", "BLR", "BBVI"), losses, strict=True)))
    ok, line = factor.verdict(outcome)
    assert ok == passed and line.endswith("PASS" if passed else "FAIL")


@pytest.mark.slow
def test_a_quick_run_prints_its_tables(tmp_path):
    out = tmp_path / "out.txt"
    options = ["--quick", "--problems", "synthetic full", "genuine batch", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gamma_factor.py"), *options],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = done.stdout
    assert done.returncode in (0, 1), text + done.stderr
    assert "pip download cytonormpy==1.0.2 --no-deps" in text
    verdicts = text[text.index("Verdicts") :].splitlines()
    assert verdicts[1].endswith("FAIL" if done.returncode else "PASS")
    assert verdicts[2].endswith("not measured")
    for title in ("Training ELBO", "by iterations", "by seconds", "Milliseconds an iteration"):
        assert text.count(title) == 1
    assert text.count("best at") == 3 and text.count("0 of 4 steps refused") == 3
    losses = next(line for line in text.splitlines() if line.startswith("  4 "))
    assert len(losses.split()) > 3 and "nan" not in losses
    assert out.read_text() == text

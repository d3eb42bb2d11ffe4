"""Targets for which the ELBO of every Gaussian is known, and that of the best one.

    python benchmarks/gaussian_targets.py               # the start's gap on each
    python benchmarks/gaussian_targets.py --references  # find the best Gaussians anew

Logistic regressions: the expected log likelihood of a row is an integral over its logit, taken by
Gauss-Hermite quadrature with 41 nodes. Eight schools, non-centred, with tau on a log scale: all
moments are those of a log-normal, but for the prior of tau, one quadrature. The best Gaussian is
found by L-BFGS on the exact ELBO in float64 over the mean and a Cholesky factor; what it reached,
the largest gradient left and how are in gaussian_references.json. Student's t with the shape matrix
R R': for x = |R^-1 (z - c)|^2 / df, a quadratic form whose Laplace transform is known under q,

    E log (1 + x) = int_0^inf (1 - E exp(-s x)) exp(-s) / s ds,

a trapezoidal sum over log s. By symmetry the best Gaussian is N(c, v R R'), v one number.

Three of the data sets come with scikit-learn, and are left out where it is not installed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize, minimize_scalar

import iblr

REFERENCES = Path(__file__).with_name("gaussian_references.json")
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclasses.dataclass(frozen=True)
class Problem:
    """A target over R^d, and the ELBO of N(mean, root root')."""

    name: str
    dim: int
    log_density: Callable
    elbo: Callable
    best: float | None = None

    def gap(self, family: iblr.Gaussian) -> float:
        """Nats below the best Gaussian."""
        best = self.best if self.best is not None else references()[self.name]["elbo"]
        mean, root = (np.asarray(x, np.float64) for x in (family.mean, family.factor.T))
        with jax.enable_x64(True):
            return best - float(jax.jit(self.elbo)(jnp.asarray(mean), jnp.asarray(root)))


@functools.cache
def references() -> dict:
    return json.loads(REFERENCES.read_text())


def entropy(root):
    d = len(root)
    return jnp.linalg.slogdet(root)[1] + 0.5 * d * (1 + math.log(2 * math.pi))


def logistic(name: str, features, labels) -> Problem:
    """Labels 0 and 1, prior N(0, I)."""
    x = np.asarray(features, np.float64) * (2 * np.asarray(labels) - 1)[:, None]
    d = x.shape[1]

    def log_density(w):
        return jax.nn.log_sigmoid(jnp.asarray(x, w.dtype) @ w).sum() - 0.5 * w @ w

    def elbo(mean, root):
        spread = jnp.sqrt(jnp.sum((x @ root) ** 2, axis=1))
        logits = (x @ mean)[:, None] + spread[:, None] * NODES
        prior = -0.5 * (mean @ mean + jnp.sum(root**2))
        return jnp.sum(jax.nn.log_sigmoid(logits) @ WEIGHTS) + prior + entropy(root)

    return Problem(name, d, log_density, elbo)


def gaussian(name: str, centre, precision) -> Problem:
    d = len(centre)

    def log_density(z):
        x = z - jnp.asarray(centre, z.dtype)
        return -0.5 * x @ jnp.asarray(precision, z.dtype) @ x

    def elbo(mean, root):
        x = mean - centre
        return -0.5 * (x @ precision @ x + jnp.sum((precision @ root) * root)) + entropy(root)

    log_det = np.linalg.slogdet(precision)[1]
    return Problem(name, d, log_density, elbo, 0.5 * (d * math.log(2 * math.pi) - log_det))


def student(name: str, centre, scale, df: float) -> Problem:
    """Student's t around `centre` with the shape matrix scale scale'."""
    d = len(centre)
    power, inverse = 0.5 * (df + d), np.linalg.inv(scale)
    step = 0.1
    s = np.exp(np.arange(-160, 5, step))[:, None]  # for standard deviations up to 1e30

    def log_density(z):
        x = jnp.asarray(inverse, z.dtype) @ (z - jnp.asarray(centre, z.dtype))
        return -power * jnp.log1p(x @ x / df)

    def expected(variances, squares):
        """E log (1 + x) for x = sum_i y_i^2 / df, y_i independent Gaussians."""
        scaled = 1 + 2 * s * variances / df
        log_transform = -jnp.sum(0.5 * jnp.log(scaled) + s / df * squares / scaled, axis=1)
        return -step * jnp.sum(jnp.expm1(log_transform) * jnp.exp(-s[:, 0]))

    def elbo(mean, root):
        spread = inverse @ root
        variances, turn = jnp.linalg.eigh(spread @ spread.T)
        way = turn.T @ (inverse @ (mean - centre))
        return -power * expected(variances, way**2) + entropy(root)

    def of_scale(log_v):
        with jax.enable_x64(True):
            cost = float(expected(np.full(d, math.exp(log_v)), np.zeros(d)))
        return power * cost - 0.5 * d * log_v

    found = minimize_scalar(of_scale, (-1.0, 1.0), tol=1e-10)
    constant = np.linalg.slogdet(scale)[1] + 0.5 * d * (1 + math.log(2 * math.pi))
    return Problem(name, d, log_density, elbo, constant - found.fun)


def quartic(dim: int) -> Problem:
    """exp(-z^4), tails lighter than a Gaussian's: the best one is N(0, I / sqrt(12))."""

    def elbo(mean, root):
        v = jnp.sum(root**2, axis=1)
        return -jnp.sum(3 * v**2 + 6 * v * mean**2 + mean**4) + entropy(root)

    best = dim * (-0.25 - 0.25 * math.log(12) + 0.5 * (1 + math.log(2 * math.pi)))
    return Problem(f"exp(-z^4), d = {dim}", dim, lambda z: -jnp.sum(z**4), elbo, best)


def log_exponential(dim: int) -> Problem:
    """Logarithms of exponential numbers, skew: the best Gaussian is N(-1/2, I)."""

    def elbo(mean, root):
        v = jnp.sum(root**2, axis=1)
        return jnp.sum(mean - jnp.exp(mean + v / 2)) + entropy(root)

    best = dim * (-1.5 + 0.5 * (1 + math.log(2 * math.pi)))
    return Problem(
        f"log exponential, d = {dim}", dim, lambda z: jnp.sum(z - jnp.exp(z)), elbo, best
    )


SCORES = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])  # of eight schools
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])


def schools() -> Problem:
    def log_density(z):
        y, sigma = jnp.asarray(SCORES, z.dtype), jnp.asarray(ERRORS, z.dtype)
        theta, mu, log_tau = z[:8], z[8], z[9]
        tau = jnp.exp(log_tau)
        likelihood = -0.5 * jnp.sum(((y - mu - tau * theta) / sigma) ** 2)
        prior = -0.5 * (theta @ theta + (mu / 5) ** 2) - jnp.log1p((tau / 5) ** 2)
        return likelihood + prior + log_tau

    def elbo(mean, root):
        y, sigma = np.array(SCORES), np.array(ERRORS)  # own copies: JAX keeps constants by object
        cov = root @ root.T
        mu, log_tau, variance = mean[8], mean[9], cov[9, 9]
        # E[tau^k f] is E[tau^k] times the mean of f under the Gaussian shifted by k cov[:, 9].
        first, second = jnp.exp(log_tau + variance / 2), jnp.exp(2 * log_tau + 2 * variance)
        once, twice = mean[:8] + cov[:8, 9], mean[:8] + 2 * cov[:8, 9]
        mu_once = mu + cov[8, 9]
        square = (
            (y - mu) ** 2 + cov[8, 8]
            + second * (twice**2 + jnp.diagonal(cov)[:8])
            - 2 * first * (y * once - once * mu_once - cov[:8, 8])
        )  # fmt: skip
        taus = jnp.exp(log_tau + jnp.sqrt(variance) * NODES)
        prior = -0.5 * (mean[:8] @ mean[:8] + jnp.trace(cov[:8, :8]) + (mu**2 + cov[8, 8]) / 25)
        prior = prior - jnp.log1p((taus / 5) ** 2) @ WEIGHTS + log_tau
        return -0.5 * jnp.sum(square / sigma**2) + prior + entropy(root)

    return Problem("eight schools, non-centred", 10, log_density, elbo)


def with_intercept(features):
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def standardised(features):
    return (features - features.mean(0)) / features.std(0)


def problems() -> list[Problem]:
    """All of them, or those that need no scikit-learn."""
    rng = np.random.default_rng(0)
    found = []
    for d in (100, 500):
        basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
        precision = (basis * np.logspace(-2, 2, d)) @ basis.T
        found.append(gaussian(f"Gaussian, d = {d}", rng.normal(size=d), precision))
    basis = np.linalg.qr(rng.normal(size=(50, 50)))[0]
    scale = basis * np.logspace(-1, 1, 50)
    found.append(student("Student's t, d = 50", rng.normal(size=50), scale, 5.0))
    found.append(schools())
    ionosphere = iblr.datasets.ionosphere()
    found.append(logistic("Ionosphere", with_intercept(ionosphere.x), ionosphere.y > 0))
    if importlib.util.find_spec("sklearn") is None:
        return found
    from sklearn import datasets

    x, y = datasets.load_breast_cancer(return_X_y=True)
    found.append(logistic("breast cancer", with_intercept(standardised(x)), y))
    x, y = datasets.load_diabetes(return_X_y=True)
    x, y = standardised(x), standardised(y)
    precision = x.T @ x / 0.5 + np.eye(10)  # noise of variance 1/2, about that of the residuals
    found.append(gaussian("diabetes", np.linalg.solve(precision, x.T @ y / 0.5), precision))
    x, y = datasets.load_digits(return_X_y=True)
    kept = (y == 3) | (y == 8)
    found.append(logistic("digits 3 and 8", with_intercept(x[kept] / 16), y[kept] == 8))
    return found


def find_best(problem: Problem) -> dict:
    d = problem.dim
    rows, columns = np.tril_indices(d)
    diagonal = jnp.asarray(rows == columns)

    def loss(theta):
        entries = jnp.where(diagonal, jnp.exp(jnp.where(diagonal, theta[d:], 0)), theta[d:])
        return -problem.elbo(theta[:d], jnp.zeros((d, d)).at[rows, columns].set(entries))

    both = jax.jit(jax.value_and_grad(loss))
    theta = np.zeros(d + len(rows))
    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 1e-15, "gtol": 1e-9}
    for _ in range(6):
        result = minimize(
            lambda t: [np.asarray(part, float) for part in both(t)],
            theta, jac=True, method="L-BFGS-B", options=options,
        )  # fmt: skip
        theta = result.x
    return {
        "elbo": -float(result.fun),
        "largest_gradient": float(np.abs(result.jac).max()),
        "how": "L-BFGS from N(0, I) on the exact ELBO (quadrature), float64, restarted six times",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--references", action="store_true")
    if parser.parse_args().references:
        with jax.enable_x64(True):
            found = {p.name: find_best(p) for p in problems() if p.best is None}
        kept = references() if REFERENCES.exists() else {}
        REFERENCES.write_text(json.dumps(kept | found, indent=1) + "\n")
        references.cache_clear()
    for problem in problems():
        start = iblr.Gaussian.standard(problem.dim)
        print(f"{problem.name:28s} d = {problem.dim:3d}   N(0, I) lacks {problem.gap(start):9.3f}")


if __name__ == "__main__":
    main()

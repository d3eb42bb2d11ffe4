"""The Gamma factor model ([LSK20] figure 4c): likelihood, held-out loss and data.

Rows y_n ~ N(0, W W' + 0.1 I) with loadings W > 0, 39 by 39, each w ~ Ga(shape 1, rate 1) a priori.
The likelihood needs only YY' and the number of rows. Data:

    genuine    6000 cells, 39 channels of mass cytometry (`iblr.datasets.cytometry`); 4500 to train,
               1500 to test, split at random.
    synthetic  of the paper's size, 300 000 to train and 222 656 to test, drawn from the model at a
               known W of Ga(0.25, 1) entries with rows scaled to |w|^2 = 0.9, so that every column
               has variance 1; not standardised beyond that.
    cytof      the paper's own, where the user has the file: the first 300 000 cells to train, every
               channel standardised over all.
"""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

import iblr

D = 39
NOISE = 0.1
PRIOR_SHAPE, PRIOR_RATE = 1.0, 1.0
NUM_TRAIN, NUM_TEST = 300_000, 222_656
NUM_GENUINE_TRAIN = 4500
ELBO_DRAWS = 100


def log_likelihood(W: jax.Array, columns: jax.Array, count: float | jax.Array) -> jax.Array:
    """Of `count` observations of which YY' = columns @ columns.T."""
    L = jnp.linalg.cholesky(W @ W.T + NOISE * jnp.eye(len(W), dtype=W.dtype))
    X = solve_triangular(L, columns, lower=True)
    log_det = jnp.log(jnp.diagonal(L)).sum()
    return -count * (log_det + 0.5 * len(W) * math.log(2 * math.pi)) - 0.5 * jnp.sum(X * X)


def expected_outer(shape: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """E_q[W W']: products of means, and on the diagonal the variances too."""
    mean, variance = shape / rate, shape / rate**2
    return mean @ mean.T + np.diag(variance.sum(1))


def log_loss(outer: np.ndarray, second_moment: np.ndarray) -> float:
    """-mean log N(y | 0, outer + 0.1 I) over rows y of which mean y y' = second_moment; float64."""
    covariance = np.asarray(outer, np.float64) + NOISE * np.eye(len(outer))
    if not np.isfinite(covariance).all():
        return math.nan
    sign, log_det = np.linalg.slogdet(covariance)
    trace = np.trace(np.linalg.solve(covariance, second_moment))
    dim = len(covariance)
    return float(0.5 * (dim * math.log(2 * math.pi) + log_det + trace)) if sign > 0 else math.nan


class Data(NamedTuple):
    """Training rows, and mean y y' of training and test rows in float64."""

    rows: np.ndarray
    train: np.ndarray
    test: np.ndarray
    known_W: np.ndarray | None = None


def genuine(path: Any = None, seed: int = 0) -> Data:
    """A random split of the cells that stand in for the paper's."""
    cells = iblr.datasets.cytometry(path).x
    order = np.random.default_rng(seed).permutation(len(cells))
    train, test = cells[order[:NUM_GENUINE_TRAIN]], cells[order[NUM_GENUINE_TRAIN:]]
    moments = train.T @ train / len(train), test.T @ test / len(test)
    return Data(train.astype(np.float32), *moments)


def cytof(path: Any = None) -> Data:
    """The paper's own cells and split."""
    cells = iblr.datasets.cytof(path).x
    cells = (cells - cells.mean(0)) / cells.std(0)
    train, test = cells[:NUM_TRAIN], cells[NUM_TRAIN:]
    moments = train.T @ train / len(train), test.T @ test / len(test)
    return Data(train.astype(np.float32), *moments)


def synthetic(seed: int, num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> Data:
    """Rows of the model at a known W; of the test rows only mean y y' is kept."""
    rng = np.random.default_rng(seed)
    W = rng.gamma(0.25, size=(D, D))
    W *= np.sqrt((1 - NOISE) / np.sum(W**2, axis=1, keepdims=True))

    def draw(count: int) -> np.ndarray:
        factors = rng.standard_normal((count, D), np.float32) @ W.T.astype(np.float32)
        noise = rng.standard_normal((count, D), np.float32)
        return factors + np.float32(math.sqrt(NOISE)) * noise

    def second_moment(rows: np.ndarray) -> np.ndarray:
        parts = (part.astype(np.float64) for part in np.array_split(rows, 50))
        return np.sum([part.T @ part for part in parts], axis=0)

    rows = draw(num_train)
    train = second_moment(rows) / num_train
    return Data(rows, train, second_moment(draw(num_test)) / num_test, W)


class Full(eqx.Module):
    """The log likelihood of all rows: that of their mean y y', times N, so that float32 will do."""

    columns: jax.Array
    count: jax.Array

    def __call__(self, W: jax.Array) -> jax.Array:
        """Of one W."""
        return self.count * log_likelihood(W, self.columns, 1.0)


def of_rows(W: jax.Array, rows: jax.Array) -> jax.Array:
    """The log likelihood of rows."""
    return log_likelihood(W, rows.T, float(len(rows)))


def make_prior() -> iblr.Gamma:
    """Ga(1, 1) for every loading."""
    ones = jnp.ones((D, D))
    return iblr.Gamma(PRIOR_SHAPE * ones, PRIOR_RATE * ones)


@jax.jit
def training_elbo(
    shape: jax.Array, rate: jax.Array, columns: jax.Array, count: jax.Array, key: jax.Array
) -> jax.Array:
    """In nats a row, with all rows."""
    q = iblr.Gamma(shape, rate)
    values = jax.vmap(lambda W: log_likelihood(W, columns, 1.0))(q.sample(key, ELBO_DRAWS))
    return values.mean() - q.kl(make_prior()) / count

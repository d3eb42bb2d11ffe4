"""What the tests of fits without settings share: targets, and the call itself."""

import jax
import jax.numpy as jnp
import numpy as np

import iblr

KEY = jax.random.key(0)


def curved(z):
    """The logarithms of exponential numbers: the best Gaussian is N(-1/2, I)."""
    return (z - jnp.exp(z)).sum()


def gap(q):
    m, v = np.asarray(q.mean, float), np.diag(np.asarray(q.covariance, float))
    elbo = (m - np.exp(m + v / 2)).sum() + 0.5 * np.linalg.slogdet(np.asarray(q.covariance, float))[
        1
    ]
    return -1.5 * len(m) - elbo


def fit(target=curved, **options):
    return iblr.fit(target, **({"init": jnp.zeros(2), "key": KEY} | options))


def separable(z):
    """Logistic regression with a flat prior on one direction, in which the data are separable."""
    along, across = z[0] + z[1], z[0] - z[1]
    return jax.nn.log_sigmoid(5 * along) + jax.nn.log_sigmoid(2 * along) - 0.5 * across**2


def two_modes(z):
    return jnp.logaddexp(-0.5 * ((z - 8) ** 2).sum(), -0.5 * ((z + 8) ** 2).sum())

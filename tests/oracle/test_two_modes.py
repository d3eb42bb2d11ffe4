"""A posterior with two mirror modes of equal weight: a mixture model whose labels may be swapped.

    y_i ~ theta N(mu_1, sigma_1) + (1 - theta) N(mu_2, sigma_2)
    mu ~ N(0, 2),  sigma ~ half-N(0, 2),  theta ~ Beta(5, 5)

A fit misses a mode where all components of its start climb to the other one, which becomes rare
with their number: about one fit in two hundred for eight, none in four hundred for twelve.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow

import iblr

SEEDS = 10


def log_likelihood(z, y):
    """Of all observations."""
    first, second = (
        -0.5 * ((y[:, None] - z["mu"]) / z["sigma"]).T ** 2 - jnp.log(z["sigma"])[:, None]
    )
    return jnp.logaddexp(jnp.log(z["theta"]) + first, jnp.log1p(-z["theta"]) + second).sum()


def log_prior(z):
    """Symmetric in the labels."""
    squares = (z["mu"] ** 2).sum() + (z["sigma"] ** 2).sum()
    return -squares / 8 + 4 * (jnp.log(z["theta"]) + jnp.log1p(-z["theta"]))


def observations(seed, theta, mu, sigma):
    """200 draws of the model, those of the second group with probability 1 - theta."""
    rng = np.random.default_rng(seed)
    group = (rng.random(200) > theta).astype(int)
    return jnp.asarray(rng.normal(np.array(mu)[group], np.array(sigma)[group]))


def start(key):
    """Twelve components around mu = (0, 0), sigma = (1, 1), theta = 1/2."""
    like = {"mu": jnp.zeros(2), "sigma": jnp.ones(2), "theta": jnp.array(0.5)}
    support = {"sigma": iblr.positive, "theta": iblr.interval(0, 1)}
    return iblr.GaussianMixture.init(key, 12, like=like, support=support)


@pytest.mark.parametrize(
    "seed, theta, mu, sigma",
    [slow(0, 0.4, (-2.75, 2.75), (1.0, 1.0)), slow(1, 0.5, (-1.5, 1.5), (1.0, 0.7))],
    ids=["far apart", "overlapping"],
)
def test_both_labellings_are_found(seed, theta, mu, sigma):
    y = observations(seed, theta, mu, sigma)
    target = iblr.Target(log_likelihood=log_likelihood, data=y, prior=log_prior)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    posterior = iblr.fit(target, jax.vmap(start)(keys), key=keys)
    assert (posterior.status == iblr.Status.ok).all()
    weights = jnp.exp(posterior.family.log_weights)
    means = posterior.family.components.mean[..., :2]
    sides = means[..., 0] < means[..., 1]
    for side, expected in ((sides, mu), (~sides, mu[::-1])):
        mass = (weights * side).sum(1)
        np.testing.assert_allclose(mass, 0.5, atol=0.05)
        centres = ((weights * side)[..., None] * means).sum(1) / mass[:, None]
        np.testing.assert_allclose(centres, np.broadcast_to(expected, (SEEDS, 2)), atol=0.4)

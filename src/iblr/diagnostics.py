"""How good is the approximation: the ELBO with its standard error."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from iblr.families.base import AbstractFamily
from iblr.target import Target, as_target

LARGEST_BATCH = 32


class Elbo(NamedTuple):
    """An estimate of the evidence lower bound (higher is better) and its standard error."""

    value: Float[Array, ""]
    standard_error: Float[Array, ""]


def elbo(
    target: Target | Callable, family: AbstractFamily, key: Key[Array, ""], *, draws: int = 1000
) -> Elbo:
    """E_q[log p(z) - log q(z)] from `draws` draws.

    The entropy of q (but for a family that has no closed form of it), and the term of a prior that
    is a family, are known exactly: they serve as a control variate whose coefficient is fitted to
    the draws. So the noise vanishes both where the target is all prior and where q is the
    posterior. With minibatches every draw takes its own, and the standard error includes their
    noise.

    A mixture takes its steps from the draws at which the target is finite. What counts for it is
    the ELBO of q restricted to those, which adds the logarithm of their share.

    Example:
        >>> import iblr, jax
        >>> target = iblr.Target(lambda z: -0.5 * (z**2).sum())
        >>> estimate = iblr.elbo(target, iblr.Gaussian.standard(2), jax.random.key(0))
        >>> round(float(estimate.value), 3)                               # log 2 pi
        1.838
    """
    target = as_target(target, "elbo")
    if draws < 3:
        raise ValueError(f"`elbo(draws=...)` must be at least 3, but got {draws}.")
    draw_key, batch_key = jax.random.split(key)
    rows, log_q = family.sample_with_log_prob(draw_key, draws)

    def evaluate(row_and_key):
        row, key = row_and_key
        return target.sampled(family.structure, target.batch(key))(row)

    keys = jax.random.split(batch_key, draws)
    # A batch that divides the draws, as a remainder would be compiled a second time.
    size = max(size for size in range(1, LARGEST_BATCH + 1) if draws % size == 0)
    sampled = jax.lax.map(evaluate, (rows, keys), batch_size=size if size > 7 else LARGEST_BATCH)
    known, expectation = -log_q, family.entropy()
    if target.exact_prior is not None:
        prior, weight = target.exact_prior, (1 / target.temperature).astype(rows.dtype)
        known = known + weight * prior.log_prob_rows(rows)
        if expectation is not None:
            expectation = expectation + weight * prior.expected_log_prob(family)
    if expectation is None:
        terms = sampled + known
        fine = jnp.isfinite(terms) if family.leaves_out_draws else jnp.ones(draws, bool)
        count = jnp.where(fine.sum() > 1, fine.sum(), jnp.nan).astype(terms.dtype)
        share = count / draws
        variance = terms.var(where=fine) / (count - 1) + (1 - share) / count
        return Elbo(terms.mean(where=fine) + jnp.log(share), jnp.sqrt(variance))
    deviation = known - expectation
    spread = jnp.var(deviation)
    slope = jnp.mean((sampled - sampled.mean()) * deviation) / jnp.where(spread > 0, spread, 1)
    terms = sampled - slope * deviation + expectation
    return Elbo(terms.mean(), terms.std() / jnp.sqrt(draws - 2))

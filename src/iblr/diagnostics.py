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
    return estimate(target, family, look(target, family, key, draws))


class Look(NamedTuple):
    """The target at draws from q.

    Attributes:
        rows: the draws, flat coordinates.
        log_q: log q there.
        sampled: log p there but for a prior that is a family.
        prior: the term of such a prior; 0 where there is none.
    """

    rows: Float[Array, "n d"]
    log_q: Float[Array, " n"]
    sampled: Float[Array, " n"]
    prior: Float[Array, " n"]


def draw(
    family: AbstractFamily, key: Key[Array, ""], draws: int
) -> tuple[Float[Array, "n d"], Float[Array, " n"]]:
    """The draws at which `look` looks, and log q at them."""
    return family.sample_with_log_prob(jax.random.split(key)[0], draws)


def look(target: Target, family: AbstractFamily, key: Key[Array, ""], draws: int) -> Look:
    """Evaluate the target at draws from q, each with a minibatch of its own."""
    rows, log_q = draw(family, key, draws)

    def evaluate(row_and_key):
        row, key = row_and_key
        batch = target.data if key is None else target.batch(key)
        return target.sampled(family.structure, batch)(row)

    # Without minibatches there are no keys, as they take long to compile.
    split = jax.random.split
    keys = split(split(key)[1], draws) if target.is_stochastic else None
    # A batch that divides the draws, as a remainder would be compiled a second time.
    size = max(size for size in range(1, LARGEST_BATCH + 1) if draws % size == 0)
    sampled = jax.lax.map(evaluate, (rows, keys), batch_size=size if size > 7 else LARGEST_BATCH)
    prior = jnp.zeros_like(log_q)
    if target.exact_prior is not None:
        weight = (1 / target.temperature).astype(rows.dtype)
        prior = weight * target.exact_prior.log_prob_rows(rows)
    return Look(rows, log_q, sampled, prior)


def estimate(target: Target, family: AbstractFamily, seen: Look) -> Elbo:
    """The ELBO from a look at the target; see `elbo`."""
    rows, log_q, sampled, prior = seen
    draws = len(rows)
    known, expectation = prior - log_q, family.entropy()
    if target.exact_prior is not None and expectation is not None:
        weight = (1 / target.temperature).astype(rows.dtype)
        expectation = expectation + weight * target.exact_prior.expected_log_prob(family)
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

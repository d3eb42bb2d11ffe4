"""How a mixture adapts the number of its components between rounds of a fit.

A component of small weight e with density h changes the ELBO by e (E_h[log p - log q] - ELBO), so
there is something to gain where log p - log q is above its mean under q. New components start at
draws of the missing mass (p - q)_+, found by importance sampling from q, a widened q, and what the
start was drawn from: with s the mean of their densities, and p normalised by its own weights, a
draw of s is taken with probability proportional to (p - q)_+ / s. Each begins with half the
standard deviations of the component that is responsible for its place. A quarter of the new ones
look elsewhere: they begin as the components of the start did, and climb to modes that q does not
know of.

The mass of (p - q)_+ is the total-variation distance of q from p; the new components share that
much weight, within bounds. What is negligible after a round is deleted.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int, Key

from iblr.families.diagonal import DiagonalGaussian
from iblr.families.mixture_components import centred, scattered

FIRST_COMPONENTS = 8
MOST_COMPONENTS = 64
NEGLIGIBLE_WEIGHT = 1e-3
CANDIDATES = 512
WIDENING = 2.0
NARROWING = 0.5
LEAST_SHARE, LARGEST_SHARE = 0.1, 0.5
SCOUTING = 0.25


class Growth(eqx.Module):
    """What a mixture of adaptive size remembers.

    Attributes:
        scale, spread: of the start, for components that look for other modes.
        most: components it may have.
    """

    scale: float = eqx.field(static=True)
    spread: float = eqx.field(static=True)
    most: int = eqx.field(static=True)


def grown(
    mixture: Any,
    log_density: Callable[[Float[Array, " d"]], Float[Array, ""]],
    key: Key[Array, ""],
    num: int,
) -> Any:
    """The mixture with `num` more components."""
    row_key, choice_key, scout_key = jax.random.split(key, 3)
    rows, missing = _missing_mass(mixture, log_density, row_key)
    plan = mixture.growth
    scouts = round(SCOUTING * num) if plan else 0
    noise = jax.random.gumbel(choice_key, missing.shape, missing.dtype)
    means = rows[jax.lax.top_k(jnp.log(missing) + noise, num - scouts)[1]]
    parents = jnp.argmax(mixture.terms(means).responsibilities, axis=0)
    parts = [mixture.components, _moved(mixture.components, parents, means)]
    if plan and scouts:
        shape, is_diagonal = (scouts, mixture.dim), isinstance(parts[0], DiagonalGaussian)
        parts.append(
            scattered(scout_key, shape, plan.scale, plan.spread, is_diagonal, mixture.dtype)
        )
    share = jnp.clip(missing.mean(), LEAST_SHARE, LARGEST_SHARE)
    return dataclasses.replace(
        mixture,
        components=jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts),
        log_weights=jnp.concatenate(
            [mixture.log_weights + jnp.log1p(-share), jnp.full(num, jnp.log(share / num))]
        ),
    )


def _missing_mass(
    mixture: Any, log_density: Callable, key: Key[Array, ""]
) -> tuple[Float[Array, "N d"], Float[Array, " N"]]:
    """Draws of s, and (p - q)_+ / s there; zero where p is not finite."""
    proposals = _proposals(mixture)
    keys = jax.random.split(key, len(proposals))
    pairs = zip(proposals, keys, strict=True)
    rows = jnp.concatenate([q.draw(key, CANDIDATES).rows for q, key in pairs])
    log_p = jax.lax.map(log_density, rows, batch_size=32)
    log_qs = jnp.stack([q.log_prob_rows(rows) for q in proposals])
    log_s = logsumexp(log_qs, axis=0) - jnp.log(len(proposals))
    fine = jnp.isfinite(log_p)
    log_ratio = jnp.where(fine, log_p - log_s, -jnp.inf)
    log_mass = logsumexp(log_ratio) - jnp.log(len(rows))
    missing = jnp.exp(log_ratio - log_mass) - jnp.exp(log_qs[0] - log_s)
    return rows, jnp.where(fine, jnp.maximum(missing, 0), 0).astype(mixture.dtype)


def _proposals(mixture: Any) -> list[Any]:
    """The mixture, the mixture widened, and, where it is known, what the start was drawn from."""
    components, plan = mixture.components, mixture.growth
    wide = jax.vmap(lambda q: q.scaled(WIDENING, q.mean))(components)
    proposals = [mixture, dataclasses.replace(mixture, components=wide)]
    if plan:
        is_diagonal = isinstance(components, DiagonalGaussian)
        scale = math.hypot(plan.scale, plan.spread)
        one = centred(mixture.dim, scale, is_diagonal, mixture.dtype)
        log_weights = jnp.zeros(1, mixture.dtype)
        proposals.append(dataclasses.replace(mixture, components=one, log_weights=log_weights))
    return proposals


def _moved(components: Any, parents: Int[Array, " n"], means: Float[Array, "n d"]) -> Any:
    """Narrower copies of components, at other means."""
    copies = jax.tree.map(lambda leaf: leaf[parents], components)
    return jax.vmap(lambda q, mean: q.scaled(NARROWING, mean))(copies, means)

"""Whether q still goes somewhere, more than the noise of an average does.

Residuals tell the noise of what was seen. Where rare draws carry much of an expectation, as of the
curvature exp(-2 log tau) of a centred hierarchy, few see it, and q goes on for thousands of batches
by steps that are small beside their noise. So q is compared with itself at an earlier age. With
weights proportional to the age of a batch (c = 2) noise alone would, between the ages r n and n,
move it on average by (1 - r^2)^2 / r + 1 - r^3 in units of what noise still costs at n. What it has
moved in nats, over that number, is the gap if it is noise, and more if it is not. (The batches with
which the finish begins are not counted: while it is young, noise alone tells half or less.) A
change of the scale as a whole costs what `radial` says.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from iblr.families.gaussian import Gaussian
from iblr.linalg import matmul

FIRST = 4.0  # the age of the finish at which q is kept first, then at every power of two


class Past(NamedTuple):
    """q at some age of the finish, 0 where there was none; `inverse` as in `Regression`."""

    mean: Float[Array, " d"]
    inverse: Float[Array, "d d"]
    age: Float[Array, ""]


class Drift(NamedTuple):
    """What q was at the last two powers of two, and the gap that its way since `earlier` tells."""

    earlier: Past
    later: Past
    gap: Float[Array, ""]


def with_q(
    drift: Drift,
    q: Gaussian,
    inverse: Float[Array, "d d"],
    age: Float[Array, ""],
    curvature: Float[Array, ""],
) -> Drift:
    """The same after one more batch of the finish; nothing, where the finish begins anew.

    Args:
        drift: before.
        q: where q is now.
        inverse: as in `Regression`.
        age: batches of the finish.
        curvature: of the scale, see `iblr.regression.radial.Scale`.
    """
    is_power = jnp.frexp(age)[0] == 0.5
    keep = (age >= FIRST) & is_power & (age > drift.later.age)
    begun = age < jnp.maximum(drift.later.age, 1)
    now = Past(q.mean, inverse, age)
    earlier = _chosen(keep, drift.later, drift.earlier)
    later = _chosen(keep, now, drift.later)
    blank = jax.tree.map(jnp.zeros_like, now)
    earlier, later = _chosen(begun, blank, earlier), _chosen(begun, blank, later)
    share = earlier.age / jnp.maximum(age, 1)
    known = (share > 0) & (share < 1)
    share = jnp.where(known, share, 0.5)
    by_noise = (1 - share**2) ** 2 / share + 1 - share**3
    gap = jax.lax.cond(
        known, lambda: _way(q, earlier, curvature) / by_noise, lambda: jnp.zeros_like(by_noise)
    )
    return Drift(earlier, later, gap)


def _way(q: Gaussian, past: Past, curvature: Float[Array, ""]) -> Float[Array, ""]:
    """Nats from what it was: KL to second order, which does not cancel, but for the scale."""
    turned = matmul(past.inverse, q.factor.T)
    excess = matmul(turned.T, turned) - jnp.eye(q.dim, dtype=turned.dtype)
    step = matmul(past.inverse, q.mean - past.mean)
    of_scale = jnp.trace(excess) ** 2 / q.dim
    of_shape = jnp.sum(excess**2) + (curvature - 1) * of_scale
    return 0.25 * of_shape + 0.5 * jnp.sum(step**2)


def _chosen(condition: Bool[Array, ""], one: Past, other: Past) -> Past:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)

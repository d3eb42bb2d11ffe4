"""The scale of q as a whole, where the curvature that q sees depends on it.

Solving for the precision, S = E_q[hess lbar], takes the expectation to change little with q. Where
the target is of heavy tails in many dimensions it changes almost as S does: the whitened excess of
the curvature, kappa = E[e . D] / d, hardly depends on the scale exp(t) of q, and steps of -kappa/2
in t take forever while they look small. Since N(0, s^2 I) has the score |e|^2 - d in log s,

    d kappa / d t = 2 + Cov(|e|^2, e . D) / d = 2 (1 + b),

with b the slope of the regression of e . D on |e|^2, which the pairs at hand tell. So where b is
clearly negative the step in t is -kappa / (2 (1 + b)), Newton's. Where b is clearly positive, as
with tails lighter than a Gaussian's, solving for the precision overshoots (for z^4 to and fro,
without end), and Newton's step does not.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from iblr.regression.pairs import Whitened

CLEARLY = 4.0  # standard errors
INDIFFERENT = 0.75  # 1 + b, below which the step is Newton's
STEEP = 0.02  # b, above which it is Newton's too; less overshooting than that dies out
SMALLEST = 0.02
LARGEST_STEP = 0.5


class Radial(NamedTuple):
    """Running means over pairs, with x = |e|^2 - d and y = e . D, and of t over batches."""

    x: Float[Array, ""]
    y: Float[Array, ""]
    xx: Float[Array, ""]
    xy: Float[Array, ""]
    yy: Float[Array, ""]
    log_scale: Float[Array, ""]


class Scale(NamedTuple):
    """What the log of all precisions is to change by, if it is known; and the gap this leaves.

    `curvature` is that of the ELBO in t in units of that of the divergence, 1 where not known.
    """

    change: Float[Array, ""]
    known: Bool[Array, ""]
    gap: Float[Array, ""]
    curvature: Float[Array, ""]


def nothing(like: Float[Array, ""]) -> Radial:
    """Before the first batch."""
    return Radial(*[jnp.zeros_like(like)] * 6)


def with_batch(
    radial: Radial, seen: Whitened, log_scale: Float[Array, ""], rate: Float[Array, ""]
) -> Radial:
    """Means with those of a batch at the weight `rate`."""
    d = seen.noise.shape[1]
    square = jnp.sum(seen.noise**2, axis=1)
    used = (square > 0).astype(square.dtype)  # pairs left out are zero
    x, y = square - d, jnp.sum(seen.noise * seen.excess, axis=1)
    number = jnp.maximum(used.sum(), 1)
    mean = lambda values: jnp.sum(used * values) / number  # noqa: E731
    new = Radial(mean(x), mean(y), mean(x * x), mean(x * y), mean(y * y), log_scale)
    return Radial(*(old + rate * (n - old) for old, n in zip(radial, new, strict=True)))


def scale(radial: Radial, log_scale: Float[Array, ""], dim: int, pairs: Float[Array, ""]) -> Scale:
    """Newton's step of the scale from means over so many pairs."""
    tiny = jnp.finfo(log_scale.dtype).tiny
    spread = jnp.maximum(radial.xx - radial.x**2, tiny)
    slope = (radial.xy - radial.x * radial.y) / spread
    rest = jnp.maximum(radial.yy - radial.y**2 - slope**2 * spread, 0)
    error = jnp.sqrt(rest / spread / pairs)
    curvature = jnp.maximum(1 + slope, SMALLEST)
    steep = slope - CLEARLY * error > STEEP
    known = ((1 + slope < INDIFFERENT) & (slope + CLEARLY * error < 0)) | steep
    kappa = (radial.y - slope * radial.x) / dim
    kappa = kappa + 2 * curvature * (log_scale - radial.log_scale)
    change = (kappa / curvature).clip(-LARGEST_STEP, LARGEST_STEP)
    # ELBO'' in t is 2 d (1 + b); kappa has the variance rest / (d^2 pairs).
    gap = 0.25 * rest / (dim * pairs * curvature)
    return Scale(change, known, jnp.where(known, gap, 0), jnp.where(known, curvature, 1))

"""One step of each rule, for one leaf: arrays in, arrays out.

q = N(mu, 1/(N s)) entry by entry, with N = `ess` and s = h + delta, where delta is the precision of
the prior over N (the weight decay) and h estimates the Hessian of the mean loss. At a sample
z = mu + eps/sqrt(N s) let g be the gradient of the mean loss. Only s is sure to be positive, h may
be negative, so s is what is stored. Its step is line 8 of [LSK20] figure 1 (right),

    s <- s + (1 - b2) g_s + (1 - b2)^2 g_s^2 / (2 s),      g_s = delta - s + sqrt(N s) eps g

computed as half the sum of two squares, which keeps s/2 at the least and does not overflow before
its result does:

    s <- (s + u^2)/2,      u = r + (1 - b2) (sqrt(N) eps g + (delta - s)/r),      r = sqrt(s)

`icml2020_step` is the figure to the letter. `ivon_step` is the form known as IVON: the prior is
outside the momentum, the new s scales the step of the mean and is not debiased. `vogn_step` is
figure 1 (left). `vadam_step` is Vadam (Khan et al. 2018), see `iblr.baselines.Vadam`.

Several samples enter as the means over them of g, of eps g and of the squares.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float


class Decay(NamedTuple):
    """The decay b of a running mean, with 1 - b and log b to float32's precision near b = 1."""

    keep: Float[Array, ""]
    take: Float[Array, ""]
    log: Float[Array, ""]

    def weight(self, k: Float[Array, ""]) -> Float[Array, ""]:
        """1 - b^k, what k terms of the running mean weigh together."""
        return -jnp.expm1(k * self.log)


def decay(b: ArrayLike) -> Decay:
    """The decay b: a number is split in double precision, an array or a traced one in its own."""
    if isinstance(b, Tracer):
        b = jnp.asarray(b, jnp.float32)
        return Decay(b, 1 - b, jnp.log1p(b - 1))
    b = float(b)  # pyright: ignore[reportArgumentType]
    return Decay(*(jnp.float32(x) for x in (b, 1 - b, math.log(b) if b > 0 else -math.inf)))


class Leaf(NamedTuple):
    """What is kept of one leaf: mu, m, s, and for Vadam the second moment v.

    The change of mu takes the place of mu in what a rule returns.
    """

    mean: Float[Array, "..."]
    momentum: Float[Array, "..."]
    precision: Float[Array, "..."]
    second_moment: Float[Array, "..."] | None = None


class Estimate(NamedTuple):
    """What the samples tell: the means of g, of eps g, and of the examples' squared gradients."""

    gradient: Float[Array, "..."]
    noise_gradient: Float[Array, "..."]
    squares: Float[Array, "..."] | None = None


class Settings(NamedTuple):
    """The numbers of one step: k counts from one, `ess` is the N with which z was drawn."""

    learning_rate: Float[Array, ""]
    b1: Decay
    b2: Decay
    k: Float[Array, ""]
    ess: Float[Array, ""]
    delta: Float[Array, "..."]
    prior_mean: Float[Array, "..."]
    clip_radius: Float[Array, ""]
    scale: Float[Array, "..."]


def improved_precision(
    s: Float[Array, "..."], noise_gradient: Float[Array, "..."], at: Settings
) -> Float[Array, "..."]:
    """The new s of the improved rule, at least s/2 and at most the largest float32."""
    r = jnp.sqrt(s)
    u = r + at.b2.take * (jnp.sqrt(at.ess) * noise_gradient + (at.delta - s) / r)
    limits = jnp.finfo(jnp.float32)
    return jnp.clip((s + u * u) / 2, float(limits.tiny), float(limits.max))


def ivon_step(leaf: Leaf, estimate: Estimate, at: Settings) -> Leaf:
    """Precision first; the mean with the new s and with the prior beside the momentum."""
    s = improved_precision(leaf.precision, estimate.noise_gradient, at)
    m = _running_mean(leaf.momentum, estimate.gradient, at.b1)
    direction = (m / at.b1.weight(at.k) + _pull(leaf, at)) / s
    return Leaf(_change(direction, at), m, s)


def icml2020_step(leaf: Leaf, estimate: Estimate, at: Settings) -> Leaf:
    """[LSK20] figure 1 (right): the mean first, with the old s, debiased."""
    m = _running_mean(leaf.momentum, estimate.gradient + _pull(leaf, at), at.b1)
    direction = m / at.b1.weight(at.k) * at.b2.weight(at.k) / leaf.precision
    s = improved_precision(leaf.precision, estimate.noise_gradient, at)
    return Leaf(_change(direction, at), m, s)


def vogn_step(leaf: Leaf, estimate: Estimate, at: Settings) -> Leaf:
    """[LSK20] figure 1 (left): squares of the examples' gradients; the mean with the new s."""
    assert estimate.squares is not None
    m = _running_mean(leaf.momentum, estimate.gradient + _pull(leaf, at), at.b1)
    s = _running_mean(leaf.precision, at.delta + estimate.squares, at.b2)
    direction = m / at.b1.weight(at.k) * at.b2.weight(at.k) / s
    return Leaf(_change(direction, at), m, s)


def vadam_step(leaf: Leaf, estimate: Estimate, at: Settings) -> Leaf:
    """Adam with noise in the weights: the square of the mean gradient, and a square root.

    v is kept beside s = v + delta: s - delta would lose a v much smaller than delta.
    """
    assert leaf.second_moment is not None
    m = _running_mean(leaf.momentum, estimate.gradient + _pull(leaf, at), at.b1)
    v = _running_mean(leaf.second_moment, estimate.gradient**2, at.b2)
    root = jnp.sqrt(v / at.b2.weight(at.k)) + at.delta
    direction = m / at.b1.weight(at.k) / root
    return Leaf(_change(direction, at), m, v + at.delta, v)


def _running_mean(
    old: Float[Array, "..."], new: Float[Array, "..."], b: Decay
) -> Float[Array, "..."]:
    return b.keep * old + b.take * new


def _pull(leaf: Leaf, at: Settings) -> Float[Array, "..."]:
    return at.delta * (leaf.mean - at.prior_mean)


def _change(direction: Float[Array, "..."], at: Settings) -> Float[Array, "..."]:
    clipped = jnp.clip(direction, -at.clip_radius, at.clip_radius)
    return -at.learning_rate * at.scale * clipped

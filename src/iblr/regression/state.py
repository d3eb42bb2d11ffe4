"""Where a regression stands, and how far from the best Gaussian that is."""

import dataclasses
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from iblr.families.gaussian import Gaussian
from iblr.regression import radial
from iblr.regression.drift import Drift, Past
from iblr.regression.models import Moments
from iblr.regression.pairs import Pairs, num_pairs
from iblr.regression.radial import Radial, Scale

CALM = 3  # batches that no model predicts twice as well as q does, before the finish
MEASURED = 3  # batches of the finish before their noise tells the gap
EXTREMES = 64
NUDGE = 1e-3  # standard deviations
# The true gap over the estimated one is a mean of d (d + 3) / 2 squares of normal numbers, if noise
# is all there is; as measured on targets of exact ELBOs, 95 % of ratios lie below SPREAD times the
# quantile of that where many pairs of light tails were seen, higher with few or heavy-tailed ones,
# of which there must be more in few dimensions, where few residuals are all that tells of tails.
SPREAD, FEW, FEW_DIMENSIONS, HEAVY = 1.5, 200.0, 4.0, 3.0


class Trusted(NamedTuple):
    """The best q so far by the ELBO of its batch.

    Attributes:
        family: q.
        inverse: as in `Regression`.
        elbo: that of its batch.
        spread: standard deviation over pairs, a running mean since (and throughout the finish).
        doubts: batches in a row since that were far below.
    """

    family: Gaussian
    inverse: Float[Array, "d d"]
    elbo: Float[Array, ""]
    spread: Float[Array, ""]
    doubts: Int[Array, ""]


class Regression(eqx.Module):
    """A fit on its way.

    Attributes:
        key: that of all noise.
        step: batches seen.
        family: q.
        inverse: A^-T, so that x is the noise x inverse'.
        memory: the latest batches.
        count: batches there are in `memory`.
        window: how many of them the last model was made of.
        calm: batches in a row no model of which was twice as good as q, and those of the finish.
        finishing: whether noise is all that is left.
        older: moments of the finish.
        younger: moments begun later.
        advantage: number, mean and sum of squares of what the younger predicts better, in nats.
        effective: number of batches whose plain average is as noisy as the older moments.
        noise: of one pair, in nats: of the gradient, and of the excess.
        extremes: the largest |D|^2 of the finish in units of its mean so far, ascending.
        radial: what the finish tells of the scale of q as a whole.
        usual: score of q in the finish.
        last: score of q one step before.
        moved: nats by which the last step moved q.
        drift: where q was in the finish, and what its way since then tells.
        radius: bound on a step of the mean, in units of sqrt(d) standard deviations.
        lead: the last gradient, whitened: the direction to look into.
        narrowed: how often in a row q was narrowed.
        trusted: where to go back to if q is lost.
        first: variances of the start.
    """

    key: Key[Array, ""]
    step: Int[Array, ""]
    family: Gaussian
    inverse: Float[Array, "d d"]
    memory: Pairs
    count: Int[Array, ""]
    window: Int[Array, ""]
    calm: Int[Array, ""]
    finishing: Bool[Array, ""]
    older: Moments
    younger: Moments
    advantage: Float[Array, "3"]
    effective: Float[Array, ""]
    noise: Float[Array, "2"]
    extremes: Float[Array, " m"]
    radial: Radial
    usual: Float[Array, ""]
    last: Float[Array, ""]
    moved: Float[Array, ""]
    drift: Drift
    radius: Float[Array, ""]
    lead: Float[Array, " d"]
    narrowed: Int[Array, ""]
    trusted: Trusted
    first: Float[Array, " d"]

    @property
    def growth(self) -> Float[Array, ""]:
        """The largest standard deviation in units of that of the start."""
        return jnp.sqrt((self.family.variances / self.first).max())

    @property
    def log_scale(self) -> Float[Array, ""]:
        """Log of the geometric mean of all standard deviations."""
        return 0.5 * self.family.log_det / self.family.dim

    @property
    def scale(self) -> Scale:
        """What is to become of it."""
        pairs = jnp.maximum(self.effective * self.memory.offset.shape[1], 1)
        return radial.scale(self.radial, self.log_scale, self.family.dim, pairs)

    @property
    def gap(self) -> Float[Array, ""]:
        """Nats that q is estimated to lack of the best Gaussian; infinite before the finish.

        What is left of the noise, or what the way of q tells if that is more, and what the last
        step did: only of a q that has come to rest does noise tell all.
        """
        pairs = self.effective * self.memory.offset.shape[1]
        d = self.family.dim
        gap = 0.5 * self.noise[0] / pairs + 0.125 * (d + 1) * self.noise[1] / pairs
        gap = jnp.maximum(gap + self.scale.gap, self.drift.gap) + self.moved
        return jnp.where(self.calm >= CALM + MEASURED, gap, jnp.inf)

    @property
    def bound(self) -> Float[Array, ""]:
        """Nats that q lacks with a probability of 95 %, see `SPREAD`, `FEW` and `HEAVY`."""
        pairs = (self.calm - CALM).clip(1) * self.memory.offset.shape[1]
        spread = SPREAD * _mean_square_quantile(self.family.dim * (self.family.dim + 3) // 2)
        few = FEW * (1 + FEW_DIMENSIONS / self.family.dim)
        factor = spread * (1 + few / pairs) * jnp.exp(HEAVY * (self.tail - 0.9).clip(0, 1))
        dtype = self.family.dtype
        return factor.astype(dtype) * self.gap + self.family.dim * jnp.finfo(dtype).eps

    @property
    def tail(self) -> Float[Array, ""]:
        """Hill's estimate of the tail index of |D|^2, from its largest fifth (or 63)."""
        seen = (self.calm - CALM).clip(0) * self.memory.offset.shape[1]
        m = (seen // 5).clip(4, EXTREMES - 1)
        logs = jnp.log(jnp.maximum(self.extremes[::-1], tiny(self.extremes)))
        top = jnp.arange(EXTREMES) < m
        return jnp.sum(jnp.where(top, logs - logs[m], 0)) / m


def _mean_square_quantile(number: int) -> float:
    """The 95 % quantile of a mean of squared normal numbers, by Wilson and Hilferty."""
    variance = 2 / (9 * number)
    return (1 - variance + 1.645 * math.sqrt(variance)) ** 3


def begin(family: Gaussian, key: Key[Array, ""]) -> Regression:
    """Nothing seen yet. Made by NumPy, as single operations would be compiled one by one.

    The mean is moved a little: pairs around the centre of a symmetric target, such as the middle of
    two modes, see no gradient at all.
    """
    d, dtype = family.dim, family.dtype
    P = num_pairs(d)
    n = max(4, math.ceil(3 * d / P))
    factor, whole = np.asarray(family.factor), jnp.asarray(np.zeros((), np.int32))
    if not np.isfinite(np.linalg.slogdet(factor)[1]):
        raise ValueError(
            f"`fit` needs a start whose covariance is positive definite, but got the root {factor}."
        )

    def zeros(*shape: int) -> Array:
        return jnp.asarray(np.zeros(shape, dtype))

    inverse = jnp.asarray(np.linalg.inv(factor).T)
    noise = np.random.default_rng(np.asarray(jax.random.key_data(key))).normal(size=d)
    mean = np.asarray(family.mean) + (NUDGE * noise @ factor).astype(dtype)
    family = dataclasses.replace(family, mean=jnp.asarray(mean))
    none = Moments(zeros(d, d), zeros(d, d), zeros(d), zeros(d), zeros())
    nowhere = Past(zeros(d), zeros(d, d), zeros())
    lowest = jnp.asarray(np.full((), -np.inf, dtype))
    return Regression(
        key=key,
        step=whole,
        family=family,
        inverse=inverse,
        memory=Pairs(zeros(n, P, d), zeros(n, P, d), zeros(n, d), zeros(n, d)),
        count=whole,
        window=whole,
        calm=whole,
        finishing=jnp.asarray(np.zeros((), bool)),
        older=none,
        younger=none,
        advantage=zeros(3),
        effective=jnp.asarray(np.ones((), dtype)),
        noise=zeros(2),
        extremes=zeros(EXTREMES),
        radial=Radial(*[zeros()] * 6),
        usual=zeros(),
        last=jnp.asarray(np.full((), np.inf, dtype)),
        moved=zeros(),
        drift=Drift(nowhere, nowhere, zeros()),
        radius=jnp.asarray(np.ones((), dtype)),
        lead=zeros(d),
        narrowed=whole,
        trusted=Trusted(family, inverse, lowest, zeros(), whole),
        first=jnp.asarray(np.sum(np.square(factor, dtype=np.float64), axis=0), dtype),
    )


def tiny(like: Float[Array, "..."]) -> float:
    """The smallest normal number of its type."""
    return float(jnp.finfo(like.dtype).tiny)

"""Averages over all batches, once noise is all that is left."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from iblr.linalg import matmul, symmetric_eigen
from iblr.regression import radial
from iblr.regression.models import (
    RIDGES,
    Model,
    Moments,
    around,
    averaged,
    blended,
    least_squares,
    rate_of,
    score,
)
from iblr.regression.pairs import Pairs, Whitened
from iblr.regression.state import CALM, EXTREMES, Regression, tiny

NOISE_FORGETTING = 4.0  # c of the noise: what it was before q settled is of no interest
SURE = 2.0  # standard errors by which younger moments must predict better, to replace the older
RELAPSE = 1e3  # times the usual score, twice in a row: q is no longer where it was
TRIM = 20.0  # over the number of pairs, what squared residuals may be in units of their mean


def finish(
    state: Regression, batch: Pairs, seen: Whitened, base: Float[Array, ""]
) -> tuple[Regression, Model, Bool[Array, ""]]:
    """All moments with the new ones among them, solved."""
    trimmed = _trimmed(state, batch, seen)
    new = averaged(jax.tree.map(lambda x: x[None], trimmed), jnp.ones(1, bool))
    race = _raced(state, seen, base, new)
    noise = _noise_of(seen)
    first = (state.noise == 0).all()
    recent = NOISE_FORGETTING / (NOISE_FORGETTING + (state.calm - CALM) + 1)
    usual_residual = jnp.where(first, noise[1], state.noise[1])
    residuals = jnp.sum(seen.excess**2, axis=1) / jnp.maximum(usual_residual, tiny(seen.noise))
    residuals = jnp.concatenate([state.extremes, residuals])
    usual = 0.9 * state.usual + 0.1 * jnp.minimum(base, 3 * state.usual)
    relapsed = jnp.minimum(base, state.last) > jnp.maximum(RELAPSE * usual, 1)
    rate = jnp.where(first, 1.0, race.rate)
    fresh = dataclasses.replace(
        state,
        count=jnp.where(relapsed, 0, state.count),
        window=jnp.where(relapsed, 0, state.window),
        calm=jnp.where(relapsed, 0, state.calm + 1),
        finishing=~relapsed,
        older=race.older,
        younger=race.younger,
        advantage=race.advantage,
        effective=race.effective,
        noise=jnp.where(first, noise, state.noise + recent * (noise - state.noise)),
        extremes=jnp.sort(residuals)[-EXTREMES:],
        radial=radial.with_batch(state.radial, seen, state.log_scale, rate),
        usual=usual,
    )
    return fresh, _rescaled(fresh, _solved(state, race.older)), jnp.zeros((), bool)


class _Race(NamedTuple):
    """What a batch makes of older and younger moments, see `Regression`; `rate` is its weight."""

    older: Moments
    younger: Moments
    advantage: Float[Array, "3"]
    effective: Float[Array, ""]
    rate: Float[Array, ""]


def _raced(state: Regression, seen: Whitened, base: Float[Array, ""], new: Moments) -> _Race:
    """Both with the new ones; the younger in the place of the older if they predict better."""
    P, d = seen.noise.shape
    gain = base - score(_solved(state, state.younger), seen)
    gain = jnp.where(state.younger.age * P >= d, gain, jnp.nan)
    number, mean, squares = state.advantage
    shifted = mean + (gain - mean) / (number + 1)
    told = jnp.stack([number + 1, shifted, squares + (gain - mean) * (gain - shifted)])
    advantage = jnp.where(jnp.isfinite(gain), told, state.advantage)
    number, mean, squares = advantage
    error = jnp.sqrt(squares / jnp.maximum(number - 1, 1) / jnp.maximum(number, 1))
    swap = (number >= 4) & (mean > SURE * error)
    older = jax.tree.map(lambda y, o: jnp.where(swap, y, o), state.younger, state.older)
    effective = jnp.where(swap, jnp.maximum(0.75 * older.age, 1), state.effective)
    rate = rate_of(older)
    younger = blended(state.younger, new)
    restart = swap | (younger.age >= jnp.maximum(0.5 * older.age, d / P + 6))
    return _Race(
        blended(older, new),
        jax.tree.map(lambda x: jnp.where(restart, 0, x), younger),
        jnp.where(restart, 0, advantage),
        1 / (rate**2 + (1 - rate) ** 2 / effective),
        rate,
    )


def _noise_of(seen: Whitened) -> Float[Array, "2"]:
    """Of one pair, in nats: of the gradient, and of the excess."""
    used = (seen.noise != 0).any(1)  # pairs left out are zero, and average nothing
    kept = used.sum(dtype=seen.noise.dtype)
    spread = jnp.sum((seen.gradients - seen.gradients.mean(0)) ** 2) / jnp.maximum(kept - 1, 1)
    noise = jnp.stack([spread, jnp.sum(seen.excess**2) / jnp.maximum(kept, 1)])
    return noise * (len(used) / jnp.maximum(kept, 1))


def _rescaled(state: Regression, model: Model) -> Model:
    """A model with the scale that `radial` asks for, where that is known."""
    d, scale = state.family.dim, state.scale
    K = model.excess
    step = jnp.where(scale.known, scale.change - jnp.trace(K) / d, 0)
    return model._replace(excess=K + step * jnp.eye(d, dtype=K.dtype))


def _trimmed(state: Regression, batch: Pairs, seen: Whitened) -> Pairs:
    """A batch whose extreme pairs count for less, the less so the more batches there are.

    With a bound on the squared residuals of n/20 times their mean, the average of n of them is that
    of all in the end, and no rare pair throws it off before.
    """
    residual = jnp.sum(seen.excess**2, axis=1)
    pairs = jnp.maximum(state.effective * len(residual), 4)
    bound = jnp.where(state.noise[1] > 0, state.noise[1] * pairs / TRIM, jnp.inf)
    weight = jnp.minimum(1, jnp.sqrt(bound / jnp.where(residual > 0, residual, 1)))
    root = jnp.sqrt(weight)[:, None]
    gradient = matmul(weight / weight.sum(), seen.gradients)
    return Pairs(
        root * batch.offset, root * batch.change, batch.centre, matmul(gradient, state.inverse)
    )


def _solved(state: Regression, moments: Moments) -> Model:
    """Least squares from moments."""
    factor, inverse = state.family.factor, state.inverse
    gram = matmul(inverse, matmul(moments.offset_offset, inverse.T))
    cross = matmul(factor, matmul(moments.change_offset, inverse.T)) - gram
    values, U = symmetric_eigen(0.5 * (gram + gram.T))
    K = least_squares(values, U, cross, RIDGES[0])
    way = matmul(inverse, state.family.mean - moments.centre)
    return around(K, matmul(factor, moments.gradient), way)

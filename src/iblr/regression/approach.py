"""From anywhere to where noise is all that is left: which batches still count?

Candidates are all models over the latest 1, 2, ... batches; the newest batch, which none of them
has seen, is the judge.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from iblr.linalg import matmul, symmetric_eigen
from iblr.regression import radial
from iblr.regression.models import (
    RIDGES,
    Model,
    around,
    averaged,
    least_squares,
    quasi_newton,
    score,
)
from iblr.regression.pairs import Pairs, Whitened, whitened, with_newest
from iblr.regression.state import CALM, Regression

SLACK = 0.1
ENOUGH = 1.25  # pairs a dimension for the finish: as many as dimensions can be nearly dependent
NEGLIGIBLE = 1e-7  # nats a coordinate by which q is off on a batch: what is left is rounding


def approach(
    state: Regression, batch: Pairs, seen: Whitened, base: Float[Array, ""]
) -> tuple[Regression, Model, Bool[Array, ""]]:
    """The longest window of batches that predicts the newest one well, solved with it."""
    n, P, d = state.memory.offset.shape
    memory = with_newest(state.memory, batch)
    batches = whitened(state.family, state.inverse, memory)
    W, places = state.window, jnp.arange(n)
    lengths = jnp.stack([jnp.int32(1), W // 2, W + 1, 2 * W]).clip(1, n - 1)

    def candidate(carry: tuple[Float[Array, "4 k"], Model], turn: Int[Array, ""]):
        """Four windows without the newest batch, judged by it, and then the chosen one with it."""
        scores, _ = carry
        last = turn == len(lengths)
        length = jnp.where(last, _chosen(scores, lengths, base).length, lengths[turn])
        inside = (places >= n - 1 - length) & (last | (places < n - 1))
        models = _models(batches, inside)
        found = jax.vmap(score, (0, None))(models, seen)
        found = jnp.where(_allowed(length, P, d) & (length <= state.count), found, jnp.inf)
        return (scores.at[turn].set(found, mode="drop"), models), None

    kinds = len(RIDGES) + 1
    none = Model(
        jnp.zeros((kinds, d, d), seen.noise.dtype), jnp.zeros((kinds, d), seen.noise.dtype)
    )
    begun = jnp.full((len(lengths), kinds), jnp.inf, seen.noise.dtype), none
    turns = jnp.arange(len(lengths) + 1)
    (scores, models), _ = jax.lax.scan(candidate, begun, turns)
    length, kind, least = _chosen(scores, lengths, base)
    noisy = ((least > 0.5 * base) & (length > 0)) | (base < NEGLIGIBLE * d)
    calm = jnp.where(noisy, jnp.minimum(state.calm + 1, CALM), 0)
    count = jnp.minimum(state.count + 1, n)
    enough = count * P >= ENOUGH * d
    finishing = (calm >= CALM) & enough
    wanted = jnp.maximum(length, math.ceil(ENOUGH * d / P))
    started = averaged(memory, places >= n - wanted)
    fresh = dataclasses.replace(
        state,
        memory=memory,
        count=count,
        window=length,
        calm=calm,
        finishing=finishing,
        older=started,
        younger=jax.tree.map(jnp.zeros_like, state.younger),
        advantage=jnp.zeros_like(state.advantage),
        effective=jnp.asarray(wanted, state.effective.dtype),
        noise=jnp.zeros_like(state.noise),
        extremes=jnp.zeros_like(state.extremes),
        radial=radial.nothing(state.usual),
        usual=base,
    )
    return fresh, jax.tree.map(lambda x: x[kind], models), (least < 0.3 * base) & (length > 0)


class _Choice(NamedTuple):
    """A window, a kind of model, and the score of both; length 0 where q itself is the best."""

    length: Int[Array, ""]
    kind: Int[Array, ""]
    score: Float[Array, ""]


def _chosen(
    scores: Float[Array, "n k"], lengths: Int[Array, " n"], base: Float[Array, ""]
) -> _Choice:
    near = scores <= (1 + SLACK) * jnp.minimum(scores.min(), base)
    length = jnp.max(jnp.where(near, lengths[:, None], 0))
    among = jnp.where(near & (lengths[:, None] == length), scores, jnp.inf)
    place = jnp.argmin(among)
    kind = jnp.where(length > 0, place % scores.shape[1], 0)
    return _Choice(length, kind, jnp.where(length > 0, among.ravel()[place], base))


def _models(batches: Pairs, inside: Bool[Array, " n"]) -> Model:
    """The quasi-Newton model and those of least squares."""
    _, P, d = batches.offset.shape
    keep = inside.astype(batches.offset.dtype)
    noise = (batches.offset * keep[:, None, None]).reshape(-1, d)
    excess = (batches.change * keep[:, None, None]).reshape(-1, d) - noise
    gram, cross = matmul(noise.T, noise), matmul(excess.T, noise)
    pairs = jnp.maximum(keep.sum() * P, d)
    values, U = symmetric_eigen(gram)
    models = [quasi_newton(values, U, cross)]
    models += [least_squares(values, U, cross, ridge * pairs) for ridge in RIDGES]
    share = keep / jnp.maximum(keep.sum(), 1)
    return around(jnp.stack(models), matmul(share, batches.gradient), matmul(share, batches.centre))


def _allowed(length: Int[Array, ""], P: int, d: int) -> Bool[Array, " k"]:
    """Models worth a look at such a window."""
    few, many = length * P <= 1.5 * d, length * P >= d
    return jnp.stack([few, *[many] * (len(RIDGES) - 1), jnp.ones((), bool)])

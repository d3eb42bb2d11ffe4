"""Antithetic pairs of points with their gradients: what one batch sees of the target."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from iblr.families.gaussian import Gaussian
from iblr.linalg import matmul
from iblr.noise import normals, seed_of_step
from iblr.target import Target

FEW_DIMENSIONS = 8


class Pairs(NamedTuple):
    """Batches of antithetic pairs mu +- x, the latest last.

    Attributes:
        offset: x.
        change: half the difference of the gradients of a pair.
        centre: mu.
        gradient: mean of all gradients of a batch.
    """

    offset: Float[Array, "*n P d"]
    change: Float[Array, "*n P d"]
    centre: Float[Array, "*n d"]
    gradient: Float[Array, "*n d"]


class Whitened(NamedTuple):
    """A batch seen from q: noise e, D of every pair, and the gradient at the mean pair by pair."""

    noise: Float[Array, "P d"]
    excess: Float[Array, "P d"]
    gradients: Float[Array, "P d"]


class Look(NamedTuple):
    """A batch, and what it says beside gradients.

    Attributes:
        pairs: the batch.
        seen: the same, whitened.
        fine: which of the pairs are finite; the others are zero in `pairs` and `seen`.
        elbo: log p - log q at every pair, the mean of both points; nan where not finite.
    """

    pairs: Pairs
    seen: Whitened
    fine: Bool[Array, " P"]
    elbo: Float[Array, " P"]


def num_pairs(dim: int) -> int:
    """Pairs of a batch: a sixth of d, at least 4 (in few dimensions 8), at most 64."""
    return min(max(math.ceil(dim / 6), 4 if dim >= FEW_DIMENSIONS else 8), 64)


def look(
    family: Gaussian,
    target: Target,
    key: Key[Array, ""],
    step: Int[Array, ""],
    lead: Float[Array, " d"],
    num: int,
) -> Look:
    """`num` pairs in orthogonal directions, the first along `lead` where that is not zero.

    Where there are more pairs than dimensions, blocks of them are orthogonal.

    Where the target takes minibatches every pair has its own, so that the spread of pairs tells
    all the noise there is; the two points of a pair share it.
    """
    d, dtype = family.dim, family.dtype
    blocks = math.ceil(num / d)
    rough, other = normals(
        seed_of_step(key, step), 0, (2, blocks, d, math.ceil(num / blocks)), dtype
    )
    first = jnp.where((lead != 0).any(), lead, rough[0, :, 0])
    Q, R = jnp.linalg.qr(rough.at[0, :, 0].set(first))
    signs = jnp.sign(jnp.diagonal(R, axis1=1, axis2=2))
    lengths = jnp.linalg.norm(other, axis=1)
    noise = (Q * (signs * lengths)[:, None]).transpose(0, 2, 1).reshape(-1, d)[:num]
    offset = family.colour(noise)
    values, slopes = _evaluated(family, target, key, step, offset)
    up, down = slopes
    fine = jnp.isfinite(slopes).all((0, 2)) & jnp.isfinite(values).all(0)
    kept = fine[:, None]
    mean, change = jnp.where(kept, 0.5 * (up + down), 0), jnp.where(kept, 0.5 * (up - down), 0)
    average = mean.sum(0) / jnp.maximum(fine.sum(), 1)
    mean = jnp.where(kept, mean, average)
    elbo = jnp.where(fine, -values.mean(0) - family.log_prob_of_noise(noise), jnp.nan)
    noise, offset = jnp.where(kept, noise, 0), jnp.where(kept, offset, 0)
    seen = Whitened(noise, family.whiten(change) - noise, family.whiten(mean))
    return Look(Pairs(offset, change, family.mean, average), seen, fine, elbo)


def _evaluated(
    family: Gaussian,
    target: Target,
    key: Key[Array, ""],
    step: Int[Array, ""],
    offset: Float[Array, "P d"],
) -> tuple[Float[Array, "2 P"], Float[Array, "2 P d"]]:
    """-log p and its gradient at mu + x and at mu - x."""

    def at(point: Float[Array, " d"], batch: Any):
        log_density = target.whole(family.structure, batch)
        return jax.value_and_grad(lambda x: -log_density(x))(point)

    points = jnp.stack([family.mean + offset, family.mean - offset])
    if not target.is_stochastic:
        return jax.vmap(jax.vmap(lambda point: at(point, target.data)))(points)
    keys = jax.random.split(jax.random.fold_in(key, step), len(offset))
    batches = jax.vmap(target.batch)(keys)
    return jax.vmap(jax.vmap(at), (0, None))(points, batches)


def whitened(family: Gaussian, inverse: Float[Array, "d d"], batches: Pairs) -> Pairs:
    """Batches seen from q: noise, all of length sqrt(d), and as `centre` the way from it to mu."""
    noise = matmul(batches.offset, inverse.T)
    length = jnp.linalg.norm(noise, axis=-1, keepdims=True)
    scale = math.sqrt(noise.shape[-1]) / jnp.where(length > 0, length, 1)
    return Pairs(
        scale * noise,
        scale * matmul(batches.change, family.factor.T),
        matmul(family.mean - batches.centre, inverse.T),
        matmul(batches.gradient, family.factor.T),
    )


def with_newest(batches: Pairs, newest: Pairs) -> Pairs:
    """The newest in, the oldest out."""
    return jax.tree.map(lambda m, b: jnp.concatenate([m[1:], b[None]]), batches, newest)

"""Models of how the gradient varies around the mean, in whitened coordinates, and their moments.

With pairs of noise E and changes D of the gradient beyond those of q itself, G = sum e e' and
C = sum D e', there are two models K of H - I, both from one eigendecomposition of G:

    least squares     min |K E - D|^2 + rho |K|^2 over symmetric K
    quasi-Newton      H on the span of the pairs, and elsewhere a multiple of I: positive definite
                      where the curvatures seen are, the block form of the BFGS update
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from iblr.linalg import matmul, symmetric_eigen
from iblr.regression.pairs import Pairs, Whitened

FORGETTING = 2.0  # c
RIDGES = (1e-3, 0.03, 0.3)  # rho over the number of pairs (or d)


class Moments(NamedTuple):
    """Averages over batches, in the coordinates of the problem; `age` of them."""

    offset_offset: Float[Array, "d d"]
    change_offset: Float[Array, "d d"]
    centre: Float[Array, " d"]
    gradient: Float[Array, " d"]
    age: Float[Array, ""]


class Model(NamedTuple):
    """What the gradient is like around the mean: gradient + (I + excess) e at the noise e."""

    excess: Float[Array, "*k d d"]
    gradient: Float[Array, "*k d"]


def score(model: Model, seen: Whitened) -> Float[Array, ""]:
    """Nats by which a model is off on a batch."""
    wrong = seen.excess - matmul(seen.noise, model.excess)
    return _nats(seen.gradients.mean(0) - model.gradient, wrong)


def score_of_q(seen: Whitened) -> Float[Array, ""]:
    """The same of q itself, a model without excess and gradient."""
    return _nats(seen.gradients.mean(0), seen.excess)


def _nats(missed: Float[Array, " d"], wrong: Float[Array, "P d"]) -> Float[Array, ""]:
    return 0.5 * jnp.sum(missed**2) + jnp.sum(wrong**2) / (4 * len(wrong))


def least_squares(
    values: Float[Array, " d"],
    U: Float[Array, "d d"],
    cross: Float[Array, "d d"],
    ridge: Float[Array, ""] | float,
) -> Float[Array, "d d"]:
    """The symmetric K that minimises |K E - D|^2 + ridge |K|^2; G = U values U', cross = D E'."""
    turned = matmul(U.T, matmul(cross + cross.T, U))
    positive = jnp.maximum(values, 0)
    return matmul(U, matmul(turned / (positive[:, None] + positive + 2 * ridge), U.T))


def quasi_newton(
    values: Float[Array, " d"], U: Float[Array, "d d"], cross: Float[Array, "d d"]
) -> Float[Array, "d d"]:
    """H - I with H as seen on the span of the pairs; elsewhere the mean curvature seen.

    With U a basis of the span, H = gamma (I - U U') + H U (U'H U)^-1 U'H. Directions without
    positive curvature get a quarter of gamma.
    """
    d = len(values)
    tiny = 1e-10 if values.dtype == jnp.float64 else 1e-5
    known = (values > tiny * values[-1]).astype(values.dtype)
    per = known / jnp.where(known > 0, values, 1)
    gram = matmul(U * values, U.T)
    HU = matmul(cross + gram, U * per)  # columns outside of the span are zero
    inner = matmul(U.T, HU) * known[:, None]
    curvature, V = symmetric_eigen(0.5 * (inner + inner.T))
    inside = jnp.einsum("i,ij->j", known, V**2) > 0.5
    good = inside & (curvature > 1e-6 * jnp.max(jnp.where(inside, curvature, 0)))
    number = jnp.maximum(good.sum(), 1)
    gamma = jnp.exp(jnp.sum(jnp.where(good, jnp.log(jnp.where(good, curvature, 1)), 0)) / number)
    HQ, Q = matmul(HU, V), matmul(U * known, V)
    rest = jnp.eye(d, dtype=values.dtype) - matmul(U * known, U.T)
    bad = (inside & ~good).astype(values.dtype)
    seen = matmul(HQ * (good / jnp.where(good, curvature, 1)), HQ.T)
    H = gamma * (rest + 0.25 * matmul(Q * bad, Q.T)) + seen
    return H - jnp.eye(d, dtype=values.dtype)


def averaged(batches: Pairs, inside: Bool[Array, " n"]) -> Moments:
    """Plain averages over some batches."""
    keep = inside.astype(batches.offset.dtype)
    share = keep / jnp.maximum(keep.sum(), 1)
    P = batches.offset.shape[1]
    weighted = share[:, None, None] * batches.offset / P
    return Moments(
        jnp.einsum("npi,npj->ij", weighted, batches.offset, precision="highest"),
        jnp.einsum("npi,npj->ij", batches.change, weighted, precision="highest"),
        matmul(share, batches.centre),
        matmul(share, batches.gradient),
        keep.sum(),
    )


def rate_of(old: Moments) -> Float[Array, ""]:
    """The weight c/(c + k) of the next batch."""
    return FORGETTING / (FORGETTING + old.age + 1)


def blended(old: Moments, new: Moments) -> Moments:
    """With the weight c/(c + k) for the new ones."""
    rate = jnp.where(old.age > 0, rate_of(old), 1.0)
    mixed = jax.tree.map(lambda o, n: o + rate * (n - o), old, new)
    return mixed._replace(age=old.age + 1)


def around(
    K: Float[Array, "*k d d"], gradient: Float[Array, " d"], way: Float[Array, " d"]
) -> Model:
    """A model whose gradient was seen on average a `way` off the mean."""
    return Model(K, gradient + way + matmul(K, way))

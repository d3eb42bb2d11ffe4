"""What draws say about the components of a mixture: densities, scores, and tangents from slopes.

The formulas are those of `mixture`. Whether draws are a component's own or shared by all, the
expectation over a component is a weighted mean over draws; one at which the target is not finite
gets no weight and is counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from iblr.families.abstract_gaussian import GaussianTangent
from iblr.linalg import matmul

LONGEST_WEIGHT_STEP = 0.1
LARGEST_LOG_WEIGHT_STEP = 1.0


class MixtureTangent(eqx.Module):
    """A natural gradient at a mixture.

    Attributes:
        components: that of every component, stacked.
        log_weights: E_c[b], the natural gradient of log pi up to a constant.
        finite: whether there was a draw at which the target is finite.
        excluded: draws at which it is not.
    """

    components: GaussianTangent
    log_weights: Float[Array, " K"]
    finite: Bool[Array, ""]
    excluded: Int[Array, ""]

    @property
    def gradient(self) -> Float[Array, " p"]:
        """The gradients of the means, which momentum averages."""
        return self.components.gradient.reshape(-1)


class Own(NamedTuple):
    """Pairs mu_c +- eps A_c of every component; rows are ordered by component, sign and pair."""

    noise: Float[Array, "K P d"]


class Pooled(NamedTuple):
    """Draws that serve all components, from components in these proportions."""

    log_proportions: Float[Array, " K"]


class Terms(NamedTuple):
    """What the density of a mixture is made of, at N points.

    Attributes:
        components: the Gaussians, stacked.
        noise: eps_c, the points as every component sees them.
        log_components: log N_c.
        log_q: log q.
        responsibilities: r_c.
    """

    components: Any
    noise: Float[Array, "K N d"]
    log_components: Float[Array, "K N"]
    log_q: Float[Array, " N"]
    responsibilities: Float[Array, "K N"]

    @staticmethod
    def at(components: Any, log_weights: Float[Array, " K"], rows: Float[Array, "N d"]) -> "Terms":
        """The terms at rows."""
        noise = jax.vmap(lambda q: q.standardise(rows - q.mean))(components)
        log_components = jax.vmap(lambda q, e: q.log_prob_of_noise(e))(components, noise)
        joint = log_components + log_weights[:, None]
        log_q = logsumexp(joint, axis=0)
        return Terms(components, noise, log_components, log_q, jnp.exp(joint - log_q))

    def score(self) -> Float[Array, "N d"]:
        """grad log q = -sum_c r_c B_c eps_c."""
        shares = self.responsibilities[:, :, None]
        noise = jnp.where(shares > 0, shares * self.noise, 0)
        return -jax.vmap(lambda q, e: q.unwhiten(e))(self.components, noise).sum(0)

    def log_hessians(self) -> Float[Array, "N d d"]:
        """hess log q = sum_c r_c (d_c d_c' - S_c) - score score'."""
        r, score = self.responsibilities, self.score()
        noise = jnp.where(r[:, :, None] > 0, jnp.sqrt(r)[:, :, None] * self.noise, 0)
        d = jax.vmap(lambda q, e: q.unwhiten(e))(self.components, noise).swapaxes(0, 1)
        S = jax.vmap(lambda q: q.precision)(self.components)
        shared = jnp.tensordot(r.T, S, 1, precision="highest")
        return matmul(d.swapaxes(1, 2), d) - shared - score[:, :, None] * score[:, None, :]

    def importance(self, pool: Pooled, fine: Bool[Array, " N"]) -> Float[Array, "K N"]:
        """N_c / s over the number of draws that can be used; zero for the others."""
        log_proposal = logsumexp(self.log_components + pool.log_proportions[:, None], axis=0)
        ratios = jnp.exp(self.log_components - log_proposal)
        return jnp.where(fine, ratios, 0) / jnp.maximum(fine.sum(), 1)


class Shared(NamedTuple):
    """Slopes of lbar at shared draws, and what weight a draw has for every component.

    Attributes:
        terms: those of the density at the draws.
        fine: whether the target is finite there; where it is not, slopes and weights are zero.
        weights: N_c / s over the number of usable draws.
        slopes: of lbar.
        b: lbar + log q.
    """

    terms: Terms
    fine: Bool[Array, " N"]
    weights: Float[Array, "K N"]
    slopes: Float[Array, "N d"]
    b: Float[Array, " N"]

    @staticmethod
    def at(
        terms: Terms, pool: Pooled, slopes: Float[Array, "N d"], values: Float[Array, " N"]
    ) -> "Shared":
        """At draws from a pool."""
        b = terms.log_q - values
        fine = jnp.isfinite(slopes).all(1) & jnp.isfinite(b)
        weights = terms.importance(pool, fine)
        slopes = jnp.where(fine[:, None], slopes, 0)
        return Shared(terms, fine, weights, slopes, jnp.where(fine, b, 0))

    def stl(self) -> MixtureTangent:
        """Stein's identity for b."""
        slopes = self.slopes_of_b()
        return self.tangent(self.map(lambda q, w, e: _stein(q, w, e, slopes)))

    def rep(self) -> MixtureTangent:
        """Stein's identity for lbar, the Hessian of log q."""
        hessians = self.terms.log_hessians()

        def curvature(q, w, e):
            of_log_q = q.from_hessian(weighted(w, hessians), 0.0)
            return _stein(q, w, e, self.slopes).plus(of_log_q)

        return self.tangent(self.map(curvature))

    def hess(self, hessians: Float[Array, "N d d"]) -> MixtureTangent:
        """The Hessians of lbar and of log q."""
        H = jnp.where(self.fine[:, None, None], hessians, 0) + self.terms.log_hessians()
        return self.tangent(self.map(lambda q, w, e: q.from_hessian(weighted(w, H), 0.0)))

    def map(self, curvature: Callable) -> Any:
        """Curvatures of all components, from each with its weights and noise."""
        return jax.vmap(curvature)(self.terms.components, self.weights, self.terms.noise)

    def slopes_of_b(self) -> Float[Array, "N d"]:
        """Those of lbar and the score, zero where the target is not finite."""
        return jnp.where(self.fine[:, None], self.slopes + self.terms.score(), 0)

    def tangent(self, curvatures: Any) -> MixtureTangent:
        """The gradients beside the curvatures."""
        gradients = matmul(self.weights, self.slopes_of_b())
        tangents = jax.vmap(lambda q, g, c: GaussianTangent(g, q.whiten(g[None])[0], c))(
            self.terms.components, gradients, curvatures
        )
        excluded = (~self.fine).sum().astype(jnp.int32)
        return MixtureTangent(tangents, matmul(self.weights, self.b), self.fine.any(), excluded)


def _stein(q: Any, weights: Float[Array, " N"], noise: Float[Array, "N d"], slopes: Any) -> Any:
    """-E_c[eps (A grad)'], made symmetric."""
    return q.low_rank(0.0, weights[:, None] * noise, q.whiten(slopes))


def weighted(weights: Float[Array, " N"], matrices: Float[Array, "N d d"]) -> Float[Array, "d d"]:
    """The sum of matrices with weights."""
    return jnp.tensordot(weights, matrices, 1, precision="highest")


def from_own(
    components: Any,
    weights: Float[Array, " K"],
    E: Float[Array, "K P d"],
    slopes: Float[Array, "N d"],
    b: Float[Array, " N"],
) -> MixtureTangent:
    """From the slopes of b at every component's own pairs.

    A component without a usable pair stays where it is, and so does its weight: E_c[b] is then that
    of the others.
    """
    K, P, d = E.shape
    slopes, b = slopes.reshape(K, 2, P, d), b.reshape(K, 2, P)
    fine = jnp.isfinite(slopes).all((1, 3)) & jnp.isfinite(b).all(1)
    count = fine.sum(1)
    shares = jnp.where(fine, 1 / jnp.maximum(count, 1)[:, None], 0).astype(E.dtype)
    slopes = jnp.where(fine[:, None, :, None], slopes, 0)

    def one(q, E, up, down, share):
        gradient = matmul(share, 0.5 * (up + down))
        Y = q.whiten(jnp.concatenate([0.5 * (up - down), gradient[None]]))
        return GaussianTangent(gradient, Y[-1], q.low_rank(0.0, share[:, None] * E, Y[:-1]))

    tangents = jax.vmap(one)(components, E, slopes[:, 0], slopes[:, 1], shares)
    means, some = jnp.sum(shares * jnp.where(fine, b.mean(1), 0), 1), count > 0
    known = jnp.where(some, weights, 0)
    others = known @ means / jnp.maximum(known.sum(), jnp.finfo(E.dtype).tiny)
    excluded = (2 * (K * P - count.sum())).astype(jnp.int32)
    return MixtureTangent(tangents, jnp.where(some, means, others), some.any(), excluded)


def weight_step(
    weights: Float[Array, " K"],
    gradient: Float[Array, " K"],
    t: Float[Array, ""],
    bounded: bool,
    curved: bool,
) -> Float[Array, " K"]:
    """What log pi loses; with `bounded` of limited Fisher length and size."""
    step = t * (gradient - weights @ gradient)
    if bounded:
        length = jnp.sqrt(weights @ jnp.minimum(step**2, 1e30))
        step = step * LONGEST_WEIGHT_STEP / jnp.maximum(length, LONGEST_WEIGHT_STEP)
        step = jnp.clip(step, -LARGEST_LOG_WEIGHT_STEP, LARGEST_LOG_WEIGHT_STEP)
    return step + 0.25 * step**2 if curved else step

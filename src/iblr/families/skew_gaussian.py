"""Skew Gaussian q(z) = E_w N(z | mu + |w| alpha, Sigma), w standard normal; [LSK20] App. K.

A conditional exponential family with the mixing variable |w|. Its joint Fisher matrix is
block-diagonal in [mu; alpha] and S = Sigma^-1 (lemma skewg_bc; not in mu and alpha apart). With
c = E|w| = sqrt(2/pi), L the negative ELBO and L_x its derivatives,

    natural gradients     mu     Sigma (L_mu - c L_alpha) / (1 - c^2)
                          alpha  Sigma (L_alpha - c L_mu) / (1 - c^2)
                          S      G = -2 L_Sigma
    improved rule         [mu; alpha] <- [mu; alpha] - t ghat
                          S <- S - t G + (t^2/2) G S^-1 G

so that S moves as that of a Gaussian. Draws are z = mu + |w| alpha + eps A with Sigma = A'A, hence

    L_mu = E[grad f],    L_alpha = E[|w| grad f],    2 L_Sigma = E[S (z - mu - |w| alpha) grad f']
                                                               = E[hess f]

with f = lbar + log q, q held in log q (`stl`), or f = lbar and the gradient of the entropy apart
(`rep`, `hess`). With a = alpha A^-1, x = (z - mu) A^-1 and k = |a|^2 density and entropy are

    log q   = log 2 - (log|2 pi Sigma| + log(1 + k) + |x|^2 - (a.x)^2/(1 + k)) / 2 + log Phi(tau),
    tau     = a.x / sqrt(1 + k)
    entropy = (log|2 pi e Sigma| + log(1 + k)) / 2 - h(k),    h(k) = E[2 Phi(y) log(2 Phi(y))],

y ~ N(0, k), as (z - mu) has the second moments Sigma + alpha alpha', and tau is N(0, k) under the
Gaussian of which q is 2 Phi(tau) times. So all of the entropy is in one number, and

    dH / dalpha = r S alpha,    2 dH / dSigma = S - r S alpha alpha' S,    r = 1/(1 + k) - 2 h'(k)
"""

import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import log_ndtr, ndtr
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from iblr.families import arguments
from iblr.families.abstract_gaussian import GaussianTangent
from iblr.families.base import AbstractFamily, Defaults, Draws, SettlingSteps, StepInfo
from iblr.families.component import Component
from iblr.families.curvature import LowRank, Parameterisation
from iblr.families.line_search import LineSearch
from iblr.linalg import matmul
from iblr.status import Status
from iblr.structure import Structure

MEAN_ABS = math.sqrt(2 / math.pi)
SPREAD = 1 - MEAN_ABS**2
QUADRATURE_REACH = 9.0
LARGEST_STEP = 0.1


class SkewTangent(eqx.Module):
    """A natural gradient at a skew Gaussian.

    Attributes:
        gradient: L_mu and L_alpha, one after the other.
        mu: the whitened natural gradient of mu, and the curvature of S.
        alpha: the whitened natural gradient of alpha.
    """

    gradient: Float[Array, " p"]
    mu: GaussianTangent
    alpha: Float[Array, " d"]


class Noise(NamedTuple):
    """What a draw mu + |w| alpha + eps A is made of."""

    skew: Float[Array, " M"]
    eps: Float[Array, "M d"]


class SkewGaussian(AbstractFamily):
    """A Gaussian with a one-sided tail along `alpha`.

    Attributes:
        base: N(mu, Sigma), which draws are spread around.
        alpha: the direction and length of the skew, flat; 0 is a Gaussian.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: (2 * z - jnp.exp(z)).sum()      # the logarithm of a Gamma
        >>> start = iblr.SkewGaussian.standard(1)
        >>> posterior = iblr.fit(log_density, start, key=jax.random.key(0), num_steps=1000)
        >>> bool(posterior.family.alpha[0] < 0)                     # a tail to the left
        True
    """

    base: Component
    alpha: Float[Array, " d"]
    structure: Structure

    def __init__(self, base: Component, alpha: Float[Array, " d"], structure: Structure):
        self.base, self.alpha, self.structure = base, alpha, structure

    @staticmethod
    def standard(
        dim: int | None = None, *, like: PyTree = None, dtype: Any = None, support: Any = None
    ) -> "SkewGaussian":
        """A standard normal start with a slight skew, which tells mu from alpha.

        As for `Gaussian.standard`; alpha is 1/10 in every coordinate.
        """
        call = "SkewGaussian.standard"
        structure, dtype = arguments.start_structure(call, dim, like, dtype, support)
        identity = jnp.eye(structure.dim, dtype=dtype)
        base = Component.from_roots(jnp.zeros(structure.dim, dtype), identity, identity)
        return SkewGaussian(base, jnp.full(structure.dim, 0.1, dtype), structure)

    @staticmethod
    def from_parameters(mu: PyTree, covariance: ArrayLike, alpha: PyTree) -> "SkewGaussian":
        """The member with given mu, Sigma and alpha; a pytree as `mu` gives its structure."""
        call = "SkewGaussian.from_parameters"
        dtype = arguments.floating(mu, covariance, alpha)
        vector, structure = arguments.flat_mean(call, mu, dtype)
        matrix = arguments.square(call, "covariance", covariance, structure.dim).astype(dtype)
        skew = structure.ravel(alpha, f"{call}(alpha=...)").astype(dtype)
        if skew.shape != vector.shape:
            raise ValueError(
                f"`{call}(mu, covariance, alpha)` needs an alpha of {vector.size} numbers, but got "
                f"shape {skew.shape}."
            )
        arguments.check_finite(call, "alpha", skew)
        factor = arguments.cholesky(call, "covariance", matrix).T
        base = Component.from_roots(vector, factor, jnp.linalg.inv(factor))
        return SkewGaussian(base, skew, structure)

    @property
    def mu(self) -> PyTree:
        """mu, in the structure of the coordinates."""
        return self.structure.unravel(self.base.mean)

    def with_support(self, support: Any) -> "SkewGaussian":
        """The same family over x, its points mapped onto the supports of the leaves."""
        return dataclasses.replace(self, structure=self.structure.with_support(support))

    # The family contract.

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes of the parameters."""
        return self.alpha.shape[:-1]

    @property
    def gradient_size(self) -> int:
        """mu and alpha."""
        return 2 * self.dim

    @property
    def defaults(self) -> Defaults:
        """Steps that settle late: alpha = 0 is a saddle, which is left slowly."""
        settling = lambda num_steps, pairs: SettlingSteps(LARGEST_STEP, num_steps)  # noqa: E731
        return Defaults(settling, True, 8, first_round=400)

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.alpha.dtype

    @property
    def mean(self) -> Float[Array, " d"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """mu + c alpha."""
        return self.base.mean + MEAN_ABS * self.alpha

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """The marginal standard deviations."""
        return jnp.sqrt(self.variances)

    @property
    def variances(self) -> Float[Array, " d"]:
        """The diagonal of the covariance."""
        return self.base.variances + SPREAD * self.alpha**2

    def root(self) -> Float[Array, "r d"]:
        """R with the covariance R'R, of d + 1 rows."""
        return jnp.concatenate([self.base.factor, math.sqrt(SPREAD) * self.alpha[None]])

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Sigma + (1 - c^2) alpha alpha'."""
        return matmul(self.root().T, self.root())

    @property
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the covariance."""
        return jnp.linalg.inv(self.covariance)

    @property
    def _whitened_alpha(self) -> Float[Array, " d"]:
        return self.base.standardise(self.alpha[None])[0]

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """mu + |w| alpha + eps A, or in pairs +- eps of one w."""
        skew_key, noise_key = jax.random.split(key)
        count = num // 2 if antithetic else num
        skew = jnp.abs(jax.random.normal(skew_key, (count,), self.dtype))
        E = jax.random.normal(noise_key, (count, self.dim), self.dtype)
        centres, X = self.base.mean + skew[:, None] * self.alpha, self.base.colour(E)
        rows = jnp.concatenate([centres + X, centres - X]) if antithetic else centres + X
        return Draws(rows, Noise(skew, E))

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """log q at independent draws, from their noise."""
        skew, E = draws.noise
        return self._log_prob_of_noise(skew[:, None] * self._whitened_alpha + E)

    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """log q at any coordinates."""
        return self._log_prob_of_noise(self.base.standardise(rows - self.base.mean))

    def _log_prob_of_noise(self, X: Float[Array, "M d"]) -> Float[Array, " M"]:
        a = self._whitened_alpha
        k, along = a @ a, X @ a
        # |x|^2 - (a.x)^2/(1 + k) without cancellation: across a, and along it.
        across = X - jnp.outer(along, a) / jnp.maximum(k, jnp.finfo(self.dtype).tiny)
        squares = jnp.sum(across**2, 1) + along**2 / jnp.maximum(
            k * (1 + k), jnp.finfo(self.dtype).tiny
        )
        constant = self.base.log_det + self.dim * math.log(2 * math.pi) + jnp.log1p(k)
        return math.log(2) - 0.5 * (constant + squares) + log_ndtr(along / jnp.sqrt(1 + k))

    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats, by quadrature in one dimension."""
        a = self._whitened_alpha
        return self.base.entropy() + 0.5 * jnp.log1p(a @ a) - entropy_of_skew(a @ a)

    def kl(self, other: Any) -> Float[Array, ""]:
        """KL(self || other) in nats, where `other` is a Gaussian."""
        return -self.entropy() - other.expected_log_prob(self)

    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """Not known in closed form."""
        raise ValueError(
            "A SkewGaussian has no exact term as a prior. Pass `prior=prior.log_prob` to `Target`."
        )

    def rep(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> SkewTangent:
        """Ghat = 2 A (dH/dSigma) A' - sym(E'Y)/M."""
        skew, E = draws.noise
        curvature = self.base.low_rank(1.0, E / len(E), self.base.whiten(slopes))
        return self._with_entropy(slopes.mean(0), skew @ slopes / len(E), curvature)

    def hess(
        self,
        draws: Draws,
        slopes: Float[Array, "M d"],
        values: Float[Array, " M"],
        hessians: Float[Array, "M d d"],
    ) -> SkewTangent:
        """Ghat = 2 A (dH/dSigma) A' - A E[hess lbar] A'."""
        skew = draws.noise.skew
        curvature = self.base.from_hessian(hessians.mean(0))
        return self._with_entropy(slopes.mean(0), skew @ slopes / len(skew), curvature)

    def stl(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> SkewTangent:
        """From the slopes of b = lbar + log q at pairs +- eps."""
        skew, E = draws.noise
        U = slopes + jax.grad(lambda rows: self.log_prob_rows(rows).sum())(draws.rows)
        up, down = jnp.split(U, 2)
        even, odd = 0.5 * (up + down), 0.5 * (up - down)
        curvature = self.base.low_rank(0.0, E / len(E), self.base.whiten(odd))
        return self._tangent(even.mean(0), skew @ even / len(E), curvature)

    def add_prior(self, tangent: SkewTangent, prior: Any, weight: Float[Array, ""]) -> SkewTangent:
        """The exact term of a Gaussian prior."""
        of_mu, of_alpha = jnp.split(tangent.gradient, 2)
        of_mu = of_mu + weight * prior.times_precision(self.mean - prior.mean)
        mixed = MEAN_ABS * (self.base.mean - prior.mean) + self.alpha
        of_alpha = of_alpha + weight * prior.times_precision(mixed)
        curvature = self.base.add_prior(tangent.mu, prior, weight).curvature
        return self._tangent(of_mu, of_alpha, curvature)

    def with_gradient(self, tangent: SkewTangent, gradient: Float[Array, " p"]) -> SkewTangent:
        """The tangent of other L_mu and L_alpha."""
        of_mu, of_alpha = jnp.split(gradient, 2)
        return self._tangent(of_mu, of_alpha, tangent.mu.curvature)

    def _with_entropy(
        self, of_mu: Float[Array, " d"], of_alpha: Float[Array, " d"], curvature: Any
    ) -> SkewTangent:
        """With the exact gradient of the entropy; the identity in `curvature` is that of S/2."""
        a = self._whitened_alpha
        k = a @ a
        slope = 1 / (1 + k) - 2 * jax.grad(entropy_of_skew)(k)
        of_entropy = slope * self.base.unwhiten(a[None])[0]
        rank_one = LowRank(jnp.zeros((), self.dtype), a[None], slope * a[None])
        curvature = _joined(curvature, rank_one)
        return self._tangent(of_mu, of_alpha - of_entropy, curvature)

    def _tangent(
        self, of_mu: Float[Array, " d"], of_alpha: Float[Array, " d"], curvature: Any
    ) -> SkewTangent:
        y, y_alpha = self.base.whiten(jnp.stack([of_mu, of_alpha]))
        along_mu = (y - MEAN_ABS * y_alpha) / SPREAD
        along_alpha = (y_alpha - MEAN_ABS * y) / SPREAD
        gradient = jnp.concatenate([of_mu, of_alpha])
        return SkewTangent(gradient, GaussianTangent(of_mu, along_mu, curvature), along_alpha)

    # The rules.

    def improved(
        self,
        tangent: SkewTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["SkewGaussian", StepInfo]:
        """That of the Gaussian, alpha beside mu; a trust region bounds the steps of both alike."""
        share = jnp.ones((), self.dtype)
        if trust_region:
            steps = step_size * jnp.stack([tangent.mu.whitened, tangent.alpha])
            radius = math.sqrt(self.dim)
            share = radius / jnp.maximum(jnp.linalg.norm(steps, axis=1).max(), radius)
        moved = self.base.improved(
            dataclasses.replace(tangent.mu, whitened=share * tangent.mu.whitened),
            step_size,
            curvature_step_size,
            parameterisation,
            trust_region,
        )
        family, info = self._moved(moved, share * step_size * tangent.alpha)
        return family, info._replace(mean_shrunk=share * info.mean_shrunk)

    def original(
        self,
        tangent: SkewTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["SkewGaussian", StepInfo]:
        """The rule without the curvature term; mu moves in the new metric, alpha in the old."""
        moved = self.base.original(
            tangent.mu, step_size, curvature_step_size, parameterisation, line_search
        )
        return self._moved(moved, moved[1].mean_shrunk * step_size * tangent.alpha)

    def geodesic(
        self,
        tangent: SkewTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["SkewGaussian", StepInfo]:
        """The exact block geodesics: straight in [mu; alpha], exponential in S."""
        moved = self.base.geodesic(tangent.mu, step_size, curvature_step_size)
        return self._moved(moved, step_size * tangent.alpha)

    def refreshed(self) -> tuple["SkewGaussian", Float[Array, ""]]:
        """The Gaussian refreshed."""
        base, drift = self.base.refreshed()
        return dataclasses.replace(self, base=base), drift

    def free(self) -> dict[str, Any]:
        """Those of the Gaussian, and alpha."""
        return {"base": self.base.free(), "alpha": self.alpha}

    def from_free(self, theta: dict[str, Any]) -> "SkewGaussian":
        """The Gaussian at its parameters, and alpha."""
        return SkewGaussian(self.base.from_free(theta["base"]), theta["alpha"], self.structure)

    def free_gradient(self, tangent: SkewTangent, theta: dict[str, Any]) -> dict[str, Any]:
        """L_mu, L_alpha, and that of C as in a Gaussian, since G = -2 L_Sigma there too."""
        of_base = self.base.free_gradient(tangent.mu, theta["base"])
        return {"base": of_base, "alpha": jnp.split(tangent.gradient, 2)[1]}

    def _moved(
        self, moved: tuple[Any, StepInfo], step: Float[Array, " d"]
    ) -> tuple["SkewGaussian", StepInfo]:
        """The family with the moved Gaussian, alpha less step A in the old metric."""
        base, info = moved
        alpha = self.alpha - self.base.colour(step[None])[0]
        fine = ~info.refused & jnp.isfinite(alpha).all()
        after = SkewGaussian(base, alpha, self.structure)
        kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), after, self)
        status = Status.where(info.refused | fine, info.status, Status.nonfinite)
        return kept, info._replace(status=status)


def entropy_of_skew(k: Float[Array, ""]) -> Float[Array, ""]:
    """h(k) = E[2 Phi(y) log(2 Phi(y))] for y ~ N(0, k).

    Gauss's rule on |y| < 9 min(1, sqrt(k)); beyond that 2 Phi is 2 or 0, or y does not come.
    """
    nodes, weights = np.polynomial.legendre.leggauss(80)
    scale = jnp.sqrt(jnp.maximum(k, jnp.finfo(k.dtype).tiny))
    reach = QUADRATURE_REACH * jnp.minimum(1.0, scale)
    y = reach * jnp.asarray(nodes, k.dtype)
    log_double = math.log(2) + log_ndtr(y)
    density = jnp.exp(-0.5 * (y / scale) ** 2) / (math.sqrt(2 * math.pi) * scale)
    inside = reach * jnp.asarray(weights, k.dtype) @ (density * jnp.exp(log_double) * log_double)
    return inside + 2 * math.log(2) * ndtr(-reach / scale)


def _joined(curvature: Any, rank_one: LowRank) -> Any:
    """The sum, of low rank where `curvature` is."""
    if not isinstance(curvature, LowRank):
        return curvature.plus(rank_one)
    return LowRank(
        curvature.shift,
        jnp.concatenate([curvature.left, rank_one.left]),
        jnp.concatenate([curvature.right, rank_one.right]),
    )

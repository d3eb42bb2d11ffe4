"""What the families of positive numbers share: scalar blocks, each updated by a factor.

A point is an array of independent positive numbers z_j, each with parameters lambda_i > 0 in scalar
blocks that are block-coordinate natural ([LSK20] Assumptions 1 to 3). In one dimension all there is
to know of a block are two positive numbers,

    weight       w = lambda^2 F                the Fisher information of log lambda
    bend         c = -lambda Gamma             the curvature, Gamma = F^-1 1/2 D^3 A

and with the relative step x = t ghat / lambda = t (dL / dlog lambda) / w, the rules are

    improved     lambda <- lambda (1 - x + c x^2 / 2)            eq. our_iblr
    geodesic     lambda <- lambda exp(-x)                        c = 1, where F is proportional to
                 lambda <- lambda (1 - (1 - c) x)^(1/(1 - c))    lambda^(-2c)

The factor of the first is at least 1 - 1/(2c), so it is positive at every step size if c > 1/2:
that is all of Theorem 2 and of the lemmas of appendices G and H, where c is at least 3/4. The
original rule moves the natural parameters eta(lambda) along the same tangent vector,

    original     eta <- eta - t (d eta / d lambda) ghat          eq. blr

and eta must stay positive.

The negative ELBO L is differentiated by implicit reparameterisation: a draw z is a fixed quantile,
so with slopes W of lbar = -log p at the draws

    dL / dlog lambda_i = E[(dlog z / dlog lambda_i) z (W + s)]

where s = grad log q at the draws (`stl`: the form b(z) = lbar + log q of appendices G and H), or
zero with the exact gradient of the entropy subtracted (`rep`). The mean of the product is estimated
as a covariance and a product of means, as E[dlog z / dlog lambda_i] = dE[log z] / dlog lambda_i is
known: far from the target z (W + s) is large and nearly constant, and its product with the noise of
the other factor would drown the shape.

All of it is in log space: u = log(z / E z) is what is drawn, so that nothing underflows where z
would; z itself is kept at or above the smallest normal number over the rounding unit (1e-31 in
float32), so that k/z does not overflow.
"""

import abc
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from iblr.families.base import AbstractFamily, Draws, StepInfo, count_draws
from iblr.families.curvature import LARGEST_GAIN, LARGEST_LOSS, Parameterisation
from iblr.families.line_search import LineSearch
from iblr.status import Status
from iblr.support import safe_range

Blocks = tuple[Float[Array, " d"], ...]
Rows = Float[Array, "M d"]


class PositiveTangent(eqx.Module):
    """A natural gradient at a positive family.

    Attributes:
        derivatives: dL / dlog lambda, block after block.
        directions: ghat / lambda, the relative natural gradient of every block.
        underflows: numbers that were drawn below the smallest one and held there.
    """

    derivatives: Float[Array, " p"]
    directions: Blocks
    underflows: Int[Array, ""] | None = None

    @property
    def gradient(self) -> Float[Array, " 0"]:
        """Nothing: where steps multiply, an average over steps would overshoot by orders."""
        return jnp.zeros(0, self.derivatives.dtype)


class AbstractPositive(AbstractFamily):
    """Independent positive numbers with scalar blocks."""

    blocks: eqx.AbstractVar[Blocks]

    shape_block: ClassVar[int | None]
    natural_floors: ClassVar[tuple[float, ...]]
    line_search: ClassVar[LineSearch] = LineSearch(share=0.8)

    # One family, in nine quantities; all entry by entry.

    @property
    @abc.abstractmethod
    def weights(self) -> Blocks:
        """w = lambda^2 F of every block."""

    @property
    @abc.abstractmethod
    def bends(self) -> Blocks:
        """c = -lambda Gamma of every block."""

    @abc.abstractmethod
    def geodesic_factors(self, steps: Blocks) -> Blocks:
        """What a relative step x along the exact geodesic multiplies every block by."""

    @abc.abstractmethod
    def to_natural(self, blocks: Blocks) -> Blocks:
        """The natural parameters eta(lambda), up to constant factors, so that all are positive."""

    @abc.abstractmethod
    def from_natural(self, natural: Blocks) -> Blocks:
        """The blocks of given natural parameters."""

    @abc.abstractmethod
    def log_ratios(self, key: Key[Array, ""], num: int) -> Rows:
        """Draws of u = log(z / E z)."""

    @abc.abstractmethod
    def log_slopes(self, ratios: Rows) -> tuple[Rows, ...]:
        """dlog z / dlog lambda_i at a fixed quantile, for every block."""

    @abc.abstractmethod
    def log_densities(self, ratios: Rows) -> Rows:
        """log q(z) of every number."""

    @abc.abstractmethod
    def log_density_slopes(self, ratios: Rows) -> Rows:
        """z d log q(z) / dz of every number."""

    # Moments that make the terms of priors exact.

    @property
    @abc.abstractmethod
    def mean(self) -> Float[Array, " d"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """E z."""

    @property
    @abc.abstractmethod
    def variances(self) -> Float[Array, " d"]:
        """The variance of z."""

    @property
    @abc.abstractmethod
    def log_gap(self) -> Float[Array, " d"]:
        """log E z - E log z."""

    @property
    @abc.abstractmethod
    def inverse_gap(self) -> Float[Array, " d"]:
        """E 1/z - 1 / E z, infinite where the first is."""

    @property
    def expected_log(self) -> Float[Array, " d"]:
        """E log z."""
        return jnp.log(self.mean) - self.log_gap

    @abc.abstractmethod
    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats."""

    # The family contract.

    def with_blocks(self, blocks: Blocks) -> "AbstractPositive":
        """The member with other parameters."""
        return eqx.tree_at(lambda q: q.blocks, self, blocks)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading axes of the parameters."""
        return self.blocks[0].shape[:-1]

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.blocks[0].dtype

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """The standard deviations of z."""
        return jnp.sqrt(self.variances)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Diagonal: the numbers are independent."""
        return jnp.diag(self.variances)

    @property
    def precision(self) -> Float[Array, "d d"]:
        """The inverse of the covariance."""
        return jnp.diag(1 / self.variances)

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """Independent draws, differentiable in the parameters by implicit reparameterisation."""
        ratios = jax.lax.stop_gradient(self.log_ratios(key, num))
        rows = jnp.exp(_log_draws(self, ratios))
        return Draws(jnp.maximum(rows, safe_range(self.dtype)[0]), ratios)

    def sample_log(self, key: Key[Array, ""], num: int | None = None) -> Any:
        """Logarithms of what `sample` draws, also where z itself would underflow."""
        ratios = jax.lax.stop_gradient(self.log_ratios(key, count_draws("sample_log", num)))
        rows = _log_draws(self, ratios)
        return self.structure.unravel(rows[0] if num is None else rows)

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """log q at draws, from u; where z underflowed, at the smallest number, as the target's."""
        return self.log_densities(jnp.maximum(draws.noise, self._smallest_ratio)).sum(-1)

    @property
    def _smallest_ratio(self) -> Float[Array, " d"]:
        return math.log(safe_range(self.dtype)[0]) - jnp.log(self.mean)

    def log_prob_rows(self, rows: Rows) -> Float[Array, " M"]:
        """log q, minus infinity outside the support."""
        inside = (rows > 0) & (rows < jnp.inf)
        ratios = jnp.log(jnp.where(inside, rows, 1.0)) - jnp.log(self.mean)
        outside = jnp.where(jnp.isnan(rows), jnp.nan, -jnp.inf)
        return jnp.where(inside, self.log_densities(ratios), outside).sum(-1)

    def kl(self, other: Any) -> Float[Array, ""]:
        """KL(self || other) in nats, in closed form between all positive families."""
        if not isinstance(other, AbstractPositive) or other.dim != self.dim:
            raise ValueError(
                f"`kl(other)` needs a positive family over as many numbers ({self.dim}), but got "
                f"{getattr(other, 'name', repr(other))}."
            )
        return -self.entropy() - other.expected_log_prob(self)

    def check_same_points(self, q: Any) -> None:
        """Raise unless q is a positive family over as many numbers."""
        if not isinstance(q, AbstractPositive) or q.dim != self.dim:
            raise ValueError(
                f"`expected_log_prob(q)` of a {self.name} needs a positive family over as many "
                f"numbers ({self.dim}), but got {getattr(q, 'name', q)}. Pass a prior as a "
                "function: `prior=prior.log_prob`."
            )

    def rep(self, draws: Draws, slopes: Rows, values: Float[Array, " M"]) -> PositiveTangent:
        """Implicit reparameterisation for lbar, the gradient of the entropy exact."""
        tangent = self._from_slopes(draws, draws.rows * slopes)
        return self._plus(tangent, lambda q: -q.entropy())

    def stl(self, draws: Draws, slopes: Rows, values: Float[Array, " M"]) -> PositiveTangent:
        """Implicit reparameterisation for b(z) = lbar(z) + log q(z), q held in log q."""
        return self._from_slopes(draws, draws.rows * slopes + self.log_density_slopes(draws.noise))

    def add_prior(
        self, tangent: PositiveTangent, prior: Any, weight: Float[Array, ""]
    ) -> PositiveTangent:
        """The exact term, the derivative of E_q[log prior]."""
        return self._plus(tangent, lambda q: -weight * prior.expected_log_prob(q))

    def tangent(
        self, derivatives: Float[Array, " p"], underflows: Int[Array, ""] | None = None
    ) -> PositiveTangent:
        """The natural gradient for dL / dlog lambda, block after block."""
        parts = jnp.split(derivatives, len(self.blocks))
        directions = tuple(g / w for g, w in zip(parts, self.weights, strict=True))
        return PositiveTangent(derivatives, directions, underflows)

    def _from_slopes(self, draws: Draws, log_slopes: Rows) -> PositiveTangent:
        """From the slopes of the integrand in log z, by covariances; unbiased from one draw on."""
        centre = log_slopes.mean(0)
        rest = log_slopes - centre if len(log_slopes) > 1 else log_slopes
        count = max(len(log_slopes) - 1, 1)
        known = self._log_derivatives(lambda q: q.expected_log.sum())
        parts = [
            ((slope - mean) * rest).sum(0) / count + mean * centre
            for slope, mean in zip(self.log_slopes(draws.noise), known, strict=True)
        ]
        underflows = jnp.sum(draws.noise < self._smallest_ratio).astype(jnp.int32)
        return self.tangent(jnp.concatenate(parts), underflows)

    def _plus(self, tangent: PositiveTangent, exact: Any) -> PositiveTangent:
        """The tangent with that of a function of the family added."""
        parts = self._log_derivatives(exact)
        return self.tangent(tangent.derivatives + jnp.concatenate(parts), tangent.underflows)

    def _log_derivatives(self, function: Any) -> list[Float[Array, " d"]]:
        """Those of a function of the family in log lambda, block by block."""
        gradients = jax.grad(lambda blocks: function(self.with_blocks(blocks)))(self.blocks)
        return [block * g for block, g in zip(self.blocks, gradients, strict=True)]

    # The rules.

    def improved(
        self,
        tangent: PositiveTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["AbstractPositive", StepInfo]:
        """lambda <- lambda (1 - x + c x^2 / 2), [LSK20] eq. our_iblr."""
        parameterisation.check_only(self.name)
        steps = self._relative_steps(tangent, step_size, curvature_step_size)
        shrunk = jnp.ones((), self.dtype)
        if trust_region:
            largest = jnp.stack([x.max() for x in steps]).max()
            shrunk = jnp.minimum(1, LARGEST_LOSS / jnp.maximum(largest, LARGEST_LOSS))
            steps = tuple(
                jnp.where(x < 0, jnp.maximum(x, -LARGEST_GAIN), shrunk * x) for x in steps
            )
        factors = [1 - x + 0.5 * c * x * x for x, c in zip(steps, self.bends, strict=True)]
        blocks = tuple(b * f for b, f in zip(self.blocks, factors, strict=True))
        return self._moved(tangent, blocks, jnp.asarray(True), shrunk)

    def original(
        self,
        tangent: PositiveTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["AbstractPositive", StepInfo]:
        """eta <- eta - t eta_hat in the natural parameters, [LSK20] eq. blr."""
        parameterisation.check_only(self.name)
        steps = self._relative_steps(tangent, step_size, curvature_step_size)
        along = tuple(b * x for b, x in zip(self.blocks, steps, strict=True))
        natural, decrease = jax.jvp(self.to_natural, (self.blocks,), (along,))
        share = jnp.ones((), self.dtype)
        if line_search is not None:
            ways = [
                d / (eta - jnp.where(eta > floor, floor, 0.0))
                for eta, d, floor in zip(natural, decrease, self.natural_floors, strict=True)
            ]
            share = line_search.cut(jnp.stack([way.max() for way in ways]).max())
        natural = tuple(eta - share * d for eta, d in zip(natural, decrease, strict=True))
        inside = jnp.stack([(eta > 0).all() for eta in natural]).all()
        kept = tuple(jnp.where(inside, eta, 1) for eta in natural)
        return self._moved(tangent, self.from_natural(kept), inside, share)

    def geodesic(
        self,
        tangent: PositiveTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["AbstractPositive", StepInfo]:
        """The exact geodesic of every block, where its length has a closed form."""
        steps = self._relative_steps(tangent, step_size, curvature_step_size)
        factors = self.geodesic_factors(steps)
        inside = jnp.stack([(factor > 0).all() for factor in factors]).all()
        blocks = tuple(b * f for b, f in zip(self.blocks, factors, strict=True))
        return self._moved(tangent, blocks, inside, jnp.ones((), self.dtype))

    def refreshed(self) -> tuple["AbstractPositive", Float[Array, ""]]:
        """Itself: nothing derived is stored."""
        return self, jnp.zeros((), self.dtype)

    def losses(self, tangent: PositiveTangent) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Numbers that underflowed, and none left out."""
        none = jnp.zeros((), jnp.int32)
        return none if tangent.underflows is None else tangent.underflows, none

    def free(self) -> Blocks:
        """theta with eta = softplus(theta) + floor; a start at its floor is put just above it."""
        natural = self.to_natural(self.blocks)
        rest = [eta - floor for eta, floor in zip(natural, self.natural_floors, strict=True)]
        least = jnp.finfo(self.dtype).eps
        above = [jnp.maximum(r, least * eta) for r, eta in zip(rest, natural, strict=True)]
        return tuple(y + jnp.log(-jnp.expm1(-y)) for y in above)

    def from_free(self, theta: Blocks) -> "AbstractPositive":
        """The member at theta, nan where a parameter would underflow."""
        blocks, tiny = self._blocks_of(theta), jnp.finfo(self.dtype).tiny
        return self.with_blocks(tuple(jnp.where(b >= tiny, b, jnp.nan) for b in blocks))

    def free_gradient(self, tangent: PositiveTangent, theta: Blocks) -> Blocks:
        """(dlog lambda / dtheta)' (dL / dlog lambda)."""
        logs = lambda theta: jnp.concatenate([jnp.log(b) for b in self._blocks_of(theta)])  # noqa: E731
        return jax.vjp(logs, theta)[1](tangent.derivatives)[0]

    def _blocks_of(self, theta: Blocks) -> Blocks:
        parts = zip(theta, self.natural_floors, strict=True)
        return self.from_natural(tuple(jax.nn.softplus(x) + floor for x, floor in parts))

    def _relative_steps(
        self, tangent: PositiveTangent, t: Float[Array, ""], t_shape: Float[Array, ""]
    ) -> Blocks:
        """x of every block: the block of the shape takes the curvature's step size."""
        return tuple(
            (t_shape if i == self.shape_block else t) * direction
            for i, direction in enumerate(tangent.directions)
        )

    def _moved(
        self,
        tangent: PositiveTangent,
        blocks: Blocks,
        inside: Bool[Array, ""],
        shrunk: Float[Array, ""],
    ) -> tuple["AbstractPositive", StepInfo]:
        """The family at `blocks` if that is inside the set and within the precision's range."""
        finite = jnp.stack([jnp.isfinite(x).all() for x in tangent.directions]).all()
        limits = jnp.finfo(self.dtype)
        fits = jnp.stack([((b >= limits.tiny) & (b <= limits.max)).all() for b in blocks]).all()
        ok = finite & inside & fits
        kept = tuple(jnp.where(ok, new, old) for new, old in zip(blocks, self.blocks, strict=True))
        status = Status.where(
            ok,
            Status.ok,
            Status.where(
                ~finite,
                Status.nonfinite,
                Status.where(inside, Status.out_of_range, Status.left_set),
            ),
        )
        underflows, none = self.losses(tangent)
        return self.with_blocks(kept), StepInfo(status, underflows, shrunk, shrunk, none, none)


@jax.custom_jvp
def _log_draws(family: AbstractPositive, ratios: Rows) -> Rows:
    """log z, with the implicit derivative in the family's blocks."""
    return jnp.log(family.mean) + ratios


@_log_draws.defjvp
def _log_draws_jvp(primals, tangents):
    (family, ratios), (moved, _) = primals, tangents
    slopes = family.log_slopes(ratios)
    parts = zip(slopes, moved.blocks, family.blocks, strict=True)
    changes = [slope * d / block for slope, d, block in parts]
    return _log_draws(family, ratios), jnp.stack(changes).sum(0)

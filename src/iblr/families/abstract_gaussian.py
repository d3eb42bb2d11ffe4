"""What the full and the diagonal Gaussian share: everything that happens in whitened coordinates.

q(z) = N(z | mu, Sigma) with Sigma = A'A, and rows for vectors: a draw is z = mu + eps A with eps
standard normal, a gradient w is whitened as w A', and mu moves by

    mu <- mu - t (A g) A = mu - t Sigma g,     g = E[grad lbar]              [LSK20] eq. ivon_1

in the old metric (the original rule, eq. von_2, moves mu in the new one). The root moves by the
scalar function of the spectrum that `curvature` explains.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree

from iblr.families import curvature as curvature_
from iblr.families.base import AbstractFamily, Defaults, Draws, StepInfo, modest_steps
from iblr.families.curvature import Dense, Diagonal, LowRank, Parameterisation, RootChange
from iblr.families.line_search import LineSearch
from iblr.noise import standard_normals
from iblr.status import Status


class GaussianTangent(eqx.Module):
    """A natural gradient at a Gaussian.

    Attributes:
        gradient: g, the gradient of the negative ELBO in the mean.
        whitened: A g, the same in whitened coordinates.
        curvature: Ghat = A G A', the whitened natural gradient in the precision.
    """

    gradient: Float[Array, " d"]
    whitened: Float[Array, " d"]
    curvature: LowRank | Dense | Diagonal


class AbstractGaussian(AbstractFamily):
    """A Gaussian with some root of its covariance."""

    needs_inverse: ClassVar[bool] = False  # whether T must come with its inverse

    if TYPE_CHECKING:

        @property
        def log_det(self) -> Float[Array, ""]:
            """The log-determinant of the covariance, stored or computed."""
            ...
    else:
        log_det: eqx.AbstractVar[Float[Array, ""]]

    # The root, in six verbs; vectors are rows.

    @abc.abstractmethod
    def colour(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows eps to eps A."""

    @abc.abstractmethod
    def whiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows w to w A'."""

    @abc.abstractmethod
    def standardise(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows x to x A^-1: the noise that `colour` would turn into x."""

    @abc.abstractmethod
    def unwhiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows y to y A^-T: the slopes that `whiten` would turn into y."""

    @abc.abstractmethod
    def root(self) -> Float[Array, "d d"]:
        """A as a matrix."""

    @abc.abstractmethod
    def rescaled(
        self, change: RootChange, step: Float[Array, " d"], ok: Bool[Array, ""]
    ) -> tuple["AbstractGaussian", Bool[Array, ""]]:
        """The family with root T A and mean less step A, and whether it is finite.

        Where `ok` is false or the result would not be finite, the family itself.
        """

    # The geometry, as the estimators see it.

    @abc.abstractmethod
    def low_rank(
        self, shift: float, left: Float[Array, "M d"], right: Float[Array, "M d"]
    ) -> LowRank | Diagonal:
        """Ghat = shift * I - sym(left' right), projected onto the family."""

    @abc.abstractmethod
    def secant(
        self, noise: Float[Array, "P d"], change: Float[Array, "P d"], ridge: float
    ) -> LowRank | Diagonal:
        """-K for the smallest symmetric K of the family with K noise' = change', ridged."""

    @abc.abstractmethod
    def from_hessian(self, hessian: Float[Array, "d d"], shift: float = 1.0) -> Dense | Diagonal:
        """shift * I - A H A' for a Hessian of the negative log density."""

    @abc.abstractmethod
    def add_prior(
        self, tangent: GaussianTangent, prior: Any, weight: Float[Array, ""]
    ) -> GaussianTangent:
        """The tangent with the exact term of `weight * log prior` added."""

    def rep(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> GaussianTangent:
        """Ghat = I - sym(E'Y) / M, the paper's "-rep", [LSK20] eq. gauss_cov_rep."""
        Y = self.whiten(slopes)
        curvature = self.low_rank(1.0, draws.noise / len(Y), Y)
        return GaussianTangent(slopes.mean(0), Y.mean(0), curvature)

    def hess(
        self,
        draws: Draws,
        slopes: Float[Array, "M d"],
        values: Float[Array, " M"],
        hessians: Float[Array, "M d d"],
    ) -> GaussianTangent:
        """Ghat = I - A H A' with H the mean Hessian, the paper's "-hess", eq. gauss_cov_hess."""
        gradient = slopes.mean(0)
        curvature = self.from_hessian(hessians.mean(0))
        return GaussianTangent(gradient, self.whiten(gradient[None])[0], curvature)

    def stl(
        self, draws: Draws, slopes: Float[Array, "M d"], values: Float[Array, " M"]
    ) -> GaussianTangent:
        """Ghat = -sym(E'D) / P with D = (Y+ - Y-)/2 - E, [LSK20] eq. mog_cov_rep at K = 1."""
        gradient, whitened, D = self.differences(draws, slopes)
        curvature = self.low_rank(0.0, draws.noise / len(draws.noise), D)
        return GaussianTangent(gradient, whitened, curvature)

    def differences(
        self, draws: Draws, slopes: Float[Array, "M d"]
    ) -> tuple[Float[Array, " d"], Float[Array, " d"], Float[Array, "P d"]]:
        """From antithetic draws: the mean gradient, the same whitened, and D.

        D is E (H - I), whitened, for a quadratic target of Hessian H.
        """
        E, (up, down) = draws.noise, jnp.split(slopes, 2)
        gradient = 0.5 * (up + down).mean(0)
        Y = self.whiten(jnp.concatenate([0.5 * (up - down), gradient[None]]))
        return gradient, Y[-1], Y[:-1] - E

    def with_gradient(
        self, tangent: GaussianTangent, gradient: Float[Array, " d"]
    ) -> GaussianTangent:
        """The tangent with another gradient in the mean."""
        whitened = self.whiten(gradient[None])[0]
        return dataclasses.replace(tangent, gradient=gradient, whitened=whitened)

    def with_support(self, support: Any) -> "AbstractGaussian":
        """The same Gaussian over x, its points mapped onto the supports of the leaves.

        Example:
            >>> import iblr, jax
            >>> q = iblr.Gaussian.standard(like={"tau": 0.0, "w": jax.numpy.zeros(2)})
            >>> q = q.with_support({"tau": iblr.positive})
            >>> bool(q.sample(jax.random.key(0))["tau"] > 0)
            True
        """
        return dataclasses.replace(self, structure=self.structure.with_support(support))

    # Moments.

    @property
    @abc.abstractmethod
    def variances(self) -> Float[Array, " d"]:
        """The diagonal of the covariance."""

    @property
    def standard_deviations(self) -> Float[Array, " d"]:
        """The marginal standard deviations."""
        return jnp.sqrt(self.variances)

    def times_precision(self, row: Float[Array, " d"]) -> Float[Array, " d"]:
        """S x."""
        return self.unwhiten(self.standardise(row[None]))[0]

    @property
    @abc.abstractmethod
    def precision_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of S."""

    @abc.abstractmethod
    def expected_square(self, q: Any) -> Float[Array, ""]:
        """E_q of the squared Mahalanobis distance from this Gaussian."""

    # The family contract.

    @property
    def dtype(self) -> Any:
        """The floating-point type of the parameters."""
        return self.mean.dtype

    @property
    def gradient_size(self) -> int:
        """That of the mean."""
        return self.dim

    @property
    def defaults(self) -> Defaults:
        """Modest steps for a Gaussian over real parameters."""
        if not self.structure.is_real:
            return super().defaults
        return Defaults(lambda num_steps, pairs: modest_steps, False, 8)

    def draw(self, key: Key[Array, ""], num: int, antithetic: bool = False) -> Draws:
        """mu + E A, or mu +- E A with half as many rows E."""
        rows = num // 2 if antithetic else num
        E = standard_normals(key, (rows, self.dim), self.mean.dtype)
        X = self.colour(E)
        if antithetic:
            return Draws(jnp.concatenate([self.mean + X, self.mean - X]), E)
        return Draws(self.mean + X, E)

    def log_prob_of_draws(self, draws: Draws) -> Float[Array, " M"]:
        """log q at independent draws, which needs only the noise."""
        return self.log_prob_of_noise(draws.noise)

    def log_prob_rows(self, rows: Float[Array, "M d"]) -> Float[Array, " M"]:
        """log q at any coordinates."""
        return self.log_prob_of_noise(self.standardise(rows - self.mean))

    def intervals(self, probability: float) -> tuple[PyTree, PyTree]:
        """In closed form where every leaf is real."""
        if not self.structure.is_real:
            return super().intervals(probability)
        reach = jax.scipy.special.ndtri(0.5 * (1 + probability)) * self.standard_deviations
        return tuple(map(self.structure.unravel, (self.mean - reach, self.mean + reach)))

    def log_prob_of_noise(self, noise: Float[Array, "M d"]) -> Float[Array, " M"]:
        """log q at mu + noise A."""
        return -0.5 * (jnp.sum(noise**2, axis=-1) + self.log_det + self.dim * jnp.log(2 * jnp.pi))

    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats."""
        return 0.5 * (self.log_det + self.dim * (1 + jnp.log(2 * jnp.pi)))

    def kl(self, other: "AbstractGaussian") -> Float[Array, ""]:
        """KL(self || other) in nats."""
        if not isinstance(other, AbstractGaussian) or other.dim != self.dim:
            raise ValueError(
                f"`kl(other)` needs a Gaussian of dimension {self.dim}, but got {other!r}."
            )
        return -self.entropy() - other.expected_log_prob(self)

    def expected_log_prob(self, q: Any) -> Float[Array, ""]:
        """E_q[log self(z)] in closed form, for q with a root of its covariance."""
        if not hasattr(q, "root") or q.dim != self.dim:
            raise ValueError(
                f"`expected_log_prob(q)` of a Gaussian needs a Gaussian q over as many coordinates "
                f"({self.dim}), but got {getattr(q, 'name', q)}. Pass a prior as a function: "
                "`prior=prior.log_prob`."
            )
        constant = self.log_det + self.dim * jnp.log(2 * jnp.pi)
        return -0.5 * (self.expected_square(q) + constant)

    def improved(
        self,
        tangent: GaussianTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        trust_region: bool,
    ) -> tuple["AbstractGaussian", StepInfo]:
        """[LSK20] eq. ivon_1 and ivon_2; the mean moves in the old metric."""
        rule = curvature_.improved(parameterisation, trust_region)
        return self._moved(tangent, step_size, curvature_step_size, rule)

    def original(
        self,
        tangent: GaussianTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
        parameterisation: Parameterisation,
        line_search: LineSearch | None,
    ) -> tuple["AbstractGaussian", StepInfo]:
        """[LSK20] eq. von_1 and von_2; the mean moves in the new metric."""
        rule = curvature_.original(parameterisation)
        if line_search is None:
            return self._moved(tangent, step_size, curvature_step_size, rule)
        share = tangent.curvature.spectrum().cut(
            curvature_step_size * parameterisation.value, line_search
        )
        family, info = self._moved(tangent, share * step_size, share * curvature_step_size, rule)
        return family, info._replace(shrunk=share, mean_shrunk=share)

    def geodesic(
        self,
        tangent: GaussianTangent,
        step_size: Float[Array, ""],
        curvature_step_size: Float[Array, ""],
    ) -> tuple["AbstractGaussian", StepInfo]:
        """The exact block geodesic: straight in the mean, exponential in the precision."""
        return self._moved(tangent, step_size, curvature_step_size, curvature_.geodesic())

    def _moved(
        self,
        tangent: GaussianTangent,
        t: Float[Array, ""],
        t_curvature: Float[Array, ""],
        rule: curvature_.Rule,
    ) -> tuple["AbstractGaussian", StepInfo]:
        if self.needs_inverse:
            rule = rule._replace(is_polynomial=False)
        change = tangent.curvature.change(t_curvature, rule)
        step = t * tangent.whitened
        mean_shrunk = jnp.ones((), step.dtype)
        if rule.trust_region:
            length = _safe_norm(step)
            radius = jnp.sqrt(jnp.asarray(self.dim, step.dtype))
            mean_shrunk = radius / jnp.maximum(length, radius)
            step = mean_shrunk * step
        change = change._replace(finite=change.finite & all_finite(step))
        if rule.new_metric:  # T is symmetric here
            step = change.apply(change.apply(step))
        family, info = self.moved_by(change, step)
        return family, info._replace(mean_shrunk=mean_shrunk)

    def moved_by(
        self, change: RootChange, step: Float[Array, " d"]
    ) -> tuple["AbstractGaussian", StepInfo]:
        """The family with root T A and mean less step A; nan in T means that it left the set."""
        inside = all_finite(change.core, change.rest, change.log_det)
        family, moved = self.rescaled(change, step, change.finite & inside)
        left = change.finite & ~inside
        status = Status.where(
            moved, Status.ok, Status.where(left, Status.left_set, Status.nonfinite)
        )
        limited, none = jnp.where(moved, change.limited, 0), jnp.zeros((), jnp.int32)
        whole = jnp.ones((), step.dtype)
        return family, StepInfo(status, limited, change.shrunk, whole, none, none)


def _safe_norm(x: Float[Array, " d"]) -> Float[Array, ""]:
    largest = jnp.maximum(jnp.abs(x).max(), jnp.finfo(x.dtype).tiny)
    return largest * jnp.linalg.norm(x / largest)


def all_finite(*arrays: Float[Array, "..."]) -> Bool[Array, ""]:
    """Whether every entry of every array is finite."""
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()

"""Estimators of the natural gradient: sample q, evaluate the target, return a tangent.

Every estimator is a final `eqx.Module` called as `estimator(family, target, key) -> tangent`. It
draws rows Z, takes the slopes W of lbar = -log p there, and leaves the family to turn them into its
natural gradient. `Rep` and `Stl` do so for every family; they differ in the part of log q:

    Rep     grad of E[lbar] from the slopes, that of the entropy exact
    Stl     the slopes of b = lbar + log q, whose noise vanishes where q is the target

The other three are of the Gaussians alone and work in whitened coordinates. With noise E, draws
Z = mu + E A and whitened slopes Y = W A', the whitened natural gradient Ghat of the precision is

    Rep     I - sym(E'Y) / M                         the paper's "-rep", eq. gauss_cov_rep
    Stl     -sym(E'D) / P,  D = Y - E                eq. mog_cov_rep at K = 1
    Secant  -K,  the smallest symmetric K, K E' = D'
    Hess    I - A E[hess lbar] A'                    the paper's "-hess", eq. gauss_cov_hess
    AtMean  I - A hess lbar(mu) A'                   the online Newton method, section 3.1

For the positive families the slopes reach the parameters by implicit reparameterisation (appendices
F, G and H).
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent
from iblr.families.base import AbstractFamily, Draws
from iblr.target import FlatFunction, Target


class AbstractEstimator(eqx.Module):
    """`(family, target, key) -> tangent`; knows nothing of step sizes."""

    @abc.abstractmethod
    def num_gradients(self, family: AbstractFamily) -> int:
        """Evaluations of the target's gradient in one call."""

    @abc.abstractmethod
    def __call__(self, family: Any, target: Target, key: Key[Array, ""]) -> Any:
        """The natural gradient of the negative ELBO at `family`."""


class AbstractSampling(AbstractEstimator):
    """From independent draws, one gradient each."""

    samples: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        check_samples(f"{type(self).__name__}(samples=...)", self.samples)

    def num_gradients(self, family: AbstractFamily) -> int:
        """Evaluations of the target's gradient in one call."""
        return self.samples


class AbstractPairing(AbstractEstimator):
    """From pairs of draws in every group of the family, two gradients each."""

    pairs: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        check_samples(f"{type(self).__name__}(pairs=...)", self.pairs)

    def num_gradients(self, family: AbstractFamily) -> int:
        """Evaluations of the target's gradient in one call."""
        return 2 * self.pairs * family.groups


class Rep(AbstractSampling):
    """The reparameterisation estimator of the paper, from gradients at independent draws.

    The gradient of the entropy, and that of a prior given as a family, are exact.

    Args:
        samples: draws, and gradient evaluations, a step.
    """

    def __call__(self, family: AbstractFamily, target: Target, key: Key[Array, ""]) -> Any:
        """See `family.rep`."""
        draw_key, batch_key = jax.random.split(key)
        draws = family.draw(draw_key, self.samples)
        function = target.sampled(family.structure, target.batch(batch_key))
        tangent = family.rep(draws, *evaluated(function, draws.rows))
        return with_prior(family, target, tangent)


class Stl(AbstractPairing):
    """Sticking the landing, from pairs of draws: noiseless where the family holds the target.

    A prior given as a family enters through its gradient at the draws: the noise vanishes at the
    optimum only if the prior is sampled with the likelihood, whose noise it cancels there. (A
    Gaussian's is exact in the mean all the same, by antithesis.)

    Args:
        pairs: pairs of draws a step, each of two gradient evaluations; a Gaussian draws +-eps, a
            family without a symmetry two independent points, a mixture `pairs` of every component.
        reuse: let the draws of a mixture's components serve all of them, by importance weights.
    """

    reuse: bool = eqx.field(static=True, default=False)

    def __call__(self, family: AbstractFamily, target: Target, key: Key[Array, ""]) -> Any:
        """See `family.stl`."""
        draw_key, batch_key = jax.random.split(key)
        draws = family.draw_pairs(draw_key, self.pairs, self.reuse)
        function = target.whole(family.structure, target.batch(batch_key))
        return family.stl(draws, *evaluated(function, draws.rows))


class Secant(AbstractPairing):
    """The smallest symmetric change of curvature that explains the pairs: for the approach.

    A shrunk estimate: its zero is right for a quadratic target and slightly off elsewhere, so
    finish with `Stl`. A prior enters through its gradient, whose curvature the pairs see exactly.

    Args:
        pairs: pairs +-eps a step, each of two gradient evaluations.
        ridge: rho / max(d, pairs); without it `pairs` near d is unstable.
    """

    ridge: float = eqx.field(static=True, default=0.3)

    def __check_init__(self):
        if not self.ridge >= 0:
            raise ValueError(f"`Secant(ridge=...)` must not be negative, but got {self.ridge}.")

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = -K with K E' = D' as the ridge vanishes."""
        draw_key, batch_key = jax.random.split(key)
        draws = only_gaussian("Secant", family).draw(draw_key, 2 * self.pairs, antithetic=True)
        function = target.whole(family.structure, target.batch(batch_key))
        slopes, _ = evaluated(function, draws.rows)
        gradient, whitened, D = family.differences(draws, slopes)
        return GaussianTangent(gradient, whitened, family.secant(draws.noise, D, self.ridge))


class Hess(AbstractSampling):
    """Exact Hessians at independent draws, O(d^3) a step.

    Args:
        samples: draws, and Hessians, a step.
        hessian: the Hessian of the target's `log_density` (or `log_likelihood`) as a (d, d)
            matrix over flat coordinates, called with the same arguments; None differentiates.
    """

    hessian: Callable | None = None

    def __call__(self, family: AbstractFamily, target: Target, key: Key[Array, ""]) -> Any:
        """See `family.hess`."""
        draw_key, batch_key = jax.random.split(key)
        batch = target.batch(batch_key)
        draws = family.draw(draw_key, self.samples)
        function = target.sampled(family.structure, batch)
        hessian = _hessian(self.hessian, target, family, batch, function)
        slopes, values = evaluated(function, draws.rows)
        tangent = family.hess(draws, slopes, values, -jax.lax.map(hessian, draws.rows))
        return with_prior(family, target, tangent)


class AtMean(AbstractEstimator):
    """Expectations replaced by the value at the mean: the online Newton method, no sampling.

    Args:
        hessian: as for `Hess`.
    """

    hessian: Callable | None = None

    def num_gradients(self, family: AbstractFamily) -> int:
        """Evaluations of the target's gradient in one call."""
        return 1

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = I - A H(mu) A'."""
        batch = target.batch(key)
        function = target.sampled(family.structure, batch)
        hessian = _hessian(self.hessian, target, family, batch, function)
        mean = only_gaussian("AtMean", family).mean[None]
        slopes, values = evaluated(function, mean)
        at_mean = Draws(mean, jnp.zeros_like(mean))
        tangent = family.hess(at_mean, slopes, values, -hessian(mean[0])[None])
        return with_prior(family, target, tangent)


def only_gaussian(estimator: str, family: Any) -> AbstractGaussian:
    """The family, if it is a Gaussian."""
    if not isinstance(family, AbstractGaussian):
        raise ValueError(
            f"`{estimator}` estimates the curvature of a Gaussian, but got a {family.name}. Use "
            "`iblr.Stl(pairs=...)` or `iblr.Rep(samples=...)`, which serve every family."
        )
    return family


def evaluated(
    function: FlatFunction, Z: Float[Array, "M d"]
) -> tuple[Float[Array, "M d"], Float[Array, " M"]]:
    """Slopes of minus the log density, nan where that is not finite, and its values."""
    values, gradients = jax.vmap(jax.value_and_grad(function))(Z)
    return jnp.where(jnp.isfinite(values)[:, None], -gradients, jnp.nan), values


def _hessian(
    given: Callable | None,
    target: Target,
    family: AbstractFamily,
    batch: PyTree,
    function: FlatFunction,
) -> Callable[[Float[Array, " d"]], Float[Array, "d d"]]:
    """The Hessian of the sampled part, with the user's own where there is one."""
    if given is None:
        return jax.hessian(function)
    structure = family.structure
    if not structure.is_real:
        raise ValueError(
            "`hessian=` is taken in the coordinates of the points, but this family maps leaves "
            "onto a support. Leave `hessian=` out: it is then differentiated."
        )

    def hessian(vector: Float[Array, " d"]) -> Float[Array, "d d"]:
        matrix = jnp.asarray(given(*target.arguments(structure.unravel(vector), batch)))
        if matrix.shape != (family.dim, family.dim):
            raise ValueError(
                f"`hessian=` must return a matrix of shape {(family.dim, family.dim)}, but "
                f"returned shape {matrix.shape}."
            )
        matrix = target.weight * matrix
        if callable(target.prior):
            log_prior = lambda v: target.prior(structure.unravel(v))  # noqa: E731
            matrix = matrix + jax.hessian(log_prior)(vector) / target.temperature
        return matrix.astype(vector.dtype)

    return hessian


def with_prior(family: AbstractFamily, target: Target, tangent: Any) -> Any:
    """The tangent with the exact term of a prior that is a family."""
    if target.exact_prior is None:
        return tangent
    weight = (1 / target.temperature).astype(family.dtype)
    return family.add_prior(tangent, target.exact_prior, weight)


def check_samples(call: str, value: int) -> None:
    """Raise unless a number of draws is one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{call}` must be a whole number of at least 1, but got {value!r}.")

"""Estimators of the natural gradient: sample q, evaluate the target, return a tangent.

Every estimator is a final `eqx.Module` called as `estimator(family, target, key) -> tangent`, and
works in whitened coordinates. Rows: noise E, draws Z = mu + E A, gradients W of lbar = -log p at
the draws, whitened Y = W A'. What differs is the whitened natural gradient Ghat of the precision:

    Rep     I - sym(E'Y) / M                         the paper's "-rep", eq. gauss_cov_rep
    Stl     -sym(E'D) / P,  D = Y - E                grad of lbar + log q, eq. mog_cov_rep at K = 1
    Secant  -K,  the smallest symmetric K, K E' = D'
    Hess    I - A E[hess lbar] A'                    the paper's "-hess", eq. gauss_cov_hess
    AtMean  I - A hess lbar(mu) A'                   the online Newton method, section 3.1
"""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent
from iblr.target import FlatFunction, Target


class AbstractEstimator(eqx.Module):
    """`(family, target, key) -> tangent`; knows nothing of step sizes."""

    @property
    @abc.abstractmethod
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""

    @abc.abstractmethod
    def __call__(self, family: Any, target: Target, key: Key[Array, ""]) -> Any:
        """The natural gradient of the negative ELBO at `family`."""


class Rep(AbstractEstimator):
    """The reparameterisation estimator of the paper, from gradients at independent draws.

    Args:
        samples: draws, and gradient evaluations, a step.
    """

    samples: int = eqx.field(static=True, default=1)

    def __check_init__(self):
        _check_count("Rep(samples=...)", self.samples)

    @property
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""
        return self.samples

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = I - sym(E'Y) / M."""
        draw_key, batch_key = jax.random.split(key)
        E = _noise(family, draw_key, self.samples)
        function = target.sampled(family.structure, target.batch(batch_key))
        W = _slopes(function, family.mean + family.colour(E))
        Y = family.whiten(W)
        curvature = family.low_rank(1.0, E / self.samples, Y)
        return _with_prior(family, target, GaussianTangent(W.mean(0), Y.mean(0), curvature))


class Stl(AbstractEstimator):
    """Sticking the landing, from antithetic pairs: noiseless at the optimum of a Gaussian target.

    A prior given as a family enters through its gradient: a Gaussian's is exact in the mean by
    antithesis, and the noise of the curvature vanishes at the optimum only if the prior is sampled
    with the likelihood, whose noise it cancels there.

    Args:
        pairs: pairs +-eps a step, each of two gradient evaluations.
    """

    pairs: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        _check_count("Stl(pairs=...)", self.pairs)

    @property
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""
        return 2 * self.pairs

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = -sym(E'D) / P with D = (Y+ - Y-)/2 - E."""
        draw_key, batch_key = jax.random.split(key)
        E = _noise(family, draw_key, self.pairs)
        function = target.whole(family.structure, target.batch(batch_key))
        gradient, whitened, D = _differences(function, family, E)
        return GaussianTangent(gradient, whitened, family.low_rank(0.0, E / self.pairs, D))


class Secant(AbstractEstimator):
    """The smallest symmetric change of curvature that explains the pairs: for the approach.

    A shrunk estimate: its zero is right for a quadratic target and slightly off elsewhere, so
    finish with `Stl`. A prior enters through its gradient, whose curvature the pairs see exactly.

    Args:
        pairs: pairs +-eps a step, each of two gradient evaluations.
        ridge: rho / max(d, pairs); without it `pairs` near d is unstable.
    """

    pairs: int = eqx.field(static=True, default=8)
    ridge: float = eqx.field(static=True, default=0.3)

    def __check_init__(self):
        _check_count("Secant(pairs=...)", self.pairs)
        if not self.ridge >= 0:
            raise ValueError(f"`Secant(ridge=...)` must not be negative, but got {self.ridge}.")

    @property
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""
        return 2 * self.pairs

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = -K with K E' = D' as the ridge vanishes."""
        draw_key, batch_key = jax.random.split(key)
        E = _noise(family, draw_key, self.pairs)
        function = target.whole(family.structure, target.batch(batch_key))
        gradient, whitened, D = _differences(function, family, E)
        return GaussianTangent(gradient, whitened, family.secant(E, D, self.ridge))


class Hess(AbstractEstimator):
    """Exact Hessians at independent draws, O(d^3) a step.

    Args:
        samples: draws, and Hessians, a step.
        hessian: the Hessian of the target's `log_density` (or `log_likelihood`) as a (d, d)
            matrix over flat coordinates, called with the same arguments; None differentiates.
    """

    samples: int = eqx.field(static=True, default=1)
    hessian: Callable | None = None

    def __check_init__(self):
        _check_count("Hess(samples=...)", self.samples)

    @property
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""
        return self.samples

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = I - A H A' with H the mean Hessian at the draws."""
        draw_key, batch_key = jax.random.split(key)
        batch = target.batch(batch_key)
        E = _noise(family, draw_key, self.samples)
        function = target.sampled(family.structure, batch)
        hessian = _hessian(self.hessian, target, family, batch, function)
        Z = family.mean + family.colour(E)
        tangent = _newton(family, function, hessian, Z)
        return _with_prior(family, target, tangent)


class AtMean(AbstractEstimator):
    """Expectations replaced by the value at the mean: the online Newton method, no sampling.

    Args:
        hessian: as for `Hess`.
    """

    hessian: Callable | None = None

    @property
    def num_gradients(self) -> int:
        """Evaluations of the target's gradient in one call."""
        return 1

    def __call__(
        self, family: AbstractGaussian, target: Target, key: Key[Array, ""]
    ) -> GaussianTangent:
        """Ghat = I - A H(mu) A'."""
        batch = target.batch(key)
        function = target.sampled(family.structure, batch)
        hessian = _hessian(self.hessian, target, family, batch, function)
        tangent = _newton(family, function, hessian, family.mean[None])
        return _with_prior(family, target, tangent)


def _noise(family: AbstractGaussian, key: Key[Array, ""], rows: int) -> Float[Array, "M d"]:
    return jax.random.normal(key, (rows, family.dim), family.mean.dtype)


def _slopes(function: FlatFunction, Z: Float[Array, "M d"]) -> Float[Array, "M d"]:
    """Gradients of minus the log density; nan where the log density itself is not finite."""
    values, gradients = jax.vmap(jax.value_and_grad(function))(Z)
    return jnp.where(jnp.isfinite(values)[:, None], -gradients, jnp.nan)


def _differences(
    function: FlatFunction, family: AbstractGaussian, E: Float[Array, "P d"]
) -> tuple[Float[Array, " d"], Float[Array, " d"], Float[Array, "P d"]]:
    """Mean gradient, the same whitened, and D, which is E (H - I) whitened for a quadratic."""
    X = family.colour(E)
    W = _slopes(function, jnp.concatenate([family.mean + X, family.mean - X]))
    up, down = W[: len(E)], W[len(E) :]
    gradient = 0.5 * (up + down).mean(0)
    Y = family.whiten(jnp.concatenate([0.5 * (up - down), gradient[None]]))
    return gradient, Y[-1], Y[:-1] - E


def _newton(
    family: AbstractGaussian,
    function: FlatFunction,
    hessian: Callable[[Float[Array, " d"]], Float[Array, "d d"]],
    Z: Float[Array, "M d"],
) -> GaussianTangent:
    gradient = _slopes(function, Z).mean(0)
    curvature = family.from_hessian(-jax.lax.map(hessian, Z).mean(0))
    return GaussianTangent(gradient, family.whiten(gradient[None])[0], curvature)


def _hessian(
    given: Callable | None,
    target: Target,
    family: AbstractGaussian,
    batch: PyTree,
    function: FlatFunction,
) -> Callable[[Float[Array, " d"]], Float[Array, "d d"]]:
    """The Hessian of the sampled part, with the user's own where there is one."""
    if given is None:
        return jax.hessian(function)
    structure = family.structure

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


def _with_prior(
    family: AbstractGaussian, target: Target, tangent: GaussianTangent
) -> GaussianTangent:
    if target.exact_prior is None:
        return tangent
    weight = (1 / target.temperature).astype(family.mean.dtype)
    return family.add_precision(tangent, target.exact_prior, weight)


def _check_count(call: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{call}` must be a whole number of at least 1, but got {value!r}.")

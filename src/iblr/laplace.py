"""Laplace's approximation, and the MAP on the way: the online Newton method run to convergence.

With expectations replaced by values at the mean ([LSK20] section 3.1) the improved rule is a Newton
method whose preconditioner stays positive definite where the Hessian is not, so it leaves saddles
(except from a start where the gradient has no part that leads away), and whose fixed point is the
mode with the Hessian there as precision. Far from it the trust region is needed; it is on here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr.estimators import AtMean
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.fit import FitError, fit
from iblr.posterior import Posterior
from iblr.starts import starting_family
from iblr.status import Status
from iblr.target import Target, as_target

CHUNK = 10


def laplace(
    target: Target | Callable,
    family: AbstractGaussian | type[AbstractGaussian] | None = None,
    *,
    key: Key[Array, ""],
    init: PyTree | Posterior | AbstractGaussian = None,
    support: Any = None,
    num_steps: int = 1000,
    step_size: float = 1.0,
    tolerance: float = 1e-8,
    throw: bool = True,
    progress: bool | None = None,
) -> Posterior:
    """A mode of the target and the curvature there, as a posterior or as a start for `fit`.

    Args:
        target: unnormalised log density of one point, or an `iblr.Target` (all of its data is best:
            with minibatches the method does not settle).
        family: where to start, and which Gaussian to return; as in `iblr.fit`.
        key: for the ELBO of the result.
        init: a point to start from, instead of a family, as in `iblr.fit`.
        support: where leaves of the point live, as in `iblr.fit`.
        num_steps: the most steps to take; it stops at convergence.
        step_size: t of the online Newton method.
        tolerance: stop when the squared whitened gradient and curvature are below this.
        throw: raise `FitError` when it does not converge. If False, read `posterior.status`.
        progress: show a line of progress; None shows it in a terminal.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> rosenbrock = lambda z: -((1 - z[0]) ** 2) - 10 * (z[1] - z[0] ** 2) ** 2
        >>> start = iblr.laplace(rosenbrock, init=jnp.zeros(2), key=jax.random.key(0))
        >>> start.mean.round(3).tolist()
        [1.0, 1.0]
        >>> posterior = iblr.fit(rosenbrock, start.family, key=jax.random.key(1), num_steps=200)
    """
    target = as_target(target, "laplace")
    start = starting_family(family, init, support, "laplace")
    if not isinstance(start, AbstractGaussian):
        raise ValueError(
            "`laplace(target, family)` needs a Gaussian, but got "
            f"{getattr(start, 'name', repr(start))}. For positive parameters map one: "
            "`Gaussian.standard(d, support=iblr.positive)`."
        )
    if jnp.ndim(key) != 0:
        raise ValueError(f"`laplace(key=...)` takes one key, but got shape {jnp.shape(key)}.")
    residual = jnp.asarray(jnp.inf)

    def converged(told) -> bool:
        nonlocal residual
        residual = _residual(told.family, target, key)
        return bool(residual < tolerance)

    posterior = fit(
        target,
        start,
        key=key,
        estimator=AtMean(),
        step_size=step_size,
        num_steps=num_steps,
        trust_region=True,
        callback=converged,
        chunk_size=min(CHUNK, num_steps),
        progress=progress,
        throw=False,
    )
    if bool(posterior.status == Status.ok) and not bool(residual < tolerance):
        posterior = dataclasses.replace(posterior, status=Status.not_converged)
    failed = (posterior.status != Status.ok) & (posterior.status != Status.interrupted)
    if throw and bool(failed):
        raise FitError(f"`iblr.laplace` failed. {posterior.message}", posterior)
    return posterior


@eqx.filter_jit
def _residual(family: AbstractGaussian, target: Target, key: Key[Array, ""]) -> Float[Array, ""]:
    """Squared length of the whitened natural gradient."""
    tangent = AtMean()(family, target, key)
    return jnp.sum(tangent.whitened**2) + jnp.sum(tangent.curvature.spectrum().values ** 2)

"""Vadam (Khan et al. 2018): VOGN with the square of the mean gradient, and a square root.

Let gbar be the mean gradient of minus the log likelihood over the rows of a minibatch at a draw,
and s the running mean of its square. Vadam is Adam with noise in the weights,

    s <- (1 - t) s + t gbar^2            mu <- mu - t (g/N) / (sqrt(s) + P0/N)

where g = N gbar + P0 (mu - m0), for a posterior precision S = N s + P0. In terms of S and the
estimate ghat = N gbar of the gradient of the sum over the data,

    S <- (1 - t) S + t (H + P0)          H = N gbar^2 = ghat^2 / N
    mu <- mu - t g / (N sqrt(s) + P0) = mu - t g / (sqrt(N (S - P0)) + P0), with the new S

The first line is that of VOGN with another H, of one gradient for all rows, where VOGN needs one a
row. Where the gradients of B rows cancel, H is up to B times too small. The square root in the
second is Adam's. For a full covariance squares are outer products and the root is that of a matrix.
At a temperature N and P0 are divided by it.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from iblr.baselines.outcome import choose, is_finite
from iblr.baselines.vogn import check_rows
from iblr.estimators import AbstractSampling, evaluated, with_prior
from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent
from iblr.families.base import StepInfo
from iblr.families.diagonal import DiagonalGaussian
from iblr.linalg import matmul
from iblr.rule import natural_gradient_step
from iblr.status import Status
from iblr.target import Target


class VadamTangent(GaussianTangent):
    """What `vadam_step` needs to know beside a natural gradient.

    Attributes:
        count: N, over the temperature.
        prior_precision: P0 over the temperature, a matrix, or the diagonal for a diagonal family.
    """

    count: Float[Array, ""]
    prior_precision: Float[Array, "d *d"]


class Vadam(AbstractSampling):
    """The squared mean gradient for the Hessian, for `vadam_step`; Gaussians, full or diagonal.

    Needs a target of `log_likelihood` and `data`, with a Gaussian prior given as a family.

    Args:
        samples: draws a step.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> x = jnp.linspace(-1.0, 1.0, 40)
        >>> target = iblr.Target(
        ...     log_likelihood=lambda w, x: -0.5 * ((2.0 * x - w[0] * x) ** 2).sum(),
        ...     data=x, batch_size=10, prior=iblr.DiagonalGaussian.standard(1))
        >>> posterior = iblr.fit(target, iblr.DiagonalGaussian.standard(1), key=jax.random.key(0),
        ...                      estimator=iblr.baselines.Vadam(),
        ...                      rule=iblr.baselines.vadam_step, step_size=0.02)
        >>> abs(float(posterior.mean[0]) - 2 * float(x @ x) / (1 + float(x @ x))) < 0.3
        True
    """

    def __call__(self, family: Any, target: Target, key: Key[Array, ""]) -> VadamTangent:
        """Ghat = I - A (ghat ghat'/N + P0) A'."""
        check_rows("Vadam", family, target)
        draw_key, batch_key = jax.random.split(key)
        draws = family.draw(draw_key, self.samples)
        function = target.sampled(family.structure, target.batch(batch_key))
        slopes, _ = evaluated(function, draws.rows)
        count = (target.num_data / target.temperature).astype(family.dtype)
        gradient, Y = slopes.mean(0), family.whiten(slopes)
        curvature = family.low_rank(1.0, Y / (self.samples * count), Y)
        tangent = GaussianTangent(gradient, Y.mean(0), curvature)
        tangent = with_prior(family, target, tangent)
        return VadamTangent(
            tangent.gradient,
            tangent.whitened,
            tangent.curvature,
            count,
            _prior_precision(family, target),
        )


def _prior_precision(family: AbstractGaussian, target: Target) -> Float[Array, "d *d"]:
    is_diagonal, prior = isinstance(family, DiagonalGaussian), target.exact_prior
    if prior is None:
        return jnp.zeros((family.dim,) if is_diagonal else (family.dim, family.dim), family.dtype)
    precision = prior.precision_diagonal if is_diagonal else prior.precision
    return (precision / target.temperature).astype(family.dtype)


def vadam_step(
    family: AbstractGaussian, tangent: VadamTangent, step_size: ArrayLike
) -> tuple[AbstractGaussian, StepInfo]:
    """One step of Vadam from a tangent of `Vadam`; S stays positive definite for t <= 1.

    Args:
        family: where to step from; S - P0 is taken as zero where it is negative, so start at the
            prior or narrower.
        tangent: what `Vadam` returns.
        step_size: t.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> q = iblr.DiagonalGaussian.standard(1)
        >>> target = iblr.Target(log_likelihood=lambda z, x: -jnp.sum(x * z), data=jnp.ones(4),
        ...                      prior=iblr.DiagonalGaussian.standard(1))
        >>> tangent = iblr.baselines.Vadam()(q, target, jax.random.key(0))     # ghat = 4
        >>> q, info = iblr.baselines.vadam_step(q, tangent, 0.25)
        >>> q.precision_diagonal.round(3).tolist()              # 3/4 + (1 + 4)/4
        [2.0]
        >>> (3 * q.mean).round(3).tolist()                      # -3 (4/4) / (sqrt(4 (2 - 1)) + 1)
        [-1.0]
    """
    if not isinstance(tangent, VadamTangent):
        raise ValueError(
            "`vadam_step` needs a tangent of `iblr.baselines.Vadam`, which knows N and the prior, "
            f"but got a {type(tangent).__name__}. Pass `estimator=iblr.baselines.Vadam()`."
        )
    held = dataclasses.replace(tangent, whitened=jnp.zeros_like(tangent.whitened))
    after, info = natural_gradient_step(family, held, step_size)
    assert isinstance(after, AbstractGaussian)
    t, P0, N = jnp.asarray(step_size, family.dtype), tangent.prior_precision, tangent.count
    if P0.ndim == 1:
        root = jnp.sqrt(jnp.maximum(N * (after.precision_diagonal - P0), 0))
        step = t * tangent.gradient / (root + P0)
    else:
        values, vectors = jnp.linalg.eigh(N * (after.precision - P0))
        root = matmul(vectors * jnp.sqrt(jnp.maximum(values, 0)), vectors.T)
        step = t * jnp.linalg.solve(root + P0, tangent.gradient)
    ok = ~info.refused & is_finite(step)
    status = Status.where(ok | info.refused, info.status, Status.nonfinite)
    after = eqx.tree_at(lambda q: q.mean, after, family.mean - step)
    return choose(ok, after, family), info._replace(status=status)

"""Variational online Gauss-Newton, VOGN (Khan et al. 2018): squared gradients for Hessians.

With g_i the gradient of minus the log likelihood of one row at a draw z, N rows of data, B of a
minibatch and a Gaussian prior of precision P0 and mean m0,

    H = (N/B) sum_i g_i g_i'             g = (N/B) sum_i g_i + P0 (mu - m0)
    S <- (1 - t) S + t (H + P0)          mu <- mu - t S^-1 g, with the new S

that is [LSK20] eq. von_1 and von_2 with the Gauss-Newton matrix H in place of E[hess lbar]. H is
not negative, so S stays positive definite for t <= 1, at the price of a bias: E[g_i g_i'] is the
Fisher information of the likelihood only where the model is right and near the optimum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from iblr.estimators import AbstractSampling, only_gaussian, with_prior
from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent
from iblr.target import Target


class Vogn(AbstractSampling):
    """The Gauss-Newton estimate, for `natural_gradient_step`; Gaussians, full or diagonal.

    Needs the gradient of every row of a minibatch on its own: a target of `log_likelihood` and
    `data`, with a Gaussian prior given as a family.

    Args:
        samples: draws a step.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> x = jnp.linspace(-1.0, 1.0, 40)
        >>> target = iblr.Target(
        ...     log_likelihood=lambda w, x: -0.5 * ((2.0 * x - w[0] * x) ** 2).sum(),
        ...     data=x, batch_size=10, prior=iblr.DiagonalGaussian.standard(1))
        >>> posterior = iblr.fit(target, iblr.DiagonalGaussian.standard(1), key=jax.random.key(0),
        ...                      estimator=iblr.baselines.Vogn(),
        ...                      rule=iblr.natural_gradient_step, step_size=0.05)
        >>> abs(float(posterior.mean[0]) - 2 * float(x @ x) / (1 + float(x @ x))) < 0.3
        True
    """

    def __call__(self, family: Any, target: Target, key: Key[Array, ""]) -> GaussianTangent:
        """Ghat = I - A (H + P0) A'."""
        check_rows("Vogn", family, target)
        slopes = row_slopes(family, target, key, self.samples)
        rows = slopes.reshape(-1, family.dim)
        weight = target.weight.astype(family.dtype)
        gradient = weight * rows.sum(0) / self.samples
        Y = family.whiten(rows)
        curvature = family.low_rank(1.0, (weight / self.samples) * Y, Y)
        tangent = GaussianTangent(gradient, family.whiten(gradient[None])[0], curvature)
        return with_prior(family, target, tangent)


def check_rows(estimator: str, family: Any, target: Target) -> None:
    """Raise unless the rows of a target have gradients of their own, beside a Gaussian prior."""
    only_gaussian(estimator, family)
    if target.data is None:
        raise ValueError(
            f"`{estimator}` takes the gradient of every row of the data, but the target has no "
            "`data`. Give `Target(log_likelihood=..., data=...)`, or use `iblr.Rep(samples=...)`."
        )
    prior = target.exact_prior
    if target.prior is not None and not isinstance(prior, AbstractGaussian):
        got = "a function" if prior is None else f"a {prior.name}"
        raise ValueError(
            f"`{estimator}` needs the precision of a Gaussian prior, but `Target(prior=...)` is "
            f"{got}. Give a family, such as `prior=iblr.DiagonalGaussian.standard(d)`."
        )
    if not family.structure.is_real:
        raise ValueError(
            f"`{estimator}` needs real parameters, but this family maps leaves onto a support. "
            "Leave the support out, or use `iblr.Rep(samples=...)`."
        )


def row_slopes(
    family: AbstractGaussian, target: Target, key: Key[Array, ""], samples: int
) -> Float[Array, "M B d"]:
    """Gradients g_i of minus the log likelihood of every row of one minibatch, at every draw."""
    draw_key, batch_key = jax.random.split(key)
    draws = family.draw(draw_key, samples).rows
    batch = target.batch(batch_key)
    log_likelihood: Any = target.log_likelihood

    def slope(vector: Float[Array, " d"], row: Any) -> Float[Array, " d"]:
        alone = jax.tree.map(lambda leaf: leaf[None], row)

        def function(vector: Float[Array, " d"]) -> Float[Array, ""]:
            z = family.structure.unravel(vector)
            return jnp.asarray(log_likelihood(z, alone)).astype(vector.dtype)

        value, gradient = jax.value_and_grad(function)(vector)
        return jnp.where(jnp.isfinite(value), -gradient, jnp.nan)

    return jax.vmap(lambda z: jax.vmap(lambda row: slope(z, row))(batch))(draws)

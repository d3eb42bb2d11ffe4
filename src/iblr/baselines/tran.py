"""Manifold Gaussian variational Bayes of Tran, Nguyen & Nguyen 2019.

Their retraction in {mu, Sigma},

    Sigma <- Sigma + t xi + (t^2/2) xi Sigma^-1 xi,     xi = Sigma G Sigma,

is the improved rule in the covariance ([LSK20] eq. special_gauss). Their Algorithm 2 takes for xi
minus the Euclidean gradient between two Sigmas, Sigma (dL/dSigma) Sigma, where the Fisher matrix of
Sigma gives twice that (footnote to [LSK20] appendix E.4): half the step of the covariance.
"""

import jax.numpy as jnp
from jaxtyping import ArrayLike

from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent
from iblr.families.base import AbstractFamily, StepInfo
from iblr.families.curvature import Parameterisation
from iblr.rule import improved_step


def tran_step(
    family: AbstractGaussian,
    tangent: GaussianTangent,
    step_size: ArrayLike,
    *,
    as_printed: bool = False,
) -> tuple[AbstractFamily, StepInfo]:
    """One step of Tran et al., on a Gaussian, full or diagonal.

    Args:
        family: where to step from.
        tangent: a natural gradient of the negative ELBO there.
        step_size: t.
        as_printed: without the factor 2 that their natural gradient of Sigma lacks.

    Example:
        >>> import iblr, jax
        >>> q = iblr.DiagonalGaussian.standard(1)
        >>> tangent = iblr.AtMean()(q, iblr.Target(lambda z: -0.75 * z @ z), jax.random.key(0))
        >>> q, info = iblr.baselines.tran_step(q, tangent, 1.0)     # 1 - 1/2 + 1/8
        >>> q.variances.tolist()
        [0.625]
    """
    if not isinstance(family, AbstractGaussian):
        raise ValueError(
            f"`tran_step` is a rule of the Gaussians, but got a {family.name}. Use "
            "`iblr.improved_step`."
        )
    t = jnp.asarray(step_size, family.dtype)
    return improved_step(
        family,
        tangent,
        t,
        curvature_step_size=0.5 * t if as_printed else t,
        parameterisation=Parameterisation.covariance,
    )

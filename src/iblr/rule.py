"""The rule: a tangent and a step size to a new member of the family, and what happened.

The improved rule steps along the natural gradient and corrects by the curvature of the block,

    lambda_i <- lambda_i - t ghat_i - (t^2/2) Gamma_i[ghat_i, ghat_i]         [LSK20] eq. our_iblr

the second-order expansion of the block geodesic, and stays in the set at any step size. The
original rule (eq. blr) drops the last term; the geodesic keeps all terms.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from iblr.families.base import AbstractFamily, StepInfo
from iblr.families.curvature import Parameterisation
from iblr.families.line_search import LineSearch


class AbstractMemoryRule(eqx.Module):
    """A rule that carries something from step to step, such as the moments of Adam.

    The loop keeps the memory in its state, and the old one where a step is refused.
    """

    @abc.abstractmethod
    def init(self, family: AbstractFamily) -> Any:
        """The memory before the first step, a pytree of arrays."""

    @abc.abstractmethod
    def __call__(
        self, family: Any, tangent: Any, step_size: ArrayLike, memory: Any
    ) -> tuple[Any, StepInfo, Any]:
        """The new family, what happened, and the new memory, of the same shapes and types."""


def improved_step(
    family: AbstractFamily,
    tangent: object,
    step_size: ArrayLike,
    *,
    curvature_step_size: ArrayLike | None = None,
    parameterisation: Parameterisation = Parameterisation.precision,
    trust_region: bool = False,
) -> tuple[AbstractFamily, StepInfo]:
    """One step of the improved rule, [LSK20] eq. our_iblr; valid at any step size.

    Args:
        family: where to step from.
        tangent: a natural gradient of the negative ELBO there, as an estimator returns it.
        step_size: t.
        curvature_step_size: another t for the covariance of a Gaussian, or for the shape of a Gamma
            or an inverse Gaussian; None takes `step_size`. Families without such a block ignore it.
        parameterisation: the block in which the rule is applied. `precision` is the paper's;
            `covariance` gives {mu, Sigma} and {mu, v} (appendices E.4 and A; with half the
            curvature step, the update that Tran et al. 2019 printed), `standard_deviation`
            gives {mu, sigma}.
        trust_region: bound the change of one step. In a Gaussian gains of precision at x = -3 one
            by one, losses at 1/2 by one common factor, and the whitened step of the mean at
            sqrt(d); in a positive family the relative steps of its blocks in the same way; in a
            custom one the Fisher length of every block's step at the root of its size.

    Returns:
        The new family, and a `StepInfo`. When the input is not finite the family comes back
        unchanged and `info.status` says so.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> q = iblr.Gaussian.standard(2)
        >>> target = iblr.Target(lambda z: 4.0 * (z**2).sum())      # it curves upwards
        >>> tangent = iblr.Hess()(q, target, jax.random.key(0))
        >>> q, info = iblr.improved_step(q, tangent, 1.0)
        >>> bool(jnp.linalg.eigvalsh(q.precision)[0] > 0)
        True
    """
    t, t_curvature = step_sizes(family, step_size, curvature_step_size)
    return family.improved(tangent, t, t_curvature, parameterisation, trust_region)


def natural_gradient_step(
    family: AbstractFamily,
    tangent: object,
    step_size: ArrayLike,
    *,
    curvature_step_size: ArrayLike | None = None,
    parameterisation: Parameterisation = Parameterisation.precision,
) -> tuple[AbstractFamily, StepInfo]:
    """One step of the original rule: eq. von_1 and von_2 of [LSK20] for a Gaussian.

    Elsewhere eq. blr, in a positive family's natural parameters and in the blocks of a custom one.

    The step may leave the set of valid parameters; then the family comes back unchanged and
    `info.status` is `Status.left_set`.
    """
    t, t_curvature = step_sizes(family, step_size, curvature_step_size)
    return family.original(tangent, t, t_curvature, parameterisation, None)


def line_search_step(
    family: AbstractFamily,
    tangent: object,
    step_size: ArrayLike,
    *,
    curvature_step_size: ArrayLike | None = None,
    parameterisation: Parameterisation = Parameterisation.precision,
    share: float = 0.8,
) -> tuple[AbstractFamily, StepInfo]:
    """One step of the original rule, cut so that it stays in the set of valid parameters.

    A search for feasibility only, as the paper's baselines have it: no entry goes further than
    `share` of its way to the boundary, and where one would, the step of all is scaled down
    (`info.shrunk` is the factor). So one parameter near its boundary holds up all. The boundary of
    a user's blocks is not known: there the step is halved until all are inside, whatever `share`.
    """
    if not 0 < share < 1:
        raise ValueError(f"`line_search_step(share=...)` must be between 0 and 1, but got {share}.")
    t, t_curvature = step_sizes(family, step_size, curvature_step_size)
    return family.original(tangent, t, t_curvature, parameterisation, LineSearch(share=share))


def geodesic_step(
    family: AbstractFamily,
    tangent: object,
    step_size: ArrayLike,
    *,
    curvature_step_size: ArrayLike | None = None,
) -> tuple[AbstractFamily, StepInfo]:
    """One step along the exact geodesic of every block, [LSK20] section 5.3.

    For a Gaussian: straight in the mean, S^(1/2) exp(-t Ghat) S^(1/2) in the precision. For an
    `Exponential`: lambda exp(-t ghat / lambda). For an `InverseGaussian`: the same in the block
    alpha, and lambda (1 - t ghat / (4 lambda))^4 in beta^2, which reaches the boundary in finite
    time; then the family comes back unchanged and `info.status` is `Status.left_set`. The length of
    a Gamma's shape and that of a user's block have no closed form: for those, and for a `Product`
    with such a part, a `ValueError`.
    """
    t, t_curvature = step_sizes(family, step_size, curvature_step_size)
    return family.geodesic(tangent, t, t_curvature)


def step_sizes(
    family: AbstractFamily, step_size: ArrayLike, curvature_step_size: ArrayLike | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """t, and that of the curvature, in the precision of the family."""
    t = jnp.asarray(step_size, family.dtype)
    return t, t if curvature_step_size is None else jnp.asarray(curvature_step_size, family.dtype)

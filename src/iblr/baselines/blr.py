"""The Bayesian learning rule (Khan & Rue 2021; Khan & Lin 2017) with the authors' line search.

[LSK20] eq. blr, for a Gaussian eq. von_1 and von_2: S first, then the mean with the new S. The step
may leave the set, so the authors cut it, all blocks alike: by 0.8 until a Gaussian's precision has
a Cholesky factor, by 0.5 until those of all components of a mixture have, and for Gammas to 0.8 of
the way to the boundary, where that is not reached anyway.
"""

from jaxtyping import ArrayLike

from iblr.families.base import AbstractFamily, StepInfo
from iblr.families.curvature import Parameterisation
from iblr.families.line_search import LineSearch
from iblr.rule import step_sizes


def blr_step(
    family: AbstractFamily,
    tangent: object,
    step_size: ArrayLike,
    *,
    backtrack: float | None = None,
) -> tuple[AbstractFamily, StepInfo]:
    """One step of the original rule with the line search of the paper's experiments.

    Args:
        family: where to step from.
        tangent: a natural gradient of the negative ELBO there, as an estimator returns it.
        step_size: t, before it is cut; `info.shrunk` is the factor.
        backtrack: what the step is multiplied by until all parameters are valid; None is what the
            authors took for the family.

    Example:
        >>> import iblr, jax
        >>> q = iblr.Gaussian.standard(2)
        >>> target = iblr.Target(lambda z: 4.0 * (z**2).sum())      # it curves upwards
        >>> tangent = iblr.Hess()(q, target, jax.random.key(0))     # 1 - 9t must be positive
        >>> q, info = iblr.baselines.blr_step(q, tangent, 0.3)
        >>> round(float(info.shrunk), 3)                            # 0.8^5
        0.328
    """
    if backtrack is not None and not 0 < backtrack < 1:
        raise ValueError(
            f"`blr_step(backtrack=...)` must be between 0 and 1, but got {backtrack}. Leave it out "
            "for what the authors took."
        )
    search = family.line_search if backtrack is None else LineSearch(factor=backtrack)
    t, t_curvature = step_sizes(family, step_size, None)
    return family.original(tangent, t, t_curvature, Parameterisation.precision, search)

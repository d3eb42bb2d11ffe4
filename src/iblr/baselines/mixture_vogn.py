"""What becomes of VOGN's idea in a mixture of Gaussians: [LSK20] appendix J, end.

A component's natural gradient in its precision is G_c = -E_c[hess b], b = lbar + log q. In a
Gaussian -E[hess log q] = S, and VOGN's squared gradients for hess lbar leave S positive definite.
In a mixture there are two ways to square gradients, and neither is good:

    of lbar    S_c <- S_c + t (E_c[grad lbar grad lbar'] + E_c[hess log q])

        -E_c[hess log q] is neither positive definite nor at most S_c, so the step can leave the
        set at t < 1;

    of b       S_c <- S_c + t E_c[grad b grad b']

        stays inside, but a precision can only grow, and the components shrink to points: grad b
        vanishes at the optimum alone.

It is here to be seen failing.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from iblr.estimators import AbstractPairing, evaluated
from iblr.families.mixture import GaussianMixture
from iblr.families.mixture_gradients import MixtureTangent
from iblr.target import Target


class MixtureVogn(AbstractPairing):
    """Squared gradients for Hessians in a mixture, for `natural_gradient_step`.

    Args:
        pairs: pairs of draws of every component, as for `Stl`.
        of_b: square the gradients of b = lbar + log q; if False those of lbar, with the exact
            Hessian of log q.

    Example:
        >>> import iblr, jax
        >>> target = iblr.GaussianMixture.init(jax.random.key(0), 2, 1, spread=3.0)
        >>> start = iblr.GaussianMixture.init(jax.random.key(1), 2, 1)
        >>> posterior = iblr.fit(target.log_prob, start, key=jax.random.key(2), step_size=0.01,
        ...                      estimator=iblr.baselines.MixtureVogn(),
        ...                      rule=iblr.natural_gradient_step, num_steps=500)
        >>> bool((posterior.family.components.log_det < start.components.log_det).all())
        True
    """

    of_b: bool = eqx.field(static=True, default=True)

    def __call__(self, family: Any, target: Target, key: Key[Array, ""]) -> MixtureTangent:
        """That of `Stl` with other curvatures."""
        if not isinstance(family, GaussianMixture):
            raise ValueError(
                f"`MixtureVogn` needs a GaussianMixture, but got a {family.name}. Use "
                "`iblr.baselines.Vogn()` for a Gaussian."
            )
        draw_key, batch_key = jax.random.split(key)
        draws = family.draw_pairs(draw_key, self.pairs)
        function = target.whole(family.structure, target.batch(batch_key))
        slopes, values = evaluated(function, draws.rows)
        tangent, terms = family.stl(draws, slopes, values), family.terms(draws.rows)
        K, d = family.num_components, family.dim
        rows = (slopes + terms.score() if self.of_b else slopes).reshape(K, -1, d)
        hessians = None if self.of_b else terms.log_hessians().reshape(K, -1, d, d)
        curvatures = jax.vmap(_squared)(family.components, rows, hessians)
        return eqx.tree_at(lambda g: g.components.curvature, tangent, curvatures)


def _squared(q: Any, slopes: Float[Array, "M d"], hessians: Float[Array, "M d d"] | None) -> Any:
    """-A (E[slopes slopes'] + E[hessians]) A', from draws at which the target is finite."""
    fine = jnp.isfinite(slopes).all(1)
    shares = jnp.where(fine, 1 / jnp.maximum(fine.sum(), 1), 0).astype(slopes.dtype)
    Y = q.whiten(jnp.where(fine[:, None], slopes, 0))
    curvature = q.low_rank(0.0, shares[:, None] * Y, Y)
    if hessians is None:
        return curvature
    return curvature.plus(q.from_hessian(jnp.tensordot(shares, hessians, 1), 0.0))

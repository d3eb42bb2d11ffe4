"""Black-box variational inference: a first-order optimiser on parameters without constraints.

Ranganath, Gerrish & Blei 2014, as [LSK20] section 6 runs it, with Adam. Every family says what its
free parameters theta are (`family.free`): mean and Cholesky factor of the covariance of a Gaussian,
softplus^-1 of a Gamma's natural parameters, logits of a mixture's weights. The gradient in theta
comes from the same tangent as the other rules' steps, by lowering its index with the Fisher matrix
(`family.free_gradient`), so all methods see the same draws: `Rep` makes it BBVI-rep, `Hess`
BBVI-hess, `Stl` the estimator of Roeder, Wu & Duvenaud 2017.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike

from iblr.baselines.outcome import choose, is_finite, outcome
from iblr.families.base import AbstractFamily, StepInfo
from iblr.rule import AbstractMemoryRule


class Bbvi(AbstractMemoryRule):
    """theta <- theta - t u, u what the optimiser makes of the gradient; knows no geometry.

    Args:
        optimiser: any of optax's, without a learning rate: the step size is that of `fit`.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: -0.5 * ((z - 3.0) ** 2 / jnp.array([1.0, 4.0])).sum()
        >>> posterior = iblr.fit(log_density, iblr.Gaussian.standard(2), key=jax.random.key(0),
        ...                      rule=iblr.baselines.Bbvi(), step_size=0.05, num_steps=500)
        >>> posterior.mean.round(2).tolist(), posterior.standard_deviation.round(2).tolist()
        ([3.0, 3.0], [1.0, 2.0])
    """

    optimiser: optax.GradientTransformation = optax.scale_by_adam()

    def __check_init__(self):
        if not isinstance(self.optimiser, optax.GradientTransformation):
            raise ValueError(
                "`Bbvi(optimiser=...)` needs a transformation such as `optax.scale_by_adam()`, but "
                f"got {self.optimiser!r}."
            )

    def init(self, family: AbstractFamily) -> Any:
        """theta, and the state of the optimiser."""
        theta = family.free()
        return theta, self.optimiser.init(theta)

    def __call__(
        self, family: AbstractFamily, tangent: Any, step_size: ArrayLike, memory: Any
    ) -> tuple[AbstractFamily, StepInfo, Any]:
        """One step; nothing moves where the gradient or its result is not finite."""
        theta, state = memory
        t = jnp.asarray(step_size, family.dtype)
        gradient = family.free_gradient(tangent, theta)
        updates, state = self.optimiser.update(gradient, state, theta)
        theta = jax.tree.map(lambda x, u: x - t * u, theta, updates)
        after = family.from_free(theta)
        ok = is_finite((gradient, theta, after))
        info = outcome(family, tangent, ok)
        return choose(ok, after, family), info, choose(ok, (theta, state), memory)

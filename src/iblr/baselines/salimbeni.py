"""Natural gradients through unconstrained parameters (Salimbeni, Eleftheriadis & Hensman 2018).

Let theta be the natural and eta the expectation parameters of a Gaussian, and xi any parameters,
here the mean and the Cholesky factor C of the covariance. The natural gradient in theta is dL/deta,
so in xi it is

    F_xi^-1 dL/dxi = (dxi/dtheta) (dL/deta),        dL/deta = (dxi/deta)' (dL/dxi)

The second product is one of a vector and a Jacobian, which reverse mode has. The first is one of a
Jacobian and a vector, which they take as two of the other kind, for frameworks without forward
mode: u -> (dxi/dtheta)' u is linear, and its own vector-Jacobian product with v is (dxi/dtheta) v.
With

    theta = (S mu, -S/2)                 mu = -theta_2^-1 theta_1 / 2,  C C' = -theta_2^-1 / 2
    eta   = (mu, Sigma + mu mu')         mu = eta_1,                    C C' = eta_2 - eta_1 eta_1'

a step costs O(d^3), several times over. It is compared with in [LSK20] figure 7.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from iblr.baselines.outcome import choose, is_finite, outcome
from iblr.families.abstract_gaussian import GaussianTangent
from iblr.families.base import AbstractFamily, StepInfo
from iblr.families.gaussian import Gaussian
from iblr.linalg import matmul
from iblr.rule import AbstractMemoryRule

Pair = tuple[Float[Array, " d"], Float[Array, "d d"]]


class Salimbeni(AbstractMemoryRule):
    """xi <- xi - t F^-1 dL/dxi for xi = (mean, Cholesky factor) of a full `Gaussian`.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> log_density = lambda z: -0.5 * ((z - 3.0) ** 2 / jnp.array([1.0, 4.0])).sum()
        >>> posterior = iblr.fit(log_density, iblr.Gaussian.standard(2), key=jax.random.key(0),
        ...                      rule=iblr.baselines.Salimbeni(), step_size=0.05, num_steps=300)
        >>> posterior.mean.round(2).tolist(), posterior.standard_deviation.round(2).tolist()
        ([3.0, 3.0], [1.0, 2.0])
    """

    def init(self, family: AbstractFamily) -> Pair:
        """xi."""
        if not isinstance(family, Gaussian):
            raise ValueError(
                f"`Salimbeni` is a rule of full Gaussians, but got a {family.name}. Use "
                "`iblr.Gaussian`, or `iblr.improved_step`."
            )
        return family.free()

    def __call__(
        self, family: Gaussian, tangent: GaussianTangent, step_size: ArrayLike, memory: Pair
    ) -> tuple[Gaussian, StepInfo, Pair]:
        """One step; nothing moves where the result is not finite."""
        t = jnp.asarray(step_size, family.dtype)
        gradient = family.free_gradient(tangent, memory)
        direction = natural_direction(memory, gradient)
        mean, C = jax.tree.map(lambda x, v: x - t * v, memory, direction)
        # The sign of a column is free, and the Cholesky factor of the next step has it positive.
        xi = (mean, C * jnp.sign(jnp.diagonal(C)))
        after = family.from_free(xi)
        ok = is_finite((gradient, xi, after))
        info = outcome(family, tangent, ok)
        return choose(ok, after, family), info, choose(ok, xi, memory)


def natural_direction(xi: Pair, gradient: Pair) -> Pair:
    """F_xi^-1 gradient, by three vector-Jacobian products."""
    mean, C = xi
    Sigma = matmul(C, C.T)
    inverse = jax.scipy.linalg.solve_triangular(C, jnp.eye(len(mean), dtype=C.dtype), lower=True)
    S = matmul(inverse.T, inverse)
    eta = (mean, Sigma + jnp.outer(mean, mean))
    theta = (matmul(S, mean), -0.5 * S)
    of_eta = jax.vjp(_from_expectation, eta)[1](gradient)[0]
    pull_back = jax.vjp(_from_natural, theta)[1]
    return jax.vjp(lambda u: pull_back(u)[0], gradient)[1](of_eta)[0]


def _from_expectation(eta: Pair) -> Pair:
    mean, second = eta
    return mean, jnp.linalg.cholesky(second - jnp.outer(mean, mean))


def _from_natural(theta: Pair) -> Pair:
    first, second = theta
    Sigma = jnp.linalg.inv(-(second + second.T))
    return matmul(Sigma, first), jnp.linalg.cholesky(Sigma)

"""What Gaussians with a dense root A of the covariance share; `gaussian` has the mathematics."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent, all_finite
from iblr.families.curvature import Dense, LowRank, RootChange
from iblr.linalg import add_low_rank, matmul


class AbstractDenseGaussian(AbstractGaussian):
    """A Gaussian that stores A as a matrix."""

    factor: eqx.AbstractVar[Float[Array, "d d"]]

    @abc.abstractmethod
    def with_root(
        self,
        mean: Float[Array, " d"],
        factor: Float[Array, "d d"],
        log_det: Float[Array, ""],
        change: RootChange,
    ) -> "AbstractDenseGaussian":
        """The Gaussian with root T A; whatever else is stored moves by the same `change` T."""

    def colour(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows eps to eps A."""
        return matmul(rows, self.factor)

    def whiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows w to w A'."""
        return matmul(rows, self.factor.T)

    def root(self) -> Float[Array, "d d"]:
        """A."""
        return self.factor

    def rescaled(
        self, change: RootChange, step: Float[Array, " d"], ok: Bool[Array, ""]
    ) -> tuple["AbstractDenseGaussian", Bool[Array, ""]]:
        """One pass over A for the rows of T and the step of the mean, one to write T A."""
        assert change.rows is not None
        left = jnp.where(ok, change.rows, 0)
        coloured = self.colour(jnp.concatenate([left, jnp.where(ok, step, 0)[None]]))
        mean = self.mean - coloured[-1]
        ok = ok & all_finite(coloured, mean)
        right = jnp.where(ok, change.times_core(coloured[:-1]), 0)
        family = self.with_root(
            jnp.where(ok, mean, self.mean),
            add_low_rank(jnp.where(ok, change.rest, 1), self.factor, left, right),
            self.log_det + jnp.where(ok, 2 * change.log_det, 0),
            change.if_ok(ok),
        )
        return family, ok

    def low_rank(
        self, shift: float, left: Float[Array, "M d"], right: Float[Array, "M d"]
    ) -> LowRank:
        """Ghat = shift * I - sym(left' right)."""
        return LowRank(jnp.asarray(shift, left.dtype), left, right)

    def secant(
        self, noise: Float[Array, "P d"], change: Float[Array, "P d"], ridge: float
    ) -> LowRank:
        """K = sym(L'R), L = (E E' + rho I)^-1 E, R = 2D - (D E') L, for noise E and change D.

        As rho -> 0, K is the symmetric matrix of smallest Frobenius norm with K E' = D'.
        """
        P, d = noise.shape
        gram = matmul(noise, noise.T) + ridge * max(d, P) * jnp.eye(P, dtype=noise.dtype)
        left = jnp.linalg.solve(gram, noise)
        return self.low_rank(0.0, left, 2 * change - matmul(matmul(change, noise.T), left))

    def from_hessian(self, hessian: Float[Array, "d d"], shift: float = 1.0) -> Dense:
        """shift * I - A H A', made symmetric."""
        whitened = matmul(matmul(self.factor, hessian), self.factor.T)
        identity = jnp.eye(self.dim, dtype=whitened.dtype)
        return Dense(shift * identity - 0.5 * (whitened + whitened.T))

    def add_prior(
        self, tangent: GaussianTangent, prior: AbstractGaussian, weight: Float[Array, ""]
    ) -> GaussianTangent:
        """The exact prior is not of low rank, so the result is dense: O(d^3) a step."""
        gradient = weight * prior.times_precision(self.mean - prior.mean)
        relative = prior.standardise(self.factor)
        return GaussianTangent(
            tangent.gradient + gradient,
            tangent.whitened + self.whiten(gradient[None])[0],
            tangent.curvature.plus(Dense(-weight * matmul(relative, relative.T))),
        )

    def free(self) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        """The mean and C, lower triangular, with Sigma = C C'; its diagonal may have any sign."""
        R = jnp.linalg.qr(self.factor, mode="r")
        return self.mean, (R * jnp.sign(jnp.diagonal(R))[:, None]).T

    def free_gradient(
        self, tangent: GaussianTangent, theta: tuple[Float[Array, " d"], Float[Array, "d d"]]
    ) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
        """dL/dmu = g, and dL/dC = tril(2 (dL/dSigma) C) = -tril(G C), as dL/dSigma = -G/2.

        With A = O C' for a rotation O (the identity after a step in C), G C = C^-T O' Ghat O. Of
        Ghat = c I - sym(L'R) the first term has the diagonal c / C_ii there, since C^-T is upper
        triangular, and the second costs O(M d^2): a row l O is (l A) C^-T.
        """
        C, Ghat = theta[1], tangent.curvature
        if isinstance(Ghat, LowRank):
            rows = self.colour(jnp.concatenate([Ghat.left, Ghat.right]))
            inside = solve_triangular(C, rows.T, lower=True)
            back = solve_triangular(C.T, inside, lower=False)
            M = len(Ghat.left)
            crossed = jnp.concatenate([inside[:, M:], inside[:, :M]], axis=1)
            of_C = 0.5 * matmul(back, crossed.T) - jnp.diag(Ghat.shift / jnp.diagonal(C))
            return tangent.gradient, jnp.tril(of_C)
        O = solve_triangular(C, self.factor.T, lower=True).T  # noqa: E741
        turned = matmul(matmul(O.T, Ghat.dense().matrix), O)
        return tangent.gradient, -jnp.tril(solve_triangular(C.T, turned, lower=False))

    @property
    def variances(self) -> Float[Array, " d"]:
        """The diagonal of the covariance."""
        return jnp.sum(self.factor**2, axis=0)

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """Sigma = A'A."""
        return matmul(self.factor.T, self.factor)

    @property
    def precision(self) -> Float[Array, "d d"]:
        """S = A^-1 A^-T."""
        inverse = self.standardise(jnp.eye(self.dim, dtype=self.factor.dtype))
        return matmul(inverse, inverse.T)

    @property
    def precision_diagonal(self) -> Float[Array, " d"]:
        """The diagonal of S."""
        return jnp.sum(self.standardise(jnp.eye(self.dim, dtype=self.factor.dtype)) ** 2, axis=1)

    def expected_square(self, q: Any) -> Float[Array, ""]:
        """E_q |(z - mu) A^-1|^2."""
        rows = jnp.concatenate([q.root(), (q.mean - self.mean)[None]])
        return jnp.sum(self.standardise(rows) ** 2)

"""Gaussian with a diagonal covariance, q(z) = prod_i N(z_i | mu_i, 1/s_i); [LSK20] App. E.3.

2d blocks: every mu_i and every s_i > 0 on its own. The rule of `gaussian` holds entry by entry,

    s_i <- s_i - t g_i + (t^2/2) g_i^2 / s_i = s_i f(t g_i / s_i),

and in the square-root form sigma_i <- sigma_i f(t ghat_i)^(-1/2) with ghat = sigma^2 g.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from iblr.families import arguments
from iblr.families.abstract_gaussian import AbstractGaussian, GaussianTangent, all_finite
from iblr.families.curvature import Diagonal, RootChange
from iblr.structure import Structure


class DiagonalGaussian(AbstractGaussian):
    """A Gaussian with independent coordinates.

    Attributes:
        mean: mu, flat.
        scale: sigma, the standard deviations, flat and positive.

    Example:
        >>> import iblr, jax.numpy as jnp
        >>> q = iblr.DiagonalGaussian.from_variances(jnp.zeros(2), jnp.array([4.0, 9.0]))
        >>> q.standard_deviations.tolist()
        [2.0, 3.0]
    """

    mean: Float[Array, " d"]
    scale: Float[Array, " d"]
    structure: Structure

    @staticmethod
    def standard(
        dim: int | None = None, *, like: PyTree = None, dtype: Any = None, support: Any = None
    ) -> "DiagonalGaussian":
        """N(0, I) over vectors of length `dim`, or over pytrees of the structure of `like`.

        With `support`, such as `{"tau": iblr.positive}`, the leaves named are mapped onto it, and
        `like` is a template of the points.
        """
        call = "DiagonalGaussian.standard"
        structure, dtype = arguments.start_structure(call, dim, like, dtype, support)
        d = structure.dim
        return DiagonalGaussian(
            mean=jnp.zeros(d, dtype), scale=jnp.ones(d, dtype), structure=structure
        )

    @staticmethod
    def from_variances(mean: PyTree, variances: PyTree) -> "DiagonalGaussian":
        """N(mean, diag(variances)), both vectors or both pytrees of one structure."""
        call, dtype = "DiagonalGaussian.from_variances", arguments.floating(mean, variances)
        mean, structure = arguments.flat_mean(call, mean, dtype)
        rows = structure.ravel(variances, f"{call}(variances=...)").astype(dtype)
        if rows.shape != mean.shape:
            raise ValueError(
                f"`{call}(mean, variances)` needs one variance for each of {mean.size} means, but "
                f"got an array of shape {rows.shape}."
            )
        arguments.check_positive(call, "variances", rows)
        return DiagonalGaussian(mean=mean, scale=jnp.sqrt(rows), structure=structure)

    def colour(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows eps to eps sigma."""
        return rows * self.scale

    def whiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows w to w sigma."""
        return rows * self.scale

    def standardise(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows x to x / sigma."""
        return rows / self.scale

    def scaled(self, size: float, mean: Float[Array, " d"]) -> "DiagonalGaussian":
        """With `size` times the standard deviations, at another mean."""
        return dataclasses.replace(self, mean=mean, scale=size * self.scale)

    def unwhiten(self, rows: Float[Array, "M d"]) -> Float[Array, "M d"]:
        """Rows y to y / sigma."""
        return rows / self.scale

    def root(self) -> Float[Array, "d d"]:
        """diag(sigma)."""
        return jnp.diag(self.scale)

    def rescaled(
        self, change: RootChange, step: Float[Array, " d"], ok: Bool[Array, ""]
    ) -> tuple["DiagonalGaussian", Bool[Array, ""]]:
        """Entry by entry."""
        mean = self.mean - step * self.scale
        scale = self.scale * change.core
        ok = ok & all_finite(mean, scale) & (scale > 0).all()
        family = DiagonalGaussian(
            mean=jnp.where(ok, mean, self.mean),
            scale=jnp.where(ok, scale, self.scale),
            structure=self.structure,
        )
        return family, ok

    def low_rank(
        self, shift: float, left: Float[Array, "M d"], right: Float[Array, "M d"]
    ) -> Diagonal:
        """The diagonal of shift * I - sym(left' right)."""
        return Diagonal(shift - jnp.sum(left * right, axis=0))

    def secant(
        self, noise: Float[Array, "P d"], change: Float[Array, "P d"], ridge: float
    ) -> Diagonal:
        """Least squares of every coordinate on its own, a problem of one dimension each."""
        gram = jnp.sum(noise**2, axis=0) + ridge * noise.shape[0]
        return Diagonal(-jnp.sum(noise * change, axis=0) / gram)

    def from_hessian(self, hessian: Float[Array, "d d"], shift: float = 1.0) -> Diagonal:
        """shift - sigma^2 diag(H)."""
        return Diagonal(shift - self.scale**2 * jnp.diagonal(hessian))

    def add_prior(
        self, tangent: GaussianTangent, prior: AbstractGaussian, weight: Float[Array, ""]
    ) -> GaussianTangent:
        """Exact at O(d) where the prior is diagonal too."""
        gradient = weight * prior.times_precision(self.mean - prior.mean)
        return GaussianTangent(
            tangent.gradient + gradient,
            tangent.whitened + self.scale * gradient,
            tangent.curvature.plus(Diagonal(-weight * self.scale**2 * prior.precision_diagonal)),
        )

    def free(self) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """The mean and sigma, which may have any sign."""
        return self.mean, self.scale

    def from_free(self, theta: tuple[Float[Array, " d"], Float[Array, " d"]]) -> "DiagonalGaussian":
        """Standard deviations |sigma|, nan where that is zero."""
        mean, sigma = theta
        scale = jnp.where(sigma == 0, jnp.nan, jnp.abs(sigma))
        return dataclasses.replace(self, mean=mean, scale=scale)

    def free_gradient(
        self, tangent: GaussianTangent, theta: tuple[Float[Array, " d"], Float[Array, " d"]]
    ) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """dL/dmu = g, and dL/dsigma = -sigma G = -Ghat / sigma."""
        return tangent.gradient, -tangent.curvature.diagonal() / theta[1]

    @property
    def log_det(self) -> Float[Array, ""]:
        """log|Sigma|."""
        return 2 * jnp.log(self.scale).sum()

    @property
    def variances(self) -> Float[Array, " d"]:
        """sigma^2."""
        return self.scale**2

    @property
    def covariance(self) -> Float[Array, "d d"]:
        """diag(sigma^2)."""
        return jnp.diag(self.scale**2)

    @property
    def precision(self) -> Float[Array, "d d"]:
        """diag(1/sigma^2)."""
        return jnp.diag(self.scale**-2)

    @property
    def precision_diagonal(self) -> Float[Array, " d"]:
        """1/sigma^2."""
        return self.scale**-2

    def expected_square(self, q: Any) -> Float[Array, ""]:
        """E_q |(z - mu) / sigma|^2."""
        return jnp.sum((q.variances + (q.mean - self.mean) ** 2) / self.scale**2)

    def refreshed(self) -> tuple["DiagonalGaussian", Float[Array, ""]]:
        """Itself: nothing derived is stored."""
        return self, jnp.zeros((), self.scale.dtype)

    def marginal(self, indices: ArrayLike | Sequence[int]) -> "DiagonalGaussian":
        """The distribution of the flat coordinates `indices`, in that order."""
        indices = arguments.check_indices("marginal", indices, self.dim)
        structure = Structure.flat(indices.size)
        return DiagonalGaussian(
            mean=self.mean[indices], scale=self.scale[indices], structure=structure
        )

    def conditional(
        self, indices: ArrayLike | Sequence[int], values: ArrayLike | Sequence[float]
    ) -> "DiagonalGaussian":
        """The distribution of the other flat coordinates, which the given ones do not change."""
        _, others, _ = arguments.split_indices(indices, values, self.dim)
        return self.marginal(others)

"""The whitened natural gradient of a Gaussian's precision, and what a rule does to its spectrum.

Write S for the precision, A for any root of the covariance (Sigma = A'A) and G for the natural
gradient in S ([LSK20] eq. ivon_2). In whitened coordinates S is the identity and the natural
gradient is Ghat = A G A', so every rule of the package is one scalar function m of the eigenvalues
x of t Ghat, applied to the root:

    A <- m(t Ghat) A

    improved rule     S <- S - tG + (t^2/2) G S^-1 G       m(x) = f(x)^(-1/2), f(x) = 1 - x + x^2/2
    original rule     S <- S - tG                          m(x) = (1 - x)^(-1/2), x < 1
    block geodesic    S <- S^(1/2) exp(-t Ghat) S^(1/2)    m(x) = exp(x/2)

In the parameter theta = S^p (p = 1 precision, -1 covariance, -1/2 standard deviation) the relative
step is p x and the geodesic is again exponential, so that the rule of that parameterisation is
theta <- theta f(p x), that is m(x) = f(p x)^(-1/(2p)). Appendix A ({mu, sigma}, {mu, v}) and E.4
({mu, Sigma}) of the paper are p = -1/2 and p = -1.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from iblr.linalg import matmul, orthonormal_rows

Multiplier = Callable[[Float[Array, "..."]], Float[Array, "..."]]

LARGEST_GAIN = 3.0
LARGEST_LOSS = 0.5


class Parameterisation(enum.Enum):
    """The power of the precision in which a rule takes its step."""

    precision = 1.0
    covariance = -1.0
    standard_deviation = -0.5


class Spectrum(NamedTuple):
    """Eigenvalues of Ghat: `values` on the orthonormal rows `basis`, `rest` on their complement.

    `basis` is None where the eigenvectors are the coordinate axes; `rest_dim` may be zero.
    """

    basis: Float[Array, "r d"] | None
    values: Float[Array, " r"]
    rest: Float[Array, ""]
    rest_dim: int


class LowRank(eqx.Module):
    """Ghat = shift * I - sym(left' right), of rank 2M on top of a multiple of the identity."""

    shift: Float[Array, ""]
    left: Float[Array, "M d"]
    right: Float[Array, "M d"]

    def dense(self) -> "Dense":
        """The same operator as a matrix."""
        d = self.left.shape[1]
        half = 0.5 * matmul(self.left.T, self.right)
        return Dense(self.shift * jnp.eye(d, dtype=half.dtype) - half - half.T)

    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal of the operator."""
        return self.shift - jnp.sum(self.left * self.right, axis=0)

    def spectrum(self) -> Spectrum:
        """From a 2M-by-2M eigenproblem where 2M < d, from a d-by-d one otherwise."""
        M, d = self.left.shape
        if 2 * M >= d:
            return self.dense().spectrum()
        return self.spectrum_in(*orthonormal_rows(jnp.concatenate([self.left, self.right])))

    def spectrum_in(self, basis: Float[Array, "r d"], rows: Float[Array, "r r"]) -> Spectrum:
        """The spectrum, given orthonormal rows and the coordinates of `left`, `right` in them."""
        M, d = self.left.shape
        half = 0.5 * matmul(rows[:M].T, rows[M:])
        values, vectors = jnp.linalg.eigh(half + half.T)
        return Spectrum(matmul(vectors.T, basis), self.shift - values, self.shift, d - 2 * M)


class Dense(eqx.Module):
    """Ghat as a symmetric matrix."""

    matrix: Float[Array, "d d"]

    def dense(self) -> "Dense":
        """The operator itself."""
        return self

    def diagonal(self) -> Float[Array, " d"]:
        """The diagonal of the matrix."""
        return jnp.diagonal(self.matrix)

    def spectrum(self) -> Spectrum:
        """From a d-by-d eigenproblem."""
        values, vectors = jnp.linalg.eigh(self.matrix)
        return Spectrum(vectors.T, values, jnp.zeros((), values.dtype), 0)


class Diagonal(eqx.Module):
    """Ghat of a Gaussian with a diagonal covariance."""

    values: Float[Array, " d"]

    def dense(self) -> Dense:
        """The same operator as a matrix."""
        return Dense(jnp.diag(self.values))

    def diagonal(self) -> Float[Array, " d"]:
        """The entries."""
        return self.values

    def spectrum(self) -> Spectrum:
        """The entries themselves."""
        return Spectrum(None, self.values, jnp.zeros((), self.values.dtype), 0)


class Scaling(NamedTuple):
    """What is done to the root: `values` on the spectrum's basis, `rest` on its complement."""

    values: Float[Array, " r"]
    rest: Float[Array, ""]
    limited: Int[Array, ""]
    shrunk: Float[Array, ""]

    def apply(self, spectrum: Spectrum, row: Float[Array, " d"]) -> Float[Array, " d"]:
        """m(Ghat) applied to one vector."""
        if spectrum.basis is None:
            return self.values * row
        along = matmul(spectrum.basis, row)
        return self.rest * row + matmul((self.values - self.rest) * along, spectrum.basis)


def improved(power: float) -> Multiplier:
    """The improved rule in the parameter S^power."""
    return lambda x: (0.5 * (1 + (1 - power * x) ** 2)) ** (-0.5 / power)


def original(power: float) -> Multiplier:
    """The rule without the curvature term; nan where the step leaves the set."""
    return lambda x: jnp.where(power * x < 1, 1 - power * x, jnp.nan) ** (-0.5 / power)


def geodesic(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The exact geodesic of the precision block, the mean held ([LSK20] lemma gauss_s_chris).

    The lemma prints Exp(+t ...); its derivative at zero must be -G, so the sign here is the
    corrected one.
    """
    return jnp.exp(0.5 * x)


def scale(spectrum: Spectrum, t: Float[Array, ""], m: Multiplier, trust_region: bool) -> Scaling:
    """Multipliers of the root for the step t along the spectrum.

    With `trust_region`, gains of precision (x < 0) are clipped one by one at x = -3 and losses
    (x > 0) are scaled by one common factor so that the largest is at most 1/2. Losses must not be
    clipped one by one: f is smallest at x = 1, so every noisy direction would double its variance.

    In every case one step changes one direction of the root by a factor of at most 100 in float32
    (10^6 in float64): beyond that the rounding of the stored factor would show in its determinant.
    """
    x, rest = t * spectrum.values, t * spectrum.rest
    factor = jnp.ones((), x.dtype)
    if trust_region:
        largest = jnp.maximum(x.max(), rest) if spectrum.rest_dim else x.max()
        factor = jnp.minimum(1, LARGEST_LOSS / jnp.maximum(largest, LARGEST_LOSS))
        x = jnp.where(x < 0, jnp.maximum(x, -LARGEST_GAIN), factor * x)
        rest = jnp.where(rest < 0, jnp.maximum(rest, -LARGEST_GAIN), factor * rest)
    bound = 1e-2 if jnp.finfo(x.dtype).eps > 1e-10 else 1e-6
    values, others = m(x), m(rest)
    outside = (values < bound) | (values > 1 / bound)
    limited = outside.sum() + spectrum.rest_dim * ((others < bound) | (others > 1 / bound))
    values, others = (jnp.clip(value, bound, 1 / bound) for value in (values, others))
    if spectrum.rest_dim == 0:
        others = jnp.exp(jnp.log(values).mean())  # any value will do; this one rounds least
    return Scaling(values, others, limited.astype(jnp.int32), factor)

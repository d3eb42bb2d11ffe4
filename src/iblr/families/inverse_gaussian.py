"""Inverse Gaussian with mean 1/beta and shape alpha, for positive numbers; [LSK20] appendix H.

    q(z) = (2 pi z^3)^(-1/2) exp(-z alpha beta^2 / 2 - alpha / (2z) + log(alpha)/2 + alpha beta)

Blocks lambda_1 = beta^2 and lambda_2 = alpha, both positive, with
A = -log(lambda_2)/2 - lambda_2 sqrt(lambda_1). Block-coordinate (Lemma fisher_ig): the mixed
derivative of log q is (1/beta - z)/2, zero on average. Natural: with one block fixed, log q + A is
linear in the other. ({1/beta, alpha} is block-coordinate too, but log q is not linear in 1/beta.)

    metric      F_1 = alpha beta^-3 / 4          F_2 = 1 / (2 alpha^2)
    weights     w_1 = phi / 4                    w_2 = 1/2               phi = alpha beta
    natural     ghat_1 = 4 beta^3 dL_1 / alpha   ghat_2 = 2 alpha^2 dL_2
    curvature   Gamma_1 = -3 / (4 lambda_1)      Gamma_2 = -1 / lambda_2
    bends       c_1 = 3/4                        c_2 = 1

The improved rule keeps lambda_1 at or above a third of itself and lambda_2 a half. F_1 is
proportional to lambda_1^(-3/2), so the geodesic of the first block is lambda_1 (1 - x/4)^4: it
reaches the boundary at x = 4, in finite time, and does not protect the constraint. That of the
second is lambda_2 exp(-x).

Everything else depends on phi and u = log(z / E z) = log(beta z) alone:

    log q       = log(phi / (2 pi))/2 - phi (cosh u - 1) - 3u/2 + log beta
    entropy     = (1 - log(phi / (2 pi)) - 3 e^(2 phi) E1(2 phi))/2 - log beta
    moments     E z = 1/beta, E 1/z = beta (1 + 1/phi), E log z = -log beta - e^(2 phi) E1(2 phi)

A draw is a root of y + 1/y = 2 + n^2/phi, n standard normal, taken with probability 1/(1 + y) (the
method of Michael, Schucany and Haas 1976): u = -+ log1p(r + sqrt(r (r + 2))), r = n^2/(2 phi), and
nothing cancels. At a fixed quantile, with s = sqrt(phi/y) (1 + y), y = e^u, and m the Mills ratio
(the paper's delta),

    dlog z / dlog alpha = 1 - k,   dlog z / dlog beta = -k,   k = 2 sqrt(phi y) m(s)
    k = (2y / (1 + y)) s m(s)
    1 - k = -tanh(u/2) + (2y / (1 + y)) (1 - s m(s)),         as s m -> 1 cancels for large phi

and dlog z / dlog lambda_1 is half of that in beta.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr import special
from iblr.families import arguments
from iblr.families.positive import AbstractPositive, Blocks, Rows
from iblr.structure import Structure


class InverseGaussian(AbstractPositive):
    """Independent inverse Gaussian variables, of any shape.

    Args:
        mean: 1/beta, a positive array or a pytree of them; a point has the same structure.
        shape: alpha (often called lambda), of the same structure or to be broadcast; the variance
            is mean^3 / shape.
        dtype: the floating-point type; that of the arguments if not given.

    Attributes:
        blocks: 1/mean^2 and shape, flat.

    Example:
        >>> import iblr, jax
        >>> target = iblr.InverseGaussian(2.0, 3.0)
        >>> posterior = iblr.fit(target.log_prob, iblr.InverseGaussian(1.0, 1.0),
        ...                      key=jax.random.key(0), num_steps=500)
        >>> [round(float(x), 3) for x in (posterior.mean, posterior.family.shape)]
        [2.0, 3.0]
    """

    blocks: tuple[Float[Array, " d"], Float[Array, " d"]]
    structure: Structure

    shape_block: ClassVar[int | None] = 1
    natural_floors: ClassVar[tuple[float, ...]] = (0.0, 0.0)

    def __init__(self, mean: PyTree, shape: PyTree, *, dtype: Any = None):
        (m, a), self.structure = arguments.positive(
            "InverseGaussian", {"mean": mean, "shape": shape}, dtype
        )
        self.blocks = (m**-2, a)
        arguments.check_fits("InverseGaussian", "mean", self.blocks[0])
        arguments.check_fits("InverseGaussian", "shape", a / m)

    @staticmethod
    def standard(
        dim: int | None = None, *, like: PyTree = None, dtype: Any = None
    ) -> "InverseGaussian":
        """Mean and shape one over vectors of length `dim`, or over pytrees like `like`."""
        structure, dtype = arguments.start_structure("InverseGaussian.standard", dim, like, dtype)
        return InverseGaussian(structure.unravel(jnp.ones(structure.dim, dtype)), 1.0, dtype=dtype)

    @property
    def shape(self) -> PyTree:
        """alpha, in the structure of the points."""
        return self.structure.unravel(self.blocks[1])

    @property
    def _phi(self) -> Float[Array, " d"]:
        return self.blocks[1] * jnp.sqrt(self.blocks[0])

    @property
    def weights(self) -> Blocks:
        """phi / 4 and 1/2."""
        return 0.25 * self._phi, jnp.full_like(self.blocks[1], 0.5)

    @property
    def bends(self) -> Blocks:
        """3/4 and 1."""
        return jnp.full_like(self.blocks[0], 0.75), jnp.ones_like(self.blocks[1])

    def geodesic_factors(self, steps: Blocks) -> Blocks:
        """(1 - x/4)^4, zero from x = 4 on, and exp(-x)."""
        return jnp.maximum(1 - 0.25 * steps[0], 0) ** 4, jnp.exp(-steps[1])

    def to_natural(self, blocks: Blocks) -> Blocks:
        """alpha beta^2 and alpha, the multipliers of -z/2 and of -1/(2z)."""
        return blocks[0] * blocks[1], blocks[1]

    def from_natural(self, natural: Blocks) -> Blocks:
        """beta^2 and alpha."""
        return natural[0] / natural[1], natural[1]

    def log_ratios(self, key: Key[Array, ""], num: int) -> Rows:
        """log(beta z)."""
        normal_key, side_key = jax.random.split(key)
        n = jax.random.normal(normal_key, (num, self.dim), self.dtype)
        r = 0.5 * n**2 / self._phi
        distance = jnp.log1p(r + jnp.sqrt(r) * jnp.sqrt(r + 2))
        is_small = jax.random.uniform(side_key, n.shape, self.dtype) < jax.nn.sigmoid(distance)
        return jnp.where(is_small, -distance, distance)

    def log_slopes(self, ratios: Rows) -> tuple[Rows, ...]:
        """-k/2 and 1 - k."""
        # s = 2 sqrt(phi) cosh(u/2), which only overflows where 1 - s m(s) is zero anyway.
        s = 2 * jnp.sqrt(self._phi) * jnp.cosh(0.5 * ratios)
        y, ratio = jax.nn.sigmoid(ratios), special.scaled_mills(s)
        return -y * ratio, 2 * y * special.mills_rest(s) - jnp.tanh(0.5 * ratios)

    def log_densities(self, ratios: Rows) -> Rows:
        """log q(z); cosh u - 1 = 2 sinh(u/2)^2."""
        phi, log_beta = self._phi, 0.5 * jnp.log(self.blocks[0])
        constant = 0.5 * jnp.log(phi / (2 * jnp.pi)) + log_beta
        return constant - 2 * phi * jnp.sinh(0.5 * ratios) ** 2 - 1.5 * ratios

    def log_density_slopes(self, ratios: Rows) -> Rows:
        """z dlog q/dz = -phi sinh u - 3/2."""
        return -self._phi * jnp.sinh(ratios) - 1.5

    @property
    def mean(self) -> Float[Array, " d"]:
        """1 / beta."""
        return 1 / jnp.sqrt(self.blocks[0])

    @property
    def variances(self) -> Float[Array, " d"]:
        """1 / (alpha beta^3)."""
        return 1 / (self.blocks[0] * self._phi)

    @property
    def log_gap(self) -> Float[Array, " d"]:
        """e^(2 phi) E1(2 phi)."""
        return special.scaled_exp1(2 * self._phi)

    @property
    def inverse_gap(self) -> Float[Array, " d"]:
        """1 / alpha."""
        return 1 / self.blocks[1]

    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats.

        Its derivatives are those of appendix H, 1/alpha - 3 beta e^(2 phi) E1(2 phi) in alpha and
        -3 alpha e^(2 phi) E1(2 phi) in beta, as d(e^x E1)/dx = e^x E1 - 1/x.
        """
        phi, log_beta = self._phi, 0.5 * jnp.log(self.blocks[0])
        constant = 0.5 * (1 - jnp.log(phi / (2 * jnp.pi)))
        return jnp.sum(constant - 1.5 * special.scaled_exp1(2 * phi) - log_beta)

    def expected_log_prob(self, q: AbstractPositive) -> Float[Array, ""]:
        """E_q[log q(z)] from E_q z, E_q 1/z and E_q log z; KL to another inverse Gaussian in `kl`.

        With v = beta E_q z, E_q[cosh u - 1] = cosh(log v) - 1 + (E_q 1/z - 1/E_q z) / (2 beta).
        """
        self.check_same_points(q)
        phi, log_beta = self._phi, 0.5 * jnp.log(self.blocks[0])
        shift = jnp.log(q.mean) + log_beta
        expected_cosh = 2 * jnp.sinh(0.5 * shift) ** 2 + 0.5 * q.inverse_gap * self.mean
        constant = 0.5 * jnp.log(phi / (2 * jnp.pi)) + log_beta
        return jnp.sum(constant - phi * expected_cosh - 1.5 * (shift - q.log_gap))

"""Gamma, q(z) = Ga(z | shape a, rate b) for positive numbers; [LSK20] Theorem 2 and appendix F.

Blocks lambda_1 = a and lambda_2 = b/a, the inverse of the mean, both positive:

    q(z) = z^-1 exp(lambda_1 log z - z lambda_1 lambda_2 - A)
    A = log Ga(lambda_1) - lambda_1 (log lambda_1 + log lambda_2)

Block-coordinate (Lemma gamma_bc): the mixed derivative of log q is -z + 1/lambda_2, zero on
average. Natural: with lambda_2 fixed log q + A is linear in lambda_1 with the statistic
log z - z lambda_2, and with lambda_1 fixed in lambda_2 with -z lambda_1. With T(a) = psi'(a) - 1/a
and U(a) = psi''(a) + 1/a^2,

    metric      F_1 = T(a)                  F_2 = a / lambda_2^2
    weights     w_1 = a^2 T(a)              w_2 = a
    natural     ghat_1 = dL_1 / T(a)        ghat_2 = dL_2 lambda_2^2 / a
    curvature   Gamma_1 = U(a) / (2 T(a))   Gamma_2 = -1/lambda_2
    bends       c_1 = -a U(a) / (2 T(a))    c_2 = 1

Lemma chris_gamma, Gamma_1 < -1/a, says c_1 > 1, so both blocks stay positive (Theorem 2). Near
zero w_1 -> 1 and c_1 -> 1, at infinity w_1 -> 1/2 and c_1 -> 1 from above (`iblr.special` computes
T and U without cancellation).

With u = log(z / E z), and R and D the rests of log Ga and psi that `iblr.special` defines, no large
terms cancel in

    log q    = log(a / (2 pi))/2 - R(a) - a (e^u - 1 - u) - log z
    entropy  = -log(a / (2 pi))/2 + R(a) - a D(a) + E log z,   as E[e^u - 1 - u] = -D(a)

where E z = a/b and E log z = psi(a) - log b = D(a) - log lambda_2. Those two moments also give the
expected log density of a Gamma under any positive family, the KL to the conjugate prior Ga(a0, b0)
among them. A draw is z = (a/b) exp(u) with u from `special.gamma_log_ratio`; at a fixed quantile

    dlog z / dlog b = -1,   dlog z / dlog a = 1 + `special.gamma_ratio_slope`,

hence dlog z / dlog lambda_1 is the latter minus one, at b = lambda_1 lambda_2, and
dlog z / dlog lambda_2 is -1. The length int sqrt(T) of the first block has no closed form: there
is no `geodesic_step`.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr import special
from iblr.families import arguments
from iblr.families.positive import AbstractPositive, Blocks, Rows
from iblr.structure import Structure


class Gamma(AbstractPositive):
    """Independent Gamma variables, of any shape.

    Args:
        shape: a, a positive array or a pytree of them; a point has the same structure.
        rate: b, of the same structure or to be broadcast.
        dtype: the floating-point type; that of the arguments if not given.

    Attributes:
        blocks: shape and inverse mean, flat.

    Example:
        >>> import iblr, jax, jax.numpy as jnp
        >>> prior = iblr.Gamma(jnp.array([1.0, 2.0]), 1.0)
        >>> counts = lambda rate: (jnp.array([7.0, 0.0]) * jnp.log(rate) - 3 * rate).sum()
        >>> target = iblr.Target(log_likelihood=counts, prior=prior)
        >>> posterior = iblr.fit(target, prior, key=jax.random.key(0))
        >>> posterior.family.shape.round(3).tolist(), posterior.family.rate.round(3).tolist()
        ([8.0, 2.0], [4.0, 4.0])
    """

    blocks: tuple[Float[Array, " d"], Float[Array, " d"]]
    structure: Structure

    shape_block: ClassVar[int | None] = 0
    # The authors' line search keeps the shape above this.
    natural_floors: ClassVar[tuple[float, ...]] = (0.01, 0.0)

    def __init__(self, shape: PyTree, rate: PyTree, *, dtype: Any = None):
        (a, b), self.structure = arguments.positive("Gamma", {"shape": shape, "rate": rate}, dtype)
        self.blocks = (a, b / a)
        arguments.check_fits("Gamma", "rate", self.blocks[1])

    @staticmethod
    def standard(dim: int | None = None, *, like: PyTree = None, dtype: Any = None) -> "Gamma":
        """Ga(1, 1) over vectors of length `dim`, or over pytrees of the structure of `like`."""
        structure, dtype = arguments.start_structure("Gamma.standard", dim, like, dtype)
        return Gamma(structure.unravel(jnp.ones(structure.dim, dtype)), 1.0, dtype=dtype)

    @property
    def shape(self) -> PyTree:
        """The shape a, in the structure of the points."""
        return self.structure.unravel(self.blocks[0])

    @property
    def rate(self) -> PyTree:
        """The rate b, in the structure of the points."""
        return self.structure.unravel(self.blocks[0] * self.blocks[1])

    @property
    def weights(self) -> Blocks:
        """a^2 T(a) and a."""
        a = self.blocks[0]
        return a**2 * special.trigamma_rest(a), a

    @property
    def bends(self) -> Blocks:
        """-a U(a) / (2 T(a)) and 1."""
        a = self.blocks[0]
        bend = -0.5 * a * special.tetragamma_rest(a) / special.trigamma_rest(a)
        return bend, jnp.ones_like(a)

    def geodesic_factors(self, steps: Blocks) -> Blocks:
        """Not known: the length of the block of the shape is no elementary function."""
        raise ValueError(
            "`geodesic_step` has no closed form for a Gamma's shape. Use `improved_step`, which "
            "agrees with the geodesic to second order and cannot leave the set."
        )

    def to_natural(self, blocks: Blocks) -> Blocks:
        """Shape and rate."""
        return blocks[0], blocks[0] * blocks[1]

    def from_natural(self, natural: Blocks) -> Blocks:
        """Shape and inverse mean."""
        return natural[0], natural[1] / natural[0]

    def log_ratios(self, key: Key[Array, ""], num: int) -> Rows:
        """log(z b / a)."""
        return special.gamma_log_ratio(key, self.blocks[0], (num, self.dim))

    def log_slopes(self, ratios: Rows) -> tuple[Rows, ...]:
        """The implicit derivative in the shape less one, and -1."""
        return special.gamma_ratio_slope(self.blocks[0], ratios), -jnp.ones_like(ratios)

    def log_densities(self, ratios: Rows) -> Rows:
        """log q(z) = -a (e^u - 1 - u) - log z + log(a / (2 pi))/2 - R(a)."""
        a, inverse_mean = self.blocks
        log_z = ratios - jnp.log(inverse_mean)
        return self._constant - a * special.expm1_rest(ratios) - log_z

    @property
    def _constant(self) -> Float[Array, " d"]:
        a = self.blocks[0]
        return 0.5 * jnp.log(a / (2 * jnp.pi)) - special.log_gamma_rest(a)

    def log_density_slopes(self, ratios: Rows) -> Rows:
        """z dlog q/dz = -a (e^u - 1) - 1."""
        return -self.blocks[0] * jnp.expm1(ratios) - 1

    @property
    def mean(self) -> Float[Array, " d"]:
        """a / b."""
        return 1 / self.blocks[1]

    @property
    def variances(self) -> Float[Array, " d"]:
        """a / b^2."""
        return 1 / (self.blocks[0] * self.blocks[1] ** 2)

    @property
    def log_gap(self) -> Float[Array, " d"]:
        """-D(a)."""
        return -special.digamma_rest(self.blocks[0])

    @property
    def inverse_gap(self) -> Float[Array, " d"]:
        """b / (a - 1) - b / a for a > 1."""
        a, inverse_mean = self.blocks
        return jnp.where(a > 1, inverse_mean / jnp.where(a > 1, a - 1, 1), jnp.inf)

    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats: -E of `log_densities`, as E[e^u - 1 - u] = -D(a)."""
        a = self.blocks[0]
        return jnp.sum(-self._constant + a * self.log_gap + self.expected_log)

    def expected_log_prob(self, q: AbstractPositive) -> Float[Array, ""]:
        """E_q[log Ga(z | a, b)] from E_q log z and E_q z: KL to the conjugate prior in `kl`.

        With v = E_q z b / a, E_q[e^u - 1 - u] = v - 1 - log v + log E_q z - E_q log z.
        """
        self.check_same_points(q)
        a, inverse_mean = self.blocks
        excess = special.expm1_rest(jnp.log(q.mean * inverse_mean)) + q.log_gap
        return jnp.sum(self._constant - a * excess - q.expected_log)

"""Exponential, q(z) = lambda exp(-lambda z) for positive numbers; [LSK20] appendix G.

One block, the rate, natural and positive, with A = -log lambda:

    metric      F = 1/lambda^2            weight  w = 1
    natural     ghat = lambda^2 dL        bend    c = 1
    curvature   Gamma = -1/lambda

so lambda <- lambda (1 - x + x^2/2), x = t ghat / lambda, and the geodesic is lambda exp(-x); both
stay positive. With u = log(lambda z), log q = u - e^u - log z, the entropy is 1 - log lambda,
E z = 1/lambda and E log z = -log lambda - 0.5772... (Euler's constant). At a fixed quantile
lambda z is fixed, so dlog z / dlog lambda = -1.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from iblr.families import arguments
from iblr.families.positive import AbstractPositive, Blocks, Rows
from iblr.structure import Structure


class Exponential(AbstractPositive):
    """Independent exponential variables, of any shape.

    Args:
        rate: lambda, a positive array or a pytree of them; a point has the same structure.
        dtype: the floating-point type; that of the argument if not given.

    Attributes:
        blocks: the rate, flat.

    Example:
        >>> import iblr, jax
        >>> posterior = iblr.fit(lambda z: -4.0 * z.sum(), iblr.Exponential.standard(2),
        ...                      key=jax.random.key(0), num_steps=500)
        >>> posterior.family.rate.round(3).tolist()
        [4.0, 4.0]
    """

    blocks: tuple[Float[Array, " d"]]
    structure: Structure

    shape_block: ClassVar[int | None] = None
    natural_floors: ClassVar[tuple[float, ...]] = (0.0,)

    def __init__(self, rate: PyTree, *, dtype: Any = None):
        (rates,), self.structure = arguments.positive("Exponential", {"rate": rate}, dtype)
        self.blocks = (rates,)

    @staticmethod
    def standard(
        dim: int | None = None, *, like: PyTree = None, dtype: Any = None
    ) -> "Exponential":
        """Rate one over vectors of length `dim`, or over pytrees of the structure of `like`."""
        structure, dtype = arguments.start_structure("Exponential.standard", dim, like, dtype)
        return Exponential(structure.unravel(jnp.ones(structure.dim, dtype)), dtype=dtype)

    @property
    def rate(self) -> PyTree:
        """lambda, in the structure of the points."""
        return self.structure.unravel(self.blocks[0])

    @property
    def weights(self) -> Blocks:
        """1."""
        return (jnp.ones_like(self.blocks[0]),)

    @property
    def bends(self) -> Blocks:
        """1."""
        return (jnp.ones_like(self.blocks[0]),)

    def geodesic_factors(self, steps: Blocks) -> Blocks:
        """exp(-x)."""
        return (jnp.exp(-steps[0]),)

    def to_natural(self, blocks: Blocks) -> Blocks:
        """The rate is natural."""
        return blocks

    def from_natural(self, natural: Blocks) -> Blocks:
        """The rate is natural."""
        return natural

    def log_ratios(self, key: Key[Array, ""], num: int) -> Rows:
        """log(lambda z)."""
        e = jax.random.exponential(key, (num, self.dim), self.dtype)
        # A uniform variable of this precision can be zero; half its spacing stands for that.
        return jnp.log(jnp.maximum(e, 0.5 * jnp.finfo(self.dtype).eps))

    def log_slopes(self, ratios: Rows) -> tuple[Rows, ...]:
        """-1."""
        return (-jnp.ones_like(ratios),)

    def log_densities(self, ratios: Rows) -> Rows:
        """log lambda - lambda z."""
        return jnp.log(self.blocks[0]) - jnp.exp(ratios)

    def log_density_slopes(self, ratios: Rows) -> Rows:
        """-lambda z."""
        return -jnp.exp(ratios)

    @property
    def mean(self) -> Float[Array, " d"]:
        """1 / lambda."""
        return 1 / self.blocks[0]

    @property
    def variances(self) -> Float[Array, " d"]:
        """1 / lambda^2."""
        return self.blocks[0] ** -2

    @property
    def log_gap(self) -> Float[Array, " d"]:
        """Euler's constant."""
        return jnp.full_like(self.blocks[0], jnp.euler_gamma)

    @property
    def inverse_gap(self) -> Float[Array, " d"]:
        """Infinite."""
        return jnp.full_like(self.blocks[0], jnp.inf)

    def entropy(self) -> Float[Array, ""]:
        """Differential entropy in nats."""
        return jnp.sum(1 - jnp.log(self.blocks[0]))

    def expected_log_prob(self, q: AbstractPositive) -> Float[Array, ""]:
        """E_q[log lambda - lambda z] from E_q z."""
        self.check_same_points(q)
        return jnp.sum(jnp.log(self.blocks[0]) - self.blocks[0] * q.mean)

"""Where a parameter lives, and the smooth map onto it from real coordinates.

A family is a distribution of real coordinates x; a point is z = T(x), T one to one and onto the
support. A density p(z) of points is the density p(T(x)) |det DT(x)| of coordinates.

    support              z = T(x)                                log |det DT(x)|

    real                 x                                       0
    positive             exp x                                   x
    interval(a, b)       a + (b - a) s(x)                        log (b - a) + log s(x) + log s(-x)
    ordered              z_0 = x_0,  z_i = z_(i-1) + exp x_i     sum_(i > 0) x_i
    simplex              z_i = s_i r_i,  z_(K-1) = r_(K-1)       sum_i log z_i + log (1 - s_i)

s is the logistic function. The first three act on every entry of an array, the last two along its
last axis. The simplex of K numbers has K - 1 coordinates: the stick is broken at

    s_i = s(x_i - log (K - 1 - i)),    r_i = prod_(j < i) (1 - s_j),    i = 0, ..., K - 2,

so that x = 0 is the uniform point; DT is there that of the first K - 1 numbers, which determine the
last, and is triangular: dz_i/dx_i = r_i s_i (1 - s_i) = z_i (1 - s_i).

In floating point T would reach the boundary, where a log density is often infinite. It does not:
exponentials stay a rounding unit's factor away from the smallest normal and the largest number,
which leaves room for k/z and k z; intervals stay between the neighbours of their ends, and ordered
numbers that round to the same are moved to successive floats. `log_jacobian` is the formula of the
table, which pulls x back from there.
"""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

Shape = tuple[int, ...]


class AbstractSupport(eqx.Module):
    """A set of points and the map onto it; hashable and compared by value.

    All methods take any leading axes. `log_jacobian` and `contains` have one value for every entry
    of an array, or one for every last axis where the map acts along that.
    """

    @abc.abstractmethod
    def point_shape(self, shape: Shape) -> Shape:
        """The shape of a point with real coordinates of shape `shape`."""

    @abc.abstractmethod
    def coordinate_shape(self, shape: Shape) -> Shape:
        """The shape of the real coordinates of a point of shape `shape`."""

    @abc.abstractmethod
    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """Real coordinates to points, strictly inside in floating point too."""

    @abc.abstractmethod
    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """Points to real coordinates; nan or infinite for what `contains` denies."""

    @abc.abstractmethod
    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """Terms of log |det DT(x)|, to be summed over the axes of one point."""

    @abc.abstractmethod
    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether points are inside."""

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class AbstractEntrywise(AbstractSupport):
    """A support of single numbers: the map acts on every entry of an array by itself."""

    def point_shape(self, shape: Shape) -> Shape:
        """The same shape."""
        return shape

    def coordinate_shape(self, shape: Shape) -> Shape:
        """The same shape."""
        return shape


class Real(AbstractEntrywise):
    """All real numbers: `iblr.real`."""

    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The coordinates themselves."""
        return jnp.asarray(x)

    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The points themselves."""
        return jnp.asarray(z)

    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """Zero for every entry."""
        return jnp.zeros_like(x)

    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether an entry is finite."""
        return jnp.isfinite(z)

    def __repr__(self) -> str:
        return "real"


class Positive(AbstractEntrywise):
    """Positive numbers, by the exponential: `iblr.positive`."""

    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The exponential."""
        return _exp(jnp.asarray(x))

    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The logarithm."""
        return jnp.log(z)

    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The coordinate itself, as far as its exponential can grow."""
        return _log_exp(jnp.asarray(x))

    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether an entry is positive and finite."""
        z = jnp.asarray(z)
        return (z > 0) & jnp.isfinite(z)

    def __repr__(self) -> str:
        return "positive"


class Interval(AbstractEntrywise):
    """Numbers strictly between two, by the logistic function; made by `iblr.interval`."""

    low: float = eqx.field(static=True)
    high: float = eqx.field(static=True)

    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The logistic function, stretched; measured from the nearer end."""
        x = jnp.asarray(x)
        low, first, width, last, high = self._numbers(x.dtype)
        z = jnp.where(x < 0, low + width * jax.nn.sigmoid(x), high - width * jax.nn.sigmoid(-x))
        return jnp.clip(z, first, last)

    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The log odds of where the point divides the interval."""
        z = jnp.asarray(z)
        return jnp.log(z - self.low) - jnp.log(self.high - z)

    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The log of the length and of both logistic factors, for every entry."""
        x = jnp.asarray(x)
        length = math.log(self.high - self.low)
        return length + jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x)

    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether an entry is strictly between the ends, as its precision has them."""
        z = jnp.asarray(z)
        return (z > self.low) & (z < self.high)

    def _numbers(self, dtype: Any) -> tuple[Any, ...]:
        low, high = np.asarray(self.low, dtype), np.asarray(self.high, dtype)
        with np.errstate(over="ignore", under="ignore"):  # the neighbours of zero are subnormal
            width = high - low
            first, last = np.nextafter(low, high), np.nextafter(high, low)
        tiny = np.asarray(jnp.finfo(dtype).tiny, dtype)
        first = tiny if 0 <= low < tiny else first
        last = -tiny if -tiny < high <= 0 else last
        if not (low < first <= last < high and np.isfinite(width)):
            raise ValueError(
                f"`{self}` does not fit into {jnp.dtype(dtype).name}, whose nearest numbers are "
                f"{float(low)} and {float(high)}. Rescale the parameter, or use float64."
            )
        return low, first, width, last, high

    def __repr__(self) -> str:
        return f"interval({self.low}, {self.high})"


class Simplex(AbstractSupport):
    """Positive numbers along the last axis that sum to one, by stick-breaking: `iblr.simplex`."""

    def point_shape(self, shape: Shape) -> Shape:
        """One number more along the last axis."""
        if not shape or shape[-1] < 1:
            raise ValueError(
                "`simplex` needs real coordinates with a last axis of K - 1 >= 1 numbers, but got "
                f"the shape {shape}."
            )
        return (*shape[:-1], shape[-1] + 1)

    def coordinate_shape(self, shape: Shape) -> Shape:
        """One number less along the last axis."""
        if not shape or shape[-1] < 2:
            raise ValueError(
                f"`simplex` needs points with a last axis of K >= 2 numbers, but got the shape "
                f"{shape}. For a single probability write `interval(0, 1)`."
            )
        return (*shape[:-1], shape[-1] - 1)

    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The pieces of the broken stick."""
        log_z, _ = self._log_pieces(jnp.asarray(x))
        return _exp(log_z)

    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The log odds of every piece against what is left after it."""
        z = jnp.asarray(z)
        left = jnp.flip(jnp.cumsum(jnp.flip(z, -1)[..., :-1], axis=-1), -1)
        return jnp.log(z[..., :-1]) - jnp.log(left) + _offsets(left)

    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The sum over the last axis."""
        log_z, log_rest = self._log_pieces(jnp.asarray(x))
        return jnp.sum(log_z[..., :-1] + log_rest, axis=-1)

    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether a last axis is positive and sums to one up to half the digits."""
        z = jnp.asarray(z)
        close = jnp.abs(z.sum(axis=-1) - 1) < math.sqrt(jnp.finfo(z.dtype).eps)
        return (z > 0).all(axis=-1) & close

    def _log_pieces(
        self, x: Float[Array, "*batch k"]
    ) -> tuple[Float[Array, "*batch K"], Float[Array, "*batch k"]]:
        """The logarithms of z_i and of 1 - s_i."""
        u = x - _offsets(x)
        log_rest = jax.nn.log_sigmoid(-u)
        log_left = jnp.cumsum(log_rest, axis=-1)
        start = jnp.zeros_like(x[..., :1])
        log_before = jnp.concatenate([start, log_left[..., :-1]], axis=-1)
        log_z = [jax.nn.log_sigmoid(u) + log_before, log_left[..., -1:]]
        return jnp.concatenate(log_z, axis=-1), log_rest

    def __repr__(self) -> str:
        return "simplex"


class Ordered(AbstractSupport):
    """Numbers that increase along the last axis, by exponential gaps: `iblr.ordered`."""

    def point_shape(self, shape: Shape) -> Shape:
        """The same shape, which must have a last axis."""
        if not shape:
            raise ValueError(
                "`ordered` needs an array with a last axis along which to increase, but got a "
                "scalar."
            )
        return shape

    def coordinate_shape(self, shape: Shape) -> Shape:
        """The same shape, which must have a last axis."""
        return self.point_shape(shape)

    def forward(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The first coordinate, then the sums of it and the exponentials of the others."""
        x = jnp.asarray(x)
        gaps = jnp.concatenate([x[..., :1], _exp(x[..., 1:])], axis=-1)
        return _separated(jnp.cumsum(gaps, axis=-1))

    def inverse(self, z: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The first number, then the logarithms of the gaps."""
        z = jnp.asarray(z)
        return jnp.concatenate([z[..., :1], jnp.log(jnp.diff(z, axis=-1))], axis=-1)

    def log_jacobian(self, x: Float[ArrayLike, "..."]) -> Float[Array, "..."]:
        """The sum of all coordinates of the last axis but the first."""
        return jnp.sum(_log_exp(jnp.asarray(x)[..., 1:]), axis=-1)

    def contains(self, z: Float[ArrayLike, "..."]) -> Bool[Array, "..."]:
        """Whether a last axis is finite and increases."""
        z = jnp.asarray(z)
        return jnp.isfinite(z).all(axis=-1) & (z[..., 1:] > z[..., :-1]).all(axis=-1)

    def __repr__(self) -> str:
        return "ordered"


real = Real()
positive = Positive()
simplex = Simplex()
ordered = Ordered()


def interval(low: ArrayLike, high: ArrayLike) -> Interval:
    """The support of numbers strictly between `low` and `high`.

    Example:
        >>> from iblr.support import interval
        >>> interval(-1, 3).forward(0.0).item()
        1.0
    """
    try:
        ends = float(low), float(high)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        ends = math.nan, math.nan
    if not (-math.inf < ends[0] < ends[1] < math.inf):
        raise ValueError(
            f"`interval(low, high)` needs two finite numbers with low < high, but got {low!r} and "
            f"{high!r}. For all positive numbers write `positive`."
        )
    return Interval(*ends)


def safe_range(dtype: Any) -> tuple[float, float]:
    """The positive numbers whose products and quotients with ordinary ones are normal."""
    info = jnp.finfo(dtype)
    return float(info.tiny) / float(info.eps), float(info.max) * float(info.eps)


def _exp_range(dtype: Any) -> tuple[float, float]:
    low, high = safe_range(dtype)
    return math.log(low), math.log(high)


def _exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.exp(jnp.clip(x, *_exp_range(x.dtype)))


def _log_exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """x, but constant where `_exp` is at its largest: it must not pull x further out."""
    return jnp.minimum(x, _exp_range(x.dtype)[1])


def _offsets(x: Float[Array, "*batch k"]) -> Float[Array, " k"]:
    """The logarithms of K - 1 - i, which make the uniform point x = 0."""
    return jnp.log(jnp.arange(x.shape[-1], 0, -1, dtype=x.dtype))


@jax.custom_jvp
def _separated(z: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
    """Numbers that increase along the last axis, those that do not strictly moved so that they do.

    The normal floats and zero are numbered in their order, n(z), and z_i moves to number
    i + max_(j <= i) (n(z_j) - j); the largest float is left to the last.
    """
    dtype, length = z.dtype, z.shape[-1]
    integer = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    numbered = lambda value: int(np.asarray(value, dtype).view(integer))  # noqa: E731
    subnormal = numbered(jnp.finfo(dtype).tiny) - 1
    top = numbered(jnp.finfo(dtype).max) - subnormal
    i = jnp.arange(length, dtype=integer)
    number = jnp.maximum(jax.lax.bitcast_convert_type(jnp.abs(z), integer) - subnormal, 0)
    number = jnp.minimum(jnp.where(z < 0, -number, number), top - (length - 1) + i)
    number = jax.lax.cummax(number - i, axis=z.ndim - 1) + i
    size = jnp.where(number == 0, 0, jnp.abs(number) + subnormal)
    value = jax.lax.bitcast_convert_type(size, dtype)
    return jnp.where(jnp.isnan(z), z, jnp.where(number < 0, -value, value))


@_separated.defjvp
def _separated_jvp(
    primals: tuple[Float[Array, "..."]], tangents: tuple[Float[Array, "..."]]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The move is below the precision: the identity to first order."""
    return _separated(*primals), tangents[0]

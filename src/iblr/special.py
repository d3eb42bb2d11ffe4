"""Special functions of the positive families, without lost digits in float32 or float64.

Stirling's terms taken out. For large a the polygamma functions are nearly powers of a, and what a
Gamma distribution needs is the small rest:

    log_gamma_rest    R(a) = log Ga(a) - (a - 1/2) log a + a - log(2 pi)/2
    digamma_rest      D(a) = psi(a) - log a
    trigamma_rest     T(a) = psi'(a) - 1/a
    tetragamma_rest   U(a) = psi''(a) + 1/a^2

Each is an asymptotic series from a = 10 on and reaches it from below by a recurrence whose terms
have one sign, such as T(a) = T(a + 1) + 1/(a^2 (a + 1)).

Draws of a Gamma in log space. `gamma_log_ratio` draws u = log(z/a), z ~ Ga(a, 1), by the method of
Marsaglia and Tsang (2000) for the whole array at once: z = d (1 + c x)^3 with d = a - 1/3, accepted
with a probability near one, hence u = log1p(-1/(3a)) + 3 log1p(c x), small and exact where a is
large; for a < 1 a draw at a + 1 and log(v)/a is added, which cannot underflow.

The implicit derivative of a draw (Figurnov et al. 2018) is -(dP/da) / p with P the distribution
function. With t = z exp(s) in dP/da = int_0^z (log t - psi(a)) p(t) dt,

    a dlog z/da = -a int_{-inf}^0 (u - D(a) + s) exp(h(s)) ds = a int_0^inf (same) ds,
    h(s) = -a (e^s - 1 - s) - a (e^u - 1)(e^s - 1) <= 0 beyond 0 on the side of the shorter tail.

The side without cancellation is integrated by Gauss-Legendre up to where exp(h) is below rounding,
for all shapes alike; where z < 1/2 the integral is a short series instead. (The function behind
`jax.random.gamma`'s derivative is 6 % off at a = 10^6 in float32, and slower.)
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

Values = Float[Array, "..."]

SERIES_FROM = 10

# Bernoulli numbers B_2, B_4, ...
_BERNOULLI = np.array(
    [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798]
)
_TWICE = 2.0 * np.arange(1, 10)


def _series(coefficients: np.ndarray, a: Values, power: int) -> Values:
    """sum_k coefficients[k] / a^(2k + power)."""
    total = jnp.zeros_like(a)
    for coefficient in coefficients[::-1].tolist():  # Python numbers keep the precision of a
        total = coefficient + total / a**2
    return total / a**power


def _above(a: Values) -> Values:
    """a, or a + 10 where the series would not do."""
    return jnp.where(a < SERIES_FROM, a + SERIES_FROM, a)


def _below(a: Values, term) -> Values:
    """The sum of the recurrence's terms where the series would not do, else zero."""
    low = jnp.where(a < SERIES_FROM, a, 1.0)
    terms = term(low[..., None] + jnp.arange(SERIES_FROM, dtype=a.dtype))
    return jnp.where(a < SERIES_FROM, terms.sum(-1), 0.0)


@jax.custom_jvp
def log_gamma_rest(a: Values) -> Values:
    """R(a) = log Ga(a) - (a - 1/2) log a + a - log(2 pi)/2."""
    series = _series(_BERNOULLI / (_TWICE * (_TWICE - 1)), _above(a), 1)
    return series + _below(a, lambda x: (x + 0.5) * jnp.log1p(1 / x) - 1)


@jax.custom_jvp
def digamma_rest(a: Values) -> Values:
    """D(a) = psi(a) - log a."""
    x = _above(a)
    series = -0.5 / x - _series(_BERNOULLI / _TWICE, x, 2)
    return series + _below(a, lambda x: jnp.log1p(1 / x) - 1 / x)


@jax.custom_jvp
def trigamma_rest(a: Values) -> Values:
    """T(a) = psi'(a) - 1/a."""
    x = _above(a)
    series = 0.5 / x**2 + _series(_BERNOULLI, x, 3)
    return series + _below(a, lambda x: 1 / (x**2 * (x + 1)))


def tetragamma_rest(a: Values) -> Values:
    """U(a) = psi''(a) + 1/a^2."""
    x = _above(a)
    series = -1 / x**3 - _series(_BERNOULLI * (_TWICE + 1), x, 4)
    return series - _below(a, lambda x: (3 * x + 2) / (x**3 * (x + 1) ** 2))


@log_gamma_rest.defjvp
def _log_gamma_rest_jvp(primals, tangents):
    (a,), (da,) = primals, tangents
    return log_gamma_rest(a), (digamma_rest(a) + 0.5 / a) * da


@digamma_rest.defjvp
def _digamma_rest_jvp(primals, tangents):
    (a,), (da,) = primals, tangents
    return digamma_rest(a), trigamma_rest(a) * da


@trigamma_rest.defjvp
def _trigamma_rest_jvp(primals, tangents):
    (a,), (da,) = primals, tangents
    return trigamma_rest(a), tetragamma_rest(a) * da


@jax.custom_jvp
def scaled_exp1(x: Values) -> Values:
    """e^x E1(x) for x > 0: a series, and from 1 on a continued fraction, as E1 would underflow."""
    # Not `jax.scipy.special.exp1`: for an array it takes of the order of 1 / x.min() iterations.
    small, large = jnp.minimum(x, 1.0), jnp.maximum(x, 1.0)
    series, power = -np.euler_gamma - jnp.log(small), jnp.ones_like(x)
    for k in range(1, 20):
        power = power * (-small) / k
        series = series - power / k
    tail = _fraction(100, lambda k, tail: k**2 / (large + (2 * k + 1) - tail), x)
    return jnp.where(x < 1, jnp.exp(small) * series, 1 / (large + 1 - tail))


@scaled_exp1.defjvp
def _scaled_exp1_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    value = scaled_exp1(x)
    return value, (value - 1 / x) * dx


def _fraction(levels: int, level: Callable[[Any, Values], Values], like: Values) -> Values:
    """A continued fraction from its last level, `tail = level(k, tail)`, to its first, k = 1."""

    def body(i, tail):
        return level((levels - i).astype(like.dtype), tail)

    return jax.lax.fori_loop(0, levels, body, jnp.zeros_like(like))


def mills_rest(s: Values) -> Values:
    """1 - s m(s) for s > 0, with m the Mills ratio Phi(-s) / N(s | 0, 1) of the Gaussian."""
    return jnp.where(s < 4, 1 - _small_mills(s), _large_mills_rest(s))


def scaled_mills(s: Values) -> Values:
    """s m(s) for s > 0, also where it is small."""
    return jnp.where(s < 4, _small_mills(s), 1 - _large_mills_rest(s))


def _small_mills(s: Values) -> Values:
    s = jnp.minimum(s, 4.0)
    log_ratio = jax.scipy.special.log_ndtr(-s) + 0.5 * s**2 + 0.5 * math.log(2 * math.pi)
    return s * jnp.exp(log_ratio)


def _large_mills_rest(s: Values) -> Values:
    """m = 1 / (s + tail), tail = 1 / (s + 2 / (s + 3 / (s + ...)))."""
    s = jnp.maximum(s, 4.0)
    tail = _fraction(40, lambda k, tail: k / (s + tail), s)
    return tail / (s + tail)


@partial(jax.jit, static_argnums=2)
def gamma_log_ratio(key: Key[Array, ""], a: Values, shape: tuple[int, ...]) -> Values:
    """Draws of log(z/a), z ~ Ga(a, 1), of the given shape, to which `a` is broadcast."""
    a = jnp.broadcast_to(a, shape)
    boosted = jnp.where(a < 1, a + 1, a)
    d = boosted - 1 / 3
    c = 1 / (3 * jnp.sqrt(d))
    boost_key, key = jax.random.split(key)

    def round_of(state):
        count, accepted, log_v = state
        normal_key, uniform_key = jax.random.split(jax.random.fold_in(key, count))
        x = jax.random.normal(normal_key, a.shape, a.dtype)
        e = jax.random.exponential(uniform_key, a.shape, a.dtype)
        inside = c * x > -1
        new = 3 * jnp.log1p(jnp.where(inside, c * x, 0.0))
        # log(uniform) < x^2/2 + d - d v + d log v, and v - 1 - log v = expm1(new) - new
        fine = inside & (-e < 0.5 * x**2 - d * expm1_rest(new)) | ~jnp.isfinite(d)
        return count + 1, accepted | fine, jnp.where(accepted, log_v, new)

    start = (0, jnp.zeros(a.shape, bool), jnp.zeros_like(a))
    log_v = jax.lax.while_loop(lambda state: ~state[1].all(), round_of, start)[2]
    u = jnp.log1p(-1 / (3 * boosted)) + log_v  # log(z / boosted)
    e = jax.random.exponential(boost_key, a.shape, a.dtype)
    return jnp.where(a < 1, u + jnp.log1p(a) - jnp.log(a) - e / a, u)


def expm1_rest(x: Values) -> Values:
    """e^x - 1 - x."""
    total, small = jnp.ones_like(x), jnp.clip(x, -1.0, 1.0)
    for k in range(12 if jnp.finfo(x.dtype).eps > 1e-10 else 20, 2, -1):
        total = 1 + small * (1 / k) * total
    return jnp.where(jnp.abs(x) < 1, 0.5 * x**2 * total, jnp.exp(x) - 1 - x)


@jax.jit
def gamma_ratio_slope(a: Values, u: Values) -> Values:
    """du / dlog a at a fixed quantile of z ~ Ga(a, 1), u = log(z/a); `a` broadcasts.

    That is dlog z / dlog a less one, and small for large a.
    """
    is_single = jnp.finfo(a.dtype).eps > 1e-10
    digits, nodes = (18.0, 20) if is_single else (38.0, 40)
    log_z = jnp.log(a) + u
    near_zero = log_z < math.log(0.5)
    return jnp.where(
        near_zero,
        _slope_near_zero(a, jnp.where(near_zero, log_z, -1.0), 9 if is_single else 15) - 1,
        _slope_by_quadrature(a, jnp.where(near_zero, 0.0, u), digits, nodes),
    )


def _slope_near_zero(a: Values, log_z: Values, terms: int) -> Values:
    """-a e^z sum_n (-z)^n/n! (k/(a+n) - 1/(a+n)^2), k = log z - psi(a): the series in z."""
    z, power = jnp.exp(log_z), jnp.ones_like(log_z)
    total = digamma_rest(a + 1) + jnp.log1p(a) - log_z  # n = 0: psi(a + 1) - log z
    a_k = 1 - a * total
    for n in range(1, terms):
        power = power * (-z) / n
        total = total - power * (a_k - a / (a + n)) / (a + n)
    return jnp.exp(z) * total


def _slope_by_quadrature(a: Values, u: Values, digits: float, num_nodes: int) -> Values:
    """-+ a int (e^(u+s) - 1 - (u+s) + D(a)) exp(h(s)) ds: one is a int (1 - e^(u+s)) exp(h) ds."""
    constant = expm1_rest(u) + digamma_rest(a)
    growth = jnp.expm1(u)  # (z - a) / a
    z = a * jnp.exp(u)
    upper = u > 0
    sign = jnp.where(upper, 1.0, -1.0).astype(a.dtype)
    length = jnp.where(upper, _upper_length(a, growth, z, digits), _lower_length(a, z, digits))
    positions, weights = np.polynomial.legendre.leggauss(num_nodes)
    fractions = jnp.asarray(0.5 * (positions + 1), u.dtype)
    shares = jnp.asarray(0.5 * weights, u.dtype)

    def add(i, total):
        s = sign * length * fractions[i]
        rest = expm1_rest(s)
        value = constant + growth * (rest + s) + rest  # expm1_rest(u + s) + D(a)
        return total + shares[i] * value * jnp.exp(-a * (rest + growth * (rest + s)))

    integral = jax.lax.fori_loop(0, num_nodes, add, jnp.zeros_like(u))
    return -sign * a * length * integral


def _upper_length(a: Values, growth: Values, z: Values, digits: float) -> Values:
    """Where h = -digits for s > 0, or beyond: h <= -(z - a) s - z s^2/2, and z e^s for small z."""
    slope = a * growth
    quadratic = 2 * digits / (slope + jnp.sqrt(slope**2 + 2 * digits * z))
    return jnp.where(z < 10, jnp.minimum(quadratic, jnp.log1p(2 * digits / z)), quadratic)


def _lower_length(a: Values, z: Values, digits: float) -> Values:
    """Where h = -digits for s < 0, from a bound beyond it by Newton's method on a convex h."""
    length = (digits + z) / a
    length = jnp.where(z > 3 * digits, jnp.minimum(length, jnp.sqrt(3 * digits / z)), length)
    for _ in range(3):
        value = a * length + z * jnp.expm1(-length) - digits
        length = length - value / (a - z * jnp.exp(-length))
    return length

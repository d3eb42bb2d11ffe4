"""Standard normal numbers as a function of where they stand, on any device.

The number at index i of a stream is computed from i alone, so noise is never stored: what was
added to a weight is computed anew when its gradient is there, a shard of a parameter computes its
slice, and every replica computes the same. Three steps, all of them elementwise:

1. A stream has an odd 64-bit key and a 64-bit offset: a BLAKE2 digest of the seed and of what the
   noise is for, mixed with the number of the parameter (`streams`).
2. The counter-based generator "squares" (Widynski 2020, arXiv:2004.06278) makes 32 bits of
   x = i key + offset, with z = x + key, by four rounds of x <- x^2 + (x_0 or z), the two halves of
   the 64 bits changing places after each but the last.
3. One bit is the sign. The other 31 are a probability p in (0, 1/2), and the number's size is
   -Phi^-1(p), a quotient of polynomials in t = sqrt(-2 log p) that is within 4e-8 of it down to
   p = 2^-33, where it is 6.3 (an own minimax fit; rounding to float32 adds up to 2e-6).
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NUMERATOR = (0.49603447, 4.11661267, 3.35645792, -7.7493595, -3.20143669)
DENOMINATOR = (0.49573508, 4.13844547, 5.39745232, 1.0)
# (log(1 + f) - f)/f^2, within 3e-8 of log(1 + f) for sqrt(1/2) <= 1 + f <= sqrt(2); an own fit.
LOGARITHM = (0.090042021, -0.14257795, 0.1480646, -0.16575048)
LOGARITHM += (0.19973106, -0.2500161, 0.3333366, -0.49999995)
SQRT_HALF = 0x3F3504F3  # as the bits of a float32


def streams(
    place: tuple[int, ...],
    parameters: Sequence[int] | np.ndarray,
    first: Sequence[int] | np.ndarray,
) -> np.ndarray:
    """Key and offset of a stream for every parameter, as int64.

    Args:
        place: integers that all share, such as seed, step and sample.
        parameters: their numbers.
        first: the index at which each begins.
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
    roots = np.frombuffer(digest, dtype="<u8")
    spread = np.asarray(parameters, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    found = _mixed(roots + spread)
    found[:, 0] |= np.uint64(1)
    found[:, 1] += found[:, 0] * np.asarray(first, dtype=np.uint64)
    return found.view(np.int64)


def normal(count: int, begin: Tensor) -> Tensor:
    """The first `count` numbers of a stream, in float32.

    Args:
        count: how many.
        begin: the stream's key and offset, int64; or for every number its key and key i + offset.
    """
    numerator, denominator = normal_quotient(count, begin)
    return numerator / denominator


def normal_quotient(count: int, begin: Tensor) -> tuple[Tensor, Tensor]:
    """Those numbers before the division, for who divides anyway."""
    key, first = begin.unbind()
    if begin.ndim == 1:
        first = torch.arange(count, device=begin.device) * key + first
    other = first + key
    x = _swapped(first * first + first)
    x = _swapped(x * x + other)
    x = _swapped(x * x + first)
    bits = ((x * x + other) >> 32).to(torch.int32)
    p = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    t = torch.sqrt(-2.0 * _log(p))
    size = polynomial(t, NUMERATOR)
    signed = (size.view(torch.int32) ^ (bits & -0x80000000)).view(torch.float32)
    return signed, polynomial(t, DENOMINATOR)


def polynomial(t: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """By Horner's rule, the highest power first."""
    value = t * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * t + coefficient
    return value


def _swapped(x: Tensor) -> Tensor:
    """The halves of 64 bits, the other way round."""
    return ((x >> 32) & 0xFFFFFFFF) | (x << 32)


def _log(p: Tensor) -> Tensor:
    """log p, from p = 2^e (1 + f) with |f| < 0.42; a compiler makes less of `torch.log`."""
    bits = p.view(torch.int32)
    exponent = (bits - SQRT_HALF) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return (polynomial(f, LOGARITHM) * f + 1.0) * f + exponent.to(torch.float32) * math.log(2)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A permutation of 64 bits that hides their order: the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""Standard normal numbers as a function of where they stand, on any device.

The number at index i of a stream is computed from i alone, so noise is never stored: what was
added to a weight is computed anew when its gradient is there, a shard of a parameter computes its
slice, and every replica computes the same. Three steps, all of them elementwise:

1. A stream has four words of 32 bits, k (odd), o, m and n: a BLAKE2 digest of the seed and of what
   the noise is for, mixed with the number of the parameter (`streams`). Where i = 2^32 a + b, its
   place is x = b k + o, and m + 0x9E3779B9 a takes m's part (`stream_at`).
2. Three rounds of x <- (x xor x >> shift) times a constant, those of the hash "triple32" (Wellons
   2018), with m and n added after the first and the second, make 32 bits of x. No product is wider
   than 32 bits: those of 64 cost several times as much where there is no AVX-512.
3. One bit is the sign. The other 31 are a probability p in (0, 1/2), and the number's size is
   -Phi^-1(p), a quotient of polynomials in t = sqrt(-2 log p) that is within 4e-8 of it down to
   p = 2^-33, where it is 6.3 (an own minimax fit; rounding to float32 adds up to 2e-6).

`triton_kernels` runs `scrambled` and what follows it too, which is why they hold nothing but
operators and literals, and annotations that are no names. (A literal is also what a compiler keeps
in a register: a number from outside a function it reads from memory again and again.)
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

PERIOD = 2**32  # indices that differ in their lower word alone
_HIGHER = np.uint32(0x9E3779B9)


def streams(place: tuple[int, ...], parameters: Sequence[int] | np.ndarray) -> np.ndarray:
    """The words of a stream for every parameter, as int32.

    Args:
        place: integers that all share, such as seed, step and sample.
        parameters: their numbers.
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
    roots = np.frombuffer(digest, dtype="<u8")
    spread = np.asarray(parameters, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    words = _finalised(roots + spread).astype("<u8").view(np.int32)
    words[:, 0] |= 1
    return words


def stream_at(words: np.ndarray, first: int) -> np.ndarray:
    """A stream from index `first` on, for indices up to the next multiple of `PERIOD`."""
    key, offset, *added = words.view(np.uint32)
    high, low = (np.array([part], dtype=np.uint32) for part in divmod(first, PERIOD))
    begun = [key, (low * key + offset)[0], (high * _HIGHER + added[0])[0], added[1]]
    return np.array(begun, dtype=np.uint32).view(np.int32)


def normal(count: int, begin: Tensor) -> Tensor:
    """The first `count` numbers of a stream, in float32.

    Args:
        count: how many.
        begin: the words of the stream, int32; or for every number x, m and n.
    """
    numerator, denominator = normal_quotient(count, begin)
    return numerator / denominator


def normal_quotient(count: int, begin: Tensor) -> tuple[Tensor, Tensor]:
    """Those numbers before the division, for who divides anyway."""
    *place, m, n = begin.unbind()
    if begin.ndim == 1:
        place = [torch.arange(count, dtype=torch.int32, device=begin.device) * place[0] + place[1]]
    bits = scrambled(place[0], m, n)
    p = ((bits & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-32
    t = torch.sqrt(-2.0 * _log(p))
    size = quantile_numerator(t)
    signed = (size.view(torch.int32) ^ (bits & -0x80000000)).view(torch.float32)
    return signed, quantile_denominator(t)


def scrambled(x: "Any", m: "Any", n: "Any") -> "Any":
    """32 bits that look random, of 32 that do not; shifts of int32 copy the sign, hence masks."""
    x = (x ^ ((x >> 17) & 0x7FFF)) * -312814405 + m
    x = (x ^ ((x >> 11) & 0x1FFFFF)) * -1404298415 + n
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 830770091
    return x ^ ((x >> 14) & 0x3FFFF)


def quantile_numerator(t: "Any") -> "Any":
    """That of -Phi^-1(p), t = sqrt(-2 log p)."""
    return (((0.49603447 * t + 4.11661267) * t + 3.35645792) * t - 7.7493595) * t - 3.20143669


def quantile_denominator(t: "Any") -> "Any":
    """That of -Phi^-1(p), t = sqrt(-2 log p)."""
    return ((0.49573508 * t + 4.13844547) * t + 5.39745232) * t + 1.0


def binary_exponent(bits: "Any") -> "Any":
    """e of a float32 given by its bits, 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2)."""
    return (bits - 0x3F3504F3) >> 23


def logarithm(f: "Any") -> "Any":
    """log(1 + f) within 3e-8 for sqrt(1/2) <= 1 + f <= sqrt(2); an own fit."""
    series = ((0.090042021 * f - 0.14257795) * f + 0.1480646) * f - 0.16575048
    series = (((series * f + 0.19973106) * f - 0.2500161) * f + 0.3333366) * f - 0.49999995
    return (series * f + 1.0) * f


def _log(p: Tensor) -> Tensor:
    """log p, from p = 2^e (1 + f) with |f| < 0.42; a compiler makes less of `torch.log`."""
    bits = p.view(torch.int32)
    exponent = binary_exponent(bits)
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    return logarithm(f) + exponent.to(torch.float32) * math.log(2)


def _finalised(x: np.ndarray) -> np.ndarray:
    """A permutation of 64 bits that hides their order: the finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

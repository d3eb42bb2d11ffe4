"""From a counter to a standard normal number, elementwise: what every framework's noise shares.

A stream of noise has four words of 32 bits: k (odd), o, m and n. The number at index i < 2^32 is
made of its place x = i k + o in two steps:

1. Three rounds of x <- (x xor x >> shift) times a constant, those of the hash "triple32" (Wellons
   2018), with m and n added after the first and the second, make 32 bits of x (`scrambled`). No
   product is wider than 32 bits: those of 64 cost several times as much where there is no AVX-512.
   At index i + 2^32 a the word m + `HIGHER` a takes the place of m.
2. One bit is the sign. The other 31 are a probability p in (0, 1/2), and the number's size is
   -Phi^-1(p), a quotient of polynomials in t = sqrt(-2 log p) that is within 4e-8 of it down to
   p = 2^-33, where it is 6.3 (an own minimax fit; rounding to float32 adds up to 2e-6).

The functions are run on arrays of JAX, on tensors of PyTorch and by Triton, which is why they hold
nothing but operators and literals, and annotations that are no names. (A literal is also what a
compiler keeps in a register: a number from outside a function it may read from memory for every
vector.)
"""

from typing import Any

PERIOD = 2**32  # indices that differ in their lower word alone
HIGHER = -0x61C88647  # times the higher word of an index, is added to m


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

"""Standard normal numbers as a function of where they stand, on any device.

The number at index i of a stream is computed from i alone, so noise is never stored: what was
added to a weight is computed anew when its gradient is there, a shard of a parameter computes its
slice, and every replica computes the same. The generator is that of `iblr.counter_noise`; the words
of a stream are a BLAKE2 digest of the seed and of what the noise is for, mixed with the number of
the parameter.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from iblr.counter_noise import (
    HIGHER,
    PERIOD,
    binary_exponent,
    logarithm,
    quantile_denominator,
    quantile_numerator,
    scrambled,
)


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
    begun = [
        key,
        (low * key + offset)[0],
        (high * np.uint32(HIGHER % PERIOD) + added[0])[0],
        added[1],
    ]
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

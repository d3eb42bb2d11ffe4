"""Noise is what it says: standard normal, a function of its index, and the published generator."""

import numpy as np
import pytest
import torch
from helpers import counter_bits
from scipy import stats
from scipy.special import ndtri

from iblr import counter_noise
from iblr.torch import noise, paths
from iblr.torch.noise import normal, stream_at, streams
from iblr.torch.slots import Sample, Slot, stream_of

WORD = counter_noise.PERIOD


def stream(*place, parameter=0, first=0):
    return torch.from_numpy(stream_at(streams(place, [parameter])[0], first))


@pytest.mark.parametrize("first", [0, 2**31 - 1000, 5 * 2**32 + 77])
def test_the_numbers_are_quantiles_of_the_bits_of_the_generator(first):
    words = [int(word) % WORD for word in stream(1, 2, 3)]
    drawn = np.array([counter_bits(first + index, *words) for index in range(2000)])
    p = ((drawn & 0x7FFFFFFF) + 0.5) / 2**32
    expected = np.where(drawn >> 31, ndtri(p), -ndtri(p))
    numbers = normal(2000, stream(1, 2, 3, first=first)).numpy()
    np.testing.assert_allclose(numbers, expected, atol=4e-6)
    assert words[0] % 2 == 1


def test_extreme_bits_give_finite_quantiles():
    # p = 2^-33 (all bits zero) and p = 1/2 - 2^-33 (all 31 bits set): the ends of the range
    for drawn, expected in ((0, -ndtri(2.0**-33)), (0x7FFFFFFF, 0.0)):
        p = torch.tensor([(drawn + 0.5) / 2**32], dtype=torch.float32)
        t = torch.sqrt(-2.0 * noise._log(p))
        size = counter_noise.quantile_numerator(t) / counter_noise.quantile_denominator(t)
        assert size.item() == pytest.approx(expected, abs=3e-6)


def test_every_bit_of_the_index_reaches_every_bit_of_the_result():
    """Half of the bits change, within the error of 2^14 draws, when one of the index does."""
    rng = np.random.default_rng(0)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, 2**14), dtype=np.int32))
    before = counter_noise.scrambled(*words).numpy()
    for bit in range(32):
        flip = np.uint32(1 << bit).astype(np.int32)
        changed = (counter_noise.scrambled(words[0] ^ flip, *words[1:]).numpy() ^ before).view(
            np.uint8
        )
        share = np.unpackbits(changed).reshape(-1, 32).mean(0)
        assert np.abs(share - 0.5).max() * 2 * 2**7 < 5


@pytest.mark.parametrize("lag", [1, 2, 16, 65536])
def test_bits_of_neighbours_are_independent(lag):
    """Pairs of bytes, the highest and the lowest, by a chi-square test."""
    place = torch.arange(2**21, dtype=torch.int32)
    key, offset, m, n = stream(0, 9)
    drawn = (
        counter_noise.scrambled(place * key + offset, m, n).numpy().view(np.uint32).astype(np.int64)
    )
    for shift in (0, 24):
        byte = (drawn >> shift) & 255
        counts = np.bincount(byte[lag:] * 256 + byte[:-lag], minlength=2**16)
        assert stats.chisquare(counts).pvalue > 1e-4


def test_moments_and_distribution():
    z = normal(2**20, stream(0, 1)).double().numpy()
    root = 2**10
    assert abs(z.mean()) * root < 4
    assert abs(z.var() - 1) * root / np.sqrt(2) < 4
    assert abs(stats.skew(z)) * root / np.sqrt(6) < 4
    assert abs(stats.kurtosis(z)) * root / np.sqrt(24) < 4
    assert stats.kstest(z, "norm").pvalue > 1e-4


@pytest.mark.parametrize("lag", [1, 2, 4, 64, 1000])
def test_neighbours_are_uncorrelated(lag):
    z = normal(2**18, stream(0, 5)).double().numpy()
    assert abs((z[lag:] * z[:-lag]).mean()) * 2**9 < 4.5
    assert abs(((z[lag:] ** 2 - 1) * (z[:-lag] ** 2 - 1)).mean() / 2) * 2**9 < 4.5


def test_streams_of_steps_samples_and_parameters_are_uncorrelated():
    places = [(0, 1, step, sample) for step in range(16) for sample in range(4)]
    drawn = [normal(2**12, stream(*p, parameter=n)).numpy() for p in places for n in range(8)]
    every = np.array(drawn, dtype=float)
    correlation = every @ every.T / 2**6
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 6  # of 130 816 pairs
    assert stats.kstest(every[:, 0], "norm").pvalue > 1e-4


def test_a_slice_is_drawn_without_the_rest():
    whole = normal(1000, stream(7, parameter=3))
    part = normal(100, stream(7, parameter=3, first=900))
    assert torch.equal(whole[900:], part)


def test_indices_beyond_32_bits_go_on():
    begin = stream(7, first=2**40)
    assert stats.kstest(normal(20_000, begin).numpy(), "norm").pvalue > 1e-4
    assert not torch.equal(normal(100, begin), normal(100, stream(7)))


def test_a_shard_may_lie_on_both_sides_of_32_bits():
    slot = Slot({"seed": 3}, 0, torch.zeros(100), {"mean": torch.zeros(100)}, first=2**32 - 40)
    (words,) = stream_of([slot], Sample(True, 0, 0))
    low = normal(40, torch.from_numpy(stream_at(words, 2**32 - 40)))
    high = normal(60, torch.from_numpy(stream_at(words, 2**32)))
    assert torch.equal(paths.noise_of(slot, Sample(True, 0, 0)), torch.cat([low, high]))

"""Noise is what it says: standard normal, a function of its index, and the published generator."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri

from iblr.torch.noise import normal, streams


def stream(*place, parameter=0, first=0):
    return torch.from_numpy(streams(place, [parameter], [first])[0])


def squares(counter, key):
    """Widynski's generator in Python's integers: 32 bits of i key + offset."""
    word = (1 << 64) - 1

    def swapped(x):
        return (x >> 32) | ((x << 32) & word)

    x = y = counter & word
    z = (y + key) & word
    x = swapped((x * x + y) & word)
    x = swapped((x * x + z) & word)
    x = swapped((x * x + y) & word)
    return ((x * x + z) & word) >> 32


def test_the_numbers_are_quantiles_of_the_bits_of_squares():
    begin = stream(1, 2, 3)
    key, offset = (int(value) % 2**64 for value in begin)
    bits = np.array([squares(index * key + offset, key) for index in range(2000)])
    p = ((bits & 0x7FFFFFFF) + 0.5) / 2**32
    expected = np.where(bits >> 31, ndtri(p), -ndtri(p))
    np.testing.assert_allclose(normal(2000, begin).numpy(), expected, atol=4e-6)
    assert key % 2 == 1


def test_extreme_bits_give_finite_quantiles():
    # p = 2^-33 (all bits zero) and p = 1/2 - 2^-33 (all 31 bits set): the ends of the range
    for bits, expected in ((0, -ndtri(2.0**-33)), (0x7FFFFFFF, 0.0)):
        p = torch.tensor([(bits + 0.5) / 2**32], dtype=torch.float32)
        from iblr.torch.noise import DENOMINATOR, NUMERATOR, _log, polynomial

        t = torch.sqrt(-2.0 * _log(p))
        size = polynomial(t, NUMERATOR) / polynomial(t, DENOMINATOR)
        assert size.item() == pytest.approx(expected, abs=3e-6)


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
    assert not torch.equal(normal(100, begin), normal(100, stream(7, first=2**40 % 2**32)))

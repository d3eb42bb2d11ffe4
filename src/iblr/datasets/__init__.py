"""Small public data sets that ship with the package, one loader each."""

from importlib.resources import files
from typing import NamedTuple

import numpy as np


class Dataset(NamedTuple):
    """Features, labels and a sentence on where they come from."""

    x: np.ndarray
    y: np.ndarray
    description: str


def murphy() -> Dataset:
    """The two-dimensional logistic-regression toy of figure 2a, 60 points, labels -1 and +1.

    Example:
        >>> import iblr
        >>> iblr.datasets.murphy().x.shape
        (60, 2)
    """
    with files("iblr.datasets").joinpath("murphy.csv").open() as lines:
        table = np.loadtxt(lines, delimiter=",", skiprows=1)
    return Dataset(
        table[:, :2],
        2 * table[:, 2] - 1,
        "30 points of N((1, 5), I) labelled +1 and 30 of N((-5, 1), 4.84 I) labelled -1: the "
        "synthetic logistic-regression demonstration in Murphy's PMTK, with the points that Lin, "
        "Schmidt & Khan (2020) used.",
    )

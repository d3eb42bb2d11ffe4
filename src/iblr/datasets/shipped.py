"""The data sets that ship with the package; NOTICE.md has their sources and licences."""

import gzip
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Dataset(NamedTuple):
    """Rows of features, one target a row, and where they come from.

    Attributes:
        x: features, one row an observation.
        y: targets, or labels -1 and +1.
        description: what the numbers are, with source, licence and citation.
        names: what the columns of `x` are called, where that is known.
    """

    x: Float[np.ndarray, "n d"]
    y: Float[np.ndarray, " n"]
    description: str
    names: tuple[str, ...] = ()


class Mortality(NamedTuple):
    """Deaths in the populations of some cities, and where the numbers come from."""

    deaths: Float[np.ndarray, " n"]
    population: Float[np.ndarray, " n"]
    description: str


def abalone(*, scaled: bool = False) -> Dataset:
    """Physical measurements of 4177 abalones, and the rings of their shells: a regression.

    Args:
        scaled: map every feature to [-1, 1], as in LIBSVM's `abalone_scale` and in figure 4a of
            the paper (which adds a column of ones). Otherwise the features are as published: sex
            (1 male, 2 female, 3 infant), lengths in units of 200 mm, weights of 200 g.

    Example:
        >>> import iblr
        >>> iblr.datasets.abalone(scaled=True).x[0].round(3).tolist()
        [-1.0, 0.027, 0.042, -0.832, -0.637, -0.699, -0.735, -0.704]
    """
    sexes = {"M": 1.0, "F": 2.0, "I": 3.0}
    table = _table("abalone.data.gz", converters={0: sexes.__getitem__})
    x, y = table[:, :-1], table[:, -1]
    return Dataset(
        scale_columns(x) if scaled else x,
        y,
        "Abalone: sex, size and weights of 4177 abalones from Tasmania, to predict the number of "
        "rings (age in years - 1.5). Nash, Sellers, Talbot, Cawthorn & Ford (1994), UCI Machine "
        "Learning Repository, https://doi.org/10.24432/C55C7W. Licence: CC BY 4.0. Sex is coded "
        "M, F, I = 1, 2, 3" + (", and every feature scaled to [-1, 1]." if scaled else "."),
        ("sex", "length", "diameter", "height", "whole_weight")
        + ("shucked_weight", "viscera_weight", "shell_weight"),
    )


def ionosphere() -> Dataset:
    """Radar returns from the ionosphere, 351 by 34, good (+1) or bad (-1): a classification.

    The second column is zero in every row.

    Example:
        >>> import iblr
        >>> data = iblr.datasets.ionosphere()
        >>> data.x.shape, int((data.y == 1).sum())
        ((351, 34), 225)
    """
    labels = {"g": 1.0, "b": -1.0}
    table = _table("ionosphere.data.gz", converters={34: labels.__getitem__})
    return Dataset(
        table[:, :-1],
        table[:, -1],
        "Ionosphere: complex autocorrelations of 17 radar pulses, real and imaginary parts in "
        "turn; +1 where the return shows structure in the ionosphere, -1 where it does not. "
        "Sigillito, Wing, Hutton & Baker (1989), UCI Machine Learning Repository, "
        "https://doi.org/10.24432/C5W01B. Licence: CC BY 4.0.",
        tuple(f"{part}_{pulse}" for pulse in range(17) for part in ("real", "imaginary")),
    )


def cancer_mortality() -> Mortality:
    """Deaths from stomach cancer in 20 cities of Missouri: the beta-binomial example.

    Example:
        >>> import iblr
        >>> data = iblr.datasets.cancer_mortality()
        >>> int(data.deaths.sum()), int(data.population.sum())
        (71, 71478)
    """
    table = _table("cancer_mortality.csv", skiprows=1)
    return Mortality(
        table[:, 0],
        table[:, 1],
        "Cancer mortality: deaths from stomach cancer, and men of 45 to 64 at risk, in the 20 "
        "cities of Missouri that Albert's R package LearnBayes has as `cancermortality`. "
        "Tsutakawa, Shoop & Marienfeld (1985), Empirical Bayes estimation of cancer mortality "
        "rates, Statistics in Medicine 4, 201-212. Facts, without a licence of their own.",
    )


def murphy() -> Dataset:
    """The two-dimensional logistic-regression toy of figure 2a, 60 points, labels -1 and +1.

    Example:
        >>> import iblr
        >>> iblr.datasets.murphy().x.shape
        (60, 2)
    """
    table = _table("murphy.csv", skiprows=1)
    return Dataset(
        table[:, :2],
        2 * table[:, 2] - 1,
        "30 points of N((1, 5), I) labelled +1 and 30 of N((-5, 1), 4.84 I) labelled -1: the "
        "synthetic logistic-regression demonstration in Murphy's PMTK, with the points that Lin, "
        "Schmidt & Khan (2020) used. Computed anew; the licence is that of this package.",
        ("x1", "x2"),
    )


def scale_columns(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Maps the range of every column onto [-1, 1]; a constant column becomes zero.

    Example:
        >>> import numpy as np
        >>> scale_columns(np.array([[1.0, 5.0], [2.0, 5.0], [5.0, 5.0]])).tolist()
        [[-1.0, 0.0], [-0.5, 0.0], [1.0, 0.0]]
    """
    low, high = x.min(0), x.max(0)
    width = np.where(high > low, high - low, 1.0)
    return ((x - low) - (high - x)) / width


def _table(
    name: str,
    *,
    skiprows: int = 0,
    converters: dict[int | str, Callable[[str], float]] | None = None,
) -> Float[np.ndarray, "n d"]:
    """The numbers of a file of this package, separated by commas."""
    raw = files("iblr.datasets").joinpath(name).read_bytes()
    lines = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode().splitlines()
    return np.loadtxt(lines, delimiter=",", skiprows=skiprows, converters=converters)

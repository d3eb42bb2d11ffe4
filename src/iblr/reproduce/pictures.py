"""What a section of the report is made of: claims, tables and pictures, as data.

An experiment says what to show, the report how. Arrays are NumPy's; every picture says of itself
what it shows in `title` and, in a sentence, in `caption`.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence of the paper or of this library, and what came of it.

    Attributes:
        text: what is claimed.
        ours: what was measured here.
        published: what was published; "not stated" where nothing was.
        holds: None where it was not run, or not long or often enough to tell.
        why: the best explanation where it does not hold, or what to know where it does.
    """

    text: str
    ours: str
    published: str
    holds: bool | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.holds is None:
            return "not run" if self.ours.startswith("not run") else "too little to tell"
        return "holds" if self.holds else "does not hold"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a picture; without a range it fits what is drawn."""

    label: str
    log: bool = False
    range: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line through points, perhaps with a band around it.

    Attributes:
        name: in the legend.
        x: abscissae.
        y: ordinates; nan is a gap.
        low: the lower edge of a band.
        high: the upper edge.
        others: more lines of the same kind, one row each, drawn thin: single seeds.
        published: whether it was read off a picture of the paper's: points, not a line.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    others: np.ndarray | None = None
    published: bool = False


@dataclasses.dataclass(frozen=True)
class Curves:
    """Lines over common axes."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Ellipse:
    """The points at Mahalanobis distance one from a mean."""

    name: str
    mean: np.ndarray
    covariance: np.ndarray
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Plane:
    """Contours of a density in the plane, and ellipses and points over it.

    Attributes:
        title: what is drawn.
        x: abscissae of the grid.
        y: ordinates of the grid.
        density: values, one row for every y.
        ellipses: over the contours, each with its centre.
        points: named single points.
        levels: of the contours; chosen from the density where not given.
        x_label: of the first coordinate.
        y_label: of the second.
        caption: a sentence.
    """

    title: str
    x: np.ndarray
    y: np.ndarray
    density: np.ndarray
    ellipses: tuple[Ellipse, ...] = ()
    points: tuple[tuple[str, float, float], ...] = ()
    levels: tuple[float, ...] | None = None
    x_label: str = "z1"
    y_label: str = "z2"
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One approximation in a gallery: its density on the common grid, and a line under it."""

    label: str
    density: np.ndarray
    caption: str


@dataclasses.dataclass(frozen=True)
class Gallery:
    """An exact density in the plane beside a series of approximations to it.

    Attributes:
        title: what is drawn.
        x: abscissae of the grid.
        y: ordinates of the grid.
        exact: values of the target, one row for every y.
        panels: the approximations in order; the report shows them all, and one by a slider.
        levels: of the contours of all, those of the exact density; chosen where not given.
        x_label: of the first coordinate.
        y_label: of the second.
        caption: a sentence.
    """

    title: str
    x: np.ndarray
    y: np.ndarray
    exact: np.ndarray
    panels: tuple[Panel, ...]
    levels: tuple[float, ...] | None = None
    x_label: str = "z1"
    y_label: str = "z2"
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Series:
    """Densities of one method, one row a coordinate."""

    name: str
    densities: np.ndarray


@dataclasses.dataclass(frozen=True)
class Marginals:
    """Marginal densities of many coordinates, as small panels.

    Attributes:
        title: what is drawn.
        points: where densities are given, one row a coordinate.
        series: of every method; the first is the exact one.
        shown: panels at once; a slider pages through the rest.
        caption: a sentence.
    """

    title: str
    points: np.ndarray
    series: tuple[Series, ...]
    shown: int = 9
    caption: str = ""


Picture = Curves | Plane | Gallery | Marginals


@dataclasses.dataclass(frozen=True)
class Section:
    """What an experiment has to say, in the order of the report.

    Attributes:
        claims: in a table, with verdicts.
        pictures: under it.
        tables: under those.
        settings: name and value of everything a reader would need to do it again.
        notes: sentences on traps and misprints that matter here.
        faults: data that are there but cannot be used: the command then fails in the end.
    """

    claims: tuple[Claim, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

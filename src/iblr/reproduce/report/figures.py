"""Pictures as plain data for the page's script, which draws them.

Numbers are rounded, lines of very many points thinned, and what is not finite becomes None, which
is a gap. All numbers as they were are in the experiment's NPZ.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from iblr.reproduce import pictures

DIGITS = 5  # that count, more where values differ only in later ones
MOST_DIGITS = 10
BUCKETS = 600  # along the abscissa; a line keeps its first, lowest and highest point in each
GRID = 151  # points on a side of a grid at most
POINTS = 201  # of a marginal density at most
MASSES = (0.99, 0.95, 0.85, 0.7, 0.5, 0.3, 0.1)  # within the contours that are chosen here


def figure(picture: pictures.Picture) -> dict[str, Any]:
    """What `pictures.js` draws."""
    match picture:
        case pictures.Curves():
            return _curves(picture)
        case pictures.Plane():
            return _plane(picture)
        case pictures.Gallery():
            return _gallery(picture)
        case pictures.Marginals():
            return _marginals(picture)


def numbers(array: np.ndarray | Sequence[float]) -> list[Any]:
    """Nested lists of rounded numbers, None for what is not finite.

    Example:
        >>> numbers([3.0, 0.123456789, math.inf, math.nan])
        [3, 0.12346, None, None]
    """
    values = np.asarray(array, float)
    if values.ndim > 1:
        return [numbers(row) for row in values]
    finite = values[np.isfinite(values)]
    digits = DIGITS
    if len(finite) and np.ptp(finite) > 0:
        digits += math.floor(np.log10(np.abs(finite).max() / np.ptp(finite)))
    digits = max(DIGITS, min(digits, MOST_DIGITS))
    return [_number(value, digits) for value in values.tolist()]


def levels(x: np.ndarray, y: np.ndarray, density: np.ndarray) -> tuple[float, ...]:
    """Heights whose contours hold given parts of the mass; evenly spaced if it is no density."""
    finite = np.where(np.isfinite(density), density, np.nan)
    if np.isnan(finite).all():
        return ()
    low, high = float(np.nanmin(finite)), float(np.nanmax(finite))
    if low == high:
        return ()
    if low < 0:
        return tuple(np.linspace(low, high, len(MASSES) + 2)[1:-1].tolist())
    cells = np.outer(_widths(y), _widths(x)).ravel()
    heights = np.nan_to_num(finite, nan=0.0).ravel()
    order = np.argsort(heights)[::-1]
    mass = np.cumsum((heights * cells)[order])
    places = np.searchsorted(mass, np.asarray(MASSES) * mass[-1])
    chosen = heights[order][np.minimum(places, len(order) - 1)]
    return tuple(sorted({float(level) for level in chosen if 0 < level < high})) or (high / 2,)


def _curves(picture: pictures.Curves) -> dict[str, Any]:
    return {
        "kind": "curves",
        "x": _axis(picture.x),
        "y": _axis(picture.y),
        "curves": [_curve(curve, log=picture.x.log) for curve in picture.curves],
    }


def _curve(curve: pictures.Curve, *, log: bool) -> dict[str, Any]:
    x = np.asarray(curve.x, float)
    lines = {"y": curve.y, "low": curve.low, "high": curve.high, "others": curve.others}
    kept = {key: np.asarray(line, float) for key, line in lines.items() if line is not None}
    index = _thinned(x, np.vstack([line.reshape(-1, len(x)) for line in kept.values()]), log=log)
    return {
        "name": curve.name,
        "published": curve.published,
        "x": numbers(x[index]),
        **{key: numbers(line[..., index]) for key, line in kept.items()},
    }


def _plane(picture: pictures.Plane) -> dict[str, Any]:
    chosen = picture.levels or levels(picture.x, picture.y, picture.density)
    keep_x, keep_y = _every(len(picture.x), GRID), _every(len(picture.y), GRID)
    drawn = ((ellipse, _outline(ellipse)) for ellipse in picture.ellipses)
    return {
        "kind": "plane",
        **_grid(picture, keep_x, keep_y, chosen),
        "density": _heights(picture.density[np.ix_(keep_y, keep_x)], chosen),
        "ellipses": [
            {
                "name": ellipse.name,
                "dashed": ellipse.dashed,
                "mean": numbers(ellipse.mean),
                "x": numbers(outline[0]),
                "y": numbers(outline[1]),
            }
            for ellipse, outline in drawn
        ],
        "points": [
            {"name": name, "x": _number(x), "y": _number(y)} for name, x, y in picture.points
        ],
    }


def _gallery(picture: pictures.Gallery) -> dict[str, Any]:
    chosen = picture.levels or levels(picture.x, picture.y, picture.exact)
    keep_x, keep_y = _every(len(picture.x), GRID), _every(len(picture.y), GRID)
    block = np.ix_(keep_y, keep_x)
    return {
        "kind": "gallery",
        **_grid(picture, keep_x, keep_y, chosen),
        "exact": _heights(picture.exact[block], chosen),
        "panels": [
            {
                "label": panel.label,
                "caption": panel.caption,
                "density": _heights(panel.density[block], chosen),
            }
            for panel in picture.panels
        ],
    }


def _marginals(picture: pictures.Marginals) -> dict[str, Any]:
    keep = _every(picture.points.shape[1], POINTS)
    return {
        "kind": "marginals",
        "shown": max(1, min(picture.shown, len(picture.points))),
        "points": numbers(picture.points[:, keep]),
        "series": [
            {"name": series.name, "densities": numbers(series.densities[:, keep])}
            for series in picture.series
        ],
    }


def _axis(axis: pictures.Axis) -> dict[str, Any]:
    shown = None if axis.range is None else [float(end) for end in axis.range]
    if shown is not None and not all(math.isfinite(end) for end in shown):
        shown = None
    if shown is not None and axis.log and min(shown) <= 0:
        shown = None
    return {"label": axis.label, "log": axis.log, "range": shown}


def _grid(
    picture: pictures.Plane | pictures.Gallery,
    keep_x: np.ndarray,
    keep_y: np.ndarray,
    chosen: Sequence[float],
) -> dict[str, Any]:
    return {
        "x": numbers(picture.x[keep_x]),
        "y": numbers(picture.y[keep_y]),
        "xLabel": picture.x_label,
        "yLabel": picture.y_label,
        "levels": numbers(sorted(chosen)),
    }


def _heights(density: np.ndarray, chosen: Sequence[float]) -> list[Any]:
    """Densities far below the lowest contour are zero: short, and the same to the eye."""
    floor = min(chosen, default=0.0) / 1000
    return numbers(np.where((density > 0) & (density < floor), 0.0, density))


def _outline(ellipse: pictures.Ellipse) -> np.ndarray:
    """Points at Mahalanobis distance one, closed; nan where the covariance is not one."""
    covariance = np.asarray(ellipse.covariance, float)
    if not np.isfinite(covariance).all():
        return np.full((2, 1), np.nan)
    squares, directions = np.linalg.eigh((covariance + covariance.T) / 2)
    angle = np.linspace(0.0, 2 * np.pi, 121)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    root = directions * np.sqrt(np.maximum(squares, 0.0))
    return np.asarray(ellipse.mean, float)[:, None] + root @ circle


def _thinned(x: np.ndarray, lines: np.ndarray, *, log: bool) -> np.ndarray:
    """Places to keep of lines over a common abscissa: ends and extremes in every bucket of it."""
    if len(x) <= 4 * BUCKETS:
        return np.arange(len(x))
    along = np.log(np.where(x > 0, x, np.nan)) if log else x
    usable = np.flatnonzero(np.isfinite(along))
    if not len(usable):
        return usable
    along, lines = along[usable], lines[:, usable]
    span = float(np.ptp(along)) or 1.0
    bucket = np.minimum((along - along.min()) / span * BUCKETS, BUCKETS - 1).astype(int)
    kept = {0, len(usable) - 1}
    low = np.where(np.isfinite(lines), lines, np.inf)
    high = np.where(np.isfinite(lines), lines, -np.inf)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(usable)], strict=True):
        kept |= {int(start), int(start + low[0, start:stop].argmin())}
        kept |= {int(start + high[0, start:stop].argmax())}
        kept |= {int(start + low[:, start:stop].min(0).argmin())}
        kept |= {int(start + high[:, start:stop].max(0).argmax())}
    return usable[sorted(kept)]


def _every(count: int, most: int) -> np.ndarray:
    """Evenly spread places, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _widths(grid: np.ndarray) -> np.ndarray:
    return np.abs(np.gradient(np.asarray(grid, float)))


def _number(value: float, digits: int = MOST_DIGITS) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e6 else rounded

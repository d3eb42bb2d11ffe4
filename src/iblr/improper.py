"""Improper targets that are flat on one side only, such as -exp(z).

A target that is flat on both sides of q makes it double its width with every batch, which soon ends
the fit. Where the target falls on one side, q widens for as long as the fit lasts. So after a fit
that did not settle, and where a climb has found another region, rays are followed from the mean
there, along the axes of the Gaussian there and of the parameters in which it is most of all wider
than the start: from 10 standard deviations to 1000, or to the width beyond which any target counts
as improper. At every distance two steps across the ray go back to the ridge, the first Newton's
with the precision of that Gaussian, the second with the curvature that the first has met (Barzilai
& Borwein 1988), and the ray goes on through the highest point. Where p(s) s never falls with the
distance s, the integral of p over log s grows with every further decade.

A fit settles in spite of a floor, such as that of a robust likelihood of a parameter without a
prior. So every coordinate is looked along, near and very far: where p(s) s is larger far off, and
what that adds up to is not negligible beside the evidence, there is no end either.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from iblr.compiling import quickly_compiled
from iblr.families.gaussian import Gaussian
from iblr.importance import with_all_rows
from iblr.tails import DIRECTIONS, log_densities
from iblr.target import Target

MOST_AXES = 4  # of each kind, each followed both ways
WIDENED = 100.0  # times the standard deviation of the start: else q has no endless ridge
WIDENED_REGION = 10.0  # the same of another region, which few batches have seen
NEAREST, LEAST_REACH = 10.0, 1000.0  # standard deviations
LARGEST_GROWTH = {4: 1e8, 8: 1e12}  # of standard deviations, by the bytes of a number
DISTANCES = 6
STEPS = 2
FEWEST = 3  # distances at which the target is finite
LARGEST_RISE = 3.0  # nats along a ray
MOST_EVALUATIONS = 4 * MOST_AXES * DISTANCES * (STEPS + 1)
NEAR_AND_FAR = np.array([10.0, 20.0, 5e6, 1e7])  # standard deviations along a coordinate
MOST_COORDINATES = 128
NEGLIGIBLE = math.log(0.01)  # of a mass over the evidence


def largest_growth(dtype: Any) -> float:
    """Of standard deviations, beyond which a target counts as improper."""
    return LARGEST_GROWTH[jnp.dtype(dtype).itemsize]


def has_endless_ridge(
    target: Target, first: Float[Array, " d"], q: Gaussian, widened: float = WIDENED
) -> tuple[bool, int]:
    """Whether a ray was found along which the target has no finite integral, and evaluations.

    Args:
        target: the target.
        first: variances of the start.
        q: from where and how wide to look.
        widened: standard deviations in those of the start, from which on an axis is followed.
    """
    before, factor = np.sqrt(np.asarray(first, float)), np.asarray(q.factor, float)
    ways = _widened_axes(before, factor, widened)
    if not len(ways):
        return False, 0
    whitened = np.linalg.lstsq(factor.T, ways.T)[0].T
    along = whitened / np.linalg.norm(whitened, axis=1, keepdims=True)
    reach = largest_growth(q.dtype) / np.linalg.norm(ways / before, axis=1)
    distances = np.geomspace(NEAREST, np.maximum(reach, LEAST_REACH), DISTANCES, axis=1)
    rays = (jnp.asarray(x, q.dtype) for x in (ways, along, distances))
    values, rounding = jax.device_get(_on_the_ridge(with_all_rows(target), q, *rays))
    improper = any(map(_never_falls, values.astype(float), rounding.astype(float), distances))
    return improper, (STEPS + 1) * values.size


def axis_evaluations(dim: int) -> int:
    """Evaluations by `has_endless_axis`."""
    rows = 2 * len(NEAR_AND_FAR) * min(dim, MOST_COORDINATES)
    return math.ceil(rows / DIRECTIONS) * DIRECTIONS


def has_endless_axis(target: Target, q: Gaussian, log_evidence: float) -> bool:
    """Whether the target has no finite integral along a coordinate, one of the widest of q.

    Args:
        target: the target.
        q: from where to look.
        log_evidence: that of the target around q.
    """
    d, rows = q.dim, axis_evaluations(q.dim)
    deviations = np.linalg.norm(np.asarray(q.factor, np.float64), axis=0)
    widest = np.argsort(-deviations)[:MOST_COORDINATES]
    ways = (np.diag(deviations)[widest, None] * NEAR_AND_FAR[:, None]).reshape(-1, d)
    ways = np.concatenate([ways, -ways])
    padded = np.concatenate([ways, np.zeros((rows - len(ways), d))]).reshape(-1, DIRECTIONS, d)
    none = np.zeros((DIRECTIONS, d))
    log_p = np.concatenate([log_densities(target, q, none, part) for part in padded])
    log_p = log_p[: len(ways)].reshape(-1, len(NEAR_AND_FAR))
    known = (np.isfinite(log_p) | (log_p == np.inf)).all(axis=1)
    along = log_p[known] + np.log(NEAR_AND_FAR)  # of p(s) s
    at_mean = log_evidence - 0.5 * (d * math.log(2 * math.pi) + float(q.log_det))
    shares = along - at_mean - 0.5 * math.log(2 * math.pi)
    rises = along[:, 2:].min(axis=1) >= along[:, :2].max(axis=1)
    return bool((rises & (shares[:, 2:].min(axis=1) > NEGLIGIBLE)).any())


def _widened_axes(first: np.ndarray, factor: np.ndarray, widened: float) -> np.ndarray:
    """Both ways along axes of q, and of coordinates, one standard deviation of q long."""
    _, widths, axes = np.linalg.svd((factor / first).T)
    deviations = np.linalg.norm(factor, axis=0)
    order = np.argsort(-deviations / first)[:MOST_AXES]
    order = order[deviations[order] > widened * first[order]]
    of_q = axes[:MOST_AXES][widths[:MOST_AXES] > widened] @ factor
    ways = np.concatenate([of_q, np.diag(deviations)[order]])
    return np.concatenate([ways, -ways])


def _never_falls(values: np.ndarray, rounding: np.ndarray, distances: np.ndarray) -> bool:
    """Whether p(s) s does not, as far as p is finite, by more than rounding may do."""
    known = np.isfinite(values)
    number = len(values) if known.all() else int(np.argmin(known))
    values, rounding, distances = values[:number], rounding[:number], distances[:number]
    if number < FEWEST:
        return False
    if number < DISTANCES and values[-1] - values[0] > LARGEST_RISE:
        return False  # on its way to where the target is, which may be where p was not finite
    gained = np.diff(values + np.log(distances)) + rounding[1:] + rounding[:-1]
    return bool((gained >= 0).all())


@quickly_compiled
def _on_the_ridge(
    target: Target,
    q: Gaussian,
    ways: Float[Array, "n d"],
    along: Float[Array, "n d"],
    distances: Float[Array, "n m"],
) -> tuple[Float[Array, "n m"], Float[Array, "n m"]]:
    """log p at every distance along every ray, and what the rounding of points does to it."""
    evaluate = jax.value_and_grad(target.whole(q.structure, target.data))
    lowest, unit = jnp.full((), -jnp.inf, q.dtype), jnp.finfo(q.dtype).eps

    def followed(ray: tuple[Array, ...]) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        way, along, distances = ray

        def at(way: Float[Array, " d"], distance: Float[Array, ""]):
            """The highest point found at a distance, as a way of length one from the mean."""
            point, highest, best, rounding = q.mean + distance * way, lowest, way, 0 * distance
            step, before = jnp.zeros_like(way), jnp.zeros_like(way)
            for _ in range(STEPS + 1):
                value, gradient = evaluate(point)
                higher = value > highest
                best = jnp.where(higher, (point - q.mean) / distance, best)
                rounding = jnp.where(higher, unit * jnp.abs(point * gradient).sum(), rounding)
                highest = jnp.where(higher, value, highest)
                slope = q.factor @ gradient
                slope = slope - along * (slope @ along)
                fall = step @ (before - slope)
                step, before = jnp.where(fall > 0, step @ step / fall, 1) * slope, slope
                point = point + q.colour(step[None])[0]
            return best, (highest, rounding)

        return jax.lax.scan(at, way, distances)[1]

    return jax.lax.map(followed, (ways, along, distances))

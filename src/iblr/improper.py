"""Improper targets that are flat on one side only, such as -exp(z).

A target that is flat on both sides of q makes it double its width with every batch, which soon ends
the fit. Where the target falls on one side, q widens for as long as the fit lasts. So after a fit
that did not settle, and where a climb has found another region, rays are followed from the mean
there, along the axes of the Gaussian there and of the parameters in which it is most of all wider
than the start. At 10 to 1000 standard deviations two steps across the ray go back to the ridge, the
first Newton's with the precision of that Gaussian, the second with the curvature that the first has
met (Barzilai & Borwein 1988), and the ray goes on through the highest point. Where p(s) s never
falls with the distance s, the integral of p over log s grows with every further decade.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from iblr.compiling import quickly_compiled
from iblr.families.gaussian import Gaussian
from iblr.importance import with_all_rows
from iblr.target import Target

MOST_AXES = 4  # of each kind, each followed both ways
WIDENED = 100.0  # times the standard deviation of the start: else q has no endless ridge
DISTANCES = np.array([10.0, 30.0, 100.0, 300.0, 1000.0])
STEPS = 2
FEWEST = 3  # distances at which the target is finite
MOST_EVALUATIONS = 4 * MOST_AXES * len(DISTANCES) * (STEPS + 1)


def has_endless_ridge(target: Target, first: Float[Array, " d"], q: Gaussian) -> tuple[bool, int]:
    """Whether a ray was found along which the target has no finite integral, and evaluations.

    Args:
        target: the target.
        first: variances of the start.
        q: from where and how wide to look.
    """
    ways = _widened_axes(np.sqrt(np.asarray(first, float)), np.asarray(q.factor, float))
    if not len(ways):
        return False, 0
    whitened = np.linalg.lstsq(np.asarray(q.factor, float).T, ways.T)[0].T
    along = whitened / np.linalg.norm(whitened, axis=1, keepdims=True)
    ways, along = jnp.asarray(ways, q.dtype), jnp.asarray(along, q.dtype)
    found = jax.device_get(_on_the_ridge(with_all_rows(target), q, ways, along))
    values, rounding = (np.asarray(x, float) for x in found)
    improper = any(map(_never_falls, values, rounding))
    return improper, (STEPS + 1) * values.size


def _widened_axes(first: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Both ways along axes of q, and of coordinates, one standard deviation of q long."""
    _, widths, axes = np.linalg.svd((factor / first).T)
    deviations = np.linalg.norm(factor, axis=0)
    order = np.argsort(-deviations / first)[:MOST_AXES]
    order = order[deviations[order] > WIDENED * first[order]]
    of_q = axes[:MOST_AXES][widths[:MOST_AXES] > WIDENED] @ factor
    ways = np.concatenate([of_q, np.diag(deviations)[order]])
    return np.concatenate([ways, -ways])


def _never_falls(log_p: np.ndarray, rounding: np.ndarray) -> bool:
    """Whether p(s) s does not, as far as p is finite, by more than rounding may do."""
    known = np.isfinite(log_p)
    first = len(log_p) if known.all() else int(np.argmin(known))
    mass = (log_p + np.log(DISTANCES))[:first]
    slack = rounding[:first]
    return first >= FEWEST and bool((np.diff(mass) + slack[1:] + slack[:-1] >= 0).all())


@quickly_compiled
def _on_the_ridge(
    target: Target, q: Gaussian, ways: Float[Array, "n d"], along: Float[Array, "n d"]
) -> tuple[Float[Array, "n m"], Float[Array, "n m"]]:
    """log p at every distance along every ray, and what the rounding of points does to it."""
    evaluate = jax.value_and_grad(target.whole(q.structure, target.data))
    lowest, unit = jnp.full((), -jnp.inf, q.dtype), jnp.finfo(q.dtype).eps

    def followed(ray: tuple[Array, Array]) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
        way, along = ray

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

        return jax.lax.scan(at, way, jnp.asarray(DISTANCES, q.dtype))[1]

    return jax.lax.map(followed, (ways, along))

"""Improper targets that are flat on one side only, such as -exp(z).

A target that is flat on both sides of q makes it double its width with every batch, which soon ends
the fit. Where the target falls on one side, q widens for as long as the fit lasts. So after a fit
that did not settle, rays are followed from the mean of q, along the axes of q and of the parameters
in which q is most of all wider than the start: at 10 to 1000 standard deviations, each point put
back on the ridge by two of Newton's steps across the ray with the precision of q. Where p(s) s
never falls with the distance s, the integral of p over log s grows with every further decade.
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
NEWTON_STEPS = 2
FEWEST = 3  # distances at which the target is finite


def has_endless_ridge(target: Target, start: Gaussian, q: Gaussian) -> tuple[bool, int]:
    """Whether a ray was found along which the target has no finite integral, and evaluations."""
    ways = _widened_axes(np.asarray(start.factor, float), np.asarray(q.factor, float))
    if not len(ways):
        return False, 0
    whitened = np.linalg.solve(np.asarray(q.factor, float).T, ways.T).T
    along = whitened / np.linalg.norm(whitened, axis=1, keepdims=True)
    points = np.asarray(q.mean, float) + DISTANCES[:, None] * ways[:, None]
    points, along = points.reshape(-1, q.dim), np.repeat(along, len(DISTANCES), axis=0)
    points, along = jnp.asarray(points, q.dtype), jnp.asarray(along, q.dtype)
    values = _on_the_ridge(with_all_rows(target), q, points, along)
    rays = np.asarray(values, float).reshape(len(ways), -1)
    return any(_never_falls(ray) for ray in rays), (NEWTON_STEPS + 1) * rays.size


def _widened_axes(start: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Both ways along axes of q, and of coordinates, one standard deviation of q long."""
    _, widths, axes = np.linalg.svd(np.linalg.solve(start.T, factor.T))
    deviations, first = (np.linalg.norm(root, axis=0) for root in (factor, start))
    order = np.argsort(-deviations / first)[:MOST_AXES]
    order = order[deviations[order] > WIDENED * first[order]]
    of_q = axes[:MOST_AXES][widths[:MOST_AXES] > WIDENED] @ factor
    ways = np.concatenate([of_q, np.diag(deviations)[order]])
    return np.concatenate([ways, -ways])


def _never_falls(log_p: np.ndarray) -> bool:
    """Whether p(s) s does not, as far as p is finite."""
    known = np.isfinite(log_p)
    first = len(log_p) if known.all() else int(np.argmin(known))
    mass = log_p[:first] + np.log(DISTANCES[:first])
    return first >= FEWEST and bool((np.diff(mass) >= 0).all())


@quickly_compiled
def _on_the_ridge(
    target: Target, q: Gaussian, points: Float[Array, "n d"], along: Float[Array, "n d"]
) -> Float[Array, " n"]:
    """log p at points, or after Newton's steps across the ray where that is higher."""
    log_density = target.whole(q.structure, target.data)

    def on_the_ridge(ray: tuple[Array, Array]) -> Float[Array, ""]:
        point, along = ray
        highest = jnp.full((), -jnp.inf, point.dtype)
        for _ in range(NEWTON_STEPS):
            value, gradient = jax.value_and_grad(log_density)(point)
            highest = jnp.fmax(highest, value)
            across = q.factor @ gradient
            across = across - along * (across @ along)
            point = point + q.colour(across[None])[0]
        return jnp.fmax(highest, log_density(point))

    return jax.lax.map(on_the_ridge, (points, along))

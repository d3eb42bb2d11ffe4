"""Other modes, looked for from dispersed starts.

Importance weights cannot see where q has no draws. So short fits of a Gaussian, by the program that
fits Gaussians without settings, start in antithetic pairs far from q with its covariance: in up to
three orthogonal directions 10 sqrt(d) standard deviations away, in one of them also 3 and in two
also 40 (in many dimensions, where a batch is dear, 10 in two directions only). All of this is in
real coordinates, those of a family of positive numbers being their logarithms. One that comes back
to where q is, and is not much wider, says nothing. One that settles elsewhere has an ELBO there, a
lower bound of the log mass of the target around it, and against q in place of the target one of the
mass that q has there. A region to which q gives less than half of what the target does is another
mode; it may lie around q, if it is wider.
"""

import dataclasses
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from iblr import regression
from iblr.automatic import stretch
from iblr.diagnostics import elbo
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.families.mixture import GaussianMixture
from iblr.families.positive import AbstractPositive
from iblr.families.product import Product
from iblr.families.skew_gaussian import SkewGaussian
from iblr.structure import Structure
from iblr.support import positive
from iblr.target import Target
from iblr.verdict import Mode

# Number of a direction, and a distance in sqrt(d) standard deviations.
AWAY = ((0, 10.0), (1, 10.0), (2, 10.0), (0, 3.0), (0, 40.0), (1, 40.0))
MANY_DIMENSIONS, FEW = 200, 2
FIRST_RADIUS = 4.0  # of a step, in sqrt(d) standard deviations: the way is far
PATIENCE, FEWEST = 24, 8  # batches
AT_ONCE = 2
NEAR = WIDER = 3.0  # standard deviations of q
DRAWS, FEW_DRAWS = 256, 32
MOMENTS_TAG, HELD_TAG = 100, 101  # beyond the numbers of the starts


def surroundings(q: AbstractFamily, key: Key[Array, ""]) -> Gaussian | None:
    """A Gaussian over real coordinates with the moments of q; None where there are none."""
    if isinstance(q, AbstractGaussian):
        return Gaussian(mean=q.mean, factor=q.root(), log_det=q.log_det, structure=q.structure)
    structure = _real_coordinates(q)
    if structure is None:
        return None
    rows = _draws(q, structure, key, DRAWS + 4 * q.dim)
    if len(rows) < 2 * q.dim + 2:
        return None
    covariance = np.cov(rows.T).reshape(q.dim, q.dim)
    try:
        factor = np.linalg.cholesky(covariance).T
    except np.linalg.LinAlgError:
        return None
    log_det = 2 * np.log(np.diagonal(factor)).sum()
    mean, factor, log_det = (jnp.asarray(x, q.dtype) for x in (rows.mean(0), factor, log_det))
    return Gaussian(mean=mean, factor=factor, log_det=log_det, structure=structure)


def is_one_point(q: AbstractFamily, key: Key[Array, ""]) -> bool:
    """Whether draws of a known family, as far as they are finite, are the same in a coordinate."""
    structure = _real_coordinates(q)
    if structure is None:
        return False
    return bool((np.ptp(_draws(q, structure, key, FEW_DRAWS), axis=0) == 0).any())


def _draws(q: AbstractFamily, structure: Structure, key: Key[Array, ""], num: int) -> np.ndarray:
    """Finite ones of q, in real coordinates."""
    points = q.sample(jax.random.fold_in(key, MOMENTS_TAG), num)
    rows = np.asarray(structure.ravel(points, "fit"), np.float64)
    return rows[np.isfinite(rows).all(axis=1)]


def _real_coordinates(q: AbstractFamily) -> Structure | None:
    """The structure of the points of q over real numbers, where it is known."""
    if isinstance(q, AbstractPositive):
        return q.structure.with_support(positive)
    if isinstance(q, Product):
        parts = {name: _real_coordinates(part) for name, part in q.parts.items()}
        known = {name: part for name, part in parts.items() if part is not None}
        return Structure.join(known) if len(known) == len(parts) else None
    is_real = isinstance(q, AbstractGaussian | GaussianMixture | SkewGaussian)
    return q.structure if is_real else None


class Seen(NamedTuple):
    """Other modes, the climbs that were made and those that were not, and their gradients."""

    modes: tuple[Mode, ...]
    climbs: int
    left_out: int
    gradients: int


def look_around(
    target: Target,
    q: AbstractFamily,
    around: Gaussian,
    elbo: float,
    key: Key[Array, ""],
    max_gradients: int,
) -> Seen:
    """Modes that q misses, from as many starts around it as gradients allow."""
    if target.exact_prior is not None and around.structure != q.structure:
        temperature = float(target.temperature)
        prior = target.exact_prior.log_prob  # of points, whatever their coordinates
        target = dataclasses.replace(target, prior=prior, temperature=temperature)
    modes: list[Mode] = []
    climbs = spent = 0
    per_batch = 2 * regression.num_pairs(q.dim)
    starts = _starts(around, key)
    for index, start in enumerate(starts):
        patience = min(PATIENCE, (max_gradients - spent) // per_batch)
        if patience < FEWEST:
            break
        climbs += 1
        of_climb = jax.random.fold_in(key, index)
        mode, batches = _climb(target, around, start, elbo, of_climb, patience)
        spent += batches * per_batch
        if mode is None or any(_seen_from(m.family, mode.family)[0] <= NEAR for m in modes):
            continue
        mode = mode.without(float(_held(q, mode.family, jax.random.fold_in(key, HELD_TAG))))
        modes += [] if mode is None else [mode]
    return Seen(tuple(modes), climbs, len(starts) - climbs, spent)


@eqx.filter_jit
def _held(q: AbstractFamily, region: Gaussian, key: Key[Array, ""]) -> Float[Array, ""]:
    """Log of the mass that q has in a region."""
    return elbo(Target(q.log_prob), region, key, draws=DRAWS).value


def _starts(q: Gaussian, key: Key[Array, ""]) -> list[np.ndarray]:
    """Means to start from."""
    d = q.dim
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    directions = np.linalg.qr(rng.normal(size=(d, min(d, 3))))[0].T
    away = [reach * directions[k] for k, reach in AWAY if k < d]
    away = away if d <= MANY_DIMENSIONS else away[:FEW]
    ways = math.sqrt(d) * np.stack(away) @ np.asarray(q.factor)
    mean = np.asarray(q.mean)
    return [mean + sign * way for way in ways for sign in (1, -1)]


def _climb(
    target: Target,
    q: Gaussian,
    mean: np.ndarray,
    elbo: float,
    key: Key[Array, ""],
    patience: int,
) -> tuple[Mode | None, int]:
    """The mode found, if it is another one, and the batches it took, at most `patience`."""
    start = dataclasses.replace(q, mean=jnp.asarray(mean, q.dtype))
    state, step = regression.begin(start, key), 0
    state = dataclasses.replace(state, radius=jnp.asarray(FIRST_RADIUS, q.dtype))
    never, limit = np.asarray(-1.0, q.dtype), np.int32(AT_ONCE)
    while True:
        before = step
        state, found, standing = stretch(state, target, never, limit)
        found, standing = jax.device_get((found, standing))
        step = int(standing.step)
        distance, width = _seen_from(q, state.family)
        came_back = distance < NEAR and width < WIDER
        if step < before + AT_ONCE or came_back:
            return None, step
        if step + AT_ONCE > patience:
            log_mass = float(np.mean(found.elbo[:AT_ONCE])) - elbo
            found_one = math.isfinite(log_mass)
            mode = Mode(distance, log_mass, state.family, width)
            return (mode if found_one else None), step


def _seen_from(q: Gaussian, other: Gaussian) -> tuple[float, float]:
    """How far the mean of the other is, and its widest direction, in standard deviations of q."""
    way = np.asarray(other.mean, float) - np.asarray(q.mean, float)
    rows = np.vstack([way, np.asarray(other.factor, float)])
    whitened = np.linalg.solve(np.asarray(q.factor, float).T, rows.T)
    return float(np.linalg.norm(whitened[:, 0])), float(np.linalg.norm(whitened[:, 1:], 2))

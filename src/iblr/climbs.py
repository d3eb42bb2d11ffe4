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
import time
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from iblr import regression
from iblr.automatic import stretch
from iblr.diagnosis import Mode
from iblr.diagnostics import elbo
from iblr.families.abstract_gaussian import AbstractGaussian
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.families.mixture import GaussianMixture
from iblr.families.positive import AbstractPositive
from iblr.families.product import Product
from iblr.families.skew_gaussian import SkewGaussian
from iblr.purposes import Purpose, key_for
from iblr.structure import Structure
from iblr.support import positive
from iblr.target import Target

# Number of a direction, and a distance in sqrt(d) standard deviations.
AWAY = ((0, 10.0), (1, 10.0), (2, 10.0), (0, 3.0), (0, 40.0), (1, 40.0))
MANY_DIMENSIONS, FEW = 200, 2
FIRST_RADIUS = 4.0  # of a step, in sqrt(d) standard deviations: the way is far
PATIENCE, FEWEST = 24, 8  # batches
AGAIN = 2  # times as many for a region that no climb has found before: it may still come back
AT_ONCE = 2
NEAR = WIDER = 3.0  # standard deviations of q
DRAWS, FEW_DRAWS = 256, 32


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
    points = q.sample(key_for(key, Purpose.MOMENTS), num)
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


def over_points(target: Target, q: AbstractFamily, around: Gaussian) -> Target:
    """The target for coordinates other than those of q: an exact prior is then one of points."""
    if target.exact_prior is None or around.structure == q.structure:
        return target
    prior, temperature = target.exact_prior.log_prob, float(target.temperature)
    return dataclasses.replace(target, prior=prior, temperature=temperature)


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
    deadline: float = math.inf,
) -> Seen:
    """Modes that q misses, from as many starts around it as gradients and the clock allow."""
    target = over_points(target, q, around)
    modes: list[Mode] = []
    climbs = spent = 0
    per_batch = 2 * regression.num_pairs(q.dim)
    starts = _starts(around, key)
    for index, start in enumerate(starts):
        affordable = (max_gradients - spent) // per_batch
        if affordable < FEWEST or time.perf_counter() >= deadline:
            break
        climb = _Climb(target, around, start, elbo, jax.random.fold_in(key, index), deadline)
        mode = _news(climb.go_on(min(PATIENCE, affordable)), q, modes, key)
        if climb.was_late:  # too early to say where it leads
            spent += climb.step * per_batch
            break
        climbs += 1
        if mode is not None and mode.matters:
            mode = _news(climb.go_on(min((1 + AGAIN) * PATIENCE, affordable)), q, modes, key)
        spent += climb.step * per_batch
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


def _news(
    mode: Mode | None, q: AbstractFamily, modes: list[Mode], key: Key[Array, ""]
) -> Mode | None:
    """What is new in a mode: not known, or much wider than what is, and lacking in q."""
    if mode is None:
        return None
    near = [m for m in modes if _seen_from(m.family, mode.family)[0] <= NEAR]
    if any(mode.width <= WIDER * known.width for known in near):
        return None
    return mode.without(float(_held(q, mode.family, key_for(key, Purpose.HELD))))


class _Climb:
    """A short fit from one start.

    Args:
        target: the target.
        q: around which it looks.
        mean: where it starts.
        elbo: of q.
        key: of the noise.
        deadline: by the clock, at which it stops where it is.
    """

    def __init__(
        self,
        target: Target,
        q: Gaussian,
        mean: np.ndarray,
        elbo: float,
        key: Key[Array, ""],
        deadline: float,
    ):
        self.target, self.q, self.elbo, self.step = target, q, elbo, 0
        self.deadline, self.was_late = deadline, False
        start = dataclasses.replace(q, mean=jnp.asarray(mean, q.dtype))
        state = regression.begin(start, key)
        self.state = dataclasses.replace(state, radius=jnp.asarray(FIRST_RADIUS, q.dtype))
        self.mode: Mode | None = None

    def go_on(self, patience: int) -> Mode | None:
        """The mode found after so many batches in all, if it is another one.

        One that went beyond all bounds is shown as it was before.
        """
        never, limit = np.asarray(-1.0, self.q.dtype), np.int32(AT_ONCE)
        while self.step + AT_ONCE <= patience:
            if time.perf_counter() >= self.deadline:
                self.was_late = True
                break
            before = self.step
            self.state, found, standing = stretch(self.state, self.target, never, limit)
            found, standing = jax.device_get((found, standing))
            self.step = int(standing.step)
            distance, width = _seen_from(self.q, self.state.family)
            if distance < NEAR and width < WIDER:
                return None  # it came back
            if self.step < before + AT_ONCE:
                break
            there = float(np.mean(found.elbo[:AT_ONCE]))
            resolution = float(jnp.finfo(self.q.dtype).eps) * abs(there)
            log_mass = there - self.elbo
            mode = Mode(distance, log_mass, self.state.family, width, resolution)
            self.mode = mode if math.isfinite(log_mass) else None
        return self.mode


def _seen_from(q: Gaussian, other: Gaussian) -> tuple[float, float]:
    """How far the mean of the other is, and its widest direction, in standard deviations of q."""
    way = np.asarray(other.mean, float) - np.asarray(q.mean, float)
    rows = np.vstack([way, np.asarray(other.factor, float)])
    if not np.isfinite(rows).all():
        return math.inf, math.inf
    try:
        whitened = np.linalg.solve(np.asarray(q.factor, float).T, rows.T)
    except np.linalg.LinAlgError:  # singular, of a fit that went wrong
        return math.inf, math.inf
    return float(np.linalg.norm(whitened[:, 0])), float(np.linalg.norm(whitened[:, 1:], 2))

"""How far q is from the target, by importance weights.

With draws x_i from q and w_i = p(x_i) / q(x_i), both densities of the flat coordinates,

    evidence    Z = E_q[w]                  KL(q || p / Z) = log E_q[w] - E_q[log w]
    moments     E_p[f] = E_q[w f] / E_q[w]

The largest weights are replaced by quantiles of a generalised Pareto distribution fitted to them,
and its shape k-hat tells how many of their moments exist: Pareto smoothed importance sampling
(Vehtari, Simpson, Gelman, Yao & Gabry 2024), in ArviZ's implementation. Below 0.7 the averages can
be relied upon; k-hat as a verdict on variational approximations is Yao, Vehtari, Simpson & Gelman
2018. It is blind to where q has no draws.

Standard errors are those of the delta method: an average of w f / E[w] has the influence function
w (f - E_p f) / E[w]. What the weights change of q is estimated as a difference over the same draws,
whose noise vanishes where the weights are constant.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.special import logsumexp, ndtri

from iblr.compiling import quickly_compiled
from iblr.diagnostics import Elbo, draw, estimate, look
from iblr.families.base import AbstractFamily
from iblr.target import Target, as_target

FEWEST_DRAWS = 100
CONSTANT = 1e-3  # weights this near to their mean, relatively, have no tail that could matter
LARGEST_KHAT = 0.7
CONFIDENCE = 0.95
BLOCK = 256


class Moved(NamedTuple):
    """What the weights change of q, for every scalar of a point.

    Attributes:
        shift: corrected mean less that of q, in standard deviations of q.
        shift_se: its standard error.
        spread: log of the corrected standard deviation over that of q.
        spread_se: its standard error.
        shape: largest difference of the two distribution functions.
        shape_se: the largest standard error of a difference.
    """

    shift: Float[np.ndarray, " n"]
    shift_se: Float[np.ndarray, " n"]
    spread: Float[np.ndarray, " n"]
    spread_se: Float[np.ndarray, " n"]
    shape: Float[np.ndarray, " n"]
    shape_se: Float[np.ndarray, " n"]

    def beyond_noise(self) -> tuple[float, float, float]:
        """The largest |shift|, |spread| and shape over scalars, less what noise may do to all."""
        error = (1 - CONFIDENCE) / (3 * len(self.shift))
        normal = float(ndtri(1 - error / 2))
        supremum = math.sqrt(2 * math.log(2 / error))  # of a Brownian bridge, over its largest sd
        excess = lambda move, noise: float(np.max(np.abs(move) - noise, initial=0.0))  # noqa: E731
        return (
            excess(self.shift, normal * self.shift_se),
            excess(self.spread, normal * self.spread_se),
            excess(self.shape, supremum * self.shape_se),
        )


class Importance(eqx.Module):
    """Importance weights of draws from q, and what they say.

    Attributes:
        elbo: evidence lower bound from these draws; `elbo_se` is its standard error.
        khat: the shape of the tail of the weights; -inf where they are constant, nan where it
            cannot be told (fewer than 25 finite ones).
        resolution: nats to which values of log p are rounded.
        log_evidence: log of the integral of the target; `log_evidence_se` is its standard error.
        kl: KL(q || p), the difference between the two; `kl_se` is its standard error.
        ess: how many draws from p the weighted draws are worth.
        log_weights: smoothed and normalised: their exponentials sum to 1.
        excluded: draws at which log p is not finite: they weigh 0, and the ELBO is that of q
            restricted to the others.
        undefined: those of them at which it is nan or +inf, which no density allows.
        moved: what the weights change of the moments of q.
        key: gives the draws again, which are not kept.
    """

    elbo: float
    elbo_se: float
    khat: float
    resolution: float
    log_evidence: float
    log_evidence_se: float
    kl: float
    kl_se: float
    ess: float
    log_weights: Float[np.ndarray, " draws"]
    excluded: int
    undefined: int
    moved: Moved
    key: Key[Array, ""]

    @property
    def draws(self) -> int:
        """How many there are: evaluations of the target."""
        return len(self.log_weights)

    @property
    def khat_se(self) -> float:
        """Standard error of `khat`: (1 + k) / sqrt(m) for a tail of m weights."""
        tail = min(3 * math.sqrt(self.draws), self.draws / 5)
        return max(1 + self.khat, 0.0) / math.sqrt(tail)

    @property
    def usable(self) -> bool:
        """Whether averages over the weights can be relied upon."""
        return self.khat < LARGEST_KHAT and self.ess > 1

    def rows(self, family: AbstractFamily) -> Float[Array, "draws d"]:
        """The draws again, flat coordinates."""
        return _draws_again(family, self.key, self.draws)


def with_all_rows(target: Target) -> Target:
    """The same target without minibatches, whose noise would be in every weight."""
    if not target.is_stochastic:
        return target
    return dataclasses.replace(target, batch_size=None, temperature=float(target.temperature))


def weigh(
    target: Target | Callable, family: AbstractFamily, key: Key[Array, ""], *, draws: int = 1000
) -> Importance:
    """Importance weights of `draws` draws from q, on all data where the target has minibatches.

    Example:
        >>> import iblr, jax
        >>> from iblr.importance import weigh
        >>> target = lambda z: -0.5 * (z**2).sum()
        >>> found = weigh(target, iblr.Gaussian.standard(2), jax.random.key(0))
        >>> round(found.log_evidence, 3), round(found.kl, 3)              # log 2 pi
        (1.838, 0.0)
    """
    target = as_target(target, "weigh")
    if draws < FEWEST_DRAWS:
        raise ValueError(
            f"`weigh(draws=...)` must be at least {FEWEST_DRAWS}, which the tail of the weights "
            f"needs, but got {draws}."
        )
    bound, points, log_p, log_q = jax.device_get(_seen(with_all_rows(target), family, key, draws))
    precision = np.finfo(log_p.dtype).eps
    log_p, log_q = (np.asarray(x, np.float64) for x in (log_p, log_q))
    finite = np.isfinite(log_p)
    resolution = float(precision * np.median(np.abs(log_p[finite]))) if finite.any() else math.nan
    excluded, undefined = int((~finite).sum()), int((np.isnan(log_p) | (log_p == np.inf)).sum())
    raw = np.where(finite, log_p - log_q, -np.inf)
    log_weights, khat = smoothed(raw)
    elbo, elbo_se = float(bound.value), float(bound.standard_error)
    if excluded:
        elbo, elbo_se = _restricted(raw[finite], draws)
    with np.errstate(all="ignore"):  # points of scales beyond the range give nan, a finding
        moved = _moved(points, np.exp(log_weights))
    evidence_influence = kl_influence = np.full(draws, np.nan)
    log_evidence, kl, ess = -math.inf, math.nan, 0.0
    if finite.any():
        kept = np.argmin(np.where(finite, raw, np.inf))  # the smallest weight is never smoothed
        log_evidence = float(raw[kept] - log_weights[kept] - math.log(draws))
        mean, share = float(np.mean(raw[finite])), float(finite.mean())
        plain = mean + math.log(share)
        kl, ess = max(log_evidence - plain, 0.0), 1 / float(np.sum(np.exp(2 * log_weights)))
        evidence_influence = draws * np.exp(log_weights) - 1
        of_plain = np.where(finite, (raw - mean + 1) / share, 0.0) - 1
        kl_influence = evidence_influence - of_plain
    return Importance(
        elbo=elbo,
        elbo_se=elbo_se,
        khat=khat,
        resolution=resolution,
        log_evidence=log_evidence,
        log_evidence_se=_standard_error(evidence_influence),
        kl=kl,
        kl_se=_standard_error(kl_influence),
        ess=ess,
        log_weights=log_weights,
        excluded=excluded,
        undefined=undefined,
        moved=moved,
        key=key,
    )


def smoothed(
    log_ratios: Float[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " n"], float]:
    """Pareto smoothed log weights, normalised, and k-hat; ratios of -inf keep their weight 0."""
    from arviz_stats.base.array import array_stats  # with xarray installed it imports that too

    finite = np.isfinite(log_ratios)
    ratios = log_ratios[finite]
    plain = log_ratios - logsumexp(ratios) if ratios.size else log_ratios
    if ratios.size == 0:
        return plain, math.nan
    if math.log(ratios.size) + np.max(plain) < CONSTANT:
        return plain, -math.inf
    if ratios.size < 25:
        return plain, math.nan
    with np.errstate(all="ignore"):
        try:
            weights, khat = array_stats.psislw(-ratios)
        except ValueError:  # the largest are all the same
            return plain, -math.inf
    if not (np.isfinite(khat) and np.isfinite(weights).all()):
        return plain, math.nan
    out = np.full_like(log_ratios, -np.inf)
    out[finite] = weights
    return out, float(khat)


@functools.partial(quickly_compiled, once=True)
def _seen(
    target: Target, family: AbstractFamily, key: Key[Array, ""], draws: int
) -> tuple[Elbo, Float[Array, "draws n"], Float[Array, " draws"], Float[Array, " draws"]]:
    """One program for the ELBO, the points, and both densities of their coordinates."""
    seen = look(target, family, key, draws)
    structure = family.structure
    points = structure.ravel_point(structure.unravel(seen.rows), "weigh")
    return estimate(target, family, seen), points, seen.sampled + seen.prior, seen.log_q


@eqx.filter_jit
def _draws_again(
    family: AbstractFamily, key: Key[Array, ""], draws: int
) -> Float[Array, "draws d"]:
    return draw(family, key, draws)[0]


def _restricted(log_ratios: Float[np.ndarray, " m"], draws: int) -> tuple[float, float]:
    """The ELBO of q restricted to the draws at which the target is finite."""
    count = len(log_ratios)
    if count < 2:
        return math.nan, math.nan
    share = count / draws
    variance = log_ratios.var() / (count - 1) + (1 - share) / count
    return float(log_ratios.mean()) + math.log(share), math.sqrt(variance)


def _standard_error(influence: Float[np.ndarray, "n *m"]) -> float:
    return float(np.sqrt(np.sum(influence**2))) / len(influence)


def _moved(points: Float[np.ndarray, "draws n"], weights: Float[np.ndarray, " draws"]) -> Moved:
    """In blocks of scalars, which bounds the memory."""
    n = points.shape[1]
    if not weights.sum() > 0:
        return Moved(*np.full((6, n), np.nan))
    blocks = [points[:, i : i + BLOCK].astype(np.float64) for i in range(0, n, BLOCK)]
    parts = [(*_moments_moved(x, weights), *_shape_moved(x, weights)) for x in blocks]
    return Moved(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _moments_moved(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    draws = len(points)
    scale = points.std(axis=0)
    x = (points - points.mean(axis=0)) / np.where(scale > 0, scale, 1)
    shift = weights @ x
    w = draws * weights[:, None]
    shift_influence = w * (x - shift) - x
    variance = np.maximum(weights @ (x - shift) ** 2, np.finfo(float).tiny)
    spread_influence = 0.5 * (w * ((x - shift) ** 2 / variance - 1) - (x**2 - 1))
    noise = lambda influence: np.sqrt(np.sum(influence**2, axis=0)) / draws  # noqa: E731
    spread = np.where(scale > 0, 0.5 * np.log(variance), 0.0)  # else all draws are the same
    return shift, noise(shift_influence), spread, noise(spread_influence)


def _shape_moved(points: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """sup |F_p - F_q|, and the largest standard error of F_p - F_q, at the draws."""
    draws = len(points)
    w = draws * weights[np.argsort(points, axis=0)]
    below, square_below = np.cumsum(w, axis=0), np.cumsum(w**2, axis=0)
    count = np.arange(1, draws + 1)[:, None]
    p, q = below / draws, count / draws
    # The influence of a draw is w (1 - p) - (1 - q) if it is below, and q - w p if it is above.
    squares = (1 - p) ** 2 * square_below - 2 * (1 - p) * (1 - q) * below + (1 - q) ** 2 * count
    squares += p**2 * (square_below[-1] - square_below) - 2 * p * q * (draws - below)
    squares += q**2 * (draws - count)
    noise = np.sqrt(np.maximum(squares, 0)) / draws
    return np.abs(p - q).max(axis=0), noise.max(axis=0)

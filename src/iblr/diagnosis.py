"""What is known about an approximation, before anything is said of it."""

import math
from typing import Any, NamedTuple

import equinox as eqx

from iblr.importance import Importance

GOOD_SPREAD = math.log(1.1)  # of a standard deviation: what need not be spoken of
LARGEST_MODE = 0.01  # share of the mass that another region may hold
HALF = 0.5
COARSE = 0.05  # nats to which log p is rounded: values are then not to be compared
ROUNDED, PROPORTION = 1.0, 100.0  # nats to which log p is rounded in a region, and over those at q


class Mode(NamedTuple):
    """A Gaussian found from a dispersed start, where q is not: another mode, or an arm.

    Attributes:
        distance: from the mean of q, in standard deviations of q.
        log_mass: log of its mass over the mass where q is.
        family: a Gaussian there, from which `iblr.fit(target, init=...)` can start.
        width: its largest standard deviation in those of q.
        resolution: nats to which log p is rounded there.
    """

    distance: float
    log_mass: float
    family: Any = None
    width: float = 1.0
    resolution: float = 0.0

    @property
    def share(self) -> float:
        """Of the mass of both; nan where it cannot be told."""
        return 0.5 * (1 + math.tanh(0.5 * self.log_mass))

    @property
    def spread(self) -> float:
        """Log of how many times larger it makes a standard deviation, at most."""
        share = self.share
        variance = (1 - share) + share * self.width**2 + share * (1 - share) * self.distance**2
        return 0.5 * math.log(variance)

    @property
    def matters(self) -> bool:
        """Whether a verdict would speak of it, were it not rounding."""
        return not (self.log_mass <= math.log(LARGEST_MODE) and self.spread <= GOOD_SPREAD)

    def is_rounded(self, resolution: float) -> bool:
        """Whether its mass may be rounding, which is of `resolution` where q is.

        It decides if the mass would matter, or values of log p are out of all proportion there.
        """
        least, most = self.log_mass - self.resolution, self.log_mass + self.resolution
        could_matter, must_matter = (x > math.log(LARGEST_MODE) for x in (most, least))
        in_proportion = self.resolution <= PROPORTION * resolution
        return self.resolution > ROUNDED and could_matter and not (must_matter and in_proportion)

    def without(self, log_held: float) -> "Mode | None":
        """What is left of it without the mass that q has there; None if that is half or more."""
        share = math.exp(min(log_held - self.log_mass, 0.0)) if math.isfinite(log_held) else 0.0
        if share >= HALF:
            return None
        return self._replace(log_mass=self.log_mass + math.log1p(-share))


class Diagnosis(eqx.Module):
    """What is known about the quality of q.

    Attributes:
        importance: the weights, and what follows from them.
        dim: number of coordinates.
        shift: the largest |corrected mean - mean| over scalars of a point, in standard deviations
            of q and beyond noise.
        spread: the largest |log(corrected standard deviation / standard deviation)|, beyond noise.
        shape: the largest difference of marginal distribution functions, beyond noise.
        outside: the target's share of mass where a Gaussian q has 1e-4; nan where not looked at.
        modes: other modes, found from dispersed starts.
        climbs: the dispersed starts; 0 where nobody looked.
        left_out: those for which there was no budget.
        climb_gradients: what they cost.
        unlooked: where nobody looked, why not or what to do.
    """

    importance: Importance
    dim: int
    shift: float
    spread: float
    shape: float
    outside: float = math.nan
    modes: tuple[Mode, ...] = ()
    climbs: int = 0
    left_out: int = 0
    climb_gradients: int = 0
    unlooked: str = "`iblr.fit` without settings looks from dispersed starts"

"""What a fit without settings was asked for, and how its budget is shared out."""

import itertools
import math
import time
from typing import Any, NamedTuple

from jaxtyping import Array, Key

from iblr.diagnose import evaluations
from iblr.families.base import AbstractFamily
from iblr.families.gaussian import Gaussian
from iblr.history import Progress, Watch
from iblr.improper import axis_evaluations
from iblr.preflight import POINTS
from iblr.steps import CHUNK, ELBO_DRAWS
from iblr.target import Target

REGRESSION_UP_TO = 1000  # coordinates: a batch takes O(d^3)
MAX_GRADIENTS, MAX_GRADIENTS_EACH, MAX_GRADIENTS_SETTLING = 20_000, 200, 400_000
MINIBATCH_FACTOR = 5  # gradients of few rows are cheap, and their noise takes more of them
DRAWS, FEWEST_DRAWS = 1000, 100  # of the diagnosis
CLIMB_GRADIENTS = 2000  # at most, kept back for a look at other modes, and more for axes


class Task(NamedTuple):
    """What to fit from where, and when to stop; see `iblr.fit`."""

    target: Target
    family: Any
    key: Key[Array, "*runs"]
    state: Any
    tol: float
    max_gradients: int | None
    max_seconds: float | None
    watch: Watch

    @property
    def deadline(self) -> float:
        """By the clock."""
        return self.watch.started + (math.inf if self.max_seconds is None else self.max_seconds)

    @property
    def regresses(self) -> bool:
        """Whether gradients are regressed on points, or else steps are taken."""
        return isinstance(self.family, Gaussian) and self.family.dim <= REGRESSION_UP_TO

    @property
    def limit(self) -> int:
        """Evaluations that may be spent."""
        if self.max_gradients is not None:
            return int(self.max_gradients)
        each = MAX_GRADIENTS_EACH * self.family.dim
        if not self.regresses:
            return max(MAX_GRADIENTS_SETTLING, each)
        return max(MAX_GRADIENTS, each) * (MINIBATCH_FACTOR if self.target.is_stochastic else 1)

    @property
    def num_draws(self) -> int:
        """Those of the diagnosis."""
        return _num_draws(self.limit)

    def left(self, checked: int) -> int:
        """What the budget leaves for the fit itself, after a check of the target."""
        return _left(self.limit, checked, self.family)

    def refuse_if_below(self, left: int, steps: int) -> None:
        """Raise where what is left does not suffice for the first steps."""
        if left >= steps:
            return
        checked = check_cost(self.family)
        least = next(n for n in itertools.count(steps) if _left(n, checked, self.family) >= steps)
        raise ValueError(
            f"`fit(max_gradients=...)` is too small for a {self.family.name} over "
            f"{self.family.dim} parameters: it takes at least {least} gradients to see anything, "
            "and some thousands to finish."
        )


def check_cost(family: AbstractFamily) -> int:
    """Evaluations by the check of a target."""
    return POINTS - 1 + len(family.centres)


def _num_draws(limit: int) -> int:
    return min(DRAWS, max(limit // 4, FEWEST_DRAWS))


def _left(limit: int, checked: int, family: AbstractFamily) -> int:
    climbs = min(limit // 10, CLIMB_GRADIENTS + axis_evaluations(family.dim))
    return limit - checked - evaluations(family, _num_draws(limit)) - climbs


class Limits:
    """A callback that ends a fit in steps when its budget is spent, or when the user's says so.

    Args:
        deadline: by the clock.
        max_gradients: what may be spent.
        callback: the user's.
        between: what is spent between two rounds.
    """

    def __init__(
        self, deadline: float, max_gradients: int | float, callback: Any, between: int = 0
    ):
        self.deadline, self.max_gradients, self.callback = deadline, max_gradients, callback
        self.between, self.reason = between, None
        self.before = self.latest = self.looks = self.step = 0

    @property
    def spent(self) -> int:
        """Gradients of all rounds, what was spent between them, and looks at the ELBO."""
        return self.before + self.latest + self.looks

    def __call__(self, told: Progress) -> bool:
        """Whether to stop; the steps and gradients told of start anew with every round."""
        if told.step <= self.step:
            self.before += self.latest + self.between
            self.latest = 0
        self.step = told.step
        needed = told.num_gradients - self.latest + ELBO_DRAWS  # by the next chunk
        if self.between and told.step + CHUNK >= told.num_steps:
            needed += self.between + 2 * needed  # it ends a round; chunks of the next cost twice
        self.latest = told.num_gradients
        self.looks += ELBO_DRAWS
        if time.perf_counter() >= self.deadline:
            self.reason = "max_seconds"
        elif self.spent + needed > self.max_gradients:
            self.reason = "max_gradients"
        elif self.callback is not None and self.callback(told):
            self.reason = "callback"
        return self.reason is not None

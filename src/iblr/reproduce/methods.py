"""What is run and on what: plans, methods, problems and checkpoints, as data."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import iblr

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How far to go.

    Attributes:
        full: the paper's iterations and lists, or a short version.
        seeds: runs of every method.
        limit: seconds after which a run stops where it is; None for no limit.
    """

    full: bool
    seeds: int
    limit: float | None = None

    def pick(self, quick: Any, full: Any) -> Any:
        """One of two settings."""
        return full if self.full else quick

    @property
    def mode(self) -> str:
        """In a word."""
        return self.pick("quick", "full")

    def shorten(self, methods: Sequence["Method"]) -> list["Method"]:
        """Methods with the grids of this plan."""
        return [m if self.full or not m.quick_grid else m.at(m.quick_grid) for m in methods]


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to fit: an estimator, a rule and a step size.

    Attributes:
        name: in tables and legends.
        estimator: of the natural gradient; None for the family's default.
        rule: what is done with it.
        step_size: a number, a schedule, a grid to choose from, or None for the family's default.
        momentum: of the mean.
        trust_region: as `iblr.fit` has it.
        words: the step size in words, where it is a schedule.
        quick_grid: the grid of a quick run, where that is another.
    """

    name: str
    estimator: Any = None
    rule: Callable = iblr.improved_step
    step_size: Any = None
    momentum: float = 0.0
    trust_region: bool | None = None
    words: str = ""
    quick_grid: tuple[float, ...] = ()

    @property
    def grid(self) -> tuple[float, ...]:
        """The step sizes to choose from, if it is a choice."""
        return self.step_size if isinstance(self.step_size, tuple) else ()

    def at(self, step_size: Any) -> "Method":
        """The method with one step size."""
        return dataclasses.replace(self, step_size=step_size)

    @property
    def step_text(self) -> str:
        """The step size in words."""
        if self.words:
            return self.words
        if self.grid:
            return "best of " + ", ".join(f"{t:.2g}" for t in self.grid)
        return "default" if self.step_size is None else f"{self.step_size:g}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be approximated, from where, and how the approximation is judged.

    Attributes:
        target: what `iblr.fit` takes.
        start: the family of a key.
        metrics: numbers by name of a stacked family, one a run.
        objective: the metric on which a step size is chosen; the smaller, the better.
        keep: arrays by name of a single family at the end.
    """

    target: Any
    start: Callable[[Any], Any]
    metrics: Callable[[Any], Arrays]
    objective: str
    keep: Callable[[Any], Arrays] = lambda family: {}


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Steps at which metrics are taken: `every` so many up to each of `until`."""

    until: tuple[int, ...]
    every: tuple[int, ...]

    @staticmethod
    def spread(num_steps: int) -> "Checkpoints":
        """Closer together at first, as on a logarithmic axis; few lengths, each is compiled."""
        plan = ((100, 10), (10_000, 100), (100_000, 2000), (math.inf, 50_000))
        reached = [(until, every) for until, every in plan if until < num_steps]
        _, last = plan[len(reached)]
        return Checkpoints(
            (*(int(until) for until, _ in reached), num_steps),
            (*(every for _, every in reached), min(last, num_steps)),
        )

    @staticmethod
    def even(num_steps: int, looks: int) -> "Checkpoints":
        """So many, evenly apart."""
        return Checkpoints((num_steps,), (max(num_steps // looks, 1),))

    @property
    def num_steps(self) -> int:
        """The last."""
        return self.until[-1]

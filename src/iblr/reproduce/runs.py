"""Runs: one method on one problem for every seed, at a step size of its own.

Where the paper gives no step size, the one of a grid that does best on the training objective of
the first seed is taken for all. The seeds run as one batch.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from iblr.datasets.files import write_atomically
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Problem
from iblr.reproduce.trajectory import slug, trajectory, words


@dataclasses.dataclass(frozen=True)
class Monitor:
    """Who hears how far a task is, and where it may keep what it has.

    Attributes:
        scratch: a folder.
        tell: takes the share that is done, and a word on what is being done.
    """

    scratch: Path
    tell: Callable[..., None]


@runtime_checkable
class Task(Protocol):
    """A piece of work whose result is kept: named, and with a rough size in seconds."""

    @property
    def name(self) -> str:
        """Under which the result is kept."""
        ...

    @property
    def effort(self) -> float:
        """Seconds it may take, roughly: for the time left."""
        ...

    @property
    def settings(self) -> str:
        """Everything it depends on: a kept result of other settings is not used."""
        ...

    def execute(self, monitor: Monitor) -> Arrays:
        """Do it."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """One method on one problem, or on one for every seed.

    Attributes:
        name: of the piece of work.
        method: what is run.
        problems: makes one for all seeds, or as many as there are seeds.
        seeds: how many.
        checkpoints: where metrics are taken.
        effort: seconds it may take, roughly.
        limit: seconds after which it stops where it is.
        grid_steps: steps of a trial of one step size; all of them where not given.
        first_seed: of the keys.
    """

    name: str
    method: Method
    problems: Callable[[], tuple[Problem, ...]]
    seeds: int
    checkpoints: Checkpoints
    effort: float = 10.0
    limit: float | None = None
    grid_steps: int | None = None
    first_seed: int = 0

    @property
    def settings(self) -> str:
        """The method, the steps and the seeds, in words."""
        return (
            f"{words(self.method)}, steps {self.checkpoints}, grid {self.grid_steps}, "
            f"{self.seeds} seeds from {self.first_seed}"
        )

    def execute(self, monitor: Monitor) -> Arrays:
        """Metrics by name with one row a checkpoint and one column a seed, and what is kept."""
        problems = self.problems()
        method, trials = self._tuned(problems[0], monitor)
        keys = [jax.random.key(self.first_seed + seed) for seed in range(self.seeds)]
        batches = (
            [(problems[0], jnp.stack(keys))]
            if len(problems) == 1
            else [(p, k[None]) for p, k in zip(problems, keys, strict=True)]
        )
        share = self._grid_share
        found = []
        for index, (problem, batch) in enumerate(batches):

            def tell(done: float, text: str = "", index: int = index) -> None:
                monitor.tell(share + (1 - share) * (index + done) / len(batches), text)

            place = monitor.scratch / f"{slug(self.name)}-{index}"
            limit = None if self.limit is None else self.limit / len(batches)
            found.append(trajectory(problem, method, batch, self.checkpoints, tell, place, limit))
        joined = _side_by_side(found)
        cut = self.limit is not None and joined["step"][-1] < self.checkpoints.num_steps
        chosen = {"step_size": _number(method.step_size), "cut_short": np.asarray(cut)}
        return trials | joined | chosen

    @property
    def _grid_share(self) -> float:
        """The share of the work that the choice of a step size is."""
        trials = len(self.method.grid) * (self.grid_steps or self.checkpoints.num_steps)
        return trials / (trials + self.seeds * self.checkpoints.num_steps)

    def _tuned(self, problem: Problem, monitor: Monitor) -> tuple[Method, Arrays]:
        """The method at the best step of its grid on the first seed, and what the trials gave."""
        grid = self.method.grid
        if not grid:
            return self.method, {}
        num_steps = self.grid_steps or self.checkpoints.num_steps
        last = self.checkpoints.every[-1]
        short = Checkpoints((num_steps,), (min(last, num_steps),))
        key = jax.random.key(self.first_seed)[None]
        place = monitor.scratch / f"{slug(self.name)}-grid"
        tried = place.with_suffix(".json")
        values = _tried(tried, self.settings)
        limit = None if self.limit is None else self.limit / len(grid)
        for index in range(len(values), len(grid)):

            def tell(done: float, text: str = "", index: int = index) -> None:
                share = self._grid_share * (index + done) / len(grid)
                monitor.tell(share, f"step size {grid[index]:.2g}")

            tell(0.0)
            method = self.method.at(grid[index])
            found = trajectory(problem, method, key, short, tell, place, limit)
            values.append(float(found[problem.objective][-1, 0]))
            kept = {"settings": self.settings, "values": values}
            write_atomically(tried, json.dumps(kept).encode())
        usable = [value if math.isfinite(value) else math.inf for value in values]
        chosen = grid[int(np.argmin(usable))]
        tried.unlink(missing_ok=True)
        return self.method.at(chosen), {"grid": np.asarray(grid), "trials": np.asarray(values)}


def _tried(path: Path, settings: str) -> list[float]:
    """What trials gave before, if they were of the same settings."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return kept["values"] if kept.get("settings") == settings else []


def _side_by_side(found: Sequence[Arrays]) -> Arrays:
    """Runs of several trajectories next to one another, as far as the shortest went."""
    if len(found) == 1:
        return found[0]
    length = min(len(arrays["step"]) for arrays in found)
    joined = {}
    for name, first in found[0].items():
        if name == "step":
            joined[name] = first[:length]
        elif name == "seconds":
            joined[name] = np.sum([arrays[name][:length] for arrays in found], axis=0)
        elif name.startswith("final_"):
            joined[name] = np.concatenate([arrays[name] for arrays in found])
        else:
            joined[name] = np.concatenate([arrays[name][:length] for arrays in found], axis=1)
    return joined


def _number(step_size: Any) -> np.ndarray:
    return np.asarray(step_size if isinstance(step_size, int | float) else math.nan)

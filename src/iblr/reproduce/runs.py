"""Methods on problems: what most experiments consist of.

A `Run` is one method on one problem for every seed. Where the paper gives no step size, the one of
a grid that does best on the training objective of the first seed is taken for all. The metrics are
taken on the way, at the steps that a `Checkpoints` names, and the seeds run as one batch. The state
is kept on disk while it runs, so that an interrupted run goes on with the same bits.
"""

import dataclasses
import io
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

import iblr
from iblr.datasets.files import write_atomically
from iblr.reproduce.results import read_arrays

SAVE_EVERY = 15.0
ELBO_DRAWS = 4
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


@dataclasses.dataclass(frozen=True)
class Run:
    """One method on one problem, or on one for every seed.

    Attributes:
        name: of the piece of work.
        method: what is run.
        problems: one for all seeds, or as many as there are seeds.
        seeds: how many.
        checkpoints: where metrics are taken.
        effort: seconds it may take, roughly.
        limit: seconds after which it stops where it is.
        grid_steps: steps of a trial of one step size; all of them where not given.
        first_seed: of the keys.
    """

    name: str
    method: Method
    problems: tuple[Problem, ...]
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
            f"{_words(self.method)}, steps {self.checkpoints}, grid {self.grid_steps}, "
            f"{self.seeds} seeds from {self.first_seed}, {len(self.problems)} problems, "
            f"limit {self.limit}"
        )

    def execute(self, monitor: Monitor) -> Arrays:
        """Metrics by name with one row a checkpoint and one column a seed, and what is kept."""
        method, trials = self._tuned(monitor)
        keys = [jax.random.key(self.first_seed + seed) for seed in range(self.seeds)]
        batches = (
            [(self.problems[0], jnp.stack(keys))]
            if len(self.problems) == 1
            else [(p, k[None]) for p, k in zip(self.problems, keys, strict=True)]
        )
        share = self._grid_share
        found = []
        for index, (problem, batch) in enumerate(batches):

            def tell(done: float, text: str = "", index: int = index) -> None:
                monitor.tell(share + (1 - share) * (index + done) / len(batches), text)

            place = monitor.scratch / f"{slug(self.name)}-{index}"
            limit = None if self.limit is None else self.limit / len(batches)
            found.append(trajectory(problem, method, batch, self.checkpoints, tell, place, limit))
        return trials | _side_by_side(found) | {"step_size": _number(method.step_size)}

    @property
    def _grid_share(self) -> float:
        """The share of the work that the choice of a step size is."""
        trials = len(self.method.grid) * (self.grid_steps or self.checkpoints.num_steps)
        return trials / (trials + self.seeds * self.checkpoints.num_steps)

    def _tuned(self, monitor: Monitor) -> tuple[Method, Arrays]:
        """The method at the best step of its grid on the first seed, and what the trials gave."""
        grid = self.method.grid
        if not grid:
            return self.method, {}
        num_steps = self.grid_steps or self.checkpoints.num_steps
        last = self.checkpoints.every[-1]
        short = Checkpoints((num_steps,), (min(last, num_steps),))
        problem, key = self.problems[0], jax.random.key(self.first_seed)[None]
        place = monitor.scratch / f"{slug(self.name)}-grid"
        tried = place.with_suffix(".json")
        values = json.loads(tried.read_text()) if tried.exists() else []
        limit = None if self.limit is None else self.limit / len(grid)
        for index in range(len(values), len(grid)):

            def tell(done: float, text: str = "", index: int = index) -> None:
                share = self._grid_share * (index + done) / len(grid)
                monitor.tell(share, f"step size {grid[index]:.2g}")

            tell(0.0)
            method = self.method.at(grid[index])
            found = trajectory(problem, method, key, short, tell, place, limit)
            values.append(float(found[problem.objective][-1, 0]))
            write_atomically(tried, json.dumps(values).encode())
        usable = [value if math.isfinite(value) else math.inf for value in values]
        chosen = grid[int(np.argmin(usable))]
        tried.unlink()
        return self.method.at(chosen), {"grid": np.asarray(grid), "trials": np.asarray(values)}


def trajectory(
    problem: Problem,
    method: Method,
    keys: Any,
    checkpoints: Checkpoints,
    tell: Callable[[float, str], None] | None,
    place: Path,
    limit: float | None,
) -> Arrays:
    """Metrics at the start and at checkpoints, and the approximation at the end.

    What there is is written to `place` on the way, and taken up from there.
    """
    single = len(keys) == 1  # a batch of one would be slower than a run by itself
    key = keys[0] if single else keys
    first = lambda key: iblr.init(problem.start(key), key, rule=method.rule)  # noqa: E731
    state = first(key) if single else jax.vmap(first)(key)
    start = state.family
    stacked = lambda family: jax.tree.map(lambda x: x[None], family) if single else family  # noqa: E731
    words = f"{_words(method)}, {len(keys)} seeds, {checkpoints}"
    metrics = lambda family: problem.metrics(stacked(family))  # noqa: E731
    record = Record(metrics, place.with_suffix(".npz"), words)
    state = record.resumed(state)
    options = {
        "estimator": method.estimator,
        "rule": method.rule,
        "step_size": method.step_size,
        "momentum": method.momentum,
        "trust_region": method.trust_region,
        "elbo_draws": ELBO_DRAWS,
        "progress": False,
        "throw": False,
    }
    stopped = False

    def look(told: Any) -> bool:
        nonlocal stopped
        record.add(told.step, told.family)
        record.save_now_and_then(told.state)
        if tell is not None:
            tell(told.step / checkpoints.num_steps, f"step {told.step}")
        stopped = limit is not None and record.seconds > limit
        return stopped

    for until, every in zip(checkpoints.until, checkpoints.every, strict=True):
        if stopped or record.step >= until:
            continue
        posterior = iblr.fit(
            problem.target,
            start,
            key=key,
            num_steps=until,
            chunk_size=every,
            callback=look,
            state=state,
            **options,
        )
        state = posterior.state
        if bool(np.any(np.asarray(posterior.status == iblr.Status.interrupted))):
            record.save(state)
            raise KeyboardInterrupt
        stopped = stopped or posterior.num_steps < until  # no run could take a step
    record.path.unlink(missing_ok=True)
    families = stacked(state.family)
    kept = [problem.keep(_one(families, run)) for run in range(len(keys))]
    return record.arrays() | {
        f"final_{name}": np.stack([k[name] for k in kept]) for name in kept[0]
    }


class Record:
    """What a trajectory has seen, in memory and on disk."""

    def __init__(self, metrics: Callable[[Any], Arrays], path: Path, settings: str):
        self.metrics, self.path, self.settings = metrics, path, settings
        self.rows: list[Arrays] = []
        self.began = self.saved = time.perf_counter()

    @property
    def step(self) -> int:
        """The last step that was looked at; -1 before the first look."""
        return int(self.rows[-1]["step"]) if self.rows else -1

    @property
    def seconds(self) -> float:
        """Since the start, over all sittings, metrics not counted."""
        return time.perf_counter() - self.began

    def add(self, step: int, family: Any) -> None:
        """Take the metrics."""
        seconds, before = self.seconds, time.perf_counter()
        numbers = {name: np.asarray(value) for name, value in self.metrics(family).items()}
        self.rows.append({"step": np.asarray(step), "seconds": np.asarray(seconds)} | numbers)
        self.began += time.perf_counter() - before

    def arrays(self) -> Arrays:
        """One row a look."""
        return {name: np.stack([row[name] for row in self.rows]) for name in self.rows[0]}

    def save_now_and_then(self, state: Any) -> None:
        """Save, if that was some time ago."""
        if time.perf_counter() - self.saved > SAVE_EVERY:
            self.save(state)

    def save(self, state: Any) -> None:
        """Write what was seen and the state to one file."""
        leaves = [_data(leaf) for leaf in jax.tree.leaves(state)]
        named = {f"state/{i}": leaf for i, leaf in enumerate(leaves)}
        named["settings"] = np.asarray(self.settings)
        write_arrays(self.path, {f"row/{name}": a for name, a in self.arrays().items()} | named)
        self.saved = time.perf_counter()

    def _stored(self) -> Arrays | None:
        """What is on disk, if it is of the same settings."""
        if not self.path.exists():
            return None
        arrays = read_arrays(self.path)
        return arrays if str(arrays.get("settings")) == self.settings else None

    def resumed(self, state: Any) -> Any:
        """The state on disk, or this one with a first look at it."""
        arrays = self._stored()
        if arrays is None:
            self.add(0, state.family)
            return state
        rows = {k.removeprefix("row/"): a for k, a in arrays.items() if k.startswith("row/")}
        self.rows = [{name: a[i] for name, a in rows.items()} for i in range(len(rows["step"]))]
        leaves, structure = jax.tree.flatten(state)
        stored = [_like(arrays[f"state/{i}"], leaf) for i, leaf in enumerate(leaves)]
        state = jax.tree.unflatten(structure, stored)
        self.began = time.perf_counter() - float(self.rows[-1]["seconds"])
        reached = int(np.max(state.step))
        if reached > self.step:  # interrupted between the step and the look at it
            self.add(reached, state.family)
        return state


@jax.jit
def _moments(family: Any) -> tuple[Any, Any]:
    return jax.vmap(lambda q: (q.mean, q.covariance))(family)


def moments(family: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances of a stack of families, in double precision."""
    mean, covariance = _moments(family)
    return np.asarray(mean, float), np.asarray(covariance, float)


def keep_moments(family: Any) -> Arrays:
    """Mean and covariance of one."""
    return {"mean": np.asarray(family.mean), "covariance": np.asarray(family.covariance)}


def at_step(arrays: Arrays, name: str, step: int) -> np.ndarray:
    """A metric at one step, a value a seed; nan where the run did not come so far."""
    rows = np.flatnonzero(arrays["step"] == step)
    return arrays[name][rows[0]] if len(rows) else np.full(arrays[name].shape[1], np.nan)


def _words(method: Method) -> str:
    """Everything a method is."""
    rule = getattr(method.rule, "__name__", type(method.rule).__name__)
    return (
        f"{method.estimator} {rule} step {method.step_text} momentum {method.momentum:g} trust "
        f"region {method.trust_region}"
    )


def write_arrays(path: Path, arrays: Arrays) -> None:
    """An NPZ file, complete or not there."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())


def slug(name: str) -> str:
    """A name fit for a file."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _data(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _like(array: np.ndarray, leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array)


def _one(tree: Any, run: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[run], tree)


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

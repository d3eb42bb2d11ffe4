"""One method on one problem from step to step, with metrics on the way and the state on disk."""

import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import iblr
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Problem
from iblr.reproduce.results import read_arrays, write_arrays

SAVE_EVERY = 15.0
ELBO_DRAWS = 4
DAMAGED = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile)


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
    settings = f"{words(method)}, {len(keys)} seeds, {checkpoints}"
    metrics = lambda family: problem.metrics(stacked(family))  # noqa: E731
    record = Record(metrics, place.with_suffix(".npz"), settings)
    state = record.resumed(state)
    options = {
        "estimator": method.estimator,
        "rule": method.rule,
        "step_size": _step_size(method, start, checkpoints.num_steps),
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
    kept = [problem.keep(member(families, run)) for run in range(len(keys))]
    return record.arrays() | {
        f"final_{name}": np.stack([k[name] for k in kept]) for name in kept[0]
    }


def _step_size(method: Method, family: Any, num_steps: int) -> Any:
    """That of the method, or the family's default for all steps together."""
    if method.step_size is not None:
        return method.step_size
    defaults, estimator = family.defaults, method.estimator
    pairs = estimator.pairs if isinstance(estimator, iblr.Stl) else defaults.pairs
    return defaults.step_size(num_steps, pairs)


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
        try:
            arrays = read_arrays(self.path)
        except DAMAGED:  # what it held is computed again
            return None
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


def words(method: Method) -> str:
    """Everything a method is."""
    rule = getattr(method.rule, "__name__", type(method.rule).__name__)
    return (
        f"{method.estimator} {rule} step {method.step_text} momentum {method.momentum:g} trust "
        f"region {method.trust_region}"
    )


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


def member(tree: Any, run: int) -> Any:
    """One of a stack."""
    return jax.tree.map(lambda leaf: leaf[run], tree)


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

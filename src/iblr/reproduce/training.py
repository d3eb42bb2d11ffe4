"""Networks trained by one optimiser for every seed, judged after every epoch, and timed.

Whole epochs run on the device. The learning rate is the one of a grid after which a tenth of the
training set, held out for this alone, is predicted best; it falls to zero along a cosine.
"""

import dataclasses
import enum
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int, Key

from iblr import calibration
from iblr.optax import grad_and_squares, posterior, sample_params
from iblr.reproduce.methods import Arrays
from iblr.reproduce.networks import Material
from iblr.reproduce.runs import Monitor
from iblr.reproduce.trajectory import Record, member, slug

SCORES = {
    "accuracy": calibration.accuracy,
    "nll": calibration.nll,
    "ece": calibration.ece,
    "brier": calibration.brier,
}
LABELS_AT_ONCE = 10_000
ROUNDS = 5
SAVE_EVERY = 120.0  # seconds; a state may be hundreds of megabytes
STEPS_TIMED = 50
Data = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A way to train.

    Attributes:
        name: in tables and legends.
        make: the optimiser of a schedule and the number of labels.
        grid: learning rates to choose from.
        words: its fixed settings.
        bayesian: whether gradients are taken at draws from a Gaussian that its state holds.
        squares: whether it needs the squares of the examples' own gradients.
    """

    name: str
    make: Callable[[optax.Schedule, ArrayLike], Any]
    grid: tuple[float, ...]
    words: str
    bayesian: bool = False
    squares: bool = False


class Fit(NamedTuple):
    """Weights, the optimiser's state and the mean loss of the last epoch."""

    weights: Any
    state: Any
    loss: Float[Array, ""]


class Numbers(NamedTuple):
    """What differs between runs: the first learning rate, the steps of all epochs, the labels."""

    rate: ArrayLike
    steps: ArrayLike
    ess: ArrayLike


class Progress(NamedTuple):
    """How far all runs are: what `trajectory.Record` writes and reads."""

    family: tuple[Fit, ...]
    step: np.ndarray


@dataclasses.dataclass(frozen=True)
class Training:
    """One optimiser on one material: the choice of a learning rate, then all seeds.

    Attributes:
        name: of the piece of work.
        trainer: the optimiser.
        material: makes network and examples.
        about: the material in words.
        seeds: how many.
        epochs: of every run.
        trial_epochs: of the trial of one learning rate.
        draws: of the weights, whose predictions are averaged.
        effort: seconds it may take, roughly.
        limit: seconds after which it stops where it is.
    """

    name: str
    trainer: Trainer
    material: Callable[[], Material]
    about: str
    seeds: int
    epochs: int
    trial_epochs: int
    draws: int
    effort: float = 10.0
    limit: float | None = None

    @property
    def settings(self) -> str:
        """Everything, in words."""
        trainer = self.trainer
        return (
            f"{self.about}; {trainer.name}, {trainer.words}, best of {trainer.grid} after "
            f"{self.trial_epochs} epochs; {self.epochs} epochs, {self.seeds} seeds, {self.draws} "
            "draws"
        )

    def execute(self, monitor: Monitor) -> Arrays:
        """Scores by name with one row an epoch and one column a seed, and what the trials gave."""
        grid, material = self.trainer.grid, self.material()
        work = len(grid) * self.trial_epochs, self.seeds * self.epochs
        share = work[0] / sum(work)

        def tell_trials(done: float, text: str) -> None:
            monitor.tell(share * done, f"learning rates, {text}")

        def tell_seeds(done: float, text: str) -> None:
            monitor.tell(share + (1 - share) * done, text)

        place = monitor.scratch / slug(self.name)
        first = [jax.random.key(0)] * len(grid)
        trials = self._runs(
            material, True, grid, first, self.trial_epochs, tell_trials, Path(f"{place}-grid")
        )
        kind = "averaged_" if self.trainer.bayesian else ""
        judged = trials[f"{kind}nll"][-1]
        rate = grid[int(np.argmin(np.where(np.isfinite(judged), judged, np.inf)))]
        keys = [jax.random.key(seed) for seed in range(self.seeds)]
        rates = (rate,) * self.seeds
        found = self._runs(
            material, False, rates, keys, self.epochs, tell_seeds, Path(f"{place}-seeds")
        )
        return found | {
            "grid": np.asarray(grid),
            "trials": judged,
            "trial_accuracy": trials[f"{kind}accuracy"][-1],
            "step_size": np.asarray(rate),
            "cut_short": np.asarray(found["step"][-1] < self.epochs),
        }

    def _runs(
        self,
        material: Material,
        trial: bool,
        rates: tuple[float, ...],
        keys: list[Any],
        epochs: int,
        tell: Callable[[float, str], None],
        place: Path,
    ) -> Arrays:
        """Runs side by side, judged after every epoch; trials of learning rates only at the end."""
        train = prepared(self.trainer, material, chunks(self.trainer, material)[0])
        judge = judged(self.trainer, material, self.draws)
        rows = material.rows(trial)
        numbers = [
            Numbers(rate, float(epochs * (len(rows) // material.batch)), material.ess(rows))
            for rate in rates
        ]

        def metrics(fits: tuple[Fit, ...]) -> Arrays:
            late = [jax.random.fold_in(key, epochs) for key in keys]
            found = [judge(fit, key, trial) for fit, key in zip(fits, late, strict=True)]
            return {name: np.stack([f[name] for f in found]) for name in found[0]}

        path = place.with_suffix(".npz")
        record = Record(metrics, path, f"{self.settings}, {place.name}")
        start = tuple(map(train.first, keys, numbers))
        progress = record.resumed(Progress(start, np.asarray(0)))
        try:
            for number in range(int(progress.step), epochs):
                fits = train.epoch(progress.family, keys, number, numbers, rows)
                progress = Progress(jax.block_until_ready(fits), np.asarray(number + 1))
                stop = self.limit is not None and record.seconds > self.limit
                if not trial or stop or number + 1 == epochs:
                    record.add(number + 1, fits)
                if time.perf_counter() - record.saved > SAVE_EVERY:
                    record.save(progress)
                tell((number + 1) / epochs, f"epoch {number + 1}")
                if stop:
                    break
        except KeyboardInterrupt:
            record.save(progress)
            raise
        path.unlink(missing_ok=True)
        return record.arrays()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that an epoch of one run takes, of all optimisers in turn, without compiling.

    One that squares the examples' gradients has the fastest of the sizes that `chunks` names.

    Attributes:
        name: of the piece of work.
        trainers: the optimisers.
        material: makes network and examples.
        about: the material in words.
        effort: seconds it may take, roughly.
        alone: it needs the machine to itself.
    """

    name: str
    trainers: tuple[Trainer, ...]
    material: Callable[[], Material]
    about: str
    effort: float = 10.0
    alone: bool = True

    @property
    def settings(self) -> str:
        """What is timed."""
        return (
            f"{self.about}; {[t.name for t in self.trainers]}, {STEPS_TIMED} steps, {ROUNDS} rounds"
        )

    def execute(self, monitor: Monitor) -> Arrays:
        """One row a round, one column an optimiser."""
        material = self.material()
        steps = min(STEPS_TIMED, material.steps)
        ready = []
        for index, trainer in enumerate(self.trainers):
            monitor.tell(index / (2 * len(self.trainers)), f"compiling {trainer.name}")
            for chunk in chunks(trainer, material):
                ready.append((index, _ready(trainer, material, chunk, steps)))
        laps = np.zeros((ROUNDS, len(ready)))
        for lap in range(ROUNDS):
            monitor.tell(0.5 + lap / (2 * ROUNDS), f"round {lap + 1}")
            for column, (_, part) in enumerate(ready):
                began = time.perf_counter()
                jax.block_until_ready(part())
                laps[lap, column] = (time.perf_counter() - began) * material.steps / steps
        fastest = {}
        for column in np.argsort(-np.median(laps, axis=0)):
            fastest[ready[column][0]] = laps[:, column]
        laps = np.stack([fastest[index] for index in range(len(self.trainers))], axis=1)
        device = jax.devices()[0].device_kind
        return {"seconds_an_epoch": laps, "device": np.asarray(device)}


def _ready(trainer: Trainer, material: Material, chunk: int, steps: int) -> Callable[[], Any]:
    """A part of an epoch, compiled and run once."""
    train, key, rows = prepared(trainer, material, chunk), jax.random.key(0), material.rows(False)
    numbers = Numbers(trainer.grid[0], float(material.steps), material.ess(rows))
    start = (train.first(key, numbers),)
    part = partial(train.epoch, start, [key], 0, [numbers], rows[: steps * material.batch])
    jax.block_until_ready(part())
    return part


class Prepared(NamedTuple):
    """Compiled functions of one optimiser on one material.

    Attributes:
        first: the start of a run, of its key and numbers.
        epoch: of all runs, of their fits, keys, the number of the epoch, their numbers and the rows
            to train on: minibatches without replacement.
    """

    first: Callable[[Any, Numbers], Fit]
    epoch: Callable[..., tuple[Fit, ...]]


def chunks(trainer: Trainer, material: Material) -> tuple[int, ...]:
    """How many examples to square the gradients of at once, the first to train with.

    On a CPU what XLA makes of more than one is 30 times slower.
    """
    if not trainer.squares or jax.default_backend() == "cpu":
        return (1,)
    return material.batch, max(material.batch // 8, 1)


@cache
def prepared(trainer: Trainer, material: Material, chunk: int) -> Prepared:
    """Compiled once, for any number of steps; on an accelerator once for every number of runs."""
    data = examples(material, Part.train)

    def optimiser(numbers: Numbers) -> Any:
        def schedule(count: Any) -> Any:
            return (
                numbers.rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(count / numbers.steps, 1)))
            )

        return trainer.make(schedule, numbers.ess)

    @jax.jit
    def first(key: Key[Array, ""], numbers: Numbers) -> Fit:
        weights = material.init(key)
        fit = Fit(weights, optimiser(numbers).init(weights), jnp.float32(jnp.nan))
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype), fit)

    def epoch(
        fit: Fit,
        order: Int[Array, "s b"],
        steps: Int[Array, ""] | int,
        key: Key[Array, ""],
        numbers: Numbers,
        data: Data,
    ) -> Fit:
        x, y = data

        def step(index: Array, fit: Fit) -> Fit:
            rows, state = order[index], fit.state
            point, batch, extra = fit.weights, (x[rows], y[rows]), {}
            if trainer.bayesian:
                point, state = sample_params(jax.random.fold_in(key, index), point, state)
            if not trainer.squares:
                loss, slopes = jax.value_and_grad(material.loss)(point, batch)
            else:
                both = grad_and_squares(material.loss, chunk=chunk)
                loss, slopes, extra["squares"] = both(point, batch)
            updates, state = optimiser(numbers).update(slopes, state, fit.weights, **extra)
            return Fit(optax.apply_updates(fit.weights, updates), state, fit.loss + loss / steps)

        return jax.lax.fori_loop(0, steps, step, fit._replace(loss=jnp.zeros_like(fit.loss)))

    on_cpu = jax.default_backend() == "cpu"
    # A loop of known length needs no look at its condition from the host; one of any length is
    # compiled only once.
    one = jax.jit(epoch, static_argnames=() if on_cpu else "steps")

    @partial(jax.jit, static_argnames="steps")
    def at_once(runs: Any, steps: int, data: Data) -> Any:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *runs)
        found = jax.vmap(lambda run: epoch(run[0], run[1], steps, run[2], run[3], data))(stacked)
        return tuple(member(found, run) for run in range(len(runs)))

    def all_runs(
        fits: tuple[Fit, ...],
        keys: list[Any],
        number: int,
        numbers: list[Numbers],
        rows: np.ndarray,
    ) -> tuple[Fit, ...]:
        keys = [jax.random.fold_in(key, number) for key in keys]
        steps = len(rows) // material.batch
        orders = [_order(key, rows, (material.steps, material.batch)) for key in keys]
        runs = tuple(zip(fits, orders, keys, numbers, strict=True))
        if on_cpu or len(runs) == 1:
            return tuple(one(fit, order, steps, key, n, data) for fit, order, key, n in runs)
        return at_once(runs, steps, data)

    return Prepared(first, all_runs)


def _order(key: Key[Array, ""], rows: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Rows in an order of the key, as minibatches; what is left over is not used."""
    seed = np.asarray(jax.random.key_data(key)).tolist()
    mixed = np.random.default_rng(seed).permutation(rows)
    order = np.zeros(shape[0] * shape[1], np.int32)
    order[: len(mixed)] = mixed[: len(order)]
    return order.reshape(shape)


@cache
def judged(trainer: Trainer, material: Material, draws: int) -> Callable[[Fit, Any, bool], Arrays]:
    """Scores of one run at the weights, and of predictions averaged over draws of them."""
    at_weights, averaged = scorers(material, draws)

    def judge(fit: Fit, key: Key[Array, ""], trial: bool) -> Arrays:
        data = examples(material, Part.held_out if trial else Part.validation)
        found = {"loss": fit.loss} | at_weights(fit.weights, data)
        if trainer.bayesian:
            better = averaged(fit.weights, fit.state, key, data)
            found |= {f"averaged_{name}": value for name, value in better.items()}
        return {name: np.asarray(value) for name, value in found.items()}

    return judge


class Part(enum.Enum):
    """Of the examples of a material."""

    train = enum.auto()
    held_out = enum.auto()
    validation = enum.auto()


@cache
def examples(material: Material, part: Part) -> Data:
    """On the device, once for all optimisers."""
    match part:
        case Part.train:
            x, y = material.train
        case Part.held_out:
            x, y = material.held_out()
        case Part.validation:
            x, y = material.validation
    return jnp.asarray(x), jnp.asarray(y)


@cache
def scorers(material: Material, draws: int) -> tuple[Callable, Callable]:
    """Compiled once for all optimisers."""

    def probabilities(weights: Any, x: Array) -> Float[Array, "n k"]:
        rows = max(LABELS_AT_ONCE // material.validation[1][0].size, 1)
        one = lambda x: jax.nn.softmax(material.predict(weights, x))  # noqa: E731
        found = jax.lax.map(one, x, batch_size=min(rows, len(x)))
        return found.reshape(-1, found.shape[-1])

    @jax.jit
    def at_weights(weights: Any, data: Data) -> dict[str, Array]:
        return scores(probabilities(weights, data[0]), data[1].ravel())

    @jax.jit
    def averaged(weights: Any, state: Any, key: Key[Array, ""], data: Data) -> dict[str, Array]:
        q = posterior(weights, state)

        def add(total: Array, key: Array) -> tuple[Array, None]:
            return total + probabilities(q.sample(key), data[0]), None

        shape = jax.eval_shape(lambda: probabilities(weights, data[0]))
        zero = jnp.zeros(shape.shape, shape.dtype)
        total, _ = jax.lax.scan(add, zero, jax.random.split(key, draws))
        return scores(total / draws, data[1].ravel())

    return at_weights, averaged


def scores(p: Float[Array, "n k"], y: Int[Array, " n"]) -> dict[str, Array]:
    """Every score, and what a reliability diagram needs."""
    found = {name: score(p, y) for name, score in SCORES.items()}
    return found | {"reliability": jnp.stack(calibration.reliability(p, y))}

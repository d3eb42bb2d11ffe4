"""The Gamma factor model ([LSK20] figure 4c): iBLR, BLR with a line search, and BBVI with Adam.

    python benchmarks/gamma_factor.py --data cytonormpy-1.0.2-py3-none-any.whl
    python benchmarks/gamma_factor.py                       # without the genuine data

Rows y_n ~ N(0, W W' + 0.1 I) with loadings W > 0, 39 by 39, each w ~ Ga(shape 1, rate 1) a priori;
q is a product of 1521 Gammas and starts at the prior; 50 draws of W an iteration. Methods:

    iBLR       `iblr.step` with `Rep` and `improved_step`.
    BLR        the same with `line_search_step`: the rule in the natural parameters, its step cut
               for all entries alike where it would leave the set of valid parameters.
    BBVI       `optax.adam` on r and s, where shape = softplus(r) + 0.01 and rate = softplus(s).

All three take the gradient of the expected log likelihood by implicit reparameterisation from the
same number of draws (BBVI by `jax.grad` through the draws of `iblr.Gamma`), and that of the prior
and the entropy in closed form. Data:

    genuine    6000 cells, which stand in for the data of the paper;
    synthetic  of the paper's size; the loss at the known W is printed

(`iblr.reproduce.factor_model` has the model and both),

and each of them

    full       the whole log likelihood, through YY' and N, as the authors' code computes it;
    batch      39 rows an iteration, drawn with replacement, their log likelihood times N / 39: the
               paper speaks of minibatches of 39.

The held-out log loss is -mean log N(y | 0, E_q[W W'] + 0.1 I) over the test rows, with E_q[W W'] in
closed form, where the authors average 2000 draws.

Each method runs at every step size of one grid, the same for all three, for 100 iterations; the one
of the highest training ELBO there (all rows, 100 draws, the same noise for all) goes on to the end
and is reported. The methods take turns, ten iterations at a time, compiled beforehand; seconds are
those of the iterations alone. `gradients` is one `value_and_grad` of the log likelihood at the 50
draws, which no method can do without; `draws by themselves` is 50 draws of W with derivatives, made
at the prior, where they take longest.

Exit status 1 when iBLR does not have the lowest held-out loss after 100 iterations.
"""

import os

# Before NumPy is imported: threads that wait by spinning stall where cores are shared.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from reporting import Report, versions, whole_number

import iblr
from iblr.datasets.cytometry import ADVICE
from iblr.reproduce.factor_model import (
    NUM_TEST,
    NUM_TRAIN,
    D,
    Data,
    Full,
    expected_outer,
    genuine,
    log_loss,
    make_prior,
    of_rows,
    synthetic,
    training_elbo,
)

BATCH = 39
GRID = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
CHECKPOINTS = (10, 20, 50, 100, 200, 300)
VERDICT_AT = 100
CHUNK = 10
PROBLEMS = ("genuine full", "synthetic full", "genuine batch", "synthetic batch")


class Problem(NamedTuple):
    """What the methods see: a target, and the same training data for its ELBO."""

    name: str
    target: Any
    data: Data
    columns: jax.Array  # a root of mean y y' of the training rows

    @property
    def num_rows(self) -> int:
        return len(self.data.rows)


def make_problem(name: str, data: Data) -> Problem:
    columns = jnp.asarray(np.linalg.cholesky(data.train), jnp.float32)
    prior = make_prior()
    if name.endswith("full"):
        count = jnp.asarray(len(data.rows), jnp.float32)
        target = iblr.Target(log_likelihood=Full(columns, count), prior=prior)
    else:
        target = iblr.Target(
            log_likelihood=of_rows,
            data=data.rows,
            batch_size=BATCH,
            replacement=True,
            prior=prior,
        )
    return Problem(name, target, data, columns)


# The three methods. A step goes from state to state, and says whether it was refused or cut.


class Method(NamedTuple):
    start: Callable[[jax.Array], Any]
    step: Callable[[Any, jax.Array, Any], tuple[Any, tuple[jax.Array, jax.Array]]]
    gammas: Callable[[Any], tuple[jax.Array, jax.Array]]


def make_ours(rule: Callable, samples: int) -> Method:
    estimator = iblr.Rep(samples=samples)

    def start(key):
        return iblr.init(make_prior(), key)

    def step(state, t, target):
        state, info = iblr.step(state, target, estimator=estimator, step_size=t, rule=rule)
        return state, (info.refused, info.shrunk < 1)

    def gammas(state):
        return state.family.shape, state.family.rate

    return Method(start, step, gammas)


class AdamState(NamedTuple):
    parameters: tuple[jax.Array, jax.Array]
    moments: Any
    step: jax.Array
    key: jax.Array


SMALLEST_SHAPE = 0.01


def constrain(parameters: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    r, s = parameters
    return jax.nn.softplus(r) + SMALLEST_SHAPE, jax.nn.softplus(s)


def unconstrain(shape: jax.Array, rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.log(jnp.expm1(shape - SMALLEST_SHAPE)), jnp.log(jnp.expm1(rate))


def neg_elbo(
    parameters: tuple[jax.Array, jax.Array], target: Any, key: jax.Array, samples: int
) -> jax.Array:
    """From one key as `Rep` uses it; `iblr.Gamma` draws by implicit reparameterisation."""
    draw_key, batch_key = jax.random.split(key)
    batch, q = target.batch(batch_key), iblr.Gamma(*constrain(parameters))

    def function(W):
        return target.weight * target.log_likelihood(*target.arguments(W, batch))

    return q.kl(target.prior) - jax.vmap(function)(q.sample(draw_key, samples)).mean()


def make_adam(samples: int) -> Method:
    def start(key):
        prior = make_prior()
        parameters = unconstrain(prior.shape, prior.rate)
        moments = optax.adam(1.0).init(parameters)
        return AdamState(parameters, moments, jnp.zeros((), jnp.int32), key)

    def step(state, t, target):
        key = jax.random.fold_in(state.key, state.step)
        gradient = jax.grad(neg_elbo)(state.parameters, target, key, samples)
        updates, moments = optax.adam(t).update(gradient, state.moments)
        new = optax.apply_updates(state.parameters, updates), moments
        # As `iblr.step` does, keep what there is where the gradient is not finite.
        refused = ~jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in gradient]))
        keep = partial(jnp.where, refused)
        kept = jax.tree.map(keep, (state.parameters, state.moments), new)
        return AdamState(*kept, state.step + 1, state.key), (refused, jnp.zeros((), bool))

    return Method(start, step, lambda state: constrain(state.parameters))


@cache
def make_methods(samples: int) -> dict[str, Method]:
    return {
        "iBLR": make_ours(iblr.improved_step, samples),
        "BLR": make_ours(iblr.line_search_step, samples),
        "BBVI": make_adam(samples),
    }


# One run of one method at one step size.


class Record(NamedTuple):
    """What is known after so many iterations."""

    iteration: int
    seconds: float
    loss: float


class Run:
    """A method at one step size: advances by chunks and keeps the held-out loss and the time."""

    def __init__(self, method: Method, t: float, problem: Problem, advance: Callable, key: Any):
        self.method, self.problem, self.step_size, self.advance = method, problem, t, advance
        self.state = method.start(key)
        self.refused = self.cut = 0
        self.records = [Record(0, 0.0, self.loss())]
        self.elbo = -math.inf

    def gammas(self) -> tuple[np.ndarray, np.ndarray]:
        shape, rate = self.method.gammas(self.state)
        return np.asarray(shape, np.float64), np.asarray(rate, np.float64)

    def evaluate(self, key: jax.Array) -> None:
        """The training ELBO; minus infinity where it is not finite."""
        shape, rate = (jnp.asarray(x, jnp.float32) for x in self.gammas())
        count = jnp.asarray(self.problem.num_rows, jnp.float32)
        value = float(training_elbo(shape, rate, self.problem.columns, count, key))
        self.elbo = value if math.isfinite(value) else -math.inf

    def loss(self) -> float:
        return log_loss(expected_outer(*self.gammas()), self.problem.data.test)

    def go_on(self) -> float:
        """Ten iterations; the seconds they took."""
        started = time.perf_counter()
        t = jnp.asarray(self.step_size, jnp.float32)
        state, (refused, cut) = self.advance(self.state, t, self.problem.target)
        self.state = jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        last = self.records[-1]
        self.refused += int(refused.sum())
        self.cut += int(cut.sum())
        self.records.append(
            Record(last.iteration + len(refused), last.seconds + seconds, self.loss())
        )
        return seconds

    def at_iteration(self, iteration: int) -> Record | None:
        return next((record for record in self.records if record.iteration == iteration), None)

    def at_seconds(self, seconds: float) -> Record:
        """The last record that was complete by then."""
        return [record for record in self.records if record.seconds <= seconds][-1]


@cache
def compiled(step: Callable, length: int) -> Callable:
    """`length` steps in one compiled scan; the step size and the target are arguments."""

    def advance(state, t, target):
        return jax.lax.scan(lambda state, _: step(state, t, target), state, length=length)

    return eqx.filter_jit(advance)


# What is contained in every iteration.


def make_parts(problem: Problem, samples: int, length: int) -> dict[str, Callable[[], float]]:
    """Seconds an iteration of the log likelihood's gradients, and of the draws, by name."""
    key, target = jax.random.key(0), problem.target

    def gradients(W, target):
        # The rows of one batch: picking them is not linear algebra.
        batch = target.data if target.data is None else target.data[:BATCH]
        function = lambda W: target.weight * target.log_likelihood(*target.arguments(W, batch))  # noqa: E731

        def body(W, _):
            values, slopes = jax.vmap(jax.value_and_grad(function))(W)
            change = slopes + values[:, None, None]
            return W + 1e-12 * change, None

        return jax.lax.scan(body, W, length=length)[0]

    def draws(shape, _):
        def body(shape, step):
            def total(shape, rate):
                return iblr.Gamma(shape, rate).sample(jax.random.fold_in(key, step), samples).sum()

            value, slopes = jax.value_and_grad(total, argnums=(0, 1))(shape, shape)
            return shape + 1e-12 * (value + sum(slopes)), None

        return jax.lax.scan(body, shape, jnp.arange(length))[0]

    starts = {
        "gradients": (eqx.filter_jit(gradients), jnp.ones((samples, D, D)) + jnp.eye(D)),
        "draws": (eqx.filter_jit(draws), jnp.ones((D, D))),
    }

    def timer(function, start):
        def seconds() -> float:
            started = time.perf_counter()
            jax.block_until_ready(function(start, target))
            return (time.perf_counter() - started) / length

        seconds()  # compiles
        return seconds

    return {name: timer(function, start) for name, (function, start) in starts.items()}


# One problem: the grid, then the best of each method to the end.


class Outcome(NamedTuple):
    """The reported run of each method, all runs of the grid, and seconds an iteration by name."""

    problem: Problem
    best: dict[str, Run]
    grid: dict[str, list[Run]]
    seconds: dict[str, float]


def solve(problem: Problem, options: argparse.Namespace, progress: Callable) -> Outcome:
    key, elbo_key = jax.random.split(jax.random.key(options.seed))
    methods = make_methods(options.samples)
    chunk = math.gcd(CHUNK, options.iterations)
    tuning = min(VERDICT_AT, options.iterations)
    advance = {}
    for name, method in methods.items():
        progress(f"{problem.name}: compiling {name}")
        advance[name] = compiled(method.step, chunk)
        Run(method, options.grid[0], problem, advance[name], key).go_on()
    parts = make_parts(problem, options.samples, chunk)
    laps: dict[str, list[float]] = {name: [] for name in (*methods, *parts)}

    def in_turn(runs: dict[str, Run], until: int) -> None:
        while any(run.records[-1].iteration < until for run in runs.values()):
            for name, run in runs.items():
                laps[name].append(run.go_on() / chunk)
            done = max(run.records[-1].iteration for run in runs.values())
            progress(
                f"{problem.name}: iteration {done} of {until} at "
                + ", ".join(f"{name} {run.step_size:.1e}" for name, run in runs.items())
            )

    grid: dict[str, list[Run]] = {name: [] for name in methods}
    for t in options.grid:
        runs = {
            name: Run(method, t, problem, advance[name], key) for name, method in methods.items()
        }
        in_turn(runs, tuning)
        for name, run in runs.items():
            run.evaluate(elbo_key)
            grid[name].append(run)
        for name, seconds in parts.items():
            laps[name].append(seconds())
    best = {name: max(runs, key=lambda run: run.elbo) for name, runs in grid.items()}
    in_turn(best, options.iterations)
    medians = {name: statistics.median(times) for name, times in laps.items()}
    return Outcome(problem, best, grid, medians)


# The printed report.


def describe(outcome: Outcome, report: Callable) -> None:
    problem, best = outcome.problem, outcome.best
    data = problem.data
    report(f"\n{problem.name}: {problem.num_rows} rows, start {_start_loss(best):.3f} nats a row")
    if data.known_W is not None:
        known = log_loss(data.known_W @ data.known_W.T, data.test)
        report(f"held-out log loss at the known W {known:.3f}")

    report("\n  Training ELBO a row at every step size")
    report("  step      " + " ".join(f"{name:>12}" for name in best))
    for index, run in enumerate(next(iter(outcome.grid.values()))):
        t, cells = run.step_size, []
        for name, runs in outcome.grid.items():
            run = runs[index]
            mark = "*" if run is best[name] else " "
            cells.append(f"{run.elbo:>11.3f}{mark}")
        report(f"  {t:<9.2e} " + " ".join(cells))
    for name, run in best.items():
        report(
            f"  {name}: best at {run.step_size:.2e}, {place(run, outcome.grid[name])}; "
            f"{run.refused} of {run.records[-1].iteration} steps refused, {run.cut} cut"
        )

    report("\n  Held-out log loss by iterations (and seconds)")
    report("  iteration " + " ".join(f"{name:>18}" for name in best))
    last = next(iter(best.values())).records[-1].iteration
    for iteration in sorted({*(c for c in CHECKPOINTS if c <= last), last}):
        found = [run.at_iteration(iteration) for run in best.values()]
        if all(record is not None for record in found):
            cells = [f"{record.loss:>9.3f} ({record.seconds:>5.1f}s)" for record in found]
            report(f"  {iteration:<9} " + " ".join(f"{cell:>18}" for cell in cells))

    report("\n  Held-out log loss by seconds (and iterations)")
    report("  seconds   " + " ".join(f"{name:>18}" for name in best))
    shortest = min(run.records[-1].seconds for run in best.values())
    for seconds in (s * 10**p for p in range(-2, 4) for s in (1, 2, 5)):
        if max(run.records[1].seconds for run in best.values()) <= seconds <= shortest:
            found = [run.at_seconds(seconds) for run in best.values()]
            cells = [f"{record.loss:>9.3f} ({record.iteration:>5})" for record in found]
            report(f"  {seconds:<9g} " + " ".join(f"{cell:>18}" for cell in cells))

    ms = {name: 1e3 * value for name, value in outcome.seconds.items()}
    report("\n  Milliseconds an iteration")
    for name in best:
        report(
            f"  {name:<9} {ms[name]:>8.2f}  gradients {ms['gradients']:.2f} "
            f"({100 * ms['gradients'] / ms[name]:.0f} %), draws by themselves {ms['draws']:.2f}"
        )


def place(run: Run, runs: list[Run]) -> str:
    """Where in the grid the best step size lies."""
    if run is runs[-1] and run.cut == run.records[-1].iteration:
        return "as any larger one, for every step is cut"
    return "at the EDGE of the grid" if run in (runs[0], runs[-1]) else "inside the grid"


def _start_loss(best: dict[str, Run]) -> float:
    return next(iter(best.values())).records[0].loss


def verdict(outcome: Outcome) -> tuple[bool, str]:
    """Whether iBLR is first at 100 iterations, or at the end of a shorter run, and the line."""
    last = min(run.records[-1].iteration for run in outcome.best.values())
    at = min(VERDICT_AT, last)
    losses = {}
    for name, run in outcome.best.items():
        record = run.at_iteration(at)
        loss = math.nan if record is None else record.loss
        losses[name] = loss if math.isfinite(loss) else math.inf
    order = sorted(losses, key=lambda name: losses[name])
    passed = order[0] == "iBLR" and math.isfinite(losses["iBLR"])
    shown = " < ".join(f"{name} {losses[name]:.3f}" for name in order)
    return passed, (
        f"{outcome.problem.name:<16} iBLR first at {at} iterations: {shown} "
        f"{'PASS' if passed else 'FAIL'}"
    )


def show_progress(text: str, started: float) -> None:
    """On one line of a terminal; nothing where errors go to a file."""
    if sys.stderr.isatty():
        line = f"{time.perf_counter() - started:5.0f} s  {text}"
        print(f"\r{line:<100.100}", end="", file=sys.stderr, flush=True)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, but got {text}")
    return value


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="wheel or directory with the genuine data")
    parser.add_argument("--problems", choices=PROBLEMS, nargs="+", default=PROBLEMS)
    parser.add_argument("--iterations", type=whole_number, default=300)
    parser.add_argument("--samples", type=whole_number, default=50, help="draws an iteration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", type=positive, nargs="+", default=GRID, help="step sizes")
    parser.add_argument("--quick", action="store_true", help="a few iterations of few draws")
    parser.add_argument("--out", type=Path, help="write what is printed to this file, too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.iterations, options.samples, options.grid = 4, 5, (1e-4, 1e-2)
    return options


def main() -> int:
    options = parse()
    report, started = Report(), time.perf_counter()
    progress = partial(show_progress, started=started)
    report(versions())
    sizes = (2000, 1000) if options.quick else (NUM_TRAIN, NUM_TEST)
    data: dict[str, Data] = {}
    if any(name.startswith("synthetic") for name in options.problems):
        progress("drawing the synthetic data")
        data["synthetic"] = synthetic(options.seed, *sizes)
    if options.data is not None:
        data["genuine"] = genuine(options.data, options.seed)
    elif any(name.startswith("genuine") for name in options.problems):
        report(f"No `--data`, so nothing genuine is measured. To get it:\n{ADVICE}")
    report(
        f"seed {options.seed}, {options.samples} draws an iteration, step sizes chosen by the "
        f"training ELBO at iteration {min(VERDICT_AT, options.iterations)}"
    )
    lines, failed = [], False
    for name in options.problems:
        if name.split()[0] in data:
            outcome = solve(make_problem(name, data[name.split()[0]]), options, progress)
            progress("")
            describe(outcome, report)
            passed, line = verdict(outcome)
            failed = failed or not passed
        else:
            line = f"{name:<16} iBLR first at {VERDICT_AT} iterations: not measured"
        lines.append(line)
    report("\nVerdicts")
    for line in lines:
        report(line)
    report(f"\n{time.perf_counter() - started:.0f} s in all")
    report.save(options.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

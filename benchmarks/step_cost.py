"""Microseconds a step: ours, the paper's dense form, and Adam on a Cholesky factor.

    python benchmarks/step_cost.py                                  # everything, then the bars
    python benchmarks/step_cost.py --dims 100 1000 --dtypes float32 --rounds 3 --out table.txt

Three programs take one step from q = N(mu, Sigma) towards the same target:

    ours     `iblr.step`: the estimator and `improved_step` on a root A of the covariance, O(M d^2).
    dense    the same estimator and rule as the paper writes them, O(d^3). Stores the precision S;
             S = L L', draws mu + L^-T eps, G by the estimator's formula in the given coordinates,
             S <- (S + U'U) / 2 with U = L' - t L^-1 G, and mu <- mu - t S^-1 g by two triangular
             solves. From the same start and noise it takes our step; this is checked first.
    Adam     `optax.adam` on mu and a lower triangular L with Sigma = L L', stored as a full matrix:
             gradients of the ELBO by autodiff of log p(mu + L eps), the entropy sum log|diag L|.
             Of several ways to write this step the fastest: it holds L' and cuts its gradient to
             the triangle. `E @ jnp.tril(L).T` inside the ELBO gives the same numbers at up to 2.5
             times the time.

The treatment is the same for all: the same target through `jax.grad`, the same noise
(`jax.random.normal`, one key folded with the step index), the same number of gradients a step
(`Stl(pairs=P)` takes 2P, so Adam gets P antithetic pairs), one jitted `lax.scan` of many steps with
the state donated, and no diagnostics. The target is a quadratic with a diagonal-plus-rank-one
precision, so that its gradient is O(d). What the target's gradients and the noise of one step cost
alone has a column each; both are contained in all three steps.

For every (d, estimator, dtype) all programs are compiled and warmed up first, then timed in turn,
round by round. A time is the median over rounds; a ratio is the median of the ratios within rounds.
The dense form runs in three rounds at most where one of its rounds takes longer than a second.
Exit status 1 when a bar is missed, 0 when all are met or not measured.
"""

import os

# Before NumPy and SciPy are imported. OpenBLAS's threads wait by spinning: where cores are shared a
# Cholesky factor of a 1000-by-1000 matrix was seen to take 600 ms, not 10, which would flatter
# us, for nearly all LAPACK time is the dense form's. Set the variable to measure otherwise.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.linalg import solve_triangular
from reporting import Report, versions, whole_number

import iblr

DIMS = (10, 30, 100, 300, 1000, 2000)
DTYPES = ("float32", "float64")
ESTIMATORS = {
    "Rep(1)": iblr.Rep(samples=1),
    "Rep(10)": iblr.Rep(samples=10),
    "Stl(1)": iblr.Stl(pairs=1),
    "Stl(5)": iblr.Stl(pairs=5),
}
ROUND_SECONDS = 0.08
SLOW_ROUND, SLOW_ROUNDS = 1.0, 3
ADAM_STEP_SIZE = 1e-3

Step = Callable[[Any], Any]


# The problem that all three share.


def make_log_density(d: int, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    rng = np.random.default_rng(d)
    diagonal = jnp.asarray(np.exp(rng.uniform(-1.4, 1.4, d)), dtype)
    direction = jnp.asarray(rng.normal(size=d) / math.sqrt(d), dtype)
    centre = jnp.asarray(rng.normal(size=d), dtype)

    def log_density(z):
        r = z - centre
        return -0.5 * (jnp.sum(diagonal * r * r) + jnp.sum(direction * r) ** 2)

    return log_density


def step_size(d: int) -> float:
    """Small enough that no run of any length here comes near to the target or to overflow."""
    return min(1e-3, 0.1 / d)


def draw(key: jax.Array, step: jax.Array, rows: int, d: int, dtype: Any) -> jax.Array:
    """The noise of one step, as the estimators of `iblr` draw it."""
    draw_key, _ = jax.random.split(jax.random.fold_in(key, step))
    return jax.random.normal(draw_key, (rows, d), dtype)


def noise_rows(estimator: Any) -> int:
    return estimator.pairs if isinstance(estimator, iblr.Stl) else estimator.samples


def points(estimator: Any, mean: jax.Array, X: jax.Array) -> jax.Array:
    """Where the gradients are taken: a row of `X` is one draw, or one pair for `Stl`."""
    return jnp.concatenate([mean + X, mean - X]) if isinstance(estimator, iblr.Stl) else mean + X


# The three steps. Each maker returns the first state and a function from state to state.


def make_ours(d: int, estimator: Any, dtype: Any) -> tuple[Any, Step]:
    target = iblr.Target(make_log_density(d, dtype))
    start = iblr.init(iblr.Gaussian.standard(d, dtype=dtype), jax.random.key(0))

    def step(state):
        return iblr.step(state, target, estimator=estimator, step_size=step_size(d))[0]

    return start, step


class DenseState(NamedTuple):
    mean: jax.Array
    precision: jax.Array
    step: jax.Array
    key: jax.Array


def make_dense(d: int, estimator: Any, dtype: Any) -> tuple[DenseState, Step]:
    gradients = jax.vmap(jax.grad(make_log_density(d, dtype)))
    rows, t = noise_rows(estimator), step_size(d)
    start = DenseState(
        jnp.zeros(d, dtype), jnp.eye(d, dtype=dtype), jnp.zeros((), jnp.int32), jax.random.key(0)
    )

    def step(state):
        mean, S = state.mean, state.precision
        E = draw(state.key, state.step, rows, d, dtype).T
        L = jax.lax.linalg.cholesky(S, symmetrize_input=False)
        X = solve_triangular(L, E, lower=True, trans=1)
        W = -gradients(points(estimator, mean, X.T)).T
        LE = L @ E
        if isinstance(estimator, iblr.Stl):
            up, down = W[:, :rows], W[:, rows:]
            g = 0.5 * (up + down).mean(1)
            half = LE @ (0.5 * (up - down) - LE).T / (2 * rows)
            G = -(half + half.T)
        else:
            g = W.mean(1)
            half = LE @ W.T / (2 * rows)
            G = S - (half + half.T)
        U = L.T - t * solve_triangular(L, G, lower=True)
        whitened = solve_triangular(L, g, lower=True)
        mean = mean - t * solve_triangular(L, whitened, lower=True, trans=1)
        return DenseState(mean, 0.5 * (S + U.T @ U), state.step + 1, state.key)

    return start, step


class AdamState(NamedTuple):
    parameters: tuple[jax.Array, jax.Array]
    moments: Any
    step: jax.Array
    key: jax.Array


def make_adam(d: int, estimator: Any, dtype: Any) -> tuple[AdamState, Step]:
    log_density = jax.vmap(make_log_density(d, dtype))
    rows, adam = noise_rows(estimator), optax.adam(ADAM_STEP_SIZE)
    parameters = (jnp.zeros(d, dtype), jnp.eye(d, dtype=dtype))
    start = AdamState(
        parameters, adam.init(parameters), jnp.zeros((), jnp.int32), jax.random.key(0)
    )

    def neg_elbo(parameters, E):
        mean, R = parameters  # R = L'
        z = points(estimator, mean, E @ R)
        return -log_density(z).mean() - jnp.log(jnp.abs(jnp.diagonal(R))).sum()

    def step(state):
        E = draw(state.key, state.step, rows, d, dtype)
        of_mean, of_R = jax.grad(neg_elbo)(state.parameters, E)
        updates, moments = adam.update((of_mean, jnp.triu(of_R)), state.moments)
        parameters = optax.apply_updates(state.parameters, updates)
        return AdamState(parameters, moments, state.step + 1, state.key)

    return start, step


# What is contained in every step.


def make_gradients(d: int, estimator: Any, dtype: Any) -> tuple[jax.Array, Step]:
    gradients = jax.vmap(jax.grad(make_log_density(d, dtype)))
    start = jnp.zeros((num_gradients(estimator), d), dtype)
    return start, lambda z: z + 1e-3 * gradients(z)


def make_noise(d: int, estimator: Any, dtype: Any) -> tuple[Any, Step]:
    rows, key = noise_rows(estimator), jax.random.key(0)
    start = (jnp.zeros((rows, d), dtype), jnp.zeros((), jnp.int32))
    return start, lambda state: (state[0] + draw(key, state[1], rows, d, dtype), state[1] + 1)


MAKERS = {
    "ours": make_ours,
    "dense": make_dense,
    "adam": make_adam,
    "gradients": make_gradients,
    "noise": make_noise,
}


# Timing.


class Program:
    """A compiled scan of `length` steps that carries its state from call to call."""

    def __init__(self, maker: Callable, d: int, estimator: Any, dtype: Any):
        state, step = maker(d, estimator, dtype)
        self.length = int(np.clip(3_000_000 // d**2, 3, 500))
        scan = partial(jax.lax.scan, lambda state, _: (step(state), None), length=self.length)
        # A copy of every leaf: equal constants may share a buffer, which cannot be donated twice.
        self.state = jax.tree.map(jnp.copy, state)
        self.run = jax.jit(lambda state: scan(state)[0], donate_argnums=0)
        self.dtype, self.calls = dtype, 1
        self.seconds_per_step()  # compiles
        self.call_seconds = self.seconds_per_step() * self.length
        self.calls = max(1, round(ROUND_SECONDS / self.call_seconds))

    def seconds_per_step(self) -> float:
        state = jax.block_until_ready(self.state)
        started = time.perf_counter()
        for _ in range(self.calls):
            state = self.run(state)
        self.state = jax.block_until_ready(state)
        return (time.perf_counter() - started) / (self.calls * self.length)

    def check(self, name: str) -> None:
        """The floating leaves are of the precision asked for, and finite."""
        leaves = [x for x in jax.tree.leaves(self.state) if jnp.issubdtype(x.dtype, jnp.floating)]
        wrong = {str(x.dtype) for x in leaves} - {str(jnp.dtype(self.dtype))}
        if wrong or not leaves:
            raise RuntimeError(f"{name} ran in {wrong or 'no'} precision, not in {self.dtype}")
        if not all(bool(jnp.isfinite(x).all()) for x in leaves):
            raise RuntimeError(f"{name} did not stay finite")


class Row(NamedTuple):
    """Medians over rounds: seconds a step by name of the program, and two ratios."""

    seconds: dict[str, float]
    dense_over_ours: float
    ours_over_adam: float


def measure(d: int, estimator: Any, dtype: str, rounds: int) -> Row:
    with jax.enable_x64(dtype == "float64"):
        programs = {name: Program(make, d, estimator, dtype) for name, make in MAKERS.items()}
        laps: dict[str, list[float]] = {name: [] for name in programs}
        for index in range(rounds):
            for name, program in programs.items():
                slow = program.calls * program.call_seconds > SLOW_ROUND
                if not slow or index < SLOW_ROUNDS:
                    laps[name].append(program.seconds_per_step())
        for name, program in programs.items():
            program.check(name)

    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(laps[above], laps[below], strict=False))

    medians = {name: statistics.median(times) for name, times in laps.items()}
    return Row(medians, ratio("dense", "ours"), ratio("ours", "adam"))


def difference_from_dense(d: int, estimator: Any, dtype: str) -> float:
    """Relative difference of covariance and mean after one large step, ours against the dense."""
    with jax.enable_x64(dtype == "float64"):
        root = np.random.default_rng(0).normal(size=(d, d)) / math.sqrt(d)
        precision = jnp.asarray(np.eye(d) + root @ root.T, dtype)
        state, ours = make_ours(d, estimator, dtype)
        family = iblr.Gaussian.from_precision(state.family.mean, precision)
        family = jax.jit(ours)(iblr.init(family, state.key)).family
        state, dense = make_dense(d, estimator, dtype)
        state = jax.jit(dense)(state._replace(precision=precision))
        expected = np.linalg.inv(np.asarray(state.precision, np.float64)), np.asarray(state.mean)
        got = np.asarray(family.covariance), np.asarray(family.mean)
        pairs = zip(got, expected, strict=True)
        return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


# Bars.


class Bar(NamedTuple):
    what: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def missed(self) -> bool:
        if self.value is None:
            return False
        return not (self.value >= self.limit if self.at_least else self.value <= self.limit)

    def line(self) -> str:
        what = f"{self.what:<58} {'>=' if self.at_least else '<='} {self.limit:<5g}"
        if self.value is None:
            return f"{what}          not measured"
        return f"{what} {self.value:8.3f} {'FAIL' if self.missed else 'PASS'}"


def bars(rows: dict[tuple[str, str, int], Row]) -> list[Bar]:
    def of(dtype: str, name: str, d: int, field: str) -> float | None:
        row = rows.get((dtype, name, d))
        return None if row is None else getattr(row, field)

    found = []
    for dtype in DTYPES:
        for name in ("Rep(1)", "Stl(1)"):
            value = of(dtype, name, 1000, "dense_over_ours")
            found.append(Bar(f"{dtype} {name} d=1000: dense / ours", value, 10, at_least=True))
        for d, limit in ((100, 2.5), (1000, 1.2), (2000, 1.2)):
            for name in ESTIMATORS:
                value = of(dtype, name, d, "ours_over_adam")
                found.append(Bar(f"{dtype} {name} d={d}: ours / Adam", value, limit))
        for name in ESTIMATORS:
            ends = [rows.get((dtype, name, d)) for d in (300, 2000)]
            value = None
            if ends[0] is not None and ends[1] is not None:
                growth = ends[1].seconds["ours"] / ends[0].seconds["ours"]
                value = math.log(growth) / math.log(2000 / 300)
            found.append(Bar(f"{dtype} {name} 300 to 2000: growth exponent of ours", value, 2.2))
    return found


# The printed report.

HEADER = (
    f"{'dtype':<8} {'estimator':<9} {'d':>5} {'gradients':>9} |"
    f" {'ours':>9} {'dense':>11} {'Adam':>9} |"
    f" {'gradient':>9} {'noise':>8} | {'dense/ours':>10} {'ours/Adam':>9}"
)


def num_gradients(estimator: Any) -> int:
    return estimator.num_gradients(iblr.Gaussian.standard(1))


def table_line(dtype: str, name: str, d: int, row: Row) -> str:
    us = {key: 1e6 * value for key, value in row.seconds.items()}
    return (
        f"{dtype:<8} {name:<9} {d:>5} {num_gradients(ESTIMATORS[name]):>9} |"
        f" {us['ours']:>9.1f} {us['dense']:>11.1f} {us['adam']:>9.1f} |"
        f" {us['gradients']:>9.2f} {us['noise']:>8.1f} |"
        f" {row.dense_over_ours:>10.2f} {row.ours_over_adam:>9.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=whole_number, nargs="+", default=DIMS)
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--estimators", choices=ESTIMATORS, nargs="+", default=tuple(ESTIMATORS))
    parser.add_argument("--rounds", type=whole_number, default=7)
    parser.add_argument("--out", type=Path, help="write what is printed to this file, too")
    options = parser.parse_args()

    report, started = Report(), time.perf_counter()
    report(versions())
    failed = False
    for dtype in options.dtypes:
        limit = 1e-12 if dtype == "float64" else 1e-4
        for name in options.estimators:
            difference = difference_from_dense(30, ESTIMATORS[name], dtype)
            failed = failed or not difference < limit
            report(
                f"one step, {dtype} {name}, d=30: ours and dense differ by {difference:.1e} "
                f"(< {limit:g}) {'PASS' if difference < limit else 'FAIL'}"
            )
    report("\nMicroseconds a step, median of rounds\n" + HEADER)
    rows: dict[tuple[str, str, int], Row] = {}
    for dtype in options.dtypes:
        for name in options.estimators:
            for d in options.dims:
                row = measure(d, ESTIMATORS[name], dtype, options.rounds)
                rows[dtype, name, d] = row
                report(table_line(dtype, name, d, row))
    report("\nBars")
    for bar in bars(rows):
        report(bar.line())
        failed = failed or bar.missed
    report(f"\n{time.perf_counter() - started:.0f} s in all")
    report.save(options.out)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

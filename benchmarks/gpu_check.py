"""Size and speed on an accelerator: milliseconds a step of the full Gaussian in float32.

    python benchmarks/gpu_check.py                          # d = 10 000, 30 000, 100 000 on a GPU
    python benchmarks/gpu_check.py --dims 100 300           # anywhere, also on a CPU

Runs on `jax.devices()[0]`. First one step in float32 is compared with the paper's dense update in
float64 NumPy, from the same start and noise. Then every size runs `--steps` steps of `iblr.step`
as one jitted `lax.scan` whose state is donated, so that the factor (40 GB at d = 100 000) is
updated in place where XLA can. Columns:

    ms/step    median of three timed runs, after one that compiles and warms up
    passes     ms/step * bandwidth / (4 d^2 bytes): how often a step goes over the factor, a read or
               a write counting as one pass, at the bandwidth of a large scaled copy (read + write)
    planned    what XLA reserves for the program: arguments, results and temporaries, in factors
    peak       the most memory in use since the process started, where the device tells; sizes run
               from small to large, so that the value belongs to the size of its row

Exit status 1 when the step is wrong or a size does not fit.
"""

import os

# Before jax is imported: the default of 0.75 leaves no room for three factors of 40 GB in 139 GiB.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
# For the reference in NumPy: threads that wait by spinning stall where cores are shared.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import gc
import math
import platform
import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from reporting import whole_number

import iblr

ACCELERATOR_DIMS, CPU_DIMS = (10_000, 30_000, 100_000), (300, 1000)
ESTIMATORS = {"Stl(1)": iblr.Stl(pairs=1), "Rep(1)": iblr.Rep(samples=1)}
REPEATS = 3
CHECK_DIM, CHECK_STEP_SIZE, CHECK_LIMIT = 300, 0.1, 1e-4
COPY_BYTES = 2**32


def quadratic(d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Diagonal, direction and centre of a target whose gradient is O(d)."""
    rng = np.random.default_rng(d)
    return np.exp(rng.uniform(-1.4, 1.4, d)), rng.normal(size=d) / math.sqrt(d), rng.normal(size=d)


def make_target(d: int) -> iblr.Target:
    diagonal, direction, centre = (jnp.asarray(x, jnp.float32) for x in quadratic(d))

    def log_density(z):
        r = z - centre
        return -0.5 * (jnp.sum(diagonal * r * r) + jnp.sum(direction * r) ** 2)

    return iblr.Target(log_density)


# Is it right?


def dense_step(
    estimator: Any, mean: np.ndarray, root: np.ndarray, E: np.ndarray, t: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance after one step in float64: S <- S - tG + (t^2/2) G S^-1 G."""
    diagonal, direction, centre = (x.astype(np.float32).astype(float) for x in quadratic(len(mean)))

    def gradients(z):
        r = z - centre
        return diagonal * r + (r @ direction)[:, None] * direction

    covariance = root.T @ root
    S = np.linalg.inv(covariance)
    X = E @ root
    SX = X @ S
    if isinstance(estimator, iblr.Stl):
        up, down = gradients(mean + X), gradients(mean - X)
        g, half = 0.5 * (up + down).mean(0), SX.T @ (0.5 * (up - down) - SX) / (2 * len(E))
        G = -(half + half.T)
    else:
        W = gradients(mean + X)
        g, half = W.mean(0), SX.T @ W / (2 * len(E))
        G = S - (half + half.T)
    after = S - t * G + 0.5 * t * t * G @ covariance @ G
    return mean - t * covariance @ g, np.linalg.inv(after)


def step_error(estimator: Any, rows: int, d: int, t: float) -> tuple[float, float]:
    """Relative errors of mean and covariance (Frobenius) of one float32 step on the device."""
    rng = np.random.default_rng(0)
    scatter = rng.normal(size=(d, d)) / math.sqrt(d)
    covariance = 0.5 * np.eye(d) + scatter @ scatter.T
    root = jnp.asarray(np.linalg.cholesky(covariance).T, jnp.float32)
    mean = jnp.asarray(rng.normal(size=d), jnp.float32)
    log_det = jnp.asarray(np.linalg.slogdet(covariance)[1], jnp.float32)
    structure = iblr.Gaussian.standard(d).structure
    start = iblr.Gaussian(mean=mean, factor=root, log_det=log_det, structure=structure)
    state, target = iblr.init(start, jax.random.key(1)), make_target(d)
    E = jax.random.normal(  # as the estimator draws it
        jax.random.split(jax.random.fold_in(state.key, state.step))[0], (rows, d), jnp.float32
    )
    step = partial(iblr.step, target=target, estimator=estimator, step_size=t)
    family = jax.jit(lambda state: step(state)[0].family)(state)
    got_root = np.asarray(family.factor, float)
    got = np.asarray(family.mean, float), got_root.T @ got_root
    expected = dense_step(estimator, *(np.asarray(x, float) for x in (mean, root, E)), t)
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, expected, strict=True)
    ]
    return errors[0], errors[1]


def check_steps() -> bool:
    """Print the errors; whether all are small enough."""
    fine = True
    for name, estimator, rows in (
        ("Stl(1)", iblr.Stl(pairs=1), 1),
        ("Stl(8)", iblr.Stl(pairs=8), 8),
        ("Rep(1)", iblr.Rep(samples=1), 1),
        ("Rep(10)", iblr.Rep(samples=10), 10),
    ):
        mean, covariance = step_error(estimator, rows, CHECK_DIM, CHECK_STEP_SIZE)
        passed = covariance < CHECK_LIMIT
        fine = fine and passed
        line = (
            f"one step, {name}, d={CHECK_DIM}, t={CHECK_STEP_SIZE}: relative error of the mean "
            f"{mean:.1e}, of the covariance {covariance:.1e} (< {CHECK_LIMIT:g}) "
            f"{'PASS' if passed else 'FAIL'}"
        )
        if jax.devices()[0].platform != "cpu":  # which may multiply float32 in fewer bits
            with jax.default_matmul_precision("highest"):
                _, best = step_error(estimator, rows, CHECK_DIM, CHECK_STEP_SIZE)
            line += f", at the highest matmul precision {best:.1e}"
        print(line, flush=True)
    return fine


# How fast, and how much memory?


class Measured(NamedTuple):
    d: int
    name: str
    seconds: float
    planned: float | None
    peak: int | None


def peak_bytes() -> int | None:
    """The most bytes in use since the start, or None where the device does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def planned_factors(compiled: Any, d: int) -> float | None:
    """Arguments, results and temporaries of a compiled program, in bytes of one factor."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    arguments, results = analysis.argument_size_in_bytes, analysis.output_size_in_bytes
    shared = analysis.alias_size_in_bytes
    return (arguments + results - shared + analysis.temp_size_in_bytes) / (4 * d * d)


def measure(d: int, name: str, steps: int) -> Measured:
    target, t = make_target(d), min(1e-3, 0.1 / d)
    step = partial(iblr.step, target=target, estimator=ESTIMATORS[name], step_size=t)

    def run(state):
        return jax.lax.scan(lambda state, _: (step(state)[0], None), state, length=steps)[0]

    # One program makes the start: outside of `jit`, `jnp.eye` holds its indices as arrays, too.
    start = jax.jit(lambda: iblr.init(iblr.Gaussian.standard(d), jax.random.key(0)))
    compiled = jax.jit(run, donate_argnums=0).lower(jax.eval_shape(start)).compile()
    state = jax.block_until_ready(compiled(start()))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        state = jax.block_until_ready(compiled(state))
        times.append((time.perf_counter() - started) / steps)
    family = state.family
    if family.factor.dtype != jnp.float32 or not bool(jnp.isfinite(family.log_det)):
        raise RuntimeError(f"{name} at d={d} did not stay finite in float32")
    return Measured(d, name, statistics.median(times), planned_factors(compiled, d), peak_bytes())


def bandwidth(largest: int) -> float:
    """Bytes read and written a second by a scaled copy of a large array."""
    size = min(COPY_BYTES, max(2**24, 4 * largest**2)) // 4
    copy = jax.jit(lambda x: 1.0001 * x)
    x = jax.block_until_ready(copy(jnp.ones(size, jnp.float32)))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        y = x
        for _ in range(10):
            y = copy(y)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - started) / 10)
    return 2 * 4 * size / statistics.median(times)


def table_line(row: Measured, bytes_per_second: float) -> str:
    passes = row.seconds * bytes_per_second / (4 * row.d**2)
    planned = "not told" if row.planned is None else f"{row.planned:.2f} A"
    peak = "not told" if row.peak is None else f"{row.peak / 1e9:.2f} GB"
    factor = 4e-9 * row.d**2
    return (
        f"{row.d:>7} {row.name:<9} {factor:>9.3f} GB | {1e3 * row.seconds:>10.3f} {passes:>8.1f} |"
        f" {planned:>9} {peak:>10}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dims", type=whole_number, nargs="+", help="default: as above, 300 and 1000 on a CPU"
    )
    parser.add_argument("--steps", type=whole_number, default=20, help="steps in one timed run")
    options = parser.parse_args()

    device = jax.devices()[0]
    modules = {"jax": jax, "jaxlib": jaxlib, "equinox": eqx, "iblr": iblr}
    names = ", ".join(f"{name} {module.__version__}" for name, module in modules.items())
    print(f"Python {platform.python_version()}, {names}\non {device.device_kind}", flush=True)
    dims = options.dims or (CPU_DIMS if device.platform == "cpu" else ACCELERATOR_DIMS)
    fine = check_steps()
    rows, failures = [], []
    for d in sorted(dims):
        for name in ESTIMATORS:
            try:
                rows.append(measure(d, name, options.steps))
                print(f"d={d} {name}: {1e3 * rows[-1].seconds:.3f} ms/step", flush=True)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
                    raise
                failures.append(f"d={d} {name}: out of memory ({str(error).splitlines()[0]})")
                print(failures[-1], flush=True)
            gc.collect()
    speed = bandwidth(max(dims))
    print(f"\nbandwidth of a scaled copy, read + write: {speed / 1e9:.0f} GB/s\n")
    print(
        f"{'d':>7} {'estimator':<9} {'factor A':>12} | {'ms/step':>10} {'passes':>8} |"
        f" {'planned':>9} {'peak':>10}"
    )
    print("\n".join([table_line(row, speed) for row in rows] + failures))
    return int(not fine or bool(failures))


if __name__ == "__main__":
    sys.exit(main())

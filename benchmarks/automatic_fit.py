"""Does `iblr.fit` without settings keep what it promises?

    python benchmarks/automatic_fit.py [robustness] [verdicts] [stopping] [compilation] [--seeds 5]
                                       [--path CHECKOUT] [--runs 200] [--out FILE]

robustness   the same call from bad starts, at bad scales and conditions, with half of the space nan
             and with minibatches: the worst of all seeds, in nats below the best Gaussian
verdicts     what it says of targets that a Gaussian fits badly, and of those it fits well, three of
             posteriordb among them where `--path` names a checkout
stopping     how often the true gap is below `gap_bound` when a fit stops, over 200 runs; two of
             the targets are in the plane, one of light tails and one that is skew
compilation  seconds of the first fit less those of the second, in a process of its own, and how
             many programs the second one compiled

Every part is judged; the exit status is 1 where a bar is missed. The breast cancer data come with
scikit-learn; without it the rows that need it are left out.
"""

import argparse
import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gaussian_targets
import jax
import jax.numpy as jnp
import numpy as np
from gaussian_targets import ERRORS, SCORES, Problem
from posteriordb_models import Checkout, path_argument
from reporting import Report, versions, whole_number

import iblr

PARTS = ("robustness", "verdicts", "stopping", "compilation")
MINIBATCH = 32
LARGEST_GAP, LEAST_SHARE, LONGEST = 0.1, 0.9, 3.0  # nats, of runs, seconds
POSTERIORS = ("arK-arK", "kidiq-kidscore_momhsiq", "mesquite-logmesquite")


@dataclasses.dataclass(frozen=True)
class Trial:
    """A call of `fit`, and the gap of what it returns."""

    name: str
    target: Any
    start: Callable[[], iblr.Gaussian]
    gap: Callable[[iblr.Gaussian], float]
    float64: bool = False


def around(mean, scale=1.0) -> iblr.Gaussian:
    mean = np.asarray(mean)
    return iblr.Gaussian.from_covariance(jnp.asarray(mean), scale**2 * np.eye(len(mean)))


def rescaled(problem: Problem, decades: float) -> Trial:
    """The same target in coordinates whose scales span so many powers of ten."""
    scales = 10 ** np.linspace(-decades / 2, decades / 2, problem.dim)

    def log_density(z):
        return problem.log_density(jnp.asarray(scales, z.dtype) * z)

    def gap(q):
        factor = np.asarray(q.factor, float) * scales
        mean = np.asarray(q.mean, float) * scales
        return problem.gap(dataclasses.replace(q, mean=mean, factor=factor))

    name = f"scales over {decades:.0f} decades"
    return Trial(name, log_density, lambda: iblr.Gaussian.standard(problem.dim), gap)


def ill_conditioned(dim: int, decades: int) -> Trial:
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    precision = (basis * np.logspace(-decades / 2, decades / 2, dim)) @ basis.T
    problem = gaussian_targets.gaussian("", rng.normal(size=dim), precision)
    name = f"condition 1e{decades}"
    return Trial(name, problem.log_density, lambda: iblr.Gaussian.standard(dim), problem.gap)


def half_of_nan(problem: Problem, best: iblr.Gaussian) -> Trial:
    """nan from six standard deviations on, in the direction of the first coordinate."""
    edge = float(best.mean[0] + 6 * best.standard_deviations[0])

    def log_density(z):
        return jnp.where(z[0] > edge, jnp.nan, problem.log_density(z))

    start = lambda: iblr.Gaussian.standard(problem.dim)  # noqa: E731
    return Trial("nan beyond 6 sd", log_density, start, problem.gap)


def minibatches(problem: Problem) -> Trial:
    from sklearn import datasets

    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = gaussian_targets.with_intercept(gaussian_targets.standardised(x))
    rows = jnp.asarray(x * (2 * y - 1)[:, None], jnp.float32)
    target = iblr.Target(
        log_likelihood=lambda w, rows: jax.nn.log_sigmoid(rows @ w).sum(),
        data=rows,
        batch_size=MINIBATCH,
        prior=lambda w: -0.5 * w @ w,
    )
    start = lambda: iblr.Gaussian.standard(problem.dim)  # noqa: E731
    return Trial(f"minibatches of {MINIBATCH}", target, start, problem.gap)


def trials(problem: Problem) -> list[Trial]:
    """All that apply to it."""
    is_gaussian = problem.best is not None
    density, dim = problem.log_density, problem.dim
    best = iblr.fit(density, init=jnp.zeros(dim), key=jax.random.key(0)).family
    rng = np.random.default_rng(2)
    direction = rng.normal(size=dim)
    far = np.asarray(best.mean) + 1000 * (direction / np.linalg.norm(direction)) @ best.factor
    found = [
        Trial("plain", density, lambda: around(np.zeros(dim)), problem.gap),
        Trial("1000 sd away", density, lambda: around(far), problem.gap),
        Trial("scale 1e4 too large", density, lambda: around(np.zeros(dim), 1e4), problem.gap),
        Trial("scale 1e4 too small", density, lambda: around(np.zeros(dim), 1e-4), problem.gap),
        half_of_nan(problem, best),
    ]
    if is_gaussian:
        hard = [ill_conditioned(dim, 6), ill_conditioned(dim, 12)]
    else:
        hard = [rescaled(problem, 3.0), rescaled(problem, 6.0), minibatches(problem)]
    hard[1] = dataclasses.replace(hard[1], float64=True)
    return found + hard


def judged(report: Report, what: str, holds: bool) -> bool:
    """Print whether a bar holds."""
    report(f"    {what}: {'PASS' if holds else 'FAIL'}")
    return holds


def robustness(report: Report, seeds: int) -> bool:
    names = ("Gaussian, d = 100", "breast cancer")
    columns = ("worst gap", "at most", "gradients", "all", "seconds")
    head = " " * 31 + " ".join(f"{column:>9s}" for column in columns)
    worst, ends = 0.0, set()
    for problem in (p for p in gaussian_targets.problems() if p.name in names):
        report(f"\n{problem.name}: nats below the best Gaussian at the stop, of {seeds} seeds")
        report(f"{head}  ended by")
        for trial in trials(problem):
            with jax.enable_x64(trial.float64):
                runs = [attempt(trial, seed) for seed in range(seeds)]
            gaps, fits, seconds = zip(*runs, strict=True)
            report(
                f"{trial.name + (' (float64)' if trial.float64 else ''):31s}{np.max(gaps):9.4f} "
                f"{np.max([p.gap_bound for p in fits]):9.4f} "
                f"{max(p.trace.num_gradients[-1] for p in fits):9d} "
                f"{max(p.num_gradients for p in fits):9d} {np.median(seconds):9.1f}  "
                f"{', '.join(sorted({p.stopped_by for p in fits}))}"
            )
            worst, ends = np.max([worst, *gaps]), ends | {p.stopped_by for p in fits}
    holds = worst <= LARGEST_GAP and ends <= {"tol", "max_gradients"}
    return judged(report, f"all end, by `tol` or their budget, within {LARGEST_GAP} nats", holds)


def attempt(trial: Trial, seed: int) -> tuple[float, iblr.Posterior, float]:
    begun = time.perf_counter()
    posterior = iblr.fit(trial.target, trial.start(), key=jax.random.key(seed), throw=False)
    return trial.gap(posterior.family), posterior, time.perf_counter() - begun


def two_modes(distance: float, dim: int) -> Callable:
    centre = np.zeros(dim)
    centre[0] = distance / 2

    def log_density(z):
        c = jnp.asarray(centre, z.dtype)
        return jnp.logaddexp(-0.5 * jnp.sum((z - c) ** 2), -0.5 * jnp.sum((z + c) ** 2))

    return log_density


def schools_centred(z):
    scores, errors = (jnp.asarray(x, z.dtype) for x in (SCORES, ERRORS))
    theta, mu, log_tau = z[:8], z[8], z[9]
    tau = jnp.exp(log_tau)
    likelihood = -0.5 * jnp.sum(((scores - theta) / errors) ** 2)
    prior = -0.5 * jnp.sum(((theta - mu) / tau) ** 2) - 8 * log_tau - 0.5 * (mu / 5) ** 2
    return likelihood + prior - jnp.log1p((tau / 5) ** 2) + log_tau


def linear(x, y):
    """A linear regression with a flat prior; the last coordinate is the log of its scale."""

    def log_density(z):
        weights, log_sigma = z[:-1], z[-1]
        errors = jnp.asarray(y, z.dtype) - jnp.asarray(x, z.dtype) @ weights
        scale = -len(y) * log_sigma - 0.5 * jnp.exp(-2 * log_sigma) * errors @ errors
        return scale + log_sigma - jnp.log1p((jnp.exp(log_sigma) / 2.5) ** 2)

    return log_density


BAD = {
    "eight schools, centred": (schools_centred, 10),
    "funnel, d = 10": (
        lambda z: -(z[0] ** 2) / 18 - 0.5 * jnp.sum(z[1:] ** 2) * jnp.exp(-z[0]) - 4.5 * z[0],
        10,
    ),
    "banana, b = 0.1": (lambda z: -(z[0] ** 2) / 200 - 0.5 * (z[1] + 0.1 * z[0] ** 2 - 10) ** 2, 2),
    "two modes at 4, d = 1": (two_modes(4, 1), 1),
    "two modes at 4, d = 2": (two_modes(4, 2), 2),
    "two modes at 16, d = 1": (two_modes(16, 1), 1),
    "two modes at 16, d = 2": (two_modes(16, 2), 2),
    "two modes at 16, d = 10": (two_modes(16, 10), 10),
    "Cauchy, product, d = 5": (lambda z: -jnp.log1p(z**2).sum(), 5),
    "Cauchy, d = 5": (lambda z: -3 * jnp.log1p((z**2).sum()), 5),
    "improper: flat": (lambda z: -0.5 * z[0] ** 2 + 0 * z[1], 2),
    "improper: exp(z)": (lambda z: z.sum(), 3),
    "improper: 1 / (1 + z^2)^(1/2)": (lambda z: -0.5 * jnp.log1p((z**2).sum()), 2),
}


def good_targets(path: Path | None) -> dict:
    names = ("breast cancer", "diabetes", "Gaussian, d = 100")
    found = {p.name: (p.log_density, p.dim) for p in gaussian_targets.problems() if p.name in names}
    models = [Checkout(path).model(name) for name in POSTERIORS] if path else []
    found |= {model.name: (model.flat, model.start) for model in models}
    rng = np.random.default_rng(3)
    x = np.concatenate([np.ones((60, 1)), rng.normal(size=(60, 3))], axis=1)
    y = x @ [1.0, 2.0, 0.0, -1.0] + 0.5 * rng.normal(size=60)
    return found | {"linear regression, n = 60": (linear(x, y), 5)}


def verdicts(report: Report, seeds: int, path: Path | None) -> bool:
    wrong = {}
    sides = (("Must not be Good", BAD, "Good"), ("Must be Good or Fair", good_targets(path), "Bad"))
    for title, targets, forbidden in sides:
        report(f"\n{title}: the verdicts of {seeds} seeds, and the last one in words")
        wrong[forbidden] = 0
        for name, (log_density, start) in targets.items():
            init = jnp.zeros(start) if isinstance(start, int) else start
            said = []
            for seed in range(seeds):
                posterior = iblr.fit(log_density, init=init, key=jax.random.key(seed), throw=False)
                said.append(posterior.verdict)
            count = {
                grade: sum(s.startswith(grade) for s in said) for grade in ("Good", "Fair", "Bad")
            }
            shown = " ".join(f"{grade} {n}" for grade, n in count.items())
            report(f"{name:30s} {shown:22s} {said[-1][:150]}")
            wrong[forbidden] += count[forbidden]
    first = judged(report, "no bad fit is called Good", wrong["Good"] == 0)
    return judged(report, "at most one good fit is called Bad", wrong["Bad"] <= 1) and first


def stopping(report: Report, runs: int) -> bool:
    problems = [p for p in gaussian_targets.problems() if p.dim <= 100]
    problems += [gaussian_targets.quartic(2), gaussian_targets.log_exponential(2)]
    each = math.ceil(runs / len(problems))
    report(f"\nTrue gaps at the stop, {each} runs a target, `tol` 0.1 and 0.01 in turn")
    report(f"{'':28s} {'below gap_bound':>16s} {'median of true / estimated':>27s}")
    below = total = 0
    for problem in problems:
        inside, ratios = 0, []
        for seed in range(each):
            posterior = iblr.fit(
                problem.log_density,
                init=jnp.zeros(problem.dim),
                key=jax.random.key(1000 + seed),
                tol=(0.1, 0.01)[seed % 2],
            )
            gap = problem.gap(posterior.family)
            inside += gap <= posterior.gap_bound
            ratios.append(gap / max(posterior.gap_estimate, 1e-12))
        report(f"{problem.name:28s} {inside:12d}/{each} {np.median(ratios):27.2f}")
        below, total = below + inside, total + each
    report(f"{'all':28s} {below:12d}/{total} = {100 * below / total:.1f} %")
    return judged(report, f"at least {LEAST_SHARE:.0%}", below >= LEAST_SHARE * total)


COMPILATION = """
import time, jax, jax.numpy as jnp, numpy as np, iblr
begun = time.perf_counter()
import arviz_stats.base.array  # imported by the first verdict: no compilation, so apart
imported = time.perf_counter() - begun
rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(500, 30)), jnp.float32)
y = jnp.asarray(rng.integers(0, 2, 500) * 2 - 1, jnp.float32)
target = lambda w: jax.nn.log_sigmoid(y * (x @ w)).sum() - 0.5 * w @ w
programs = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: programs.append(seconds) if "backend_compile" in event else None)
init, keys, times, counts = jnp.zeros(30), [jax.random.key(0), jax.random.key(1)], [], []
for key in keys:
    begun, before = time.perf_counter(), len(programs)
    iblr.fit(target, init=init, key=key)
    times.append(time.perf_counter() - begun)
    counts.append(len(programs) - before)
print(f"first fit {times[0]:.2f} s, second {times[1]:.2f} s, so {times[0] - times[1]:.2f} s to "
      f"compile {counts[0]} programs; the second fit compiled {counts[1]}. The import of ArviZ and "
      f"SciPy's statistics took {imported:.2f} s before")
print(times[0] - times[1], counts[1])
"""


def compilation(report: Report, seeds: int) -> bool:
    report("\nLogistic regression, d = 30, in a process of its own")
    longest = again = 0.0
    for _ in range(min(seeds, 3)):
        done = subprocess.run(
            [sys.executable, "-c", COMPILATION], capture_output=True, text=True, check=True
        )
        sentence, numbers = done.stdout.strip().split("\n")
        report(sentence)
        took, programs = (float(number) for number in numbers.split())
        longest, again = max(longest, took), max(again, programs)
    holds = longest <= LONGEST and again == 0
    return judged(report, f"at most {LONGEST:g} s, and nothing twice", holds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--seeds", type=whole_number, default=5)
    parser.add_argument("--runs", type=whole_number, default=200, help="of the part on stopping")
    parser.add_argument("--out", type=Path, help="a file to write what is printed to")
    path_argument(parser)
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report, seeds = Report(), arguments.seeds
    report(versions())
    parts = {
        "robustness": lambda: robustness(report, seeds),
        "verdicts": lambda: verdicts(report, seeds, arguments.path),
        "stopping": lambda: stopping(report, arguments.runs),
        "compilation": lambda: compilation(report, seeds),
    }
    holds = []
    for part in arguments.parts or PARTS:
        holds.append(parts[part]())
        report.save(arguments.out)
    sys.exit(not all(holds))


if __name__ == "__main__":
    main()

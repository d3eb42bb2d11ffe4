"""Figure 4a: a full Gaussian for a linear regression, where the exact posterior is known."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import iblr
from iblr import baselines
from iblr.reproduce.logistic import round_gaussian
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Plan, Problem
from iblr.reproduce.pictures import Axis, Claim, Curve, Curves, Section, Table
from iblr.reproduce.runner import Experiment
from iblr.reproduce.runs import Run
from iblr.reproduce.trajectory import at_step, moments
from iblr.reproduce.wording import confirmed, count, number, spread, verdict

NOISE_VARIANCE = 162.9751
PRIOR_PRECISION = 0.0046
NUM_TRAIN = 3341
BATCH = 168
SEEDS = 7
LATER = (100, 1000, 10_000, 100_000)
DEAD = 1e6  # nats; the start is at 1e4

METHODS = (
    Method("iBLR-rep", iblr.Rep(1), iblr.improved_step, 1e-4),
    Method("BLR-rep", iblr.Rep(1), baselines.blr_step, 4e-5),
    Method("BLR-rep, half the step", iblr.Rep(1), baselines.blr_step, 2e-5),
    Method("BBVI-rep", iblr.Rep(1), baselines.Bbvi(), 0.01),
    Method("VOGN", baselines.Vogn(1), iblr.natural_gradient_step, 2e-4),
    Method("iBLR at our defaults"),
    Method("iBLR, Stl and a trust region", trust_region=True),
)
PUBLISHED = {  # L - L* read off the authors' picture; at 1e5 the middle of a noisy curve
    "iBLR-rep": {3: 3e4, 100: 5e2, 1000: 35.0, 10_000: 8.0, 100_000: 0.03},
    "BLR-rep": {100: 2e3, 1000: 80.0, 10_000: 20.0, 100_000: 0.05},
    "BBVI-rep": {100: 8e3, 1000: 1.5e3, 10_000: 150.0, 100_000: 3.0},
    "VOGN": {100: 500.0, 1000: 130.0, 10_000: 40.0, 100_000: 40.0},
}


def log_likelihood(w: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
    """N(y | x'w, 162.9751), the sum over rows."""
    residuals = rows[1] - rows[0] @ w
    constant = len(residuals) * jnp.log(2 * jnp.pi * NOISE_VARIANCE)
    return -0.5 * (residuals @ residuals / NOISE_VARIANCE + constant)


class Posterior(NamedTuple):
    """The exact posterior in double precision, and its negative ELBO L*."""

    mean: np.ndarray
    precision: np.ndarray
    loss: float

    def gaps(self, family) -> np.ndarray:
        """L - L* = KL(q || posterior) of every member of a stack."""
        log_det = np.linalg.slogdet(self.precision)[1]
        gaps = []
        for mean, covariance in zip(*moments(family), strict=True):
            apart = mean - self.mean
            square = np.trace(self.precision @ covariance) + apart @ self.precision @ apart
            gaps.append(0.5 * (square - len(mean) - np.linalg.slogdet(covariance)[1] - log_det))
        return np.array(gaps)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Training rows with a bias, and the number of rings."""
    table = iblr.datasets.abalone(scaled=True)
    picked = np.random.default_rng(0).permutation(len(table.y))[:NUM_TRAIN]
    return np.column_stack([np.ones(NUM_TRAIN), table.x[picked]]), table.y[picked]


def exact() -> Posterior:
    """Of the training rows."""
    x, y = data()
    precision = PRIOR_PRECISION * np.eye(x.shape[1]) + x.T @ x / NOISE_VARIANCE
    mean = np.linalg.solve(precision, x.T @ y) / NOISE_VARIANCE
    square = y @ y / NOISE_VARIANCE - mean @ precision @ mean
    log_dets = np.linalg.slogdet(precision)[1] - x.shape[1] * np.log(PRIOR_PRECISION)
    constant = len(y) * np.log(2 * np.pi * NOISE_VARIANCE)
    return Posterior(mean, precision, 0.5 * (square + log_dets + constant))


def problem() -> Problem:
    """Minibatches without replacement, from the prior."""
    x, y = data()
    prior = round_gaussian(np.zeros(x.shape[1]), 1 / PRIOR_PRECISION)
    target = iblr.Target(
        log_likelihood=log_likelihood,
        data=(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)),
        batch_size=BATCH,
        prior=prior,
    )
    posterior = exact()
    return Problem(target, lambda key: prior, lambda q: {"gap": posterior.gaps(q)}, "gap")


def tasks(plan: Plan) -> list[Run]:
    """One a method."""
    seeds = plan.pick(plan.seeds, max(SEEDS, plan.seeds))
    checkpoints = Checkpoints.spread(plan.pick(10_000, 100_000))
    return [
        Run(
            method.name,
            method,
            lambda: (problem(),),
            seeds,
            checkpoints,
            effort=plan.pick(6.0, 60.0),
            limit=plan.limit,
        )
        for method in METHODS
    ]


def section(plan: Plan, raw: dict[str, Arrays]) -> Section:
    """Curves of L - L* on the paper's axes."""
    curves = [_curve(name, arrays) for name, arrays in raw.items()]
    for name, points in PUBLISHED.items():
        x, y = np.array(list(points), float), np.array(list(points.values()))
        curves.append(Curve(f"{name}, published", x, y, published=True))
    gap = {
        name: {
            step: _alive(at_step(arrays, "gap", step), step <= arrays["step"][-1]) for step in LATER
        }
        for name, arrays in raw.items()
    }
    middle = {
        name: {step: np.median(v) for step, v in values.items()} for name, values in gap.items()
    }
    rows = [(name, *(spread(v) for v in values.values())) for name, values in gap.items()]
    table = Table("L - L* in nats", ("method", *(count(step) for step in LATER)), tuple(rows))
    picture = Curves(
        "Negative ELBO less that of the exact posterior",
        Axis("iterations", log=True, range=(1.0, 1e5)),
        Axis("L - L*", log=True, range=(1e-4, 1e6)),
        tuple(curves),
        "Lines: the median of the seeds, thin ones the seeds. Open points: read off the published "
        "picture.",
    )
    return Section(tuple(_claims(middle, gap)), (picture,), (table,), _settings(), NOTES)


def _claims(middle: dict, gap: dict) -> list[Claim]:
    ours = middle["iBLR-rep"]
    claims = []
    for step in LATER[:3]:
        published = PUBLISHED["iBLR-rep"][step]
        close = bool(published / 3 <= ours[step] <= 3 * published)
        seeds = len(gap["iBLR-rep"][step])
        claims.append(
            Claim(
                f"The median L - L* of iBLR at {count(step)} iterations is within a factor of 3 "
                "of the published one",
                spread(gap["iBLR-rep"][step]),
                number(published),
                None if np.isnan(ours[step]) else confirmed(close, seeds >= SEEDS),
                "Smaller is better; a seed with bad first iterations comes much later.",
            )
        )
    claims.append(
        Claim(
            "iBLR's L - L* is at most 0.1 at 1e5 iterations",
            spread(gap["iBLR-rep"][100_000]),
            "0.01 to 0.1",
            verdict(ours[100_000] <= 0.1, ours[100_000]),
        )
    )
    reached = [step for step in LATER if np.isfinite(ours[step])]
    last = reached[-1] if reached else LATER[0]
    late = [step for step in reached if step >= 1000]
    for other in ("BLR-rep", "BBVI-rep"):
        shown = [name for name in middle if name.startswith(other)]
        faster = all(ours[step] < min(middle[name][step] for name in shown) for step in late)
        claims.append(
            Claim(
                f"iBLR is ahead of {other} from 1e3 iterations on",
                f"at {count(last)}: {number(ours[last])} against "
                + " and ".join(f"{number(middle[name][last])} ({name})" for name in shown),
                "35 against " + ("80" if other == "BLR-rep" else "1500") + " at 1e3",
                confirmed(faster, len(gap["iBLR-rep"][last]) >= SEEDS) if late else None,
                "Where BLR survives at the published step it is about as fast."
                if other == "BLR-rep"
                else "",
            )
        )
    end = gap["BLR-rep"][last]
    dead = int(np.isinf(end).sum())
    claims.append(
        Claim(
            "BLR with its line search is fragile at the published step",
            f"it fails in {dead} of {len(end)} seeds; at half the step in "
            f"{int(np.isinf(gap['BLR-rep, half the step'][last]).sum())}",
            "a curve, no failure shown",
            None if np.isnan(end).any() else confirmed(dead > 0, len(end) >= SEEDS),
            "The smallest eigenvalue of the precision shrinks from step to step, since a line "
            "search for feasibility alone may stop just short of the boundary.",
        )
    )
    floor = middle["VOGN"][last]
    claims.append(
        Claim(
            "VOGN stops at a floor of about 40",
            f"{number(floor)} at {count(last)}",
            "40",
            verdict(20 <= floor <= 80, floor) if late else None,
        )
    )
    others = [name for name in middle if "Stl" not in name and "defaults" not in name]
    for name, words in (
        ("iBLR, Stl and a trust region", "With Stl and a trust region"),
        ("iBLR at our defaults", "At its defaults (Stl, no trust region)"),
    ):
        best = min(middle[other][last] for other in others)
        claims.append(
            Claim(
                f"{words} the library is ahead of all of them at {count(last)} iterations",
                f"{number(middle[name][last])} against {number(best)}; at 1e3 "
                f"{number(middle[name][1000])} against {number(ours[1000])} of iBLR-rep",
                "not in the paper",
                verdict(middle[name][last] < best, middle[name][last], best),
                "It takes 16 gradients an iteration instead of one. Without the trust region the "
                "first steps from so wide a prior overshoot, and it takes thousands to recover.",
            )
        )
    return claims


def _alive(gap: np.ndarray, reached: bool) -> np.ndarray:
    """Gaps, infinite for a seed that failed; nan where no seed came so far."""
    return np.where(gap < DEAD, gap, np.inf) if reached else gap


def _curve(name: str, arrays: Arrays) -> Curve:
    kept = arrays["step"] > 0
    gap = _alive(arrays["gap"][kept], True)
    shown = np.where(np.isinf(gap), np.nan, gap)
    middle = np.median(gap, 1)
    return Curve(
        name, arrays["step"][kept], np.where(np.isinf(middle), np.nan, middle), others=shown.T
    )


def _settings() -> tuple[tuple[str, str], ...]:
    return (
        ("Data", f"abalone scaled to [-1, 1], a bias in front, {NUM_TRAIN} of 4177 rows"),
        ("Model", f"N(y | x'w, {NOISE_VARIANCE}), prior N(0, I / {PRIOR_PRECISION}), exact"),
        ("Start", "the prior"),
        ("Seeds", f"{SEEDS} or more in a full run"),
        ("Minibatch", f"{BATCH} rows without replacement, one draw of w"),
        ("L*", f"{exact().loss:.4f}, of this split"),
        *((method.name, f"step {method.step_text}") for method in METHODS),
    )


NOTES = (
    "With the bias there are 9 weights; the paper says d = 8.",
    "At the published step of 4e-5 BLR with its line search is fragile, here as in independent "
    "re-implementations and in one run of the authors' code; half the step is shown beside it.",
    "Two of seven seeds of iBLR are known to have bad first iterations and to converge much later: "
    "the thin lines show them.",
)

EXPERIMENT = Experiment(
    name="abalone",
    title="Bayesian linear regression, Abalone",
    figure="Figure 4a",
    claim="iBLR converges faster than BLR and BBVI, and is more accurate than VOGN.",
    tasks=tasks,
    section=section,
)

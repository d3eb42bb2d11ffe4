"""Figure 4b: a full Gaussian for a logistic regression, judged on rows that were left out."""

from typing import Any, NamedTuple

import numpy as np

import iblr
from iblr import baselines
from iblr.reproduce.logistic import DENSITY, EPS, Gaussian, Regression, round_gaussian
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Plan, Problem
from iblr.reproduce.pictures import Axis, Claim, Curve, Curves, Section, Table
from iblr.reproduce.runner import Experiment
from iblr.reproduce.runs import Run
from iblr.reproduce.trajectory import at_step, moments
from iblr.reproduce.wording import confirmed, count, number, spread, step_text, verdict

NUM_TRAIN = 175
BATCH = 17
SPLITS = 10
PRIOR_PRECISION = 1.0
GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
JUDGED_AT = 1000
SMALLEST = 1e-300  # a chance that underflows is not impossible
LATER = (20, 60, 1000, 15_000)

METHODS = (
    Method("iBLR-rep", iblr.Rep(1), iblr.improved_step, GRID),
    Method("VOGN", baselines.Vogn(1), iblr.natural_gradient_step, GRID),
    Method("BLR-rep", iblr.Rep(1), baselines.blr_step, GRID),
    Method("BBVI-rep", iblr.Rep(1), baselines.Bbvi(), GRID),
    Method("iBLR at our defaults"),
)
PUBLISHED = {  # read off the authors' picture
    "iBLR-rep": {20: 86.0, 60: 67.0, 1000: 56.0, 15_000: 55.0},
    "VOGN": {60: 65.0, 1000: 57.0, 15_000: 56.0},
    "BLR-rep": {150: 122.0, 1000: 72.0, 15_000: 57.0},
    "BBVI-rep": {1000: 102.0, 15_000: 81.0},
}


class Split(NamedTuple):
    """Rows to train with and rows to judge by."""

    train: Regression
    x: np.ndarray
    y: np.ndarray

    def log_loss(self, q: Gaussian) -> float:
        """-sum log E_q[sigmoid(y x'w)] over the rows left out, in nats."""
        slopes = self.x * self.y[:, None]
        at, width = slopes @ q.mean, np.einsum("ni,ij,nj->n", slopes, q.covariance, slopes)
        margins = at[:, None] + np.sqrt(np.maximum(width, 0))[:, None] * EPS
        chances = np.exp(-np.logaddexp(0, -margins)) @ DENSITY
        return -float(np.log(np.maximum(chances, SMALLEST)).sum())

    def metrics(self, family: Any) -> Arrays:
        """The training objective and the log loss of every member of a stack."""
        losses = [self.log_loss(Gaussian(*q)) for q in zip(*moments(family), strict=True)]
        return {"loss": self.train.losses(family), "test": np.array(losses)}


def split(seed: int) -> Split:
    """A random half of the rows, and the rest."""
    table = iblr.datasets.ionosphere()
    order = np.random.default_rng(seed).permutation(len(table.y))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    model = Regression(table.x[train], table.y[train], PRIOR_PRECISION)
    return Split(model, table.x[test], table.y[test])


def problem(seed: int) -> Problem:
    """Of one split."""
    half = split(seed)
    start = round_gaussian(np.zeros(half.x.shape[1]), 1 / PRIOR_PRECISION)
    return Problem(half.train.minibatches(BATCH), lambda key: start, half.metrics, "loss")


def tasks(plan: Plan) -> list[Run]:
    """One a method, on all splits."""
    splits = plan.pick(plan.seeds, max(SPLITS, plan.seeds))
    steps = plan.pick(1000, 15_000)
    return [
        Run(
            method.name,
            method,
            lambda: tuple(problem(seed) for seed in range(splits)),
            splits,
            Checkpoints.spread(steps),
            effort=plan.pick(8.0, 120.0),
            limit=plan.limit,
            grid_steps=JUDGED_AT,
        )
        for method in METHODS
    ]


def section(plan: Plan, raw: dict[str, Arrays]) -> Section:
    """Log loss against iterations, its order at 1000 of them, and the gap to the optimum."""
    first = next(iter(raw.values()))
    halves = [split(seed) for seed in range(first["test"].shape[1])]
    optima = [half.train.optimum() for half in halves]
    best = np.array([h.train.negative_elbo(q) for h, q in zip(halves, optima, strict=True)])
    exact = np.array([h.log_loss(q) for h, q in zip(halves, optima, strict=True)])
    curves = []
    for name, arrays in raw.items():
        kept = arrays["step"] > 0
        test = arrays["test"][kept]
        low, middle, high = np.quantile(test, (0.25, 0.5, 0.75), axis=1)
        curves.append(Curve(name, arrays["step"][kept], middle, low, high))
    for name, points in PUBLISHED.items():
        x, y = np.array(list(points), float), np.array(list(points.values()))
        curves.append(Curve(f"{name}, published", x, y, published=True))
    end = np.array([1.0, first["step"].max()])
    curves.append(Curve("exact Gaussian optimum", end, np.full(2, np.median(exact))))
    picture = Curves(
        "Log loss on the rows left out",
        Axis("iterations", log=True, range=(10.0, 2e4)),
        Axis(f"total log loss of {len(halves[0].y)} rows", log=True),
        tuple(curves),
        "Median and quartiles over splits. Open points: read off the published picture.",
    )
    rows = []
    for name, arrays in raw.items():
        cells = [at_step(arrays, "test", step) for step in LATER]
        gap = at_step(arrays, "loss", JUDGED_AT) - best
        rows.append(
            (
                name,
                step_text(arrays["step_size"]),
                *(spread(cell) for cell in cells),
                spread(gap),
            )
        )
    table = Table(
        "Total log loss, and the gap of the training objective",
        ("method", "step", *(f"at {count(step)}" for step in LATER), f"gap at {count(JUDGED_AT)}"),
        tuple(rows),
        f"The gap is that of the negative ELBO to the exact Gaussian optimum of the same split, in "
        f"nats; log loss of that optimum {spread(exact)}.",
    )
    return Section((_ordering(raw), *_near(raw, best)), (picture,), (table,), SETTINGS, NOTES)


def _ordering(raw: dict[str, Arrays]) -> Claim:
    names = [method.name for method in METHODS[:4]]
    middle = [float(np.median(at_step(raw[name], "test", JUDGED_AT))) for name in names]
    ours, vogn, blr, bbvi = middle
    return Claim(
        "At 1e3 iterations the median log loss is ordered iBLR <= VOGN < BLR < BBVI",
        ", ".join(f"{n} {number(v)}" for n, v in zip(names, middle, strict=True)),
        ", ".join(f"{name} {PUBLISHED[name][JUDGED_AT]:g}" for name in names),
        None
        if np.isnan(middle).any()
        else confirmed(ours <= vogn < blr < bbvi, raw[names[0]]["test"].shape[1] >= SPLITS),
        "The paper states neither the prior, the start nor the steps; here every method has the "
        "best step of one grid by its training objective at 1e3 iterations. A method that is "
        "behind in training can be ahead on few rows left out.",
    )


def _near(raw: dict[str, Arrays], best: np.ndarray) -> list[Claim]:
    gaps = {name: at_step(a, "loss", JUDGED_AT) - best for name, a in raw.items()}
    ours = np.median(gaps["iBLR-rep"])
    others = {name: np.median(gaps[name]) for name in ("BLR-rep", "BBVI-rep")}
    default = np.median(gaps["iBLR at our defaults"])
    return [
        Claim(
            "At 1e3 iterations iBLR is nearer to the exact Gaussian optimum than BLR and BBVI",
            f"gap {number(ours)}; "
            + ", ".join(f"{name} {number(value)}" for name, value in others.items())
            + f"; VOGN {number(np.median(gaps['VOGN']))}",
            "not stated",
            verdict(ours < min(others.values()), ours, *others.values()),
        ),
        Claim(
            "At its defaults the library is nearer still",
            f"gap {number(default)}",
            "not in the paper",
            verdict(default < ours, default, ours),
            "It takes 16 gradients an iteration instead of one.",
        ),
    ]


SETTINGS = (
    ("Data", "ionosphere, 34 columns as they are, no bias, 175 rows to train and 176 to test"),
    ("Prior", f"N(0, I / {PRIOR_PRECISION:g}), exact; not stated in the paper"),
    ("Start", "the prior; not stated in the paper"),
    ("Minibatch", f"{BATCH} rows without replacement, one draw; the draws are not stated"),
    ("Steps", f"best of {', '.join(f'{t:g}' for t in GRID)} by the training objective of the first "
     f"split at {JUDGED_AT} iterations"),
    ("Log loss", "-sum log E_q[sigmoid(y x'w)], by quadrature, in nats"),
)  # fmt: skip
NOTES = (
    "The published log loss starts at 122 = 176 log 2: it is a sum over the rows left out.",
    "The second column of the data is zero throughout.",
)

EXPERIMENT = Experiment(
    name="ionosphere",
    title="Bayesian logistic regression, Ionosphere",
    figure="Figure 4b",
    claim="iBLR outperforms BLR and BBVI, and does about as well as VOGN.",
    tasks=tasks,
    section=section,
)

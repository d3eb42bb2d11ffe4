"""Figures 3 and 8: a mixture of ten Student t in 20 dimensions, by six methods."""

import numpy as np

import iblr
from iblr import baselines
from iblr.reproduce.methods import Arrays, Checkpoints, Method, Plan
from iblr.reproduce.mixture_of_t import BANDWIDTH, KL_DRAWS, MMD_DRAWS, Case
from iblr.reproduce.pictures import Axis, Claim, Curve, Curves, Section, Table
from iblr.reproduce.runner import Experiment
from iblr.reproduce.runs import Run
from iblr.reproduce.wording import confirmed, count, number, spread, step_text

CASE = Case(dim=20, components=25, modes=10, side=20.0, bins=200)
SAMPLES = 10
GRID = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
QUICK_GRID = (3e-3, 3e-2, 3e-1)
SOON = 4000
GOOD = 1.0  # nats: less than half of a perfect fit to one mode of ten

HESS, REP = iblr.Hess(SAMPLES), iblr.Rep(SAMPLES)
METHODS = (
    Method("iBLR-hess", HESS, iblr.improved_step, 0.04),
    Method("iBLR-rep", REP, iblr.improved_step, 0.004),
    Method("BLR-hess", HESS, baselines.blr_step, GRID, quick_grid=QUICK_GRID),
    Method("BLR-rep", REP, baselines.blr_step, GRID, quick_grid=QUICK_GRID),
    Method("BBVI-hess", HESS, baselines.Bbvi(), GRID, quick_grid=QUICK_GRID),
    Method("BBVI-rep", REP, baselines.Bbvi(), GRID, quick_grid=QUICK_GRID),
    Method("iBLR at our defaults"),
)
PUBLISHED = {  # the final MMD, and from which iteration on
    "iBLR-hess": (0.009, 2e3),
    "iBLR-rep": (0.013, 2e4),
    "BLR-hess": (0.009, 2e4),
    "BLR-rep": (0.013, 9e4),
    "BBVI-hess": (0.022, 2e5),
    "BBVI-rep": (0.011, 8e5),
}


def tasks(plan: Plan) -> list[Run]:
    """One a method."""
    runs = []
    for method in plan.shorten(METHODS):
        default = method.step_size is None
        steps = plan.pick(1500, 4000 if default else 2_000_000)
        runs.append(
            Run(
                method.name,
                method,
                lambda: (CASE.problem(),),
                plan.seeds,
                Checkpoints.spread(steps),
                effort=plan.pick(25.0, 600.0),
                limit=plan.limit or plan.pick(None, 900.0),
                grid_steps=plan.pick(None, 10_000),
            )
        )
    return runs


def section(plan: Plan, raw: dict[str, Arrays]) -> Section:
    """Both distances against iterations, and the marginals."""
    shown = {name: raw[name] for name in ("iBLR-hess", "iBLR-rep")}
    pictures = (
        _curves(raw, "mmd2", "MMD^2", "Squared maximum mean discrepancy", True),
        _curves(raw, "kl", "KL(q || p) in nats", "Divergence from the target", False),
        CASE.marginals("Marginals", shown, shown=9),
    )
    columns = ("method", "step", "iterations", "MMD^2", "KL", "modes of 10", "published MMD")
    rows = []
    for name, arrays in raw.items():
        published = PUBLISHED.get(name)
        rows.append(
            (
                name,
                step_text(arrays["step_size"]),
                count(arrays["step"][-1]),
                spread(arrays["mmd2"][-1], 2),
                spread(arrays["kl"][-1]),
                spread(arrays["modes"][-1], 2),
                "" if published is None else f"{published[0]} from {count(published[1])}",
            )
        )
    table = Table("At the end", columns, tuple(rows), "Median [range] over seeds.")
    return Section(_claims(raw), pictures, (table,), SETTINGS, NOTES)


def _curves(raw: dict[str, Arrays], metric: str, label: str, title: str, points: bool) -> Curves:
    curves = []
    for name, arrays in raw.items():
        kept = arrays["step"] > 0
        values = np.where(np.isfinite(arrays[metric][kept]), arrays[metric][kept], np.nan)
        low, middle, high = np.nanquantile(values, (0.0, 0.5, 1.0), axis=1)
        curves.append(Curve(name, arrays["step"][kept], middle, low, high))
    if points:
        for name, (value, step) in PUBLISHED.items():
            at = np.array([step]), np.array([value])
            curves.append(Curve(f"{name}, published", *at, published=True))
    return Curves(
        title,
        Axis("iterations", log=True),
        Axis(label, log=True),
        tuple(curves),
        "Median and range over seeds."
        + (" Open points: where the published curves become flat." if points else ""),
    )


def _ended(raw: dict[str, Arrays], names: list[str]) -> str:
    """Which of the methods stopped by themselves."""
    steps = max(int(arrays["step"][-1]) for arrays in raw.values())
    stuck = [
        name for name in names if raw[name]["step"][-1] < steps and not raw[name].get("cut_short")
    ]
    said = [f"{name} ended at {count(raw[name]['step'][-1])}" for name in stuck]
    return "".join(f"; {words}: no seed could take a step" for words in said)


def _reached(arrays: Arrays) -> float:
    """The iterations until the median KL is good; infinite where it never is."""
    middle = np.median(arrays["kl"], axis=1)
    good = np.flatnonzero(middle < GOOD)
    return float(arrays["step"][good[0]]) if len(good) else np.inf


def _claims(raw: dict[str, Arrays]) -> tuple[Claim, ...]:
    final = {name: float(np.median(arrays["kl"][-1])) for name, arrays in raw.items()}
    claims = []
    for kind in ("hess", "rep"):
        names = [f"{rule}-{kind}" for rule in ("iBLR", "BLR", "BBVI")]
        common = min(raw[name]["step"][-1] for name in names)
        at = {}
        for name in names:
            row = np.searchsorted(raw[name]["step"], common, side="right") - 1
            value = float(np.median(raw[name]["kl"][row]))
            at[name] = value if np.isfinite(value) else np.inf
        ours = at.pop(f"iBLR-{kind}")
        claims.append(
            Claim(
                f"iBLR-{kind} converges fastest of the three",
                f"KL at {count(common)}: {number(ours)}; "
                + ", ".join(f"{name} {number(value)}" for name, value in at.items())
                + _ended(raw, names),
                "MMD flat from "
                + ", ".join(f"{count(PUBLISHED[name][1])} ({name})" for name in names),
                bool(ours < min(at.values())),
                "The steps of BLR and BBVI are the best of a grid after a trial of few "
                "iterations; the authors' are not stated.",
            )
        )
    steps = _reached(raw["iBLR-hess"])
    modes = np.median(raw["iBLR-hess"]["modes"][-1])
    claims.append(
        Claim(
            f"iBLR-hess is within {GOOD:g} nat of the target in about 2e3 iterations",
            f"from {count(steps) if np.isfinite(steps) else 'never'} on; {modes:g} of 10 modes",
            "MMD flat from 2e3",
            confirmed(steps <= SOON, raw["iBLR-hess"]["step"][-1] >= SOON),
        )
    )
    default, hess = final["iBLR at our defaults"], final["iBLR-hess"]
    claims.append(
        Claim(
            "Our defaults end closer to the target than iBLR-hess, without a Hessian",
            f"KL {number(default)} against {number(hess)}",
            "not in the paper",
            bool(default < hess),
            "One pair of every component, 50 gradients an iteration, against 10 Hessians.",
        )
    )
    return tuple(claims)


SETTINGS = (
    ("Target", "10 Student t, 2 degrees of freedom, modes uniform in (-20, 20)^20, precisions "
     "W'W + I with W_ij ~ N(0, 2^2)"),
    ("Approximation", "25 Gaussians of weight 1/25, fixed"),
    ("Start", "means N(0, 100^2 I), covariances 300 I"),
    ("Draws", f"{SAMPLES} of the mixture an iteration"),
    ("Iterations", "2 000 000 in the paper; with --full as many as the time limit allows (15 "
     "minutes a method if none is given), 4000 at our defaults"),
    ("Steps", "iBLR 0.04 (hess) and 0.004 (rep), the authors'; BLR and BBVI the best of "
     + ", ".join(f"{t:g}" for t in GRID) + " by the KL of a short trial"),
    ("MMD", f"unbiased, RBF with h^2 = {BANDWIDTH**2:.0f}, {MMD_DRAWS} draws of each"),
    ("KL", f"from {KL_DRAWS} draws"),
)  # fmt: skip
NOTES = (
    "The paper calls V_k = A'A + I a shape matrix; the authors' code, and their picture, use it as "
    "a precision, and so does this.",
    "The paper states no kernel for its MMD; at its end it measures how many components fall into "
    "each mode more than how well they fit, so that KL and the modes found are shown beside it.",
    "The caption of figure 8 speaks of another figure and of a mixture of Gaussians as the target.",
)

EXPERIMENT = Experiment(
    name="mixt-20",
    title="Mixture of Student t, 20 dimensions",
    figure="Figures 3 and 8",
    claim="iBLR converges fastest, with either gradient, and its marginals closely match the "
    "target's.",
    tasks=tasks,
    section=section,
)

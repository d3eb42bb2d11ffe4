"""Automatic fits and their peers on ten posteriors of a posteriordb checkout.

    python benchmarks/posteriordb.py --path CHECKOUT [--only NAME ...] [--peers ...] [--seeds 5]
                                     [--budget 100000] [--seconds 5] [--out STEM]

Every method starts at N(start, I) of the coordinates, the start being zeros, ones and middles of
intervals. Errors are the worst over a posterior's parameters: of means in standard deviations of
the reference draws, of standard deviations as a ratio less one; once against the draws and once
against the best Gaussian of posteriordb_references.json, which no Gaussian can be expected to
beat. `ours` is where it stops by itself, the worst of the seeds; a peer is shown with one seed, at
the end of its budget (Pathfinder and NUTS end by themselves), `cut` where its seconds ended first,
and with the setting that ends nearest to the best Gaussian, whose seconds alone are given. `to bar`
counts gradients until both errors first are below 0.1 and 15 %, with the setting that is there
first: against the best Gaussian, or against the draws for a method that draws. `compile` is the
first call's extra time. With --out a table STEM.txt and a picture STEM.png.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import gaussian_peers
import jax
import jax.numpy as jnp
import numpy as np
import posteriordb_best
from posteriordb_models import VARIABLE, Checkout, Model, path_argument
from reporting import Report, versions, whole_number

import iblr

MEAN_BAR, SD_BAR = 0.1, 0.15
OURS = 20_000  # gradients of its trajectories
TOP = 30.0  # of the picture
COLOURS = {
    "ours": "#d62728",
    "NumPyro": "#1f77b4",
    "BlackJAX": "#17becf",
    "Pathfinder": "#9467bd",
    "multi-path": "#8c564b",
    "PyMC": "#7f7f7f",
    "GSM": "#2ca02c",
    "BaM": "#ff7f0e",
    "NUTS": "#111111",
}


class Errors(NamedTuple):
    """Worst over the parameters."""

    mean: float
    sd: float

    @property
    def fine(self) -> bool:
        return self.mean <= MEAN_BAR and self.sd <= SD_BAR

    @property
    def both(self) -> float:
        return max(self.mean, self.sd)


class Row(NamedTuple):
    """Where a method ended, and how it came there."""

    setting: str
    gradients: int
    seconds: float
    compiling: float
    draws: Errors
    best: Errors
    to_bar: float
    path: list[tuple[int, float]]  # gradients, error against the draws
    cut: bool = False  # by the seconds


class Judge:
    """Errors of approximations to one posterior."""

    def __init__(self, model: Model, reference: dict):
        with jax.enable_x64(True):
            self.noise = jnp.asarray(posteriordb_best.noise(model.dim, 2**13, seed=5))
            self.coloured = jax.jit(lambda m, r, e: model.numbers(m + e @ r.T))
            self.mapped = jax.jit(model.numbers)
        numbers = lambda part: np.array([part[name] for name in model.names])  # noqa: E731
        self.draws = [numbers(reference["draws"][key]) for key in ("mean", "sd")]
        self.best = [numbers(reference[key]) for key in ("mean", "sd")]
        self.floor = self._errors(*self.best, self.draws)

    def __call__(self, mean, root, rows=None) -> tuple[Errors, Errors]:
        """Against the draws and against the best Gaussian."""
        with jax.enable_x64(True):
            if rows is None:
                rows = self.coloured(jnp.asarray(mean), jnp.asarray(root), self.noise)
            else:
                rows = self.mapped(jnp.asarray(rows))
        numbers = np.asarray(rows)
        moments = numbers.mean(0), numbers.std(0)
        return self._errors(*moments, self.draws), self._errors(*moments, self.best)

    def _errors(self, mean, sd, reference) -> Errors:
        off = np.abs(mean - reference[0]) / self.draws[1]
        ratio = np.abs(sd / reference[1] - 1)
        worst = [float(np.nan_to_num(np.max(x), nan=math.inf)) for x in (off, ratio)]
        return Errors(*worst)


def follow(method, setting: str, judge: Judge, key, limit: float) -> Row | None:
    """One run to its end; None where it gives nothing finite."""
    path, to_bar, row = [], math.inf, None
    for seen in method.run(method.settings[setting], key):
        draws, best = judge(seen.mean, seen.root, seen.draws)
        path.append((seen.gradients, draws.both))
        fine = best.fine if seen.draws is None else draws.fine
        to_bar = min(to_bar, seen.gradients if fine else math.inf)
        compiling = method.compile_seconds()
        row = Row(setting, seen.gradients, seen.seconds, compiling, draws, best, to_bar, path)
        if seen.seconds > limit:
            return row._replace(cut=True)
    return row


def peer(name: str, model: Model, judge: Judge, budget: int, limit: float) -> Row | None:
    """The setting that ends nearest to the best Gaussian."""
    if name == "NUTS":  # the truth's price
        budget, limit = 10**7, 24 * limit
    method = gaussian_peers.PEERS[name].prepare(model.flat, model.start, budget)
    key = jax.random.key(0)
    rows = [follow(method, setting, judge, key, limit) for setting in method.settings]
    rows = [row for row in rows if row is not None]
    if not rows:
        return None
    chosen = min(rows, key=lambda row: row.best.both)
    return chosen._replace(to_bar=min(row.to_bar for row in rows))


def ours(model: Model, judge: Judge, seeds: int) -> tuple[Row, list[gaussian_peers.Outcome]]:
    """Where it stops, the worst of the seeds; the first one's seconds are with compiling."""
    target = iblr.Target(model.log_density)
    ends = [
        gaussian_peers.automatic(target, model.init, model.support, jax.random.key(seed))
        for seed in range(seeds)
    ]
    judged = [judge(end.mean, end.root) for end in ends]
    worst = [Errors(*np.max([pair[k] for pair in judged], axis=0).tolist()) for k in (0, 1)]
    later = [end.seconds for end in ends[1:]] or [ends[0].seconds]
    seconds = float(np.median(later))
    gradients = max(end.gradients for end in ends)
    return Row("", gradients, seconds, ends[0].seconds - seconds, *worst, math.inf, []), ends


def line(name: str, row: Row) -> str:
    to_bar = "never" if math.isinf(row.to_bar) else f"{row.to_bar:.0f}"
    errors = "".join(
        f"{value:>9.3g}" for pair in (row.draws, row.best) for value in (pair.mean, pair.sd)
    )
    return (
        f"    {name:11s}{row.setting:11s}{row.gradients:>10d}{row.seconds:>9.2f}"
        f"{row.compiling:>9.2f}{errors}{to_bar:>9s}{'  cut' if row.cut else ''}"
    )


def picture(paths: dict, floors: dict, stops: dict, file: Path) -> None:
    from matplotlib import pyplot

    names = list(paths)
    columns = min(5, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(max(3.4 * columns, 12), 3.1 * rows + 0.5),
        squeeze=False,
        sharey=True,
    )
    for axis, name in zip(axes.flat, names, strict=False):
        for method, points in paths[name].items():
            if not points:
                continue
            x, y = np.array(points).T
            colour, strong = COLOURS[method], method == "ours"
            style = {"color": colour, "lw": 2.2 if strong else 1.2, "zorder": 5 if strong else 2}
            if len(x) == 1:
                axis.plot(x, y, "D", ms=5, label=method, color=colour)
            else:
                axis.plot(x, y, label=method, **style)
        axis.axhline(floors[name], ls="--", lw=1, color="0.5", zorder=1)
        if name in stops:
            x, y = np.array(stops[name]).T
            off = ~(y <= TOP)
            dots = {"color": COLOURS["ours"], "zorder": 6, "ls": "none", "clip_on": False}
            axis.plot(x[~off], y[~off], "o", ms=7, mec="white", **dots)
            axis.plot(x[off], np.full(off.sum(), TOP), "X", ms=9, mec="white", **dots)
        axis.set(xscale="log", yscale="log", ylim=(5e-3, TOP))
        axis.set_title(name.split("-")[1], fontsize=10)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(names) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("gradients")
    for axis in axes[:, 0]:
        axis.set_ylabel("error, in reference sd")
    found = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = [name for name in COLOURS if name in found]
    figure.suptitle(
        "Worst error of a mean or standard deviation against reference draws. Dashed: the best "
        "Gaussian. Ours: its worst seed; dots: where every seed stops by itself, crosses: off the "
        "scale.",
        fontsize=11,
    )
    figure.legend(
        [found[name] for name in order], order, loc="lower center", ncols=len(order), frameon=False
    )
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    path_argument(parser)
    parser.add_argument("--only", nargs="+", help="names of posteriors")
    parser.add_argument("--peers", nargs="*", choices=list(gaussian_peers.PEERS))
    parser.add_argument("--seeds", type=whole_number, default=5, help="of ours")
    parser.add_argument("--budget", type=whole_number, default=100_000, help="gradients of a run")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of a run; 24 times that for NUTS"
    )
    parser.add_argument("--out", type=Path, help="stem of a table .txt and a picture .png")
    options = parser.parse_args()
    if options.path is None:
        print(f"posteriordb: no --path CHECKOUT and no {VARIABLE}: nothing to run")
        return
    checkout, references = (
        Checkout(options.path),
        json.loads(posteriordb_best.REFERENCES.read_text()),
    )
    here, _ = gaussian_peers.installed()
    peers = list(gaussian_peers.PEERS) if options.peers is None else options.peers
    report, began = Report(), time.perf_counter()
    report(versions())
    for sentence in gaussian_peers.presented(peers):
        report(sentence)
    report(
        f"ours: iblr.fit, worst of {options.seeds} seeds; peers at most {options.budget} gradients "
        f"and {options.seconds:g} s a run"
    )
    paths, floors, marks, totals, misses = {}, {}, {}, {}, []
    for name in options.only or checkout.names():
        if name not in references:
            report(f"\n{name}: no best Gaussian is committed for it: left out")
            continue
        model = checkout.model(name)
        judge = Judge(model, references[name])
        floors[name] = judge.floor.both
        report(
            f"\n{name} (d = {model.dim}); the best Gaussian is {judge.floor.mean:.3f} sd and "
            f"{judge.floor.sd:.0%} from the draws"
        )
        report(
            f"    {'':22s}{'gradients':>10}{'seconds':>9}{'compile':>9}{'from draws':>18}"
            f"{'from best q':>18}{'to bar':>9}"
        )
        row, ends = ours(model, judge, options.seeds)
        totals.setdefault("ours", []).append(row)
        method = gaussian_peers.PEERS["ours"].prepare(
            model.flat, model.start, min(options.budget, OURS)
        )
        walks = [
            follow(method, "", judge, jax.random.key(seed), options.seconds)
            for seed in range(options.seeds)
        ]
        walks = [walk for walk in walks if walk is not None]
        paths[name] = {"ours": max(walks, key=lambda w: w.path[-1][1]).path if walks else []}
        marks[name] = [(end.gradients, judge(end.mean, end.root)[0].both) for end in ends]
        failed = len(walks) < options.seeds
        to_bar = math.inf if failed else max(walk.to_bar for walk in walks)
        report(line("ours", row._replace(to_bar=to_bar)))
        for other in [peer for peer in peers if peer in here and peer != "ours"]:
            found = peer(other, model, judge, options.budget, options.seconds)
            if found is None:
                report(f"    {other:11s}nothing finite")
                continue
            totals.setdefault(other, []).append(found)
            paths[name][other] = found.path
            report(line(other, found))
        worst = np.max([end.khat for end in ends])
        whys = ", ".join(sorted({end.stopped_by for end in ends}))
        report(f"    ours stopped by {whys}; k-hat {worst:.2f}")
        for verdict in sorted({end.verdict for end in ends} - {""}):
            report(f"    {verdict}")
        passed = "PASS" if row.best.fine else "FAIL"
        report(f"    within 0.1 sd and 15 % of the best Gaussian: {passed}")
        if not row.best.fine:
            misses.append(name)
        if options.out is not None:
            report.save(options.out.with_suffix(".txt"))
            picture(paths, floors, marks, options.out.with_suffix(".png"))
    report(f"\nSeconds on {len(paths)} posteriors   without compiling        with it")
    for name, rows in totals.items():
        plain = sum(row.seconds for row in rows)
        note = "" if len(rows) == len(paths) else f"   ({len(rows)} of {len(paths)})"
        report(f"    {name:22s}{plain:>20.2f}{plain + sum(r.compiling for r in rows):>15.2f}{note}")
    report(
        f"\nMissed: {', '.join(misses) or 'none'}. {(time.perf_counter() - began) / 60:.1f} minutes"
    )
    if options.out is not None:
        report.save(options.out.with_suffix(".txt"))


if __name__ == "__main__":
    main()

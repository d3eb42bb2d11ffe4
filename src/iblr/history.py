"""What a fit remembers between chunks, and the line of progress it shows."""

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from iblr.families.base import AbstractFamily
from iblr.posterior import Posterior, Trace
from iblr.status import Status

LARGEST_DRIFT = 0.1
LARGEST_SHARE_REFUSED = 0.1


class Report(NamedTuple):
    """What one chunk of steps found, each a scalar a run."""

    elbo: Any
    elbo_se: Any
    refused: Any
    left_set: Any
    out_of_range: Any
    limited: Any
    halvings: Any
    excluded: Any
    drift: Any


class Progress(NamedTuple):
    """What a callback is told after every chunk."""

    step: int
    num_steps: int
    elbo: Any
    elbo_se: Any
    step_size: float
    family: AbstractFamily
    seconds: float
    state: Any
    num_gradients: int
    gap: float = float("nan")


class History:
    """Reports of all chunks so far, the counts over them, and each run's best family."""

    def __init__(self, family: AbstractFamily, first_step: int, batched: bool):
        runs = jax.tree.leaves(family)[0].shape[:1] if batched else ()
        self.first_step = self.step = first_step
        self.rows: list[tuple[int, Any, Any, float, int]] = []
        self.refused = self.left_set = self.limited = np.zeros(runs, int)
        self.halvings = self.excluded = np.zeros(runs, int)
        self.stuck = self.too_far = self.inaccurate = np.zeros(runs, bool)
        self.best_elbo, self.best_elbo_se = np.full(runs, -np.inf), np.full(runs, np.nan)
        self.best_family = family
        self.elbo = self.elbo_se = np.full(runs, np.nan)

    def add(
        self, step: int, step_size: float, report: Report, family: AbstractFamily, spent: int
    ) -> None:
        """Take in one chunk that ended at `step` with `family`, after `spent` gradients."""
        taken, self.step = step - self.step, step
        report = Report(*(np.asarray(value) for value in report))
        self.elbo, self.elbo_se = report.elbo, report.elbo_se
        self.rows.append((step, report.elbo, report.elbo_se, step_size, spent))
        self.refused = self.refused + report.refused
        self.left_set = self.left_set + report.left_set
        self.limited = self.limited + report.limited
        self.halvings = self.halvings + report.halvings
        self.excluded = self.excluded + report.excluded
        self.stuck = report.refused == taken
        self.too_far = self.stuck & (report.out_of_range == taken)
        accurate = report.drift <= LARGEST_DRIFT
        self.inaccurate = self.inaccurate | ~accurate
        better = np.nan_to_num(report.elbo, nan=-np.inf, posinf=-np.inf) > self.best_elbo
        better = better & accurate
        self.best_elbo = np.where(better, report.elbo, self.best_elbo)
        self.best_elbo_se = np.where(better, report.elbo_se, self.best_elbo_se)
        if better.all():
            self.best_family = family
        elif better.any():
            self.best_family = _choose(better, family, self.best_family)

    @property
    def hopeless(self) -> bool:
        """Whether no run took a single step of its last chunk."""
        return bool(self.stuck.all())

    def posterior(
        self,
        family: AbstractFamily,
        state: Any,
        interrupted: bool,
        num_gradients: int,
        seconds: float,
        stopped_by: str,
    ) -> Posterior:
        """The result: the last family, or the best one where the run did not end well."""
        diverged = ~np.isfinite(self.elbo) & (len(self.rows) > 0)
        failed = interrupted | diverged | self.inaccurate | self.stuck
        fell_back = failed & np.isfinite(self.best_elbo)
        often_refused = self.refused > LARGEST_SHARE_REFUSED * (self.step - self.first_step)
        found = [
            (self.left_set > 0, Status.left_set),
            (self.too_far, Status.out_of_range),
            (self.stuck | (diverged & often_refused), Status.nonfinite),
            (diverged, Status.diverged),
            (self.inaccurate, Status.inaccurate),
            (np.full_like(self.stuck, interrupted), Status.interrupted),
            (often_refused, Status.refused_steps),
            (np.ones_like(self.stuck), Status.ok),
        ]
        first = np.argmax(np.stack([mask for mask, _ in found]), axis=0)
        items = [item for _, item in found]
        status = jax.tree.map(lambda *codes: jnp.stack(codes)[first], *items)
        return Posterior(
            family=_choose(fell_back, self.best_family, family),
            elbo=jnp.asarray(np.where(fell_back, self.best_elbo, self.elbo)),
            elbo_se=jnp.asarray(np.where(fell_back, self.best_elbo_se, self.elbo_se)),
            status=status,
            trace=Trace(
                np.array([row[0] for row in self.rows], int),
                np.array([row[1] for row in self.rows]).reshape(-1, *self.elbo.shape),
                np.array([row[2] for row in self.rows]).reshape(-1, *self.elbo.shape),
                np.array([row[3] for row in self.rows], float),
                np.array([row[4] for row in self.rows], int),
                np.full(len(self.rows), np.nan),
            ),
            refused=np.asarray(self.refused),
            limited=np.asarray(self.limited),
            halvings=np.asarray(self.halvings),
            excluded=np.asarray(self.excluded),
            num_steps=self.step,
            num_gradients=num_gradients,
            seconds=seconds,
            state=state,
            stopped_by=stopped_by,
        )


def _choose(first: np.ndarray | np.bool, a: AbstractFamily, b: AbstractFamily) -> AbstractFamily:
    """`a` for the runs in `first`, `b` for the others."""
    if first.all():
        return a
    if not first.any():
        return b
    pick = lambda x, y: jnp.where(first.reshape(first.shape + (1,) * (x.ndim - 1)), x, y)  # noqa: E731
    return jax.tree.map(pick, a, b)


class ProgressLine:
    """One line in a terminal, rewritten after every chunk; silent elsewhere."""

    def __init__(self, wanted: bool | None):
        self.stream = sys.stderr
        self.shown = self.stream.isatty() if wanted is None else wanted
        self.width = 0
        self.before = 0, 0.0

    def show(self, told: Progress) -> None:
        """Rewrite the line."""
        if not self.shown:
            return
        elbo, elbo_se, which = told.elbo, told.elbo_se, ""
        if np.ndim(elbo):
            best = int(np.argmax(np.nan_to_num(elbo, nan=-np.inf)))
            elbo, elbo_se, which = elbo[best], elbo_se[best], f" (best of {len(told.elbo)})"
        step, seconds = self.before
        taken = told.step - step if told.step > step else told.step
        rate = taken / max(told.seconds - seconds, 1e-9)
        self.before = told.step, told.seconds
        moving = f"step size {told.step_size:.2g}"
        if not np.isfinite(told.step_size):
            moving = f"gap {told.gap:.2g}" if np.isfinite(told.gap) else "approaching"
        text = (
            f"step {told.step}/{told.num_steps}  ELBO {elbo:.4f} ± {elbo_se:.4f}{which}  "
            f"{moving}  {rate:.0f} steps/s"
        )
        self.stream.write("\r" + text.ljust(self.width))
        self.stream.flush()
        self.width = len(text)

    def close(self) -> None:
        """End the line."""
        if self.shown and self.width:
            self.stream.write("\n")
            self.stream.flush()


class Watch(NamedTuple):
    """Who looks on: the user's callback, the line of progress, and when the fit began."""

    callback: Callable[[Progress], Any] | None
    line: ProgressLine
    started: float

    def tell(self, told: Progress) -> bool:
        """Show progress; whether the user wants to stop."""
        self.line.show(told)
        return self.callback is not None and bool(self.callback(told))

    @property
    def seconds(self) -> float:
        """Since the fit began."""
        return time.perf_counter() - self.started

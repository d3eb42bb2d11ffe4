"""Experiments run one after the other, kept on disk piece by piece, with a bar of progress."""

import contextlib
import dataclasses
import datetime
import difflib
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from iblr.datasets import DataError, MissingDataError
from iblr.datasets.files import write_atomically
from iblr.reproduce import results
from iblr.reproduce.methods import Arrays, Plan
from iblr.reproduce.pictures import Section
from iblr.reproduce.results import Result
from iblr.reproduce.runs import Monitor, Task

SCRATCH = ".partial"


class ReproduceError(RuntimeError):
    """Something a user can mend; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure of the paper: what to run, and what to show of it.

    Attributes:
        name: on the command line.
        title: of its section.
        figure: where the paper shows it.
        claim: what the paper says of it.
        tasks: the pieces of work of a plan.
        section: what to show of what they returned, by the name of the piece.
        waiting: why it cannot be run yet; empty where it can.
    """

    name: str
    title: str
    figure: str
    claim: str
    tasks: Callable[[Plan], Sequence[Task]]
    section: Callable[[Plan, dict[str, Arrays]], Section]
    waiting: str = ""


def chosen(names: Sequence[str], experiments: Sequence[Experiment]) -> list[Experiment]:
    """Those of the given names, or all."""
    known = {experiment.name: experiment for experiment in experiments}
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
            raise ReproduceError(f"There is no experiment {name!r}. {hint}")
    return [experiment for name, experiment in known.items() if not names or name in names]


def check_folder(
    folder: Path, picked: Sequence[Experiment], plan: Plan, keep: bool, overwrite: bool
) -> None:
    """Raise unless results can be written there without losing any."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ReproduceError(f"Cannot write to {folder}: {reason}. Give another --out.") from error
    there = [one.name for one in picked if (folder / f"{one.name}.json").exists()]
    if overwrite or not there:
        return
    if not keep:
        raise ReproduceError(
            f"{folder} has results of {', '.join(there)}. Pass --resume to go on with them, "
            "--overwrite to begin anew, or another --out."
        )
    for name in there:
        kept = results.load(folder, name)
        before = (plan.mode, plan.seeds) if kept is None else (kept[0].mode, kept[0].plan_seeds)
        if before != (plan.mode, plan.seeds):
            raise ReproduceError(
                f"{folder} has results of {name} with --{before[0]} --seeds {before[1]}. Pass "
                "these with --resume, or --overwrite, or another --out."
            )


def clear(folder: Path, picked: Sequence[Experiment]) -> None:
    """Remove what is there of these experiments."""
    for experiment in picked:
        for ending in ("json", "npz", "log"):
            (folder / f"{experiment.name}.{ending}").unlink(missing_ok=True)
        shutil.rmtree(folder / SCRATCH / experiment.name, ignore_errors=True)


def reproduce(
    picked: Sequence[Experiment],
    plan: Plan,
    folder: Path,
    *,
    console: Console | None = None,
) -> list[Result]:
    """Run experiments, and return what came of each; kept in `folder` after every piece of work.

    Pieces that are there, with the same settings, are not done again. An interrupt from the
    keyboard is passed on when everything there is has been written.
    """
    console = Console(stderr=True) if console is None else console
    found = []
    with _Display(console, picked, plan) as display:
        for experiment in picked:
            sitting = Sitting(experiment, plan, folder)
            found.append(sitting.run(display))
    return found


class Sitting:
    """One experiment: pieces done before are taken from disk, the others are done and kept."""

    def __init__(self, experiment: Experiment, plan: Plan, folder: Path):
        self.experiment, self.plan, self.folder = experiment, plan, folder
        self.scratch = folder / SCRATCH / experiment.name
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kept = results.load(folder, experiment.name)
        self.tasks, self.raw = ({}, {}) if kept is None else (dict(kept[0].tasks), kept[1])
        self.section = None if kept is None else kept[0].section
        self.started = now if kept is None else kept[0].started
        self.seeds = plan.seeds

    def run(self, display: "_Display") -> Result:
        """All pieces, then the section; whatever fails is written into the result."""
        if self.experiment.waiting:
            return self.save("waiting", self.experiment.waiting)
        try:
            tasks = self.experiment.tasks(self.plan)
            for task in tasks:
                self.perform(task, display)
            found = {task.name: self.raw[task.name] for task in tasks}
            self.seeds = max(getattr(task, "seeds", 1) for task in tasks)
            self.section = self.experiment.section(self.plan, found)
        except KeyboardInterrupt:
            self.save("partial", "interrupted; go on with --resume")
            raise
        except MissingDataError as error:
            return self.save("not run", f"data missing: {error}")
        except DataError as error:
            return self.save("failed", f"data unusable: {error}")
        except results.ResultError:
            raise
        except Exception as error:
            log = self.folder / f"{self.experiment.name}.log"
            write_atomically(log, traceback.format_exc().encode())
            return self.save("failed", f"{type(error).__name__}: {error} (see {log.name})")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self.save("done", "")

    def perform(self, task: Task, display: "_Display") -> None:
        """One piece of work, unless its result is there."""
        if self.has(task):
            display.skip(task)
            return
        began = time.perf_counter()
        with display.showing(self.experiment, task) as tell:
            arrays = task.execute(Monitor(self.scratch, tell))
        self.keep(task, arrays, time.perf_counter() - began)

    def has(self, task: Task) -> bool:
        """Whether the piece was done before, with the same settings."""
        kept = self.tasks.get(task.name, {})
        cut_short = bool(self.raw.get(task.name, {}).get("cut_short", False))
        more_time = cut_short and kept.get("limit") != self.plan.limit
        return kept.get("settings") == task.settings and not more_time

    def keep(self, task: Task, arrays: Arrays, seconds: float) -> None:
        """Take in the result of a piece, and write it."""
        self.raw[task.name] = arrays
        self.tasks[task.name] = {
            "settings": task.settings,
            "seconds": round(seconds, 2),
            "limit": self.plan.limit,
        }
        self.save("partial", "under way")

    def save(self, status: str, reason: str) -> Result:
        """Write what there is; a section of an earlier sitting stays until there is another."""
        experiment = self.experiment
        result = Result(
            experiment=experiment.name,
            title=experiment.title,
            figure=experiment.figure,
            claim=experiment.claim,
            status=status,
            reason=reason,
            mode=self.plan.mode,
            seeds=self.seeds,
            plan_seeds=self.plan.seeds,
            started=self.started,
            seconds=float(sum(piece["seconds"] for piece in self.tasks.values())),
            environment=results.environment(),
            tasks=self.tasks,
            section=self.section,
        )
        results.save(self.folder, result, self.raw)
        return result


class _Display:
    """Two bars: all experiments, by the seconds they may take, and the piece under way."""

    def __init__(self, console: Console, picked: Sequence[Experiment], plan: Plan):
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        total = sum(task.effort for experiment in picked for task in known_tasks(experiment, plan))
        self.whole: TaskID = self.progress.add_task("all", total=max(total, 1.0), note="")

    def __enter__(self) -> "_Display":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def skip(self, task: Task) -> None:
        """A piece that was done before."""
        self.progress.advance(self.whole, task.effort)

    @contextlib.contextmanager
    def showing(self, experiment: Experiment, task: Task) -> Iterator[Callable[..., None]]:
        """A bar for one piece of work, moved by the function that is given."""
        label = f"{experiment.name}: {task.name}"
        bar = self.progress.add_task(label, total=1.0, note="")
        done = 0.0
        began = time.perf_counter()

        def tell(share: float, text: str = "") -> None:
            nonlocal done
            self.progress.update(bar, completed=share, note=text)
            self.progress.advance(self.whole, (share - done) * task.effort)
            done = share

        try:
            yield tell
            tell(1.0)
            seconds = time.perf_counter() - began
            self.console.print(f"[dim]{label}: {seconds:.1f} s", highlight=False)
        finally:
            self.progress.remove_task(bar)


def known_tasks(experiment: Experiment, plan: Plan) -> Sequence[Task]:
    """The pieces of an experiment, or none where its data are missing."""
    if experiment.waiting:
        return ()
    try:
        return experiment.tasks(plan)
    except Exception:  # told when it is run
        return ()

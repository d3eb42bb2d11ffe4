"""Pieces of work in several processes, for machines with many cores.

Every process has cores of its own. What they return is kept in the folder, where `runner.reproduce`
finds it; pieces that measure time are left to it.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from iblr.reproduce.catalogue import EXPERIMENTS
from iblr.reproduce.methods import Arrays, Plan
from iblr.reproduce.runner import Experiment, Sitting, known_tasks
from iblr.reproduce.runs import Monitor, Task


def run_ahead(
    picked: Sequence[Experiment],
    plan: Plan,
    folder: Path,
    jobs: int,
    console: Console | None = None,
) -> None:
    """Do all pieces that are not yet in `folder` and need no machine to themselves."""
    sittings = {e.name: Sitting(e, plan, folder) for e in picked if not e.waiting}
    pending: list[tuple[str, Task]] = [
        (name, task)
        for name, sitting in sittings.items()
        for task in known_tasks(sitting.experiment, plan)
        if not getattr(task, "alone", False) and not sitting.has(task)
    ]
    pending.sort(key=lambda item: -item[1].effort)
    if not pending:
        return
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    for number in range(jobs):
        numbers.put(number)
    orders = [(name, plan, task.name, sittings[name].scratch) for name, task in pending]
    tasks = {(name, task.name): task for name, task in pending}
    bars = Progress(console=console or Console(stderr=True))
    # Leaving the pool, also by an interrupt, ends its processes; their states are on disk.
    with bars as progress, context.Pool(jobs, _settle, (numbers, jobs)) as pool:
        bar = progress.add_task(f"{len(pending)} pieces", total=sum(t.effort for _, t in pending))
        for name, task_name, arrays, said in pool.imap_unordered(_work, orders):
            task = tasks[name, task_name]
            progress.advance(bar, task.effort)
            if arrays is None:  # it is tried again, and told, by `reproduce`
                progress.print(f"{name}: {task_name}: {said}")
                continue
            sittings[name].keep(task, arrays, float(said))
            progress.print(f"[dim]{name}: {task_name}: {float(said):.1f} s")


def _settle(numbers, jobs: int) -> None:
    """Take cores of one's own, before anything counts them, and leave interrupts to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    number = numbers.get()
    mine = cores[number % max(len(cores), 1) :: jobs]
    if mine:
        os.sched_setaffinity(0, mine)


def _work(order: tuple[str, Plan, str, Path]) -> tuple[str, str, Arrays | None, str]:
    """One piece, found by its names: what came of it, and the seconds or what went wrong."""
    name, plan, task_name, scratch = order
    began = time.perf_counter()
    try:
        experiment = next(e for e in EXPERIMENTS if e.name == name)
        task = next(task for task in experiment.tasks(plan) if task.name == task_name)
        arrays = task.execute(Monitor(scratch, lambda share, text="": None))
    except Exception as error:
        return name, task_name, None, f"{type(error).__name__}: {error}"
    return name, task_name, arrays, str(time.perf_counter() - began)

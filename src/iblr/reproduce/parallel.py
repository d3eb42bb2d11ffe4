"""Pieces of work in several processes, for machines with many cores.

Every process has cores of its own. What they return is kept in the folder, where `runner.reproduce`
finds it; pieces that measure time are left to it.
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from iblr.reproduce.catalogue import EXPERIMENTS
from iblr.reproduce.runner import Experiment, Sitting, known_tasks
from iblr.reproduce.runs import Arrays, Monitor, Plan, Task


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
    pool = ProcessPoolExecutor(jobs, context, initializer=_settle, initargs=(numbers, jobs))
    with pool, Progress(console=console or Console(stderr=True)) as progress:
        bar = progress.add_task(f"{len(pending)} pieces", total=sum(t.effort for _, t in pending))
        futures = {
            pool.submit(_work, name, plan, task.name, sittings[name].scratch): (name, task)
            for name, task in pending
        }
        try:
            for future in as_completed(futures):
                name, task = futures[future]
                progress.advance(bar, task.effort)
                error = future.exception()
                if error is not None:  # it is tried again, and told, by `reproduce`
                    progress.print(f"{name}: {task.name}: {error}")
                    continue
                arrays, seconds = future.result()
                sittings[name].keep(task, arrays, seconds)
                progress.print(f"[dim]{name}: {task.name}: {seconds:.1f} s")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _settle(numbers, jobs: int) -> None:
    """Take cores of one's own, before anything counts them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    number = numbers.get()
    mine = cores[number % max(len(cores), 1) :: jobs]
    if mine:
        os.sched_setaffinity(0, mine)


def _work(name: str, plan: Plan, task_name: str, scratch: Path) -> tuple[Arrays, float]:
    """One piece, found by its names."""
    experiment = next(e for e in EXPERIMENTS if e.name == name)
    task = next(task for task in experiment.tasks(plan) if task.name == task_name)
    began = time.perf_counter()
    arrays = task.execute(Monitor(scratch, lambda share, text="": None))
    return arrays, time.perf_counter() - began

"""What `iblr` understands on the command line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import iblr
from iblr.reproduce import report, results
from iblr.reproduce.catalogue import EXPERIMENTS
from iblr.reproduce.methods import Plan
from iblr.reproduce.parallel import run_ahead
from iblr.reproduce.results import Result, ResultError
from iblr.reproduce.runner import ReproduceError, check_folder, chosen, clear, reproduce

FULL_SEEDS = 5
INTERRUPTED = 130
COLOURS = {"holds": "green", "does not hold": "red"}

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=iblr.__doc__
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(iblr.__version__)
        raise typer.Exit


@app.command("reproduce")
def _reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Experiments; all if none is named."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full/--quick", help="The paper's iterations, or all of it in minutes."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results and the report.")] = Path(
        "reproduced"
    ),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of every method: 1 if quick, else 5.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the results there.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results there.")
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(min=0.01, help="Minutes a piece of work may take; it stops where it is."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to run pieces of work in.")] = 1,
    show: Annotated[bool, typer.Option("--list", help="Show the experiments and exit.")] = False,
) -> None:
    """Run the experiments of the paper and write a report.

    Results are kept in the folder after every piece of work: one JSON and one NPZ file an
    experiment, and the report, index.html.
    """
    if show:
        _list()
        return
    plan = Plan(full, seeds or (FULL_SEEDS if full else 1), None if limit is None else 60 * limit)
    try:
        picked = chosen(names or [], EXPERIMENTS)
        check_folder(out, picked, plan, resume, overwrite)
        if not resume:
            clear(out, picked)
        if jobs > 1:
            run_ahead(picked, plan, out, jobs)
        found = reproduce(picked, plan, out)
        page = _write_report(out)
    except KeyboardInterrupt:
        _write_report(out)
        _fail(f"Interrupted. What there is is in {out}; go on with --resume.", INTERRUPTED)
    except (ReproduceError, ResultError) as error:
        _fail(str(error))
    _summary(found)
    print(f"\nReport: {page}")
    wrong = [
        f"{r.experiment}: {r.reason}"
        for r in found
        if r.status == "failed" or (names and r.status == "not run")
    ]
    wrong += [f"{r.experiment}: {fault}" for r in found if r.section for fault in r.section.faults]
    if wrong:
        _fail("\n".join(wrong))


def _write_report(folder: Path) -> Path:
    there, wrong = results.load_all(folder, [experiment.name for experiment in EXPERIMENTS])
    for message in wrong:
        print(message, file=sys.stderr)
    return report.write(folder, there)


def _list() -> None:
    table = Table("name", "figure", "title", box=None)
    for experiment in EXPERIMENTS:
        table.add_row(experiment.name, experiment.figure, experiment.title)
    Console().print(table)


def _summary(found: Sequence[Result]) -> None:
    """All claims, and what came of each."""
    table = Table("experiment", "claim", "verdict", "ours", "published")
    doubts = []
    for result in found:
        if result.section is None:
            status = "failed" if result.status == "failed" else "not run"
            table.add_row(result.experiment, result.reason, f"[yellow]{status}", "", "")
            continue
        for claim in result.section.claims:
            verdict = f"[{COLOURS.get(claim.verdict, 'yellow')}]{claim.verdict}"
            table.add_row(result.experiment, claim.text, verdict, claim.ours, claim.published)
            if claim.holds is False:
                doubts.append(f"{result.experiment}: {claim.text}: {claim.why}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    claims = [c for r in found if r.section is not None for c in r.section.claims]
    judged = [claim.holds for claim in claims if claim.holds is not None]
    console.print(f"{sum(judged)} of {len(judged)} claims hold.")
    for line in doubts:
        console.print(f"Does not hold: {line}", highlight=False)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(code)

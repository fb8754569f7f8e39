"""`rkr reproduce`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rkr.cli import complete
from rkr.cli.console import console, watched
from rkr.cli.options import OUTPUT, SCHEDULE, WHAT, Cluster, Data, Gpus, Json, Memory, Out, Threads, Workers
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.experiment.plan import Plan

EXAMPLES = ("rkr reproduce --list", "rkr reproduce table-lenet --quick")


def reproduce(
    exhibit: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXHIBIT]",
            help="A table or figure of the paper (default: list all of them).",
            autocompletion=complete.exhibits,
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(help="Runs per method (default: as many as in the paper).", rich_help_panel=WHAT),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Run nothing and print the results so far.", rich_help_panel=WHAT)
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Use a much shorter schedule. Results are labelled as quick.", rich_help_panel=SCHEDULE
        ),
    ] = False,
    data: Data = None,
    out: Out = Path("runs"),
    workers: Workers = 1,
    threads: Threads = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    memory: Memory = None,
    list_all: Annotated[
        bool,
        typer.Option(
            "--list", help="List all tables and figures with recipe, data, time and progress.", rich_help_panel=OUTPUT
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Reproduce a table or figure of the paper: run what is missing, then compare with the published numbers."""
    from rkr.report.exhibits import exhibit_json, exhibit_notes, exhibit_table, listing, listing_note, listing_table
    from rkr.report.reproduce import exhibit_names, load_exhibit, shown

    if list_all or exhibit is None:
        rows = listing([load_exhibit(name) for name in exhibit_names()], out, data, quick)
        if json_:
            print(json.dumps(rows, indent=2))
        else:
            console().print(listing_table(rows))
            print(listing_note(quick))
        return
    chosen = load_exhibit(exhibit)
    if runs is not None and runs < 1:
        raise UsageError(f"--runs must be at least 1, not {runs}")
    if not show:
        _run(chosen.plans(out, data, runs, quick), workers, threads, (cluster, gpus, memory), json_)
    found = shown(chosen, out, quick)
    if json_:
        print(json.dumps(exhibit_json(chosen, found, quick)))
        return
    console().print(exhibit_table(chosen, found, quick))
    for note in exhibit_notes(chosen, found):
        print(note)


def _run(
    plans: list[Plan],
    workers: int,
    threads: int | None,
    where: tuple[str | None, float | None, str | None],
    json_: bool,
) -> None:
    from rkr.experiment.execution import Execution, byte_count
    from rkr.experiment.runner import run_plan
    from rkr.report.outcome import draw

    cluster, gpus, memory = where
    execution = Execution(workers, threads, cluster=cluster, gpus=gpus, memory=byte_count(memory))
    for plan in plans:
        watched(json_, partial(run_plan, plan, execution), execution.cluster)
        figures = draw(plan.root)
        if not json_:
            print(f"figures: {figures}")

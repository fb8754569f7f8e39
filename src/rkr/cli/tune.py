"""`rkr tune`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rkr.cli import complete
from rkr.cli.console import watched
from rkr.cli.options import WHAT, Data, Epochs, Json, Limit, Out, RecipeName, Threads, Workers
from rkr.errors import UsageError

EXAMPLES = (
    "rkr tune cifar100-lenet --method ewc",
    "rkr tune cifar100-lenet --method si --grid strength=0.1,1,10 --epochs 20",
)


def tune(
    recipe: RecipeName,
    method: Annotated[
        str,
        typer.Option(help="Method whose options are tuned.", autocompletion=complete.method, rich_help_panel=WHAT),
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUES",
            help="An option and its values, such as strength=0.1,1,10 (default: the method's grid). Can be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(help="Number of tasks, from the first one (default: 3, or all if fewer).", rich_help_panel=WHAT),
    ] = None,
    order: Annotated[
        str | None, typer.Option(help="Task order (default: the recipe's first).", rich_help_panel=WHAT)
    ] = None,
    epochs: Epochs = None,
    limit: Limit = None,
    data: Data = None,
    out: Out = Path("runs"),
    workers: Workers = 1,
    threads: Threads = None,
    json_: Json = False,
) -> None:
    """Choose a method's options on the validation splits of the first tasks. The test split is never used."""
    from rkr.experiment.execution import Execution
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.tune import (
        outcome,
        outcome_json,
        outcome_lines,
        parsed_grid,
        run_search,
        search_plan,
        tuning,
        write_chosen,
    )

    if tasks is not None and tasks < 1:
        raise UsageError(f"--tasks must be at least 1, not {tasks}")
    loaded = load_recipe(recipe)
    tasks = min(3, loaded.stream.tasks) if tasks is None else tasks
    search = tuning(loaded, method, tasks, out, parsed_grid(grid or ()))
    plan = search_plan(search, order, epochs, data, limit)
    done = watched(json_, partial(run_search, plan, Execution(workers, threads)))
    assert done is not None
    plan, diverged = done
    found = outcome(search, plan)
    chosen = write_chosen(search, plan, found, diverged)
    if json_:
        print(json.dumps(outcome_json(search, found, diverged)))
    else:
        print(*outcome_lines(search, plan, found, diverged, chosen), sep="\n")

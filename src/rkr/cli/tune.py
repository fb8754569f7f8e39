"""`rkr tune`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rkr.cli import complete
from rkr.cli.console import watched
from rkr.cli.options import (
    WHAT,
    Cluster,
    Data,
    Epochs,
    Gpus,
    Json,
    Limit,
    Memory,
    Out,
    RecipeName,
    Threads,
    Workers,
)
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.experiment.plan import Plan
    from rkr.experiment.tune import Tuning

EXAMPLES = (
    "rkr tune cifar100-lenet --method ewc",
    "rkr tune cifar100-lenet --method ewc --search tpe --trials 30 --cluster auto",
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
    range_: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="OPTION=LOW:HIGH[:log]",
            help="A range to search, such as strength=0.1:10:log (default: the method's). Can be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    search_: Annotated[
        str | None,
        typer.Option(
            "--search",
            metavar="SAMPLER",
            help="Search by Optuna: grid, random or tpe (default: every value of the grid, without Optuna).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Trials, earlier ones included (default: 20, or the grid).", rich_help_panel=WHAT),
    ] = None,
    pruner: Annotated[
        str,
        typer.Option(help="Which trials to stop after a task: none, median or halving.", rich_help_panel=WHAT),
    ] = "none",
    search_seed: Annotated[int, typer.Option(help="Seed of the search.", rich_help_panel=WHAT)] = 0,
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
    cluster: Cluster = None,
    gpus: Gpus = None,
    memory: Memory = None,
    json_: Json = False,
) -> None:
    """Choose a method's options on the validation splits of the first tasks. The test split is never used."""
    from rkr.experiment.execution import Execution, byte_count
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.tune import (
        outcome,
        outcome_json,
        outcome_lines,
        parsed_grid,
        parsed_ranges,
        run_search,
        search_plan,
        tuning,
        write_chosen,
    )

    if tasks is not None and tasks < 1:
        raise UsageError(f"--tasks must be at least 1, not {tasks}")
    loaded = load_recipe(recipe)
    tasks = min(3, loaded.stream.tasks) if tasks is None else tasks
    execution = Execution(workers, threads, cluster=cluster, gpus=gpus, memory=byte_count(memory))
    values = {**(parsed_grid(grid or ()) or {}), **parsed_ranges(range_ or ())} or None
    search, pruned = tuning(loaded, method, tasks, out, values, search_ is None), []
    if search_ is None:
        if range_ or trials is not None or pruner != "none":
            raise UsageError("--range, --trials and --pruner are for --search grid, random or tpe")
        plan = search_plan(search, order, epochs, data, limit)
        done = watched(json_, partial(run_search, plan, execution), cluster)
        assert done is not None
        plan, diverged = done
    else:
        from rkr.experiment.search import Strategy, run_trials

        strategy = Strategy(search_, trials, pruner, search_seed)

        def make(search: Tuning) -> Plan:
            return search_plan(search, order, epochs, data, limit)

        came = watched(json_, lambda watch: run_trials(search, make, strategy, execution, watch), cluster)
        assert came is not None
        search, plan, diverged, pruned = came.search, came.plan, came.diverged, came.pruned
    found = outcome(search, plan)
    chosen = write_chosen(search, plan, found, diverged, pruned)
    if json_:
        print(json.dumps(outcome_json(search, found, diverged, pruned)))
    else:
        print(*outcome_lines(search, plan, found, diverged, chosen, pruned), sep="\n")

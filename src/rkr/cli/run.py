"""`rkr run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rkr.cli import complete
from rkr.cli.console import RANK, console, watched
from rkr.cli.options import (
    OUTPUT,
    RESOURCES,
    SCHEDULE,
    WHAT,
    Cluster,
    Data,
    Epochs,
    Gpus,
    Json,
    Limit,
    Memory,
    Out,
    RecipeNames,
    Threads,
    Workers,
    comma_separated,
)

if TYPE_CHECKING:
    from rkr.experiment.execution import Execution
    from rkr.experiment.plan import Plan

EXAMPLES = (
    "rkr run cifar100-lenet --method rkr,finetune --epochs 20",
    "rkr run gzsl --method rkr --seeds 5 --workers 2",
    "rkr run cifar100-lenet --orders 5 --seeds 3 --cluster auto --threads 2",
    "torchrun --nproc-per-node 4 -m rkr run imagenet-resnet18",
)


def run(
    recipes: RecipeNames,
    method: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas (default: those of the recipe).",
            autocompletion=complete.methods,
            rich_help_panel=WHAT,
        ),
    ] = None,
    orders: Annotated[
        int | None,
        typer.Option(
            help="Number of task orders (default: 1, or all orders that the paper reports one by one).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Task orders, separated by commas: seeds, A to E, fixed, or a first dataset such as first-CUB.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, from 0 (default: 1).", rich_help_panel=WHAT)
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            help="Seeds of initial weights and batches, separated by commas (default: the recipe's).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation", help="Test on the validation split instead of the test split.", rich_help_panel=WHAT
        ),
    ] = False,
    epochs: Epochs = None,
    limit: Limit = None,
    save_minutes: Annotated[
        float,
        typer.Option(help="Minutes between checkpoints. One is also saved after each task.", rich_help_panel=SCHEDULE),
    ] = 5.0,
    data: Data = None,
    out: Out = Path("runs"),
    workers: Workers = 1,
    threads: Threads = None,
    cluster: Cluster = None,
    gpus: Gpus = None,
    memory: Memory = None,
    accelerator: Annotated[
        str, typer.Option(help="Device: auto, cpu, cuda or mps.", rich_help_panel=RESOURCES)
    ] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="32-true (default) or bf16-mixed.", rich_help_panel=RESOURCES)
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write TensorBoard event files to the run folders.", rich_help_panel=OUTPUT),
    ] = False,
    figures: Annotated[
        bool, typer.Option(help="Write figures of all runs of the recipe.", rich_help_panel=OUTPUT)
    ] = True,
    json_: Json = False,
) -> None:
    """Train and test methods on the tasks of recipes. Run the command again to resume."""
    from rkr.experiment.machine import avoid_broken_amx

    if precision == "bf16-mixed":
        avoid_broken_amx()  # before torch computes anything: recipes are checked by running their networks
    from rkr.experiment.execution import Execution, byte_count
    from rkr.experiment.plan import Plan, choose_orders, choose_seeds
    from rkr.experiment.recipes import load_recipe

    plans = []
    for recipe in recipes:
        loaded = load_recipe(recipe)
        loaded = loaded.on_validation() if validation else loaded
        methods = tuple(loaded.methods) if method is None else comma_separated(method)
        chosen = choose_orders(loaded, orders, () if order is None else comma_separated(order))
        drawn = choose_seeds(loaded, seeds, () if seed is None else comma_separated(seed))
        changes = (epochs, drawn, limit, data, validation, accelerator, precision)
        plans.append(Plan(loaded, recipe, methods, chosen, out, *changes))
    execution = Execution(workers, threads, save_minutes, tensorboard, cluster, gpus, byte_count(memory))
    for plan in plans:
        run_and_show(plan, execution, json_, figures=figures, more=plan is not plans[-1])


def run_and_show(
    plan: Plan, execution: Execution, json_: bool, matrices: bool = False, figures: bool = True, more: bool = False
) -> None:
    """Run a plan and print its results; with `more`, other plans follow it."""
    from rkr.experiment.execution import Diverged
    from rkr.experiment.folder import RunFolder
    from rkr.experiment.runner import run_plan

    diverged: Diverged | None = None
    try:
        watched(json_, lambda watch: run_plan(plan, execution, watch, more), execution.cluster)
    except Diverged as error:  # all other runs are complete
        diverged = error
    specs = [spec for spec in plan.specs if diverged is None or RunFolder(plan.folder(spec)).finished]
    if specs and not RANK:
        from rkr.report.outcome import Outcome, draw

        outcome = Outcome(plan, specs)
        drawn = draw(plan.root) if figures else None
        if json_:
            print(*outcome.json_lines(), sep="\n")
        else:
            screen = console()
            for table in outcome.tables(screen.width, matrices):
                screen.print(table)
            print(*outcome.lines(drawn), sep="\n")
    if diverged is not None:
        raise diverged

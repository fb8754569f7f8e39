"""The command `rkr`. Thin: it parses, calls and prints; what is heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from rkr.errors import DataWarning, RkrError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from rkr.experiment.events import Watch
    from rkr.experiment.plan import Plan
    from rkr.experiment.runner import Execution
    from rkr.experiment.spec import RunSpec
    from rkr.report.reproduce import Exhibit

app = typer.Typer(
    name="rkr",
    help="Teach neural networks new tasks without forgetting the old ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

T = TypeVar("T")
_RANK = int(os.environ.get("RANK", "0"))  # of several processes the first speaks for all
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
_WORKERS = "Runs at once, each in its own process; candidates of a run, where there are more workers than runs."


def main() -> None:
    """Entry point: an error of the package is one line on stderr, and its exit code or 2. So are warnings of data."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        app()
    except RkrError as error:
        print("rkr: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


_showwarning = warnings.showwarning
_warned: set[str] = set()  # data are read again for every recipe and order


def _warn(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    if not issubclass(category, DataWarning):
        _showwarning(message, category, *rest)
    elif str(message) not in _warned:
        _warned.add(str(message))
        print(f"rkr: {message}", file=sys.stderr)


def _version(asked: bool) -> None:
    if asked:
        from rkr import __version__

        print(f"rkr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------
# rkr list


@app.command("list")
def list_(
    name: Annotated[
        str | None, typer.Argument(help="A method or network: all its options. A recipe: its file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Recipes, methods, networks and data sets, one line each; or all of one."""
    from rkr.cli.listing import everything, in_words, options_of

    if name is None:
        found = everything()
        if json_:
            print(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            _print_names(found)
    elif json_:
        print(json.dumps(options_of(name), indent=2, ensure_ascii=False))
    else:
        print(in_words(name))


def _print_names(found: dict[str, dict[str, str]]) -> None:
    """Tables on a terminal; in a pipe plain lines, which are never wrapped or cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    width = max(len(name) for names in found.values() for name in names)
    for title, names in found.items():
        if not console.is_terminal:
            print(title, *(f"  {name:{width}}  {text}" for name, text in names.items()), "", sep="\n")
            continue
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True, min_width=width)
        table.add_column()
        for name, text in names.items():
            table.add_row(name, text)
        console.print(table)
        console.print()


# ---------------------------------------------------------------------------------------------------------
# rkr cost


@app.command()
def cost(
    network: Annotated[str, typer.Argument(help="A network, as `rkr list` names them.")],
    rank: Annotated[
        int | None, typer.Option(help="K. The method's own by default: 2 for rkr, 16 for zero-shot tasks.")
    ] = None,
    tasks: Annotated[int, typer.Option(help="How many tasks.")] = 10,
    classes: Annotated[
        int | None, typer.Option(help="Classes of all tasks together; the network's by default.")
    ] = None,
    method: Annotated[str, typer.Option(help="A method of `rkr list`; for cada-vae one of zero-shot tasks.")] = "rkr",
    stem: Annotated[str | None, typer.Option(help="Of resnet18: cifar or imagenet.")] = None,
    input_: Annotated[
        str | None, typer.Option("--input", help="Shape of an image, such as 3,32,32, or number of features.")
    ] = None,
    json_: Json = False,
) -> None:
    """Parameters, bytes and multiply-adds that tasks cost, untrained."""
    from torch import nn

    from rkr.experiment.counting import count
    from rkr.experiment.recipes.known import network_arguments
    from rkr.experiment.recipes.settings import NetworkSettings

    given = {"classes": classes, "stem": stem}
    arguments = {name: value for name, value in given.items() if value is not None}
    shape = _shape(input_) if input_ is not None else None
    if shape is not None and len(shape) == 1 and "in_features" in network_arguments(network):
        arguments["in_features"] = shape[0]
    settings = NetworkSettings.checked({"name": network, **arguments})
    head = settings.head if isinstance(getattr(settings.build(), settings.head, None), nn.Linear) else None
    text, values = count(method, settings.build, head, tasks, rank, shape)
    print(json.dumps(values, indent=2) if json_ else text)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(f"--input: give a shape such as 3,32,32, not {text!r}")
    return shape


# ---------------------------------------------------------------------------------------------------------
# rkr features


@app.command()
def features(
    images: Annotated[Path, typer.Argument(help="A folder of class folders: IMAGES/<class>/<image>.")],
    out: Annotated[Path, typer.Option(help="The MATLAB file to write.")] = Path("features.mat"),
    model: Annotated[
        str | None,
        typer.Option(help="package.module:function that returns an nn.Module. EfficientNet-Lite0 by default."),
    ] = None,
    size: Annotated[int, typer.Option(help="Images are resized, and their centres cut out, to so many pixels.")] = 224,
    mean: Annotated[
        str | None, typer.Option(help="Of red, green, blue from 0 to 1: 0.485,0.456,0.406 for --model.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="In the same way: 0.229,0.224,0.225 for --model.")] = None,
    batch: Annotated[int, typer.Option(help="Images at once.")] = 64,
    threads: Annotated[int | None, typer.Option(help="Threads that decode and compute. All cores by default.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Features of your own images, for zero-shot learning; the same command goes on after an interruption."""
    from rkr.data.features import Options, choose_progress, extract, three_numbers

    options = Options(
        model,
        size,
        None if mean is None else three_numbers("--mean", mean),
        None if std is None else three_numbers("--std", std),
        batch,
        threads,
        force,
    )
    try:
        with choose_progress() as watch:
            found = extract(images, out, options, watch)
    except KeyboardInterrupt:
        print("The same command goes on from here.")
        raise typer.Exit(130) from None  # as a shell counts Ctrl-C
    print(f"{out}: {found.images} images of {found.classes} classes, {found.width} features each")


# ---------------------------------------------------------------------------------------------------------
# rkr run, rkr demo


@app.command()
def run(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE", help="Recipes, as `rkr list` names them, or .toml files of your own."),
    ],
    method: Annotated[
        str | None, typer.Option(help="Methods, separated by commas. Those of the recipe by default.")
    ] = None,
    orders: Annotated[
        int | None,
        typer.Option(
            help="How many of the recipe's orders of tasks. 1 by default; all if the paper has numbers of each."
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help="Which orders, separated by commas: seeds, A to E, fixed, or first-CUB and the like."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Where data sets lie. $RKR_DATA or the user's cache else.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs"),
    epochs: Annotated[int | None, typer.Option(help="Another length of the schedule, its steps in proportion.")] = None,
    seed: Annotated[str | None, typer.Option(help="Other seeds of initial values and batches, by commas.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds: 0, 1, ... 1 by default.")] = None,
    limit: Annotated[int | None, typer.Option(help="Training images of each class, at most.")] = None,
    workers: Annotated[int, typer.Option(help=_WORKERS)] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each run. All cores over the workers else.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Test on what is held out of training, for choices.")
    ] = False,
    accelerator: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="32-true or bf16-mixed. 32-true by default.")] = None,
    save_minutes: Annotated[float, typer.Option(help="Save the state so often, and after each task.")] = 5.0,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard event files to the run folders.")] = False,
    figures: Annotated[bool, typer.Option(help="Write figures of all runs of the recipe.")] = True,
    helper: Annotated[bool, typer.Option("--helper", hidden=True)] = False,
    json_: Json = False,
) -> None:
    """Train and test methods on a recipe's tasks; the same command goes on after an interruption.

    Several GPUs or machines: torchrun --nproc-per-node 4 -m rkr run ...
    """
    from rkr.experiment.machine import avoid_broken_amx

    if precision == "bf16-mixed":
        avoid_broken_amx()  # first of all: networks compute when recipes are checked
    from rkr.experiment.plan import Plan, choose_orders, choose_seeds
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.runner import Execution

    plans = []
    for recipe in recipes:
        loaded = load_recipe(recipe)
        loaded = loaded.on_validation() if validation else loaded
        methods = tuple(loaded.methods) if method is None else _names(method)
        chosen = choose_orders(loaded, orders, () if order is None else _names(order))
        drawn = choose_seeds(loaded, seeds, () if seed is None else _names(seed))
        changes = (epochs, drawn, limit, data, validation, accelerator, precision)
        plans.append(Plan(loaded, recipe, methods, chosen, out, *changes))
    execution = Execution(workers, threads, save_minutes, tensorboard)
    for plan in plans:
        if helper:
            _help(plan, execution)
        else:
            _run(plan, execution, json_, figures=figures, more=plan is not plans[-1])


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs"),
    json_: Json = False,
) -> None:
    """Learn 5 tasks of 2 handwritten digits with RKR and by fine-tuning; about a minute, no download."""
    from rkr.experiment.plan import Plan
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.runner import Execution

    recipe = load_recipe("digits")
    _run(
        Plan(recipe, "digits", tuple(recipe.methods), recipe.orders[:1], out),
        Execution(threads=1),
        json_,
        matrices=True,
    )


@app.command()
def reproduce(
    exhibit: Annotated[str | None, typer.Argument(help="A table or figure of the paper, as --list names them.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="All of them: recipe, data, time, state.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A much shorter schedule, and labelled so.")] = False,
    runs: Annotated[int | None, typer.Option(help="Runs of each method. As many as the paper has else.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Run nothing; show what there is.")] = False,
    data: Annotated[str | None, typer.Option(help="Where data sets lie. $RKR_DATA or the user's cache else.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs"),
    workers: Annotated[int, typer.Option(help=_WORKERS)] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each run. All cores over the workers else.")] = None,
    json_: Json = False,
) -> None:
    """A table or figure of the paper: run what is missing, then show paper, ours, difference and verdict."""
    from rkr.report.reproduce import exhibit_names, load_exhibit

    if list_all or exhibit is None:
        _list_exhibits([load_exhibit(name) for name in exhibit_names()], out, data, quick, json_)
        return
    chosen = load_exhibit(exhibit)
    if runs is not None and runs < 1:
        raise UsageError(f"--runs must be at least 1, not {runs}")
    if not show:
        _run_exhibit(chosen.plans(out, data, runs, quick), workers, threads, json_)
    _show_exhibit(chosen, out, quick, json_)


def _run_exhibit(plans: list[Plan], workers: int, threads: int | None, json_: bool) -> None:
    from rkr.experiment.runner import Execution, run_plan

    for plan in plans:
        _watched(json_, partial(run_plan, plan, Execution(workers, threads)))
        _draw(plan)
        if not json_:
            print(f"figures: {plan.root / 'figures'}")


def _list_exhibits(exhibits: list[Exhibit], out: Path, data: str | None, quick: bool, json_: bool) -> None:
    from rich.table import Table

    from rkr.report.reproduce import state_of

    rows: list[dict[str, Any]] = []
    for exhibit in exhibits:
        state = state_of(exhibit, out, data, quick)
        minutes = exhibit.quick.minutes if quick else exhibit.minutes
        rows.append(
            {
                "name": exhibit.name,
                "title": exhibit.title,
                "where": exhibit.where,
                "recipes": list(exhibit.recipes),
                "data": state.data,
                "hours": round(minutes * (state.of - state.done) / 60, 1),
                "done": state.done,
                "of": state.of,
            }
        )
    if json_:
        print(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "what", "recipes", "data", "time left*", "runs done"):
        table.add_column(name, overflow="fold")
    for row in rows:
        done = "counted" if not row["of"] else f"{row['done']} of {row['of']}"
        time_left = f"{row['hours']:g} h" if row["hours"] else "-"
        table.add_row(row["name"], row["title"], ", ".join(row["recipes"]), row["data"], time_left, done)
    console = _console()
    console.print(table)
    schedule = "shortened schedules, one run of each method" if quick else "the paper's schedule and number of runs"
    print(f"* at most about, every run taken for the longest one: on one core, for {schedule}; see --quick and --runs")


def _show_exhibit(exhibit: Exhibit, out: Path, quick: bool, json_: bool) -> None:
    from rich.table import Table

    from rkr.report.reproduce import shown

    found = shown(exhibit, out, quick)
    if json_:
        label = exhibit.quick.model_dump(include={"epochs", "limit"}) if quick else None
        rows = [line.to_json() for line in found.lines]
        about = {"quick": label, "notes": list(exhibit.notes), "left_out": list(found.left_out)}
        print(json.dumps({"event": "exhibit", "name": exhibit.name, **about, "lines": rows}))
        return
    title = f"{exhibit.title} ({exhibit.where})"
    changed = f"quick: {exhibit.quick.epochs} epochs, at most {exhibit.quick.limit} training samples of a class"
    table = Table(title=f"{title}; {changed}" if quick else title, title_justify="left", box=None, header_style="bold")
    for name in ("recipe", "method", "number", "paper", "ours", "difference", "n", "verdict"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("paper", "ours", "difference", "n") else "left"
        )
    for line in found.lines:
        table.add_row(*line.cells)
    _console().print(table)
    for note in exhibit.notes:
        print(f"note: {note}")
    for reason in found.left_out:
        print(f"left out: {reason}")


def _console() -> Console:
    """A console; where nothing has an edge, lines are not broken at 80 columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 160))


@app.command()
def tune(
    recipe: Annotated[str, typer.Argument(help="A recipe, as `rkr list` names them, or a .toml file of your own.")],
    method: Annotated[str, typer.Option(help="The method whose options are chosen.")],
    tasks: Annotated[int | None, typer.Option(help="How many tasks, the first ones. 3 by default, or all.")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="An option and its values, such as strength=0.1,1,10; may be repeated.")
    ] = None,
    order: Annotated[str | None, typer.Option(help="The order of tasks. The recipe's first by default.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Another length of the schedule, its steps in proportion.")] = None,
    limit: Annotated[int | None, typer.Option(help="Training samples of each class, at most.")] = None,
    data: Annotated[str | None, typer.Option(help="Where data sets lie. $RKR_DATA or the user's cache else.")] = None,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs"),
    workers: Annotated[int, typer.Option(help=_WORKERS)] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of each run. All cores over the workers else.")] = None,
    json_: Json = False,
) -> None:
    """Choose a method's options on validation samples of the first tasks, never on the test."""
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.runner import Execution
    from rkr.experiment.tune import (
        as_good,
        at_an_edge,
        outcome,
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
    done = _watched(json_, partial(run_search, plan, Execution(workers, threads)))
    assert done is not None
    plan, diverged = done
    found = outcome(search, plan)
    chosen, best = write_chosen(search, plan, found, diverged), next(iter(found))
    if json_:
        print(
            json.dumps(
                {
                    "event": "tuned",
                    "method": method,
                    "chosen": search.points[best],
                    "tried": found,
                    "diverged": diverged,
                }
            )
        )
        return
    for name, value in found.items():
        print(f"{name}: {value:.2f} %")
    for name in diverged:
        print(f"{name}: training diverged")
    print(f"chosen: {chosen}; as a section for a recipe in {search.chosen(plan)}")
    if equal := as_good(found):
        print(f"as good: {', '.join(equal)}; the first one tried was chosen")
    if not any(found.values()):
        print("all are 0, which decides nothing: train for longer, or on more samples")
    for option in at_an_edge(search, found, diverged):
        print(f"{option}: the best value is at the edge of what was tried; try more beyond it with --grid")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{text!r} names nothing")
    return names


def _watched(json_: bool, work: Callable[[Watch], T]) -> T:
    """Do with a display what can be interrupted; if it was, and so yields nothing, say how to go on and leave."""
    from rkr.experiment.display import choose_display
    from rkr.experiment.runner import STOPPED

    try:
        with choose_display("json" if json_ else "auto") as watch:
            done = work(watch)
    except KeyboardInterrupt:  # Ctrl-C for the second time: nothing is waited for
        if not json_ and not _RANK:
            print("Stopped at once. The same command goes on from the last saved state.")
        raise typer.Exit(STOPPED) from None
    if not done and not _RANK:
        if not json_:
            print("The same command goes on from here.")
        raise typer.Exit(STOPPED)
    return done


def _help(plan: Plan, execution: Execution) -> None:
    """Train the candidates that a process which executes a run names on the standard input."""
    from rkr.experiment.runner import help_run
    from rkr.experiment.workers import DONE, asked_lines

    def answer() -> None:
        print(DONE, flush=True)

    _watched(True, lambda watch: help_run(plan, execution, watch, asked_lines(), answer))


def _draw(plan: Plan) -> None:
    """Figures of all runs of a recipe that there are; those that cannot be compared get folders of their own."""
    from rkr.report import comparable
    from rkr.report.figures import write_figures
    from rkr.report.scan import scan

    groups = comparable(scan(plan.root).results)
    for name, runs in groups.items():
        write_figures(runs, plan.root / "figures" / (name if len(groups) > 1 else ""))


def _run(
    plan: Plan, execution: Execution, json_: bool, matrices: bool = False, figures: bool = True, more: bool = False
) -> None:
    """Run, then show what came out; `more` plans come after it."""
    from rkr.experiment.folder import RunFolder
    from rkr.experiment.loop import Diverged
    from rkr.experiment.runner import run_plan

    diverged: Diverged | None = None
    try:
        _watched(json_, lambda watch: run_plan(plan, execution, watch, more))
    except Diverged as error:  # all other runs are complete
        diverged = error
    specs = [spec for spec in plan.specs if diverged is None or RunFolder(plan.folder(spec)).finished]
    if specs and not _RANK:
        _show(plan, specs, json_, matrices, figures)
    if diverged is not None:
        raise diverged


def _show(plan: Plan, specs: Sequence[RunSpec], json_: bool, matrices: bool, figures: bool) -> None:
    """Tables and figures of runs of a plan, and where their files lie."""
    from rkr.experiment.results import read_result
    from rkr.report import (
        accuracy_table,
        added_by_a_task,
        comparable,
        summary_json,
        summary_tables,
        zero_shot_table,
    )

    results = [read_result(plan.folder(spec)) for spec in specs]
    shortened = plan.epochs is not None or plan.limit is not None  # the paper's numbers are of its own schedule
    groups = [
        (runs, {} if shortened else plan.recipe.published_numbers(runs[0].order))
        for runs in comparable(results).values()
    ]
    if figures:
        _draw(plan)
    if json_:
        for runs, paper in groups:
            print(json.dumps({"event": "summary", **summary_json(runs, paper)}))
        return
    console = _console()
    if matrices:
        for result in results:
            console.print(accuracy_table(result))
    for runs, paper in groups:
        for table in summary_tables(runs, paper, width=console.width):
            console.print(table)
        if plan.recipe.zero_shot:
            console.print(zero_shot_table(runs))
    for result in results:
        print(f"{result.method} {result.label}: {added_by_a_task(result)}")
    if figures:
        print(f"figures: {plan.root / 'figures'}")
    for spec in specs:
        print(f"{spec.method} {spec.label}: results and model in {plan.folder(spec)}")


# ---------------------------------------------------------------------------------------------------------
# rkr compare


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs: of a method or of a recipe.")],
    json_: Json = False,
) -> None:
    """Methods or runs beside each other, and how far each is from the first over the same orders and seeds."""
    from rkr.report import comparison_json, comparison_tables
    from rkr.report.compare import compare as compare_folders

    found = compare_folders(folders)
    if json_:
        print(json.dumps(comparison_json(found), indent=2))
        return
    console = _console()
    for table in comparison_tables(found):
        console.print(table)
    for item in found.skipped:
        print(f"left out: {item.path}: {item.reason}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------
# rkr report


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, such as runs/; all below them is found.")],
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("report"),
    figures: Annotated[bool, typer.Option(help="Write figures for print.")] = True,
) -> None:
    """A page of results for a browser, and beside it tables (.md .csv .tex) and figures (.svg .png)."""
    from rkr.report.html import write_report

    written = write_report(folders, out, figures)
    for item in written.skipped:
        print(f"left out: {item.path}: {item.reason}", file=sys.stderr)
    runs = f"{written.runs} run" + ("" if written.runs == 1 else "s")
    print(f"{written.page}: {runs}, {written.page.stat().st_size / 1e6:.2f} MB")
    for folder, files in (("tables", written.tables), ("figures", written.figures)):
        if files:
            print(f"{out / folder}: {len(files)} files")

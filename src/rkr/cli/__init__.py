"""The command `rkr`, with one module per command.

Commands parse, call and print. They import torch and everything else that is slow only when they run, so that
`rkr --help` and shell completion stay fast.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

from rkr.cli import (
    compare,
    cost,
    demo,
    evaluate,
    export,
    features,
    hub,
    learn,
    predict,
    queue,
    report,
    reproduce,
    run,
    serve,
    tasks,
    tune,
)
from rkr.cli import list as list_
from rkr.errors import DataWarning, PluginWarning, RkrError
from rkr.importing import importable

__all__ = ["app", "main"]

app = typer.Typer(
    name="rkr",
    help="Teach neural networks new tasks without forgetting the old ones.",
    epilog="Run [bold]rkr COMMAND --help[/bold] for the options and an example of a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _add(command: Callable[..., None], name: str, panel: str, *examples: str) -> None:
    """Add a command, with examples at the end of its help."""
    epilog = "\n".join(["[bold]Examples:[/bold]" if len(examples) > 1 else "[bold]Example:[/bold]", *examples])
    app.command(name, rich_help_panel=panel, epilog=epilog)(command)


OWN, TRAIN, RESULTS, LOOK_UP = "Your own pictures", "Train and test", "Read results", "Look up"
_add(learn.learn, "learn", OWN, *learn.EXAMPLES)
_add(predict.predict, "predict", OWN, *predict.EXAMPLES)
_add(tasks.tasks, "tasks", OWN, *tasks.EXAMPLES)
_add(serve.serve, "serve", OWN, *serve.EXAMPLES)
_add(evaluate.evaluate, "evaluate", OWN, *evaluate.EXAMPLES)
_add(export.export, "export", OWN, *export.EXAMPLES)
_add(hub.push, "push", OWN, *hub.PUSH_EXAMPLES)
_add(hub.pull, "pull", OWN, *hub.PULL_EXAMPLES)
_add(demo.demo, "demo", TRAIN, "rkr demo")
_add(run.run, "run", TRAIN, *run.EXAMPLES)
_add(reproduce.reproduce, "reproduce", TRAIN, *reproduce.EXAMPLES)
_add(tune.tune, "tune", TRAIN, *tune.EXAMPLES)
_add(features.features, "features", TRAIN, *features.EXAMPLES)
_add(compare.compare, "compare", RESULTS, *compare.EXAMPLES)
_add(queue.queue, "queue", RESULTS, *queue.EXAMPLES)
_add(report.report, "report", RESULTS, *report.EXAMPLES)
_add(list_.list_, "list", LOOK_UP, *list_.EXAMPLES)
_add(cost.cost, "cost", LOOK_UP, *cost.EXAMPLES)


def _print_version(wanted: bool) -> None:
    if wanted:
        from rkr import __version__

        print(f"rkr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Errors of the package and data warnings are printed to stderr as one line each."""
    warnings.showwarning = _warn  # type: ignore[assignment]
    with suppress(FileNotFoundError):  # the directory is deleted
        importable(os.curdir)  # for methods, networks and sources by dotted name
    try:
        app(prog_name="rkr")
    except RkrError as error:
        print("rkr: " + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


_showwarning = warnings.showwarning
_warned: set[str] = set()  # the same data is read for every recipe and order; warn once


def _warn(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    if not issubclass(category, DataWarning | PluginWarning):
        _showwarning(message, category, *rest)
    elif str(message) not in _warned:
        _warned.add(str(message))
        print(f"rkr: {message}", file=sys.stderr)

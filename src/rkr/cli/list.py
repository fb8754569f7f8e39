"""`rkr list`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rkr.cli import complete
from rkr.cli.options import Json

EXAMPLES = ("rkr list", "rkr list ewc", "rkr list cifar100-lenet > mine.toml")


def list_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Method, network or dataset to describe, or recipe to print (default: list all of them).",
            autocompletion=complete.anything,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List recipes, methods, networks and datasets, or describe one of them."""
    from rkr.cli.listing import everything, in_words, options_of

    if json_:
        print(json.dumps(everything() if name is None else options_of(name), indent=2, ensure_ascii=False))
    elif name is None:
        _print_names(everything())
    else:
        print(in_words(name))


def _print_names(found: dict[str, dict[str, str]]) -> None:
    """Print tables on a terminal, and plain lines that are never wrapped in a pipe."""
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

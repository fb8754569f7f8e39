"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rkr.cli import complete
from rkr.errors import UsageError

# Titles of the groups of options in `rkr COMMAND --help`.
WHAT = "What to run"
SCHEDULE = "Schedule"
WHERE = "Where"
RESOURCES = "Resources"
OUTPUT = "Output"

RecipeNames = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE",
        help="Names of recipes (see `rkr list`) or paths of .toml files.",
        autocompletion=complete.recipes,
    ),
]
RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="Name of a recipe (see `rkr list`) or path of a .toml file.",
        autocompletion=complete.recipes,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(
        help="Epochs per task (default: the recipe's). The learning rate steps move in proportion.",
        rich_help_panel=SCHEDULE,
    ),
]
Limit = Annotated[
    int | None, typer.Option(help="Maximum number of training samples per class.", rich_help_panel=SCHEDULE)
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Dataset directory (default: $RKR_DATA, then the user cache).", rich_help_panel=WHERE
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory for results.", rich_help_panel=WHERE)]
Workers = Annotated[
    int,
    typer.Option(help="Number of parallel runs. Spare workers train candidates.", rich_help_panel=RESOURCES),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads per run (default: cores / workers; on a cluster the recipe's, or 1).", rich_help_panel=RESOURCES
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Execute runs on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; local starts one on this machine.",
        rich_help_panel=RESOURCES,
    ),
]
Gpus = Annotated[
    float | None,
    typer.Option(
        help="GPUs of each run on a cluster, or a share such as 0.5 (default: the recipe's).", rich_help_panel=RESOURCES
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of each run on a cluster, such as 4GB (default: the recipe's).",
        rich_help_panel=RESOURCES,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", rich_help_panel=OUTPUT)]


def comma_separated(text: str) -> tuple[str, ...]:
    """Split "a,b" into its distinct names, in order."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{text!r} contains no names")
    return names


def shape(text: str) -> tuple[int, ...]:
    """Parse "3,32,32" or "3x32x32"."""
    try:
        sizes = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--input must be a shape such as 3,32,32, not {text!r}")
    return sizes

"""`rkr cost`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rkr.cli import complete
from rkr.cli.options import WHAT, Json, shape

EXAMPLES = ("rkr cost resnet18 --rank 2", "rkr cost lenet --method pgn --tasks 5")


def cost(
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK",
            help="Name of a network (see `rkr list`) or package.module:function.",
            autocompletion=complete.networks,
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="Name of a method (see `rkr list`) or package.module:Class. cada-vae needs a zero-shot method.",
            autocompletion=complete.method,
            rich_help_panel=WHAT,
        ),
    ] = "rkr",
    rank: Annotated[
        int | None,
        typer.Option(
            help="Rank K of the rectification (default: the method's, 2 for images and 16 for zero-shot tasks).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    tasks: Annotated[int, typer.Option(help="Number of tasks.", rich_help_panel=WHAT)] = 10,
    classes: Annotated[
        int | None,
        typer.Option(help="Number of classes over all tasks (default: the network's).", rich_help_panel=WHAT),
    ] = None,
    stem: Annotated[str | None, typer.Option(help="Stem of resnet18: cifar or imagenet.", rich_help_panel=WHAT)] = None,
    input_: Annotated[
        str | None,
        typer.Option(
            "--input", help="Shape of an image, such as 3,32,32, or number of features.", rich_help_panel=WHAT
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="Name of the classification layer (default: the network's).", rich_help_panel=WHAT),
    ] = None,
    json_: Json = False,
) -> None:
    """Count the parameters, bytes and multiply-adds of a method's tasks, without training."""
    from rkr.experiment.counting import count_named

    text, values = count_named(
        network, method, tasks, rank, classes, stem, None if input_ is None else shape(input_), head
    )
    print(json.dumps(values, indent=2) if json_ else text)

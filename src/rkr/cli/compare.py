"""`rkr compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.console import console
from rkr.cli.options import Json

EXAMPLES = ("rkr compare runs/cifar100-lenet/rkr runs/cifar100-lenet/ewc", "rkr compare runs/gzsl --json")


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Run folders, or folders of a method or a recipe.")
    ],
    json_: Json = False,
) -> None:
    """Compare methods or runs with the first one, over the orders and seeds that they share."""
    from rkr.report import comparison_json, comparison_tables
    from rkr.report.compare import compare as compare_folders

    found = compare_folders(folders)
    if json_:
        print(json.dumps(comparison_json(found), indent=2))
        return
    screen = console()
    for table in comparison_tables(found):
        screen.print(table)
    for item in found.skipped:
        print(f"skipped: {item.path}: {item.reason}", file=sys.stderr)

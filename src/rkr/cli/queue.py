"""`rkr queue`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.console import console
from rkr.cli.options import Json

EXAMPLES = ("rkr queue runs/",)


def queue(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Directory of runs.")] = Path("runs"),
    json_: Json = False,
) -> None:
    """List what is running and where, what is waiting, and what failed and why."""
    from rkr.experiment.queue import read_queue
    from rkr.report.queue import queue_table, queue_words

    entries = read_queue(folder)
    if json_:
        print(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1))
        return
    if entries:
        console().print(queue_table(entries))
    print(queue_words(entries))

"""`rkr evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.console import console
from rkr.cli.learn import TaskName, Zoo
from rkr.cli.options import OUTPUT, Json

EXAMPLES = ("rkr evaluate zoo/ photos/birds-test --task birds --confusion birds.png",)


def evaluate(
    model: Zoo,
    pictures: Annotated[
        Path, typer.Argument(metavar="PICTURES", help="Class folders (or test/ with class folders), .csv or .jsonl.")
    ],
    task: TaskName = None,
    confusion: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the confusion matrix as a PNG.", rich_help_panel=OUTPUT),
    ] = None,
    json_: Json = False,
) -> None:
    """Test a task on labelled pictures: accuracy, accuracy per class, and which classes are confused."""
    from rkr.pictures.zoo import open_zoo

    found = open_zoo(model).evaluate(pictures, task)
    if confusion is not None:
        found.draw(confusion)
    if json_:
        print(json.dumps(found.to_json(), indent=1, ensure_ascii=False))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("class")
    for title in ("pictures", "accuracy", "most often taken for"):
        table.add_column(title, justify="left" if "taken" in title else "right")
    for number, (name, accuracy) in enumerate(found.per_class.items()):
        row = found.confusion[number].clone()
        total, row[number] = int(row.sum()), 0
        other = f"{found.classes[int(row.argmax())]} ({int(row.max())})" if int(row.max()) else ""
        table.add_row(*map(Text, (name, str(total), "" if accuracy is None else f"{100 * accuracy:.1f} %", other)))
    console().print(table)
    for path, why in found.broken:
        print(f"left out: {why if path in why else f'{path}: {why}'}")
    print(f"{found.task}: {100 * found.accuracy:.1f} % of {found.pictures} pictures")
    if confusion is not None:
        print(f"confusion matrix: {confusion}")

"""`rkr predict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rkr.cli.console import console
from rkr.cli.learn import Zoo
from rkr.cli.options import OUTPUT

if TYPE_CHECKING:
    from rkr.pictures.predict import Prediction

EXAMPLES = (
    "rkr predict zoo/ pictures/ --task birds --top 3",
    "rkr predict zoo/ pictures/ --task auto",
    "rkr predict zoo/ a.jpg b.jpg --format csv --out answers.csv",
)


def predict(
    model: Zoo,
    pictures: Annotated[list[Path], typer.Argument(metavar="PICTURES", help="Pictures, and folders with pictures.")],
    task: Annotated[
        str | None, typer.Option(help="Name of the task, or auto to infer it; not needed if there is only one.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of classes to name for each picture.")] = 1,
    false_alarms: Annotated[
        float,
        typer.Option(help="With --task auto: share of the tasks' own pictures that may be called none of the tasks."),
    ] = 0.05,
    format_: Annotated[
        Literal["table", "csv", "json"] | None,
        typer.Option(
            "--format", help="Format: table (default), csv (default with --out) or json.", rich_help_panel=OUTPUT
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write instead of the screen.", rich_help_panel=OUTPUT)
    ] = None,
) -> None:
    """Classify pictures by a task of a model."""
    from rkr.atomic import write_atomic
    from rkr.pictures.predict import as_csv, as_json
    from rkr.pictures.zoo import open_zoo

    endings: dict[str, Literal["csv", "json"]] = {".json": "json", ".csv": "csv"}
    chosen = format_ or ("table" if out is None else endings.get(out.suffix.lower(), "csv"))
    answers = open_zoo(model).predict(pictures, task, top, false_alarms)
    if chosen == "table" and out is None:
        _print(answers)
        return
    text = as_json(answers) if chosen == "json" else as_csv(answers, top)
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text.encode())
        print(f"{out}: answers for {len(answers)} pictures")


def _print(answers: list[Prediction]) -> None:
    from rich.table import Table
    from rich.text import Text

    inferred = any(one.task_probability is not None for one in answers)
    table = Table("picture", *(("task",) if inferred else ()), "answer")
    for one in answers:
        shares = ", ".join(f"{c} {100 * p:.1f} %" for c, p in zip(one.classes, one.probabilities, strict=True))
        said = one.error or shares or "none of the tasks"
        task = "" if one.task is None else f"{one.task} {100 * (one.task_probability or 0):.0f} %"
        table.add_row(*(Text(cell) for cell in (one.path, *((task,) if inferred else ()), said)))
    console().print(table)

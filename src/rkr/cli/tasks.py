"""`rkr tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rkr.cli.console import console
from rkr.cli.learn import Zoo
from rkr.cli.options import Json
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.pictures.zoo import Record

EXAMPLES = (
    "rkr tasks zoo/",
    "rkr tasks zoo/ --show birds",
    "rkr tasks zoo/ --rename birds --to 'garden birds'",
    "rkr tasks zoo/ --drop birds",
    "rkr tasks zoo/ --copy birds --into other-zoo/",
)
CHANGE = "Change"


def tasks(
    model: Zoo,
    show: Annotated[str | None, typer.Option(metavar="TASK", help="Show all that is known of a task.")] = None,
    drop: Annotated[str | None, typer.Option(metavar="TASK", help="Remove a task.", rich_help_panel=CHANGE)] = None,
    rename: Annotated[
        str | None, typer.Option(metavar="TASK", help="Rename a task; see --to.", rich_help_panel=CHANGE)
    ] = None,
    copy: Annotated[
        str | None, typer.Option(metavar="TASK", help="Copy a task; see --into and --to.", rich_help_panel=CHANGE)
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="NAME", help="The new name.", rich_help_panel=CHANGE)] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Another model folder with the same base, or a new one.", rich_help_panel=CHANGE
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List the tasks of a model, show one, or rename, drop or copy it."""
    from rkr.pictures.zoo import open_zoo

    if sum(option is not None for option in (show, drop, rename, copy)) > 1:
        raise UsageError("use only one of --show, --drop, --rename and --copy")
    if rename is not None and to is None:
        raise UsageError("--rename needs the new name: --to NAME")
    if to is not None and rename is None and copy is None:
        raise UsageError("--to goes with --rename or --copy")
    if (copy is None) != (into is None):
        raise UsageError("--copy TASK and --into DIR go together")
    zoo = open_zoo(model, device="cpu")
    if drop is not None:
        zoo.drop(drop)
        print(f"{model}: dropped {drop!r}")
    elif rename is not None and to is not None:
        zoo.rename(rename, to)
        print(f"{model}: {rename!r} is {to!r} now")
    elif copy is not None and into is not None:
        zoo.copy(copy, into, to)
        print(f"{into}: has {to or copy!r} now")
    elif show is not None:
        zoo.chosen(show)
        values = {**zoo.tasks[show].to_json(), "fingerprint": zoo.model.fingerprint(show)}
        print(
            json.dumps(values, indent=1, ensure_ascii=False)
            if json_
            else _in_words(zoo.tasks[show], values["fingerprint"])
        )
    elif json_:
        print(json.dumps([record.to_json() for record in zoo.tasks.values()], indent=1, ensure_ascii=False))
    else:
        _print(list(zoo.tasks.values()))


def _print(records: list[Record]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("task")
    for title in ("classes", "pictures", "accuracy", "size", "learned"):
        table.add_column(title, justify="right")
    for one in records:
        cells = (
            one.name,
            str(len(one.classes)),
            "" if one.pictures is None else str(one.pictures),
            _percent(one.accuracy),
            f"{one.nbytes / 1e6:.2f} MB",
            (one.date or "")[:16].replace("T", " "),
        )
        table.add_row(*map(Text, cells))
    console().print(table)


def _in_words(one: Record, fingerprint: str) -> str:
    about = one.about
    counts = about.get("per_class") or {}
    lines = [f"task         {one.name}"]
    lines += [f"pictures     {one.pictures}, {about.get('validation')} of them for validation"] if one.pictures else []
    lines += [f"accuracy     {_percent(one.accuracy)} (validation)"] if one.accuracy is not None else []
    lines += [f"linear probe {_percent(about['probe'])}"] if about.get("probe") is not None else []
    lines += [f"size         {one.nbytes / 1e6:.2f} MB", f"learned      {one.date}"] if one.date else []
    lines += [f"network      {about['network']['backbone']}"] if "network" in about else []
    lines += [f"settings     {', '.join(f'{k} {v}' for k, v in one.settings.items())}"] if one.settings else []
    lines += [f"fingerprint  {fingerprint}", f"classes      {len(one.classes)}"]
    lines += [f"  {name}{f': {counts[name]} pictures' if name in counts else ''}" for name in one.classes]
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"

"""`rkr report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rkr.cli.options import OUTPUT, WHERE

EXAMPLES = ("rkr report runs/ --out report/", "rkr report runs/ results/ --no-figures")


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Folders with runs, such as runs/. Subfolders are searched."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the report.", rich_help_panel=WHERE)] = Path(
        "report"
    ),
    figures: Annotated[bool, typer.Option(help="Write figures for print.", rich_help_panel=OUTPUT)] = True,
) -> None:
    """Write an HTML page of results, with tables (.md, .csv, .tex) and figures (.svg, .png) next to it."""
    from rkr.report.html import write_report

    written = write_report(folders, out, figures)
    for item in written.skipped:
        print(f"skipped: {item.path}: {item.reason}", file=sys.stderr)
    runs = f"{written.runs} run" + ("" if written.runs == 1 else "s")
    print(f"{written.page}: {runs}, {written.page.stat().st_size / 1e6:.2f} MB")
    for folder, files in (("tables", written.tables), ("figures", written.figures)):
        if files:
            print(f"{out / folder}: {len(files)} files")

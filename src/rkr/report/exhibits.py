"""What `rkr reproduce` prints: the list of the paper's tables and figures, and one of them next to our results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rkr.report.reproduce import Exhibit, Shown, state_of

if TYPE_CHECKING:
    from rkr.data.download import Data

RIGHT = ("paper", "ours", "difference", "n")  # columns of numbers


def listing(exhibits: Sequence[Exhibit], out: Path, data: Data, quick: bool) -> list[dict[str, Any]]:
    """For each exhibit, its recipes, what data is missing, the hours left and the runs that are done."""
    rows = []
    for exhibit in exhibits:
        state = state_of(exhibit, out, data, quick)
        minutes = exhibit.quick.minutes if quick else exhibit.minutes
        rows.append(
            {
                "name": exhibit.name,
                "title": exhibit.title,
                "where": exhibit.where,
                "recipes": list(exhibit.recipes),
                "data": state.data,
                "hours": round(minutes * (state.of - state.done) / 60, 1),
                "done": state.done,
                "of": state.of,
            }
        )
    return rows


def listing_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of `listing` as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("name", "what", "recipes", "data", "time left*", "runs done"):
        table.add_column(name, overflow="fold")
    for row in rows:
        done = f"{row['done']} of {row['of']}" if row["of"] else "counted"
        time_left = f"{row['hours']:g} h" if row["hours"] else "-"
        table.add_row(row["name"], row["title"], ", ".join(row["recipes"]), row["data"], time_left, done)
    return table


def listing_note(quick: bool) -> str:
    """The footnote of `listing_table`."""
    schedule = "the shortened schedule and one run per method" if quick else "the paper's schedule and number of runs"
    return f"* Upper estimate on one core, with {schedule}. See --quick and --runs."


def exhibit_json(exhibit: Exhibit, found: Shown, quick: bool) -> dict[str, Any]:
    """An exhibit as an event."""
    return {
        "event": "exhibit",
        "name": exhibit.name,
        "quick": exhibit.quick.model_dump(include={"epochs", "limit"}) if quick else None,
        "notes": list(exhibit.notes),
        "left_out": list(found.left_out),
        "lines": [line.to_json() for line in found.lines],
    }


def exhibit_table(exhibit: Exhibit, found: Shown, quick: bool) -> Table:
    """The paper's numbers next to ours."""
    title = f"{exhibit.title} ({exhibit.where})"
    if quick:
        title += f"; quick: {exhibit.quick.epochs} epochs, at most {exhibit.quick.limit} training samples per class"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for name in ("recipe", "method", "number", "paper", "ours", "difference", "n", "verdict"):
        table.add_column(name, overflow="fold", justify="right" if name in RIGHT else "left")
    for line in found.lines:
        table.add_row(*line.cells)
    return table


def exhibit_notes(exhibit: Exhibit, found: Shown) -> Iterator[str]:
    """Notes about the exhibit, and the runs that could not be read."""
    yield from (f"note: {note}" for note in exhibit.notes)
    yield from (f"skipped: {reason}" for reason in found.left_out)

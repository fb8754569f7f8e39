"""The queue of runs as a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rkr.experiment.display.text import duration, one_line
from rkr.experiment.queue import STATES, Entry

STYLES = {"running": "green", "failed": "red", "stopped": "yellow", "finished": "dim"}


def queue_table(entries: Sequence[Entry], now: float | None = None) -> Table:
    """A row for each run, those at work first."""
    now = time.time() if now is None else now
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "state", "for", "where", "tasks", "done", "why"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        task, tasks = entry.task
        again = f" (begun {entry.begun} times)" if entry.begun > 1 else ""
        cells = [
            entry.run,
            entry.state,
            duration(now - entry.since) if entry.since else "",
            entry.node,
            f"{task}/{tasks}" if tasks else "",
            f"{100 * entry.done:.0f} %" if entry.done else "",
            entry.reason + again,
        ]
        style = STYLES.get(entry.state, "")
        table.add_row(*(Text(one_line(cell), style if at == 1 else "") for at, cell in enumerate(cells)))
    return table


def queue_words(entries: Sequence[Entry]) -> str:
    """How many runs are in which state."""
    counts = Counter(entry.state for entry in entries)
    said = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]) or "no runs"
    return said + (": repeat the command to resume them" if counts["stopped"] and not counts["running"] else "")

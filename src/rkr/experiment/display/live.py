"""Terminal display: a bar per active run, and above the bars a line for each task or candidate that is learned."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live as RichLive
from rich.text import Text

from rkr.experiment.display import text
from rkr.experiment.display.base import Display
from rkr.experiment.events import (
    CandidateEnd,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Preparing,
    Progress,
    Started,
    Stopped,
    TaskEnd,
)


@dataclass(frozen=True)
class _Row:
    """The state of an active run."""

    label: str
    tasks: int = 0  # 0: not told
    number: int = 1
    epochs: int = 0
    epoch: int = 0  # 0, 1, ...
    loss: float | None = None
    accuracy: float | None = None
    done: float = 0.0
    left: float | None = None
    testing: bool = False  # all epochs of the task are over, but it is not tested yet
    round: tuple[int, int] = (0, 0)  # which (1, 2, ...) of how many
    candidates: int = 0  # of the round; 0: the task is trained as it is
    trying: tuple[int, ...] = ()  # the candidates in training
    preparing: str = ""  # preparations before training


class Live(Display):
    """Bars that are updated at most `rate` times a second.

    Without a terminal only the permanent lines are written. There is no thread: nothing is drawn between events, so
    processes may be forked at any time.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        console: Console | None = None,
        rate: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._console = console or Console(file=sys.stdout if stream is None else stream, highlight=False)
        self._pause, self._clock = 1 / rate, clock
        self._drawn = -math.inf
        self._rows: dict[str, _Row] = {}  # by run
        self._live = RichLive(
            _Bars(self._rows),
            console=self._console,
            auto_refresh=False,
            transient=True,
            # Other output appears above the bars, unless it goes to a file.
            redirect_stdout=_terminal(sys.stdout),
            redirect_stderr=_terminal(sys.stderr),
        )

    def open(self) -> None:
        self._live.start()

    def close(self) -> None:
        """Release the terminal. The bar of a run without a final event stays, to show its position."""
        self._live.transient = not self._rows
        self._live.stop()

    def show(self, event: Event) -> None:
        row = self._rows.get(event.run) or _Row(text.encodable(text.one_line(event.run), self._console.encoding))
        if isinstance(event, Started):
            done = ((event.number - 1) + event.epoch / max(event.epochs, 1)) / max(len(event.tasks), 1)
            self._rows[event.run] = replace(
                row,
                preparing="",
                tasks=len(event.tasks),
                number=event.number,
                epochs=event.epochs,
                epoch=event.epoch,
                done=done,
            )
            if event.resumed:
                self._print(text.started(event))
        elif isinstance(event, Preparing):
            done = event.count / max(event.total, 1)
            self._rows[event.run] = replace(row, preparing=f"{event.what} {event.count}/{event.total}", done=done)
        elif isinstance(event, Progress | EpochEnd):
            row = replace(row, preparing="", number=event.number, epochs=event.epochs, epoch=event.epoch)
            row = replace(row, loss=event.loss, accuracy=event.accuracy)
            if isinstance(event, Progress):
                row = replace(row, done=event.done, left=event.seconds_left, testing=False)
            else:
                row = replace(row, testing=event.epoch + 1 >= event.epochs)
            self._rows[event.run] = _with_candidate(row, event)
        elif isinstance(event, CandidateEnd):
            trying = tuple(one for one in row.trying if one != event.candidate[0])
            self._rows[event.run] = replace(row, trying=trying, testing=False)
            self._print(text.candidate_end(event, row.tasks))
        elif isinstance(event, TaskEnd):
            self._rows[event.run] = replace(row, tasks=event.tasks, testing=False)
            self._print_task(event)
        elif isinstance(event, Finished | Stopped | Failed):
            self._rows.pop(event.run, None)
            style = {Finished: "green", Stopped: "yellow", Failed: "red"}[type(event)]
            self._print(text.ended(event), style)
        if self._clock() - self._drawn >= self._pause:
            self._live.refresh()
            self._drawn = self._clock()

    def _print_task(self, event: TaskEnd) -> None:
        proof = text.proof(event)
        if not proof:
            self._print(text.task_end(event))
        elif event.unchanged:
            self._print(text.task_end(event), "", f", {proof} {self._mark('✓', 'ok')}", "green")
        else:
            self._print(text.task_end(event), "", f", {proof} {self._mark('✗', '!')}", "bold red")

    def _mark(self, mark: str, simple: str) -> str:
        return mark if _unicode(self._console.encoding) else simple

    def _print(self, line: str, style: str = "", more: str = "", more_style: str = "") -> None:
        """Print a permanent line above the bars. Continuation lines are indented."""
        whole = Text.assemble(
            (text.encodable(line, self._console.encoding), style),
            (text.encodable(more, self._console.encoding), more_style),
        )
        if whole.cell_len > self._console.width:
            first, *rest = whole.wrap(self._console, max(self._console.width - 2, 1), overflow="fold")
            whole = Text("\n").join([first, *(Text.assemble("  ", part) for part in rest)])
        self._console.print(whole, overflow="fold", highlight=False)
        self._drawn = self._clock()  # the bars were drawn anew below it


def _with_candidate(row: _Row, event: Progress | EpochEnd) -> _Row:
    """The row with the candidate of an event, and the others of its round in training."""
    if event.round is None or event.candidate is None:
        return replace(row, candidates=0, trying=())
    one, count = event.candidate
    others = row.trying if row.round == event.round else ()
    return replace(row, round=event.round, candidates=count, trying=tuple(sorted({*others, one})))


class _Bars:
    """Renders the current rows in as many columns as fit."""

    def __init__(self, rows: dict[str, _Row]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from layout(list(self._rows.values()), options.max_width, _unicode(options.encoding))


def layout(rows: Sequence[_Row], width: int, unicode: bool = True) -> list[Text]:
    """One line per run, at most `width` wide: words, then names, are shortened, then columns dropped."""
    if not rows:
        return []
    names = max(cell_len(row.label) for row in rows)
    for short, columns, label, bar in (
        (False, "task candidate epoch loss accuracy left", names, 16),
        (True, "task candidate epoch loss accuracy left", names, 10),
        (True, "task candidate epoch loss accuracy left", 9, 4),
        (True, "task candidate epoch accuracy left", 9, 4),
        (True, "task candidate epoch left", 6, 4),
        (True, "task candidate epoch", 0, 0),
        (True, "task epoch", 0, 0),
    ):
        cells = [[_cells(row, short)[column] for column in columns.split()] for row in rows]
        sizes = [max(map(len, column)) for column in zip(*cells, strict=True)]
        gap = 1 if short else 2
        room = width - sum(size + gap for size in sizes if size) - gap  # for the name and the bar
        if room >= min(label, names) + bar:
            break
    label = min(names, max(label, room - 10, 0), max(room - bar, 0))  # a bar of 10 before the whole name
    bar = min(room - label, 40)
    lines = []
    for row, line in zip(rows, cells, strict=True):
        parts = [_cut(row.label, label, unicode)] if label else []
        parts += [_bar(row.done, bar, unicode)] if bar > 0 else []
        parts += [Text(cell.rjust(size)) for cell, size in zip(line, sizes, strict=True) if size]
        joined = Text(" " * gap).join(parts)
        joined.truncate(width)
        joined.no_wrap = True
        lines.append(joined)
    return lines


def _cells(row: _Row, short: bool) -> dict[str, str]:
    """The columns after the bar, in words or `short`; empty if there is no value yet."""
    if row.preparing:
        return dict.fromkeys(("task", "candidate", "loss", "accuracy", "left"), "") | {"epoch": row.preparing}
    task = text.of(row.number, row.tasks)
    epoch = text.of(row.epoch + 1, row.epochs)
    left = "" if row.left is None else text.duration(row.left)
    accuracy = "" if row.accuracy is None else text.percent(row.accuracy, 1)
    if not short:
        task, epoch = f"task {task}", f"epoch {epoch}"
        left = left and f"{left} left"
        accuracy = accuracy and f"training {accuracy}"
    else:
        task, epoch, accuracy = f"t{task}", f"e{epoch}", accuracy.replace(" ", "")
    return {
        "task": task,
        "candidate": _candidates(row, short),
        "epoch": "testing" if row.testing else epoch,
        "loss": "" if row.loss is None else f"loss {text.number(row.loss, 3)}",
        "accuracy": accuracy,
        "left": left,
    }


def _candidates(row: _Row, short: bool) -> str:
    """ "round 1/2 candidate 3,4/8", or short "r1/2 c3,4/8"; the round only if there are several."""
    if not row.candidates or not row.trying:
        return ""
    one = f"{','.join(map(str, row.trying))}/{row.candidates}"
    candidates = f"c{one}" if short else f"candidate {one}"
    if row.round[1] < 2:
        return candidates
    rounds = text.of(*row.round)
    return f"r{rounds} {candidates}" if short else f"round {rounds} {candidates}"


def _cut(label: str, size: int, unicode: bool) -> Text:
    """Shorten a name. The end is kept, because runs of one experiment differ there."""
    if cell_len(label) > size:
        while label and cell_len(label) > size - 1:
            label = label[1:]
        label = ("…" if unicode else "~") + label
    return Text(label + " " * (size - cell_len(label)), style="bold")


def _bar(done: float, size: int, unicode: bool) -> Text:
    full = round(min(max(done, 0.0), 1.0) * size) if math.isfinite(done) else 0
    return Text.assemble(
        (("━" if unicode else "#") * full, "green"), (("─" if unicode else "-") * (size - full), "bright_black")
    )


def _unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")


def _terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()

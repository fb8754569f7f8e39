"""How far it is: a bar on a terminal, in a pipe a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Watch = Callable[[int, int], None]  # images done, of how many; the first call says where the work begins


def choose_progress(stream: TextIO | None = None) -> AbstractContextManager[Watch]:
    """A bar where the stream, by default the standard output, is a terminal; else lines without escape codes."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return Bar(Console(file=stream))
    return Lines(stream)


class Bar(AbstractContextManager[Watch]):
    """A bar that moves and is gone at the end."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TextColumn("images"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> Watch:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.update(self._task, completed=done)


class Lines(AbstractContextManager[Watch]):
    """A line where work goes on, and one every so many seconds."""

    def __init__(self, stream: TextIO, every: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._every, self._clock = stream, every, clock
        self._start: tuple[float, int] | None = None  # when, and how many images were done then
        self._last = 0.0

    def __enter__(self) -> Watch:
        return self._show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _show(self, done: int, total: int) -> None:
        now = self._clock()
        if self._start is None:
            self._start, self._last = (now, done), now
            if done:
                self._print(f"goes on after {done} of {total} images")
        elif now - self._last >= self._every and self._start[1] < done < total:
            began, before = self._start
            left = (now - began) * (total - done) / (done - before)
            self._last = now
            self._print(f"{done} of {total} images, {timedelta(seconds=round(left))} left")

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

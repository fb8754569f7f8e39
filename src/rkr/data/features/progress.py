"""Progress of a feature extraction: rich's bar on a terminal, a line every few seconds in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Watch = Callable[[int, int], None]  # images done and in total; the first call tells where the work starts


@contextmanager
def progress(
    console: Console | None = None, every: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> Iterator[Watch]:
    """Show the progress on the console, by default the standard output; `every` is in seconds."""
    console = console or Console()
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TextColumn("images"), TimeRemainingColumn())
    disable = not console.is_interactive
    printed: float | None = None
    with Progress(*columns, console=console, transient=True, disable=disable, get_time=clock) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int) -> None:
            nonlocal printed
            bar.update(task, completed=done, total=total)
            if not disable:
                return
            now = clock()
            if printed is None:
                printed = now
                if done:
                    print(f"resuming after {done} of {total} images", file=console.file, flush=True)
            elif now - printed >= every and done < total:
                printed = now
                left = bar.tasks[0].time_remaining
                rest = "" if left is None else f", {timedelta(seconds=round(left))} left"
                print(f"{done} of {total} images{rest}", file=console.file, flush=True)

        yield show

"""The console, and work that Ctrl-C interrupts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from rkr.experiment.events import Watch

T = TypeVar("T")

RANK = int(os.environ.get("RANK", "0"))  # under torchrun only the first process prints
INTERRUPTED = "Interrupted. Run the same command to resume."
INTERRUPTED_TWICE = "Interrupted. Run the same command to resume from the last saved state."


def console() -> Console:
    """A console that does not wrap tables at 80 columns when the output is not a terminal."""
    from rich.console import Console

    made = Console()
    return made if made.is_terminal else Console(width=max(made.width, 160))


def watched(json_: bool, work: Callable[[Watch], T]) -> T:
    """Do `work` with a display. If it is interrupted and returns nothing, say how to resume and exit."""
    from rkr.experiment.display import choose_display
    from rkr.experiment.runner import STOPPED

    try:
        with choose_display("json" if json_ else "auto") as watch:
            done = work(watch)
    except KeyboardInterrupt:  # the second Ctrl-C does not wait for the state to be saved
        if not json_ and not RANK:
            print(INTERRUPTED_TWICE)
        raise typer.Exit(STOPPED) from None
    if not done and not RANK:
        if not json_:
            print(INTERRUPTED)
        raise typer.Exit(STOPPED)
    return done

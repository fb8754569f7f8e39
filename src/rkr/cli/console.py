"""The console, and work that Ctrl-C interrupts."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
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


def watched(json_: bool, work: Callable[[Watch], T], cluster: str | None = None) -> T:
    """Do `work` with a display. If it is interrupted and returns nothing, say how to resume and exit.

    With a cluster, the work is done in a child process, which Ray may end at any time.
    """
    from rkr.experiment.display import choose_display
    from rkr.experiment.execution import STOPPED

    if cluster is not None:
        outlive(cluster)
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


_guarded = False


def outlive(cluster: str) -> None:
    """Go on in a child process, while this one waits to say what happened if it ends without a word.

    Ray ends a process at once, without any exception, when the node that it is connected to is lost.
    """
    global _guarded
    if _guarded or not hasattr(os, "fork"):
        return
    _guarded = True
    sys.stdout.flush()
    sys.stderr.flush()
    (alive, here), (farewell, there) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(here)
        os.close(farewell)
        threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
        atexit.register(os.write, there, b".")
        return
    os.close(alive)
    os.close(there)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda heard, frame: os.kill(child, heard))
    if sys.stdin is not None and sys.stdin.isatty():  # the terminal tells the child itself
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not os.read(farewell, 1):
        print(
            f"rkr: the Ray cluster {cluster} is gone, or this machine's part of it, and has ended what used "
            "it. The last states are here: start it again and repeat the command, or repeat it without --cluster",
            file=sys.stderr,
            flush=True,
        )
        code = 2
    os._exit(code)


def _end_with(pipe: int) -> None:
    """End this process when the one at the other end of a pipe has ended."""
    os.read(pipe, 1)
    os._exit(1)

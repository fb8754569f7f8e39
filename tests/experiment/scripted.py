"""Jobs that take no time to start, for tests of executors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rkr.errors import FileError, UsageError
from rkr.experiment.events import Failed
from rkr.experiment.execution import Diverged, Interrupted
from rkr.experiment.jobs import Site
from rkr.experiment.signals import signals


def do(site: Site, steps: list[list[Any]]) -> bool:
    """Steps one after another, each the name of a function below and its arguments."""
    for name, *arguments in steps:
        STEPS[name](site, *arguments)
    return False


def _wait(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def _until_told(site: Site, path: str, obeys: bool = True) -> None:
    """Until it is told to stop."""
    told: list[bool] = []
    with signals(lambda: told.append(True)):
        Path(f"{path}.ready").touch()
        while not told:
            time.sleep(0.02)
        Path(f"{path}.told").touch()
        while not obeys:
            time.sleep(0.02)
    raise Interrupted


def _raise(kind: type[Exception], *words: str) -> None:
    raise kind(*words)


STEPS: dict[str, Callable[..., Any]] = {
    "touch": lambda site, path: Path(path).touch(),
    "wait": lambda site, path: _wait(path),
    "sleep": lambda site, seconds: time.sleep(seconds),
    "fail": lambda site, run, reason: site.watch(Failed(run, "f", reason)),
    "warn": lambda site, text: print(text, file=sys.stderr),
    "print": lambda site, text: print(text),
    "file error": lambda site, text: _raise(FileError, text),
    "usage error": lambda site, text: _raise(UsageError, text),
    "fault": lambda site, text: _raise(ValueError, text),
    "diverge": lambda site, text: _raise(Diverged, text),
    "stop": lambda site: _raise(Interrupted),
    "kill": lambda site: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda site, code: os._exit(code),
    "until told": _until_told,
}

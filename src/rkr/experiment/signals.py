"""Stops runs on SIGINT and SIGTERM without loss."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SAME_SIGNAL_SECONDS = 1.0


@contextmanager
def signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop`, which requests a stop; a second signal stops at once.

    Signals within a second count as one, because a terminal signals every process, and torchrun signals them again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first: float | None = None

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            stop()
        elif time.monotonic() - first > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Ctrl-C and a polite kill, without loss."""

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
    """Ctrl-C and a polite kill call `stop`, which takes note; a second one stops at once.

    Within a second it is the same one: a terminal tells every process, and torchrun tells them once more.
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

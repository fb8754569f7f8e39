"""The base of displays: a context manager that is called with events, from any thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

from rkr.experiment.events import Event, Watch

D = TypeVar("D", bound="Display")


class Display(ABC):
    """`with display as watch: watch(event)`. Events of several runs may come at once, each from its own thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may emit an event while another is handled

    def __enter__(self: D) -> D:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self.show(event)

    def open(self) -> None:  # noqa: B027
        """Before the first event."""

    def close(self) -> None:  # noqa: B027
        """After the last event, or when an exception ends the run."""

    @abstractmethod
    def show(self, event: Event) -> None:
        """Handle one event. Calls never overlap."""


class Quiet(Display):
    """Shows nothing."""

    def show(self, event: Event) -> None:
        pass


def both(*watches: Watch) -> Watch:
    """Pass each event to each of the watches, in order. Displays among them must be open."""

    def watch(event: Event) -> None:
        for each in watches:
            each(event)

    return watch

"""Events as lines of JSON for other programs, and back, for a process that displays another one."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO, get_type_hints

from rkr.experiment.display.base import Display
from rkr.experiment.events import KINDS, Event, Preparing, Progress, Watch, from_json


class JsonLines(Display):
    """One JSON object per line and event, written at once.

    `Progress` and `Preparing` at most every `every` seconds per run.
    """

    def __init__(
        self, stream: TextIO | None = None, every: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._stream = sys.stdout if stream is None else stream
        self._every, self._clock = every, clock
        self._last: dict[str, float] = {}  # by run: when one of these was written

    def show(self, event: Event) -> None:
        if isinstance(event, Progress | Preparing):
            now = self._clock()
            if now - self._last.get(event.run, -math.inf) < self._every:
                return
            self._last[event.run] = now
        print(json.dumps(_finite(event.to_json()), allow_nan=False), file=self._stream, flush=True)


def relay(lines: Iterable[str], watch: Watch, other: Callable[[str], None] | None = None) -> None:
    """Pass the events that another process has written as `JsonLines` to `watch`, and other lines to `other`."""
    for line in lines:
        line = line.rstrip("\r\n")
        try:
            event = _event(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            if other is not None:
                other(line)
        else:
            watch(event)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which are not JSON, with null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _event(values: dict[str, Any]) -> Event:
    """The event of a line, with NaN restored where None is impossible."""
    hints = get_type_hints(KINDS[values["event"]])
    for key, value in values.items():
        if value is None and hints.get(key) is float:
            values[key] = math.nan
        elif isinstance(value, list):
            values[key] = [math.nan if v is None else v for v in value]
    return from_json(values)

"""The log: one line for each request and event, for people or as JSON."""

from __future__ import annotations

import datetime
import json
import sys
import threading
from typing import Any, TextIO


class Log:
    """Writes lines to a file. Text from outside cannot break a line.

    Args:
        as_json: One JSON object for each line.
        file: Where to; by default stderr.
    """

    def __init__(self, as_json: bool = False, file: TextIO | None = None) -> None:
        self._as_json, self._file = as_json, file
        self._lock = threading.Lock()

    def __call__(self, event: str, **fields: Any) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        if self._as_json:
            line = json.dumps({"time": now, "event": event, **fields})
        else:
            line = f"{now} {_words(event, fields)}"
        file = self._file or sys.stderr
        with self._lock:
            print(line.encode("ascii", "backslashreplace").decode(), file=file, flush=True)


def _words(event: str, fields: dict[str, Any]) -> str:
    given = dict(fields)
    if event == "request":
        first = f"{given.pop('method')} {_printable(given.pop('path'))} {given.pop('status')} {given.pop('ms')} ms"
    else:
        first = event
    return " ".join([first, *(f"{key}={_printable(value)}" for key, value in given.items() if value is not None)])


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)

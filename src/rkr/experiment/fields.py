"""The fields of a JSON object, checked as they are taken, with messages that name their place."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rkr.errors import FileError

LARGEST = 2**63 - 1  # of integers, so that they fit into any table
HUGE = 1e12  # beyond any percentage and any number of seconds
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # no part of a name

Row = tuple[float, ...]  # fractions; row i has the accuracy on tasks 1..i after learning task i


class Fields:
    """The fields of a JSON object, checked as they are read; `where` is its place, for messages."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise FileError(f"{where}: not a JSON object")
        self.where, self.values = where, values

    def get(self, key: str) -> Any:
        if key not in self.values:
            raise FileError(f"{self.where}: {key!r} is missing")
        return self.values[key]

    def text(self, key: str) -> str:
        value = self.get(key)
        return value if isinstance(value, str) else self._refuse(key, "text")

    def name(self, key: str) -> str:
        """A printable string: not empty, without control characters or lone surrogates."""
        value = self.text(key)
        if not value.strip() or UNPRINTABLE.search(value):
            self._refuse(key, "a name without control characters")
        return value

    def integer(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or value < 0:
            self._refuse(key, "a whole number, 0 or more")
        return value if value <= LARGEST else self._refuse(key, f"at most {LARGEST}")

    def number(self, key: str) -> float:
        """Any number; values of diverged runs may be infinite."""
        value = self.get(key)
        if type(value) not in (int, float):
            self._refuse(key, "a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf

    def positive(self, key: str) -> float:
        value = self.number(key)
        return value if 0 < value < HUGE else self._refuse(key, "a number above 0")

    def seconds(self, key: str) -> float:
        value = self.number(key)
        return value if abs(value) < HUGE else self._refuse(key, "a number of seconds")

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        return value if value is None or isinstance(value, bool) else self._refuse(key, "true, false or null")

    def list(self, key: str) -> Sequence[Any]:
        value = self.get(key)
        return value if isinstance(value, list) else self._refuse(key, "a list")

    def object(self, key: str) -> Fields:
        return Fields(f"{self.where}: {key!r}", self.get(key))

    def fractions(self, key: str, n: int) -> Row:
        row = self.list(key)
        if len(row) != n or not all(type(value) in (int, float) and 0 <= value <= 1 for value in row):
            self._refuse(key, f"a list of {n} fractions from 0 to 1")
        return tuple(map(float, row))

    def texts(self, key: str) -> Mapping[str, str]:
        values = self.object(key).values
        if not all(isinstance(value, str) for value in values.values()):
            self._refuse(key, "an object of texts")
        return values

    def _refuse(self, key: str, wanted: str) -> Any:
        shown = json.dumps(self.values[key])
        shown = shown if len(shown) < 80 else shown[:77] + "..."
        raise FileError(f"{self.where}: {key!r} must be {wanted}, not {shown}")


class Line(Fields):
    """The fields of a line. Its place is formatted only for errors."""

    def __init__(self, path: Path, number: int, values: Any) -> None:
        self._path, self._number, self.values = path, number, values
        if not isinstance(values, dict):
            raise FileError(f"{self.where}: not a JSON object")

    @property
    def where(self) -> str:  # type: ignore[override]
        return f"{self._path}: line {self._number}"

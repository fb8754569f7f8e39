"""Values of an option that `rkr tune` tries, and between which it searches.

    grid = {"strength": Log((1.0, 10.0, 100.0)), "mode": ("all", "online")}

A grid tries the values themselves. A search draws from the range of `Log` and `Linear`, whole numbers if all of the
values are, and chooses among the values of anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Log(tuple[Any, ...]):
    """Numbers above 0. A search draws from the lowest to the highest, evenly in the logarithm."""


class Linear(tuple[Any, ...]):
    """Numbers. A search draws from the lowest to the highest, evenly."""


def whole(values: Sequence[Any]) -> bool:
    """Whether all values are whole numbers."""
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)

"""Marks of single parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values of a parametrized test that only `make test-slow` runs. A tuple is one value for each parameter."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]

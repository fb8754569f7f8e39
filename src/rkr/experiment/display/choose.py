"""Chooses the display of a mode."""

from __future__ import annotations

import os
import sys
from typing import Literal, TextIO, get_args

from rkr.errors import UsageError
from rkr.experiment.display.base import Display, Quiet
from rkr.experiment.display.json_lines import JsonLines
from rkr.experiment.display.live import Live
from rkr.experiment.display.plain import Plain

Mode = Literal["auto", "live", "plain", "json", "quiet"]
MODES: tuple[Mode, ...] = get_args(Mode)


def choose_display(mode: Mode = "auto", stream: TextIO | None = None) -> Display:
    """The display of a mode on a stream, by default the standard output. "auto": live on a terminal, else plain."""
    stream = sys.stdout if stream is None else stream
    if mode == "auto":
        mode = "live" if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") else "plain"
    if mode == "live":
        return Live(stream)
    if mode == "plain":
        return Plain(stream)
    if mode == "json":
        return JsonLines(stream)
    if mode == "quiet":
        return Quiet()
    raise UsageError(f"there is no display {mode!r}: choose one of {', '.join(MODES)}")

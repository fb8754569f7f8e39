"""Displays of runs: a terminal, a log file, JSON for other programs, TensorBoard. All receive events."""

from rkr.experiment.display.base import Display, Quiet, both
from rkr.experiment.display.choose import MODES, Mode, choose_display
from rkr.experiment.display.json_lines import JsonLines, relay
from rkr.experiment.display.live import Live
from rkr.experiment.display.plain import Plain
from rkr.experiment.display.tensorboard import TensorBoard

__all__ = [
    "MODES",
    "Display",
    "JsonLines",
    "Live",
    "Mode",
    "Plain",
    "Quiet",
    "TensorBoard",
    "both",
    "choose_display",
    "relay",
]

"""What a run looks like from outside: a terminal, a log file, another program, TensorBoard. All listen to events."""

from rkr.display.base import Display, Quiet, both
from rkr.display.choose import MODES, Mode, choose_display
from rkr.display.json_lines import JsonLines, relay
from rkr.display.live import Live
from rkr.display.plain import Plain
from rkr.display.tensorboard import TensorBoard

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

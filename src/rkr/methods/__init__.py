"""Learning methods. Each is one file with a `Learner` that registers itself (see `rkr.registry`).

Methods for zero-shot tasks are in `rkr.methods.zeroshot`.

For methods of your own:
    `Learner`: the base of all methods, and the hooks that the training loop calls.
    `SeenTask`, `Phase`, `Outcome`: what hooks get and return.
    `Capacity`, `plain_size`: what it takes to keep what was learned.
    `decay_groups`: all trainable parameters as optimiser groups.
    `MakeNetwork`, `ReadSamples`: types of arguments.
"""

from rkr.capacity import Capacity
from rkr.methods.learner import (
    Learner,
    MakeNetwork,
    Outcome,
    Phase,
    ReadSamples,
    SeenTask,
    decay_groups,
    plain_size,
)
from rkr.registry import METHODS as _METHODS
from rkr.registry import Method

__all__ = [
    "METHODS",
    "ZERO_SHOT_METHODS",
    "Capacity",
    "Learner",
    "MakeNetwork",
    "Method",
    "Outcome",
    "Phase",
    "ReadSamples",
    "SeenTask",
    "decay_groups",
    "plain_size",
]

METHODS, ZERO_SHOT_METHODS = _METHODS["images"], _METHODS["zero-shot"]

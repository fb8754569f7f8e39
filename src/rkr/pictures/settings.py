"""How `rkr learn` trains. The values were found by experiment: docs/method/pictures.md has the table."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from rkr.core import Options
from rkr.errors import UsageError

RANK = 4  # of a new zoo


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is learned from given pictures.

    Attributes:
        rank: K of the rectification, the zoo's, or 0 for a linear probe: the base's features and a new head.
        epochs: Longest training.
        batch: Pictures in a batch.
        lr: Highest learning rate, of head and normalisation; the rate rises to it and falls along a cosine.
        factor_lr: The rate of LM and RM, as a multiple.
        weight_decay: Of factors and head.
        smoothing: Label smoothing.
        zoom: Smallest share of a picture's area that a random crop shows.
        patience: Epochs without a better validation after which training ends.
        validation: Share of each class for validation, where the pictures' source does not say.
        balance: Classes with fewer pictures than this share of the largest are repeated to reach it.
        seed: Of initial values, the validation part, batches and crops.
    """

    rank: int = RANK
    epochs: int = 6
    batch: int = 32
    lr: float = 3e-4
    factor_lr: float = 3.0
    weight_decay: float = 0.05
    smoothing: float = 0.1
    zoom: float = 0.35
    patience: int = 3
    validation: float = 0.15
    balance: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("epochs", 1), ("batch", 2), ("patience", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"--{name} must be a whole number of at least {least}, not {value!r}")
        for name, low, high in (("lr", 0.0, 10.0), ("factor_lr", 0.0, 1e4), ("weight_decay", 0.0, 10.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} must be a number of {low:g} to {high:g}, not {value!r}")
        if not self.lr > 0:
            raise UsageError("--lr must be greater than 0")
        for name, high in (("validation", 0.5), ("smoothing", 0.9), ("zoom", 1.0), ("balance", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= high:
                raise UsageError(f"--{name} must be a share of 0 to {high:g}, not {value!r}")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


def options_for(network: nn.Module, rank: int) -> Options:
    """How a new zoo's network is rectified.

    Depthwise convolutions are left out: they hold few weights, and their factors would be half of a task. F is left
    out where BatchNorm follows, which has a scale of its own; networks without it get F and their own affine
    parameters of other normalisation.
    """
    depthwise = tuple(
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == module.in_channels > 1
    )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()):
        return Options(rank=rank, exclude=depthwise, scale_outputs="linear", bn="per_task")
    return Options(rank=rank, exclude=depthwise, norm="per_task")

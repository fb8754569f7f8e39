"""Fine-tuning with smoothed labels: a method for rkr that lives in a package of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.methods import Outcome
from rkr.methods.shared.one_network import OneNetwork


@rkr.register.method("smooth", "fine-tuning with smoothed labels", citation="Szegedy et al., CVPR 2016")
class Smooth(OneNetwork):
    """Fine-tuning whose targets are not quite one-hot.

    Args:
        make: Builds the network.
        head: Its classification layer.
        smoothing: The share of each target that is spread over all classes.
        bn: See `OneNetwork`.
    """

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"smoothing": (0.05, 0.1, 0.2)}

    def __init__(self, make: Callable[[], nn.Module], head: str, *, smoothing: float = 0.1, bn: str = "shared") -> None:
        super().__init__(make, head, bn=bn)
        self.smoothing = smoothing

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.select(self.task.number)
        logits, y = self.network(x), y - self.task.start  # (B, C), (B,)
        return Outcome(F.cross_entropy(logits, y, label_smoothing=self.smoothing), (logits.argmax(1) == y).sum())

"""Learning without forgetting (LwF; Li & Hoiem, ECCV 2016)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rkr.errors import UsageError
from rkr.learners.distillation import Taught, distilled
from rkr.learners.learner import MakeNetwork, Outcome


class Lwf(Taught):
    """On images of the new task, old heads go on answering as they did: cross-entropy + λ Σ_old distillation.

    The answers to imitate are those of the network before the task, which is kept for as long; old heads are trained
    too. Batch normalisation is shared, as new and old heads see the same images in one pass. The authors train the new
    head alone for a while first, which is left out here.

    Args:
        make: Builds the network.
        head: Its classification layer.
        strength: λ.
        temperature: Of the distillation.
        bn: "shared" or "frozen": see `OneNetwork`.
    """

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (0.1, 1.0, 10.0)}

    def __init__(
        self, make: MakeNetwork, head: str, *, strength: float = 1.0, temperature: float = 2.0, bn: str = "shared"
    ) -> None:
        super().__init__(make, head, bn=bn)
        if strength < 0 or temperature <= 0:
            raise UsageError(f"strength must be at least 0 and temperature above 0, not {strength} and {temperature}")
        self.strength, self.temperature = strength, temperature

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        logits = self.logits(x)
        loss, correct = self.classified(logits[:, self.task.labels], y)
        if self.teacher is None:
            return Outcome(loss, correct)
        wanted = self.wanted(x)
        old = [distilled(logits[:, t.labels], wanted[:, t.labels], self.temperature) for t in self.seen[:-1]]
        return Outcome(loss + self.strength * torch.stack(old).sum(), correct)

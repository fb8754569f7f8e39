"""Learning without forgetting (LwF; Li & Hoiem, ECCV 2016)."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.learners.distillation import distilled
from rkr.learners.learner import ONE_PASS, MakeNetwork, OneNetwork, Outcome, SeenTask, decay_groups, nbytes


class Lwf(OneNetwork):
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

    bn_choices: ClassVar[tuple[str, ...]] = ONE_PASS
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (0.1, 1.0, 10.0)}
    teacher: nn.Module | None

    def __init__(
        self, make: MakeNetwork, head: str, *, strength: float = 1.0, temperature: float = 2.0, bn: str = "shared"
    ) -> None:
        super().__init__(make, head, bn=bn)
        if strength < 0 or temperature <= 0:
            raise UsageError(f"strength must be at least 0 and temperature above 0, not {strength} and {temperature}")
        self.strength, self.temperature = strength, temperature
        self.register_module("teacher", None)

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.select(None)
            self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        super().begin(task)

    def train(self, mode: bool = True) -> Lwf:
        """The teacher answers as it did."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def groups(self) -> list[dict[str, Any]]:
        return decay_groups(self.network)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.select(None)
        logits = self.network(x)  # (B, classes of all tasks)
        loss, correct = self.classified(logits[:, self.task.labels], y)
        if self.teacher is None:
            return Outcome(loss, correct)
        with torch.no_grad():
            wanted = self.teacher(x)
        old = [distilled(logits[:, t.labels], wanted[:, t.labels], self.temperature) for t in self.seen[:-1]]
        return Outcome(loss + self.strength * torch.stack(old).sum(), correct)

    def extra_bytes(self) -> int:
        return 0 if self.teacher is None else nbytes(self.teacher)

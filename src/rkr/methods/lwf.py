"""Learning without forgetting (LwF; Li & Hoiem, ECCV 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Outcome, Phase, ReadSamples
from rkr.methods.shared.distillation import Taught, distilled
from rkr.registry import register


@register.method(
    "lwf", "LwF: old heads go on answering as before a task, on its images", citation="Li & Hoiem, ECCV 2016"
)
class Lwf(Taught):
    """Old heads keep their outputs on images of the new task: cross-entropy + λ Σ_old distillation.

    The targets come from a copy of the network made before the task; old heads are trained too. Batch normalisation is
    shared, because new and old heads see the same images in one pass. First the new head is trained alone (section 3,
    "warm-up"), so that its random outputs do not disturb the network.

    Args:
        make: Builds the network.
        head: Its classification layer.
        strength: λ.
        temperature: Temperature of the distillation.
        warm_up: Share of the epochs, from the second task on, in which only the new head is trained. 0 for none.
        bn: Batch normalisation: "shared" by all tasks, or "frozen" after the first.
    """

    checked = "The paper's loss and its warm-up of the new head."
    differs = ("Batch normalisation is shared, its statistics follow the newest task.",)

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (0.1, 1.0, 10.0)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        strength: float = 1.0,
        temperature: float = 2.0,
        warm_up: float = 0.1,
        bn: str = "shared",
    ) -> None:
        super().__init__(make, head, bn=bn)
        if strength < 0:
            raise UsageError(f"strength must be at least 0, not {strength!r}")
        if temperature <= 0:
            raise UsageError(f"temperature must be above 0, not {temperature!r}")
        if not 0 <= warm_up < 1:
            raise UsageError(f"warm_up must be from 0 to below 1, not {warm_up}")
        self.strength, self.temperature, self.warm_up = strength, temperature, warm_up
        self._warms_up = False

    def phases(self) -> Sequence[Phase]:
        if not self.task.number or not self.warm_up:
            return (Phase(),)
        return (Phase("warm-up", share=self.warm_up), Phase(share=1 - self.warm_up))

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self._warms_up = phase.name == "warm-up"

    def train(self, mode: bool = True) -> Lwf:
        """Freeze statistics while only the head is trained."""
        super().train(mode)
        if self._warms_up:
            self.network.eval()
        return self

    def groups(self) -> list[dict[str, Any]]:
        if self._warms_up:
            return [{"params": list(self.heads.heads[self.task.number].parameters())}]
        return super().groups()

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        if self._warms_up:  # old outputs do not change, and only the head learns
            return self.classified(self.heads.heads[self.task.number](self.features(x)), y)
        logits = self.logits(x)
        loss, correct = self.classified(logits[:, self.task.labels], y)
        if self.teacher is None:
            return Outcome(loss, correct)
        wanted = self.wanted(x)
        old = [distilled(logits[:, t.labels], wanted[:, t.labels], self.temperature) for t in self.seen[:-1]]
        return Outcome(loss + self.strength * torch.stack(old).sum(), correct)

"""One network for each task (the paper's "Original"): no forgetting and no transfer, at T times the size."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rkr.capacity import Capacity
from rkr.methods.learner import (
    Learner,
    MakeNetwork,
    Outcome,
    ReadSamples,
    SeenTask,
    decay_groups,
    nbytes,
    plain_size,
)
from rkr.methods.shared.one_network import put_task_head
from rkr.registry import register


@register.method("separate", 'one network for each task (the paper\'s "Original")')
class Separate(Learner):
    """Train a new network for every task."""

    checked = 'A reference point by its definition, the paper\'s "Original".'

    isolating = True

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__(make, head)
        self.networks = nn.ModuleList()
        self._plain = plain_size(make())

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        network = self.make()
        put_task_head(network, self.head).add(task.classes)
        self.networks.append(network)
        for earlier in self.networks[:-1]:
            earlier.requires_grad_(False)

    def groups(self) -> list[dict[str, Any]]:
        return decay_groups(self.networks[-1])

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        return self.classified(self.networks[-1](x), y)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.networks[-1].requires_grad_(False)  # now: torch may choose other kernels by it, with other last bits

    def predict(self, x: Tensor, number: int) -> Tensor:
        return self.networks[number](x)

    def capacity(self) -> Capacity:
        size = self._plain.parameters
        return Capacity(len(self.networks) * size, size, nbytes(self.networks), self._plain.multiply_adds)

"""A method, from public names only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import rkr
from rkr.methods import Capacity, Outcome, ReadSamples, SeenTask, decay_groups, plain_size


@rkr.register.method("averaging-low", "keeps more of the old weights", preset={"share": 0.25})
@rkr.register.method("averaging", "the mean of old and new weights", citation="Nobody et al., 2026")
class Averaging(rkr.Learner):
    """One network; after each task its shared weights go back a part of the way.

    Args:
        make: Builds the network.
        head: Its classification layer.
        share: How much of the new weights is kept, from 0 to 1.
    """

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"share": (0.5, 1.0)}

    def __init__(self, make: Callable[[], nn.Module], head: str, *, share: float = 0.5) -> None:
        super().__init__(make, head)
        self.share = share
        self.network = make()
        self.plain = plain_size(self.network)
        self.features = self.network.get_submodule(head).in_features
        self.network.set_submodule(head, nn.Identity())
        self.heads = nn.ModuleList()

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.heads.append(nn.Linear(self.features, task.classes))
        self.before = copy.deepcopy(self.network).requires_grad_(False)

    def groups(self) -> list[dict[str, Any]]:
        return [*decay_groups(self.network), {"params": list(self.heads[-1].parameters())}]

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        return self.classified(self.predict(x, self.task.number), y)

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        if self.task.number:
            for p, old in zip(self.network.parameters(), self.before.parameters(), strict=True):
                p.copy_(self.share * p + (1 - self.share) * old)

    def predict(self, x: Tensor, number: int) -> Tensor:
        return self.heads[number](self.network(x))

    def capacity(self) -> Capacity:
        return self.plain

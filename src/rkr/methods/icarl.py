"""iCaRL (Rebuffi, Kolesnikov, Sperl, Lampert, CVPR 2017): a memory of exemplars, and the nearest mean of them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.capacity import Capacity
from rkr.methods.learner import MakeNetwork, Outcome, ReadSamples, SeenTask, nbytes
from rkr.methods.shared.rehearsing import Rehearsing, task_and_class
from rkr.registry import register


@register.method(
    "icarl",
    "iCaRL: exemplars, nearest mean; keeps 2,000 images to go on learning, 151 % on LeNet",
    citation="Rebuffi et al., CVPR 2017",
)
class Icarl(Rehearsing):
    """Sigmoid outputs with distillation, and classification by the nearest mean of exemplars.

    The loss is the binary cross-entropy of algorithm 3, summed over outputs: targets are the previous network's outputs
    for old classes and the labels for new ones. The authors take the mean over 100 outputs and a rate of 2.0, which is
    about equivalent with usual learning rates.

    Args:
        make: Builds the network.
        head: Its classification layer.
        memory: Number of exemplars of all classes together.
        flip: Whether means include mirror images of the exemplars, as in the authors' code. Default in recipes:
            `training.augment.flip`.
        bn: Batch normalisation: "shared" by all tasks, or "frozen" after the first.
    """

    checked = "The authors' code (srebuffi/iCaRL)."
    differs = (
        "A class has as many exemplars as fit into the memory (the authors round up).",
        "The loss is a sum over outputs (there: a mean over 100 of them, with a learning rate of 2).",
    )

    augment_options = ("flip",)

    def __init__(
        self, make: MakeNetwork, head: str, *, memory: int = 2000, flip: bool = True, bn: str = "shared"
    ) -> None:
        super().__init__(make, head, memory=memory, bn=bn)
        self.flip = flip

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        size = (task.classes, self.heads.features)
        self.register_buffer(f"means_{task.number}", next(self.network.parameters()).new_zeros(size))

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        logits = self.logits(x)
        targets = F.one_hot(y, logits.shape[1]).to(logits)
        if self.teacher is not None:
            targets[:, : self.task.start] = self.wanted(x).sigmoid()
        loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(x)
        return Outcome(loss, (logits.detach().argmax(1) == y).sum())

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.fill_memory(train)
        features, labels = self._read(train)
        flipped = self._read(lambda: ((x.flip(-1), y) for x, y in train()))[0] if self.flip else features
        first = int((labels < self.task.start).sum())
        for task in self.seen:
            means = self.get_buffer(f"means_{task.number}")
            for label in range(task.classes):
                rows = (labels == task.start + label).nonzero()[:, 0]
                if task is self.task:  # all its samples were read, of earlier tasks the exemplars only
                    rows = first + self.memory.of(task.number, label).to(labels)
                parts = [F.normalize(f[rows], dim=1).mean(0) for f in (features, flipped)]
                means[label] = F.normalize(torch.stack(parts).mean(0), dim=0)

    def capacity(self) -> Capacity:
        """Tests need the means instead of heads.

        To go on learning, heads and exemplars are kept, from which the means follow.
        """
        found = super().capacity()
        more = nbytes(self.heads) - sum(self.get_buffer(f"means_{task.number}").nbytes for task in self.seen)
        assert found.further_bytes is not None
        return replace(found, bytes=found.bytes - more, further_bytes=found.further_bytes + more)

    def _distances(self, x: Tensor, means: Tensor) -> Tensor:
        """Squared distances of features from means, both on the unit sphere: 2 - 2 cos, (B, C)."""
        return 2 - 2 * F.normalize(self.features(x), dim=1) @ means.T

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.select(number)
        return -self._distances(x, self.get_buffer(f"means_{number}"))

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest mean of all classes."""
        self.select(self.task.number)
        means = torch.cat([self.get_buffer(f"means_{t.number}") for t in self.seen])
        return task_and_class(self._distances(x, means).argmin(1), self.seen)

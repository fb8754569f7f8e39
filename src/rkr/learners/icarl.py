"""iCaRL (Rebuffi, Kolesnikov, Sperl, Lampert, CVPR 2017): a memory of exemplars, and the nearest mean of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.learners.distillation import Taught
from rkr.learners.learner import MakeNetwork, Outcome, ReadSamples, SeenTask
from rkr.learners.memory import Memory, class_features, herd


class Rehearsing(Taught):
    """One network that is trained on the new task and on exemplars of earlier ones, beside a copy of what it was.

    Batch normalisation is shared: a batch has samples of all tasks. Until a task is learned, the exemplars of earlier
    ones have the whole memory.
    """

    learns_its_size = True  # which samples it keeps

    def __init__(self, make: MakeNetwork, head: str, *, memory: int = 2000, bn: str = "shared") -> None:
        super().__init__(make, head, bn=bn)
        self.memory = Memory(memory)
        self.sample_bytes = 0  # of one image; known when images are seen

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.memory.begin(task.classes)

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        kept: dict[int, Tensor | None] = {t.number: self.memory.of_task(t.number) for t in self.seen[:-1]}
        return {**kept, self.task.number: None}

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What goes into the heads, (B, D)."""
        self.heads.bare = True
        try:
            return self.network(x).flatten(1)
        finally:
            self.heads.bare = False

    @torch.no_grad()
    def herded(self, train: ReadSamples, count: int) -> list[Tensor]:
        """Numbers of so many samples of every new class, by herding, best first."""
        features, labels = self._read(train)
        first = int((labels < self.task.start).sum())  # exemplars of earlier tasks are read first
        wanted = range(self.task.start, self.task.start + self.task.classes)
        return [rows[herd(own, count)] - first for rows, own in class_features(features, labels, wanted)]

    def fill_memory(self, train: ReadSamples) -> None:
        """Keep exemplars of the new classes."""
        self.memory.keep(self.herded(train, self.memory.room(sum(self.memory.classes))))

    def _read(self, train: ReadSamples) -> tuple[Tensor, Tensor]:
        features, labels = [], []
        for x, y in train():
            self.sample_bytes = x[0].numel()  # kept as bytes, one for each value
            features.append(self.features(x))
            labels.append(y)
        return torch.cat(features), torch.cat(labels)

    def extra_bytes(self) -> int:
        return super().extra_bytes() + len(self.memory) * self.sample_bytes


class Icarl(Rehearsing):
    """Sigmoid outputs that keep old answers and learn new ones; the class with the nearest mean of exemplars wins.

    The loss is the binary cross-entropy of algorithm 3, summed over outputs: for old classes with what the network
    answered before, for new ones with the labels. The authors take the mean over 100 outputs and a rate of 2.0, which
    is about the same as this with the usual rates.

    Args:
        make: Builds the network.
        head: Its classification layer.
        memory: Exemplars of all classes together.
        flip: Means are of exemplars and their mirror images, as in the authors' code.
        bn: "shared" or "frozen": see `OneNetwork`.
    """

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

    def extra_bytes(self) -> int:
        return super().extra_bytes() + sum(self.get_buffer(f"means_{task.number}").nbytes for task in self.seen)

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


def task_and_class(labels: Tensor, seen: Sequence[SeenTask]) -> tuple[Tensor, Tensor]:
    """From classes over all tasks to task numbers and classes within them."""
    starts = torch.tensor([task.start for task in seen], device=labels.device)
    task = torch.searchsorted(starts, labels, right=True) - 1
    return task, labels - starts[task]

"""One network that rehearses exemplars of earlier tasks: the base of iCaRL, EEIL and RPS-Net."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask, evaluating
from rkr.methods.shared.distillation import Taught
from rkr.methods.shared.memory import Memory, class_features, herd


class Rehearsing(Taught):
    """One network, trained on the new task and on exemplars of earlier ones, and a copy of it from before the task.

    Batch normalisation is shared: a batch has samples of all tasks. Until a task is learned, the exemplars of earlier
    ones have the whole memory.
    """

    learns_its_size = "this is with a full memory"
    agnostic = "every"

    sample_bytes: Tensor

    def __init__(self, make: MakeNetwork, head: str, *, memory: int = 2000, bn: str = "shared") -> None:
        super().__init__(make, head, bn=bn)
        self.memory = Memory(memory)
        self.register_buffer("sample_bytes", torch.zeros((), dtype=torch.int64))  # of one; known when some are seen

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.memory.begin(task.classes)

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        kept: dict[int, Tensor | None] = {t.number: self.memory.of_task(t.number) for t in self.seen[:-1]}
        return {**kept, self.task.number: None}

    def predict(self, x: Tensor, number: int) -> Tensor:
        return self.logits(x)[:, self.seen[number].labels]

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The highest output of all classes."""
        return task_and_class(self.logits(x).argmax(1), self.seen)

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
        with evaluating(self.network):  # statistics do not move, and features are those of tests
            for x, y in train():
                self.sample_bytes.fill_(x[0].numel())  # kept as bytes, one for each value
                features.append(self.features(x))
                labels.append(y)
        return torch.cat(features), torch.cat(labels)

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        """The exemplars. Until samples are kept, their maximum size counts."""
        kept, each = len(self.memory), int(self.sample_bytes)
        if not each:
            kept, each = self.memory.budget, math.prod(getattr(self.network, "input_shape", (0,)))
        return (), kept * each


def task_and_class(labels: Tensor, seen: Sequence[SeenTask]) -> tuple[Tensor, Tensor]:
    """From classes over all tasks to task numbers and classes within them."""
    starts = torch.tensor([task.start for task in seen], device=labels.device)
    task = torch.searchsorted(starts, labels, right=True) - 1
    return task, labels - starts[task]

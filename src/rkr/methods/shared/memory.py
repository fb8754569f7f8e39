"""A memory of exemplars: which samples of earlier tasks are kept, and how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError


def herd(features: Tensor, count: int) -> Tensor:
    """The rows, in order, whose running mean stays nearest to the mean of all (herding; Welling, ICML 2009).

    Row k is the one that brings (f_1 + ... + f_k) / k closest to the mean of `features` (N, D); no row comes twice.
    """
    count = min(count, len(features))
    mean, total = features.mean(0), torch.zeros_like(features[0])
    taken = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    chosen = []
    for k in range(1, count + 1):
        far = ((total + features) / k - mean).square().sum(1).masked_fill(taken, torch.inf)
        best = int(far.argmin())
        chosen.append(best)
        taken[best] = True
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)


class Memory(nn.Module):
    """Numbers of kept training samples, for each class best first, so that it can shrink when classes are added.

    Only the numbers are here: the training loop reads these samples, and no others of earlier tasks. Their size is
    counted.

    Args:
        budget: Number of samples of all classes together. At least one of each class is kept.
    """

    def __init__(self, budget: int) -> None:
        super().__init__()
        if budget < 1:
            raise UsageError(f"memory must hold 1 sample or more, not {budget}")
        self.budget = budget
        self.classes: list[int] = []  # of each task

    def room(self, classes: int) -> int:
        """Samples of each of so many classes: what fits (iCaRL's authors round up, and keep a few more)."""
        return max(1, self.budget // max(1, classes))

    @property
    def quota(self) -> int:
        """Samples per class. Decreases when a task's samples are added, not when the task begins."""
        kept = [bool((self._rows(n) >= 0).any()) for n in range(len(self.classes))]
        return self.room(sum(c for c, there in zip(self.classes, kept, strict=True) if there))

    def begin(self, classes: int) -> None:
        """Prepare for a new task. Until its samples are added, earlier tasks use the whole memory."""
        self.classes.append(classes)
        rows = torch.full((classes, self.room(sum(self.classes))), -1)
        self.register_buffer(f"task_{len(self.classes) - 1}", rows)

    def keep(self, chosen: Sequence[Tensor]) -> None:
        """Keep samples of every class of the newest task, best first; earlier classes shrink."""
        fill_rows(self._rows(len(self.classes) - 1), chosen)

    def of(self, number: int, label: int) -> Tensor:
        """The samples kept of a class of a task."""
        rows = self._rows(number)[label, : self.quota]
        return rows[rows >= 0]

    def of_task(self, number: int) -> Tensor:
        """All samples kept of a task, class by class."""
        return torch.cat([self.of(number, label) for label in range(self.classes[number])])

    def __len__(self) -> int:
        return sum(len(self.of_task(number)) for number in range(len(self.classes)))

    def _rows(self, number: int) -> Tensor:
        return self.get_buffer(f"task_{number}")


def fill_rows(table: Tensor, chosen: Sequence[Tensor]) -> None:
    """Write numbers of samples into a table of a row for each class, (C, N); -1 where there are too few."""
    table.fill_(-1)
    for row, numbers in zip(table, chosen, strict=True):
        row[: len(numbers)] = numbers[: len(row)].to(row)


def class_features(features: Tensor, labels: Tensor, classes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """For each class, where its samples are, and their features on the unit sphere."""
    found = []
    for label in classes:
        rows = (labels == label).nonzero()[:, 0]
        found.append((rows, F.normalize(features[rows], dim=1)))
    return found

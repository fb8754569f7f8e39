"""Tests a task on labelled pictures: accuracy, accuracy of each class, and which classes are taken for which."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rkr.errors import FileError, UsageError
from rkr.pictures.cache import Squares
from rkr.pictures.dataset import list_pictures

if TYPE_CHECKING:
    from rkr.pictures.zoo import Zoo

BATCH = 32


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How a task does on labelled pictures.

    Attributes:
        task: Its name.
        classes: Names of its classes.
        confusion: Pictures of class i (row) that were called class j (column): int64 (C, C).
        broken: Files that cannot be read as pictures, and why.
    """

    task: str
    classes: tuple[str, ...]
    confusion: Tensor
    broken: tuple[tuple[str, str], ...] = ()

    @property
    def pictures(self) -> int:
        """How many were tested."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of pictures whose class was right."""
        return int(self.confusion.diagonal().sum()) / self.pictures

    @property
    def per_class(self) -> dict[str, float | None]:
        """Accuracy of each class; None where there was no picture of it."""
        hits, totals = self.confusion.diagonal().tolist(), self.confusion.sum(1).tolist()
        return {
            name: hit / total if total else None for name, hit, total in zip(self.classes, hits, totals, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "task": self.task,
            "pictures": self.pictures,
            "accuracy": self.accuracy,
            "per_class": self.per_class,
            "confusion": self.confusion.tolist(),
            "classes": list(self.classes),
            "broken": [path for path, _ in self.broken],
        }

    def draw(self, path: str | os.PathLike[str]) -> None:
        """The confusion matrix as a picture: share of each row in percent."""
        import io

        import matplotlib

        from rkr.atomic import write_atomic

        matplotlib.use("Agg")
        from matplotlib.figure import Figure

        count = len(self.classes)
        shares = 100 * self.confusion / self.confusion.sum(1, keepdim=True).clamp(min=1)
        side = min(max(3.0, 1.5 + 0.32 * count), 40.0)
        figure = Figure((side + 1, side), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=100)
        names = [name if len(name) <= 24 else name[:23] + "…" for name in self.classes]
        axes.set_xticks(range(count), names, rotation=90, fontsize=7)
        axes.set_yticks(range(count), names, fontsize=7)
        axes.set_xlabel("answer")
        axes.set_ylabel("class")
        axes.set_title(f"{self.task}: {100 * self.accuracy:.1f} % of {self.pictures} pictures", fontsize=9)
        if count <= 30:
            for i, row in enumerate(self.confusion.tolist()):
                for j, value in enumerate(row):
                    if value:
                        colour = "white" if shares[i, j] > 60 else "black"
                        axes.text(j, i, str(value), ha="center", va="center", fontsize=6, color=colour)
        figure.colorbar(image, label="% of the class", shrink=0.7)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=120)
        write_atomic(Path(path), file.getvalue())


def evaluate(zoo: Zoo, source: str | os.PathLike[str], task: str | None = None) -> Evaluation:
    """Test a task. Of a source with parts the pictures for testing count, or else those for validation."""
    name = zoo.chosen(task)
    classes = zoo.tasks[name].classes
    number_of = {label: number for number, label in enumerate(classes)}
    listing = list_pictures(source)
    for wanted in (("test",), ("validation",)):
        if listing.only(*wanted).pictures:
            listing = listing.only(*wanted)
            break
    unknown = sorted(set(listing.classes) - set(classes))
    if unknown:
        raise UsageError(
            f"{listing.source}: the class {unknown[0]!r} is not among those of the task {name!r}: "
            f"{', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}"
        )
    squares = Squares([p.path for p in listing.pictures], zoo.preparation, memory=0)
    y = [number_of[picture.label] for picture in listing.pictures]
    confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64)
    broken: list[tuple[str, str]] = []
    waiting: list[tuple[int, Tensor]] = []

    def answer() -> None:
        if waiting:
            answers = zoo.logits(torch.stack([square for _, square in waiting]), name).argmax(1)
            for (label, _), found in zip(waiting, answers.tolist(), strict=True):
                confusion[label, found] += 1
            waiting.clear()

    for number, (content, square) in enumerate(squares.decoded(range(len(y)))):
        if square is None:
            broken.append((listing.pictures[number].path, str(content)))
            continue
        waiting.append((y[number], square))
        if len(waiting) == BATCH:
            answer()
    answer()
    if not int(confusion.sum()):
        raise FileError(f"{listing.source}: none of its {len(y)} files can be used, for instance {broken[0][1]}")
    return Evaluation(name, classes, confusion, tuple(broken))

"""What `rkr learn` would do, how long it would take and how large it would be: measured on a few pictures."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from rkr.core.features import base_features
from rkr.errors import FileError
from rkr.experiment.display.text import duration
from rkr.experiment.processes import make_fabric
from rkr.methods.learner import SeenTask
from rkr.pictures.cache import MEMORY, place
from rkr.pictures.learn import Request, begin_zoo, default_precision
from rkr.pictures.learner import PictureLearner
from rkr.pictures.preparation import Preparation

TRIED = 16  # pictures that are read and trained on


@dataclass(frozen=True)
class Plan:
    """What would happen."""

    model: str
    new: bool
    task: str
    backbone: str
    classes: int
    pictures: int
    smallest: tuple[str, int]  # the class with the fewest pictures, and how many
    largest: tuple[str, int]
    epochs: int  # at most
    seconds: float  # at most, by the speed of a few pictures
    task_bytes: int
    base_bytes: int  # that a new model takes
    kept_in: str  # where decoded pictures are kept: memory, file, nowhere
    decoded_bytes: int
    numbers: float  # of the task, as a share of the network's

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    def in_words(self) -> str:
        """The same as text."""
        what = "makes" if self.new else "adds to"
        kept = {
            "memory": f"kept in memory: {self.decoded_bytes / 1e6:.0f} MB",
            "file": f"kept in a file while it learns: {self.decoded_bytes / 1e6:.0f} MB",
            "nowhere": "decoded again in each epoch",
        }[self.kept_in]
        base = f" and the network, {self.base_bytes / 1e6:.1f} MB" if self.new else ""
        return "\n".join(
            (
                f"task         {self.task!r}: {what} {self.model}",
                f"network      {self.backbone}",
                f"pictures     {self.pictures} of {self.classes} classes, {self.smallest[1]} ({self.smallest[0]}) to "
                f"{self.largest[1]} ({self.largest[0]}) each; decoded pictures are {kept}",
                f"time         at most {duration(self.seconds)} for {self.epochs} epochs, by the speed of a few",
                f"size         {self.task_bytes / 1e6:.2f} MB for the task, {100 * self.numbers:.1f} % of it{base}",
                "nothing was written",
            )
        )


def plan(request: Request, accelerator: str = "auto", precision: str | None = None, threads: int | None = None) -> Plan:
    """Look at the pictures, and measure a few of them."""
    if threads is not None:
        torch.set_num_threads(threads)
    fabric = make_fabric(accelerator, precision or default_precision(accelerator))
    zoo = begin_zoo(request)
    pictures, classes = request.listing.pictures, request.listing.classes
    counts = Counter(picture.label for picture in pictures).most_common()
    squares, decode = _decoded([p.path for p in pictures], zoo.preparation)
    base_bytes = sum(t.nbytes for t in zoo.model.network.state_dict().values())
    learner = PictureLearner(zoo.model, request.settings)
    learner.begin(SeenTask(0, request.task, classes, 0))
    task = zoo.model.tasks[request.task]
    zoo.model.to(fabric.device)
    x = zoo.preparation.normalised(zoo.preparation.centre(squares)).to(fabric.device)
    y = torch.arange(len(x), device=fabric.device) % len(classes)
    zoo.model.eval()
    forward = _seconds(lambda: base_features(zoo.model, x)) / len(x)
    epochs = request.settings.epochs if request.settings.rank else 0
    step = 0.0
    if epochs:
        optimizer = torch.optim.AdamW(learner.groups(), lr=0.0)
        learner.train()

        def train() -> None:
            optimizer.zero_grad()
            with fabric.autocast():
                fabric.backward(learner.loss(x, y).loss)
            optimizer.step()

        step = _seconds(train) / len(x)
    n, held = len(pictures), request.settings.validation
    passes = learner.crops(n) + (2 if epochs else 1)  # for the probe, and to test what is kept
    seconds = n * (decode + passes * forward + epochs * ((1 - held) * step + held * forward))
    decoded = n * zoo.preparation.resize**2 * 3
    return Plan(
        str(request.folder),
        request.new,
        request.task,
        request.backbone,
        len(classes),
        n,
        counts[-1],
        counts[0],
        epochs,
        seconds,
        sum(t.nbytes for t in task.tensors().values()),
        base_bytes,
        place(n, zoo.preparation.resize, MEMORY, request.lesson_folder),
        decoded,
        sum(t.numel() for t in task.tensors().values()) / sum(p.numel() for p in zoo.model.network.parameters()),
    )


def _decoded(paths: list[str], preparation: Preparation) -> tuple[torch.Tensor, float]:
    """Some squares, and the seconds that each took on all threads."""
    found, began, error = [], time.perf_counter(), None
    for path in paths[:: max(1, len(paths) // TRIED)][:TRIED]:
        try:
            found.append(preparation.square(path))
        except FileError as one:
            error = one
    if not found:
        raise error or FileError("no picture can be read")
    return torch.stack(found), (time.perf_counter() - began) / len(found) / torch.get_num_threads()


def _seconds(work: Any) -> float:
    """The second of two calls: the first one sets things up."""
    work()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began

"""Zero-shot runs small enough to be repeated hundreds of times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_runs import Case, training
from torch import Tensor

from rkr.data import Stream, Task, Training
from rkr.data.task import Features
from rkr.experiment.spec import RunSpec
from rkr.methods import ZERO_SHOT_METHODS
from rkr.networks import CadaVae

CLASSES, UNSEEN, ATTRIBUTES = (4, 6, 3), ((1,), (0, 5), (2,)), (5, 3, 4)
CLASSIFIER: dict[str, Any] = {"epochs": 2, "seen": 5, "unseen": 8, "batch": 8}
STEPS = (4, 8, 4)  # of two epochs: 23, 36 and 18 latents in batches of 8
METHODS = ("base", "sft", "l1", "l2", "lzsl", "rkr", "original")
TRAIN, TEST, EPOCHS, BATCHES = 19, 40, 2, 3


class Net(CadaVae):
    """A small one; `quiet` ones draw nothing."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(8, 3, encoder=7, decoder=6, attribute_encoder=5, attribute_decoder=4)
        self.quiet = quiet

    def sample(self, gaussian: tuple[Tensor, Tensor]) -> Tensor:
        return gaussian[0] if self.quiet else super().sample(gaussian)


def features(task: int, count: int, classes: tuple[int, ...], seed: int) -> Features:
    """A place for each class, and noise."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.rand(CLASSES[task], 8, generator=torch.Generator().manual_seed(100 + task))
    y = torch.tensor(classes)[torch.arange(count) % len(classes)]
    return Features(places[y] + 0.1 * torch.rand(count, 8, generator=draw), y)


def make_stream(tasks: int = 3, validation: bool = False) -> Stream:
    made = []
    for n in range(tasks):
        every = tuple(range(CLASSES[n]))
        attributes = torch.rand(CLASSES[n], ATTRIBUTES[n], generator=torch.Generator().manual_seed(n))
        training = Training(
            f"set {n}",
            tuple(f"{n}.{c}" for c in every),
            features(n, TRAIN, tuple(c for c in every if c not in UNSEEN[n]), 2 * n),
            features(n, 20, every, 50 + n) if validation else None,
            attributes,
            UNSEEN[n],
            (torch.full((8,), float(n)), torch.full((8,), n + 1.0)),
        )
        made.append(Task(training, features(n, TEST, every, 2 * n + 1)))
    order = tuple(tuple(range(1, classes + 1)) for classes in CLASSES[:tasks])
    return Stream("places", tuple(made), (), (), order)


SCHEDULE: dict[str, Any] = {
    "epochs": EPOCHS,
    "batch": 8,
    "optimizer": "adam",
    "lr": 0.01,
    "amsgrad": True,
    "eps": 1e-9,
    "sampling": "afresh",
}


def make_case(method: str = "rkr", /, **changes: Any) -> Case:
    """A run of 3 tasks, 2 epochs, 3 batches; `tasks`, `validation`, `quiet` and the schedule may be changed too."""
    kind = {key: changes.pop(key) for key in ("tasks", "validation") if key in changes}
    quiet = changes.pop("quiet", False)
    classifier = {"classifier": {**CLASSIFIER, **changes.pop("classifier", {})}}
    stream = changes.pop("stream", None) or make_stream(**kind)
    fields: dict[str, Any] = {
        "recipe": "places",
        "method": method,
        "order": "fixed",
        "make": lambda: Net(quiet),
        "head": "fc",
        "learner": changes.pop("learner", None) or ZERO_SHOT_METHODS[method],
        "options": {**({} if method == "ridge" else classifier), **changes.pop("options", {})},
        "training": training(SCHEDULE, changes),
        "agnostic": "never",
        "settings": {"method": method},
    }
    return Case(RunSpec(**{**fields, **changes}), stream)


def outcome(folder: Path) -> dict[str, bytes]:
    """What a run must repeat byte for byte: results, and every file of the model."""
    found = [folder / "results.jsonl", *(path for path in sorted((folder / "model").rglob("*")) if path.is_file())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}

"""Runs small enough to be repeated hundreds of times, and the ways in which they are made to fail."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr.atomic
import rkr.experiment.folder
from rkr.data import Images, Stream, Task, Training
from rkr.experiment.events import Event
from rkr.experiment.execution import Execution
from rkr.experiment.processes import make_fabric
from rkr.experiment.recipes.settings import TrainingSettings
from rkr.experiment.run import Run
from rkr.experiment.spec import RunSpec
from rkr.methods import METHODS, Method
from rkr.methods.learner import Learner, Outcome, Phase, ReadSamples, SeenTask
from rkr.methods.shared.one_network import OneNetwork

FOREVER = 1e9  # minutes between two saves


def few_digits(methods: Sequence[str], tasks: int = 5, augment: bool = False) -> str:
    """A recipe of two orders with 22 images a task: batches of 7, 7, 7 and 1."""
    return f"""
        title = "a few digits"
        about = "for tests"
        orders = ["fixed", 1]
        [stream]
        source = "digits"
        tasks = 5
        first = {tasks}
        limit = 11
        [network]
        name = "digits-net"
        classes = 10
        [training]
        epochs = 2
        batch = 7
        optimizer = "sgd"
        lr = 0.05
        momentum = 0.9
        weight_decay = 5e-4
        milestones = [1]
        gamma = 0.1
        seed = 0
        [training.augment]
        pad = {int(augment)}
        flip = false
        {"".join(f"[methods.{method}]" + chr(10) for method in methods)}
    """


SCHEDULE: dict[str, Any] = {  # 3 batches an epoch, the last one smaller
    "epochs": 2,
    "batch": 8,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "milestones": (1,),
    "augment": {"pad": 1},
}


class Case(NamedTuple):
    """What a run is made of."""

    spec: RunSpec
    stream: Stream


def training(usual: dict[str, Any], changes: dict[str, Any]) -> TrainingSettings:
    """Takes the fields of the schedule out of changes."""
    values = {**usual, **{key: changes.pop(key) for key in TrainingSettings.model_fields if key in changes}}
    values["milestones"] = tuple(m for m in values.get("milestones", ()) if m < values["epochs"])
    if values.get("optimizer") == "adam":
        values["momentum"] = 0.0
    return TrainingSettings(**values)


class Net(nn.Module):
    """Convolutions, BatchNorm, dropout and two fully connected layers, in any precision."""

    input_shape = (1, 8, 8)

    def __init__(self, dropout: float = 0.2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 7, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(7)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(7 * 4 * 4, 11)
        self.fc = nn.Linear(11, 10)
        self.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x.to(self.dtype))))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(F.relu(self.fc1(self.dropout(x.flatten(1)))))


def images(count: int, classes: int, seed: int) -> Images:
    """A bright spot whose place tells the class, in noise."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 120, (count, 1, 8, 8), generator=draw, dtype=torch.uint8)
    y = torch.arange(count) % classes
    for i, label in enumerate(y.tolist()):
        x[i, 0, 2 * (label // 2) : 2 * (label // 2) + 3, 4 * (label % 2) : 4 * (label % 2) + 3] += 100
    return Images(x, y)


def make_stream(tasks: int = 3, train: int = 19, test: int = 10, classes: int = 2) -> Stream:
    made = tuple(
        Task(
            Training(f"task {n}", tuple(f"class {n}.{i}" for i in range(classes)), images(train, classes, 2 * n)),
            images(test, classes, 2 * n + 1),
        )
        for n in range(tasks)
    )
    order = tuple(tuple(range(classes * n, classes * (n + 1))) for n in range(tasks))
    return Stream("spots", made, (0.3,), (0.2,), order)


class TwoPhases(OneNetwork):
    """All that a method may do: phases that train different parts, a memory drawn at random, a snapshot, a penalty."""

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        if task.number == 0:
            self.spare = nn.Parameter(torch.ones(3))  # without a gradient: no optimiser may move it
            self.register_buffer("anchor", torch.zeros_like(self.network.conv2.weight))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer(f"memory{task.number}", torch.zeros(4, dtype=torch.int64))

    def phases(self) -> Sequence[Phase]:
        return (Phase("heads", epochs=1, lr_factor=2.0), Phase())

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self.phase = phase.name
        self.network.conv1.weight.requires_grad_(phase.name != "heads")
        self.anchor.copy_(self.network.conv2.weight.detach() + 0.1 * torch.randn_like(self.anchor))

    def rehearse(self, images: Sequence[int]) -> dict[int, Tensor | None]:
        return {**{n: self.get_buffer(f"memory{n}") for n in range(self.task.number)}, self.task.number: None}

    def groups(self) -> list[dict[str, Any]]:
        if self.phase == "heads":
            return [{"params": list(self.heads.parameters())}]
        return [*super().groups(), {"params": [self.spare]}]

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.heads.use = None
        logits = self.network(x)
        pull = (self.network.conv2.weight - self.anchor).square().mean()
        return Outcome(
            F.cross_entropy(logits, y) + pull, None if self.phase == "heads" else (logits.argmax(1) == y).sum()
        )

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % 2:
            self.anchor *= 0.9

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        count = sum(int((y >= self.task.start).sum()) for _, y in train())  # of this task, not of memories
        self.get_buffer(f"memory{self.task.number}").copy_(torch.randperm(count)[:4])


class Forgetful(OneNetwork):
    """Fine-tuning that claims to be isolating."""

    isolating = True


LEARNERS = {**METHODS, "two-phases": Method(TwoPhases, "for tests"), "forgetful": Method(Forgetful, "for tests")}


def make_case(method: str = "rkr", /, **changes: Any) -> Case:
    """A run of 3 tasks, 2 epochs, 3 batches; `dropout`, `dtype` and fields of the schedule may be changed too."""
    net = {key: changes.pop(key) for key in ("dropout", "dtype") if key in changes}
    schedule = training(SCHEDULE, changes)
    size = {key: changes.pop(key) for key in ("tasks", "train", "test", "classes") if key in changes}
    stream = changes.pop("stream", None) or make_stream(**size)
    fields: dict[str, Any] = {
        "recipe": "spots",
        "method": method,
        "order": "fixed",
        "make": lambda: Net(**net),
        "head": "fc",
        "learner": changes.pop("learner", None) or LEARNERS[method],
        "options": {},
        "training": schedule,
        "settings": {"method": method, "training": {"lr": schedule.lr, "epochs": schedule.epochs}},
    }
    return Case(RunSpec(**{**fields, **changes}), stream)


def execute(
    folder: Path | str,
    case: Case | str = "rkr",
    watch: Callable[[Event], None] = lambda event: None,
    save_minutes: float = FOREVER,
    **changes: Any,
) -> bool:
    if isinstance(case, str):
        case = make_case(case, **changes)
    return Run(*case, Path(folder), make_fabric("cpu"), watch, Execution(save_minutes=save_minutes)).execute()


def outcome(folder: Path) -> dict[str, bytes]:
    """What a run must repeat byte for byte: results, and every file of the model."""
    found = [folder / "results.jsonl", *sorted((folder / "model").iterdir())]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


# ---------------------------------------------------------------------------------------------------------
# Faults


class _Faulty:
    """A file that goes wrong in the middle of a write."""

    def __init__(self, file: Any, fault: Callable[[Callable[[], None]], None]) -> None:
        self._file, self._fault = file, fault

    def __enter__(self) -> _Faulty:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> None:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._fault(half)
        self._file.write(data)


def pauses(seconds: float) -> None:
    """Rest before every epoch: small runs end in less time than a busy machine may take to stop them."""
    begin = Learner.begin_epoch

    def rested(self: Learner, progress: float) -> None:
        time.sleep(seconds)
        begin(self, progress)

    Learner.begin_epoch = rested  # type: ignore[method-assign]


def faults(at: int, kind: str) -> None:
    """From the `at`-th step of writing on (half a write, fsync, rename): "kill" this process, or the disk is "full"."""
    steps = 0

    def fault(before: Callable[[], None] = lambda: None) -> None:
        nonlocal steps
        steps += 1
        if steps < at:
            return
        before()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fsync, replace = os.fsync, os.replace

    def faulty_fsync(file: int) -> None:
        fault()
        fsync(file)

    def faulty_replace(a: Any, b: Any) -> None:
        fault()
        replace(a, b)

    def faulty_open(path: Any, mode: str = "r", *rest: Any) -> Any:
        file = open(path, mode, *rest)  # noqa: SIM115
        return _Faulty(file, fault) if mode[0] in "axw" else file

    os.fsync, os.replace = faulty_fsync, faulty_replace
    for module in (rkr.atomic, rkr.experiment.folder):
        module.open = faulty_open  # type: ignore[attr-defined]

"""What every method is: a module with a few hooks, which the engine calls in the same order for all of them.

    for each task:  begin(task)                       make room: a head, factors, a network, ...
                    for each phase:  prepare(phase)   most methods have one
                        groups()                      what to optimise
                        for each epoch:  begin_epoch(progress)
                            for each batch:  loss(x, y), after_step()
                    end(train, validation)            importance weights, memories, freezing, ...
    at any time:    predict(x, number)                logits over the classes of one task

A learner is an `nn.Module`, so its state is its `state_dict`: parameters, and buffers for anything else that it
remembers. To go on after an interruption the engine makes a new learner, calls `begin` for the same tasks, and loads
that state; a method whose shape depends on more than the tasks overrides `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from rkr.core.cost import multiply_adds
from rkr.core.files import write_atomic

MakeNetwork = Callable[[], nn.Module]
ReadSamples = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""A pass over a part of the task's samples, in order and without augmentation."""


@dataclass(frozen=True)
class SeenTask:
    """A task as its learner knows it. Labels count classes over all tasks, so this task's begin at `start`."""

    number: int  # 0, 1, ...
    name: str
    class_names: tuple[str, ...]
    start: int
    attributes: Tensor | None = None  # (C, A): what is known of the classes besides samples, in zero-shot learning
    unseen: tuple[int, ...] = ()  # classes without training samples, counted within the task

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def labels(self) -> slice:
        """Its classes among those of all tasks."""
        return slice(self.start, self.start + self.classes)


class Outcome(NamedTuple):
    """A batch's mean loss, and how many samples were classified rightly (None if that has no meaning)."""

    loss: Tensor
    correct: Tensor | None


@dataclass(frozen=True)
class Phase:
    """One pass of training within a task. None: as the recipe says."""

    name: str = "train"
    epochs: int | None = None
    lr: float | None = None
    same_optimizer: bool = False  # goes on with the optimiser of the phase before, which must train the same groups


@dataclass(frozen=True)
class Capacity:
    """What must be kept to use every task learned so far.

    Attributes:
        parameters: By the paper's count: heads lie within the plain network's 100 %, statistics are not counted.
        network: Parameters of the plain network: 100 %.
        bytes: Of everything, heads and statistics and memories of samples included.
        multiply_adds: For one sample of the last task.
    """

    parameters: int
    network: int
    bytes: int
    multiply_adds: int | None

    @property
    def percent(self) -> float:
        """The paper's "capacity"."""
        return 100 * self.parameters / self.network


class Learner(nn.Module):
    """Base of all methods.

    Args:
        make: Builds a new, randomly initialised network.
        head: Name of the network's classification layer.
    """

    isolating: ClassVar[bool] = False
    """Whether the method promises that earlier tasks answer bit for bit as before. The engine checks it."""

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__()
        self.make, self.head = make, head
        self.seen: list[SeenTask] = []

    # -- hooks --------------------------------------------------------------------------------------------

    def begin(self, task: SeenTask) -> None:
        """Make room for a task. Subclasses call this first."""
        self.seen.append(task)

    def phases(self) -> Sequence[Phase]:
        """The passes in which the task is trained."""
        return (Phase(),)

    def prepare(self, phase: Phase) -> None:
        """A phase begins."""

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        """Which training images of which tasks (by number) to train on; None for all of a task's.

        Args:
            images: How many training images each task has.
        """
        return {self.task.number: None}

    def groups(self) -> list[dict[str, Any]]:
        """Optimiser groups of what the phase trains."""
        raise NotImplementedError

    def begin_epoch(self, progress: float) -> None:
        """An epoch begins, or goes on after an interruption; `progress` is the share of the phase before it, 0 to 1."""

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        """The loss of a batch; `y` counts classes over all tasks."""
        raise NotImplementedError

    def after_step(self) -> None:
        """The optimiser has moved."""

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        """The task is learned. `validation` is there if the recipe keeps some of the training samples apart."""

    def predict(self, x: Tensor, number: int) -> Tensor:
        """Logits over the classes of task `number` (0, 1, ...)."""
        raise NotImplementedError

    def capacity(self) -> Capacity:
        """What it takes to keep what was learned."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """What else is worth recording of the task just learned, as JSON."""
        return {}

    def export(self, folder: Any) -> None:
        """Write what was learned to a folder, for use outside of experiments."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {key: value.detach().cpu().contiguous() for key, value in self.state_dict().items()}
        write_atomic(folder / "learner.safetensors", encode_tensors(state))

    # -- for subclasses -----------------------------------------------------------------------------------

    @property
    def task(self) -> SeenTask:
        """The task being learned."""
        return self.seen[-1]

    def classified(self, logits: Tensor, y: Tensor) -> Outcome:
        """Cross-entropy over the classes of the task being learned."""
        y = y - self.task.start
        return Outcome(F.cross_entropy(logits, y), (logits.detach().argmax(1) == y).sum())


class TaskHead(nn.Module):
    """The classification layers of several tasks in the place of one. Computes the one in use, or all side by side."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        self.use: int | None = None
        self._make: Callable[[int], nn.Linear] = lambda classes: nn.Linear(
            original.in_features, classes, original.bias is not None
        ).to(original.weight)

    def add(self, classes: int) -> None:
        """A new head, which is used from now on."""
        self.heads.append(self._make(classes))
        self.use = len(self.heads) - 1

    def forward(self, features: Tensor) -> Tensor:
        if self.use is None:
            return torch.cat([head(features) for head in self.heads], 1)  # (B, classes of all tasks)
        return self.heads[self.use](features)


class OneNetwork(Learner):
    """A single plain network with a head for each task: what fine-tuning, penalties and memories have in common."""

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__(make, head)
        self.network = make()
        self._plain = plain_size(self.network)
        put_task_head(self.network, head)

    @property
    def heads(self) -> TaskHead:
        """The network's classification layers."""
        return cast("TaskHead", self.network.get_submodule(self.head))

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.heads.add(task.classes)

    def groups(self) -> list[dict[str, Any]]:
        own = self.heads.heads[self.task.number]
        others = {id(p) for p in self.heads.parameters()} - {id(p) for p in own.parameters()}
        return decay_groups(self.network, leave_out=others)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.heads.use = self.task.number
        return self.classified(self.network(x), y)

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.heads.use = number
        return self.network(x)

    def capacity(self) -> Capacity:
        return Capacity(self._plain.parameters, self._plain.parameters, nbytes(self.network), self._plain.multiply_adds)


# ---------------------------------------------------------------------------------------------------------
# Pieces


@dataclass(frozen=True)
class PlainSize:
    """The plain network, with its own head."""

    parameters: int
    multiply_adds: int | None


def plain_size(network: nn.Module) -> PlainSize:
    """Count a network; multiply-adds where it tells its `input_shape`."""
    shape = getattr(network, "input_shape", None)
    macs = None if shape is None else multiply_adds(network, shape)[0]
    return PlainSize(sum(p.numel() for p in network.parameters()), macs)


def put_task_head(network: nn.Module, head: str) -> TaskHead:
    """Exchange a network's classification layer for one that holds a head for each task."""
    original = network.get_submodule(head)
    assert isinstance(original, nn.Linear)
    made = TaskHead(original)
    parent, _, leaf = head.rpartition(".")
    setattr(network.get_submodule(parent), leaf, made)
    return made


def decay_groups(network: nn.Module, leave_out: set[int] = frozenset()) -> list[dict[str, Any]]:  # type: ignore[assignment]
    """All trainable parameters, those of normalisation layers without weight decay, as `RectifiedModel` groups them."""
    norms = {id(p) for m in network.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()}
    chosen = [p for p in network.parameters() if p.requires_grad and id(p) not in leave_out]
    return [
        {"params": [p for p in chosen if id(p) not in norms]},
        {"params": [p for p in chosen if id(p) in norms], "weight_decay": 0.0},
    ]


def nbytes(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.nbytes for t in tensors.values())

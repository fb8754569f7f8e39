"""A single plain network with a head for each task: what fine-tuning, penalties and memories have in common.

The rectification core (`rkr.core`) keeps heads and normalisation of tasks as well. It is not used here, because these
methods do what it forbids: several heads answer and learn at once, and statistics that all tasks share move.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from rkr.capacity import Capacity
from rkr.core import BATCH_NORMS
from rkr.errors import UsageError
from rkr.methods.learner import Learner, MakeNetwork, Outcome, SeenTask, decay_groups, nbytes, plain_size


class TaskHead(nn.Module):
    """The classification layers of several tasks in the place of one. Computes the one in use, or all side by side.

    With `bare` it passes on the features that go into it.
    """

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        self.use: int | None = None
        self.bare = False
        self.features = original.in_features
        self._make: Callable[[int], nn.Linear] = lambda classes: nn.Linear(
            original.in_features, classes, original.bias is not None
        ).to(original.weight)

    def add(self, classes: int) -> None:
        """A new head, which is used from now on."""
        self.heads.append(self._make(classes))
        self.use = len(self.heads) - 1

    def forward(self, features: Tensor) -> Tensor:
        if self.bare:
            return features
        if self.use is None:
            return torch.cat([head(features) for head in self.heads], 1)  # (B, classes of all tasks)
        return self.heads[self.use](features)


BN = ("shared", "frozen", "per_task")
ONE_PASS = ("shared", "frozen")


class TaskNorm(nn.Module):
    """The batch normalisation of several tasks in the place of one: each has its own statistics and parameters."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([original])
        self.use = 0

    def add(self) -> None:
        """A new one that starts where the last is, and is used from now on."""
        self.norms.append(copy.deepcopy(self.norms[-1]))
        self.use = len(self.norms) - 1
        for earlier in self.norms[:-1]:
            earlier.requires_grad_(False)

    def train(self, mode: bool = True) -> TaskNorm:
        """Only the newest is trained."""
        super().train(False)
        self.training = mode
        self.norms[-1].train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[self.use](x)


class OneNetwork(Learner):
    """A single plain network with a head for each task: what fine-tuning, penalties and memories have in common.

    Args:
        make: Builds the network.
        head: Its classification layer.
        bn: Batch normalisation: "shared" by all tasks, whose statistics follow the newest one; "frozen" after the first
            task; or "per_task".
    """

    bn_choices: ClassVar[tuple[str, ...]] = BN
    """Without "per_task" where a pass has samples or heads of several tasks: it cannot serve each with its own."""

    def __init__(self, make: MakeNetwork, head: str, *, bn: str = "shared") -> None:
        super().__init__(make, head)
        if bn not in self.bn_choices:
            raise UsageError(f"bn must be one of {', '.join(self.bn_choices)}, not {bn!r}")
        self.bn = bn
        self.network = make()
        self._plain = plain_size(self.network)
        put_task_head(self.network, head)
        self._norms = put_task_norms(self.network) if bn == "per_task" else []
        if bn == "frozen":
            self._norms = [m for m in self.network.modules() if isinstance(m, BATCH_NORMS)]

    @property
    def heads(self) -> TaskHead:
        """The network's classification layers."""
        return cast("TaskHead", self.network.get_submodule(self.head))

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.heads.add(task.classes)
        if not task.number:
            return
        for norm in self._norms:
            if isinstance(norm, TaskNorm):
                norm.add()
            else:
                norm.requires_grad_(False)

    def train(self, mode: bool = True) -> OneNetwork:
        """Statistics that are frozen do not move."""
        super().train(mode)
        if self.bn == "frozen" and len(self.seen) > 1:
            for norm in self._norms:
                norm.eval()
        return self

    def shared(self) -> list[nn.Parameter]:
        """The parameters that all tasks use and train: what penalties hold back."""
        own = {id(p) for p in self.heads.parameters()}
        own |= {id(p) for norm in self._norms for p in norm.parameters()}
        return [p for p in self.network.parameters() if p.requires_grad and id(p) not in own]

    def select(self, number: int | None) -> None:
        """Compute with a task's head and normalisation; None: with all heads side by side."""
        self.heads.use = number
        for norm in self._norms:
            if isinstance(norm, TaskNorm):
                norm.use = len(self.seen) - 1 if number is None else number

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What goes into the heads, (B, D)."""
        self.heads.bare = True
        try:
            return self.network(x).flatten(1)
        finally:
            self.heads.bare = False

    def groups(self) -> list[dict[str, Any]]:
        own = self.heads.heads[self.task.number]
        others = {id(p) for p in self.heads.parameters()} - {id(p) for p in own.parameters()}
        return decay_groups(self.network, leave_out=others)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.select(self.task.number)
        return self.classified(self.network(x), y)

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.select(number)
        return self.network(x)

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        """What going on takes beside the network: tensors such as importances, and bytes of samples.

        What equals the network's own weights when a task ends, and what the next task makes anew, is not part of it.
        """
        return (), 0

    def capacity(self) -> Capacity:
        """The network with what tasks have of their own; heads lie within its 100 %, as the paper counts."""
        plain, norms = self._plain.parameters, [norm for norm in self._norms if isinstance(norm, TaskNorm)]
        own = sum(p.numel() for norm in norms for later in norm.norms[1:] for p in later.parameters())
        used = Capacity(plain + own, plain, nbytes(self.network), self._plain.multiply_adds)
        return used.keeping(*self.kept_to_learn())


def put_task_head(network: nn.Module, head: str) -> TaskHead:
    """Exchange a network's classification layer for one that holds a head for each task."""
    modules = dict(network.named_modules())
    original = modules.get(head)
    if not isinstance(original, nn.Linear):
        known = ", ".join(repr(path) for path, m in modules.items() if isinstance(m, nn.Linear)) or "there is none"
        what = "it has no such layer" if original is None else f"that is a {type(original).__name__}"
        raise UsageError(
            f"head must name the network's last linear layer, not {head!r}: {what}; linear layers: {known}"
        )
    made = TaskHead(original)
    parent, _, leaf = head.rpartition(".")
    setattr(network.get_submodule(parent), leaf, made)
    return made


def put_task_norms(network: nn.Module) -> list[nn.Module]:
    """Exchange a network's batch normalisation for one that tasks have for themselves."""
    found: list[nn.Module] = []
    for path, layer in list(network.named_modules()):
        if isinstance(layer, BATCH_NORMS):
            parent, _, leaf = path.rpartition(".")
            found.append(TaskNorm(layer))
            setattr(network.get_submodule(parent), leaf, found[-1])
    return found

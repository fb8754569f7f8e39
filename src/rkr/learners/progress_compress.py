"""Progress & Compress (P&C; Schwarz et al., ICML 2018): learn a task beside what is known, then work it in."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.learners.learner import MakeNetwork, Outcome, Phase, ReadSamples, SeenTask, decay_groups
from rkr.learners.shared.anchored import Anchored
from rkr.learners.shared.distillation import imitated
from rkr.learners.shared.fisher import fisher
from rkr.learners.shared.one_network import put_task_head


class Lateral(nn.Module):
    """What a layer of the active column takes from the knowledge base: α ⊙ U ReLU(V h + c) (equation 1).

    h is what goes into the same layer of the knowledge base; V reduces its width, U has the form of the layer, and α is
    a factor for each of its outputs, at first small.
    """

    def __init__(self, layer: nn.Module, reduction: int) -> None:
        super().__init__()
        self.reduce: nn.Module
        self.into: nn.Module
        if isinstance(layer, nn.Conv2d):
            width = max(1, layer.in_channels // reduction)
            self.reduce = nn.Conv2d(layer.in_channels, width, 1)
            shape: Any = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            self.into = nn.Conv2d(width, layer.out_channels, layer.kernel_size, bias=False, **shape)  # type: ignore[arg-type]
            size: tuple[int, ...] = (layer.out_channels, 1, 1)
        else:
            assert isinstance(layer, nn.Linear)
            width = max(1, layer.in_features // reduction)
            self.reduce = nn.Linear(layer.in_features, width)
            self.into = nn.Linear(width, layer.out_features, bias=False)
            size = (layer.out_features,)
        self.scale = nn.Parameter(torch.empty(size).uniform_(0, 0.1))
        self.to(layer.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.into(F.relu(self.reduce(h)))


class ProgressCompress(Anchored):
    """Two columns: the knowledge base, which answers, and an active one that learns each task with its help.

    Progress: the active column, made anew for each task, is trained with lateral connections from the frozen knowledge
    base. Compress: the knowledge base learns to answer as the active column does, held back by online EWC (section 3):
    KL(active || base) + λ/2 Σ F* (θ - θ*)²; the paper's γ before F* lies within λ, and F is not normalised. Each phase
    takes all epochs of the recipe.

    In both phases the active column is helped by the knowledge base as earlier tasks left it, so that what is to be
    imitated does not move with the one who imitates. That copy and the active column are not counted: the next task
    makes both anew.

    Args:
        make: Builds a network.
        head: Its classification layer.
        strength: λ.
        gamma: F* ← γ F* + F.
        reduction: How much narrower lateral connections are.
        bn: Of the knowledge base: see `OneNetwork`.
    """

    helper: nn.Module | None

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (1.0, 10.0, 100.0, 1e3, 1e4)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        strength: float = 100.0,
        gamma: float = 0.95,
        reduction: int = 4,
        bn: str = "per_task",
    ) -> None:
        super().__init__(make, head, strength=strength, bn=bn)
        if not 0 <= gamma <= 1:
            raise UsageError(f"gamma must be from 0 to 1, not {gamma!r}")
        if reduction < 1:
            raise UsageError(f"reduction must be at least 1, not {reduction!r}")
        self.gamma, self.reduction = gamma, reduction
        self.active: nn.Module = nn.Identity()
        self.laterals = nn.ModuleDict()
        self.register_module("helper", None)
        self._phase = "progress"

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.select(task.number - 1)
            self.helper = copy.deepcopy(self.network).requires_grad_(False)
        super().begin(task)
        self.active = self.make()
        put_task_head(self.active, self.head).add(task.classes)
        self.laterals = nn.ModuleDict()
        if task.number:
            for path, layer in _sites(self.active, self.head)[1:]:  # the first layer sees the image itself
                self.laterals[path.replace(".", "/")] = Lateral(layer, self.reduction)

    def phases(self) -> Sequence[Phase]:
        return (Phase("progress"), Phase("compress"))

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self._phase = phase.name

    def train(self, mode: bool = True) -> ProgressCompress:
        """Of the column that is not trained, no statistics move."""
        super().train(mode)
        (self.network if self._phase == "progress" else self.active).eval()
        if self.helper is not None:
            self.helper.eval()
        return self

    def groups(self) -> list[dict[str, Any]]:
        if self._phase == "progress":
            return [*decay_groups(self.active), {"params": list(self.laterals.parameters())}]
        return super().groups()

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        if self._phase == "progress":
            return self.classified(self.act(x), y)
        with torch.no_grad():
            wanted = self.act(x)
        self.select(self.task.number)
        logits = self.network(x)
        return Outcome(imitated(logits, wanted), (logits.detach().argmax(1) == y - self.task.start).sum())

    def before_step(self, optimizer: Optimizer) -> None:
        if self._phase == "compress":
            super().before_step(optimizer)

    def act(self, x: Tensor) -> Tensor:
        """What the active column answers, with the help of the knowledge base."""
        if self.helper is None:
            return self.active(x)
        seen: dict[str, Tensor] = {}
        handles = []
        for column, hook in ((self.helper, _remember), (self.active, _help)):
            for path, layer in _sites(column, self.head)[1:]:
                key = path.replace(".", "/")
                handles.append(layer.register_forward_hook(partial(hook, seen, key, self.laterals[key])))
        try:
            with torch.no_grad():
                self.helper(x)
            return self.active(x)
        finally:
            for handle in handles:
                handle.remove()

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.select(self.task.number)
        shared = self.shared()
        self.anchor.renew(shared, fisher(self.network, shared, train, self.task.start), self.gamma)


def _sites(network: nn.Module, head: str) -> list[tuple[str, nn.Module]]:
    """Convolutions and linear layers but the head, in order."""
    kinds = (nn.Conv2d, nn.Linear)
    inside = f"{head}."
    found = network.named_modules()
    return [(path, m) for path, m in found if isinstance(m, kinds) and path != head and not path.startswith(inside)]


def _remember(
    seen: dict[str, Tensor], key: str, lateral: nn.Module, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    seen[key] = inputs[0].clone()  # what comes next may write into it


def _help(
    seen: dict[str, Tensor], key: str, lateral: nn.Module, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
) -> Tensor:
    return output + lateral(seen[key])

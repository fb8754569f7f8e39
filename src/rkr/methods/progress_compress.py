"""Progress & Compress (P&C; Schwarz et al., ICML 2018): learn a task in an active column, then distil it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Outcome, Phase, ReadSamples, SeenTask, decay_groups
from rkr.methods.shared.anchored import Anchored
from rkr.methods.shared.distillation import imitated
from rkr.methods.shared.fisher import fisher
from rkr.methods.shared.lateral import Laterals
from rkr.methods.shared.one_network import put_task_head
from rkr.registry import register


@register.method(
    "pc",
    "P&C: an active column, distilled with online EWC; about 200 % to go on learning",
    citation="Schwarz et al., ICML 2018",
)
class ProgressCompress(Anchored):
    """Two columns: the knowledge base, which predicts, and an active column that learns each task.

    Progress: the active column, newly initialised for each task, is trained with lateral connections from the frozen
    knowledge base. Compress: the active column is distilled into the knowledge base under the penalty of online EWC
    (section 3): KL(active || base) + λ/2 Σ F* (θ - θ*)²; the paper's γ before F* lies within λ, and F is not
    normalised. Each phase takes all epochs of the recipe.

    In both phases the lateral connections come from a copy of the knowledge base as earlier tasks left it, so that the
    target of the distillation is fixed. That copy and the active column are not counted, because the next task creates
    both again.

    Args:
        make: Builds a network.
        head: Its classification layer.
        strength: λ.
        gamma: F* ← γ F* + F.
        reduction: Factor by which lateral connections are narrower.
        bn: Of the knowledge base: see `OneNetwork`.
    """

    checked = "The paper's equations; the authors published no code."
    differs = (
        "Both phases take all epochs of the recipe.",
        "The Fisher information is not normalised, λ takes the place of that.",
        "Lateral connections lead into every layer but the first and the head.",
    )

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
        self.laterals = Laterals(nn.Identity(), head, reduction)  # the first task has none
        self.register_module("helper", None)
        self._phase = "progress"

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.select(task.number - 1)
            self.helper = copy.deepcopy(self.network).requires_grad_(False)
        super().begin(task)
        self.active = self.make()
        put_task_head(self.active, self.head).add(task.classes)
        if task.number:
            self.laterals = Laterals(self.active, self.head, self.reduction)

    def phases(self) -> Sequence[Phase]:
        return (Phase("progress"), Phase("compress"))

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self._phase = phase.name

    def train(self, mode: bool = True) -> ProgressCompress:
        """Freeze the statistics of the column that is not trained."""
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
        """The outputs of the active column, with lateral connections from the knowledge base."""
        return self.active(x) if self.helper is None else self.laterals.helped_answer(self.active, self.helper, x)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.select(self.task.number)
        shared = self.shared()
        self.anchor.renew(shared, fisher(self.network, shared, train, self.task.start), self.gamma)

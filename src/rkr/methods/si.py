"""Synaptic intelligence (SI; Zenke, Poole, Ganguli, ICML 2017)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask
from rkr.methods.shared.anchored import Anchored, require_strength
from rkr.registry import register


@register.method(
    "si",
    "SI: penalty weighted by path integrals; about 200 % to go on learning",
    citation="Zenke et al., ICML 2017",
)
class SynapticIntelligence(Anchored):
    """The importance of a weight is how much its path lowered the loss: the path integral ω of -gradient times step.

    At the end of a task it grows by ω / (Δ² + ξ), where Δ is the weight's change (equations 4 and 5). It never falls
    below 0, as in the authors' code: momentum and noise make some ω negative.

    Args:
        make: Builds the network.
        head: Its classification layer.
        strength: c: what is minimised is cross-entropy + c Σ_i Ω_i (θ_i - θ*_i)².
        damping: ξ.
        bn: See `OneNetwork`.
    """

    checked = "The authors' code (ganguli-lab/pathint)."
    differs = (
        "It runs with the recipe's momentum and weight decay, which move weights without lowering the loss; "
        "importances do not fall below 0, as in the authors' code.",
        "Every task has its own batch normalisation.",
    )

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (0.01, 0.1, 1.0, 10.0, 100.0)}

    def __init__(
        self, make: MakeNetwork, head: str, *, strength: float = 0.1, damping: float = 1e-3, bn: str = "per_task"
    ) -> None:
        require_strength(strength)
        super().__init__(make, head, strength=2 * strength, bn=bn)  # SI's formula has no 1/2
        if damping <= 0:
            raise UsageError(f"damping must be above 0, not {damping!r}")
        self.damping = damping
        zeros = [nn.Parameter(torch.zeros_like(p), requires_grad=False) for p in self.shared()]
        self.path = nn.ParameterList(zeros)  # ω
        self._step: list[tuple[Tensor, Tensor] | None] = []  # where it begins, and the gradients of the loss there

    @torch.no_grad()
    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        for path in self.path:
            path.zero_()

    def before_step(self, optimizer: Optimizer) -> None:
        self._step = [None if p.grad is None else (p.detach().clone(), p.grad.clone()) for p in self.shared()]
        super().before_step(optimizer)

    @torch.no_grad()
    def after_step(self) -> None:
        """ω_i -= g_i Δθ_i, g being the gradient of the loss without the penalty, where the step began."""
        for p, path, began in zip(self.shared(), self.path, self._step, strict=True):
            if began is not None:
                before, gradient = began
                path.sub_(gradient * (p - before))
        self._step = []

    @torch.no_grad()
    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        shared, importance = self.shared(), []
        starts = self.anchor.values  # of the first task: the initial values
        for p, start, path, old in zip(shared, starts, self.path, self.anchor.importance, strict=True):
            importance.append((old + path / ((p - start).square() + self.damping)).clamp(min=0))
        self.anchor.put(shared, importance)

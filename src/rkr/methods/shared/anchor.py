"""A penalty on moving away from the solution of earlier tasks, for L2T, EWC, SI, P&C and zero-shot L1 and L2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer


def departure(
    parameters: Iterable[Tensor], values: Iterable[Tensor], importance: Iterable[Tensor] | None = None, norm: int = 2
) -> Tensor:
    """Σ_i I_i |θ_i - θ*_i|^p, p = `norm` 1 or 2; without importances all count the same, 1."""
    moved = [p - value for p, value in zip(parameters, values, strict=True)]
    parts = [m.abs() if norm == 1 else m.square() for m in moved]
    if importance is not None:
        parts = [matters * part for matters, part in zip(importance, parts, strict=True)]
    return torch.stack([part.sum() for part in parts]).sum()


class Anchor(nn.Module):
    """Earlier values of parameters and their importances: Σ_i I_i (θ_i - θ*_i)². At first the penalty is 0."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList([_still(p.detach().clone()) for p in parameters])
        self.importance = nn.ParameterList([_still(torch.zeros_like(p)) for p in parameters])

    @torch.no_grad()
    def put(self, parameters: Sequence[Tensor], importance: Sequence[Tensor] | float) -> None:
        """Anchor parameters at their current values."""
        for i, p in enumerate(parameters):
            self.values[i].copy_(p)
            self.importance[i].copy_(torch.as_tensor(importance[i] if isinstance(importance, Sequence) else importance))

    @torch.no_grad()
    def add(self, parameters: Sequence[Tensor], importance: Sequence[Tensor]) -> None:
        """Add an anchor without using more memory.

        A sum of parabolas is a parabola: I (θ - a)² + J (θ - b)² = (I + J)(θ - (I a + J b) / (I + J))² + constant.
        """
        for value, matters, p, own in zip(self.values, self.importance, parameters, importance, strict=True):
            both = matters + own
            value.lerp_(p, torch.where(both > 0, own / both, 1))  # any value will do where both importances are 0
            matters.copy_(both)

    def renew(self, parameters: Sequence[Tensor], importance: Sequence[Tensor], gamma: float) -> None:
        """Anchor parameters at their current values; I ← γ I + the new ones (online EWC; Schwarz et al., 2018)."""
        self.put(parameters, [gamma * old + new for old, new in zip(self.importance, importance, strict=True)])

    def penalty(self, parameters: Sequence[Tensor]) -> Tensor:
        """Σ_i I_i (θ_i - θ*_i)², which `pull` lowers. For checks."""
        return departure(parameters, self.values, self.importance)

    @torch.no_grad()
    def pull(self, parameters: Sequence[Tensor], strength: float, optimizer: Optimizer) -> None:
        """Add the gradients of λ/2 Σ_i I_i (θ_i - θ*_i)², λ = `strength`, to those of the parameters.

        SGD follows a parabola of steepness λI only while lr λI < 2 (1 + momentum); beyond, each step overshoots by more
        than the last. Importances within a network differ by many orders of magnitude, so a λ that is effective for
        most weights exceeds that limit for some. For these, λI is limited to 1/lr, with which a step without momentum
        ends at the anchor.
        """
        rate = optimizer.param_groups[0]["lr"] if isinstance(optimizer, SGD) else 0.0
        for p, value, matters in zip(parameters, self.values, self.importance, strict=True):
            steepness = strength * matters
            if rate:
                steepness.clamp_(max=1 / rate)
            gradient(p).addcmul_(steepness, p - value)


def gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter, 0 if there is none."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def _still(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)

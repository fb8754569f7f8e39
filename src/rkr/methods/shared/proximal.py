"""In-place proximal steps of sparsity penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_threshold(weight: Tensor, threshold: float) -> None:
    """Of L1: sign(w) max(|w| - threshold, 0)."""
    weight.copy_(F.softshrink(weight, threshold))


def group_threshold(groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Of group lasso: g max(1 - threshold / ||g||, 0); returns which groups are 0.

    A group has the same index in dimension 0 of all the tensors.
    """
    norm = group_norm(groups)
    factor = torch.where(norm > threshold, 1 - threshold / norm, 0)
    for group in groups:
        group.mul_(factor.to(group.dtype).view(-1, *[1] * (group.dim() - 1)))
    return factor == 0


def group_norm(groups: Sequence[Tensor]) -> Tensor:
    """Euclidean norms of groups, in double precision if available, so that 0 means 0."""
    squares = [group.to(finest(group.device)).square() for group in groups]
    return torch.stack([s if s.dim() == 1 else s.flatten(1).sum(1) for s in squares]).sum(0).sqrt()


def finest(device: torch.device) -> torch.dtype:
    """The precision for sums of squares. Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

"""Metrics of zero-shot learning, used for tests and for validation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unseen_and_seen(answers: Tensor, labels: Tensor, classes: int, unseen: Sequence[int]) -> tuple[float, float]:
    """Compute U and S, the mean per-class accuracies of unseen and seen classes (Xian et al., TPAMI 2018).

    Every class with test samples has the same weight, regardless of its number of samples.
    """
    is_unseen = torch.zeros(classes, dtype=torch.bool)
    is_unseen[list(unseen)] = True
    tested = torch.bincount(labels, minlength=classes)
    hits = torch.bincount(labels[answers == labels], minlength=classes)
    of_class = hits.double() / tested.clamp(min=1)

    def mean(which: Tensor) -> float:
        found = of_class[which & (tested > 0)]
        return float(found.mean()) if len(found) else 0.0

    return mean(is_unseen), mean(~is_unseen)


def harmonic_mean(u: float, s: float) -> float:
    """Compute H, the harmonic mean of U and S."""
    return 2 * u * s / (u + s) if u + s else 0.0

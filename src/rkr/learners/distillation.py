"""Losses that make a network answer as another one does."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distilled(student: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """Cross-entropy with the teacher's softened probabilities (Hinton et al. 2015), mean over samples.

    Logits are (B, C). At temperature T gradients are smaller by about T²; as in LwF and EEIL that is left so.
    """
    wanted = F.softmax(teacher.detach() / temperature, 1)
    return -(wanted * F.log_softmax(student / temperature, 1)).sum(1).mean()


def imitated(student: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence from the teacher's probabilities to the student's, mean over samples; 0 where they agree."""
    log_p, log_q = F.log_softmax(teacher.detach(), 1), F.log_softmax(student, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()

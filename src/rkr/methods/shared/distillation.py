"""Distillation: the losses, and the network before the task as the teacher."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.methods.learner import MakeNetwork, SeenTask, decay_groups
from rkr.methods.shared.one_network import ONE_PASS, OneNetwork


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


class Taught(OneNetwork):
    """One network and a copy of it from before the task, its teacher.

    Old heads are trained too. The copy is made when a task begins, so between tasks only the network is kept. Batch
    normalisation is shared: all heads see the same images in one pass.
    """

    bn_choices: ClassVar[tuple[str, ...]] = ONE_PASS
    teacher: nn.Module | None

    def __init__(self, make: MakeNetwork, head: str, *, bn: str = "shared") -> None:
        super().__init__(make, head, bn=bn)
        self.register_module("teacher", None)

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.select(None)
            self.teacher = copy.deepcopy(self.network).requires_grad_(False)
        super().begin(task)

    def train(self, mode: bool = True) -> Taught:
        """Keep the copy in evaluation mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def groups(self) -> list[dict[str, Any]]:
        return decay_groups(self.network)

    def logits(self, x: Tensor) -> Tensor:
        """Over the classes of all tasks so far, (B, C)."""
        self.select(None)
        return self.network(x)

    @torch.no_grad()
    def wanted(self, x: Tensor) -> Tensor:
        """The logits of the copy over the classes of earlier tasks."""
        assert self.teacher is not None
        return self.teacher(x)

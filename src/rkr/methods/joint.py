"""Joint training: all tasks' data at once, which a sequence of tasks does not allow. A reference point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.methods.learner import Outcome, decay_groups
from rkr.methods.shared.one_network import ONE_PASS, OneNetwork
from rkr.registry import register


@register.method("joint", "one network, trained on the images of all tasks so far")
class Joint(OneNetwork):
    """With every new task, train one network further on the images of all tasks so far, each with its own head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        bn: Batch normalisation: "shared" by all tasks, or "frozen" after the first one.
    """

    bn_choices: ClassVar[tuple[str, ...]] = ONE_PASS

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        return {task.number: None for task in self.seen}

    def groups(self) -> list[dict[str, Any]]:
        return decay_groups(self.network)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.heads.use = None
        logits = self.network(x)  # (B, classes of all tasks)
        starts = torch.tensor([task.start for task in self.seen], device=y.device)
        task_of_class = torch.repeat_interleave(
            torch.arange(len(starts), device=y.device),
            torch.tensor([task.classes for task in self.seen], device=y.device),
        )
        foreign = task_of_class[None] != task_of_class[y][:, None]
        logits = logits.masked_fill(foreign, float("-inf"))  # the task is given, so only its classes compete
        return Outcome(F.cross_entropy(logits, y), (logits.detach().argmax(1) == y).sum())

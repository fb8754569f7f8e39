"""Joint training on the data of all tasks, which continual learning does not allow. A reference point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.methods.learner import MakeNetwork, Outcome, ReadSamples, decay_groups
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

    checked = "A reference point by its definition."
    differs = ("With every task one network is trained further, not a new one from the start.",)

    sample_bytes: Tensor

    bn_choices: ClassVar[tuple[str, ...]] = ONE_PASS

    learns_its_size = "this is without the samples, all of which are kept to go on learning"

    def __init__(self, make: MakeNetwork, head: str, *, bn: str = "shared") -> None:
        super().__init__(make, head, bn=bn)
        self.register_buffer("sample_bytes", torch.zeros((), dtype=torch.int64))  # of all so far: one for each value

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        return {task.number: None for task in self.seen}

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.sample_bytes.fill_(sum(x.numel() for x, _ in train()))

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        """The samples of all tasks."""
        return (), int(self.sample_bytes)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """States of earlier versions lack the size of samples."""
        return super().load_state_dict({"sample_bytes": self.sample_bytes, **state_dict}, strict, assign)

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

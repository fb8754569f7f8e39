"""The classification layer: each task has its own, with its own number of classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core.adapters.base import NeedsGrouping, TargetLayer
from rkr.core.adapters.conv import CONVS
from rkr.core.portable import Portable, Tasks
from rkr.core.portable.head import PortableHead
from rkr.core.state import TaskState, clone_state
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.mixed import MixedBatch

HEADS = (nn.Linear, *CONVS)


class HeadLayer(TargetLayer):
    """A Linear or convolution whose weight and bias are "head.weight" and "head.bias" of the task."""

    properties = ("weight", "bias")

    @property
    def class_dim(self) -> int:
        """Where the output has its classes: last for a Linear, dimension 1 for a convolution."""
        return 1 if self.weight.dim() > 2 else -1

    def expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        assert classes is not None
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        found["head.weight"] = ((classes, *self.weight.shape[1:]), self.weight.dtype)
        if self.bias is not None:
            found["head.bias"] = ((classes,), self.weight.dtype)
        return found

    def new(self, classes: int, init: str) -> dict[str, Tensor]:
        """A new task's head: "random", or a copy of the "network"'s own."""
        w, b = self.weight, self.bias
        if init == "network":
            if w.shape[0] != classes:
                raise UsageError(
                    f"the network's own head has {w.shape[0]} classes, the task {classes}: use head_init='random'"
                )
            return clone_state({"head.weight": w} | ({} if b is None else {"head.bias": b}))
        if init != "random":
            raise UsageError(f"head_init must be 'random' or 'network', not {init!r}")
        weight = torch.empty(classes, *w.shape[1:])
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        found = {"head.weight": weight.to(w)}
        if b is not None:
            bound = w[0].numel() ** -0.5
            found["head.bias"] = torch.empty(classes).uniform_(-bound, bound).to(b)
        return found

    def replaced(self) -> Iterable[str]:
        return self.module._parameters

    def covered(self) -> Iterable[str]:
        return "weight", "bias"

    def overrides(self) -> tuple[str, ...]:
        return ("forward",)

    def read(self, name: str) -> Tensor | None:
        task = self.task_in_use()
        return self.base_tensor(name) if task is None else self.update.head(self, task, name)

    def forward(self, input: Tensor) -> Tensor:
        """The logits of the task in use."""
        if self.active.mixed is not None:
            return self.mixed(self.active.mixed, input)
        return self.original.forward(self.module, input)  # type: ignore[attr-defined]

    def mixed(self, batch: MixedBatch, input: Tensor) -> Tensor:
        """Each task's own head, rows padded with -inf to the widest."""
        batch.check(self.path, input)
        if self.weight.dim() != 2:
            raise NeedsGrouping(self.path)
        weights, biases = batch.all("head.weight"), [task.get("head.bias") for task in batch.tasks]
        out = input.new_full((*input.shape[:-1], max(map(len, weights))), -torch.inf)
        parts = zip(out.split(batch.counts), input.split(batch.counts), weights, biases, strict=True)
        for part, rows, weight, bias in parts:
            part[..., : len(weight)] = F.linear(rows, weight, bias)
        return out

    def merged_tensors(self, task: TaskState) -> dict[str, Tensor | None]:
        return {"weight": task.get("head.weight"), "bias": task.get("head.bias")}

    def fit(self, module: nn.Module, task: TaskState) -> None:
        plain: Any = module
        setattr(plain, "out_features" if isinstance(module, nn.Linear) else "out_channels", task.classes)

    def portable(self, tasks: Tasks) -> Portable:
        return PortableHead(self, tasks)

    def cost_group(self, name: str) -> str:
        return "head"

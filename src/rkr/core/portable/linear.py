"""Fully connected layers and embeddings in traced form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rkr.core.portable.base import LowRank


class PortableLinear(LowRank):
    """`(x W' + b + (x LM_t) RM_t) · F_t`."""

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self.layer
        own = self.prepared()
        y = layer.apply(input, layer.weight, layer.bias)
        if "lm" in own:
            y = y + self.product(self.product(input, own["lm"]), own["rm"])
        return self.scaled(y, own)


class PortableEmbedding(LowRank):
    """`(W[x] + LM_t[x] RM_t) · F_t`: the rows of all tasks are in one table."""

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        found = super().prepare(own)
        if "lm" in own and self.tasks.states is not None:
            found["lm"] = torch.cat(own["lm"])  # (T·V, K)
            found["first"] = torch.arange(self.tasks.count) * len(own["lm"][0])
        return found

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self.layer
        own = self.prepared()
        if self.tasks.index is not None and input.dim() == 1 and isinstance(len(input), int):
            input = input.unsqueeze(0)  # rows that are looked up once for all samples, such as those of positions
        y = layer.apply(input, layer.weight, None)
        if "lm" in own:
            rows = input + self.pick(own["first"], input, 0) if "first" in own else input
            u = layer.apply(rows, own["lm"], None)
            y = y + self.product(u, own["rm"])
        return self.scaled(y, own)


class PortableEmbeddingBag(LowRank):
    """Sums and means of rows are linear: the bag of rows of W, and that of rows of LM times RM.

    A bag may be a part of a flat input, so the rows of all tasks stand side by side and each bag keeps its own.
    """

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        found = super().prepare(own)
        if "lm" in own and self.tasks.states is not None:
            found["lm"] = torch.cat(own["lm"], 1)  # (V, T·K)
            found["mine"] = torch.eye(self.tasks.count, dtype=found["rm"].dtype).unsqueeze(-1)
        return found

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self.layer
        own = self.prepared()
        y = layer.apply(input, layer.weight, None, *args, **kwargs)
        if "lm" in own:
            u = layer.apply(input, own["lm"], None, *args, **kwargs)
            if "mine" in own:
                u = u.unflatten(-1, (self.tasks.count, -1))
                u = (u * self.pick(own["mine"], u, -2)).sum(-2)
            y = y + self.product(u, own["rm"])
        return self.scaled(y, own)

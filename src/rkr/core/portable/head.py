"""The classification layer in traced form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rkr.core.portable.base import Portable

if TYPE_CHECKING:
    from rkr.core.adapters.head import HeadLayer
    from rkr.core.portable.tasks import Tasks


class PortableHead(Portable):
    """Each sample's own head. Rows are padded with -inf to the widest."""

    layer: HeadLayer

    def __init__(self, layer: HeadLayer, tasks: Tasks) -> None:
        super().__init__(layer, tasks)
        self.spatial = layer.weight.dim() - 2
        kinds: tuple[type, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        kind = next(cls for cls in kinds if issubclass(layer.original, cls))
        self.keys = {key.removeprefix("head."): key for key in self.names()}
        names = ("forward", "_conv_forward")
        self.is_plain = all(getattr(layer.original, n, None) is getattr(kind, n, None) for n in names)

    def names(self) -> list[str]:
        return ["head.weight", "head.bias"] if self.layer.bias is not None else ["head.weight"]

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        if not self._by_product:
            return self.apart(own)
        weights = own["weight"]
        biases = own.get("bias") or [w.new_zeros(len(w)) for w in weights]
        width = max(map(len, weights))
        weight = torch.stack([F.pad(w.flatten(1), (0, 0, 0, width - len(w))) for w in weights])  # (T, C, I)
        bias = torch.stack([F.pad(b, (0, width - len(b)), value=-torch.inf) for b in biases])
        return {"weight": weight if self.spatial else weight.transpose(1, 2), "bias": bias}

    def forward(self, input: Tensor) -> Tensor:
        at = -1 - self.spatial
        if not self._by_product:
            return self.each(lambda number: self._logits(input, number), at)
        own = self.prepared()
        if self.spatial:
            y = self.channel_product(input, own["weight"], self.spatial)
        else:
            y = self.product(input, own["weight"])
        return y + self.pick(own["bias"], y, at)

    @property
    def _by_product(self) -> bool:
        """Whether logits are products with each sample's own weight: those of a Linear, or at every place."""
        if not self.is_plain or self.tasks.count == 1:
            return False
        conv = self.module
        if not self.spatial:
            return True
        unpadded = conv.padding in ("valid", (0,) * self.spatial)
        return {*conv.kernel_size, *conv.stride, conv.groups} == {1} and unpadded

    def _logits(self, input: Tensor, number: int) -> Tensor:
        """The logits of one task, as wide as the widest."""
        y = functional_call(self.module, self.of(number), (input,))
        count = self.tasks.count
        if count == 1:
            return y
        more = max(len(self.of(n)["weight"]) for n in range(count)) - len(self.of(number)["weight"])
        return F.pad(y, (*[0] * (2 * self.spatial), 0, more), value=-torch.inf)

"""Normalisation layers in traced form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rkr.core.portable.base import Portable
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.adapters.norm import NormLayer
    from rkr.core.portable.tasks import Tasks

_INSTANCE = nn.modules.instancenorm._InstanceNorm


class PortableNorm(Portable):
    """Normalisation with each sample's own affine parameters and statistics.

    With running statistics it is one scale and one shift for each channel. Without, the input is normalised first.
    """

    layer: NormLayer

    def __init__(self, layer: NormLayer, tasks: Tasks) -> None:
        super().__init__(layer, tasks)
        plain = getattr(layer.original, "forward", None) is getattr(layer.registered, "forward", None)
        batch_norm = isinstance(self.module, nn.modules.batchnorm._NormBase)
        fixed = batch_norm and self.module.running_mean is not None
        if batch_norm and not fixed and not isinstance(self.module, _INSTANCE) and tasks.count > 1:
            raise UsageError(
                f"layer {self.path!r} normalises a batch by its own mean and variance, so samples of several tasks "
                'cannot be in one batch; export one task, style="merged", or with its tensors as inputs, '
                'style="adapter"'
            )
        self.by_channel = plain and fixed
        self.one_by_one = not plain or (tasks.count == 1 and not fixed)

    def names(self) -> list[str]:
        return [key for key in self.layer.shapes() if not key.endswith("num_batches_tracked")]

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        if self.one_by_one:
            return self.apart(own)
        found = super().prepare(own)
        if not self.by_channel:
            return found
        mean, var, weight, bias = (
            found.get(name, self.layer.base_tensor(name)) for name in ("running_mean", "running_var", "weight", "bias")
        )
        assert mean is not None
        assert var is not None
        scale = torch.rsqrt(var + self.module.eps)
        scale = scale if weight is None else scale * weight
        return {"weight": scale, "bias": -mean * scale if bias is None else bias - mean * scale}

    def forward(self, input: Tensor) -> Tensor:
        if self.one_by_one:
            return self.each(lambda number: functional_call(self.module, self.of(number), (input,)), 1 - input.dim())
        own = self.prepared()
        y, at = (input, 1 - input.dim()) if self.by_channel else self._normalised(input)
        if "weight" in own and "bias" in own and not torch.compiler.is_compiling():
            return torch.addcmul(self.pick(own["bias"], y, at), y, self.pick(own["weight"], y, at))
        if "weight" in own:
            y = y * self.pick(own["weight"], y, at)
        return y + self.pick(own["bias"], y, at) if "bias" in own else y

    def _normalised(self, x: Tensor) -> tuple[Tensor, int]:
        """The input without mean and variance, and where its affine parameters apply."""
        module: Any = self.module
        if isinstance(module, _INSTANCE):
            return F.instance_norm(x, eps=module.eps), 1 - x.dim()
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, None, None, module.eps), 1 - x.dim()
        shape = module.normalized_shape
        norm: Any = F.layer_norm if isinstance(module, nn.LayerNorm) else F.rms_norm
        return norm(x, shape, eps=module.eps), -len(shape)

"""Transposed convolutions: `nn.ConvTranspose1d`, `nn.ConvTranspose2d`, `nn.ConvTranspose3d`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core.adapters.base import Adapter, MultiplyAdds, first_input
from rkr.core.options import Options
from rkr.core.portable.conv import PortableConvTranspose
from rkr.core.rectification import conv_lm_std
from rkr.core.state import Active
from rkr.core.updates import LayerUpdate

CONV_TRANSPOSES = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUNCTIONS = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class ConvTransposeAdapter(Adapter):
    """The weight is stored as (inputs, outputs / groups, *kernel).

    LM and RM have the shapes of a convolution with as many channels: (W·inputs / groups, K) and (K, H·outputs).
    """

    family = "conv"
    per_sample = True
    portable_layer = PortableConvTranspose
    module: nn.ConvTranspose2d

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        super().__init__(path, module, active, options, update)
        self.channel_dim = 1 - self.weight.dim()  # of inputs with and without a batch

    def canonical(self, weight: Tensor) -> Tensor:
        """(I, O / groups, *kernel) as (O, I / groups, *kernel)."""
        groups = self.module.groups
        if groups == 1:
            return weight.transpose(0, 1)
        return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)

    def stored(self, weight: Tensor) -> Tensor:
        return self.canonical(weight)  # it exchanges two dimensions, so it is its own reverse

    def lm_std(self, fan: int) -> float:
        return conv_lm_std(fan)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None, output_size: list[int] | None = None) -> Tensor:
        conv: Any = self.module
        dims = weight.dim() - 2
        sizes = conv.stride, conv.padding, conv.kernel_size, dims, conv.dilation
        output_padding = conv._output_padding(input, output_size, *sizes)
        function: Any = _FUNCTIONS[dims - 1]
        return function(input, weight, bias, conv.stride, conv.padding, output_padding, conv.groups, conv.dilation)

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        """Each value of the input meets one filter: outputs / groups x kernel."""
        per_value = cast("Tensor", module.weight)[0].numel()
        return [(module, output.numel(), first_input(args, kwargs).numel() * per_value)]

    def paper_multiplies(self) -> int:
        return self.module.out_channels if self.scaled else 0

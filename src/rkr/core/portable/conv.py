"""Convolutions in traced form.

R is separable: a kernel of 1 x w to K channels, then one of h x 1. Each is a product with the factors of the sample's
task and a fixed kernel of zeros and ones: LM makes w·K channels, of which `add` shifts and adds up the K of each tap,
and `spread` makes the shifted copies, h·K channels, that RM takes. So the time does not depend on the number of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.core.portable.base import LowRank, total

if TYPE_CHECKING:
    from rkr.core.adapters.base import Adapter
    from rkr.core.portable.tasks import Tasks

_CONVS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


class PortableConv(LowRank):
    """`(W * x + b + R_t * x) · F_t`."""

    add: Tensor
    spread: Tensor

    def __init__(self, layer: Adapter, tasks: Tasks) -> None:
        super().__init__(layer, tasks)
        if "lm" not in self.keys:
            return
        *outer, inner = self.module.kernel_size
        rank, rows, weight = layer.rank or 0, prod(outer), layer.weight
        eye = partial(torch.eye, dtype=weight.dtype, device=weight.device)
        add = torch.einsum("kl,ab->kalb", eye(rank), eye(inner))  # (K, w, K, w)
        spread = torch.einsum("kl,ab->alkb", eye(rank), eye(rows))  # (h, K, K, h)
        self.register_buffer("add", self.kernel(add.reshape(rank, inner * rank, *[1] * len(outer), inner)))
        self.register_buffer("spread", self.kernel(spread.reshape(rows * rank, rank, *outer, 1)))

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        found = super().prepare(own)
        if "lm" in found:
            inner, groups = self.module.kernel_size[-1], self.module.groups
            lm = found["lm"].unflatten(-2, (inner, -1)).transpose(-2, -1).flatten(-3, -2)  # (T, w·K, I)
            rm = found["rm"].unflatten(-1, (-1, self.layer.shape[0]))  # (T, K, h, O)
            rm = rm.transpose(-3, -1).flatten(-2)  # (T, O, h·K)
            if groups > 1:
                lm, rm = lm.unsqueeze(-3), rm.unflatten(-2, (groups, -1))
            found["lm"], found["rm"] = lm, rm
        return found

    def kernel(self, kernel: Tensor) -> Tensor:
        """A kernel (outputs, inputs, ...) that is the same for every group, as the convolution takes it."""
        return kernel.repeat(self.module.groups, *[1] * (kernel.dim() - 1))

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own, conv = self.prepared(), self.module
        spatial, groups = len(conv.kernel_size), conv.groups
        base, add, spread = self.parts(input, *args, **kwargs)
        y = base(input)
        if "lm" in own:
            u = add(self.channel_product(self.padded(input), own["lm"], spatial, groups), self.add)
            y = total(y, self.channel_product(spread(u, self.spread), own["rm"], spatial, groups))
        return self.scaled(y, own, self.layer.channel_dim)

    def parts(self, x: Tensor) -> tuple[Callable[[Tensor], Tensor], _Thin, _Thin]:
        """The convolution with the base's weight, with kernels along the last axis, and along the others."""
        conv, layer = self.module, self.layer
        apply: Any = _CONVS[len(conv.kernel_size) - 1]
        stride, padding, dilation = list(conv.stride), self._padding(), list(conv.dilation)
        ones, last = [1] * len(stride), len(stride) - 1
        # Rows that no output reads need not be computed.
        skips = set(conv.kernel_size[:-1]) <= {1} and not any(padding[:-1])
        first = stride if skips else [*ones[:-1], stride[last]]
        second = ones if skips else [*stride[:-1], 1]

        def base(x: Tensor) -> Tensor:
            return apply(self.padded(x), layer.weight, layer.bias, stride, padding, dilation, conv.groups)

        def add(x: Tensor, kernel: Tensor) -> Tensor:
            pad, dilate = [*[0] * last, padding[last]], [*ones[:-1], dilation[last]]
            return apply(x, kernel, None, first, pad, dilate, conv.groups)

        def spread(u: Tensor, kernel: Tensor) -> Tensor:
            return apply(u, kernel, None, second, [*padding[:-1], 0], [*dilation[:-1], 1], conv.groups)

        return base, add, spread

    def _padding(self) -> list[int]:
        """Padding that the convolutions themselves add."""
        conv = self.module
        if self._pads_first():
            return [0] * len(conv.kernel_size)
        if isinstance(conv.padding, str):
            return [around // 2 for around in self._around()] if conv.padding == "same" else [0] * len(conv.kernel_size)
        return list(conv.padding)

    def _around(self) -> list[int]:
        """Padding on both sides together of `padding="same"`."""
        conv = self.module
        return [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]

    def _pads_first(self) -> bool:
        """Whether the input is padded by a step of its own."""
        conv = self.module
        return conv.padding_mode != "zeros" or (conv.padding == "same" and any(n % 2 for n in self._around()))

    def padded(self, x: Tensor) -> Tensor:
        """The input with what its own step pads."""
        if not self._pads_first():
            return x
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        return F.pad(x, conv._reversed_padding_repeated_twice, mode)


_Thin = Callable[[Tensor, Tensor], Tensor]


class PortableConvTranspose(PortableConv):
    """The same with transposed convolutions, which are separable too."""

    def kernel(self, kernel: Tensor) -> Tensor:
        return super().kernel(kernel.transpose(0, 1))

    def parts(self, x: Tensor, output_size: list[int] | None = None) -> tuple[Callable[[Tensor], Tensor], _Thin, _Thin]:
        conv, layer = self.module, self.layer
        last = len(conv.kernel_size) - 1
        apply: Any = _TRANSPOSED[last]
        extra = conv._output_padding(
            x, output_size, conv.stride, conv.padding, conv.kernel_size, last + 1, conv.dilation
        )
        settings = conv.stride, conv.padding, extra

        def base(x: Tensor) -> Tensor:
            return apply(x, layer.weight, layer.bias, *settings, conv.groups, conv.dilation)

        def add(x: Tensor, kernel: Tensor) -> Tensor:
            stride, padding, more = ([*[n] * last, values[last]] for n, values in zip((1, 0, 0), settings, strict=True))
            return apply(x, kernel, None, stride, padding, more, conv.groups, [*[1] * last, conv.dilation[last]])

        def spread(u: Tensor, kernel: Tensor) -> Tensor:
            stride, padding, more = ([*values[:last], n] for n, values in zip((1, 0, 0), settings, strict=True))
            return apply(u, kernel, None, stride, padding, more, conv.groups, [*conv.dilation[:last], 1])

        return base, add, spread

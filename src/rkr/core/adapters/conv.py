"""Convolutions: `nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`.

On CPUs torch passes the weight to oneDNN, which reorders it at every call. With few samples this takes a good part of
the call: a fifth in the last layers of ResNet-18 with 8 samples. A merged weight serves many calls, so it is reordered
once and kept that way: `packing`. The kernel and the bits are those of the plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rkr.core import kernels, ways
from rkr.core.adapters.base import Adapter, MultiplyAdds, autocasts, needs_grad
from rkr.core.options import Options
from rkr.core.portable.conv import PortableConv
from rkr.core.rectification import conv_lm_std, rectified_weight, scaled
from rkr.core.state import Active
from rkr.core.updates import LayerUpdate

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ConvAdapter(Adapter):
    """The weight is (outputs, inputs / groups, *kernel), and the rectification a separable convolution."""

    family = "conv"
    same_methods = ("forward", "_conv_forward")
    per_sample = standard = convolves = True
    portable_layer = PortableConv
    module: nn.Conv2d

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        super().__init__(path, module, active, options, update)
        self.channel_dim = 1 - self.weight.dim()  # of inputs with and without a batch

    def lm_std(self, fan: int) -> float:
        return conv_lm_std(fan)

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(self.module, input, weight, bias)

    def rectify_input(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """With factored gradients, where they apply and pay, or in plain operations."""
        w, b, conv = self.weight, self.bias, self.module
        if ways.merges_plainly(self.options.kernels, w, len(input)) and not autocasts(input.device):
            weight = scaled(rectified_weight(w, lm, rm, self.options.layout), f, 0)
            if weight.stride() != w.stride():  # torch's slow convolution refuses odd strides of dimensions of size 1
                weight = torch.empty_like(w, requires_grad=False).copy_(weight)
            return self.apply(input, weight, b if b is None or f is None else b * f)
        padding = self._factored_padding(input)
        if padding is None or needs_grad(w, b):
            return None
        many = ways.merges_conv(input.numel(), w.numel())
        stride, dilation = cast("kernels.Pair", conv.stride), cast("kernels.Pair", conv.dilation)
        return kernels.factored_conv2d(input, w, b, lm, rm, f, stride, padding, dilation, many)

    def _factored_padding(self, x: Tensor) -> tuple[int, int] | None:
        """Padding in numbers if the factored gradients apply to this convolution and input, else None."""
        conv, weight = self.module, self.weight
        if (
            x.dim() != 4
            or weight.dim() != 4
            or not ways.factored_pays(weight.shape, self.rank)
            or conv.groups != 1
            or conv.padding_mode != "zeros"
            or self.options.layout != "axes"
            or x.shape[0] == 0
            or autocasts(x.device)
        ):
            return None
        if conv.padding == "valid":
            return 0, 0
        if conv.padding == "same":
            spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
            return None if any(s % 2 for s in spans) else (spans[0] // 2, spans[1] // 2)
        return cast("tuple[int, int]", conv.padding)

    def packing(self, input: Tensor) -> Callable[[Tensor], Tensor] | None:
        return packing(self.module, input, self.weight)

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        filter_size = prod(cast("Tensor", module.weight).shape[1:])
        return [(module, output.numel(), output.numel() * filter_size)]

    def paper_multiplies(self) -> int:
        return self.weight.shape[0] if self.scaled else 0


# ---------------------------------------------------------------------------------------------------------
# What a convolution computes with any weight


def convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a convolution for a weight, plain or packed, and a bias."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *_geometry(conv), "none", [], "")
    if weight.shape[-1] == 1 and _picks_pixels(conv, weight):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode)
        picked: Any = (..., *[slice(None, None, s) for s in conv.stride])
        x = x[picked]
        apply = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        return apply(x, weight, bias, groups=conv.groups)
    return conv._conv_forward(x, weight, bias)


def _picks_pixels(conv: nn.Conv2d, weight: Tensor) -> bool:
    """Whether to read every n-th pixel of the padded input first, then convolve with stride 1.

    The weight gradient of a channels_last 1x1 convolution with unequal strides, or with strides and few channels,
    writes out of bounds in torch 2.13 on CPUs.
    """
    stride, few = conv.stride, min(weight.shape[:2]) < 16
    return max(weight.shape[2:]) == 1 and (len(set(stride)) > 1 or (few and max(stride) > 1))


def packing(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """How to reorder weights of this shape for inputs like x; None where that gains nothing or changes a bit.

    Weights are reordered only where torch itself calls oneDNN and the output has the same layout: channels_last.
    """
    if (
        torch.is_grad_enabled()
        or _is_watched(x)
        or x.device.type != "cpu"
        or x.dtype is not torch.float32
        or not x.dim() == weight.dim() == 4
        or x.is_contiguous()
        or not x.is_contiguous(memory_format=torch.channels_last)
        or conv.padding_mode != "zeros"
        or isinstance(conv.padding, str)
        or torch.is_autocast_enabled("cpu")
        or not len(x)
        or _picks_pixels(conv, weight)
    ):
        return None
    geometry = conv.padding, conv.stride, conv.dilation, conv.groups
    switches = torch._C._get_mkldnn_enabled(), torch.get_num_threads()
    if not _calls_onednn(x.shape, weight.shape, *geometry, *switches):
        return None
    return lambda w: torch.ops.mkldnn._reorder_convolution_weight(w, *_geometry(conv), list(x.shape))


@lru_cache(maxsize=4096)  # asking torch takes a tenth of the shortest calls
def _calls_onednn(
    x: torch.Size,
    weight: torch.Size,
    padding: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    *switches: object,
) -> bool:
    """Whether torch hands a channels_last convolution of these shapes to oneDNN."""
    like: Any = {
        "dtype": torch.float32,
        "device": "cpu",
        "memory_format": torch.channels_last,
    }  # not the user's defaults
    tensors = [torch.empty(shape, **like) for shape in (x, weight)]
    backend = torch._C._select_conv_backend(*tensors, None, stride, padding, dilation, False, [0, 0], groups)
    return bool(backend == torch._C._ConvBackend.Mkldnn)  # type: ignore[attr-defined]


def _is_watched(x: Tensor) -> bool:
    """Whether anything records what is computed: a compiler, a tracer, a counter, forward-mode derivatives."""
    return (
        type(x) is not Tensor
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_function_stack() > 0
        or _get_current_dispatch_mode() is not None
    )


def _geometry(conv: nn.Conv2d) -> tuple[list[int], list[int], list[int], int]:
    """Padding, stride, dilation and groups as oneDNN's operators take them."""
    assert not isinstance(conv.padding, str)
    return list(conv.padding), list(conv.stride), list(conv.dilation), conv.groups

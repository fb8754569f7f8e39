"""What a convolution layer computes, with a weight that need not be its own.

On CPUs torch hands the weight to oneDNN, which reorders it at every call. Where samples are few that is a good part of
the call: a fifth in the last layers of ResNet-18 with 8 samples. A merged weight serves many calls, so it may be
reordered once and kept so: `packing`. Kernel and bits are those of the plain call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rkr.core.sites import CONVS


def is_plain_conv(cls: Any) -> bool:
    """Whether a class of convolutions computes as torch's do."""
    return any(cls.forward is conv.forward and cls._conv_forward is conv._conv_forward for conv in CONVS)


def convolve(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's output for a weight, plain or packed, and a bias."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, *_geometry(conv), "none", [], "")
    if _goes_around(conv, weight):
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = F.pad(x, conv._reversed_padding_repeated_twice, mode)
        picked: Any = (..., *[slice(None, None, s) for s in conv.stride])
        x = x[picked]
        apply = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
        return apply(x, weight, bias, groups=conv.groups)
    return conv._conv_forward(x, weight, bias)


def _goes_around(conv: nn.Conv2d, weight: Tensor) -> bool:
    """Whether to read every n-th pixel of the padded input first, then convolve with stride 1.

    The weight gradient of a channels_last 1x1 convolution with unequal strides, or with strides and few channels,
    writes out of bounds in torch 2.13 on CPUs.
    """
    stride, few = conv.stride, min(weight.shape[:2]) < 16
    return max(weight.shape[2:]) == 1 and (len(set(stride)) > 1 or (few and max(stride) > 1))


def packing(conv: nn.Conv2d, x: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """How to reorder weights of this shape for inputs like x; None where it would gain nothing, or change a bit.

    Only where torch itself would call oneDNN, and where its output has the same memory order: channels_last.
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
        or _goes_around(conv, weight)
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
    """Whether anything else sees what is computed: a compiler, a tracer, a counter, derivatives forward."""
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

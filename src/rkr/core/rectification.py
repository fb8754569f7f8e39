"""The paper's equations (section "Rectification-based Knowledge Retention").

For layer l and task t:

    R = LM·RM                 equations 3 and 5: `rectification`
    W_t = W + R               equation 1
    O_t = (W_t * I + b) · F   equation 2; F has one value for each output channel or unit

`formula` computes them literally. It is the reference for every fast path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def factor_shapes(weight: torch.Size | tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of LM and RM for a weight (C_out, C_in, *kernel).

    Conv2d, as in the paper: LM is (W_f·C_in) x K and RM is K x (H_f·C_out). The innermost kernel axis goes to LM
    and all outer ones to RM, so Conv1d has LM (W_f·C_in) x K and RM K x C_out, Conv3d has RM K x (D_f·H_f·C_out),
    and Linear, with no kernel, LM H_in x K and RM K x H_out. With groups, C_in is the number that each filter sees.
    """
    outputs, inputs, *kernel = weight
    inner = kernel[-1] if kernel else 1
    outer = 1
    for size in kernel[:-1]:
        outer *= size
    return (inner * inputs, rank), (rank, outer * outputs)


def rectification(lm: Tensor, rm: Tensor, weight: torch.Size, layout: str = "axes") -> Tensor:
    """R = LM·RM in the shape of the weight (equations 3 and 5). For a Linear both layouts are the same.

    "axes": R[o, i, h, w] = sum_k LM[w·C_in + i, k] RM[k, h·C_out + o].
    "reshape": the product is read row by row as (W, H, C_in, C_out), then turned to PyTorch's (C_out, C_in, H, W).
    """
    outputs, inputs, *kernel = weight
    if layout == "reshape":
        r = (lm @ rm).reshape(*reversed(kernel), inputs, outputs)
        return r.permute(*reversed(range(r.dim())))
    outer, inner = kernel[:-1], kernel[-1:]
    r = (lm @ rm).view(*inner, inputs, *outer, outputs)  # (w, i, h, o)
    i, o = len(inner), r.dim() - 1
    return r.permute(o, i, *range(i + 1, o), *range(i))  # (o, i, h, w)


def rectified_weight(weight: Tensor, lm: Tensor | None, rm: Tensor | None, layout: str = "axes") -> Tensor:
    """W_t = W + R (equation 1)."""
    return weight if lm is None or rm is None else weight + rectification(lm, rm, weight.shape, layout)


def scaled(output: Tensor, f: Tensor | None, channel_dim: int) -> Tensor:
    """O_t = O · F along the channels (equation 2)."""
    if f is None:
        return output
    shape = [1] * output.dim()
    shape[channel_dim] = -1
    return output * f.view(shape)


def formula(
    weight: Tensor,
    bias: Tensor | None,
    lm: Tensor | None,
    rm: Tensor | None,
    f: Tensor | None,
    apply: Callable[[Tensor, Tensor | None], Tensor],
    layout: str = "axes",
    channel_dim: int = 1,
) -> Tensor:
    """A whole layer as the equations have it: rectify the weight, apply the layer, scale its output."""
    return scaled(apply(rectified_weight(weight, lm, rm, layout), bias), f, channel_dim)


# RM starts at 0 and F at 1, so a new task starts as the base network, whatever LM is. The first steps move R by about
# learning rate x fan x std², where `fan` is the number of LM's rows.


def lm_std(fan: int) -> float:
    """Standard deviation of a new LM for fully connected layers.

    With columns of length 1, R moves as fast as full training would move the weight.
    """
    return 1 / max(fan, 1) ** 0.5


def conv_lm_std(fan: int) -> float:
    """Standard deviation of a new LM for convolutions.

    A normalisation layer after a convolution tolerates large factors, and needs them to learn at the paper's rate of
    0.01. For wide kernels the step is bounded.
    """
    return min(0.5, 5 / max(fan, 1) ** 0.5)

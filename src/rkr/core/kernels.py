"""Fast paths for the rectified layer, each equal to the formula in `rectification.py`.

A rectified layer computes `y = ((W + R) * x + b) · F` with `R = LM·RM`. There are three ways:

* `merge`: build `(W + R)·F` once, then run the plain layer. Used for inference, where the result is cached.
* `MergedWeight`: the same values, differentiable through the full weight gradient. Used while the base is
  trained, and wherever the factored gradients do not apply.
* `FactoredConv2d`, `FactoredLinear`: for a frozen base. The full weight gradient, about 43 % of a
  ResNet-18 step on a CPU, is never formed; the gradients of LM and RM come from products with K columns.

All use the "axes" layout, in which R is separable: a (1 x W) convolution to K channels, then an (H x 1) one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rkr.core.rectification import rectified_weight

Pair = tuple[int, int]


def merge(w: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, layout: str = "axes") -> Tensor:
    """The effective weight `(W + R)·F` (equations 1 and 2 folded), in the memory format of `w`.

    `w` is (O, I, *kernel); `lm` is (W·I, K) and `rm` (K, H·O), or both None; `f` is (O) or None. Two passes over
    the weight: one multiplies by F, one adds the product (O·H, K) @ (K, W·I).
    """
    if layout == "reshape" and lm is not None and rm is not None:
        r = rectified_weight(w, lm, rm, layout)
        return torch.mul(r, 1 if f is None else _per_output(f, w.dim()), out=torch.empty_like(w))
    out = w.clone() if f is None else w * _per_output(f, w.dim())
    if lm is None or rm is None:
        return out
    if out.dim() > 2 and out.is_contiguous():
        out.view(len(w), -1).addmm_(_by_place(rm, f, len(w)).t(), _repeated(lm, w.shape))
        return out
    rows = _output_rows(rm, f, w.shape[0])  # (O·H, K)
    flat = out if w.dim() == 2 else out.movedim(1, -1)  # (O, *kernel, I): contiguous if w is channels_last
    if flat.is_contiguous():
        _add_product(flat.view(rows.shape[0], lm.shape[0]), rows, lm.t())
    elif flat.dim() == 2 and flat.t().is_contiguous():  # stored as (I, O)
        _add_product(flat.t(), lm, rows.t())
    else:
        flat.add_((rows @ lm.t()).view(flat.shape))
    return out


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (M, N) += a (M, K) @ b (K, N).

    For few columns and a large `out`, 8 rows at a time: the tiles of one product span many rows, whose stride tends to
    be a multiple of a high power of 2, and miss the cache. Measured with K = 2 on 1560 x 2048: 0.9 ms, not 2.0.
    """
    (m, n), k = out.shape, b.shape[0]
    if 2 <= k <= 4 and m % 8 == 0 and out.numel() >= 1 << 20 and out.device.type == "cpu":
        out.view(-1, 8, n).baddbmm_(a.reshape(-1, 8, k), b.expand(m // 8, k, n))
    else:
        out.addmm_(a, b)


def _repeated(lm: Tensor, weight: torch.Size) -> Tensor:
    """LM (W·I, K) as (K·H, I·H·W): for each place along H the factor at this place, and 0 at the others.

    RM as (O, K·H) times this is R in the order of a contiguous weight. That is H times the multiplications, but it
    spares moving R: 1.2 ms instead of 12 for 512 x 512 x 3 x 3.
    """
    inputs, width, k, height = weight[1], weight[-1], lm.shape[1], prod(weight[2:-1])
    found = lm.new_zeros(k, height, inputs, height, width)
    found.diagonal(dim1=1, dim2=3).copy_(lm.view(width, inputs, k, 1).permute(2, 1, 0, 3))  # (K, I, W, H)
    return found.view(k * height, -1)


def _by_place(rm: Tensor, f: Tensor | None, outputs: int) -> Tensor:
    """RM as (K·H, O), each column times its output's F."""
    rows = rm.reshape(-1, outputs)
    return rows if f is None else rows * f


def _per_output(f: Tensor, dim: int) -> Tensor:
    """F as (O, 1, ...), to multiply a weight with."""
    return f.view(-1, *[1] * (dim - 1))


def _output_rows(rm: Tensor, f: Tensor | None, outputs: int) -> Tensor:
    """RM (K, H·O) as (O·H, K), each row times its output's F."""
    if rm.shape[1] == outputs:
        return (rm if f is None else rm * f).t()
    rows = rm.view(rm.shape[0], -1, outputs).permute(2, 1, 0)  # (O, H, K)
    if f is not None:
        rows = rows * f.view(-1, 1, 1)
    return rows.reshape(-1, rm.shape[0])


def thin(a: Tensor, b: Tensor) -> Tensor:
    """a (N, C) @ b (C, K) for a small K. The transposed product is 3 to 6 times faster on CPUs."""
    return (b.t() @ a.t()).t()


class MergedWeight(torch.autograd.Function):
    """`merge` with gradients of W, LM, RM and F from the full weight gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None) -> Tensor:
        ctx.save_for_backward(w, lm, rm, f)
        return merge(w, lm, rm, f)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        w, lm, rm, f = ctx.saved_tensors
        dw = dlm = drm = df = None
        if ctx.needs_input_grad[0]:
            dw = g if f is None else g * _per_output(f, g.dim())
        if f is not None and ctx.needs_input_grad[3]:
            df = (g * w).flatten(1).sum(1)
        if lm is not None:
            k, outputs, height = lm.shape[1], len(w), rm.shape[1] // len(w)
            ordered = g.dim() > 2 and g.is_contiguous()
            flat = g.view(outputs, -1) if ordered else g.movedim(1, -1).reshape(-1, lm.shape[0])  # else (O·H, W·I)
            if ctx.needs_input_grad[1]:
                if ordered:
                    found = (_by_place(rm, f, outputs) @ flat).view(k, height, g.shape[1], height, -1)
                    dlm = found.diagonal(dim1=1, dim2=3).sum(-1).permute(2, 1, 0).reshape(lm.shape)
                else:
                    dlm = (_output_rows(rm, f, outputs).t() @ flat).t()
            if ctx.needs_input_grad[2] or df is not None:
                if ordered:
                    drows = (flat @ _repeated(lm, w.shape).t()).view(outputs, k, -1).transpose(1, 2)
                else:
                    drows = thin(flat, lm).reshape(outputs, -1, k)  # (O, H, K), as if F were 1
                if df is not None:
                    df += (drows * _output_rows(rm, None, outputs).view_as(drows)).sum((1, 2))
                if f is not None:
                    drows = drows * f.view(-1, 1, 1)
                drm = drows.permute(2, 1, 0).reshape(rm.shape)
        return dw, dlm, drm, df


# ---------------------------------------------------------------------------------------------------------
# Linear


class FactoredLinear(torch.autograd.Function):
    """`(x W' + b + (x LM) RM) · F`. x is (N, I), W (O, I).

    With few rows `W + R` is never built. With many (tokens of a transformer) merging once is cheaper than passing over
    the outputs again: `fold`. In both cases the gradient of W is only formed if W requires it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        lm: Tensor | None,
        rm: Tensor | None,
        f: Tensor | None,
        fold: bool,
    ) -> Tensor:
        u = None if lm is None else thin(x, lm)  # (N, K)
        merged = None
        if fold:
            merged = merge(w, lm, rm, f)
            y = F.linear(x, merged, b if f is None or b is None else b * f)
        else:
            y = F.linear(x, w, b)
            if u is not None and rm is not None:
                y.addmm_(u, rm)
            if f is not None:
                y.mul_(f)
        ctx.save_for_backward(x, w, b, lm, rm, f, u, merged)
        ctx.output = _Output(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, lm, rm, f, u, merged = ctx.saved_tensors
        need = ctx.needs_input_grad
        dx = dw = db = dlm = drm = df = None
        if f is not None and need[5]:
            df = ctx.output.scale_gradient(dy, f, lambda: _linear_unscaled(x, w, b, u, rm))
        # The gradient before F, (N, O); with merged weights F is already inside them and RM.
        g = dy if f is None or (merged is not None and not need[1] and not need[2]) else dy * f
        unscaled = g is dy and f is not None
        t = None
        if lm is not None:
            t = thin(g, ((rm * f) if unscaled else rm).t())  # (N, K)
            if need[3]:
                dlm = (t.t() @ x).t()
            if need[4]:
                drm = u.t() @ g
                if unscaled:
                    drm *= f
        if need[0]:
            if merged is not None:
                dx = dy @ merged
            else:
                dx = g @ w
                if t is not None:
                    dx.addmm_(t, lm.t())
        if need[1]:
            dw = g.t() @ x
        if b is not None and need[2]:
            db = g.sum(0)
        return dx, dw, db, dlm, drm, df, None


def _linear_unscaled(rows: Tensor, w: Tensor, b: Tensor | None, u: Tensor | None, rm: Tensor | None) -> Tensor:
    y = F.linear(rows, w, b)
    return y if u is None or rm is None else y.addmm_(u, rm)


def _graph_is_kept() -> bool:
    """Whether the backward pass may run again (`retain_graph`). True if torch does not say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())


class _Output:
    """A layer's scaled output, remembered for the gradient of F.

    The following layer keeps it anyway, so this costs no memory. It is not among autograd's saved tensors, because
    users may write to it (`ReLU(inplace=True)`): then, and where F is 0, the unscaled output is computed again.
    """

    def __init__(self, y: Tensor) -> None:
        self.y: Tensor | None = y.detach()
        self.version = self.y._version

    def scale_gradient(self, dy: Tensor, f: Tensor, unscaled: Callable[[], Tensor]) -> Tensor:
        """dF: for each channel the sum of dY times the output before scaling, which is Y / F."""
        y = self.y
        if not _graph_is_kept():
            self.y = None  # release it, as autograd releases saved tensors
        tiny = f.abs() < torch.finfo(f.dtype).tiny ** 0.5
        if y is None or y._version != self.version or bool(tiny.any()):
            return channel_dot(dy, unscaled())
        return channel_dot(dy, y) / f


def channel_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a·b for each channel (dim 1). One pass and no temporary.

    The batch-norm backward kernel computes sum((b - mean)·invstd·a); with mean 0 and invstd 1 it is this product.
    """
    channels = a.shape[1]
    # Where strides differ, torch's kernel misreads some batches of one sample.
    if a.dim() == 2 or a.numel() == 0 or a.stride() != b.stride() or a.dtype not in (torch.float32, torch.float64):
        return (a * b).sum([d for d in range(a.dim()) if d != 1])
    zeros, ones = a.new_zeros(channels), a.new_ones(channels)
    _, dot, _ = torch.ops.aten.native_batch_norm_backward(
        a, b, None, None, None, zeros, ones, True, 0.0, [False, True, False]
    )
    return dot


# ---------------------------------------------------------------------------------------------------------
# Convolution


class Geometry(NamedTuple):
    """How a convolution's kernel moves over its input."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def taps(self, axis: int, size: int, outputs: int) -> list[tuple[slice, slice]]:
        """For each place of the kernel along an axis: the inputs it meets, and the outputs that they go to."""
        _, stride, padding, dilation = (pair[axis] for pair in self)
        return [_overlap(size, outputs, j * dilation - padding, stride) for j in range(self.kernel[axis])]


class FactoredConv2d(torch.autograd.Function):
    """Convolution over a frozen base, without the gradient of its weight.

    With many pixels the weight is merged once: `fold`. With few, the last layers of most networks, the base is used as
    it is, and the separable part is added to the output and, backward, to the gradient of the input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        lm: Tensor | None,
        rm: Tensor | None,
        f: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        fold: bool,
    ) -> Tensor:
        ctx.geometry = Geometry((w.shape[2], w.shape[3]), stride, padding, dilation)
        weight, u = w, None
        if fold:
            weight = merge(w, lm, rm, f)
            y = F.conv2d(x, weight, b if b is None or f is None else b * f, stride, padding, dilation)
        else:
            y = F.conv2d(x, w, b, stride, padding, dilation)
            if lm is not None and rm is not None:
                u = input_planes(x, lm, ctx.geometry, y.shape[2:])
                y.add_(_from_planes(_by_height(rm, None, w.shape[2]).t(), u, _taps_dim(x)))
            if f is not None:
                y.mul_(f.view(-1, 1, 1))
        ctx.save_for_backward(x, w, b, lm, rm, f, weight, u)
        ctx.output = _Output(y)
        ctx.fold = fold
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, lm, rm, f, weight, u = ctx.saved_tensors
        geometry = ctx.geometry
        need = ctx.needs_input_grad
        dx = dlm = drm = df = None
        if f is not None and need[5]:
            df = ctx.output.scale_gradient(dy, f, lambda: F.conv2d(x, merge(w, lm, rm, None), b, *geometry[1:]))
        # g goes with `weight` and with RM times `left`: F is inside the merged weight, or else inside g.
        g, left = (dy, f) if ctx.fold or f is None else (dy * f.view(-1, 1, 1), None)
        if need[0]:
            dx = torch.ops.aten.convolution_backward(
                g, x, weight, None, *geometry[1:], False, (0, 0), 1, (True, False, False)
            )[0]
        if lm is None:
            return dx, None, None, None, None, df, None, None, None, None
        kh, kw = geometry.kernel
        k = rm.shape[0]
        if need[4]:  # dRM[k, h, o] = sum u[k, p·sh + h·dh - ph, q] · g[o, p, q]
            if u is None:
                u = input_planes(x, lm, geometry, dy.shape[2:])
            drm = _pixels_to(u, g, _taps_dim(x)).view(kh, k, -1)
            drm = (drm if left is None else drm * left).transpose(0, 1).reshape(rm.shape)
        if need[3] or (dx is not None and not ctx.fold):
            s = output_planes(g, rm, left, geometry, x.shape[2:])
            # dLM[w, i, k] = sum s[k, y, q] · x[i, y, q·sw + w·dw - pw]
            dlm = _pixels_to(s, x, _taps_dim(g)).view(kw, k, -1).transpose(1, 2).reshape(lm.shape)
            if dx is not None and not ctx.fold:
                dx.add_(_from_planes(_by_width(lm, kw).t(), s, _taps_dim(g)))
        return dx, None, None, dlm, drm, df, None, None, None, None


# The gradients of LM and RM come from four products with K columns. With `u = conv(x, LM)` along the width and
# `s = transposed conv(g, RM)` along the height, both with K channels: dRM is u against g, dLM is s against x.
# x is (B, I, Y, X), g, the gradient of the output, is (B, O, P, Q).


def input_planes(x: Tensor, lm: Tensor, geometry: Geometry, outputs: torch.Size) -> Tensor:
    """u as each row of the kernel meets it: planes for H taps, each (P, Q)."""
    kh, kw = geometry.kernel
    height, out_h, out_w = x.shape[2], *outputs
    # u[k, y, q] = sum_w LM[w, :, k] · x[:, y, q·sw + w·dw - pw]
    dim, parts = _taps_dim(x), _to_planes(_by_width(lm, kw), x, kw)
    u = _new_planes(parts, dim, None, height, out_w)
    for j, (src, dst) in enumerate(geometry.taps(1, x.shape[3], out_w)):
        u[..., dst] += parts.select(dim, j)[..., src]
    planes = _new_planes(parts, dim, kh, out_h, out_w)
    for j, (src, dst) in enumerate(geometry.taps(0, height, out_h)):
        planes.select(dim, j)[..., dst, :] = u[..., src, :]
    return planes


def output_planes(g: Tensor, rm: Tensor, f: Tensor | None, geometry: Geometry, inputs: torch.Size) -> Tensor:
    """s as each column of the kernel meets it: planes for W taps, each (Y, X)."""
    kh, kw = geometry.kernel
    height, width, out_w = *inputs, g.shape[3]
    # s[k, y, q] = sum_h RM[k, h, :] · F · g[:, p, q]  with  y = p·sh + h·dh - ph
    dim, parts = _taps_dim(g), _to_planes(_by_height(rm, f, kh), g, kh)
    s = _new_planes(parts, dim, None, height, out_w)
    for j, (src, dst) in enumerate(geometry.taps(0, height, g.shape[2])):
        s[..., src, :] += parts.select(dim, j)[..., dst, :]
    planes = _new_planes(parts, dim, kw, height, width)
    for j, (src, dst) in enumerate(geometry.taps(1, width, out_w)):
        planes.select(dim, j)[..., src] = s[..., dst]
    return planes


def _by_width(lm: Tensor, kw: int) -> Tensor:
    """LM (W·I, K) as (W·K, I)."""
    return lm.view(kw, -1, lm.shape[1]).transpose(1, 2).reshape(kw * lm.shape[1], -1)


def _by_height(rm: Tensor, f: Tensor | None, kh: int) -> Tensor:
    """RM (K, H·O) as (H·K, O), each column times its output's F."""
    rows = rm.view(rm.shape[0], kh, -1).transpose(0, 1)  # (H, K, O)
    return (rows if f is None else rows * f).reshape(kh * rm.shape[0], -1)


def _overlap(size: int, outputs: int, offset: int, stride: int) -> tuple[slice, slice]:
    """Input positions `q·stride + offset` inside `size`, and the outputs q that read them."""
    first = max(0, -(offset // stride))  # smallest q with q·stride + offset >= 0
    last = min(outputs - 1, (size - 1 - offset) // stride)
    if last < first:
        return slice(0, 0, 1), slice(0, 0)
    start = first * stride + offset
    return slice(start, (last - first) * stride + start + 1, stride), slice(first, last + 1)


# The factors' few channels are kept as planes: (taps, K, B, H, W) beside channels_last tensors, where a product over
# all pixels is one GEMM, and (B, taps, K, H, W) beside contiguous ones, where it is one GEMM per sample.


def _taps_dim(x: Tensor) -> int:
    """Which dimension of the planes made from x has the taps."""
    return 0 if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous() else 1


def _to_planes(m: Tensor, x: Tensor, taps: int) -> Tensor:
    """(taps·K, C) times (B, C, H, W) over the channels, as planes."""
    batch, channels, height, width = x.shape
    if _taps_dim(x) == 0:
        pixels = x.permute(0, 2, 3, 1).reshape(-1, channels)
        return (m @ pixels.t()).view(taps, -1, batch, height, width)
    return torch.matmul(m, x.flatten(2)).view(batch, taps, -1, height, width)


def _new_planes(like: Tensor, dim: int, taps: int | None, height: int, width: int) -> Tensor:
    """Zero planes with another number of taps, None for no such dimension, and another size."""
    shape = list(like.shape[:3])
    shape[dim : dim + 1] = [] if taps is None else [taps]
    return like.new_zeros(*shape, height, width)


def _from_planes(m: Tensor, planes: Tensor, dim: int) -> Tensor:
    """(C, taps·K) times planes: (B, C, H, W)."""
    height, width = planes.shape[3:]
    if dim == 0:
        pixels = planes.flatten(2).flatten(0, 1)
        return (pixels.t() @ m.t()).view(-1, height, width, len(m)).permute(0, 3, 1, 2)
    return torch.matmul(m, planes.flatten(3).flatten(1, 2)).unflatten(2, (height, width))


def _pixels_to(planes: Tensor, x: Tensor, dim: int) -> Tensor:
    """Planes times (B, C, H, W), summed over batch and pixels: (taps·K, C)."""
    if dim == 0:
        return planes.flatten(2).flatten(0, 1) @ x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    return torch.bmm(planes.flatten(3).flatten(1, 2), x.flatten(2).transpose(1, 2)).sum(0)


# Typed functions: `Function.apply` has no types.


def merged_weight(w: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None) -> Tensor:
    """`merge`, differentiable."""
    return MergedWeight.apply(w, lm, rm, f)  # type: ignore[no-untyped-call]


def factored_linear(
    x: Tensor, w: Tensor, b: Tensor | None, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, fold: bool
) -> Tensor:
    """A rectified Linear on (..., I), see `FactoredLinear`."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor = FactoredLinear.apply(rows, w, b, lm, rm, f, fold)  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def factored_conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    lm: Tensor | None,
    rm: Tensor | None,
    f: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    fold: bool,
) -> Tensor:
    """A rectified Conv2d over a frozen base, see `FactoredConv2d`."""
    return FactoredConv2d.apply(x, w, b, lm, rm, f, stride, padding, dilation, fold)  # type: ignore[no-untyped-call]

"""Fast paths for the rectified layer, each equal to the formula in `layers.py`.

A rectified layer computes `y = ((W + R) * x + b) · F` with `R = LM·RM`. Three ways to get there:

* `merge`: build `(W + R)·F` once, then run the plain layer. Used for inference, where the result is cached.
* `MergedWeight`: the same values, differentiable through the full weight gradient. Used while the base is
  trained, and wherever the factored gradients do not apply.
* `FactoredConv2d`, `FactoredLinear`: for a frozen base. The full weight gradient, about 43 % of a
  ResNet-18 step on a CPU, is never formed; the gradients of LM and RM come from products with K columns.

All use the "axes" layout, in which R is separable: a (1 x W) convolution to K channels, then an (H x 1) one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# A convolution with fewer input channels forms the full weight gradient: the products with K columns would
# cost about as much as the gradient that they replace.
MIN_CHANNELS = 24

Pair = tuple[int, int]


def merge(w: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, layout: str = "axes") -> Tensor:
    """The effective weight `(W + R)·F` (equations 1 and 2 folded), in the memory format of `w`.

    `w` is (O, I, *kernel); `lm` is (W·I, K) and `rm` (K, H·O), or both None; `f` is (O) or None. Two passes over
    the weight: one multiplies by F, one adds the product (O·H, K) @ (K, W·I).
    """
    out = torch.empty_like(w)
    if f is None:
        out.copy_(w)
    else:
        torch.mul(w, _per_output(f, w.dim()), out=out)
    if lm is None or rm is None:
        return out
    if layout == "reshape":
        r = reshape_layout(lm, rm, w.shape)
        return out.add_(r if f is None else r * _per_output(f, w.dim()))
    rows = _output_rows(rm, f, w.shape[0])  # (O·H, K)
    flat = out.movedim(1, -1)  # (O, *kernel, I): contiguous if w is channels_last, or has no kernel
    if flat.is_contiguous():
        flat.view(rows.shape[0], lm.shape[0]).addmm_(rows, lm.t())
    else:
        flat.add_((rows @ lm.t()).view(flat.shape))
    return out


def reshape_layout(lm: Tensor, rm: Tensor, shape: torch.Size) -> Tensor:
    """`LM·RM` reshaped row by row to (W, H, C_in, C_out), then turned to PyTorch's (C_out, C_in, H, W)."""
    o, i, *kernel = shape
    r = (lm @ rm).reshape(*reversed(kernel), i, o)
    return r.permute(*reversed(range(r.dim())))


def _per_output(f: Tensor, dim: int) -> Tensor:
    """F as (O, 1, ...), to multiply a weight with."""
    return f.view(-1, *[1] * (dim - 1))


def _output_rows(rm: Tensor, f: Tensor | None, outputs: int) -> Tensor:
    """RM (K, H·O) as (O·H, K), each row times its output's F."""
    rows = rm.view(rm.shape[0], -1, outputs).permute(2, 1, 0)  # (O, H, K)
    if f is not None:
        rows = rows * f.view(-1, 1, 1)
    return rows.reshape(-1, rm.shape[0])


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
            flat = g.movedim(1, -1).reshape(-1, lm.shape[0])  # (O·H, W·I)
            if ctx.needs_input_grad[1]:
                dlm = flat.t() @ _output_rows(rm, f, w.shape[0])
            if ctx.needs_input_grad[2] or df is not None:
                drows = (flat @ lm).view(w.shape[0], -1, lm.shape[1])  # (O, H, K), as if F were 1
                if df is not None:
                    df += (drows * _output_rows(rm, None, w.shape[0]).view_as(drows)).sum((1, 2))
                if f is not None:
                    drows = drows * f.view(-1, 1, 1)
                drm = drows.permute(2, 1, 0).reshape(rm.shape)
        return dw, dlm, drm, df


# ---------------------------------------------------------------------------------------------------------
# Linear


class FactoredLinear(torch.autograd.Function):
    """`(x W' + b + (x LM) RM) · F` without building `W + R`.

    x is (..., I), W (O, I). With many rows (tokens of a transformer) it is cheaper to merge once than to pass over
    the outputs again, so `fold` chooses; either way no gradient of W is formed unless W asks for one.
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
        rows = x.reshape(-1, x.shape[-1])  # (N, I)
        u = None if lm is None else rows @ lm  # (N, K)
        merged = None
        if fold:
            merged = merge(w, lm, rm, f)
            y = F.linear(rows, merged, b if f is None or b is None else b * f)
        else:
            y = F.linear(rows, w, b)
            if u is not None and rm is not None:
                y.addmm_(u, rm)
            if f is not None:
                y.mul_(f)
        ctx.save_for_backward(rows, w, b, lm, rm, f, u, merged, y if f is not None else None)
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, w, b, lm, rm, f, u, merged, y = ctx.saved_tensors
        need = ctx.needs_input_grad
        dy = dy.reshape(-1, dy.shape[-1])  # (N, O)
        dx = dw = db = dlm = drm = df = None
        if f is not None and need[5]:
            df = _scale_gradient(dy, y, f, lambda: _linear_unscaled(rows, w, b, u, rm))
        # The gradient before F, (N, O); with merged weights F is already inside them and RM.
        g = dy if f is None or (merged is not None and not need[1] and not need[2]) else dy * f
        unscaled = g is dy and f is not None
        t = None
        if lm is not None:
            t = g @ ((rm * f) if unscaled else rm).t()  # (N, K)
            if need[3]:
                dlm = rows.t() @ t
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
            dx = dx.view(ctx.shape)
        if need[1]:
            dw = g.t() @ rows
        if b is not None and need[2]:
            db = g.sum(0)
        return dx, dw, db, dlm, drm, df, None


def _linear_unscaled(
    rows: Tensor, w: Tensor, b: Tensor | None, u: Tensor | None, rm: Tensor | None
) -> Tensor:
    y = F.linear(rows, w, b)
    return y if u is None or rm is None else y.addmm_(u, rm)


def _scale_gradient(dy: Tensor, y: Tensor, f: Tensor, unscaled: Any) -> Tensor:
    """dF = sum over samples of dY times the output before scaling, which is Y / F.

    Y is kept by the following layer anyway, so this costs no memory. Where F is 0 nothing can be divided:
    only then the output is computed again, by `unscaled()`.
    """
    tiny = f.abs() < torch.finfo(f.dtype).tiny ** 0.5
    if bool(tiny.any()):
        return channel_dot(dy, unscaled())
    return channel_dot(dy, y) / f


def channel_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a·b for each channel (dim 1). One pass and no temporary.

    The batch-norm backward kernel computes sum((b - mean)·invstd·a); with mean 0 and invstd 1 it is this product.
    """
    channels = a.shape[1]
    if a.dim() == 2 or a.dtype not in (torch.float32, torch.float64):
        return (a * b).sum([d for d in range(a.dim()) if d != 1])
    zeros, ones = a.new_zeros(channels), a.new_ones(channels)
    _, dot, _ = torch.ops.aten.native_batch_norm_backward(
        a, b, None, None, None, zeros, ones, True, 0.0, [False, True, False]
    )
    return dot  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------
# Convolution


class FactoredConv2d(torch.autograd.Function):
    """Convolution over a frozen base: forward with the merged weight, backward without its gradient."""

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
    ) -> Tensor:
        merged = merge(w, lm, rm, f)
        bias = b if b is None or f is None else b * f
        y = F.conv2d(x, merged, bias, stride, padding, dilation)
        ctx.save_for_backward(x, w, b, lm, rm, f, merged, y if f is not None else None)
        ctx.geometry = (stride, padding, dilation)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, b, lm, rm, f, merged, y = ctx.saved_tensors
        stride, padding, dilation = ctx.geometry
        need = ctx.needs_input_grad
        dx = dlm = drm = df = None
        if need[0]:
            dx = torch.ops.aten.convolution_backward(
                dy, x, merged, None, stride, padding, dilation, False, (0, 0), 1, (True, False, False)
            )[0]
        if f is not None and need[5]:
            df = _scale_gradient(
                dy, y, f, lambda: F.conv2d(x, merge(w, lm, rm, None), b, stride, padding, dilation)
            )
        if lm is not None and (need[3] or need[4]):
            dlm, drm = factor_gradients(x, dy, lm, rm, f, w.shape[2:], stride, padding, dilation)
        return dx, None, None, dlm, drm, df, None, None, None


def factor_gradients(
    x: Tensor,
    dy: Tensor,
    lm: Tensor,
    rm: Tensor,
    f: Tensor | None,
    kernel: torch.Size,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> tuple[Tensor, Tensor]:
    """Gradients of LM and RM of a convolution from four products with K columns.

    With `u = conv(x, LM)` along the width and `s = transposed conv(dY·F, RM)` along the height, both with K channels:
    dRM is u against dY, dLM is s against x. x is (B, I, Y, X), dy is (B, O, P, Q).
    """
    kh, kw = kernel
    (sh, sw), (ph, pw), (dh, dw) = stride, padding, dilation
    batch, cin, height, width = x.shape
    cout, out_h, out_w = dy.shape[1:]
    k = rm.shape[0]
    across = [_overlap(width, out_w, j * dw - pw, sw) for j in range(kw)]
    down = [_overlap(height, out_h, j * dh - ph, sh) for j in range(kh)]

    # u[b, y, q, k] = sum_w x[b, :, y, q·sw + w·dw - pw] · LM[w, :, k]
    by_width = lm.view(kw, cin, k).permute(1, 0, 2).reshape(cin, kw * k)
    px = _channels_to(x, by_width).view(batch, height, width, kw, k)
    if kw == 1 and across[0] == (slice(0, width, 1), slice(0, out_w)):
        u = px[:, :, :, 0]
    else:
        u = px.new_zeros(batch, height, out_w, k)
        for j, (src, dst) in enumerate(across):
            u[:, :, dst] += px[:, :, src, j]
    # dRM[k, h, o] = sum u[b, p·sh + h·dh - ph, q, k] · dY[b, o, p, q] · F[o]
    us = u.new_zeros(batch, out_h, out_w, kh, k)
    for j, (src, dst) in enumerate(down):
        us[:, dst, :, j] = u[:, src]
    drm = _pixels_to(us.view(batch, out_h, out_w, kh * k), dy).view(kh, k, cout)
    if f is not None:
        drm = drm * f
    drm = drm.permute(1, 0, 2).reshape(k, kh * cout)

    # s[b, y, q, k] = sum_h dY[b, :, p, q] · F · RM[k, h, :]  with  y = p·sh + h·dh - ph
    by_height = rm.view(k, kh, cout).permute(2, 1, 0)  # (O, H, K)
    if f is not None:
        by_height = by_height * f.view(-1, 1, 1)
    py = _channels_to(dy, by_height.reshape(cout, kh * k)).view(batch, out_h, out_w, kh, k)
    s = py.new_zeros(batch, height, out_w, k)
    for j, (src, dst) in enumerate(down):
        s[:, src] += py[:, dst, :, j]
    # dLM[w, i, k] = sum s[b, y, q, k] · x[b, i, y, q·sw + w·dw - pw]
    ss = s.new_zeros(batch, height, width, kw, k)
    for j, (src, dst) in enumerate(across):
        ss[:, :, src, j] = s[:, :, dst]
    dlm = _pixels_to(ss.view(batch, height, width, kw * k), x).view(kw, k, cin)
    return dlm.permute(0, 2, 1).reshape(kw * cin, k), drm


def _overlap(size: int, outputs: int, offset: int, stride: int) -> tuple[slice, slice]:
    """Input positions `q·stride + offset` that lie inside `size`, and the outputs q that read them."""
    first = max(0, -(offset // stride))  # smallest q with q·stride + offset >= 0
    last = min(outputs - 1, (size - 1 - offset) // stride)
    if last < first:
        return slice(0, 0, 1), slice(0, 0)
    start = first * stride + offset
    return slice(start, (last - first) * stride + start + 1, stride), slice(first, last + 1)


def _is_nhwc(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _channels_to(x: Tensor, m: Tensor) -> Tensor:
    """(B, C, H, W) times (C, M) over the channels: (B, H, W, M)."""
    if _is_nhwc(x):
        return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]) @ m
    return torch.matmul(m.t(), x.flatten(2)).transpose(1, 2).reshape(*x.shape[:1], *x.shape[2:], -1)


def _pixels_to(small: Tensor, x: Tensor) -> Tensor:
    """(B, H, W, M) times (B, C, H, W), summed over batch and pixels: (M, C)."""
    if _is_nhwc(x):
        return small.reshape(-1, small.shape[-1]).t() @ x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    rows = small.flatten(1, 2)  # (B, H·W, M)
    return torch.bmm(rows.transpose(1, 2), x.flatten(2).transpose(1, 2)).sum(0)


"""Rectified layers: the paper's equations, and how a user's own module comes to compute with them.

For layer l and task t (section "Rectification-based Knowledge Retention"):

    R = LM·RM                 equations 3 and 5: `rectification`
    W_t = W + R               equation 1
    O_t = (W_t * I + b) · F   equation 2: F has one value for each output channel or unit; `formula` is both

The user's module keeps its parameters, its keys and its place in the network; only its class is exchanged for
a subclass whose `weight` and `bias` are those of the task in use. Code that reads `layer.weight` directly (attention
layers do) therefore sees the rectified weight, while `state_dict` still holds the base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import kernels
from rkr.core.options import Options
from rkr.core.tasks import Active, Task, version_key
from rkr.errors import UsageError

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
OTHER_NORMS = tuple(
    getattr(nn, name) for name in ("LayerNorm", "GroupNorm", "RMSNorm") if hasattr(nn, name)
)

# ---------------------------------------------------------------------------------------------------------
# The formula


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
    """R = LM·RM in the shape of the weight (equations 3 and 5).

    "axes" keeps the axes that name the factors' sizes together: R[o, i, h, w] = sum_k LM[w·C_in + i, k] RM[k, h·C_out + o].
    """
    if layout == "reshape":
        return kernels.reshape_layout(lm, rm, weight)
    outputs, inputs, *kernel = weight
    outer, inner = kernel[:-1], kernel[-1:]
    r = (lm @ rm).view(*inner, inputs, *outer, outputs)  # (w, i, h, o)
    n = r.dim()
    i, o = len(inner), n - 1
    return r.permute(o, i, *range(i + 1, o), *range(i))  # (o, i, h, w)


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
    """Equations 1 and 2 to the letter: rectify the weight, apply the layer, scale its output."""
    if lm is not None and rm is not None:
        weight = weight + rectification(lm, rm, weight.shape, layout)
    output = apply(weight, bias)
    if f is None:
        return output
    shape = [1] * output.dim()
    shape[channel_dim] = -1
    return output * f.view(shape)


def lm_std(kind: str, fan: int) -> float:
    """Standard deviation of a new LM with `fan` rows; RM starts at 0 and F at 1, so a new task starts as the base.

    The first steps move R by about learning rate x fan x std². A normalisation layer after a convolution tolerates
    unit-normal factors, and needs them to learn at the paper's rate of 0.01; wide kernels are held at the same
    step. Fully connected layers have no such guard and take smaller factors.
    """
    return min(1.0, 10 / fan**0.5) if kind == "conv" else 2 / fan**0.5


# ---------------------------------------------------------------------------------------------------------
# Sites: where a network is rectified


@dataclass(eq=False)
class Site:
    """One place in the network that computes with the task's tensors."""

    path: str
    module: nn.Module
    active: Active
    kind: str  # "linear", "conv", "projection", "norm" or "head"
    options: Options
    rank: int | None = None  # None: the weight is not rectified
    scaled: bool = False
    affine: bool = False  # norm: each task has its own affine parameters
    stats: bool = False  # norm: each task has its own running statistics

    def __post_init__(self) -> None:
        self.lm, self.rm, self.f = (join(self.path, name) for name in ("lm", "rm", "f"))
        self.weight_name, self.bias_name = (
            ("in_proj_weight", "in_proj_bias") if self.kind == "projection" else ("weight", "bias")
        )

    @property
    def weight(self) -> Tensor:
        """The base weight."""
        return self.module._parameters[self.weight_name]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base bias."""
        return self.module._parameters.get(self.bias_name)

    def factors(self, task: Task) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """LM, RM and F of a task here."""
        p = task._parameters
        return p.get(self.lm), p.get(self.rm), p.get(self.f)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a task keeps here, the head's excepted."""
        if self.kind == "norm":
            names = (("weight", "bias") if self.affine else ()) + (NORM_STATS if self.stats else ())
            found = {name: self.base_tensor(name) for name in names}
            return {join(self.path, n): tuple(t.shape) for n, t in found.items() if t is not None}
        shapes: dict[str, tuple[int, ...]] = {}
        if self.rank is not None:
            shapes[self.lm], shapes[self.rm] = factor_shapes(self.weight.shape, self.rank)
        if self.scaled:
            shapes[self.f] = (self.weight.shape[0],)
        return shapes

    def base_tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer of the base at this place."""
        value = self.module._parameters.get(name)
        return value if value is not None else self.module._buffers.get(name)

    def draw(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """New tensors for a task that starts as the base network."""
        if self.kind == "norm":
            return {
                key: self.base_tensor(key.rpartition(".")[2]).detach().clone()  # type: ignore[union-attr]
                for key in self.shapes()
            }
        w = self.weight
        tensors = {key: torch.zeros(s, dtype=w.dtype, device=w.device) for key, s in self.shapes().items()}
        if self.rank is not None:
            lm = tensors[self.lm]
            std = self.options.init_gain * lm_std("conv" if self.kind == "conv" else "linear", lm.shape[0])
            tensors[self.lm] = torch.randn(lm.shape, generator=generator).mul_(std).to(lm)
        if self.scaled:
            tensors[self.f].fill_(1)
        return tensors


NORM_STATS = ("running_mean", "running_var", "num_batches_tracked")


def join(path: str, name: str) -> str:
    """Dotted name; the root module's path is empty."""
    return f"{path}.{name}" if path else name


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must see what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def effective(site: Site) -> tuple[Tensor, Tensor | None]:
    """Weight and bias with the task's rectification and scale folded in: `(W + R)·F` and `b·F`.

    Without gradients the result is cached; with them it has the same bits.
    """
    active = site.active
    if active.mixed is not None:
        raise NeedsGrouping(site.path)
    task = active.task
    if task is None:
        return site.weight, site.bias
    return effective_for(site, task)


def effective_for(site: Site, task: Task) -> tuple[Tensor, Tensor | None]:
    """`effective` for a task that need not be the one in use."""
    w, b = site.weight, site.bias
    lm, rm, f = site.factors(task)
    layout = site.options.layout
    if needs_grad(w, b, lm, rm, f):
        if layout == "axes" and site.options.fast:
            weight = kernels.MergedWeight.apply(w, lm, rm, f)
        else:
            weight = formula_weight(w, lm, rm, f, layout)
        return weight, b if b is None or f is None else b * f
    cache, key = site.active.cache, version_key(w, b, lm, rm, f)
    found = cache.get(task, site, key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            weight = (
                kernels.merge(w, lm, rm, f, layout)
                if site.options.fast
                else formula_weight(w, lm, rm, f, layout)
            )
            found = weight, b if b is None or f is None else b * f
        cache.put(task, site, key, *found)
    return found


def formula_weight(w: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, layout: str) -> Tensor:
    """`(W + R)·F` by plain operations."""
    return formula(w, None, lm, rm, f, lambda weight, _: weight, layout, channel_dim=0)


class NeedsGrouping(Exception):
    """Raised inside a mixed batch by a layer that can only compute one task at a time."""


# ---------------------------------------------------------------------------------------------------------
# The exchanged classes


class _Exchanged:
    """What all exchanged classes share: the site, and a way to copy and pickle instances."""

    _rkr: Site

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, _exchange_of[type(self)], self.__dict__


class _EffectiveWeight(_Exchanged):
    """A Linear or convolution whose forward is not torch's own reads the folded weight and bias."""

    @property
    def weight(self) -> Tensor:
        return effective(self._rkr)[0]

    @property
    def bias(self) -> Tensor | None:
        return effective(self._rkr)[1]


class _Linear(_EffectiveWeight):
    def forward(self, x: Tensor) -> Tensor:
        site = self._rkr
        check_input(site, x)
        if site.active.mixed is not None:
            return site.active.mixed.linear(site, x)
        if self.training and torch.is_grad_enabled():  # type: ignore[attr-defined]
            lm, rm, f = site.factors(site.active.require())
            if site.options.fast and not torch.is_autocast_enabled(x.device.type):
                many = x.numel() > 2 * site.weight.numel()
                return kernels.FactoredLinear.apply(x, site.weight, site.bias, lm, rm, f, many)  # type: ignore[no-any-return]
            return formula(
                site.weight, site.bias, lm, rm, f, lambda w, b: F.linear(x, w, b), channel_dim=-1
            )
        return F.linear(x, *effective(site))


class _Conv(_EffectiveWeight):
    def forward(self, x: Tensor) -> Tensor:
        site = self._rkr
        check_input(site, x)
        if site.active.mixed is not None:
            return site.active.mixed.conv(site, x, self._convolve)
        if self.training and torch.is_grad_enabled():  # type: ignore[attr-defined]
            w, b = site.weight, site.bias
            lm, rm, f = site.factors(site.active.require())
            if not site.options.fast:
                return formula(w, b, lm, rm, f, lambda w, b: self._convolve(x, w, b), site.options.layout)
            padding = _factored_padding(self, x)
            if padding is not None and not needs_grad(w, b):
                return kernels.FactoredConv2d.apply(  # type: ignore[no-any-return]
                    x, w, b, lm, rm, f, self.stride, padding, self.dilation  # type: ignore[attr-defined]
                )
        return self._convolve(x, *effective(site))

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv: Any = self
        if weight[0, 0].numel() == 1 and len(set(conv.stride)) > 1 and not any(conv.padding):
            # The weight gradient of a channels_last 1x1 convolution with unequal strides writes out of bounds in
            # torch 2.13 on CPUs. Reading every n-th pixel first is the same convolution with stride 1.
            x = x[(..., *(slice(None, None, s) for s in conv.stride))]
            apply = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
            return apply(x, weight, bias, groups=conv.groups)
        return conv._conv_forward(x, weight, bias)  # type: ignore[no-any-return]


def _factored_padding(conv: Any, x: Tensor) -> tuple[int, int] | None:
    """Padding in numbers if the factored gradients apply to this convolution and input, else None."""
    site: Site = conv._rkr
    if (
        x.dim() != 4
        or site.weight.dim() != 4
        or site.weight.shape[1] < kernels.MIN_CHANNELS
        or conv.groups != 1
        or conv.padding_mode != "zeros"
        or site.options.layout != "axes"
        or x.shape[0] == 0
        or torch.is_autocast_enabled(x.device.type)
    ):
        return None
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        spans = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(s % 2 for s in spans) else (spans[0] // 2, spans[1] // 2)
    return tuple(conv.padding)  # type: ignore[return-value]


class _Projection(_Exchanged):
    """`nn.MultiheadAttention`: its packed input projection is a Linear from E to 3·E without a module of its own."""

    @property
    def in_proj_weight(self) -> Tensor:
        return effective(self._rkr)[0]

    @property
    def in_proj_bias(self) -> Tensor | None:
        return effective(self._rkr)[1]


class _Norm(_Exchanged):
    """A normalisation layer that uses the task's affine parameters and statistics where the task has its own."""

    weight = property(lambda self: _norm_tensor(self, "weight"))
    bias = property(lambda self: _norm_tensor(self, "bias"))
    running_mean = property(lambda self: _norm_tensor(self, "running_mean"))
    running_var = property(lambda self: _norm_tensor(self, "running_var"))
    num_batches_tracked = property(lambda self: _norm_tensor(self, "num_batches_tracked"))


class _BatchNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        mixed = self._rkr.active.mixed
        if mixed is not None:
            return mixed.batch_norm(self._rkr, x)
        return super().forward(x)  # type: ignore[misc, no-any-return]


def _norm_tensor(module: Any, name: str) -> Tensor | None:
    site: Site = module._rkr
    if site.active.mixed is not None and (site.affine or site.stats):
        raise NeedsGrouping(site.path)
    task = site.active.task
    found = None if task is None else task.get(join(site.path, name))
    return found if found is not None else site.base_tensor(name)


class _Head(_Exchanged):
    """The classification layer: each task brings its own, with its own number of classes."""

    @property
    def weight(self) -> Tensor:
        return head_tensor(self._rkr, "head.weight")  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return head_tensor(self._rkr, "head.bias")

    def forward(self, x: Tensor) -> Tensor:
        site = self._rkr
        if site.active.mixed is not None:
            return site.active.mixed.head(site, x)
        return super().forward(x)  # type: ignore[misc, no-any-return]


def head_tensor(site: Site, key: str) -> Tensor | None:
    """The head's weight or bias for the task in use."""
    if site.active.mixed is not None:
        raise NeedsGrouping(site.path)
    task = site.active.task
    return site.base_tensor(key.rpartition(".")[2]) if task is None else task.get(key)


def check_input(site: Site, x: Tensor) -> None:
    """A clear word where torch would fail from deep inside."""
    w = site.weight
    if x.dtype is not w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise UsageError(
            f"layer {site.path!r} got {x.dtype}, but the network is {w.dtype}: convert the input with x.to({w.dtype})"
        )
    if x.device != w.device:
        raise UsageError(
            f"layer {site.path!r} got an input on {x.device}, but the network is on {w.device}: "
            f"move the input with x.to({str(w.device)!r}), or the model with model.to({str(x.device)!r})"
        )


@cache
def exchanged_class(mixin: type, original: type) -> type:
    """The subclass of `original` with `mixin` in front; one object for each pair."""
    new = type(f"Rectified{original.__name__}", (mixin, original), {"__module__": __name__})
    _exchange_of[new] = (mixin, original)
    return new


_exchange_of: dict[type, tuple[type, type]] = {}


def _rebuild(mixin: type, original: type) -> Any:
    cls = exchanged_class(mixin, original)
    return cls.__new__(cls)


def exchange(site: Site) -> None:
    """Turn the site's module into its rectified subclass, in place."""
    module, cls = site.module, type(site.module)
    mixin: type
    if site.kind == "head":
        mixin = _Head
    elif site.kind == "norm":
        mixin = _BatchNorm if isinstance(module, BATCH_NORMS) else _Norm
    elif site.kind == "projection":
        mixin = _Projection
    elif site.kind == "linear":
        mixin = _Linear if cls.forward is nn.Linear.forward else _EffectiveWeight
    else:
        plain = any(cls.forward is conv.forward for conv in CONVS)
        mixin = _Conv if plain else _EffectiveWeight
    module._rkr = site  # type: ignore[assignment]
    module.__class__ = exchanged_class(mixin, cls)


def restore(module: nn.Module) -> None:
    """Undo `exchange`."""
    module.__class__ = _exchange_of[type(module)][1]
    del module._rkr


def is_exchanged(module: nn.Module) -> bool:
    """Whether the module is rectified already."""
    return isinstance(module, _Exchanged)

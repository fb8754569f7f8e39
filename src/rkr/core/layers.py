"""How a user's own module comes to compute with the task in use.

The module keeps its parameters, its keys and its place in the network; only its class is exchanged for a subclass whose
`weight` and `bias` are those of the task: `(W + R)·F` and `b·F`. Code that reads `layer.weight` directly (attention
layers do) therefore sees the rectified weight, while `state_dict` still holds the base.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import kernels
from rkr.core.buffers import lent_buffers, own_buffers
from rkr.core.changes import Rectification
from rkr.core.convolution import convolve, is_plain_conv, packing
from rkr.core.rectification import formula
from rkr.core.sites import BATCH_NORMS, Site
from rkr.core.state import TaskState
from rkr.errors import UsageError


def autocasts(device: torch.device) -> bool:
    """Whether mixed precision is on for this kind of device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def by_formula(site: Site) -> bool:
    """Whether to compute by plain operations: by the options, or inside torch.func's transforms (vmap, grad)."""
    return not site.options.fast or torch._C._are_functorch_transforms_active()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must see what is computed from these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def merged_weight(site: Site) -> Tensor:
    """The weight with the task's rectification and scale in it: `(W + R)·F`.

    Without gradients the result is cached; with them it has the same bits.
    """
    task = _task_at(site)
    return site.weight if task is None else merged_for(site, task)[0]


def merged_bias(site: Site) -> Tensor | None:
    """The bias with the task's scale in it: `b·F`."""
    task = _task_at(site)
    if task is None or site.bias is None:
        return site.bias
    if needs_grad(site.bias, site.factors(task)[2]):
        return site.change.bias(site, task)
    return merged_for(site, task)[1]


def merged(site: Site) -> tuple[Tensor, Tensor | None]:
    """Weight and bias."""
    task = _task_at(site)
    return (site.weight, site.bias) if task is None else merged_for(site, task)


def _task_at(site: Site) -> TaskState | None:
    if site.active.mixed is not None:
        raise NeedsGrouping(site.path)
    return site.active.task


def merged_for(
    site: Site, task: TaskState, pack: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """`merged` for a task that need not be the one in use. With `pack` the weight is kept in the form that it gives."""
    w, b = site.weight, site.bias
    if autocasts(w.device):  # weights are merged in full precision, so that the cache serves every precision
        with torch.autocast(w.device.type, enabled=False):
            return merged_for(site, task, pack)
    lm, rm, f = site.factors(task)
    fast, layout = not by_formula(site), site.options.layout
    if needs_grad(w, b, lm, rm, f):
        site.active.cache.drop(task)
        if fast and layout == "axes":
            return kernels.merged_weight(w, lm, rm, f), site.change.bias(site, task)
        return site.change.weight(site, task), site.change.bias(site, task)
    if torch._C._are_functorch_transforms_active():
        return site.change.weight(site, task), site.change.bias(site, task)
    cache, sources = site.active.cache, (w, b, lm, rm, f)
    place = site if pack is None else (site, "packed")
    found = cache.get(task, place, sources)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            weight = kernels.merge(w, lm, rm, f, layout) if fast else site.change.weight(site, task)
            if weight is w:
                weight = w.clone()
            found = weight if pack is None else pack(weight), site.change.bias(site, task)
        cache.put(task, place, sources, *found)
    return found


class NeedsGrouping(Exception):
    """Raised inside a mixed batch by a layer that can only compute one task at a time."""


# ---------------------------------------------------------------------------------------------------------
# The exchanged classes


class _Exchanged:
    """What all exchanged classes share: the site, and a way to copy and pickle instances."""

    _rkr: Site
    training: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        state, own = self.__dict__, getattr(type(self), "__getstate__", None)
        if own is not None and own is not getattr(object, "__getstate__", None):  # which Python has from 3.11 on
            state = own(self)
        return _rebuild, _exchange_of[type(self)], state


class _MergedWeight(_Exchanged):
    """A Linear or convolution whose forward is not torch's own reads the folded weight and bias."""

    @property
    def weight(self) -> Tensor:
        return merged_weight(self._rkr)

    @property
    def bias(self) -> Tensor | None:
        return merged_bias(self._rkr)


class _Linear(_MergedWeight):
    def forward(self, x: Tensor) -> Tensor:
        site = self._rkr
        check_input(site, x)
        if site.active.mixed is not None:
            return site.active.mixed.linear(site, x)
        if self.training and torch.is_grad_enabled():
            lm, rm, f = site.factors(site.active.task_to_train())
            if not by_formula(site) and not autocasts(x.device):
                many = x.numel() > 2 * site.weight.numel()
                return kernels.factored_linear(x, site.weight, site.bias, lm, rm, f, many)
            return formula(site.weight, site.bias, lm, rm, f, lambda w, b: F.linear(x, w, b), channel_dim=-1)
        return F.linear(x, *merged(site))


class _Conv(_MergedWeight):
    def forward(self, x: Tensor) -> Tensor:
        site, conv = self._rkr, cast("Any", self)
        check_input(site, x)
        if site.active.mixed is not None:
            return site.active.mixed.conv(site, x, self._merged)
        if self.training and torch.is_grad_enabled():
            w, b = site.weight, site.bias
            lm, rm, f = site.factors(site.active.task_to_train())
            if by_formula(site):
                return formula(w, b, lm, rm, f, lambda w, b: convolve(conv, x, w, b), site.options.layout, 1 - w.dim())
            padding = _factored_padding(conv, x)
            if padding is not None and not needs_grad(w, b):
                many = 2 * x.numel() > w.numel()
                return kernels.factored_conv2d(x, w, b, lm, rm, f, conv.stride, padding, conv.dilation, many)
        return self._merged(x, site.active.task)

    def _merged(self, x: Tensor, task: TaskState | None) -> Tensor:
        """With the merged weight of a task."""
        site, conv = self._rkr, cast("Any", self)
        if task is None:
            return convolve(conv, x, site.weight, site.bias)
        return convolve(conv, x, *merged_for(site, task, packing(conv, x, site.weight)))


def _factored_padding(conv: nn.Conv2d, x: Tensor) -> tuple[int, int] | None:
    """Padding in numbers if the factored gradients apply to this convolution and input, else None."""
    site = cast("Site", conv._rkr)
    if (
        x.dim() != 4
        or site.weight.dim() != 4
        or not kernels.factored_pays(site.weight.shape, site.rank)
        or conv.groups != 1
        or conv.padding_mode != "zeros"
        or site.options.layout != "axes"
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


class _Changed(_Exchanged):
    """A layer under any other change: the module's own forward with the task's weight and bias, then the output's."""

    @property
    def weight(self) -> Tensor:
        site, task = self._rkr, _task_at(self._rkr)
        return site.weight if task is None else site.change.weight(site, task)

    @property
    def bias(self) -> Tensor | None:
        site, task = self._rkr, _task_at(self._rkr)
        return site.bias if task is None else site.change.bias(site, task)

    def forward(self, x: Tensor) -> Tensor:
        site, task = self._rkr, _task_at(self._rkr)
        check_input(site, x)
        return self._plain(x) if task is None else site.change.passed(site, task, x, self._plain)

    def _plain(self, x: Tensor) -> Tensor:
        return super().forward(x)  # type: ignore[misc]


class _ChangedConv(_Changed):
    def _plain(self, x: Tensor) -> Tensor:
        return convolve(cast("nn.Conv2d", self), x, self.weight, self.bias)


class _Attention(_Exchanged):
    """`nn.MultiheadAttention`: its packed input projection is a Linear from E to 3·E without a module of its own."""

    @property
    def in_proj_weight(self) -> Tensor:
        return merged_weight(self._rkr)

    @property
    def in_proj_bias(self) -> Tensor | None:
        return merged_bias(self._rkr)


class _Norm(_Exchanged):
    """A normalisation layer that uses the task's affine parameters and statistics where the task has its own."""

    weight = property(lambda self: _norm_tensor(self, "weight"))
    bias = property(lambda self: _norm_tensor(self, "bias"))
    running_mean = property(lambda self: _norm_tensor(self, "running_mean"))
    running_var = property(lambda self: _norm_tensor(self, "running_var"))
    num_batches_tracked = property(lambda self: _norm_tensor(self, "num_batches_tracked"))


class _BatchNorm(_Norm):
    def train(self, mode: bool = True) -> Any:
        """Shared statistics, which earlier tasks depend on, stay as they are once the base is frozen."""
        shared = self._rkr.active.base_frozen and not self._rkr.stats
        return super().train(mode and not shared)  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        mixed = self._rkr.active.mixed
        if mixed is not None:
            return mixed.batch_norm(self._rkr, x)
        plain, site = super().forward, self._rkr  # type: ignore[misc]
        if self.training and site.active.base_frozen and not site.stats and not torch.compiler.is_compiling():
            plain = _on_own_buffers(self, plain)  # someone has set `training` by hand
        return plain(x) if site.active.task is None else site.change.normalised(site, site.active.task, x, plain)


def _norm_tensor(module: Any, name: str) -> Tensor | None:
    site: Site = module._rkr
    if site.active.mixed is not None and (site.affine or site.stats):
        raise NeedsGrouping(site.path)
    task = site.active.task
    return site.base_tensor(name) if task is None else site.change.norm(site, task, name)


class _Pinned(_Exchanged):
    """A module with shared buffers: once the base is frozen, whatever a call writes to them does not last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lent_buffers([self._rkr]):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _on_own_buffers(module: Any, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with own_buffers(module):
            return forward(x)

    return run


class _Head(_Exchanged):
    """The classification layer: each task brings its own, with its own number of classes."""

    @property
    def weight(self) -> Tensor:
        return head_tensor(self._rkr, "weight")  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return head_tensor(self._rkr, "bias")

    def forward(self, x: Tensor) -> Tensor:
        site = self._rkr
        if site.active.mixed is not None:
            return site.active.mixed.head(site, x)
        return super().forward(x)  # type: ignore[misc]


def head_tensor(site: Site, name: str) -> Tensor | None:
    """The head's weight or bias for the task in use."""
    if site.active.mixed is not None:
        raise NeedsGrouping(site.path)
    task = site.active.task
    return site.base_tensor(name) if task is None else site.change.head(site, task, name)


def check_input(site: Site, x: Tensor) -> None:
    """A clear word where torch would fail from deep inside."""
    w = site.weight
    if x.dtype is not w.dtype and not autocasts(x.device):
        raise UsageError(
            f"layer {site.path!r} got {x.dtype}, but the network is {w.dtype}: convert the input with x.to({w.dtype})"
        )
    if x.device != w.device:
        raise UsageError(
            f"layer {site.path!r} got an input on {x.device}, but the network is on {w.device}: "
            f"move the input with x.to({str(w.device)!r}), or the model with model.to({str(x.device)!r})"
        )


@cache
def exchanged_class(original: type, *mixins: type) -> type:
    """The subclass of `original` with mixins in front; one object for each combination."""
    new = type(f"Rectified{original.__name__}", (*mixins, original), {"__module__": __name__})
    _exchange_of[new] = (original, *mixins)
    return new


_exchange_of: dict[type, tuple[type, ...]] = {}  # the original class and the mixins


def _rebuild(original: type, *mixins: type) -> Any:
    cls: Any = exchanged_class(original, *mixins)
    return cls.__new__(cls)


def exchange(site: Site) -> None:
    """Turn the site's module into its rectified subclass, in place."""
    module: Any = site.module
    cls: Any = type(module)
    mixins: list[type]
    if site.kind == "head":
        mixins = [_Head]
    elif site.kind == "pinned":
        mixins = []  # nothing but shared buffers
    elif site.kind == "norm":
        mixins = [_BatchNorm if isinstance(module, BATCH_NORMS) else _Norm]
    elif type(site.change) is not Rectification:
        mixins = [_ChangedConv if site.kind == "conv" and is_plain_conv(cls) else _Changed]
    elif site.kind == "attention":
        mixins = [_Attention]
    elif site.kind == "linear":
        mixins = [_Linear if cls.forward is nn.Linear.forward else _MergedWeight]
    else:
        mixins = [_Conv if is_plain_conv(cls) else _MergedWeight]
    module._rkr = site
    module.__class__ = exchanged_class(cls, *([_Pinned] if site.buffers else []), *mixins)


def restore(module: nn.Module) -> None:
    """Undo `exchange`."""
    module.__class__ = _exchange_of[type(module)][0]
    del module._rkr


def original_class(module: nn.Module) -> type:
    """The class of a module before it was exchanged."""
    return _exchange_of[type(module)][0] if type(module) in _exchange_of else type(module)


def is_exchanged(module: nn.Module) -> bool:
    """Whether the module is rectified already."""
    return isinstance(module, _Exchanged)

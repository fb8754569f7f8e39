"""How a user's own module comes to compute with the task in use.

The module keeps its parameters, its keys and its place in the network. Only its class is exchanged for a subclass whose
`weight` and `bias` are those of the task: `(W + R)·F` and `b·F`. Code that reads `layer.weight` directly (attention
layers do) therefore sees the rectified weight, while `state_dict` still holds the base.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from rkr.core.buffers import lent_buffers

if TYPE_CHECKING:
    from rkr.core.adapters.base import TargetLayer


class _Exchanged:
    """Base of all exchanged classes: holds the target layer, and makes instances copyable and picklable."""

    _rkr: TargetLayer

    def __reduce_ex__(self, protocol: Any) -> Any:
        state, own = self.__dict__, getattr(type(self), "__getstate__", None)
        if own is not None and own is not getattr(object, "__getstate__", None):  # Python has one from 3.11 on
            state = own(self)
        return _rebuild, _exchanges[type(self)], state


class _LendsBuffers(_Exchanged):
    """A module with shared buffers: once the base is frozen, what a call writes to them does not last."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with lent_buffers([self._rkr]):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _property(name: str) -> property:
    return property(lambda module: module._rkr.read(name))


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._rkr.forward(*args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    if name == "forward":
        return _forward
    return lambda module, *args, **kwargs: getattr(module._rkr, name)(*args, **kwargs)


@cache
def _exchanged_class(original: type, properties: tuple[str, ...], methods: tuple[str, ...], lends: bool) -> type:
    """A subclass of `original` that gets attributes and methods from its target layer; one for each combination."""
    members: dict[str, Any] = {name: _property(name) for name in properties}
    members |= {name: _method(name) for name in methods}
    base = _LendsBuffers if lends else _Exchanged
    new = type(f"Rectified{original.__name__}", (base, original), {**members, "__module__": __name__})
    _exchanges[new] = (original, properties, methods, lends)
    return new


_exchanges: dict[type, tuple[type, tuple[str, ...], tuple[str, ...], bool]] = {}


def _rebuild(original: type, properties: tuple[str, ...], methods: tuple[str, ...], lends: bool) -> Any:
    cls: Any = _exchanged_class(original, properties, methods, lends)
    return cls.__new__(cls)


def exchange(layer: TargetLayer) -> None:
    """Let a target layer's module compute with the task in use, in place."""
    module: Any = layer.module
    original: Any = type(module)
    layer.original = original
    module._rkr = layer
    module.__class__ = _exchanged_class(original, layer.properties, layer.overrides(), bool(layer.buffers))


def restore(module: nn.Module) -> None:
    """Undo `exchange`."""
    module.__class__ = original_class(module)
    del module._rkr


def original_class(module: nn.Module) -> type:
    """The class of a module before it was exchanged."""
    return _exchanges[type(module)][0] if type(module) in _exchanges else type(module)


def is_exchanged(module: nn.Module) -> bool:
    """Whether a module is a target layer of some model."""
    return isinstance(module, _Exchanged)


def layer_of(module: nn.Module) -> TargetLayer | None:
    """The target layer that a module belongs to."""
    return getattr(module, "_rkr", None)

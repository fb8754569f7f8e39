"""Which layers of a network tasks change."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from rkr.core.adapters import Adapter, BuffersOnly, HeadLayer, TargetLayer, adapter_for, registered
from rkr.core.adapters.head import HEADS
from rkr.core.exchange import original_class
from rkr.core.options import Options
from rkr.core.state import Active
from rkr.core.updates import LayerUpdate
from rkr.errors import UsageError


def find_layers(
    network: nn.Module, options: Options, update: LayerUpdate, head: str | None, active: Active
) -> list[TargetLayer]:
    """The target layers of a network, in its order. Checks everything and changes nothing."""
    modules = dict(network.named_modules())
    lazy = next((n for n, t in (*network.named_parameters(), *network.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise UsageError(f"{lazy!r} has no shape yet: run the network once before rectify")
    if head is not None:
        head = _check_head(network, modules, head)
    layers = []
    for path, module in modules.items():
        layer = _layer_of(path, module, options, update, head, active)
        if layer is not None:
            layers.append(layer)
    if not any(isinstance(layer, Adapter) for layer in layers):
        raise UsageError(
            "nothing to rectify: no layer that can be rectified passes the options "
            f"(include={list(options.include)}, exclude={list(options.exclude)}, "
            f"rectify_weights={options.rectify_weights!r}, scale_outputs={options.scale_outputs!r})"
        )
    _check_patterns(options, [name for name, module in modules.items() if is_rectifiable(module)])
    keys = [key for layer in layers for key in layer.shapes()]
    clash = next((k for k in keys if k in ("head.weight", "head.bias")), None)
    if clash is not None:
        raise UsageError(f"the name {clash!r} is a task's head in task files: rename the layer 'head'")
    return layers


def is_rectifiable(module: nn.Module) -> bool:
    """Whether there is an adapter that takes a module."""
    found = adapter_for(module)
    return found is not None and issubclass(found, Adapter)


def _layer_of(
    path: str, module: nn.Module, options: Options, update: LayerUpdate, head: str | None, active: Active
) -> TargetLayer | None:
    """The one place that chooses what kind of target layer a module is."""
    if path == head:
        return HeadLayer(path, module, active, options, update)
    found = None if parametrize.is_parametrized(module) else registered(module)
    if found is not None and found[1].takes(module):
        layer = found[1](path, module, active, options, update)
        layer.original, layer.registered = original_class(module), found[0]
        if layer.chosen():
            return layer
    if any(b is not None for b in module._buffers.values()):
        return BuffersOnly(path, module, active, options, update)
    return None


def _check_patterns(options: Options, layers: list[str]) -> None:
    """A pattern that matches no layer is a typing error."""
    for name in ("include", "exclude", "ranks"):
        for pattern in getattr(options, name):
            if not any(fnmatchcase(path, pattern) for path in layers):
                some = ", ".join(map(repr, layers[:6])) + (", ..." if len(layers) > 6 else "")
                raise UsageError(f"{name}: no layer matches {pattern!r}; layers: {some}")


def _check_head(network: nn.Module, modules: Mapping[str, nn.Module], head: str) -> str:
    """The head's first name in the network, if there is such a layer."""
    found = dict(network.named_modules(remove_duplicate=False)).get(head) if isinstance(head, str) else None
    candidates = [n for n, m in modules.items() if isinstance(m, HEADS)]
    if found is None:
        hint = f"; the last one is {candidates[-1]!r}" if candidates else ""
        raise UsageError(f"the network has no module named {head!r} to be its head{hint}")
    if not isinstance(found, HEADS) or "weight" not in found._parameters:
        raise UsageError(f"the head {head!r} is a {type(found).__name__}: it must be a Linear or convolution layer")
    return next(name for name, module in modules.items() if module is found)

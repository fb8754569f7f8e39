"""What is checked of a model before it computes, and what is said of inputs that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rkr.core.adapters import TargetLayer
from rkr.core.adapters.base import join
from rkr.core.exchange import layer_of
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


def places(network: nn.Module, layers: Sequence[TargetLayer]) -> list[tuple[dict[str, Any], str, nn.Module]]:
    """Where each target layer, and each module that holds one, is found: a dictionary of modules, and a name there."""
    found: dict[str, tuple[dict[str, Any], str, nn.Module]] = {}
    for layer in layers:
        parent, path = network, ""
        for name in filter(None, layer.path.split(".")):
            modules, path = parent._modules, join(path, name)
            parent = modules[name]  # type: ignore[assignment]
            found[path] = modules, name, parent
    return list(found.values())


def check_layers(model: RectifiedModel) -> None:
    """Check that target layers were not replaced, and that no module with buffers was added after `rectify`."""
    check_owner(model)
    modules, known = dict(model.network.named_modules()), {id(layer.module) for layer in model.layers}
    for layer in model.layers:
        if modules.get(layer.path) is not layer.module:
            raise UsageError(
                f"layer {layer.path!r} was replaced after rectify, and tasks cannot change the new one: change "
                "the network (to SyncBatchNorm, for instance) before rectify"
            )
    for path, module in modules.items():
        if id(module) not in known and any(b is not None for b in module._buffers.values()):
            raise UsageError(
                f"module {path!r} came after rectify, and later tasks would change its buffers: build the whole "
                "network before rectify, if necessary by running it once"
            )


def check_owner(model: RectifiedModel) -> None:
    """Check that the network still computes with this model's tasks."""
    if model.layers and layer_of(model.layers[0].module) is not model.layers[0]:
        raise UsageError(
            "this model's network was given to another rectified model: use that one, or load this one again "
            "with a new network"
        )


def explain(model: RectifiedModel, inputs: Sequence[Any], error: RuntimeError) -> None:
    """Raise a clear error if types or devices that do not match caused this one."""
    base = next(iter(model.network.parameters()))
    own = list(model.tasks.parameters())[:1]
    found = [(p, "the task") for p in own] + [(x, "the input") for x in inputs]
    for value, what in found:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if value.dtype != base.dtype or value.device != base.device:
            raise UsageError(
                f"{what} is {value.dtype} on {value.device}, but the network is {base.dtype} on {base.device}: "
                "convert the input with x.to(...), or the whole model with model.to(...)"
            ) from error

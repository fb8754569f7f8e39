"""Plain networks with one task folded in."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rkr.core.conventions import counting, set_classes
from rkr.core.exchange import restore
from rkr.core.state import Active, TaskState

if TYPE_CHECKING:
    from rkr.core.adapters.base import TargetLayer
    from rkr.core.model import RectifiedModel


def plain_copy(model: RectifiedModel, task: TaskState) -> nn.Module:
    """A copy of the user's network that computes what the task computes, without any part of this package."""
    plain, copies = bare_copy(model)
    with torch.no_grad():
        for layer, copied in zip(model.layers, copies, strict=True):
            module = copied.module
            layer.fit(module, task)
            for name, tensor in layer.merged_tensors(task).items():
                if tensor is not None:
                    _replace(module, name, tensor.clone())
    set_classes(counting(plain), task)
    for key, p in plain.named_parameters():
        p.requires_grad_(model.user_requires_grad.get(key, True))
    return plain


def bare_copy(model: RectifiedModel) -> tuple[nn.Module, list[TargetLayer]]:
    """A copy of the user's network that computes with the base, and the copies of the model's target layers."""
    model.tensors.restore_shared()
    network = copy.deepcopy(model.network, {id(model.active): Active()})  # without the tasks
    modules = dict(network.named_modules())
    layers = [modules[layer.path]._rkr for layer in model.layers]
    for layer in layers:
        restore(layer.module)
    return network, layers


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a new tensor in the place of a parameter or buffer; the old one may be shared with another module."""
    if module._parameters.get(name) is not None:
        module._parameters[name] = nn.Parameter(tensor)
    else:
        module._buffers[name] = tensor

"""What is done once for a pass of the network, instead of in each layer: checking or making merged weights.

Layers take their weights from `Active.ready`. If there is none (a call of the network or a part of it without the
model, a compiled graph, a transform of torch.func), each layer makes its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkr.core import ways
from rkr.core.adapters import Adapter
from rkr.core.adapters.base import autocasts
from rkr.core.grouped import Plan
from rkr.core.state import Ready, TaskState, saved_tensor_hooks

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


class Passes:
    """Prepares passes of one model, and keeps what serves many of them."""

    def __init__(self) -> None:
        self._plans: tuple[Any, list[Plan]] = None, []

    def prepare(
        self, model: RectifiedModel, task: TaskState | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Ready | None:
        """Merged weights for a pass: cached ones without gradients, new ones for a training step of grouped layers."""
        if task is None or not model.is_rectification or ways.by_formula(model.options.kernels):
            return None
        layers = model.weight_layers()
        if not torch.is_grad_enabled():
            return model.active.cache.ready(task, _sources(layers, task), _packs(layers[0].weight))
        if not model.training:
            return None
        device = layers[0].weight.device
        kernels = model.options.kernels
        largest = ways.largest_grouped(kernels, device, _samples(args, kwargs))
        plans = self._planned(layers, largest, ways.smallest_group(kernels, device)) if largest else []
        if not plans:
            return None
        model.active.cache.drop(task)
        ready = Ready(hooks=saved_tensor_hooks())
        for plan in plans:
            ready.weights |= plan.merged(task)
        return ready

    def _planned(self, layers: Sequence[Adapter], largest: float, smallest: int) -> list[Plan]:
        """The layers of each device and type in groups, if one has at least `smallest`."""
        weights = [x.module._parameters[x.weight_name] for x in layers]
        key = largest, smallest, list(map(id, weights)), list(map(Tensor.data_ptr, weights))  # type: ignore[arg-type]
        if key != self._plans[0]:
            kinds: dict[Any, list[Adapter]] = {}
            for x in layers:
                if x.can_group and x.weight.numel() <= largest:
                    kinds.setdefault((x.weight.device, x.weight.dtype), []).append(x)
            plans = map(Plan, kinds.values())
            self._plans = key, [plan for plan in plans if plan.largest >= smallest]
        return self._plans[1]

    def __deepcopy__(self, memo: Any) -> Passes:
        return Passes()

    def __reduce__(self) -> tuple[type[Passes], tuple[()]]:
        return Passes, ()


@contextmanager
def as_when_frozen(network: nn.Module) -> Iterator[None]:
    """Without gradients, compute exactly as after the base is frozen.

    torch chooses some kernels by `requires_grad`, even under no_grad, so the last bits could differ.
    """
    shared = [p for p in network.parameters() if p.requires_grad]
    try:
        for p in shared:
            p.requires_grad_(False)
        yield
    finally:
        for p in shared:
            p.requires_grad_(True)


def _sources(layers: Sequence[Adapter], task: TaskState) -> list[Tensor]:
    """All tensors that merged weights are made from."""
    get = task._parameters.get
    found = [
        t
        for x in layers
        for p in (x.module._parameters,)
        for t in (p[x.weight_name], p.get(x.bias_name), get(x.lm), get(x.rm), get(x.f))
    ]
    return [t for t in found if t is not None]


def _packs(weight: Tensor) -> Any:
    """What decides, besides a layer's input, whether weights are kept in oneDNN's order; None if they never are."""
    if weight.device.type != "cpu" or autocasts(weight.device) or weight.dtype is not torch.float32:
        return None
    return torch._C._get_mkldnn_enabled(), torch.get_num_threads()


def _samples(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first dimension of a pass's first tensor."""
    found = (value.shape[0] for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim())
    return next(found, 1)

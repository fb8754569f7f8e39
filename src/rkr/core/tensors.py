"""Which tensors belong to the base that all tasks share, and which to each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rkr.core.adapters import HeadLayer, NormLayer, TargetLayer
from rkr.core.adapters.base import join
from rkr.core.state import TaskState
from rkr.errors import UsageError


class Tensors:
    """The tensors of a network with tasks, by who they belong to.

    Args:
        network: The user's module.
        layers: Its target layers.
    """

    def __init__(self, network: nn.Module, layers: Sequence[TargetLayer]) -> None:
        self.network, self.layers = network, layers
        self.head = next((layer for layer in layers if isinstance(layer, HeadLayer)), None)

    def replaced_keys(self) -> set[str]:
        """The network's keys for what each task has for itself: its head, and normalisation by the options."""
        own = {id(layer.module): tuple(layer.replaced()) for layer in self.layers}
        modules = self.network.named_modules(remove_duplicate=False)
        return {join(path, name) for path, module in modules for name in own.get(id(module), ())}

    def unused_head(self) -> list[nn.Parameter]:
        """The parameters of the network's own head, which no task uses, unless they are tied to something else."""
        if self.head is None:
            return []
        head = self.head.module
        others = (m for m in self.network.modules() if m is not head)
        elsewhere = {id(p) for module in others for p in module._parameters.values()}
        return [p for p in head._parameters.values() if p is not None and id(p) not in elsewhere]

    def new_head(self, classes: int, init: str) -> dict[str, Tensor]:
        """A new task's head: "random", or a copy of the "network"'s own."""
        assert self.head is not None
        return self.head.new(classes, init)

    def norm_state(self, task: TaskState) -> dict[str, Tensor]:
        """The task's normalisation tensors; while the base is trained they are the base's own."""
        layers = (layer for layer in self.layers if isinstance(layer, NormLayer))
        return {key: tensor for layer in layers for key, tensor in layer.state(task).items()}

    def task_state(self, task: TaskState) -> dict[str, Tensor]:
        """Everything that belongs to a task, as its file holds it."""
        return {**task.tensors(), **self.norm_state(task)}

    def expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of a task's tensors in this model."""
        return {key: what for layer in self.layers for key, what in layer.expected(classes).items()}

    def base_state(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What tasks share: the network's tensors without those that each task has for itself."""
        if state is None:
            self.restore_shared()
            state = self.network.state_dict()
        odd = next((k for k, v in state.items() if not isinstance(v, Tensor)), None)
        if odd is not None:
            raise UsageError(f"the network's state {odd!r} is not a tensor, so it cannot be hashed or saved")
        own = self.replaced_keys()
        return {k: v for k, v in state.items() if k not in own}

    def restore_shared(self) -> None:
        """Undo what was written to buffers that all tasks share."""
        for layer in self.layers:
            layer.buffers.restore()

"""Layer updates: how a task updates the layers of a network.

A network with tasks (`RectifiedModel`) does everything that methods have in common: each task's tensors, normalisation
and head, where a new task starts, what is frozen, what it costs. A `LayerUpdate` says the rest:

    y = output(weight_t * x + bias_t)

RKR's is `Rectification`. Methods that generate, decompose, calibrate or grow weights have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rkr.core.rectification import factor_shapes, rectified_weight, scaled
from rkr.core.state import TaskState

if TYPE_CHECKING:
    from rkr.core.adapters.base import Adapter, TargetLayer


class LayerUpdate:
    """The network as it is; subclasses override what they change.

    Tensors that a task has at a layer have short names here ("lm", "gate"); in task files they are "<layer>.<name>".
    """

    opens_base: ClassVar[bool] = False
    """Whether the base is trained with every task; by default it is frozen after the first."""

    undecayed: ClassVar[frozenset[str]] = frozenset()
    """Tensors without weight decay."""

    # -- what a task has at a layer -----------------------------------------------------------------------

    def applies(self, layer: Adapter) -> bool:
        """Whether a layer is updated at all."""
        return layer.standard

    def shapes(self, layer: Adapter) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a task has at a layer."""
        return {}

    def draw(self, layer: Adapter) -> dict[str, Tensor]:
        """These tensors for a task that starts as the base network."""
        w = layer.weight
        return {name: torch.zeros(s, dtype=w.dtype, device=w.device) for name, s in self.shapes(layer).items()}

    # -- what it computes with them -----------------------------------------------------------------------

    def weight(self, layer: Adapter, task: TaskState) -> Tensor:
        """The layer's weight for a task."""
        return layer.weight

    def bias(self, layer: Adapter, task: TaskState) -> Tensor | None:
        """The layer's bias for a task."""
        return layer.bias

    def passed(self, layer: Adapter, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's output; `plain` is the module's own forward, with the task's weight and bias."""
        return self.output(layer, task, x, plain(x))

    def output(self, layer: Adapter, task: TaskState, x: Tensor, y: Tensor) -> Tensor:
        """The layer's output, given its input x and y = weight * x + bias."""
        return y

    def norm(self, layer: TargetLayer, task: TaskState, name: str) -> Tensor | None:
        """A tensor of a normalisation layer ("weight", "running_mean", ...): the task's own, or the base's."""
        own = layer.own(task, name)
        return own if own is not None else layer.base_tensor(name)

    def normalised(self, layer: TargetLayer, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of a BatchNorm; `plain` is the module's own forward, with the task's tensors."""
        return plain(x)

    def multiply_adds(self, layer: Adapter, values: int) -> int:
        """What `output` adds for one sample at a layer that returns `values` values."""
        return 0

    def run(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], task: TaskState | None) -> Any:
        """The network's output."""
        return network(*args, **kwargs)

    def head(self, layer: TargetLayer, task: TaskState, name: str) -> Tensor | None:
        """The "weight" or "bias" of the task's head."""
        return task.get(f"head.{name}")


class Rectification(LayerUpdate):
    """W_t = W + LM·RM and O_t = O·F (equations 1 to 5), F folded into weight and bias.

    Adapters compute the same faster.
    """

    undecayed = frozenset({"f"})

    def applies(self, layer: Adapter) -> bool:
        return layer.rank is not None or layer.scaled

    def shapes(self, layer: Adapter) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        size = layer.shape
        if layer.rank is not None:
            shapes["lm"], shapes["rm"] = factor_shapes(size, layer.rank)
        if layer.scaled:
            shapes["f"] = (size[0],)
        return shapes

    def draw(self, layer: Adapter) -> dict[str, Tensor]:
        """R = 0 and F = 1: a new task starts as the base network."""
        tensors = super().draw(layer)
        if layer.rank is not None:
            lm = tensors["lm"]
            std = layer.options.init_gain * layer.lm_std(lm.shape[0])
            tensors["lm"] = torch.randn(lm.shape).mul_(std).to(lm)
        if layer.scaled:
            tensors["f"].fill_(1)
        return layer.initial(tensors)

    def weight(self, layer: Adapter, task: TaskState) -> Tensor:
        lm, rm, f = layer.factors(task)
        weight = rectified_weight(layer.canonical(layer.weight), lm, rm, layer.options.layout)
        return layer.stored(scaled(weight, f, 0))

    def bias(self, layer: Adapter, task: TaskState) -> Tensor | None:
        f = layer.factors(task)[2]
        return layer.bias if layer.bias is None or f is None else layer.bias * f

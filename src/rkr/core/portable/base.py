"""What a layer becomes in a traced network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rkr.core.portable.tasks import Tasks
from rkr.core.rectification import rectified_weight, scaled
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.adapters.base import Adapter, TargetLayer

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def total(y: Tensor, more: Tensor) -> Tensor:
    """`y + more`, in the memory of `y` where nothing else needs it: it has just been computed."""
    return y.add_(more) if _may_overwrite(y, more) else y + more


def product(y: Tensor, factor: Tensor) -> Tensor:
    """`y * factor`, as `total`."""
    return y.mul_(factor) if _may_overwrite(y, factor) else y * factor


def _may_overwrite(y: Tensor, other: Tensor) -> bool:
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and y.dtype is other.dtype


class Portable(nn.Module):
    """A layer that takes the place of the network's own in the traced copy, and computes with the tasks' tensors.

    Tensors of tasks that are constants are prepared once; those that are inputs are prepared in the graph.

    Args:
        layer: The target layer, of the copy.
        tasks: Where its tensors come from.
    """

    def __init__(self, layer: TargetLayer, tasks: Tasks) -> None:
        super().__init__()
        self.layer, self.tasks, self.path = layer, tasks, layer.path
        self.module: Any = layer.module
        prefix = f"{layer.path}." if layer.path else ""
        self.keys = {key.removeprefix(prefix): key for key in self.names()}
        self.constants = nn.Module()
        # Hooks of the user belong to the module that is called.
        for name in _HOOKS:
            setattr(self, name, getattr(layer.module, name))

    def names(self) -> list[str]:
        """Keys of the tensors that tasks have at this layer."""
        return list(self.layer.shapes())

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """What the layer computes with, from the tensors of each task."""
        return self.tasks.stacked(own)

    def apart(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """The tensors of each task by themselves, for `of`."""
        return {f"{name}{number}": t for name, tensors in own.items() for number, t in enumerate(tensors)}

    def of(self, number: int) -> dict[str, Tensor]:
        """The tensors of one task, from `apart`."""
        own = self.prepared()
        return {name: own[f"{name}{number}"] for name in self.keys}

    def settle(self) -> None:
        """Keep what is prepared from constants."""
        if self.tasks.states is not None:
            with torch.no_grad():
                for name, tensor in self._prepare().items():
                    self.constants.register_buffer(name, tensor.detach().contiguous().clone())

    def prepared(self) -> Mapping[str, Tensor]:
        """What the layer computes with in this call."""
        return self.constants._buffers if self.tasks.states is not None else self._prepare()  # type: ignore[return-value]

    def _prepare(self) -> dict[str, Tensor]:
        return self.prepare({name: self.tasks.own(key) for name, key in self.keys.items()})

    def each(self, compute: Callable[[int], Any], at: int) -> Any:
        """What the layer computes for each task, of which each sample keeps its own; `at`: see `Tasks.pick`."""
        found, *others = [compute(number) for number in range(self.tasks.count)]
        if others and not isinstance(found, Tensor):
            raise UsageError(
                f"layer {self.path!r} returns {type(found).__name__}, of which no sample can keep a part; export one "
                'task, style="merged", or with its tensors as inputs, style="adapter"'
            )
        for number, other in enumerate(others, 1):
            mine = torch.arange(self.tasks.count, device=found.device).unsqueeze(-1) == number
            found = torch.where(self.pick(mine, found, at), other, found)
        return found

    def pick(self, table: Tensor, like: Tensor, at: int) -> Tensor:
        """The entry of each sample's task: `Tasks.pick`."""
        return self.tasks.pick(self.path, table, like, at)

    def product(self, x: Tensor, factor: Tensor) -> Tensor:
        """`x` (..., I) times the matrix of each sample's task, of (T, I, O), or times (I, O)."""
        if self.tasks.index is None:
            return x @ factor
        dim, index = self.tasks.place(self.path, x, x.dim() - 1)
        rows = x.movedim(dim, 0)
        y = rows.reshape(rows.shape[0], -1, x.shape[-1]) @ factor.index_select(0, index)
        return y.reshape(y.shape[0], *rows.shape[1:-1], y.shape[-1]).movedim(0, dim)

    def channel_product(self, x: Tensor, factor: Tensor, spatial: int, groups: int = 1) -> Tensor:
        """The channels at every place times the matrix of each sample's task, of (T, O, I), or times (O, I).

        With groups, channels are (G·I) and the matrices (T, G, O, I), or (T, 1, O, I) for all groups.
        """
        places = x.shape[x.dim() - spatial :]
        values = x.flatten(-spatial)  # (B, I, places)
        if self.tasks.index is None:
            own = factor
        else:
            own = factor.index_select(0, self.tasks.place(self.path, x, x.dim() - spatial - 1)[1])
        if groups == 1 and values.dim() == 3 and values.stride(1) == 1 and not torch.compiler.is_compiling():
            y = (values.transpose(1, 2) @ own.transpose(-2, -1)).transpose(1, 2)  # channels_last stays so
            return y.unflatten(-1, places)
        y = own @ values if groups == 1 else (own @ values.unflatten(-2, (groups, -1))).flatten(-3, -2)
        return y.unflatten(-1, places)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the network's own layer, for code that looks at them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__["_modules"].get("module")
            if module is None:
                raise
            if name in module._parameters:
                return self.attribute(name)
            return getattr(module, name)

    def attribute(self, name: str) -> Tensor | None:
        """A parameter of the network's own layer, read by other code."""
        self.tasks.read[f"{self.path}.{name}"] = None
        return self.module._parameters[name]


class LowRank(Portable):
    """A layer whose weight is rectified."""

    layer: Adapter

    def attribute(self, name: str) -> Tensor | None:
        """The merged weight or bias, if there is one task."""
        if self.tasks.count == 1 and name in (self.layer.weight_name, self.layer.bias_name):
            own = {name: self.tasks.own(key)[0] for name, key in self.keys.items()}
            return self.merged(own)[name != self.layer.weight_name]
        return super().attribute(name)

    def merged(self, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The weight `(W + R)·F` and the bias `b·F` of a task, computed in the graph."""
        layer = self.layer
        lm, rm, f = (own.get(name) for name in ("lm", "rm", "f"))
        weight = rectified_weight(layer.canonical(layer.weight), lm, rm, layer.options.layout)
        bias = layer.bias if layer.bias is None or f is None else layer.bias * f
        return layer.stored(scaled(weight, f, 0)), bias

    def scaled(self, y: Tensor, own: Mapping[str, Tensor], at: int = -1) -> Tensor:
        """Equation 2."""
        return product(y, self.pick(own["f"], y, at)) if "f" in own else y


class PortableByWeight(LowRank):
    """Any adapter: each task's weight is built in the graph, and the layer computed once for each task.

    Right for every layer, and slow. It is what a registered adapter becomes that has no `portable` of its own, a
    subclass with a `forward` of its own, and a convolution whose rectification is not separable.
    """

    def prepare(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        return self.apart(own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.each(lambda number: self._computed(number, args, kwargs), self.layer.channel_dim)

    def _computed(self, number: int, args: Any, kwargs: Any) -> Any:
        """The layer's output with the weight of one task."""
        weight, bias = self.merged(self.of(number))
        layer = self.layer
        if layer.apply is not None and layer.is_plain:
            return layer.apply(args[0], weight, bias, *args[1:], **kwargs)
        swapped = {layer.weight_name: weight, layer.bias_name: bias}
        tensors = {name: tensor for name, tensor in swapped.items() if tensor is not None}
        return functional_call(self.module, tensors, args, kwargs)

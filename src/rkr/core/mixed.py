"""One batch, a task per sample.

Two strategies. "group" runs the network once for each task with its merged weights; it is always correct. "layer" runs
it once and lets each layer apply each sample's own factors; it reads large linear weights once, but is only correct if
the first dimension is the batch throughout the network. So it is used where it can be faster and is proved correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkr.core.adapters import NeedsGrouping
from rkr.core.adapters.base import autocasts
from rkr.core.buffers import own_buffers
from rkr.core.state import TaskState
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


@dataclass(eq=False)
class MixedBatch:
    """A batch sorted by task, computed in one pass ("layer" strategy, inference only).

    A linear layer multiplies by the shared base once and adds each sample's own low-rank part, so its large weight is
    read once and not once for each task. Other layers run task by task with merged weights (`Adapter.mixed`).
    """

    tasks: list[TaskState]
    counts: list[int]
    index: Tensor  # (B) position in `tasks` of each sample's task

    def check(self, path: str, x: Tensor) -> None:
        """Refuse an input that does not have the batch in dimension 0."""
        if x.dim() < 2 or x.shape[0] != len(self.index):
            raise NeedsGrouping(path)

    def all(self, key: str) -> list[Tensor]:
        """A tensor that every task has, for each of them."""
        return [task.get(key) for task in self.tasks]  # type: ignore[misc]


def run(model: RectifiedModel, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The network's output for a batch whose i-th sample belongs to the task `names[i]`."""
    size = batch_size(args, kwargs)
    if isinstance(names, str) or not isinstance(names, Sized) or len(names) != size:
        got = (
            f"{len(names)} names"
            if isinstance(names, Sized) and not isinstance(names, str)
            else f"the single name {names!r}"
        )
        raise UsageError(
            f"tasks must have one name for each of the {size} samples, not {got}: "
            "pass a list as long as the batch, or use set_task for a batch of one task"
        )
    if size == 0:
        raise UsageError("a batch with tasks needs at least one sample")
    tasks = [model.tasks[name] for name in dict.fromkeys(names)]
    position = {task.name: i for i, task in enumerate(tasks)}
    index = torch.tensor([position[name] for name in names])
    batch = MixedBatch(tasks, torch.bincount(index).tolist(), index.sort().values.to(_device(model)))
    order = index.argsort(stable=True).to(_device(model))
    active = model.active
    current = active.task
    try:
        if not may_run_by_layer(model, tasks, args, kwargs):
            return run_groups(model, args, kwargs, batch, order)
        try:
            return run_layers(model, args, kwargs, batch, order)
        except NeedsGrouping:
            return run_groups(model, args, kwargs, batch, order)
    finally:
        active.task, active.mixed = current, None


def run_groups(model: RectifiedModel, args: Any, kwargs: Any, batch: MixedBatch, order: Tensor) -> Any:
    """One pass for each task."""
    active = model.active
    rows = list(order.split(batch.counts))
    outputs = []
    current, active.mixed = active.task, None
    for task, picked in zip(batch.tasks, rows, strict=True):
        active.task = task
        active.cache.touch(task)
        part, named = take((tuple(args), dict(kwargs)), picked, len(order))
        # In training mode statistics move: the task in use may learn from its samples, the others may not.
        with nullcontext() if task is current or not model.training else own_buffers(task):
            outputs.append(logits_of(model.run(part, named, task)))
    active.task = current
    return assemble(outputs, rows, class_dim(model))


def run_layers(model: RectifiedModel, args: Any, kwargs: Any, batch: MixedBatch, order: Tensor) -> Any:
    """One pass for all."""
    part, named = take((tuple(args), dict(kwargs)), order, len(order))
    model.active.mixed = batch
    output = model.run(part, named, None)
    model.active.mixed = None
    return assemble([logits_of(output)], [order], class_dim(model))


def class_dim(model: RectifiedModel) -> int:
    """Where a network's output has its classes: last for a Linear head, dimension 1 for a convolution."""
    head = model.tensors.head
    return 1 if head is None else head.class_dim


def may_run_by_layer(
    model: RectifiedModel, tasks: Sequence[TaskState], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the "layer" strategy applies to this call, is faster, and is correct for this network."""
    options = model.options
    if options.mixed == "group" or len(tasks) == 1 or options.layout != "axes":
        return False
    if not model.is_rectification:
        return False
    if torch.is_grad_enabled() or autocasts(_device(model)) or any(x.module.training for x in model.layers):
        return False
    once, other = (
        sum(x.weight.numel() for x in model.weight_layers() if x.one_product is which) for which in (True, False)
    )
    if options.mixed == "auto" and once <= other:
        return False
    return model.is_rowwise() and _all_tensors(model.network, args, kwargs)


def _all_tensors(network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether every argument of `forward` is given and a tensor, as the trace took it to be.

    One that is left out, or a flag, may lead the call to code that the trace has not seen.
    """
    signature = inspect.signature(network.forward)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    return all(isinstance(given.get(name), Tensor) for name in signature.parameters)


def _device(model: RectifiedModel) -> torch.device:
    return next(iter(model.network.parameters())).device


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Samples in a call: the first dimension of its first tensor."""
    for value in _tensors((*args, *kwargs.values())):
        if value.dim():
            return value.shape[0]
    raise UsageError("a batch with tasks needs a tensor input whose first dimension is the batch")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a (nested) argument, as `take` finds them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _tensors(v)


def take(value: Any, rows: Tensor, size: int) -> Any:
    """The given rows of every batched tensor in a (nested) argument; anything else as it is."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.shape[0] == size else value
    if isinstance(value, tuple | list):
        parts = [take(v, rows, size) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {k: take(v, rows, size) for k, v in value.items()}
    return value


def logits_of(output: Any) -> Any:
    """The logits of an output object that has them (transformers' models), else the output."""
    return getattr(output, "logits", output)


def assemble(outputs: list[Any], rows: list[Tensor], dim: int) -> Any:
    """Put the outputs of the groups back in the order of the batch, classes (in `dim`) padded with -inf."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        parts = [assemble(list(part), rows, dim) for part in zip(*outputs, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, dict):
        return {key: assemble([o[key] for o in outputs], rows, dim) for key in first}
    if first is None:
        return None
    if not isinstance(first, Tensor):
        raise UsageError(
            f"a mixed batch needs a network that returns tensors, not {type(first).__name__}: "
            "call the model once for each task instead"
        )
    if any(o.dim() == 0 or len(o) != len(r) for o, r in zip(outputs, rows, strict=True)):
        raise UsageError(
            "a mixed batch needs a network whose output has the batch in its first dimension: "
            "call the model once for each task instead"
        )
    if len({o.shape[1:] for o in outputs}) > 1:
        width = max(o.shape[dim] for o in outputs)
        outputs = [_pad(o, width, dim) for o in outputs]
    joined = torch.cat(outputs)
    order = torch.cat(rows)
    out = torch.empty_like(joined)
    out[order] = joined
    return out


def _pad(x: Tensor, width: int, dim: int) -> Tensor:
    """Widen a dimension, filled with -inf."""
    if not x.is_floating_point():
        raise UsageError(
            f"tasks with different numbers of classes make outputs of different width, and {x.dtype} has no -inf to "
            "fill them up with: return logits, or call the model once for each task"
        )
    shape = list(x.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([x, x.new_full(shape, -torch.inf)], dim)

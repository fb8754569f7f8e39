"""The tensors of a task, the task in use, and the cache of merged weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rkr.core.conventions import scoped
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.mixed import MixedBatch


class TaskState(nn.Module):
    """One task's tensors, under the names that its file uses: "layer1.0.conv1.lm", "bn1.running_mean", "head.weight".

    The tensors are stored flat, without a module per layer, so that a thousand tasks are cheap to store and move.
    """

    def __init__(self, name: str, classes: int | None, class_names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.name = name
        self.number = 0  # 0, 1, ... in the order in which tasks were added
        self.classes = classes
        self.class_names = None if class_names is None else tuple(class_names)
        self.about: dict[str, Any] = {}  # saved with the task: see `about.py`

    def put(self, key: str, tensor: Tensor) -> None:
        """Store a tensor, as a parameter unless it is a running statistic."""
        if is_statistic(key):
            self._buffers[key] = tensor.detach()
        else:
            self._parameters[key] = nn.Parameter(tensor.detach(), requires_grad=False)

    def own(self, key: str, tensor: Any) -> None:
        """Store this very tensor, which must be what `put` would make."""
        (self._buffers if is_statistic(key) else self._parameters)[key] = tensor

    def __setattr__(self, name: str, value: Any) -> None:
        """Names with dots are tensors: `load_state_dict(..., assign=True)` sets them."""
        if "." in name:
            self.own(name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Names up to a dot are modules: `torch.func.functional_call` walks along them."""
        return scoped(self, name) or super().__getattr__(name)

    def emptied(self) -> TaskState:
        """The task without its tensors."""
        task = TaskState(self.name, self.classes, self.class_names)
        task.about, task.number = self.about, self.number
        return task

    def discard(self, key: str) -> None:
        """Remove a tensor."""
        self._parameters.pop(key, None)
        self._buffers.pop(key, None)

    def get(self, key: str) -> Tensor | None:
        """The tensor under `key`, or None if this task has no such tensor."""
        value = self._parameters.get(key)
        return value if value is not None else self._buffers.get(key)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        found = {**self._parameters, **self._buffers}
        return {key: value for key, value in found.items() if value is not None}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """As for any module, except that names with dots are not submodules here."""
        *others, unexpected, errors = rest
        found: list[str] = []
        arguments: Any = (*others, found, errors)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        unexpected += [key for key in found if key[len(prefix) :] not in self.tensors()]

    def trainable(self, on: bool) -> None:
        """Turn gradients for the parameters of this task on or off."""
        for p in self._parameters.values():
            if p is not None:
                p.requires_grad_(on)
                if not on:
                    p.grad = None


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(key: str) -> bool:
    """Whether a tensor name is a normalisation statistic, which no optimiser touches."""
    return key.rpartition(".")[2] in STATISTICS


@dataclass(eq=False)
class Active:
    """Which task a network computes with. Every rectified layer points here, so a switch is one assignment."""

    task: TaskState | None = None
    mixed: MixedBatch | None = None
    base_frozen: bool = False  # whether the base is fixed permanently
    cache: MergeCache = field(default_factory=lambda: MergeCache(0))
    ready: Ready | None = None  # merged weights for the pass that is running

    def require(self) -> TaskState:
        """The task in use."""
        if self.task is None:
            raise UsageError("no task is selected: call add_task or set_task first")
        return self.task

    def task_to_train(self) -> TaskState:
        """The task in use, which is being trained: its merged weights are dropped.

        Training code may write to `.data`, which version counters do not record.
        """
        task = self.require()
        if not torch.compiler.is_compiling():
            self.cache.drop(task)
        return task


def saved_tensor_hooks() -> Any:
    """The hooks under which autograd saves tensors now. Gradient checkpointing has its own for each segment."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@dataclass(eq=False)
class Ready:
    """Merged weights and biases that layers use during one pass without checking anything.

    Attributes:
        weights: By the layer's path; of layers whose weight is packed for an input, by path and the input's shape.
        hooks: Of weights with gradients: the hooks under which they were made. A checkpointed segment, which runs
            under others, makes its own weights, because they must be made again when it runs again.
        packs: Whether weights may be packed: see `Adapter.packing`. Of weights without gradients.
    """

    weights: dict[Any, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    hooks: Any = None
    packs: Any = None
    cached: bool = False
    sources: list[Tensor] = field(default_factory=list)
    versions: tuple[list[int], list[int]] = ([], [])
    made: list[tuple[Tensor, int]] = field(default_factory=list)

    def find(self, key: Any) -> tuple[Tensor, Tensor | None] | None:
        """A layer's merged weight and bias."""
        if not self.cached and saved_tensor_hooks() != self.hooks:
            return None
        return self.weights.get(key)

    def put(self, key: Any, found: tuple[Tensor, Tensor | None]) -> None:
        """Keep merged tensors from the cache for the next passes."""
        if len(self.weights) < READY_ENTRIES:
            self.weights[key] = found
            self.made += [(t, t._version) for t in found if t is not None]

    def is_valid(self, sources: Sequence[Tensor], packs: Any) -> bool:
        """Whether the weights are still those of these tensors."""
        return (
            packs == self.packs
            and len(sources) == len(self.sources)
            and all(map(is_, sources, self.sources))
            and _versions(sources) == self.versions
            and all(t._version == version for t, version in self.made)
        )


def _versions(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """What changes if one of the tensors is written to, or gets other memory."""
    return list(map(_VERSION, tensors)), list(map(Tensor.data_ptr, tensors))


_VERSION = attrgetter("_version")


READY_ENTRIES = 1 << 14


class _Entry(NamedTuple):
    sources: tuple[Tensor | None, ...]  # kept, so that no other tensor gets the address of one of them
    key: Any
    weight: Tensor
    bias: Tensor | None


class MergeCache:
    """Merged weights of the most recently used tasks, up to a number of bytes.

    An entry is valid only while every tensor that it was built from is the same and unchanged, by its version counter.
    So a task that was trained or loaded again is merged again. Weights are always built from the frozen base and never
    un-merged, so nothing drifts.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[TaskState, dict[Hashable, _Entry]] = OrderedDict()
        self._ready: dict[TaskState, Ready] = {}
        self._bytes = 0
        self._lock = RLock()  # several threads may answer at once: see `views.py`

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def __contains__(self, task: object) -> bool:
        """Whether anything of a task is cached."""
        return task in self._entries

    def get(
        self, task: TaskState, place: Hashable, sources: Sequence[Tensor | None], more: Hashable = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The weight and bias that were merged from these tensors, if they are cached and valid."""
        entry = self._entries.get(task, {}).get(place)
        if (
            entry is None
            or any(a is not b for a, b in zip(entry.sources, sources, strict=True))
            or entry.key != (version_key(*sources), version_key(entry.weight, entry.bias), more)
        ):
            return None
        return entry.weight, entry.bias

    def put(
        self,
        task: TaskState,
        place: Hashable,
        sources: Sequence[Tensor | None],
        weight: Tensor,
        bias: Tensor | None,
        more: Hashable = None,
    ) -> None:
        """Cache merged tensors and drop the least recently used tasks. `more` is what else the tensors depend on."""
        key = version_key(*sources), version_key(weight, bias), more  # a user may write to either
        entry = _Entry(tuple(sources), key, weight, bias)
        with self._lock:
            entries = self._entries.setdefault(task, {})
            if place in entries:
                self._bytes -= _size(entries[place])
            entries[place] = entry
            self._bytes += _size(entry)
            self.touch(task)
            while self._bytes > self.limit and len(self._entries) > 1:
                self.drop(next(iter(self._entries)))

    def ready(self, task: TaskState, sources: list[Tensor], packs: Any) -> Ready | None:
        """A task's merged weights for a pass without gradients, if none of the tensors they are made from has changed.

        Else an empty one, which the layers fill. None if changes cannot be seen: tensors of the inference mode.
        """
        try:
            found = self._ready.get(task)
            if found is None or not found.is_valid(sources, packs):
                versions = _versions(sources)
                found = self._ready[task] = Ready(packs=packs, cached=True, sources=sources, versions=versions)
        except RuntimeError:
            return None
        return found

    def touch(self, task: TaskState) -> None:
        """Mark a task as used now."""
        with self._lock:
            if task in self._entries:
                self._entries.move_to_end(task)

    def drop(self, task: TaskState) -> None:
        """Drop one task's merged weights."""
        with self._lock:
            self._ready.pop(task, None)
            self._bytes -= sum(map(_size, self._entries.pop(task, {}).values()))

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._entries.clear()
            self._ready.clear()
            self._bytes = 0

    def __deepcopy__(self, memo: Mapping[int, Any]) -> MergeCache:
        return MergeCache(self.limit)

    def __reduce__(self) -> tuple[type[MergeCache], tuple[int]]:
        return MergeCache, (self.limit,)


def _size(entry: _Entry) -> int:
    tensors = (entry.weight, entry.bias)
    return sum(torch.ops.mkldnn._nbytes(t) if t.is_mkldnn else t.nbytes for t in tensors if t is not None)


def version_key(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Changes whenever one of the tensors is replaced or written to."""
    return tuple(
        # A packed weight has no address, and nothing else refers to it.
        None if t is None or t.is_mkldnn else (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype)
        for t in tensors
    )


def _count_fused_steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch's fused optimisers do not count their writes to parameters, so merged weights would seem up to date."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                if p.grad is not None and not p.is_inference():
                    increment_version(p)


register_optimizer_step_post_hook(_count_fused_steps)


def clone_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Independent copies."""
    return {key: value.detach().clone() for key, value in tensors.items()}

"""Views: one task of a model, to be called by any thread at any time.

A model computes with the task in use, which is one for the whole model. A view computes on a replica of the network's
modules instead, which shares every tensor, the tasks and the merged weights with the model and has a task in use of its
own. A replica serves one call at a time and then the next, of whichever task: there are as many as calls at once.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rkr.core.state import MergeCache, TaskState

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


class View:
    """One task of a model. Call it like the model, from any thread; it answers as the model does in evaluation mode.

    It holds no tensors: the task is looked up at each call, so it may be replaced meanwhile. Without it, calls raise
    UsageError.

    Attributes:
        name: The task's name.
    """

    def __init__(self, model: RectifiedModel, name: str) -> None:
        self._model, self.name = model, name

    @property
    def task(self) -> TaskState:
        """The task."""
        return self._model.tasks[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._model.check_owner()
        return self._model.replicas.run(self._model, self.task, args, kwargs)

    def __repr__(self) -> str:
        return f"View({self.name!r})"


class Replicas:
    """The replicas of a model that are not in use at the moment."""

    def __init__(self) -> None:
        self._free: list[RectifiedModel] = []
        self._lock = threading.RLock()

    def one_at_a_time(self) -> AbstractContextManager[Any]:
        """For the model's own calls, which may write to its modules, and for making a replica of them."""
        return nullcontext() if torch.compiler.is_compiling() else self._lock

    def run(self, model: RectifiedModel, task: TaskState, args: Any, kwargs: Any) -> Any:
        """One call for a task."""
        free = self._free
        try:
            replica = free.pop()  # one step, so no two threads get the same
        except IndexError:
            with self.one_at_a_time():
                replica = replica_of(model)
        replica.active.task = task
        try:
            return replica(*args, **kwargs)
        finally:
            replica.active.task = None
            if free is self._free:
                free.append(replica)

    def clear(self) -> None:
        """Make new ones from now on, because the model has changed."""
        self._free = []

    def __deepcopy__(self, memo: Any) -> Replicas:
        return Replicas()

    def __reduce__(self) -> tuple[type[Replicas], tuple[()]]:
        return Replicas, ()


@torch.inference_mode(False)
def replica_of(model: RectifiedModel) -> RectifiedModel:
    """A model with modules of its own and the same tensors, in evaluation mode."""
    active = dataclasses.replace(model.active, task=None, mixed=None, ready=None)
    parameters = list(model.network.parameters())
    shared: list[Any] = [model.tasks, model.update, model.stored, active.cache, *model.network.buffers()]
    shared += [t for layer in model.layers for t in layer.buffers.tensors()]
    memo: dict[int, Any] = {id(value): value for value in shared}
    if model.base_frozen:
        memo |= {id(p): p for p in parameters}
    else:  # being trained: the same memory, without gradients
        memo |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in parameters}
        active.cache = MergeCache(active.cache.limit)
    memo[id(model.active)] = active
    replica = copy.deepcopy(model, memo)
    replica.network.eval()
    replica.__dict__["training"] = False
    return replica

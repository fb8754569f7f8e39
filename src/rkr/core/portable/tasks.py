"""The tasks of a traced network: where its layers find their tensors, and which task each sample has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rkr.errors import UsageError


class Tasks:
    """What all layers of a traced network share.

    Args:
        states: The tensors of each task, which become constants of the graph; the task of each sample is an input.
            None: one task, whose tensors are inputs.

    Attributes:
        index: (B) Position in `states` of each sample's task, during a call. None: all samples have the same task.
        given: The tensors that a call brings along.
        read: Weights that something has read in place of calling their layer.
    """

    def __init__(self, states: Sequence[Mapping[str, Tensor]] | None) -> None:
        self.states = states
        self.index: Tensor | None = None
        self.given: Mapping[str, Tensor] = {}
        self.read: dict[str, None] = {}

    @property
    def count(self) -> int:
        """Number of tasks in the graph."""
        return 1 if self.states is None else len(self.states)

    def own(self, key: str) -> list[Tensor]:
        """A tensor that each task has."""
        return [state[key] for state in (self.states or [self.given])]

    def stacked(self, own: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
        """The tensors of all tasks, (T, ...); those that are inputs belong to one task and stay as they are."""
        if self.states is None:
            return {name: tensor for name, (tensor,) in own.items()}
        return {name: torch.stack(tensors) for name, tensors in own.items()}

    def pick(self, path: str, table: Tensor, like: Tensor, at: int) -> Tensor:
        """The entry of each sample's task, in a shape that broadcasts.

        Args:
            path: The layer, for messages.
            table: (T, *values), or the values if they are inputs.
            like: The tensor that the result is combined with.
            at: The first dimension of `like`, from the end, in which the values lie.
        """
        if self.index is None:
            trailing = [1] * (-at - table.dim())
            return table.reshape(*table.shape, *trailing) if trailing else table
        values = table.shape[1:]
        trailing = [1] * (-at - len(values))
        leading = [1] * (like.dim() + at)
        dim, index = self.place(path, like, len(leading))
        leading[dim] = -1
        return table.index_select(0, index).reshape(*leading, *values, *trailing)

    def place(self, path: str, x: Tensor, leading: int) -> tuple[int, Tensor]:
        """Which of the first dimensions of a layer's values is the batch, and the task of each of its entries.

        Dimension 0 may hold several entries for each sample one after the other, such as windows of an image, or a
        single one for all.
        """
        index = self.index
        assert index is not None
        batch = index.shape[0]
        for dim in range(leading):
            if _same(x.shape[dim], batch):
                return dim, index
        if leading:
            entries = _quotient(x.shape[0], batch)
            if entries is not None:
                return 0, index.repeat_interleave(entries)
            if isinstance(x.shape[0], int) and x.shape[0] == 1:
                return 0, index
        raise UsageError(
            f"layer {path!r} has no dimension of its own for the batch: {tuple(x.shape)}. A batch with a task for each "
            'sample cannot go through it; export one task, style="merged", or with its tensors as inputs, '
            'style="adapter"'
        )


def _same(size: Any, batch: Any) -> bool:
    """Whether two sizes are equal for every batch, if they are traced."""
    if isinstance(size, int) or isinstance(batch, int):
        return isinstance(size, int) and isinstance(batch, int) and size == batch
    return _always(size == batch)


def _quotient(size: Any, batch: Any) -> int | None:
    """How many entries each sample has, if that is the same for every batch."""
    if isinstance(size, int) or isinstance(batch, int):
        whole = isinstance(size, int) and isinstance(batch, int) and batch and size % batch == 0
        return size // batch if whole else None
    return int(size // batch) if (size // batch).node.expr.is_number and _always(size % batch == 0) else None


def _always(condition: Any) -> bool:
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(condition))

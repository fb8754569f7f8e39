"""What a method must keep, and what it computes: the size of runs, for learners, result files and reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

RULE = (
    "Capacity is what must be kept, in percent of the plain network: to use all tasks learned so far, and in a second "
    "count to go on learning as well; what equals something kept bit for bit, or can be computed from it, counts once, "
    "and the state of the optimiser does not count."
)


@dataclass(frozen=True)
class Capacity:
    """What must be kept to use all tasks learned so far, and to go on learning: see `RULE`, the same for all methods.

    Learned numbers count one each, stored samples one for 4 bytes. Heads (and what takes their place) are part of the
    plain network's 100 %, as the paper counts; running statistics, and notes such as which unit belongs to which task,
    count in bytes only.

    Attributes:
        parameters: Numbers that are kept to use all tasks.
        network: Parameters of the plain network: 100 %.
        bytes: Memory of these, with heads and statistics.
        multiply_adds: For one sample of the last task; None if unknown.
        further: Numbers that are kept in addition to go on learning: anchors, importances, samples; None if unknown.
        further_bytes: Their memory.
    """

    parameters: int
    network: int
    bytes: int
    multiply_adds: int | None
    further: int | None = 0
    further_bytes: int | None = 0

    @property
    def percent(self) -> float:
        """What is kept to use all tasks, in percent of the plain network: the paper's "capacity"."""
        return self._percent(self.parameters)

    @property
    def percent_to_learn(self) -> float | None:
        """What is kept to use all tasks and to go on learning, in percent of the plain network."""
        return None if self.further is None else self._percent(self.parameters + self.further)

    @property
    def bytes_to_learn(self) -> int | None:
        """Memory of what is kept to use all tasks and to go on learning."""
        return None if self.further_bytes is None else self.bytes + self.further_bytes

    def _percent(self, parameters: int) -> float:
        return 100 * parameters / max(self.network, 1)

    def keeping(self, tensors: Iterable[Tensor] = (), sample_bytes: int = 0) -> Capacity:
        """The same, with what is kept in addition to go on learning: tensors and stored samples."""
        kept = list(tensors)
        numbers = sum(t.numel() for t in kept) + sample_bytes // 4
        size = sum(t.nbytes for t in kept) + sample_bytes
        return replace(self, further=(self.further or 0) + numbers, further_bytes=(self.further_bytes or 0) + size)

    def to_json(self) -> dict[str, Any]:
        """As in result files, which have percentages in place of the network's size."""
        cost: dict[str, Any] = {"parameters": self.parameters, "percent": self.percent}
        cost |= {"bytes": self.bytes, "multiply_adds": self.multiply_adds}
        if self.further is not None:
            numbers = {"parameters": self.parameters + self.further, "percent": self.percent_to_learn}
            cost["learning"] = {**numbers, "bytes": self.bytes_to_learn}
        return cost

    @classmethod
    def from_json(cls, parameters: int, percent: float, bytes: int, multiply_adds: int | None) -> Capacity:
        """From `to_json` of a record without the cost of further learning. Rounding recovers the network's size."""
        return cls(parameters, round(100 * parameters / percent), bytes, multiply_adds, None, None)

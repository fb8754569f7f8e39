"""What a method must keep, and what it computes: the size of runs, for learners, result files and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What must be kept to use every task learned so far.

    Attributes:
        parameters: By the paper's count: heads are part of the plain network's 100 %, statistics are not counted.
        network: Parameters of the plain network: 100 %.
        bytes: Memory of everything, including heads, statistics and stored samples.
        multiply_adds: For one sample of the last task; None if unknown.
    """

    parameters: int
    network: int
    bytes: int
    multiply_adds: int | None

    @property
    def percent(self) -> float:
        """The paper's "capacity": parameters in percent of the plain network."""
        return 100 * self.parameters / max(self.network, 1)

    def to_json(self) -> dict[str, int | float | None]:
        """As in result files, which have the percentage in place of the network's size."""
        cost: dict[str, int | float | None] = {"parameters": self.parameters, "percent": self.percent}
        return {**cost, "bytes": self.bytes, "multiply_adds": self.multiply_adds}

    @classmethod
    def from_json(cls, parameters: int, percent: float, bytes: int, multiply_adds: int | None) -> Capacity:
        """From `to_json`. The network's size is an integer, so rounding recovers it exactly."""
        return cls(parameters, round(100 * parameters / percent), bytes, multiply_adds)

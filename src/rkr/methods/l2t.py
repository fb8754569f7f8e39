"""L2-Transfer (a baseline of APD; Yoon et al., ICLR 2020): stay near the previous task's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from rkr.methods.learner import MakeNetwork, ReadSamples
from rkr.methods.shared.anchored import Anchored
from rkr.registry import register


@register.method("l2t", "L2-Transfer: a penalty on leaving old weights", citation="Yoon et al., ICLR 2020")
class L2Transfer(Anchored):
    """All weights are equally important and stay near their values after the previous task, so drift adds up."""

    checked = "The description in APD's paper; there is no code of it."
    differs = (
        "The weight of the penalty is not published.",
        "Every task has its own batch normalisation.",
    )

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (1e-2, 0.1, 1.0, 10.0, 100.0)}

    def __init__(self, make: MakeNetwork, head: str, *, strength: float = 0.1, bn: str = "per_task") -> None:
        super().__init__(make, head, strength=strength, bn=bn)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.anchor.put(self.shared(), 1.0)

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        return (), 0  # the importances are all 1

"""One network under a quadratic penalty, the base of L2T, EWC, SI and P&C."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork
from rkr.methods.shared.anchor import Anchor
from rkr.methods.shared.one_network import OneNetwork


def require_strength(strength: float) -> None:
    """Check the weight of a penalty. Beyond 1e30, float32 overflows to infinity, which times 0 is NaN."""
    if not 0 <= strength <= 1e30:
        raise UsageError(f"strength must be from 0 to 1e30, not {strength!r}")


class Anchored(OneNetwork):
    """One network, with a quadratic penalty on its distance from where earlier tasks left it.

    Every task has its own head and, by default, its own batch normalisation. Tests give the task, so this is fair.
    Shared statistics would change with every new task, whatever the penalty.

    Args:
        make: Builds the network.
        head: Its classification layer.
        strength: λ: what is minimised is cross-entropy + λ/2 Σ_i I_i (θ_i - θ*_i)², see `Anchor.pull`.
        bn: See `OneNetwork`.
    """

    def __init__(self, make: MakeNetwork, head: str, *, strength: float, bn: str = "per_task") -> None:
        super().__init__(make, head, bn=bn)
        require_strength(strength)
        self.strength = strength
        self.anchor = Anchor(self.shared())

    def penalty(self) -> Tensor:
        """λ/2 Σ_i I_i (θ_i - θ*_i)² over what all tasks share: what `before_step` lowers."""
        return 0.5 * self.strength * self.anchor.penalty(self.shared())

    def before_step(self, optimizer: Optimizer) -> None:
        """The penalty, by its gradient alone: `loss` is the cross-entropy."""
        if self.task.number:
            self.anchor.pull(self.shared(), self.strength, optimizer)

    def kept_to_learn(self) -> tuple[Sequence[Tensor], int]:
        """The importances. By default the anchor is the network at the end of a task."""
        return list(self.anchor.importance), 0

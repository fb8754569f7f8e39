"""L1 and L2: fine-tuning with a penalty on how far the encoder moves from where the previous task left it."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Outcome, SeenTask
from rkr.methods.ranges import Log
from rkr.methods.shared.anchor import departure, gradient
from rkr.methods.zeroshot.learner import ZeroShot
from rkr.registry import register


class Guarded(ZeroShot):
    """Fine-tuning that compares with the previous task's encoder, copied when a task begins."""

    previous: nn.Module | None

    def __init__(self, make: MakeNetwork, head: str = "", *, classifier: dict[str, object] | None = None) -> None:
        super().__init__(make, head, classifier=classifier)
        self.register_module("previous", None)

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.previous = copy.deepcopy(self.vae.encoder).requires_grad_(False)
        super().begin(task)


@register.method("l1", "fine-tuning with an L1 penalty on changes of the image encoder", preset={"norm": 1})
@register.method("l2", "fine-tuning with an L2 penalty on changes of the image encoder", preset={"norm": 2})
class Penalty(Guarded):
    """Adds `strength` times the L1 norm, or the squared L2 norm, of the encoder's change.

    Args:
        make: Builds the network.
        head: Not used.
        norm: 1 or 2.
        strength: Weight of the penalty beside CADA-VAE's loss, which is a sum over the batch. Neither the paper nor
            LZSL prints it.
        classifier: Fields of `ClassifierOptions`.
    """

    checked = "The description in LZSL's paper; there is no code of these baselines."
    differs = ("The weight of the penalty is not published.",)

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": Log((1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0))}

    def __init__(
        self,
        make: MakeNetwork,
        head: str = "",
        *,
        norm: int = 2,
        strength: float = 1.0,
        classifier: dict[str, object] | None = None,
    ) -> None:
        super().__init__(make, head, classifier=classifier)
        if norm not in (1, 2):
            raise UsageError(f"norm must be 1 or 2, not {norm!r}")
        if strength < 0:
            raise UsageError(f"strength must be at least 0, not {strength!r}")
        self.norm, self.strength = norm, strength
        self._rows = 0  # of the batch at hand

    def penalty(self) -> Tensor:
        """λ Σ_i |θ_i - θ*_i|^p: what `before_step` lowers, beside a loss that is a sum over the batch."""
        before = self.vae.encoder if self.previous is None else self.previous
        return self.strength * departure(self.vae.encoder.parameters(), before.parameters(), norm=self.norm)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self._rows = self.whole_batch or len(x)
        return super().loss(x, y)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """The penalty, by its gradient alone, divided by the batch as the loss is: faster than through autograd."""
        if self.previous is None:
            return
        pull = self.norm * self.strength / self._rows
        for p, value in zip(self.vae.encoder.parameters(), self.previous.parameters(), strict=True):
            moved = p - value
            gradient(p).add_(moved.sign_() if self.norm == 1 else moved, alpha=pull)

"""L1 and L2: fine-tuning with a penalty on how far the encoder moves from where the previous task left it."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.learners.learner import MakeNetwork, SeenTask
from rkr.learners.shared.anchor import departure
from rkr.learners.zeroshot.learner import Gaussian, ZeroShot


class Guarded(ZeroShot):
    """Fine-tuning that keeps the previous task's encoder to compare with: 200 % of memory."""

    previous: nn.Module | None

    def __init__(self, make: MakeNetwork, head: str = "", *, classifier: dict[str, object] | None = None) -> None:
        super().__init__(make, head, classifier=classifier)
        self.register_module("previous", None)

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.previous = copy.deepcopy(self.vae.encoder).requires_grad_(False)
        super().begin(task)

    @property
    def encoders(self) -> float:
        return 1 if self.previous is None else 2


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

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"strength": (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)}

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

    def extra_loss(self, x: Tensor, visual: Gaussian) -> Tensor | None:
        if self.previous is None:
            return None
        moved = departure(self.vae.encoder.parameters(), self.previous.parameters(), norm=self.norm)
        processes = dist.get_world_size() if dist.is_initialized() else 1  # each adds its share to the gradient
        return self.strength / processes * moved

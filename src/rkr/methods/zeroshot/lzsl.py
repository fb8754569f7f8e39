"""LZSL (Wei, Deng, Yang, IJCAI 2020): selective retraining and distillation, as its published code does them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Phase, ReadSamples
from rkr.methods.ranges import Log
from rkr.methods.shared.anchor import gradient
from rkr.methods.zeroshot.penalty import Guarded
from rkr.networks.interfaces import Gaussian
from rkr.registry import register

USED = 1e-4  # an input unit is in use if one of its weights is larger; the code does not take absolute values


@register.method(
    "lzsl", "LZSL: selective retraining and distillation of the image encoder", citation="Wei et al., IJCAI 2020"
)
class Lzsl(Guarded):
    """Two passes over every task but the first, in both of which the encoder imitates the previous task's.

    In the first pass the encoder is frozen but for its last layer, log-variance. In the second all of it is trained,
    except weights from input units that no later unit uses; a dense network has hardly any, so this pass is fine-tuning
    with distillation. Both passes share one optimiser, and the loss warms up in each.

    Args:
        make: Builds the network.
        head: Not used.
        distillation: Weight of the L1 distance to the previous encoder's mean and log-variance, summed over the batch.
        classifier: Fields of `ClassifierOptions`.
    """

    grid: ClassVar[dict[str, tuple[float, ...]]] = {"distillation": Log((0.1, 1.0, 3.0, 10.0, 30.0, 100.0))}

    checked = "The authors' code (Drkun/Lifelong-Zero-Shot-Learning)."

    def __init__(
        self,
        make: MakeNetwork,
        head: str = "",
        *,
        distillation: float = 1.0,
        classifier: dict[str, object] | None = None,
    ) -> None:
        super().__init__(make, head, classifier=classifier)
        if distillation < 0:
            raise UsageError(f"distillation must be at least 0, not {distillation!r}")
        self.distillation = distillation
        self._masked: list[tuple[Tensor, Tensor]] | None = []  # weights with unused inputs; None: to be looked up
        for i, weight in enumerate(self._weights()):
            self.register_buffer(f"mask_{i}", torch.ones(weight.shape[1], device=weight.device))  # of input units

    def phases(self) -> Sequence[Phase]:
        if self.task.number == 0:
            return (Phase(),)
        return (Phase("last layer"), Phase("selective retraining", same_optimizer=True))

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        encoder = self.vae.encoder
        self._masked = []
        if phase.name == "last layer":
            encoder.requires_grad_(False)
            for p in list(encoder.parameters())[-2:]:
                p.requires_grad_(True)
        elif phase.name == "selective retraining":
            encoder.requires_grad_(True)
            for i, weight in enumerate(self._weights()):
                self._mask(i).copy_((weight > USED).any(0))
            self._masked = None  # a run that is resumed gets its masks after this

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Weights from unused inputs stay. Most layers have none of these, and nothing is done about them."""
        if self._masked is None:
            masks = [(weight, self._mask(i)) for i, weight in enumerate(self._weights())]
            self._masked = [(weight, mask) for weight, mask in masks if not mask.all()]
        for weight, mask in self._masked:
            gradient(weight).mul_(mask)

    def extra_loss(self, x: Tensor, visual: Gaussian) -> Tensor | None:
        if self.previous is None or not self.distillation:
            return None
        with torch.no_grad():
            wanted = self.previous(x)
        far = [F.l1_loss(now, then, reduction="sum") for now, then in zip(visual, wanted, strict=True)]
        return self.distillation * torch.stack(far).sum()

    def notes(self) -> dict[str, Any]:
        if self.previous is None:
            return super().notes()
        unused = [int((self._mask(i) == 0).sum()) for i, _ in enumerate(self._weights())]
        return {**super().notes(), "unused_inputs": unused}

    def _weights(self) -> list[Tensor]:
        return [p for p in self.vae.encoder.parameters() if p.dim() == 2]

    def _mask(self, i: int) -> Tensor:
        return self.get_buffer(f"mask_{i}")

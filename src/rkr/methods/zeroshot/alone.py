"""The lower and upper reference points: a network per task that is discarded, or kept."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask
from rkr.methods.zeroshot.learner import ZeroShot
from rkr.networks.interfaces import Gaussian
from rkr.registry import register


@register.method("base", "a new network for every task, and only the last one is kept")
class Base(ZeroShot):
    """A new network for every task that replaces the last one: old tasks are tested with the wrong encoder."""

    checked = (
        "The paper's description of its baseline, and the authors' code of CADA-VAE (edgarschnfld/CADA-VAE-PyTorch)."
    )

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.network = self.make()
        super().begin(task)

    def carried_on(self) -> list[Tensor]:
        return []


@register.method("original", "one network for each task, all of which are kept")
class Original(Base):
    """A new network for every task, and all encoders are kept: the upper bound, at T times the memory."""

    checked = "The authors' code of CADA-VAE (edgarschnfld/CADA-VAE-PyTorch)."
    differs = ("Every dataset has the settings of the sequence, so that methods can be compared.",)

    isolating = True

    def __init__(self, make: MakeNetwork, head: str = "", *, classifier: dict[str, object] | None = None) -> None:
        super().__init__(make, head, classifier=classifier)
        self.earlier = nn.ModuleList()

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self.earlier.append(copy.deepcopy(self.vae.encoder).requires_grad_(False))
        super().begin(task)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self.network.requires_grad_(False)  # now: torch may choose other kernels by it, with other last bits
        super().end(train, validation)

    def encode(self, x: Tensor, number: int) -> Gaussian:
        encoder = self.vae.encoder if number == self.task.number else self.earlier[number]
        return encoder(x)

    @property
    def kept_encoders(self) -> int:
        return len(self.seen)

"""End-to-end incremental learning (EEIL; Castro, Marín-Jiménez, Guil, Schmid, Alahari, ECCV 2018)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, Outcome, Phase, ReadSamples, SeenTask
from rkr.methods.shared.distillation import distilled
from rkr.methods.shared.memory import fill_rows
from rkr.methods.shared.rehearsing import Rehearsing
from rkr.registry import register


@register.method(
    "eeil", "EEIL: exemplars, distillation, a balanced phase; keeps as iCaRL", citation="Castro et al., ECCV 2018"
)
class Eeil(Rehearsing):
    """Cross-entropy over all classes, distillation of every old head, then a balanced phase at a tenth of the rate.

    The first phase takes 4/7 of the epochs, on the new task and all exemplars. The second takes the rest. It balances
    the classes: herding chooses as many samples of each new class as there are exemplars of an old one. It also distils
    the new head as the first phase left it. Then the memory takes exemplars of the new classes (section 3.3). The
    authors' gradient noise and twelvefold augmentation are not used; the recipe sets the augmentation.

    Args:
        make: Builds the network.
        head: Its classification layer.
        memory: Number of exemplars of all classes together.
        temperature: Temperature of the distillation.
        bn: Batch normalisation: "shared" by all tasks, or "frozen" after the first.
    """

    checked = "The authors' code (fmcp/EndToEndIncrementalLearning)."
    differs = (
        "No noise is added to gradients, and images are augmented as the recipe says (there: twelve fixed variants "
        "of each).",
    )

    newest: nn.Module | None

    def __init__(
        self, make: MakeNetwork, head: str, *, memory: int = 2000, temperature: float = 2.0, bn: str = "shared"
    ) -> None:
        super().__init__(make, head, memory=memory, bn=bn)
        if temperature <= 0:
            raise UsageError(f"temperature must be above 0, not {temperature!r}")
        self.temperature = temperature
        self._balanced = False
        self.register_module("newest", None)

    def phases(self) -> Sequence[Phase]:
        if self.task.number == 0:
            return (Phase(),)
        return (Phase("unbalanced", share=4 / 7), Phase("balanced", share=3 / 7, lr_factor=0.1))

    def begin(self, task: SeenTask) -> None:
        old = self.memory.room(sum(self.memory.classes))
        super().begin(task)
        self._balanced = False
        self.register_buffer("balanced", torch.full((task.classes, old), -1))  # numbers of samples of the new classes
        if task.number:  # takes its values when the balanced phase begins
            self.select(None)
            self.newest = copy.deepcopy(self.network).requires_grad_(False)

    def train(self, mode: bool = True) -> Eeil:
        """Keep copies of networks in evaluation mode."""
        super().train(mode)
        if self.newest is not None:
            self.newest.eval()
        return self

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        if phase.name != "balanced":
            return
        assert self.newest is not None
        self.eval()
        fill_rows(self.get_buffer("balanced"), self.herded(train, self.memory.quota))
        self.newest.load_state_dict(self.network.state_dict())
        self._balanced = True

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        wanted = super().rehearse(images)
        if not self._balanced:
            return wanted
        rows = self.get_buffer("balanced").flatten()
        return {**wanted, self.task.number: rows[rows >= 0]}

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        correct = (logits.detach().argmax(1) == y).sum()
        if self.teacher is None:
            return Outcome(loss, correct)
        wanted = self.wanted(x)
        old = [distilled(logits[:, t.labels], wanted[:, t.labels], self.temperature) for t in self.seen[:-1]]
        if self._balanced:
            assert self.newest is not None
            with torch.no_grad():
                newest = self.newest(x)[:, self.task.labels]
            old.append(distilled(logits[:, self.task.labels], newest, self.temperature))
        return Outcome(loss + torch.stack(old).sum(), correct)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self._balanced = False  # exemplars are chosen from all samples
        self.fill_memory(train)

"""A frozen network with a new head for each task: shows how far the features of the first task suffice."""

from __future__ import annotations

from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask
from rkr.methods.shared.one_network import OneNetwork
from rkr.registry import register


@register.method("head-only", "the network of the first task, frozen, with a new head for each task")
class HeadOnly(OneNetwork):
    """Train the network on the first task, then only heads."""

    checked = "A reference point by its definition."

    isolating = True

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__(make, head)
        self._frozen = False

    def begin(self, task: SeenTask) -> None:
        if task.number:
            self._freeze()
        super().begin(task)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        self._freeze()

    def train(self, mode: bool = True) -> HeadOnly:
        """Freeze shared statistics once the network is frozen."""
        super().train(mode and not self._frozen)
        return self

    def _freeze(self) -> None:
        self._frozen = True
        self.requires_grad_(False)
        self.train(False)

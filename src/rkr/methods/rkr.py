"""RKR, RKR-Lite and their ablations (paper, sections "Rectification-based Knowledge Retention" and "Ablations")."""

from __future__ import annotations

from typing import Any

from rkr.core import Options, load
from rkr.methods.learner import MakeNetwork
from rkr.methods.shared.changed import Changed


class Rkr(Changed):
    """A frozen base, and for each task a low-rank rectification of the weights, scaling factors and a head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Where a new task's factors start: at the "previous" task's, or "random".
        options: Fields of `rkr.Options`, such as `rank` or `bn`.
    """

    isolating = True

    def __init__(self, make: MakeNetwork, head: str, *, init: str = "previous", **options: Any) -> None:
        super().__init__(make, head, options=Options.from_json(options), init=init)

    def export(self, folder: Any) -> None:
        """A model folder for `rkr.load`, one file a task."""
        self.model.save(folder)

    def restore(self, folder: Any) -> None:
        self.model = load(folder, self.make())

"""RKR, RKR-Lite and their ablations (paper, sections "Rectification-based Knowledge Retention" and "Ablations")."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rkr.core.model import rectify
from rkr.core.options import Options
from rkr.errors import UsageError
from rkr.learners.learner import Capacity, Learner, MakeNetwork, Outcome, SeenTask, plain_size


class Rkr(Learner):
    """A frozen base, and for each task a low-rank rectification of the weights, scaling factors and a head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Where a new task's factors start: at the "previous" task's, or "random".
        options: Fields of `rkr.Options`, such as `rank` or `bn`.
    """

    isolating = True

    def __init__(self, make: MakeNetwork, head: str, *, init: str = "previous", **options: Any) -> None:
        super().__init__(make, head)
        if init not in ("previous", "random"):
            raise UsageError(f'init must be "previous" or "random", not {init!r}')
        network = make()
        self._multiply_adds = plain_size(network).multiply_adds
        self.model = rectify(network, head=head, options=Options.from_json(options))
        self.init = init

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.model.add_task(task.name, classes=task.class_names, init=self.init if task.number else "previous")

    def groups(self) -> list[dict[str, Any]]:
        return self.model.task_parameters(groups=True)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        return self.classified(self.model(x), y)

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.model.set_task(self.seen[number].name)
        return self.model(x)

    def capacity(self) -> Capacity:
        cost = self.model.cost()
        own = sum(task.parameters for task in cost.tasks)
        return Capacity(cost.network + own, cost.network, cost.total_bytes, self._multiply_adds)

    def export(self, folder: Any) -> None:
        """A model folder for `rkr.load`, one file a task."""
        self.model.save(folder)

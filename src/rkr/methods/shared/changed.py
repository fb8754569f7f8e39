"""The base of methods that give each task its own tensors at every layer of one network."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rkr.capacity import Capacity
from rkr.core import Adapter, LayerUpdate, Options, RectifiedModel
from rkr.errors import UsageError
from rkr.methods.learner import Learner, MakeNetwork, Outcome, SeenTask, plain_size

INITS = ("previous", "random")


class Changed(Learner):
    """A network with tasks (`RectifiedModel`) whose layers have an update, trained with cross-entropy alone.

    Args:
        make: Builds the network.
        head: Its classification layer.
        change: The update of each layer; None for RKR's.
        options: Which layers are updated, and how normalisation is handled.
        init: Where a new task's tensors start: at the "previous" task's, or "random".
    """

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        change: LayerUpdate | None = None,
        options: Options | None = None,
        init: str = "previous",
    ) -> None:
        super().__init__(make, head)
        if init not in INITS:
            raise UsageError(f'init must be "previous" or "random", not {init!r}')
        network = make()
        self._plain = plain_size(network)
        self.model = RectifiedModel(network, options or Options(), head, update=change)
        self.init = init

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.model.add_task(task.name, classes=task.class_names, init=self.init if task.number else "previous")

    def layers(self) -> list[Adapter]:
        """The layers that tasks change."""
        return self.model.weight_layers()

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
        macs = cost.multiply_adds
        computed = None if macs is None else macs.network + macs.change
        return Capacity(cost.network + own, cost.network, cost.total_bytes, computed)

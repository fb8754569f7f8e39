"""The specification of a run: everything that decides its results, apart from the data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rkr.data import Augment
from rkr.experiment.recipes.settings import Order, TrainingSettings
from rkr.methods import MakeNetwork
from rkr.registry import Method


@dataclass(frozen=True, eq=False)
class RunSpec:
    """Everything that decides a run's results. The order names its data, which are loaded when the run starts.

    Attributes:
        recipe: Name of the recipe, with the changes to it: "cifar100-lenet-20-epochs".
        method: Name of the method in the recipe.
        order: Order of the tasks.
        learner: What learns the tasks.
        options: Options of the learner.
        make: Builds the network.
        head: Name of the network's classification layer.
        training: How each task is trained, and the seed of the run.
        agnostic: When to test without the task's identity: after the "last" task, after "every" task, or "never".
        settings: All of this as JSON. Two runs with equal settings and data are the same run.
        about: More for `run.json`.
    """

    recipe: str
    method: str
    order: Order
    learner: Method
    options: dict[str, Any]
    make: MakeNetwork
    head: str
    training: TrainingSettings
    agnostic: str = "last"
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Seed of initial values, batches and augmentation."""
        return self.training.seed

    @property
    def augment(self) -> Augment | None:
        """Augmentation of training images."""
        chosen = self.training.augment.model_dump()
        return Augment(**chosen) if any(chosen.values()) else None

    @property
    def label(self) -> str:
        """Distinguishes the runs of a method: "A", or "A seed 1"."""
        return f"{self.order} seed {self.seed}" if self.seed else str(self.order)

    @property
    def name(self) -> str:
        """Distinguishes the runs of a plan: "rkr A"."""
        return f"{self.method} {self.label}"

    @property
    def title(self) -> str:
        """Distinguishes all runs: "cifar100-lenet rkr A"."""
        return f"{self.recipe} {self.name}"

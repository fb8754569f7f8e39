"""All that decides a run's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rkr.data import Augment, Stream
from rkr.methods import MakeNetwork, Method


class Schedule(Protocol):
    """How long and how fast to learn. The rate is `lr` times `gamma` for every milestone (an epoch) that has passed."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def milestones(self) -> Sequence[int]: ...
    @property
    def gamma(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def amsgrad(self) -> bool: ...
    @property
    def sampling(self) -> str: ...


@dataclass(frozen=True)
class Experiment:
    """All that decides a run's results.

    Attributes:
        label: What displays call it: "cifar100-lenet rkr A".
        stream: The tasks.
        make: Builds the network.
        head: Name of its classification layer.
        method: How the tasks are learned.
        options: Of the method.
        schedule: Of every task.
        augment: Of training images.
        seed: Of initial values, batches and augmentation.
        channels_last: The memory layout of the network.
        agnostic: When to test without telling the task: after the "last" task, after "every" one, or "never".
        settings: All of this as JSON: what tells one run from another.
        about: More for the record.
    """

    label: str
    stream: Stream
    make: MakeNetwork
    head: str
    method: Method
    options: dict[str, Any]
    schedule: Schedule
    augment: Augment | None = None
    seed: int = 0
    channels_last: bool = True
    agnostic: str = "last"
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

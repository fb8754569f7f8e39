"""Events of a run. Displays, JSON output and TensorBoard get nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """Base of all events. `run` names the run: "cifar100-lenet rkr A"."""

    run: str

    def to_json(self) -> dict[str, Any]:
        """The event as plain values, its kind under "event"; of candidates and copies only where there are some."""
        values = dataclasses.asdict(self)
        for name in ("round", "candidate", "same_as"):
            if values.get(name, ()) is None:
                del values[name]
        return {"event": _kind(type(self)), **values}


@dataclass(frozen=True)
class Started(Event):
    """A run begins or is resumed before epoch `epoch` (0, 1, ...) of task `number` (1, 2, ...).

    Epochs are counted through the phases of a task. If only the test of the task is left, it is the last epoch.
    """

    folder: str
    tasks: tuple[str, ...]
    epochs: int  # of the schedule; methods may give a task more or fewer
    number: int
    epoch: int
    resumed: bool
    epochs_done: int = 0  # of all tasks so far


@dataclass(frozen=True)
class Preparing(Event):
    """Preparation before training, such as reading pictures."""

    what: str
    count: int
    total: int


@dataclass(frozen=True)
class Progress(Event):
    """Within an epoch, at most a few times a second. Loss and accuracy are of the epoch's training images so far."""

    number: int
    task: str
    epoch: int  # 0, 1, ...
    epochs: int
    batch: int  # batches done
    batches: int
    loss: float
    accuracy: float | None  # a fraction; None where the loss is not a classifier's
    done: float  # share of the whole run, 0 to 1
    seconds_left: float | None  # of the whole run, by the speed so far
    round: tuple[int, int] | None = None  # which (1, 2, ...) of how many, if candidates are trained
    candidate: tuple[int, int] | None = None  # which of how many in the round


@dataclass(frozen=True)
class EpochEnd(Event):
    """An epoch of training is over."""

    number: int
    task: str
    epoch: int  # 0, 1, ...
    epochs: int
    loss: float
    accuracy: float | None
    lr: float
    seconds: float
    round: tuple[int, int] | None = None  # as in `Progress`; of the winner the epochs come once more, without these
    candidate: tuple[int, int] | None = None


@dataclass(frozen=True)
class CandidateEnd(Event):
    """A candidate of a task is trained and tested on held-out samples of the task."""

    number: int
    task: str
    round: tuple[int, int]  # which (1, 2, ...) of how many
    candidate: tuple[int, int]  # which of how many in the round
    accuracy: float | None  # on the held-out samples; None: its training diverged
    score: float | None  # by the method; the highest of all rounds wins
    seconds: float


@dataclass(frozen=True)
class TaskEnd(Event):
    """A task is learned, and all tasks so far have been tested. Accuracies are fractions, in the order of tasks."""

    number: int
    task: str
    tasks: int
    accuracy: tuple[float, ...]
    agnostic: tuple[float, ...] | None  # task-agnostic
    unchanged: bool | None  # earlier tasks' outputs are bit-identical; None: the method does not promise it
    seconds: float
    measure: str = "accuracy"  # what the accuracies are: H in zero-shot learning


@dataclass(frozen=True)
class Finished(Event):
    """The run is complete; `already` if it was so before, or another recipe's run, `same_as`, is the same."""

    folder: str
    seconds: float
    already: bool
    same_as: str | None = None


@dataclass(frozen=True)
class Stopped(Event):
    """The run was interrupted after saving its state; run the same command again to resume."""

    folder: str
    number: int
    epoch: int
    round: tuple[int, int] | None = None  # as in `Progress`; then the candidate is the first that is not trained yet
    candidate: tuple[int, int] | None = None


@dataclass(frozen=True)
class Failed(Event):
    """The run failed; its last saved state is intact."""

    folder: str
    reason: str


Watch = Callable[[Event], None]


def _kind(event: type[Event]) -> str:
    """ "task" for `TaskEnd`, as in results.jsonl; "started" for `Started`."""
    return event.__name__.removesuffix("End").lower()


KINDS: dict[str, type[Event]] = {
    _kind(kind): kind
    for kind in (Started, Preparing, Progress, EpochEnd, CandidateEnd, TaskEnd, Finished, Stopped, Failed)
}


def from_json(values: dict[str, Any]) -> Event:
    """An event from `Event.to_json`, as another process has written it."""
    fields: Any = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key != "event"}
    return KINDS[values["event"]](**fields)

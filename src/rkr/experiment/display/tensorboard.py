"""Curves for TensorBoard, in the folder of each run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rkr.errors import UsageError
from rkr.experiment.display.base import Display
from rkr.experiment.display.text import mean
from rkr.experiment.events import EpochEnd, Event, Failed, Finished, Started, Stopped, TaskEnd

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Display):
    """Writes event files to `<run folder>/tensorboard`. A step is an epoch of training, counted through all tasks.

    After every epoch `training/loss`, `training/accuracy`, `training/lr`; after every task `test_accuracy/task_01`, ...
    and `test_accuracy/mean`, and the task-agnostic accuracies under `test_accuracy_inferred`. When a run is resumed,
    points of epochs that are repeated are purged.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"curves for TensorBoard need the package tensorboard ({error}): pip install tensorboard"
            ) from error
        self._new = SummaryWriter
        self._runs: dict[str, tuple[SummaryWriter, int]] = {}  # by run: writer, epochs so far

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._end(event.run)
            done = event.epochs_done
            writer = self._new(str(Path(event.folder) / "tensorboard"), purge_step=done + 1, flush_secs=10)
            self._runs[event.run] = writer, done
        elif isinstance(event, Finished | Stopped | Failed):
            self._end(event.run)
        elif event.run in self._runs:
            writer, done = self._runs[event.run]
            if isinstance(event, EpochEnd) and event.candidate is None:  # the winner's come when it has won
                step = done + 1
                self._runs[event.run] = writer, step
                writer.add_scalar("training/loss", event.loss, step)
                if event.accuracy is not None:
                    writer.add_scalar("training/accuracy", event.accuracy, step)
                writer.add_scalar("training/lr", event.lr, step)
            elif isinstance(event, TaskEnd):
                _accuracies(writer, "test_accuracy", event.accuracy, done)
                _accuracies(writer, "test_accuracy_inferred", event.agnostic or (), done)
                writer.flush()

    def close(self) -> None:
        for run in list(self._runs):
            self._end(run)

    def _end(self, run: str) -> None:
        if run in self._runs:
            self._runs.pop(run)[0].close()


def _accuracies(writer: SummaryWriter, tag: str, values: tuple[float, ...], step: int) -> None:
    for i, value in enumerate(values, 1):
        writer.add_scalar(f"{tag}/task_{i:02}", value, step)
    if values:
        writer.add_scalar(f"{tag}/mean", mean(values), step)

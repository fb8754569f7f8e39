"""TensorBoard: the numbers that its own reader finds in the files."""

import sys
from pathlib import Path
from typing import Any

import pytest

import rkr
from rkr.experiment.display import TensorBoard
from rkr.experiment.events import EpochEnd, Finished, Started, Stopped, TaskEnd


@pytest.fixture
def curves() -> Any:
    pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        found.Reload()
        return {tag: [(x.step, x.value) for x in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


def test_a_whole_run(script: list[Any], curves: Any, tmp_path: Path) -> None:
    with TensorBoard() as watch:
        for event in script:
            watch(event)
    found = curves(tmp_path / "run")
    losses = found.pop("training/loss")
    assert losses[:3] == [(1, 0.5), (2, pytest.approx(1 / 3)), (3, 0.25)]
    assert losses[3][0] == 4
    assert losses[3][1] != losses[3][1]  # NaN
    assert found == {
        "training/accuracy": [(step, 0.625) for step in (1, 2, 3, 4)],
        "training/lr": [(step, pytest.approx(0.1 if step % 2 else 0.05)) for step in (1, 2, 3, 4)],
        "test_accuracy/task_01": [(2, 0.75), (4, 0.75)],
        "test_accuracy/task_02": [(4, 0.5)],
        "test_accuracy/mean": [(2, 0.75), (4, 0.625)],
        "test_accuracy_inferred/task_01": [(4, 0.25)],
        "test_accuracy_inferred/task_02": [(4, 0.5)],
        "test_accuracy_inferred/mean": [(4, 0.375)],
    }


def test_going_on_leaves_one_value_per_step(curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after 4 epochs with the state of 3: the fourth is written again, and only the second time counts."""
    from tensorboard.summary.writer import event_file_writer

    folder = str(tmp_path)
    times = iter(range(1_700_000_000, 1_800_000_000))  # names of files sort by their second
    monkeypatch.setattr(event_file_writer.time, "time", lambda: float(next(times)))

    def epoch(number: int, epoch: int, loss: float) -> EpochEnd:
        return EpochEnd("a", number, "t", epoch, 2, loss, None, 0.5, 1.0)

    def attempt(*events: Any) -> None:
        with TensorBoard() as watch:
            for event in events:
                watch(event)

    attempt(
        Started("a", folder, ("t", "u"), 2, 1, 0, False),
        *(epoch(1, 0, 1.0), epoch(1, 1, 2.0), TaskEnd("a", 1, "t", 2, (0.5,), None, None, 1.0)),
        *(epoch(2, 0, 3.0), epoch(2, 1, 4.0), Stopped("a", folder, 2, 1)),
    )
    attempt(
        Started("a", folder, ("t", "u"), 2, 2, 1, True, 3),
        *(epoch(2, 1, 40.0), TaskEnd("a", 2, "u", 2, (0.5, 1.0), None, True, 1.0), Finished("a", folder, 1.0, False)),
    )
    attempt(Finished("a", folder, 1.0, True))
    found = curves(tmp_path)
    assert found["training/loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert found["test_accuracy/mean"] == [(2, 0.5), (4, 0.75)]
    assert "training/accuracy" not in found
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2  # the third attempt wrote nothing
    attempt(Started("a", folder, ("t", "u"), 2, 1, 0, False), epoch(1, 0, 7.0))  # from the beginning
    assert curves(tmp_path)["training/loss"] == [(1, 7.0)]


def test_tasks_of_more_epochs_than_the_schedule_do_not_overlap(curves: Any, tmp_path: Path) -> None:
    """A method may train a task in several phases: 2 epochs, then 4, then 4 more."""
    with TensorBoard() as watch:
        watch(Started("a", str(tmp_path), ("x", "y", "z"), 2, 1, 0, False))
        for number, epochs in ((1, 2), (2, 4), (3, 4)):
            for epoch in range(epochs):
                watch(EpochEnd("a", number, "x", epoch, epochs, 10 * number + epoch, None, 0.1, 2.0))
            watch(TaskEnd("a", number, "x", 3, (0.5,) * number, None, None, 1.0))
    found = curves(tmp_path)
    assert found["training/loss"] == list(enumerate([10, 11, 20, 21, 22, 23, 30, 31, 32, 33], 1))
    assert [step for step, _ in found["test_accuracy/mean"]] == [2, 6, 10]


def test_candidates_have_no_curves_but_the_winner(curves: Any, tmp_path: Path) -> None:
    with TensorBoard() as watch:
        watch(Started("a", str(tmp_path), ("x",), 1, 1, 0, False))
        for place in (1, 2):
            watch(EpochEnd("a", 1, "x", 0, 1, 0.5 * place, None, 0.1, 2.0, (1, 1), (place, 2)))
        watch(EpochEnd("a", 1, "x", 0, 1, 0.5, None, 0.1, 0.0))
    assert curves(tmp_path)["training/loss"] == [(1, 0.5)]


def test_files_are_closed_on_an_error(script: list[Any], curves: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TensorBoard() as watch:  # noqa: PT012
        for event in script[:6]:
            watch(event)
        raise KeyboardInterrupt
    assert curves(tmp_path / "run")["training/loss"] == [(1, 0.5)]


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(rkr.errors.UsageError, match="pip install tensorboard"):
        TensorBoard()

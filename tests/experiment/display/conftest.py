"""Two scripted runs: one from the beginning to its end, with a NaN on the way, and one that fails at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rkr.experiment.events import EpochEnd, Event, Failed, Finished, Progress, Started, TaskEnd

RUN = "digits lenet A"


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def script(tmp_path: Path) -> list[Event]:
    """2 tasks of 2 epochs of 4 batches."""
    folder = str(tmp_path / "run")
    events: list[Event] = [Started(RUN, folder, ("0-4", "5-9"), 2, 1, 0, False)]
    for number, task in ((1, "0-4"), (2, "5-9")):
        for epoch in (0, 1):
            loss = float("nan") if (number, epoch) == (2, 1) else 1 / (2 * number + epoch)
            for batch in (1, 2, 3, 4):
                done = ((number - 1) * 8 + epoch * 4 + batch) / 16
                left = None if done < 0.1 else 160 * (1 - done)
                events.append(Progress(RUN, number, task, epoch, 2, batch, 4, loss, 0.5, done, left))
            events.append(EpochEnd(RUN, number, task, epoch, 2, loss, 0.625, 0.1 / (epoch + 1), 2.5))
        accuracy = (0.75,) if number == 1 else (0.75, 0.5)
        agnostic = None if number == 1 else (0.25, 0.5)
        events.append(TaskEnd(RUN, number, task, 2, accuracy, agnostic, number == 2 or None, 61.0))
    events += [Finished(RUN, folder, 3723.4, False), Failed("other", folder, "no\n  memory \x1b[31mleft")]
    return events


@pytest.fixture
def play(clock: Clock) -> Callable[[Callable[[Event], None], list[Event], float], None]:
    """Tell the events to a watch, so many seconds apart."""

    def tell(watch: Callable[[Event], None], events: list[Event], apart: float) -> None:
        for event in events:
            watch(event)
            clock.now += apart

    return tell

"""Lines without escape codes, for a log file or a pipe. Each says which run and which task it is about."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rkr.experiment.display import text
from rkr.experiment.display.base import Display
from rkr.experiment.events import (
    CandidateEnd,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Preparing,
    Progress,
    Started,
    Stopped,
    TaskEnd,
)


@dataclass
class _Run:
    """The parts of earlier events that later lines need."""

    since: float  # when the last line was written
    tasks: int = 0
    epochs: int = 0
    left: float | None = None


class Plain(Display):
    """A line per task and candidate, and one per epoch, at most every `every` seconds unless epochs take longer.

    Within an epoch there is a line only after `6 * every` seconds, and none near the end of the epoch.
    """

    def __init__(
        self, stream: TextIO | None = None, every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._stream = sys.stdout if stream is None else stream
        self._every, self._clock = every, clock
        self._runs: dict[str, _Run] = {}

    def show(self, event: Event) -> None:
        run = self._runs.setdefault(event.run, _Run(self._clock()))
        waited = self._clock() - run.since
        if isinstance(event, Started):
            run.tasks, run.epochs = len(event.tasks), event.epochs
            self._write(run, text.started(event))
        elif isinstance(event, Preparing):
            if waited >= self._every and event.count < event.total:
                self._write(run, text.one_line(f"{event.run}: {event.what} {event.count}/{event.total}"))
        elif isinstance(event, Progress):
            run.left = event.seconds_left
            # The last 15 % of an epoch this long take about `every`: its own line does not follow sooner.
            if waited >= 6 * self._every and event.batch < 0.85 * event.batches:
                self._write(run, self._training(event, run, f", batch {event.batch}/{event.batches}"))
        elif isinstance(event, EpochEnd):
            if waited >= self._every or event.seconds >= self._every:
                self._write(run, self._training(event, run, "", f", lr {event.lr:g}"))
        elif isinstance(event, CandidateEnd):
            self._write(run, text.candidate_end(event, run.tasks))
        elif isinstance(event, TaskEnd):
            proof = text.proof(event)
            self._write(run, text.task_end(event) + (f", {proof}" if proof else ""))
        elif isinstance(event, Finished | Stopped | Failed):
            self._write(run, text.ended(event))
            del self._runs[event.run]

    def _training(self, event: Progress | EpochEnd, run: _Run, where: str, more: str = "") -> str:
        accuracy = "" if event.accuracy is None else f", training accuracy {text.percent(event.accuracy)}"
        left = "" if run.left is None else f", {text.duration(run.left)} left"
        candidate = text.candidate(event)
        return text.one_line(
            f"{event.run}: task {text.of(event.number, run.tasks)} ({event.task}), {candidate and f'{candidate}, '}"
            f"epoch {event.epoch + 1}/{event.epochs}{where}: "
            f"loss {text.number(event.loss)}{accuracy}{more}{left}"
        )

    def _write(self, run: _Run, line: str) -> None:
        run.since = self._clock()
        print(text.encodable(line, self._stream.encoding), file=self._stream, flush=True)

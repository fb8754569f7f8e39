"""Candidates: variants of a task, of which the best is kept. Each is trained by the same loop, on a learner of its own.

A candidate is a file of the run folder. During training it holds the state to resume from, afterwards the result. What
it starts from is the state of its run, which is saved when a round begins, so any process can train it, with the same
result: the run itself, or others that it has started.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rkr.errors import FileError, RkrError
from rkr.experiment.evaluate import BATCH, held_out_accuracy
from rkr.experiment.events import Watch
from rkr.experiment.loop import CandidateKey, Diverged, Loop
from rkr.experiment.samples import derived, held_out
from rkr.experiment.state import load_state, save_state

LOCK_SECONDS = 60.0  # a process whose run was killed ends after the batch at hand


@dataclass(frozen=True)
class Trained:
    """The result of a candidate.

    Attributes:
        accuracy: On the held-out samples; None if training diverged.
        learner: The trained state; None if training diverged.
        lines: The lines of its epochs, as for `results.jsonl`.
        seconds: Training time.
        epoch_seconds: Time of each epoch, in the last session.
    """

    accuracy: float | None
    learner: dict[str, Any] | None
    lines: list[dict[str, Any]]
    seconds: float
    epoch_seconds: list[float]


@dataclass(frozen=True)
class Tried:
    """A candidate that was trained, and its score."""

    round: int
    index: int
    candidate: Any
    accuracy: float | None  # on the held-out samples; None: its training diverged
    score: float  # -inf: its training diverged
    seconds: float


def read_trained(path: Path) -> Trained | None:
    """The result of a candidate, or None if its training is not complete."""
    if not path.exists():
        return None
    found = load_state(path)
    return Trained(**found["trained"]) if "trained" in found else None


def best_of(tried: Sequence[Tried]) -> Tried | None:
    """The candidate with the highest score, the first in a tie; None if all of them diverged."""
    best = None
    for one in tried:
        if one.score > (float("-inf") if best is None else best.score):
            best = one
    return best


class Candidate(Loop):
    """Trains one candidate, from the beginning or from its last saved state."""

    def __init__(self, run: Loop, key: CandidateKey, watch: Watch) -> None:
        super().__init__(run.spec, run.stream, run.folder, run.fabric, watch, run.execution)
        self._key, self._asked = key, run._asked  # type: ignore[method-assign]
        self._words = ("candidate", key.round, key.place)
        self._path = run.folder.candidates / key.file
        self._lines: list[dict[str, Any]] = []

    def train(self) -> None:
        """Train and test it, unless that is done, and write its file."""
        with self._alone():
            there = load_state(self._path) if self._path.exists() else None
            if there is None or "trained" not in there:
                self._train(there)
            self.fabric.barrier()

    def _train(self, state: dict[str, Any] | None) -> None:
        key, run = self._key, self.folder.state()
        proposed, rounds = run["round"]["candidates"], run["round"]["rounds"]
        self._mark = {"round": (key.round + 1, rounds), "candidate": (key.place + 1, len(proposed))}
        self._at.number = key.number
        self._build(run["begun"])
        self._learner.load_state_dict(run["learner"])
        training = self.stream.tasks[key.number].training
        seed = derived(self.spec.seed, "held out", key.number)  # the same for all candidates of the task
        samples, self._kept_back = held_out(training, self._learner.holds_out, seed)
        self._adopt(key, proposed[key.place])
        if state is not None:
            self._restore(state)
            self._lines = state["lines"]
        self._began = self._last_save = time.monotonic()
        try:
            self._learn(state)
        except Diverged:
            self._task_seconds += time.monotonic() - self._began
            self._keep({"accuracy": None, "learner": None})
            return
        accuracy = held_out_accuracy(self._learner, self._reader()(samples, batch=BATCH), key.number, self.fabric)
        self._keep({"accuracy": accuracy, "learner": self._learner.state_dict()})

    def _keep(self, found: dict[str, Any]) -> None:
        more = {"lines": self._lines, "seconds": self._task_seconds, "epoch_seconds": self._epoch_seconds}
        if self.fabric.is_global_zero:
            save_state(self._path, {"trained": {**found, **more}})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the candidate: a process whose run was killed may still train it for a batch."""
        if not self.fabric.is_global_zero:
            self.fabric.barrier()
            yield
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self._path.with_suffix(".lock"), timeout=LOCK_SECONDS)
            lock.acquire()
        except Timeout:
            raise RkrError(f"{self._path}: another process is training this: wait for it, or stop it first") from None
        except OSError as error:
            raise FileError(f"{self._path}: cannot be locked: {error.strerror or error}") from error
        try:
            self.fabric.barrier()
            yield
        finally:
            lock.release()

    # -- the loop's --------------------------------------------------------------------------------------

    def _save(self, task_seconds: float) -> None:
        state = self._state(task_seconds)
        if self.fabric.is_global_zero:
            save_state(self._path, {**state, "lines": self._lines})
        self.fabric.barrier()
        self._last_save = time.monotonic()

    def _record(self, line: dict[str, Any]) -> None:
        self._lines.append(line)

    def _done(self, of_task: float = 0.0) -> float:
        return of_task

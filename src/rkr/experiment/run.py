"""A run: every task of a stream is learned, tested, recorded and saved, and resumed after any interruption."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rkr.data import Stream
from rkr.errors import RkrError
from rkr.experiment.candidates import Candidate, Tried, best_of, read_trained
from rkr.experiment.evaluate import Evaluator, Row
from rkr.experiment.events import (
    CandidateEnd,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Progress,
    Started,
    Stopped,
    TaskEnd,
    Watch,
)
from rkr.experiment.execution import DEFAULT, Diverged, Execution, Interrupted
from rkr.experiment.folder import RunFolder
from rkr.experiment.jobs import Helpers
from rkr.experiment.loop import CandidateKey, Loop, be_deterministic
from rkr.experiment.machine import environment
from rkr.experiment.processes import gather, keep_freed_memory
from rkr.experiment.signals import signals
from rkr.experiment.spec import RunSpec

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["Run"]


class Run(Loop):
    """Executes a `RunSpec` in a folder, from the beginning or from the last saved state.

    Args:
        spec: Everything that decides the results.
        stream: The tasks.
        folder: Where the run's files are.
        fabric: Device, precision and processes.
        watch: Called with every event.
        execution: Settings that do not change results.
        helpers: Trains candidates elsewhere.
        similar: Folders of other runs; a finished one with the same settings is copied.
        saved: Called when the files of the folder belong together, so that the run could go on from them.
    """

    def __init__(
        self,
        spec: RunSpec,
        stream: Stream,
        folder: Path,
        fabric: Fabric,
        watch: Watch = lambda event: None,
        execution: Execution = DEFAULT,
        helpers: Helpers | None = None,
        similar: Sequence[Path] = (),
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(spec, stream, RunFolder(folder, saved), fabric, watch, execution)
        self._evaluator = Evaluator(stream, fabric, execution.threads)
        self._helpers = helpers if fabric.world_size == 1 else None  # several processes train each candidate together
        self._similar = similar
        self._stop = self._repeatable = False

    def execute(self) -> bool:
        """Run to the end. False if it was interrupted and can be resumed."""
        label, path = self.spec.title, str(self.folder.path)
        try:
            with self._held(), signals(self._take_note):
                return self._execute()
        except Interrupted:
            self._watch(Stopped(label, path, self._at.number + 1, self._epoch_at_hand(), **self._mark))
            return False
        except RkrError as error:
            self._watch(Failed(label, path, str(error)))
            raise

    def train_candidate(self, key: CandidateKey) -> None:
        """Train a candidate for this run, which another process executes."""
        be_deterministic()
        keep_freed_memory()
        with signals(self._take_note):
            self._candidate(key, self._watch).train()

    @property
    def stop_wanted(self) -> bool:
        """True if a stop was requested, even at the end of the run."""
        return self._stop

    def _take_note(self) -> None:
        self._stop = True
        self._leave_if_repeatable()

    @contextmanager
    def _repeated_if_stopped(self) -> Iterator[None]:
        """A block that can be interrupted at once: it only changes memory, and is repeated from the last saved state.

        Several processes must stop at the same place, so they finish it.
        """
        self._repeatable = self.fabric.world_size == 1
        try:
            self._leave_if_repeatable()
            yield
        finally:
            self._repeatable = False

    def _leave_if_repeatable(self) -> None:
        if self._stop and self._repeatable:
            self._repeatable = False
            raise Interrupted

    def _epoch_at_hand(self) -> int:
        """The current epoch, counted through the phases of the task; the last one while the task is tested."""
        if len(self._learner.seen) == self._at.number:  # the task has not begun
            return 0
        epoch, epochs = self._counted()
        return max(0, min(epoch, epochs - 1))

    # -- task by task -------------------------------------------------------------------------------------

    def _execute(self) -> bool:
        spec, tasks = self.spec, self.stream.tasks
        copied = None
        if self.fabric.is_global_zero:
            described = self.stream.describe()
            self.folder.begin(spec.settings, described["sha256"], lambda: self._about(described))
            copied = self.folder.take_over(self._similar)
        self.fabric.barrier()
        if self.folder.finished:
            if self.fabric.is_global_zero:
                self.folder.drop_state()
                self.folder.drop_candidates()
            self._watch(Finished(spec.title, str(self.folder.path), 0.0, True, copied))
            return True
        be_deterministic()
        keep_freed_memory()
        state = self._resume()
        self._began = self._last_save = time.monotonic()
        self._done_at_start = self._done()
        names = tuple(task.name for task in tasks)
        at = self._at
        self._watch(
            Started(
                spec.title,
                str(self.folder.path),
                names,
                spec.training.epochs,
                at.number + 1,
                self._epoch_at_hand(),
                state is not None,
                sum(line["event"] == "epoch" for line in self.folder.lines()),
            )
        )
        while at.number < len(tasks):
            if len(self._learner.seen) == at.number:
                self._begin(at.number)
            self._seed("rounds", at.number)
            rounds = self._learner.rounds()
            if rounds:
                self._choose(rounds, None if state is None else state.get("round"))
            else:
                self._learn(state)
            state = None
            self._finish_task()
        self._watch(Finished(spec.title, str(self.folder.path), time.monotonic() - self._began, False))
        return True

    def _about(self, stream: dict[str, Any]) -> dict[str, Any]:
        """The content of `run.json` besides the settings."""
        spec = self.spec
        names = {"recipe": spec.recipe, "method": spec.method, "order": str(spec.order), "seed": spec.seed}
        return {**names, "stream": stream, **spec.about, **environment()}

    def _finish_task(self) -> None:
        """Test, record, export, save."""
        spec, learner, at, began = self.spec, self._learner, self._at, time.monotonic()
        task, tasks = learner.task, len(self.stream.tasks)
        learner.eval()
        self._seed("end", at.number)  # the same in every process
        held_out = self.stream.tasks[at.number].training.validation
        validation = None
        if held_out is not None:
            rows = torch.arange(len(held_out))
            validation = self._in_order(held_out.take(rows, held_out.y + task.start))
        last = at.number + 1 == tasks
        agnostic = None
        with self._repeated_if_stopped():
            learner.end(self._in_order(), validation)
            row = self._evaluator.row(learner, at.number + 1)
            if spec.agnostic == "every" or (spec.agnostic == "last" and last):
                agnostic = self._evaluator.agnostic(learner, at.number + 1)
        unchanged = self._unchanged(row)
        line = {"event": "task", "number": at.number + 1, "task": task.name, "classes": task.classes}
        line |= {**row.measures, "agnostic": agnostic, "tested": row.tested}
        line |= {"proof": row.proof, "unchanged": unchanged, "cost": learner.capacity().to_json()}
        notes = learner.notes()
        self._append(self.folder.results, {**line, "notes": notes} if notes else line)
        tested = time.monotonic() - began
        times = {"number": at.number + 1, "task": task.name, "train_seconds": round(self._task_seconds, 3)}
        epoch_seconds = round(statistics.median(self._epoch_seconds), 3) if self._epoch_seconds else None
        self._append(self.folder.times, {**times, "test_seconds": round(tested, 3), "epoch_seconds": epoch_seconds})
        if self.fabric.is_global_zero:
            learner.export(self.folder.model)
        seconds, measure = self._task_seconds + tested, next(iter(row.measures))
        at.number, at.phase, at.epoch, at.batch = at.number + 1, 0, 0, 0
        self._task_seconds = 0.0
        if not last:
            self._save(0.0)
        elif self.fabric.is_global_zero:
            self.folder.close(tasks)
        if self.fabric.is_global_zero:
            self.folder.drop_candidates()
        self._watch(TaskEnd(spec.title, at.number, task.name, tasks, row.main, agnostic, unchanged, seconds, measure))
        self._stop = self._agreed(self._stop, False)[0]
        if self._stop and not last:
            raise Interrupted

    def _unchanged(self, row: Row) -> bool | None:
        """Whether the outputs of every earlier task are bit-identical to those when it was learned."""
        if not self._learner.isolating:
            return None
        first: dict[str, str] = {}
        for line in self.folder.lines():
            if line["event"] == "task":
                first = {**line["proof"], **first}
        return all(row.proof[name] == proof for name, proof in first.items())

    # -- candidates ---------------------------------------------------------------------------------------

    def _choose(self, rounds: int, resumed: dict[str, Any] | None) -> None:
        """Learn the current task by candidates: train those of every round, and adopt the best.

        The state is saved when a round begins. After an interruption the round is repeated, except for candidates that
        are already trained.
        """
        learner, number = self._learner, self._at.number
        tried = [] if resumed is None else [Tried(**one) for one in resumed["tried"]]
        for at in range(0 if resumed is None else resumed["number"], rounds):
            candidates = self._propose(at, rounds, tried) if resumed is None else resumed["candidates"]
            found = self._train_round(at, rounds, candidates, resumed is not None)
            for one in found:
                line = {"event": "candidate", "number": number + 1, "task": learner.task.name}
                line |= {"round": at, "index": one.index, "candidate": one.candidate}
                self._append(self.folder.results, {**line, "accuracy": one.accuracy, "score": _finite(one.score)})
            self._seed("judge", number, at)
            learner.observe(at, candidates, [one.score for one in found])
            tried += found
            resumed = None
        best = best_of(tried)
        if not tried:
            raise RkrError(f"task {learner.task.name!r}: the method has rounds of candidates, but no candidate")
        if best is None:
            where = f"the loss of task {learner.task.name!r} is not finite with any of its {len(tried)} candidates"
            raise Diverged(f"training diverged: {where}; choose a lower learning rate, or other options of the method")
        self._become(best)
        self._task_seconds = sum(one.seconds for one in tried)

    def _propose(self, at: int, rounds: int, tried: list[Tried]) -> list[Any]:
        """Begin a round: get its candidates and save the state with them."""
        number, best, first = self._at.number, best_of(tried), self.fabric.is_global_zero
        self._seed("propose", number, at)
        candidates = json.loads(json.dumps(self._learner.propose(at)))  # the same values as when resumed
        if first:
            earlier = {CandidateKey(number, one.round, one.index).file for one in tried}
            self.folder.drop_candidates(lambda name: name in earlier)  # nothing of this round is left from before
        past = [dataclasses.asdict(one) for one in tried]
        self._save(0.0, {"number": at, "rounds": rounds, "candidates": candidates, "tried": past})
        if first:
            kept = set() if best is None else {CandidateKey(number, best.round, best.index).file}
            self.folder.drop_candidates(lambda name: name in kept)
        return candidates

    def _train_round(self, at: int, rounds: int, candidates: list[Any], resumed: bool) -> list[Tried]:
        """Train the remaining candidates of a round, here or in other processes."""
        spec, learner, count = self.spec, self._learner, len(candidates)
        found: dict[int, Tried] = {}
        shares = dict.fromkeys(range(count), 0.0)  # of each candidate, how much is done

        def took(key: CandidateKey) -> bool:
            trained = read_trained(self.folder.candidates / key.file)
            if trained is None:
                return False
            candidate, accuracy = candidates[key.place], trained.accuracy
            score = -math.inf if accuracy is None else float(learner.score(candidate, accuracy))
            found[key.place] = Tried(at, key.place, candidate, accuracy, score, trained.seconds)
            shares[key.place] = 1.0
            return True

        def done() -> float:
            return self._done((at + sum(shares.values()) / count) / rounds)

        def told(key: CandidateKey, event: Event) -> None:
            if isinstance(event, Progress):
                shares[key.place] = event.done
                event = dataclasses.replace(event, done=done(), seconds_left=self._left(done()))
            self._watch(event)

        keys = [CandidateKey(self._at.number, at, index) for index in range(count)]
        waiting = [key for key in keys if not self._first_says(took(key))]
        if resumed and count:
            self._done_at_start = done()
        trains = self._one_by_one if self._helpers is None else self._helpers.train
        try:
            for key in trains(waiting, told, self._asked):
                if took(key):
                    self._watch(_candidate_end(spec.title, learner.task.name, key, rounds, count, found[key.place]))
        except Interrupted:
            first = next((key.place for key in keys if key.place not in found), count - 1)  # to go on with
            self._mark = {"round": (at + 1, rounds), "candidate": (first + 1, count)}
            raise
        for key in keys:
            if key.place not in found:
                raise RkrError(f"{self.folder.candidates / key.file}: cannot be seen by all processes")
        return [found[index] for index in range(count)]

    def _one_by_one(
        self, keys: Iterable[CandidateKey], told: Callable[[CandidateKey, Event], None], asked: Callable[[], bool]
    ) -> Iterator[CandidateKey]:
        for key in keys:
            self._candidate(key, lambda event, key=key: told(key, event)).train()  # type: ignore[misc]
            yield key

    def _candidate(self, key: CandidateKey, watch: Watch) -> Candidate:
        return Candidate(self, key, watch)

    def _become(self, best: Tried) -> None:
        """Adopt the winner and its trained state, and record its epochs as those of the task."""
        spec, key = self.spec, CandidateKey(self._at.number, best.round, best.index)
        trained = read_trained(self.folder.candidates / key.file)
        if trained is None or trained.learner is None:
            raise RkrError(f"{self.folder.candidates / key.file}: is missing: remove {self.folder.path} to start over")
        self._adopt(key, best.candidate)
        self._learner.load_state_dict(trained.learner)
        self._epoch_seconds = trained.epoch_seconds
        for epoch, line in enumerate(trained.lines):
            self._record(line)
            values = (line["loss"], line["accuracy"], line["lr"], 0.0)
            self._watch(EpochEnd(spec.title, line["number"], line["task"], epoch, len(trained.lines), *values))

    def _first_says(self, value: bool) -> bool:
        """The value of the first process, for all of them."""
        return bool(gather(self.fabric, value)[0])

    # -- state --------------------------------------------------------------------------------------------

    def _save(self, task_seconds: float, candidates: dict[str, Any] | None = None) -> None:
        state = self._state(task_seconds)
        if self.fabric.is_global_zero:
            self.folder.save(state if candidates is None else {**state, "round": candidates})
        self.fabric.barrier()
        self._last_save = time.monotonic()

    def _resume(self) -> dict[str, Any] | None:
        """Build the learner, and restore the last saved state, if there is one."""
        if self.fabric.is_global_zero:
            state = self.folder.resume()
        self.fabric.barrier()
        if not self.fabric.is_global_zero:
            state = self.folder.resume()
        self._build(0 if state is None else state["begun"])
        if state is not None:
            self._restore(state)
        if self.fabric.is_global_zero and (state is None or "round" not in state):
            self.folder.drop_candidates()
        return state

    def _record(self, line: dict[str, Any]) -> None:
        self._append(self.folder.results, line)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        if self.fabric.is_global_zero:
            self.folder.append(path, line)

    def _asked(self) -> bool:
        return self._stop

    def _done(self, of_task: float = 0.0) -> float:
        """Share of the run that is done, in training epochs."""
        return (self._at.number + of_task) / len(self.stream.tasks)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Lock the folder. A finished run is not written to, so it needs no lock."""
        if self.fabric.is_global_zero and not self.folder.finished:
            with self.folder.locked():
                yield
        else:
            yield


def _candidate_end(label: str, task: str, key: CandidateKey, rounds: int, count: int, one: Tried) -> CandidateEnd:
    which = ((key.round + 1, rounds), (key.place + 1, count))
    return CandidateEnd(label, key.number + 1, task, *which, one.accuracy, _finite(one.score), one.seconds)


def _finite(score: float) -> float | None:
    """Replace infinity, which JSON does not have, with None."""
    return score if math.isfinite(score) else None

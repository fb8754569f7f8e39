"""The engine of a server: one thread computes, everything else waits for it in a bounded queue.

Pictures come decoded, with the name of their task. Those that arrive within a short time are computed together,
whatever their tasks. Tasks change in the computing thread only, between two batches, so a batch sees one state of the
folder.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rkr.core.infer import FALSE_ALARMS
from rkr.errors import FileError, RkrError
from rkr.pictures.predict import Prediction
from rkr.pictures.zoo import AUTO, Zoo
from rkr.serve.catalogue import Catalogue, Entry
from rkr.serve.compute import Computer
from rkr.serve.limits import Busy, Limits, NotFound, Refused

DRAIN = 4.0  # seconds in which all that is accepted can be answered, so that a shutdown loses nothing
LOOK = 0.2  # seconds between two looks at the folder
Tell = Callable[..., None]  # takes an event and its fields, for the log


@dataclass(eq=False, slots=True)
class Picture:
    """One decoded picture that waits for its answer."""

    square: Tensor  # uint8 (3, R, R)
    task: str
    top: int
    false_alarms: float
    answer: Future[Prediction]
    arrived: float = field(default_factory=time.monotonic)
    task_probability: float | None = None


@dataclass(frozen=True)
class Batch:
    """What is told of a batch that was computed."""

    pictures: int
    tasks: int
    seconds: float


class Engine:
    """Answers for the tasks of a zoo, which come and go.

    Args:
        zoo: The tasks. From now on only the engine may use it.
        limits: Bounds.
        threads: For computing; None for torch's own number.
        cache: Bytes of merged weights that are kept.
        tell: Gets what belongs into the log.
        watch: Called with every batch.
    """

    def __init__(
        self,
        zoo: Zoo,
        limits: Limits | None = None,
        *,
        threads: int | None = None,
        cache: int | None = None,
        tell: Tell = lambda event, **fields: None,
        watch: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self.zoo, self.limits = zoo, limits or Limits()
        self.computer = Computer(zoo)
        self.catalogue = Catalogue(zoo, tell)
        self._threads, self._tell, self._watch = threads, tell, watch
        if cache is not None:
            zoo.model.active.cache.limit = cache
        self._waiting: deque[Picture] = deque()
        self._refreshes: list[Future[None]] = []
        self._changed = threading.Condition()
        self._accepted = 0
        self._pace = 0.0  # seconds a picture, of the last batches
        self._stopping = self._hurried = self._ready = False
        self._looked = 0.0
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="rkr-compute", daemon=True)

    # -- from other threads -------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Begin to compute."""
        self._thread.start()
        return self

    def hurry(self) -> None:
        """Let no picture wait for others any more."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def close(self, seconds: float = 5.0) -> None:
        """Answer what was accepted, then end. What is left after some seconds is not answered."""
        self.hurry()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(seconds)
        with self._changed:
            left, refreshes = list(self._waiting), self._refreshes
            self._waiting.clear()
            self._refreshes = []
        for picture in left:
            _fail(picture.answer, Busy("the server is shutting down", 5))
        for future in refreshes:
            _fail(future, Busy("the server is shutting down", 5))

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self._ready and self._thread.is_alive() and not self._stopping

    @property
    def trouble(self) -> str:
        """Why changes of the folder cannot be taken over; empty if they can."""
        return self._trouble

    @property
    def accepted(self) -> int:
        """Pictures that are accepted and not yet answered."""
        return self._accepted

    @property
    def tasks(self) -> Mapping[str, Entry]:
        """The tasks at this moment."""
        return self.catalogue.tasks

    def accept(self, pictures: int) -> None:
        """Take places in the queue, or raise Busy. `release` gives them back."""
        with self._changed:
            if self._stopping:
                raise Busy("the server is shutting down", 5)
            most = min(self.limits.queue, max(self.limits.batch, self.limits.pictures, int(DRAIN / (self._pace or 1))))
            if self._accepted + pictures > most:
                raise Busy(
                    f"{self._accepted} pictures are waiting already, {most} is the limit: try again later",
                    self._accepted * self._pace,
                )
            self._accepted += pictures

    def release(self, pictures: int) -> None:
        """Give places in the queue back."""
        with self._changed:
            self._accepted -= pictures

    def check(self, task: str | None) -> str:
        """The name of the task that a request asks for, or NotFound."""
        tasks = self.tasks
        if task is None:
            if len(tasks) != 1:
                raise Refused(422, f"there are {len(tasks)} tasks: give one, or {AUTO!r} to infer it")
            return next(iter(tasks))
        if task != AUTO:
            self._entry(task)
        return task

    def _entry(self, task: str) -> Entry:
        entry = self.tasks.get(task)
        if entry is None:
            raise NotFound(f"there is no task {task!r}")
        return entry

    def submit(self, square: Tensor, task: str, top: int = 1, false_alarms: float = FALSE_ALARMS) -> Future[Prediction]:
        """Ask for the answer to one picture. Cancel the future if nobody waits for it any more."""
        picture = Picture(square, task, top, false_alarms, Future())
        with self._changed:
            if self._stopping:
                raise Busy("the server is shutting down", 5)
            self._waiting.append(picture)
            self._changed.notify()
        return picture.answer

    def refresh(self) -> Future[None]:
        """Take over what has changed in the folder; done when answers come from it."""
        future: Future[None] = Future()
        with self._changed:
            if self._stopping:
                raise Busy("the server is shutting down", 5)
            self._refreshes.append(future)
            self._changed.notify()
        return future

    # -- the computing thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._begin()
        while True:
            self._look()
            pictures = self._collect()
            if pictures:
                self._compute(pictures)
            elif self._stopping and not self._waiting:
                break
            elif not self._waiting:
                self.catalogue.check_one()
        self._ready = False

    def _begin(self) -> None:
        started = time.perf_counter()
        try:
            self.catalogue.build()
            self.computer.measure(self.limits.batch, self.catalogue.first_sound())
        except Exception as error:  # answers are possible all the same
            self._tell("trouble", message=_said(error))
        if not self.computer.alone:
            self.computer.alone = {1: 0.05}
        self._pace = self.computer.alone[1]
        seconds = round(time.perf_counter() - started, 2)
        self._tell("ready", tasks=len(self.tasks), seconds=seconds, **self.computer.to_json())
        self._ready = True

    def _look(self) -> None:
        """Take over changes of the folder, if it is time or someone waits for it."""
        with self._changed:
            waiting, self._refreshes = self._refreshes, []
        now = time.monotonic()
        if not waiting and now - self._looked < LOOK:
            return
        self._looked, trouble = now, ""
        try:
            changes = self.zoo.follow()
            if changes:
                self.computer.forget()
                self.catalogue.change(changes)
        except Exception as error:
            trouble = _said(error)
        if trouble and trouble != self._trouble:
            self._tell("trouble", message=trouble)
        self._trouble = trouble
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if trouble:
                future.set_exception(Refused(409, trouble))
            else:
                future.set_result(None)

    def _collect(self) -> list[Picture]:
        """The pictures that are computed next; none if none comes until it is time for something else."""
        size = min(self.computer.size, self.limits.batch)
        with self._changed:
            if not self._waiting and not self._refreshes and not self._stopping:
                self._changed.wait(0.001 if self.catalogue.unchecked else LOOK)
            if not self._waiting:
                return []
            end = self._waiting[0].arrived + self.limits.wait
            while len(self._waiting) < size and not self._hurried:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            found: list[Picture] = []
            while self._waiting and len(found) < size:
                picture = self._waiting.popleft()
                if picture.answer.set_running_or_notify_cancel():  # else nobody waits for it
                    found.append(picture)
            return found

    def _compute(self, pictures: list[Picture]) -> None:
        started = time.perf_counter()
        try:
            known = self._with_task(pictures)
            if known:
                self._answer(known)
        except Exception as error:
            if len(pictures) > 1:  # one of them is to blame: the others get their answers
                for picture in pictures:
                    if not picture.answer.done():
                        picture.task_probability = None
                        self._compute([picture])
                return
            self._tell("error", message=_said(error))
            _fail(pictures[0].answer, error)
        seconds = time.perf_counter() - started
        self._pace += 0.2 * (seconds / len(pictures) - self._pace)
        self._watch(Batch(len(pictures), len({p.task for p in pictures}), seconds))

    def _with_task(self, pictures: list[Picture]) -> list[Picture]:
        """Those whose task is there; where it was to be inferred, it is entered. All others are answered."""
        found = [p for p in pictures if p.task != AUTO]
        unknown = [p for p in pictures if p.task == AUTO]
        if unknown:
            found += self._inferred(unknown)
        trouble: dict[str, Refused | None] = {task: self._missing(task) for task in {p.task for p in found}}
        for picture in found:
            error = trouble[picture.task]
            if error is not None:
                _fail(picture.answer, error)
        return [p for p in found if trouble[p.task] is None]

    def _missing(self, task: str) -> Refused | None:
        """Why a task cannot answer."""
        if task not in self.zoo.model.tasks:
            return NotFound(f"there is no task {task!r} any more")
        try:
            self.zoo.model.tasks[task]
        except FileError as error:
            if not self.catalogue.is_there(task):
                return NotFound(f"there is no task {task!r} any more")
            self.catalogue.damaged(task, str(error))
            return Refused(409, f"the task {task!r} cannot be used, because its file is damaged")
        return None

    def _inferred(self, pictures: list[Picture]) -> list[Picture]:
        """Enter the tasks of pictures. Those of none are answered."""
        try:
            rule = self.zoo.rule()
        except RkrError as error:
            for picture in pictures:
                _fail(picture.answer, Refused(409, " ".join(str(error).split())))
            return []
        features = self.zoo.features(torch.stack([p.square for p in pictures]))
        found = []
        for row, picture in enumerate(pictures):
            inferred = rule(features[row : row + 1], picture.false_alarms)
            number = int(inferred.task[0])
            picture.task_probability = float(inferred.probability[0, number])
            if bool(inferred.none[0]):
                picture.answer.set_result(Prediction("", None, task_probability=picture.task_probability))
            else:
                picture.task = rule.names[number]
                found.append(picture)
        return found

    def _answer(self, pictures: list[Picture]) -> None:
        names = [p.task for p in pictures]
        logits = self.computer(torch.stack([p.square for p in pictures]), names)
        classes = {name: self.catalogue.classes(name) for name in Counter(names)}
        for picture, row in zip(pictures, logits, strict=True):
            own = classes[picture.task]
            shares, order = row.softmax(0).topk(min(picture.top, len(own)))
            picture.answer.set_result(
                Prediction(
                    "",
                    picture.task,
                    tuple(own[c] for c in order.tolist()),
                    tuple(shares.tolist()),
                    picture.task_probability,
                )
            )


def _fail(future: Future[Any], error: BaseException) -> None:
    try:
        if not future.done():
            future.set_exception(error)
    except InvalidStateError:  # cancelled meanwhile
        pass


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, RkrError) else f"{type(error).__name__}: {text}"

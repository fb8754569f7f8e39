"""Reading run folders: `run.json`, `results.jsonl` and `times.jsonl`.

A run that is in progress, or was killed, may have an incomplete last line, which is skipped. Anything else that a run
does not write is an error that names the file and the line, so results that were read need no further checks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rkr.capacity import Capacity
from rkr.errors import FileError
from rkr.experiment.fields import Fields, Line, Row
from rkr.experiment.recount import Recorded, recounted
from rkr.versions import Format


def _with_kernels(run: Any) -> Any:
    """Version 2 has the option `fast` of RKR, which became one of the values of `kernels`, and no `budget`."""
    settings: Any = run.get("settings") if isinstance(run, dict) else None
    options: Any = settings.get("options") if isinstance(settings, dict) else None
    if not isinstance(options, dict) or not isinstance(options.get("fast"), bool):
        return run
    changed = {"budget": None, **options, "kernels": "auto" if options["fast"] else "formula"}
    del changed["fast"]
    return {**run, "settings": {**settings, "options": changed}}


# Lines of version 1 have one size: see `recount`.
RUN_FORMAT = Format("rkr-results", 3, {1: lambda run: run, 2: _with_kernels})
CLASSIFICATION, ZERO_SHOT = ("accuracy", "top5"), ("H", "U", "S")
RUN, RESULTS, TIMES = "run.json", "results.jsonl", "times.jsonl"
SECTIONS = ("stream", "network", "training", "options", "own_training")  # of the settings: objects, if they are there
DEEPEST = 20  # levels of settings within settings
EPOCH_LINE = b'{"event": "epoch", '


class Epoch(NamedTuple):  # a folder of runs has hundreds of thousands of them
    """One epoch of training; loss and accuracy are of the training images."""

    number: int  # of the task: 1, 2, ...
    task: str
    phase: str
    epoch: int  # 0, 1, ...
    loss: float | None
    accuracy: float | None
    lr: float | None


@dataclass(frozen=True)
class Times:
    """How long one task took."""

    number: int
    task: str
    train_seconds: float
    test_seconds: float
    epoch_seconds: float | None  # the median


@dataclass(frozen=True)
class Result:
    """One run, as read from its folder. There is a row for each task learned so far, in order."""

    folder: Path
    recipe: str
    method: str
    order: str
    seed: int
    tasks: tuple[str, ...]  # of the whole stream, learned or not
    groups: tuple[tuple[int, ...], ...]  # for each task, the numbers of its classes
    settings: Mapping[str, Any]
    record: Mapping[str, Any]  # all of run.json: data, versions, machine and commit as well
    measures: Mapping[str, tuple[Row, ...]]  # with the task given; the main one first: accuracy, or H in zero-shot
    agnostic: tuple[Row | None, ...]  # task-agnostic top-1 accuracy, where it was computed
    proofs: tuple[Mapping[str, str], ...]  # for each row, task -> hash of its logits on its test samples
    unchanged: tuple[bool | None, ...]  # whether earlier tasks' outputs are bit-identical; None: not promised
    costs: tuple[Capacity, ...]
    notes: tuple[Mapping[str, Any], ...]  # what the method recorded of each task
    epochs: tuple[Epoch, ...]
    times: tuple[Times, ...]  # of the tasks that have one, in order
    finished: bool

    @property
    def done(self) -> int:
        """How many tasks are learned and tested."""
        return len(self.matrix)

    @property
    def label(self) -> str:
        """Distinguishes the runs of a method: "A", or "A seed 1"."""
        return f"{self.order} seed {self.seed}" if self.seed else self.order

    @property
    def options(self) -> dict[str, Any]:
        """The method's own, an optimiser of its own among them as "training".

        How classifiers of zero-shot tasks are trained belongs to the protocol; by one rule, their epochs may be others
        in each order.
        """
        found = {name: value for name, value in (self.settings.get("options") or {}).items() if name != "classifier"}
        return {**found, **({"training": own} if (own := self.settings.get("own_training")) else {})}

    @property
    def measure(self) -> str:
        """The measure in `matrix`."""
        return next(iter(self.measures))

    @property
    def matrix(self) -> tuple[Row, ...]:
        """The main measure of each task after each task."""
        return self.measures[self.measure]


def read_result(folder: str | os.PathLike[str], epochs: bool = True) -> Result:
    """Read a run folder, finished or not. Without epochs, which are most of the lines, it is much faster."""
    folder = Path(folder)
    run = _read_run(folder / RUN)
    stream = run.object("stream")
    tasks = tuple(Fields(f"{stream.where}: task {i}", t).name("name") for i, t in enumerate(stream.list("tasks"), 1))
    groups = tuple(_class_numbers(stream.where, group) for group in stream.list("order"))
    if not tasks or len(groups) != len(tasks):
        raise FileError(f"{stream.where}: {len(tasks)} tasks, but classes of {len(groups)}")

    unseen = any(task.get("unseen") for task in stream.list("tasks"))
    measures: dict[str, list[Row]] = {name: [] for name in (ZERO_SHOT if unseen else CLASSIFICATION)}
    matrix = next(iter(measures.values()))
    notes: list[Mapping[str, Any]] = []
    agnostic: list[Row | None] = []
    proofs: list[Mapping[str, str]] = []
    unchanged: list[bool | None] = []
    costs: list[Capacity] = []
    recorded_before = 0  # lines of tasks in format 1
    learned: list[Epoch] = []
    finished = False
    for line in read_lines(folder / RESULTS, without=b"" if epochs else EPOCH_LINE):
        if finished:
            raise FileError(f"{line.where}: a line after the end of the run")
        event = line.text("event")
        if event == "end":
            if not line.integer("tasks") == len(matrix) == len(tasks):
                raise FileError(f"{line.where}: the run ends after {len(matrix)} of {len(tasks)} tasks")
            finished = True
            continue
        if event not in ("epoch", "candidate", "task"):
            raise FileError(f"{line.where}: unknown event {event!r}")
        number, task = _which_task(line, tasks)
        if number != len(matrix) + 1:
            raise FileError(f"{line.where}: {event} line of task {number} where task {len(matrix) + 1} is due")
        if event == "candidate":  # not a result
            continue
        if event == "epoch":
            learned.append(_epoch(line, number, task))
            continue
        for name, rows in measures.items():
            rows.append(line.fractions(name, number))
        notes.append(line.object("notes").values if "notes" in line.values else {})
        agnostic.append(None if line.get("agnostic") is None else line.fractions("agnostic", number))
        proofs.append(line.texts("proof"))
        unchanged.append(line.flag("unchanged"))
        cost = line.object("cost")
        if run.values["format"] in (1, "1") and "learning" not in cost.values:
            recorded_before += 1
            costs.append(_size(cost, cost))
        else:
            costs.append(_size(cost, cost.object("learning")))

    order, settings = run.get("order"), _settings(run.object("settings"))
    if recorded_before:
        before = Recorded(
            str(settings.get("learner", run.name("method"))),
            settings.get("options") or {},
            unseen,
            _mapping(run.values.get("network")).get("parameters"),
            stream.values.get("input_shape", []),
            stream.list("tasks"),
        )
        costs[:recorded_before] = recounted(before, costs[:recorded_before])
    return Result(
        folder=folder,
        recipe=run.name("recipe"),
        method=run.name("method"),
        order=str(run.integer("order")) if type(order) is int else run.name("order"),
        seed=run.integer("seed"),
        tasks=tasks,
        groups=groups,
        settings=settings,
        record=run.values,
        measures={name: tuple(rows) for name, rows in measures.items()},
        agnostic=tuple(agnostic),
        proofs=tuple(proofs),
        unchanged=tuple(unchanged),
        costs=tuple(costs),
        notes=tuple(notes),
        epochs=tuple(learned) if epochs else (),
        times=_read_times(folder / TIMES, tasks),
        finished=finished,
    )


def find_results(root: str | os.PathLike[str]) -> list[Result]:
    """All runs at or below a folder, by recipe, method and order; numbered orders count as numbers."""
    root = Path(root)
    if not root.is_dir():
        raise FileError(f"{root}: no such folder")
    results = [read_result(path.parent) for path in root.rglob(RUN)]
    return sorted(results, key=lambda result: (result.recipe, result.method, rank(result.order), str(result.folder)))


def rank(order: str) -> tuple[bool, int, str]:
    """A key to sort orders by: numbers first, as numbers."""
    return (False, int(order), order) if is_number(order) else (True, 0, order)


def is_number(order: str) -> bool:
    """Whether an order is a number, as those are that a seed makes."""
    return order.isdecimal() and len(order) < 20


# ---------------------------------------------------------------------------------------------------------
# The files


def _read_run(path: Path) -> Fields:
    try:
        values = json.loads(_read(path))
    except ValueError:
        raise FileError(f"{path}: not JSON") from None
    run = Fields(str(path), values)
    return Fields(str(path), RUN_FORMAT.upgraded(path, run.get("format"), values))


def _settings(settings: Fields) -> Mapping[str, Any]:
    for key in SECTIONS:
        if settings.values.get(key) is not None:
            settings.object(key)
    level: list[Any] = [settings.values]
    for _ in range(DEEPEST):
        level = [item for node in level if isinstance(node, dict | list) for item in _items(node)]
    if level:
        raise FileError(f"{settings.where}: more than {DEEPEST} levels")
    return settings.values


def _size(cost: Fields, learning: Fields) -> Capacity:
    """Of a task's line; without `learning` what that takes is not known."""
    multiply_adds = None if cost.get("multiply_adds") is None else cost.integer("multiply_adds")
    found = Capacity.from_json(
        cost.integer("parameters"), cost.positive("percent"), cost.integer("bytes"), multiply_adds
    )
    if learning is cost:
        return found
    more, size = learning.integer("parameters") - found.parameters, learning.integer("bytes") - found.bytes
    if more < 0 or size < 0:
        raise FileError(f"{learning.where}: less than what is kept to use the tasks")
    return replace(found, further=more, further_bytes=size)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(node: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node


def _read_times(path: Path, tasks: Sequence[str]) -> tuple[Times, ...]:
    """The times of each task. A task that was tested again after a kill has two lines: the later one counts."""
    times: dict[int, Times] = {}
    for line in read_lines(path):
        number, task = _which_task(line, tasks)
        epoch = None if line.get("epoch_seconds") is None else line.seconds("epoch_seconds")
        seconds = (line.seconds("train_seconds"), line.seconds("test_seconds"), epoch)
        times[number] = Times(number, task, *seconds)
    return tuple(times[number] for number in sorted(times))


def read_lines(path: Path, without: bytes = b"") -> Iterator[Line]:
    """The JSON objects of a file, one per line; none if there is no file. Skips lines that start with `without`."""
    if not path.exists():
        return
    *whole, last = _read(path).split(b"\n")
    for number, line in enumerate(whole, 1):
        if without and line.startswith(without) and line.endswith(b"}"):
            continue
        try:
            values = _decode(line.decode())
        except ValueError:
            raise FileError(f"{path}: line {number} is not JSON") from None
        yield Line(path, number, values)
    try:
        values = _decode(last.decode())  # an object that was cut off does not parse
    except ValueError:
        return
    if isinstance(values, dict):
        yield Line(path, len(whole) + 1, values)


def _decode(text: str) -> Any:
    """`json.loads` without its search for white space, which results do not contain."""
    if text.startswith("{"):
        values, end = _JSON.raw_decode(text)
        if end == len(text):
            return values
    return _JSON.decode(text)


_JSON = json.JSONDecoder()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _epoch(line: Line, number: int, task: str) -> Epoch:
    """Check a valid line quickly, and an invalid one field by field, for a precise message."""
    values = line.values
    phase, epoch = values.get("phase"), values.get("epoch")
    loss, accuracy, lr = values.get("loss"), values.get("accuracy"), values.get("lr")
    numbers = type(loss) is type(accuracy) is type(lr) is float
    if numbers and type(phase) is str and type(epoch) is int and epoch >= 0:
        return Epoch(number, task, phase, epoch, loss, accuracy, lr)
    return Epoch(
        number,
        task,
        line.text("phase"),
        line.integer("epoch"),
        line.optional_number("loss"),
        line.optional_number("accuracy"),
        line.optional_number("lr"),
    )


def _which_task(line: Fields, tasks: Sequence[str]) -> tuple[int, str]:
    number, task = line.integer("number"), line.text("task")
    if not 1 <= number <= len(tasks) or tasks[number - 1] != task:
        raise FileError(f"{line.where}: the stream has no task {number} {task!r}")
    return number, task


def _class_numbers(where: str, group: Any) -> tuple[int, ...]:
    if not isinstance(group, list) or not all(type(label) is int for label in group):
        raise FileError(f"{where}: 'order' needs a list of class numbers for each task, not {group!r}")
    return tuple(group)

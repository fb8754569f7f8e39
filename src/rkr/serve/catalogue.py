"""What is told of the tasks of a server, without reading their tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rkr.core.files import read_task_about, task_fingerprint
from rkr.core.index import Changes
from rkr.errors import FileError, RkrError
from rkr.pictures.zoo import Zoo


@dataclass(frozen=True)
class Entry:
    """What is told of a task.

    Attributes:
        name: Its name.
        classes: Names of its classes.
        pictures: That it was learned from.
        accuracy: On the validation part, 0 to 1.
        bytes: Of its file.
        date: When it was learned.
        fingerprint: A hash of all that it computes with; None until its file was read.
        damaged: Why its file cannot be used.
    """

    name: str
    classes: tuple[str, ...] = ()
    pictures: int | None = None
    accuracy: float | None = None
    bytes: int = 0
    date: str | None = None
    fingerprint: str | None = None
    damaged: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        values = {**vars(self), "classes": list(self.classes)}
        if self.damaged is None:
            del values["damaged"]
        return values


class Catalogue:
    """The tasks of a zoo. The computing thread writes, any thread reads.

    Attributes:
        tasks: By name; replaced as a whole.
        unchecked: Tasks whose files are yet to be read.
    """

    def __init__(self, zoo: Zoo, tell: Callable[..., None]) -> None:
        self._zoo, self._tell = zoo, tell
        self.tasks: Mapping[str, Entry] = {}
        self.unchecked: deque[str] = deque()

    def build(self) -> None:
        """List all tasks."""
        self.tasks = {name: self._read(name) for name in self._zoo.model.tasks}
        self.unchecked = deque(self.tasks)

    def change(self, changes: Changes) -> None:
        """Take over what has changed."""
        for what in ("added", "replaced", "removed"):
            for name in getattr(changes, what):
                self._tell(what, task=name)
        new = (*changes.added, *changes.replaced)
        there, old = self._zoo.model.tasks, self.tasks
        self.tasks = {name: self._read(name) if name in new else old.get(name) or self._read(name) for name in there}
        self.unchecked.extend(new)

    def first_sound(self) -> str | None:
        """The first task that can be used."""
        for name in self.tasks:
            try:
                self._zoo.model.tasks[name]
            except FileError as error:
                self.damaged(name, str(error))
            else:
                return name
        return None

    def check_one(self) -> None:
        """Read the file of one task that was not read yet, so that damage is told before someone asks for it."""
        if not self.unchecked:
            return
        name = self.unchecked.popleft()
        model = self._zoo.model
        if name not in model.tasks or model.stored is None:
            return
        try:
            fingerprint = task_fingerprint(model, model.tasks[name], model.stored.base)
        except FileError as error:
            if self.is_there(name):
                self.damaged(name, str(error))
        else:
            self._enter(replace(self.tasks[name], fingerprint=fingerprint, damaged=None))

    def damaged(self, name: str, why: str) -> None:
        """Tell that the file of a task cannot be used."""
        why = " ".join(why.split())
        entry = self.tasks.get(name) or Entry(name)
        if entry.damaged != why:
            self._tell("damaged", task=name, message=why)
            self._enter(replace(entry, damaged=why))

    def is_there(self, name: str) -> bool:
        """Whether the folder has the task at this moment; another process may have removed it just now."""
        stored = self._zoo.model.stored
        return stored is not None and name in stored.index.newer().tasks

    def classes(self, name: str) -> tuple[str, ...]:
        """Names of a task's classes, from the task itself."""
        task = self._zoo.model.tasks[name]
        return task.class_names or tuple(map(str, range(task.classes or 0)))

    def _enter(self, entry: Entry) -> None:
        self.tasks = {**self.tasks, entry.name: entry}

    def _read(self, name: str) -> Entry:
        stored = self._zoo.model.stored
        assert stored is not None
        path = Path(stored.index.folder) / stored.index.tasks[name]
        try:
            stated = read_task_about(path)
        except RkrError as error:
            why = " ".join(str(error).split())
            self._tell("damaged", task=name, message=why)
            return Entry(name, damaged=why)
        about = stated.about
        pictures, accuracy, date = (about.get(key) for key in ("pictures", "accuracy", "date"))
        return Entry(
            name,
            stated.class_names or tuple(map(str, range(stated.classes or 0))),
            pictures if isinstance(pictures, int) else None,
            float(accuracy) if isinstance(accuracy, int | float) and 0 <= accuracy <= 1 else None,
            stated.bytes,
            date if isinstance(date, str) else None,
        )

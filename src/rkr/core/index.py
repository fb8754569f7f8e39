"""The index of a model folder: which task is in which file.

`zoo.json` has everything and is replaced as a whole. In a folder with many tasks that would make one more task as
expensive as all of them, so there a journal beside it takes the changes since: each one is a line that is appended.
When the journal is longer than the list of tasks, `zoo.json` is written anew.

A line is complete or it does not count, so a kill at any moment leaves the old state or the new one. Whoever writes
holds the lock. Whoever reads needs none: two calls of `stat` tell whether anything is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rkr.atomic import TEMPORARY, append, write_atomic
from rkr.core.about import checked_about
from rkr.core.options import Options
from rkr.errors import FileError, RkrError
from rkr.versions import Format

ZOO = Format("rkr-zoo", 2, {1: lambda index: {**index, "about": {}}})
INDEX, LOCK, SUFFIX = "zoo.json", "zoo.lock", ".safetensors"
WHOLE = 256  # an index of fewer tasks has no journal: it is written as quickly as a line
RETRIES = 9  # how often a reader starts again because another process saved to the folder
LOCK_SECONDS = 30  # how long a writer waits for another

Op = dict[str, Any]
"""One change: {"put": name, "file": ...}, {"drop": name}, {"rename": name, "to": ..., "file": ...}, {"current": name}
or {"about": {...}}."""


@dataclass(frozen=True)
class Index:
    """The index of a folder as it was at one moment.

    Attributes:
        folder: The folder.
        fields: What `zoo.json` has beside the tasks.
        tasks: The file of each task by name, in order.
    """

    folder: Path
    fields: dict[str, Any]
    tasks: dict[str, str]
    _sum: str  # of zoo.json, which the journal's name has
    _stamp: tuple[int, ...]  # of zoo.json
    _appendable: bool  # whether zoo.json has the present version
    _size: int = 0  # of the journal's complete lines
    _lines: int = 0

    @property
    def journal(self) -> Path:
        """The file of changes since `zoo.json` was written. It need not exist."""
        return self.folder / f"zoo.{self._sum[:16]}.jsonl"

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder as it is now."""
        for _ in range(RETRIES):
            index = _read_snapshot(folder)._with_journal()
            if index._is_current():
                return index
        raise FileError(f"{folder}: other processes save to it all the time: try again")

    def newer(self) -> Index:
        """The index as it is now: the same object if nothing has changed, which takes two calls of `stat`."""
        if not self._is_current():
            return Index.read(self.folder)
        index = self._with_journal()
        return index if index is self or index._is_current() else Index.read(self.folder)

    def _is_current(self) -> bool:
        try:
            return _stamp(os.stat(self.folder / INDEX)) == self._stamp
        except OSError:
            return False

    # -- the journal --------------------------------------------------------------------------------------

    def _with_journal(self) -> Index:
        """This index with the lines that the journal has got since."""
        try:
            if os.stat(self.journal).st_size == self._size:
                return self
            with open(self.journal, "rb") as file:
                file.seek(self._size)
                data = file.read()
        except FileNotFoundError:
            return self
        except OSError as error:
            raise FileError(f"{self.journal}: cannot be read: {error.strerror}") from error
        *lines, rest = data.split(b"\n")
        fields, tasks = dict(self.fields), dict(self.tasks)
        for number, line in enumerate(lines, self._lines):
            for op in self._decoded(line, number):
                try:
                    _apply(op, fields, tasks)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise FileError(f"{self.journal}: line {number + 1} is invalid: {error}") from error
        if rest and _sum_of(rest[17:-1], self._lines + len(lines)) == rest[:16]:
            raise FileError(f"{self.journal}: damaged: its last line does not end")  # else it was being written
        size = self._size + len(data) - len(rest)
        return replace(self, fields=fields, tasks=tasks, _size=size, _lines=self._lines + len(lines))

    def _decoded(self, line: bytes, number: int) -> list[Op]:
        if line[:17] != _sum_of(line[17:], number) + b" ":
            raise FileError(f"{self.journal}: damaged: the checksum of line {number + 1} does not match")
        try:
            return list(json.loads(line[17:]))
        except (ValueError, RecursionError, TypeError) as error:
            raise FileError(f"{self.journal}: line {number + 1} is invalid: {error}") from error

    # -- writing, with the lock held ----------------------------------------------------------------------

    def committed(self, ops: Sequence[Op]) -> Index:
        """Make changes, all or none. This must be the newest index. Files that no task needs any more are removed."""
        fields, tasks = dict(self.fields), dict(self.tasks)
        for op in ops:
            _apply(op, fields, tasks)
        if not self._appendable or len(tasks) < WHOLE or self._lines >= max(WHOLE, len(tasks)):
            return write_index(self.folder, fields, tasks)
        if not ops:
            return self
        text = json.dumps(ops).encode()
        line = _sum_of(text, self._lines) + b" " + text + b"\n"
        append(self.journal, line, self._size)
        for file in set(self.tasks.values()) - set(tasks.values()):
            with contextlib.suppress(OSError):
                os.unlink(self.folder / file)
        return replace(self, fields=fields, tasks=tasks, _size=self._size + len(line), _lines=self._lines + 1)


def _apply(op: Op, fields: dict[str, Any], tasks: dict[str, str]) -> None:
    """Make one change. Raise KeyError, TypeError, ValueError or AttributeError if it does not fit."""
    (kind, name), *_ = op.items()
    if kind == "put" and set(op) == {"put", "file"}:
        _check_entry(name, op["file"])
        tasks[name] = op["file"]
    elif kind == "drop" and set(op) == {"drop"}:
        del tasks[name]
        if fields["current"] == name:
            fields["current"] = None
    elif kind == "rename" and set(op) == {"rename", "to", "file"}:
        _check_entry(op["to"], op["file"])
        if op["to"] in tasks or name not in tasks:
            raise ValueError(f"{name!r} cannot be renamed to {op['to']!r}")
        there = [(op["to"], op["file"]) if n == name else (n, f) for n, f in tasks.items()]
        tasks.clear()
        tasks.update(there)
        if fields["current"] == name:
            fields["current"] = op["to"]
    elif kind == "current" and set(op) == {"current"}:
        if name is not None and name not in tasks:
            raise ValueError(f"{name!r} is not a task")
        fields["current"] = name
    elif kind == "about" and set(op) == {"about"}:
        fields["about"] = checked_about(name)
    else:
        raise ValueError(f"the change {op!r} is unknown")


@dataclass(frozen=True)
class Changes:
    """What has changed in a folder, by tasks' names. False if nothing has."""

    added: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.replaced or self.removed)

    @property
    def names(self) -> set[str]:
        """All tasks that changed."""
        return {*self.added, *self.replaced, *self.removed}


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> Changes:
    """What has changed from one list of tasks and their files to another."""
    if old is new:
        return Changes()
    return Changes(
        tuple(name for name in new if name not in old),
        tuple(name for name, file in new.items() if name in old and old[name] != file),
        tuple(name for name in old if name not in new),
    )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one who writes to a folder, which is made if necessary. The lock ends with the process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=LOCK_SECONDS)
        lock.acquire()
    except Timeout:
        raise FileError(f"{folder}: another process is writing to it: try again when it has finished") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    try:
        yield
    finally:
        lock.release()


def write_index(folder: Path, fields: Mapping[str, Any], tasks: Mapping[str, str]) -> Index:
    """Write `zoo.json` as a whole, then remove files that it does not name. The lock must be held."""
    rows = [{"name": name, "file": file} for name, file in tasks.items()]
    content = {**ZOO.stated, **fields, "options": fields["options"].to_json(), "tasks": rows}
    data, path = encode_index(content), folder / INDEX
    new = Index(folder, dict(fields), dict(tasks), _index_sum(content), (), True)
    with contextlib.suppress(OSError, FileError):
        if new.journal.exists() and json.loads(path.read_text("utf-8")).get("sha256") != new._sum:
            os.unlink(new.journal)  # of an earlier index with the same content
    write_atomic(path, data)
    new = replace(new, _stamp=_stamp(os.stat(path)))
    for journal in folder.glob(f"zoo.{'[0-9a-f]' * 16}.jsonl"):
        with contextlib.suppress(OSError):
            os.unlink(journal)
    _remove_unnamed(folder, {fields["base"], *tasks.values()})
    return new


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove files of earlier saves, recognised by the form of their names."""
    for path in folder.glob(f"*.{'[0-9a-f]' * 16}{SUFFIX}"):
        if path.name not in named:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


def _sum_of(text: bytes, number: int) -> bytes:
    """The checksum of a line of the journal, which covers its place too."""
    return hashlib.sha256(b"%d:%b" % (number, text)).hexdigest()[:16].encode()


# ---------------------------------------------------------------------------------------------------------
# zoo.json


def encode_index(index: Any) -> bytes:
    """The text of `zoo.json`, with a checksum."""
    if isinstance(index, dict):
        index = {**index, "sha256": _index_sum(index)}
    return json.dumps(index, indent=1).encode()


def _index_sum(index: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_snapshot(folder: Path) -> Index:
    """Read and check `zoo.json`."""
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))
            index = json.loads(file.read().decode())
    except FileNotFoundError:
        raise FileError(f"{folder}: not a saved model: there is no {INDEX}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(index, dict) or index.get("format") != ZOO.name:
        raise FileError(f"{path}: not the index of a saved model")
    version, stored = ZOO.check(path, index.get("version")), index.get("sha256")
    if stored != _index_sum(index):
        raise FileError(f"{path}: damaged: its checksum does not match")
    try:
        index = ZOO.upgraded(path, index["version"], index)
        if not index["options"]:
            raise ValueError("'options' are missing")
        index["options"] = Options.from_json(index["options"])
        _check_index(index)
    except (KeyError, TypeError, ValueError, RkrError) as error:
        raise FileError(f"{path}: incomplete or invalid: {error}") from error
    tasks = {task["name"]: task["file"] for task in index["tasks"]}
    fields = {key: value for key, value in index.items() if key not in ("format", "version", "tasks", "sha256")}
    return Index(folder, fields, tasks, stored, stamp, version == ZOO.version)


_INDEX_TYPES: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "version": str,
    "about": dict,
    "options": Options,
    "head": (str, type(None)),
    "base": str,
    "base_frozen": bool,
    "current": (str, type(None)),
    "fixed": list,
    "tasks": list,
    "sha256": str,
}


def _check_index(index: Mapping[str, Any]) -> None:
    """Check types and consistency."""
    if set(index) != set(_INDEX_TYPES):
        raise ValueError(f"{sorted(set(index) ^ set(_INDEX_TYPES))[0]!r} is missing or unknown")
    for key, kind in _INDEX_TYPES.items():
        if not isinstance(index[key], kind):
            raise ValueError(f"{key!r} is {index[key]!r}")
    checked_about(index["about"])
    for task in index["tasks"]:
        if set(task) != {"name", "file"}:
            raise ValueError(f"the task {task!r} must have a name and a file")
        _check_entry(task["name"], task["file"])
    names = {task["name"] for task in index["tasks"]}
    if len(names) != len(index["tasks"]):
        raise ValueError("two tasks have the same name")
    if index["current"] is not None and index["current"] not in names:
        raise ValueError(f"'current' is {index['current']!r}, which is not a task")
    if not index["base_frozen"] and len(names) > 1:
        raise ValueError("the base cannot be in training with more than one task")
    _check_file(index["base"])


def _check_entry(name: Any, file: Any) -> None:
    if not isinstance(name, str) or not name or not isinstance(file, str):
        raise ValueError(f"the task {name!r} in the file {file!r} must have a name and a file")
    _check_file(file)


def _check_file(file: str) -> None:
    if "/" in file or os.path.basename(file) != file or "\0" in file or not file.endswith(SUFFIX):
        raise ValueError(f"{file!r} is not the name of a file in this folder")

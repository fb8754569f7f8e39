"""The tasks of a model by name. Those that were loaded from a folder are read when they are first used.

A task that was read, or written, and has not changed since can leave memory, because its file has the same bits. The
least recently used ones do when all such tasks take more than a number of bytes. A task stays as long as anything else
holds it or one of its tensors: an optimiser, a view, the user.
"""

from __future__ import annotations

import copy
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn

from rkr.core.about import check_about
from rkr.core.files import raw_bytes
from rkr.core.state import TaskState
from rkr.errors import FileError, UsageError

MEMORY = 256 << 20  # default bound on tasks that can be read again
ATTEMPTS = 8  # tasks that are tried for each one that is read, when some must leave memory

Sums = tuple[Any, ...]


class _Kept(NamedTuple):
    """A task in memory that its file can replace, as long as it has these checksums."""

    sums: Sums
    nbytes: int


class TaskTable(nn.Module):
    """The tasks of a model by name, in the order in which they were added.

    Names are free text, so entries bypass the checks of attribute names.

    Args:
        read: Reads the task of a name from the folder; whoever has written to the folder has put it there.
        forget: Called with a task before it leaves memory.

    Attributes:
        memory: Bytes that tasks may take which can be read again. Others do not count.
        damaged: Tasks whose files were found to be wrong, with the messages.
    """

    def __init__(self, read: Callable[[str], TaskState], forget: Callable[[TaskState], None]) -> None:
        super().__init__()
        self.memory = MEMORY
        self.damaged: dict[str, str] = {}
        self._read, self._forget = read, forget
        self._numbers: dict[str, int] = {}  # of every task, in memory or not
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self.changes = 0  # how often a task was added, replaced or removed
        self.casts: list[Callable[[Tensor], Tensor]] = []  # conversions of the model that tasks on disk have missed
        self._lock = threading.RLock()

    @property
    def _table(self) -> dict[str, TaskState]:
        """The tasks that are in memory, by the names of submodules."""
        return cast("dict[str, TaskState]", self._modules)

    # -- reading ------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> TaskState:
        """The task, read from its file if it is not in memory."""
        task = self.in_memory(name)
        if task is not None and name not in self._kept:
            return task
        with self._lock:
            task = self.in_memory(name) or self._load(name)
            if name in self._kept:
                self._kept.move_to_end(name)
        return task

    def in_memory(self, name: str) -> TaskState | None:
        """The task if it is in memory. Raise UsageError if there is none of that name."""
        if name not in self:
            known = ", ".join(map(repr, list(self)[:8])) or "none yet"
            more = ", ..." if len(self) > 8 else ""
            raise UsageError(f"no task is named {name!r}; tasks: {known}{more}")
        return self._table.get(_module_key(name))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._numbers))

    def keys(self) -> list[str]:
        """The names in order."""
        return list(self)

    def values(self) -> list[TaskState]:
        """The tasks in order; all of them are read."""
        return [self[name] for name in self]

    def items(self) -> list[tuple[str, TaskState]]:
        """Names and tasks in order; all of them are read."""
        return [(name, self[name]) for name in self]

    def last(self) -> TaskState | None:
        """The task that was added last."""
        with self._lock:
            name = next(reversed(self._numbers), None)
            return None if name is None else self[name]

    def is_last(self, task: TaskState) -> bool:
        """Whether a task is the one that was added last."""
        return next(reversed(self._numbers), None) == task.name and self.in_memory(task.name) is task

    # -- changing -----------------------------------------------------------------------------------------

    def put(self, task: TaskState) -> None:
        """Add a task, or replace the one with its name in place."""
        with self._lock:
            self.changes += 1
            self._number(task.name)
            self._let_go(task.name)
            old, task.number = self.in_memory(task.name), self._numbers[task.name]
            if old is not None and old is not task:
                self._forget(old)
            self._modules[_module_key(task.name)] = task
            self.damaged.pop(task.name, None)

    def put_stored(self, name: str) -> None:
        """Add a task that is in the folder and is read later, or replace the one with its name in place."""
        with self._lock:
            self.changes += 1
            self._number(name)
            self._drop(name)
            self.damaged.pop(name, None)

    def _number(self, name: str) -> None:
        if name not in self._numbers:
            last = next(reversed(self._numbers.values()), -1)
            self._numbers[name] = last + 1

    def remove(self, name: str) -> None:
        """Remove a task."""
        with self._lock:
            self.changes += 1
            self._drop(name)
            del self._numbers[name]
            self.damaged.pop(name, None)

    def _drop(self, name: str) -> None:
        self._let_go(name)
        task = self._table.pop(_module_key(name), None)
        if task is not None:
            self._forget(task)

    # -- leaving memory -----------------------------------------------------------------------------------

    def keep(self, task: TaskState) -> None:
        """A task's file has the values that it has now: it can leave memory."""
        with self._lock:
            self._let_go(task.name)
            nbytes = sum(t.nbytes for t in task.tensors().values())
            self._kept[task.name] = _Kept(sums_of(task), nbytes)
            self._bytes += nbytes

    def is_as_stored(self, name: str) -> bool:
        """Whether the task's file has the values that it has now. True for tasks that are not in memory."""
        task = self.in_memory(name)
        if task is None:
            return True
        kept = self._kept.get(name)
        return kept is not None and kept.sums == sums_of(task)

    def shrink(self, memory: int | None = None) -> None:
        """Let least recently used tasks leave memory, down to a number of bytes: by default the bound."""
        limit, attempts = (self.memory, ATTEMPTS) if memory is None else (memory, len(self._kept))
        with self._lock:
            for name in list(self._kept)[:attempts]:
                if self._bytes <= limit:
                    break
                self._leave(name)

    def _leave(self, name: str) -> None:
        """Let a task leave memory, unless it has changed or something else holds it or its tensors."""
        task = self._table[_module_key(name)]
        if not self.is_as_stored(name) or any(p.grad is not None for p in task.parameters()):
            self._let_go(name)
            return
        self._forget(task)
        del self._modules[_module_key(name)]
        fresh = task.emptied()
        values = {key: t.data for key, t in task.tensors().items()}  # other tensors with the same memory
        tensors, held = {key: ref(t) for key, t in task.tensors().items()}, ref(task)
        del task
        found = held()
        if found is None and any(t() is not None for t in tensors.values()):
            found = fresh
            for key, value in values.items():
                found.put(key, value)
                own = tensors[key]()
                if own is not None:
                    found.own(key, own)
        if found is None:
            self._let_go(name)
        else:
            self._modules[_module_key(name)] = found
            self._kept.move_to_end(name)

    def _let_go(self, name: str) -> None:
        """Do not count a task among those that can leave memory."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self._bytes -= kept.nbytes

    def _load(self, name: str) -> TaskState:
        task = self._from_file(name)
        self._modules[_module_key(name)] = task
        self.keep(task)
        self.shrink()
        return task

    def _from_file(self, name: str) -> TaskState:
        try:
            task = self._read(name)
        except FileError as error:
            self.damaged[name] = str(error)
            raise
        self.damaged.pop(name, None)
        task.number = self._numbers[name]
        return task

    def check(self) -> dict[str, str]:
        """Read the files of all tasks that are not in memory. Returns the damaged ones with the messages."""
        for name in self:
            if self.in_memory(name) is None:
                try:
                    self._from_file(name)
                except FileError:
                    continue
        return self.damaged

    # -- as a module --------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> TaskTable:
        """Tasks have tensors only, so there is nothing to switch."""
        self.__dict__["training"] = mode  # not by setattr: a task may have that name
        return self

    def cast(self, tensor: Tensor) -> Tensor:
        """A tensor from a file as the model's conversions since it was loaded have left the others."""
        for convert in self.casts:
            tensor = convert(tensor)
        return tensor

    def _apply(self, fn: Any, recurse: bool = True) -> TaskTable:
        """Convert the tasks in memory. Others are converted when they are read."""
        with self._lock:
            if len(self) > len(self._modules) or self._kept:
                probes = [torch.zeros(2, 2, 2, 2, dtype=t) for t in (torch.double, torch.float, torch.half, torch.long)]
                after = [fn(p.clone()) for p in probes]
                if any(a.dtype is not p.dtype or a.stride() != p.stride() for a, p in zip(after, probes, strict=True)):
                    self.casts.append(fn)
            first = next(iter(self._kept), None)
            if first is not None and any(fn(t) is not t for t in self[first].tensors().values()):
                self.shrink(0)  # quicker than to convert them
            still = [name for name in self._kept if self.is_as_stored(name)]
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name in still:
                self.keep(self._table[_module_key(name)])
        return self

    def written(self) -> None:
        """All tasks on disk have been written as they would be read."""
        self.casts.clear()

    def read_all(self) -> None:
        """Read every task, whatever memory that takes."""
        with self._lock:
            memory, self.memory = self.memory, 1 << 62
            try:
                ordered = {_module_key(name): self[name] for name in self}
            finally:
                self.memory = memory
            self._modules.clear()
            self._modules.update(ordered)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.read_all()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.read_all()
        super()._load_from_state_dict(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> TaskTable:
        """A copy that reads from the same files."""
        new: TaskTable = type(self).__new__(type(self))
        memo[id(self)] = new
        with self._lock:
            state = {key: value for key, value in self.__dict__.items() if key != "_lock"}
            new.__dict__.update(copy.deepcopy(state, memo), _lock=threading.RLock())
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Everything, because a copy in another place may not find the files."""
        self.read_all()
        return {**self.__dict__, "_kept": OrderedDict(), "_bytes": 0, "casts": [], "_lock": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()


def sums_of(task: TaskState) -> Sums:
    """Changes whenever a task's file would."""
    about: object
    try:
        about = check_about(task.about, "a task")
    except UsageError:
        about = object()  # cannot be saved, so it is not what was saved
    names = task.name, task.classes, task.class_names, about
    return (*names, *((key, t.dtype, t.shape, zlib.crc32(raw_bytes(t))) for key, t in task.tensors().items()))


def _module_key(name: str) -> str:
    return name.replace("%", "%25").replace(".", "%2E")

"""What the commands that write into a directory are doing: which runs wait, which are at work and where, which failed.

Each command keeps a file of its own, `.queue/<name>.json`, and a lock that ends with it, however it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from rkr.atomic import write_atomic
from rkr.errors import FileError
from rkr.experiment.events import Event, Progress, Started, TaskEnd
from rkr.experiment.execution import Interrupted
from rkr.experiment.folder import RunFolder
from rkr.locks import is_locked

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER = ".queue"
WRITE_SECONDS = 1.0
KEPT = 20  # files of commands that have ended
STATES = ("running", "waiting", "failed", "stopped", "finished")


@dataclass(frozen=True)
class Entry:
    """A run of a queue.

    Attributes:
        run: Its title, such as "cifar100-lenet rkr A".
        folder: Its folder, below the directory of results.
        state: One of `STATES`. "stopped" is one that the same command resumes.
        since: When that began, in seconds since 1970.
        node: Where it is or was at work.
        task: How many tasks are learned, and how many there are; (0, 0) if it has not begun.
        done: Share of the whole run.
        begun: How often it was begun by the command: more than once if processes were lost.
        reason: Why it failed.
    """

    run: str
    folder: str
    state: str = "waiting"
    since: float = 0.0
    node: str = ""
    task: tuple[int, int] = (0, 0)
    done: float = 0.0
    begun: int = 0
    reason: str = ""


class Queue:
    """The file of a command, kept up to date from the events of its runs.

    Args:
        out: The directory of results.
        runs: The titles and folders of its runs.
    """

    def __init__(self, out: Path, runs: Iterable[tuple[str, Path]]) -> None:
        self._folder = out / FOLDER
        self._entries = {run: Entry(run, _below(folder, out), since=time.time()) for run, folder in runs}
        self._path = self._folder / f"{int(time.time())}-{secrets.token_hex(4)}.json"
        self._lock, self._written = threading.RLock(), 0.0
        self._held = FileLock(self._path.with_suffix(".lock"), thread_local=False)

    def __enter__(self) -> Self:
        if int(os.environ.get("RANK", "0")):  # under torchrun the first process tells
            self._written = math.inf
            return self
        with contextlib.suppress(OSError, FileError):  # a report of the work is no reason to refuse it
            self._folder.mkdir(parents=True, exist_ok=True)
            self._held.acquire(timeout=0)
            self._forget()
        self._write(now=True)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for run, entry in self._entries.items():
                if entry.state in ("running", "waiting"):
                    self._entries[run] = dataclasses.replace(entry, state="stopped", since=time.time())
        self._write(now=True)
        self._held.release()

    def add(self, run: str, folder: Path) -> None:
        """One more run."""
        with self._lock:
            self._entries.setdefault(run, Entry(run, _below(folder, self._folder.parent), since=time.time()))
        self._write()

    def told(self, event: Event) -> None:
        """An event of one of its runs."""
        with self._lock:
            entry = self._entries.get(event.run)
            if entry is None or entry.state in ("finished", "failed"):
                return
            changes: dict[str, Any] = {} if entry.state == "running" else {"state": "running", "since": time.time()}
            if isinstance(event, Started):
                changes |= {"node": event.node or socket.gethostname(), "task": (event.number - 1, len(event.tasks))}
                changes |= {"begun": entry.begun + 1}
            elif isinstance(event, TaskEnd):
                changes |= {"task": (event.number, event.tasks), "done": event.number / event.tasks}
            elif isinstance(event, Progress):
                changes |= {"done": event.done}
            self._entries[event.run] = dataclasses.replace(entry, **changes)
        self._write(now=isinstance(event, Started))

    def ended(self, run: str, error: BaseException | None) -> None:
        """A run has ended."""
        with self._lock:
            entry = self._entries[run]
            state = "finished" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
            changes: dict[str, Any] = {"done": 1.0, "task": (entry.task[1],) * 2} if error is None else {}
            reason = str(error) if state == "failed" else ""
            changed = dataclasses.replace(entry, state=state, since=time.time(), reason=reason, **changes)
            self._entries[run] = changed
        self._write(now=state == "failed")

    def _write(self, now: bool = False) -> None:
        with self._lock, contextlib.suppress(FileError):
            if self._written < math.inf and (now or time.monotonic() - self._written > WRITE_SECONDS):
                self._written = time.monotonic()
                about = {"host": socket.gethostname(), "process": os.getpid()}
                values = {**about, "runs": [dataclasses.asdict(entry) for entry in self._entries.values()]}
                write_atomic(self._path, json.dumps(values).encode(), durable=False)

    def _forget(self) -> None:
        """Delete the oldest files of commands that have ended."""
        ended = [path for path in sorted(self._folder.glob("*.json")) if not _at_work(path)]
        for path in ended[:-KEPT]:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


def read_queue(out: Path) -> list[Entry]:
    """All runs below a directory as they are now: the latest command that knows a run tells about it."""
    if not out.is_dir():
        raise FileError(f"{out}: there is no such folder")
    found: dict[str, Entry] = {}
    for path in sorted(out.glob(f"**/{FOLDER}/*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            runs = json.loads(path.read_text())["runs"]
            base, at_work = _below(path.parent.parent, out), _at_work(path)
            for values in runs:
                entry = Entry(**{**values, "task": tuple(values["task"])})
                state = entry.state if at_work or entry.state in ("finished", "failed") else "stopped"
                folder = entry.folder if base == "." else f"{base}/{entry.folder}"
                later = folder in found and found[folder].since > entry.since
                if not later:
                    found[folder] = dataclasses.replace(entry, folder=folder, state=state)
    for path in sorted(out.glob("**/run.json")):
        folder = _below(path.parent, out)
        finished = RunFolder(path.parent).finished
        if finished and (folder not in found or found[folder].state != "finished"):
            since = path.parent.joinpath("results.jsonl").stat().st_mtime
            run = found[folder].run if folder in found else folder
            found[folder] = Entry(run, folder, "finished", since, done=1.0)
        elif folder not in found:
            found[folder] = Entry(folder, folder, _state(path.parent), path.stat().st_mtime)
    return sorted(found.values(), key=lambda entry: (STATES.index(entry.state), entry.folder))


def _state(folder: Path) -> str:
    """Of a run that no command tells about."""
    return "running" if is_locked(folder / "lock") else "stopped"


def _at_work(path: Path) -> bool:
    return is_locked(path.with_suffix(".lock"))


def _below(folder: Path, out: Path) -> str:
    return Path(os.path.relpath(folder, out)).as_posix()

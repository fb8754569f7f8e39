"""The folder of a run: settings, results that only grow, the last state, and a lock.

run.json           settings and environment; written once
results.jsonl      a line for each epoch, task and candidate; repeating a run gives the same bytes
times.jsonl        durations, which differ between repetitions
state.safetensors  where to resume; deleted when the run is finished
candidates/        candidates of the current task; deleted when the task is learned
model/             what was learned; for RKR one file per task, for `rkr.load`
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rkr.atomic import TEMPORARY, write_atomic
from rkr.errors import FileError, UsageError
from rkr.experiment.results import RUN_FORMAT, read_lines
from rkr.experiment.state import load_state, save_state

DATA = "stream_sha256"  # among the settings: a hash of all samples


class RunFolder:
    """The only writer of a run's files.

    Args:
        path: The folder.
        saved: Called when its files belong together, so that the run could go on from them.
    """

    def __init__(self, path: Path, saved: Callable[[], None] = lambda: None) -> None:
        self.path, self._saved = path, saved
        self.results = path / "results.jsonl"
        self.times = path / "times.jsonl"
        self.model = path / "model"
        self.candidates = path / "candidates"
        self._settings = path / "run.json"
        self._state = path / "state.safetensors"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. A second process gets an error. The lock ends with the process, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be created: {error.strerror or error}; choose another --out"
            ) from error
        lock = FileLock(self.path / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UsageError(
                f"{self.path}: another process is executing this run: wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise FileError(f"{self.path}: cannot be locked: {error.strerror or error}") from error
        try:
            yield
        finally:
            lock.release()

    def tidy(self) -> None:
        """Remove half-written files of a process that was killed. The folder must be locked."""
        for left in self.path.rglob(f"{TEMPORARY}*.tmp"):
            with contextlib.suppress(OSError):
                left.unlink()

    def begin(self, settings: dict[str, Any], data: str, about: Callable[[], dict[str, Any]]) -> None:
        """Write the settings, or check that the folder has the same ones. Removes half-written files of a killed run.

        `data` is a hash of all samples; `about` is called only for a new run.
        """
        settings = {**settings, DATA: data}
        self.tidy()
        if self._settings.exists():
            try:
                there = read_record(self._settings)["settings"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise FileError(f"{self._settings}: cannot be read ({error}): move the folder away") from error
            wanted = json.loads(json.dumps(settings))
            if there != wanted:
                key, old, new = next(_differences(there, wanted))
                how = "the data have changed" if key == DATA else f"{key} is {old!r} there, {new!r} now"
                raise UsageError(
                    f"{self.path} holds a run with other settings ({how}): "
                    "choose another folder with --out, or remove that one"
                )
        else:
            text = json.dumps({"format": RUN_FORMAT.version, **about(), "settings": settings}, indent=1)
            write_atomic(self._settings, (text + "\n").encode())

    def take_over(self, others: Iterable[Path]) -> str | None:
        """Copy another finished run with the same settings, apart from the recipe's name, unless this one has begun.

        Several tables of a paper share runs. Damaged runs are never copied. Results mark a run as finished, so they are
        copied last.

        Returns:
            The recipe, method and order of the run that was copied, or None.
        """
        if self.results.exists() or self._state.exists():
            return None
        from rkr.experiment.learned import is_intact

        own = read_record(self._settings)
        for path in others:
            other = RunFolder(path)
            try:
                record = read_record(other._settings)
                same = {**record["settings"], "recipe": ""} == {**own["settings"], "recipe": ""}
            except (OSError, ValueError, KeyError, TypeError, FileError):
                continue
            if not same or not is_intact(path):
                continue
            source = "/".join(path.parts[-3:])
            mine = {"recipe": own["recipe"], "settings": own["settings"], "same_as": source}
            with _explained(self.path):
                shutil.rmtree(self.model, ignore_errors=True)  # files of a copy that was killed
                for file in filter(Path.is_file, (*other.model.rglob("*"), other.times)):
                    write_atomic(self.path / file.relative_to(path), file.read_bytes())
                write_atomic(self._settings, (json.dumps({**record, **mine}, indent=1) + "\n").encode())
                write_atomic(self.results, other.results.read_bytes())
            return source
        return None

    @property
    def finished(self) -> bool:
        """Whether the run is finished. Reads only the last bytes: results can be long."""
        try:
            with open(self.results, "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - 100))
                text = file.read()
        except OSError:
            return False
        lines = text[: text.rfind(b"\n") + 1].splitlines()  # without a line that was cut short
        return bool(lines) and lines[-1].startswith(b'{"event": "end"')

    def lines(self) -> list[dict[str, Any]]:
        """The results so far."""
        try:
            return [line.values for line in read_lines(self.results)]
        except FileError as error:
            raise FileError(f"{error}: remove {self.path} to start over") from error

    def append(self, path: Path, line: dict[str, Any]) -> None:
        """Add a line to one of the growing files."""
        with _explained(path), open(path, "ab") as file:
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def save(self, state: dict[str, Any]) -> None:
        """Keep a state, and how much of the results belongs to it."""
        size = self.results.stat().st_size if self.results.exists() else 0
        save_state(self._state, {**state, "results": size})
        self._saved()

    def resume(self) -> dict[str, Any] | None:
        """The last state, if any. Results written after it are dropped: they will be written again."""
        if not self._state.exists():
            if self.results.exists() and not self.finished:
                self._cut(0)
            return None
        state = self.state()
        self._cut(state.pop("results"))
        return state

    def state(self) -> dict[str, Any]:
        """The last state. It must exist."""
        found: dict[str, Any] = load_state(self._state)
        return found

    def close(self, tasks: int) -> None:
        """Mark the run as finished."""
        self.append(self.results, {"event": "end", "tasks": tasks})
        self.drop_state()
        self._saved()

    def save_candidate(self, name: str, state: dict[str, Any]) -> None:
        """Keep the state of a candidate, or what came out of it."""
        save_state(self.candidates / name, state)
        self._saved()

    def drop_state(self) -> None:
        """Delete the state: a finished run is not resumed."""
        self._state.unlink(missing_ok=True)

    def drop_candidates(self, keep: Callable[[str], bool] = lambda name: False) -> None:
        """Delete the files of candidates, except those to keep."""
        for path in self.candidates.glob("*"):
            if not keep(path.name):
                with _explained(path):
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing or not empty
            self.candidates.rmdir()

    def _cut(self, size: int) -> None:
        if not self.results.exists():
            if size:
                raise FileError(f"{self.results}: is missing, but there is a state: remove {self.path} to start over")
            return
        if self.results.stat().st_size < size:
            raise FileError(f"{self.results}: shorter than when the state was saved: remove {self.path} to start over")
        with _explained(self.results), open(self.results, "r+b") as file:
            file.truncate(size)


def read_record(path: Path) -> dict[str, Any]:
    """The content of `run.json`, upgraded to the current version."""
    record = json.loads(path.read_text())
    return dict(RUN_FORMAT.upgraded(path, record["format"], record))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}; the last saved state is intact") from error


def _differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    elif a != b:
        yield path, a, b

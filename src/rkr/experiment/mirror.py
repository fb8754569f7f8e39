"""A run's folder on two machines: what has changed on the one is sent to the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rkr.atomic import TEMPORARY, write_atomic
from rkr.errors import FileError

# Files that tell what others are for come after them, so that a kill between two leaves a folder to go on from.
LAST = ("times.jsonl", "run.json", "results.jsonl", "state.safetensors")


@dataclass(frozen=True)
class Changes:
    """Files by their paths, whole, and those that are gone."""

    files: dict[str, bytes]
    gone: tuple[str, ...] = ()


def contents(root: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The files below `root` that match: their paths and what is in them."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths) if _belongs(path)}


def put(root: Path, changes: Changes) -> None:
    """Take over changes. A kill leaves a folder to go on from: with the state before, or with the new one."""
    for name in (*changes.files, *changes.gone):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise FileError(f"{name}: not a path below {root}")
    for name in sorted(changes.files, key=_turn):
        write_atomic(root / name, changes.files[name])
    for name in changes.gone:
        (root / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            (root / name).parent.rmdir()


class Mirror:
    """Finds what has changed in a folder below `root` since it was last asked."""

    def __init__(self, root: Path, folder: str) -> None:
        self._root, self._folder = root, root / folder
        self._seen = self._stamps()

    def changes(self) -> Changes:
        """What has changed. The folder is not written to meanwhile."""
        now = self._stamps()
        files = {name: (self._root / name).read_bytes() for name, stamp in now.items() if self._seen.get(name) != stamp}
        gone = tuple(name for name in self._seen if name not in now)
        self._seen = now
        return Changes(files, gone)

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for path in self._folder.rglob("*"):
            if _belongs(path):
                known = path.stat()
                found[path.relative_to(self._root).as_posix()] = (known.st_mtime_ns, known.st_size, known.st_ino)
        return found


def _belongs(path: Path) -> bool:
    """Whether a file is of the run, not a lock of the machine that it lies on."""
    locks = path.name == "lock" or (path.suffix == ".lock" and path.parent.name == "candidates")
    return not locks and not path.name.startswith(TEMPORARY) and path.is_file()


def _turn(name: str) -> int:
    last = PurePosixPath(name).name
    return LAST.index(last) + 1 if last in LAST else 0

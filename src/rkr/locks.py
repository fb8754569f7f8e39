"""Locks that end with their process, however it ends: they tell whether it is alive."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from rkr.errors import RkrError


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock."""
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True
    except (OSError, RkrError):
        return False


@contextmanager
def own_folder(place: Path, prefix: str = "") -> Iterator[Path]:
    """A folder within `place`, locked as long as its process lives; those of processes that were killed are removed."""
    for lock in place.glob(f"{prefix}*.lock"):
        with suppress(OSError, Timeout):
            if lock.stat().st_uid == os.getuid():
                with FileLock(lock, timeout=0):
                    _remove(lock)
    root = place / f"{prefix}{secrets.token_hex(8)}"
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(lock_of(root), thread_local=False):  # before there is a folder that others could remove
        root.mkdir(mode=0o700)
        try:
            yield root
        finally:
            _remove(lock_of(root))


def lock_of(folder: Path) -> Path:
    """The lock of a folder that `own_folder` has made."""
    return folder.with_suffix(".lock")


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)

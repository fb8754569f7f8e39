"""Atomic writes: a file has its old content or its new content, never a part of it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from rkr.errors import FileError

TEMPORARY = ".rkr-"  # prefix of unfinished files


def write_atomic(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a temporary file, fsync and rename it, so that a kill leaves either the old or the new content.

    Pass `durable=False` to skip fsync for files that can be recomputed: a power failure may leave them empty.
    """
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    renamed = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        renamed = True
        if durable:
            _sync_folder(path.parent)
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise _failed(path, error) from error
    finally:
        if not renamed:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def append(path: Path, data: bytes, at: int) -> None:
    """Write data at the end of a file, which is made if necessary, and fsync it.

    A kill may leave a part of the data: readers must recognise it, and the next call removes it.

    Args:
        path: The file.
        data: What to append.
        at: Size of the file without such a part.
    """
    new = not path.exists()
    try:
        with open(path, "xb" if new else "r+b", buffering=0) as file:
            try:
                file.truncate(at)
                file.seek(at)
                while data:
                    data = data[file.write(data) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(at)
                raise
        if new:
            _sync_folder(path.parent)
    except OSError as error:
        raise _failed(path, error) from error


def _sync_folder(path: Path) -> None:
    """Let a change of names in a folder last."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _failed(path: Path, error: OSError | ValueError) -> FileError:
    return FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}")

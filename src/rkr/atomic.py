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
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if not renamed:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()

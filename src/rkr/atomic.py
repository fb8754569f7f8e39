"""Files that are either there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from rkr.errors import FileError

TEMPORARY = ".rkr-"  # how unfinished files begin


def write_atomic(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file so that a kill at any moment leaves the old content or the new: temporary file, fsync, rename.

    What can be made again at any time need not be `durable`: a loss of power may then leave it empty.
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
    except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if not renamed:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()

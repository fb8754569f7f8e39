"""The partial results of a feature file: the folder `<file>.part`.

lock               held by the process that computes
settings.json      what the features depend on; written first
*.safetensors      the features of a chunk of batches
done.json          the hash of the whole file and the settings; written before the file is moved into place
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from rkr.atomic import TEMPORARY, write_atomic
from rkr.core.files import check_tensors, decode, encode
from rkr.errors import FileError, UsageError
from rkr.versions import Format

PARTS = Format("rkr-features", 1)  # of the chunks and of settings.json


class Parts:
    """Writes a feature file and its part folder."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.with_name(f"{out.name}.part")
        self._lock = self.path / "lock"
        self._settings = self.path / "settings.json"
        self._done = self.path / "done.json"
        self._whole = self.path / "whole.mat"
        self._current: Mapping[str, Any] = {}  # settings

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other processes. At the end it is removed if it holds no results."""
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be created: {error.strerror or error}") from error
        lock = FileLock(self._lock, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UsageError(f"{self.out}: another process is writing this file; wait for it or stop it") from None
        except OSError as error:
            raise FileError(f"{self.path}: cannot be locked: {error.strerror or error}") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.listdir(self.path) == [self._lock.name]:
                    self._lock.unlink()
                    self.path.rmdir()
            lock.release()

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Write the settings, or check that those of the folder are the same."""
        for left in self.path.glob(f"{TEMPORARY}*.tmp"):  # left by a killed process
            left.unlink(missing_ok=True)
        self._current = settings
        some_work = any(self.path.glob("*.safetensors"))
        if not self._settings.exists() or not some_work:  # without results, old settings do not matter
            if some_work:
                raise FileError(f"{self._settings}: missing, so the partial results cannot be used: remove {self.path}")
            write_atomic(self._settings, (json.dumps(settings, indent=1) + "\n").encode())
            return
        there, now = _read(self._settings), _plain(settings)
        there = PARTS.upgraded(self._settings, there.get("format"), there)
        for key in (*now, *there):
            if there.get(key) != now.get(key):
                raise UsageError(
                    f"{self.path} holds partial results with other settings "
                    f"({key}: {_short(there.get(key))} there, {_short(now.get(key))} now): "
                    "run the original command, or remove the folder"
                )

    def led_to_file(self, settings: Mapping[str, Any]) -> bool:
        """Whether the existing file was written from this folder, so that only the cleanup is missing."""
        return self._done.exists() and _read(self._done) == _done(_bytes(self.out), settings)

    def has(self, name: str) -> bool:
        """Whether a chunk is finished."""
        return self._chunk(name).exists()

    def save(self, name: str, features: Tensor) -> None:
        """Save a chunk: float32 (n, D)."""
        write_atomic(self._chunk(name), encode({"features": features}, PARTS.stated))

    def load(self, name: str, images: int, width: int) -> Tensor:
        """Load and verify a chunk."""
        path = self._chunk(name)
        try:
            _, tensors = decode(path, PARTS)
            check_tensors(path, tensors, {"features": ((images, width), torch.float32)})
        except FileError as error:
            raise FileError(f"{error}; remove that file and run the command again") from error
        return tensors["features"]

    def publish(self, data: bytes) -> None:
        """Write the file in the folder, where a kill leaves no debris, and move it into place."""
        write_atomic(self._whole, data)
        write_atomic(self._done, json.dumps(_done(data, self._current)).encode())
        try:
            os.replace(self._whole, self.out)
            folder = os.open(self.out.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise FileError(f"{self.out}: cannot be written: {error.strerror or error}") from error

    def clear(self) -> None:
        """Remove the partial results. done.json goes last, so that a killed cleanup can be recognised."""
        try:
            for path in (*self.path.glob("*.safetensors"), self._whole, self._settings, self._done):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be removed: {error.strerror or error}; remove it") from error

    def _chunk(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_bytes(path))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise FileError(f"{path}: damaged ({error}): remove {path.parent}") from error
    return found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error


def _done(data: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "settings": _plain(settings)}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as read from JSON: tuples become lists."""
    return dict(json.loads(json.dumps(settings)))


def _short(value: Any) -> str:
    """A setting in a message. Hashes are shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:12]}..."

"""Keeps decoded pictures: in memory, beyond a bound in a file, and beyond that not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rkr.errors import FileError
from rkr.pictures.preparation import Preparation

MEMORY = 2 << 30  # bytes of squares that are kept in memory
SHARE_OF_DISK = 0.5  # of the free space, that squares may take in a file
AHEAD = 64  # pictures that are decoded ahead of those that are taken
Watch = Callable[[int, int], None]  # pictures done, and in total


class Squares:
    """The squares of a listing, as `rkr.data.Pictures` reads them.

    Args:
        paths: The files.
        preparation: How they are decoded.
        folder: Where a file with squares may be put, if memory is too small for them. None: nowhere.
        memory: How many bytes of squares may be kept in memory.
        threads: Threads for decoding.
    """

    def __init__(
        self,
        paths: Sequence[str],
        preparation: Preparation,
        folder: Path | None = None,
        memory: int = MEMORY,
        threads: int | None = None,
    ) -> None:
        self.side = preparation.resize
        self.names: Sequence[bytes] = ()  # hashes of the files, once they are read
        self._paths, self._preparation, self._folder = paths, preparation, folder
        self._threads = threads or os.cpu_count() or 1
        self._kept: Tensor | None = None
        self._file: Path | None = None
        self.kept_in = place(len(paths), self.side, memory, folder)

    def load(self, watch: Watch = lambda done, total: None) -> list[str | FileError]:
        """Read every file once: the SHA-256 of its content, or why it is not a picture. Squares are kept."""
        self._allocate()
        found: list[str | FileError] = []
        for number, (content, square) in enumerate(self.decoded(range(len(self._paths)), hashed=True)):
            found.append(content)
            if self._kept is not None and square is not None:
                self._kept[number] = square
            watch(number + 1, len(self._paths))
        self.names = [b"" if isinstance(one, FileError) else bytes.fromhex(one) for one in found]
        return found

    def read(self, rows: Tensor) -> Tensor:
        """Some squares: uint8 (B, 3, R, R)."""
        if self._kept is not None:
            return self._kept.index_select(0, rows)
        squares = []
        for content, square in self.decoded(rows.tolist()):
            if square is None:
                raise content if isinstance(content, FileError) else FileError(content)
            squares.append(square)
        return torch.stack(squares)

    def close(self) -> None:
        """Free the memory, and remove the file."""
        self._kept = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _allocate(self) -> None:
        shape = (len(self._paths), self.side, self.side, 3)
        if self.kept_in == "memory":
            kept = torch.empty(shape, dtype=torch.uint8)
        elif self.kept_in == "file":
            assert self._folder is not None
            self._file = self._folder / "squares.bin"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                mapped = np.memmap(self._file, dtype=np.uint8, mode="w+", shape=shape)
            except OSError as error:
                raise FileError(f"{self._file}: cannot be written: {error.strerror or error}") from error
            kept = torch.from_numpy(mapped)
        else:
            return
        self._kept = kept.permute(0, 3, 1, 2)  # (N, 3, R, R), channels_last

    def decoded(
        self, rows: Sequence[int], hashed: bool = False
    ) -> Generator[tuple[str | FileError, Tensor | None], None, None]:
        """Hashes and squares in order. Threads, because Pillow releases Python's lock while it decodes."""
        pool = ThreadPoolExecutor(self._threads, "decode")
        waiting: deque[Future[tuple[str | FileError, Tensor | None]]] = deque()
        try:
            for row in rows:
                waiting.append(pool.submit(self._one, self._paths[row], hashed))
                if len(waiting) >= AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _one(self, path: str, hashed: bool) -> tuple[str | FileError, Tensor | None]:
        try:
            with open(path, "rb") as file:
                data = file.read()
            square = self._preparation.square(data)
        except OSError as error:
            return FileError(f"{path}: cannot be read: {error.strerror or error}"), None
        except FileError as error:
            return FileError(str(error).replace("the image", path, 1)), None
        return hashlib.sha256(data).hexdigest() if hashed else "", square


def place(count: int, side: int, memory: int, folder: Path | None) -> str:
    """Where squares are kept: "memory", "file" or "nowhere"."""
    size = count * side * side * 3
    if size <= memory:
        return "memory"
    if folder is not None:
        there = next((p for p in (folder, *folder.parents) if p.exists()), None)
        if there is not None and size <= SHARE_OF_DISK * shutil.disk_usage(there).free:
            return "file"
    return "nowhere"

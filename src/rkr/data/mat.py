"""Variables of MATLAB files: version 5 (with or without compression) by scipy, version 7.3, which is HDF5, by h5py.

Only numbers and text are taken from a file. Neither reader runs anything that a file asks for, as unpickling would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rkr.errors import FileError

HDF5 = b"\x89HDF\r\n\x1a\n"
USERBLOCK = 512  # MATLAB's own header, before the HDF5 file begins


@dataclass(frozen=True, eq=False)
class Variables:
    """Some variables of a file, in the shape that MATLAB shows."""

    path: Path
    numbers: dict[str, NDArray[Any]]  # real numbers, any shape
    texts: dict[str, tuple[str, ...]]  # cells of strings, or the rows of a character matrix
    names: tuple[str, ...]  # all that the file has, wanted or not

    def matrix(self, name: str) -> NDArray[Any]:
        """A matrix of numbers, or an error that says what is there instead."""
        if name in self.numbers:
            array = self.numbers[name]
            if array.ndim == 2:
                return array
            raise FileError(f"{self.path}: {name!r} must be a matrix of numbers, but has {array.ndim} dimensions")
        if name in self.names:
            raise FileError(f"{self.path}: {name!r} must be a matrix of numbers, but is of another kind")
        raise FileError(f"{self.path}: there is no variable {name!r}; it has {', '.join(sorted(self.names)) or 'none'}")


def read_mat(path: Path, wanted: Sequence[str]) -> Variables:
    """Read those of the wanted variables that a file has; the others are not even decompressed."""
    try:
        with open(path, "rb") as file:
            start = file.read(USERBLOCK + len(HDF5))
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _read_73(path, wanted) if start.startswith(HDF5) or start.endswith(HDF5) else _read_5(path, wanted)


def _read_5(path: Path, wanted: Sequence[str]) -> Variables:
    from scipy.io import loadmat, whosmat  # type: ignore[import-untyped]  # slow to import

    try:
        names = tuple(name for name, _, _ in whosmat(path, appendmat=False))
        content = loadmat(path, appendmat=False, variable_names=[name for name in wanted if name in names])
    except Exception as error:  # the reader has no error of its own: damage shows as any of a dozen
        raise FileError(f"{path}: damaged, or not a MATLAB file: {error}") from error
    return _sorted(path, wanted, names, content)


def _read_73(path: Path, wanted: Sequence[str]) -> Variables:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileError(
            f"{path} is a MATLAB 7.3 file, which needs the package h5py ({error}): pip install 'rkr[matlab73]', or "
            "save it in MATLAB with -v7"
        ) from error

    def text(data: Any) -> Any:
        """Characters are UTF-16 units; a string of length L is (L, 1)."""
        units = np.atleast_2d(np.asarray(data).T)
        if units.dtype.kind not in "iu" or units.ndim != 2:
            return None
        return np.array([row.astype("<u2").tobytes().decode("utf-16-le", "replace") for row in units], dtype=str)

    def value(item: Any) -> Any:
        """What scipy would have made of the same variable in a file of version 5."""
        if not isinstance(item, h5py.Dataset):
            return None  # a group: a struct, or a sparse matrix
        kind = item.attrs.get("MATLAB_class", b"")
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        data = item[()]
        if item.attrs.get("MATLAB_empty", 0):  # the data are the shape
            return np.zeros([int(n) for n in np.ravel(data)])
        if kind == "char":
            return text(data)
        if h5py.check_ref_dtype(item.dtype) is h5py.Reference:
            cells = np.empty(np.shape(data), dtype=object)
            for at, reference in np.ndenumerate(data):
                cells[at] = value(item.file[reference]) if reference else None
            return cells.T
        return np.asarray(data).T  # HDF5 counts dimensions in the opposite order

    try:
        with h5py.File(path, "r") as file:
            names = tuple(name for name in file if not name.startswith("#"))  # '#refs#' holds what cells refer to
            content = {name: value(file[name]) for name in wanted if name in names}
    except Exception as error:
        raise FileError(f"{path}: damaged, or not a MATLAB file: {error}") from error
    return _sorted(path, wanted, names, content)


def _sorted(path: Path, wanted: Sequence[str], names: tuple[str, ...], content: dict[str, Any]) -> Variables:
    """Variables by what they are."""
    numbers, texts = {}, {}
    for name in wanted:
        value = content.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            numbers[name] = value
        elif (strings := _strings(value)) is not None:
            texts[name] = strings  # and the rest is of no use: structs, sparse matrices, complex numbers, ...
    return Variables(path, numbers, texts, names)


def _strings(value: Any) -> tuple[str, ...] | None:
    """The strings of a cell, column by column, or the rows of a character matrix without their padding."""
    if not isinstance(value, np.ndarray):
        return None
    if value.dtype.kind == "U":
        return tuple(str(row).rstrip() for row in value.ravel())
    if value.dtype.kind != "O":
        return None
    strings = []
    for cell in value.ravel(order="F"):
        if not isinstance(cell, np.ndarray) or cell.size > 1 or (cell.size and cell.dtype.kind != "U"):
            return None
        strings.append(str(cell.ravel()[0]) if cell.size else "")
    return tuple(strings)

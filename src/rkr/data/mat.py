"""Reads variables of MATLAB files: version 5 with scipy, version 7.3 (HDF5) with h5py.

Only numbers and text are read, and no code in a file is executed.
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
USERBLOCK = 512  # size of MATLAB's header before the HDF5 data


@dataclass(frozen=True, eq=False)
class Variables:
    """Variables of a file, in MATLAB's shapes."""

    path: Path
    numbers: dict[str, NDArray[Any]]  # real numbers, any shape
    texts: dict[str, tuple[str, ...]]  # cells of strings, or the rows of a character matrix
    names: tuple[str, ...]  # of all variables in the file

    def matrix(self, name: str) -> NDArray[Any]:
        """A matrix of numbers. Raises FileError if the variable is missing or something else."""
        if name in self.numbers:
            array = self.numbers[name]
            if array.ndim == 2:
                return array
            raise FileError(f"{self.path}: {name!r} must be a matrix of numbers, but has {array.ndim} dimensions")
        if name in self.names:
            raise FileError(f"{self.path}: {name!r} must be a matrix of numbers, but has another type")
        raise FileError(f"{self.path}: no variable {name!r}; the file has {', '.join(sorted(self.names)) or 'none'}")


def read_mat(path: Path, wanted: Sequence[str]) -> Variables:
    """Read the wanted variables that the file has. Others are not decompressed."""
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
    except Exception as error:  # damaged files raise many kinds of errors
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
        """The value that scipy returns for the same variable in a version 5 file."""
        if not isinstance(item, h5py.Dataset):
            return None  # a group: a struct, or a sparse matrix
        kind = item.attrs.get("MATLAB_class", b"")
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        data = item[()]
        if item.attrs.get("MATLAB_empty", 0):  # the data is the shape
            return np.zeros([int(n) for n in np.ravel(data)])
        if kind == "char":
            return text(data)
        if h5py.check_ref_dtype(item.dtype) is h5py.Reference:
            cells = np.empty(np.shape(data), dtype=object)
            for at, reference in np.ndenumerate(data):
                cells[at] = value(item.file[reference]) if reference else None
            return cells.T
        return np.asarray(data).T  # HDF5 stores dimensions in reverse order

    try:
        with h5py.File(path, "r") as file:
            names = tuple(name for name in file if not name.startswith("#"))  # '#refs#' holds the content of cells
            content = {name: value(file[name]) for name in wanted if name in names}
    except Exception as error:
        raise FileError(f"{path}: damaged, or not a MATLAB file: {error}") from error
    return _sorted(path, wanted, names, content)


def _sorted(path: Path, wanted: Sequence[str], names: tuple[str, ...], content: dict[str, Any]) -> Variables:
    """Sort variables into numbers and texts."""
    numbers, texts = {}, {}
    for name in wanted:
        value = content.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            numbers[name] = value
        elif (strings := _strings(value)) is not None:
            texts[name] = strings  # structs, sparse matrices and complex numbers are ignored
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

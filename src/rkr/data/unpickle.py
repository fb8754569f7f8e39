"""Reading archives that nobody vouches for: pickles that can build only plain data, tar files that can write nowhere.

The CIFAR archives are tar files of pickles, and loading a pickle the usual way runs whatever program it holds. Here a
pickle can make dicts, lists, tuples, strings, numbers and uint8 arrays. Even for arrays no function of numpy is handed
to it: stand-ins note what it asks for and check it.
"""

from __future__ import annotations

import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NoReturn

import numpy as np

from rkr.errors import FileError

MEMBER_LIMIT = 1 << 28  # bytes; the largest member of either archive, CIFAR-100's train, has 155,249,918


class _Refused(Exception):
    """The pickle asks for something that its format does not need."""


class _StandIn:
    """What a pickle gets in the place of a numpy name; it cannot be changed by the pickle."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise _Refused("changes a function")


class _NdarrayName(_StandIn):
    """numpy.ndarray, as the first argument of _reconstruct only."""

    __slots__ = ()


class _Dtype:
    """numpy.dtype("u1") while its state is being read."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        # (version, byte order, subtype, names, fields, item size, alignment, flags)
        if not isinstance(state, tuple) or len(state) != 8 or state[1] not in (b"|", "|") or state[2:5] != (None,) * 3:
            raise _Refused("has an array type that is not plain uint8")


class _DtypeName(_StandIn):
    """numpy.dtype."""

    __slots__ = ()

    def __call__(self, kind: object = None, *flags: object) -> _Dtype:
        if kind not in (b"u1", "u1", b"uint8", "uint8"):
            raise _Refused(f"has an array of type {kind!r}, not uint8")
        return _Dtype()


class _Array:
    """An ndarray while its state is being read."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __setstate__(self, state: object) -> None:
        # (version, shape, dtype, Fortran order, bytes)
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("has an array with an unknown state")
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise _Refused("has an array that is not plain uint8")
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != len(data):
            raise _Refused("has an array whose shape does not fit its data")
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Reconstruct(_StandIn):
    """numpy.core.multiarray._reconstruct."""

    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        if not isinstance(kind, _NdarrayName):
            raise _Refused("has an array of an unknown class")
        return _Array()


# The opcodes that such pickles are written with, of Python 2 (protocol 2) and of today (protocols 3 and 4).
_OPCODES = frozenset(
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE
    + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1 + pickle.BINFLOAT
    + pickle.BINSTRING + pickle.SHORT_BINSTRING + pickle.BINUNICODE + pickle.SHORT_BINUNICODE
    + pickle.BINBYTES + pickle.SHORT_BINBYTES
    + pickle.EMPTY_DICT + pickle.SETITEM + pickle.SETITEMS + pickle.EMPTY_LIST + pickle.APPEND + pickle.APPENDS
    + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.BINPUT + pickle.LONG_BINPUT + pickle.MEMOIZE + pickle.BINGET + pickle.LONG_BINGET
    + pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.REDUCE + pickle.BUILD
)  # fmt: skip


def _refuse(opcode: int) -> Callable[[Any], NoReturn]:
    def refuse(self: object) -> NoReturn:
        raise _Refused(f"uses the opcode {chr(opcode)!r}")

    return refuse


class _Unpickler(pickle._Unpickler):
    """Knows three names; all others are refused before anything is imported.

    The one written in Python: opcodes can be taken from it, and it never makes room for more than the pickle really
    holds. (The one in C lets 5 bytes ask for 16 GB.) For CIFAR it takes a fraction of a second longer.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: load if opcode in _OPCODES else _refuse(opcode) for opcode, load in pickle._Unpickler.dispatch.items()
    }
    NAMES: ClassVar[dict[tuple[str, str], _StandIn]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
        ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),  # numpy 2 writes this one
        ("numpy", "ndarray"): _NdarrayName(),
        ("numpy", "dtype"): _DtypeName(),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.NAMES[module, name]
        except KeyError:
            raise _Refused(f"asks for {module}.{name}") from None


def unpickle(data: bytes, what: str) -> dict[str, Any]:
    """The dict in a pickle; `what` names it in errors. Strings of Python 2 become bytes, keys always str."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        return {_text(key): _plain(value) for key, value in _dict(found).items()}
    except _Refused as error:
        raise FileError(f"{what}: refused, because its pickle {error}") from error
    except RecursionError as error:
        raise FileError(f"{what}: refused, because its pickle is nested too deeply") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise FileError(f"{what}: not a whole pickle, cut short or damaged ({error})") from error


def _dict(value: object) -> dict[object, object]:
    if type(value) is not dict:
        raise _Refused("holds no dict")
    return value


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if isinstance(key, str):
        return key
    raise _Refused(f"has the key {key!r}")


def _plain(value: object) -> Any:
    """A value of the dict: an array, or strings and numbers in lists, arrays nowhere deeper."""
    if isinstance(value, _Array):
        if value.value is None:
            raise _Refused("has an array without data")
        return value.value
    if type(value) in (str, bytes, int, float, bool, type(None)):
        return value
    if type(value) in (list, tuple):
        if not all(type(item) in (str, bytes, int) for item in value):  # type: ignore[attr-defined]
            raise _Refused("has a list of other things than strings and numbers")
        return value
    raise _Refused(f"holds a {type(value).__name__}")


def read_tar(path: Path, folder: str, names: Collection[str]) -> dict[str, bytes]:
    """The files `folder/name` of a tar archive, read in one pass without writing anything to disk.

    Every member is looked at: an archive with a path outside `folder`, a link, a device or a name twice is refused.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if not parts or parts[0] != folder or ".." in parts or "\\" in member.name or "\0" in member.name:
                    raise FileError(f"{path}: refused, because its member {member.name!r} lies outside {folder}/")
                if not (member.isreg() or member.isdir()):
                    raise FileError(f"{path}: refused, because its member {member.name!r} is a link or a device")
                name = "/".join(parts[1:])
                if name not in names:
                    continue
                if name in found or not member.isreg():
                    raise FileError(f"{path}: refused, because {member.name!r} is not one file")
                if member.size > MEMBER_LIMIT:
                    raise FileError(f"{path}: refused, because {member.name!r} has {member.size:,} bytes")
                file = archive.extractfile(member)
                found[name] = file.read() if file is not None else b""
                if len(found[name]) != member.size:
                    raise FileError(f"{path}: cut short or damaged ({member.name!r} is not whole)")
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, MemoryError, ArithmeticError) as error:
        raise FileError(f"{path}: cannot be read: missing, cut short or damaged ({error})") from error
    missing = sorted(set(names) - set(found))
    if missing:
        raise FileError(f"{path}: {folder}/{missing[0]} is missing: damaged, cut short, or another archive")
    return found

"""Safe reading of untrusted archives: pickles that can only build plain data, and tar files that write nothing.

The CIFAR archives are tar files of pickles, and `pickle.load` runs any code that a pickle contains. Here a pickle can
only build dicts, lists, tuples, strings, numbers and uint8 arrays. Even for arrays no numpy function is called:
stand-ins record and check the arguments.
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
    """The pickle contains something that the format does not need."""


class _StandIn:
    """Stands in for a numpy name. The pickle cannot modify it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise _Refused("changes a function")


class _NdarrayName(_StandIn):
    """numpy.ndarray, only as the first argument of _reconstruct."""

    __slots__ = ()


class _Dtype:
    """numpy.dtype("u1") before its state is set."""

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
    """An ndarray before its state is set."""

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
            raise _Refused("has an array whose shape does not match its data")
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Reconstruct(_StandIn):
    """numpy.core.multiarray._reconstruct."""

    __slots__ = ()

    def __call__(self, kind: object, shape: object, code: object) -> _Array:
        if not isinstance(kind, _NdarrayName):
            raise _Refused("has an array of an unknown class")
        return _Array()


# The opcodes of such pickles, written by Python 2 (protocol 2) or Python 3 (protocols 3 and 4).
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
    """Resolves three names. All others are refused before anything is imported.

    Based on the unpickler written in Python, because its opcodes can be replaced and it never allocates more than the
    pickle contains (in the one written in C, 5 bytes can request 16 GB). It is a fraction of a second slower for CIFAR.
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
    """Read the dict in a pickle; `what` names it in errors. Strings of Python 2 become bytes, and keys become str."""
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        return {_text(key): _plain(value) for key, value in _dict(found).items()}
    except _Refused as error:
        raise FileError(f"{what}: refused, because its pickle {error}") from error
    except RecursionError as error:
        raise FileError(f"{what}: refused, because its pickle is nested too deeply") from error
    except Exception as error:  # damaged pickles raise many kinds of errors
        raise FileError(f"{what}: incomplete or damaged pickle ({error})") from error


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
    """A value of the dict: an array, a string or number, or a list of strings and numbers."""
    if isinstance(value, _Array):
        if value.value is None:
            raise _Refused("has an array without data")
        return value.value
    if type(value) in (str, bytes, int, float, bool, type(None)):
        return value
    if type(value) in (list, tuple):
        if not all(type(item) in (str, bytes, int) for item in value):  # type: ignore[attr-defined]
            raise _Refused("has a list with items other than strings and numbers")
        return value
    raise _Refused(f"holds a {type(value).__name__}")


def read_tar(path: Path, folder: str, names: Collection[str]) -> dict[str, bytes]:
    """Read the files `folder/name` of a tar archive in one pass, without writing to disk.

    An archive is refused if a member is outside `folder`, a link, a device or a duplicate.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if not parts or parts[0] != folder or ".." in parts or "\\" in member.name or "\0" in member.name:
                    raise FileError(f"{path}: refused, because its member {member.name!r} is outside {folder}/")
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
                    raise FileError(f"{path}: truncated or damaged ({member.name!r} is incomplete)")
    except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError, MemoryError, ArithmeticError) as error:
        raise FileError(f"{path}: cannot be read: missing, truncated or damaged ({error})") from error
    missing = sorted(set(names) - set(found))
    if missing:
        raise FileError(f"{path}: {folder}/{missing[0]} is missing: the archive is truncated, damaged or another one")
    return found

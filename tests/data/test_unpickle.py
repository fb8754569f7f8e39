"""Pickles and tar files from strangers: plain data comes out, everything else is refused and nothing is run."""

import builtins
import gzip
import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rkr
from rkr.data.unpickle import read_tar, unpickle

ARRAY = np.arange(12, dtype=np.uint8).reshape(3, 4)


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_python2_pickle(official: Any) -> None:
    write, _ = official
    found = unpickle(write({b"data": ARRAY, b"labels": [1, -2, 70000], b"filenames": [b"a", b"b" * 300]}), "x")
    assert (found["data"] == ARRAY).all()
    assert found["data"].dtype == np.uint8
    assert found["labels"] == [1, -2, 70000]
    assert found["filenames"] == [b"a", b"b" * 300]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_todays_pickle(protocol: int) -> None:
    if protocol == 5 and np.lib.NumpyVersion(np.__version__) >= "1.16.0":
        # Protocol 5 makes arrays by another function, which the format has no need of.
        with pytest.raises(rkr.FileError, match="_frombuffer"):
            unpickle(pickle.dumps({"data": ARRAY}, protocol), "x")
        return
    found = unpickle(pickle.dumps({"data": np.asfortranarray(ARRAY), "labels": [1]}, protocol), "x")
    assert (found["data"] == ARRAY).all()


def evil(tmp_path: Path) -> dict[str, Any]:
    mark = f"touch {tmp_path / 'owned'}"
    code = f"open({str(tmp_path / 'owned')!r}, 'w')"
    return {
        "os.system": Calls(os.system, mark),
        "builtins.eval": Calls(builtins.eval, code),
        "builtins.exec": Calls(builtins.exec, code),
        "subprocess": Calls(subprocess.call, ["sh", "-c", mark]),
        "getattr": Calls(getattr, "x", "upper"),
        "deep in lists": [1, [2, {"a": (Calls(os.system, mark),)}]],
        "as a dict key": {("a", Calls(os.system, mark)): 1},
        "object array": np.array([Calls(os.system, mark)], object),
        "plain object array": np.array(["a", 1], object),
        "float array": np.zeros(3),
        "structured array": np.zeros(2, [("a", "u1")]),
        "bytearray": bytearray(b"a"),
        "set": {1},
        "complex": 1j,
        "numpy number": np.uint8(3),
        "class": os.PathLike,
    }


@pytest.mark.parametrize("name", list(evil(Path("."))))
@pytest.mark.parametrize("protocol", [2, 4])
def test_anything_else_is_refused(name: str, protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps({"data": ARRAY, "labels": evil(tmp_path)[name]}, protocol)
    with pytest.raises(rkr.FileError, match="refused"):
        unpickle(data, "evil")
    assert not (tmp_path / "owned").exists()
    with pytest.raises(rkr.FileError, match="refused"):
        unpickle(pickle.dumps(evil(tmp_path)[name], protocol), "evil")


NAMES = (b"cnumpy.core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\n", b"cnumpy\ndtype\n")


@pytest.mark.parametrize(
    "program",
    [
        *(b"\x80\x02" + name + b"}U\x01aK\x01sb." for name in NAMES),  # BUILD with a dict: set attributes of a function
        *(b"\x80\x02" + name + b"N}U\x08__code__K\x01s\x86b." for name in NAMES),  # BUILD with slots
        *(b"\x80\x02" + name + b")\x81." for name in NAMES),  # NEWOBJ
        *(b"\x80\x02" + name + b")R." for name in NAMES),  # called with nothing
        b"\x80\x02" + NAMES[0] + NAMES[2] + b"K\x00\x85U\x01b\x87R.",  # _reconstruct(dtype, ...)
        b"\x80\x02}U\x01a" + NAMES[1] + b"s.",  # a name left lying in the result
        b"\x80\x02}U\x01a" + NAMES[0] + NAMES[1] + b"K\x00\x85U\x01b\x87Rs.",  # an array that never got its state
        b"\x80\x02" + NAMES[0] + NAMES[1] + b"K\x00\x85U\x01b\x87R(K\x01J\xff\xff\xff\x7f\x85NNU\x01atb.",
        b"\x80\x02" + NAMES[2] + b"U\x01O\x85R.",
        b"\x80\x02P1\n.",  # an object outside the pickle
        b"\x80\x02\x82\x01.",  # an extension code
        b"(ios\nsystem\n.",  # INST, protocol 0
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02]q\x00h\x00a.",  # a list in itself, and no dict
        b"\x80\x02}U\x01a]q\x00h\x00as.",
        b"",
        b"garbage",
        b"\x80\x02}",
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
    ],
)
def test_hand_made_programs(program: bytes) -> None:
    with pytest.raises(rkr.FileError, match=r"refused|incomplete or damaged pickle"):
        unpickle(program, "evil")


def test_every_cut_and_many_flips(official: Any) -> None:
    """Damage may lead to other plain data, but never to anything but FileError or plain data."""
    write, _ = official
    whole = write({b"data": ARRAY, b"labels": [1, 2, 3]})
    for end in range(len(whole)):
        with pytest.raises(rkr.FileError):
            unpickle(whole[:end], "cut")
    for at in range(len(whole)):
        for bit in range(8):
            damaged = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            try:
                found = unpickle(damaged, "flipped")
            except rkr.FileError:
                continue
            assert all(type(key) is str for key in found)


def test_nothing_is_imported() -> None:
    """A refused name must not even have its module imported."""
    assert "antigravity" not in sys.modules
    with pytest.raises(rkr.FileError, match=r"asks for antigravity\.x"):
        unpickle(b"\x80\x02cantigravity\nx\n.", "evil")
    assert "antigravity" not in sys.modules


# ---------------------------------------------------------------------------------------------------------
# tar


def write_tar(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            content = b"x" * member.size if member.isreg() else b""
            archive.addfile(member, io.BytesIO(content))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 3 if kind == tarfile.REGTYPE else 0
    return info


def test_tar_reads_what_is_asked_for(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", member("f", tarfile.DIRTYPE), member("f/a"), member("f/b"), member("./f/c"))
    assert read_tar(path, "f", ["a", "c"]) == {"a": b"xxx", "c": b"xxx"}
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz"]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (member("/etc/passwd"), "outside"),
        (member("f/../../x"), "outside"),
        (member("../f/x"), "outside"),
        (member("g/x"), "outside"),
        (member("x"), "outside"),
        (member("f\\..\\x"), "outside"),
        (member("f/l", tarfile.SYMTYPE, "/etc/passwd"), "link or a device"),
        (member("f/l", tarfile.LNKTYPE, "f/a"), "link or a device"),
        (member("f/l", tarfile.CHRTYPE), "link or a device"),
        (member("f/l", tarfile.BLKTYPE), "link or a device"),
        (member("f/l", tarfile.FIFOTYPE), "link or a device"),
        (member("f/a"), "not one file"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_tar_refuses(bad: tarfile.TarInfo, match: str, first: bool, tmp_path: Path) -> None:
    good = member("f/a")
    path = write_tar(tmp_path / "a.tar.gz", *((bad, good) if first else (good, bad)))
    with pytest.raises(rkr.FileError, match=match):
        read_tar(path, "f", ["a"])


def test_tar_damaged(tmp_path: Path) -> None:
    content = os.urandom(20000)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        info = tarfile.TarInfo("f/a")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    whole = file.getvalue()
    path = tmp_path / "a.tar.gz"
    for end in (0, 1, 5, 100, len(whole) // 2, len(whole) - 4000):
        path.write_bytes(whole[:end])
        with pytest.raises(rkr.FileError, match=r"a\.tar\.gz"):
            read_tar(path, "f", ["a"])
    path.write_bytes(whole)
    with pytest.raises(rkr.FileError, match=r"f/b is missing"):
        read_tar(path, "f", ["a", "b"])
    with pytest.raises(rkr.FileError, match="cannot be read"):
        read_tar(tmp_path / "nothing", "f", ["a"])


def test_tar_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that claims more than any real one is refused before it is read."""
    info = member("f/a")
    info.size = 1 << 40
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT)))
    with pytest.raises(rkr.FileError, match="1,099,511,627,776 bytes"):
        read_tar(path, "f", ["a"])

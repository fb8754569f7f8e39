"""Data for the tests: files in the official formats that are written here, and the real ones that $RKR_DATA has."""

import dataclasses
import hashlib
import http.server
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rkr.data import Source, load_source
from rkr.data.cifar import CIFAR10, CIFAR100, Archive

REAL = os.environ.get("RKR_DATA", "")


def _string(value: bytes) -> bytes:
    """A str of Python 2, as the official files have it."""
    if len(value) < 256:
        return b"U" + bytes([len(value)]) + value
    return b"T" + len(value).to_bytes(4, "little") + value


def _value(value: Any) -> bytes:
    if isinstance(value, bytes):
        return _string(value)
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    if isinstance(value, list):
        return b"](" + b"".join(map(_value, value)) + b"e"
    assert isinstance(value, np.ndarray)
    dtype = b"cnumpy\ndtype\n" + _string(b"u1") + b"K\x00K\x01\x87R(K\x03" + _string(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + _string(b"b") + b"\x87R"
    shape = _value(value.shape[0]) + _value(value.shape[1]) + b"\x86"
    return array + b"(K\x01" + shape + dtype + b"\x89" + _string(value.tobytes()) + b"tb"


def pickle2(content: dict[bytes, Any]) -> bytes:
    """A dict as Python 2 and numpy 1 pickled it: the opcodes of the official archives, one by one."""
    return b"\x80\x02}(" + b"".join(_string(key) + _value(value) for key, value in content.items()) + b"u."


def tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


@dataclasses.dataclass
class Made:
    """A small archive in the official format, and the description that fits it."""

    archive: Archive
    content: bytes
    members: dict[str, bytes]
    data: dict[str, np.ndarray]
    labels: dict[str, list[int]]


def make_archive(official: Archive, count: int, classes: int, **more: bytes) -> Made:
    random = np.random.default_rng(0)
    members, data, labels = {}, {}, {}
    for name in (*official.train, official.test):
        data[name] = random.integers(0, 256, (count, 3072), np.uint8)
        labels[name] = [int(i) for i in random.permutation(np.arange(count) % classes)]
        files = [b"%d.png" % i for i in range(count)]
        members[name] = pickle2(
            {
                b"batch_label": b"batch",
                official.labels.encode(): labels[name],
                b"data": data[name],
                b"filenames": files,
            }
        )
    members[official.meta] = pickle2({official.label_names.encode(): [b"class %d" % i for i in range(classes)]})
    members.update(more)
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in members.items()}
    content = tar({f"{official.folder}/{name}": content for name, content in {**members, "readme.html": b"hi"}.items()})
    return Made(dataclasses.replace(official, md5=md5), content, members, data, labels)


@pytest.fixture
def cifar10() -> Made:
    return make_archive(CIFAR10, 40, 10)


@pytest.fixture
def make() -> Callable[..., Made]:
    return make_archive


@pytest.fixture
def official() -> tuple[Callable[..., bytes], Callable[..., bytes]]:
    """The writers of pickles and tar files."""
    return pickle2, tar


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty cache and no $RKR_DATA; the cache folder."""
    monkeypatch.delenv("RKR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rkr"


class Server:
    """A web server on this machine. `cut[path]` is how many more times an answer breaks off half-way."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: dict[str, int] = {}
        self.flip: dict[str, int] = {}
        self.requests: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(self.path)
                content = server.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if server.cut.get(self.path, 0):
                    server.cut[self.path] -= 1
                    content = content[: len(content) // 2]
                elif server.flip.get(self.path, 0):
                    server.flip[self.path] -= 1
                    middle = len(content) // 2
                    content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="session")
def cifar100() -> Source:
    if not (Path(REAL) / CIFAR100.file).is_file() and not (Path(REAL) / CIFAR100.folder).is_dir():
        pytest.skip(f"$RKR_DATA has no {CIFAR100.file}")
    return load_source("cifar100", REAL)


@pytest.fixture(scope="session")
def mnist() -> Source:
    if not (Path(REAL) / "mnist").is_dir():
        pytest.skip("$RKR_DATA has no mnist/")
    return load_source("mnist", REAL)

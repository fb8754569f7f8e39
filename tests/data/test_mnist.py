"""MNIST: the real files, and small ones in the same format in every layout."""

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rkr
from rkr.data import Source
from rkr.data import mnist as module
from rkr.data.mnist import MD5, load_mnist


def test_official_numbers(mnist: Source) -> None:
    assert (len(mnist.train), len(mnist.test), mnist.train.shape) == (60000, 10000, (1, 28, 28))
    assert mnist.train.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.test.y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.train.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert mnist.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    assert int(mnist.train.x[0].sum()) == 27525
    assert hashlib.md5(mnist.train.x[0].numpy().tobytes()).hexdigest() == "2ce86e4daeeff3a0cdebce6897c784ba"
    assert float(mnist.train.x.double().mean()) / 255 == pytest.approx(0.1307, abs=1e-4)
    assert mnist.class_names == tuple("0123456789")


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def files() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    made = {}
    for kind, n in (("train", 30), ("t10k", 20)):
        made[f"{kind}-images-idx3-ubyte"] = idx(random.integers(0, 256, (n, 28, 28), np.uint8))
        made[f"{kind}-labels-idx1-ubyte"] = idx((np.arange(n) % 10).astype(np.uint8))
    return made


def md5(content: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.md5(data).hexdigest() for name, data in content.items()}


def test_checksums_are_of_four_files() -> None:
    assert set(MD5) == set(files())


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "raw", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_layouts(folder: str, packed: bool, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "download", None)
    made = files()
    (tmp_path / "d" / folder).mkdir(parents=True)
    for name, content in made.items():
        path = tmp_path / "d" / folder / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(content) if packed else content)
    source = load_mnist(tmp_path / "d", md5(made))
    assert source.train.x.numpy().tobytes() == made["train-images-idx3-ubyte"][16:]
    assert source.test.y.tolist() == [i % 10 for i in range(20)]
    with pytest.raises(rkr.FileError, match="not the official file"):
        load_mnist(tmp_path / "d")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(rkr.FileError, match=path.name):
        load_mnist(tmp_path / "d", md5(made))


def test_download_from_the_second_address(server: Any, alone: Path) -> None:
    made = files()
    for name, content in made.items():
        server.files[f"/m/{name}.gz"] = gzip.compress(content)
    server.cut["/m/train-images-idx3-ubyte.gz"] = 1
    source = load_mnist(None, md5(made), (server.address + "gone/", server.address + "m/"))
    assert len(source.train) == 30
    assert sorted(os.listdir(alone / "mnist")) == sorted(f"{name}.gz" for name in made)
    count = len(server.requests)
    load_mnist(None, md5(made), (server.address + "gone/",))
    assert len(server.requests) == count


@pytest.mark.parametrize("bad", [b"", b"\0\0\x08\x03", b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", b"\0\0\x08\x01\0\0\0\x09abc"])
def test_wrong_format(bad: bytes, tmp_path: Path, alone: Path) -> None:
    made = {**files(), "train-labels-idx1-ubyte": bad}
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(rkr.FileError, match="train-labels-idx1-ubyte is not an idx file"):
        load_mnist(tmp_path, md5(made))

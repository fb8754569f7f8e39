"""CIFAR: the real CIFAR-100, and CIFAR-10 in files of the same format."""

import dataclasses
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rkr
from rkr.data import Source
from rkr.data import cifar as module
from rkr.data.cifar import CIFAR10, CIFAR100, load_cifar, read_cifar


def check(source: Source, made: Any) -> None:
    """A source against the arrays that the archive was made of."""
    archive = made.archive
    for part, names in ((source.train, archive.train), (source.test, (archive.test,))):
        data = np.concatenate([made.data[name] for name in names])
        assert part.y.tolist() == [y for name in names for y in made.labels[name]]
        assert part.x.dtype == torch.uint8
        for i in (0, 7, len(data) - 1):
            for c in range(3):  # channel by channel, row by row
                assert part.x[i, c].flatten().tolist() == data[i, 1024 * c : 1024 * (c + 1)].tolist()


def test_official_numbers(cifar100: Source) -> None:
    assert (len(cifar100.train), len(cifar100.test), cifar100.train.shape) == (50000, 10000, (3, 32, 32))
    assert cifar100.train.y.bincount().tolist() == [500] * 100
    assert cifar100.test.y.bincount().tolist() == [100] * 100
    assert cifar100.train.y[:5].tolist() == [19, 29, 0, 11, 1]
    assert cifar100.test.y[:5].tolist() == [49, 33, 72, 51, 71]
    assert cifar100.class_names[:3] == ("apple", "aquarium_fish", "baby")
    assert cifar100.class_names[-1] == "worm"
    mean = cifar100.train.x.double().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.50707516, 0.48654887, 0.44091784], abs=1e-7)
    assert mean.tolist() == pytest.approx(cifar100.mean, abs=2e-4)
    std = torch.stack([channel.float().std() for channel in cifar100.train.x.unbind(1)]) / 255
    assert std.tolist() == pytest.approx(cifar100.std, abs=2e-4)
    assert hashlib.md5(cifar100.train.x[0].numpy().tobytes()).hexdigest() == "58ea78abb4f30d48e42fc5d25239ba10"
    assert hashlib.md5(cifar100.train.x.numpy().tobytes()).hexdigest() == "e07b6859dfcb4ef6850fbc815e123615"
    assert cifar100.train.x[0, 0, 0, :3].tolist() == [255, 255, 255]


def test_official_checksums() -> None:
    assert CIFAR100.md5 == {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    }
    assert set(CIFAR10.md5) == set(CIFAR10.members)


def test_cifar10_packed_and_unpacked(cifar10: Any, tmp_path: Path, alone: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cifar-10-python.tar.gz").write_bytes(cifar10.content)
    check(load_cifar(cifar10.archive, tmp_path / "a"), cifar10)
    folder = tmp_path / "b" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in cifar10.members.items():
        (folder / name).write_bytes(content)
    source = load_cifar(cifar10.archive, tmp_path / "b")
    check(source, cifar10)
    assert source.class_names == tuple(f"class {i}" for i in range(10))
    assert len(source.train) == 200
    os.remove(folder / "test_batch")
    with pytest.raises(rkr.FileError, match=r"test_batch: cannot be read"):
        load_cifar(cifar10.archive, tmp_path / "b")


def test_search_order(cifar10: Any, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "download", None)
    alone.mkdir(parents=True)
    (alone / CIFAR10.file).write_bytes(cifar10.content)
    check(load_cifar(cifar10.archive), cifar10)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / CIFAR10.file).write_bytes(b"bad")
    monkeypatch.setenv("RKR_DATA", str(tmp_path / "env"))
    with pytest.raises(rkr.FileError, match="env"):
        load_cifar(cifar10.archive)  # $RKR_DATA comes before the cache
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / CIFAR10.file).write_bytes(cifar10.content)
    check(load_cifar(cifar10.archive, tmp_path / "mine"), cifar10)


def test_another_archive_is_refused(cifar10: Any, tmp_path: Path) -> None:
    """With the official checksums, nothing but the official files is even unpickled."""
    path = tmp_path / CIFAR10.file
    path.write_bytes(cifar10.content)
    with pytest.raises(rkr.FileError, match=r"data_batch_1 is damaged or not the official one \(md5 "):
        read_cifar(path, CIFAR10)


def test_every_damage_is_noticed(cifar10: Any, tmp_path: Path) -> None:
    path = tmp_path / CIFAR10.file
    random = np.random.default_rng(0)
    for _ in range(60):
        at = int(random.integers(len(cifar10.content)))
        damaged = bytearray(cifar10.content)
        damaged[at] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            source = read_cifar(path, cifar10.archive)
        except rkr.FileError:
            continue
        check(source, cifar10)  # a flip in a file name's padding or a time stamp changes no image
    for share in (0, 0.1, 0.5, 0.9):
        path.write_bytes(cifar10.content[: int(share * len(cifar10.content))])
        with pytest.raises(rkr.FileError):
            read_cifar(path, cifar10.archive)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (pickle.dumps({"data": Evil()}, 2), r"refused, because its pickle asks for (posix|nt|os)\.system"),
        (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}, 3), "not uint8"),
        (pickle.dumps({"labels": [0, 1]}, 2), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((2, 100), np.uint8), "labels": [0, 1]}, 3), "no array 'data' of 3072"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, 3), "no list 'labels' of 2"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, -1]}, 3), "no list 'labels' of 2"),
        (pickle.dumps([1], 2), "holds no dict"),
    ],
)
def test_wrong_content(content: bytes, match: str, make: Callable[..., Any], tmp_path: Path) -> None:
    """Even where the checksum fits."""
    made = make(CIFAR10, 10, 10, test_batch=content)
    path = tmp_path / CIFAR10.file
    path.write_bytes(made.content)
    with pytest.raises(rkr.FileError, match=match):
        read_cifar(path, made.archive)
    assert not Path("owned").exists()


# ---------------------------------------------------------------------------------------------------------
# Download


def served(cifar10: Any, server: Any) -> Any:
    server.files["/" + CIFAR10.file] = cifar10.content
    return dataclasses.replace(cifar10.archive, address=server.address)


def test_download(cifar10: Any, server: Any, alone: Path) -> None:
    archive = served(cifar10, server)
    check(load_cifar(archive), cifar10)
    assert os.listdir(alone) == [CIFAR10.file]
    assert (alone / CIFAR10.file).read_bytes() == cifar10.content
    check(load_cifar(archive), cifar10)
    assert len(server.requests) == 1  # the second time it was there


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_download_is_done_again(how: str, cifar10: Any, server: Any, alone: Path) -> None:
    archive = served(cifar10, server)
    getattr(server, how)["/" + CIFAR10.file] = 2
    check(load_cifar(archive), cifar10)
    assert len(server.requests) == 3
    assert os.listdir(alone) == [CIFAR10.file]


@pytest.mark.parametrize(("how", "match"), [("cut", r"cut after [\d,]+ of [\d,]+ bytes"), ("flip", "damaged")])
def test_download_that_never_works(how: str, match: str, cifar10: Any, server: Any, alone: Path) -> None:
    archive = served(cifar10, server)
    getattr(server, how)["/" + CIFAR10.file] = 99
    with pytest.raises(rkr.FileError, match=match):
        load_cifar(archive)
    assert os.listdir(alone) == []


def test_damaged_copy_in_the_cache_is_replaced(cifar10: Any, server: Any, alone: Path) -> None:
    archive = served(cifar10, server)
    alone.mkdir(parents=True)
    (alone / CIFAR10.file).write_bytes(cifar10.content[:1000])
    check(load_cifar(archive), cifar10)
    assert (alone / CIFAR10.file).read_bytes() == cifar10.content


def test_damaged_copy_of_the_user_is_not_touched(cifar10: Any, server: Any, alone: Path, tmp_path: Path) -> None:
    archive = served(cifar10, server)
    (tmp_path / "mine").mkdir()
    path = tmp_path / "mine" / CIFAR10.file
    path.write_bytes(cifar10.content[:1000])
    with pytest.raises(rkr.FileError, match="mine"):
        load_cifar(archive, tmp_path / "mine")
    assert path.read_bytes() == cifar10.content[:1000]
    assert server.requests == []

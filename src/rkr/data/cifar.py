"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from the official Python archives, packed or unpacked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rkr.data.download import Data, download, find, is_cached, place
from rkr.data.task import Images, Source
from rkr.data.unpickle import read_tar, unpickle
from rkr.errors import FileError
from rkr.registry import register

ADDRESS = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Archive:
    """The files of an archive and their checksums."""

    name: str
    file: str
    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str  # keys of the pickled dicts
    label_names: str
    md5: Mapping[str, str]  # of the members, because copies of the archive may be packed differently
    mean: tuple[float, float, float]  # of the training images
    std: tuple[float, float, float]
    address: str = ADDRESS

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.meta)


CIFAR10 = Archive(
    name="cifar10",
    file="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test="test_batch",
    meta="batches.meta",
    labels="labels",
    label_names="label_names",
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)

CIFAR100 = Archive(
    name="cifar100",
    file="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train=("train",),
    test="test",
    meta="meta",
    labels="fine_labels",
    label_names="fine_label_names",
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
)


@register.dataset(
    "cifar10",
    "60,000 colour images 32x32, 10 classes; 170 MB",
    classes=10,
    shape=(3, 32, 32),
    files=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    without="cifar10 will be downloaded, 170 MB",
)
def load_cifar10(data: Data = None) -> Source:
    """Load CIFAR-10."""
    return load_cifar(CIFAR10, data)


@register.dataset(
    "cifar100",
    "60,000 colour images 32x32, 100 classes; 169 MB",
    classes=100,
    shape=(3, 32, 32),
    files=("cifar-100-python.tar.gz", "cifar-100-python"),
    without="cifar100 will be downloaded, 169 MB",
)
def load_cifar100(data: Data = None) -> Source:
    """Load CIFAR-100."""
    return load_cifar(CIFAR100, data)


def load_cifar(archive: Archive, data: Data = None) -> Source:
    """Find or download the archive and read it."""
    path = find((archive.file, archive.folder), data)
    if path is not None:
        try:
            return read_cifar(path, archive)
        except FileError:
            if not is_cached(path) or path.is_dir():
                raise  # the user's file, which must not be replaced
    target = place(data) / archive.file
    read: list[Source] = []
    download(
        [archive.address + archive.file], target, lambda part: read.append(read_cifar(part, archive)), archive.name
    )
    return read[-1]


def read_cifar(path: Path, archive: Archive) -> Source:
    """Read an archive or the folder that it was unpacked to. Checksums are verified before anything is parsed."""
    if path.is_dir():
        members = {name: _read(path / name) for name in archive.members}
    else:
        members = read_tar(path, archive.folder, archive.members)
    for name, content in members.items():
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != archive.md5[name]:
            raise FileError(
                f"{path}: {name} is damaged or not the official one (md5 {found}, not {archive.md5[name]}): "
                "remove it to download it again"
            )
    names = unpickle(members.pop(archive.meta), f"{path}: {archive.meta}").get(archive.label_names)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise FileError(f"{path}: {archive.meta} has no list {archive.label_names!r}")
    class_names = tuple(name.decode() if isinstance(name, bytes) else name for name in names)

    def part(*files: str) -> Images:
        read = [_images(f"{path}: {file}", unpickle(members.pop(file), f"{path}: {file}"), archive) for file in files]
        return Images(torch.cat([images.x for images in read]), torch.cat([images.y for images in read]))

    train, test = part(*archive.train), part(archive.test)
    return Source(archive.name, class_names, train, test, archive.mean, archive.std)


def _images(what: str, content: dict[str, Any], archive: Archive) -> Images:
    data, labels = content.get("data"), content.get(archive.labels)
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != PIXELS:
        raise FileError(f"{what} has no array 'data' of {PIXELS} bytes per image")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(y) is int and y >= 0 for y in labels):
        raise FileError(f"{what} has no list {archive.labels!r} of {len(data)} class numbers")
    # A row is the red, then the green, then the blue channel, each row by row.
    return Images(torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels, dtype=torch.int64))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error

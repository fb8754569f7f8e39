"""MNIST (LeCun, Cortes, Burges) from the four idx files, compressed with gzip or not."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rkr.data.download import Data, download, find, is_cached, place
from rkr.data.task import Images, Source
from rkr.errors import FileError
from rkr.registry import register

ADDRESSES = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
FOLDERS = ("mnist", "MNIST/raw", "mnist/raw", "raw", ".")  # torchvision keeps its copy in MNIST/raw
MD5 = {  # of the decompressed files, because copies may be compressed differently
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
LIMIT = 1 << 26  # bytes; the largest file has 47,040,016


@register.dataset(
    "mnist",
    "70,000 handwritten digits 28x28, 10 classes; 12 MB",
    classes=10,
    shape=(1, 28, 28),
    files=(
        "mnist/train-images-idx3-ubyte",
        "mnist/train-images-idx3-ubyte.gz",
        "MNIST/raw/train-images-idx3-ubyte",
        "MNIST/raw/train-images-idx3-ubyte.gz",
        "mnist/raw/train-images-idx3-ubyte",
        "mnist/raw/train-images-idx3-ubyte.gz",
        "raw/train-images-idx3-ubyte",
        "raw/train-images-idx3-ubyte.gz",
        "train-images-idx3-ubyte",
        "train-images-idx3-ubyte.gz",
    ),
    without="mnist will be downloaded, 12 MB",
)
def load(data: Data = None) -> Source:
    """Load MNIST."""
    return load_mnist(data)


def load_mnist(data: Data = None, md5: Mapping[str, str] = MD5, addresses: tuple[str, ...] = ADDRESSES) -> Source:
    """Find or download the four files and read them."""
    files = {name: _content(name, data, md5, addresses) for name in md5}
    parts = []
    for kind in ("train", "t10k"):
        images, labels = (f"{kind}-images-idx3-ubyte", f"{kind}-labels-idx1-ubyte")
        x, y = _idx(images, files[images], 3), _idx(labels, files[labels], 1)
        if len(x) != len(y):
            raise FileError(f"MNIST: {images} has {len(x)} images, {labels} {len(y)} labels")
        parts.append(Images(x.unsqueeze(1), y.long()))
    return Source("mnist", tuple("0123456789"), parts[0], parts[1], (0.1307,), (0.3081,))


def _content(name: str, data: Data, md5: Mapping[str, str], addresses: tuple[str, ...]) -> bytes:
    """The verified content of a file."""
    path = find((f"{folder}/{name}{suffix}" for folder in FOLDERS for suffix in ("", ".gz")), data)
    if path is not None:
        try:
            return _read(path, md5[name])
        except FileError:
            if not is_cached(path):
                raise  # the user's file, which must not be replaced
    target = place(data) / "mnist" / f"{name}.gz"
    read: list[bytes] = []
    urls = [f"{address}{name}.gz" for address in addresses]
    download(urls, target, lambda part: read.append(_read(part, md5[name])), f"mnist: {name}")
    return read[-1]


def _read(path: Path, md5: str) -> bytes:
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            content = file.read(LIMIT)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path}: cannot be read: truncated or damaged ({error})") from error
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise FileError(
            f"{path}: damaged or not the official file (md5 of its content {found}, not {md5}): "
            "remove it to download it again"
        )
    return content


def _idx(name: str, content: bytes, dims: int) -> Tensor:
    """A uint8 tensor in the idx format: 0, 0, type 8, number of axes, their lengths, the values."""
    shape = tuple(int(n) for n in np.frombuffer(content[4 : 4 + 4 * dims], ">u4"))
    values = content[4 + 4 * dims :]
    if content[:4] != bytes((0, 0, 8, dims)) or len(shape) != dims or int(np.prod(shape)) != len(values):
        raise FileError(f"MNIST: {name} is not an idx file of bytes with {dims} axes")
    return torch.from_numpy(np.frombuffer(values, np.uint8).reshape(shape).copy())

"""The data sets by name. A new one is a file with a loader, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rkr.data import mnist
from rkr.data.cifar import CIFAR10, CIFAR100, load_cifar
from rkr.data.digits import load_digits
from rkr.data.download import Data, find
from rkr.data.imagefolder import IMAGENET_FOLDERS, load_folder, load_imagenet
from rkr.data.mnist import load_mnist
from rkr.data.task import Source
from rkr.data.xlsa17 import FOLDERS as XLSA17_FOLDERS
from rkr.errors import UsageError


@dataclass(frozen=True)
class Entry:
    """How a source is loaded, and one line that says what it is.

    `files` are where it may lie below a folder of data, any one of which will do; `without` is what happens if none is
    there.
    """

    load: Callable[..., Source]
    description: str
    files: tuple[str, ...] = ()
    without: str = ""


SOURCES: dict[str, Entry] = {
    "cifar10": Entry(
        lambda data=None: load_cifar(CIFAR10, data),
        "60,000 colour images 32x32, 10 classes; 170 MB",
        (CIFAR10.file, CIFAR10.folder),
        "cifar10 will be downloaded, 170 MB",
    ),
    "cifar100": Entry(
        lambda data=None: load_cifar(CIFAR100, data),
        "60,000 colour images 32x32, 100 classes; 169 MB",
        (CIFAR100.file, CIFAR100.folder),
        "cifar100 will be downloaded, 169 MB",
    ),
    "mnist": Entry(
        load_mnist,
        "70,000 handwritten digits 28x28, 10 classes; 12 MB",
        tuple(f"{folder}/train-images-idx3-ubyte{suffix}" for folder in mnist.FOLDERS for suffix in ("", ".gz")),
        "mnist will be downloaded, 12 MB",
    ),
    "imagenet": Entry(
        load_imagenet,
        "ImageNet-1K, 1.3 million photographs, 1,000 classes; your own copy, class folders",
        tuple(f"{folder}/train" for folder in IMAGENET_FOLDERS),
        "put imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG into the folder of data",
    ),
    "folder": Entry(load_folder, "any folder of class folders, with train/ and test/ or cut by a seed"),
    "digits": Entry(load_digits, "1,797 handwritten digits 8x8, 10 classes; comes with scikit-learn, no download"),
}


def load_source(name: str, data: Data = None, **options: Any) -> Source:
    """Load a data set by name, from `data`, $RKR_DATA, the user's cache or its official address."""
    if name not in SOURCES:
        raise UsageError(f"no source {name!r}: choose one of {', '.join(SOURCES)}")
    try:
        return SOURCES[name].load(data, **options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"source {name!r}: {str(error).split(') ')[-1]}") from error


def missing_data(needs: Sequence[str], data: Data = None) -> str:
    """What happens for lack of sources that are not there, or what to do about it; "" if all are.

    A need is a source's name, or a path such as "CUB/res101.mat" of a zero-shot data set.
    """
    lacks: list[str] = []
    files: list[str] = []
    for need in needs:
        if need in SOURCES:
            entry = SOURCES[need]
            if entry.files and find(entry.files, data) is None:
                lacks.append(entry.without)
        elif find((f"{folder}/{need}" for folder in XLSA17_FOLDERS), data) is None:
            files.append(need)
    if files:
        lacks.append(f"put {', '.join(files)} into xlsa17/data of the folder of data")
    return "; ".join(lacks)

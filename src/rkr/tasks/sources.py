"""The data sets by name. A new one is a file with a loader, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rkr.errors import UsageError
from rkr.tasks.cifar import CIFAR10, CIFAR100, load_cifar
from rkr.tasks.digits import load_digits
from rkr.tasks.download import Data
from rkr.tasks.imagefolder import load_folder, load_imagenet
from rkr.tasks.mnist import load_mnist
from rkr.tasks.task import Source


@dataclass(frozen=True)
class Entry:
    """How a source is loaded, and one line that says what it is."""

    load: Callable[..., Source]
    description: str


SOURCES: dict[str, Entry] = {
    "cifar10": Entry(lambda data=None: load_cifar(CIFAR10, data), "60,000 colour images 32x32, 10 classes; 170 MB"),
    "cifar100": Entry(lambda data=None: load_cifar(CIFAR100, data), "60,000 colour images 32x32, 100 classes; 169 MB"),
    "mnist": Entry(load_mnist, "70,000 handwritten digits 28x28, 10 classes; 12 MB"),
    "imagenet": Entry(
        load_imagenet, "ImageNet-1K, 1.3 million photographs, 1,000 classes; your own copy, class folders"
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

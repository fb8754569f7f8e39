"""Images in one folder per class: ImageNet-1K or your own images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rkr.data.cut import balanced_cut
from rkr.data.decode import decode_centre
from rkr.data.download import Data, find, folders
from rkr.data.task import ImageFiles, Images, Samples, Source
from rkr.errors import FileError, UsageError
from rkr.registry import register

SUFFIXES = (".jpeg", ".jpg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
IMAGENET_FOLDERS = ("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", ".")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


@register.dataset(
    "imagenet",
    "ImageNet-1K, 1.3 million photographs, 1,000 classes; your own copy, class folders",
    classes=1000,
    shape=(3, "size", "size"),
    files=("imagenet/train", "ILSVRC2012/train", "ILSVRC/Data/CLS-LOC/train", "train"),
    without="put imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG into the folder of data",
    in_files=True,
)
def load_imagenet(data: Data = None, size: int = 224) -> Source:
    """Load ImageNet-1K from class folders in train/ and val/. Downloading it needs an account."""
    path = find((f"{folder}/train" for folder in IMAGENET_FOLDERS), data)
    if path is None:
        raise FileError(
            "imagenet not found, and its licence forbids an automatic download: get it from https://image-net.org "
            "and put its class folders at imagenet/train/<class>/*.JPEG and imagenet/val/<class>/*.JPEG in one of "
            + ", ".join(map(str, folders(data)))
        )
    class_names = classes_in(path)
    train, test = list_images(path, class_names, size), list_images(path.parent / "val", class_names, size)
    return Source("imagenet", class_names, train, test, MEAN, STD)


@register.dataset(
    "folder",
    "any folder of class folders, with train/ and test/ or cut by a seed",
    shape=(3, "size", "size"),
    in_files=True,
)
def load_folder(
    data: Data = None,
    path: str | None = None,
    size: int = 224,
    resident: bool = False,
    test: float = 0.2,
    seed: int = 0,
    name: str | None = None,
) -> Source:
    """Load images from class folders in `path` (or else `data`), or in its subfolders train and test (or val).

    Without these subfolders, a fraction `test` of every class is held out by `seed`. With `resident` all images are
    resized to `size` once and kept in memory, which is much faster for small images.
    """
    directory = data if path is None else path
    if directory is None:
        raise UsageError("folder needs a directory: path = ...")
    root = Path(directory).expanduser()
    testing = next((root / part for part in ("test", "val") if (root / part).is_dir()), None)
    train_part: Samples
    test_part: Samples
    if (root / "train").is_dir() and testing is not None:
        class_names = classes_in(root / "train")
        train_part = list_images(root / "train", class_names, size)
        test_part = list_images(testing, class_names, size)
    else:
        class_names = classes_in(root)
        whole = list_images(root, class_names, size)
        kept, off = balanced_cut(whole.y, test, seed, "test")
        train_part, test_part = whole.take(kept), whole.take(off)
    if resident:
        train_part, test_part = _resident(train_part), _resident(test_part)
    return Source(name or root.resolve().name, class_names, train_part, test_part, MEAN, STD)


def classes_in(folder: Path) -> tuple[str, ...]:
    """The names of the class folders, sorted."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error
    if not names:
        raise FileError(f"{folder}: has no class folders; images must be at {folder}/<class>/<image>")
    return tuple(names)


def list_images(folder: Path, class_names: Sequence[str], size: int) -> ImageFiles:
    """All images of the classes, sorted by class and name."""
    extra = sorted(set(classes_in(folder)) - set(class_names))
    if extra:
        raise FileError(f"{folder}: the class folder {extra[0]!r} is not among the training classes")
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        try:
            with os.scandir(folder / name) as entries:
                found = sorted(entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES))
        except OSError as error:
            raise FileError(f"{folder / name}: cannot be read: {error.strerror or error}") from error
        if not found:
            raise FileError(f"{folder / name}: has no images ({' '.join(SUFFIXES)})")
        paths += [os.fsencode(f"{name}/{image}") for image in found]
        labels += [label] * len(found)
    return ImageFiles(str(folder.absolute()), np.array(paths), torch.tensor(labels, dtype=torch.int64), size)


def _resident(files: ImageFiles) -> Images:
    x = torch.empty(len(files), *files.shape, dtype=torch.uint8)
    for i in range(len(files)):
        x[i] = decode_centre(files.path(i), files.size, resize=files.size)
    return Images(x, files.y)

"""Zero-shot datasets in the format of "xlsa17" (Xian et al., Zero-Shot Learning - A Comprehensive Evaluation of the
Good, the Bad and the Ugly, TPAMI 2018): one file with features, one with attributes and splits.

`att_splits.mat` lists the rows of the features for training (`trainval_loc`) and for testing on seen and unseen classes
(`test_seen_loc`, `test_unseen_loc`). Errors name the file and the variable.

The rows for tuning hyper-parameters leak test samples: `train_loc` and `val_loc` split the seen classes, but may list
*all* rows of these classes, including those of `test_seen_loc` (on CUB, 1173 of the 5875 rows of `train_loc`; not on
AWA1). So only their classes are used here, with rows from `trainval_loc` (see `validation_source`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rkr.data.download import Data, find, folders
from rkr.data.mat import Variables, read_mat
from rkr.data.zeroshot import ZeroShotSource
from rkr.errors import DataWarning, FileError, UsageError

FOLDERS = ("xlsa17/data", "data", ".")  # where a dataset's folder may be
SPLITS = "att_splits.mat"
PUBLISHED = "res101"  # the published ResNet-101 features
PARTS = {"trainval_loc": "training", "test_seen_loc": "seen", "test_unseen_loc": "unseen"}

LARGEST_FEATURE = 1e18  # features are scaled to 0..1 by their range, which must be finite
LARGEST_ATTRIBUTE = 1e4  # attributes are not scaled; published ones have norm 1 or values up to 100

Numbers = NDArray[np.int64]


def load_xlsa17(name: str, data: Data = None, features: str = PUBLISHED, embedding: str = "att") -> ZeroShotSource:
    """Find and read a dataset such as "CUB".

    `features` is the name of the feature file without .mat. `embedding` is the variable of att_splits.mat that
    describes the classes: "att", or for some datasets "sent" (sentence embeddings).

    `train_loc` and `val_loc` only define the validation classes, because some of their rows are test rows (see the
    module docstring).
    """
    path = _found(name, data, features)
    read = _read(path, path.with_name(SPLITS), embedding)
    numbers = np.unique(read.labels[np.concatenate((read.trainval, read.test_unseen))])
    table = np.full(len(read.attributes) + 1, -1, dtype=np.int64)  # from published numbers to 0, 1, ...
    table[numbers] = np.arange(len(numbers))
    return ZeroShotSource(
        name=name,
        class_names=tuple(read.names[number - 1] for number in numbers),
        numbers=tuple(numbers.tolist()),
        features=torch.from_numpy(read.features),
        labels=torch.from_numpy(table[read.labels]),
        attributes=torch.from_numpy(read.attributes[numbers - 1]),
        trainval=torch.from_numpy(read.trainval),
        test_seen=torch.from_numpy(read.test_seen),
        test_unseen=torch.from_numpy(read.test_unseen),
        validation_classes=None if read.validation_classes is None else tuple(table[read.validation_classes].tolist()),
    )


def require_files(names: Sequence[str], data: Data, features: str) -> None:
    """Raise FileError, with instructions, if files of a dataset are missing."""
    missing: list[FileError] = []
    for name in names:
        try:
            _found(name, data, features)
        except FileError as error:
            missing.append(error)
    if len(missing) > 1:
        others = ", ".join(str(error).partition(":")[0] for error in missing[1:])
        raise FileError(f"{missing[0]}. Also missing: {others}")
    if missing:
        raise missing[0]


def _found(name: str, data: Data, features: str) -> Path:
    """The path of the feature file, with the splits next to it."""
    if features.endswith(".mat"):
        raise UsageError(f"name the feature file without .mat: {features.removesuffix('.mat')!r}")
    for what, value in (("dataset", name), ("feature file", features)):
        if value in ("", "..") or Path(value).name != value:
            raise UsageError(f"the name of a {what} must not be a path: {value!r}")
    path = find((f"{folder}/{name}/{features}.mat" for folder in FOLDERS), data)
    if path is not None and path.with_name(SPLITS).exists():
        return path
    if path is not None:
        raise FileError(
            f"{path.with_name(SPLITS)}: not found next to {path.name}. It holds attributes and splits: those of "
            'published datasets come with "xlsa17" (Xian et al.); for your own data, write it yourself'
        )
    folder = f"xlsa17/data/{name}, data/{name} or {name} in the dataset directory (--data or $RKR_DATA)"
    if features == PUBLISHED:
        advice = f'Xian et al. publish it with the splits as "xlsa17"; put it in {folder}'
    else:
        advice = f"These features are not published: compute them with `rkr features` and put them in {folder}"
    places = ", ".join(map(str, folders(data)))
    there = find((f"{folder}/{name}" for folder in FOLDERS), data)
    others = sorted(file.stem for file in there.glob("*.mat") if file.name != SPLITS) if there is not None else []
    hint = f" {there} has other features: {', '.join(others)}." if others else ""
    raise FileError(f"{name}: {name}/{features}.mat not found in {places}.{hint} {advice}")


@dataclass(frozen=True, eq=False)
class _Published:
    """The content of the files. Classes are numbered from 1, as in the files, and rows from 0."""

    features: NDArray[np.float32]  # (N, D)
    labels: Numbers  # (N,)
    attributes: NDArray[np.float32]  # (classes, A); some classes may have no rows
    names: tuple[str, ...]  # of the classes
    trainval: Numbers
    test_seen: Numbers
    test_unseen: Numbers
    validation_classes: Numbers | None


def _read(features: Path, splits: Path, embedding: str) -> _Published:
    """Read features and splits."""
    wanted = [embedding, *PARTS, "train_loc", "val_loc", "allclasses_names"]
    split = read_mat(splits, wanted)  # first, because it is small
    names = split.texts.get("allclasses_names", ())
    attributes = _attributes(split, embedding, names)
    content = read_mat(features, ["features", "labels", "allclasses_names"])
    x, labels = _samples(content)
    _check_labels(features, labels, split, embedding)
    _check_names(content, split, names)
    trainval, test_seen, test_unseen = parts = [_rows(split, part, len(x)) for part in PARTS]
    _check_parts(splits, parts, labels)
    if not names:  # use the names that `rkr features` writes
        known = content.texts.get("allclasses_names", ())[: len(attributes)]
        names = (*known, *(f"class {number}" for number in range(len(known) + 1, len(attributes) + 1)))
    classes = np.unique(labels[np.concatenate((trainval, test_unseen))])
    _check_alike(splits, embedding, attributes, names, classes)
    left_out = [f"{number} ({names[number - 1]})" for number in np.setdiff1d(labels, classes).tolist()]
    if left_out:
        said = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
        warnings.warn(f"{splits}: no split has rows of class {said}; skipped", DataWarning, stacklevel=3)
    held_out = _validation_classes(split, labels, trainval)
    return _Published(x, labels, attributes, names, trainval, test_seen, test_unseen, held_out)


def _attributes(splits: Variables, embedding: str, names: tuple[str, ...]) -> NDArray[np.float32]:
    """(C, A), one row per published class."""
    att = splits.matrix(embedding)
    if len(names) == att.shape[0] != att.shape[1]:
        raise FileError(
            f"{splits.path}: {embedding!r} must be attributes x classes; it is {_size(att)}, but allclasses_names has "
            f"{len(names)} classes: it looks transposed"
        )
    if names and len(names) != att.shape[1]:
        raise FileError(
            f"{splits.path}: {embedding!r} describes {att.shape[1]} classes, but allclasses_names has {len(names)}"
        )
    return _finite(splits.path, embedding, att, LARGEST_ATTRIBUTE)


def _samples(content: Variables) -> tuple[NDArray[np.float32], Numbers]:
    """(N, D) and (N,), the published class of every row."""
    x = content.matrix("features")
    labels = _whole(content, "labels")
    if x.shape[1] != len(labels):
        hint = ": it looks transposed" if x.shape[0] == len(labels) else ""
        raise FileError(
            f"{content.path}: 'features' must be dimensions x samples; it is {_size(x)}, but 'labels' has "
            f"{len(labels)} samples{hint}"
        )
    if len(labels) and labels.min() < 1:
        raise FileError(f"{content.path}: 'labels' must be classes 1, 2, ..., but has {labels.min()}")
    return _finite(content.path, "features", x, LARGEST_FEATURE), labels


def _check_labels(path: Path, labels: Numbers, splits: Variables, embedding: str) -> None:
    rows, columns = splits.matrix(embedding).shape
    top = int(labels.max(initial=0))
    if top > columns:
        hint = "; it looks transposed" if rows >= top else ""
        raise FileError(
            f"{path}: 'labels' has class {top}, but {embedding!r} of {splits.path} describes only {columns}: it must "
            f"be attributes x classes and is {rows} x {columns}{hint}"
        )


def _check_names(content: Variables, splits: Variables, names: tuple[str, ...]) -> None:
    """Check that feature files with class names, as written by `rkr features`, number the classes like the splits."""
    there = content.texts.get("allclasses_names", ())
    if not there or not names:
        return
    if len(there) > len(names):
        raise FileError(f"{content.path} names {len(there)} classes, but {splits.path} only {len(names)}")
    differs = next((k for k, pair in enumerate(zip(there, names, strict=False)) if pair[0] != pair[1]), None)
    if differs is not None:
        raise FileError(
            f"class {differs + 1} is {there[differs]!r} in {content.path}, but {names[differs]!r} in {splits.path}: "
            "attributes must be in the order of the class numbers"
        )


def _rows(splits: Variables, name: str, samples: int) -> Numbers:
    """Row numbers, from 0."""
    rows = _whole(splits, name)
    outside = rows[(rows < 1) | (rows > samples)]
    if len(outside):
        raise FileError(f"{splits.path}: {name!r} must have rows from 1 to {samples}, but has {outside[0]}")
    return rows - 1


def _check_parts(path: Path, parts: list[Numbers], labels: Numbers) -> None:
    taken: dict[str, Numbers] = {}
    for name, rows in zip(PARTS, parts, strict=True):
        if not len(rows):
            raise FileError(f"{path}: {name!r} has no rows, so the {PARTS[name]} set is empty")
        unique, counts = np.unique(rows, return_counts=True)
        if len(unique) < len(rows):
            raise FileError(f"{path}: {name!r} has row {unique[counts > 1][0] + 1} more than once")
        for other, others in taken.items():
            both = np.intersect1d(unique, others)
            if len(both):
                raise FileError(f"{path}: row {both[0] + 1} is both in {other!r} and in {name!r}")
        taken[name] = unique
    seen, tested, unseen = (np.unique(labels[rows]) for rows in parts)
    both = np.intersect1d(seen, unseen)
    if len(both):
        raise FileError(f"{path}: class {both[0]} is both seen ('trainval_loc') and unseen ('test_unseen_loc')")
    untrained = np.setdiff1d(tested, seen)
    if len(untrained):
        raise FileError(f"{path}: class {untrained[0]} of 'test_seen_loc' has no training rows in 'trainval_loc'")


def _check_alike(
    path: Path, embedding: str, attributes: NDArray[np.float32], names: tuple[str, ...], classes: Numbers
) -> None:
    """Refuse classes with identical attributes: they cannot be told apart."""
    known: dict[bytes, int] = {}
    for number in classes.tolist():
        other = known.setdefault((attributes[number - 1] + 0).tobytes(), number)  # -0 + 0 is 0
        if other != number:
            raise FileError(
                f"{path}: {embedding!r} describes class {other} ({names[other - 1]}) and class {number} "
                f"({names[number - 1]}) by the same values, so no method can tell them apart: fix the attributes, or "
                "leave one class out of the splits"
            )


def _validation_classes(splits: Variables, labels: Numbers, trainval: Numbers) -> Numbers | None:
    """The classes of val_loc. Rows of val_loc and train_loc are not used, because some are test rows."""
    if not {"train_loc", "val_loc"} <= set(splits.names):
        return None
    train, held_out = (np.unique(labels[_rows(splits, name, len(labels))]) for name in ("train_loc", "val_loc"))
    both = np.intersect1d(train, held_out)
    if len(both):
        raise FileError(f"{splits.path}: class {both[0]} is both in 'train_loc' and in 'val_loc'")
    seen = np.unique(labels[trainval])
    untrained = np.setdiff1d(held_out, seen)
    if len(untrained):
        raise FileError(f"{splits.path}: class {untrained[0]} of 'val_loc' has no training rows in 'trainval_loc'")
    if not 0 < len(held_out) < len(seen):
        raise FileError(
            f"{splits.path}: 'val_loc' has {len(held_out)} of {len(seen)} seen classes; it must have some, but not all"
        )
    return held_out


def _whole(content: Variables, name: str) -> Numbers:
    """A vector of whole numbers."""
    array = content.matrix(name)
    if array.size and 1 not in array.shape:
        raise FileError(f"{content.path}: {name!r} must be one column, but is {_size(array)}")
    values = array.ravel()
    if values.dtype.kind == "f" and not bool(np.all((np.floor(values) == values) & (np.abs(values) < 2**53))):
        raise FileError(f"{content.path}: {name!r} must be whole numbers")
    return values.astype(np.int64)


def _finite(path: Path, name: str, array: NDArray[Any], largest: float) -> NDArray[np.float32]:
    """The transpose of a published matrix as float32, copied only if necessary."""
    if not array.size:
        raise FileError(f"{path}: {name!r} is empty: {_size(array)}")
    with np.errstate(over="ignore"):
        made = np.require(array.T, np.float32, ["C", "W"])
    if not np.isfinite(made).all():
        raise FileError(f"{path}: {name!r} has values that are NaN, infinite or too large for float32")
    top = max(float(made.max()), -float(made.min()))
    if top > largest:
        raise FileError(
            f"{path}: {name!r} has values up to {top:.3g}, but at most {largest:g} is allowed: "
            "scale them or fix the file"
        )
    return made


def _size(array: NDArray[Any]) -> str:
    return " x ".join(map(str, array.shape))

"""Zero-shot data sets in the layout of "xlsa17" (Xian et al., Zero-Shot Learning - A Comprehensive Evaluation of the
Good, the Bad and the Ugly, TPAMI 2018): features of images, attributes of classes, and the proposed splits.

A class is seen, with images to train on, or unseen: then it comes only in the test. `att_splits.mat` names rows of the
features for training (`trainval_loc`) and for testing on either kind (`test_seen_loc`, `test_unseen_loc`).

There is a trap in the rows that it names for choosing hyper-parameters. `train_loc` and `val_loc` divide the seen
classes in two, but may list *all* rows of these classes, those of `test_seen_loc` too (on CUB, 1173 of the 5875 rows
of `train_loc`; not on AWA1). Whoever trains on them chooses hyper-parameters with test samples. So only the classes of
the two are used here; their rows come from `trainval_loc` alone (`validation_source`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rkr.errors import FileError, UsageError
from rkr.tasks.cut import generator, shuffled_class
from rkr.tasks.download import Data, find, folders
from rkr.tasks.published import read_published
from rkr.tasks.task import Features, Stream, Task, Training

FOLDERS = ("xlsa17/data", "data", ".")  # where a data set's folder may be
SPLITS = "att_splits.mat"
PUBLISHED = "res101"  # features of ResNet-101, which come with the splits
SCALERS = ("train", "each", "none")
HELD_OUT = 0.2  # of the rows of a class that validation sees


@dataclass(frozen=True, eq=False)
class ZeroShotSource:
    """A zero-shot data set: the classes that occur in it, numbered 0, 1, ... in the published order."""

    name: str
    class_names: tuple[str, ...]
    numbers: tuple[int, ...]  # of the classes as published, from 1; a file may have more classes than images
    features: Tensor  # float32 (N, D), as published
    labels: Tensor  # int64 (N,); -1 for a row of another class, which is in no part
    attributes: Tensor  # float32 (C, A)
    trainval: Tensor  # int64, rows of the features
    test_seen: Tensor
    test_unseen: Tensor
    validation_classes: tuple[int, ...] | None = None  # seen classes to hold out when hyper-parameters are chosen

    @property
    def seen(self) -> tuple[int, ...]:
        """The classes that are trained on."""
        return tuple(self.labels[self.trainval].unique().tolist())

    @property
    def unseen(self) -> tuple[int, ...]:
        """The classes that come only in the test."""
        return tuple(self.labels[self.test_unseen].unique().tolist())


def load_xlsa17(name: str, data: Data = None, features: str = PUBLISHED, embedding: str = "att") -> ZeroShotSource:
    """Find and read a data set such as "CUB".

    `features` is the file of features to take, without its ending, and `embedding` the variable of att_splits.mat that
    describes the classes: "att", or for some data sets "sent", embeddings of sentences about them.

    The splits' `train_loc` and `val_loc` serve only to say which classes validation holds out, because their rows are
    partly test rows; see the module.
    """
    path = _found(name, data, features)
    read = read_published(path, path.with_name(SPLITS), embedding)
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


def validation_source(source: ZeroShotSource, seed: int = 0) -> ZeroShotSource:
    """A smaller data set, made of the training rows of another alone, to choose hyper-parameters on.

    The classes of `validation_classes` become the unseen ones; where these are not given, the seed chooses as large a
    share of the seen classes as the source's unseen ones are of all. Of every other class a fifth of the rows, by the
    seed, becomes the test of seen classes: at least one row, unless the class has no other to train on. The source's
    test rows and unseen classes are not in the result, so nothing that is chosen with it can know them.
    """
    seen = source.seen
    held_out = source.validation_classes
    if held_out is None:
        if len(seen) < 3:
            raise UsageError(
                f"{source.name}: validation needs 3 or more seen classes to hold some out, not {len(seen)}; "
                "with a number for classifier.epochs no validation is needed"
            )
        count = round(len(seen) * len(source.unseen) / len(source.class_names))
        order = torch.randperm(len(seen), generator=generator("rkr zero-shot validation", seed)).tolist()
        held_out = tuple(sorted(seen[i] for i in order[: min(max(count, 1), len(seen) - 2)]))
    if not held_out or not set(held_out) < set(seen):
        raise UsageError(f"{source.name}: validation_classes must be some of the seen classes, but not all")
    table = torch.full((len(source.class_names),), -1)  # from the source's classes to 0, 1, ...
    table[list(seen)] = torch.arange(len(seen))
    labels = table[source.labels[source.trainval]]
    hidden = set(table[list(held_out)].tolist())

    trainval, test_seen = [], []
    for label in range(len(seen)):
        if label not in hidden:
            rows = shuffled_class(labels, label, "rkr zero-shot validation", seed)
            tested = min(max(round(HELD_OUT * len(rows)), 1), len(rows) - 1)
            test_seen.append(rows[:tested])
            trainval.append(rows[tested:])
    if not sum(map(len, test_seen)):
        raise UsageError(
            f"{source.name}: validation needs a seen class with 2 or more training rows; "
            "with a number for classifier.epochs no validation is needed"
        )
    return replace(
        source,
        class_names=tuple(source.class_names[label] for label in seen),
        numbers=tuple(source.numbers[label] for label in seen),
        features=source.features[source.trainval],
        labels=labels,
        attributes=source.attributes[list(seen)],
        trainval=torch.cat(trainval).sort().values,
        test_seen=torch.cat(test_seen).sort().values,
        test_unseen=torch.isin(labels, torch.tensor(sorted(hidden))).nonzero().squeeze(1),
        validation_classes=None,
    )


def limited(source: ZeroShotSource, limit: int, seed: int = 0) -> ZeroShotSource:
    """The data set with at most so many training rows of a class; the seed decides which."""
    labels = source.labels[source.trainval]
    kept = [shuffled_class(labels, label, "rkr zero-shot limit", seed)[:limit] for label in source.seen]
    return replace(source, trainval=source.trainval[torch.cat(kept).sort().values])


def zero_shot_stream(sources: Sequence[ZeroShotSource], scaler: str = "train", validation: bool = False) -> Stream:
    """Zero-shot data sets learned one after the other, each a task; tests have the seen classes' rows first.

    `scaler` says how features come to 0..1, dimension by dimension: "train" by minimum and range of the training rows,
    so that test rows may go beyond; "each" by those of the training rows, the seen test rows and the unseen test rows,
    each for themselves, as CADA-VAE and LZSL did in their authors' code: this uses what only the whole test set tells;
    "none" leaves the features as they are.

    With `validation` learners get a copy of each task's test part as its validation part: for sources from
    `validation_source`, where nothing is meant to be hidden from them.
    """
    if scaler not in SCALERS:
        raise UsageError(f"scaler must be one of {', '.join(SCALERS)}, not {scaler!r}")
    for i, source in enumerate(sources):
        first = sources[0]
        if source.features.shape[1] != first.features.shape[1]:
            raise UsageError(
                f"features of {first.name} have {first.features.shape[1]} dimensions, those of {source.name} "
                f"{source.features.shape[1]}: one stream takes features of one kind"
            )
        if any(source.name == other.name for other in sources[:i]):
            raise UsageError(f"{source.name} comes twice: a stream learns a data set once")
    tasks = [_task(source, scaler) for source in sources]
    if validation:
        copies = [task.test.take(torch.arange(len(task.test))) for task in tasks]
        pairs = zip(tasks, copies, strict=True)
        tasks = [Task(replace(task.training, validation=copy), task.test) for task, copy in pairs]
    return Stream("zero-shot", tuple(tasks), (), (), tuple(source.numbers for source in sources))


def _task(source: ZeroShotSource, scaler: str) -> Task:
    train = source.features[source.trainval]
    rows = torch.cat((source.test_seen, source.test_unseen))
    test = source.features[rows]
    scaling = (torch.zeros_like(train[0]), torch.ones_like(train[0])) if scaler == "none" else _extent(train)
    parts = (test[: len(source.test_seen)], test[len(source.test_seen) :])
    scalings = [_extent(part) if scaler == "each" else scaling for part in parts]
    for part, (low, width) in zip((train, *parts), (scaling, *scalings), strict=True):
        part.sub_(low).div_(width)
    training = Training(
        source.name,
        source.class_names,
        Features(train, source.labels[source.trainval]),
        attributes=source.attributes,
        unseen=source.unseen,
        scaling=scaling,
    )
    return Task(training, Features(test, source.labels[rows]))


def _extent(x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and range of every dimension; 1 instead of a range that is nothing but rounding, as scikit-learn does."""
    low, high = x.aminmax(dim=0)
    width = high - low
    width[width < 10 * torch.finfo(x.dtype).eps] = 1
    return low, width


def _found(name: str, data: Data, features: str) -> Path:
    """The file of features that has the splits next to it."""
    for what, value in (("data set", name), ("file of features", features)):
        if value in ("", "..") or Path(value).name != value:
            raise UsageError(f"a {what} has a plain name, not {value!r}")
    path = find((f"{folder}/{name}/{features}.mat" for folder in FOLDERS), data)
    if path is not None and path.with_name(SPLITS).exists():
        return path
    if path is not None:
        raise FileError(
            f"{path.with_name(SPLITS)}: there is no such file beside {path.name}. It has attributes and splits: those "
            'of published data sets come with "xlsa17" (Xian et al.), of your own you write it'
        )
    folder = f"xlsa17/data/{name}, data/{name} or {name} of the folder of data (--data or $RKR_DATA)"
    if features == PUBLISHED:
        advice = f'Features and splits are published by Xian et al. as "xlsa17": they belong into {folder}'
    else:
        advice = (
            f"They are not published: compute features of the images with `rkr features`, and put them into {folder}"
        )
    places = ", ".join(map(str, folders(data)))
    there = find((f"{folder}/{name}" for folder in FOLDERS), data)
    others = sorted(file.stem for file in there.glob("*.mat") if file.name != SPLITS) if there is not None else []
    hint = f" {there} has other features: {', '.join(others)}." if others else ""
    raise FileError(f"{name}: there is no {name}/{features}.mat in {places}.{hint} {advice}")

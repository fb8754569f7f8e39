"""Samples (images or features with labels), tasks, and streams of tasks.

A learner only receives the `Training` part of a task. The test samples belong to the `Task`, which only the evaluator
holds. The parts of a task never share memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rkr.data.measures import harmonic_mean, unseen_and_seen
from rkr.errors import UsageError


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one shape in memory, as one uint8 tensor."""

    x: Tensor  # uint8 (N, C, H, W)
    y: Tensor  # int64 (N,), the class within the task or source: 0, 1, ...

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.dim() != 4:
            raise UsageError(f"images must be uint8 (N, C, H, W), not {self.x.dtype} {tuple(self.x.shape)}")
        _check_labels(self.y, len(self.x))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (self.x.shape[1], self.x.shape[2], self.x.shape[3])

    def take(self, index: Tensor, labels: Tensor | None = None) -> Images:
        """Copy some images, with new labels if given."""
        return Images(self.x[index], self.y[index] if labels is None else labels)

    def digest(self) -> str:
        """SHA-256 of all pixels and labels."""
        h = hashlib.sha256(f"images {tuple(self.x.shape)}".encode())
        h.update(_raw(self.x))
        h.update(_raw(self.y))
        return h.hexdigest()


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Images on disk: paths and labels. `Batches` decodes them in worker processes."""

    root: str
    paths: NDArray[np.bytes_]  # (N,) relative to root; one array, because a list of str would be copied to every worker
    y: Tensor  # int64 (N,)
    size: int = 224  # height and width of the crops

    def __post_init__(self) -> None:
        if self.paths.dtype.kind != "S" or self.paths.ndim != 1:
            raise UsageError(f"paths must be one array of bytes, not {self.paths.dtype} {self.paths.shape}")
        if self.size < 1:
            raise UsageError(f"size must be a positive number of pixels, not {self.size}")
        _check_labels(self.y, len(self.paths))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of decoded images."""
        return (3, self.size, self.size)

    def path(self, i: int) -> str:
        """The path of image i."""
        return os.path.join(self.root, os.fsdecode(bytes(self.paths[i])))

    def take(self, index: Tensor, labels: Tensor | None = None) -> ImageFiles:
        """Select some images, with new labels if given."""
        y = self.y[index] if labels is None else labels
        return ImageFiles(self.root, self.paths[index.numpy()], y, self.size)

    def digest(self) -> str:
        """SHA-256 of paths and labels. Files are not read, because that would take hours for ImageNet."""
        h = hashlib.sha256(f"files {self.size} {len(self)}".encode())
        h.update(b"\0".join(self.paths.tolist()))
        h.update(_raw(self.y))
        return h.hexdigest()


@dataclass(frozen=True, eq=False)
class Features:
    """Feature vectors that a pretrained network computed from images, for zero-shot learning."""

    x: Tensor  # float32 (N, D)
    y: Tensor  # int64 (N,)

    def __post_init__(self) -> None:
        if self.x.dtype != torch.float32 or self.x.dim() != 2:
            raise UsageError(f"features must be float32 (N, D), not {self.x.dtype} {tuple(self.x.shape)}")
        _check_labels(self.y, len(self.x))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int]:
        """(D,), the number of features."""
        return (self.x.shape[1],)

    def take(self, index: Tensor, labels: Tensor | None = None) -> Features:
        """Copy some vectors, with new labels if given."""
        return Features(self.x[index], self.y[index] if labels is None else labels)

    def digest(self) -> str:
        """SHA-256 of all values and labels."""
        h = hashlib.sha256(f"features {tuple(self.x.shape)}".encode())
        h.update(_raw(self.x))
        h.update(_raw(self.y))
        return h.hexdigest()


@dataclass(frozen=True, eq=False)
class Pictures:
    """Pictures decoded to squares, a little larger than what the network sees, so that crops can be drawn from them.

    The squares may lie in memory, in a file, or be decoded when they are read: `store` decides.
    """

    store: PictureStore
    rows: Tensor  # int64 (N,), numbers in the store
    y: Tensor  # int64 (N,)
    size: int  # height and width of what the network sees: the centre, or a random crop

    def __post_init__(self) -> None:
        _check_labels(self.y, len(self.rows))
        if not 1 <= self.size <= self.store.side:
            raise UsageError(f"size must be 1 to {self.store.side} pixels, not {self.size}")

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of what the network sees."""
        return (3, self.size, self.size)

    def read(self, index: Tensor) -> Tensor:
        """Some squares: uint8 (B, 3, R, R)."""
        return self.store.read(self.rows[index])

    def take(self, index: Tensor, labels: Tensor | None = None) -> Pictures:
        """Select some pictures, with new labels if given."""
        return Pictures(self.store, self.rows[index], self.y[index] if labels is None else labels, self.size)

    def digest(self) -> str:
        """SHA-256 of the files' content and the labels."""
        h = hashlib.sha256(f"pictures {self.size} {self.store.side} {len(self)}".encode())
        h.update(b"\0".join(self.store.names[row] for row in self.rows.tolist()))
        h.update(_raw(self.y))
        return h.hexdigest()


class PictureStore(Protocol):
    """Where the squares of `Pictures` come from."""

    side: int  # R
    names: Sequence[bytes]  # identify the content of each picture

    def read(self, rows: Tensor) -> Tensor:
        """uint8 (B, 3, R, R)."""


Samples = Images | ImageFiles | Features | Pictures


def joined(parts: Sequence[Samples]) -> Samples:
    """Concatenate several parts."""
    if len(parts) == 1:
        return parts[0]
    y = torch.cat([part.y for part in parts])
    for kind in (Images, Features):
        if all(isinstance(part, kind) for part in parts):
            return kind(torch.cat([part.x for part in parts if isinstance(part, kind)]), y)
    pictures = [part for part in parts if isinstance(part, Pictures)]
    if len(pictures) == len(parts) and len({(id(part.store), part.size) for part in pictures}) == 1:
        return Pictures(pictures[0].store, torch.cat([part.rows for part in pictures]), y, pictures[0].size)
    files = [part for part in parts if isinstance(part, ImageFiles)]
    if len(files) < len(parts) or len({(part.root, part.size) for part in files}) > 1:
        raise UsageError("samples of different kinds or folders cannot be joined")
    return ImageFiles(files[0].root, np.concatenate([part.paths for part in files]), y, files[0].size)


def _raw(t: Tensor) -> Any:
    """A tensor's bytes in row-major order, as a buffer."""
    return t.contiguous().numpy()


def _check_labels(y: Tensor, samples: int) -> None:
    if y.dtype != torch.int64 or y.shape != (samples,):
        raise UsageError(f"labels must be int64 ({samples},), not {y.dtype} {tuple(y.shape)}")
    if samples and int(y.min()) < 0:
        raise UsageError(f"labels must be 0, 1, ..., not {int(y.min())}")


def _check_classes(what: str, samples: Samples, classes: int) -> None:
    if len(samples) and int(samples.y.max()) >= classes:
        raise UsageError(f"{what} has the label {int(samples.y.max())}, but there are only {classes} classes")


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset with its published train and test split."""

    name: str
    class_names: tuple[str, ...]
    train: Samples
    test: Samples
    mean: tuple[float, ...]  # of each channel, pixels in 0..1
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_normalisation(self.train.shape, self.mean, self.std)
        for what, part in (("train", self.train), ("test", self.test)):
            _check_classes(f"{self.name}: the {what} part", part, len(self.class_names))
            if part.shape != self.train.shape:
                raise UsageError(f"{self.name}: the {what} part is {part.shape}, the train part {self.train.shape}")


@dataclass(frozen=True, eq=False)
class Training:
    """The part of a task that its learner sees.

    In zero-shot learning some classes are `unseen`: they have test samples but no training samples. All classes are
    described by `attributes`.
    """

    name: str
    class_names: tuple[str, ...]
    train: Samples
    validation: Samples | None = None
    attributes: Tensor | None = None  # float32 (C, A), one row per class
    unseen: tuple[int, ...] = ()
    scaling: tuple[Tensor, Tensor] | None = None  # (D,) each: offset and divisor of the features

    def __post_init__(self) -> None:
        for what, part in (("train", self.train), ("validation", self.validation)):
            if part is not None:
                _check_classes(f"task {self.name!r}: the {what} part", part, len(self.class_names))
        if not len(self.train):
            raise UsageError(f"task {self.name!r} has no training samples")
        if self.unseen and self.attributes is None:
            raise UsageError(f"task {self.name!r} has unseen classes but no attributes")
        shape = None if self.attributes is None else tuple(self.attributes.shape)
        if shape is not None and (len(shape) != 2 or shape[0] != len(self.class_names)):
            raise UsageError(
                f"task {self.name!r}: attributes must have {len(self.class_names)} rows, one per class, not {shape}"
            )
        if set(self.unseen) & set(self.train.y.tolist()):
            raise UsageError(f"task {self.name!r} has training samples of unseen classes")


@dataclass(frozen=True, eq=False)
class Task:
    """A task: the training part for the learner, and the test samples for the evaluator."""

    training: Training
    test: Samples

    def __post_init__(self) -> None:
        _check_classes(f"task {self.name!r}: the test part", self.test, len(self.training.class_names))

    @property
    def name(self) -> str:
        return self.training.name

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the test metrics, the main one first."""
        return ZERO_SHOT if self.training.unseen else CLASSIFICATION

    def measure(self, ranked: Tensor) -> tuple[float, ...]:
        """Compute the test metrics, in the order of `measures`, from the top-5 classes (N, 5) of each sample.

        Zero-shot tasks have H, U and S (see `rkr.data.measures`).
        """
        if not self.training.unseen:
            right = ranked == self.test.y[:, None]
            return (_share(right[:, 0]), _share(right.any(1)))
        u, s = unseen_and_seen(ranked[:, 0], self.test.y, len(self.training.class_names), self.training.unseen)
        return (harmonic_mean(u, s), u, s)


CLASSIFICATION = ("accuracy", "top5")
ZERO_SHOT = ("H", "U", "S")


def _share(right: Tensor) -> float:
    return int(right.sum()) / len(right)


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in the order in which they are learned.

    All samples have the same shape, and all images the same normalisation, so that any task can classify any sample
    when the task is inferred.
    """

    name: str
    tasks: tuple[Task, ...]
    mean: tuple[float, ...]  # of each channel; () for features
    std: tuple[float, ...]
    order: tuple[tuple[int, ...], ...]  # for each task, the class numbers in the source

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UsageError(f"stream {self.name!r} has no tasks")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise UsageError(f"stream {self.name!r} has two tasks with the same name: {', '.join(names)}")
        sizes = [len(task.training.class_names) for task in self.tasks]
        if [len(group) for group in self.order] != sizes:
            raise UsageError(f"stream {self.name!r}: its order does not match tasks with {sizes} classes")
        for task in self.tasks:
            for part in (task.training.train, task.training.validation, task.test):
                if part is not None and part.shape != self.input_shape:
                    raise UsageError(
                        f"stream {self.name!r}: samples of task {task.name!r} are {part.shape}, "
                        f"those of the first task {self.input_shape}"
                    )
        if len({task.measures for task in self.tasks}) > 1:
            raise UsageError(f"stream {self.name!r} has both tasks with unseen classes and tasks without")
        _check_normalisation(self.input_shape, self.mean, self.std)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.tasks[0].training.train.shape

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the test metrics, the main one first."""
        return self.tasks[0].measures

    def describe(self) -> dict[str, Any]:
        """Describe the stream as JSON. `sha256` depends on every sample, label, class, attribute and the order."""
        return json.loads(self._description)

    @cached_property
    def _description(self) -> str:
        tasks = []
        for task in self.tasks:
            parts = {"train": task.training.train, "validation": task.training.validation, "test": task.test}
            there = {what: part for what, part in parts.items() if part is not None}
            described: dict[str, Any] = {
                "name": task.name,
                "class_names": task.training.class_names,
                "images": {what: len(part) for what, part in there.items()},
                "sha256": {what: part.digest() for what, part in there.items()},
            }
            if task.training.attributes is not None:
                described["unseen"] = task.training.unseen
                described["attributes"] = tuple(task.training.attributes.shape)
                described["sha256"]["attributes"] = hashlib.sha256(_raw(task.training.attributes)).hexdigest()
            tasks.append(described)
        whole = {
            "name": self.name,
            "input_shape": self.input_shape,
            "mean": self.mean,
            "std": self.std,
            "order": self.order,
            "tasks": tasks,
        }
        whole["sha256"] = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return json.dumps(whole)


def _check_normalisation(shape: tuple[int, ...], mean: Sequence[float], std: Sequence[float]) -> None:
    if len(shape) == 1:  # features are not normalised
        if mean or std:
            raise UsageError(f"features are not normalised: mean and std must be (), not {mean} and {std}")
    elif len(mean) != shape[0] or len(std) != shape[0] or not all(value > 0 for value in std):
        raise UsageError(f"images of {shape[0]} channels need as many means and positive stds, not {mean} and {std}")

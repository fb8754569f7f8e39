"""Zero-shot datasets: image features, class attributes, and the train and test rows.

Seen classes have training images. Unseen classes only occur in the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rkr.data.cut import generator, shuffled_class
from rkr.data.task import Features, Stream, Task, Training
from rkr.errors import UsageError

SCALERS = ("train", "each", "none")
HELD_OUT = 0.2  # fraction of a seen class's rows that validation tests on
KINDS = (
    *(("features", torch.float32, 2), ("labels", torch.int64, 1), ("attributes", torch.float32, 2)),
    *((part, torch.int64, 1) for part in ("trainval", "test_seen", "test_unseen")),
)


@dataclass(frozen=True, eq=False)
class ZeroShotSource:
    """A zero-shot dataset. Its classes are numbered 0, 1, ... in the published order."""

    name: str
    class_names: tuple[str, ...]
    numbers: tuple[int, ...]  # published class numbers, from 1; classes without images are skipped
    features: Tensor  # float32 (N, D), as published
    labels: Tensor  # int64 (N,); -1 for rows of skipped classes
    attributes: Tensor  # float32 (C, A)
    trainval: Tensor  # int64, rows of the features
    test_seen: Tensor
    test_unseen: Tensor
    validation_classes: tuple[int, ...] | None = None  # seen classes to hold out for tuning

    def __post_init__(self) -> None:
        """Check what every loader must guarantee. Loaders of files give more precise errors."""
        for name, kind, dims in KINDS:
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype != kind or value.dim() != dims or not value.numel():
                found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise self._wrong(f"{name} must be a tensor of {kind} with {dims} dimensions, not empty; it is {found}")
            if kind.is_floating_point and not bool(value.isfinite().all()):
                raise self._wrong(f"{name} has values that are NaN or infinite")
        if len(self.features) != len(self.labels):
            raise self._wrong(f"there are {len(self.features)} features, but {len(self.labels)} labels")
        counts = len(self.class_names), len(self.numbers), len(self.attributes)
        if len(set(counts)) > 1:
            raise self._wrong(f"class_names, numbers and attributes must have the same length, not {counts}")
        rows = torch.cat((self.trainval, self.test_seen, self.test_unseen))
        if int(rows.min()) < 0 or int(rows.max()) >= len(self.features):
            raise self._wrong(f"rows must be 0 to {len(self.features) - 1}, not {int(rows.min())} to {int(rows.max())}")
        if len(rows.unique()) < len(rows):
            raise self._wrong("a row is in two of trainval, test_seen and test_unseen, or twice in one")
        seen, tested, unseen = set(self.seen), set(self.labels[self.test_seen].tolist()), set(self.unseen)
        if seen & unseen:
            raise self._wrong(f"class {min(seen & unseen)} is both seen and unseen")
        if tested - seen:
            raise self._wrong(f"class {min(tested - seen)} of test_seen has no rows in trainval")
        if seen | unseen != set(range(len(self.class_names))):
            raise self._wrong(
                f"classes must be 0 to {len(self.class_names) - 1}, each with rows in trainval or test_unseen"
            )

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.name}: {what}")

    @property
    def seen(self) -> tuple[int, ...]:
        """The classes with training rows."""
        return tuple(self.labels[self.trainval].unique().tolist())

    @property
    def unseen(self) -> tuple[int, ...]:
        """The classes that only occur in the test."""
        return tuple(self.labels[self.test_unseen].unique().tolist())


def validation_source(source: ZeroShotSource, seed: int = 0) -> ZeroShotSource:
    """A smaller dataset for tuning, made only of the training rows of another.

    `validation_classes` become the unseen classes. If they are not given, the seed selects the same fraction of the
    seen classes as the source has unseen classes. A fifth of the rows of every other class, selected by the seed,
    becomes the test of seen classes: at least one row, unless the class has only one. The source's test rows and unseen
    classes are not in the result, so tuning on it cannot leak them.
    """
    seen = source.seen
    held_out = source.validation_classes
    if held_out is None:
        if len(seen) < 3:
            raise UsageError(
                f"{source.name}: validation needs at least 3 seen classes, not {len(seen)}; "
                "set classifier.epochs to a number to run without validation"
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
            f"{source.name}: validation needs a seen class with at least 2 training rows; "
            "set classifier.epochs to a number to run without validation"
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
    """Keep at most `limit` training rows per class, selected by the seed."""
    labels = source.labels[source.trainval]
    kept = [shuffled_class(labels, label, "rkr zero-shot limit", seed)[:limit] for label in source.seen]
    return replace(source, trainval=source.trainval[torch.cat(kept).sort().values])


def zero_shot_stream(sources: Sequence[ZeroShotSource], scaler: str = "train", validation: bool = False) -> Stream:
    """A stream with one task per dataset. Test parts have the rows of seen classes first.

    `scaler` scales each feature to 0..1: "train" uses the minimum and range of the training rows, so test values may be
    outside 0..1; "each" scales the training, seen test and unseen test rows separately, as the authors' code of
    CADA-VAE and LZSL does, which uses statistics of the whole test set; "none" does not scale.

    With `validation` the validation part of each task is a copy of its test part, for sources from `validation_source`.
    """
    if scaler not in SCALERS:
        raise UsageError(f"scaler must be one of {', '.join(SCALERS)}, not {scaler!r}")
    for i, source in enumerate(sources):
        first = sources[0]
        if source.features.shape[1] != first.features.shape[1]:
            raise UsageError(
                f"features of {first.name} have {first.features.shape[1]} dimensions, those of {source.name} "
                f"{source.features.shape[1]}: all datasets of a stream need the same features"
            )
        if any(source.name == other.name for other in sources[:i]):
            raise UsageError(f"{source.name} occurs twice in the stream")
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
    """Minimum and range of every dimension. Ranges near 0 become 1, as in scikit-learn."""
    low, high = x.aminmax(dim=0)
    width = high - low
    width[width < 10 * torch.finfo(x.dtype).eps] = 1
    return low, width

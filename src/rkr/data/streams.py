"""Splits the classes of a source into a sequence of tasks.

The images for training, validation and test depend only on the class and a seed, not on the order of tasks, so that
runs with different orders use the same images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index

import torch
import torch.nn.functional as F

from rkr.data.cut import balanced_cut, generator, shuffled_class
from rkr.data.task import Images, Samples, Source, Stream, Task, Training
from rkr.errors import UsageError

Order = int | str | Sequence[int | str]

# APD (Yoon et al., ICLR 2020): CIFAR-100 in blocks of 10 classes, 0-9, 10-19, ..., in these orders of blocks.
APD_ORDERS = {
    "A": (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    "B": (1, 7, 4, 5, 2, 0, 8, 6, 9, 3),
    "C": (7, 0, 5, 1, 8, 4, 3, 6, 2, 9),
    "D": (5, 8, 2, 9, 0, 4, 3, 7, 6, 1),
    "E": (2, 9, 5, 4, 8, 0, 6, 1, 3, 7),
}


def split(
    source: Source, tasks: int = 10, order: Order = 0, validation: float = 0.0, limit: int | None = None, seed: int = 0
) -> Stream:
    """Split the classes of a source into tasks of equal size.

    `order` is a seed for a random order of classes, a list of all classes (numbers or names), or "A" to "E" for the
    published orders of CIFAR-100. `validation` is the fraction of every class that is held out of training. `limit`
    is the maximum number of training images per class before that. `seed` selects the images.
    """
    groups = class_groups(source, tasks, order)
    made = [
        _task(source, f"{source.name}-{number}", group, validation, limit, seed)
        for number, group in enumerate(groups, 1)
    ]
    return Stream(source.name, tuple(made), source.mean, source.std, groups)


def split_cifar(
    cifar10: Source,
    cifar100: Source,
    order: int | str = 0,
    validation: float = 0.0,
    limit: int | None = None,
    seed: int = 0,
    groups: int = 5,
) -> Stream:
    """CIFAR-10 as the first task, then 5 groups of 10 CIFAR-100 classes.

    `order` is a seed for random groups, or "fixed" for classes 0-9, ..., 40-49 (SI and HNET). All tasks are normalised
    with CIFAR-100's mean and std, because a network has one input normalisation.
    """
    if order == "fixed":
        numbers = list(range(len(cifar100.class_names)))
    elif isinstance(order, int):
        numbers = _random_order(cifar100, order)
    else:
        raise UsageError(f"order must be a seed or 'fixed', not {order!r}")
    if not 0 <= groups * 10 <= len(numbers):
        raise UsageError(f"{groups} groups of 10 classes need more than the {len(numbers)} classes of {cifar100.name}")
    later = tuple(tuple(numbers[10 * g : 10 * g + 10]) for g in range(groups))
    return _joined("split-cifar", cifar10, cifar100, later, validation, limit, seed)


def mnist_then(
    mnist: Source,
    cifar100: Source,
    tasks: int = 10,
    order: Order = 0,
    validation: float = 0.0,
    limit: int | None = None,
    seed: int = 0,
) -> Stream:
    """MNIST as the first task, padded to 32x32 and repeated to 3 channels, then CIFAR-100 split as by `split`.

    All tasks are normalised with CIFAR-100's mean and std, because a network has one input normalisation.
    """
    later = class_groups(cifar100, tasks, order)
    return _joined(f"mnist-{cifar100.name}", like(mnist, cifar100), cifar100, later, validation, limit, seed)


def narrowed(stream: Stream, first: int | None = None, on_validation: bool = False) -> Stream:
    """A stream for tuning: only the first tasks, or tested on validation images instead of test images."""
    tasks = list(stream.tasks[:first])
    if on_validation:
        for i, task in enumerate(tasks):
            if task.training.validation is None:
                raise UsageError(f"task {task.name!r} has no validation split to test on")
            tasks[i] = Task(replace(task.training, validation=None), task.training.validation)
    return replace(stream, tasks=tuple(tasks), order=stream.order[:first])


def like(source: Source, other: Source) -> Source:
    """Pad the images of a source with black, and repeat a single channel, to match the shape of another source."""
    if len(source.train.shape) != 3 or len(other.train.shape) != 3:
        raise UsageError(f"{source.name} and {other.name} must be images to be padded")
    channels, height, width = other.train.shape
    c, h, w = source.train.shape
    if h > height or w > width or c not in (1, channels) or (height - h) % 2 or (width - w) % 2:
        raise UsageError(f"{source.name}: images of {source.train.shape} cannot be padded to {other.train.shape}")

    def made(part: Samples) -> Images:
        if not isinstance(part, Images):
            raise UsageError(f"{source.name}: image files cannot be padded")
        y, x = (height - h) // 2, (width - w) // 2
        return Images(F.pad(part.x, (x, x, y, y)).expand(-1, channels, -1, -1).contiguous(), part.y)

    mean, std = other.mean, other.std
    return Source(source.name, source.class_names, made(source.train), made(source.test), mean, std)


def class_groups(source: Source, tasks: int, order: Order) -> tuple[tuple[int, ...], ...]:
    """The class numbers of each task."""
    classes = len(source.class_names)
    if tasks < 1 or classes % tasks:
        fitting = ", ".join(str(n) for n in range(1, classes + 1) if classes % n == 0)
        raise UsageError(
            f"{classes} classes of {source.name} cannot be split into {tasks} tasks of equal size; choose {fitting}"
        )
    if isinstance(order, int):
        numbers = _random_order(source, order)
    elif isinstance(order, str):
        numbers = _published_order(source, order)
    else:
        numbers = _given_order(source, order)
    size = classes // tasks
    return tuple(tuple(numbers[start : start + size]) for start in range(0, classes, size))


def _random_order(source: Source, seed: int) -> list[int]:
    return torch.randperm(len(source.class_names), generator=generator("rkr order", seed)).tolist()


def _published_order(source: Source, name: str) -> list[int]:
    if name not in APD_ORDERS or len(source.class_names) != 100:
        raise UsageError(
            f"no order {name!r} for {source.name}: give a seed or a list of classes; "
            f"{', '.join(APD_ORDERS)} are for the 100 classes of cifar100"
        )
    return [10 * block + i for block in APD_ORDERS[name] for i in range(10)]


def _given_order(source: Source, order: Iterable[int | str]) -> list[int]:
    names = {name: number for number, name in enumerate(source.class_names)}
    numbers = []
    for item in order:
        try:
            number = names[item] if isinstance(item, str) else index(item)
        except (KeyError, TypeError):
            number = -1
        if not 0 <= number < len(names):
            raise UsageError(f"order: {source.name} has no class {item!r}; it has 0 to {len(names) - 1}")
        numbers.append(number)
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        raise UsageError(f"order: these classes of {source.name} occur more than once: {_listed(repeated)}")
    missing = sorted(set(range(len(names))) - set(numbers))
    if missing:
        raise UsageError(f"order: these classes of {source.name} are missing: {_listed(missing)}")
    return numbers


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")


def _joined(
    name: str,
    first: Source,
    later: Source,
    groups: tuple[tuple[int, ...], ...],
    validation: float,
    limit: int | None,
    seed: int,
) -> Stream:
    """All classes of one source as the first task, then tasks from another source."""
    all_of_first = tuple(range(len(first.class_names)))
    tasks = [_task(first, first.name, all_of_first, validation, limit, seed)]
    for number, group in enumerate(groups, 1):
        tasks.append(_task(later, f"{later.name}-{number}", group, validation, limit, seed))
    return Stream(name, tuple(tasks), later.mean, later.std, (all_of_first, *groups))


def _task(source: Source, name: str, group: tuple[int, ...], validation: float, limit: int | None, seed: int) -> Task:
    """A task with some classes, which are renumbered 0, 1, ... in the order of the group."""
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be None or at least 1 image per class, not {limit}")
    y = source.train.y
    chosen = torch.cat([shuffled_class(y, label, "rkr limit", seed)[:limit] for label in group]).sort().values
    kept, off = balanced_cut(y[chosen], validation, seed, "validation")
    names = tuple(source.class_names[label] for label in group)
    for label, title in zip(group, names, strict=True):
        if not bool((y == label).any()):
            raise UsageError(f"{source.name}: class {title!r} has no training images")
    training = Training(
        name,
        names,
        _relabelled(source.train, chosen[kept], group),
        _relabelled(source.train, chosen[off], group) if validation else None,
    )
    of_group = torch.isin(source.test.y, torch.tensor(group)).nonzero().squeeze(1)
    untested = sorted(set(group) - set(source.test.y[of_group].tolist()))
    if untested:
        raise UsageError(f"{source.name}: class {source.class_names[untested[0]]!r} has no test images")
    return Task(training, _relabelled(source.test, of_group, group))


def _relabelled(images: Samples, where: torch.Tensor, group: tuple[int, ...]) -> Samples:
    """Select some images and renumber their labels within the task."""
    table = torch.full((int(images.y.max()) + 1,), -1)
    table[torch.tensor(group)] = torch.arange(len(group))
    return images.take(where, table[images.y[where]])

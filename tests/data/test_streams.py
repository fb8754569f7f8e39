"""Streams: published orders, clear refusals, parts that never overlap, and learners that never reach test data."""

import dataclasses
import gc
import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rkr
from rkr.data import Images, Source, Stream, Task, Training, load_source, mnist_then, split, split_cifar
from rkr.data.cut import balanced_cut
from rkr.data.streams import APD_ORDERS
from rkr.registry import datasets


def source(classes: int = 6, train: int = 10, test: int = 4, name: str = "toy") -> Source:
    """Every image holds its own number, so that it can be recognised."""
    n = classes * (train + test)
    x = torch.zeros(n, 3, 32, 32, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = torch.arange(n) % 256, torch.arange(n) // 256
    y = torch.arange(n) % classes
    cut = classes * train
    names = tuple(f"c{i}" for i in range(classes))
    return Source(
        name, names, Images(x[:cut].clone(), y[:cut]), Images(x[cut:].clone(), y[cut:]), (0.5,) * 3, (0.2,) * 3
    )


def ids(images: Any) -> list[int]:
    return (images.x[:, 0, 0, 0].long() + 256 * images.x[:, 0, 0, 1].long()).tolist()


def test_split() -> None:
    s = source()
    stream = split(s, tasks=3, order=[4, 1, 0, 5, 3, 2])
    assert stream.order == ((4, 1), (0, 5), (3, 2))
    assert [task.name for task in stream.tasks] == ["toy-1", "toy-2", "toy-3"]
    assert stream.input_shape == (3, 32, 32)
    for task, group in zip(stream.tasks, stream.order, strict=True):
        assert task.training.class_names == tuple(f"c{i}" for i in group)
        assert task.training.validation is None
        for part, count in ((task.training.train, 20), (task.test, 8)):
            assert len(part) == count
            assert [group[y] for y in part.y.tolist()] == [i % 6 for i in ids(part)]
    assert split(s, tasks=3, order=["c4", "c1", 0, 5, "c3", 2]).order == stream.order
    assert split(s, tasks=3, order=torch.tensor([4, 1, 0, 5, 3, 2]).numpy()).order == stream.order  # type: ignore[arg-type]
    assert type(split(s, tasks=3, order=list(np.arange(6))).order[0][0]) is int


def test_seeded_orders() -> None:
    s = source(100, 1, 1)
    orders = [split(s, order=seed).order for seed in range(5)]
    assert len(set(orders)) == 5
    assert split(s, order=3).order == orders[3]
    for order in orders:
        assert sorted(sum(order, ())) == list(range(100))
    assert orders[0][0] == (46, 26, 84, 37, 76, 71, 2, 36, 72, 62)  # must never change: results rest on it


def test_published_orders() -> None:
    s = source(100, 1, 1)
    published = {
        "A": "0 1 2 3 4 5 6 7 8 9",
        "B": "1 7 4 5 2 0 8 6 9 3",
        "C": "7 0 5 1 8 4 3 6 2 9",
        "D": "5 8 2 9 0 4 3 7 6 1",
        "E": "2 9 5 4 8 0 6 1 3 7",
    }
    assert set(published) == set(APD_ORDERS)
    for name, blocks in published.items():
        expected = tuple(tuple(range(10 * int(b), 10 * int(b) + 10)) for b in blocks.split())
        assert split(s, order=name).order == expected


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tasks": 4}, r"6 classes of toy cannot be split into 4 tasks of equal size; choose 1, 2, 3, 6"),
        ({"tasks": 0}, "cannot be split into 0 tasks"),
        ({"order": [0, 1, 2, 3, 4]}, "missing: 5"),
        ({"order": [0, 1, 2, 3, 4, 4]}, "more than once: 4"),
        ({"order": [0, 1, 2, 3, 4, 6]}, "no class 6; it has 0 to 5"),
        ({"order": [0, 1, 2, 3, 4, -1]}, "no class -1"),
        ({"order": [0, 1, 2, 3, 4, "cat"]}, "no class 'cat'"),
        ({"order": [0, 1, 2, 3, 4, 5.0]}, "no class 5.0"),
        ({"order": []}, "missing: 0, 1, 2, 3, 4, 5"),
        ({"order": "A"}, "no order 'A' for toy"),
        ({"order": "F"}, "no order 'F'"),
        ({"validation": 1.0}, "validation must be a fraction of at least 0 and less than 1"),
        ({"validation": -0.1}, "validation must be"),
        ({"limit": 0}, "limit must be None or at least 1 image per class, not 0"),
    ],
)
def test_errors(options: dict, match: str) -> None:
    with pytest.raises(rkr.UsageError, match=match):
        split(source(), **{"tasks": 3, **options})


@pytest.mark.parametrize(("validation", "limit", "counts"), [(0.2, None, (8, 2)), (0.5, 4, (2, 2)), (0.99, 3, (1, 2))])
def test_parts_are_balanced_and_do_not_overlap(validation: float, limit: int | None, counts: tuple[int, int]) -> None:
    stream = split(source(), tasks=2, order=1, validation=validation, limit=limit)
    seen: list[int] = []
    for task in stream.tasks:
        assert task.training.validation is not None
        assert task.training.train.y.bincount().tolist() == [counts[0]] * 3
        assert task.training.validation.y.bincount().tolist() == [counts[1]] * 3
        assert task.test.y.bincount().tolist() == [4] * 3
        for part in (task.training.train, task.training.validation, task.test):
            seen += ids(part)
    assert len(set(seen)) == len(seen)


def test_images_do_not_depend_on_the_order() -> None:
    def validation(order: list[int], seed: int = 0) -> set[int]:
        stream = split(source(), tasks=2, order=order, validation=0.3, limit=7, seed=seed)
        return {i for task in stream.tasks for i in ids(task.training.validation)}

    first = validation([0, 1, 2, 3, 4, 5])
    assert validation([3, 4, 5, 0, 1, 2]) == first
    assert validation([5, 1, 3, 0, 4, 2]) == first
    assert validation([0, 1, 2, 3, 4, 5], seed=1) != first


def test_balanced_cut() -> None:
    y = torch.tensor([0] * 10 + [1] * 5 + [2])
    kept, off = balanced_cut(y, 0.4, 0, "test")
    assert y[off].bincount(minlength=3).tolist() == [4, 2, 0]
    assert sorted([*kept.tolist(), *off.tolist()]) == list(range(16))


def test_describe() -> None:
    s = source()
    stream = split(s, tasks=3, order=0, validation=0.2)
    text = json.dumps(stream.describe())
    found = json.loads(text)
    assert found["tasks"][0]["images"] == {"train": 16, "validation": 4, "test": 8}
    assert found["order"] == [list(group) for group in stream.order]
    assert json.dumps(split(source(), tasks=3, order=0, validation=0.2).describe()) == text
    changed = source()
    changed.test.x[5, 2, 31, 31] ^= 1
    others = [
        split(s, tasks=3, order=1, validation=0.2),
        split(s, tasks=2, order=0, validation=0.2),
        split(s, tasks=3, order=0, validation=0.3),
        split(s, tasks=3, order=0, validation=0.2, seed=1),
        split(changed, tasks=3, order=0, validation=0.2),
    ]
    assert len({found["sha256"], *(other.describe()["sha256"] for other in others)}) == 6


def test_split_cifar() -> None:
    ten, hundred = source(10, 4, 2, "cifar10"), source(100, 2, 1, "cifar100")
    fixed = split_cifar(ten, hundred, "fixed")
    assert fixed.order == tuple(tuple(range(10 * g, 10 * g + 10)) for g in (0, 0, 1, 2, 3, 4))
    assert [task.name for task in fixed.tasks] == ["cifar10", *(f"cifar100-{i}" for i in range(1, 6))]
    assert [len(task.training.train) for task in fixed.tasks] == [40] + [20] * 5
    assert fixed.mean == hundred.mean
    random = split_cifar(ten, hundred, 0)
    later = sum(random.order[1:], ())
    assert len(set(later)) == 50
    assert later != tuple(range(50))
    assert split_cifar(ten, hundred, 1).order != random.order
    with pytest.raises(rkr.UsageError, match="seed or 'fixed'"):
        split_cifar(ten, hundred, "B")


def test_mnist_then_real(mnist: Source, cifar100: Source) -> None:
    stream = mnist_then(mnist, cifar100, order="E", limit=20)
    assert len(stream.tasks) == 11
    assert stream.input_shape == (3, 32, 32)
    first = stream.tasks[0]
    assert (len(first.training.train), len(first.test)) == (200, 10000)
    assert isinstance(first.test, Images)
    assert torch.equal(first.test.x[:, :, 2:30, 2:30], mnist.test.x.expand(-1, 3, -1, -1))
    assert int(first.test.x.long().sum()) == 3 * int(mnist.test.x.long().sum())  # all around is black
    assert stream.tasks[1].training.class_names == cifar100.class_names[20:30]
    assert stream.mean == cifar100.mean


def test_cifar100_real(cifar100: Source) -> None:
    stream = split(cifar100, order="B", validation=0.1)
    for task in stream.tasks:
        assert task.training.validation is not None
        assert task.training.train.y.bincount().tolist() == [450] * 10
        assert task.training.validation.y.bincount().tolist() == [50] * 10
        assert task.test.y.bincount().tolist() == [100] * 10
    assert stream.tasks[0].training.class_names[0] == cifar100.class_names[10]
    third = stream.tasks[2]  # block 4: its test images are those of classes 40 to 49, in the file's order
    of_block = (cifar100.test.y >= 40) & (cifar100.test.y < 50)
    assert isinstance(third.test, Images)
    assert torch.equal(third.test.x, cifar100.test.x[of_block])
    assert torch.equal(third.test.y + 40, cifar100.test.y[of_block])


# ---------------------------------------------------------------------------------------------------------
# What a learner can see


def reach(start: object) -> list[object]:
    """Every object that can be reached from one, code and classes left aside."""
    stop = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)
    seen: dict[int, object] = {}
    todo = [start]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, stop):
            continue
        seen[id(item)] = item
        todo += gc.get_referents(item)
    return list(seen.values())


def folder_source(tmp: Any) -> Source:
    from PIL import Image

    for c in range(6):
        for i in range(4):
            (tmp / f"{c}").mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (c, i, 0)).save(tmp / f"{c}" / f"{i}.png")
    return load_source("folder", tmp, size=8)


@pytest.mark.parametrize("make", [lambda tmp: source(), lambda tmp: load_source("digits"), folder_source])
def test_learners_cannot_reach_test_data(make: Callable[[Any], Source], tmp_path: Any) -> None:
    made = make(tmp_path)
    stream = split(made, tasks=2, validation=0.25)
    assert {field.name for field in dataclasses.fields(Training)} == {
        *("name", "class_names", "train", "validation"),
        *("attributes", "unseen", "scaling"),
    }
    tests = [task.test for task in stream.tasks] + [made.test]
    storages = {part.x.untyped_storage().data_ptr() for part in tests if isinstance(part, Images)}
    storages |= {part.y.untyped_storage().data_ptr() for part in tests}
    for task in stream.tasks:
        found = reach(task.training)
        assert any(item is task.training.train for item in found)
        assert not [item for item in found if isinstance(item, Task | Stream | Source)]
        assert not [item for item in found if any(item is part for part in tests)]
        tensors = [item for item in found if isinstance(item, Tensor)]
        assert len(tensors) >= 2
        assert not storages & {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for part in tests:
            paths = getattr(part, "paths", None)
            if paths is not None:
                assert not [item for item in found if item is paths]
                mine = {*task.training.train.paths, *task.training.validation.paths}  # type: ignore[union-attr]
                assert not mine & {*paths}
    assert any(item is stream.tasks[0].test for item in reach(stream.tasks[0]))  # the walk does find it from there


# ---------------------------------------------------------------------------------------------------------
# Parts, and sources by name


def test_digits() -> None:
    digits = load_source("digits")
    assert len(digits.train) + len(digits.test) == 1797
    assert (len(digits.train), digits.train.shape) == (1347, (1, 8, 8))
    total = digits.train.y.bincount() + digits.test.y.bincount()
    assert total.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert isinstance(digits.train, Images)
    pixels = digits.train.x.double() / 255
    assert (int(digits.train.x.max()), int(digits.train.x.min())) == (255, 0)
    assert float(pixels.mean()) == pytest.approx(digits.mean[0], abs=1e-4)
    assert float(pixels.std()) == pytest.approx(digits.std[0], abs=1e-4)
    assert load_source("digits", size=32).train.shape == (1, 32, 32)


def test_registry() -> None:
    assert list(datasets) == ["cifar10", "cifar100", "digits", "folder", "imagenet", "mnist"]
    assert all(entry.description and "\n" not in entry.description for entry in datasets.values())
    with pytest.raises(rkr.UsageError, match="no source 'cifar': choose one of cifar10"):
        load_source("cifar")
    with pytest.raises(rkr.UsageError, match="source 'digits' has no option 'colour'; its options: size, test, seed"):
        load_source("digits", colour=1)


def test_parts_are_checked() -> None:
    x, y = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1])
    good = Images(x, y)
    for bad in (
        lambda: Images(x.float(), y),
        lambda: Images(x[0], y),
        lambda: Images(x, y[:1]),
        lambda: Images(x, y.int()),
        lambda: Images(x, y - 1),
        lambda: Training("t", ("a",), good),
        lambda: Training("t", ("a", "b"), Images(x[:0], y[:0])),
        lambda: Task(Training("t", ("a", "b"), good), Images(x, y + 1)),
        lambda: Source("s", ("a", "b"), good, good, (0.5,), (0.0,)),
        lambda: Source("s", ("a", "b"), good, good, (0.5,) * 3, (0.1,) * 3),
        lambda: Stream("s", (), (0.5,), (0.1,), ()),
        lambda: Stream("s", (Task(Training("t", ("a", "b"), good), good),) * 2, (0.5,), (0.1,), ((0, 1), (2, 3))),
    ):
        with pytest.raises(rkr.UsageError):
            bad()
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.x = x  # type: ignore[misc]


def test_a_class_without_test_images_is_refused() -> None:
    whole = source()
    kept = (whole.test.y != 1).nonzero().squeeze(1)
    poorer = dataclasses.replace(whole, test=whole.test.take(kept))
    with pytest.raises(rkr.UsageError, match=f"class {whole.class_names[1]!r} has no test images"):
        split(poorer, tasks=1)

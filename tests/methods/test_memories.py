"""Exemplars and the methods that learn from them: herding, the memory, iCaRL and EEIL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import CLASSES
from helpers.learning import small_double_cnn as make
from torch import Tensor

import rkr
from rkr.methods import METHODS, Learner
from rkr.methods.learner import SeenTask
from rkr.methods.shared.memory import Memory, herd
from rkr.methods.shared.rehearsing import Rehearsing, task_and_class

OF_CLASS = 7  # samples


class Pool:
    """Three tasks with the same number of samples of every class, and what the engine does with them, in small."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.tasks, self.x, self.y = [], [], []
        start = 0
        for number, classes in enumerate(CLASSES):
            names = tuple(f"{number}{i}" for i in range(classes))
            self.tasks.append(SeenTask(number, f"t{number}", names, start))
            draw = torch.Generator().manual_seed(number)
            y = torch.arange(classes * OF_CLASS) % classes
            x = torch.randn(len(y), 1, 4, 4, generator=draw, dtype=torch.float64)
            for label in range(classes):
                x[y == label, 0, label] += 2
            self.x.append(x)
            self.y.append(y + start)
            start += classes

    def read(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What the learner wants, in batches that mix its tasks."""
        x, y = [], []
        for number, rows in self.learner.rehearse([len(y) for y in self.y[: len(self.learner.seen)]]).items():
            x.append(self.x[number] if rows is None else self.x[number][rows])
            y.append(self.y[number] if rows is None else self.y[number][rows])
        return iter(list(zip(torch.cat(x).split(10), torch.cat(y).split(10), strict=True)))

    def whole(self) -> tuple[Tensor, Tensor]:
        parts = list(self.read())
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

    def train(self, number: int, upto: str | None = None) -> None:
        """Train a task, to the end of a phase; None for all of them and `end`."""
        learner = self.learner
        learner.begin(self.tasks[number])
        for phase in learner.phases():
            learner.prepare(phase, self.read)
            self.steps()
            if phase.name == upto:
                return
        learner.eval()
        learner.end(self.read)

    def steps(self, count: int = 3) -> None:
        optimizer = torch.optim.SGD(self.learner.groups(), lr=0.02, momentum=0.9)
        self.learner.train()
        for _ in range(count):
            for x, y in self.read():
                optimizer.zero_grad()
                self.learner.loss(x, y).loss.backward()
                optimizer.step()


def built(name: str, **options: Any) -> tuple[Any, Pool]:
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc", **options)
    return learner, Pool(learner)


# ---------------------------------------------------------------------------------------------------------
# Herding and the memory


@pytest.mark.parametrize(("count", "wanted"), [(1, 1), (5, 2), (9, 6), (8, 8), (6, 20)])
def test_herding_is_greedy(count: int, wanted: int) -> None:
    """Every choice against all others, in plain Python."""
    features = torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    rows = features.tolist()
    mean = [sum(column) / count for column in zip(*rows, strict=True)]
    chosen: list[int] = []
    while len(chosen) < min(wanted, count):
        best, least = -1, float("inf")
        for i in range(count):
            if i not in chosen:
                tried = [*chosen, i]
                middle = [sum(rows[j][d] for j in tried) / len(tried) for d in range(3)]
                far = sum((a - b) ** 2 for a, b in zip(middle, mean, strict=True))
                if far < least:
                    best, least = i, far
        chosen.append(best)
    assert herd(features, wanted).tolist() == chosen


def test_herding_takes_no_sample_twice() -> None:
    same = torch.ones(5, 2)
    assert sorted(herd(same, 5).tolist()) == [0, 1, 2, 3, 4]


def test_memory_shrinks_by_its_ranking() -> None:
    memory = Memory(budget=13)
    memory.begin(2)
    assert len(memory) == 0
    memory.keep([torch.tensor([9, 7, 5, 3, 1, 0]), torch.tensor([2, 4, 6, 8])])  # 6 each; of one there are fewer
    assert memory.quota == 6
    assert [memory.of(0, label).tolist() for label in range(2)] == [[9, 7, 5, 3, 1, 0], [2, 4, 6, 8]]
    memory.begin(3)
    assert (memory.quota, len(memory)) == (6, 10)  # until the new task is kept, the old one has all the room
    memory.keep([torch.arange(10, 20)] * 3)
    assert memory.quota == 2
    assert memory.of_task(0).tolist() == [9, 7, 2, 4]
    assert memory.of_task(1).tolist() == [10, 11] * 3
    assert len(memory) == 10 <= memory.budget
    memory.begin(4)
    memory.keep([torch.tensor([1])] * 4)
    assert memory.quota == 1
    assert (memory.of_task(0).tolist(), len(memory)) == ([9, 2], 9)


@pytest.mark.parametrize("name", ["icarl", "eeil"])
def test_exemplars_of_every_class(name: str) -> None:
    learner, pool = built(name, memory=20)
    quotas = []
    first: dict[int, list[int]] = {}
    for number in range(3):
        pool.train(number)
        seen = sum(CLASSES[: number + 1])
        quota = min(20 // seen, OF_CLASS)
        quotas.append(quota)
        assert len(learner.memory) == quota * seen <= 20
        for task in learner.seen:
            for label in range(task.classes):
                kept = learner.memory.of(task.number, label)
                assert len(kept) == quota
                assert (pool.y[task.number][kept] == task.start + label).all()
                best = first.setdefault(task.start + label, kept.tolist())
                assert kept.tolist() == best[:quota]  # the ranking stays
    assert quotas == [6, 4, 2]
    # The newest by herding of unit features, computed here.
    x, y = pool.x[2], pool.y[2]
    features = F.normalize(_features(learner, x), dim=1)
    for label in range(4):
        rows = (y == 5 + label).nonzero()[:, 0]
        assert learner.memory.of(2, label).tolist() == rows[herd(features[rows], 2)].tolist()


def test_a_task_is_learned_with_all_of_the_memory() -> None:
    """Old exemplars make room when the new task is learned, not before."""
    learner, pool = built("icarl", memory=20)
    pool.train(0)
    learner.begin(pool.tasks[1])
    wanted = learner.rehearse([21, 14])
    assert wanted[1] is None
    assert pool.y[0][wanted[0]].bincount().tolist() == [6, 6, 6]
    assert pool.whole()[1].bincount().tolist() == [6, 6, 6, OF_CLASS, OF_CLASS]


@torch.no_grad()
def _features(learner: Rehearsing, x: Tensor) -> Tensor:
    """What goes into the heads, by the network's formula."""
    net = cast("Any", learner.eval().network)
    x = F.relu(net.bn1(net.conv1(x)))
    x = F.max_pool2d(F.relu(net.bn2(net.conv2(x))), 2)
    return F.relu(net.fc1(x.flatten(1)))


# ---------------------------------------------------------------------------------------------------------
# iCaRL


@pytest.mark.parametrize("flip", [True, False])
def test_icarl_answers_with_the_nearest_mean(flip: bool) -> None:
    learner, pool = built("icarl", memory=20, flip=flip)
    for number in range(3):
        pool.train(number)
    means = []
    for task in learner.seen:
        for label in range(task.classes):
            kept = pool.x[task.number][learner.memory.of(task.number, label)]
            views = [kept, kept.flip(3)] if flip else [kept]
            unit = [f / f.norm() for view in views for f in _features(learner, view)]
            mean = torch.stack(unit).mean(0)
            means.append(mean / mean.norm())
    found = torch.cat([learner.get_buffer(f"means_{n}") for n in range(3)])
    torch.testing.assert_close(found, torch.stack(means), rtol=1e-10, atol=1e-12)
    x = torch.randn(30, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        logits = [learner.predict(x, n) for n in range(3)]
        task, label = learner.infer(x)
    for i, own in enumerate(_features(learner, x)):
        far = [float((own / own.norm() - mean).square().sum()) for mean in means]
        for n, seen in enumerate(learner.seen):
            assert (-logits[n][i]).tolist() == pytest.approx(far[seen.labels], abs=1e-10)
        best = far.index(min(far))
        n = max(k for k in range(3) if learner.seen[k].start <= best)
        assert (int(task[i]), int(label[i])) == (n, best - learner.seen[n].start)
    assert len(set(task.tolist())) == 3


def test_icarl_s_targets() -> None:
    """Old classes: what the network answered before, for all images; new ones: the labels."""
    learner, pool = built("icarl", memory=20)
    pool.train(0)
    pool.train(1)
    x, y = pool.x[2][:5], pool.y[2][:5]
    x, y = torch.cat([x, pool.x[0][:4]]), torch.cat([y, pool.y[0][:4]])
    learner.eval()
    with torch.no_grad():
        before = torch.cat([learner.network.fc.heads[n](_features(learner, x)) for n in range(2)], 1)
    learner.begin(pool.tasks[2])
    learner.prepare(learner.phases()[0], pool.read)
    pool.steps(1)
    learner.eval()
    with torch.no_grad():
        now = torch.cat([learner.network.fc.heads[n](_features(learner, x)) for n in range(3)], 1)
        loss = 0.0
        for i in range(len(x)):
            for c in range(9):
                target = float(before[i, c].sigmoid()) if c < 5 else float(y[i] == c)
                p = float(now[i, c].sigmoid())
                loss -= float(target * torch.tensor(p).log() + (1 - target) * torch.tensor(1 - p).log())
    assert learner.loss(x, y).loss.item() == pytest.approx(loss / len(x), rel=1e-5)
    assert learner.teacher is not None
    assert not learner.train().teacher.training
    assert not any(p.requires_grad for p in learner.teacher.parameters())


def test_the_first_task_of_icarl_is_binary_cross_entropy() -> None:
    learner, pool = built("icarl")
    learner.begin(pool.tasks[0])
    learner.eval()
    x, y = pool.x[0], pool.y[0]
    logits = learner.network.fc.heads[0](_features(learner, x))
    one_hot = torch.eye(3, dtype=torch.float64)[y]
    expected = -(one_hot * logits.sigmoid().log() + (1 - one_hot) * (-logits).sigmoid().log()).sum() / len(x)
    assert learner.loss(x, y).loss.item() == pytest.approx(float(expected), rel=1e-10)


def test_classes_to_tasks() -> None:
    seen = [SeenTask(n, str(n), ("a",) * size, start) for n, (size, start) in enumerate(((3, 0), (2, 3), (4, 5)))]
    task, label = task_and_class(torch.arange(9), seen)
    assert task.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert label.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------
# EEIL


def test_eeil_s_sets() -> None:
    """First the new task and all exemplars; then as many of every class, of the new ones by herding."""
    learner, pool = built("eeil", memory=12)
    pool.train(0)
    assert [phase.name for phase in learner.phases()] == ["train"]
    pool.train(1, upto="unbalanced")
    assert pool.whole()[1].bincount().tolist() == [4, 4, 4, OF_CLASS, OF_CLASS]
    balanced = learner.phases()[1]
    features = F.normalize(_features(learner, pool.x[1]), dim=1)
    learner.prepare(balanced, pool.read)
    wanted = learner.rehearse([21, 14])
    rows = [(pool.y[1] == 3 + label).nonzero()[:, 0] for label in range(2)]
    assert wanted[1].tolist() == torch.cat([own[herd(features[own], 4)] for own in rows]).tolist()
    assert pool.whole()[1].bincount().tolist() == [4] * 5
    assert len(learner.memory) == 12
    pool.steps()
    learner.eval()
    features = F.normalize(_features(learner, pool.x[1]), dim=1)  # the memory is filled by the final features
    learner.end(pool.read)
    assert learner.memory.of_task(1).tolist() == torch.cat([own[herd(features[own], 2)] for own in rows]).tolist()
    assert len(learner.memory) == 2 * 5
    learner.begin(pool.tasks[2])
    assert pool.whole()[1].bincount().tolist() == [2] * 5 + [OF_CLASS] * 4


@pytest.mark.parametrize("temperature", [2.0, 3.0])
def test_eeil_s_losses(temperature: float) -> None:
    learner, pool = built("eeil", memory=12, temperature=temperature)
    pool.train(0)
    pool.train(1)
    x, y = torch.cat([pool.x[2][:6], pool.x[1][:3]]), torch.cat([pool.y[2][:6], pool.y[1][:3]])

    @torch.no_grad()
    def outputs() -> list[Tensor]:
        features = _features(learner, x)
        return [head(features) for head in learner.network.fc.heads]

    def cross_entropy() -> float:
        return float(F.cross_entropy(torch.cat(outputs(), 1), y))

    def distillation(wanted: Tensor, number: int) -> float:
        p, q = (wanted / temperature).softmax(1), (outputs()[number] / temperature).softmax(1)
        return -float((p * q.log()).sum(1).mean())

    old = outputs()
    pool.train(2, upto="unbalanced")
    learner.eval()
    expected = cross_entropy() + distillation(old[0], 0) + distillation(old[1], 1)
    assert learner.loss(x, y).loss.item() == pytest.approx(expected, rel=1e-10)
    middle = outputs()
    learner.prepare(learner.phases()[1], pool.read)
    pool.steps(2)
    assert not learner.newest.training
    assert not learner.teacher.training
    learner.eval()
    expected = cross_entropy() + distillation(old[0], 0) + distillation(old[1], 1) + distillation(middle[2], 2)
    assert learner.loss(x, y).loss.item() == pytest.approx(expected, rel=1e-10)


def test_eeil_answers_with_the_highest_output() -> None:
    learner, pool = built("eeil", memory=12)
    for number in range(3):
        pool.train(number)
    learner.eval()
    x = torch.cat(pool.x)
    with torch.no_grad():
        outputs = torch.cat([head(_features(learner, x)) for head in learner.network.fc.heads], 1)
        for task in learner.seen:
            torch.testing.assert_close(learner.predict(x, task.number), outputs[:, task.labels])
        task, label = learner.infer(x)
    starts = torch.tensor([0, 3, 5])
    assert torch.equal(starts[task] + label, outputs.argmax(1))


# ---------------------------------------------------------------------------------------------------------
# Capacity


PLAIN = 3_038_110  # LeNet with 100 classes
STATISTICS = 4 * 2 * 70 + 8 * 2
IMAGE = 3 * 32 * 32


@pytest.mark.parametrize("name", ["icarl", "eeil"])
def test_capacity_counts_images_to_go_on_and_no_copy_of_the_network(name: str) -> None:
    learner = cast("Rehearsing", METHODS[name].build(lambda: rkr.networks.lenet(classes=100), "fc"))
    learner.sample_bytes.fill_(IMAGE)
    for number in range(10):
        learner.begin(SeenTask(number, f"t{number}", tuple(map(str, range(10))), 10 * number))
        learner.memory.keep([torch.arange(500)] * 10)
        assert len(learner.memory) == 2000 // (10 * number + 10) * (10 * number + 10)
    assert len(learner.memory) == 2000
    biases = 4 * 100 if name == "icarl" else 0  # of heads, which the means of its classes have not
    capacity = learner.capacity()
    assert capacity.bytes == 4 * PLAIN + STATISTICS - biases
    assert capacity.bytes_to_learn == 4 * PLAIN + STATISTICS + 2000 * IMAGE
    assert capacity.percent == 100
    assert capacity.percent_to_learn == pytest.approx(150.56, abs=0.005)


def test_an_image_s_size_is_what_is_read() -> None:
    learner, pool = built("icarl", memory=20)
    pool.train(0)
    assert learner.sample_bytes == 16
    assert learner.kept_to_learn() == ((), 18 * 16)

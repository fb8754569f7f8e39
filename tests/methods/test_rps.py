"""RPS-Net: parallel modules, paths and their candidates, the loss, the memory, and what is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import seen_tasks, small_double_cnn
from torch import Tensor, nn

import rkr
from rkr.methods import METHODS
from rkr.methods.learner import SeenTask, nbytes
from rkr.methods.rps import Parallel, RpsNet, layers_and_norms
from rkr.methods.shared.memory import herd

CLASSES = (3, 2, 4, 2)
OF_CLASS = 7  # samples
LAYERS = ("conv1", "conv2", "fc1")


def make() -> nn.Module:
    return small_double_cnn(classes=11)


def samples(task: SeenTask, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * task.number + seed)
    y = torch.arange(task.classes * OF_CLASS) % task.classes
    x = torch.randn(len(y), 1, 4, 4, generator=draw, dtype=torch.float64)
    for label in range(task.classes):
        x[y == label, 0, label] += 2
    return x, y + task.start


def built(seed: int = 0, **options: Any) -> RpsNet:
    torch.manual_seed(seed)
    learner = METHODS["rps-net"].build(make, "fc", **options)
    assert isinstance(learner, RpsNet)
    return learner


def reader(learner: RpsNet) -> Iterator[tuple[Tensor, Tensor]]:
    """What the learner wants, in batches that mix its tasks."""
    x, y = [], []
    for number, rows in learner.rehearse([OF_CLASS * t.classes for t in learner.seen]).items():
        own_x, own_y = samples(learner.seen[number])
        x.append(own_x if rows is None else own_x[rows])
        y.append(own_y if rows is None else own_y[rows])
    return iter(list(zip(torch.cat(x).split(10), torch.cat(y).split(10), strict=True)))


def steps(learner: RpsNet, count: int = 2) -> None:
    optimizer = torch.optim.SGD(learner.groups(), lr=0.02, momentum=0.9, weight_decay=0.01)
    learner.train()
    for _ in range(count):
        for x, y in reader(learner):
            optimizer.zero_grad()
            learner.loss(x, y).loss.backward()
            optimizer.step()


def learn(learner: RpsNet, number: int) -> None:
    learner.begin(seen_tasks(CLASSES)[number])
    steps(learner)
    learner.eval()
    learner.end(lambda: reader(learner))


def layer(learner: RpsNet, name: str, network: nn.Module | None = None) -> Parallel:
    found = (network or learner.network).get_submodule(name)
    assert isinstance(found, Parallel)
    return found


def modules(learner: RpsNet, network: nn.Module | None = None) -> list[list[int]]:
    """The modules of each layer."""
    return [[int(n) for n in layer(learner, name, network).branches] for name in LAYERS]


# ---------------------------------------------------------------------------------------------------------
# Modules


def by_formula(learner: RpsNet, x: Tensor) -> Tensor:
    """The small network written out, every layer the sum of its modules; in training mode only the last one's
    normalisation is that of the batch."""

    def normalised(name: str, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for i, branch in enumerate(layer(learner, name).branches.values()):
            conv, norm = branch
            y = F.conv2d(x, conv.weight, conv.bias, padding=1)
            last = i == len(layer(learner, name).branches) - 1
            if learner.training and last:
                mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
            else:
                mean, var = norm.running_mean, norm.running_var
            y = (y - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
            total = total + y * norm.weight[:, None, None] + norm.bias[:, None, None]
        return total

    x = F.relu(normalised("conv1", x))
    x = F.max_pool2d(F.relu(normalised("conv2", x)), 2).flatten(1)
    x = F.relu(sum((x @ b[0].weight.T + b[0].bias for b in layer(learner, "fc1").branches.values()), torch.zeros(())))
    return torch.cat([x @ head.weight.T + head.bias for head in learner.heads.heads], 1)  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_is_the_sum_of_its_modules(training: bool) -> None:
    learner = built(jump=1)
    for number in range(3):
        learn(learner, number)
    assert [len(row) for row in modules(learner)] == [3, 3, 3]
    x, _ = samples(seen_tasks(CLASSES)[0], 5)
    learner.train(training)
    expected = by_formula(learner, x)
    torch.testing.assert_close(learner.logits(x), expected, rtol=1e-9, atol=1e-9)
    learner.eval()
    expected = by_formula(learner, x)
    for task in learner.seen:  # task told
        torch.testing.assert_close(learner.predict(x, task.number), expected[:, task.labels], rtol=1e-9, atol=1e-9)
    number, label = learner.infer(x)
    starts = torch.tensor([task.start for task in learner.seen])
    assert torch.equal(starts[number] + label, expected.argmax(1))


@pytest.mark.parametrize("name", ["lenet", "resnet18", "resnet32", "small_cnn"])
def test_the_first_path_is_the_network_itself(name: str) -> None:
    """Bit for bit, and its statistics move alike; normalisation is inside of modules, shortcuts are not."""

    def network() -> nn.Module:
        return getattr(rkr.networks, name)(classes=3)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    plain: Any = network()
    torch.manual_seed(0)
    learner: Any = METHODS["rps-net"].build(network, "fc")
    learner.begin(seen_tasks(CLASSES)[0])
    plain.fc = learner.heads.heads[0]
    x = torch.randn(2, *plain.input_shape)
    for mode in (True, False):
        learner.train(mode)
        plain.train(mode)
        assert torch.equal(learner.logits(x), plain(x))
    norms = [m for m in plain.modules() if isinstance(m, nn.BatchNorm2d)]
    paired = [
        m.branches["0"][1] for m in learner.network.modules() if isinstance(m, Parallel) and len(m.branches["0"]) == 2
    ]
    assert len(norms) == len(paired)
    layers = [m for m in plain.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert sum(isinstance(m, Parallel) for m in learner.network.modules()) == len(layers) - 1


def test_new_modules_start_as_the_network_s_own() -> None:
    learner = built(jump=1)
    learner.begin(seen_tasks(CLASSES)[0])
    torch.manual_seed(7)
    learner.begin(seen_tasks(CLASSES)[1])
    torch.manual_seed(7)
    learner.heads._make(2)  # what `begin` draws before: a head and the paths
    learner._draw([[0, 0, 0]])
    fresh = make()
    for name in LAYERS:
        new = layer(learner, name).branches[str(learner.paths[1][LAYERS.index(name)])]
        assert torch.equal(new[0].weight, fresh.get_submodule(name).weight)  # type: ignore[index,arg-type]
        assert new.training


class Odd(nn.Module):
    """A layer called twice, a BatchNorm behind two layers, one before a layer, a LayerNorm, a parameter, two names."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.both = nn.BatchNorm1d(4)
        self.before = nn.BatchNorm1d(4)
        self.body = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        self.other = self.body[0]
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        x = self.both(self.a(x)) + self.both(self.b(x))
        x = self.body(torch.relu(self.before(x)))
        return self.fc(self.norm(x) * self.scale)


def test_which_normalisation_belongs_to_a_layer() -> None:
    expected = {"twice": None, "a": None, "b": None, "body.0": "body.1"}
    assert layers_and_norms(Odd(), "fc") == expected
    with pytest.raises(rkr.UsageError, match="layers besides the head '1'"):
        METHODS["rps-net"].build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "1")


def test_what_is_in_no_module_belongs_to_the_first_path() -> None:
    torch.manual_seed(0)
    learner: Any = METHODS["rps-net"].build(Odd, "fc", jump=2)
    assert learner.network.other is learner.network.body[0]
    x = torch.randn(8, 4)
    outside = {"both", "before", "norm", "scale"}

    def step() -> set[str]:
        before = copy.deepcopy(learner.network.state_dict())
        optimizer = torch.optim.SGD(learner.groups(), lr=0.1, weight_decay=0.1)
        learner.train()
        learner.loss(x, torch.arange(8) % learner.task.classes + learner.task.start).loss.backward()
        optimizer.step()
        after = learner.network.state_dict()
        return {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}

    for number in range(2):
        learner.begin(seen_tasks(CLASSES)[number])
        assert step() == outside | {"twice", "a", "b", "body", "other", "fc"}
    learner.begin(seen_tasks(CLASSES)[2])
    assert step() == {"twice", "a", "b", "body", "other", "fc"}
    assert learner.network.body[3].training  # dropout goes on


# ---------------------------------------------------------------------------------------------------------
# Paths


@pytest.mark.parametrize(("jump", "expected"), [(1, [1, 2, 3, 4]), (2, [1, 1, 2, 2]), (3, [1, 1, 1, 2])])
def test_a_new_path_every_few_tasks_and_all_are_used(jump: int, expected: list[int]) -> None:
    learner = built(jump=jump)
    kept: list[list[int]] = []
    for task, count in zip(seen_tasks(CLASSES), expected, strict=True):
        learner.begin(task)
        paths = learner.paths
        assert len(paths) == count
        assert paths[: len(kept)] == kept  # those of before go on, and are part of the union
        assert paths[0] == [0, 0, 0]
        assert modules(learner) == [[path[i] for path in paths] for i in range(3)]
        old = len(kept) if task.number else 0
        if task.number:
            assert modules(learner, learner.teacher) == [[path[i] for path in paths[:old]] for i in range(3)]
        kept = paths
        trained = {id(p) for group in learner.groups() for p in group["params"]}
        new = [layer(learner, name).branches[str(paths[-1][i])] for i, name in enumerate(LAYERS)]
        heads = [p for head in learner.heads.heads for p in head.parameters()]
        assert trained == {id(p) for branch in new for p in branch.parameters()} | {id(p) for p in heads}


def test_finished_paths_stay_bit_for_bit() -> None:
    """Parameters and statistics, over training of later paths; those of the path at hand all move."""
    learner = built(jump=2)
    learn(learner, 0)
    before = copy.deepcopy(layer(learner, "conv1").state_dict())
    learn(learner, 1)
    after = layer(learner, "conv1").state_dict()
    assert all(not torch.equal(after[key], before[key]) for key in before)  # the path goes on
    finished = {name: copy.deepcopy(layer(learner, name).state_dict()) for name in LAYERS}
    learner.begin(seen_tasks(CLASSES)[2])
    started = {name: copy.deepcopy(layer(learner, name).state_dict()) for name in LAYERS}
    steps(learner)
    for name in LAYERS:
        now = layer(learner, name).state_dict()
        assert len(now) == 2 * len(finished[name])
        for key in now:
            if key in finished[name]:
                assert torch.equal(now[key], finished[name][key])
            else:
                assert not torch.equal(now[key], started[name][key])
        assert not any(p.requires_grad for p in layer(learner, name).branches["0"].parameters())


def test_the_network_of_before_answers_as_it_did() -> None:
    learner = built(jump=1)
    learn(learner, 0)
    learn(learner, 1)
    x, _ = samples(seen_tasks(CLASSES)[0], 3)
    before = learner.logits(x).detach()
    learner.begin(seen_tasks(CLASSES)[2])
    steps(learner)
    torch.testing.assert_close(learner.wanted(x), before)  # as one layer instead of two modules
    assert not torch.allclose(learner.logits(x)[:, :5], before)


def test_training_after_inference_mode() -> None:
    """What was folded without gradients serves with them."""
    learner = built(jump=1)
    for number in range(2):
        learn(learner, number)
    learner.begin(seen_tasks(CLASSES)[2])
    learner.eval()
    with torch.inference_mode():
        learner.logits(samples(seen_tasks(CLASSES)[0])[0])
    steps(learner, 1)
    assert len(layer(learner, "conv1")._parts()) == 2 < len(layer(learner, "conv1").branches)


def test_candidates_are_different_paths_through_unused_modules() -> None:
    learner = built(jump=1, modules=4, candidates=5)
    learner.begin(seen_tasks(CLASSES)[0])
    assert learner.rounds() == 0  # the network itself
    assert learner.propose(0) == [[0, 0, 0]]
    for task in seen_tasks(CLASSES)[1:3]:
        used = [set(row) for row in modules(learner)]
        learner.begin(task)
        found = learner.propose(0)
        assert learner.rounds() == 1
        assert len(found) == 5 == len({tuple(path) for path in found})
        assert all(0 < m < 4 and m not in used[i] for path in found for i, m in enumerate(path))
        assert learner.paths[-1] == found[0]  # what is trained without candidates
    learner.begin(seen_tasks(CLASSES)[3])  # one unused module of each layer is left
    assert learner.rounds() == 0
    assert [sorted(row) for row in modules(learner)] == [[0, 1, 2, 3]] * 3
    learner.begin(SeenTask(4, "t4", ("x",), 11))  # and now none: paths go through finished ones, the head learns
    assert learner.rounds() == 0
    assert all(0 <= m < 4 for m in learner.paths[-1])
    assert [sorted(row) for row in modules(learner)] == [[0, 1, 2, 3]] * 3
    trained = {id(p) for group in learner.groups() for p in group["params"]}
    assert trained == {id(p) for p in learner.heads.parameters()}


@pytest.mark.parametrize("reuse", [False, True])
def test_drawing_among_all_modules(reuse: bool) -> None:
    """As published, finished modules are drawn as often as others; a candidate has something new all the same."""
    learner = built(modules=3, candidates=20, reuse=reuse)
    torch.manual_seed(0)
    drawn = torch.cat([learner._draw([[0, 1, 2]]) for _ in range(20)])
    drawn = drawn[drawn[:, 0] >= 0]
    old = drawn == torch.tensor([0, 1, 2])
    assert bool(old.any()) is reuse
    assert not old.all(1).any()
    # Different by what is new: 3 kinds of each layer (old, and two new modules) but for none new; or 2 of each.
    assert len(learner._draw([[0, 1, 2]])) == 20
    sizes = {int((learner._draw([[0, 1, 2]])[:, 0] >= 0).sum()) for _ in range(5)}
    assert sizes == ({20} if reuse else {8})


def test_only_new_paths_have_rounds() -> None:
    for options, expected in (
        ({"jump": 2}, [0, 0, 1, 0]),
        ({"jump": 1}, [0, 1, 1, 1]),
        ({"jump": 1, "candidates": 1}, [0] * 4),
        ({"jump": 1, "modules": 1}, [0] * 4),
    ):
        learner = built(**options)
        found = []
        for task in seen_tasks(CLASSES):
            learner.begin(task)
            found.append(learner.rounds())
        assert found == expected


def test_candidates_as_an_engine_tries_them() -> None:
    """Each on a new learner with the state at hand; the winner's trained state goes into the learner itself."""
    options: dict[str, Any] = {"jump": 1, "modules": 4, "candidates": 3, "memory": 20}
    learner = built(**options)
    learn(learner, 0)
    learn(learner, 1)
    learner.begin(seen_tasks(CLASSES)[2])
    state = copy.deepcopy(learner.state_dict())
    finished = [copy.deepcopy(layer(learner, name).branches["0"].state_dict()) for name in LAYERS]
    paths = learner.paths[:-1]
    trained = []
    for seed, candidate in enumerate(learner.propose(0)):
        torch.manual_seed(100 + seed)
        other = METHODS["rps-net"].build(make, "fc", **options)
        assert isinstance(other, RpsNet)
        for task in seen_tasks(CLASSES)[:3]:
            other.begin(task)
        other.load_state_dict(state)
        assert other.propose(0) == learner.propose(0)
        other.adopt(candidate)
        assert other.paths == [*paths, candidate]
        assert modules(other) == [[path[i] for path in other.paths] for i in range(3)]
        for name, old in zip(LAYERS, finished, strict=True):
            now = layer(other, name).branches["0"].state_dict()
            assert all(torch.equal(now[key], old[key]) for key in old)
        steps(other)
        trained.append(copy.deepcopy(other))
    assert len({tuple(t.paths[-1]) for t in trained}) == 3
    winner = trained[1]
    learner.adopt(learner.propose(0)[1])
    learner.load_state_dict(winner.state_dict())
    x, _ = samples(seen_tasks(CLASSES)[1], 4)
    assert torch.equal(learner.eval().logits(x), winner.eval().logits(x))
    learner.end(lambda: reader(learner))
    learn(learner, 3)
    assert learner.paths[2] == winner.paths[2]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_state_goes_into_a_learner_with_other_paths(reuse: bool) -> None:
    """Paths are in the state: a learner that drew others becomes the same, amid a task too, and trains on alike."""
    options: dict[str, Any] = {"jump": 1, "modules": 6, "memory": 20, "reuse": reuse}
    learner = built(0, **options)
    other = built(1, **options)
    for number in range(3):
        learn(learner, number)
    for task in seen_tasks(CLASSES)[:3]:
        other.begin(task)
    assert other.paths != learner.paths
    for _ in range(2):  # the second time nothing is exchanged any more: an optimiser may hold the parameters
        held = [p for group in other.groups() for p in group["params"]]
        drawn = torch.get_rng_state()
        other.load_state_dict(learner.state_dict())
        assert torch.equal(torch.get_rng_state(), drawn)
    assert all(p is q for p, q in zip(held, (q for g in other.groups() for q in g["params"]), strict=True))
    assert (other.paths, modules(other)) == (learner.paths, modules(learner))
    assert modules(other, other.teacher) == modules(learner, learner.teacher)
    assert learner.state_dict().keys() == other.state_dict().keys()
    for each in (learner, other):
        steps(each, 1)  # as if amid the task
        torch.manual_seed(5)
        learn(each, 3)
    mine, theirs = learner.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    flags = [[(n, p.requires_grad) for n, p in each.named_parameters()] for each in (learner, other)]
    assert flags[0] == flags[1]
    assert other.notes() == {"path": learner.paths[3]}


# ---------------------------------------------------------------------------------------------------------
# Learning


@pytest.mark.parametrize("jump", [1, 2])
def test_loss_is_the_formula(jump: int) -> None:
    """Written out in plain Python for images of the new task and of earlier ones."""
    learner = built(jump=jump, rigidity=1.5, temperature=3.0)
    weights = {1: [1.0, 1.0, 1.5, 3.0], 2: [1.0, 1.0, 1.0, 1.5]}[jump]
    for task, phi in zip(seen_tasks(CLASSES), weights, strict=True):
        parts = [samples(t) for t in seen_tasks(CLASSES)[: task.number + 1]]
        x, y = torch.cat([own[:4] for own, _ in parts]), torch.cat([own[:4] for _, own in parts])
        learner.eval()
        before = learner.logits(x).tolist() if task.number else []
        learn(learner, task.number)
        now = learner.logits(x).tolist()
        assert learner.phi == phi
        total = 0.0
        for i, label in enumerate(y.tolist()):
            norm = math.log(sum(math.exp(v) for v in now[i]))
            total += norm - now[i][label]
            if task.number:
                target = before[i] + [float(label == c) for c in range(task.start, task.start + task.classes)]
                p = [math.exp(v / 3) for v in target]
                q = [math.exp(v / 3) for v in now[i]]
                p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
                total += phi * sum(max(0.0, a * math.log(a / b)) for a, b in zip(p, q, strict=True))
        found = learner.loss(x, y)
        assert found.loss.item() == pytest.approx(total / len(y), rel=1e-9)
        assert int(found.correct) == sum(
            row.index(max(row)) == label for row, label in zip(now, y.tolist(), strict=True)
        )  # type: ignore[arg-type]


def test_published_weights() -> None:
    learner = built()
    found = []
    for number in range(6):
        learner.begin(SeenTask(number, f"t{number}", ("x",), number))
        found.append(learner.phi)
    assert found == [1, 1, 1, 2.5, 5, 7.5]


def test_random_exemplars() -> None:
    learner = built(memory=20)
    ranked: dict[int, list[int]] = {}
    for number in range(3):
        learn(learner, number)
        quota = 20 // sum(CLASSES[: number + 1])
        for task in learner.seen:
            for label in range(task.classes):
                kept = learner.memory.of(task.number, label).tolist()
                assert len(set(kept)) == len(kept) == min(quota, OF_CLASS)
                assert (samples(task)[1][kept] == task.start + label).all()
                assert kept == ranked.setdefault(task.start + label, kept)[: len(kept)]
    orders = set()
    for seed in range(5):
        torch.manual_seed(seed)
        learner.fill_memory(lambda: reader(learner))
        orders.add(tuple(learner.memory.of_task(2).tolist()))
    assert len(orders) == 5
    assert learner.sample_bytes == 16


def test_herded_exemplars() -> None:
    learner = built(memory=20, exemplars="herding", jump=1)
    for number in range(2):
        learn(learner, number)
    x, y = samples(seen_tasks(CLASSES)[1])
    learner.heads.bare = True
    features = F.normalize(learner.network(x), dim=1)
    learner.heads.bare = False
    for label in range(2):
        rows = (y == 3 + label).nonzero()[:, 0]
        assert learner.memory.of(1, label).tolist() == rows[herd(features[rows], 4)].tolist()


@pytest.mark.parametrize("name", ["lenet", "resnet18"])
def test_a_step_of_a_second_path(name: str) -> None:
    torch.manual_seed(0)
    learner: Any = METHODS["rps-net"].build(lambda: getattr(rkr.networks, name)(classes=5), "fc", jump=1, candidates=2)
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 3, 4, 4])
    learner.begin(seen_tasks(CLASSES)[0])
    learner.train()
    for _ in range(3):
        learner.loss(x, torch.tensor([0, 1, 2, 0]))  # statistics
    learner.begin(seen_tasks(CLASSES)[1])
    optimizer = torch.optim.SGD(learner.groups(), lr=1e-5)
    learner.train()
    loss = learner.loss(x, y).loss
    loss.backward()
    old = [m.branches["0"] for m in learner.network.modules() if isinstance(m, Parallel)]
    new = [list(m.branches.values())[1] for m in learner.network.modules() if isinstance(m, Parallel)]
    assert all(p.grad is None for branch in old for p in branch.parameters())
    assert all(p.grad is not None for branch in new for p in branch.parameters())
    optimizer.step()
    assert learner.loss(x, y).loss < loss


def test_capacity() -> None:
    """LeNet, by hand: three paths through 2 convolutions with BatchNorm and 2 linear layers, heads within 100 %."""
    learner: Any = METHODS["rps-net"].build(lambda: rkr.networks.lenet(classes=100), "fc", jump=2, memory=150)
    path = (3 * 25 + 1 + 2) * 20 + (20 * 25 + 1 + 2) * 50 + 3201 * 800 + 801 * 500
    statistics = 2 * (20 + 50) * 4 + 2 * 8
    heads = [501 * 10 * n for n in range(1, 6)]
    plain = path + 501 * 100
    body = 32 * 32 * 20 * 75 + 16 * 16 * 50 * 500 + 3200 * 800 + 800 * 500
    for number in range(5):
        learner.begin(SeenTask(number, f"t{number}", tuple("abcdefghij"), 10 * number))
        capacity = learner.capacity()
        paths, old = number // 2 + 1, (number + 1) // 2
        teacher = 4 * (old * path + heads[number - 1]) + old * statistics if number else 0
        assert capacity.network == plain
        room = 150 * 3072  # for samples, until some are kept
        assert capacity.bytes == 4 * (paths * path + heads[number]) + paths * statistics
        assert capacity.parameters == plain + (paths - 1) * path
        assert (capacity.further, capacity.further_bytes) == (room // 4, room)  # the teacher is copied anew
        assert capacity.multiply_adds == body + 500 * 100 + (paths - 1) * body
        assert learner.teacher is None or nbytes(learner.teacher) == teacher
    learner.memory.keep([torch.arange(9)] * 10)
    learner.sample_bytes.fill_(3072)
    assert learner.capacity().further_bytes == 10 * 3 * 3072
    assert learner.capacity().percent == capacity.percent
    assert learner.capacity().percent_to_learn == pytest.approx(100 * (capacity.parameters + 10 * 3 * 768) / plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": 0}, "modules must be at least 1, not 0"),
        ({"jump": 0}, "jump must be at least 1, not 0"),
        ({"candidates": -1}, "candidates must be at least 1, not -1"),
        ({"exemplars": "best"}, "exemplars must be one of random, herding, not 'best'"),
        ({"temperature": 0.0}, "temperature above 0"),
        ({"rigidity": -1.0}, "rigidity must be 0 or more"),
        ({"memory": 0}, "memory must hold 1 sample"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rkr.UsageError, match=message):
        METHODS["rps-net"].build(make, "fc", **options)

"""Fisher information, penalties on leaving old weights, and the methods made of them: L2T, EWC, SI, P&C, LwF."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import double_noise as batch
from helpers.learning import seen_tasks as tasks
from helpers.learning import small_double_cnn as make
from helpers.tensors import assert_same
from helpers.tensors import snapshot as state
from hypothesis import given, settings, strategies
from torch import Tensor, nn

import rkr
import rkr.methods.shared.fisher
from rkr.errors import UsageError
from rkr.methods import METHODS, Learner
from rkr.methods.ewc import Ewc
from rkr.methods.l2t import L2Transfer
from rkr.methods.learner import Outcome, ReadSamples, SeenTask
from rkr.methods.lwf import Lwf
from rkr.methods.progress_compress import ProgressCompress
from rkr.methods.shared.anchor import Anchor, departure
from rkr.methods.shared.distillation import distilled, imitated
from rkr.methods.shared.fisher import ESTIMATORS, fisher
from rkr.methods.shared.lateral import Lateral, Laterals
from rkr.methods.shared.one_network import OneNetwork, TaskNorm
from rkr.methods.si import SynapticIntelligence

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),
]


def reader(task: SeenTask) -> ReadSamples:
    return lambda: iter([batch(task)])


def steps(learner: Learner, task: SeenTask, count: int, lr: float = 0.02) -> None:
    """Training steps of the phase at hand."""
    optimizer = torch.optim.SGD(learner.groups(), lr=lr, momentum=0.9)
    learner.train()
    for step in range(count):
        optimizer.zero_grad()
        learner.loss(*batch(task, step % 2)).loss.backward()
        learner.before_step(optimizer)
        optimizer.step()
        learner.after_step()


def learn(learner: Learner, task: SeenTask, count: int = 4) -> None:
    learner.begin(task)
    for phase in learner.phases():
        learner.prepare(phase, reader(task))
        steps(learner, task, count)
    learner.eval()
    learner.end(reader(task))


# ---------------------------------------------------------------------------------------------------------
# Fisher information


class Mixed(nn.Module):
    """The layers whose squares are computed in closed form, in all their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(2, 1), dilation=(2, 1))
        self.bn1 = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(3, 4, (2, 3), padding="same", bias=False)
        self.conv3 = nn.Conv2d(4, 4, 2, padding="valid")
        self.each = nn.Linear(4, 5)  # of every position
        self.bn2 = nn.BatchNorm1d(5)  # (B, C, L)
        self.bn3 = nn.BatchNorm1d(5)  # (B, C)
        self.fc1 = nn.Linear(5, 6, bias=False)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn1(self.conv1(x)))
        x = self.act(self.conv3(self.conv2(x)))
        x = self.each(x.flatten(2).transpose(1, 2)).transpose(1, 2)
        x = self.bn3(self.bn2(x).mean(2))
        return self.fc(self.act(self.fc1(x)))


class Unusual(nn.Module):
    """Layers of other kinds, which torch.func does, beside some of the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")
        self.conv2 = nn.Conv2d(4, 4, 3, groups=2)
        self.norm = nn.LayerNorm(4)
        self.act = nn.PReLU(4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.bn = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x)).relu_().mean((2, 3))
        return self.fc(self.bn(self.b(self.act(self.a(self.norm(x))))))


class Attentive(nn.Module):
    """Attention computes with the weights of its last linear layer, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(x[:, 0]).mean(1))


class Standardised(nn.Conv2d):
    """A layer of a known kind that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) + 0.1), self.bias)


class PassedBy(nn.Module):
    """Layers that are used otherwise than by one plain call with all samples side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Standardised(2, 4, 2)
        self.keyword, self.functional, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.twice, self.apart, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean(3).transpose(1, 2)  # (B, P, 4)
        x = self.apart(x.reshape(-1, 4)).view(len(x), -1, 4).mean(1)
        x = F.linear(self.keyword(input=x), self.functional.weight, self.functional.bias)
        x = torch.tanh(self.both(x)) @ self.both.weight
        return self.fc(self.twice(torch.tanh(self.twice(x))))


class Branching(nn.Module):
    """What torch.func cannot take over several samples: a way that depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = [(self.a if float(row.sum()) > 0 else self.b)(row) for row in x[:, 0, 0]]
        return self.fc(torch.stack(rows))


def randomised(network: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in network.parameters():
        nn.init.normal_(p, std=0.7)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(cast("Tensor", layer.running_mean))
            nn.init.uniform_(cast("Tensor", layer.running_var), 0.5, 2)
    cast("nn.Linear", network.fc).weight.data *= 0.2  # no class is certain
    return network.double()


N = 11
X = torch.randn(N, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (N,), generator=torch.Generator().manual_seed(2))


def read(sizes: Sequence[int], start: int = 0) -> ReadSamples:
    return lambda: iter(list(zip(X.split(list(sizes)), (Y + start).split(list(sizes)), strict=True)))


def by_loop(network: nn.Module, estimator: str, sizes: Sequence[int], seed: int) -> list[Tensor]:
    """One sample at a time, one backward pass for each of its classes."""
    network = copy.deepcopy(network).eval()
    parameters = list(network.parameters())
    torch.manual_seed(seed)
    drawn = torch.cat([torch.multinomial(network(x).softmax(1).detach(), 1)[:, 0] for x in X.split(list(sizes))])
    sums = [torch.zeros_like(p) for p in parameters]
    some: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    batch_of = [k for k, size in enumerate(sizes) for _ in range(size)]
    gradients: list[list[Tensor]] = []
    for i in range(N):
        log_p = network(X[i : i + 1])[0].log_softmax(0)
        grads = [torch.autograd.grad(log_p[c], parameters, **some) for c in range(4)]
        gradients.append(list(grads[int(Y[i])]))
        for k, total in enumerate(sums):
            if estimator == "exact":
                total += sum(log_p.detach().exp()[c] * grads[c][k] ** 2 for c in range(4))
            elif estimator != "batched":
                total += grads[int((drawn if estimator == "sampled" else Y)[i])][k] ** 2
    if estimator == "batched":
        for number, size in enumerate(sizes):
            for k, total in enumerate(sums):
                total += size * (sum(g[k] for i, g in enumerate(gradients) if batch_of[i] == number) / size) ** 2
    return [total / N for total in sums]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", [Mixed, Unusual, Attentive, PassedBy, Branching])
@pytest.mark.filterwarnings("ignore:the Fisher information")
def test_fisher_equals_a_loop_over_samples(kind: type[nn.Module], estimator: str) -> None:
    network = randomised(kind())
    sizes = [7, 4]
    expected = by_loop(network, estimator, sizes, seed=3)
    torch.manual_seed(3)
    found = fisher(network, list(network.parameters()), read(sizes), 0, estimator)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)
    assert all(bool(values.max() > 1e-6) for values in found)


def test_layers_of_known_kinds_take_the_fast_way() -> None:
    """A wrong formula would not be seen in results: what it computes wrongly is left to torch.func."""
    network = randomised(Mixed()).eval()
    ways = rkr.methods.shared.fisher._find_ways(network, list(network.parameters()), X[:4])
    assert set(ways.layers) == {layer for layer in network.modules() if list(layer.parameters(recurse=False))}
    assert not ways.vectorised
    assert not ways.one_by_one


@given(data=strategies.data())
@settings(max_examples=150, deadline=None)
def test_squares_of_kernels_equal_a_loop_over_samples(data: strategies.DataObject) -> None:
    def pair(low: int, high: int) -> tuple[int, int]:
        return data.draw(strategies.tuples(strategies.integers(low, high), strategies.integers(low, high)))

    kernel, dilation, stride = pair(1, 4), pair(1, 3), pair(1, 3)
    padding: Any = data.draw(strategies.sampled_from(["same", "valid", pair(0, 3)]))
    (inputs, outputs), size, batch = pair(1, 3), pair(5, 11), data.draw(strategies.integers(1, 5))
    stride = (1, 1) if padding == "same" else stride
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = (max(size[0], span[0]), max(size[1], span[1]))
    torch.manual_seed(data.draw(strategies.integers(0, 99)))
    layer = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation).double()
    x = torch.randn(batch, inputs, *size, dtype=torch.float64)
    if data.draw(strategies.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    g = torch.randn_like(layer(x))
    expected = torch.zeros_like(layer.weight)
    for i in range(batch):
        expected += torch.autograd.grad((layer(x[i : i + 1]) * g[i : i + 1]).sum(), layer.weight)[0].square()
    for in_cache in (1, 1 << 20):  # samples one by one, all at once
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rkr.methods.shared.fisher, "IN_CACHE", in_cache)
            found = rkr.methods.shared.fisher._squares_of_kernel(layer, x, g)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [Mixed, Unusual])
@pytest.mark.parametrize("estimator", ["exact", "empirical"])
def test_fisher_does_not_depend_on_batches_or_on_where_labels_start(
    kind: type[nn.Module], estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = randomised(kind())
    parameters = list(network.parameters())[:-1]  # some
    whole = fisher(network, parameters, read([N]), 0, estimator)
    for sizes, start, chunk in (([1] * N, 0, 32), ([4, 7], 5, 32), ([9, 2], 0, 4)):
        monkeypatch.setattr(rkr.methods.shared.fisher, "AT_ONCE", 0)
        monkeypatch.setattr(rkr.methods.shared.fisher, "FEWEST", chunk)
        for a, b in zip(fisher(network, parameters, read(sizes, start), start, estimator), whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_sampled_labels_give_the_exact_information_in_the_mean() -> None:
    network = randomised(Mixed())
    parameters = list(network.parameters())
    exact = fisher(network, parameters, read([N]), 0, "exact")
    torch.manual_seed(0)
    draws = [fisher(network, parameters, read([N]), 0, "sampled") for _ in range(150)]
    for k, expected in enumerate(exact):
        values = torch.stack([draw[k].sum() for draw in draws])
        error = values.std() / math.sqrt(len(draws))
        assert abs(values.mean() - expected.sum()) < 4 * error


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fisher_leaves_the_network_alone(estimator: str) -> None:
    network = randomised(Unusual() if estimator == "sampled" else Mixed()).train()
    frozen = cast("nn.Module", network.bn if estimator == "sampled" else network.bn1)
    frozen.eval()
    before, modes = state(network), [layer.training for layer in network.modules()]
    hooks = [len(layer._forward_hooks) for layer in network.modules()]
    fisher(network, list(network.parameters()), read([N]), 0, estimator)
    assert_same(before, network)
    assert [layer.training for layer in network.modules()] == modes
    assert [len(layer._forward_hooks) for layer in network.modules()] == hooks
    assert all(p.grad is None for p in network.parameters())


def test_fisher_of_some_samples() -> None:
    """Drawn at random: the first ones may all be of one class."""
    network = randomised(Mixed())
    parameters = list(network.parameters())
    torch.manual_seed(5)
    rows = torch.randperm(N)[:6].sort().values
    torch.manual_seed(5)
    found = fisher(network, parameters, read([7, 4]), 0, "empirical", limit=6)
    expected = fisher(network, parameters, lambda: iter([(X[rows], Y[rows])]), 0, "empirical")
    more = fisher(network, parameters, read([7, 4]), 0, "empirical", limit=100)
    whole = fisher(network, parameters, read([7, 4]), 0, "empirical")
    for a, b, c, d in zip(found, expected, more, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(c, d, rtol=1e-10, atol=1e-14)


class Twice(nn.Module):
    """A layer that is called, and whose weight is used directly as well: its squares are not by its inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.fc = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.both(x)) @ self.both.weight)


def test_fisher_is_not_misled_by_samples_that_are_certain() -> None:
    """The way is tried on the first samples: their gradients may vanish, those of later ones need not."""
    torch.manual_seed(0)
    network = Twice()
    network.fc.weight.data *= 200
    x = torch.randn(64, 4)
    best = network(x).detach().topk(2).values
    x = x[(best[:, 0] - best[:, 1]).argsort(descending=True)]
    y = network(x).argmax(1)
    y[-5:] = (y[-5:] + 1) % 4
    parameters = list(network.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        grads = torch.autograd.grad(network(x[i : i + 1]).log_softmax(1)[0, y[i]], parameters)
        if i < 4:
            assert max(float(g.square().max()) for g in grads) < 1e-30
        for total, g in zip(sums, grads, strict=True):
            total += g.square() / len(x)
    for found, expected in zip(fisher(network, parameters, lambda: iter([(x, y)]), 0, "empirical"), sums, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


def test_fisher_says_when_it_is_slow_and_refuses_unknown_estimators() -> None:
    network = randomised(Branching())
    with pytest.warns(UserWarning, match=r"of a\.weight, a\.bias, b\.weight .* sample by sample"):
        fisher(network, list(network.parameters()), read([N]), 0, "empirical")
    with pytest.raises(UsageError, match="exact, sampled, empirical, batched"):
        fisher(network, list(network.parameters()), read([N]), 0, "true")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_frozen_has_no_fisher_information(estimator: str) -> None:
    network = randomised(Mixed())
    frozen = cast("nn.Module", network.conv1).requires_grad_(False)
    parameters = list(network.parameters())
    torch.manual_seed(3)
    found = fisher(network, parameters, read([N]), 0, estimator)
    frozen.requires_grad_(True)
    torch.manual_seed(3)
    whole = fisher(network, parameters, read([N]), 0, estimator)
    for k, (a, b) in enumerate(zip(found, whole, strict=True)):
        torch.testing.assert_close(a, torch.zeros_like(b) if k < 2 else b, rtol=1e-10, atol=1e-14)


def test_a_frozen_stem_is_not_held_nor_counted() -> None:
    """Neither penalty nor anchors where nothing moves."""

    def made() -> nn.Module:
        network = make()
        cast("nn.Module", network.conv1).requires_grad_(False)
        return network

    free, learner = (METHODS["ewc"].build(m, "fc") for m in (make, made))
    assert isinstance(learner, Ewc)
    stem = sum(p.numel() for p in cast("nn.Module", learner.network.conv1).parameters())
    for one in (free, learner):
        learn(one, tasks()[0])
    more, fewer = free.capacity().further, learner.capacity().further
    assert more is not None
    assert fewer is not None
    assert more - fewer == stem  # its importances: after one task the anchor is the network itself


# ---------------------------------------------------------------------------------------------------------
# The anchor


def parameters_like(seed: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((3, 2), (4,))]


def test_anchor_is_zero_where_it_was_put_and_pulls_as_the_closed_form_says() -> None:
    at, importance = parameters_like(0), [t.abs() for t in parameters_like(1)]
    anchor = Anchor(at)
    assert float(anchor.penalty(parameters_like(9))) == 0  # nothing matters yet
    anchor.put(at, importance)
    assert float(anchor.penalty(at)) == 0
    there = [t.requires_grad_() for t in parameters_like(2)]
    penalty = anchor.penalty(there)
    by_hand = sum(
        i * (p - a) ** 2
        for ps, vs, ws in zip(there, at, importance, strict=True)
        for p, a, i in zip(ps.flatten().tolist(), vs.flatten().tolist(), ws.flatten().tolist(), strict=True)
    )
    assert float(penalty) == pytest.approx(by_hand, rel=1e-12)
    pulls = torch.autograd.grad(penalty, there)
    anchor.pull(there, 3.0, torch.optim.Adam(there))
    for pull, p, a, i in zip(pulls, there, at, importance, strict=True):
        torch.testing.assert_close(pull, 2 * i * (p.detach() - a), rtol=1e-12, atol=0)
        assert p.grad is not None
        torch.testing.assert_close(p.grad, 1.5 * pull, rtol=1e-12, atol=0)  # of 3/2 the penalty
    one = departure(there, at, importance, norm=1)
    expected = sum(float((i * (p - a).abs()).sum()) for p, a, i in zip(there, at, importance, strict=True))
    assert float(one) == pytest.approx(expected, rel=1e-12)
    for pull, p, a, i in zip(torch.autograd.grad(one, there), there, at, importance, strict=True):
        torch.testing.assert_close(pull, i * (p.detach() - a).sign())
    anchor.put(at, 1.0)
    assert float(departure(there, at)) == pytest.approx(float(anchor.penalty(there)), rel=1e-12)
    whole = sum(float((p - a).abs().sum()) for p, a in zip(there, at, strict=True))
    assert float(departure(there, at, norm=1)) == pytest.approx(whole, rel=1e-12)


def test_no_strength_is_more_than_sgd_can_follow() -> None:
    """Importances as on CIFAR-100 with LeNet, 1e-5 to 10: what is held more than 1/lr allows is held by 1/lr."""
    importance = torch.logspace(-5, 1, 7, dtype=torch.float64)
    start, lr, strength = torch.linspace(-1, 1, 7, dtype=torch.float64) + 2, 0.01, 1e4
    anchor = Anchor([start])
    anchor.put([start], [importance])
    p = (start + 1).requires_grad_()
    optimizer = torch.optim.SGD([p], lr=lr, momentum=0.9)
    anchor.pull([p], strength, optimizer)
    assert p.grad is not None
    torch.testing.assert_close(p.grad, (strength * importance).clamp(max=1 / lr), rtol=1e-12, atol=0)
    for _ in range(200):  # a loss that pulls away with force 1 and noise of its own
        p.grad = torch.randn(7, dtype=torch.float64) * 0.1 - 1
        anchor.pull([p], strength, optimizer)
        optimizer.step()
    moved = (p.detach() - start).abs()
    assert bool((moved[3:] < 0.02).all())  # held
    assert moved[0] > 0.5  # free to go
    assert bool(torch.isfinite(moved).all())


def test_anchors_add_up_as_separate_parabolas_do() -> None:
    places = [parameters_like(seed) for seed in range(3)]
    weights = [[t.abs() for t in parameters_like(seed + 10)] for seed in range(3)]
    for k in range(3):
        weights[k][0][0] = 0 if k < 2 else 1e-30  # nothing matters for a while, then hardly anything
    weights[1][1][1] = 0
    anchor = Anchor(places[0])
    for place, weight in zip(places, weights, strict=True):
        anchor.add(place, weight)
    constants = []
    for seed in range(20, 25):
        there = [t.requires_grad_() for t in parameters_like(seed)]
        one, own = anchor.penalty(there), torch.zeros((), dtype=torch.float64)
        for place, weight in zip(places, weights, strict=True):
            own = own + sum((i * (p - a).square()).sum() for p, a, i in zip(there, place, weight, strict=True))
        pairs = zip(torch.autograd.grad(one, there), torch.autograd.grad(own, there), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        constants.append(float(own) - float(one))
    assert max(constants) - min(constants) < 1e-11
    assert constants[0] > 0.1
    assert all(bool(torch.isfinite(value).all()) for value in anchor.values)


# ---------------------------------------------------------------------------------------------------------
# L2T, EWC, SI


PENALTIES: list[tuple[str, dict[str, Any]]] = [("l2t", {}), ("si", {}), ("pc", {}), ("ewc", {"mode": "online"})]
PENALTIES += [("ewc", {"estimator": estimator}) for estimator in ESTIMATORS]


@pytest.mark.parametrize("bn", ["per_task", "frozen", "shared"])
@pytest.mark.parametrize(("name", "options"), PENALTIES, ids=str)
def test_the_penalty_is_zero_at_first_and_greater_once_training_moves(
    name: str, options: dict[str, Any], bn: str
) -> None:
    torch.manual_seed(0)
    learner = cast("L2Transfer", METHODS[name].build(make, "fc", bn=bn, **options))
    first, second, _ = tasks()
    learn(learner, first)
    learner.begin(second)
    phase = learner.phases()[-1]
    learner.prepare(phase, reader(second))
    assert float(learner.penalty()) == 0
    steps(learner, second, 1)
    assert float(learner.penalty()) > 1e-9
    # What is added to the gradients is its gradient.
    expected = torch.autograd.grad(learner.penalty(), learner.shared())
    for p in learner.shared():
        p.grad = torch.ones_like(p)
    learner.before_step(torch.optim.SGD(learner.shared(), lr=1e-9))
    for p, pull in zip(learner.shared(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, 1 + pull, rtol=1e-10, atol=1e-12)


def test_ewc_sums_the_penalties_of_all_tasks() -> None:
    """Against one Fisher information and one copy of the weights for each task."""
    learner = cast("Ewc", METHODS["ewc"].build(make, "fc", strength=3.0))
    kept = _fishers(learner)
    there = [torch.randn_like(p).requires_grad_() for p in learner.shared()]
    found = torch.autograd.grad(0.5 * learner.strength * learner.anchor.penalty(there), there)
    for k, pull in enumerate(found):
        expected = sum(3.0 * own[k] * (there[k].detach() - place[k]) for own, place in kept)
        torch.testing.assert_close(pull, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("samples", [None, 5])
def test_ewc_s_importances_are_by_the_estimator_and_the_samples_it_is_given(
    estimator: str, samples: int | None
) -> None:
    torch.manual_seed(0)
    learner = cast("Ewc", METHODS["ewc"].build(make, "fc", estimator=estimator, samples=samples))
    task = tasks()[0]
    learner.begin(task)
    learner.prepare(learner.phases()[0], reader(task))
    steps(learner, task, 3)
    learner.eval()
    torch.manual_seed(7)
    expected = fisher(learner.network, learner.shared(), reader(task), task.start, estimator, samples)
    torch.manual_seed(7)
    learner.end(reader(task))
    for found, values in zip(learner.anchor.importance, expected, strict=True):
        assert torch.equal(found, values)


def test_online_ewc_decays_and_follows_the_newest_weights() -> None:
    learner = cast("Ewc", METHODS["ewc"].build(make, "fc", mode="online", gamma=0.5))
    (f0, _), (f1, _), (f2, place) = _fishers(learner)
    for k, importance in enumerate(learner.anchor.importance):
        torch.testing.assert_close(importance, 0.25 * f0[k] + 0.5 * f1[k] + f2[k], rtol=1e-10, atol=1e-14)
        assert torch.equal(learner.anchor.values[k], place[k])


def test_compression_keeps_fisher_information_by_gamma() -> None:
    learner = cast("ProgressCompress", METHODS["pc"].build(make, "fc", gamma=0.5))
    (f0, _), (f1, _), (f2, place) = _fishers(learner)
    for k, importance in enumerate(learner.anchor.importance):
        torch.testing.assert_close(importance, 0.25 * f0[k] + 0.5 * f1[k] + f2[k], rtol=1e-10, atol=1e-14)
        assert torch.equal(learner.anchor.values[k], place[k])


def _fishers(learner: Ewc | ProgressCompress) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Learn all tasks; the Fisher information after each, and where the weights were."""
    torch.manual_seed(0)
    kept = []
    for task in tasks():
        learner.begin(task)
        for phase in learner.phases():
            learner.prepare(phase, reader(task))
            steps(learner, task, 3)
        learner.eval()
        torch.manual_seed(7)
        learner.end(reader(task))
        torch.manual_seed(7)
        learner.select(task.number)
        shared = learner.shared()
        found = fisher(learner.network, shared, reader(task), task.start, "sampled")
        assert max(float(f.max()) for f in found) > 1e-4
        kept.append((found, [p.detach().clone() for p in shared]))
    return kept


def test_what_is_shared() -> None:
    """Neither heads nor normalisation that tasks have for themselves are held back."""
    for bn, count in (("per_task", 6), ("frozen", 6), ("shared", 10)):
        learner = cast("OneNetwork", METHODS["ewc"].build(make, "fc", bn=bn))
        for task in tasks():
            learner.begin(task)
            assert len(learner.shared()) == count
    net = cast("Any", learner.network)
    wanted = [net.conv1, net.bn1, net.conv2, net.bn2, net.fc1]
    assert {id(p) for p in learner.shared()} == {id(p) for layer in wanted for p in layer.parameters()}


def test_l2t_finds_the_closed_form_minimiser() -> None:
    """Least squares and λ/2 |w - w*|²: w = (XᵀX/N + λ)⁻¹ (Xᵀt/N + λ w*), for the second and the third task."""
    torch.manual_seed(0)

    class Plane(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(5, 1, bias=False), nn.Linear(1, 1)
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x))

    class LeastSquares(L2Transfer):
        def classified(self, logits: Tensor, y: Tensor) -> Outcome:
            return Outcome(0.5 * (logits[:, 0] - y).square().mean(), None)

    strength = 0.3
    learner = LeastSquares(Plane, "fc", strength=strength)
    body = cast("nn.Linear", learner.network.body)
    previous = None
    for number in range(3):
        learner.begin(SeenTask(number, f"t{number}", ("one",), number))
        nn.init.ones_(cast("nn.Linear", learner.heads.heads[number]).weight)
        nn.init.zeros_(cast("nn.Linear", learner.heads.heads[number]).bias)
        x, t = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
        optimizer = torch.optim.SGD(learner.shared(), lr=0.5)
        for _ in range(400):
            optimizer.zero_grad()
            learner.loss(x, t).loss.backward()
            learner.before_step(optimizer)
            optimizer.step()
        pull = 0.0 if previous is None else strength
        start = torch.zeros(5, dtype=torch.float64) if previous is None else previous
        left = x.T @ x / 20 + pull * torch.eye(5, dtype=torch.float64)
        expected = torch.linalg.solve(left, x.T @ t / 20 + pull * start)
        torch.testing.assert_close(body.weight.detach()[0], expected, rtol=1e-9, atol=1e-10)
        previous = expected
        learner.end(lambda: iter(()))


class Bowl(SynapticIntelligence):
    """SI on a quadratic loss of the shared weights: ½ Σ a (θ - m)²."""

    def bowl(self) -> Tensor:
        parts = []
        for k, p in enumerate(self.shared()):
            spread = torch.linspace(0.2, 2, p.numel(), dtype=torch.float64).view_as(p)
            goal = torch.linspace(-1, 1 + self.task.number, p.numel(), dtype=torch.float64).view_as(p) * (-1) ** k
            parts.append(0.5 * (spread * (p - goal).square()).sum())
        return torch.stack(parts).sum()

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        return Outcome(self.bowl(), None)


def _path_error(task_count: int, parts: int) -> tuple[float, float]:
    """How far the path integral is from the decrease of the loss, and that decrease, of the last of some tasks."""
    torch.manual_seed(0)
    learner = Bowl(make, "fc", strength=0.05)
    for task in tasks()[:task_count]:
        learner.begin(task)
        learner.prepare(learner.phases()[0], reader(task))
        before = float(learner.bowl())
        optimizer = torch.optim.SGD(learner.shared(), lr=0.4 / parts)
        for _ in range(3 * parts):
            optimizer.zero_grad()
            learner.loss(*batch(task)).loss.backward()
            learner.before_step(optimizer)
            optimizer.step()
            learner.after_step()
        gained = before - float(learner.bowl())
        total = sum(float(path.sum()) for path in learner.path)
        learner.end(reader(task))
    return total - gained, gained


@pytest.mark.parametrize("task_count", [1, 2])
def test_si_s_path_integral_is_the_decrease_of_the_loss(task_count: int) -> None:
    """Of the loss alone, whatever the penalty does; the error falls with the size of the steps."""
    errors = []
    for parts in (4, 8, 16, 32):
        error, gained = _path_error(task_count, parts)
        assert gained > 100
        errors.append(abs(error) / gained)
    assert errors[-1] < 0.02
    for larger, smaller in pairwise(errors):
        assert smaller == pytest.approx(larger / 2, rel=0.15)


def test_si_s_gradient_is_without_the_penalty_and_its_importance_as_written() -> None:
    """Against gradients of the cross-entropy computed for themselves, with momentum and weight decay at work."""

    def plain() -> nn.Module:
        layers = {"flat": nn.Flatten(), "fc1": nn.Linear(16, 7), "act": nn.Tanh(), "fc": nn.Linear(7, 9)}
        network = nn.Sequential()
        for name, layer in layers.items():
            network.add_module(name, layer)
        return network.double()

    torch.manual_seed(0)
    learner = SynapticIntelligence(plain, "fc", strength=2.0, damping=1e-3)
    omega: list[Tensor] = [torch.zeros_like(p) for p in learner.shared()]
    for task in tasks():
        learner.begin(task)
        learner.prepare(learner.phases()[0], reader(task))
        begin = [p.detach().clone() for p in learner.shared()]
        path = [torch.zeros_like(p) for p in begin]
        optimizer = torch.optim.SGD(learner.groups(), lr=0.02, momentum=0.9, weight_decay=0.01)
        for step in range(6):
            x, y = batch(task, step)
            loss = F.cross_entropy(learner.predict(x, task.number), y - task.start)
            grads = torch.autograd.grad(loss, learner.shared())
            before = [p.detach().clone() for p in learner.shared()]
            optimizer.zero_grad()
            learner.loss(x, y).loss.backward()
            learner.before_step(optimizer)
            optimizer.step()
            learner.after_step()
            for w, g, p, b in zip(path, grads, learner.shared(), before, strict=True):
                w -= g * (p.detach() - b)
        for found, expected in zip(learner.path, path, strict=True):
            torch.testing.assert_close(found.data, expected, rtol=1e-8, atol=1e-12)
        if task.number:
            assert float(learner.penalty()) > 1e-4
        learner.end(reader(task))
        for k, p in enumerate(learner.shared()):
            omega[k] = (omega[k] + path[k] / ((p.detach() - begin[k]) ** 2 + 1e-3)).clamp(min=0)
            torch.testing.assert_close(learner.anchor.importance[k].data, omega[k], rtol=1e-8, atol=1e-10)
            assert torch.equal(learner.anchor.values[k], p)
    there = [torch.randn_like(p) for p in learner.shared()]
    for p, value in zip(learner.shared(), there, strict=True):
        p.data.copy_(value)
    expected = sum(
        2.0 * float((o * (v - a).square()).sum()) for o, v, a in zip(omega, there, learner.anchor.values, strict=True)
    )
    assert float(learner.penalty()) == pytest.approx(expected, rel=1e-8)  # c Σ Ω (θ - θ*)², without 1/2


def test_si_s_importance_never_falls_below_zero() -> None:
    """A way that has raised the loss makes a weight matter less, but not less than nothing."""
    torch.manual_seed(0)
    learner = cast("SynapticIntelligence", METHODS["si"].build(make, "fc"))
    task = tasks()[0]
    learner.begin(task)
    for k, path in enumerate(learner.path):
        path.data.copy_(torch.linspace(-1, 1, path.numel(), dtype=path.dtype).view_as(path) * (k + 1))
    learner.end(reader(task))
    for path, importance in zip(learner.path, learner.anchor.importance, strict=True):
        assert torch.equal(importance > 0, path > 0)
        assert bool((importance[path <= 0] == 0).all())


# ---------------------------------------------------------------------------------------------------------
# Progress & Compress


@pytest.mark.parametrize("bn", ["per_task", "frozen", "shared"])
def test_only_one_column_moves_at_a_time(bn: str) -> None:
    torch.manual_seed(0)
    learner = cast("ProgressCompress", METHODS["pc"].build(make, "fc", bn=bn))
    for task in tasks():
        learner.begin(task)
        progress, compress = learner.phases()
        base, active, laterals = state(learner.network), state(learner.active), state(learner.laterals)
        assert bool(laterals) is (task.number > 0)
        learner.prepare(progress, reader(task))
        steps(learner, task, 3)
        assert_same(base, learner.network)
        assert not torch.equal(active["bn1.running_mean"], learner.active.state_dict()["bn1.running_mean"])
        assert not torch.equal(active["conv1.weight"], learner.active.state_dict()["conv1.weight"])
        moved = [key for key, value in learner.laterals.state_dict().items() if not torch.equal(value, laterals[key])]
        assert moved == list(laterals)
        active, laterals = state(learner.active), state(learner.laterals)
        helper = state(learner.helper) if learner.helper is not None else {}
        learner.prepare(compress, reader(task))
        learner.train()
        with torch.no_grad():
            wanted = learner.act(batch(task)[0])
        steps(learner, task, 3)
        assert_same(active, learner.active)
        assert_same(laterals, learner.laterals)
        with torch.no_grad():
            assert torch.equal(learner.act(batch(task)[0]), wanted)  # the teacher stays where it is
        changed = {key for key, value in learner.network.state_dict().items() if not torch.equal(value, base[key])}
        assert {"conv1.weight", "conv2.weight", "fc1.weight", f"fc.heads.{task.number}.weight"} <= changed
        assert not any(key.startswith(f"fc.heads.{n}.") for key in changed for n in range(task.number))
        own = {key for key in changed if key.startswith("bn")}
        if bn == "per_task":
            assert {key.split(".")[2] for key in own} == {str(task.number)}
        elif bn == "frozen":
            assert bool(own) is (task.number == 0)
        if learner.helper is not None:
            assert_same(helper, learner.helper)
            assert not any(p.requires_grad for p in learner.helper.parameters())
        learner.eval()
        learner.end(reader(task))


def test_lateral_by_hand() -> None:
    linear = nn.Linear(2, 2)
    lateral = Lateral(linear, reduction=1)
    assert lateral.scale.shape == (2,)
    assert bool(((lateral.scale >= 0) & (lateral.scale <= 0.1)).all())
    with torch.no_grad():
        lateral.reduce.weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 0.5]]))
        lateral.reduce.bias.copy_(torch.tensor([0.5, -10.0]))
        lateral.into.weight.copy_(torch.tensor([[3.0, 100.0], [-2.0, 100.0]]))
        lateral.scale.copy_(torch.tensor([0.1, 0.5]))
    # V h + c = (3 - 1 + 0.5, 6 + 0.5 - 10) = (2.5, -3.5); ReLU: (2.5, 0); U: (7.5, -5); α: (0.75, -2.5)
    torch.testing.assert_close(lateral(torch.tensor([[3.0, 1.0]])), torch.tensor([[0.75, -2.5]]))
    conv = nn.Conv2d(8, 6, 3, stride=2, padding=1)
    side = Lateral(conv, reduction=4)
    h = torch.randn(2, 8, 7, 7)
    assert side(h).shape == conv(h).shape
    small = F.relu(F.conv2d(h, side.reduce.weight, side.reduce.bias))
    assert small.shape[1] == 2
    expected = F.conv2d(small, side.into.weight, stride=2, padding=1) * side.scale.view(1, 6, 1, 1)
    torch.testing.assert_close(side(h), expected)


class Again(nn.Module):
    """Calls a layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.fc = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.again(torch.tanh(self.again(self.first(x)))))


def test_a_layer_that_is_called_twice_is_helped_by_the_same_call() -> None:
    torch.manual_seed(0)
    active, helper, x = Again(), Again(), torch.randn(3, 5)
    laterals = Laterals(active, "fc", reduction=2)
    assert list(laterals) == ["again"]
    lateral = laterals["again"]
    one = helper.first(x)
    two = torch.tanh(helper.again(one))
    h = torch.tanh(active.again(active.first(x)) + lateral(one))
    expected = active.fc(active.again(h) + lateral(two))
    torch.testing.assert_close(laterals.helped_answer(active, helper, x), expected)
    torch.testing.assert_close(helper(x), helper.fc(helper.again(two)))  # nothing is left behind
    once = nn.Sequential(OrderedDict(first=helper.first, again=helper.again, fc=helper.fc))
    with pytest.raises(UsageError, match="layer 'again' is called more often in training than in evaluation"):
        laterals.helped_answer(active, once, x)


def test_every_task_has_an_active_column_of_its_own() -> None:
    torch.manual_seed(0)
    learner = cast("ProgressCompress", METHODS["pc"].build(make, "fc"))
    first, second, _ = tasks()
    learn(learner, first)
    assert not learner.laterals
    before = state(learner.active)
    learner.begin(second)
    after = learner.active.state_dict()
    drawn = [key for key in before if before[key].dim() > 1 and not key.startswith("fc.")]
    assert drawn
    assert not any(torch.equal(after[key], before[key]) for key in drawn)
    for lateral in learner.laterals.values():  # at first it hardly matters, but it is not cut off
        scale = cast("Lateral", lateral).scale
        assert bool(((scale >= 0) & (scale <= 0.1)).all())
        assert float(scale.std()) > 0.01


def test_the_active_column_adds_what_the_knowledge_base_knows() -> None:
    torch.manual_seed(0)
    learner = cast("ProgressCompress", METHODS["pc"].build(make, "fc"))
    first, second, _ = tasks()
    learn(learner, first)
    learner.begin(second)
    learner.prepare(learner.phases()[0], reader(second))
    steps(learner, second, 2)
    learner.eval()
    x = batch(second)[0]
    active, base = cast("Any", learner.active), cast("Any", learner.network)
    assert sorted(learner.laterals) == ["conv2", "fc1"]
    learner.select(0)  # what earlier tasks know, with the normalisation of the last of them

    def inside(net: Any, laterals: Any = None, known: Sequence[Tensor] = ()) -> tuple[list[Tensor], Tensor]:
        one = F.relu(net.bn1(net.conv1(x)))
        two = net.conv2(one)
        if laterals is not None:
            two = two + laterals["conv2"](known[0])
        two = F.max_pool2d(F.relu(net.bn2(two)), 2).flatten(1)
        three = net.fc1(two)
        if laterals is not None:
            three = three + laterals["fc1"](known[1])
        return [one, two], net.fc.heads[-1](F.relu(three))

    known, _ = inside(base)
    _, expected = inside(active, learner.laterals, known)
    torch.testing.assert_close(learner.act(x), expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(learner.act(x), active(x))


def test_compression_s_loss() -> None:
    torch.manual_seed(0)
    learner = cast("ProgressCompress", METHODS["pc"].build(make, "fc", strength=5.0))
    first, second, _ = tasks()
    learn(learner, first)
    learner.begin(second)
    for phase in learner.phases():
        learner.prepare(phase, reader(second))
        steps(learner, second, 2)
    learner.eval()
    x, y = batch(second)
    p, q = learner.act(x).softmax(1), learner.predict(x, 1).softmax(1)
    assert float(learner.loss(x, y).loss) == pytest.approx(float((p * (p / q).log()).sum() / len(x)), rel=1e-10)
    expected = 0.0
    for value, importance, now in zip(learner.anchor.values, learner.anchor.importance, learner.shared(), strict=True):
        expected += 2.5 * float((importance * (now - value) ** 2).sum())
    assert float(learner.penalty()) == pytest.approx(expected, rel=1e-10)


# ---------------------------------------------------------------------------------------------------------
# Distillation


def test_distillation_by_hand() -> None:
    student, teacher = [[2.0, 0.0, -4.0], [1.0, 1.0, 1.0]], [[4.0, 2.0, 0.0], [0.0, 0.0, 6.0]]
    found, kl = [], []
    for a, b in zip(student, teacher, strict=True):
        wanted = [math.exp(v / 2) / sum(math.exp(w / 2) for w in b) for v in b]
        given = [math.exp(v / 2) / sum(math.exp(w / 2) for w in a) for v in a]
        found.append(-sum(w * math.log(g) for w, g in zip(wanted, given, strict=True)))
        sharp = [math.exp(v) / sum(math.exp(w) for w in b) for v in b]
        own = [math.exp(v) / sum(math.exp(w) for w in a) for v in a]
        kl.append(sum(w * math.log(w / g) for w, g in zip(sharp, own, strict=True)))
    one, two = torch.tensor(student, requires_grad=True), torch.tensor(teacher, requires_grad=True)
    assert float(distilled(one, two)) == pytest.approx(sum(found) / 2, rel=1e-6)
    assert float(imitated(one, two)) == pytest.approx(sum(kl) / 2, rel=1e-6)
    assert float(imitated(two, two)) == 0
    distilled(one, two).backward()
    assert two.grad is None
    # The gradient is (q - p) / T, over the batch's size: no factor of T².
    expected = ((one / 2).softmax(1) - (two / 2).softmax(1)) / 2 / 2
    torch.testing.assert_close(one.grad, expected.detach())


@pytest.mark.parametrize(("bn", "temperature"), [("shared", 2.0), ("frozen", 2.0), ("shared", 3.0)])
def test_lwf_imitates_the_network_of_before(bn: str, temperature: float) -> None:
    torch.manual_seed(0)
    learner = cast("Lwf", METHODS["lwf"].build(make, "fc", strength=0.7, temperature=temperature, bn=bn))
    seen = tasks()
    for task in seen[:2]:
        learn(learner, task)
    learner.eval()
    x, y = batch(seen[2])
    answers = [learner.predict(x, n).detach() for n in range(2)]
    learner.begin(seen[2])
    learner.prepare(learner.phases()[1], reader(seen[2]))
    assert learner.teacher is not None
    teacher, before = state(learner.teacher), state(learner.network)
    steps(learner, seen[2], 3)
    assert_same(teacher, learner.teacher)
    assert not any(p.requires_grad for p in learner.teacher.parameters())
    after = learner.network.state_dict()
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    assert {f"fc.heads.{n}.weight" for n in range(3)} <= changed  # old heads are trained too
    assert ("bn1.running_mean" in changed) is (bn == "shared")
    learner.eval()
    expected = F.cross_entropy(learner.predict(x, 2), y - 5)
    for n in range(2):
        p, q = (answers[n] / temperature).softmax(1), (learner.predict(x, n) / temperature).log_softmax(1)
        expected = expected - 0.7 * (p * q).sum(1).mean()
    assert float(learner.loss(x, y).loss) == pytest.approx(float(expected), rel=1e-10)


def test_lwf_trains_the_new_head_alone_first() -> None:
    torch.manual_seed(0)
    learner = cast("Lwf", METHODS["lwf"].build(make, "fc", warm_up=0.25))
    seen = tasks()
    learner.begin(seen[0])
    assert [(p.name, p.share) for p in learner.phases()] == [("train", 1.0)]
    learner.begin(seen[1])
    first, second = learner.phases()
    assert (first.name, first.share, second.name, second.share) == ("warm-up", 0.25, "train", 0.75)
    before = state(learner.network)
    learner.prepare(first, reader(seen[1]))
    steps(learner, seen[1], 3)
    after = learner.network.state_dict()
    assert {key for key in before if not torch.equal(after[key], before[key])} == {
        "fc.heads.1.weight",
        "fc.heads.1.bias",
    }
    learner.prepare(second, reader(seen[1]))
    steps(learner, seen[1], 3)
    assert not torch.equal(learner.network.state_dict()["bn1.running_mean"], before["bn1.running_mean"])


# ---------------------------------------------------------------------------------------------------------
# Normalisation, options, capacity


def test_normalisation_of_each_task() -> None:
    torch.manual_seed(0)
    learner = cast("OneNetwork", METHODS["ewc"].build(make, "fc"))
    kept: list[dict[str, Tensor]] = []
    for task in tasks():
        learner.begin(task)
        norm = cast("TaskNorm", learner.network.bn1)
        assert len(norm.norms) == task.number + 1
        if task.number:  # starts where the last one is
            assert_same(kept[-1], norm.norms[-1])
        learner.prepare(learner.phases()[0], reader(task))
        steps(learner, task, 2)
        for before, own in zip(kept, norm.norms, strict=False):
            assert_same(before, own)
        learner.eval()
        learner.end(reader(task))
        kept.append(state(norm.norms[-1]))
        assert len({float(own["running_mean"][0]) for own in kept}) == len(kept)
    learner.train()
    assert [own.training for own in norm.norms] == [False, False, True]
    x = torch.randn(6, 16, 4, 4, dtype=torch.float64)
    for number in range(3):
        learner.eval()
        learner.select(number)
        shape = (1, 16, 1, 1)
        of = {key: value.view(shape) for key, value in kept[number].items() if value.dim()}
        expected = (x - of["running_mean"]) / (of["running_var"] + 1e-5).sqrt() * of["weight"] + of["bias"]
        torch.testing.assert_close(norm(x), expected)


def test_frozen_normalisation_stays_after_the_first_task() -> None:
    torch.manual_seed(0)
    learner = cast("OneNetwork", METHODS["ewc"].build(make, "fc", bn="frozen"))
    seen = tasks()
    norm = cast("nn.BatchNorm2d", learner.network.bn1)
    fresh = state(norm)
    learn(learner, seen[0])
    kept = state(norm)
    assert not torch.equal(fresh["running_mean"], kept["running_mean"])
    for task in seen[1:]:
        learn(learner, task)
        assert_same(kept, norm)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ewc", {"strength": -1.0}, "strength"),
    ("ewc", {"estimator": "true"}, "exact, sampled, empirical, batched"),
    ("ewc", {"samples": 0}, "samples must be at least 1, or be left out"),
    ("ewc", {"samples": "all"}, 'samples must be a whole number, not "all"'),
    ("ewc", {"samples": 2.5}, "samples must be a whole number"),
    ("ewc", {"samples": True}, "samples must be a whole number"),
    ("l2t", {"strength": 1e39}, "strength must be from 0 to 1e30"),
    ("si", {"strength": -1.0}, r"strength must be from 0 to 1e30, not -1\.0"),
    ("ewc", {"mode": "both"}, "all, online"),
    ("ewc", {"gamma": 1.5}, "gamma"),
    ("ewc", {"bn": "none"}, "shared, frozen, per_task"),
    ("si", {"damping": 0.0}, "damping"),
    ("pc", {"reduction": 0}, "^reduction must be at least 1"),
    ("pc", {"gamma": -0.1}, "^gamma must be from 0 to 1"),
    ("lwf", {"temperature": 0.0}, "temperature"),
    ("eeil", {"temperature": 0.0}, "temperature"),
    ("lwf", {"warm_up": 1.0}, "warm_up"),
    ("lwf", {"bn": "per_task"}, "shared, frozen, not"),
    ("joint", {"bn": "per_task"}, "shared, frozen, not"),
    ("icarl", {"bn": "per_task"}, "shared, frozen, not"),
    ("eeil", {"bn": "per_task"}, "shared, frozen, not"),
    ("icarl", {"memory": 0}, "memory"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=lambda value: str(value))
def test_options_that_make_no_sense(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        METHODS[name].build(make, "fc", **options)


PLAIN = 3_038_110  # LeNet with 100 classes
HEADS = 501 * 100
SHARED = PLAIN - HEADS
NORMS = 2 * 70  # of a task
STATISTICS = 4 * 2 * 70 + 8 * 2  # bytes: means and variances, and two counters
OF_TEN_TASKS: dict[str, tuple[int, int]] = {  # numbers kept to go on learning, and the network's own bytes
    "l2t": (0, 4 * (PLAIN + 9 * NORMS) + 10 * STATISTICS),
    "ewc": (2 * (SHARED - NORMS), 4 * (PLAIN + 9 * NORMS) + 10 * STATISTICS),
    "si": ((SHARED - NORMS), 4 * (PLAIN + 9 * NORMS) + 10 * STATISTICS),
    "pc": ((SHARED - NORMS), 4 * (PLAIN + 9 * NORMS) + 10 * STATISTICS),
    "lwf": (0, 4 * PLAIN + STATISTICS),
}
PERCENT = {"l2t": 100.04, "ewc": 296.73, "si": 198.39, "pc": 198.39, "lwf": 100.0}  # to go on learning


@pytest.mark.parametrize("name", OF_TEN_TASKS)
def test_capacity_of_ten_tasks_on_lenet(name: str) -> None:
    learner = METHODS[name].build(lambda: rkr.networks.lenet(classes=100), "fc")
    for number in range(10):
        learner.begin(SeenTask(number, f"t{number}", tuple(map(str, range(10))), 10 * number))
    capacity = learner.capacity()
    extra, own = OF_TEN_TASKS[name]
    norms = 9 * NORMS if name != "lwf" else 0
    assert capacity.network == PLAIN
    assert (capacity.parameters, capacity.further) == (PLAIN + norms, extra)
    assert (capacity.bytes, capacity.further_bytes) == (own, 4 * extra)
    assert capacity.percent_to_learn == pytest.approx(PERCENT[name], abs=0.005)
    assert capacity.multiply_adds == 10_946_000


def test_readers_are_read_in_evaluation_mode_only() -> None:
    """Passes for Fisher information, exemplars and their means move no statistics, whatever mode they come in."""
    for name in ("ewc", "pc", "icarl", "eeil", "rps-net"):
        torch.manual_seed(0)
        learner = METHODS[name].build(make, "fc")
        for task in tasks()[:2]:
            learner.begin(task)
            if learner.rounds():
                learner.adopt(learner.propose(0)[0])
            for phase in learner.phases():
                learner.prepare(phase, reader(task))
                steps(learner, task, 2)
            learner.train()
            before = state(cast("OneNetwork", learner).network)
            learner.end(reader(task))
            assert_same(before, cast("OneNetwork", learner).network)

"""Progressive networks against columns and lateral connections that are written out one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.core import LayerUpdate
from rkr.methods import METHODS
from rkr.methods.learner import Phase, SeenTask
from rkr.methods.pgn import Columns, ProgressiveNetwork

WIDTHS = {"conv1": 16, "conv2": 32, "fc1": 128}
RATIO = 0.2
LATER = {"conv1": 3, "conv2": 6, "fc1": 26}  # of RATIO
INPUT = {"conv2": "conv1", "fc1": "conv2"}


def make() -> nn.Module:
    return rkr.networks.small_cnn(classes=6, size=4).double()


def task(number: int) -> SeenTask:
    return SeenTask(number, f"t{number}", ("x", "y"), 2 * number)


def batch(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * number + seed)
    x = torch.randn(12, 1, 4, 4, generator=draw, dtype=torch.float64)
    return x, torch.randint(2, (12,), generator=draw) + 2 * number


def train(learner: ProgressiveNetwork, steps: int = 3, optimizer: str = "sgd") -> None:
    learner.prepare(Phase(), lambda: iter(()))
    if optimizer == "sgd":
        made: Any = torch.optim.SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=0.1)
    else:
        made = torch.optim.Adam(learner.groups(), lr=0.01, weight_decay=0.1)
    learner.train()
    for step in range(steps):
        made.zero_grad()
        learner.loss(*batch(learner.task.number, step)).loss.backward()
        made.step()
        learner.after_step()
    learner.eval()


def learned(count: int, lateral: str = "linear", **options: Any) -> ProgressiveNetwork:
    """A learner of some tasks."""
    torch.manual_seed(0)
    learner = METHODS["pgn"].build(make, "fc", lateral=lateral, ratio=RATIO, **options)
    assert isinstance(learner, ProgressiveNetwork)
    for number in range(count):
        learner.begin(task(number))
        train(learner)
    return learner


def span(layer: str, column: int) -> slice:
    """Where a column's units lie among all units of a layer."""
    start = 0 if not column else WIDTHS[layer] + (column - 1) * LATER[layer]
    return slice(start, start + (LATER[layer] if column else WIDTHS[layer]))


def inputs(layer: str, column: int) -> slice:
    """Where a column's units lie among the inputs of a layer."""
    if layer == "conv1":
        return slice(0, 1)
    found, values = span(INPUT[layer], column), 4 if layer == "fc1" else 1
    return slice(found.start * values, found.stop * values)


def own(learner: ProgressiveNetwork, number: int, key: str) -> Tensor:
    found = learner.model.tasks[f"t{number}"].get(key)
    assert found is not None
    return found


class Column:
    """One column with its own weights, and laterals of its own from each earlier column."""

    def __init__(self, learner: ProgressiveNetwork, number: int) -> None:
        state = {k: v.detach().clone() for k, v in learner.model.network.state_dict().items()}
        self.number, self.adapter = number, learner.lateral == "adapter"
        self.weight = {
            n: state[f"{n}.weight"][span(n, number), inputs(n, number if n != "conv1" else 0)] for n in WIDTHS
        }
        self.bias = {n: state[f"{n}.bias"][span(n, number)] for n in WIDTHS}
        self.norm = {}  # as its own task has it
        for name, norm in (("conv1", "bn1"), ("conv2", "bn2")):
            kinds = ("running_mean", "running_var", "weight", "bias")
            self.norm[name] = [own(learner, number, f"{norm}.{k}")[span(name, number)].clone() for k in kinds]
        self.lateral: dict[tuple[str, int], Tensor] = {}
        self.own: dict[str, Any] = {}
        for name in INPUT:
            for j in range(number):
                self.lateral[name, j] = state[f"{name}.weight"][span(name, number), inputs(name, j)]
            if self.adapter and number:
                kinds = ("reduce", "reduce_bias", "into", "alpha")
                self.own[name] = [own(learner, number, f"{name}.{k}").detach().clone() for k in kinds]

    def before_activation(self, name: str, own: Tensor, earlier: list[Tensor]) -> Tensor:
        def apply(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return F.linear(x, weight, bias) if x.dim() == 2 else F.conv2d(x, weight, bias, padding=1)

        total = apply(self.weight[name], own, self.bias[name])
        if self.adapter and earlier:
            reduce, bias, into, alpha = self.own[name]
            hidden = torch.zeros(())
            for j, h in enumerate(earlier):  # V's part for each earlier column, α's number for it
                part = reduce[:, inputs(name, j)]
                hidden = hidden + (F.linear(alpha[j] * h, part) if h.dim() == 2 else F.conv2d(alpha[j] * h, part))
            hidden = F.relu(hidden + bias.view(1, -1, *[1] * (own.dim() - 2)))
            return total + apply(into, hidden)
        for j, h in enumerate(earlier):
            total = total + apply(self.lateral[name, j], h)
        return total

    def layer(self, name: str, own: Tensor, earlier: list[Tensor]) -> Tensor:
        total = self.before_activation(name, own, earlier)
        if name in self.norm:
            total = F.batch_norm(total, *self.norm[name])
        return F.relu(total)


def direct(columns: list[Column], x: Tensor) -> dict[str, list[Tensor]]:
    """What each column computes at each layer."""
    found: dict[str, list[Tensor]] = {"conv1": [c.layer("conv1", x, []) for c in columns]}
    found["conv2"] = [c.layer("conv2", found["conv1"][i], found["conv1"][:i]) for i, c in enumerate(columns)]
    flat = [F.max_pool2d(h, 2).flatten(1) for h in found["conv2"]]
    found["fc1"] = [c.layer("fc1", flat[i], flat[:i]) for i, c in enumerate(columns)]
    return found


@torch.no_grad()
def answers(learner: ProgressiveNetwork, number: int) -> Tensor:
    learner.eval()
    return learner.predict(batch(0, 7)[0], number).clone()


@pytest.mark.parametrize("lateral", ["linear", "adapter"])
def test_columns_and_laterals_one_by_one(lateral: str) -> None:
    """Each column with weights of its own time, all laterals single, gives every task's answers."""
    torch.manual_seed(0)
    learner = METHODS["pgn"].build(make, "fc", lateral=lateral, ratio=RATIO)
    assert isinstance(learner, ProgressiveNetwork)
    columns: list[Column] = []
    for number in range(3):
        learner.begin(task(number))
        train(learner)
        columns.append(Column(learner, number))  # what later tasks might do to it does not count
    with torch.no_grad():
        for number in range(3):
            features = direct(columns[: number + 1], batch(0, 7)[0])["fc1"]
            head, bias = own(learner, number, "head.weight"), own(learner, number, "head.bias")
            assert head.shape == (2, 128 + 26 * number)  # features of its own column and of all earlier ones
            expected = F.linear(torch.cat(features, 1), head, bias)
            torch.testing.assert_close(answers(learner, number), expected, rtol=1e-9, atol=1e-11)
            without = F.linear(torch.cat(direct(columns[:1], batch(0, 7)[0])["fc1"], 1), head[:, :128], bias)
            assert number == 0 or not torch.allclose(without, expected, atol=1e-3)
    assert learner.growth.widths(2) == {name: WIDTHS[name] + 2 * LATER[name] for name in WIDTHS}


@pytest.mark.parametrize("lateral", ["linear", "adapter"])
@pytest.mark.parametrize("training", [False, True])
def test_activations_of_earlier_columns_stay(lateral: str, training: bool) -> None:
    """Also while a later task is trained: batch statistics are those of its own units only."""
    learner = learned(3, lateral)
    columns = [Column(learner, number) for number in range(2)]
    x = batch(0, 7)[0]
    found: dict[str, Tensor] = {}
    for name, layer in (("conv1", "bn1"), ("conv2", "bn2"), ("fc1", "fc1")):
        module = learner.model.network.get_submodule(layer)
        module.register_forward_hook(lambda m, i, output, name=name: found.__setitem__(name, F.relu(output)))
    with torch.no_grad():
        learner.model.set_task("t2")
        learner.train(training)
        learner.model(x)
        expected = direct(columns, x)
        for name in WIDTHS:
            for number in range(2):
                torch.testing.assert_close(
                    found[name][:, span(name, number)], expected[name][number], rtol=1e-9, atol=1e-11
                )


def test_settled_normalisation() -> None:
    """A task's own units are normalised by the batch, and only their statistics and parameters move."""
    learner = learned(2)
    learner.begin(task(2))
    before = {k: v.clone() for k, v in learner.model.tasks["t2"].state_dict().items()}
    inputs_of: list[Tensor] = []
    outputs: list[Tensor] = []
    norm = learner.model.network.get_submodule("bn1")
    norm.register_forward_pre_hook(lambda m, arguments: inputs_of.append(arguments[0].detach()))
    norm.register_forward_hook(lambda m, arguments, output: outputs.append(output.detach()))
    train(learner, steps=1, optimizer="adam")
    x, y, old = inputs_of[0], outputs[0], 16 + 3
    weight, bias = (before[f"bn1.{k}"][old:].view(1, -1, 1, 1) for k in ("weight", "bias"))
    own_x = x[:, old:]
    mean, var = own_x.mean((0, 2, 3), keepdim=True), own_x.var((0, 2, 3), unbiased=False, keepdim=True)
    torch.testing.assert_close(y[:, old:], (own_x - mean) / (var + 1e-5).sqrt() * weight + bias)
    kept = [before[f"bn1.{k}"][:old].view(1, -1, 1, 1) for k in ("running_mean", "running_var", "weight", "bias")]
    torch.testing.assert_close(y[:, :old], (x[:, :old] - kept[0]) / (kept[1] + 1e-5).sqrt() * kept[2] + kept[3])
    after = learner.model.tasks["t2"].state_dict()
    for key in ("running_mean", "running_var", "weight", "bias"):
        for norm, count in (("bn1", 19), ("bn2", 38)):
            now, was = after[f"{norm}.{key}"], before[f"{norm}.{key}"]
            assert torch.equal(now[:count], was[:count])
            assert bool((now[count:] != was[count:]).all())
            earlier = learner.model.tasks["t1"].state_dict()[f"{norm}.{key}"]
            assert torch.equal(was[:count], earlier)  # a column has the normalisation of its own task
    torch.testing.assert_close(
        after["bn1.running_mean"][old:], 0.9 * before["bn1.running_mean"][old:] + 0.1 * mean.flatten()
    )
    assert int(after["bn1.num_batches_tracked"]) == int(before["bn1.num_batches_tracked"]) + 1


@pytest.mark.parametrize("lateral", ["linear", "adapter"])
def test_gradients_without_those_of_earlier_columns(lateral: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What learns has the gradients that it has when every unit's gradient is formed."""
    learner = learned(2, lateral)
    learner.begin(task(2))
    learner.train()

    def gradients() -> dict[str, Tensor]:
        learner.zero_grad()
        learner.loss(*batch(2, 0)).loss.backward()
        found = {k: p.grad.clone() for k, p in learner.model.tasks["t2"].named_parameters() if p.grad is not None}
        for site in learner.layers():
            held = learner.held(site)
            assert held is not None
            assert site.weight.grad is not None
            found[site.path] = site.weight.grad[~held].clone()
        return found

    apart = gradients()
    assert len(apart) > len(learner.layers())
    monkeypatch.setattr(Columns, "passed", LayerUpdate.passed)
    whole = gradients()
    assert apart.keys() == whole.keys()
    for key, gradient in whole.items():
        assert bool(gradient.any())
        torch.testing.assert_close(apart[key], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("lateral", ["linear", "adapter"])
def test_held_entries_do_not_move_under_weight_decay(lateral: str, optimizer: str) -> None:
    learner = learned(2, lateral)
    kept = [answers(learner, number) for number in range(2)]
    learner.begin(task(2))
    before = {k: v.clone() for k, v in learner.model.network.state_dict().items()}
    train(learner, optimizer=optimizer)
    after = learner.model.network.state_dict()
    for name in WIDTHS:
        now, was, mine = after[f"{name}.weight"], before[f"{name}.weight"], span(name, 2)
        assert torch.equal(now[: mine.start], was[: mine.start])
        assert torch.equal(after[f"{name}.bias"][: mine.start], before[f"{name}.bias"][: mine.start])
        assert bool((after[f"{name}.bias"][mine] != before[f"{name}.bias"][mine]).all())
        first = inputs(name, 2).start if name != "conv1" and lateral == "adapter" else 0
        assert bool((now[mine, first:] != was[mine, first:]).all())
        if name == "conv1":
            continue
        for row in range(3):
            for column in range(3):
                block = now[span(name, row), inputs(name, column)]
                absent = row < column or (lateral == "adapter" and row > column)
                assert bool((block == 0).all()) is absent, (name, row, column)
    for number, answer in enumerate(kept):
        assert torch.equal(answers(learner, number), answer)


def lenet_with(lateral: str, ratio: float) -> ProgressiveNetwork:
    torch.manual_seed(0)
    learner = METHODS["pgn"].build(lambda: rkr.networks.lenet(classes=100), "fc", ratio=ratio, lateral=lateral)
    assert isinstance(learner, ProgressiveNetwork)
    for number in range(10):
        names = tuple(f"class {i}" for i in range(10 * number, 10 * number + 10))
        learner.begin(SeenTask(number, f"t{number}", names, 10 * number))
    return learner


@pytest.mark.parametrize(("lateral", "percent"), [("linear", 170.7), ("adapter", None)])
def test_capacity_of_ten_tasks_on_lenet(lateral: str, percent: float | None) -> None:
    """In closed form; 171 % are published."""
    learner = lenet_with(lateral, METHODS["pgn"].options["ratio"])
    a, b, c, d = 1, 3, 49, 30  # units of a later column
    total = 3_038_110 + 2 * (20 + 50)  # the first task has its normalisation for itself
    for t in range(1, 10):
        widths = [20 + t * a, 50 + t * b, 800 + t * c, 500 + t * d]  # with this column
        if lateral == "linear":
            total += a * 75 + b * 25 * widths[0] + c * 64 * widths[1] + d * widths[2]
        else:
            total += a * 75 + b * 25 * a + c * 64 * b + d * c  # the column itself
            earlier = [w - own for w, own in zip(widths, (a, b, c, d), strict=True)]
            for inner, into, out, values, kernel in (
                (a, earlier[0], b, 1, 25),
                (b, earlier[1], c, 64, 1),
                (c, earlier[2], d, 1, 1),
            ):
                total += inner * into * values + inner + out * inner * kernel + t  # V, its bias, U, α
        total += a + b + c + d  # biases
        total += 2 * (a + b) + 10 * t * d  # normalisation; what the head is wider by
    found = learner.capacity()
    assert (found.parameters, found.network) == (total, 3_038_110)
    if percent is not None:
        assert found.percent == pytest.approx(percent, abs=0.05)


def test_networks_with_shortcuts() -> None:
    """Residual streams grow as one; answers of the first column stay."""
    for name in ("resnet32", "resnet18"):
        torch.manual_seed(0)
        learner = METHODS["pgn"].build(lambda name=name: getattr(rkr.networks, name)(classes=4), "fc", ratio=0.05)  # type: ignore[misc]
        x = torch.randn(2, 3, 16, 16)
        learner.begin(task(0))
        learner.eval()
        with torch.no_grad():
            kept = learner.predict(x, 0).clone()
        learner.begin(task(1))
        learner.prepare(Phase(), lambda: iter(()))
        optimizer = torch.optim.SGD(learner.groups(), lr=0.01, weight_decay=0.1)
        learner.train()
        learner.loss(x, torch.tensor([2, 3])).loss.backward()
        optimizer.step()
        learner.after_step()
        learner.eval()
        with torch.no_grad():
            assert tuple(learner.predict(x, 1).shape) == (2, 2)
            assert torch.equal(learner.predict(x, 0), kept)


class Whitened(nn.Module):
    """Channels that cannot grow: the input is normalised, and a layer's output is added to it."""

    input_shape = (2, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.bn0, self.bn1 = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.conv1, self.conv2 = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 2, 3, padding=1)
        self.fc = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn0(x)
        return self.fc((x + self.bn1(self.conv2(F.relu(self.conv1(x))))).mean(dim=(2, 3)))


OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("pgn", "linear"): {},
    ("pgn", "adapter"): {"lateral": "adapter"},
    ("rcl", ""): {"unit": "absolute"},
}


@pytest.mark.parametrize(("name", "lateral"), OPTIONS)
def test_channels_that_cannot_grow(name: str, lateral: str) -> None:
    """Are as earlier tasks left them, and normalised as they were by a progressive network."""
    torch.manual_seed(0)
    learner = METHODS[name].build(Whitened, "fc", **OPTIONS[name, lateral])
    x, kept = 3 * torch.randn(6, 2, 4, 4) + 1, []
    for number in range(3):
        learner.begin(task(number))
        if name == "rcl" and number:
            learner.adopt([2])
        learner.prepare(Phase(), lambda: iter(()))
        optimizer = torch.optim.SGD(learner.groups(), lr=0.01, weight_decay=0.1)
        learner.train()
        learner.loss(x, torch.tensor([0, 1] * 3) + 2 * number).loss.backward()
        optimizer.step()
        learner.after_step()
        learner.eval()
        with torch.no_grad():
            kept.append(learner.predict(x, number).clone())
            assert all(torch.equal(learner.predict(x, n), answer) for n, answer in enumerate(kept))
    means = [own(learner, number, "bn0.running_mean") for number in range(3)]  # type: ignore[arg-type]
    assert torch.equal(means[0], means[2]) is (name == "pgn")
    more = 2 * (18 + 1) + 8  # two columns of one unit that nothing may take, the first task's normalisation
    if name == "rcl":
        more = 4 * (18 + 1) + 4 * 18 + 3 * 8  # four units, which the second convolution takes
    elif lateral == "adapter":
        more += (5 + 1 + 1) + (6 + 1 + 2)
    found = learner.capacity()
    assert found.parameters == found.network + more


def test_gradients_of_the_input_in_evaluation() -> None:
    """They go through earlier columns as well: what is cut off in training is cut off there only."""
    learner = learned(3)
    learner.model.set_task("t2")
    x = batch(2)[0].requires_grad_()
    (found,) = torch.autograd.grad(learner.model(x)[:, 0].sum(), x)
    step = torch.zeros_like(x)
    step[3, 0, 1, 2] = 1e-6
    with torch.no_grad():
        change = learner.model(x + step)[:, 0].sum() - learner.model(x - step)[:, 0].sum()
    assert float(found[3, 0, 1, 2]) == pytest.approx(float(change) / 2e-6, rel=1e-5)


def test_normalisation_without_statistics_of_earlier_columns_stays() -> None:
    def untracked() -> nn.Module:
        network = rkr.networks.small_cnn(classes=6, size=4).double()
        for name, width in (("bn1", 16), ("bn2", 32)):
            setattr(network, name, nn.BatchNorm2d(width, track_running_stats=False).double())
        return network

    torch.manual_seed(0)
    learner = METHODS["pgn"].build(untracked, "fc", ratio=RATIO)
    assert isinstance(learner, ProgressiveNetwork)
    for number in range(2):
        learner.begin(task(number))
        before = {k: v.clone() for k, v in learner.model.tasks[f"t{number}"].state_dict().items()}
        train(learner)
    after = learner.model.tasks["t1"].state_dict()
    for norm, width in (("bn1", 16), ("bn2", 32)):
        for key in (f"{norm}.weight", f"{norm}.bias"):
            assert torch.equal(after[key][:width], before[key][:width])
            assert not torch.equal(after[key][width:], before[key][width:])


def test_adapters_are_counted() -> None:
    """V at every pixel that goes in, U at every one that comes out: 4x4 pixels and 2x2 of them after pooling."""
    adds = [learned(2, lateral).capacity().multiply_adds for lateral in ("linear", "adapter")]
    assert adds[0] is not None
    a, b, c = LATER["conv1"], LATER["conv2"], LATER["fc1"]
    more = 16 * (a * 16 + b * a * 9)  # of conv2, whose maps are 4x4
    more += b * 4 * WIDTHS["conv2"] + c * b  # of fc1
    assert adds[1] == adds[0] + more


def test_bad_options() -> None:
    with pytest.raises(rkr.UsageError, match="ratio must be above 0 and at most 1, not 0"):
        METHODS["pgn"].build(make, "fc", ratio=0)
    with pytest.raises(rkr.UsageError, match="lateral must be one of linear, adapter, not 'none'"):
        METHODS["pgn"].build(make, "fc", lateral="none")

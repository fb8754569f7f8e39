"""DEN: proximal steps, the sub-network, expansion, split and time stamps, against closed forms and references."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.methods import METHODS
from rkr.methods.den import STAGES, Den, _count
from rkr.methods.growth.growth import NEVER
from rkr.methods.learner import Phase, SeenTask
from rkr.methods.shared.proximal import group_threshold, soft_threshold
from rkr.networks.resnet import ResNet, ZeroPad, projection

CLASSES = 3
LASTING = STAGES[1:]  # the phases of a later task


class Tiny(nn.Module):
    """Two convolutions with normalisation, a flatten, and linear layers without, of any widths."""

    def __init__(self, widths: tuple[int, int, int] = (4, 5, 6), classes: int = 9) -> None:
        super().__init__()
        a, b, c = widths
        self.input_shape = (1, 4, 4)
        self.conv1 = nn.Conv2d(1, a, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(a)
        self.conv2 = nn.Conv2d(a, b, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(b)
        self.fc1 = nn.Linear(4 * b, c)
        self.fc = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(F.relu(self.fc1(x.flatten(1))))


def residual(shortcut: Any = ZeroPad) -> ResNet:
    return ResNet((1, 1), (3, 5), 9, shortcut=shortcut)


def seen(number: int) -> SeenTask:
    return SeenTask(number, f"t{number}", tuple(f"{number}.{i}" for i in range(CLASSES)), CLASSES * number)


def batch(learner: Den, number: int, n: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(n, *learner.model.network.input_shape, generator=generator)  # type: ignore[misc]
    return x, torch.randint(CLASSES, (n,), generator=generator) + CLASSES * number


def reader(learner: Den) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    return lambda: iter([batch(learner, learner.task.number)])


def optimizer_of(learner: Den, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(learner.groups(), lr=lr, momentum=0.9, weight_decay=0.01)


def step(learner: Den, optimizer: torch.optim.Optimizer) -> None:
    learner.train()
    outcome = learner.loss(*batch(learner, learner.task.number))
    optimizer.zero_grad(set_to_none=True)
    outcome.loss.backward()
    learner.before_step(optimizer)
    optimizer.step()
    learner.after_step()


def run_phase(learner: Den, phase: Phase, steps: int = 3) -> None:
    learner.prepare(phase, reader(learner))
    optimizer = optimizer_of(learner)
    for _ in range(0 if phase.epochs == 0 else steps):
        step(learner, optimizer)


def learn(learner: Den, number: int, until: str | None = None, steps: int = 3) -> None:
    """What the engine does, in small: phases are asked for anew after each one; stops after phase `until`."""
    learner.begin(seen(number))
    at = 0
    while at < len(learner.phases()):
        phase = learner.phases()[at]
        run_phase(learner, phase, steps)
        if phase.name == until:
            return
        at += 1
    learner.eval()
    learner.end(reader(learner))


def made(make: Callable[[], nn.Module] = Tiny, **options: Any) -> Den:
    torch.manual_seed(0)
    return Den(make, "fc", **{"expand": 2, "split": 2, "drift_threshold": 0.0, "loss_threshold": 0.0, **options})


@torch.no_grad()
def answers(learner: Den, number: int) -> Tensor:
    learner.eval()
    found = learner.predict(batch(learner, 0)[0], number).clone()
    learner.model.set_task(learner.task.name)
    return found


def weights(learner: Den) -> dict[str, Tensor]:
    """Of all layers, the growing ones: weight and bias."""
    found = {}
    for site in learner.layers():
        found[f"{site.path}.weight"] = site.weight.detach().clone()
        if site.bias is not None:
            found[f"{site.path}.bias"] = site.bias.detach().clone()
    return found


def sparsify(learner: Den, zeros: float = 0.7) -> None:
    """Make most connections between units exactly 0, kernels and blocks behind a flatten as a whole."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for site in learner.layers():
            space = learner.growth.spaces.into.get(site.path)
            values = 1 if space is None else space.takers[site.path]
            rows, columns = site.weight.shape[:2]
            gone = torch.rand(rows, columns // values, generator=generator) < zeros
            gone = gone.repeat_interleave(values, 1)
            site.weight.masked_fill_(gone.view(rows, columns, *[1] * (site.weight.dim() - 2)), 0)


# -- proximal steps ---------------------------------------------------------------------------------------


def test_soft_threshold() -> None:
    w = torch.tensor([-2.0, -0.3, -0.1, 0.0, 0.2, 0.3, 1.5])
    soft_threshold(w, 0.3)
    torch.testing.assert_close(w, torch.tensor([-1.7, 0.0, 0.0, 0.0, 0.0, 0.0, 1.2]))


def test_group_threshold() -> None:
    """g max(1 - t / ||g||, 0), over all tensors that a unit has a part in."""
    a = torch.tensor([[3.0, 0.0], [0.1, 0.1], [0.0, 0.0]])
    b = torch.tensor([4.0, 0.1, 0.0])
    zero = group_threshold([a, b], 0.5)
    torch.testing.assert_close(a, torch.tensor([[2.7, 0.0], [0.0, 0.0], [0.0, 0.0]]))  # norm 5: times 0.9
    torch.testing.assert_close(b, torch.tensor([3.6, 0.0, 0.0]))
    assert zero.tolist() == [False, True, True]


def test_the_first_task_is_trained_with_l1() -> None:
    """After the optimiser's own step every weight, the head's too, is soft-thresholded by rate times l1."""
    learner = made(l1=0.5)
    learner.begin(seen(0))
    assert [phase.name for phase in learner.phases()] == ["train"]
    learner.prepare(*learner.phases(), reader(learner))
    optimizer = optimizer_of(learner, lr=0.1)
    learner.train()
    learner.loss(*batch(learner, 0)).loss.backward()
    optimizer.step()
    named = learner.model.named_task_parameters()
    before = {key: p.detach().clone() for key, p in named.items()}
    learner.before_step(optimizer)
    learner.after_step()
    thresholded = {"conv1.weight", "conv2.weight", "fc1.weight", "head.weight"}
    assert thresholded < set(named)
    for key, p in named.items():
        w = before[key].numpy()
        expected = np.sign(w) * np.maximum(np.abs(w) - np.float32(0.05), 0) if key in thresholded else w
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6, atol=1e-7, err_msg=key)
    assert 0.05 < float((named["fc1.weight"] == 0).float().mean()) < 1


@pytest.mark.parametrize("l1", [0.0, 0.2])
def test_the_group_lasso_step_of_new_units(l1: float) -> None:
    """prox of L1, then of the group lasso, for each new unit; what there was before stays bit for bit."""
    learner = made(l1=l1, group_lasso=1.5)
    learn(learner, 0)
    learn(learner, 1, until="grow")
    with torch.no_grad():
        learner.own.get("bn1.bias").add_(0.3)
    learner.prepare(learner.phases()[LASTING.index("expand")], reader(learner))
    optimizer = optimizer_of(learner, lr=0.1)
    before = {**weights(learner), **{k: p.detach().clone() for k, p in learner.own.named_parameters()}}
    learner.before_step(optimizer)
    learner.after_step()
    after = {**weights(learner), **{k: p.detach() for k, p in learner.own.named_parameters()}}
    widths = {"conv1": 4, "conv2": 5, "fc1": 6}
    for layer, norm, old in (("conv1", "bn1", 4), ("conv2", "bn2", 5), ("fc1", None, 6)):
        parts = [before[f"{layer}.weight"], before[f"{layer}.bias"]] + ([before[f"{norm}.bias"]] if norm else [])
        for unit in range(old, old + 2):
            group = [part[unit].numpy().astype(np.float64) for part in parts]
            group[0] = np.sign(group[0]) * np.maximum(np.abs(group[0]) - 0.1 * l1, 0)
            norm_of = np.sqrt(sum((part**2).sum() for part in group))
            expected = [part * max(1 - 0.15 / norm_of, 0) for part in group]
            found = [after[f"{layer}.weight"], after[f"{layer}.bias"]] + ([after[f"{norm}.bias"]] if norm else [])
            for part, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(part[unit].numpy(), wanted, rtol=1e-5, atol=1e-7)
        into = {"conv2": 4, "fc1": 20}.get(layer, before[f"{layer}.weight"].shape[1])
        assert torch.equal(after[f"{layer}.weight"][:old, :into], before[f"{layer}.weight"][:old, :into])
        assert torch.equal(after[f"{layer}.bias"][:old], before[f"{layer}.bias"][:old])
        if norm:
            assert torch.equal(after[f"{norm}.bias"][: widths[layer]], before[f"{norm}.bias"][: widths[layer]])
    assert torch.equal(after["head.weight"][:, :6], before["head.weight"][:, :6])
    assert torch.equal(after["head.bias"], before["head.bias"])


# -- the sub-network --------------------------------------------------------------------------------------

Node = tuple[str, int]


def on_paths(edges: dict[Node, list[Node]], starts: list[Node]) -> set[Node]:
    """All nodes on any simple path that begins at a start, every path walked by itself."""
    found: set[Node] = set()

    def walk(path: list[Node]) -> None:
        found.add(path[-1])
        for node in edges.get(path[-1], []):
            if node not in path:
                walk([*path, node])

    for start in starts:
        walk([start])
    return found


def add_edges(edges: dict[Node, list[Node]], weight: Tensor, out: str, into: str, values: int = 1) -> None:
    w = weight.detach().numpy()
    for o in range(w.shape[0]):
        for i in range(w.shape[1] // values):
            if np.any(w[o, i * values : (i + 1) * values] != 0):
                edges.setdefault((out, o), []).append((into, i))


def chosen(learner: Den) -> dict[str, list[int]]:
    return {name: units.nonzero()[:, 0].tolist() for name, units in learner.reachable().items()}


def head_with_one_input_each(learner: Den, inputs: dict[int, int]) -> None:
    head = learner.own.get("head.weight")
    with torch.no_grad():
        head.zero_()
        for output, unit in inputs.items():
            head[output, unit] = 1.0


@pytest.mark.parametrize("inputs", [{2: 1}, {0: 0, 1: 3}, {}])
def test_the_sub_network_is_what_paths_reach_through_a_flatten(inputs: dict[int, int]) -> None:
    """By any output of the head, not the first alone."""
    learner = made()
    learn(learner, 0)
    learner.begin(seen(1))
    sparsify(learner, 0.6)
    head_with_one_input_each(learner, inputs)
    found = learner.model.network
    edges: dict[Node, list[Node]] = {}
    add_edges(edges, found.fc1._parameters["weight"], "fc1", "conv2", values=4)  # type: ignore[union-attr, arg-type]
    add_edges(edges, found.conv2._parameters["weight"], "conv2", "conv1")  # type: ignore[union-attr, arg-type]
    nodes = on_paths(edges, [("fc1", unit) for unit in inputs.values()])
    expected = {name: sorted(i for n, i in nodes if n == name) for name in ("conv1", "conv2", "fc1")}
    assert chosen(learner) == expected
    if inputs:
        assert 0 < len(expected["conv2"]) < 5  # else nothing is proved


@pytest.mark.parametrize("shortcut", [ZeroPad, projection])
@pytest.mark.parametrize("unit", range(5))
def test_the_sub_network_through_residual_ties(shortcut: Any, unit: int) -> None:
    learner = made(lambda: residual(shortcut))
    learner.begin(seen(0))
    learner.begin(seen(1))
    sparsify(learner, 0.75)
    head_with_one_input_each(learner, {1: unit})
    w = {site.path: site.weight for site in learner.layers()}
    edges: dict[Node, list[Node]] = {}
    # Spaces: "conv1" with layer1.0.conv2, and "layer2.0.conv2" with the shortcut of its block, are tied.
    add_edges(edges, w["layer1.0.conv1"], "layer1.0.conv1", "conv1")
    add_edges(edges, w["layer1.0.conv2"], "conv1", "layer1.0.conv1")
    add_edges(edges, w["layer2.0.conv1"], "layer2.0.conv1", "conv1")
    add_edges(edges, w["layer2.0.conv2"], "layer2.0.conv2", "layer2.0.conv1")
    if shortcut is projection:
        add_edges(edges, w["layer2.0.downsample.0"], "layer2.0.conv2", "conv1")
    else:
        for channel in range(3):
            edges.setdefault(("layer2.0.conv2", channel), []).append(("conv1", channel))
    nodes = on_paths(edges, [("layer2.0.conv2", unit)])
    names = ("conv1", "layer1.0.conv1", "layer2.0.conv1", "layer2.0.conv2")
    assert chosen(learner) == {name: sorted(i for n, i in nodes if n == name) for name in names}


def test_dead_units_are_no_part_of_the_sub_network() -> None:
    learner = made()
    learn(learner, 0)
    learn(learner, 1)
    learner.begin(seen(2))
    alive = learner._alive()
    for name, units in learner.reachable().items():
        assert not bool((units & ~alive[name]).any())
    assert any(not bool(units.all()) for units in alive.values())


def test_select_trains_the_head_alone() -> None:
    learner = made(l1=0.5)
    learn(learner, 0)
    before = weights(learner)
    learn(learner, 1, until="select")
    assert {k for k, v in weights(learner).items() if not torch.equal(v, before[k])} == set()
    for key, own in learner.own.named_parameters():
        if not key.startswith("head."):
            assert torch.equal(own, learner.model.tasks["t0"].get(key))
    assert bool((learner.own.get("head.weight") == 0).any())
    assert [len(group["params"]) for group in learner.groups()] == [2]


def test_retraining_moves_nothing_outside_the_sub_network() -> None:
    """Bit for bit, under momentum and weight decay; what is inside moves."""
    learner = made()
    learn(learner, 0)
    learner.begin(seen(1))
    run_phase(learner, learner.phases()[0])
    sparsify(learner, 0.7)
    head_with_one_input_each(learner, {2: 1, 0: 4})
    inside = {name: units.numpy() for name, units in learner.reachable().items()}
    before = weights(learner)
    run_phase(learner, learner.phases()[1], steps=5)
    after = weights(learner)
    sides = {"conv1": (None, 1), "conv2": ("conv1", 1), "fc1": ("conv2", 4)}
    for layer, (below, values) in sides.items():
        columns = np.ones(1, bool) if below is None else np.repeat(inside[below], values)
        between = torch.from_numpy(inside[layer][:, None] & columns[None])
        moved = after[f"{layer}.weight"] != before[f"{layer}.weight"]
        assert not bool(moved[~between].any())
        assert bool(moved[between].any())
        moved_bias = (after[f"{layer}.bias"] != before[f"{layer}.bias"]).numpy()
        assert not moved_bias[~inside[layer]].any()
        assert not inside[layer].all()
    head = learner.own.get("head.weight")
    assert bool((head[:, ~torch.from_numpy(inside["fc1"])] == 0).all())
    assert bool((head[:, torch.from_numpy(inside["fc1"])] != 0).all())  # also those to other outputs


def test_the_penalty_on_drift() -> None:
    learner = made(strength=3.0)
    learn(learner, 0)
    old = weights(learner)
    learn(learner, 1, until="expand")
    assert learner.layers()[2].weight.shape == (8, 28)
    squares = 0.0
    for key, value in weights(learner).items():
        squares += float(((value[tuple(map(slice, old[key].shape))] - old[key]) ** 2).sum())
    assert squares > 0
    assert learner.penalty().item() == pytest.approx(1.5 * squares, rel=1e-5)
    learner.eval()
    x, y = batch(learner, 1)
    plain = F.cross_entropy(learner.predict(x, 1), y - CLASSES).item()
    for phase, extra in (("retrain", 1.5 * squares), ("split", 1.5 * squares), ("expand", 0.0), ("select", 0.0)):
        learner._phase = phase
        assert learner.loss(x, y).loss.item() == pytest.approx(plain + extra, rel=1e-5)


# -- expansion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Tiny, residual])
def test_expansion_trains_what_is_new_alone(make: Callable[[], nn.Module]) -> None:
    """Earlier tasks answer as before it, bit for bit, and so do all old weights stay."""
    learner = made(make, group_lasso=0.01)
    learn(learner, 0)
    learn(learner, 1, until="retrain")
    first, old = answers(learner, 0), weights(learner)
    before = {key: p.detach().clone() for key, p in learner.own.named_parameters()}
    for at in (2, 3):
        run_phase(learner, learner.phases()[at])
    assert learner.growth.widths(0) == {s.name: s.width for s in learner.growth.spaces.growing}
    assert learner.growth.widths(1) == {s.name: s.width + 2 for s in learner.growth.spaces.growing}
    for key, value in weights(learner).items():
        assert torch.equal(value[tuple(map(slice, old[key].shape))], old[key])
    for key, own in learner.own.named_parameters():
        assert torch.equal(own[tuple(map(slice, before[key].shape))], before[key])
    assert torch.equal(answers(learner, 0), first)


def test_new_units_give_nothing_to_units_outside() -> None:
    learner = made()
    learn(learner, 0)
    learner.begin(seen(1))
    run_phase(learner, learner.phases()[0])
    sparsify(learner, 0.6)
    head_with_one_input_each(learner, {2: 1})
    for at in (1, 2, 3):
        run_phase(learner, learner.phases()[at])
    inside = learner.get_buffer("chosen1")
    weight = learner.model.network.conv2._parameters["weight"]  # type: ignore[union-attr]
    assert weight is not None
    assert not bool(weight[:5][~inside][:, 4:].any())
    assert bool(weight[:5][inside][:, 4:].all())
    assert not bool(inside.all())


def test_whether_to_expand_is_asked_of_the_mean_loss() -> None:
    """Over all training samples; a phase with nothing to do has no epochs."""
    for threshold, expanded in ((0.0, 1), (1e9, 0)):
        learner = made(loss_threshold=threshold, drift_threshold=1e9)
        learn(learner, 0)
        learn(learner, 1, until="retrain")
        assert [p.epochs for p in learner.phases()] == [None, None, 0, None, 0, None]  # not known yet
        assert sum(p.share for p in learner.phases() if p.epochs is None) == pytest.approx(1)
        x, y = batch(learner, 1)
        expected = F.cross_entropy(answers_of(learner, x, 1), y - CLASSES).item()
        run_phase(learner, learner.phases()[2])
        assert float(learner.reached) == pytest.approx(expected, rel=1e-6)
        assert int(learner.expanded) == expanded
        assert [p.epochs for p in learner.phases()] == [None, None, 0, None if expanded else 0, 0, None]
        run_phase(learner, learner.phases()[3])
        run_phase(learner, learner.phases()[4])
        assert [p.epochs for p in learner.phases()][3:] == [None if expanded else 0, 0, 0]
        assert learner.growth.widths(1)["fc1"] == 6 + 2 * expanded


@torch.no_grad()
def answers_of(learner: Den, x: Tensor, number: int) -> Tensor:
    learner.eval()
    return learner.predict(x, number)


def test_the_mean_is_over_samples_not_batches() -> None:
    learner = made()
    learn(learner, 0)
    learn(learner, 1, until="retrain")
    parts = [batch(learner, 1, 10), batch(learner, 1, 3)]
    logits = answers_of(learner, torch.cat([x for x, _ in parts]), 1)
    expected = F.cross_entropy(logits, torch.cat([y for _, y in parts]) - CLASSES).item()
    learner.train()
    learner.prepare(learner.phases()[2], lambda: iter(parts))
    assert float(learner.reached) == pytest.approx(expected, rel=1e-6)
    assert learner.training
    assert all(m.training for m in learner.model.network.modules())


def idle(learner: Den, space: str, units: list[int]) -> None:
    """Let a proximal step bring units to 0."""
    found = next(s for s in learner.growth.spaces.growing if s.name == space)
    first = len(learner.growth.times(found)[0]) - 2
    with torch.no_grad():
        for group in learner._incoming(found):
            group[[u - first for u in units]] *= 1e-6


@pytest.mark.parametrize("mode", [True, False])
def test_idle_new_units_are_dropped_and_nothing_changes(mode: bool) -> None:
    learner = made(l1=0.0, group_lasso=1e-3)
    learn(learner, 0)
    learn(learner, 1, until="expand")
    learner._rate = 0.1
    for space, units in (("conv1", [4]), ("conv2", [5, 6]), ("fc1", [7])):
        idle(learner, space, units)
    learner.after_step()
    x = batch(learner, 1)[0]
    other = copy.deepcopy(learner)
    with torch.no_grad():
        expected = learner.train(mode).model(x)  # in training mode this moves statistics, of which other has its own
        first = answers(other, 0)
        other._drop()
        torch.testing.assert_close(other.train(mode).model(x), expected, rtol=1e-5, atol=1e-6)
    assert other.growth.widths(1) == {"conv1": 5, "conv2": 5, "fc1": 7}
    assert other.growth.widths(0) == {"conv1": 4, "conv2": 5, "fc1": 6}
    assert other.own.get("head.weight").shape == (CLASSES, 7)
    assert [tuple(site.weight.shape) for site in other.layers()] == [(5, 1, 3, 3), (5, 5, 3, 3), (7, 20)]
    assert torch.equal(answers(other, 0), first)
    assert other.capacity().bytes < learner.capacity().bytes
    storage = [site.weight.untyped_storage().nbytes() for site in other.layers()]
    assert storage == [site.weight.nbytes for site in other.layers()]  # gone, not hidden
    other.end(reader(other))
    learn(other, 2)  # and it goes on
    assert other.growth.widths(2) == {"conv1": 7, "conv2": 7, "fc1": 9}


class Bent(Tiny):
    """Where nothing goes in, something comes out."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(torch.sigmoid(self.bn1(self.conv1(x)))))), 2)
        return self.fc(F.softplus(self.fc1(x.flatten(1))))


def test_units_that_are_never_zero_are_not_dropped() -> None:
    learner = made(Bent, split=0)
    learn(learner, 0)
    learn(learner, 1, until="expand")
    with torch.no_grad():
        for space in learner.growth.spaces.growing:
            for group in learner._incoming(space):
                group.zero_()
    widths, before = learner.growth.widths(1), answers(learner, 1)
    learner._drop()
    assert learner.growth.widths(1) == widths
    assert torch.equal(answers(learner, 1), before)


def test_a_unit_that_a_shortcut_feeds_is_not_idle() -> None:
    """Stage 2 adds the channels of stage 1 to its own: its new unit stays while the one that is added to it does."""
    learner = made(residual, l1=0.0, group_lasso=1e-3)
    learn(learner, 0)
    learn(learner, 1, until="expand")
    learner._rate = 0.1
    idle(learner, "conv1", [3])
    idle(learner, "layer2.0.conv2", [5, 6])
    learner.after_step()
    with torch.no_grad():
        x = batch(learner, 1)[0]
        expected = learner.eval().model(x)
        learner._drop()
        torch.testing.assert_close(learner.model(x), expected, rtol=1e-5, atol=1e-6)
    assert learner.growth.widths(1)["conv1"] == 4
    assert learner.growth.widths(1)["layer2.0.conv2"] == 6
    before, after = (learner.growth.spaces.growing[i] for i in (0, 3))
    assert learner.growth.slots(before)[3:].tolist() == learner.growth.slots(after)[5:].tolist()  # still a pair


# -- split ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Tiny, residual, lambda: residual(projection)])
def test_a_split_changes_nothing_for_the_task_and_gives_earlier_ones_their_weights_back(
    make: Callable[[], nn.Module],
) -> None:
    """If all that drifted is copied, earlier tasks answer again as before the task began, to the last bit."""
    learner = made(make, split=1000)
    learn(learner, 0)
    first, old = answers(learner, 0), weights(learner)
    learn(learner, 1, until="expand")
    assert not torch.allclose(answers(learner, 0), first, atol=1e-4)
    second = answers(learner, 1)
    run_phase(learner, learner.phases()[4])
    torch.testing.assert_close(answers(learner, 1), second, rtol=1e-4, atol=1e-5)
    assert torch.equal(answers(learner, 0), first)
    for key, value in weights(learner).items():
        assert torch.equal(value[tuple(map(slice, old[key].shape))], old[key])
    run_phase(learner, learner.phases()[5])
    assert torch.equal(answers(learner, 0), first)
    assert not torch.allclose(answers(learner, 1), second, atol=1e-4)


def test_the_units_that_drifted_most_are_copied() -> None:
    learner = made(split=2, expand=1)
    learn(learner, 0)
    old = weights(learner)
    learn(learner, 1, until="expand")
    with torch.no_grad():
        for unit, far in ((1, 3.0), (3, 5.0), (0, 4.0)):
            learner.layers()[1].weight[unit, :4] += far
    now = weights(learner)
    drifts = learner.drift()
    distance = np.sqrt(((now["conv2.weight"][:5, :4] - old["conv2.weight"]).numpy() ** 2).sum((1, 2, 3)))
    np.testing.assert_allclose(drifts["conv2"][:5].numpy(), distance, rtol=1e-5)
    assert float(drifts["conv2"][5]) == 0  # a new unit has nowhere to drift from
    run_phase(learner, learner.phases()[4])
    space = learner.growth.spaces.growing[1]
    born, dead = learner.growth.times(space)
    assert born.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert dead.tolist() == [1, NEVER, NEVER, 1, NEVER, NEVER, NEVER, NEVER]
    after = weights(learner)["conv2.weight"]
    kept = torch.tensor([0, 1, 2, 3])  # inputs that there were before
    assert torch.equal(after[6, kept], now["conv2.weight"][3, kept])  # the largest first
    assert torch.equal(after[7, kept], now["conv2.weight"][0, kept])
    for unit in (0, 3):
        assert torch.equal(after[unit, :4], old["conv2.weight"][unit])
    # What goes from the originals to units that stay is as it was, what goes from the copies is as it is.
    into, was, earlier = weights(learner)["fc1.weight"], now["fc1.weight"], old["fc1.weight"]
    stays = (learner.growth.times(learner.growth.spaces.growing[2])[1][:6] == NEVER).nonzero()[:, 0]
    assert torch.equal(into[stays][:, :4], earlier[stays][:, :4])
    assert torch.equal(into[stays][:, 24:28], was[stays][:, 12:16])
    assert torch.equal(into[stays][:, 4:12], was[stays][:, 4:12])  # of a unit that was not copied: drifted


def test_no_drift_above_the_threshold_no_copies() -> None:
    learner = made(drift_threshold=1e9)
    learn(learner, 0)
    learn(learner, 1)
    assert int(learner.divided) == 0
    assert learner.notes()["copied"] == {"conv1": 0, "conv2": 0, "fc1": 0}
    assert learner.notes()["added"] == {"conv1": 2, "conv2": 2, "fc1": 2}


# -- time stamps ------------------------------------------------------------------------------------------


def test_a_task_computes_with_the_widths_that_it_knew() -> None:
    """As a network of these widths by itself, which has the same weights."""
    learner = made(group_lasso=1e-3)
    for number in range(3):
        learn(learner, number)
    x = batch(learner, 0)[0]
    whole = weights(learner)
    every = {s.name: len(learner.growth.times(s)[0]) for s in learner.growth.spaces.growing}
    assert every == {"conv1": 12, "conv2": 13, "fc1": 14}
    for number in range(3):
        units = {}
        for i, space in enumerate(learner.growth.spaces.growing):
            born, dead = (learner.growth.get_buffer(f"{name}{i}").tolist() for name in ("born", "dead"))
            units[space.name] = [k for k in range(len(born)) if born[k] <= number < dead[k]]
        assert [len(u) for u in units.values()] == [4 + 2 * number, 5 + 2 * number, 6 + 2 * number]
        narrow = Tiny((4 + 2 * number, 5 + 2 * number, 6 + 2 * number), CLASSES).eval()
        flat = [4 * u + k for u in units["conv2"] for k in range(4)]
        own = learner.model.tasks[f"t{number}"]
        state = {key: value for key, value in own.tensors().items() if key.startswith("bn")}
        state["fc.weight"], state["fc.bias"] = own.get("head.weight"), own.get("head.bias")  # type: ignore[assignment]
        state["conv1.weight"] = whole["conv1.weight"][units["conv1"]]
        state["conv2.weight"] = whole["conv2.weight"][units["conv2"]][:, units["conv1"]]
        state["fc1.weight"] = whole["fc1.weight"][units["fc1"]][:, flat]
        for layer in ("conv1", "conv2", "fc1"):
            state[f"{layer}.bias"] = whole[f"{layer}.bias"][units[layer]]
        narrow.load_state_dict(state)
        with torch.no_grad():
            torch.testing.assert_close(answers_of(learner, x, number), narrow(x), rtol=1e-5, atol=1e-6)


# -- state ------------------------------------------------------------------------------------------------


@cache
def after_three_tasks(make: Callable[[], nn.Module], grows: bool, stop: str = "") -> dict[str, Tensor]:
    """The state at the end; `stop` is a phase, of the second task if there is one, that a new learner goes on with."""
    task = 0 if stop == "train" else 1
    options = {} if grows else {"loss_threshold": 1e9, "drift_threshold": 1e9}
    learner = made(make, group_lasso=0.5, **options)
    for number in range(3):
        torch.manual_seed(10 * number + 9)
        learner.begin(seen(number))
        at = 0
        while at < len(learner.phases()):
            phase = learner.phases()[at]
            torch.manual_seed(10 * number + at)
            learner.prepare(phase, reader(learner))
            optimizer = optimizer_of(learner)
            for k in range(0 if phase.epochs == 0 else 4):
                if (number, phase.name, k) == (task, stop, 2):
                    state = copy.deepcopy(learner.state_dict())
                    moments = copy.deepcopy(optimizer.state_dict())
                    torch.manual_seed(99)
                    learner = Den(make, "fc", **learner_options(learner))
                    for earlier in range(number + 1):
                        learner.begin(seen(earlier))
                    learner.load_state_dict(state)
                    assert learner.phases()[at] == phase
                    learner.prepare(phase, reader(learner))
                    optimizer = optimizer_of(learner)
                    learner.load_state_dict(state)
                    optimizer.load_state_dict(moments)
                step(learner, optimizer)
            at += 1
        learner.eval()
        learner.end(reader(learner))
    return learner.state_dict()


@pytest.mark.parametrize("make", [Tiny, residual])
@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("stop", ["train", *LASTING])
def test_it_goes_on_from_every_phase(make: Callable[[], nn.Module], grows: bool, stop: str) -> None:
    """A new learner that began the same tasks, was loaded, prepared and loaded again, ends with the same bits."""
    whole, parts = after_three_tasks(make, grows), after_three_tasks(make, grows, stop)
    assert list(whole) == list(parts)
    for key, value in whole.items():
        assert torch.equal(parts[key], value), key


def learner_options(learner: Den) -> dict[str, Any]:
    names = ("l1", "strength", "group_lasso", "loss_threshold", "drift_threshold", "expand", "split")
    return {name: getattr(learner, name) for name in names}


def test_nothing_of_a_task_s_start_is_kept_after_it() -> None:
    learner = made()
    for number in range(2):
        learn(learner, number)
    kept = {key: value.numel() for key, value in learner.state_dict().items() if key.startswith("old_")}
    assert kept
    assert not any(kept.values())


# -- cost -------------------------------------------------------------------------------------------------


def grow_as_much_as_possible(learner: Den, tasks: int, classes: int) -> None:
    """As if every task found its loss too high and its units adrift, and no new unit became idle."""
    spaces = learner.growth.spaces.growing
    for number in range(tasks):
        names = tuple(f"{number}.{i}" for i in range(classes))
        learner.begin(SeenTask(number, f"t{number}", names, classes * number))
        if number:
            learner.growth.grow(learner.model, {s.name: _count(learner.expand, s) for s in spaces})
            copied = {s.name: learner.growth.units(s, number)[: _count(learner.split, s)].tolist() for s in spaces}
            learner.growth.split(learner.model, copied)
        learner.end(lambda: iter(()))


def lenet() -> nn.Module:
    return rkr.networks.lenet(classes=100)


def test_capacity_of_ten_tasks_on_lenet_as_published() -> None:
    """181 % (Yoon et al., ICLR 2020). The method's own options come to it, or 3.8 % new units a task without copies."""
    learner = METHODS["den"].build(lenet, "fc")
    assert isinstance(learner, Den)
    grow_as_much_as_possible(learner, 10, 10)
    capacity = learner.capacity()
    assert capacity.network == 3_038_110
    assert capacity.percent == pytest.approx(181, abs=1)
    assert capacity.parameters == 5_477_430
    learner = Den(lenet, "fc", expand=0.038, split=0)
    grow_as_much_as_possible(learner, 10, 10)
    assert capacity.percent == pytest.approx(181, abs=1)
    a, b, c, d = 20 + 9, 50 + 9 * 2, 800 + 9 * 30, 500 + 9 * 19
    count = 76 * a + (25 * a + 1) * b + (64 * b + 1) * c + (c + 1) * d + 50_100 + 140  # the network, with its own head
    for number in range(10):
        count += 10 * 19 * number + 2 * (20 + number + 50 + 2 * number)  # wider heads, normalisation
    assert learner.capacity().parameters == count
    assert learner.capacity().percent == pytest.approx(181, abs=1)


def test_ten_units_a_task_as_in_the_public_code_are_181_percent_after_four_of_nine_tasks() -> None:
    learner = Den(lenet, "fc", expand=10, split=0)
    for number in range(10):
        names = tuple(f"{number}.{i}" for i in range(10))
        learner.begin(SeenTask(number, f"t{number}", names, 10 * number))
        if number in (2, 4, 6, 8):
            learner.growth.grow(learner.model, {s.name: 10 for s in learner.growth.spaces.growing})
        learner.end(lambda: iter(()))
    assert learner.capacity().percent == pytest.approx(181, abs=1)


def test_connections_that_no_task_uses_are_not_counted() -> None:
    """A copy and the unit in whose place it is never meet."""
    learner = made(expand=0, split=2)
    learn(learner, 0)
    learn(learner, 1)
    # conv1 4 + 2, conv2 5 + 2, fc1 6 + 2 units. Between copies and what stays: all but (2 originals x 2 copies) twice.
    used = [6 * 1 * 9, (6 * 7 - 2 * 2 * 2) * 9, (7 * 8 - 2 * 2 * 2) * 4]
    assert [learner.used(site) for site in learner.layers()] == used
    plain = sum(p.numel() for p in Tiny().parameters())
    grown = sum(used) - (4 * 9 + 20 * 9 + 120) + (6 + 7 + 8) - (4 + 5 + 6)
    assert learner.capacity().parameters == plain + grown + 2 * 2 * (4 + 5)  # and each task's normalisation
    assert learner.capacity().network == plain
    assert learner.capacity().bytes > 4 * (sum(used) + 21)


# -- networks and options ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: rkr.networks.lenet(classes=9), lambda: rkr.networks.resnet32(9)])
def test_it_learns_on_the_paper_s_networks(make: Callable[[], nn.Module]) -> None:
    learner = made(make, drift_threshold=1e-6, expand=1, split=1, l1=1e-4)
    learn(learner, 0, steps=1)
    learn(learner, 1, steps=1)
    notes = learner.notes()
    assert set(notes["added"].values()) == {1}
    assert set(notes["copied"].values()) <= {0, 1}
    assert sum(notes["copied"].values()) > 0
    assert answers(learner, 0).shape == answers(learner, 1).shape == (10, CLASSES)
    assert bool(torch.isfinite(answers(learner, 1)).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"l1": -1}, "l1 must be at least 0, not -1"),
        ({"strength": float("nan")}, "strength must be at least 0"),
        ({"expand": 2.5}, "expand must be a whole number of units, or a share below 1, not 2.5"),
        ({"split": -1}, "split must be at least 0"),
        ({"select_share": 0.5, "split_share": 0.3}, "must be above 0 and leave a rest"),
        ({"expand_share": 0.0}, "must be above 0 and leave a rest"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rkr.UsageError, match=message):
        Den(Tiny, "fc", **options)

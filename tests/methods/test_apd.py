"""APD: decomposed weights, the gradient of its loss, what is cut, shared, counted and kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.learning import double_noise as batch
from helpers.learning import seen_tasks, small_double_cnn
from safetensors.torch import load_file
from sklearn.cluster import KMeans
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, Optimizer

import rkr
from rkr.errors import UsageError
from rkr.methods import METHODS
from rkr.methods.apd import Apd, cut, k_means, name_at, packed, split, unpacked
from rkr.methods.learner import SeenTask

CLASSES = (3, 2, 4, 2, 3)
LAYERS = ("conv1", "conv2", "fc1")
OPTIMIZERS = (lambda groups: SGD(groups, lr=1e-4, momentum=0.9), lambda groups: Adam(groups, lr=1e-3))


def make() -> nn.Module:
    return small_double_cnn(classes=14)


def task(number: int) -> SeenTask:
    return seen_tasks(CLASSES)[number]


def apd(**options: Any) -> Apd:
    learner = METHODS["apd"].build(make, "fc", **options)
    assert isinstance(learner, Apd)
    return learner


def step(learner: Apd, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """As the engine does it."""
    loss = learner.loss(x, y).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    learner.before_step(optimizer)
    optimizer.step()
    learner.after_step()


def learn(learner: Apd, number: int, steps: int = 3, lr: float = 0.02) -> None:
    seen = task(number)
    learner.begin(seen)
    optimizer = SGD(learner.groups(), lr=lr, momentum=0.9, weight_decay=5e-4)
    learner.train()
    for i in range(steps):
        step(learner, optimizer, *batch(seen, i % 2))
    optimizer.zero_grad(set_to_none=True)
    learner.eval()
    torch.manual_seed(number)
    learner.end(lambda: iter([batch(seen)]))


def own(learner: Apd, number: int, name: str) -> dict[str, Tensor]:
    """A task's tensors of one name, by layer."""
    state = learner.model.tasks[f"t{number}"]
    return {site.path: site.tensor(state, name) for site in learner.layers()}


@torch.no_grad()
def scatter(learner: Apd, scale: float = 0.1) -> None:
    """Move everything that a step can move."""
    for group in learner.groups():
        for p in group["params"]:
            p.add_(scale * torch.randn_like(p))


def weights(learner: Apd, number: int) -> dict[str, Tensor]:
    """θ by layer, as the layers compute with it."""
    state = learner.model.tasks[f"t{number}"]
    return {site.path: learner.decomposition.weight(site, state).detach().clone() for site in learner.layers()}


# ---------------------------------------------------------------------------------------------------------
# Weights


@pytest.mark.parametrize("grouped", [False, True])
def test_answers_are_those_of_a_plain_network_with_the_sum_of_all_parts(grouped: bool) -> None:
    torch.manual_seed(0)
    learner = apd(consolidate=2 if grouped else 0, clusters=1, tolerance=0.05, l1=1e-3)
    for number in range(2):
        learn(learner, number, steps=6)
    learner.begin(task(2))
    scatter(learner)
    assert [layer for layer in LAYERS if f"{layer}/0" in learner.local._buffers] == (list(LAYERS) if grouped else [])
    learner.eval()
    x, _ = batch(task(0))
    for number in range(3):
        state = learner.model.tasks[f"t{number}"]
        plain = make().eval()
        tensors = {key: state.get(key) for key in plain.state_dict()}  # normalisation, biases
        for layer in LAYERS:
            sigma = learner.model.network.get_submodule(layer)._parameters["weight"]
            v, tau = own(learner, number, "v")[layer], own(learner, number, "tau")[layer]
            assert v.shape == sigma.shape[:1]
            theta = sigma * torch.sigmoid(v).reshape([-1] + [1] * (sigma.dim() - 1)) + tau
            if grouped and number < 2:
                shared = learner.local.get_buffer(f"{layer}/0")
                assert shared.count_nonzero() > 0
                theta = theta + shared
            tensors[f"{layer}.weight"] = theta
        head = plain.fc  # its own head is replaced below
        plain.fc = nn.Linear(head.in_features, CLASSES[number]).double()
        tensors |= {"fc.weight": state.get("head.weight"), "fc.bias": state.get("head.bias")}
        assert all(value is not None for value in tensors.values())
        torch.testing.assert_close(learner.predict(x, number), functional_call(plain, tensors, x))


@pytest.mark.parametrize("init", ["zero", "sigma"])
def test_where_tasks_start(init: str) -> None:
    """The first as the plain network; others at τ = 0 or σ, a mask of 1/2, biases and normalisation of the last one."""
    torch.manual_seed(0)
    learner = apd(init=init, consolidate=0)
    torch.manual_seed(0)
    plain = make()
    learner.begin(task(0))
    for layer, theta in weights(learner, 0).items():
        torch.testing.assert_close(theta, plain.get_submodule(layer).weight)
        assert torch.equal(own(learner, 0, "bias")[layer], plain.get_submodule(layer).bias)
    learner = apd(init=init, consolidate=0)
    learn(learner, 0)
    learner.begin(task(1))
    old, new = (learner.model.tasks[name] for name in ("t0", "t1"))
    for site in learner.layers():
        wanted = site.weight if init == "sigma" else torch.zeros_like(site.weight)
        assert torch.equal(site.tensor(new, "tau"), wanted)
        assert site.tensor(new, "v").count_nonzero() == 0
        assert site.tensor(old, "v").count_nonzero() > 0
        assert torch.equal(site.tensor(new, "bias"), site.tensor(old, "bias"))
    for key in ("bn1.weight", "bn2.bias", "bn2.running_mean", "bn1.running_var"):
        assert torch.equal(new.get(key), old.get(key))  # type: ignore[arg-type]
    assert not torch.equal(new.get("bn1.running_var"), torch.ones(16).double())  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------
# Loss


def written_out(
    learner: Apd, x: Tensor, y: Tensor, start: dict[tuple[int, str], Tensor], l2: dict[str, float]
) -> Tensor:
    """The complete loss by autograd, with θ_i* = `start`."""
    current = learner.task.number
    loss = F.cross_entropy(learner.model(x), y - learner.task.start)
    for site in learner.layers():
        for number in range(current + 1):
            loss = loss + learner.l1 * own(learner, number, "tau")[site.path].abs().sum()
        for number in range(current):
            theta = learner.decomposition.weight(site, learner.model.tasks[f"t{number}"])
            loss = loss + l2[site.path] * 0.5 * (theta - start[number, site.path]).square().sum()
    return loss


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam"])
def test_gradients_are_those_of_the_written_out_loss(optimizer: Any, limited: bool) -> None:
    torch.manual_seed(0)
    learner = apd(l1=3e-3, l2=70.0, consolidate=2, clusters=1, tolerance=0.02)  # the first two share something
    for number in range(3):
        learn(learner, number)
    learner.begin(task(3))
    start = {(n, layer): theta for n in range(3) for layer, theta in weights(learner, n).items()}
    scatter(learner)
    made = optimizer(learner.groups())
    if limited:
        made.param_groups[0]["lr"] = 0.5
    strengths = {site.path: float(learner.strength(site, made)) for site in learner.layers()}
    assert all((value < 70) == (limited and isinstance(made, SGD)) for value in strengths.values())
    learner.train()
    statistics = {k: v.clone() for k, v in learner.state_dict().items() if "running" in k or "tracked" in k}
    learner.loss(*batch(task(3))).loss.backward()
    learner.before_step(made)
    trained = [p for group in made.param_groups for p in group["params"]]
    found = [None if p.grad is None else p.grad.clone() for p in trained]
    assert all(g is not None for g in found)

    learner.load_state_dict({**learner.state_dict(), **statistics})
    for p in trained:
        p.requires_grad_(True)
        p.grad = None
    written_out(learner, *batch(task(3)), start, strengths).backward()
    for p, gradient in zip(trained, found, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-9, atol=1e-10)
    moving = [own(learner, n, name)[layer] for n in range(3) for name in ("v", "tau") for layer in LAYERS]
    assert all(p.grad is not None and p.grad.count_nonzero() > 0 for p in moving)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam"])
def test_nothing_is_held_back_right_at_the_start_of_a_task(optimizer: Any) -> None:
    torch.manual_seed(0)
    learner = apd(consolidate=2, clusters=1, tolerance=0.02)
    for number in range(2):
        learn(learner, number)
    learner.begin(task(2))
    made = optimizer(learner.groups())
    learner.before_step(made)  # without a loss: the penalties alone
    for site in learner.layers():
        assert site.weight.grad is not None
        assert site.weight.grad.count_nonzero() == 0
        for number in range(2):
            tau, v = own(learner, number, "tau")[site.path], own(learner, number, "v")[site.path]
            assert v.grad is not None
            assert v.grad.count_nonzero() == 0
            assert torch.equal(tau.grad, learner.l1 * tau.sign())  # type: ignore[arg-type]


def test_what_is_trained_and_what_decays() -> None:
    torch.manual_seed(0)
    learner = apd()
    sigmas = {id(learner.model.network.get_submodule(layer)._parameters["weight"]) for layer in LAYERS}
    for number in range(3):
        learner.begin(task(number))
        shared, new, rest = learner.groups()
        assert {id(p) for p in shared["params"]} == sigmas
        assert ("weight_decay" in shared) is (number > 0)
        assert {id(p) for p in new["params"]} == {id(own(learner, number, n)[k]) for n in ("v", "tau") for k in LAYERS}
        assert "weight_decay" not in new
        assert rest["weight_decay"] == 0
        state = learner.model.tasks[f"t{number}"]
        others = {key for key, p in state.named_parameters() if id(p) in {id(q) for q in rest["params"]}}
        norms = {f"{n}.{k}" for n in ("bn1", "bn2") for k in ("weight", "bias")}
        assert others == norms | {f"{layer}.bias" for layer in LAYERS} | {"head.weight", "head.bias"}
        held = {id(own(learner, i, n)[k]) for i in range(number) for n in ("v", "tau") for k in LAYERS}
        assert held == {id(p) for p in rest["params"]} - {id(p) for p in state.parameters()}
        trained = [id(p) for group in (shared, new, rest) for p in group["params"]]
        assert len(trained) == len(set(trained))
        optimizer = SGD(learner.groups(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        before = {key: value.clone() for key, value in learner.state_dict().items()}
        learner.train()
        for i in range(3):
            step(learner, optimizer, *batch(task(number), i))
        after = learner.state_dict()
        moved = {key.removeprefix("model.") for key in before if not torch.equal(before[key], after[key])}
        named = {f"tasks.t{i}.{k}.{n}" for i in range(number + 1) for n in ("v", "tau") for k in LAYERS}
        named |= {f"network.{layer}.weight" for layer in LAYERS}
        # Before batch normalisation the gradient of a bias is 0 but for rounding, which some processors do not have.
        still = {f"tasks.t{number}.{layer}.bias" for layer in ("conv1", "conv2")}
        assert moved | still == named | {f"tasks.t{number}.{key}" for key in state.tensors()}
        learner.end(lambda: iter([]))


def test_steepness_bounds_the_curvature_of_what_holds_weights_in_place() -> None:
    torch.manual_seed(0)
    old, units, inputs = 3, 2, 4
    learner = METHODS["apd"].build(lambda: nn.Sequential(nn.Linear(inputs, units), nn.Linear(units, 3)).double(), "1")
    assert isinstance(learner, Apd)
    for number in range(old + 1):
        learner.begin(SeenTask(number, f"t{number}", ("a", "b"), 2 * number))
    (site,) = learner.layers()
    with torch.no_grad():
        site.weight.copy_(torch.randn(units, inputs))
        for number in range(old):
            site.tensor(learner.model.tasks[f"t{number}"], "v").copy_(torch.randn(units))
    masks = [site.tensor(learner.model.tasks[f"t{n}"], "v") for n in range(old)]
    here = torch.cat([site.weight.flatten(), *masks, torch.zeros(old * units * inputs)]).detach().double()

    def held(z: Tensor) -> Tensor:
        sigma, v, tau = z.split([units * inputs, old * units, old * units * inputs])
        theta = sigma.view(1, units, inputs) * v.view(old, units, 1).sigmoid() + tau.view(old, units, inputs)
        return 0.5 * (theta - theta.detach()).square().sum()

    steepest = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(held, here)).max())
    learner.l2 = 1e9
    bound = 1 / (0.1 * float(learner.strength(site, SGD(learner.groups(), lr=0.1))))
    assert steepest <= bound <= 1.1 * steepest
    learner.l2 = 0.3
    assert float(learner.strength(site, SGD(learner.groups(), lr=0.1))) == pytest.approx(0.3)
    learner.l2 = 1e9
    assert float(learner.strength(site, Adam(learner.groups(), lr=0.1))) == 1e9


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_however_strong_sgd_comes_back_to_the_old_weights(momentum: float) -> None:
    torch.manual_seed(0)
    learner = apd(l1=0.0, l2=1e8, consolidate=0)
    for number in range(2):
        learn(learner, number)
    learner.begin(task(2))
    start = [weights(learner, number) for number in range(2)]
    with torch.no_grad():
        for site in learner.layers():
            site.weight.add_(torch.randn_like(site.weight))

    def distance() -> float:
        now = [weights(learner, number) for number in range(2)]
        return sum(float((a[k] - b[k]).square().sum()) for a, b in zip(now, start, strict=True) for k in LAYERS)

    far = distance()
    optimizer = SGD(learner.groups(), lr=0.1, momentum=momentum)
    for _ in range(150):
        optimizer.zero_grad(set_to_none=True)
        learner.before_step(optimizer)
        optimizer.step()
    assert distance() < 1e-4 * far


# ---------------------------------------------------------------------------------------------------------
# Zeros


def test_small_entries_are_cut_for_good() -> None:
    values = torch.tensor([-0.3, -0.1, -0.05, 0.0, 0.1, 0.10001, 2.0])
    assert cut(values, 0.1).tolist() == pytest.approx([-0.3, 0, 0, 0, 0, 0.10001, 2.0])
    torch.manual_seed(0)
    learner = apd(l1=0.05, consolidate=0)
    for number in range(2):
        learner.begin(task(number))
    scatter(learner)
    before = [{k: t.clone() for k, t in own(learner, n, "tau").items()} for n in range(2)]
    masks = [{k: t.clone() for k, t in own(learner, n, "v").items()} for n in range(2)]
    learner.end(lambda: iter([]))
    for number in range(2):
        for layer, tau in own(learner, number, "tau").items():
            assert torch.equal(tau, torch.where(before[number][layer].abs() > 0.05, before[number][layer], 0))
            assert torch.equal(own(learner, number, "v")[layer], masks[number][layer])  # masks are not cut
    assert learner.notes()["tau"] == [sum(int((t.abs() > 0.05).sum()) for t in each.values()) for each in before]
    assert list(learner.anchors.buffers()) == []


@pytest.mark.parametrize(("name", "steps"), [("sgd", 1500), ("adam", 600)])
def test_what_no_task_needs_comes_to_exact_zeros(name: str, steps: int) -> None:
    """From τ = σ, far above λ1, with both optimisers; λ1 itself is 4e-4."""
    torch.manual_seed(0)
    learner = apd(init="sigma", consolidate=0)
    learner.begin(task(0))
    taus = own(learner, 0, "tau").values()
    assert min(float((t.abs() > 10 * learner.l1).double().mean()) for t in taus) > 0.9
    groups = learner.groups()
    optimizer: Optimizer = SGD(groups, lr=0.05, momentum=0.9) if name == "sgd" else Adam(groups, lr=1e-3)
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] *= 1 if name == "sgd" or i < 400 else 0.98
        optimizer.zero_grad(set_to_none=True)
        learner.before_step(optimizer)
        optimizer.step()
    assert all(t.count_nonzero() == t.numel() for t in taus)  # near 0, not at it
    learner.end(lambda: iter([]))
    assert [int(t.count_nonzero()) for t in taus] == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------
# Groups of tasks


def test_split_by_hand() -> None:
    members = torch.tensor(
        [[0.500, 0.100, 0.0, -0.30, 0.02], [0.508, 0.130, 0.0, -0.31, 0.0], [0.502, 0.110, 0.0, -0.305, 0.0]]
    )
    shared, left = split(members, 0.0101)
    assert shared.tolist() == pytest.approx([0.504, 0, 0, -0.305, 0])
    wanted = torch.zeros(3, 5)
    wanted[:, 1], wanted[:, 4] = members[:, 1], members[:, 4]  # they differ by 0.03 and 0.02
    assert torch.equal(left, wanted)


def test_k_means_is_lloyd_s() -> None:
    torch.manual_seed(0)
    for count in (2, 3, 5):
        points = torch.randn(12, 40, dtype=torch.float64)
        reference = KMeans(count, init=points[:count].numpy(), n_init=1, max_iter=100, tol=0).fit(points.numpy())
        assert k_means(points, points[:count]).tolist() == reference.labels_.tolist()
    points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    assert k_means(points, torch.tensor([[0.0], [1.0]])).tolist() == [0, 0, 1, 1]
    assert k_means(points, torch.tensor([[99.0], [0.0], [9.0]])).tolist() == [1, 1, 2, 2]  # the first stays empty


def five_tasks(**options: Any) -> Apd:
    """Tasks 0, 2, 4 have one τ, tasks 1, 3 another, each up to 0.004 and with some entries of their own."""
    torch.manual_seed(0)
    learner = apd(**options)
    for number in range(5):
        learner.begin(task(number))
    with torch.no_grad():
        for site in learner.layers():
            size = site.weight.shape
            common = [torch.randn(size).double() * (torch.rand(size) < 0.3) for _ in range(2)]
            for number in range(5):
                tau = own(learner, number, "tau")[site.path]
                tau.copy_(common[number % 2])
                tau[tau != 0] += (torch.rand(int(tau.count_nonzero())).double() - 0.5) * 0.008
                tau.view(-1)[number] = 3.0 + number
    return learner


def test_consolidation_shares_what_a_cluster_has_in_common() -> None:
    learner = five_tasks(l1=0.0, consolidate=5, clusters=2, tolerance=1e-2)
    before = [weights(learner, number) for number in range(5)]
    taus = [{k: t.clone() for k, t in own(learner, n, "tau").items()} for n in range(5)]
    full = learner.capacity()
    learner.end(lambda: iter([]))
    for layer in LAYERS:
        group = learner.local.get_buffer(f"{layer}/group").tolist()
        assert group[0] == group[2] == group[4] != group[1] == group[3]
        for members in ((0, 2, 4), (1, 3)):
            values = torch.stack([taus[n][layer] for n in members])
            shared = learner.local.get_buffer(f"{layer}/{group[members[0]]}")
            alike = values.amax(0) - values.amin(0) <= 1e-2
            assert not alike.flatten()[list(members)].any()  # each has an entry of its own there
            assert torch.equal(shared, torch.where(alike, (values.amax(0) + values.amin(0)) / 2, 0))
            for n in members:
                assert torch.equal(own(learner, n, "tau")[layer], torch.where(alike, 0, taus[n][layer]))
    moved = [(weights(learner, n)[k] - before[n][k]).abs().max() for n in range(5) for k in LAYERS]
    assert 0 < max(moved) <= 1e-2 / 2 + 1e-15
    assert sum(learner.notes()["tau"]) < 0.01 * sum(int(t.count_nonzero()) for each in taus for t in each.values())
    assert learner.capacity().parameters < full.parameters - 0.5 * sum(int(t.count_nonzero()) for t in taus[0].values())
    assert learner.capacity().bytes < full.bytes


def test_what_is_shared_is_cut_as_well() -> None:
    """Of 0.006 and twice 0 the middle is not above λ1 = 0.004, of 0.009 and twice 0 it is."""
    learner = five_tasks(l1=4e-3, consolidate=5)
    with torch.no_grad():
        for number in range(5):
            own(learner, number, "tau")["fc1"].view(-1)[50:52] = 0
        own(learner, 2, "tau")["fc1"].view(-1)[50:52] = torch.tensor([0.006, 0.009])
    before = [weights(learner, number) for number in range(5)]
    learner.end(lambda: iter([]))
    group = learner.local.get_buffer("fc1/group").tolist()
    shared = learner.local.get_buffer(f"fc1/{group[2]}").view(-1)[50:52]
    assert shared.tolist() == pytest.approx([0, 0.0045])
    for number in (0, 2, 4):
        assert own(learner, number, "tau")["fc1"].view(-1)[50:52].tolist() == [0, 0]
    moved = [(weights(learner, n)[k] - before[n][k]).abs().max() for n in range(5) for k in LAYERS]
    assert max(moved) <= 4e-3 + 1e-2 / 2


def test_regrouping_starts_from_whole_parts_and_old_groups() -> None:
    """Regrouped at once, nothing changes; a task that is alone in its cluster takes back what it shared."""
    learner = five_tasks(l1=0.0)
    learner.end(lambda: iter([]))
    before = [weights(learner, number) for number in range(5)]
    state = copy.deepcopy(learner.state_dict())
    torch.manual_seed(9)
    with torch.no_grad():
        learner.regroup()
    for number in range(5):
        for layer, theta in weights(learner, number).items():
            torch.testing.assert_close(theta, before[number][layer], rtol=0, atol=1e-15)
    groups = [key for key in state if key.endswith("/group")]
    assert len(groups) == 3
    for key in groups:  # numbers may change, not who is together
        old, new = state[key], learner.state_dict()[key]
        assert torch.equal(old[:, None] == old, new[:, None] == new)
    learner.clusters = 5  # as many as tasks
    with torch.no_grad():
        for site in learner.layers():  # far apart, so that every one is alone
            site.tensor(learner.model.tasks["t0"], "tau").add_(100)
            site.tensor(learner.model.tasks["t1"], "tau").sub_(100)
        before = [weights(learner, number) for number in range(5)]
        learner.regroup()
    for site in learner.layers():
        for number in (0, 1):
            assert learner.decomposition.local_of(site, learner.model.tasks[f"t{number}"]) is None
            torch.testing.assert_close(weights(learner, number)[site.path], before[number][site.path])


@pytest.mark.parametrize(("every", "tasks", "groups"), [(0, 4, None), (2, 3, 2), (2, 4, 4), (3, 5, 3)])
def test_when_and_into_how_many_groups(every: int, tasks: int, groups: int | None) -> None:
    torch.manual_seed(0)
    learner = apd(consolidate=every, l1=0.0)
    for number in range(tasks):
        learner.begin(task(number))
        scatter(learner, 1.0)
        learner.end(lambda: iter([]))
    found = {len(learner.local.get_buffer(f"{layer}/group")) for layer in LAYERS} if every else set()
    assert found == ({groups} if groups else set())
    centres = learner._centres(torch.randn(10, 3), torch.tensor([0, 2, 0])) if every == 2 else None
    if centres is not None:
        assert len(centres) == 10  # 2 for every 2 tasks


# ---------------------------------------------------------------------------------------------------------
# Cost, files, state


def numbered(learner: Apd, values: int) -> None:
    """Set so many entries of all τ to 1, from the first task on."""
    with torch.no_grad():
        for state in learner.model.tasks.values():
            for site in learner.layers():
                tau = site.tensor(state, "tau")
                fill = min(values, tau.numel())
                tau.zero_().view(-1)[:fill] = 1
                values -= fill
    assert values == 0


def test_capacity_counts_exactly_what_is_not_zero() -> None:
    torch.manual_seed(0)
    learner = apd(l1=0.0, consolidate=0)
    plain = make()
    network = sum(p.numel() for p in plain.parameters())
    learner.begin(task(0))
    with torch.no_grad():
        for p in learner.parameters():
            p.fill_(1)
    numbered(learner, 0)
    units = sum(plain.get_submodule(layer).weight.shape[0] for layer in LAYERS)
    assert learner.capacity().network == network
    assert learner.capacity().parameters == network + units  # the network and a mask
    learner.begin(task(1))
    with torch.no_grad():
        for p in learner.model.tasks["t1"].parameters():
            p.fill_(1)
    norms = sum(p.numel() for m in (plain.bn1, plain.bn2) for p in m.parameters())
    both = network + units + (units + units + norms)  # its mask, biases, normalisation; heads lie within
    for values in (0, 1, 77, 1234):
        numbered(learner, values)
        assert learner.capacity().parameters == both + values
    with torch.no_grad():
        learner.layers()[0].weight.view(-1)[:5] = 0
        own(learner, 0, "v")["fc1"][:3] = 0
    assert learner.capacity().parameters == both + 1234 - 8
    shared = torch.zeros(16, 1, 3, 3).double()
    shared[2:4] = 0.5
    learner.local.register_buffer("conv1/0", shared)
    learner.local.register_buffer("conv1/group", torch.tensor([0, 0]))
    assert learner.capacity().parameters == both + 1234 - 8 + 18
    assert learner.notes() == {"tau": [1234, 0], "local": 18}


def test_the_paper_s_135_percent_on_lenet() -> None:
    """What sparse parts may have, all else of ten tasks counted: 31 % of a network in all, or 3.1 % each."""
    torch.manual_seed(0)
    learner = METHODS["apd"].build(lambda: rkr.networks.lenet(classes=100), "fc")
    assert isinstance(learner, Apd)
    for number in range(10):
        learner.begin(SeenTask(number, f"t{number}", tuple(map(str, range(10))), 10 * number))
        with torch.no_grad():
            for p in learner.model.tasks[f"t{number}"].parameters():
                p.fill_(1)
    units, norms = 20 + 50 + 800 + 500, 2 * (20 + 50)
    numbered(learner, 0)
    base = learner.capacity()
    assert base.network == 3_038_110
    assert base.parameters == 3_038_110 + 10 * units + 9 * (units + norms)
    values = round(1.35 * 3_038_110) - base.parameters
    numbered(learner, values)
    assert learner.capacity().percent == pytest.approx(135, abs=1e-4)
    sigma = 3 * 20 * 25 + 20 * 50 * 25 + 3200 * 800 + 800 * 500
    bits = sum(-(-n // 8) for n in (3 * 20 * 25, 20 * 50 * 25, 3200 * 800, 800 * 500))
    statistics = 2 * 70 * 4 + 2 * 8
    network = 3_038_110 * 4 + statistics  # with its own head, biases and normalisation, which no task uses
    each = 4 * (2 * units + norms + 500 * 10 + 10) + statistics + bits
    assert learner.capacity().bytes == network + 10 * each + 4 * values
    assert sigma == 2_986_500


def test_packed_and_back() -> None:
    torch.manual_seed(0)
    for shape in ((7,), (8,), (3, 5, 2), (0,), (1, 1)):
        dense = torch.randn(shape) * (torch.rand(shape) < 0.3)
        bits, values = packed(dense)
        assert bits.numel() == -(-dense.numel() // 8)
        assert values.numel() == dense.count_nonzero()
        assert torch.equal(unpacked(bits, values, dense.shape), dense)
    assert packed(torch.tensor([0, 1.0, 0, 0, 0, 0, 0, 2.0, 3.0]))[0].tolist() == [130, 1]


def test_export_has_all_it_takes_in_the_bytes_that_are_counted(tmp_path: Path) -> None:
    learner = five_tasks()
    learner.end(lambda: iter([]))
    learner.eval().export(tmp_path)
    found = load_file(tmp_path / "learner.safetensors")
    assert sum(t.nbytes for t in found.values()) == learner.capacity().bytes
    state = learner.state_dict()
    assert not [key for key in found if key.startswith("anchors")]
    sparse = {key.removesuffix(".bits") for key in found if key.endswith(".bits")}
    assert {key for key in state if key.endswith(".tau")} < sparse
    torch.manual_seed(5)
    other = apd()
    for number in range(5):
        other.begin(task(number))
    other.restore(tmp_path)
    assert set(other.state_dict()) == set(state)
    other.eval()
    x, _ = batch(task(0))
    for number in range(5):
        assert torch.equal(other.predict(x, number), learner.predict(x, number))


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_going_on_after_an_interruption(name: str, at: int) -> None:
    """Amid the task with number `at`, groups having been made after every second: bit for bit the same."""

    def optimizer_of(learner: Apd) -> Optimizer:
        groups = learner.groups()
        return SGD(groups, lr=0.05, momentum=0.9, weight_decay=5e-4) if name == "sgd" else Adam(groups, lr=1e-3)

    torch.manual_seed(0)
    options: Any = {"consolidate": 2, "clusters": 1, "tolerance": 0.05, "l1": 1e-3}
    learner = apd(**options)
    for number in range(at):
        learn(learner, number)
    between = copy.deepcopy(learner.state_dict())
    assert any(key.startswith("local.") for key in between)
    assert not any(key.startswith("anchors.") for key in between)
    learner.begin(task(at))
    optimizer = optimizer_of(learner)
    learner.train()
    for i in range(3):
        step(learner, optimizer, *batch(task(at), i))
    state, momentum = copy.deepcopy(learner.state_dict()), copy.deepcopy(optimizer.state_dict())

    torch.manual_seed(7)
    other = apd(**options)
    for number in range(at):
        other.begin(task(number))
    other.load_state_dict(between)  # what is held of earlier tasks is not there any more
    assert set(other.state_dict()) == set(between)
    other.begin(task(at))
    assert set(other.state_dict()) == set(state)
    other.load_state_dict(state)
    again = optimizer_of(other)
    again.load_state_dict(momentum)
    other.train()
    for each, mover in ((learner, optimizer), (other, again)):
        for i in range(3):
            step(each, mover, *batch(task(at), i))
        each.eval()
        torch.manual_seed(1)
        each.end(lambda: iter([]))
    for key, value in learner.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    x, _ = batch(task(0))
    for number in range(at + 1):
        assert torch.equal(other.predict(x, number), learner.predict(x, number))


@pytest.mark.parametrize("network", ["lenet", "resnet32"])
def test_one_step_on_real_networks(network: str) -> None:
    torch.manual_seed(0)
    build = getattr(rkr.networks, network)
    learner = METHODS["apd"].build(lambda: build(classes=10).to(memory_format=torch.channels_last), "fc", consolidate=2)
    assert isinstance(learner, Apd)
    x = torch.randn(4, 3, 32, 32)
    for number in range(3):
        learner.begin(SeenTask(number, f"t{number}", ("a", "b"), 2 * number))
        optimizer = SGD(learner.groups(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        learner.train()
        before = learner.layers()[0].weight.clone()
        step(learner, optimizer, x, torch.tensor([0, 1, 1, 0]) + 2 * number)
        assert not torch.equal(learner.layers()[0].weight, before)
        learner.eval()
        learner.end(lambda: iter([]))
        assert [learner.predict(x, n).shape for n in range(number + 1)] == [(4, 2)] * (number + 1)
        assert all(bool(learner.predict(x, n).isfinite().all()) for n in range(number + 1))
    assert {name_at(site, "group") for site in learner.layers()} <= set(learner.local._buffers)
    assert learner.capacity().percent > 100


@pytest.mark.parametrize(
    "options",
    [{"l1": -1.0}, {"l2": -1.0}, {"tolerance": -0.1}, {"consolidate": -1}, {"clusters": 0}],
)
def test_bad_numbers_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"clusters at least 1.*{next(iter(options.values()))}"):
        apd(**options)


def test_parts_of_a_task_are_refused() -> None:
    with pytest.raises(UsageError, match=r"consolidate must be a whole number, not 2\.5"):
        apd(consolidate=2.5)


def test_bad_start_is_named() -> None:
    with pytest.raises(UsageError, match="init must be 'zero' or 'sigma', not 'previous'"):
        apd(init="previous")

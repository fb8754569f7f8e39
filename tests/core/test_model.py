"""The rectified model: the user's example, no forgetting bit by bit, parameters, starts, caches, merging, bad use.

What kernels compute is tested with the kernels, what files hold with the files. Here a model is used as a user would
use it, carelessly at times, and every answer of an earlier task must keep every bit.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import rkr
from rkr.networks import VisualEncoder, lenet

# ---------------------------------------------------------------------------------------------------------
# Networks: each has a head `fc`, and takes what `INPUTS` says


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(16, 12)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.fc2(self.drop(F.relu(self.fc1(x))))))


class ConvNet(nn.Module):
    """Two convolutions, each with what `norm` makes after it; the second one can be exchanged."""

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, second: nn.Module | None = None, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = norm(8)
        self.conv2 = second if second is not None else nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False)
        self.bn2 = norm(8)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.drop(x.mean(dim=(2, 3))))


class WideConv(nn.Module):
    """Wide enough for the factored gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.bn = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.conv2(F.relu(self.conv1(x))))).mean(dim=(2, 3)))


class Words(nn.Module):
    """Embedding, LSTM and a buffer that training moves: none of it can be rectified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.project = nn.Linear(8, 8)
        self.counter = Counter()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(x))
        return self.fc(self.counter(F.relu(self.project(x[:, -1]))))


class Counter(nn.Module):
    """Subtracts a running mean of its own, as home-made normalisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def spectral(second: bool = False) -> ConvNet:
    wrap = nn.utils.spectral_norm if second else parametrizations.spectral_norm
    return ConvNet(second=wrap(nn.Conv2d(8, 8, 3, padding=1)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dropout": (lambda: Mlp(0.3), {}),
    "batch_norm": (ConvNet, {}),
    "batch_norm_average": (lambda: ConvNet(lambda n: nn.BatchNorm2d(n, momentum=None)), {}),
    "batch_norm_no_statistics": (lambda: ConvNet(lambda n: nn.BatchNorm2d(n, track_running_stats=False)), {}),
    "batch_norm_no_affine": (lambda: ConvNet(lambda n: nn.BatchNorm2d(n, affine=False)), {}),
    "bn_per_task": (ConvNet, {"bn": "per_task"}),
    "bn_stats": (ConvNet, {"bn": "stats"}),
    "bn_affine": (ConvNet, {"bn": "affine"}),
    "bn_frozen": (ConvNet, {"bn": "frozen"}),
    "rectification_only": (ConvNet, {"scale_outputs": False}),
    "scaling_only": (ConvNet, {"rectify_weights": False}),
    "lite": (ConvNet, {"rectify_weights": "conv", "scale_outputs": "linear"}),
    "reshape": (ConvNet, {"layout": "reshape"}),
    "formula": (ConvNet, {"fast": False}),
    "group_norm": (lambda: ConvNet(lambda n: nn.GroupNorm(2, n)), {"norm": "per_task"}),
    "group_norm_shared": (lambda: ConvNet(lambda n: nn.GroupNorm(2, n)), {}),
    "layer_norm": (lambda: ConvNet(lambda n: nn.LayerNorm([8, 8, 8]), nn.Conv2d(8, 8, 1)), {"norm": "per_task"}),
    "instance_norm": (lambda: ConvNet(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)), {}),
    "instance_norm_plain": (lambda: ConvNet(nn.InstanceNorm2d), {}),
    "spectral_norm": (spectral, {}),
    "spectral_norm_hook": (lambda: spectral(True), {}),
    "weight_norm": (lambda: ConvNet(second=parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))), {}),
    "transposed": (lambda: ConvNet(second=nn.ConvTranspose2d(8, 8, 3, padding=1)), {}),
    "factored": (WideConv, {"rank": 1}),
    "words": (Words, {}),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inputs(network: nn.Module, batch: int = 8) -> Tensor:
    if isinstance(network, Words):
        return torch.randint(0, 11, (batch, 5))
    return torch.randn(batch, 6) if isinstance(network, Mlp) else torch.randn(batch, 3, 8, 8)


def logits(model: rkr.RectifiedModel, name: str, x: Tensor) -> Tensor:
    """What a task answers, in evaluation; the task in use and the mode stay as they were."""
    mode, current = model.training, model.task
    model.eval()
    model.set_task(name)
    with torch.no_grad():
        answer = model(x)
    if current is not None:
        model.set_task(current)
    model.train(mode)
    return answer.clone()


def features(model: rkr.RectifiedModel, name: str, x: Tensor) -> Tensor:
    """What the head of a task sees."""
    seen: list[Tensor] = []
    hook = model.network.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    logits(model, name, x)
    hook.remove()
    return seen[0]


def train(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, classes: int, steps: int = 3) -> list[float]:
    """A plain training loop in train mode; labels are the samples' numbers."""
    y = torch.arange(len(x)) % classes
    model.train()
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def learn(model: rkr.RectifiedModel, name: str, x: Tensor, classes: int = 3, steps: int = 3, **options: Any) -> None:
    """Add a task and train it."""
    model.add_task(name, classes=classes, **options)
    optimiser = torch.optim.SGD(model.task_parameters(groups=True), lr=0.1, momentum=0.9, weight_decay=0.01)
    train(model, optimiser, x, classes, steps)


def trained(network: nn.Module, tasks: str = "ab", **options: Any) -> rkr.RectifiedModel:
    """A model that has learned a task for each letter, in evaluation mode."""
    model = rkr.rectify(network, head="fc", **options)
    for name in tasks:
        learn(model, name, inputs(network))
    return model.eval()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names in the same order, same bits."""
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def plain_classes(module: nn.Module) -> bool:
    return all(
        "Rectified" not in type(m).__name__ and not type(m).__module__.startswith("rkr.core") and not hasattr(m, "_rkr")
        for m in module.modules()
    )


# ---------------------------------------------------------------------------------------------------------
# The example of the README, line by line


def test_example(tmp_path: Path) -> None:
    network = ConvNet()
    keys = list(network.state_dict())
    model = rkr.rectify(network, rank=2, head="fc")
    assert model.network is network

    x = torch.randn(8, 3, 8, 8)
    base = snapshot(network)
    model.add_task("animals", classes=10)
    optimiser = torch.optim.SGD(model.task_parameters(), lr=0.1)
    losses = train(model, optimiser, x, 10, steps=10)
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(network.state_dict()["conv1.weight"], base["conv1.weight"])  # the base is trained too

    model.add_task("vehicles", classes=7)
    assert model.base_frozen
    assert not any(p.requires_grad for p in network.parameters())
    base = snapshot(network)
    optimiser = torch.optim.SGD(model.task_parameters(), lr=0.1)
    losses = train(model, optimiser, x, 7, steps=30)
    assert losses[-1] < 0.9 * losses[0]
    assert same(snapshot(network), base)

    model.eval()
    model.set_task("animals")
    y = model(x)
    assert model.task == "animals"
    assert y.shape == (8, 10)
    model.set_task("vehicles")
    assert model(x).shape == (8, 7)

    with torch.no_grad():
        mixed = model(x, tasks=["animals", "vehicles"] * 4)
        vehicles = model(x)
    assert mixed.shape == (8, 10)
    torch.testing.assert_close(mixed[::2], y[::2].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed[1::2, :7], vehicles[1::2], rtol=1e-5, atol=1e-5)
    assert bool((mixed[1::2, 7:] == -torch.inf).all())

    model.save(tmp_path / "zoo")
    model = rkr.load(tmp_path / "zoo", ConvNet())
    assert list(model.tasks) == ["animals", "vehicles"]
    assert torch.equal(logits(model, "animals", x), y)
    assert torch.equal(logits(model, "vehicles", x), vehicles)

    model.save_task("vehicles", tmp_path / "vehicles.safetensors")
    model.remove_task("vehicles")
    assert list(model.tasks) == ["animals"]
    model.load_task(tmp_path / "vehicles.safetensors")
    assert model.task == "vehicles"
    assert torch.equal(logits(model, "vehicles", x), vehicles)

    plain = model.merged("animals")
    assert list(plain.state_dict()) == keys
    assert torch.equal(plain.eval()(x), y)
    text = str(model.cost())
    assert "animals" in text
    assert "vehicles" in text
    assert "%" in text


def test_network_without_head() -> None:
    """`head=None`: tasks take no classes, and the network's own output is the task's."""
    network = VisualEncoder(12, 10, 4)
    x = torch.randn(5, 12)
    model = rkr.rectify(network, rank=3)
    for name in ("apy", "awa"):
        model.add_task(name)
        optimiser = torch.optim.Adam(model.task_parameters(), lr=0.05)
        if name == "awa":
            first = logits_pair(model, "apy", x)
        for _ in range(5):
            optimiser.zero_grad()
            mu, logvar = model(x)
            (mu.square().sum() + logvar.square().sum()).backward()
            optimiser.step()
    assert all(map(torch.equal, first, logits_pair(model, "apy", x)))
    assert not torch.equal(first[0], logits_pair(model, "awa", x)[0])
    assert model.tasks["apy"].classes is None
    assert [tuple(t.shape) for t in model.merged("awa")(x)] == [(5, 4), (5, 4)]


def logits_pair(model: rkr.RectifiedModel, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    current = model.task
    model.set_task(name)
    with torch.no_grad():
        mu, logvar = model(x)
    model.set_task(current)
    return mu.clone(), logvar.clone()


# ---------------------------------------------------------------------------------------------------------
# No forgetting


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_forgetting(kind: str, tmp_path: Path) -> None:
    """After every step of a long life, earlier tasks answer with the same bits and the base is the same."""
    build, options = NETWORKS[kind]
    network = build()
    x = inputs(network)
    model = rkr.rectify(network, head="fc", **options)
    model.add_task("first", classes=4)
    shared = torch.optim.SGD(model.task_parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    train(model, shared, x, 4)
    known = {"first": logits(model, "first", x)}
    proof = {"first": model.fingerprint("first")}

    def check(model: rkr.RectifiedModel = model) -> None:
        for name, answer in known.items():
            assert torch.equal(logits(model, name, x), answer), f"{name} has forgotten"
            assert model.fingerprint(name) == proof[name]
        assert same(snapshot(model.network), base), "the base has changed"

    # Adding, and training with the optimiser of the first task, which still holds base and first task.
    model.add_task("second", classes=3)
    base = snapshot(network)
    check()
    shared.add_param_group({"params": list(model.task_parameters())})
    losses = train(model, shared, x, 3, steps=5)
    assert losses[-1] < losses[0]
    check()
    known["second"], proof["second"] = logits(model, "second", x), model.fingerprint("second")
    assert not torch.equal(known["second"][:, :3], known["first"][:, :3])

    # The other starts, other optimisers, gradients that are zeroed and not dropped.
    for name, init, optimiser_class in (("third", "random", torch.optim.Adam), ("fourth", "first", torch.optim.AdamW)):
        model.add_task(name, classes=5, init=init)
        check()
        optimiser = optimiser_class(model.parameters(), lr=0.01, weight_decay=0.1)
        optimiser.zero_grad(set_to_none=False)
        train(model, optimiser, x, 5)
        check()
        known[name], proof[name] = logits(model, name, x), model.fingerprint(name)

    # Switching in train mode without training, and mixed batches.
    for name in (*known, *known):
        model.set_task(name)
    model.eval()
    with torch.no_grad():
        model(x, tasks=["second", "first", "fourth", "third"] * 2)
        model(x, tasks=["third"] * 8)
    check()

    # Merging, copying, and what happens to copies.
    merged = model.merged("second")
    clone = copy.deepcopy(model)
    check(clone)
    train(merged, torch.optim.SGD(merged.parameters(), lr=0.1), x, 3)
    clone.set_task("first")
    train(clone, torch.optim.SGD(clone.task_parameters(), lr=0.1), x, 4)
    assert not torch.equal(logits(clone, "first", x), known["first"])
    del merged, clone
    check()

    # Files, removal, and a loaded model that learns on.
    model.save_task("second", tmp_path / "second.safetensors")
    model.remove_task("second")
    second = known.pop("second")
    check()
    model.load_task(tmp_path / "second.safetensors")
    known["second"] = second
    check()
    model.save(tmp_path / "zoo")
    loaded = rkr.load(tmp_path / "zoo", build())
    check(loaded)
    learn(loaded, "fifth", x)
    check(loaded)
    loaded.remove_task("first")
    del known["first"]
    learn(loaded, "sixth", x)
    check(loaded)


@pytest.mark.parametrize("kind", ["batch_norm", "dropout", "group_norm", "factored", "spectral_norm"])
def test_no_forgetting_over_dtypes_and_formats(kind: str) -> None:
    """Double and back, channels_last and back: nothing is rounded away, not even when a task is learned meanwhile."""
    build, options = NETWORKS[kind]
    model = trained(build(), "ab", **options)
    x = inputs(model.network)
    known = {name: logits(model, name, x) for name in "ab"}
    base = snapshot(model.network)

    model.double()
    assert logits(model, "a", x.double()).dtype == torch.float64
    learn(model, "c", x.double())
    model.float()
    assert all(torch.equal(logits(model, n, x), known[n]) for n in known)

    model.to(memory_format=torch.channels_last)
    seen = {name: logits(model, name, x) for name in "ab"}
    for name in known:
        torch.testing.assert_close(seen[name], known[name], rtol=1e-4, atol=1e-5)
    learn(model, "d", x)
    assert all(torch.equal(logits(model, n, x), seen[n]) for n in known)
    model.to(memory_format=torch.contiguous_format)
    assert all(torch.equal(logits(model, n, x), known[n]) for n in known)
    assert same(snapshot(model.network), base)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    ],
    ids=["sgd", "sgd-foreach", "adam", "adamw", "rmsprop", "adagrad"],
)
def test_one_optimiser_for_all_tasks(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Momentum and decay of an optimiser that still holds base and earlier tasks move none of them."""
    model = rkr.rectify(ConvNet(dropout=0), head="fc")
    x = inputs(model.network)
    model.add_task("t0", classes=3)
    optimiser = make(model.task_parameters())
    train(model, optimiser, x, 3)
    known = [logits(model, "t0", x)]
    base = None
    for i in range(1, 4):
        model.add_task(f"t{i}", classes=3)
        base = base or snapshot(model.network)
        optimiser.add_param_group({"params": list(model.task_parameters())})
        train(model, optimiser, x, 3)
        known.append(logits(model, f"t{i}", x))
        for j, answer in enumerate(known):
            assert torch.equal(logits(model, f"t{j}", x), answer)
        assert base is not None
        assert same(snapshot(model.network), base)


def test_looking_at_other_tasks_does_not_disturb_training() -> None:
    """A task trained with evaluations of others in between ends with the same bits as one trained alone."""
    results = []
    for look in (False, True):
        torch.manual_seed(1)
        model = trained(ConvNet(dropout=0), "ab")
        x = inputs(model.network)
        model.add_task("c", classes=3)
        optimiser = torch.optim.SGD(model.task_parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            train(model, optimiser, x, 3, steps=1)
            if look:
                logits(model, "a", x)
                with torch.no_grad():
                    model.eval()(x, tasks=["a", "b", "c", "a"] * 2)
                model.merged("b")
                model.fingerprint("c")
                model.cost()
        results.append(model.tasks["c"].tensors())
    assert list(results[0]) == list(results[1])
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


def test_pretrained_base_stays_as_it_is() -> None:
    """`train_base=False`: the base keeps every bit from the first task on, running statistics too."""
    for options in ({}, {"bn": "stats"}, {"bn": "affine"}, {"bn": "frozen"}):
        network = ConvNet()
        base = snapshot(network)
        x = inputs(network)
        model = rkr.rectify(network, head="fc", **options)
        model.add_task("a", classes=3, train_base=False)
        assert model.base_frozen
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        losses = train(model, optimiser, x, 3, steps=8)
        assert losses[-1] < losses[0]
        assert same(snapshot(network), base)
        if model.options.bn_stats:
            assert not torch.equal(model.tasks["a"].get("bn1.running_mean"), base["bn1.running_mean"])


@pytest.mark.parametrize("kind", ["bn_affine", "bn_frozen", "spectral_norm", "words", "bn_stats", "instance_norm"])
def test_train_mode_of_the_network_itself_moves_nothing_shared(kind: str) -> None:
    """The network is the user's own, so a user may well call its `train()` and not the model's."""
    build, options = NETWORKS[kind]
    network = build()
    model = trained(network, "ab", **options)
    x = inputs(network)
    known, base = logits(model, "a", x), snapshot(network)
    network.train()
    network(x)
    assert same(snapshot(network), base)
    assert torch.equal(logits(model, "a", x), known)


def test_dropout_beside_a_buffer_stays_on() -> None:
    """A module that holds a buffer, say the mean of its inputs, may also drop out: later tasks need that as well."""

    class Net(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x - self.mean, 0.5, self.training))

    model = trained(Net(), "a").train()
    assert not torch.equal(model(X), model(X))
    model.add_task("b", classes=3)
    assert not torch.equal(model(X), model(X))
    model.train()
    assert not torch.equal(model(X), model(X))
    assert torch.equal(model.eval()(X), model(X))


def test_first_task_survives_removal_in_its_file(tmp_path: Path) -> None:
    """Saved, removed, others learned, loaded again: the base must not have been trained further meanwhile."""
    model = trained(ConvNet(), "a")
    x = inputs(model.network)
    known = logits(model, "a", x)
    model.save_task("a", tmp_path / "a.safetensors")
    model.remove_task("a")
    learn(model, "b", x)
    model.load_task(tmp_path / "a.safetensors")
    assert torch.equal(logits(model, "a", x), known)


def test_fingerprint_says_what_a_task_computes_with() -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    a, b = model.fingerprint("a"), model.fingerprint("b")
    assert a != b
    assert a == model.fingerprint("a") == copy.deepcopy(model).fingerprint("a")
    for key, tensor in list(model.tasks["b"].tensors().items()):
        old = tensor.clone()
        with torch.no_grad():
            tensor.add_(1)
        assert model.fingerprint("b") != b, key
        assert model.fingerprint("a") == a, key
        with torch.no_grad():
            tensor.copy_(old)
        assert model.fingerprint("b") == b, key
    learn(model, "c", x)
    assert (model.fingerprint("a"), model.fingerprint("b")) == (a, b)
    base = snapshot(model.network)
    for key in ("conv1.weight", "conv1.bias", "conv2.weight"):
        model.network.load_state_dict({**base, key: base[key] + 1})
        assert model.fingerprint("a") != a, key
        assert model.fingerprint("b") != b, key
        model.network.load_state_dict(base)
        assert (model.fingerprint("a"), model.fingerprint("b")) == (a, b)
    model.network.load_state_dict({**base, "fc.weight": base["fc.weight"] + 1})  # no task computes with this
    assert (model.fingerprint("a"), model.fingerprint("b")) == (a, b)
    model.double().float()
    model.to(memory_format=torch.channels_last)
    assert (model.fingerprint("a"), model.fingerprint("b")) == (a, b)
    model.set_task("b")
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), x, 3, steps=1)
    assert model.fingerprint("b") != b
    assert model.fingerprint("a") == a


# ---------------------------------------------------------------------------------------------------------
# What is trained

FACTORS = {f"{layer}.{part}" for layer in ("conv1", "conv2") for part in ("lm", "rm", "f")}
HEAD = {"head.weight", "head.bias"}
AFFINE = {f"{layer}.{part}" for layer in ("bn1", "bn2") for part in ("weight", "bias")}
BASE = {"conv1.weight", "conv1.bias", "conv2.weight"} | AFFINE


def test_task_parameters_while_the_base_is_trained() -> None:
    network = ConvNet()
    model = rkr.rectify(network, head="fc")
    task = model.add_task("a", classes=3)
    named = model.named_task_parameters()
    assert set(named) == FACTORS | HEAD | BASE
    assert [id(p) for p in model.task_parameters()] == [id(p) for p in named.values()]
    assert all(p.requires_grad for p in named.values())
    own = dict(network.named_parameters())
    for key, p in named.items():
        assert p is (own[key] if key in own else task.get(key)), key
    assert tuple(named["head.weight"].shape) == (3, 8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, FACTORS | HEAD | AFFINE),
        ({"bn": "affine"}, FACTORS | HEAD | AFFINE),
        ({"bn": "stats"}, FACTORS | HEAD),
        ({"bn": "frozen"}, FACTORS | HEAD),
        ({"scale_outputs": False}, {k for k in FACTORS if not k.endswith(".f")} | HEAD),
        ({"rectify_weights": False}, {k for k in FACTORS if k.endswith(".f")} | HEAD | AFFINE),
        ({"include": "conv2"}, {k for k in FACTORS if k.startswith("conv2")} | HEAD | AFFINE),
        ({"exclude": ["*2"]}, {k for k in FACTORS if k.startswith("conv1")} | HEAD | AFFINE),
    ],
)
@pytest.mark.parametrize("later", [True, False], ids=["second", "train_base=False"])
def test_task_parameters_over_a_frozen_base(options: dict[str, Any], expected: set[str], later: bool) -> None:
    model = rkr.rectify(ConvNet(), head="fc", **options)
    if later:
        model.add_task("a", classes=3)
        model.add_task("b", classes=3)
    else:
        model.add_task("b", classes=3, train_base=False)
    named = model.named_task_parameters()
    assert set(named) == expected
    assert len({id(p) for p in named.values()}) == len(expected)
    assert all(p.requires_grad and model.tasks["b"].get(k) is p for k, p in named.items())
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in named.values()}


def test_every_task_parameter_gets_a_gradient() -> None:
    for names in ("a", "ab"):
        model = rkr.rectify(ConvNet(lambda n: nn.GroupNorm(2, n)), head="fc", norm="per_task")
        for name in names:
            model.add_task(name, classes=3)
        with torch.no_grad():  # RM starts at 0, where LM has no gradient yet
            for key, p in model.named_task_parameters().items():
                if key.endswith(".rm"):
                    p.normal_()
        F.cross_entropy(model(inputs(model.network)), torch.arange(8) % 3).backward()
        for key, p in model.named_task_parameters().items():
            assert p.grad is not None, key
            assert float(p.grad.abs().sum()) > 0, key


@pytest.mark.parametrize("later", [False, True])
def test_groups_keep_decay_off_scales_and_normalisation(later: bool) -> None:
    model = rkr.rectify(ConvNet(), head="fc")
    model.add_task("a", classes=3)
    if later:
        model.add_task("b", classes=3)
    named = model.named_task_parameters()
    names = {id(p): key for key, p in named.items()}
    decayed, free = model.task_parameters(groups=True)
    assert "weight_decay" not in decayed
    assert free["weight_decay"] == 0
    assert {names[id(p)] for p in free["params"]} == {"conv1.f", "conv2.f"} | AFFINE
    assert len(decayed["params"]) + len(free["params"]) == len(named)
    assert {names[id(p)] for g in (decayed, free) for p in g["params"]} == set(named)

    before = {key: p.detach().clone() for key, p in named.items()}
    optimiser = torch.optim.SGD([decayed, free], lr=0.1, weight_decay=0.5)
    for p in named.values():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for key, p in named.items():
        kept = key in AFFINE or key.endswith(".f")
        torch.testing.assert_close(p.detach(), before[key] * (1 if kept else 0.95), rtol=1e-6, atol=0)


def test_groups_know_shared_and_per_task_normalisation() -> None:
    """LayerNorm shared and frozen is trained with the base without decay; per task, it is the task's own."""
    for norm, names in (("frozen", "a"), ("per_task", "a"), ("per_task", "ab")):
        model = rkr.rectify(ConvNet(lambda n: nn.GroupNorm(2, n)), head="fc", norm=norm)
        for name in names:
            model.add_task(name, classes=3)
        ids = {id(p): key for key, p in model.named_task_parameters().items()}
        free = {ids[id(p)] for p in model.task_parameters(groups=True)[1]["params"]}
        assert free == {"conv1.f", "conv2.f"} | AFFINE


def test_layer_named_head_is_not_the_head() -> None:
    """`head.weight` in a task is its classifier; a layer of the network with that very name must not push it out."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 8)
            self.fc = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.head(x)))

    model = rkr.rectify(Net(), head="fc")
    task = model.add_task("a", classes=4)
    base = dict(model.network.named_parameters())
    expected = [*task.parameters(), base["head.weight"], base["head.bias"]]
    assert tuple(task.get("head.weight").shape) == (4, 8)
    assert {id(p) for p in model.task_parameters()} == {id(p) for p in expected}
    for name in ("a", "b"):
        if name == "b":
            model.add_task(name, classes=2)
        losses = train(model, torch.optim.Adam(model.task_parameters(), lr=0.05), inputs(Mlp()), 2, steps=20)
        assert losses[-1] < losses[0]
        assert torch.equal(model.eval().merged(name)(X), model(X))


def test_own_parameter_named_f_does_not_hide_the_scale() -> None:
    class Gain(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 12)
            self.f = nn.Parameter(torch.full((12,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.f

    network = Mlp()
    network.fc2 = Gain()
    model = rkr.rectify(network, head="fc")
    task = model.add_task("a", classes=3)
    optimised = {id(p) for p in model.task_parameters()}
    assert id(task.get("fc2.f")) in optimised
    assert id(network.fc2.f) in optimised


def test_layers_that_the_user_froze_stay_frozen() -> None:
    network = ConvNet()
    network.conv1.requires_grad_(False)
    before = network.conv1.weight.clone()
    model = rkr.rectify(network, head="fc")
    model.add_task("a", classes=3)
    assert set(model.named_task_parameters()) == (FACTORS | HEAD | BASE) - {"conv1.weight", "conv1.bias"}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), inputs(network), 3)
    assert torch.equal(network.state_dict()["conv1.weight"], before)
    plain = model.merged("a")
    assert [p.requires_grad for p in plain.conv1.parameters()] == [False, False]
    assert all(p.requires_grad for p in plain.conv2.parameters())


def test_only_the_task_in_use_is_trainable() -> None:
    model = trained(Mlp(), "abc")
    for name in "abc":
        model.set_task(name)
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert trainable == {id(p) for p in model.tasks[name].parameters()}
    model(inputs(model.network)).sum().backward()
    assert all(p.grad is not None for p in model.tasks["c"].parameters())
    model.set_task("a")
    assert all(p.grad is None for p in model.tasks["c"].parameters())
    assert all(p.grad is None for p in model.network.parameters())


# ---------------------------------------------------------------------------------------------------------
# Where a task starts


@pytest.mark.parametrize("kind", ["dropout", "batch_norm", "reshape", "formula", "lite", "factored", "words"])
@pytest.mark.parametrize("train_base", [None, False])
def test_first_task_starts_as_the_plain_network(kind: str, train_base: bool | None) -> None:
    build, options = NETWORKS[kind]
    network = build().eval()
    x = inputs(network)
    seen: list[Tensor] = []
    hook = network.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        plain = network(x)
    hook.remove()
    model = rkr.rectify(network, head="fc", **options)
    model.add_task("a", classes=3, train_base=train_base, head_init="network")
    assert torch.equal(features(model, "a", x), seen[0])
    assert torch.equal(logits(model, "a", x), plain)


def test_first_task_trains_as_the_plain_network_at_first() -> None:
    """Train mode, first step: same loss as the plain network, same gradients of the base."""
    network = ConvNet(dropout=0)
    twin = copy.deepcopy(network)
    x, y = inputs(network), torch.arange(8) % 3
    model = rkr.rectify(network, head="fc")
    model.add_task("a", classes=3, head_init="network")
    losses = []
    for net in (twin, model):
        loss = F.cross_entropy(net.train()(x), y)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    own = dict(network.named_parameters())
    for key, p in twin.named_parameters():
        if not key.startswith("fc."):
            torch.testing.assert_close(own[key].grad, p.grad, rtol=1e-4, atol=1e-6)
    assert own["fc.weight"].grad is None


def test_previous_copies_the_last_task() -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    known = features(model, "b", x)
    model.set_task("a")  # "previous" is the task added last, not the one in use
    task = model.add_task("c", classes=5)
    source = model.tasks["b"]
    assert set(task.tensors()) == set(source.tensors())
    for key, tensor in task.tensors().items():
        if key not in HEAD:
            assert torch.equal(tensor, source.get(key)), key
            assert tensor.data_ptr() != source.get(key).data_ptr(), key
    assert tuple(task.get("head.weight").shape) == (5, 8)
    assert torch.equal(features(model, "c", x), known)


def test_a_name_copies_that_task() -> None:
    model = trained(ConvNet(), "abc")
    x = inputs(model.network)
    task = model.add_task("d", classes=2, init="a")
    for key, tensor in task.tensors().items():
        if key not in HEAD:
            assert torch.equal(tensor, model.tasks["a"].get(key)), key
    assert torch.equal(features(model, "d", x), features(model, "a", x))
    assert not torch.equal(features(model, "d", x), features(model, "c", x))


def test_random_starts_from_the_base() -> None:
    """R = 0 and F = 1, LM drawn anew: the features are those of the bare base with its own normalisation."""
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    tasks = [model.add_task(name, classes=3, init="random") for name in "cd"]
    for task in tasks:
        for layer in ("conv1", "conv2"):
            assert not task.get(f"{layer}.rm").any()
            assert bool((task.get(f"{layer}.f") == 1).all())
            assert float(task.get(f"{layer}.lm").detach().std()) > 0.1
        for key in ("bn1.weight", "bn2.running_var"):
            assert torch.equal(task.get(key), model.network.state_dict()[key])
    assert not torch.equal(tasks[0].get("conv1.lm"), tasks[1].get("conv1.lm"))
    plain = ConvNet()
    plain.load_state_dict(model.network.state_dict())
    seen: list[Tensor] = []
    plain.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    plain.eval()(x)
    assert torch.equal(features(model, "c", x), seen[0])


def test_tasks_named_like_a_start() -> None:
    """The two words of `init` keep their meaning, whatever tasks are called."""
    model = trained(Mlp(), "a")
    for name in ("random", "previous", "b"):
        learn(model, name, X)
    task = model.add_task("c", classes=3, init="random")
    assert not task.get("fc1.rm").any()
    task = model.add_task("d", classes=3, init="previous")
    assert torch.equal(task.get("fc1.lm"), model.tasks["c"].get("fc1.lm"))


def test_new_heads_are_drawn_as_torch_draws_them() -> None:
    model = rkr.rectify(Mlp(), head="fc")
    task = model.add_task("a", classes=200)
    bound = 12**-0.5
    for key in ("head.weight", "head.bias"):
        t = task.get(key).detach()
        assert float(t.abs().max()) <= bound
        assert float(t.std()) == pytest.approx(bound / 3**0.5, rel=0.15)
    assert model.add_task("b", classes=["cat", "dog"]).class_names == ("cat", "dog")
    assert tuple(model.tasks["b"].get("head.weight").shape) == (2, 12)
    copied = model.add_task("c", classes=3, head_init="network")
    assert torch.equal(copied.get("head.weight"), model.network.state_dict()["fc.weight"])


def test_head_without_bias_and_convolutional_head() -> None:
    class Segment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.fc = nn.Conv2d(8, 4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.conv(x)))

    model = rkr.rectify(Segment(), head="fc")
    x = torch.randn(2, 3, 6, 6)
    task = model.add_task("a", classes=5)
    assert set(task.tensors()) == {"conv.lm", "conv.rm", "conv.f", "head.weight"}
    assert model(x).shape == (2, 5, 6, 6)
    model.add_task("b", classes=2)
    plain = model.eval().merged("b")
    assert plain.fc.out_channels == 2
    assert torch.equal(plain(x), model(x))


def test_names_are_free_text(tmp_path: Path) -> None:
    """Names that are no attribute names, and names that could be mistaken for one another."""
    names = ["a.b", "a%2Eb", "training", "weight", "tasks", " ", "/", "../x", "Vögel 🐦", "n" * 300]
    model = rkr.rectify(Mlp(), head="fc")
    x = torch.randn(2, 6)
    for name in names:
        model.add_task(name, classes=2)
    known = {name: logits(model, name, x) for name in names}
    assert list(model.tasks) == names
    assert len({tuple(v.flatten().tolist()) for v in known.values()}) == len(names)
    model.save(tmp_path / "zoo")
    loaded = rkr.load(tmp_path / "zoo", Mlp())
    assert list(loaded.tasks) == names
    assert all(torch.equal(logits(loaded, name, x), known[name]) for name in names)


# ---------------------------------------------------------------------------------------------------------
# The user's own module


def test_network_keeps_its_keys_and_computes_the_task() -> None:
    network = ConvNet()
    keys = list(network.state_dict())
    parameters = [(n, id(p)) for n, p in network.named_parameters()]
    x = inputs(network)
    initial = snapshot(network)
    model = rkr.rectify(network, head="fc")
    assert same(snapshot(network), initial)
    assert [(n, id(p)) for n, p in network.named_parameters()] == parameters
    network.load_state_dict(initial)
    for name in "abc":
        learn(model, name, x)
        model.eval()
        assert list(network.state_dict()) == keys
        assert [(n, id(p)) for n, p in network.named_parameters()] == parameters
        assert torch.equal(network(x), model(x))
        twin = ConvNet()
        assert str(twin.load_state_dict(network.state_dict())) == "<All keys matched successfully>"
    model.set_task("a")
    assert torch.equal(network(x), logits(model, "a", x))
    assert isinstance(network.conv1, nn.Conv2d)
    assert isinstance(network.fc, nn.Linear)


def test_layers_show_the_weights_they_compute_with() -> None:
    """Code that reads `layer.weight`, as attention layers do, sees (W + R)·F, b·F, and the task's own head."""
    model = trained(Mlp(), "ab")
    task, base = model.tasks["b"], model.network.state_dict()
    r = (task.get("fc1.lm") @ task.get("fc1.rm")).T
    expected = (base["fc1.weight"] + r) * task.get("fc1.f")[:, None]
    with torch.no_grad():
        torch.testing.assert_close(model.network.fc1.weight, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.network.fc1.bias, base["fc1.bias"] * task.get("fc1.f"), rtol=1e-6, atol=1e-6)
    assert torch.equal(model.network.fc.weight, task.get("head.weight"))


def test_state_dict_of_the_model_loads_again() -> None:
    """torch's own way to keep a model: `model.state_dict()`, strictly loaded into a model with the same tasks."""
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    other = copy.deepcopy(model)
    learn(other, "b2", x)
    other.remove_task("b2")
    for name in "ab":
        other.set_task(name)
        train(other, torch.optim.SGD(other.task_parameters(), lr=0.1), x, 3)
    other.eval()
    assert not torch.equal(logits(other, "a", x), logits(model, "a", x))
    other.load_state_dict(model.state_dict())
    for name in "ab":
        assert torch.equal(logits(other, name, x), logits(model, name, x))


def test_reading_a_weight_never_gives_a_handle_to_break_it() -> None:
    """`layer.weight` is computed from base and task. Writing to it must not change what the task answers."""
    model = trained(Mlp(), "ab")
    x = inputs(model.network)
    known = {name: logits(model, name, x) for name in "ab"}
    with torch.no_grad():
        model(x)
        nn.init.normal_(model.network.fc1.weight)
        assert torch.equal(model(x), known["b"])
    assert torch.equal(logits(model, "a", x), known["a"])
    assert torch.equal(model.merged("b")(x), known["b"])


# ---------------------------------------------------------------------------------------------------------
# Stale caches


def answer(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    """What the current task answers without gradients: the cached path."""
    with torch.no_grad():
        return model(x).clone()


def truth(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    """The same from a copy, which starts with an empty cache."""
    return answer(copy.deepcopy(model), x)


def test_fresh_after_optimiser_steps() -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    for name in "aab":
        model.set_task(name)
        optimiser = torch.optim.SGD(model.task_parameters(), lr=0.1)
        for _ in range(3):
            before = answer(model.eval(), x)
            train(model, optimiser, x, 3, steps=1)
            model.eval()
            assert not torch.equal(answer(model, x), before)
            assert torch.equal(answer(model, x), truth(model, x))


def test_fresh_after_training_in_evaluation_mode() -> None:
    """Fine-tuning with `eval()` on all the time, as one does with small batches."""
    model = trained(ConvNet(), "ab")
    x, y = inputs(model.network), torch.arange(8) % 3
    optimiser = torch.optim.Adam(model.task_parameters(), lr=0.05)
    for _ in range(3):
        before = answer(model, x)
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        assert not torch.equal(answer(model, x), before)
        assert torch.equal(answer(model, x), truth(model, x))


def factor_data(model: rkr.RectifiedModel) -> Iterable[Tensor]:
    """`.data` of all factors of the current task: writes to it leave no trace in version counters."""
    return (p.data for key, p in model.named_task_parameters().items() if key not in HEAD)


@pytest.mark.parametrize("through", ["model", "network", "gradient"])
def test_fresh_after_writes_to_data_in_training(through: str) -> None:
    """Old optimisers, clipping and moving averages write to `.data`; after `train`/`eval`, or once gradients have
    been computed, nothing merged before may be served."""
    model = trained(Mlp(), "ab")
    x = inputs(model.network)
    before = answer(model, x)
    if through == "gradient":
        model(x).sum().backward()
    else:
        (model if through == "model" else model.network).train()
        model(x).sum().backward()
    for data in factor_data(model):
        data.add_(0.5)
    if through != "gradient":
        (model if through == "model" else model.network).eval()
    expected = truth(model, x)
    assert not torch.equal(expected, before)
    assert torch.equal(answer(model, x), expected)


def test_fresh_after_loading(tmp_path: Path) -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    old = answer(model, x)
    model.save_task("b", tmp_path / "b.safetensors")
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.5), x, 3)
    assert not torch.equal(answer(model.eval(), x), old)
    model.load_task(tmp_path / "b.safetensors")
    assert torch.equal(answer(model, x), old)
    model.load_task(tmp_path / "b.safetensors", name="copy")
    assert model.task == "copy"
    assert torch.equal(answer(model, x), old)
    assert list(model.tasks) == ["a", "b", "copy"]


def test_fresh_after_the_base_is_loaded_anew() -> None:
    """Who loads other weights into the network changes all tasks, and must see it at once."""
    for assign in (False, True):
        model = trained(ConvNet(), "ab")
        x = inputs(model.network)
        before = {name: logits(model, name, x) for name in "ab"}
        base = snapshot(model.network)
        model.network.load_state_dict({k: v * 2 for k, v in base.items()}, assign=assign)
        for name in "ab":
            model.set_task(name)
            assert not torch.equal(answer(model, x), before[name])
            assert torch.equal(answer(model, x), truth(model, x))
        model.network.load_state_dict(base, assign=assign)
        assert all(torch.equal(logits(model, name, x), before[name]) for name in "ab")


def test_fresh_after_a_task_is_replaced_by_its_namesake() -> None:
    model = trained(Mlp(), "ab")
    x = inputs(model.network)
    answer(model, x)
    model.remove_task("b")
    learn(model, "b", x, init="random")
    assert torch.equal(answer(model.eval(), x), truth(model, x))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimisers_do_not_leave_merged_weights_behind(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Fused steps write to parameters without counting it, which a cache must notice all the same."""
    torch.manual_seed(0)
    model = rkr.rectify(Mlp(), head="fc")
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    for name in ("a", "b"):
        model.add_task(name, classes=3)
        fused = optimizer(model.task_parameters(), lr=0.05, fused=True)
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            model.eval()
            with torch.no_grad():
                before = model(x)  # merges, and keeps what it merged
                fused.step()
                after = model(x)
            fused.zero_grad()
            model.train()
            with torch.no_grad():
                assert not torch.equal(after, before)
                assert torch.equal(after, copy.deepcopy(model).eval()(x))  # which merges anew


def test_inference_mode_and_no_grad_share_a_cache() -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    with torch.inference_mode():
        known = {}
        for name in "ab":
            model.set_task(name)
            known[name] = model(x)
    for name in "ab":
        model.set_task(name)
        assert torch.equal(answer(model, x), known[name])
        assert torch.equal(model(x).detach(), known[name])  # with gradients: same bits
        train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), x, 3, steps=1)
        assert not torch.equal(answer(model.eval(), x), known[name])


WEIGHTS = (16 * 6 + 16 + 12 * 16 + 12) * 4  # bytes of the merged weights and biases of Mlp


@pytest.mark.parametrize("room", [0, 1, 3])
def test_cache_stays_within_its_bound(room: int) -> None:
    """However many tasks take turns, merged weights of at most `room` tasks are held, or of the one in use."""
    model = rkr.rectify(Mlp(), head="fc", cache_bytes=room * WEIGHTS)
    x = torch.randn(2, 6)
    for i in range(8):
        model.add_task(f"t{i}", classes=2)
        with torch.no_grad():
            for p in model.task_parameters():
                p.add_(0.1 * torch.randn_like(p))
    model.eval()
    known = [answer_of(model, f"t{i}", x) for i in range(8)]
    cache = model.active.cache
    for i in [0, 1, 2, 1, 7, 6, 5, 0, 3, 3, 4]:
        assert torch.equal(answer_of(model, f"t{i}", x), known[i])
        assert cache.nbytes <= max(room, 1) * WEIGHTS
    with torch.no_grad():
        model(x.repeat(4, 1), tasks=[f"t{i}" for i in range(8)])
    assert cache.nbytes <= max(room, 1) * WEIGHTS
    model.remove_task("t4")
    for i in (0, 1, 2, 3, 5, 6, 7):
        model.remove_task(f"t{i}")
    assert cache.nbytes == 0


def answer_of(model: rkr.RectifiedModel, name: str, x: Tensor) -> Tensor:
    model.set_task(name)
    return answer(model, x)


def test_a_thousand_tasks() -> None:
    """Switching works, and memory holds the factors of all, but merged weights of few."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(37, 41)
            self.fc = nn.Linear(41, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.fc1(x)))

    limit = 10 * (37 * 41 + 41) * 4
    model = rkr.rectify(Tiny(), rank=1, head="fc", cache_bytes=limit).eval()
    for i in range(1000):
        model.add_task(f"t{i}", classes=2)
        with torch.no_grad():
            for p in model.task_parameters():
                p.uniform_(-0.3, 0.3)
    x = torch.randn(3, 37)
    known = [answer_of(model, f"t{i}", x) for i in range(1000)]
    assert model.active.cache.nbytes <= limit
    gc.collect()
    merged = sum(1 for o in gc.get_objects() if type(o) is Tensor and o.shape == (41, 37))
    assert merged <= 11  # ten tasks in the cache, and nothing kept elsewhere
    base = model.network.state_dict()
    for i in (0, 1, 500, 998, 999, 0):
        get = model.tasks[f"t{i}"].get
        h = torch.tanh((x @ base["fc1.weight"].T + base["fc1.bias"] + x @ get("fc1.lm") @ get("fc1.rm")) * get("fc1.f"))
        expected = h @ get("head.weight").T + get("head.bias")
        torch.testing.assert_close(known[i], expected.detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(answer_of(model, f"t{i}", x), known[i])
    assert model.cost().tasks[-1].bytes == (37 + 41 + 41 + 2 * 41 + 2) * 4
    with torch.no_grad():
        mixed = model(x, tasks=["t999", "t0", "t500"])
    torch.testing.assert_close(mixed, torch.stack([known[999][0], known[0][1], known[500][2]]), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------
# Merging and copying


@pytest.mark.parametrize("kind", NETWORKS)
def test_merged_is_plain_and_answers_the_same(kind: str) -> None:
    build, options = NETWORKS[kind]
    network = build()
    kinds = [type(m) for m in network.modules()]
    model = trained(network, "ab", **options)
    model.add_task("c", classes=5)
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), inputs(network), 5)
    model.eval()
    x = inputs(network)
    for name in "abc":
        plain = model.merged(name).eval()
        assert model.task == "c"
        assert plain_classes(plain)
        assert [type(m) for m in plain.modules()] == kinds
        assert list(plain.state_dict()) == list(network.state_dict())
        assert plain.fc.out_features == model.tasks[name].classes
        assert all(p.requires_grad for p in plain.parameters())
        with torch.no_grad():
            assert torch.equal(plain(x), logits(model, name, x))


def test_merged_while_the_base_is_trained() -> None:
    model = trained(ConvNet(), "a")
    x = inputs(model.network)
    assert not model.base_frozen
    known = logits(model, "a", x)
    plain = model.merged("a").eval()
    assert torch.equal(plain(x), known)
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), x, 3)
    assert torch.equal(plain(x), known)
    assert not torch.equal(logits(model, "a", x), known)


def test_merged_is_independent() -> None:
    """Training, emptying and deleting a merged network touches neither base nor tasks, and the reverse."""
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    known = {name: logits(model, name, x) for name in "ab"}
    base = snapshot(model.network)
    kept, plain = model.merged("b").eval(), model.merged("b")
    own = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}
    assert not own & {p.data_ptr() for p in (*plain.parameters(), *plain.buffers())}
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.5), x, 3)
    with torch.no_grad():
        for t in (*plain.parameters(), *plain.buffers()):
            t.zero_()
    del plain
    gc.collect()
    assert same(snapshot(model.network), base)
    assert all(torch.equal(logits(model, name, x), known[name]) for name in "ab")

    model.set_task("b")
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.5), x, 3)
    model.remove_task("b")
    assert torch.equal(kept(x), known["b"])


def test_merged_can_be_pickled_and_rectified_without_this_package_noticing() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = rkr.rectify(network, head="3")
    x = torch.randn(4, 6)
    for name in "ab":
        model.add_task(name, classes=3)
        train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), x, 3)
    plain = model.merged("b").eval()
    assert b"rkr" not in pickle.dumps(plain)
    again = rkr.rectify(plain, head="3")
    again.add_task("new", classes=3, head_init="network")
    assert torch.equal(logits(again, "new", x), logits(model, "b", x))


@pytest.mark.parametrize("kind", ["batch_norm", "layer_norm", "spectral_norm", "instance_norm", "words"])
def test_deepcopy_is_a_model_of_its_own(kind: str) -> None:
    build, options = NETWORKS[kind]
    model = trained(build(), "ab", **options)
    x = inputs(model.network)
    known = {name: logits(model, name, x) for name in "ab"}
    clone = copy.deepcopy(model)
    assert (clone.task, list(clone.tasks), clone.base_frozen) == ("b", ["a", "b"], True)
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not own & {t.data_ptr() for t in (*clone.parameters(), *clone.buffers())}

    clone.set_task("a")
    assert model.task == "b"
    assert torch.equal(logits(clone, "a", x), known["a"])
    learn(clone, "c", x)
    clone.set_task("a")
    train(clone, torch.optim.SGD(clone.task_parameters(), lr=0.1), x, 3)
    clone.remove_task("b")
    assert list(model.tasks) == ["a", "b"]
    assert all(torch.equal(logits(model, name, x), known[name]) for name in "ab")

    clone = copy.deepcopy(model)
    model.set_task("b")
    train(model, torch.optim.SGD(model.task_parameters(), lr=0.1), x, 3)
    assert torch.equal(logits(clone, "b", x), known["b"])
    assert not torch.equal(logits(model, "b", x), known["b"])


def test_deepcopy_while_the_base_is_trained() -> None:
    model = trained(ConvNet(), "a")
    x = inputs(model.network)
    known = logits(model, "a", x)
    clone = copy.deepcopy(model)
    assert set(clone.named_task_parameters()) == set(model.named_task_parameters())
    own = {id(p) for p in clone.network.parameters()} | {id(p) for p in clone.tasks.parameters()}
    assert {id(p) for p in clone.task_parameters()} <= own
    learn(clone, "b", x)
    assert not model.base_frozen
    assert torch.equal(logits(model, "a", x), known)
    assert torch.equal(logits(clone, "a", x), known)


def test_deepcopy_of_the_network_alone_keeps_computing() -> None:
    model = trained(ConvNet(), "ab")
    x = inputs(model.network)
    twin = copy.deepcopy(model.network)
    known = model(x)
    assert torch.equal(twin(x), known)
    model.set_task("a")
    assert torch.equal(twin(x), known)


# ---------------------------------------------------------------------------------------------------------
# Bad use


def state_of(model: rkr.RectifiedModel) -> tuple[Any, ...]:
    """All that a failed call must leave alone."""
    return (
        list(model.tasks),
        model.task,
        model.base_frozen,
        model.training,
        [(n, type(m), m.training) for n, m in model.network.named_modules()],
        [(n, id(p), p.requires_grad, p.detach().clone().flatten().tolist()) for n, p in model.named_parameters()],
        [(n, b.clone().flatten().tolist()) for n, b in model.named_buffers()],
    )


X = torch.ones(4, 6)
BAD_CALLS: dict[str, tuple[Callable[[rkr.RectifiedModel], Any], str]] = {
    "set unknown": (lambda m: m.set_task("zebras"), "no task is named 'zebras'.*'a', 'b'"),
    "set number": (lambda m: m.set_task(0), "0"),
    "set None": (lambda m: m.set_task(None), "None"),
    "set list": (lambda m: m.set_task(["a"]), "'a'"),
    "remove unknown": (lambda m: m.remove_task("zebras"), "zebras"),
    "remove number": (lambda m: m.remove_task(1), "1"),
    "merge unknown": (lambda m: m.merged("zebras"), "zebras"),
    "merge None": (lambda m: m.merged(None), "None"),
    "fingerprint unknown": (lambda m: m.fingerprint("zebras"), "zebras"),
    "save unknown": (lambda m: m.save_task("zebras", "/nowhere/x.safetensors"), "zebras"),
    "cost unknown": (lambda m: m.cost()["zebras"], "zebras"),
    "cost shape": (lambda m: m.cost((3, 32, 32)), "does not run"),
    "add duplicate": (lambda m: m.add_task("a", classes=3), "already"),
    "add empty name": (lambda m: m.add_task("", classes=3), "name"),
    "add number": (lambda m: m.add_task(3, classes=3), "name"),
    "no classes": (lambda m: m.add_task("c"), "classes"),
    "zero classes": (lambda m: m.add_task("c", classes=0), "at least 1"),
    "negative classes": (lambda m: m.add_task("c", classes=-2), "at least 1"),
    "classes as text": (lambda m: m.add_task("c", classes="ten"), "classes"),
    "classes as bool": (lambda m: m.add_task("c", classes=True), "classes"),
    "classes as float": (lambda m: m.add_task("c", classes=3.0), "classes"),
    "classes as tensor": (lambda m: m.add_task("c", classes=torch.tensor([[1.0]])[0, 0]), "class"),
    "empty classes": (lambda m: m.add_task("c", classes=[]), "at least 1"),
    "double classes": (lambda m: m.add_task("c", classes=["x", "y", "x"]), "differ"),
    "init unknown": (lambda m: m.add_task("c", classes=2, init="zebras"), "zebras.*'a', 'b'"),
    "init itself": (lambda m: m.add_task("c", classes=2, init="c"), "init"),
    "init None": (lambda m: m.add_task("c", classes=2, init=None), "init"),
    "base too late": (lambda m: m.add_task("c", classes=2, train_base=True), "Only the first task"),
    "head_init": (lambda m: m.add_task("c", classes=2, head_init="zeros"), "head_init"),
    "head_init width": (lambda m: m.add_task("c", classes=2, head_init="network"), "3 classes"),
    "float64": (lambda m: m(X.double()), "float64.*float32"),
    "float16": (lambda m: m(X.half()), "float16.*float32"),
    "integers": (lambda m: m(X.long()), "int64.*float32"),
    "device": (lambda m: m(X.to("meta")), "meta.*cpu"),
    "too few tasks": (lambda m: m(X, tasks=["a", "b"]), "4 samples.*2 names"),
    "too many tasks": (lambda m: m(X, tasks=["a"] * 5), "4 samples.*5 names"),
    "no tasks": (lambda m: m(X, tasks=[]), "4 samples.*0 names"),
    "one name": (lambda m: m(X, tasks="abab"), "single name"),
    "unknown in batch": (lambda m: m(X, tasks=["a", "b", "a", "zebras"]), "zebras"),
    "numbers in batch": (lambda m: m(X, tasks=[0, 1, 0, 1]), "0"),
    "None in batch": (lambda m: m(X, tasks=["a", None, "a", "b"]), "None"),
    "no tensor": (lambda m: m(tasks=["a"]), "tensor"),
    "empty batch": (lambda m: m(X[:0], tasks=[]), "at least one sample"),
    "mixed dtype": (lambda m: m(X.double(), tasks=["a", "b"] * 2), "float64"),
    "rectified twice": (lambda m: rkr.rectify(m.network, head="fc"), "already"),
    "rectified model": (lambda m: rkr.rectify(m, head="network.fc"), "already"),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_raise_and_change_nothing(call: str) -> None:
    run, text = BAD_CALLS[call]
    model = trained(Mlp(), "ab").train()
    before = state_of(model)
    with pytest.raises(rkr.UsageError, match=rf"(?s){text}") as caught:
        run(model)
    assert isinstance(caught.value, rkr.RkrError)
    assert len(str(caught.value)) > 15
    assert state_of(model) == before
    assert torch.isfinite(model(X)).all()


@pytest.mark.parametrize(
    "arguments",
    [
        {"classes": 0},
        {"classes": 3, "head_init": "zeros"},
        {"classes": 2, "head_init": "network"},
        {"classes": 3, "init": "zebras"},
        {"classes": 3, "train_base": True},
        {},
    ],
    ids=str,
)
def test_failed_second_task_does_not_freeze_the_base(arguments: dict[str, Any]) -> None:
    model = trained(ConvNet(), "a")
    before = state_of(model)
    with pytest.raises(rkr.UsageError):
        model.add_task("b", **arguments)
    assert not model.base_frozen
    assert state_of(model) == before


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"rank": 0}, "at least 1"),
    "rank -1": ({"rank": -1}, "at least 1"),
    "rank 2.0": ({"rank": 2.0}, "whole number"),
    "rank text": ({"rank": "2"}, "whole number"),
    "rank True": ({"rank": True}, "whole number"),
    "ranks -1": ({"ranks": {"fc1": -1}}, "ranks.*at least 0"),
    "ranks list": ({"ranks": [2]}, "ranks"),
    "ranks key": ({"ranks": {1: 2}}, "ranks"),
    "no such head": ({"head": "classifier"}, "no module named 'classifier'.*'fc'"),
    "head is a list": ({"head": ["fc"]}, "head"),
    "head is a module": ({"head": nn.Linear(2, 2)}, "head"),
    "head is no layer": ({"head": "drop"}, "Dropout"),
    "head is the network": ({"head": ""}, "Linear or convolution"),
    "unknown option": ({"heads": "fc"}, "heads: no such option; choose one of rank, "),
    "nothing included": ({"include": "conv*"}, "nothing to rectify"),
    "all excluded": ({"exclude": ["*"]}, "nothing to rectify"),
    "nothing wanted": ({"rectify_weights": False, "scale_outputs": False}, "nothing to rectify"),
    "only convolutions": ({"rectify_weights": "conv", "scale_outputs": "conv"}, "nothing to rectify"),
    "include None": ({"include": None}, "include"),
    "exclude None": ({"exclude": None}, "exclude"),
    "include number": ({"include": [1]}, "include"),
    "rectify_weights": ({"rectify_weights": "all"}, "rectify_weights"),
    "scale_outputs": ({"scale_outputs": 1}, "scale_outputs"),
    "bn": ({"bn": "shared"}, "bn"),
    "norm": ({"norm": True}, "norm"),
    "layout": ({"layout": "raw"}, "layout"),
    "mixed": ({"mixed": "fast"}, "mixed"),
    "gain 0": ({"init_gain": 0}, "init_gain"),
    "gain nan": ({"init_gain": float("nan")}, "init_gain"),
    "gain infinite": ({"init_gain": float("inf")}, "init_gain"),
    "gain text": ({"init_gain": "large"}, "init_gain"),
    "cache -1": ({"cache_bytes": -1}, "cache_bytes"),
    "cache text": ({"cache_bytes": "1 GB"}, "cache_bytes"),
    "options twice": ({"options": rkr.Options(), "rank": 2}, "not both"),
    "options as dict": ({"options": {"rank": 2}}, "rkr.Options"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_raise_and_leave_the_network_plain(case: str) -> None:
    options, text = BAD_OPTIONS[case]
    network = Mlp()
    before = snapshot(network)
    with pytest.raises(rkr.UsageError, match=rf"(?s){text}"):
        rkr.rectify(network, **{"head": "fc", **options})
    assert plain_classes(network)
    assert same(snapshot(network), before)
    assert all(p.requires_grad for p in network.parameters())
    model = rkr.rectify(network, head="fc")  # and it can still be rectified
    model.add_task("a", classes=2)
    assert model(X).shape == (4, 2)


def test_bad_networks() -> None:
    with pytest.raises(rkr.UsageError, match=r"torch\.nn\.Module"):
        rkr.rectify(lambda x: x)
    with pytest.raises(rkr.UsageError, match=r"torch\.nn\.Module"):
        rkr.rectify(Mlp)
    with pytest.raises(rkr.UsageError, match="no shape yet"):
        rkr.rectify(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))
    with pytest.raises(rkr.UsageError, match="nothing to rectify"):
        rkr.rectify(nn.Sequential(nn.ReLU()))
    with pytest.raises(rkr.UsageError, match="nothing to rectify"):
        rkr.rectify(nn.Sequential(nn.PReLU(), nn.Bilinear(3, 3, 3), nn.Flatten()))


def test_nothing_works_before_the_first_task() -> None:
    """Training, asking or merging before a task exists says what to do first."""
    model = rkr.rectify(Mlp(), head="fc")
    for call in (
        lambda: model(X),
        lambda: model.task_parameters(),
        lambda: model.task_parameters(groups=True),
        lambda: model.named_task_parameters(),
        lambda: model.set_task("a"),
        lambda: model.remove_task("a"),
        lambda: model.merged("a"),
        lambda: model(X, tasks=["a"] * 4),
        lambda: model.add_task("b", classes=2, init="a"),
    ):
        with pytest.raises(rkr.UsageError, match=r"add_task|none yet"):
            call()
    assert model.task is None
    assert len(model.tasks) == 0
    assert not model.base_frozen


def test_removing_the_task_in_use_leaves_none_in_use() -> None:
    model = trained(Mlp(), "ab")
    known = logits(model, "a", X)
    model.remove_task("b")
    assert model.task is None
    with pytest.raises(rkr.UsageError, match="set_task"):
        model(X)
    with pytest.raises(rkr.UsageError, match="no task is named 'b'"):
        model.set_task("b")
    model.set_task("a")
    assert torch.equal(logits(model, "a", X), known)
    assert model.base_frozen  # for good: the base does not thaw
    model.remove_task("a")
    with pytest.raises(rkr.UsageError, match="Only the first task"):
        model.add_task("c", classes=2, train_base=True)


def test_head_and_classes_belong_together() -> None:
    model = rkr.rectify(VisualEncoder(6, 5, 2))
    with pytest.raises(rkr.UsageError, match="no head"):
        model.add_task("a", classes=3)
    assert len(model.tasks) == 0
    model.add_task("a")
    assert model.tasks["a"].get("head.weight") is None


def test_class_counts_of_other_number_types() -> None:
    """Counts often come out of arrays; what is a whole number is accepted."""
    numpy = pytest.importorskip("numpy")
    model = rkr.rectify(Mlp(), head="fc")
    assert model.add_task("a", classes=numpy.int64(4)).classes == 4
    assert model(X).shape == (4, 4)
    assert model.add_task("b", classes=numpy.array(["x", "y"])).class_names == ("x", "y")


def test_head_by_another_of_its_names() -> None:
    """A module can be registered twice; torch lists the first name only, but both are right."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(6, 8)
            last = nn.Linear(8, 3)
            self.layers = nn.ModuleList([last])
            self.classifier = last

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(F.relu(self.fc1(x)))

    network = Twice()
    keys = list(network.state_dict())
    model = rkr.rectify(network, head="classifier")
    model.add_task("a", classes=5)
    assert model(X).shape == (4, 5)
    assert set(model.named_task_parameters()) == {"fc1.lm", "fc1.rm", "fc1.f", *HEAD, "fc1.weight", "fc1.bias"}
    plain = model.eval().merged("a")
    assert list(plain.state_dict()) == keys
    assert torch.equal(plain(X), model(X))


def test_moving_only_the_network_says_what_to_do() -> None:
    """`network.double()` after rectify leaves the tasks behind: a clear word, not a failure deep inside torch."""
    model = trained(Mlp(), "ab")
    model.network.double()
    with pytest.raises(rkr.UsageError, match="float64"):
        model(X.double())
    model.double()
    assert model(X.double()).dtype == torch.float64


def test_input_of_wrong_type_where_the_first_layer_is_shared() -> None:
    """The check holds whatever the first layer is."""
    for network, options in (
        (ConvNet(), {"exclude": "conv1"}),
        (nn.Sequential(nn.BatchNorm2d(3), ConvNet()), {}),
        (nn.Sequential(nn.ConvTranspose2d(3, 3, 1), ConvNet()), {}),
    ):
        model = rkr.rectify(network, head="fc" if isinstance(network, ConvNet) else "1.fc", **options)
        model.add_task("a", classes=2)
        with pytest.raises(rkr.UsageError, match="float64"):
            model.eval()(torch.randn(2, 3, 8, 8).double())


def test_network_given_to_another_model(tmp_path: Path) -> None:
    """`rkr.load` may take over the very network that was saved; the old model then says so."""
    network = Mlp()
    model = trained(network, "ab")
    known = logits(model, "a", X)
    model.save(tmp_path)
    other = rkr.load(tmp_path, network)
    assert torch.equal(logits(other, "a", X), known)
    for call in (lambda: model(X), lambda: model.merged("a"), lambda: model(X, tasks=["a"] * 4)):
        with pytest.raises(rkr.UsageError, match="another rectified model"):
            call()


def test_errors_are_one_family() -> None:
    assert issubclass(rkr.UsageError, rkr.RkrError)
    assert issubclass(rkr.FileError, rkr.RkrError)
    assert issubclass(rkr.UsageError, ValueError)
    with pytest.raises(rkr.RkrError):
        rkr.rectify(lenet(), rank=0)


# ---------------------------------------------------------------------------------------------------------
# Training and answering agree, whatever the layer


def test_own_convolution_code_is_respected_in_training() -> None:
    """A subclass that overrides `_conv_forward` computes its own way in every mode, factored gradients or not."""

    class Centred(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean(dim=(1, 2, 3), keepdim=True), bias)

    network = WideConv()
    network.bn = nn.Identity()
    network.conv2 = Centred(64, 64, 3, padding=1)
    model = trained(network, "ab", rank=1)
    x = inputs(network)
    torch.testing.assert_close(model.train()(x).detach(), logits(model, "b", x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["factored", "dropout", "layer_norm", "reshape", "formula"])
def test_training_and_evaluation_compute_the_same(kind: str) -> None:
    """Without dropout and batch statistics both modes must agree up to rounding, for first and later tasks."""
    build, options = NETWORKS[kind]
    network = build()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = rkr.rectify(network, head="fc", **{**options, "bn": "frozen"})
    x = inputs(network)
    for name in "ab":
        learn(model, name, x)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.training = False
        in_training = model(x).detach()
        torch.testing.assert_close(in_training, logits(model, name, x), rtol=1e-4, atol=1e-5)


def test_adding_tasks_without_training_the_first_is_noticed() -> None:
    model = rkr.rectify(Mlp(), head="fc")
    model.add_task("a", 3)
    with pytest.warns(UserWarning, match="not trained"):
        model.add_task("b", 3)


def test_buffers_that_another_method_moves_do_not_make_tasks_forget() -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def update(self, x: Tensor) -> None:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))

        def forward(self, x: Tensor) -> Tensor:
            return x - self.mean

    class Net(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.bank = Bank()

        def forward(self, x: Tensor) -> Tensor:
            self.bank.update(x.detach())  # in both modes
            return super().forward(self.bank(x))

    torch.manual_seed(0)
    network = Net()
    model = rkr.rectify(network, head="fc")
    model.add_task("a", 3)
    x = torch.randn(8, 6)
    model.train()
    model(x)
    model.add_task("b", 3)
    known, proof = logits(model, "a", x), model.fingerprint("a")
    for _ in range(3):
        model.set_task("b")
        model.train()
        model(x + 5).sum().backward()
        network.bank.update(x)
        model.eval()
        model(x - 3)
    assert torch.equal(logits(model, "a", x), known)
    assert model.fingerprint("a") == proof


def test_memory_of_a_step_is_let_go_with_its_backward() -> None:
    """Losses that are kept in a list must not keep activations."""
    import gc

    from rkr.core import kernels

    model = rkr.rectify(rkr.networks.lenet(10), head="fc", kernels="factored")
    model.add_task("a", 3, train_base=False)
    model.train()
    before = [o for o in gc.get_objects() if type(o) is kernels._Output]  # of other tests, not yet collected
    loss = model(torch.randn(2, 3, 32, 32)).sum()
    kept = [o for o in gc.get_objects() if type(o) is kernels._Output and not any(o is b for b in before)]
    assert len(kept) == 3  # the second convolution and two linear layers
    loss.backward(retain_graph=True)
    assert all(o.y is not None for o in kept)
    loss.backward()
    assert all(o.y is None for o in kept)

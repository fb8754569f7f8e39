"""Kinds of layers beyond Linear and convolution, and kinds that users register.

Each is compared in float64 with the equations written another way, and must keep every promise of a rectified network.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.core import adapters, kernels
from rkr.core.adapters import Adapter, LinearAdapter, register_layer

RANK = 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _registry() -> Iterator[None]:
    kept = dict(adapters._LAYERS)
    yield
    adapters._LAYERS.clear()
    adapters._LAYERS.update(kept)


def one_layer(layer: nn.Module, **options: Any) -> tuple[rkr.RectifiedModel, Any]:
    """A model of one layer in float64, with a task whose factors are all random."""
    model = rkr.rectify(nn.Sequential(layer).double(), rank=RANK, **options)
    task = model.add_task("a", train_base=False)
    with torch.no_grad():
        for p in task.parameters():
            p.copy_(torch.randn_like(p))
    return model, task


def factors(task: Any) -> tuple[Tensor | None, ...]:
    return tuple(task.get(f"0.{name}") for name in ("lm", "rm", "f"))


def assert_same(
    layer: nn.Module, x: Tensor, reference: Callable[..., Tensor], call: Sequence[Any] = (), **options: Any
) -> None:
    """Training, evaluation, the formula and the merged copy equal a reference in float64, gradients included."""
    found = []
    for fast in (True, False):
        torch.manual_seed(1)
        model, task = one_layer(copy.deepcopy(layer), fast=fast, **options)
        model.train()
        module = model.network[0]
        inputs = x.clone().requires_grad_(x.is_floating_point())
        y = module(inputs, *call)
        g = torch.randn(y.shape, dtype=y.dtype)
        own = [p for p in task.parameters() if p.requires_grad]
        wanted = [*own, inputs] if inputs.requires_grad else own
        grads = torch.autograd.grad(y, wanted, g)
        other = x.clone().requires_grad_(x.is_floating_point())
        expected = reference(other, module._parameters["weight"], module._parameters.get("bias"), *factors(task))
        expected_grads = torch.autograd.grad(expected, [*own, other] if inputs.requires_grad else own, g)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-11, atol=1e-11)
        model.eval()
        with torch.no_grad():
            for answer in (module(x, *call), module(x, *call), model.merged("a")[0](x, *call)):
                torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
        found.append(y.detach())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------
# Transposed convolutions


def transposed_reference(conv: Any, call: Sequence[Any] = ()) -> Callable[..., Tensor]:
    """A transposed convolution as the adjoint of a convolution, with R written as a sum over channels and places."""
    plain = (F.conv1d, F.conv2d, F.conv3d)[len(conv.kernel_size) - 1]
    outputs, groups = conv.out_channels, conv.groups

    def run(x: Tensor, w: Tensor, b: Tensor | None, lm: Tensor, rm: Tensor, f: Tensor) -> Tensor:
        inputs, per_group = w.shape[0] // groups, outputs // groups
        *outer, inner = conv.kernel_size
        r = torch.einsum("wik,khgo->giohw", lm.view(inner, inputs, -1), rm.view(len(rm), -1, groups, per_group))
        weight = w + r.reshape(groups * inputs, per_group, *outer, inner)  # (I, O / groups, *kernel)
        with torch.no_grad():
            shape = conv(x.detach(), *call).shape
        z = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
        image = plain(z, weight, None, conv.stride, conv.padding, conv.dilation, groups)
        (y,) = torch.autograd.grad(image, z, x, create_graph=True)
        channels = (-1, *[1] * len(conv.kernel_size))
        return (y if b is None else y + b.view(channels)) * f.view(channels)

    return run


TRANSPOSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (3, 4, 7)),
    "2d": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), padding=(1, 0), output_padding=(1, 2)),
        (3, 4, 5, 4),
    ),
    "2d_groups": (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=2, groups=2), (3, 4, 5, 4)),
    "2d_depthwise": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=4, dilation=2, bias=False), (3, 4, 5, 4)),
    "2d_dilation": (lambda: nn.ConvTranspose2d(4, 6, 3, dilation=(1, 2), stride=(1, 2), padding=1), (3, 4, 5, 4)),
    "3d": (lambda: nn.ConvTranspose3d(4, 6, (2, 1, 3), stride=(1, 2, 2), groups=2), (2, 4, 3, 4, 3)),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_convolution(kind: str) -> None:
    build, shape = TRANSPOSED[kind]
    conv = build().double()
    assert_same(conv, torch.randn(shape, dtype=torch.float64), transposed_reference(conv))
    assert_same(conv, torch.randn(shape[1:], dtype=torch.float64), transposed_reference(conv))  # without a batch


def test_transposed_convolution_with_an_output_size() -> None:
    conv, x = nn.ConvTranspose2d(4, 6, 3, stride=3).double(), torch.randn(2, 4, 5, 4, dtype=torch.float64)
    for call in ([(16, 13)], [(15, 14)]):
        assert_same(conv, x, transposed_reference(conv, call), call)
    model, _ = one_layer(nn.ConvTranspose2d(4, 6, 3, stride=3))
    assert model.network[0](x, output_size=(17, 12)).shape == (2, 6, 17, 12)
    with pytest.raises(ValueError, match="output size"):
        model.network[0](x, output_size=(30, 12))


def test_memory_formats_of_a_transposed_convolution() -> None:
    conv = nn.ConvTranspose2d(4, 6, 3, stride=2).double().to(memory_format=torch.channels_last)
    x = torch.randn(3, 4, 5, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert_same(conv, x, transposed_reference(conv))


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_layouts_of_a_transposed_convolution(kind: str) -> None:
    """ "reshape": the product is read row by row as (W, H, I, O)."""
    build, shape = TRANSPOSED[kind]
    model, task = one_layer(build(), layout="reshape")
    conv, (lm, rm, f) = model.network[0], factors(task)
    x = torch.randn(shape, dtype=torch.float64)
    groups, inputs, outputs = conv.groups, conv.in_channels // conv.groups, conv.out_channels
    r = (lm @ rm).reshape(*reversed(conv.kernel_size), inputs, outputs)
    r = r.permute(*reversed(range(r.dim())))  # (O, I / groups, *kernel)
    stored = torch.cat([part.transpose(0, 1) for part in r.chunk(groups)])
    scale = torch.cat([part.expand(inputs, -1) for part in f.chunk(groups)])
    weight = (conv._parameters["weight"] + stored) * scale.view(*scale.shape, *[1] * len(conv.kernel_size))
    torch.testing.assert_close(conv.weight, weight, rtol=1e-12, atol=1e-12)
    training = model.train()(x)
    torch.testing.assert_close(model.eval()(x), training, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["1d", "2d_groups", "3d"])
def test_gradients_of_a_transposed_convolution(kind: str) -> None:
    build, shape = TRANSPOSED[kind]
    model, task = one_layer(build())
    adapter = model.weight_layers()[0]

    def run(x: Tensor, w: Tensor, lm: Tensor, rm: Tensor, f: Tensor) -> Tensor:
        return adapter.apply(x, adapter.stored(kernels.merged_weight(adapter.canonical(w), lm, rm, f)), None)

    small = torch.randn((2, *shape[1:2], *[2] * (len(shape) - 2)), dtype=torch.float64)
    tensors = [small, adapter.weight, *factors(task)]
    assert torch.autograd.gradcheck(run, [t.detach().clone().requires_grad_() for t in tensors])


# ---------------------------------------------------------------------------------------------------------
# Embeddings


def embedding_reference(table: nn.Embedding | nn.EmbeddingBag) -> Callable[..., Tensor]:
    """One-hot rows times W + LM·RM, times F. The padding row passes no gradient to the table."""

    def run(x: Tensor, w: Tensor, b: None, lm: Tensor, rm: Tensor, f: Tensor) -> Tensor:
        whole = w + lm @ rm
        if table.padding_idx is not None:
            fixed = torch.zeros(len(w), 1, dtype=torch.bool)
            fixed[table.padding_idx] = True
            whole = torch.where(fixed, whole.detach(), whole)
        return (F.one_hot(x, len(w)).to(w) @ whole) * f

    return run


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)], ids=str)
def test_embedding(shape: tuple[int, ...]) -> None:
    assert_same(nn.Embedding(7, 4).double(), torch.randint(0, 7, shape), embedding_reference(nn.Embedding(7, 4)))


def test_the_padding_row_of_an_embedding_is_not_rectified() -> None:
    table = nn.Embedding(7, 4, padding_idx=2)
    model = rkr.rectify(nn.Sequential(table), rank=2)
    task = model.add_task("a", train_base=False)
    assert not task.get("0.lm")[2].any()
    assert task.get("0.lm")[[0, 1, 3, 4, 5, 6]].all()
    optimiser = torch.optim.SGD(model.task_parameters(), lr=0.5, weight_decay=0.1)
    x = torch.tensor([[2, 1], [2, 2], [5, 2]])
    for _ in range(3):
        optimiser.zero_grad()
        (model(x) - 1).square().sum().backward()
        optimiser.step()
    assert not task.get("0.lm")[2].any()
    assert task.get("0.rm").any()
    with torch.no_grad():
        assert not model.eval()(x)[1].any()
    reference = embedding_reference(table)
    model, task = one_layer(nn.Embedding(7, 4, padding_idx=2))
    with torch.no_grad():
        task.get("0.lm")[2] = 0
    y = model.train()(x)
    expected = reference(x, model.network[0]._parameters["weight"], None, *factors(task))
    grads = [torch.autograd.grad(t, list(task.parameters()), torch.ones_like(y)) for t in (y, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_an_embedding_whose_gradients_are_scaled_or_sparse() -> None:
    x = torch.tensor([[1, 1, 1, 3]])
    for options in ({"scale_grad_by_freq": True}, {"sparse": True}):
        model = rkr.rectify(nn.Sequential(nn.Embedding(7, 4, **options)), rank=2)
        model.add_task("a")  # with the base
        model.train()(x).sum().backward()
        table = model.network[0]._parameters["weight"]
        assert table.grad.is_sparse == ("sparse" in options)
        dense = table.grad.to_dense()
        torch.testing.assert_close(dense[1], torch.full((4,), 1.0 if "sparse" not in options else 3.0))
        assert model.tasks["a"].get("0.rm").grad.any()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode: str) -> None:
    bag = nn.EmbeddingBag(7, 4, mode=mode).double()
    rows = embedding_reference(bag)
    x, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 3])

    def two_dimensional(x: Tensor, *tensors: Any) -> Tensor:
        y = rows(x, *tensors)
        return y.sum(1) if mode == "sum" else y.mean(1)

    def flat(x: Tensor, *tensors: Any) -> Tensor:
        y = rows(x, *tensors)
        parts = [y[:2], y[2:3], y[3:]]
        return torch.stack([p.sum(0) if mode == "sum" else p.mean(0) for p in parts])

    assert_same(bag, x.view(2, 3), two_dimensional)
    assert_same(bag, x, flat, [offsets])


def test_tables_that_cannot_be_rectified_are_listed() -> None:
    network = nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 4))
    model = rkr.rectify(network)
    model.add_task("a")
    assert [(s.name, s.reason) for s in model.cost().shared] == [("0", "not a layer that can be rectified")]
    for module in (nn.Embedding(7, 4, max_norm=1.0), nn.EmbeddingBag(7, 4, mode="max")):
        with pytest.raises(rkr.UsageError, match="nothing to rectify"):
            rkr.rectify(nn.Sequential(module))


# ---------------------------------------------------------------------------------------------------------
# Whole networks


class Upscaler(nn.Module):
    input_shape = (4, 3, 3)

    def __init__(self) -> None:
        super().__init__()
        self.up1 = nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2)
        self.up2 = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.bn = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.up2(F.relu(self.up1(x))))
        return self.fc(F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, 8)
        self.hidden = nn.Linear(16, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.hidden(torch.cat([self.words(x).mean(1), self.bag(x)], 1))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "upscaler": (Upscaler, lambda: torch.randn(12, 4, 3, 3)),
    "text": (Text, lambda: torch.randint(0, 11, (12, 5))),
}


def answers(model: rkr.RectifiedModel, x: Tensor) -> dict[str, Tensor]:
    model.eval()
    found = {}
    for name in model.tasks:
        model.set_task(name)
        with torch.no_grad():
            found[name] = model(x).clone()
    return found


def learn(model: rkr.RectifiedModel, x: Tensor, classes: int) -> None:
    y = torch.arange(len(x)) % classes
    optimiser = torch.optim.Adam(model.task_parameters(groups=True), lr=0.02)
    model.train()
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("mixed", ["group", "layer"])
@pytest.mark.parametrize("kind", NETWORKS)
def test_tasks_are_kept_saved_merged_and_mixed(kind: str, mixed: str, tmp_path: Path) -> None:
    build, data = NETWORKS[kind]
    model, x = rkr.rectify(build(), head="fc", mixed=mixed), data()
    known: dict[str, Tensor] = {}
    for name, classes in (("first", 4), ("second", 3), ("third", 4)):
        model.add_task(name, classes=classes)
        learn(model, x, classes)
        now = answers(model, x)
        assert all(torch.equal(now[old], answer) for old, answer in known.items())  # bit for bit
        known = now
        model.set_task(name)
    assert not torch.equal(known["first"], known["third"])
    names = ["third", "first", "second"] * 4
    with torch.no_grad():
        rows = model(x, tasks=names)
    for i, name in enumerate(names):
        torch.testing.assert_close(rows[i, : known[name].shape[1]], known[name][i], rtol=1e-4, atol=1e-5)
    for name in known:
        plain = model.merged(name).eval()
        assert type(plain) is type(model.network)
        assert list(plain.state_dict()) == list(build().state_dict())
        with torch.no_grad():
            torch.testing.assert_close(plain(x), known[name], rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "zoo")
    loaded = rkr.load(tmp_path / "zoo", build())
    assert all(torch.equal(answer, known[name]) for name, answer in answers(loaded, x).items())
    assert [loaded.fingerprint(n) for n in known] == [model.fingerprint(n) for n in known]


def test_one_pass_computes_a_mixed_batch_of_transposed_convolutions() -> None:
    model = rkr.rectify(nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Flatten(), nn.Linear(20, 5)), head="2")
    assert model.is_rowwise()
    assert rkr.rectify(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), head="1").is_rowwise()
    assert not rkr.rectify(nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2)), head="1").is_rowwise()


def test_cost_of_transposed_convolutions_and_embeddings() -> None:
    model = rkr.rectify(Upscaler(), head="fc")
    model.add_task("a", classes=5)
    cost = model.cost()
    # up1: LM (3·4/2, 2), RM (2, 3·8); up2: LM (2·8, 2), RM (2, 2·6)
    assert cost["a"].rectification == 2 * (3 * 2 + 3 * 8) + 2 * (2 * 8 + 2 * 6)
    assert (cost["a"].scale, cost["a"].norm, cost["a"].head) == (8 + 6, 12, 35)
    macs = cost.multiply_adds
    assert macs is not None
    # 3x3 inputs meet 8 / 2 filters of 3x3, 7x7 inputs meet 6 filters of 2x2
    assert macs.network == 4 * 9 * (4 * 9) + 8 * 49 * (6 * 4) + 6 * 5
    assert macs.paper == 8 + 6
    assert macs.per_output == 8 * 49 + 6 * 14 * 14
    text = rkr.rectify(Text(), head="fc")
    text.add_task("a", classes=5)
    cost = text.cost(torch.randint(0, 11, (1, 5)))
    assert cost["a"].rectification == 2 * (2 * (11 + 8) + (16 + 8))
    assert cost["a"].scale == 8 + 8 + 8
    assert cost.shared == ()
    assert cost.multiply_adds is not None
    assert cost.multiply_adds.network == 16 * 8 + 8 * 5  # a look-up multiplies nothing
    assert cost.multiply_adds.per_output == 5 * 8 + 8 + 8
    assert cost.multiply_adds.paper == 0


def test_wrong_inputs_are_named() -> None:
    model = rkr.rectify(Upscaler(), head="fc")
    model.add_task("a", classes=5)
    with pytest.raises(rkr.UsageError, match=r"layer 'up1' got torch.float64, but the network is torch.float32"):
        model(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    text = rkr.rectify(Text(), head="fc")
    text.add_task("a", classes=5)
    with pytest.raises(IndexError):
        text(torch.full((2, 3), 11))
    with pytest.raises(rkr.UsageError, match="layer 'words' got an input on meta"):
        text(torch.zeros(2, 3, dtype=torch.long, device="meta"))


def test_options_choose_the_new_kinds() -> None:
    def names(network: nn.Module, **options: Any) -> set[str]:
        model = rkr.rectify(network, head="fc", **options)
        return set(model.add_task("a", classes=5).tensors()) - {"head.weight", "head.bias"}

    assert names(Text(), exclude=["words", "bag"]) == {"hidden.lm", "hidden.rm", "hidden.f"}
    lite = names(Upscaler(), rectify_weights="conv", scale_outputs="linear", bn="frozen")
    assert lite == {"up1.lm", "up1.rm", "up2.lm", "up2.rm"}
    assert names(Text(), rectify_weights=False) == {"words.f", "bag.f", "hidden.f"}
    assert rkr.rectify(Text(), head="fc", ranks={"words": 4}).add_task("a", classes=5).get("words.lm").shape == (11, 4)


# ---------------------------------------------------------------------------------------------------------
# Kinds of layers from outside


class Scaled(nn.Module):
    """A layer that this package does not know: `y = x W / sqrt(inputs) + shift`, W stored as (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs))
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel / len(self.kernel) ** 0.5 + self.shift


class ReadsWeight(Adapter):
    """The least that works: the module's own forward reads the merged weight."""

    properties = ("kernel", "shift")
    weight_name, bias_name = "kernel", "shift"

    def canonical(self, weight: Tensor) -> Tensor:
        return weight.t()

    def stored(self, weight: Tensor) -> Tensor:
        return weight.t()


class Applies(ReadsWeight):
    """With the layer's computation, training by the formula and mixed batches in one pass follow."""

    per_sample = True

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return input @ weight / len(weight) ** 0.5 + bias

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[tuple[nn.Module, int, int]]:
        return [(module, output.numel(), output.numel() * args[0].shape[-1])]


def two_layers() -> nn.Module:
    return nn.Sequential(Scaled(6, 8), nn.Tanh(), nn.Linear(8, 5))


@pytest.mark.parametrize("adapter", [ReadsWeight, Applies])
@pytest.mark.usefixtures("_registry")
def test_a_layer_of_the_user(adapter: type[Adapter], tmp_path: Path) -> None:
    with pytest.raises(rkr.UsageError, match="nothing to rectify"):
        rkr.rectify(two_layers(), head="2")
    register_layer(Scaled, adapter)
    model, x = rkr.rectify(two_layers(), head="2", mixed="layer").double(), torch.randn(9, 6, dtype=torch.float64)
    known: dict[str, Tensor] = {}
    for name in ("first", "second"):
        model.add_task(name, classes=4)
        learn(model, x, 4)
        now = answers(model, x)
        assert all(torch.equal(now[old], answer) for old, answer in known.items())
        known = now
        model.set_task(name)
    task, layer = model.tasks["second"], model.network[0]
    lm, rm, f = factors(task)
    assert [tuple(t.shape) for t in (lm, rm, f)] == [(6, 2), (2, 8), (8,)]
    base = layer._parameters
    expected = ((x @ (base["kernel"] + lm @ rm)) / 6**0.5 + base["shift"]) * f
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.train()(x), expected, rtol=1e-12, atol=1e-12)
    model.eval()
    with torch.no_grad():
        rows = model(x, tasks=["first", "second", "first"] * 3)
        torch.testing.assert_close(rows[1::3], known["second"][1::3], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rows[0::3], known["first"][0::3], rtol=1e-12, atol=1e-12)
        plain = model.merged("first")
        assert type(plain[0]) is Scaled
        torch.testing.assert_close(plain(x), known["first"], rtol=1e-12, atol=1e-12)
    model.save(tmp_path / "zoo")
    loaded = rkr.load(tmp_path / "zoo", two_layers().double())
    assert all(torch.equal(answer, known[name]) for name, answer in answers(loaded, x).items())
    cost = model.cost((6,))
    assert cost["first"].rectification == 2 * (6 + 8)
    assert cost.multiply_adds is not None
    assert cost.multiply_adds.network == 6 * 8 + 8 * 5


@pytest.mark.usefixtures("_registry")
def test_transposed_weights_take_a_few_lines() -> None:
    """What a user writes for a layer such as transformers' Conv1D."""

    class InOut(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(inputs, outputs))
            self.bias = nn.Parameter(torch.randn(outputs))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    class InOutAdapter(LinearAdapter):
        def canonical(self, weight: Tensor) -> Tensor:
            return weight.t()

        def stored(self, weight: Tensor) -> Tensor:
            return weight.t()

    register_layer(InOut, InOutAdapter)

    def reference(x: Tensor, w: Tensor, b: Tensor, lm: Tensor, rm: Tensor, f: Tensor) -> Tensor:
        return (x @ (w + lm @ rm) + b) * f

    for rows in (3, 100):  # few rows are factored, many are folded
        assert_same(InOut(5, 4).double(), torch.randn(rows, 5, dtype=torch.float64), reference)


@pytest.mark.usefixtures("_registry")
def test_subclasses_and_registered_classes() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x = torch.randn(3, 4, dtype=torch.float64)
    model, task = one_layer(Doubling(4, 4))
    lm, rm, f = factors(task)
    base = model.network[0]._parameters
    expected = (F.linear(x, base["weight"] + (lm @ rm).t()) + base["bias"]) * f
    torch.testing.assert_close(model(x), 2 * expected)  # its own forward, with the merged weight

    class Plain(LinearAdapter):
        """The registered adapter's computation takes the place of the forward."""

    register_layer(Doubling, Plain)
    model, task = one_layer(Doubling(4, 4))
    lm, rm, f = factors(task)
    base = model.network[0]._parameters
    expected = (F.linear(x, base["weight"] + (lm @ rm).t()) + base["bias"]) * f
    torch.testing.assert_close(model(x), expected)
    assert type(model.weight_layers()[0]) is Plain


def test_bad_registrations() -> None:
    for module in (3, "Linear", int, nn.Linear(2, 2)):
        with pytest.raises(rkr.UsageError, match=r"register a subclass of torch\.nn\.Module"):
            register_layer(module, LinearAdapter)
    for adapter in (nn.Linear, LinearAdapter.apply, None, adapters.NormLayer):
        with pytest.raises(rkr.UsageError, match=r"adapter must be a subclass of rkr\.core\.adapters\.Adapter"):
            register_layer(nn.Linear, adapter)
    assert adapters.adapter_for(nn.Linear(2, 2)) is LinearAdapter


def test_transformers_is_not_imported() -> None:
    code = "import sys, torch, rkr; rkr.rectify(torch.nn.Linear(2, 2)); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys, rkr.core; assert 'torch' not in sys.modules; rkr.core.Options; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

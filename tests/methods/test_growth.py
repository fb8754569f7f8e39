"""Which channels of a network belong together, and networks that become wider with their tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.core import LayerUpdate
from rkr.core.model import RectifiedModel
from rkr.core.options import Options
from rkr.errors import UsageError
from rkr.methods.growth.growth import NEVER, SLOTS, Growth, cut, layout_of
from rkr.methods.growth.widths import Spaces, find_spaces
from rkr.methods.learner import SeenTask
from rkr.methods.shared.growing import Growing
from rkr.networks.resnet import ResNet, ZeroPad

# ---------------------------------------------------------------------------------------------------------
# Spaces


def spaces_of(network: nn.Module, head: str = "fc") -> Spaces:
    return find_spaces(network, head, "This method")


def test_spaces_of_lenet() -> None:
    found = spaces_of(rkr.networks.lenet())
    assert [(s.name, s.width, s.makers, s.norms, s.takers) for s in found.growing] == [
        ("conv1", 20, ["conv1"], ["bn1"], {"conv2": 1}),
        ("conv2", 50, ["conv2"], ["bn2"], {"fc1": 64}),  # 8x8 values of each channel
        ("fc1", 800, ["fc1"], [], {"fc2": 1}),
        ("fc2", 500, ["fc2"], [], {"fc": 1}),
    ]
    assert {layer: space.name for layer, space in found.into.items()} == {
        "conv2": "conv1",
        "fc1": "conv2",
        "fc2": "fc1",
        "fc": "fc2",
    }
    assert set(found.out) == {"conv1", "bn1", "conv2", "bn2", "fc1", "fc2"}  # not the head, whose width is the classes'
    assert not found.pads


def test_spaces_of_small_cnn() -> None:
    found = spaces_of(rkr.networks.small_cnn(size=6))
    assert [(s.name, s.width, s.takers) for s in found.growing] == [
        ("conv1", 16, {"conv2": 1}),
        ("conv2", 32, {"fc1": 9}),
        ("fc1", 128, {"fc": 1}),
    ]


def test_spaces_of_resnet18_are_streams_and_what_is_within_blocks() -> None:
    network = rkr.networks.resnet18()
    found = spaces_of(network)
    streams = {
        "conv1": (64, ["conv1", "layer1.0.conv2", "layer1.1.conv2"]),
        **{
            f"layer{n}.0.conv2": (width, [f"layer{n}.0.conv2", f"layer{n}.0.downsample.0", f"layer{n}.1.conv2"])
            for n, width in ((2, 128), (3, 256), (4, 512))
        },
    }
    names = {s.name: s for s in found.growing}
    assert len(names) == 4 + 8
    for name, (width, makers) in streams.items():
        assert names[name].width == width
        assert sorted(names[name].makers) == sorted(makers)
        assert len(names[name].norms) == len(makers)
    for stage in range(1, 5):
        for block in range(2):
            inner = names[f"layer{stage}.{block}.conv1"]
            assert inner.makers == [f"layer{stage}.{block}.conv1"]
            assert inner.takers == {f"layer{stage}.{block}.conv2": 1}
    assert names["layer4.0.conv2"].takers == {"layer4.1.conv1": 1, "fc": 1}
    layers = {n for n, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    assert {layer for s in found.growing for layer in s.makers} == layers
    assert not found.pads


def test_spaces_of_resnet32_are_joined_by_pads() -> None:
    found = spaces_of(rkr.networks.resnet32())
    assert len(found.growing) == 3 + 15
    assert [(a.name, b.name) for a, b in found.pads.values()] == [
        ("conv1", "layer2.0.conv2"),
        ("layer2.0.conv2", "layer3.0.conv2"),
    ]
    assert [len(s.makers) for s in found.growing if "conv2" in s.name or s.name == "conv1"] == [6, 5, 5]


class Net(nn.Module):
    """A network for 8x8 images, of a given forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] | None = (3, 8, 8)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.other = nn.Conv2d(3, 3, 3, padding=1)
        self.third = nn.Conv2d(3, 3, 1)
        self.grouped = nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.up = nn.ConvTranspose2d(3, 3, 2, stride=2)
        self.layer_norm = nn.LayerNorm(8)
        self.gate = nn.Parameter(torch.ones(8))
        self.scale = nn.Parameter(torch.ones(()))
        self.fc = nn.Linear(3, 5)
        self.wide = nn.Linear(6, 5)
        self._forward = forward
        if shape is not None:
            self.input_shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def pooled(x: Tensor) -> Tensor:
    return x.mean(dim=(2, 3))


SEEN = {
    "add": (lambda n, x: n.fc(pooled(n.conv(x) + n.other(x))), [["conv", "other"]]),
    "input": (lambda n, x: n.fc(pooled(n.third(n.conv(x) + x))), [["third"]]),  # as wide as the image
    "both": (lambda n, x: n.fc(pooled(n.conv(x) + (n.third(x) + n.other(x)))), [["conv", "third", "other"]]),
    "in place": (lambda n, x: n.fc(pooled(_added(n.conv(x), n.other(x)))), [["conv", "other"]]),
    "product": (lambda n, x: n.fc(pooled(n.conv(x) * torch.sigmoid(n.other(x)))), [["conv", "other"]]),
    "types": (lambda n, x: n.fc(pooled(n.conv(x.to(torch.float32)).float())), [["conv"]]),
    "numbers": (lambda n, x: n.fc(pooled(2 * n.conv(x) * n.scale + 1)), [["conv"]]),
    "pixels": (lambda n, x: n.fc(pooled(n.conv(x)[:, :, 1:, ::2])), [["conv"]]),
    "padding": (lambda n, x: n.fc(pooled(F.pad(n.conv(x), (1, 1)))), [["conv"]]),
    "nothing": (lambda n, x: n.fc(pooled(x)), []),
}


def _added(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


@pytest.mark.parametrize("name", SEEN)
def test_spaces_of_odd_networks(name: str) -> None:
    forward, makers = SEEN[name]
    assert [sorted(s.makers) for s in spaces_of(Net(forward)).growing] == [sorted(m) for m in makers]


REFUSED = {
    "concatenation": (lambda n, x: n.wide(pooled(torch.cat([n.conv(x), n.other(x)], 1))), "through .*cat"),
    "groups": (lambda n, x: n.fc(pooled(n.grouped(n.conv(x)))), "the convolution 'grouped' has groups"),
    "transposed": (lambda n, x: n.fc(pooled(n.up(n.conv(x)))), "through ConvTranspose2d"),
    "layer norm": (lambda n, x: n.fc(pooled(n.layer_norm(n.conv(x)))), "through LayerNorm"),
    "a layer twice": (lambda n, x: n.fc(pooled(n.conv(n.conv(x)))), "weight of 'conv' is used twice"),
    "chosen channels": (lambda n, x: n.fc(pooled(n.conv(x)[:, [2, 1, 0]])), "through .*getitem"),
    "a sample": (lambda n, x: n.fc(pooled(n.conv(x)[0:1])), "through .*getitem"),
    "mean of channels": (lambda n, x: n.fc(pooled(n.conv(x)).mean(1, keepdim=True) * pooled(x)), "through mean"),
    "own tensor": (lambda n, x: n.fc(pooled(n.conv(x) * n.gate)), "through .*mul"),
    "view": (lambda n, x: n.fc(pooled(n.conv(x)).view(-1, 3)), "through view"),
    "size": (lambda n, x: n.fc(n.conv(x).view(x.size(0), -1)[:, :3]), "through size"),
    "flattened pixels": (lambda n, x: n.fc(n.conv(x).flatten(2).mean(2)), "through flatten"),
    "channels in front": (lambda n, x: n.wide(pooled(F.pad(n.conv(x), (0, 0, 0, 0, 3, 0)))), "through .*pad"),
    "padded input": (lambda n, x: n.wide(pooled(F.pad(x, (0, 0, 0, 0, 0, 3)))), "through .*pad"),
    "unequal": (lambda n, x: n.fc(pooled(n.conv(x)) + pooled(n.conv(x)).mean(1, keepdim=True)), "used twice"),
    "choice": (lambda n, x: n.fc(pooled(n.conv(x) if x.sum() > 0 else x)), "can be traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_clear_word_where_channels_cannot_be_seen(name: str) -> None:
    forward, message = REFUSED[name]
    head = "wide" if name in ("concatenation", "channels in front", "padded input") else "fc"
    with pytest.raises(rkr.UsageError, match=f"This method.*{message}") as raised:
        spaces_of(Net(forward), head)
    assert "\n" not in str(raised.value)


def test_instance_norm_is_refused() -> None:
    network = rkr.networks.small_cnn()
    network.bn1 = nn.InstanceNorm2d(16, affine=True)  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"^This method: 'bn1' is an InstanceNorm, which knows one width only$"):
        spaces_of(network)


class Dropping(ResNet):
    """Zero-padded shortcuts, and dropout as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("mode", [True, False])
def test_dropout_follows_the_mode(mode: bool) -> None:
    network = Dropping((1, 1), (3, 5), 9, shortcut=ZeroPad)
    model = RectifiedModel(network, Options(bn="per_task"), "fc", update=Growth(network, "fc", "This method"))
    model.add_task("a", 4)
    model.train(mode)
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(x), model(x)) is not mode


def test_a_network_must_tell_the_shape_of_its_input() -> None:
    with pytest.raises(rkr.UsageError, match="with an attribute `input_shape`"):
        spaces_of(Net(SEEN["add"][0], shape=None))


def test_finding_spaces_leaves_the_network_as_it_was() -> None:
    network = rkr.networks.small_cnn()
    network.bn1.eval()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    spaces_of(network)
    assert network.training
    assert not network.bn1.training
    assert network.bn2.training
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


# ---------------------------------------------------------------------------------------------------------
# Growth


def tiny_resnet() -> ResNet:
    network = ResNet((2, 1, 1), (3, 5, 6), 4, shortcut=ZeroPad)
    network.input_shape = (3, 8, 8)
    return network


def wide_resnet() -> ResNet:
    network = ResNet((1, 2), (4, 6), 4)
    network.input_shape = (3, 8, 8)
    return network


def small() -> nn.Module:
    return rkr.networks.small_cnn(classes=4, in_channels=3)


MAKES: Mapping[str, Callable[[], nn.Module]] = {"cnn": small, "pads": tiny_resnet, "projections": wide_resnet}


def grown_model(make: Callable[[], nn.Module], layout: torch.memory_format = torch.contiguous_format) -> RectifiedModel:
    torch.manual_seed(0)
    network = make().double().to(memory_format=layout)  # type: ignore[call-overload]
    return RectifiedModel(network, Options(bn="per_task"), "fc", update=Growth(network, "fc", "Growth"))


def growth_of(model: RectifiedModel) -> Growth:
    assert isinstance(model.update, Growth)
    return model.update


def weight_of(model: RectifiedModel, path: str) -> Tensor:
    """Of all units."""
    weight = model.network.get_submodule(path)._parameters["weight"]
    assert weight is not None
    return weight


def add(model: RectifiedModel, name: str) -> None:
    model.add_task(name, classes=3)


def all_spaces(model: RectifiedModel, count: int) -> dict[str, int]:
    return {space.name: count + i % 2 for i, space in enumerate(growth_of(model).spaces.growing)}


def images(seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=draw, dtype=torch.float64)


def train(model: RectifiedModel, steps: int = 2) -> None:
    """Move everything that the task in use may move, statistics too, except what earlier tasks share."""
    model.train()
    frozen = {n: p.detach().clone() for n, p in model.network.named_parameters()}
    optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images(step)), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    with torch.no_grad():
        for n, p in model.network.named_parameters():
            if len(model.tasks) > 1:
                p.copy_(frozen[n])
    model.eval()


@torch.no_grad()
def logits(model: RectifiedModel, name: str) -> Tensor:
    model.eval()
    model.set_task(name)
    found: Tensor = model(images(9)).clone()
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MAKES)
def test_growing_leaves_earlier_tasks_as_they_were_to_the_last_bit(name: str, layout: torch.memory_format) -> None:
    model = grown_model(MAKES[name], layout)
    kept: dict[str, Tensor] = {}
    for number in range(4):
        add(model, f"t{number}")
        if number:
            growth_of(model).grow(model, all_spaces(model, number))
        train(model)
        kept[f"t{number}"] = logits(model, f"t{number}")
        for earlier, before in kept.items():
            assert torch.equal(logits(model, earlier), before)
        with torch.no_grad():  # whatever is done to weights that came later
            for space in growth_of(model).spaces.growing:
                new = growth_of(model).times(space)[0] == number
                for path in space.makers if number else ():
                    weight_of(model, path)[new] += 1
        model.refresh()
        for earlier in list(kept)[:-1]:
            assert torch.equal(logits(model, earlier), kept[earlier])
        kept[f"t{number}"] = logits(model, f"t{number}")
    widths = [growth_of(model).widths(number) for number in range(4)]
    for i, space in enumerate(growth_of(model).spaces.growing):
        added = [number + i % 2 for number in (1, 2, 3)]
        assert [w[space.name] for w in widths] == [space.width + sum(added[:n]) for n in range(4)]


@pytest.mark.parametrize("name", MAKES)
def test_a_grown_task_computes_what_a_wider_network_does(name: str) -> None:
    """The same units in a network that was made that wide; with pads, its channels in the order that pads keep."""
    model = grown_model(MAKES[name])
    add(model, "a")
    train(model)
    add(model, "b")
    growth = growth_of(model)
    growth.grow(model, dict.fromkeys((s.name for s in growth.spaces.growing), 2))
    train(model)
    task = model.tasks["b"]
    x = images(9)
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        state = {k: v for k, v in model.network.state_dict().items() if "bn" not in k and "downsample.1" not in k}

        def layer(path: str, x: Tensor) -> Tensor:
            module: Any = model.network.get_submodule(path)
            weight, bias = state[f"{path}.weight"], state.get(f"{path}.bias")
            if x.dim() == 2:
                return F.linear(x, weight, bias)
            return F.conv2d(x, weight, bias, module.stride, module.padding)

        def norm(path: str, x: Tensor) -> Tensor:
            mean, var, weight, bias = (
                task.get(f"{path}.{n}") for n in ("running_mean", "running_var", "weight", "bias")
            )
            assert mean is not None
            return F.batch_norm(x, mean, var, weight, bias)

        if name == "cnn":
            x = F.relu(norm("bn1", layer("conv1", x)))
            x = F.max_pool2d(F.relu(norm("bn2", layer("conv2", x))), 2)
            x = F.relu(layer("fc1", x.flatten(1)))
        else:
            network: Any = model.network
            x = F.relu(norm("bn1", layer("conv1", x)))
            for stage in network.stages:
                for i in range(len(network.get_submodule(stage))):
                    block = f"{stage}.{i}"
                    out = F.relu(norm(f"{block}.bn1", layer(f"{block}.conv1", x)))
                    out = norm(f"{block}.bn2", layer(f"{block}.conv2", out))
                    shortcut = x
                    if f"{block}.downsample.0.weight" in state:
                        shortcut = norm(f"{block}.downsample.1", layer(f"{block}.downsample.0", x))
                    elif out.shape != x.shape:  # 2 new channels at the end of both; zeros after the old ones
                        old, new = x[:, :-2, ::2, ::2], x[:, -2:, ::2, ::2]
                        zeros = torch.zeros_like(out)[:, : out.shape[1] - x.shape[1]]
                        shortcut = torch.cat([old, zeros, new], 1)
                    x = F.relu(out + shortcut)
            x = x.mean(dim=(2, 3))
        head, bias = task.get("head.weight"), task.get("head.bias")
        assert head is not None
        values["b"] = F.linear(x, head, bias)
    torch.testing.assert_close(logits(model, "b"), values["b"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", MAKES)
def test_split_changes_nothing_for_the_newest_task_nor_for_earlier_ones(name: str) -> None:
    model = grown_model(MAKES[name])
    add(model, "a")
    train(model)
    add(model, "b")
    growth = growth_of(model)
    growth.grow(model, dict.fromkeys((s.name for s in growth.spaces.growing), 2))
    train(model)
    add(model, "c")
    train(model)
    kept = {n: logits(model, n) for n in "abc"}
    for space in growth.spaces.growing:  # a first unit, one that came with b
        growth.split(model, {space.name: [1, space.width + 1]})
        torch.testing.assert_close(logits(model, "c"), kept["c"], rtol=1e-10, atol=1e-12)
    add(model, "d")
    head, norms = model.tasks["c"].get("head.weight"), model.tasks["c"].tensors()
    assert head is not None
    for key in ("head.weight", "head.bias"):
        tensor = model.tasks["c"].get(key)
        assert tensor is not None
        model.tasks["d"].put(key, tensor)
    for key, tensor in norms.items():
        own = model.tasks["d"].get(key)
        assert own is not None
        assert own.shape == tensor.shape
    torch.testing.assert_close(logits(model, "d"), kept["c"], rtol=1e-10, atol=1e-12)
    growth.split(model, {s.name: [0, s.width + 2] for s in growth.spaces.growing})  # all at once; a copy of a copy
    torch.testing.assert_close(logits(model, "d"), kept["c"], rtol=1e-10, atol=1e-12)
    for earlier in "ab":
        assert torch.equal(logits(model, earlier), kept[earlier])
    torch.testing.assert_close(logits(model, "c"), kept["c"], rtol=1e-10, atol=1e-12)
    space = growth.spaces.growing[0]
    born, dead = growth.times(space)
    width = space.width
    assert born.tolist() == [0] * width + [1, 1, 2, 2, 3, 3]
    ends = {0: 3, 1: 2, width + 1: 2, width + 2: 3}
    assert dead.tolist() == [ends.get(unit, NEVER) for unit in range(width + 6)]
    came = [SLOTS, SLOTS + 1]
    assert growth.slots(space).tolist() == [*range(width), *came, 1, SLOTS + 1, 0, 1]


def test_split_then_trained_copies_leave_originals_alone() -> None:
    model = grown_model(small)
    add(model, "a")
    train(model)
    add(model, "b")
    growth_of(model).split(model, {"conv1": [3]})
    before = logits(model, "a")
    model.set_task("b")
    with torch.no_grad():
        conv1, conv2 = (weight_of(model, path) for path in ("conv1", "conv2"))
        assert torch.equal(conv1[16], conv1[3])
        assert torch.equal(conv2[:, 16], conv2[:, 3])
        conv1[16] += 1
        conv2[:, 16] -= 1
    model.refresh()
    assert torch.equal(logits(model, "a"), before)
    kept = logits(model, "b")
    with torch.no_grad():
        conv1[3] += 1  # the original is no part of the newest task
    model.refresh()
    assert torch.equal(logits(model, "b"), kept)
    assert not torch.equal(logits(model, "a"), before)


def test_pads_keep_the_places_of_every_task_s_units() -> None:
    model = grown_model(tiny_resnet)
    add(model, "a")
    growth = growth_of(model)
    (before, after), *_ = growth.spaces.pads.values()
    add(model, "b")
    growth.grow(model, {before.name: 2, after.name: 3})
    add(model, "c")
    growth.grow(model, {before.name: 3, after.name: 1})
    growth.split(model, {before.name: [1], after.name: [6]})
    x = torch.arange(1.0, 10.0).view(1, 9, 1, 1)
    expected = {
        0: [1, 2, 3, 0, 0],  # 3 units of 5
        1: [1, 2, 3, 0, 0, 4, 5, 0],  # then 2 of 3
        # Then 3 of 1: those beyond are dropped. The second of the first units is a copy at the end, and the second
        # of b's places as well.
        2: [1, 8, 2, 0, 0, 3, 0, 5, 4],
    }
    assert growth.units(before, 2).tolist() == [0, 2, 3, 4, 5, 6, 7, 8]
    assert growth.units(after, 2).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    for number, places in expected.items():
        units = len(growth.units(before, number))
        assert growth.carry(x[:, :units], before, after, number).flatten().tolist() == places


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_growing_keeps_the_memory_format_and_what_was_there(layout: torch.memory_format) -> None:
    model = grown_model(small, layout)
    add(model, "a")
    before = {k: v.clone() for k, v in model.network.state_dict().items() if "bn" not in k and k != "fc.weight"}
    add(model, "b")
    torch.manual_seed(5)
    growth_of(model).grow(model, {"conv1": 3, "conv2": 2, "fc1": 4})
    after = model.network.state_dict()
    shapes = {"conv1.weight": (19, 3, 3, 3), "conv2.weight": (34, 19, 3, 3), "fc1.weight": (132, 34 * 16)}
    shapes |= {"bn1.weight": (19,), "bn2.running_var": (34,), "fc.weight": (4, 132), "fc1.bias": (132,)}
    assert {k: tuple(after[k].shape) for k in shapes} == shapes
    for key, old in before.items():
        assert torch.equal(after[key][tuple(map(slice, old.shape))], old)
    for key in ("conv1.weight", "conv2.weight"):
        assert after[key].is_contiguous(memory_format=layout)
    task = model.tasks["b"]
    assert {k: tuple(t.shape) for k, t in task.tensors().items() if k in ("head.weight", "bn1.weight")} == {
        "bn1.weight": (19,),
        "head.weight": (3, 132),
    }
    fan = 19 * 9  # new weights are drawn as torch draws those of a layer of that many inputs
    new = torch.cat([after["conv2.weight"][32:].flatten(), after["conv2.weight"][:32, 16:].flatten()])
    assert fan**-0.5 * 0.97 < float(new.abs().max()) <= (16 * 9) ** -0.5


def test_growing_nothing_changes_nothing() -> None:
    model = grown_model(small)
    add(model, "a")
    train(model)
    before, keys = logits(model, "a"), {k: v.clone() for k, v in model.tasks["a"].tensors().items()}
    growth_of(model).grow(model, {})
    growth_of(model).grow(model, {"conv1": 0})
    assert torch.equal(logits(model, "a"), before)
    assert all(torch.equal(v, keys[k]) for k, v in model.tasks["a"].tensors().items())


def test_cut_takes_rows_and_columns_in_the_same_memory_format() -> None:
    whole = torch.randn(6, 5, 3, 3)
    for tensor in (whole, whole.to(memory_format=torch.channels_last)):
        for rows, columns in (([0, 1, 2], [0, 1]), ([1, 4], [0, 2, 3]), (list(range(6)), list(range(5)))):
            found = cut(tensor, [torch.tensor(rows), torch.tensor(columns)])
            assert torch.equal(found, whole[rows][:, columns])
            assert layout_of(found) == layout_of(tensor)
            assert found.is_contiguous(memory_format=layout_of(tensor))


# ---------------------------------------------------------------------------------------------------------
# States


class Wider(Growing):
    """Grows by hand."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(make, "fc", Growth(make(), "fc", "Wider"))


def seen(number: int) -> SeenTask:
    return SeenTask(number, f"t{number}", ("x", "y", "z"), 3 * number)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", MAKES)
def test_a_state_brings_its_sizes(name: str, layout: torch.memory_format) -> None:
    """A new learner that began the same tasks, and knows nothing of growth, takes it from the state."""

    def make() -> nn.Module:
        made: nn.Module = MAKES[name]().double().to(memory_format=layout)  # type: ignore[call-overload]
        return made

    torch.manual_seed(0)
    learner = Wider(make)
    spaces = learner.growth.spaces.growing
    for number in range(3):
        learner.begin(seen(number))
        if number:
            learner.growth.grow(learner.model, {s.name: number for s in spaces})
        if number == 2:
            learner.growth.split(learner.model, {s.name: [2] for s in spaces})
        train(learner.model)
    learner.begin(seen(3))
    torch.manual_seed(1)
    other = Wider(make)
    for number in range(4):
        other.begin(seen(number))
    other.load_state_dict(learner.state_dict())
    for number in range(4):
        assert torch.equal(logits(other.model, f"t{number}"), logits(learner.model, f"t{number}"))
    for (key, a), (_, b) in zip(learner.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
        assert a.stride() == b.stride(), key
    assert other.growth.widths(3) == learner.growth.widths(3)
    for each in (learner, other):  # and goes on alike
        torch.manual_seed(2)
        each.growth.grow(each.model, {spaces[0].name: 1, spaces[-1].name: 2})
        train(each.model)
    for number in range(4):
        assert torch.equal(logits(other.model, f"t{number}"), logits(learner.model, f"t{number}"))
    assert other.capacity() == learner.capacity()


def test_capacity_counts_a_wider_network() -> None:
    learner = Wider(lambda: rkr.networks.small_cnn(classes=6, in_channels=3))
    for number in range(2):
        learner.begin(seen(number))
    learner.growth.grow(learner.model, {"conv1": 2, "conv2": 1, "fc1": 4})
    a, b, c = 18, 33, 132
    plain = sum(p.numel() for p in rkr.networks.small_cnn(classes=6, in_channels=3).parameters())
    layers = (28 * a + (9 * a + 1) * b + (16 * b + 1) * c) - (28 * 16 + (9 * 16 + 1) * 32 + (16 * 32 + 1) * 128)
    norms = 2 * (16 + 32) + 2 * (a + b)
    heads = 3 * 4  # 4 more inputs, 3 classes
    found = learner.capacity()
    assert (found.parameters, found.network) == (plain + layers + norms + heads, plain)
    assert found.multiply_adds == 64 * 27 * a + 64 * 9 * a * b + 16 * b * c + 6 * c  # with the plain network's classes


def test_changed_convolutions_with_strides_and_few_channels() -> None:
    """They go the way around torch's write out of bounds, so the gradient of the weight is right."""

    class Open(LayerUpdate):
        opens_base = True

    network = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2), nn.Flatten(), nn.Linear(8 * 16, 3))
    model = RectifiedModel(network, Options(), "2", update=Open())
    model.add_task("a", 3)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train()
    x = torch.randn(6, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    conv = next(layer for layer in model.weight_layers() if layer.convolves)
    gradient = torch.autograd.grad(model(x).square().sum(), conv.weight)[0]
    weight = conv.weight.detach().double().requires_grad_()
    head = [model.tasks["a"].get(f"head.{name}").double() for name in ("weight", "bias")]  # type: ignore[union-attr]
    y = F.linear(F.conv2d(x.double(), weight, conv.bias.double(), stride=2).flatten(1), *head)  # type: ignore[union-attr]
    torch.testing.assert_close(
        gradient.double(), torch.autograd.grad(y.square().sum(), weight)[0], rtol=1e-4, atol=1e-5
    )
    nodes, seen = [model(x).grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    strides = [getattr(node, "_saved_stride", None) for node in seen if node.name() == "ConvolutionBackward0"]
    assert strides == [(1, 1)]  # the pixels were picked before

"""Convolutions with reordered weights: the bits of torch's own call, only where torch would compute the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import rkr
from rkr.core.adapters.conv import convolve, packing

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


class Net(nn.Module):
    """Enough channels that a forgotten reordering would show."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv2(F.relu(self.bn(self.conv1(x))))).mean((2, 3)))


def images(count: int = 8) -> Tensor:
    return channels_last(torch.randn(count, 3, 8, 8))


def two_tasks() -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(Net(), rank=2, head="fc")
    for name in ("a", "b"):
        model.add_task(name, classes=3)
        optimizer = torch.optim.SGD(model.task_parameters(), lr=0.2)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(images()), torch.arange(8) % 3).backward()
            optimizer.step()
    return model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def packed(model: rkr.RectifiedModel) -> int:
    """How many packed weights the cache holds."""
    entries = model.active.cache._entries.values()
    return sum(entry.weight.is_mkldnn for of_task in entries for entry in of_task.values())


@needs_onednn
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bits_of_the_plain_call(data: st.DataObject) -> None:
    def pick(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    groups = pick(1, 1, 1, 2, 4)
    inputs, outputs = groups * pick(1, 2, 3, 8, 16, 20), groups * pick(1, 2, 8, 16, 50)
    kernel, stride, dilation = (pick(1, 2, 3, 5), pick(1, 3, 5)), (pick(1, 2), pick(1, 2)), (pick(1, 2), pick(1, 2))
    conv = nn.Conv2d(inputs, outputs, kernel, stride, (pick(0, 1), pick(0, 1, 2)), dilation, groups, pick(True, False))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = channels_last(torch.randn(pick(1, 2, 8, 17), inputs, pick(9, 12), pick(9, 16)))
    weight = torch.randn_like(conv.weight)
    if pick(True, False):
        weight = channels_last(weight)
    with torch.no_grad():
        pack = packing(conv, x, conv.weight)
        assume(pack is not None)
        assert pack is not None
        expected = F.conv2d(x, weight, conv.bias, stride, conv.padding, dilation, groups)
        found = convolve(conv, x, pack(weight), conv.bias)
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)
        # Packed once, used for batches of any size and place.
        other = channels_last(torch.randn(3, inputs, 10, 11))
        if packing(conv, other, conv.weight) is not None:
            assert torch.equal(convolve(conv, other, pack(weight), conv.bias), convolve(conv, other, weight, conv.bias))


@needs_onednn
def test_a_model_answers_with_the_bits_of_its_plain_network() -> None:
    """With gradients on the weights are plain, without they are packed; a merged network knows nothing of either."""
    model = two_tasks()
    x = images()
    for name in ("a", "b"):
        model.set_task(name)
        with_gradients = model(x).detach()
        assert packed(model) == (0 if name == "a" else 2)
        with torch.no_grad():
            assert torch.equal(model(x), with_gradients)
            assert torch.equal(channels_last_network(model.merged(name))(x), with_gradients)
        with torch.inference_mode():
            assert torch.equal(model(x), with_gradients)
    assert packed(model) == 4
    with torch.no_grad():
        own = {name: set_and_run(model, name, x) for name in ("a", "b")}
        rows = model(x, tasks=["a", "b"] * 4)
        by_group = {name: set_and_run(model, name, x[i::2]) for i, name in enumerate(("a", "b"))}
    for i, name in enumerate(("a", "b")):
        assert torch.equal(rows[i::2], by_group[name])
        torch.testing.assert_close(rows[i::2], own[name][i::2])


def channels_last_network(network: nn.Module) -> nn.Module:
    return network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def set_and_run(model: rkr.RectifiedModel, name: str, x: Tensor) -> Tensor:
    model.set_task(name)
    return model(x)  # type: ignore[no-any-return]


@needs_onednn
def test_packed_weights_are_counted_dropped_and_made_anew() -> None:
    model = two_tasks()
    x = images()
    cache = model.active.cache
    with torch.no_grad():
        before = model(x)
        assert packed(model) == 2
        convs = (model.network.conv1, model.network.conv2)
        sizes = [layer.weight.nbytes for layer in model.weight_layers() if layer.convolves]
        bias = convs[0]._parameters["bias"]
        assert cache.nbytes == sum(sizes) + bias.nbytes
        assert torch.equal(copy.deepcopy(model)(x), before)
        next(p for key, p in model.named_task_parameters().items() if key == "conv2.rm").add_(0.5)
        after = model(x)
        assert not torch.equal(after, before)
        assert torch.equal(after, copy.deepcopy(model)(x))
        assert cache.nbytes == sum(sizes) + bias.nbytes
    model.remove_task("b")
    assert cache.nbytes == 0


@needs_onednn
def test_a_weight_is_packed_once_and_counted_as_it_is() -> None:
    """oneDNN pads 17 channels to whole blocks, so that the packed weight is larger than the plain one."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(17, 17, 3, bias=False), nn.Flatten(), nn.Linear(17 * 36, 3))
    model = rkr.rectify(network, rank=1, head="2")
    model.add_task("a", classes=3, train_base=False)
    model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = channels_last(torch.randn(8, 17, 8, 8))
    cache = model.active.cache
    with torch.no_grad():
        first = model(x)
        ((_, _, weight, _),) = next(iter(cache._entries.values())).values()
        assert weight.is_mkldnn
        assert torch.equal(model(x), first)
        assert next(iter(cache._entries.values())).popitem()[1].weight is weight
    assert cache.nbytes == torch.ops.mkldnn._nbytes(weight) > 17 * 17 * 9 * 4


def test_a_volume_without_a_batch() -> None:
    """Four dimensions, and yet no batch of images."""
    network = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.Flatten(0), nn.Linear(8 * 3 * 5 * 5, 3))
    model = rkr.rectify(network, rank=1, head="2")
    model.add_task("a", classes=3, train_base=False)
    x = channels_last(torch.randn(4, 3, 5, 5))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.merged("a")(x.contiguous()))


def under_autocast(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)  # type: ignore[no-any-return]


def under_a_counter(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    plain = channels_last_network(model.merged("b"))
    counts = []
    for network in (model, plain):
        with FlopCounterMode(display=False) as counter:
            found = network(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    return found  # type: ignore[no-any-return]


def with_a_tangent(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    plain = channels_last_network(model.merged("b"))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, channels_last(torch.ones_like(x)))
        found, expected = (forward_ad.unpack_dual(network(dual)) for network in (model, plain))
        torch.testing.assert_close(found.tangent, expected.tangent)
        return found.primal


class Watching(TorchFunctionMode):
    """Counts calls of `conv2d`."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.conv2d
        return func(*args, **(kwargs or {}))


def under_a_function_mode(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    with Watching() as mode:
        found = model(x)
    assert mode.seen == 2
    return found  # type: ignore[no-any-return]


UNPACKED: dict[str, Callable[[rkr.RectifiedModel, Tensor], Tensor]] = {
    "contiguous": lambda model, x: model.to(memory_format=torch.contiguous_format)(x.contiguous()),  # type: ignore[call-overload]
    "float64": lambda model, x: model.double()(x.double()),
    "autocast": under_autocast,
    "vmap": lambda model, x: torch.vmap(lambda one: model(one[None])[0])(x),
    "counted": under_a_counter,
    "forward derivative": with_a_tangent,
    "function mode": under_a_function_mode,
    "no samples": lambda model, x: model(x[:0]),
    "traced": lambda model, x: make_fx(model)(x)(x),
    "switched off": lambda model, x: without_onednn(model, x),
}


def without_onednn(model: rkr.RectifiedModel, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use", UNPACKED)
def test_plain_weights_wherever_torch_computes_otherwise(use: str) -> None:
    model = two_tasks()
    x = images()
    with torch.no_grad():
        expected = channels_last_network(model.merged("b"))(x)
        found = UNPACKED[use](model, x)
        assert packed(model) == 0
    if len(found):
        tolerance = 0.1 if use == "autocast" else 1e-5
        torch.testing.assert_close(found.to(expected), expected, rtol=tolerance, atol=tolerance)


@needs_onednn
def test_the_users_defaults_do_not_decide() -> None:
    """What is asked once for a shape must not depend on when it was asked."""
    conv, x = nn.Conv2d(19, 23, 3), channels_last(torch.randn(7, 19, 9, 9))
    with torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            assert packing(conv, x, conv.weight) is not None
        finally:
            torch.set_default_dtype(torch.float32)
        assert packing(conv, x, conv.weight) is not None

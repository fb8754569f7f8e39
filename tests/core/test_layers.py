"""Rectified layers through the public API, against the paper's equations written here with explicit indices.

The reference never calls a convolution: it pads the input and sums over the positions of the kernel.
"""

import copy
import itertools
import subprocess
import sys
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rkr
from rkr.core import kernels, ways

TOLERANCE = 1e-12
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPEN, FROZEN = False, True  # the base is trained with the first task, frozen from the second on

sweep = settings(deadline=None, derandomize=True, max_examples=300)
# torch pads one more pixel on one side for padding="same" with an even kernel, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- the definition ----------------------------------------------------------------------------------------


def indexed_rectification(lm: Tensor, rm: Tensor, shape: Sequence[int], layout: str = "axes") -> Tensor:
    """R[o, i, h, w] = sum over k of LM[w·C_in + i, k] · RM[k, h·C_out + o].

    "reshape" numbers the entries of LM·RM row by row, and reads them as (W, H, C_in, C_out).
    """
    outputs, inputs, *kernel = shape
    o, i, *taps = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    h = w = position = torch.zeros_like(o)
    if taps:
        w = taps[-1]
    for size, tap in zip(kernel[:-1], taps[:-1], strict=True):
        h = h * size + tap
    rows, columns = w * inputs + i, h * outputs + o
    if layout == "reshape":
        for size, tap in zip(reversed(kernel), reversed(taps), strict=True):
            position = position * size + tap
        position = (position * inputs + i) * outputs + o
        rows, columns = position // rm.shape[1], position % rm.shape[1]
    return torch.einsum("...k,...k->...", lm[rows], rm.t()[columns])


def padded(x: Tensor, conv: nn.Module) -> Tensor:
    """The input with the padding of a convolution around it."""
    around: list[int] = []
    for axis in reversed(range(len(conv.kernel_size))):
        if conv.padding == "same":
            total = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
            around += [total // 2, total - total // 2]
        else:
            around += [0 if conv.padding == "valid" else conv.padding[axis]] * 2
    return F.pad(x, around, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)


def summed_conv(x: Tensor, w: Tensor, b: Tensor | None, conv: nn.Module) -> Tensor:
    """Convolution as a sum over kernel positions, each a product over the channels of one group."""
    x = padded(x, conv).unflatten(1, (conv.groups, -1))  # (B, G, I, ...)
    w = w.unflatten(0, (conv.groups, -1))  # (G, O / G, I, ...)
    y = torch.zeros((), dtype=x.dtype)
    for taps in itertools.product(*map(range, w.shape[3:])):
        window: list[slice] = []
        for tap, size, kernel, stride, dilation in zip(
            taps, x.shape[3:], w.shape[3:], conv.stride, conv.dilation, strict=True
        ):
            outputs = (size - dilation * (kernel - 1) - 1) // stride + 1
            window.append(slice(tap * dilation, tap * dilation + (outputs - 1) * stride + 1, stride))
        y = y + torch.einsum("bgi...,goi->bgo...", x[(..., *window)], w[(..., *taps)])
    y = y.flatten(1, 2)
    return y if b is None else y + b.view(-1, *[1] * (w.dim() - 3))


def reference_layer(layer: nn.Module, x: Tensor, own: dict[str, Tensor | None], layout: str) -> Tensor:
    """Equations 1 and 2 for one layer: rectify the weight, apply, scale the output."""
    w, b, lm, rm, f = (own.get(n) for n in ("weight", "bias", "lm", "rm", "f"))
    if lm is not None:
        w = w + indexed_rectification(lm, rm, w.shape, layout)
    if isinstance(layer, nn.Linear):
        y = torch.einsum("...i,oi->...o", x, w)
        y = y if b is None else y + b
        return y if f is None else y * f
    y = summed_conv(x, w, b, layer)
    return y if f is None else (y.movedim(1, -1) * f).movedim(-1, 1)


def reference_state(model: rkr.RectifiedModel) -> dict[str, Tensor]:
    """The network's tensors with (W + R)·F and b·F in place of W and b, for `torch.func.functional_call`."""
    own, base = model.named_task_parameters(), model.network.state_dict(keep_vars=True)
    state = dict(base)
    for key, w in base.items():
        path, _, name = key.rpartition(".")
        lm, rm, f = (own.get(f"{path}.{n}" if path else n) for n in ("lm", "rm", "f"))
        if not name.endswith("weight") or (lm is None and f is None):
            continue
        if lm is not None:
            w = w + indexed_rectification(lm, rm, w.shape, model.options.layout)
        if f is not None:
            w = (w.movedim(0, -1) * f).movedim(-1, 0)
            bias = key.removesuffix("weight") + "bias"
            if base.get(bias) is not None:
                state[bias] = base[bias] * f
        state[key] = w
    return state


# -- helpers -----------------------------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def laid_out(x: Tensor, channels_last: bool) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last and x.dim() > 2 else x.contiguous()


def with_task(network: nn.Module, base: bool, scale: float = 1.0, **options: Any) -> rkr.RectifiedModel:
    """A model whose task in use has random factors; `base` is OPEN or FROZEN."""
    kernels = "factored" if options.pop("fast", True) else "formula"  # layer by layer; groups: test_ways.py
    model = rkr.rectify(network, kernels=kernels, **options)
    model.add_task("first")
    if base is FROZEN:
        model.add_task("second")
    with torch.no_grad():
        for name, p in model.named_task_parameters().items():
            if name.rpartition(".")[2] in ("lm", "rm", "f"):
                p.normal_(std=scale)
    return model


@contextmanager
def factored_everywhere() -> Iterator[mock.Mock]:
    """Small shapes take the factored path too. Yields a mock that counts its calls."""
    apply = kernels.FactoredConv2d.apply
    with (
        mock.patch.object(ways, "factored_pays", return_value=True),
        mock.patch.object(kernels.FactoredConv2d, "apply", side_effect=apply) as spy,
    ):
        yield spy


def assert_close(actual: Tensor, expected: Tensor, what: str = "output", tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if actual.numel():
        error, scale = (actual - expected).abs().max().item(), max(1.0, expected.abs().max().item())
        assert error <= tolerance * scale, f"{what}: off by {error:.1e} at scale {scale:.1e}"


def gradients(y: Tensor, leaves: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), g), strict=True))


def assert_equals(
    model: rkr.RectifiedModel, x: Tensor, reference: Callable[[Tensor], Tensor], tolerance: float = TOLERANCE
) -> None:
    """Outputs and every gradient, in training and evaluation, with and without autograd."""
    expected = reference(x)
    leaves: dict[str, Tensor] = dict(model.named_task_parameters())
    if x.requires_grad:
        leaves["x"] = x
    g = torch.randn_like(expected)
    wanted = gradients(expected, leaves, g)
    for mode in ("train", "eval"):
        model.train(mode == "train")
        y = model(x)
        assert_close(y, expected, f"{mode} output", tolerance)
        got = gradients(y, leaves, g)
        for name in leaves:
            assert_close(got[name], wanted[name], f"{mode} gradient of {name}", tolerance)
        with torch.no_grad():
            assert_close(model(x), expected, f"{mode} output without gradients", tolerance)


def assert_equals_plain(model: rkr.RectifiedModel, plain: nn.Module, x: Tensor, tolerance: float = TOLERANCE) -> None:
    """`assert_equals` against the user's own network with the weights of `reference_state`."""

    def reference(x: Tensor) -> Tensor:
        return torch.func.functional_call(plain, reference_state(model), x)

    assert_equals(model, x, reference, tolerance)


# -- every geometry ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conv:
    """A convolution and its input. Printed whole by hypothesis when an example fails."""

    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    mode: str = "zeros"
    bias: bool = True
    batch: int = 2
    weight_channels_last: bool = False
    input_channels_last: bool = False

    def build(self) -> nn.Module:
        layer = CONVS[len(self.kernel)](
            self.inputs,
            self.outputs,
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias,
            self.mode,
        ).double()
        layer.weight.data = laid_out(layer.weight.data, self.weight_channels_last)
        return layer

    def example(self) -> Tensor:
        return laid_out(normal(self.batch, self.inputs, *self.size), self.input_channels_last)

    @property
    def separable(self) -> bool:
        """Whether the factored gradients are meant for it: 2-d, ungrouped, zeros around it, the same on both sides."""
        uneven = self.padding == "same" and any(
            d * (k - 1) % 2 for k, d in zip(self.kernel, self.dilation, strict=True)
        )
        return len(self.kernel) == 2 and self.groups == 1 and self.mode == "zeros" and not uneven


@st.composite
def convolutions(draw: st.DrawFn) -> Conv:
    dims = draw(st.sampled_from([2, 2, 2, 1, 3]))
    most = 3 if dims == 3 else 4

    def axes(least: int, most: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(least, most)] * dims))

    groups, wide, out = draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if groups > 1 and draw(st.booleans()):
        wide = 1  # depthwise
    kernel = draw(st.one_of(st.just((1,) * dims), st.just((3,) * dims), st.tuples(*[st.integers(1, most)] * dims)))
    stride, dilation, padding = axes(1, 3), axes(1, 2), axes(0, 2)
    named = draw(st.sampled_from(["", "", "same", "valid"]))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    spans = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if named == "same":
        stride, around = (1,) * dims, [s - s // 2 for s in spans]
    else:
        around = [0] * dims if named == "valid" else list(padding)
    least = [max(1, s + 1 - 2 * p, 1 if mode == "zeros" else p + 1) for s, p in zip(spans, around, strict=True)]
    return Conv(
        inputs=groups * wide,
        outputs=groups * out,
        kernel=kernel,
        size=tuple(n + draw(st.integers(0, 3)) for n in least),
        stride=stride,
        padding=named or padding,
        dilation=dilation,
        groups=groups,
        mode=mode,
        bias=draw(st.booleans()),
        batch=draw(st.integers(1, 3)),
        weight_channels_last=draw(st.booleans()),
        input_channels_last=draw(st.booleans()),
    )


POINT = Conv(5, 4, (1, 1), (5, 6), (2, 1), (0, 0), (1, 1), weight_channels_last=True, input_channels_last=True)
SQUARE = Conv(5, 4, (3, 3), (6, 6), (1, 1), (1, 1), (1, 1), weight_channels_last=True, input_channels_last=True)
EVEN = Conv(3, 4, (2, 4), (5, 6), (1, 1), "same", (1, 1))  # one more pixel on one side
DEPTHWISE = Conv(4, 8, (3, 2), (6, 5), (2, 1), (1, 1), (1, 2), groups=4)
choices = {
    "rank": st.integers(1, 4),
    "parts": st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
    "base": st.sampled_from([OPEN, FROZEN, FROZEN]),
    "layout": st.sampled_from(["axes", "axes", "reshape"]),
    "fast": st.sampled_from([True, True, True, False]),
    "x_grad": st.sampled_from([True, True, False]),
    "seed": st.integers(0, 99),
}
usual: dict[str, Any] = {
    "rank": 2,
    "parts": (True, True),
    "base": FROZEN,
    "layout": "axes",
    "fast": True,
    "x_grad": True,
    "seed": 0,
}


def check_layer(
    layer: nn.Module, x: Tensor, rank: int, parts: tuple[bool, bool], base: bool, layout: str, fast: bool, x_grad: bool
) -> None:
    rectify, scale = parts
    if x_grad:
        x.requires_grad_()
    model = with_task(
        nn.Sequential(nn.Identity(), layer),
        base,
        rank=rank,
        rectify_weights=rectify,
        scale_outputs=scale,
        layout=layout,
        fast=fast,
    )
    trained = {n.removeprefix("1."): p for n, p in model.named_task_parameters().items()}
    shared = {n.removeprefix("1."): p for n, p in model.network.state_dict(keep_vars=True).items()}
    expected = ({"lm", "rm"} if rectify else set()) | ({"f"} if scale else set())
    assert set(trained) == expected | (set() if base is FROZEN else set(shared))
    assert_equals(model, x, lambda x: reference_layer(layer, x, {**shared, **trained}, layout))


@given(conv=convolutions(), **choices)
@example(conv=POINT, **usual)
@example(conv=POINT, **{**usual, "base": OPEN})
@example(conv=SQUARE, **usual)
@example(conv=SQUARE, **{**usual, "base": OPEN})
@example(conv=SQUARE, **{**usual, "layout": "reshape"})
@example(conv=EVEN, **usual)
@example(conv=DEPTHWISE, **usual)
@sweep
def test_conv(
    conv: Conv, rank: int, parts: tuple[bool, bool], base: bool, layout: str, fast: bool, x_grad: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = conv.build(), conv.example()
    with torch.no_grad():  # the reference convolves as torch does
        assert_close(summed_conv(x, layer.weight, layer.bias, layer), layer(x))
    with factored_everywhere() as factored:
        check_layer(layer, x, rank, parts, base, layout, fast, x_grad)
    taken = fast and base is FROZEN and conv.separable and layout == "axes"
    event(f"factored: {taken}")
    assert factored.call_count == taken


@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    inputs=st.integers(1, 8),
    outputs=st.integers(1, 8),
    bias=st.booleans(),
    transposed=st.booleans(),
    **choices,
)
@example(lead=[300], inputs=4, outputs=3, bias=True, transposed=False, **usual)  # merged, as for many tokens
@example(lead=[1], inputs=8, outputs=8, bias=True, transposed=False, **usual)  # not merged
@sweep
def test_linear(
    lead: list[int],
    inputs: int,
    outputs: int,
    bias: bool,
    transposed: bool,
    rank: int,
    parts: tuple[bool, bool],
    base: bool,
    layout: str,
    fast: bool,
    x_grad: bool,
    seed: int,
) -> None:
    """Inputs with no, one, two or three leading dimensions; 0 gives an empty batch."""
    torch.manual_seed(seed)
    x = normal(inputs, *lead).movedim(0, -1) if transposed else normal(*lead, inputs)
    apply = kernels.FactoredLinear.apply
    with mock.patch.object(kernels.FactoredLinear, "apply", side_effect=apply) as factored:
        check_layer(nn.Linear(inputs, outputs, bias).double(), x, rank, parts, base, layout, fast, x_grad)
    assert factored.call_count == fast


def test_few_rows_are_not_merged_and_many_are() -> None:
    model = with_task(nn.Sequential(nn.Linear(8, 8)), FROZEN)
    apply = kernels.FactoredLinear.apply
    with mock.patch.object(kernels.FactoredLinear, "apply", side_effect=apply) as factored:
        model(torch.randn(1, 8))
        model(torch.randn(1000, 8))
    assert [call.args[-1] for call in factored.call_args_list] == [False, True]


def test_few_pixels_are_not_merged_and_many_are() -> None:
    model = with_task(nn.Sequential(nn.Conv2d(128, 128, 3)), FROZEN)
    apply = kernels.FactoredConv2d.apply
    with mock.patch.object(kernels.FactoredConv2d, "apply", side_effect=apply) as factored:
        model(torch.randn(1, 128, 4, 4))
        model(torch.randn(4, 128, 16, 16))
    assert [call.args[-1] for call in factored.call_args_list] == [False, True]


@pytest.mark.parametrize(("channels", "base", "taken"), [(128, FROZEN, 1), (128, OPEN, 0), (2, FROZEN, 0)])
def test_wide_convolutions_over_a_frozen_base_are_factored(channels: int, base: bool, taken: int) -> None:
    model = with_task(nn.Sequential(nn.Conv2d(channels, channels, 3)), base)
    apply = kernels.FactoredConv2d.apply
    with mock.patch.object(kernels.FactoredConv2d, "apply", side_effect=apply) as factored:
        model(torch.randn(1, channels, 4, 4))
    assert factored.call_count == taken


def test_strides_of_a_1x1_convolution_do_not_break_the_heap() -> None:
    """float32 and channels_last, where torch 2.13 writes out of bounds: in a process of its own, which may die."""
    script = """
        import sys, torch, rkr
        torch.set_num_threads(1)
        nhwc = dict(memory_format=torch.channels_last)
        paddings = [dict(padding=0), dict(padding="valid"), dict(padding=1, padding_mode="reflect")]
        kinds = [((6, 5), (2, 1), 8), ((4, 8), (2, 2), 32)]
        for (channels, stride, width), padding in [(kind, padding) for kind in kinds for padding in paddings]:
            for size in (3, 6, width):
                if size == 3:
                    torch.manual_seed(0)
                print(channels, padding, size, file=sys.stderr, flush=True)  # the last line: what the process died of
                for repeat in range(10):
                    conv = torch.nn.Conv2d(*channels, 1, stride, **padding)
                    model = rkr.rectify(torch.nn.Sequential(conv).to(**nhwc))
                    model.add_task("first")
                    x = torch.randn(2, channels[0], size, width).to(**nhwc)
                    y = model(x)
                    g = torch.randn_like(y)
                    y.backward(g)
                    if conv.padding_mode != "zeros":
                        x = torch.nn.functional.pad(x, (1, 1, 1, 1), mode=conv.padding_mode)
                    expected = torch.einsum("bihw,bohw->oi", x[:, :, ::2, ::stride[1]], g)
                    got = dict(model.network.named_parameters())["0.weight"].grad[:, :, 0, 0]
                    assert torch.allclose(got, expected, atol=1e-3), (got - expected).abs().max()
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-500:]


# -- numerical derivatives ---------------------------------------------------------------------------------

SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (2, 3)),
    "linear, many rows": (lambda: nn.Linear(2, 2), (3, 4, 2)),
    "conv1d": (lambda: nn.Conv1d(2, 2, 3, 2, 1), (2, 2, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0)), (2, 2, 4, 3)),
    "conv2d 1x1": (lambda: nn.Conv2d(2, 3, 1, (2, 1)), (2, 2, 4, 3)),
    "conv2d groups": (lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2), (1, 2, 3, 3)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (1, 2, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 3, 2, 3)),
}


def leaves_of(model: rkr.RectifiedModel, x: Tensor) -> list[Tensor]:
    return [x.requires_grad_(), *model.task_parameters()]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_gradcheck(case: tuple[Callable[[], nn.Module], tuple[int, ...]], base: bool, mode: str) -> None:
    build, shape = case
    model = with_task(nn.Sequential(build()).double(), base).train(mode == "train")
    with factored_everywhere():
        assert torch.autograd.gradcheck(lambda x, *_: model(x), leaves_of(model, normal(*shape)))


@pytest.mark.parametrize("case", [SMALL["linear"], SMALL["conv2d"]], ids=["linear", "conv2d"])
def test_the_literal_formula_has_second_derivatives(case: tuple[Callable[[], nn.Module], tuple[int, ...]]) -> None:
    build, shape = case
    model = with_task(nn.Sequential(build(), nn.Tanh()).double(), FROZEN, fast=False)
    assert torch.autograd.gradgradcheck(lambda x, *_: model(x), leaves_of(model, normal(*shape)))


# -- scaling factors of 0 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("zeros", [slice(1, 3), slice(None)], ids=["some", "all"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_gradient_of_f_where_it_is_0(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]], zeros: slice, base: bool
) -> None:
    build, shape = case
    network = nn.Sequential(build()).double()
    plain = copy.deepcopy(network)
    model = with_task(network, base)
    f = model.named_task_parameters()["0.f"]
    with torch.no_grad():
        f[zeros] = 0
    with factored_everywhere():
        assert_equals_plain(model, plain, normal(*shape).requires_grad_())
    model.train()(normal(*shape)).square().sum().backward()
    assert f.grad is not None
    assert torch.isfinite(f.grad).all()


# -- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "literal"])
@pytest.mark.parametrize("layout", ["axes", "reshape"])
def test_evaluation_has_the_same_bits_with_gradients(layout: str, fast: bool, dtype: torch.dtype, base: bool) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, (3, 2), groups=2), nn.Flatten(), nn.Linear(32, 5)
    )
    model = with_task(network.to(dtype), base, 0.3, layout=layout, fast=fast).eval()
    x = torch.randn(4, 3, 6, 5, dtype=dtype)
    y = model(x)
    assert y.requires_grad
    with torch.no_grad():
        assert torch.equal(model(x), y)
    with torch.inference_mode():
        assert torch.equal(model(x), y)
    assert torch.equal(model(x), y)
    y = model.train()(x)
    assert_close(y, model.eval()(x), "train output", 1e-5 if dtype is torch.float32 else TOLERANCE)


def test_inference_mode_then_training() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(27, 4)).double()
    plain = copy.deepcopy(network)
    model = with_task(network, FROZEN)
    x = normal(2, 2, 5, 5)
    with torch.inference_mode():
        model.eval()(x)
        model.train()(x)
    assert_equals_plain(model, plain, x.requires_grad_())


# -- other precisions --------------------------------------------------------------------------------------


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
    )


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "literal"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
def test_autocast(base: bool, fast: bool, mode: str) -> None:
    model = with_task(small_network(), base, 0.3, fast=fast).train(mode == "train")
    x = torch.randn(8, 3, 7, 7)
    named = model.named_task_parameters()
    y = model(x)
    expected = gradients(y, named, torch.ones_like(y))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = model(x)
    assert relative(z, y) < 0.03
    got = gradients(z, named, torch.ones_like(z))
    for name in named:
        assert got[name].dtype is torch.float32
        assert torch.isfinite(got[name]).all()
        assert relative(got[name], expected[name]) < 0.05, name


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "literal"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
def test_autocast_leaves_no_trace(channels_last: bool, fast: bool) -> None:
    """A task's answers have the same bits whether or not it ran with autocast before."""
    network = small_network()
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    model = with_task(network, FROZEN, 0.3, fast=fast).eval()
    other = with_task(twin, FROZEN, fast=fast).eval()
    with torch.no_grad():
        for p, q in zip(other.task_parameters(), model.task_parameters(), strict=True):
            p.copy_(q)
        x = torch.randn(4, 3, 7, 7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        assert torch.equal(model(x), other(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), y)  # with gradients


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_networks_of_other_precisions(dtype: torch.dtype, base: bool) -> None:
    model = with_task(small_network().to(dtype), base, 0.3)
    x = torch.randn(8, 3, 7, 7).to(dtype)
    exact = copy.deepcopy(model).double()
    y, z = model(x), exact(x.double())
    assert y.dtype is dtype
    bound = 20 * torch.finfo(dtype).eps
    assert relative(y, z) < bound
    got = gradients(y, model.named_task_parameters(), torch.ones_like(y))
    expected = gradients(z, exact.named_task_parameters(), torch.ones_like(z))
    for name in got:
        assert got[name].dtype is dtype
        assert relative(got[name], expected[name]) < bound, name


# -- inputs of unusual shape -------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "literal"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched_convolution(dims: int, base: bool, fast: bool) -> None:
    """As many output channels as pixels on a side: scaling along the wrong axis would go unnoticed by shapes."""
    network = nn.Sequential(CONVS[dims](3, 4, 3, padding=1)).double()
    plain = copy.deepcopy(network)
    model = with_task(network, base, fast=fast)
    with factored_everywhere():
        assert_equals_plain(model, plain, normal(3, *[4] * dims).requires_grad_())


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "literal"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
def test_empty_batch(base: bool, fast: bool) -> None:
    model = with_task(small_network(), base, fast=fast)
    with factored_everywhere():
        for mode in (True, False):
            y = model.train(mode)(torch.randn(0, 3, 7, 7))
            assert y.shape == (0, 4)
            y.sum().backward()
            for name, p in model.named_task_parameters().items():
                assert p.grad is not None, name
                assert torch.count_nonzero(p.grad) == 0, name


# -- what users do around a layer --------------------------------------------------------------------------


class AddInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("follower", [nn.ReLU(inplace=True), AddInPlace()], ids=["relu", "add"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_output_changed_in_place(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]], follower: nn.Module, base: bool, mode: str
) -> None:
    """Linear and convolution layers let the next layer write over their output; so must the rectified ones."""
    build, shape = case
    network = nn.Sequential(build().double(), follower, nn.Tanh())
    plain = copy.deepcopy(network)
    model = with_task(network, base).train(mode == "train")
    x = normal(*shape).requires_grad_()
    leaves = {"x": x, **model.named_task_parameters()}
    expected = torch.func.functional_call(plain, reference_state(model), x)
    g = torch.randn_like(expected)
    wanted = gradients(expected, leaves, g)
    with factored_everywhere():
        y = model(x)
        assert_close(y, expected)
        got = gradients(y, leaves, g)
    for name in leaves:
        assert_close(got[name], wanted[name], f"gradient of {name}")


class ToImage(nn.Module):
    """(1, C, H, W) to (H, W, C), whose gradient comes back in that order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0).permute(1, 2, 0).contiguous()


@pytest.mark.parametrize("memory", ["nchw", "nhwc", "hwc"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
def test_one_image(base: bool, memory: str) -> None:
    """A batch of 1 made of an (H, W, C) image, and the output used as one: its strides are ambiguous to torch."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), ToImage()).double()
    plain = copy.deepcopy(network)
    x = (
        normal(6, 5, 3).permute(2, 0, 1).unsqueeze(0)
        if memory == "hwc"
        else laid_out(normal(1, 3, 6, 5), memory == "nhwc")
    )
    with factored_everywhere():
        assert_equals_plain(with_task(network, base), plain, x.requires_grad_())


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(torch.tanh(self.conv(torch.tanh(self.conv(x)))))))


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
def test_a_layer_used_twice(base: bool) -> None:
    network = Twice().double()
    plain = copy.deepcopy(network)
    with factored_everywhere():
        assert_equals_plain(with_task(network, base), plain, normal(2, 3, 4, 4).requires_grad_())


@pytest.mark.parametrize("kept", ["weight", "bias"])
@pytest.mark.parametrize("case", SMALL.values(), ids=SMALL.keys())
def test_a_base_that_is_frozen_in_part(case: tuple[Callable[[], nn.Module], tuple[int, ...]], kept: str) -> None:
    build, shape = case
    network = nn.Sequential(build()).double()
    plain = copy.deepcopy(network)
    network[0]._parameters[kept].requires_grad_(False)
    model = with_task(network, OPEN)
    assert set(model.named_task_parameters()) == {"0.lm", "0.rm", "0.f", "0.weight", "0.bias"} - {f"0.{kept}"}
    with factored_everywhere():
        assert_equals_plain(model, plain, normal(*shape).requires_grad_())


def test_the_network_itself_may_be_the_layer() -> None:
    network = nn.Conv2d(3, 4, 3).double()
    plain = copy.deepcopy(network)
    model = with_task(network, FROZEN)
    assert set(model.named_task_parameters()) == {"lm", "rm", "f"}
    assert_equals_plain(model, plain, normal(2, 3, 5, 5).requires_grad_())


# -- layers of the user's own ------------------------------------------------------------------------------


class Standardised(nn.Conv2d):
    """Reads its weight and convolves by itself."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class PadsFirst(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 1, 0, 1)))


class Doubled(nn.Conv2d):
    """Changes the step that torch's own forward calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight), self.bias)


class Quiet(nn.Linear):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Standardised(3, 4, 3, padding=1), (2, 3, 4, 4)),
        (PadsFirst(3, 4, 2), (2, 3, 4, 4)),
        (Doubled(3, 4, 3), (2, 3, 4, 4)),
        (Cosine(5, 4), (3, 5)),
        (Quiet(5, 4), (3, 5)),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(5, 4), (3, 5)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_subclasses(layer: nn.Module, shape: tuple[int, ...], base: bool) -> None:
    network = nn.Sequential(copy.deepcopy(layer)).double()
    plain = copy.deepcopy(network)
    model = with_task(network, base)
    with factored_everywhere():
        assert_equals_plain(model, plain, normal(*shape).requires_grad_())


def test_weight_and_bias_are_those_of_the_task() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).double()
    base = {n: t.clone() for n, t in network.state_dict().items()}
    model = with_task(network, FROZEN)
    for name, expected in reference_state(model).items():
        assert_close(network.get_submodule(name[0]).__getattribute__(name[2:]), expected, name)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, base[name]), name


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, bias=bias, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_multihead_attention(bias: bool, base: bool) -> None:
    network = Attention(bias).double()
    plain = copy.deepcopy(network)
    model = with_task(network, base, 0.5)
    own = {f"attn.{part}{n}" for part in ("", "out_proj.") for n in ("lm", "rm", "f")}
    shared = set(network.state_dict()) if base is OPEN else set()
    assert set(model.named_task_parameters()) == own | shared
    assert model.named_task_parameters()["attn.lm"].shape == (8, 2)
    assert model.named_task_parameters()["attn.rm"].shape == (2, 24)
    assert_equals_plain(model, plain, normal(3, 5, 8).requires_grad_())


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_transformer_encoder_layer(norm_first: bool, base: bool) -> None:
    """In evaluation without gradients torch takes a fused path that reads the weights of the layers inside."""
    network = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True, norm_first=norm_first).double()
    plain = copy.deepcopy(network)
    assert_equals_plain(with_task(network, base, 0.3), plain, normal(3, 5, 8).requires_grad_())


# -- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize(
    ("options", "rectified", "scaled"),
    [
        ({"exclude": ["2", "7"]}, "05", "05"),
        ({"include": ["2", "5"]}, "25", "25"),
        ({"include": ["[0-5]"], "exclude": "2"}, "05", "05"),
        ({"rectify_weights": "conv", "scale_outputs": "linear"}, "02", "57"),
        ({"rectify_weights": "linear", "scale_outputs": False}, "57", ""),
        ({"rectify_weights": False}, "", "0257"),
        ({"rank": 50}, "0257", "0257"),
        ({"rank": 1, "ranks": {"2": 3, "7": 40}}, "0257", "0257"),
        ({"layout": "reshape", "rank": 3}, "0257", "0257"),
        ({"fast": False}, "0257", "0257"),
    ],
    ids=str,
)
def test_options(options: dict[str, Any], rectified: str, scaled: str, base: bool) -> None:
    """A whole network in double precision: layers left out, some parts only, ranks above the size of the matrix."""
    network = small_network().double()
    plain = copy.deepcopy(network)
    model = with_task(network, base, 0.3, **options)
    own = {f"{i}.{n}" for i in rectified for n in ("lm", "rm")} | {f"{i}.f" for i in scaled}
    assert set(model.named_task_parameters()) - set(network.state_dict()) == own
    for i in rectified:
        rank = options.get("ranks", {}).get(i, options.get("rank", 2))
        assert model.named_task_parameters()[f"{i}.lm"].shape[1] == rank
    with factored_everywhere():
        assert_equals_plain(model, plain, normal(2, 3, 7, 7).requires_grad_())


# -- bad input ---------------------------------------------------------------------------------------------


def named_network(kind: str) -> tuple[nn.Module, Tensor]:
    layer, x = (nn.Linear(5, 4), torch.randn(2, 5)) if kind == "fc" else (nn.Conv2d(3, 4, 3), torch.randn(2, 3, 5, 5))
    return nn.Sequential(OrderedDict(features=nn.Sequential(OrderedDict({kind: layer})))), x


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("kind", ["fc", "conv"])
@pytest.mark.parametrize(
    ("network_type", "input_type"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.int64),
    ],
    ids=str,
)
def test_wrong_dtype(kind: str, network_type: torch.dtype, input_type: torch.dtype, base: bool, mode: str) -> None:
    network, x = named_network(kind)
    model = with_task(network.to(network_type), base).train(mode == "train")
    message = rf"'features.{kind}' got {input_type}, .* {network_type}.*x\.to\({network_type}\)"
    with torch.set_grad_enabled(mode != "no_grad"), pytest.raises(rkr.UsageError, match=message):
        model(x.to(input_type))


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("base", [OPEN, FROZEN], ids=["open", "frozen"])
@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_wrong_device(kind: str, base: bool, mode: str) -> None:
    network, x = named_network(kind)
    model = with_task(network, base).train(mode == "train")
    message = rf"'features.{kind}' .*meta.* cpu: .*x\.to\('cpu'\).*model\.to\('meta'\)"
    with torch.set_grad_enabled(mode != "no_grad"), pytest.raises(rkr.UsageError, match=message):
        model(x.to("meta"))


@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_wrong_dtype_and_device(kind: str) -> None:
    network, x = named_network(kind)
    model = with_task(network, FROZEN)
    with pytest.raises(rkr.UsageError, match=f"'features.{kind}'"):
        model(x.to("meta", torch.float64))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", ["fc", "conv"])
def test_a_network_on_the_meta_device(kind: str, mode: str) -> None:
    """Shapes without computing, as torch users do to size a network; wrong types are still told."""
    network, x = named_network(kind)
    model = with_task(network, FROZEN).to("meta").train(mode == "train")
    y = model(x.to("meta"))
    assert y.device.type == "meta"
    assert y.shape == ((2, 4) if kind == "fc" else (2, 4, 3, 3))
    with pytest.raises(rkr.UsageError, match=f"'features.{kind}' got torch.float64"):
        model(x.to("meta", torch.float64))

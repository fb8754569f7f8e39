"""The kernels against the definition, written here a second time with explicit indices, in float64.

R[o, i, h, w] = sum over k of LM[w·C_in + i, k] · RM[k, h·C_out + o], then torch's own layer with W + R, then times F.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rkr.core import kernels
from rkr.core.rectification import factor_shapes, formula, rectification

TOLERANCE = 1e-12
FORMATS = ("contiguous", "channels_last")

sweep = settings(deadline=None, derandomize=True, max_examples=300)
shorter = settings(deadline=None, derandomize=True, max_examples=150)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# -- the definition ----------------------------------------------------------------------------------------


def indexed_rectification(lm: Tensor, rm: Tensor, shape: Sequence[int], layout: str = "axes") -> Tensor:
    """R entry by entry: which row of LM and which column of RM each entry of the weight comes from.

    Conv2d is (o, i, h, w). The kernel axes before the last count as one, so Conv3d has h = d·H + h'; Conv1d and
    Linear have h = 0, Linear has w = 0 too.
    """
    outputs, inputs, *kernel = shape
    o, i, *taps = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    if layout == "axes":
        w = taps[-1] if taps else torch.zeros_like(o)
        h = torch.zeros_like(o)
        for size, tap in zip(kernel[:-1], taps[:-1], strict=True):
            h = h * size + tap
        rows, columns = w * inputs + i, h * outputs + o
    else:  # position in the row-major (W, H, C_in, C_out), which is position in the row-major LM·RM
        position = torch.zeros_like(o)
        for size, tap in zip(reversed(kernel), reversed(taps), strict=True):
            position = position * size + tap
        position = (position * inputs + i) * outputs + o
        rows, columns = position // rm.shape[1], position % rm.shape[1]
    return torch.einsum("...k,...k->...", lm[rows], rm.t()[columns])


def scaled(y: Tensor, f: Tensor | None, dim: int) -> Tensor:
    """Output times F, one value for each index of `dim`."""
    return y if f is None else (y.movedim(dim, -1) * f).movedim(-1, dim)


def rectified(w: Tensor, lm: Tensor | None, rm: Tensor | None, layout: str = "axes") -> Tensor:
    return w if lm is None else w + indexed_rectification(lm, rm, w.shape, layout)


def plain_conv(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """torch's convolution of a padded input; a 1x1 kernel reads every n-th pixel first.

    (torch 2.13 writes out of bounds in the weight gradient of a 1x1 channels_last convolution with unequal strides.)
    """
    x = F.pad(x, [p for both in reversed(padding) for p in (both, both)])
    if w[0, 0].numel() == 1:
        x = x[(..., *(slice(None, None, s) for s in stride))]
        stride = (1,) * len(stride)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[w.dim() - 3]
    return convolve(x, w, b, stride, 0, dilation)


# -- helpers -----------------------------------------------------------------------------------------------


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def factors(shape: Sequence[int], rank: int) -> tuple[Tensor, Tensor]:
    """LM and RM for a weight, sizes by the paper: (W·C_in, K) and (K, H·C_out)."""
    outputs, inputs, *kernel = shape
    inner, outer = (kernel[-1] if kernel else 1), math.prod(kernel[:-1])
    return normal(inner * inputs, rank), normal(rank, outer * outputs)


def laid_out(x: Tensor, memory: str) -> Tensor:
    """The same values in another memory format; the channel is dim 1."""
    if memory == "contiguous" or x.dim() < 3:
        return x.contiguous()
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def assert_close(actual: Tensor, expected: Tensor, what: str = "values") -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if actual.numel():
        error, scale = (actual - expected).abs().max().item(), max(1.0, expected.abs().max().item())
        assert error <= TOLERANCE * scale, f"{what}: off by {error:.1e} at scale {scale:.1e}"


def assert_same(
    fast: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    tensors: dict[str, Tensor | None],
    trained: Sequence[str],
    gradient: Callable[[Tensor], Tensor] = torch.randn_like,
) -> None:
    """Outputs and gradients of two functions of the same tensors; those named in `trained` ask for gradients."""
    leaves = {n: None if t is None else t.detach().requires_grad_(n in trained) for n, t in tensors.items()}
    wanted = {n: t for n, t in leaves.items() if t is not None and n in trained}
    y, z = fast(**leaves), reference(**leaves)
    assert_close(y, z, "output")
    if not wanted:
        assert not y.requires_grad
        return
    g = gradient(z.detach())
    got, expected = (torch.autograd.grad(out, list(wanted.values()), g) for out in (y, z))
    for name, a, b in zip(wanted, got, expected, strict=True):
        assert_close(a, b, f"gradient of {name}")


def names(*allowed: str) -> st.SearchStrategy[list[str]]:
    """Which tensors ask for gradients: all in most examples."""
    return st.one_of(st.just(list(allowed)), st.lists(st.sampled_from(allowed), unique=True))


@st.composite
def weight_shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """(C_out, C_in, *kernel) of a Linear, Conv1d, Conv2d or Conv3d."""
    kernel = draw(st.lists(st.integers(1, 4), max_size=3))
    return (draw(st.integers(1, 6)), draw(st.integers(1, 6)), *kernel)


PARTS = [("lm", "f"), ("lm",), ("f",), ()]
LAYOUTS = ["axes", "reshape"]


# -- R and the formula -------------------------------------------------------------------------------------


def test_rectification_by_hand() -> None:
    """2 filters over 1 channel with a 2 x 3 kernel, rank 1: LM holds the width, RM (height, filter)."""
    lm = torch.tensor([[1.0], [2.0], [3.0]])
    rm = torch.tensor([[1.0, 10.0, 100.0, 1000.0]])
    expected = [[[[1, 2, 3], [100, 200, 300]]], [[[10, 20, 30], [1000, 2000, 3000]]]]
    torch.testing.assert_close(
        rectification(lm, rm, torch.Size([2, 1, 2, 3])), torch.tensor(expected, dtype=torch.float32)
    )
    # LM·RM, row by row, is 1 10 100 1000 2 20 ...: read as (width, height, input, filter)
    torch.testing.assert_close(
        rectification(lm, rm, torch.Size([2, 1, 2, 3]), "reshape")[:, 0, :, 1],
        torch.tensor([[2.0, 200], [20, 2000]]),
    )


@given(weight_shapes(), st.integers(1, 4), st.sampled_from(LAYOUTS), st.integers(0, 99))
@sweep
def test_rectification_is_the_indexed_sum(shape: tuple[int, ...], rank: int, layout: str, seed: int) -> None:
    torch.manual_seed(seed)
    lm, rm = factors(shape, rank)
    assert factor_shapes(shape, rank) == (lm.shape, rm.shape)
    assert_same(
        lambda lm, rm: rectification(lm, rm, torch.Size(shape), layout),
        lambda lm, rm: indexed_rectification(lm, rm, shape, layout),
        {"lm": lm, "rm": rm},
        ["lm", "rm"],
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
@pytest.mark.parametrize("kernel", [(), (3,), (2, 3), (2, 1, 3)], ids=["linear", "conv1d", "conv2d", "conv3d"])
def test_formula_is_equations_1_and_2(kernel: tuple[int, ...], parts: Sequence[str], layout: str) -> None:
    shape = (5, 4, *kernel)
    lm, rm = factors(shape, 2) if "lm" in parts else (None, None)
    tensors = {"x": normal(2, 4, *(5 for _ in kernel)), "w": normal(*shape), "b": normal(5), "lm": lm, "rm": rm}
    tensors["f"] = normal(5) if "f" in parts else None

    def layer(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ones = (1,) * len(kernel)
        return plain_conv(x, w, b, ones, tuple(k - 1 for k in kernel), ones) if kernel else F.linear(x, w, b)

    assert_same(
        lambda x, w, b, lm, rm, f: formula(w, b, lm, rm, f, lambda w, b: layer(x, w, b), layout),
        lambda x, w, b, lm, rm, f: scaled(layer(x, rectified(w, lm, rm, layout), b), f, 1),
        tensors,
        list(tensors),
    )


# -- merged weights ----------------------------------------------------------------------------------------


@given(
    weight_shapes(),
    st.integers(1, 4),
    st.sampled_from(PARTS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FORMATS),
    st.integers(0, 99),
)
@sweep
def test_merge(shape: tuple[int, ...], rank: int, parts: Sequence[str], layout: str, memory: str, seed: int) -> None:
    torch.manual_seed(seed)
    w = laid_out(normal(*shape), memory)
    before = w.clone()
    lm, rm = factors(shape, rank) if "lm" in parts else (None, None)
    f = normal(shape[0]) if "f" in parts else None
    merged = kernels.merge(w, lm, rm, f, layout)
    assert_close(merged, scaled(rectified(w, lm, rm, layout), f, 0))
    assert merged.stride() == w.stride()
    assert merged.data_ptr() != w.data_ptr()
    assert torch.equal(w, before)


def test_merge_of_a_transposed_weight() -> None:
    """Tied or converted weights may be the transpose of a contiguous matrix."""
    w, f = normal(5, 7).t(), normal(7)
    lm, rm = factors(w.shape, 3)
    assert_close(kernels.merge(w, lm, rm, f), scaled(rectified(w, lm, rm), f, 0))


@given(
    weight_shapes(),
    st.integers(1, 4),
    st.sampled_from(PARTS),
    st.sampled_from(FORMATS),
    names("w", "lm", "rm", "f"),
    st.integers(0, 99),
)
@sweep
def test_merged_weight(
    shape: tuple[int, ...], rank: int, parts: Sequence[str], memory: str, trained: list[str], seed: int
) -> None:
    torch.manual_seed(seed)
    lm, rm = factors(shape, rank) if "lm" in parts else (None, None)
    assert_same(
        lambda w, lm, rm, f: kernels.MergedWeight.apply(w, lm, rm, f),
        lambda w, lm, rm, f: scaled(rectified(w, lm, rm), f, 0),
        {"w": laid_out(normal(*shape), memory), "lm": lm, "rm": rm, "f": normal(shape[0]) if "f" in parts else None},
        trained,
    )


# -- linear ------------------------------------------------------------------------------------------------


def linear_tensors(lead: Sequence[int], inputs: int, outputs: int, rank: int | None, parts: Sequence[str]) -> dict:
    lm, rm = (None, None) if rank is None else factors((outputs, inputs), rank)
    return {
        "x": normal(*lead, inputs),
        "w": normal(outputs, inputs),
        "b": normal(outputs) if "b" in parts else None,
        "lm": lm,
        "rm": rm,
        "f": normal(outputs) if "f" in parts else None,
    }


def reference_linear(
    x: Tensor, w: Tensor, b: Tensor | None, lm: Tensor | None, rm: Tensor | None, f: Tensor | None
) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, rectified(w, lm, rm))
    return scaled(y if b is None else y + b, f, -1)


def factored_linear(fold: bool) -> Callable[..., Tensor]:
    return lambda x, w, b, lm, rm, f: kernels.factored_linear(x, w, b, lm, rm, f, fold)


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 7),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from(["bf", "b", "f", ""]),
    names("x", "w", "b", "lm", "rm", "f"),
    st.booleans(),
    st.integers(0, 99),
)
@sweep
@example([6], 5, 4, 2, "bf", ["x", "lm", "rm", "f"], True, 0)  # a frozen base, merged
@example([6], 5, 4, 2, "bf", ["x", "lm", "rm", "f"], False, 0)
def test_factored_linear(
    lead: list[int],
    inputs: int,
    outputs: int,
    rank: int | None,
    parts: str,
    trained: list[str],
    fold: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tensors = linear_tensors(lead, inputs, outputs, rank, parts)
    assert_same(factored_linear(fold), reference_linear, tensors, trained)


@pytest.mark.parametrize("fold", [False, True])
def test_factored_linear_with_strided_tensors(fold: bool) -> None:
    tensors = linear_tensors((3, 4), 5, 6, 2, "bf")
    tensors["x"] = normal(5, 4, 3).permute(2, 1, 0)
    expanded = normal(6)
    for gradient in (lambda z: expanded.expand_as(z), lambda z: normal(6, 4, 3).permute(2, 1, 0)):
        assert_same(factored_linear(fold), reference_linear, tensors, list(tensors), gradient)


# -- convolution -------------------------------------------------------------------------------------------


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, tuple[int, int]]:
    """Kernel, stride, padding, dilation and an input size that fits them; all free of each other on both axes."""
    kernel, stride, padding, dilation = (draw(pairs(*ends)) for ends in ((1, 4), (1, 4), (0, 3), (1, 2)))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    size = (least[0] + draw(st.integers(0, 4)), least[1] + draw(st.integers(0, 4)))
    return {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "size": size}


def conv_tensors(geometry: dict, inputs: int, outputs: int, rank: int | None, parts: Sequence[str]) -> dict:
    shape = (outputs, inputs, *geometry["kernel"])
    lm, rm = (None, None) if rank is None else factors(shape, rank)
    return {
        "x": normal(2, inputs, *geometry["size"]),
        "w": normal(*shape),
        "b": normal(outputs) if "b" in parts else None,
        "lm": lm,
        "rm": rm,
        "f": normal(outputs) if "f" in parts else None,
    }


def both_convs(geometry: dict, fold: bool = True) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    where = (geometry["stride"], geometry["padding"], geometry["dilation"])
    return (
        lambda x, w, b, lm, rm, f: kernels.FactoredConv2d.apply(x, w, b, lm, rm, f, *where, fold),
        lambda x, w, b, lm, rm, f: scaled(plain_conv(x, rectified(w, lm, rm), b, *where), f, 1),
    )


SQUARE = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "size": (5, 5)}
POINT = {"kernel": (1, 1), "stride": (2, 1), "padding": (0, 0), "dilation": (1, 1), "size": (5, 4)}
WIDE = {"kernel": (2, 4), "stride": (1, 3), "padding": (2, 0), "dilation": (2, 1), "size": (4, 9)}
# Padding so wide that some kernel positions read nothing but zeros.
EDGE = {"kernel": (3, 3), "stride": (3, 4), "padding": (3, 3), "dilation": (2, 2), "size": (1, 1)}


@given(
    geometries(),
    st.integers(1, 5),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 4)),
    st.sampled_from(["bf", "b", "f", ""]),
    names("x", "lm", "rm", "f"),
    st.tuples(*[st.sampled_from(FORMATS)] * 3),
    st.integers(0, 99),
)
@sweep
@example(SQUARE, 3, 4, 2, "bf", ["x", "lm", "rm", "f"], ("channels_last",) * 3, 0)
@example(POINT, 3, 4, 2, "bf", ["x", "lm", "rm", "f"], ("channels_last",) * 3, 0)
@example(EDGE, 3, 4, 2, "bf", ["x", "lm", "rm", "f"], ("channels_last",) * 3, 0)
def test_factored_conv2d(
    geometry: dict,
    inputs: int,
    outputs: int,
    rank: int | None,
    parts: str,
    trained: list[str],
    memory: tuple[str, str, str],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tensors = conv_tensors(geometry, inputs, outputs, rank, parts)
    tensors["x"], tensors["w"] = laid_out(tensors["x"], memory[0]), laid_out(tensors["w"], memory[1])
    for fold in (True, False):
        pair = both_convs(geometry, fold)
        assert_same(*pair, tensors, trained, lambda z: laid_out(torch.randn_like(z), memory[2]))


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("geometry", [SQUARE, POINT, WIDE], ids=["3x3", "1x1", "2x4"])
def test_factored_conv2d_with_strided_gradients(geometry: dict, memory: str) -> None:
    """`y.sum().backward()` sends one number expanded to the whole output; slices and flips send strided ones."""
    tensors = conv_tensors(geometry, 4, 3, 2, "bf")
    tensors["x"] = laid_out(tensors["x"], memory)
    for gradient in (
        lambda z: torch.tensor(1.5, dtype=z.dtype).expand_as(z),
        lambda z: normal(z.shape[1], 1, 1).expand_as(z),
        lambda z: normal(*reversed(z.shape)).permute(3, 2, 1, 0),
        lambda z: normal(z.shape[0], 2 * z.shape[1], *z.shape[2:])[:, ::2],
    ):
        for fold in (True, False):
            assert_same(*both_convs(geometry, fold), tensors, ["x", "lm", "rm", "f"], gradient)


@given(geometries(), st.integers(1, 4), st.booleans(), st.sampled_from(FORMATS), st.sampled_from(FORMATS))
@shorter
def test_factor_gradients(geometry: dict, rank: int, with_f: bool, x_memory: str, dy_memory: str) -> None:
    """dLM and dRM from the full weight gradient, contracted with the indexed sum."""
    torch.manual_seed(0)
    t = conv_tensors(geometry, 3, 4, rank, "f" if with_f else "")
    where = (geometry["stride"], geometry["padding"], geometry["dilation"])
    lm, rm = t["lm"].requires_grad_(), t["rm"].requires_grad_()
    y = scaled(plain_conv(t["x"], rectified(t["w"], lm, rm), None, *where), t["f"], 1)
    dy = laid_out(torch.randn_like(y), dy_memory)
    expected = torch.autograd.grad(y, (lm, rm), dy)
    for fold in (True, False):
        x = laid_out(t["x"], x_memory)
        z = kernels.FactoredConv2d.apply(x, t["w"], None, lm, rm, t["f"], *where, fold)
        got = torch.autograd.grad(z, (lm, rm), dy)
        assert_close(got[0], expected[0], "gradient of lm")
        assert_close(got[1], expected[1], "gradient of rm")


# -- scaling factors ---------------------------------------------------------------------------------------


def strided(shape: Sequence[int], how: str) -> Tensor:
    x = normal(*shape)
    if how == "reversed":
        axes = tuple(reversed(range(x.dim())))
        return normal(*(shape[a] for a in axes)).permute(axes)
    if how == "sliced":
        return normal(shape[0], 2 * shape[1], *shape[2:])[:, ::2]
    if how == "expanded":
        return normal(1, shape[1], *[1] * (x.dim() - 2)).expand(shape)
    return laid_out(x, how)


HOW = (*FORMATS, "reversed", "sliced", "expanded")


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=5),
    st.sampled_from(HOW),
    st.sampled_from(HOW),
    st.integers(0, 99),
)
@example([1, 2, 1, 2], "contiguous", "reversed", 0)  # channels_last by its strides, but not as torch suggests it
@sweep
def test_channel_dot(shape: list[int], first: str, second: str, seed: int) -> None:
    torch.manual_seed(seed)
    a, b = strided(shape, first), strided(shape, second)
    assert_close(kernels.channel_dot(a, b), torch.einsum("nc...,nc...->c", a, b))


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("size", [(3, 4), (1, 4), (3, 1), (1, 1)], ids=str)
def test_channel_dot_of_one_image(size: tuple[int, int], memory: str) -> None:
    """(H, W, C) seen as a batch of 1: torch's batch-norm kernel takes it for contiguous and channels_last at once."""
    image = normal(*size, 5).permute(2, 0, 1).unsqueeze(0)
    other = laid_out(normal(1, 5, *size), memory)
    expected = torch.einsum("nchw,nchw->c", image, other)
    assert_close(kernels.channel_dot(image, other), expected)
    assert_close(kernels.channel_dot(other, image), expected)


def test_channel_dot_by_hand() -> None:
    a = torch.arange(8.0).view(2, 2, 2)  # channel 0: 0 1 4 5, channel 1: 2 3 6 7
    assert kernels.channel_dot(a, a).tolist() == [42, 98]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_channel_dot_keeps_the_type(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 4, 3, 5, 3).to(dtype)
    got = kernels.channel_dot(a, b)
    expected = torch.einsum("nchw,nchw->c", a.double(), b.double())
    assert got.dtype is dtype
    assert (got.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()


# Below 1e-154 F cannot divide the output; above it, it must.
SCALES = {
    "some zero": [0.0, 1.5, 0.0, -2.0],
    "all zero": [0.0] * 4,
    "zero and negative zero": [-0.0, 0.0, 1.0, 1.0],
    "subnormal": [5e-324, 1e-310, 1.0, -1.0],
    "tiny": [1e-200, -1e-160, 1.0, 0.0],
    "small": [1e-150, -1e-100, 1e-30, 1.0],
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("layer", [f"{k}{how}" for k in ("linear", "3x3", "1x1", "2x4") for how in ("", ", merged")])
@pytest.mark.parametrize("rank", [2, None])
def test_gradient_of_a_vanishing_f(layer: str, scale: list[float], rank: int | None) -> None:
    if layer.startswith("linear"):
        tensors = linear_tensors((6,), 5, 4, rank, "bf")
        pair = factored_linear(layer.endswith("merged")), reference_linear
    else:
        geometry = {"3x3": SQUARE, "1x1": POINT, "2x4": WIDE}[layer.partition(",")[0]]
        tensors = conv_tensors(geometry, 3, 4, rank, "bf")
        pair = both_convs(geometry, layer.endswith("merged"))
    tensors["f"] = torch.tensor(scale, dtype=torch.float64)
    assert_same(*pair, tensors, ["x", "lm", "rm", "f"])


# -- numerical derivatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [(), (2,), (2, 3), (1, 2, 2)], ids=["linear", "conv1d", "conv2d", "conv3d"])
def test_gradcheck_merged_weight(kernel: tuple[int, ...]) -> None:
    w, (lm, rm), f = normal(3, 2, *kernel), factors((3, 2, *kernel), 2), normal(3)
    assert torch.autograd.gradcheck(kernels.MergedWeight.apply, [t.requires_grad_() for t in (w, lm, rm, f)])


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_gradcheck_factored_linear(fold: bool, zeros: bool) -> None:
    tensors = linear_tensors((2, 3), 4, 3, 2, "bf")
    if zeros:
        tensors["f"][1] = 0
    assert torch.autograd.gradcheck(
        lambda *t: kernels.factored_linear(*t, fold), [t.requires_grad_() for t in tensors.values()]
    )


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("geometry", [SQUARE, POINT, WIDE], ids=["3x3", "1x1", "2x4"])
def test_gradcheck_factored_conv2d(geometry: dict, memory: str, zeros: bool, fold: bool) -> None:
    t = conv_tensors(geometry, 2, 3, 2, "bf")
    if zeros:
        t["f"][1] = 0
    trained = [t[n].requires_grad_() for n in ("lm", "rm", "f")]
    x = laid_out(t["x"][:, :, :5, :5], memory).requires_grad_()
    fast = both_convs(geometry, fold)[0]
    assert torch.autograd.gradcheck(lambda x, lm, rm, f: fast(x, t["w"], t["b"], lm, rm, f), [x, *trained])


def test_second_derivatives_are_refused() -> None:
    """The kernels have no second derivative: asking for one is an error, not a wrong number."""
    linear = [t.requires_grad_() for t in linear_tensors((3,), 4, 3, 2, "bf").values()]
    conv = conv_tensors(SQUARE, 2, 3, 2, "bf")
    x = conv["x"].requires_grad_()
    outputs = {
        kernels.factored_linear(*linear, False): linear[0],
        kernels.MergedWeight.apply(linear[1], *linear[3:]): linear[1],
        both_convs(SQUARE)[0](**conv): x,
    }
    for y, leaf in outputs.items():
        (g,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()

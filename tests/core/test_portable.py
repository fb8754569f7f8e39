"""The traced form of every kind of layer computes what the model does: in float64, to 1e-12 of the largest value.

`rkr.core.portable` makes it; here it runs in plain PyTorch. `test_export.py` runs what is exported from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.tasks import agree, model_of, rows
from torch import Tensor, nn

import rkr
from rkr.core import adapters
from rkr.core.adapters import Adapter, LinearAdapter, register_layer
from rkr.core.portable import PortableByWeight
from rkr.core.portable.conv import PortableConv
from rkr.core.portable.linear import PortableLinear
from rkr.core.portable.network import PortableNetwork, plain_state

TASKS = ("a", "b", "c")
CLASSES = {"a": 3, "b": 5, "c": 2}
EXACT = 1e-12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _registry() -> Iterator[None]:
    kept = dict(adapters._LAYERS)
    yield
    adapters._LAYERS.clear()
    adapters._LAYERS.update(kept)


def check(model: rkr.RectifiedModel, *args: Any, exact: float = EXACT, **kwargs: Any) -> None:
    """A batch with several tasks, and each task's tensors as inputs, against the model with one task at a time."""
    batch = len(next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)))
    names = list(model.tasks)
    index = (torch.arange(batch) * 2 + 1) % len(names)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        got = PortableNetwork(model, model.tasks.values())(*args, task=index, **kwargs)
        agree(got, rows(model, [names[i] for i in index.tolist()], *args, **kwargs), exact)
        given = PortableNetwork(model, None)
        for name, task in model.tasks.items():
            model.set_task(name)
            want = model(*args, **kwargs)
            agree(given(*args, tensors=plain_state(model, task), **kwargs), getattr(want, "logits", want), exact)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def one(layer: nn.Module, **options: Any) -> rkr.RectifiedModel:
    return model_of(nn.Sequential(layer).double(), dict.fromkeys(TASKS), rank=3, **options)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CONVS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2), (5, 4, 11)),
    "1d_groups": (lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), (5, 4, 11)),
    "2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (5, 4, 6, 7)),
    "2d_pointwise": (lambda: nn.Conv2d(4, 6, 1), (5, 4, 6, 7)),
    "2d_pointwise_stride": (lambda: nn.Conv2d(4, 6, 1, stride=(2, 3)), (5, 4, 6, 7)),
    "2d_uneven": (lambda: nn.Conv2d(4, 6, (2, 3), (2, 1), (1, 0), (1, 2)), (5, 4, 6, 7)),
    "2d_row": (lambda: nn.Conv2d(4, 6, (1, 3), stride=2, padding=(1, 1)), (5, 4, 6, 7)),
    "2d_column": (lambda: nn.Conv2d(4, 6, (3, 1), stride=2, padding=1), (5, 4, 6, 7)),
    "2d_same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), (5, 4, 6, 7)),
    "2d_same_even": (lambda: nn.Conv2d(4, 6, (2, 4), padding="same"), (5, 4, 6, 7)),
    "2d_valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (5, 4, 6, 7)),
    "2d_groups": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (5, 4, 6, 7)),
    "2d_depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (5, 4, 6, 7)),
    "2d_multiplier": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding=2), (5, 4, 6, 7)),
    "2d_reflect": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), (5, 4, 6, 7)),
    "2d_circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2, padding_mode="circular"), (5, 4, 6, 7)),
    "2d_replicate_same": (lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="replicate"), (5, 4, 6, 7)),
    "3d": (lambda: nn.Conv3d(4, 6, (2, 3, 1), stride=(1, 2, 2), padding=(1, 0, 0)), (5, 4, 3, 5, 4)),
    "3d_groups": (lambda: nn.Conv3d(4, 6, 3, padding=1, groups=2), (5, 4, 3, 5, 4)),
    "transposed_1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (5, 4, 7)),
    "transposed_2d": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2)), (5, 4, 5, 4)),
    "transposed_groups": (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=2, groups=2), (5, 4, 5, 4)),
    "transposed_depthwise": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=4, dilation=2, bias=False), (5, 4, 5, 4)),
    "transposed_3d": (lambda: nn.ConvTranspose3d(4, 6, (2, 1, 3), stride=(1, 2, 2), groups=2), (5, 4, 3, 4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("layout", ["axes", "reshape"])
@pytest.mark.parametrize("kind", CONVS)
def test_convolutions(kind: str, layout: str) -> None:
    build, shape = CONVS[kind]
    model = one(build(), layout=layout)
    check(model, double(*shape))
    module = PortableNetwork(model, model.tasks.values()).network[0]
    pointwise = set(model.network[0].kernel_size) == {1} and layout == "reshape"
    assert isinstance(module, PortableConv if layout == "axes" else PortableByWeight) or pointwise


@pytest.mark.parametrize("options", [{"rectify_weights": False}, {"scale_outputs": False}, {"rank": 1}], ids=str)
@pytest.mark.parametrize("kind", ["2d_groups", "transposed_2d"])
def test_convolutions_with_a_part_of_the_update(kind: str, options: dict[str, Any]) -> None:
    build, shape = CONVS[kind]
    model = model_of(nn.Sequential(build()).double(), dict.fromkeys(TASKS), **options)
    check(model, double(*shape))


class WithSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x, output_size=[17, 12])


def test_a_transposed_convolution_with_an_output_size() -> None:
    check(model_of(WithSize().double(), dict.fromkeys(TASKS)), double(3, 4, 5, 4))


@pytest.mark.parametrize("shape", [(7, 6), (4, 3, 6), (2, 3, 2, 6)], ids=str)
def test_linear(shape: tuple[int, ...]) -> None:
    check(one(nn.Linear(6, 5)), double(*shape))
    check(one(nn.Linear(6, 5, bias=False), layout="reshape"), double(*shape))


def test_embeddings() -> None:
    for layout in ("axes", "reshape"):
        for table in (nn.Embedding(9, 4), nn.Embedding(9, 4, padding_idx=2)):
            check(one(table, layout=layout), torch.randint(9, (5, 3)))
    for mode in ("sum", "mean"):
        check(one(nn.EmbeddingBag(9, 4, mode=mode, padding_idx=1)), torch.randint(9, (5, 3)))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, offsets: Tensor, x: Tensor) -> Tensor:
        return self.bag(x, offsets)


def test_bags_of_a_flat_input() -> None:
    check(model_of(Bags().double(), dict.fromkeys(TASKS)), torch.tensor([0, 2, 2, 5]), torch.randint(9, (7,)))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch_1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch_1d_long": (lambda: nn.BatchNorm1d(4), (5, 4, 3)),
    "batch_2d": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 2)),
    "batch_plain": (lambda: nn.BatchNorm2d(4, affine=False), (5, 4, 3, 2)),
    "batch_sync": (lambda: nn.SyncBatchNorm(4), (5, 4, 3, 2)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 2)),
    "instance_stats": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (5, 4, 3, 2)),
    "layer": (lambda: nn.LayerNorm(2), (5, 4, 3, 2)),
    "layer_two": (lambda: nn.LayerNorm((3, 2), bias=False), (5, 4, 3, 2)),
    "group": (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 2)),
    "rms": (lambda: nn.RMSNorm(2), (5, 4, 3, 2)),
}


@pytest.mark.parametrize("bn", ["auto", "stats", "affine", "frozen"])
@pytest.mark.parametrize("kind", NORMS)
def test_normalisation(kind: str, bn: str) -> None:
    build, shape = NORMS[kind]
    network = nn.Sequential(build(), nn.Flatten(), nn.Linear(4 * torch.Size(shape[2:]).numel(), 3)).double()
    check(model_of(network, dict.fromkeys(TASKS), bn=bn, norm="per_task"), double(*shape))


def test_statistics_of_the_batch_are_for_one_task() -> None:
    network = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    model = model_of(network, dict.fromkeys(TASKS))
    with pytest.raises(rkr.UsageError, match=r"layer '0' normalises a batch .*\"merged\".*\"adapter\""):
        PortableNetwork(model, model.tasks.values())
    x = double(5, 4)
    with torch.no_grad():
        agree(PortableNetwork(model, None)(x, tensors=plain_state(model, model.tasks["c"])), model(x), EXACT)


# ---------------------------------------------------------------------------------------------------------
# Heads


@pytest.mark.parametrize(
    "head",
    [
        lambda: nn.Conv2d(4, 7, 1),
        lambda: nn.Conv2d(4, 7, 1, bias=False),
        lambda: nn.Conv2d(4, 7, 3, padding=1),
        lambda: nn.Conv2d(4, 7, 1, stride=2),
    ],
)
def test_heads_of_images(head: Callable[[], nn.Module]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), head()).double()
    check(model_of(network, CLASSES, head="1"), double(5, 3, 6, 5))


class Cosine(nn.Linear):
    """Logits by the angle to each class."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1)) * 4


@pytest.mark.parametrize("head", [lambda: nn.Linear(4, 7), lambda: nn.Linear(4, 7, bias=False), lambda: Cosine(4, 7)])
@pytest.mark.parametrize("shape", [(5, 6), (5, 3, 6)], ids=str)
def test_heads_of_vectors(head: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    network = nn.Sequential(nn.Linear(6, 4), head()).double()
    check(model_of(network, CLASSES, head="1"), double(*shape))
    check(model_of(nn.Sequential(nn.Linear(6, 4), head()).double(), {"only": 3}, head="1"), double(*shape))


# ---------------------------------------------------------------------------------------------------------
# Attention


class Attention(nn.Module):
    """Self-attention or attention over a memory, with or without masks."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor, memory: Tensor | None = None, **options: Any) -> Tensor:
        y, weights = self.attention(x, *[x if memory is None else memory] * 2, **options)
        return y if weights is None else torch.cat([y.flatten(), weights.flatten()])[None]


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "no_weights": {"need_weights": False},
    "weights_of_heads": {"average_attn_weights": False},
    "padding": {"key_padding_mask": torch.arange(4).expand(3, 4) > torch.tensor([[3], [1], [2]])},
    "padding_numbers": {"key_padding_mask": -torch.rand(3, 4, dtype=torch.float64), "need_weights": False},
    "causal": {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "is_causal": True},
    "causal_sdpa": {"attn_mask": torch.ones(4, 4, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    "for_each": {"attn_mask": torch.randn(6, 4, 4, dtype=torch.float64)},
}


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("part", [{}, {"exclude": ["attention"]}, {"exclude": ["attention.out_proj"]}], ids=str)
def test_attention(mask: str, options: dict[str, Any], part: dict[str, Any]) -> None:
    model = model_of(Attention(batch_first=True, **options).double(), dict.fromkeys(TASKS), **part)
    x = double(3, 4, 8)
    for args in ((x,), (x, double(3, 4, 8))):
        want = {}
        for name in TASKS:
            model.set_task(name)
            with torch.no_grad():
                want[name] = model.network.attention(args[0], args[-1], args[-1], **MASKS[mask])
        whole = PortableNetwork(model, model.tasks.values())
        given = PortableNetwork(model, None)
        for name in TASKS:
            state = plain_state(model, model.tasks[name])
            with torch.no_grad():
                agree(given(*args, tensors=state, **MASKS[mask]), flat(want[name]), EXACT)
        index = torch.tensor([2, 0, 1])
        whole.tasks.index = index
        with torch.no_grad():
            y, weights = whole.network.attention(args[0], args[-1], args[-1], **MASKS[mask])
        for row, i in enumerate(index.tolist()):
            expected, attended = want[TASKS[i]]
            agree(y[row], expected[row], EXACT)
            assert (weights is None) == (attended is None)
            if weights is not None:
                agree(weights[row], attended[row], EXACT)


def flat(output: tuple[Tensor, Tensor | None]) -> Tensor:
    y, weights = output
    return y if weights is None else torch.cat([y.flatten(), weights.flatten()])[None]


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 7}], ids=str)
def test_attention_with_the_batch_second(options: dict[str, Any]) -> None:
    """A batch in dimension 1 is found by its size; no other dimension has it."""

    class Turned(Attention):
        def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
            x, key, value = (t.transpose(0, 1) for t in (x, key, value))
            return self.attention(x, key, value, need_weights=False)[0].transpose(0, 1)

    sizes = 8, options.get("kdim", 8), options.get("vdim", 8)
    check(
        model_of(Turned(**options).double(), dict.fromkeys(TASKS)),
        *(double(3, n, size) for n, size in zip((4, 5, 5), sizes, strict=True)),
    )


def test_attention_without_a_batch() -> None:
    model = model_of(Attention().double(), dict.fromkeys(TASKS))
    model.set_task("b")
    x = double(4, 8)
    with torch.no_grad():
        given = PortableNetwork(model, None)(x, tensors=plain_state(model, model.tasks["b"]))
        agree(given, model(x), EXACT)
        with pytest.raises(rkr.UsageError, match="layer 'attention' has no dimension"):
            PortableNetwork(model, model.tasks.values())(x, task=torch.tensor([0, 1, 2, 0]))


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.fc(self.encoder(x)).mean(1)
        return self.fc(self.encoder(x.transpose(0, 1))).mean(0)


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.fc(self.both(source, target)).mean(1)


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": False}, {"norm_first": True, "activation": "gelu"}, {"bias": False}], ids=str
)
@pytest.mark.parametrize("norm", ["frozen", "per_task"])
@pytest.mark.parametrize("rectify_weights", [True, "conv"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformers(options: dict[str, Any], norm: str, rectify_weights: Any) -> None:
    model = model_of(Encoder(**options).double(), CLASSES, head="fc", norm=norm, rectify_weights=rectify_weights)
    check(model, double(7, 4, 8), exact=1e-11)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_and_decoder() -> None:
    check(model_of(Translator().double(), CLASSES, head="fc"), double(3, 4, 8), double(3, 5, 8), exact=1e-11)


# ---------------------------------------------------------------------------------------------------------
# Kinds of layers from outside, and other people's subclasses


class Scaled(nn.Module):
    """`y = x W / sqrt(inputs) + shift`, W stored as (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(inputs, outputs))
        self.shift = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel / len(self.kernel) ** 0.5 + self.shift


class ReadsWeight(Adapter):
    properties = ("kernel", "shift")
    weight_name, bias_name = "kernel", "shift"

    def canonical(self, weight: Tensor) -> Tensor:
        return weight.t()

    def stored(self, weight: Tensor) -> Tensor:
        return weight.t()


class Applies(ReadsWeight):
    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return input @ weight / len(weight) ** 0.5 + bias


class Inherits(LinearAdapter):
    """Another computation than the class whose traced form it inherits."""

    properties = ("kernel", "shift")
    weight_name, bias_name = "kernel", "shift"
    canonical, stored = ReadsWeight.canonical, ReadsWeight.stored

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return input @ weight / len(weight) ** 0.5 + bias


@pytest.mark.parametrize("adapter", [ReadsWeight, Applies, Inherits])
@pytest.mark.usefixtures("_registry")
def test_a_layer_of_the_user(adapter: type[Adapter]) -> None:
    register_layer(Scaled, adapter)
    model = model_of(nn.Sequential(Scaled(6, 8), nn.Tanh(), nn.Linear(8, 5)).double(), CLASSES, head="2")
    check(model, double(5, 6))
    assert type(PortableNetwork(model, model.tasks.values()).network[0]) is PortableByWeight


@pytest.mark.usefixtures("_registry")
def test_a_layer_of_the_user_with_a_thin_form() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))
            self.bias = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    class TransposedAdapter(LinearAdapter):
        canonical, stored = ReadsWeight.canonical, ReadsWeight.stored

    register_layer(Transposed, TransposedAdapter)
    model = model_of(nn.Sequential(Transposed(), nn.Linear(8, 5)).double(), CLASSES, head="1")
    check(model, double(5, 6))
    assert type(PortableNetwork(model, model.tasks.values()).network[0]) is PortableLinear


class Standardised(nn.Conv2d):
    """Computes with its weight in another form."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return self._conv_forward(x, (w - w.mean()) / w.std(), self.bias)


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_subclasses_with_a_forward_of_their_own() -> None:
    network = nn.Sequential(Standardised(3, 4, 3), Doubled(4), nn.Flatten(), nn.Linear(4 * 16, 5)).double()
    model = model_of(network, CLASSES, head="3")
    check(model, double(5, 3, 6, 6))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.again = self.one  # the same layer under two names
        self.one.register_forward_hook(lambda module, args, y: torch.tanh(y))
        self.two.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> Tensor:
        assert self.one.in_features == 6
        return self.fc(self.two(self.one(self.again(x)).to(self.one.weight.dtype)))


def test_hooks_attributes_and_layers_with_two_names() -> None:
    check(model_of(Hooked().double(), CLASSES, head="fc"), double(5, 6))


class Windows(nn.Module):
    """Several rows for each sample, one row for all, and places looked up once."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.every = nn.Embedding(4, 6), nn.Embedding(4, 6)
        self.norm, self.inner, self.fc = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:  # (B, 8, 6)
        x = x.reshape(-1, 4, 6) + self.place(torch.arange(4))  # (2·B, 4, 6)
        x = self.inner(self.norm(x)).unflatten(0, (-1, 2)).mean(1)  # (B, 4, 6)
        return self.fc(x + self.every(torch.arange(4)[None])).mean(1)


def test_several_rows_for_each_sample() -> None:
    model = model_of(Windows().double(), CLASSES, head="fc", exclude=["place"], norm="per_task")
    check(model, double(5, 8, 6))


@pytest.mark.parametrize(
    "options",
    [
        {"rectify_weights": "conv", "scale_outputs": "linear"},  # RKR-Lite
        {"rectify_weights": "linear", "scale_outputs": "conv"},
        {"rectify_weights": False},
        {"scale_outputs": False},
        {"ranks": {"conv2": 4, "fc1": 1}},
        {"exclude": ["conv1", "fc*"]},
        {"bn": "frozen"},
        {"bn": "stats"},
        {"bn": "affine"},
        {"fast": False},
        {"layout": "reshape"},
        {"mixed": "layer"},
        {"init_gain": 2.0},
    ],
    ids=str,
)
def test_options(options: Mapping[str, Any]) -> None:
    check(model_of(rkr.networks.lenet(4).double(), CLASSES, head="fc", **options), double(4, 3, 32, 32), exact=1e-11)


def test_many_tasks_and_one() -> None:
    for count in (1, 40):
        model = model_of(Hooked().double(), {f"t{i}": 2 + i % 3 for i in range(count)}, head="fc")
        check(model, double(6, 6))


def test_the_base_while_it_is_trained() -> None:
    model = rkr.rectify(rkr.networks.small_cnn(5).double(), head="fc")
    model.add_task("first", classes=3)
    model(double(8, 1, 8, 8)).sum().backward()
    model.eval()
    check(model, double(4, 1, 8, 8))


def test_wrong_numbers_of_tasks() -> None:
    model = model_of(Hooked().double(), CLASSES, head="fc")
    portable = PortableNetwork(model, model.tasks.values())
    with pytest.raises(rkr.UsageError, match="one number for each of the 5 samples"):
        portable(double(5, 6), task=torch.tensor([0, 1]))
    with pytest.raises((IndexError, RuntimeError), match="range"):
        portable(double(2, 6), task=torch.tensor([0, 3]))

"""One batch, a task per sample: every row must be what its own task answers, however the batch is computed."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.networks import VisualEncoder, lenet, resnet32

CLASSES = {"a": 3, "b": 5, "c": 2, "d": 5}
STRATEGIES = ("group", "layer", "auto")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.bn = nn.BatchNorm1d(16)
        self.fc2 = nn.Linear(16, 12)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.fc2(F.relu(self.bn(self.fc1(x))))))


class SmallLeNet(nn.Module):
    """Convolution, normalisation, linear layers: mostly linear, so that "auto" tries the "layer" strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.fc1 = nn.Linear(6 * 16, 20)
        self.fc = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return self.fc(F.relu(self.fc1(x.flatten(1))))


class Bare(nn.Module):
    """Linear layers alone, for inputs (B, 6) or (B, T, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 12)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def jiggle(model: rkr.RectifiedModel, name: str, size: float = 0.2) -> None:
    """Change all that a task owns, as training would, so that no two tasks compute alike."""
    with torch.no_grad():
        for key, tensor in model.tasks[name].tensors().items():
            if tensor.is_floating_point() and not key.endswith(".lm"):
                noise = size * torch.randn_like(tensor)
                if key.endswith(".rm"):
                    noise = noise / 8  # it adds up over all that a layer sees
                tensor.add_(noise.abs() if key.endswith("running_var") else noise)


def model_of(network: nn.Module, tasks: Sequence[str] = "abcd", **options: Any) -> rkr.RectifiedModel:
    model = rkr.rectify(network, **{"head": "fc", **options})
    for name in tasks:
        model.add_task(name, classes=None if model.head is None else CLASSES[name])
    for name in tasks:
        jiggle(model, name)
    return model.eval()


def expected(model: rkr.RectifiedModel, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Each row from its own task, one task at a time over the whole batch, padded with -inf."""
    current = model.task
    width = max(model.tasks[name].classes or 0 for name in names)
    rows = []
    with torch.no_grad():
        for i, name in enumerate(names):
            model.set_task(name)
            row = model(*args, **kwargs)[i]
            if model.head is not None:
                row = F.pad(row, (0, width - row.shape[-1]), value=-torch.inf)
            rows.append(row)
    if current is not None:
        model.set_task(current)
    return torch.stack(rows)


def check(model: rkr.RectifiedModel, names: Sequence[str], *args: Any, grad: bool = False, **kwargs: Any) -> Tensor:
    """Compare a mixed batch with `expected`, twice: the first may be a trial, the second must keep its word."""
    want = expected(model, names, *args, **kwargs)
    current = model.task
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            got = model(*args, tasks=names, **kwargs)
        assert got.shape == want.shape
        assert torch.equal(got == -torch.inf, want == -torch.inf)
        torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)
        assert model.task == current
    return got


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: lenet(10), (3, 32, 32)),
    "resnet32": (resnet32, (3, 32, 32)),
    "mlp": (Mlp, (6,)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_rows_are_each_tasks_own(kind: str, strategy: str) -> None:
    """Different class counts, tasks in any order, one group of one sample."""
    build, shape = NETWORKS[kind]
    model = model_of(build(), mixed=strategy)
    x = torch.randn(7, *shape)
    got = check(model, ["b", "a", "d", "b", "c", "a", "b"], x)
    assert got.shape == (7, 5)
    assert torch.isfinite(got[[0, 2, 3, 6]]).all()
    assert [int((row == -torch.inf).sum()) for row in got] == [0, 2, 0, 0, 3, 2, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_order(strategy: str) -> None:
    model = model_of(Mlp(), mixed=strategy)
    x = torch.randn(4, 6)
    for names in itertools.permutations("abcd"):
        check(model, names, x)
    for names in itertools.product("ab", repeat=4):
        check(model, names, x)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_task_and_one_sample(strategy: str) -> None:
    model = model_of(Mlp(), mixed=strategy)
    x = torch.randn(5, 6)
    assert check(model, ["c"] * 5, x).shape == (5, 2)
    assert check(model, ["c"], x[:1]).shape == (1, 2)
    assert check(model, ("b", "c"), x[:2]).shape == (2, 5)
    assert check(model, ["d", "d", "d", "d", "b"], x).shape == (5, 5)


def test_list_tuple_and_array() -> None:
    numpy = pytest.importorskip("numpy")
    model = model_of(Mlp())
    x = torch.randn(4, 6)
    want = expected(model, "abca", x)
    with torch.no_grad():
        for names in (["a", "b", "c", "a"], ("a", "b", "c", "a"), numpy.array(["a", "b", "c", "a"])):
            torch.testing.assert_close(model(x, tasks=names), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_encoder_without_head(strategy: str) -> None:
    """A tuple of outputs stays a tuple, each part in the order of the batch."""
    model = model_of(VisualEncoder(12, 10, 4), head=None, mixed=strategy)
    x = torch.randn(6, 12)
    names = ["c", "a", "b", "a", "d", "c"]
    want = []
    with torch.no_grad():
        for part in range(2):
            rows = []
            for i, name in enumerate(names):
                model.set_task(name)
                rows.append(model(x)[part][i])
            want.append(torch.stack(rows))
        for _ in range(2):
            got = model(x, tasks=names)
            assert type(got) is tuple
            assert len(got) == 2
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_outputs": False},
        {"rectify_weights": False},
        {"rectify_weights": "conv", "scale_outputs": "linear"},
        {"bn": "stats"},
        {"bn": "affine"},
        {"bn": "frozen"},
        {"layout": "reshape"},
        {"fast": False},
        {"ranks": {"fc1": 5}},
        {"exclude": "fc1"},
        {"cache_bytes": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options(options: dict[str, Any], strategy: str) -> None:
    model = model_of(SmallLeNet(), mixed=strategy, **options)
    check(model, ["b", "a", "c", "b", "d"], torch.randn(5, 3, 8, 8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_are_used_as_asked(strategy: str) -> None:
    """The "layer" strategy runs the network once for all tasks, "group" once for each."""
    model = model_of(Bare(), mixed=strategy)
    x = torch.randn(6, 6)
    check(model, list("abcabc"), x)
    calls = []
    model.network.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(x, tasks=list("abcabc"))
    assert len(calls) == (3 if strategy == "group" else 1)


def test_gradients_flow_to_the_task_in_use_only() -> None:
    for strategy in STRATEGIES:
        model = model_of(Mlp(), mixed=strategy)
        model.set_task("b")
        x = torch.randn(4, 6)
        check(model, ["a", "b", "b", "c"], x, grad=True)
        out = model(x, tasks=["a", "b", "b", "c"])
        out[out != -torch.inf].sum().backward()
        assert all(p.grad is not None for p in model.tasks["b"].parameters())
        assert all(p.grad is None for n in "acd" for p in model.tasks[n].parameters())
        assert all(p.grad is None for p in model.network.parameters())


# ---------------------------------------------------------------------------------------------------------
# Arguments and outputs of all kinds


class Two(nn.Module):
    """Two inputs, one by name, a number, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(4, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor, *, other: Tensor, gain: float = 1.0, extra: dict[str, Tensor] | None = None) -> Tensor:
        h = self.fc1(x) + gain * self.fc2(other)
        if extra is not None:
            h = h * extra["factor"]
        return self.fc(torch.tanh(h))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keyword_inputs(strategy: str) -> None:
    model = model_of(Two(), mixed=strategy)
    x, other, factor = torch.randn(5, 6), torch.randn(5, 4), torch.rand(5, 1)
    names = ["b", "a", "c", "a", "b"]
    check(model, names, x, other=other)
    check(model, names, x=x, other=other, gain=0.5)
    check(model, names, x, other=other, extra={"factor": factor})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens(strategy: str) -> None:
    """Logits (B, T, C) are padded over the classes, the last dimension of a linear head."""
    model = model_of(Bare(), mixed=strategy)
    assert check(model, ["a", "b", "c", "b"], torch.randn(4, 7, 6)).shape == (4, 7, 5)
    assert check(model, ["b", "d", "b", "b"], torch.randn(4, 7, 6)).shape == (4, 7, 5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pixels(strategy: str) -> None:
    """Logits (B, C, H, W) of a convolutional head are padded over its channels."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = model_of(network, head="2", mixed=strategy)
    x = torch.randn(3, 3, 6, 6)
    with torch.no_grad():
        got = model(x, tasks=["a", "b", "c"])
        assert got.shape == (3, 5, 6, 6)
        for i, name in enumerate("abc"):
            model.set_task(name)
            torch.testing.assert_close(got[i, : CLASSES[name]], model(x)[i], rtol=1e-5, atol=1e-5)
            assert bool((got[i, CLASSES[name] :] == -torch.inf).all())


Pair = namedtuple("Pair", ["logits_a", "hidden"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y, h: (y, h),
        lambda y, h: [y, h],
        lambda y, h: {"y": y, "h": h},
        lambda y, h: (y, {"h": [h]}),
        lambda y, h: Pair(y, h),
        lambda y, h: (y, None),
    ],
    ids=["tuple", "list", "dict", "nested", "namedtuple", "none"],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_of_all_kinds(wrap: Callable[..., Any], strategy: str) -> None:
    class Wrapped(Bare):
        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.fc1(x))
            return wrap(self.fc(torch.tanh(self.fc2(h))), h)

    model = model_of(Wrapped(), mixed=strategy)
    x = torch.randn(4, 6)
    names = ["b", "a", "b", "c"]

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        parts = value.values() if isinstance(value, dict) else value
        return [t for v in parts if v is not None for t in tensors(v)]

    with torch.no_grad():
        for _ in range(2):
            got = model(x, tasks=names)
            assert type(got) is type(wrap(x, x))
            found = tensors(got)
            for i, name in enumerate(names):
                model.set_task(name)
                for g, w in zip(found, tensors(model(x)), strict=True):
                    torch.testing.assert_close(g[i, : w.shape[1]], w[i], rtol=1e-5, atol=1e-5)


def test_outputs_that_cannot_be_put_together() -> None:
    class Text(Bare):
        def forward(self, x: Tensor) -> str:
            return str(super().forward(x))

    model = model_of(Text())
    with pytest.raises(rkr.UsageError, match="returns tensors, not str"):
        model(torch.randn(4, 6), tasks=list("abab"))
    assert model.task == "d"


# ---------------------------------------------------------------------------------------------------------
# Networks inside which dimension 0 is not the batch


class Sequences(nn.Module):
    """nn.TransformerEncoder as it is by default: (T, B, E) inside."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # (B, T, 8)
        if self.batch_first:
            return self.fc(self.encoder(x).mean(1))
        return self.fc(self.encoder(x.transpose(0, 1)).mean(0))


class TimeFirst(nn.Module):
    """Linear layers over (T, B, E)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 16)
        self.fc2 = nn.Linear(16, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # (T, B, 6)
        return self.fc(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))).mean(0))


class Reversed(Bare):
    """Turns the batch around inside, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc2(torch.tanh(self.fc1(x.flip(0))))).flip(0))


class Folded(Bare):
    """Time folded into the batch, (B·T, E), as networks over frames do."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.fc1(x.reshape(-1, x.shape[-1])))
        return self.fc(torch.tanh(self.fc2(h.view(*x.shape[:2], -1)).mean(1)))


INSIDE_OUT: dict[str, Callable[[], nn.Module]] = {
    "encoder": Sequences,
    "encoder_batch_first": lambda: Sequences(True),
    "time_first": TimeFirst,
    "folded": Folded,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("time", [3, 4, 1], ids=["T=3", "T=B", "T=1"])
@pytest.mark.parametrize("kind", INSIDE_OUT)
def test_dimension_0_is_not_the_batch(kind: str, time: int, strategy: str) -> None:
    model = model_of(INSIDE_OUT[kind](), mixed=strategy)
    for names in ("abcd", "bbac", "dcba"):
        check(model, list(names), torch.randn(4, time, 6))
    check(model, list("aab"), torch.randn(3, time, 6))
    check(model, list("abcdabcd"), torch.randn(8, time, 6))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("attention", [True, False])
def test_attention_left_out_of_rectification(strategy: str, attention: bool) -> None:
    """With attention excluded only plain linear layers are left, which see (T, B, E)."""
    options = {} if attention else {"exclude": ["*self_attn*"]}
    model = model_of(Sequences(), mixed=strategy, **options)
    for time in (4, 2, 4):
        check(model, list("abca"), torch.randn(4, time, 6))


@pytest.mark.parametrize("strategy", ["layer", "auto"])
@pytest.mark.parametrize("kind", ["time_first", "reversed"])
def test_a_first_batch_of_equal_tasks_proves_nothing(kind: str, strategy: str) -> None:
    """New tasks start alike, so on a first batch right and wrong agree. They must not count as proof for later."""
    model = rkr.rectify(TimeFirst() if kind == "time_first" else Reversed(), head="fc", mixed=strategy)
    for name in "abcd":
        model.add_task(name, classes=CLASSES[name])
    model.eval()
    shape = (4, 4, 6) if kind == "time_first" else (4, 6)
    check(model, list("abcd"), torch.randn(shape))
    for name in "abcd":
        jiggle(model, name)
    check(model, list("abcd"), torch.randn(shape))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tasks_trained_and_added_between_batches(strategy: str) -> None:
    model = model_of(Mlp(), "ab", mixed=strategy)
    x = torch.randn(4, 6)
    check(model, list("abab"), x)
    jiggle(model, "a", 0.5)
    check(model, list("abab"), x)
    model.add_task("c", classes=2)
    jiggle(model, "c")
    model.eval()
    check(model, list("acbc"), x)
    model.remove_task("a")
    check(model, list("cbcb"), x)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", ["frozen", "per_task"])
def test_layer_and_group_norm(norm: str, strategy: str) -> None:
    network = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12), nn.GroupNorm(3, 12), nn.Linear(12, 3)
    )
    model = model_of(network, head="5", norm=norm, mixed=strategy)
    check(model, list("bacd"), torch.randn(4, 6))


# ---------------------------------------------------------------------------------------------------------
# What a mixed batch leaves alone


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_task_in_use_comes_back_also_after_an_error(strategy: str) -> None:
    class Moody(Bare):
        fail_at = -1
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = super().forward(x)
            if self.calls == self.fail_at:
                raise RuntimeError("out of memory")
            return y

    network = Moody()
    model = model_of(network, mixed=strategy)
    model.set_task("b")
    x = torch.randn(4, 6)
    alone = model(x).detach()
    with torch.no_grad():
        model(x, tasks=list("cada"))  # looks at the network, once
    for fail_at in (1, 2) if strategy == "group" else (1,):
        network.calls, network.fail_at = 0, fail_at
        with torch.no_grad(), pytest.raises(RuntimeError, match="out of memory"):
            model(x, tasks=list("cada"))
        assert model.task == "b"
        network.fail_at = -1
        assert torch.equal(model(x).detach(), alone)
    check(model, list("cada"), x)
    assert torch.equal(model(x).detach(), alone)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_task_in_use(strategy: str) -> None:
    model = model_of(Mlp(), mixed=strategy)
    model.remove_task("d")
    assert model.task is None
    with torch.no_grad():
        assert model(torch.randn(3, 6), tasks=list("abc")).shape == (3, 5)
    assert model.task is None
    with pytest.raises(rkr.UsageError, match="no task is selected"):
        model(torch.randn(3, 6))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_changes_no_bit(strategy: str) -> None:
    model = model_of(SmallLeNet(), mixed=strategy)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(6, 3, 8, 8), tasks=list("abcdab"))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_in_train_mode_only_the_task_in_use_learns() -> None:
    """A mixed batch in train mode must not move the running statistics of the other tasks: they would forget."""
    model = model_of(Mlp())
    model.set_task("d")
    before = {name: {k: t.clone() for k, t in model.tasks[name].tensors().items()} for name in "abc"}
    model.train()
    model(torch.randn(8, 6), tasks=list("abcdabcd"))
    for name, tensors in before.items():
        for key, tensor in tensors.items():
            assert torch.equal(model.tasks[name].get(key), tensor), f"{name}: {key}"


def test_wrong_lengths_and_names() -> None:
    model = model_of(Mlp())
    x = torch.randn(4, 6)
    for names, text in (
        (["a"], "4 samples, not 1 names"),
        (["a"] * 5, "4 samples, not 5 names"),
        ("abcd", "single name 'abcd'"),
        (["a", "b", "c", "e"], "no task is named 'e'"),
        ([0, 1, 2, 3], "no task is named 0"),
        ([], "4 samples, not 0 names"),
        (7, "one name for each"),
    ):
        with pytest.raises(rkr.UsageError, match=text):
            model(x, tasks=names)
        assert model.task == "d"
    with pytest.raises(rkr.UsageError, match="tensor input"):
        model({"x": 3}, tasks=["a"])
    check(model, list("abcd"), x)


class Sorter(nn.Module):
    """Sorts its samples inside, as code around packed sequences does: right for one task, wrong layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        y = self.fc(torch.relu(self.hidden(x[order])))
        return y[order.argsort()]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(6, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + self.hidden(x))


def test_only_what_is_proved_runs_in_one_pass() -> None:
    from rkr.core.rowwise import is_rowwise

    chain = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    assert is_rowwise(nn.Sequential(*chain))
    assert is_rowwise(rkr.networks.lenet(10))
    assert is_rowwise(rkr.networks.VisualEncoder(8, 6, 4))
    model = rkr.rectify(rkr.networks.lenet(10), head="fc")
    assert is_rowwise(model.network)
    assert not is_rowwise(nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)))
    assert not is_rowwise(Sorter())
    assert not is_rowwise(Residual())  # it would hold, but two tensors might be aligned in any way
    assert not is_rowwise(nn.TransformerEncoderLayer(8, 2))
    assert not is_rowwise(nn.LSTM(3, 4))


@pytest.mark.parametrize("strategy", ["auto", "layer", "group"])
def test_samples_that_are_sorted_inside(strategy: str) -> None:
    torch.manual_seed(0)
    model = rkr.rectify(Sorter(), head="fc", mixed=strategy)
    for name in ("a", "b"):
        model.add_task(name, 3)
        with torch.no_grad():
            for p in model.named_task_parameters().values():
                p.add_(torch.randn_like(p))
    model.eval()
    names = ["a", "b", "a", "b"]
    with torch.no_grad():
        for x in (torch.ones(4, 6), torch.randn(4, 6), torch.full((4, 6), torch.nan), torch.randn(4, 6)):
            mixed = model(x, tasks=names)
            for i, name in enumerate(names):
                model.set_task(name)
                torch.testing.assert_close(mixed[i], model(x[i : i + 1])[0], equal_nan=True)


def test_under_autocast() -> None:
    model = rkr.rectify(rkr.networks.lenet(10), head="fc")
    for name in ("a", "b"):
        model.add_task(name, 3)
    model.eval()
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = model(x, tasks=["a", "b", "a", "b"])
    assert y.shape == (4, 3)
    assert y.isfinite().all()


def test_an_output_without_the_batch_in_front_is_refused() -> None:
    class Turned(Sorter):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).t()

    model = rkr.rectify(Turned(), head="fc")
    for name in ("a", "b"):
        model.add_task(name, 3)
    with pytest.raises(rkr.UsageError, match="first dimension"):
        model.eval()(torch.randn(4, 6), tasks=["a", "b", "a", "b"])

"""The ways of computing: how many calls each takes, that all agree, and which one is chosen."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rkr
from rkr.core import ways

WAYS = ("factored", "grouped", "formula", "auto")
# Calls that compute nothing: views, memory.
FREE = {
    *("view", "_unsafe_view", "detach", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "unbind", "alias", "as_strided", "empty", "empty_like", "new_empty"),
}


class Calls(TorchDispatchMode):
    """Counts the calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    network: nn.Module = transformers.ViTForImageClassification(config)
    return network


# Networks, their heads, and how many times the plain network's calls a grouped training step may have.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, float]] = {
    "lenet": (lambda: rkr.networks.lenet(10), "fc", 2.0),
    "resnet18": (lambda: rkr.networks.resnet18(10, width=16), "fc", 1.5),
    "resnet32": (lambda: rkr.networks.resnet32(10), "fc", 1.5),
    "vit": (vit, "classifier", 1.5),
}


def logits(output: Any) -> Tensor:
    return getattr(output, "logits", output)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(logits(model(x)), torch.arange(len(x)))


def with_tasks(network: nn.Module, head: str | None, first: bool = False, **options: Any) -> rkr.RectifiedModel:
    """A model in training whose task in use has random tensors."""
    torch.manual_seed(1)
    model = rkr.rectify(network, head=head, **options)
    model.add_task("a", 10 if head else None, train_base=first)
    if not first:
        model.add_task("b", 10 if head else None)
    with torch.no_grad():
        for key, p in model.named_task_parameters().items():
            if key.endswith((".lm", ".rm", ".f")):
                p.normal_(1.0 if key.endswith(".f") else 0.0, 0.2)
    return model.train()


def gradients(model: rkr.RectifiedModel, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model, x).backward()
    named = model.named_task_parameters()
    return {key: p.grad.clone() for key, p in named.items() if p.grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
def test_few_calls(name: str) -> None:
    """The way for accelerators, here on a CPU: calls in one training step."""
    build, head, bar = NETWORKS[name]
    x = torch.randn(2, 3, 32, 32)

    def calls(model: nn.Module) -> int:
        loss_of(model, x).backward()  # gradients are there
        model.zero_grad()
        with Calls() as counted:
            loss_of(model, x).backward()
        return counted.found.total()

    plain = calls(build().train())
    grouped = calls(with_tasks(build(), head, kernels="grouped"))
    assert grouped <= bar * plain, f"{grouped} of {plain}"
    assert calls(with_tasks(build(), head, kernels="factored")) > 2 * grouped


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale_outputs": False}, {"rectify_weights": False}, {"rectify_weights": "conv", "scale_outputs": "linear"}],
    ids=["rkr", "rectify-only", "scale-only", "lite"],
)
def test_gradients_are_the_formulas(options: dict[str, Any], layout: str, first: bool) -> None:
    """Of the task's tensors and, with the first task, of the base: to 1e-12 in float64."""
    network = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3)),
        *(nn.BatchNorm2d(6), nn.Tanh()),
        *(nn.Conv2d(6, 6, (1, 3), groups=2), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 8, 2)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 12), nn.Linear(12, 12, bias=False)),
        *(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)),
    ).double()
    x = torch.randn(4, 3, 9, 9, dtype=torch.float64)
    formulas = gradients(with_tasks(copy.deepcopy(network), "16", first, kernels="formula", **options), x)
    if layout == "channels_last":
        network, x = network.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    for way in ("grouped", "auto"):  # for 4 samples on a CPU: three convolutions in a group, the others plain
        found = gradients(with_tasks(copy.deepcopy(network), "16", first, kernels=way, **options), x)
        assert found.keys() == formulas.keys()
        for key, wanted in formulas.items():
            torch.testing.assert_close(found[key], wanted, rtol=1e-12, atol=1e-12, msg=f"{way}: {key}")


@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}],
    ids=["usual", "average", "no-statistics", "no-affine"],
)
def test_batch_norm_is_torchs(options: dict[str, Any], first: bool) -> None:
    """The task's BatchNorm has the bits of a plain one, outputs and statistics, in training and evaluation."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, **options)
    model = rkr.rectify(
        nn.Sequential(copy.deepcopy(plain), nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(32, 2)), head="3"
    )
    model.add_task("a", 2, train_base=first)
    for training in (True, True, False):
        x = torch.randn(5, 3, 4, 4)
        plain.train(training)
        model.train(training)
        assert torch.equal(model.network[0](x), plain(x))
    task = model.tasks["a"]
    for key, wanted in plain.named_buffers():
        found = model.network[0]._buffers[key] if first else task.get(f"0.{key}")
        assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="expected 4D input"):
        model.network[0](torch.randn(2, 3))


@pytest.mark.parametrize("kernels", WAYS)
def test_ways_agree(kernels: str) -> None:
    """One step by each way leads to the same answers; packed attention weights are read, not called."""
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Linear(5, 16), layer, nn.Flatten(), nn.Linear(48, 10)).double()
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    answers = []
    for way in ("formula", kernels):
        model = with_tasks(copy.deepcopy(network), "3", kernels=way)
        optimizer = torch.optim.SGD(model.task_parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
        answers.append(model.eval()(x).detach())
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-11, atol=1e-12)


class Branch(nn.Module):
    """Leaves one of two layers of equal shape out."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.used(x).relu())


def test_layers_that_a_pass_leaves_out_get_no_gradient() -> None:
    """So that momentum and decay do not move their factors, although another of their group is used."""
    model = with_tasks(Branch(), "fc", kernels="grouped")
    got = gradients(model, torch.randn(4, 6))
    assert {key.split(".")[0] for key in got} == {"used", "head"}


class Checkpointed(nn.Module):
    """Runs its middle again in the backward pass."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.again = again
        self.first, self.middle, self.fc = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        x = self.middle(x) if self.again is None else checkpoint(self.middle, x, use_reentrant=self.again)
        return self.fc(x.tanh())


@pytest.mark.parametrize("again", [False, True], ids=["hooks", "reentrant"])
def test_checkpointed_segments_make_their_own_weights(again: bool) -> None:
    """They are made again when the segment runs again, after the pass."""
    x, found = torch.randn(4, 6, dtype=torch.float64), []
    plain = Checkpointed().double()
    for how in (None, again):
        network = Checkpointed(how).double()
        network.load_state_dict(plain.state_dict())
        found.append(gradients(with_tasks(network, "fc", kernels="grouped"), x))
    for key, wanted in found[0].items():
        torch.testing.assert_close(found[1][key], wanted, rtol=1e-12, atol=1e-12)


def test_what_is_ready_is_made_anew_after_a_write() -> None:
    """Whatever way a task, the base or a merged weight changes, answers are those of a new model."""
    model = with_tasks(rkr.networks.small_cnn(10), "fc").eval()
    x = torch.randn(2, 1, 8, 8)

    def fresh() -> Tensor:
        return copy.deepcopy(model)(x)

    with torch.no_grad():
        before = model(x)
        assert torch.equal(model(x), before)
        assert torch.equal(fresh(), before)
        task = model.tasks["b"]
        task.get("conv1.f").mul_(2)  # type: ignore[union-attr]
        assert not torch.equal(model(x), before)
        assert torch.equal(model(x), fresh())
        task.get("fc1.rm").data = torch.randn_like(task.get("fc1.rm"))  # type: ignore[union-attr, arg-type]
        assert torch.equal(model(x), fresh())
        task.put("conv2.lm", torch.randn_like(task.get("conv2.lm")))  # type: ignore[arg-type]
        assert torch.equal(model(x), fresh())
        model.network.fc1._parameters["bias"].add_(1)  # type: ignore[union-attr]
        assert torch.equal(model(x), fresh())
        after = model(x)
        model.network.conv1.weight.mul_(3)  # the merged weight, which is nobody's to write to
        assert torch.equal(model(x), after)
    assert model.active.ready is None


def test_choice() -> None:
    """By device and sizes, in one place."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    everything = float("inf")
    assert ways.largest_grouped("auto", gpu, 512) == everything
    assert ways.largest_grouped("auto", cpu, 4) == ways.SMALL_WEIGHT > ways.THIN_WEIGHT
    assert ways.largest_grouped("auto", cpu, 512) == ways.THIN_WEIGHT
    assert ways.largest_grouped("grouped", cpu, 512) == everything
    assert ways.largest_grouped("factored", gpu, 4) == ways.largest_grouped("formula", gpu, 4) == 0
    assert ways.smallest_group("auto", gpu) == ways.smallest_group("grouped", cpu) == 1
    assert ways.smallest_group("auto", cpu) == ways.MANY
    small, large = torch.empty(ways.THIN_WEIGHT), torch.empty(ways.SMALL_WEIGHT)
    assert ways.merges_plainly("auto", small, 512)
    assert ways.merges_plainly("auto", large, 4)
    assert not ways.merges_plainly("auto", large, 512)
    assert not ways.merges_plainly("factored", small, 4)
    assert ways.few_rows("auto", torch.empty(4, 4, 7))
    assert not ways.few_rows("auto", torch.empty(17, 7))
    assert not ways.few_rows("grouped", torch.empty(4, 7))


def test_options() -> None:
    """Earlier versions had `fast`; an unknown way is an error."""
    assert rkr.Options.from_json({"fast": False}).kernels == "formula"
    assert rkr.Options.from_json({"fast": True}).kernels == "auto"
    assert "fast" not in rkr.Options().to_json()
    with pytest.raises(rkr.UsageError, match=r"kernels.*auto.*factored.*grouped.*formula"):
        rkr.rectify(nn.Linear(2, 2), kernels="quick")

"""What tasks cost: every figure that the paper prints, counted on live modules, and what the paper does not count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.networks import VisualEncoder, lenet, resnet18, resnet32

RECTIFICATION_ONLY = {"scale_outputs": False}
SCALING_ONLY = {"rectify_weights": False}
LITE = {"rectify_weights": "conv", "scale_outputs": "linear"}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def model_of(network: nn.Module, tasks: int = 1, classes: int | None = 10, **options: Any) -> rkr.RectifiedModel:
    model = rkr.rectify(network, head=None if classes is None else "fc", **options)
    for i in range(tasks):
        model.add_task(f"task {i}", classes=classes)
    return model


# ---------------------------------------------------------------------------------------------------------
# The paper's tables


@pytest.mark.parametrize(
    ("options", "percent", "numbers"),
    [
        ({"rank": 1}, "0.3355", (23_241, 4_800, 9_600)),
        ({"rank": 2}, "0.5426", (46_482, 4_800, 9_600)),
        ({"rank": 4}, "0.9569", (92_964, 4_800, 9_600)),
        ({"rank": 8}, "1.7854", (185_928, 4_800, 9_600)),
        ({"rank": 2, **RECTIFICATION_ONLY}, "0.4143", (46_482, 0, 0)),
        ({"rank": 2, **SCALING_ONLY}, "0.1283", (0, 4_800, 9_600)),
    ],
    ids=["K=1", "K=2", "K=4", "K=8", "rectification", "scaling"],
)
def test_resnet18(options: dict[str, Any], percent: str, numbers: tuple[int, int, int]) -> None:
    cost = model_of(resnet18(), tasks=2, **options).cost()
    assert cost.network == 11_220_132
    for task in cost.tasks:
        assert f"{task.percent:.4f}" == percent
        assert (task.rectification, task.scale, task.norm) == numbers
        assert task.parameters == sum(numbers)
    assert f"{cost.percent:.4f}" == percent
    assert f" {percent} " in str(cost)


@pytest.mark.parametrize(
    ("options", "percent", "capacity", "numbers"),
    [
        ({}, "0.4292", "104.3", (11_530, 1_370, 140)),
        (RECTIFICATION_ONLY, "0.3795", "103.8", (11_530, 0, 0)),
        (SCALING_ONLY, "0.0497", "100.5", (0, 1_370, 140)),
        (LITE, "0.0734", "100.7", (930, 1_300, 0)),
        ({"rank": 1}, "0.2395", "102.4", (5_765, 1_370, 140)),
        ({"rank": 4}, "0.8087", "108.1", (23_060, 1_370, 140)),
        ({"rank": 8}, "1.5678", "115.7", (46_120, 1_370, 140)),
    ],
    ids=["RKR", "rectification", "scaling", "RKR-Lite", "K=1", "K=4", "K=8"],
)
def test_lenet_and_ten_tasks(
    options: dict[str, Any], percent: str, capacity: str, numbers: tuple[int, int, int]
) -> None:
    cost = model_of(lenet(), tasks=10, **options).cost()
    assert cost.network == 3_038_110
    assert [f"{t.percent:.4f}" for t in cost.tasks] == [percent] * 10
    assert (cost.tasks[0].rectification, cost.tasks[0].scale, cost.tasks[0].norm) == numbers
    assert f"{cost.total_percent:.1f}" == capacity
    assert "with 10 tasks" in str(cost)


@pytest.mark.parametrize(
    ("rank", "percent", "capacity"),
    [(1, "0.2516", "101.01"), (4, "0.8572", "103.43"), (16, "3.2796", "113.12"), (32, "6.5095", "126.04")],
)
def test_zero_shot_encoder(rank: int, percent: str, capacity: str) -> None:
    """The paper prints 3.28 % and 101 / 104 / 113 / 126 %; its 104 comes from rounding 0.8572 to 0.9 first."""
    cost = model_of(VisualEncoder(), tasks=4, classes=None, rank=rank).cost()
    assert cost.network == 3_396_248
    assert f"{cost.percent:.4f}" == percent
    assert f"{cost.total_percent:.2f}" == capacity
    assert (cost.tasks[0].rectification, cost.tasks[0].scale) == (6_856 * rank, 1_688)
    assert (cost.tasks[0].norm, cost.tasks[0].head, cost.tasks[0].statistics) == (0, 0, 0)
    if rank == 16:
        assert (f"{cost.percent:.2f}", f"{cost.total_percent:.0f}") == ("3.28", "113")


def test_imagenet_stem() -> None:
    cost = model_of(resnet18(1000, "imagenet"), classes=100).cost()
    assert cost.network == 11_689_512
    assert cost.tasks[0].parameters == 61_418
    assert f"{cost.percent:.3f}" == "0.525"
    assert cost.multiply_adds is not None
    assert cost.multiply_adds.paper == 4_800
    assert f"{cost.multiply_adds.paper_percent:.2e}" == "2.65e-04"


def test_resnet32() -> None:
    cost = model_of(resnet32()).cost()
    assert cost.network == 464_154
    assert cost.tasks[0].parameters == 16_674
    assert f"{cost.percent:.2f}" == "3.59"


@pytest.mark.parametrize(
    ("network", "options", "macs", "paper", "paper_percent", "per_output", "per_output_percent"),
    [
        (resnet18, {}, 555_468_800, 4_800, "8.6e-04", 614_400, "0.1106"),
        (lenet, {}, 10_946_000, 70, "6.4e-04", 34_580, "0.3159"),
        (lenet, LITE, 10_946_000, 0, "0.0e+00", 1_300, "0.0119"),
        (lenet, RECTIFICATION_ONLY, 10_946_000, 0, "0.0e+00", 0, "0.0000"),
    ],
    ids=["resnet18", "lenet", "lite", "rectification"],
)
def test_multiply_adds(
    network: Any,
    options: dict[str, Any],
    macs: int,
    paper: int,
    paper_percent: str,
    per_output: int,
    per_output_percent: str,
) -> None:
    """Both conventions: the paper's, one multiply per convolution channel, and one per scaled value."""
    model = model_of(network(), **options)
    counted = model.cost().multiply_adds
    assert counted is not None
    assert counted.network == macs
    assert (counted.paper, counted.per_output) == (paper, per_output)
    assert f"{counted.paper_percent:.1e}" == paper_percent
    assert f"{counted.per_output_percent:.4f}" == per_output_percent
    text = str(model.cost())
    assert f"{macs:,}" in text
    assert f"{paper_percent} %" in text
    assert f"{per_output_percent} %" in text


# ---------------------------------------------------------------------------------------------------------
# What the paper leaves out


def test_nothing_is_hidden() -> None:
    """Heads, statistics and bytes: what `percent` leaves out, `percent_stored` and `bytes` have."""
    model = model_of(lenet(), tasks=1)
    model.add_task("small", classes=3)
    cost = model.cost()
    for name, classes in (("task 0", 10), ("small", 3)):
        task = cost[name]
        assert task.head == classes * 501
        assert task.statistics == 2 * 70 + 2  # mean and variance of 70 channels, two counters of batches
        stored = 13_040 + classes * 501 + 142
        assert task.percent_stored == pytest.approx(100 * stored / 3_038_110, rel=1e-12)
        assert task.bytes == (13_040 + classes * 501 + 140) * 4 + 2 * 8
    held = sum(t.nbytes for t in model.tasks["small"].tensors().values())
    assert cost["small"].bytes == held
    assert cost.network_bytes == (3_038_110 + 140) * 4 + 2 * 8
    assert cost.total_bytes == cost.network_bytes + cost["task 0"].bytes + cost["small"].bytes


def test_first_task_costs_the_same_before_and_after_the_base_is_frozen() -> None:
    """While the base is trained its own normalisation is the task's: counted all the same."""
    model = model_of(lenet())
    before = model.cost()["task 0"]
    model.freeze_base()
    assert model.cost()["task 0"] == before
    model.add_task("next", classes=10)
    assert model.cost()["task 0"] == before


def test_half_the_bytes_in_half_precision() -> None:
    model = model_of(VisualEncoder(20, 10, 4), classes=None)
    whole = model.cost().tasks[0]
    half = model.bfloat16().cost().tasks[0]
    assert (half.bytes * 2, half.percent) == (whole.bytes, whole.percent)


def test_ranks_by_layer() -> None:
    """LeNet per unit of K: conv 115 + 350, fc 4,000 + 1,300."""
    cost = model_of(lenet(), ranks={"fc*": 1, "conv2": 3}, rank=2).cost()
    assert cost.tasks[0].rectification == 2 * 115 + 3 * 350 + 5_300
    assert model_of(lenet(), exclude="fc1").cost().tasks[0].rectification == 2 * (465 + 1_300)


@pytest.mark.parametrize("bn", ["per_task", "stats", "affine", "frozen"])
def test_normalisation_policies(bn: str) -> None:
    task = model_of(lenet(), tasks=2, bn=bn).cost().tasks[1]
    assert task.norm == (140 if bn in ("per_task", "affine") else 0)
    assert task.statistics == (142 if bn in ("per_task", "stats") else 0)


def test_measuring_changes_nothing() -> None:
    model = model_of(lenet(), tasks=2)
    model.train()
    model.network.bn1.eval()
    modes = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    hooks = [len(m._forward_hooks) for m in model.modules()]
    model.cost()
    with pytest.raises(rkr.UsageError, match="does not run on an input of shape"):
        model.cost((5, 5))
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert model.task == "task 1"
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_example_by_shape_or_tensor() -> None:
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 8, 3))
    model = rkr.rectify(network, head="2")
    model.add_task("a", classes=3)
    assert model.cost().multiply_adds is None
    assert "give cost() an example" in str(model.cost())
    for example in ((2, 10), torch.randn(5, 2, 10)):
        counted = model.cost(example).multiply_adds
        assert counted is not None
        assert (counted.network, counted.paper, counted.per_output) == (4 * 8 * 6 + 3 * 32, 4, 4 * 8)


def test_without_tasks() -> None:
    cost = rkr.rectify(lenet(), head="fc").cost()
    assert (cost.tasks, cost.percent, cost.total_percent) == ((), 0.0, 100.0)
    assert cost.multiply_adds is not None
    assert "3,038,110" in str(cost)


# ---------------------------------------------------------------------------------------------------------
# Shared modules


class Odd(nn.Module):
    """Everything that cannot be rectified: a class token, tied embeddings, a recurrent and a transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.embedding = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.up = nn.ConvTranspose1d(8, 8, 2)
        self.norm = nn.LayerNorm(8)
        self.unembed = nn.Linear(8, 11, bias=False)
        self.unembed.weight = self.embedding.weight
        self.out = nn.Linear(11, 6)
        self.skip = nn.Linear(11, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embedding(x)], 1)  # (B, T + 1, 8)
        x, _ = self.lstm(x)
        x = self.norm(self.up(x.transpose(1, 2)).transpose(1, 2))
        x = self.unembed(x[:, 0])
        return self.fc(F.relu(self.out(x) + self.skip(x)))


def test_shared_modules_are_listed_by_name() -> None:
    model = rkr.rectify(Odd(), head="fc", exclude=["skip"])
    model.add_task("a", classes=3)
    shared = {s.name: (s.type, s.parameters) for s in model.cost().shared}
    assert shared == {
        "": ("Odd", 8),
        "lstm": ("LSTM", 2 * (4 * 8 * 8 + 4 * 8)),
        "norm": ("LayerNorm", 16),
        "skip": ("Linear", 72),
    }
    text = str(model.cost())
    for name, (kind, count) in shared.items():
        assert f"shared and frozen: {name or 'the network itself'} ({kind}, {count:,})" in text
    reasons = {s.name: s.reason for s in model.cost().shared}
    assert "options" in reasons["skip"]
    assert "options" in reasons["norm"]
    assert "not a layer" in reasons["lstm"]
    assert "norm" not in {s.name for s in rectified_odd(norm="per_task").cost().shared}


def rectified_odd(**options: Any) -> rkr.RectifiedModel:
    model = rkr.rectify(Odd(), head="fc", **options)
    model.add_task("a", classes=3)
    return model


def test_tied_weights_are_counted_once() -> None:
    """The embedding is also the weight of `unembed`: one tensor in the 100 %, and two layers with factors."""
    model = rectified_odd()
    network = 8 + 88 + 2 * (256 + 32) + 136 + 16 + 2 * 72 + 21
    cost = model.cost(torch.randint(0, 11, (2, 5)))
    assert cost.network == network
    assert cost.network_bytes == 4 * network
    embedding, up = 11 + 8, 2 * 8 + 8
    assert cost.tasks[0].rectification == 2 * ((8 + 11) + 2 * (11 + 6) + embedding + up)
    assert cost.tasks[0].scale == 11 + 6 + 6 + 8 + 8
    assert cost.percent == pytest.approx(100 * (2 * 96 + 39) / network, rel=1e-12)


def test_shared_statistics_and_parametrised_layers_are_listed() -> None:
    network = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.Linear(4, 2),
    )
    model = rkr.rectify(network, head="3", bn="frozen")
    model.add_task("a", classes=2)
    shared = {s.name: s.parameters for s in model.cost((4,)).shared}
    assert shared == {"1": 8, "2": 4, "2.parametrizations.weight": 16}
    assert "1 (BatchNorm1d, 8)" in str(model.cost((4,)))


def test_module_used_twice_costs_twice_the_work_and_once_the_memory() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.alias = self.layer
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(F.relu(self.alias(F.relu(self.layer(x)))))

    model = rkr.rectify(Twice(), head="fc")
    model.add_task("a", classes=3)
    cost = model.cost((6,))
    assert cost.network == 42 + 21
    assert cost.tasks[0].parameters == 2 * 12 + 6
    assert cost.multiply_adds is not None
    assert cost.multiply_adds.network == 2 * 36 + 18
    assert cost.multiply_adds.per_output == 12


def test_attention_projections_are_counted() -> None:
    """The packed projections of `nn.MultiheadAttention` are linear layers, rectified and scaled like others."""
    model = rkr.rectify(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    model.add_task("a")
    cost = model.cost((5, 8))
    assert cost.tasks[0].rectification == 2 * ((8 + 24) + (8 + 8) + (8 + 16) + (16 + 8))
    assert cost.tasks[0].scale == 24 + 8 + 16 + 8
    assert cost.multiply_adds is not None
    assert cost.multiply_adds.network == 5 * (8 * 24 + 8 * 8 + 8 * 16 + 16 * 8)
    assert cost.multiply_adds.per_output == 5 * (24 + 8 + 16 + 8)

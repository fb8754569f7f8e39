"""Ranks by budget: the rule against all allotments of a small network, and layers of rank 0 everywhere."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkr
from rkr.core.budget import allot
from rkr.errors import UsageError
from rkr.networks import lenet, resnet18

COSTS, MOST, CONVOLVES = [3, 20, 7, 5], [4, 3, 6, 3], [True, False, True, False]


def worth(ranks: Sequence[int]) -> tuple[float, ...]:
    """What counts, in this order: layers with a rank, convolutions, others; the k-th rank is worth 1/k."""
    harmonic = [sum(1 / k for k in range(1, rank + 1)) for rank in ranks]
    of_convolutions = sum(h for h, conv in zip(harmonic, CONVOLVES, strict=True) if conv)
    return sum(rank > 0 for rank in ranks), round(of_convolutions, 9), round(sum(harmonic) - of_convolutions, 9)


def spent(ranks: Sequence[int]) -> int:
    return sum(rank * cost for rank, cost in zip(ranks, COSTS, strict=True))


def next_rank(ranks: Sequence[int]) -> int | None:
    """The layer that the rule names next if anything fits."""
    tops = ([1] * 4, [m if c else 1 for m, c in zip(MOST, CONVOLVES, strict=True)], MOST)
    for top in tops:
        below = [i for i in range(4) if ranks[i] < top[i]]
        if below:
            return min(below, key=lambda i: (ranks[i] + 1) * COSTS[i])
    return None


def test_no_allotment_of_the_same_cost_is_worth_more() -> None:
    every = list(itertools.product(*(range(most + 1) for most in MOST)))
    # The allotments without anything passed over: each is the best of all that cost as much or less.
    ranks = [0] * 4
    while (chosen := next_rank(ranks)) is not None:
        ranks[chosen] += 1
        budget = spent(ranks)
        assert allot(COSTS, MOST, CONVOLVES, budget) == ranks
        assert worth(ranks) == max(worth(other) for other in every if spent(other) <= budget)
    assert ranks == MOST
    # With any other budget as many layers as possible have a rank, and no more than one rank of a layer is missed.
    for budget in range(spent(MOST)):
        found = allot(COSTS, MOST, CONVOLVES, budget)
        best = max(worth(other) for other in every if spent(other) <= budget)
        assert worth(found)[0] == best[0]
        missed = [1 / (r + 1) for r, most, conv in zip(found, MOST, CONVOLVES, strict=True) if conv and r < most]
        assert worth(found)[1] >= best[1] - max(missed, default=0) - 1e-6


def test_all_is_spent_that_can_be() -> None:
    for budget in range(spent(MOST)):
        found = allot(COSTS, MOST, CONVOLVES, budget)
        left = budget - spent(found)
        assert left >= 0
        assert all(r == m or c > left for r, m, c in zip(found, MOST, COSTS, strict=True))
    assert allot(COSTS, MOST, CONVOLVES, 10**9) == MOST
    assert allot(COSTS, MOST, CONVOLVES, 2) == [0, 0, 0, 0]
    assert allot([], [], [], 5) == []


@pytest.mark.parametrize("budget", ["paper", 0.0043, 13_000])
def test_lenet(budget: Any) -> None:
    """Of 13,040 numbers 1,510 are F and affine parameters. A rank costs 115, 350, 4,000 and 1,300."""
    model = rkr.rectify(lenet(), head="fc", budget=budget)
    model.add_task("first", classes=10)
    ranks = {"conv1": 13, "conv2": 13, "fc1": 1, "fc2": 1}
    assert model.options.ranks == ranks
    cost = model.cost()
    assert cost.ranks == ranks
    assert "ranks: conv1 13, conv2 13, fc1 1, fc2 1" in str(cost)
    assert cost["first"].rectification == 13 * 115 + 13 * 350 + 4000 + 1300
    assert cost["first"].parameters == 12_855
    assert rkr.rectify(lenet(), head="fc").options.ranks == {}


def test_a_small_budget_leaves_layers_without_ranks() -> None:
    model = rkr.rectify(lenet(), head="fc", budget=4_000)
    model.add_task("first", classes=10)
    assert model.options.ranks == {"conv1": 7, "conv2": 1, "fc1": 0, "fc2": 1}
    assert model.cost()["first"].parameters == 1_510 + 7 * 115 + 350 + 1300


def test_paper_is_the_cost_of_the_rank_everywhere() -> None:
    for rank in (1, 2, 4):
        uniform = rkr.rectify(resnet18(), rank, head="fc")
        allotted = rkr.rectify(resnet18(), rank, head="fc", budget="paper")
        for model in (uniform, allotted):
            model.add_task("first", classes=10)
        most, found = uniform.cost()["first"].parameters, allotted.cost()["first"].parameters
        assert 0.99 * most < found <= most


def test_ranks_of_the_user_stay() -> None:
    model = rkr.rectify(lenet(), head="fc", budget="paper", ranks={"fc1": 0})
    assert model.options.ranks["fc1"] == 0
    model.add_task("first", classes=10)
    assert 12_000 < model.cost()["first"].parameters <= 13_040
    again = rkr.Options.from_json(model.options.to_json())
    assert rkr.rectify(lenet(), head="fc", options=again).options == again


def test_only_shapes_count() -> None:
    ranks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        ranks.append(rkr.rectify(lenet(classes=10 + seed), head="fc", budget=13_000).options.ranks)
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (1000, "fewer than the 1,510 that scaling factors"),
        (1.5, "must be less than 1"),
        (0, "budget"),
        (-0.5, "budget"),
        ("much", "must be 'paper'"),
        (True, "budget"),
    ],
)
def test_bad_budgets(budget: Any, message: str) -> None:
    with pytest.raises(UsageError, match="budget") as caught:
        rkr.rectify(lenet(), head="fc", budget=budget)
    assert message in str(caught.value)


class Small(nn.Module):
    """Two convolutions and two linear layers, one of each without LM and RM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc1, self.fc2, self.fc = nn.Linear(96, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).relu().flatten(1)
        return self.fc(self.fc2(self.fc1(x).relu()).relu())


RANKS = {"conv1": 0, "conv2": 3, "fc1": 0, "fc2": 2}


def small(scale: bool) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(Small(), head="fc", ranks=RANKS, scale_outputs=scale)
    model.add_task("a", classes=5)
    for p in model.network.parameters():
        p.data.add_(0.01)
    model.add_task("b", classes=3)
    with torch.no_grad():
        for p in model.task_parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "rectified only"])
def test_rank_zero(scale: bool, tmp_path: Path) -> None:
    model = small(scale)
    keys = {name for name in model.named_task_parameters() if name.endswith((".lm", ".rm"))}
    assert keys == {"conv2.lm", "conv2.rm", "fc2.lm", "fc2.rm"}
    assert model.cost().ranks == RANKS
    x = torch.randn(7, 3, 6, 6)
    model.train()
    loss = model(x).square().sum()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.task_parameters())
    model.eval()
    with torch.no_grad():
        y = model(x)
        torch.testing.assert_close(model.merged("b").eval()(x), y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.for_task("b")(x), y)
        mixed = model(x, tasks=["a", "b"] * 3 + ["b"])
        torch.testing.assert_close(mixed[1::2, :3], y[1::2], rtol=1e-5, atol=1e-5)
        model.save(tmp_path / "zoo")
        loaded = rkr.load(tmp_path / "zoo", Small()).eval()
        assert loaded.options == model.options
        loaded.set_task("b")
        assert torch.equal(loaded(x), y)
        assert loaded.fingerprint("b") == model.fingerprint("b")
        model.save_task("b", tmp_path / "b.safetensors")
        model.remove_task("b")
        model.load_task(tmp_path / "b.safetensors")
        assert torch.equal(model(x), y)
    rkr.export(model, tmp_path / "all.pt2", style="all", example=x)
    index = json.loads((tmp_path / "zoo" / "zoo.json").read_text())
    assert index["options"]["ranks"] == RANKS

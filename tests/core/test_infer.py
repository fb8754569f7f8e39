"""Inferring the task: every piece against a direct computation."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from rkr.core import infer
from rkr.core.infer import Description, Rule, Shared, describe, embed, shared_covariance
from rkr.errors import UsageError

D = 12


def samples(seed: int, classes: int = 4, each: int = 30, spread: float = 0.5) -> tuple[Tensor, Tensor]:
    """Features around class means that belong to a task, some dimensions noisier than others."""
    draw = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(classes, D, generator=draw)
    y = torch.arange(classes).repeat_interleave(each)
    noise = torch.randn(len(y), D, generator=draw) * torch.linspace(0.2, 2, D) * spread
    return means[y] + noise, y


def more(seed: int, each: int = 50, classes: int = 4, spread: float = 0.5) -> Tensor:
    """Other samples of the same classes."""
    draw = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(classes, D, generator=draw)
    draw = torch.Generator().manual_seed(seed + 1000)
    noise = torch.randn(classes * each, D, generator=draw) * torch.linspace(0.2, 2, D) * spread
    return means.repeat_interleave(each, 0) + noise


def test_embedding() -> None:
    x = embed(torch.tensor([[4.0, -9.0, 0.0]]))
    torch.testing.assert_close(x, torch.tensor([[2.0, -3.0, 0.0]]) / 13**0.5)


def test_the_shared_covariance_is_the_direct_one() -> None:
    tasks = [samples(0), samples(1, each=60)]
    described = [describe(x, y, 4, directions=D) for x, y in tasks]
    direct, total = torch.zeros(D, D, dtype=torch.float64), 0
    for x, y in tasks:
        z = embed(x).double()
        centred = torch.cat([z[y == c] - z[y == c].mean(0) for c in range(4)])
        direct += len(x) * centred.T @ centred / (len(x) - 4)
        total += len(x)
    direct /= total
    torch.testing.assert_close(shared_covariance(described, 0.0).double(), direct, rtol=2e-3, atol=2e-4)
    level = direct.diagonal().mean()
    shrunk = 0.75 * direct + 0.25 * level * torch.eye(D)
    torch.testing.assert_close(shared_covariance(described, 0.25).double(), shrunk, rtol=2e-3, atol=2e-4)


def test_few_directions_keep_the_total_variance() -> None:
    x, y = samples(2)
    full, few = (shared_covariance([describe(x, y, 4, directions=r)], 0.0) for r in (D, 3))
    torch.testing.assert_close(few.trace(), full.trace(), rtol=1e-3, atol=0)
    torch.testing.assert_close(torch.linalg.eigvalsh(few)[-3:], torch.linalg.eigvalsh(full)[-3:], rtol=2e-3, atol=0)


def test_distances_leave_the_sample_out_of_its_mean() -> None:
    x, y = samples(3, classes=3, each=5)
    z, nearest = embed(x), []
    for i in range(len(z)):
        rest = torch.arange(len(z)) != i
        means = torch.stack([z[rest & (y == c)].mean(0) for c in range(3)])
        nearest.append((z[i] - means).square().sum(1).min())
    wanted = torch.quantile(torch.stack(nearest), torch.linspace(0, 1, 101))
    torch.testing.assert_close(describe(x, y, 3).quantiles, wanted, rtol=1e-4, atol=1e-6)


def test_the_rule_is_the_nearest_mean_under_the_covariance() -> None:
    described = {f"t{i}": describe(*samples(i), 4) for i in range(3)}
    features = torch.cat([more(i, each=10) for i in range(3)])
    found = Rule(described)(features)
    inverse = torch.linalg.inv(shared_covariance(list(described.values())).double())
    z, distances = embed(features).double(), []
    for one in described.values():
        gap = z[:, None] - one.means.double()
        distances.append(torch.einsum("bcd,de,bce->bc", gap, inverse, gap).amin(1))
    direct = torch.stack(distances, 1)
    assert torch.equal(found.task, direct.argmin(1))
    probability = torch.softmax(-direct / (2 * infer.TEMPERATURE * D), 1)
    torch.testing.assert_close(found.probability.double(), probability, rtol=1e-3, atol=1e-4)
    truth = torch.arange(3).repeat_interleave(40)
    assert (found.task == truth).float().mean() > 0.97


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.2])
def test_false_alarms_on_held_out_samples(rate: float) -> None:
    described = {"t": describe(*samples(5, each=400), 4)}
    none = Rule(described)(more(5, each=1000), rate).none.float().mean().item()
    assert none == pytest.approx(rate, abs=0.25 * rate + 0.004)
    assert Rule(described)(more(77, each=100), 0.05).none.float().mean() > 0.9  # other classes


def test_other_tasks_do_not_change_what_is_called_none() -> None:
    described = {f"t{i}": describe(*samples(i), 4) for i in range(3)}
    x = more(0)
    alone = Rule({"t0": described["t0"]})(x).none
    assert not (Rule(described)(x).none & ~alone).any()


def test_json() -> None:
    one = describe(*samples(0), 4)
    again = Description.from_json(json.loads(json.dumps(one.to_json())))
    for name in ("means", "directions", "variances", "quantiles"):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert (again.rest, again.samples) == (one.rest, one.samples)
    for change in ({"means": None}, {"samples": 0}, {"quantiles": one.to_json()["means"]}):
        with pytest.raises(UsageError, match="cannot be read"):
            Description.from_json({**one.to_json(), **change})


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "MEANS_BYTES", 5 * 2 * D)
    x, y = samples(0, classes=40, each=6)
    one = describe(x, y, 40)
    assert one.means.shape == (5, D)
    centres = one.means.float()
    distance = torch.cdist(embed(x), centres).square().amin(1)
    torch.testing.assert_close(one.quantiles[100], distance.max(), rtol=1e-2, atol=1e-3)


def test_bad_calls() -> None:
    x, y = samples(0)
    with pytest.raises(UsageError, match="class 4 has no samples"):
        describe(x, y, 5)
    with pytest.raises(UsageError, match="no task to choose from"):
        Rule({})
    with pytest.raises(UsageError, match="different widths"):
        Rule({"a": describe(x, y, 4), "b": describe(x[:, :5], y, 4)})
    with pytest.raises(UsageError, match="false-alarm rate"):
        Rule({"a": describe(x, y, 4)})(x, 1.0)


def test_the_covariance_beside_the_base_is_the_direct_one() -> None:
    """Refined by one task after the other, through files, it is that of all samples."""
    tasks, shared = [samples(0), samples(1, each=60), samples(2, each=10)], None
    total = torch.zeros(D, D, dtype=torch.float64)
    for number, (x, y) in enumerate(tasks):
        shared = Shared.refined(shared, f"t{number}", embed(x), y, 4)
        assert Shared.refined(shared, f"t{number}", embed(x), y, 4) is shared  # a task counts once
        shared = Shared.from_json(json.loads(json.dumps(shared.to_json())))
        z = embed(x).double()
        centred = torch.cat([z[y == c] - z[y == c].mean(0) for c in range(4)])
        total += len(x) * centred.T @ centred / (len(x) - 4)
    direct = total / sum(len(x) for x, _ in tasks)
    torch.testing.assert_close(shared.covariance.double(), direct, rtol=3e-3, atol=1e-5)
    assert (shared.samples, shared.tasks) == (120 + 240 + 40, ("t0", "t1", "t2"))
    described = {f"t{n}": describe(x, y, 4) for n, (x, y) in enumerate(tasks)}
    features = more(1, each=5)
    found = Rule(described, shared).evidence(features)
    inverse = torch.linalg.inv(shared.shrunk().double())
    gap = embed(features).double()[:, None] - described["t1"].means.double()
    nearest = torch.einsum("bcd,de,bce->bc", gap, inverse, gap).amin(1)
    torch.testing.assert_close(found[:, 1].double(), -nearest / infer.SCALE, rtol=1e-3, atol=1e-3)
    for change in ({"covariance": None}, {"level": "x"}, {"covariance": described["t0"].to_json()["quantiles"]}):
        with pytest.raises(UsageError, match="covariance of the tasks cannot be read"):
            Shared.from_json({**shared.to_json(), **change})


def test_few_features_are_expanded() -> None:
    x, _ = samples(0)
    wide = embed(x, 40)
    assert wide.shape == (len(x), 40)
    projection = torch.randn(D, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide, (embed(x) @ projection).clamp(min=0))
    assert torch.equal(embed(x, D), embed(x))

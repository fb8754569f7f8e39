"""`model.estimate_statistics` against a direct computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rkr
from rkr.errors import UsageError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.01), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(96, 5)
    )


def model() -> rkr.RectifiedModel:
    made = rkr.rectify(network(), head="5")
    made.add_task("first", classes=3, train_base=False)
    made.add_task("second", classes=2)
    return made


def batches(sizes: tuple[int, ...] = (8, 8, 8)) -> list[Tensor]:
    torch.manual_seed(1)
    return [2 + 3 * torch.randn(n, 3, 6, 6) for n in sizes]


def test_statistics_are_the_mean_over_batches() -> None:
    m, given = model(), batches()
    assert m.estimate_statistics(given) == 1
    outputs = [m.network[0](x) for x in given]
    mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    var = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    task = m.tasks["second"]
    torch.testing.assert_close(task.get("1.running_mean"), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.get("1.running_var"), var, rtol=1e-5, atol=1e-6)
    assert task.get("1.num_batches_tracked").item() == 3  # type: ignore[union-attr]


def test_nothing_else_changes() -> None:
    m = model()
    before = {key: value.clone() for key, value in m.state_dict().items()}
    first = m.fingerprint("first")
    m.train()
    m.estimate_statistics((x, None) for x in batches())
    changed = {key for key, value in m.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"tasks.second.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert m.fingerprint("first") == first
    assert m.training
    assert m.network[1].momentum == 0.01


def test_dropout_is_off_and_the_result_repeats() -> None:
    m = model()
    m.estimate_statistics(batches())
    once = m.tasks["second"].get("1.running_var").clone()  # type: ignore[union-attr]
    m.estimate_statistics(batches())
    assert torch.equal(m.tasks["second"].get("1.running_var"), once)  # type: ignore[arg-type]


def test_an_error_leaves_the_statistics() -> None:
    m = model()
    m.estimate_statistics(batches())
    before = {key: value.clone() for key, value in m.state_dict().items()}
    with pytest.raises(UsageError, match="at least one batch"):
        m.estimate_statistics([])
    with pytest.raises(RuntimeError):
        m.estimate_statistics([*batches(), torch.zeros(2, 4, 6, 6)])
    assert all(torch.equal(value, before[key]) for key, value in m.state_dict().items())


def test_shared_statistics_are_left_alone() -> None:
    m = rkr.rectify(network(), head="5", bn="affine")
    m.add_task("first", classes=3, train_base=False)
    before = m.network[1].running_mean.clone()
    assert m.estimate_statistics(batches()) == 0
    assert torch.equal(m.network[1].running_mean, before)

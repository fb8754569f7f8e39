"""What single methods promise beyond the contract of all: heads, weight decay, options, published capacities."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.learning import answers, learn, noise, seen_tasks, small_cnn
from torch import nn

import rkr
from rkr.methods import METHODS
from rkr.methods.learner import SeenTask, decay_groups
from rkr.methods.shared.one_network import TaskHead


def test_fine_tuning_forgets() -> None:
    torch.manual_seed(0)
    learner = METHODS["finetune"].build(small_cnn, "fc")
    first, second, _ = seen_tasks()
    learn(learner, first)
    before = answers(learner, 0)
    head = [p.clone() for p in learner.network.fc.heads[0].parameters()]  # type: ignore[union-attr]
    learn(learner, second)
    assert not torch.allclose(answers(learner, 0), before, atol=1e-3)
    for p, old in zip(learner.network.fc.heads[0].parameters(), head, strict=True):  # type: ignore[union-attr]
        assert torch.equal(p, old)  # the network moved under it, weight decay did not touch it


PAPER_CAPACITY = {"rkr": 104.29, "rkr-lite": 100.73, "finetune": 100.0, "joint": 100.0, "head-only": 100.0}
PAPER_CAPACITY |= {"rkr-plus": 104.23}  # not the paper's: at most as much as rkr
PAPER_CAPACITY |= {"separate": 1000.0, "rectify-only": 103.795, "scale-only": 100.497}


@pytest.mark.parametrize("name", PAPER_CAPACITY)
def test_capacity_of_ten_tasks_on_lenet_as_in_the_paper(name: str) -> None:
    learner = METHODS[name].build(lambda: rkr.networks.lenet(classes=100), "fc")
    for number in range(10):
        names = tuple(f"class {i}" for i in range(10 * number, 10 * number + 10))
        learner.begin(SeenTask(number, f"t{number}", names, 10 * number))
    capacity = learner.capacity()
    assert capacity.network == 3_038_110
    assert capacity.percent == pytest.approx(PAPER_CAPACITY[name], abs=0.005)
    assert capacity.multiply_adds == 10_946_000


def test_joint_loss_is_that_of_each_task_with_its_own_head() -> None:
    torch.manual_seed(0)
    learner = METHODS["joint"].build(small_cnn, "fc").eval()
    seen = seen_tasks()
    for task in seen:
        learner.begin(task)
    parts = [noise(task, n=n) for task, n in zip(seen, (5, 3, 4), strict=True)]
    found = learner.loss(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    total, right = torch.tensor(0.0), 0
    for task, (x, y) in zip(seen, parts, strict=True):
        logits = learner.predict(x, task.number)
        total = total + F.cross_entropy(logits, y - task.start, reduction="sum")
        right += int((logits.argmax(1) == y - task.start).sum())
    torch.testing.assert_close(found.loss, total / 12)
    assert found.correct is not None
    assert int(found.correct) == right
    assert learner.rehearse([5, 3, 4]) == {0: None, 1: None, 2: None}
    assert {id(p) for group in learner.groups() for p in group["params"]} == {id(p) for p in learner.parameters()}


def test_labels_count_over_all_seen_tasks() -> None:
    learner = METHODS["finetune"].build(small_cnn, "fc").eval()
    for task in seen_tasks():
        learner.begin(task)
    x, y = noise(seen_tasks()[2])
    expected = F.cross_entropy(learner.predict(x, 2), y - 5)
    torch.testing.assert_close(learner.loss(x, y).loss, expected)
    assert learner.rehearse([1, 1, 1]) == {2: None}
    assert seen_tasks()[2].labels == slice(5, 9)


def test_head_only_trains_nothing_but_the_head_after_the_first_task() -> None:
    torch.manual_seed(0)
    learner = METHODS["head-only"].build(small_cnn, "fc")
    first, second, _ = seen_tasks()
    learn(learner, first)
    before = {k: v.clone() for k, v in learner.state_dict().items()}
    learn(learner, second)
    after = learner.state_dict()
    changed = {k for k in after if k not in before or not torch.equal(after[k], before[k])}
    assert changed == {"network.fc.heads.1.weight", "network.fc.heads.1.bias"}


def test_weight_decay_spares_normalisation() -> None:
    network = small_cnn()
    decayed, free = decay_groups(network)
    assert free["weight_decay"] == 0
    assert {id(p) for p in free["params"]} == {id(p) for m in (network.bn1, network.bn2) for p in m.parameters()}  # type: ignore[union-attr]
    assert len(decayed["params"]) + len(free["params"]) == len(list(network.parameters()))


def test_task_head_side_by_side() -> None:
    head = TaskHead(nn.Linear(5, 7, bias=False))
    head.add(2)
    head.add(3)
    x = torch.randn(4, 5)
    assert all(layer.bias is None for layer in head.heads)
    assert torch.equal(head(x), head.heads[1](x))
    head.use = None
    assert torch.equal(head(x), torch.cat([head.heads[0](x), head.heads[1](x)], 1))


def test_options() -> None:
    assert METHODS["rkr-k4"].options["rank"] == 4
    assert METHODS["rkr"].options["rank"] == 2
    assert METHODS["finetune"].options == {"bn": "shared"}
    assert METHODS["head-only"].options == {}
    with pytest.raises(rkr.UsageError, match="rnak: rkr has no such option; did you mean 'rank'"):
        METHODS["rkr"].build(small_cnn, "fc", rnak=3)
    with pytest.raises(rkr.UsageError, match="rank: finetune has no such option; choose one of bn"):
        METHODS["finetune"].build(small_cnn, "fc", rank=3)
    with pytest.raises(rkr.UsageError, match="init must be"):
        METHODS["rkr"].build(small_cnn, "fc", init="zero")
    with pytest.raises(rkr.UsageError, match="rank"):
        METHODS["rkr"].build(small_cnn, "fc", rank=0)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("ewc", {"strength": "abc"}, 'strength must be a number, not "abc"'),
        ("ewc", {"strength": math.nan}, "strength must be a finite number, not NaN"),
        ("icarl", {"memory": 2.5}, "memory must be a whole number, not 2.5"),
        ("icarl", {"flip": 1}, "flip must be true or false, not 1"),
        ("ewc", {"mode": 3}, "mode must be text in quotes, not 3"),
    ],
)
def test_options_of_a_wrong_type(method: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(rkr.UsageError, match=re.escape(words)):
        METHODS[method].build(small_cnn, "fc", **options)


@pytest.mark.parametrize("method", ["ewc", "separate", "icarl"])
def test_a_wrong_head(method: str) -> None:
    for head, words in (("classifier", "no such layer"), ("conv1", "that is a Conv2d")):
        with pytest.raises(rkr.UsageError, match=f"not {head!r}: .*{words}; linear layers: .*'fc'"):
            METHODS[method].build(small_cnn, head).begin(SeenTask(0, "a", ("x", "y"), 0))
    METHODS["ewc"].build(small_cnn, "fc", strength=np.float32(2))


def test_rkr_plus_trains_factors_at_a_rate_of_their_own() -> None:
    """LM and RM learn faster and do not decay; everything else is as RKR's groups. The first task trains the base."""
    for options, decay in (({}, {"weight_decay": 0.0}), ({"decay": True}, {})):
        learner = METHODS["rkr-plus"].build(small_cnn, "fc", rate=4.0, **options)
        first, second, _ = seen_tasks()
        learn(learner, first)
        state = learner.model.tasks["t0"]  # type: ignore[union-attr]
        for layer in learner.layers():  # type: ignore[operator]
            assert not bool(state.get(f"{layer.path}.rm").any())
            assert bool((state.get(f"{layer.path}.f") == 1).all())
        learner.begin(second)
        named = learner.model.named_task_parameters()  # type: ignore[union-attr]
        *others, own = learner.groups()
        factors = {f"{layer}.{name}" for layer in ("conv1", "conv2", "fc1") for name in ("lm", "rm")}
        assert {id(p) for p in own["params"]} == {id(named[key]) for key in factors}
        assert {key: value for key, value in own.items() if key != "params"} == {"lr_factor": 4.0, **decay}
        for mine, theirs in zip(others, learner.model.task_parameters(groups=True), strict=True):  # type: ignore
            left = [p for p in theirs["params"] if id(p) not in {id(q) for q in own["params"]}]
            assert [id(p) for p in mine["params"]] == [id(p) for p in left]
            assert mine.get("weight_decay") == theirs.get("weight_decay")
    numbers = {}
    for name in ("rkr", "rkr-plus"):
        learner = METHODS[name].build(small_cnn, "fc")
        learner.begin(seen_tasks()[0])
        numbers[name] = learner.model.cost()["t0"].parameters  # type: ignore[union-attr]
    assert numbers["rkr-plus"] <= numbers["rkr"]


def test_random_start_draws_anew(tmp_path: Path) -> None:
    """`rkr-random` starts each task at R = 0, F = 1; `rkr` at the previous task's values."""
    for name, same in (("rkr", True), ("rkr-random", False)):
        torch.manual_seed(0)
        learner = METHODS[name].build(small_cnn, "fc")
        learn(learner, seen_tasks()[0])
        learner.begin(seen_tasks()[1])
        first, second = learner.model.tasks["t0"], learner.model.tasks["t1"]  # type: ignore[union-attr]
        for key in ("conv2.lm", "conv2.rm", "fc1.f"):
            assert torch.equal(first.get(key), second.get(key)) is same
        assert bool((second.get("conv2.rm") == 0).all()) is not same


@pytest.mark.parametrize("name", ["rkr", "finetune"])
def test_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = METHODS[name].build(small_cnn, "fc")
    for task in seen_tasks()[:2]:
        learn(learner, task)
    learner.export(tmp_path / "model")
    if name == "rkr":
        model = rkr.load(tmp_path / "model", small_cnn()).eval()
        assert list(model.tasks) == ["t0", "t1"]
        model.set_task("t0")
        with torch.no_grad():
            assert torch.equal(model(noise(seen_tasks()[0], n=20)[0]), answers(learner, 0))
    else:
        assert [p.name for p in (tmp_path / "model").iterdir()] == ["learner.safetensors"]


def test_only_normalisation_itself_is_without_weight_decay() -> None:
    """Not all that lies within a module that is called so."""

    class NormedNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(4, 3), nn.LayerNorm(3)

    network = NormedNet()
    decayed, free = decay_groups(network)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in network.inner.parameters()}
    assert {id(p) for p in free["params"]} == {id(p) for p in network.norm.parameters()}
    assert free["weight_decay"] == 0

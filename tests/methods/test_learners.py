"""Every method through the hooks that the engine calls, on a small network."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.methods import METHODS, Learner
from rkr.methods.learner import SeenTask, decay_groups
from rkr.methods.shared.one_network import TaskHead

ISOLATING = [name for name, method in METHODS.items() if method.learner.isolating]
CLASSES = (3, 2, 4)
COMPUTES_MORE = {"ccll", "den", "eft", "pgn", "rps-net"}


def make() -> nn.Module:
    return rkr.networks.small_cnn(classes=9, size=4)


def tasks() -> list[SeenTask]:
    found, start = [], 0
    for number, classes in enumerate(CLASSES):
        names = tuple(f"{number}{i}" for i in range(classes))
        found.append(SeenTask(number, f"t{number}", names, start))
        start += classes
    return found


def batch(task: SeenTask, n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * task.number + seed)
    x = torch.randn(n, 1, 4, 4, generator=generator)
    return x, torch.randint(task.classes, (n,), generator=generator) + task.start


def rehearsed(learner: Learner) -> Iterator[tuple[Tensor, Tensor]]:
    """What a learner wants to be trained on."""
    for number, rows in learner.rehearse([12] * len(learner.seen)).items():
        x, y = batch(learner.seen[number])
        yield (x, y) if rows is None else (x[rows], y[rows])


def learn(learner: Learner, task: SeenTask, steps: int = 3) -> list[float]:
    """What the engine does, in small."""
    learner.begin(task)
    losses = []
    samples = partial(rehearsed, learner)
    for phase in learner.phases():
        learner.prepare(phase, samples)
        optimizer = torch.optim.SGD(learner.groups(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        learner.train()
        for step in range(steps):
            outcome = learner.loss(*batch(task, seed=step % 2))
            optimizer.zero_grad()
            outcome.loss.backward()
            learner.before_step(optimizer)
            optimizer.step()
            learner.after_step()
            losses.append(outcome.loss.item())
    learner.eval()
    learner.end(samples)
    return losses


@torch.no_grad()
def answers(learner: Learner, number: int) -> Tensor:
    learner.eval()
    return learner.predict(batch(tasks()[0], 20)[0], number).clone()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_and_answers_with_each_task_s_classes(name: str) -> None:
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc")
    for task in tasks():
        losses = learn(learner, task, steps=12)
        assert losses[-1] < losses[0] or losses[-1] < losses[-12]  # phases may have losses of their own
        assert [tuple(answers(learner, n).shape) for n in range(task.number + 1)] == [
            (20, classes) for classes in CLASSES[: task.number + 1]
        ]
    capacity = learner.capacity()
    assert capacity.network == sum(p.numel() for p in make().parameters())
    assert capacity.bytes >= 4 * capacity.network * 0.9  # heads of 3 classes are smaller than one of 9
    plain = 16 * 9 * 16 + 16 * 32 * 16 * 9 + 128 * 128 + 128 * 9
    assert capacity.multiply_adds is not None
    if name in COMPUTES_MORE:  # how much is tested beside each method
        assert capacity.multiply_adds > plain
    else:
        assert capacity.multiply_adds == plain


@pytest.mark.parametrize("name", ISOLATING)
def test_isolating_methods_answer_bit_for_bit_as_before(name: str) -> None:
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc")
    kept: list[Tensor] = []
    for task in tasks():
        learn(learner, task)
        kept.append(answers(learner, task.number))
        for number, before in enumerate(kept):
            assert torch.equal(answers(learner, number), before)


def test_fine_tuning_forgets() -> None:
    torch.manual_seed(0)
    learner = METHODS["finetune"].build(make, "fc")
    first, second, _ = tasks()
    learn(learner, first)
    before = answers(learner, 0)
    head = [p.clone() for p in learner.network.fc.heads[0].parameters()]  # type: ignore[union-attr]
    learn(learner, second)
    assert not torch.allclose(answers(learner, 0), before, atol=1e-3)
    for p, old in zip(learner.network.fc.heads[0].parameters(), head, strict=True):  # type: ignore[union-attr]
        assert torch.equal(p, old)  # the network moved under it, weight decay did not touch it


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), ("pgn", {"lateral": "adapter"})])
def test_what_has_a_gradient_is_trained(name: str, options: dict[str, object]) -> None:
    """Nothing is learned by halves: no parameter collects gradients that no optimiser sees."""
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc", **options)
    for task in tasks()[:2]:
        learn(learner, task)
    learner.begin(tasks()[2])
    for phase in learner.phases():
        learner.prepare(phase, partial(rehearsed, learner))
        groups = learner.groups()
        learner.train()
        learner.zero_grad(set_to_none=True)
        learner.loss(*batch(tasks()[2])).loss.backward()
        trained = {id(p) for group in groups for p in group["params"]}
        left = [key for key, p in learner.named_parameters() if p.grad is not None and id(p) not in trained]
        assert left == []


@pytest.mark.parametrize("name", METHODS)
def test_state_carries_everything(name: str) -> None:
    """A new learner that began the same tasks and loads the state computes the same, and trains on alike."""
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc")
    for task in tasks()[:2]:
        learn(learner, task)
    torch.manual_seed(1)
    other = METHODS[name].build(make, "fc")
    for task in tasks()[:2]:
        other.begin(task)
    other.load_state_dict(learner.state_dict())
    for number in range(2):
        assert torch.equal(answers(other, number), answers(learner, number))
    for each in (learner, other):
        torch.manual_seed(2)
        learn(each, tasks()[2])
    for number in range(3):
        assert torch.equal(answers(other, number), answers(learner, number))


PAPER_CAPACITY = {"rkr": 104.29, "rkr-lite": 100.73, "finetune": 100.0, "joint": 100.0, "head-only": 100.0}
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
    learner = METHODS["joint"].build(make, "fc").eval()
    seen = tasks()
    for task in seen:
        learner.begin(task)
    parts = [batch(task, n) for task, n in zip(seen, (5, 3, 4), strict=True)]
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


def test_labels_count_over_all_tasks() -> None:
    learner = METHODS["finetune"].build(make, "fc").eval()
    for task in tasks():
        learner.begin(task)
    x, y = batch(tasks()[2])
    expected = F.cross_entropy(learner.predict(x, 2), y - 5)
    torch.testing.assert_close(learner.loss(x, y).loss, expected)
    assert learner.rehearse([1, 1, 1]) == {2: None}
    assert tasks()[2].labels == slice(5, 9)


def test_head_only_trains_nothing_but_the_head_after_the_first_task() -> None:
    torch.manual_seed(0)
    learner = METHODS["head-only"].build(make, "fc")
    first, second, _ = tasks()
    learn(learner, first)
    before = {k: v.clone() for k, v in learner.state_dict().items()}
    learn(learner, second)
    after = learner.state_dict()
    changed = {k for k in after if k not in before or not torch.equal(after[k], before[k])}
    assert changed == {"network.fc.heads.1.weight", "network.fc.heads.1.bias"}


def test_weight_decay_spares_normalisation() -> None:
    network = make()
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
    with pytest.raises(rkr.UsageError, match="no option 'rnak'"):
        METHODS["rkr"].build(make, "fc", rnak=3)
    with pytest.raises(rkr.UsageError, match="no option 'rank'"):
        METHODS["finetune"].build(make, "fc", rank=3)
    with pytest.raises(rkr.UsageError, match="init must be"):
        METHODS["rkr"].build(make, "fc", init="zero")
    with pytest.raises(rkr.UsageError, match="rank"):
        METHODS["rkr"].build(make, "fc", rank=0)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("ewc", {"strength": "abc"}, "strength must be a finite number, not 'abc'"),
        ("ewc", {"strength": math.nan}, "strength must be a finite number, not nan"),
        ("icarl", {"memory": 2.5}, "memory must be a whole number, not 2.5"),
        ("icarl", {"flip": 1}, "flip must be True or False, not 1"),
        ("ewc", {"mode": 3}, "mode must be text, not 3"),
    ],
)
def test_options_of_a_wrong_type(method: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(rkr.UsageError, match=re.escape(words)):
        METHODS[method].build(make, "fc", **options)


@pytest.mark.parametrize("method", ["ewc", "separate", "icarl"])
def test_a_wrong_head(method: str) -> None:
    for head, words in (("classifier", "no such layer"), ("conv1", "that is a Conv2d")):
        with pytest.raises(rkr.UsageError, match=f"not {head!r}: .*{words}; linear layers: .*'fc'"):
            METHODS[method].build(make, head).begin(SeenTask(0, "a", ("x", "y"), 0))
    METHODS["ewc"].build(make, "fc", strength=np.float32(2))


def test_random_start_draws_anew(tmp_path: Path) -> None:
    """`rkr-random` starts each task at R = 0, F = 1; `rkr` at the previous task's values."""
    for name, same in (("rkr", True), ("rkr-random", False)):
        torch.manual_seed(0)
        learner = METHODS[name].build(make, "fc")
        learn(learner, tasks()[0])
        learner.begin(tasks()[1])
        first, second = learner.model.tasks["t0"], learner.model.tasks["t1"]  # type: ignore[union-attr]
        for key in ("conv2.lm", "conv2.rm", "fc1.f"):
            assert torch.equal(first.get(key), second.get(key)) is same
        assert bool((second.get("conv2.rm") == 0).all()) is not same


@pytest.mark.parametrize("name", ["rkr", "finetune"])
def test_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    learner = METHODS[name].build(make, "fc")
    for task in tasks()[:2]:
        learn(learner, task)
    learner.export(tmp_path / "model")
    if name == "rkr":
        model = rkr.load(tmp_path / "model", make()).eval()
        assert list(model.tasks) == ["t0", "t1"]
        model.set_task("t0")
        with torch.no_grad():
            assert torch.equal(model(batch(tasks()[0], 20)[0]), answers(learner, 0))
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

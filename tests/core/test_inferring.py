"""Answers without being told the task: the two steps against a direct computation, size, cost and files."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.core import inferring
from rkr.core.features import base_features, base_maps
from rkr.core.infer import Description, Rule, describe, embed
from rkr.errors import UsageError

CLASSES, INPUTS = 3, 20


def network() -> nn.Module:
    """A wide random network: its features keep what its inputs tell."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 7)
    )


def samples(task: int, seed: int, each: int = 40) -> tuple[Tensor, Tensor]:
    """Classes of a task around their means."""
    means = 2 * torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(100 + task))
    draw = torch.Generator().manual_seed(1000 * task + seed)
    y = torch.arange(CLASSES).repeat(each)
    return means[y] + 0.9 * torch.randn(len(y), INPUTS, generator=draw), y


def learned(tasks: int, steps: int = 15) -> rkr.RectifiedModel:
    model = rkr.rectify(network(), rank=4, head="5")
    for number in range(tasks):
        model.add_task(f"t{number}", classes=CLASSES, train_base=False)
        x, y = samples(number, 0)
        optimizer = torch.optim.SGD(model.task_parameters(groups=True), lr=0.05, momentum=0.9)
        model.train()
        for _ in range(steps):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.describe_task([(x[:50], y[:50]), (x[50:], y[50:])])
        assert model.training
    return model


@pytest.fixture(scope="module")
def model() -> rkr.RectifiedModel:
    return learned(6)


def test_base_features_do_not_depend_on_the_task_in_use(model: rkr.RectifiedModel) -> None:
    x, _ = samples(0, 1)
    model.eval()
    plain = network().eval()
    wanted = plain[:5](x)
    for name in ("t0", "t5"):
        model.set_task(name)
        torch.testing.assert_close(base_features(model, x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("most", "grid"), [(800, 4), (799, 3), (256, 2), (50, 1), (10, 1), (10_000, 8)])
def test_maps_of_the_last_convolution(most: int, grid: int) -> None:
    torch.manual_seed(0)
    plain = rkr.networks.lenet().eval()
    model = rkr.rectify(copy.deepcopy(plain), head="fc").eval()
    model.add_task("a", classes=5, train_base=False)
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        y = F.max_pool2d(plain.bn1(plain.conv1(x)), 3, 2, 1).relu()
        y = F.max_pool2d(plain.bn2(plain.conv2(y)), 3, 2, 1).relu()
    wanted = F.adaptive_avg_pool2d(y, grid).flatten(1)
    assert wanted.shape == (3, 50 * grid * grid)
    torch.testing.assert_close(base_maps(model, x, most), wanted, rtol=1e-4, atol=1e-5)


def test_networks_whose_head_sees_pooled_maps_or_no_maps() -> None:
    torch.manual_seed(0)
    model = rkr.rectify(rkr.networks.resnet18(), head="fc").eval()
    model.add_task("a", classes=5, train_base=False)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(base_maps(model, x, 800), base_features(model, x))
    flat = learned(1, steps=0)
    assert torch.equal(base_maps(flat, samples(0, 1)[0], 800), base_features(flat, samples(0, 1)[0]))


def test_the_grid_is_so_fine_that_class_means_fit() -> None:
    """All tasks have the grid of the first: 800 values of LeNet's maps for 10 classes, 450 for 20."""
    for classes, grid in ((10, 4), (20, 3)):
        torch.manual_seed(0)
        model = rkr.rectify(rkr.networks.lenet(), head="fc", budget="paper").eval()
        for name, count in (("first", classes), ("second", 4)):
            model.add_task(name, classes=count)
            x, y = torch.randn(2 * count, 3, 32, 32), torch.arange(count).repeat(2)
            model.describe_task([(x, y)])
            described = Description.from_json(model.tasks[name].about["infer"])
            assert described.means.shape == (count, 50 * grid * grid)
            assert len(json.dumps(model.tasks[name].about["infer"])) <= model.cost()[name].bytes // 3
        assert model.infer(x).names == ("first", "second")


def test_two_steps_are_the_direct_computation(model: rkr.RectifiedModel) -> None:
    model.eval().set_task("t1")
    x = torch.cat([samples(number, 2)[0] for number in range(6)])
    rule = inferring.rule_of(model)
    with torch.no_grad():
        by_class = torch.stack(rule.by_class(base_features(model, x)), 1)  # (B, T, C)
        assert torch.allclose(by_class.exp().sum((1, 2)), torch.ones(len(x)))
        heads = []
        for name in model.tasks:
            model.set_task(name)
            heads.append(model(x).log_softmax(1))
        model.set_task("t1")
    evidence, product = by_class.exp().sum(2), (by_class + torch.stack(heads, 1)).exp()
    for candidates in (1, 2, 6):
        allowed = torch.zeros_like(evidence, dtype=torch.bool)
        allowed.scatter_(1, evidence.topk(candidates, 1).indices, True)
        sure = evidence.amax(1) > inferring.CERTAIN
        allowed[sure] = F.one_hot(evidence.argmax(1), 6).bool()[sure]
        score = torch.where(allowed[:, :, None], product, torch.tensor(0.0))
        found = inferring.infer(model, x, 0.05, candidates)
        assert torch.equal(found.task, score.flatten(1).argmax(1) // CLASSES)
        assert torch.equal(found.label, score.flatten(1).argmax(1) % CLASSES)
        of_tasks = score.sum(2) / score.sum((1, 2))[:, None]
        wanted = of_tasks.gather(1, found.task[:, None])[:, 0] * torch.where(allowed, evidence, 0.0).sum(1)
        torch.testing.assert_close(found.probability, wanted, rtol=1e-3, atol=1e-5)
        assert model.task == "t1"
    truth = torch.arange(6).repeat_interleave(3 * 40)
    found = model.infer(x)
    assert found.names == tuple(f"t{n}" for n in range(6))
    assert (found.task == truth).float().mean() > 0.9


def test_means_of_groups_of_classes_tell_the_task_only() -> None:
    model = learned(2)
    model.eval()
    x = torch.cat([samples(number, 2)[0] for number in range(2)])
    y = samples(0, 0)[1]
    for number, name in enumerate(model.tasks):
        features = base_features(model, samples(number, 0)[0])
        limit = 2 * 3 * 128 * 2  # one mean fits
        model.tasks[name].about["infer"] = describe(features, y, CLASSES, limit=limit, width=256).to_json()
    model.about.clear()
    model.rule = None
    found = model.infer(x)
    assert [own.shape[1] for own in inferring.rule_of(model).by_class(base_features(model, x))] == [1, 1]
    for number, name in enumerate(model.tasks):
        model.set_task(name)
        rows = found.task == number
        assert torch.equal(found.label[rows], model(x[rows]).argmax(1))
    assert (found.task == torch.arange(2).repeat_interleave(3 * 40)).float().mean() > 0.8


def test_none_of_the_tasks(model: rkr.RectifiedModel) -> None:
    model.eval()
    own = torch.cat([samples(number, 3, each=200)[0] for number in range(6)])
    for rate in (0.05, 0.2):
        # Of several tasks all must refuse a sample, so the rate is a bound.
        assert model.infer(own, rate).none.float().mean() < rate + 0.03  # known from 120 samples a task
        by_rule = inferring.rule_of(model).none(base_features(model, own), rate)
        assert torch.equal(model.infer(own, rate).none, by_rule)
    assert model.infer(own, 0.2).none.any()


def test_told_answers_do_not_change() -> None:
    model = learned(2, steps=3)
    model.eval().set_task("t0")
    x, y = samples(0, 4)
    before, prints = model(x), [model.fingerprint(name) for name in model.tasks]
    model.describe_task([(x, y)])
    model.infer(x)
    assert torch.equal(model(x), before)
    assert [model.fingerprint(name) for name in model.tasks] == prints


def test_a_third_of_the_task_at_most(model: rkr.RectifiedModel) -> None:
    for name in model.tasks:
        size = len(json.dumps(model.tasks[name].about["infer"]))
        assert size <= model.cost()[name].bytes // 3
    x, y = samples(0, 0)
    wide = torch.randn(len(x), 500).abs()
    full = describe(wide, y, CLASSES)
    for limit in (60_000, 20_000, 8_000, 6_000):
        one = describe(wide, y, CLASSES, limit=limit)
        assert len(json.dumps(one.to_json())) <= limit
        assert one.means.shape == (CLASSES, 500)
    assert len(describe(wide, y, CLASSES, limit=20_000).directions) < len(full.directions)
    assert len(describe(wide, y, CLASSES, limit=8_000).directions) < 3
    few = describe(wide, y, CLASSES, limit=3_500)
    assert few.means.shape == (1, 500)
    assert len(few.directions) == 0
    text = json.loads(json.dumps(few.to_json()))
    again = type(few).from_json(text)
    assert torch.equal(again.means, few.means)
    assert Rule({"a": few, "b": full})(wide).probability.shape == (len(x), 2)
    assert base64.b64decode(text["means"]["data"]) == few.means.numpy().tobytes()


def test_files_keep_descriptions(model: rkr.RectifiedModel, tmp_path: Path) -> None:
    model.eval()
    x = torch.cat([samples(number, 5)[0] for number in range(6)])
    wanted = model.infer(x)
    model.save(tmp_path / "zoo")
    loaded = rkr.load(tmp_path / "zoo", network()).eval()
    loaded.tasks.memory = 1  # tasks leave memory at once
    found = loaded.infer(x)
    assert torch.equal(found.task, wanted.task)
    assert torch.equal(found.label, wanted.label)
    loaded.remove_task("t5")
    assert loaded.infer(x).names == tuple(f"t{n}" for n in range(5))
    model.save_task("t5", tmp_path / "t5.safetensors")
    loaded.load_task(tmp_path / "t5.safetensors")
    assert torch.equal(loaded.infer(x).task, wanted.task)


def test_five_passes_for_many_tasks() -> None:
    """A thousand tasks: rows that pass the network are counted."""
    model = rkr.rectify(network(), rank=1, head="5").eval()
    x, y = samples(0, 0, each=2)
    for number in range(1000):
        model.add_task(f"t{number}", classes=CLASSES, train_base=False, init="random")
        means = torch.randn(CLASSES, 128, generator=torch.Generator().manual_seed(number)).abs()
        model.tasks[f"t{number}"].about["infer"] = describe(
            means[y] + 0.1 * torch.rand(len(y), 128), y, CLASSES, width=inferring.WIDTH
        ).to_json()
    rows: list[int] = []
    handle = model.network[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    x = torch.randn(30, INPUTS, generator=torch.Generator().manual_seed(1))
    found = model.infer(x)
    handle.remove()
    assert rows[0] == 30
    assert sum(rows) <= 5 * 30
    assert found.task.shape == found.label.shape == found.probability.shape == found.none.shape == (30,)


def test_messages() -> None:
    model = rkr.rectify(network(), head="5")
    model.add_task("a", classes=CLASSES, train_base=False)
    x, y = samples(0, 0)
    with pytest.raises(UsageError, match="'a' has no description by which it could be inferred: select it"):
        model.infer(x)
    with pytest.raises(UsageError, match="no samples of task 'a'"):
        model.describe_task([])
    with pytest.raises(UsageError, match="candidates must be at least 1"):
        inferring.infer(model, x, 0.05, 0)
    model.describe_task([(x, y)])
    with pytest.raises(UsageError, match="false-alarm rate"):
        model.infer(x, 0.0)
    model.tasks["a"].about["infer"] = describe(torch.randn(len(x), 500), y, CLASSES).to_json()
    model.rule = None
    with pytest.raises(UsageError, match="described by 500 values, and this network gives 128: select each task"):
        model.infer(x)
    headless = rkr.rectify(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    headless.add_task("a", train_base=False)
    with pytest.raises(UsageError, match="has no head"):
        headless.describe_task([(torch.randn(3, 4), torch.arange(3))])


def test_embedding_keeps_the_sign() -> None:
    assert bool((embed(torch.tensor([[-4.0, 1.0]])) == embed(torch.tensor([[-16.0, 4.0]]))).all())

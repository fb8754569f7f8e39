"""Sizes of runs that were recorded in format 1, against learners that are built for the same tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import rkr
from rkr.capacity import Capacity
from rkr.errors import FileError
from rkr.experiment.recipes.settings import NetworkSettings
from rkr.experiment.recount import Recorded, recounted
from rkr.experiment.results import Result, read_result
from rkr.methods import METHODS, ZERO_SHOT_METHODS, Learner
from rkr.methods.learner import SeenTask
from rkr.methods.rps import RpsNet
from rkr.methods.shared.rehearsing import Rehearsing

RESULTS = Path(__file__).parents[2] / "results"
LENET = RESULTS / "cifar100-lenet-20-epochs"
TRAINED = {"apd", "den", "rcl"}  # training decides on the size; the count has not changed
RUNS = [path for path in sorted(RESULTS.glob("*/*/*")) if path.is_dir() and path.name in ("A", "fixed")]
RUNS = [path for path in RUNS if json.loads((path / "run.json").read_text())["settings"]["learner"] not in TRAINED]
# These describe their tasks by what they have read, and share the covariance of so many values.
PLUS = {RESULTS / "digits" / "rkr-plus" / "fixed": 288, LENET / "rkr-plus" / "A": 500}
RUNS = [path for path in RUNS if path not in PLUS]


def sizes(result: Result) -> list[Capacity]:
    """After each task of a run, of an untrained learner that has adopted what the run had found."""
    settings, stream = result.settings, result.record["stream"]
    network = NetworkSettings.model_validate(settings["network"])
    method = (ZERO_SHOT_METHODS if result.measure == "H" else METHODS)[settings["learner"]]
    known = {key: value for key, value in settings["options"].items() if key in method.options}
    learner: Learner = method.build(network.build, network.head, **{**method.learner.unrecorded, **known})
    found, start = [], 0
    for number, task in enumerate(stream["tasks"]):
        more: dict[str, Any] = {}
        if result.measure == "H":
            more = {"attributes": torch.zeros(task["attributes"]), "unseen": tuple(task["unseen"])}
        learner.begin(SeenTask(number, task["name"], tuple(task["class_names"]), start, **more))
        classes = len(task["class_names"])
        if isinstance(learner, RpsNet):
            learner.adopt(result.notes[number]["path"])
        if isinstance(learner, Rehearsing):
            learner.memory.keep([torch.arange(task["images"]["train"] // classes)] * classes)
            learner.sample_bytes.fill_(prod(stream["input_shape"]))
        start += classes
        found.append(learner.capacity())
    return found


@pytest.mark.parametrize("path", RUNS, ids=["-".join(path.parts[-3:-1]) for path in RUNS])
def test_committed_runs_have_the_size_of_learners_built_for_their_tasks(path: Path) -> None:
    """Multiply-adds are recorded, and need no other count."""
    result = read_result(path, epochs=False)
    built = sizes(result)
    assert [replace(cost, multiply_adds=None) for cost in result.costs] == [
        replace(cost, multiply_adds=None) for cost in built
    ]


@pytest.mark.parametrize("path", PLUS, ids=["digits", "lenet"])
def test_descriptions_count_in_bytes(path: Path) -> None:
    """Those of the tasks, and what they share: half of a symmetric matrix in float16, as base64."""
    result = read_result(path, epochs=False)
    built, described, shared = sizes(result), 0, []
    for cost, untrained, notes in zip(result.costs, built, result.notes, strict=True):
        described += notes["description"]
        assert cost.parameters == untrained.parameters
        shared.append(cost.bytes - untrained.bytes - described)
    width = PLUS[path]
    assert all(0 <= size - width * (width + 1) // 2 * 2 * 4 / 3 < 300 for size in shared)


def test_sizes_that_training_decides_on_count_as_recorded() -> None:
    for name in TRAINED:
        path = LENET / name / "A"
        lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
        costs = [line["cost"] for line in lines if line["event"] == "task"]
        for cost, read in zip(costs, read_result(path).costs, strict=True):
            assert (cost["parameters"], cost["bytes"]) == (read.parameters, read.bytes)
            assert (read.further, read.further_bytes) == (0, 0)


def test_copies_of_the_network_no_longer_count() -> None:
    """Ten tasks of CIFAR-100 on LeNet, in percent: recorded, to use all tasks, to go on learning."""
    wanted = {"l2t": (198.4, 100, 100), "lwf": (199.8, 100, 100), "si": (296.7, 100, 198.4), "pc": (296.7, 100, 198.4)}
    wanted |= {"icarl": (252, 100, 150.6), "eeil": (250.4, 100, 150.6), "ewc": (296.7, 100, 296.7)}
    wanted |= {"rps-net": (1037.2, 493.4, 544)}
    for name, numbers in wanted.items():
        path = LENET / name / "A"
        lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
        recorded = [line["cost"]["percent"] for line in lines if line["event"] == "task"][-1]
        cost = read_result(path).costs[-1]
        assert (recorded, cost.percent, cost.percent_to_learn) == pytest.approx(numbers, abs=0.05)


COSTS = [Capacity(150, 100, 600, None, None, None), Capacity(150, 100, 600, None, None, None)]
TASKS = [{"class_names": ["a", "b"], "images": {"train": 6}}] * 2


def recorded(learner: str, **changes: Any) -> Recorded:
    return Recorded(learner, {}, False, None, [1, 2, 2], TASKS)._replace(**changes)


def test_joint_training_keeps_what_it_has_read() -> None:
    found = recounted(recorded("joint"), COSTS)
    assert [(cost.further, cost.further_bytes) for cost in found] == [(6, 24), (12, 48)]
    assert [(cost.parameters, cost.bytes) for cost in found] == [(150, 600)] * 2


def test_online_ewc_is_held_where_the_network_is() -> None:
    every = recounted(recorded("ewc"), COSTS)
    assert [(cost.parameters, cost.further) for cost in every] == [(100, 25), (100, 50)]
    online = recounted(recorded("ewc", options={"mode": "online"}), COSTS)
    assert [(cost.parameters, cost.further) for cost in online] == [(100, 25), (100, 25)]


@pytest.mark.parametrize(
    "run",
    [
        recorded("of-a-plug-in"),
        recorded("of-a-plug-in", zero_shot=True),
        recorded("sft", zero_shot=True),  # the whole network is not told
        recorded("joint", tasks=[{"class_names": ["a"]}] * 2),
        recorded("joint", tasks=[{"class_names": ["a"], "images": {"train": "many"}}] * 2),
        recorded("icarl", sample=None),
        recorded("eeil", options={"memory": "large"}),
        recorded("lwf", tasks=[{"images": {"train": 6}}] * 2),
    ],
)
def test_what_a_record_does_not_tell_stays_unknown(run: Recorded) -> None:
    assert recounted(run, COSTS) == COSTS
    assert COSTS[0].percent_to_learn is COSTS[0].bytes_to_learn is None


def test_a_record_that_contradicts_itself_is_left_as_it_is() -> None:
    impossible = [Capacity(100_000, 100, 600, None, None, None)]
    assert recounted(recorded("lwf"), impossible) == impossible


def test_lines_of_both_formats_in_one_run(tmp_path: Path) -> None:
    """A run that an earlier version began and this one goes on with."""
    for name in ("run.json", "results.jsonl"):
        (tmp_path / name).write_bytes((LENET / "si" / "A" / name).read_bytes())
    before = read_result(tmp_path).costs
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "task" and line["number"] > 4:
            line["cost"] = before[line["number"] - 1].to_json()
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_result(tmp_path).costs == before


def test_the_present_format_has_both_sizes(tmp_path: Path) -> None:
    for name in ("run.json", "results.jsonl"):
        (tmp_path / name).write_bytes((LENET / "si" / "A" / name).read_bytes())
    run = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**run, "format": 2}))
    with pytest.raises(FileError, match="'cost': 'learning' is missing"):
        read_result(tmp_path)


def test_sizes_are_read_as_they_are_written() -> None:
    learner = METHODS["si"].build(lambda: rkr.networks.lenet(classes=100), "fc")
    learner.begin(SeenTask(0, "t", ("a", "b"), 0))
    cost, written = learner.capacity(), learner.capacity().to_json()
    assert written["learning"] == {
        "parameters": cost.parameters + 2_987_870,
        "percent": cost.percent_to_learn,
        "bytes": cost.bytes + 4 * 2_987_870,
    }

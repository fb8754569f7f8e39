"""What runs have learned, loaded from their folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rkr
from rkr.experiment import recipes
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import read_result
from rkr.experiment.run import Run
from rkr.experiment.runner import Execution, run_plan

OWN = """
[methods.apd]
consolidate = 2

[methods.rcl]
trials = 2

[methods.eft]
stem = true

[methods.rps-net]
candidates = 2
"""


@pytest.fixture
def run_folder_of(tmp_path: Path) -> Callable[..., Path]:
    """Runs a method on the digits."""
    text = (Path(recipes.__file__).parent / "digits.toml").read_text()
    (tmp_path / "own.toml").write_text(text + OWN)
    recipe = load_recipe(str(tmp_path / "own.toml"))

    def run(method: str, completes: bool = True) -> Path:
        out = tmp_path / "runs"
        plan = Plan(recipe, str(tmp_path / "own.toml"), (method,), ("fixed",), out, epochs=2, limit=20)
        assert run_plan(plan, Execution(threads=1), lambda _: None) is completes
        return plan.folder(plan.specs[0])

    return run


@pytest.mark.parametrize("method", ["rkr", "ewc", "icarl", "apd", "rcl", "hnet", "rps-net"])
def test_a_loaded_learner_answers_as_it_was_tested(method: str, run_folder_of: Callable[..., Path]) -> None:
    folder = run_folder_of(method)
    learner = rkr.load_learner(folder)
    result, stream = read_result(folder), load_recipe("digits").stream("fixed")
    assert [task.name for task in learner.seen] == list(result.tasks)
    for number, task in enumerate(stream.tasks):
        x: Any = task.test.x  # type: ignore[union-attr]
        images = (x.float() / 255 - torch.tensor(stream.mean).view(-1, 1, 1)) / torch.tensor(stream.std).view(-1, 1, 1)
        with torch.no_grad():
            hits = learner.predict(images, number).argmax(1) == task.test.y  # type: ignore[union-attr]
        assert float(hits.float().mean()) == pytest.approx(result.matrix[-1][number], abs=1.01 / len(x))
    capacity, counted = learner.capacity(), result.costs[-1]
    assert (capacity.parameters, capacity.bytes) == (counted.parameters, counted.bytes)
    made_for_it = method in ("icarl", "rps-net")
    assert [row is not None for row in result.agnostic] == [made_for_it] * (len(result.tasks) - 1) + [True]


def test_an_option_that_came_later_is_what_it_was(run_folder_of: Callable[..., Path]) -> None:
    """EFT transformed the first convolution too before there was a choice."""
    folder = run_folder_of("eft")
    wanted = rkr.load_learner(folder).state_dict()
    assert "model.tasks.digits-1.conv1.spatial" in wanted
    record = json.loads((folder / "run.json").read_text())
    assert record["settings"]["options"].pop("stem") is True
    (folder / "run.json").write_text(json.dumps(record))
    found = rkr.load_learner(folder).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_what_was_learned_so_far(run_folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that goes on, the tasks that are complete."""
    finish = Run._finish_task

    def finish_task(self: Run) -> None:
        self._stop = self._at.number == 2  # the third task is not tested any more
        finish(self)

    monkeypatch.setattr(Run, "_finish_task", finish_task)
    folder = run_folder_of("ewc", completes=False)
    learner = rkr.load_learner(folder)
    assert [task.name for task in learner.seen] == ["digits-1", "digits-2"]
    assert learner.predict(torch.zeros(1, 1, 8, 8), 1).shape == (1, 2)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text(lines[0])
    with pytest.raises(rkr.UsageError, match="has learned no task yet: run its command again to resume"):
        rkr.load_learner(folder)


def test_what_cannot_be_loaded(run_folder_of: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(rkr.RkrError, match=r"run\.json"):
        rkr.load_learner(tmp_path)
    folder = run_folder_of("ewc")
    record = json.loads((folder / "run.json").read_text())
    for change, words in (
        ({"learner": "mine"}, "no method is called 'mine': install the plug-in that brings it"),
        ({"learner": "gone:Mine"}, "gone:Mine: there is no module 'gone': install it, or add the folder that has it"),
        ({"network": {"name": "mine", "head": "fc", "arguments": {}}}, r"run\.json: .*no network is called 'mine'"),
    ):
        changed = {**record, "settings": {**record["settings"], **change}}
        (folder / "run.json").write_text(json.dumps(changed))
        with pytest.raises(rkr.UsageError, match=words):
            rkr.load_learner(folder)
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "model" / "learner.safetensors").unlink()
    with pytest.raises(rkr.FileError, match=r"learner\.safetensors: cannot be read: No such file"):
        rkr.load_learner(folder)

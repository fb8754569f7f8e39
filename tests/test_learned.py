"""What runs have learned, loaded from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rkr
from rkr.experiments import How, Plan, run_plan
from rkr.recipes import load_recipe
from rkr.report import read_result

OWN = """
[methods.apd]
consolidate = 2

[methods.rcl]
trials = 2

[methods.rps-net]
candidates = 2
"""


@pytest.mark.parametrize("method", ["rkr", "ewc", "icarl", "apd", "rcl", "hnet", "rps-net"])
def test_a_loaded_learner_answers_as_it_was_tested(method: str, tmp_path: Path) -> None:
    from rkr import recipes

    text = (Path(recipes.__file__).parent / "digits.toml").read_text()
    (tmp_path / "own.toml").write_text(text + OWN)
    recipe = load_recipe(str(tmp_path / "own.toml"))
    plan = Plan(recipe, str(tmp_path / "own.toml"), (method,), ("fixed",), tmp_path / "runs", epochs=2, limit=20)
    assert run_plan(plan, How(threads=1), lambda _: None)
    folder = plan.folder(plan.jobs[0])
    learner = rkr.load_learner(folder)
    result, stream = read_result(folder), recipe.changed(2, None, 20).stream("fixed")
    assert [task.name for task in learner.seen] == list(result.tasks)
    for number, task in enumerate(stream.tasks):
        x: Any = task.test.x  # type: ignore[union-attr]
        images = (x.float() / 255 - torch.tensor(stream.mean).view(-1, 1, 1)) / torch.tensor(stream.std).view(-1, 1, 1)
        with torch.no_grad():
            hits = learner.predict(images, number).argmax(1) == task.test.y  # type: ignore[union-attr]
        assert float(hits.float().mean()) == pytest.approx(result.matrix[-1][number], abs=1.01 / len(x))


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(rkr.FileError, match=r"is no folder of a run: run\.json cannot be read"):
        rkr.load_learner(tmp_path)
    settings = {"network": {"name": "lenet", "head": "fc", "arguments": {}}, "method": "sft", "learner": "sft"}
    record = {"stream": {"tasks": []}, "settings": {**settings, "stream": {"datasets": ["CUB"]}}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(rkr.UsageError, match="only methods of images can be loaded, not 'sft'"):
        rkr.load_learner(tmp_path)
    record["settings"]["stream"] = {}  # type: ignore[index]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(rkr.UsageError, match="has no model yet: complete the run first"):
        rkr.load_learner(tmp_path)

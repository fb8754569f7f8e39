"""`rkr run` of zero-shot recipes from files to results: the validation run first, workers, seeds, a second time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Server
from safetensors.torch import load_file, save_file
from scipy.io import loadmat, savemat  # type: ignore[import-untyped]
from small_zeroshot import outcome

import rkr
from rkr.errors import FileError, UsageError
from rkr.experiment.events import Finished
from rkr.experiment.execution import Diverged
from rkr.experiment.jobs import run_job
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import read_result
from rkr.experiment.run import Run
from rkr.experiment.runner import Execution, run_plan
from rkr.methods.zeroshot.learner import ZeroShot

REAL = Path(os.environ.get("RKR_DATA", "")) / "xlsa17" / "data"
NAMES = ("ONE", "TWO")
RECIPE = """\
title = "Small"
about = "For tests"
orders = ["fixed", "first-TWO"]

[stream]
kind = "zero-shot"
datasets = ["ONE", "TWO"]

[network]
name = "cada-vae"
in_features = 6
latent = 3
encoder = 8
decoder = 8
attribute_encoder = 8
attribute_decoder = 8

[training]
epochs = 2
batch = 16
optimizer = "adam"
lr = 1e-3
amsgrad = true
sampling = "afresh"

[classifier]
longest = 5
seen = 10
unseen = 20

[methods.sft]

[methods.rkr]
"""


def put(folder: Path, seed: int) -> None:
    """A dataset of 7 classes, of which 1 and 5 are unseen, with 12 rows each."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(1, 8), 12)
    where = {label: np.flatnonzero(labels == label) + 1 for label in range(1, 8)}
    seen, unseen, held_out = (2, 3, 4, 6, 7), (1, 5), (3, 7)
    att = draw.normal(size=(4 + seed, 7))
    features = (draw.normal(size=(6, 4 + seed)) @ att)[:, labels - 1] + 0.1 * draw.normal(size=(6, len(labels)))
    names = np.empty((7, 1), dtype=object)
    names[:, 0] = [f"class {label}" for label in range(1, 8)]

    def rows(parts: list[Any]) -> Any:
        return np.concatenate(parts).astype(float).reshape(-1, 1)

    folder.mkdir(parents=True)
    savemat(folder / "res101.mat", {"features": features, "labels": labels.astype(float).reshape(-1, 1)})
    splits = {
        "att": att,
        "allclasses_names": names,
        "trainval_loc": rows([where[c][2:] for c in seen]),
        "test_seen_loc": rows([where[c][:2] for c in seen]),
        "test_unseen_loc": rows([where[c] for c in unseen]),
        "train_loc": rows([where[c] for c in seen if c not in held_out]),
        "val_loc": rows([where[c] for c in held_out]),
    }
    savemat(folder / "att_splits.mat", splits)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for seed, name in enumerate(NAMES):
        put(tmp_path / "data" / name, seed)
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def words(recipe: Path, out: str, *more: object) -> tuple[object, ...]:
    where = ("--data", recipe.parent / "data", "--out", recipe.parent / out)
    return ("run", recipe, *where, "--accelerator", "cpu", "--threads", 1, "--json", "--no-figures", *more)


def test_the_validation_run_comes_first(server: Server, recipe: Path) -> None:
    done = server.cli(*words(recipe, "a"))
    assert done.wait() == 0, done.stderr
    root = recipe.parent / "a"
    assert [event["run"] for event in done.events("finished")] == [
        "small-validation sft fixed",
        "small-validation rkr fixed",
        "small sft fixed",
        "small rkr fixed",
    ]
    assert not any(event["already"] for event in done.events("finished"))
    for method in ("sft", "rkr"):  # each by its own run, and the same rule
        chosen = read_result(root / "small-validation" / method / "fixed")
        assert chosen.finished
        steps = {}
        for name, notes in zip(chosen.tasks, chosen.notes, strict=True):
            curve = notes["validation_h"]
            assert len(curve) == 5
            in_epoch = (3 * 10 + 2 * 20) // 32  # latents of 3 seen and 2 held-out classes
            assert notes["classifier_steps"] == in_epoch * (1 + int(np.argmax(curve)) if any(curve) else 5)
            steps[name] = notes["classifier_steps"]
        for task in chosen.record["stream"]["tasks"]:
            # Classes 3 and 7 of 2, 3, 4, 6, 7 are held out whole; of the others a fifth of their 10 training rows.
            assert task["unseen"] == [1, 4]
            assert task["images"] == {"train": 24, "validation": 6 + 20, "test": 26}
            assert task["sha256"]["validation"] == task["sha256"]["test"]
        result = read_result(root / "small" / method / "fixed")
        assert result.settings["options"]["classifier"]["steps"] == steps
        assert "epochs" not in result.settings["options"]["classifier"]
        assert result.settings["classifier_steps"] == "validation"
        assert {name: n["classifier_steps"] for name, n in zip(result.tasks, result.notes, strict=True)} == steps
    (summary,) = done.events("summary")
    assert [(m["method"], m["measure"]) for m in summary["methods"]] == [("sft", "H"), ("rkr", "H")]

    again = server.cli(*words(recipe, "a"))
    assert again.wait() == 0, again.stderr
    assert [event["already"] for event in again.events("finished")] == [True] * 4
    assert not again.events("epoch")
    assert again.events("summary") == done.events("summary")


def test_a_run_that_another_recipe_has_made_is_taken_over(recipe: Path) -> None:
    """With its validation run; not if anything but the recipe's name differs, or nothing can be loaded from it."""
    other, out = recipe.parent / "other.toml", recipe.parent / "runs"
    other.write_text(RECIPE.replace('orders = ["fixed", "first-TWO"]', 'orders = ["fixed"]'))

    def ran(path: Path, **changes: Any) -> tuple[Plan, list[bool]]:
        data = str(recipe.parent / "data")
        plan = Plan(
            load_recipe(str(path)), str(path), ("sft",), ("fixed",), out, data=data, accelerator="cpu", **changes
        )
        events: list[Any] = []
        assert run_plan(plan, Execution(threads=1), events.append)
        return plan, [event.already for event in events if isinstance(event, Finished)]

    made, already = ran(recipe)
    assert already == [False, False]
    taken, already = ran(other)
    assert already == [True, True]
    one, two = (plan.folder(plan.specs[0]) for plan in (made, taken))
    assert outcome(one) == outcome(two)
    before, after = (json.loads((folder / "run.json").read_text()) for folder in (one, two))
    assert after.pop("same_as") == "small/sft/fixed"
    assert (after["recipe"], after["settings"]["recipe"]) == ("other", "other")
    assert {**after, "recipe": "", "settings": {**after["settings"], "recipe": ""}} == {
        **before,
        "recipe": "",
        "settings": {**before["settings"], "recipe": ""},
    }
    assert read_result(two).recipe == "other"
    rkr.load_learner(two)
    (two / "results.jsonl").unlink()  # as after a kill before the last file was copied
    assert ran(other)[1] == [True, True]
    assert outcome(one) == outcome(two)
    assert ran(other, seeds=(1,))[1] == [True, False]  # another seed; its validation run is the same
    assert ran(other, epochs=1)[1] == [False, False]
    shutil.rmtree(two)
    shutil.rmtree(one / "model")
    assert ran(other)[1] == [True, False]


@pytest.mark.filterwarnings("always::rkr.errors.DataWarning")
def test_what_is_odd_about_data_is_said_once(command: Callable[..., tuple[int, str, str]], recipe: Path) -> None:
    path = recipe.parent / "data" / "TWO" / "att_splits.mat"
    splits = {name: value for name, value in loadmat(path).items() if not name.startswith("__")}
    splits["test_unseen_loc"] = splits["test_unseen_loc"][:12]  # without class 5
    savemat(path, splits)
    code, _, err = command(*map(str, words(recipe, "a", "--epochs", 1, "--method", "sft")))
    assert (code, err) == (0, f"rkr: {path}: no split has rows of class 5 (class 5); skipped\n")


def _cut_a_model(run: Path) -> None:
    path = max((run / "model").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-8])


def _lose_a_task(run: Path) -> None:
    path = run / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if not line.startswith(b'{"event": "task", "number": 2')))


@pytest.mark.parametrize(
    ("damage", "is_copied"),
    [
        (lambda run: (run / "times.jsonl").unlink(), True),  # how long it took is no result
        (lambda run: (run / "results.jsonl").write_bytes(b"{\n" + (run / "results.jsonl").read_bytes()), False),
        (_lose_a_task, False),
        (_cut_a_model, False),
        (lambda run: [path.unlink() for path in (run / "model").rglob("*") if path.is_file()], False),
    ],
)
def test_of_runs_only_whole_ones_are_taken_over(recipe: Path, damage: Any, is_copied: bool) -> None:
    """What is damaged must not spread: then the run is made, and is what it would have been alone."""
    text = RECIPE.replace('orders = ["fixed", "first-TWO"]', 'orders = ["fixed"]')
    recipe.write_text(text.replace("[classifier]", "[classifier]\nepochs = 3"))  # so that there is no validation run
    other, out = recipe.parent / "other.toml", recipe.parent / "runs"
    other.write_text(recipe.read_text())

    def ran(path: Path) -> tuple[Path, Finished]:
        plan = Plan(load_recipe(str(path)), str(path), ("rkr",), ("fixed",), out, data=str(recipe.parent / "data"))
        events: list[Any] = []
        assert run_plan(plan, Execution(threads=1), events.append)
        (finished,) = (event for event in events if isinstance(event, Finished))
        return plan.folder(plan.specs[0]), finished

    one, first = ran(recipe)
    assert (first.already, first.same_as, "same_as" in first.to_json()) == (False, None, False)
    before = outcome(one)
    damage(one)
    two, second = ran(other)
    assert (second.already, second.same_as) == (is_copied, "small/rkr/fixed" if is_copied else None)
    assert read_result(two).finished
    rkr.load_learner(two)
    assert outcome(two) == before
    assert second.to_json().get("same_as") == second.same_as


@pytest.mark.parametrize("method", ["rkr", "base", "original", "l2", "lzsl"])
@pytest.mark.parametrize("scaler", ["train", "none"])
def test_a_loaded_learner_answers_about_features_as_they_come(recipe: Path, method: str, scaler: str) -> None:
    text = recipe.read_text().replace("[methods.sft]", f"[methods.{method}]" if method != "rkr" else "[methods.sft]")
    text = text.replace('kind = "zero-shot"', f'kind = "zero-shot"\nscaler = "{scaler}"')
    text = text.replace("epochs = 2\n", "epochs = 30\n").replace("lr = 1e-3", "lr = 1e-2")  # so that answers differ
    recipe.write_text(text.replace("[classifier]", "[classifier]\nepochs = 9"))
    plan = Plan(
        load_recipe(str(recipe)),
        str(recipe),
        (method,),
        ("fixed",),
        recipe.parent / "runs",
        data=str(recipe.parent / "data"),
    )
    assert run_plan(plan, Execution(threads=1), lambda _: None)
    folder = plan.folder(plan.specs[0])
    learner, result = rkr.load_learner(folder), read_result(folder)
    assert isinstance(learner, ZeroShot)
    assert [task.name for task in learner.seen] == list(NAMES)
    for number, name in enumerate(NAMES):
        raw = loadmat(recipe.parent / "data" / name / "res101.mat")
        splits = loadmat(recipe.parent / "data" / name / "att_splits.mat")
        x, y = torch.from_numpy(raw["features"].T).float(), torch.from_numpy(raw["labels"][:, 0]).long() - 1
        assert float(x.min()) < 0  # as they come
        with pytest.raises(UsageError, match=r"features must be \(samples, 6\), not \(6, 84\)"):
            learner.scaled(x.T, number)
        for part, key in (("test_seen_loc", "S"), ("test_unseen_loc", "U")):
            rows = torch.from_numpy(splits[part][:, 0]).long() - 1
            with torch.no_grad():
                hits = learner.predict(learner.scaled(x[rows], number), number).argmax(1) == y[rows]
            each = [float(hits[y[rows] == label].float().mean()) for label in y[rows].unique()]
            assert np.mean(each) == pytest.approx(result.measures[key][-1][number], abs=1e-6)
    with pytest.raises(UsageError, match="zero-shot tasks must be given"):
        learner.infer(x)
    assert all(task.attributes is None and task.scaling is None for task in learner.seen)


def test_a_model_without_its_scaling_is_not_loaded(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[classifier]", "[classifier]\nepochs = 1"))
    plan = Plan(
        load_recipe(str(recipe)), str(recipe), ("sft",), ("fixed",), recipe.parent, data=str(recipe.parent / "data")
    )
    assert run_plan(plan, Execution(threads=1), lambda _: None)
    folder = plan.folder(plan.specs[0])
    path = folder / "model" / "learner.safetensors"
    save_file({key: value for key, value in load_file(path).items() if not key.startswith(("low_", "width_"))}, path)
    with pytest.raises(FileError, match="cannot be read, or belongs to another run"):
        rkr.load_learner(folder)


def test_ridge_is_not_loaded(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("[methods.sft]", "[methods.ridge]"))
    plan = Plan(
        load_recipe(str(recipe)),
        str(recipe),
        ("ridge",),
        ("fixed",),
        recipe.parent / "runs",
        data=str(recipe.parent / "data"),
    )
    assert run_plan(plan, Execution(threads=1), lambda _: None)
    with pytest.raises(UsageError, match="only methods that train a network can be loaded, not 'ridge'"):
        rkr.load_learner(plan.folder(plan.specs[0]))


@pytest.mark.slow  # workers start up for longer than they compute
def test_workers_and_seeds(server: Server, recipe: Path) -> None:
    """The same bytes with workers, which leave the validation run to the process that started them."""
    more = ("--seeds", 2, "--order", "first-TWO", "--method", "rkr")
    one, two = server.cli(*words(recipe, "1", *more)), server.cli(*words(recipe, "2", *more, "--workers", 2))
    assert one.wait() == 0, one.stderr
    assert two.wait() == 0, two.stderr
    assert [event["run"] for event in two.events("finished")].count("small-validation rkr first-TWO") == 1
    found = {}
    for name in ("small/rkr/first-TWO", "small/rkr/first-TWO-seed-1", "small-validation/rkr/first-TWO"):
        found[name] = outcome(recipe.parent / "1" / name)
        assert found[name] == outcome(recipe.parent / "2" / name)
    assert len({files["results.jsonl"] for files in found.values()}) == 3
    # The numbers were chosen once, for all seeds.
    assert not (recipe.parent / "1" / "small-validation" / "rkr" / "first-TWO-seed-1").exists()
    first, second = (read_result(recipe.parent / "1" / name) for name in list(found)[:2])
    assert first.settings["options"]["classifier"] == second.settings["options"]["classifier"]
    assert first.tasks == second.tasks == ("TWO", "ONE")
    assert (second.order, second.seed, second.label) == ("first-TWO", 1, "first-TWO seed 1")


def test_the_validation_part_for_itself(server: Server, recipe: Path) -> None:
    done = server.cli(*words(recipe, "a", "--validation", "--method", "rkr"))
    assert done.wait() == 0, done.stderr
    assert [event["run"] for event in done.events("finished")] == ["small-validation rkr fixed"]
    result = read_result(recipe.parent / "a" / "small-validation" / "rkr" / "fixed")
    assert all(len(notes["validation_h"]) == 5 for notes in result.notes)


def test_fixed_epochs_need_no_validation_run(server: Server, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("longest = 5", "epochs = { ONE = 2, TWO = 3 }"))
    done = server.cli(*words(recipe, "a", "--method", "base"))
    assert done.wait() == 0, done.stderr
    assert [event["run"] for event in done.events("finished")] == ["small base fixed"]
    result = read_result(recipe.parent / "a" / "small" / "base" / "fixed")
    in_epoch = (5 * 10 + 2 * 20) // 32  # latents of 5 seen and 2 unseen classes
    assert [notes["classifier_steps"] for notes in result.notes] == [2 * in_epoch, 3 * in_epoch]


def test_a_method_without_classifiers_needs_no_validation_run(recipe: Path) -> None:
    made = plan(recipe, methods=("ridge",))
    assert made.before is None
    assert run_plan(made, Execution(threads=1), lambda event: None)
    result = read_result(made.folder(made.specs[0]))
    assert result.measure == "H"
    assert result.unchanged == (True, True)
    assert "classifier" not in result.settings["options"]
    before = plan(recipe, methods=("ridge", "sft")).before
    assert before is not None
    assert before.methods == ("sft",)


def plan(recipe: Path, **changes: Any) -> Plan:
    data = str(recipe.parent / "data")
    given = {"methods": ("rkr",), "orders": ("fixed",), "out": recipe.parent / "a", "data": data, **changes}
    return Plan(load_recipe(recipe), str(recipe), accelerator="cpu", **given)


def test_a_method_that_diverges_on_validation_classes_does_not_keep_others_from_running(recipe: Path) -> None:
    recipe.write_text(RECIPE + "\n[methods.lzsl]\ndistillation = 1e39\n")
    made = plan(recipe, methods=("lzsl", "sft"))
    for _ in range(2):
        with pytest.raises(Diverged, match=r"^on validation classes, so lzsl cannot be tested: .* 'TWO' is "):
            run_plan(made, Execution(threads=1), lambda _: None)
        lzsl, sft = made.specs
        assert read_result(made.folder(sft)).finished
        assert not made.folder(lzsl).exists()
    with pytest.raises(Diverged, match="cannot be tested"):
        run_plan(plan(recipe, methods=("lzsl",)), Execution(threads=1), lambda _: None)


def test_what_comes_before(recipe: Path) -> None:
    made = plan(recipe, epochs=1, limit=4, seeds=(3, 4), orders=("first-TWO",), methods=("rkr", "sft"))
    before = made.before
    assert before is not None
    assert [(s.method, s.order, s.seed) for s in before.specs] == [("rkr", "first-TWO", 0), ("sft", "first-TWO", 0)]
    assert before.folder(before.specs[0]) == made.out / "small-validation-1-epochs-limit-4" / "rkr" / "first-TWO"
    assert before.before is None
    recipe.write_text(RECIPE.replace("longest = 5", "longest = 2").replace("[stream]", "[stream]\nfirst = 1"))
    first = plan(recipe, epochs=1, orders=("fixed", "first-TWO"), methods=("sft",))
    assert first.before is not None
    assert [spec.order for spec in first.before.specs] == ["fixed", "first-TWO"]
    assert run_plan(first, Execution(threads=1), lambda event: None)
    found = [read_result(first.folder(spec)) for spec in first.specs]
    assert [result.tasks for result in found] == [("ONE",), ("TWO",)]
    for spec, result in zip(first.before.specs, found, strict=True):  # with the steps chosen for its order
        chosen = read_result(first.before.folder(spec))
        assert chosen.tasks == result.tasks
        assert chosen.notes[0]["classifier_steps"] == result.notes[0]["classifier_steps"]
    for each in (before, made):
        job = run_job(each, Execution(2), each.specs[0])
        assert job.arguments["plan"]["on_validation"] is (each is before)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_ctrl_c_in_the_validation_run_stops_all(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    """Within its training, and after its last test, when that run is complete but not what it is for."""
    unchanged, between = Run._unchanged, Run._between_batches

    def after_the_test(self: Run, row: Any) -> bool | None:
        self._stop = at_the_end and self._at.number == 1
        return unchanged(self, row)

    def between_batches(self: Run, *arguments: Any) -> None:
        self._stop = not at_the_end
        between(self, *arguments)

    monkeypatch.setattr(Run, "_unchanged", after_the_test)
    monkeypatch.setattr(Run, "_between_batches", between_batches)
    made = plan(recipe)
    events: list[Any] = []
    assert not run_plan(made, Execution(threads=1), events.append)
    assert {event.run for event in events} == {"small-validation rkr fixed"}
    assert not made.root.exists()
    monkeypatch.undo()
    assert run_plan(made, Execution(threads=1), events.append)
    assert read_result(made.folder(made.specs[0])).finished


def test_features_of_another_width(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("in_features = 6", "in_features = 7"))
    with pytest.raises(UsageError, match=r"takes 7 features, the data have 6: set network\.in_features = 6"):
        run_plan(plan(recipe), Execution(threads=1), lambda event: None)


@pytest.mark.slow
@pytest.mark.skipif(
    not all((REAL / name / "efflite2.mat").is_file() for name in ("aPascal", "CUB", "FLO")),
    reason="$RKR_DATA has no efflite2.mat of aPascal, CUB and FLO in xlsa17/data",
)
def test_real_data(server: Server, tmp_path: Path) -> None:
    command: tuple[object, ...] = ("run", "gzsl-local", "--method", "rkr", "--epochs", 1, "--limit", 2, "--threads", 1)
    command += ("--accelerator", "cpu", "--json", "--no-figures", "--out", tmp_path)
    done = server.cli(*command)
    assert done.wait() == 0, done.stderr
    result = read_result(tmp_path / "gzsl-local-1-epochs-limit-2" / "rkr" / "fixed")
    assert result.finished
    assert result.tasks == ("aPascal", "CUB", "FLO")
    assert result.unchanged == (True, True, True)
    for name in ("H", "U", "S"):  # no forgetting
        final = result.measures[name][-1]
        assert [row[-1] for row in result.measures[name]] == list(final)
    steps = result.settings["options"]["classifier"]["steps"]
    chosen = read_result(tmp_path / "gzsl-local-validation-1-epochs-limit-2" / "rkr" / "fixed")
    assert steps == {n: notes["classifier_steps"] for n, notes in zip(chosen.tasks, chosen.notes, strict=True)}
    again = server.cli(*command)
    assert again.wait() == 0, again.stderr
    assert [event["already"] for event in again.events("finished")] == [True, True]

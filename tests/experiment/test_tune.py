"""Hyper-parameters chosen on validation samples: what is run, on what, and what is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.marks import slow

from rkr.errors import UsageError
from rkr.experiment import recipes
from rkr.experiment.recipes import list_recipes, load_recipe
from rkr.experiment.recipes.load import SHIPPED
from rkr.experiment.recipes.write import recipe_text, toml_text
from rkr.experiment.results import find_results
from rkr.experiment.runner import Execution
from rkr.experiment.tune import as_good, at_an_edge, outcome, parsed_grid, run_search, search_plan, tuning, write_chosen
from rkr.methods import METHODS, ZERO_SHOT_METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_every_recipe_can_be_written_and_read(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / f"{name}.toml").write_text(recipe_text(recipe))
    again = load_recipe(str(tmp_path / f"{name}.toml"))
    assert again == recipe.model_copy(update={"paper": ()})


def test_values_survive_toml() -> None:
    values = {
        "a": 'x "y" \\ ü',
        "b": [1, 2.5, True],
        "t": {"u": {"v": 1e-30}, "w": {"x y": False}},
        "empty": {},
        "n": None,
    }
    again = tomllib.loads(toml_text(values))
    assert again == {key: value for key, value in values.items() if value is not None}


def test_the_search_never_sees_the_test_part(tmp_path: Path) -> None:
    recipe = load_recipe("digits")
    plan = search_plan(tuning(recipe, "ewc", 2, tmp_path), None, 1, None)
    stream, whole = plan.recipe.stream("fixed"), recipe.stream("fixed")
    assert len(stream.tasks) == 2
    for task, original in zip(stream.tasks, whole.tasks, strict=False):
        assert task.training.validation is None
        rows = {x.numpy().tobytes() for x in original.training.train.x}  # type: ignore[union-attr]
        tested = {x.numpy().tobytes() for x in task.test.x}  # type: ignore[union-attr]
        trained = {x.numpy().tobytes() for x in task.training.train.x}  # type: ignore[union-attr]
        assert tested <= rows  # held out of training, which the test part is no part of
        assert not tested & trained
        assert len(task.test) + len(task.training.train) == len(original.training.train)
        assert len(task.test) == pytest.approx(0.2 * len(original.training.train), abs=2)


def test_the_grid_becomes_methods(tmp_path: Path) -> None:
    recipe = load_recipe("cifar100-lenet")
    search = tuning(recipe, "ewc", 3, tmp_path, {"strength": [1, 100.0], "mode": ["all", "online"]})
    assert list(search.points) == [
        "ewc-strength-1-mode-all",
        "ewc-strength-1-mode-online",
        "ewc-strength-100-mode-all",
        "ewc-strength-100-mode-online",
    ]
    assert search.recipe.methods["ewc-strength-100-mode-online"].options == {"strength": 100.0, "mode": "online"}
    assert (search.recipe.stream.part, search.recipe.stream.first) == ("validation", 3)
    for methods in (METHODS, ZERO_SHOT_METHODS):
        for name, method in methods.items():
            assert set(method.learner.grid) <= set(method.options), name


def test_grids_in_words() -> None:
    assert parsed_grid(["strength=1,0.5", "mode=all,online"]) == {"strength": [1, 0.5], "mode": ["all", "online"]}
    assert parsed_grid(["flip=true,False", "samples=none,100"]) == {"flip": [True, False], "samples": [None, 100]}
    assert parsed_grid([]) is None
    for wrong in ("strength", "=1", "strength="):
        with pytest.raises(UsageError, match="--grid: give an option and its values"):
            parsed_grid([wrong])


def test_values_of_a_grid_are_all_tried(tmp_path: Path) -> None:
    """However close they are, and though an option is named twice."""
    assert parsed_grid(["strength=1,2.5", "bn=frozen", "strength=1e3"]) == {
        "strength": [1, 2.5, 1000.0],
        "bn": ["frozen"],
    }
    close = tuning(load_recipe("digits"), "si", 2, tmp_path, {"strength": [1.0000001, 1.0000002, 1e30]})
    assert list(close.points) == ["si-strength-1.0000001", "si-strength-1.0000002", "si-strength-1e30"]


def test_what_cannot_be(tmp_path: Path) -> None:
    recipe = load_recipe("digits")
    with pytest.raises(UsageError, match="rkr has no grid of its own"):
        tuning(recipe, "rkr", 2, tmp_path)
    with pytest.raises(UsageError, match="ewc has no option 'strenght'; its options: bn, estimator"):
        tuning(recipe, "ewc", 2, tmp_path, {"strenght": [1]})
    with pytest.raises(UsageError, match="--tasks: give 1 to 5, the tasks of digits, not 7"):
        tuning(recipe, "ewc", 7, tmp_path)
    with pytest.raises(UsageError, match="no method 'ecw'"):
        tuning(recipe, "ecw", 2, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_recipe_of_few_tasks_is_tuned_on_all(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def stop(recipe: object, method: str, tasks: int, *rest: object) -> None:
        asked.append(tasks)
        raise UsageError("enough")

    monkeypatch.setattr("rkr.experiment.tune.tuning", stop)
    few = tmp_path / "few.toml"
    few.write_text((SHIPPED / "digits.toml").read_text().replace("tasks = 5", "tasks = 2"))
    for name in (str(few), "digits"):
        assert command("tune", name, "--method", "ewc")[0] == 2
    assert asked == [2, 3]


def test_from_the_command_line(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    def tune(*words: str) -> str:
        common = ("--method", "l2t", "--tasks", "2", "--epochs", "1", "--threads", "1", "--out", str(tmp_path))
        code, out, _ = command("tune", "digits", *common, *words)
        assert code == 0
        return out

    out = tune("--grid", "strength=0.1,1000")
    folder = tmp_path / "digits-tune-l2t-2-tasks"
    chosen = tomllib.loads(next(folder.glob("chosen-*.toml")).read_text())["methods"]["l2t"]["strength"]
    shown = [line for line in out.splitlines() if line.startswith("l2t-strength-")]
    assert len(shown) == 2
    assert shown[0].startswith(f"l2t-strength-{chosen:g}: ")  # the best comes first
    assert "already finished" in tune("--grid", "strength=0.1,1000")  # a search goes on where it was
    event = json.loads(tune("--grid", "strength=0.1,1000", "--json").splitlines()[-1])
    assert event["chosen"] == {"strength": chosen}
    assert list(event["tried"].values()) == sorted(event["tried"].values(), reverse=True)


@pytest.mark.parametrize("workers", ["1", *slow("2")])
def test_a_value_that_diverges_is_left_out(
    workers: str, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    words = ["tune", "digits", "--method", "lwf", "--tasks", "2", "--epochs", "1", "--threads", "1", "--json"]
    words += ["--limit", "30"]
    words += ["--grid", "strength=0.1,1e30", "--workers", workers, "--out", str(tmp_path)]
    code, out, _ = command(*words)
    assert code == 0
    event = json.loads(out.splitlines()[-1])
    assert event["chosen"] == {"strength": 0.1}
    assert event["diverged"] == ["lwf-strength-1e30"]
    assert list(event["tried"]) == ["lwf-strength-0.1"]
    for run in find_results(tmp_path / "digits-tune-lwf-2-tasks"):  # the one that diverged too
        counts = [task["images"] for task in run.record["stream"]["tasks"]]
        assert all(count["train"] <= 60 for count in counts)
    (chosen,) = tmp_path.glob("*/chosen-1-epochs-limit-30-fixed.toml")
    assert "1 epochs a task, at most 30 training samples of a class:" in chosen.read_text()


def test_the_best_is_written(tmp_path: Path) -> None:
    search = tuning(load_recipe("digits"), "si", 2, tmp_path, {"strength": [0.1, 0.5, 2.0]})
    plan = search_plan(search, None, 5, None)
    said = write_chosen(search, plan, {"si-strength-2": 91.5, "si-strength-0.5": 80.0}, ["si-strength-0.1"])
    assert said == "strength = 2.0"
    assert search.chosen(plan).name == "chosen-5-epochs-fixed.toml"
    text = search.chosen(plan).read_text()
    assert tomllib.loads(text) == {"methods": {"si": {"strength": 2.0}}}
    assert text.startswith("# Chosen on validation samples of the first 2 tasks, order fixed, 5 epochs a task:\n")
    assert "# si-strength-2: 91.50\n# si-strength-0.5: 80.00\n# si-strength-0.1: training diverged\n" in text
    assert "# strength: the best value is at the edge of what was tried\n" in text
    assert search.chosen(search_plan(search, None, None, None)).name == "chosen-fixed.toml"
    assert search.chosen(search_plan(search, None, 5, None, 20)).name == "chosen-5-epochs-limit-20-fixed.toml"


def test_a_best_value_at_the_edge_of_the_grid(tmp_path: Path) -> None:
    search = tuning(load_recipe("digits"), "si", 2, tmp_path, {"strength": [0.5, 1, 2.0], "damping": [0.1]})
    names = list(search.points)
    edges = [at_an_edge(search, {best: 90.0, **{name: 80.0 for name in names if name != best}}) for best in names]
    assert edges == [["strength"], [], ["strength"]]
    assert at_an_edge(search, dict.fromkeys(names[:2], 90.0), names[2:]) == []  # the one in the middle is as good
    assert at_an_edge(search, dict.fromkeys(names, 0.0)) == []


def test_an_earlier_search_counts(tmp_path: Path) -> None:
    """Who tries more beyond the edge gets the best of all that was tried, with the same schedule and order."""
    recipe = load_recipe("digits")
    first = tuning(recipe, "si", 2, tmp_path, {"strength": [0.5, 2.0]})
    plan = search_plan(first, None, 1, None)
    assert run_search(plan, Execution(threads=1), lambda _: None) is not None
    more = tuning(recipe, "si", 2, tmp_path, {"strength": [2.0, 8.0]})
    assert (list(more.points), list(more.asked)) == (
        ["si-strength-2", "si-strength-8", "si-strength-0.5"],
        ["si-strength-2", "si-strength-8"],
    )
    assert more.points["si-strength-0.5"] == {"strength": 0.5}
    again = search_plan(more, None, 1, None)
    assert again.methods == ("si-strength-2", "si-strength-8")
    assert set(outcome(more, again)) == {"si-strength-0.5", "si-strength-2"}  # one is not run yet
    assert outcome(more, search_plan(more, None, 2, None)) == {}  # of another schedule
    assert at_an_edge(more, {"si-strength-2": 3.0, "si-strength-8": 2.0, "si-strength-0.5": 1.0}) == []
    assert list(tuning(recipe, "si", 3, tmp_path, {"strength": [4.0]}).points) == ["si-strength-4"]
    (first.file).write_text("damaged")
    assert list(tuning(recipe, "si", 2, tmp_path, {"strength": [4.0]}).points) == ["si-strength-4"]


def test_equal_results_are_told() -> None:
    assert as_good({"a": 90.0, "b": 90.0, "c": 80.0}) == ["b"]
    assert as_good({"a": 90.0, "b": 89.9}) == []


def test_a_method_with_a_name_of_its_own_keeps_its_section(tmp_path: Path) -> None:
    """What is written can be put into the recipe in the place of the section that was there."""
    text = (Path(recipes.__file__).parent / "digits.toml").read_text()
    (tmp_path / "mine.toml").write_text(text + '\n[methods.firm]\nlearner = "ewc"\nmode = "online"\n')
    search = tuning(load_recipe(str(tmp_path / "mine.toml")), "firm", 2, tmp_path, {"strength": [0.5]})
    plan = search_plan(search, None, None, None)
    write_chosen(search, plan, {"firm-strength-0.5": 80.0})
    wanted = {"methods": {"firm": {"learner": "ewc", "mode": "online", "strength": 0.5}}}
    assert tomllib.loads(search.chosen(plan).read_text()) == wanted

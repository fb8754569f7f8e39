"""Searches by Optuna: what is tried, by whom, what is stopped, and that the same seed tries the same."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkr.errors import UsageError
from rkr.experiment.events import Event, Finished, Started
from rkr.experiment.execution import Execution
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.experiment.tune import Grid, Tuning, outcome, outcome_json, parsed_ranges, search_plan, tuning, write_chosen
from rkr.methods import METHODS
from rkr.methods.ranges import Linear, Log

pytest.importorskip("optuna", reason="Optuna is not installed")
from rkr.experiment import search as searching
from rkr.experiment.search import Found, Strategy, Study, run_trials

GRID: Grid = {"strength": Log((0.01, 0.1, 100.0)), "damping": Linear((0.1, 0.3)), "bn": ("shared", "per_task")}


def plan_of(search: Tuning) -> Plan:
    return search_plan(search, None, 4, None, 8)


def study(out: Path, grid: Grid = GRID, **strategy: Any) -> Study:
    search = tuning(load_recipe("digits"), "si", 2, out, grid, points=False)
    first = searching.with_point(search, {name: values[0] for name, values in grid.items()})[0]
    return Study(search, plan_of(first), Strategy(**strategy))


def value_of(point: dict[str, Any]) -> float:
    return 1 / (1 + abs(math.log10(point["strength"])) + point["damping"]) - 0.1 * (point["bn"] == "shared")


def searched(out: Path, again: int = 10**9, **strategy: Any) -> list[dict[str, Any]]:
    """The points of a search whose results are known at once; another process goes on after `again` trials."""
    points: list[dict[str, Any]] = []
    made = study(out, **strategy)
    while (trial := made.ask()) is not None:
        points.append(made.point(trial))
        made.tell(trial, value_of(points[-1]))
        if len(points) % again == 0:
            made.close()
            made = study(out, **strategy)
    made.close()
    return points


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_the_same_seed_tries_the_same(tmp_path: Path, sampler: str) -> None:
    """However often the search is interrupted."""
    whole = searched(tmp_path / "1", sampler=sampler, trials=14, seed=3)
    parts = searched(tmp_path / "2", 3, sampler=sampler, trials=14, seed=3)
    other = searched(tmp_path / "3", sampler=sampler, trials=14, seed=4)
    assert whole == parts != other
    assert len(whole) == (12 if sampler == "grid" else 14)
    assert len({json.dumps(point) for point in whole}) == len(whole)
    if sampler == "grid":
        assert {point["strength"] for point in whole} == {0.01, 0.1, 100.0}
    else:
        assert all(0.01 <= point["strength"] <= 100 and 0.1 <= point["damping"] <= 0.3 for point in whole)
        assert {point["bn"] for point in whole} == {"shared", "per_task"}
        assert all(point["strength"] == float(f"{point['strength']:.4g}") for point in whole)
    if sampler == "random":  # evenly in the logarithm: half of the draws are expected below 1
        assert 3 <= sum(point["strength"] < 1 for point in whole) <= 11


def test_tpe_goes_where_results_are_good(tmp_path: Path) -> None:
    points = searched(tmp_path, sampler="tpe", trials=40)
    early, late = ([value_of(point) for point in part] for part in (points[:10], points[-10:]))
    assert sum(late) / 10 > sum(early) / 10
    read = json.loads(next(tmp_path.glob("*/search-*.json")).read_text())
    assert [trial["options"] for trial in read["trials"]] == points
    assert set(read["importance"]) == set(GRID)
    assert sum(read["importance"].values()) == pytest.approx(1)
    assert max(read["importance"], key=read["importance"].get) == "strength"


def test_several_processes_share_a_search(tmp_path: Path) -> None:
    """What one leaves undone another takes over, but not before it has ended."""
    one, two = study(tmp_path, trials=3), study(tmp_path, trials=3)
    first, second, third = one.ask(), two.ask(), one.ask()
    assert [trial.number for trial in (first, second, third)] == [0, 1, 2]
    assert one.ask() is two.ask() is None  # all are at work
    two.tell(second, 0.5)
    one.close()
    taken = [two.ask(), two.ask()]
    assert [trial.number for trial in taken] == [0, 2]
    assert [two.point(trial) for trial in taken] == [one.point(trial) for trial in (first, third)]
    assert two.ask() is None
    two.close()


def test_whole_numbers_and_ranges_in_words(tmp_path: Path) -> None:
    ranges = parsed_ranges(["strength=0.1:100:log", "samples=1:64:log", "gamma=0:1"])
    assert ranges == {"strength": (0.1, 100), "samples": (1, 64), "gamma": (0, 1)}
    assert [type(values) for values in ranges.values()] == [Log, Log, Linear]
    search = tuning(load_recipe("digits"), "ewc", 2, tmp_path, {**ranges, "gamma": Linear((0.0, 1.0))}, points=False)
    made = Study(search, plan_of(searching.with_point(search, {"strength": 1.0})[0]), Strategy("random", 12))
    points = [made.point(made.ask()) for _ in range(12)]
    made.close()
    assert all(isinstance(point["samples"], int) and 1 <= point["samples"] <= 64 for point in points)
    assert all(isinstance(point["gamma"], float) and 0 <= point["gamma"] <= 1 for point in points)
    for wrong in ("strength", "strength=1", "strength=1:a", "strength=2:1", "strength=0:1:log", "strength=1:2:lin"):
        with pytest.raises(UsageError, match=r"^--range: "):
            parsed_ranges([wrong])


def test_methods_declare_ranges() -> None:
    """In one place with their grids."""
    for name in ("ewc", "si", "l2t", "lwf", "apd", "den", "hnet", "pc"):
        for values in METHODS[name].learner.grid.values():
            assert isinstance(values, Log)
            assert min(values) > 0


def test_trials_are_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is finished, one stopped after its first task, one diverges; the same command finds all done."""
    report, events = Study.report, list[Event]()

    def stops(self: Study, trial: Any, number: int, accuracy: float) -> bool:
        report(self, trial, number, accuracy)
        return bool(trial.params["strength"] == 1.0)

    monkeypatch.setattr(Study, "report", stops)
    grid = {"strength": (0.1, 1.0, 1e30)}
    search = tuning(load_recipe("digits"), "lwf", 2, tmp_path, grid, points=False)

    def run() -> Found:
        events.clear()
        found = run_trials(search, plan_of, Strategy("grid"), Execution(threads=1), events.append)
        assert found is not None
        return found

    found = run()
    assert (found.diverged, found.pruned) == (["lwf-strength-1e30"], ["lwf-strength-1"])
    best = outcome(found.search, found.plan)
    assert list(best) == ["lwf-strength-0.1"]
    assert sum(isinstance(event, Started) for event in events) == 3
    assert sum(isinstance(event, Finished) for event in events) == 1
    (left,) = tmp_path.rglob("lwf-strength-1/fixed/state.safetensors")
    assert left.exists()  # it could go on
    assert write_chosen(found.search, found.plan, best, found.diverged, found.pruned) == "strength = 0.1"
    text = found.search.chosen(found.plan).read_text()
    assert "# lwf-strength-1: stopped early, as it was worse than others\n" in text
    assert outcome_json(found.search, best, found.diverged, found.pruned)["pruned"] == ["lwf-strength-1"]
    read = json.loads(next(tmp_path.glob("*/search-*.json")).read_text())
    ends = {trial["options"]["strength"]: (trial["state"], len(trial["after_task"])) for trial in read["trials"]}
    assert ends == {0.1: ("complete", 2), 1.0: ("pruned", 1), 1e30: ("pruned", 1)}
    again = run()
    assert not events
    assert (again.diverged, again.pruned) == (found.diverged, found.pruned)
    tried = [f"lwf-strength-{trial['options']['strength']:g}".replace("+", "") for trial in read["trials"]]
    search = dataclasses.replace(search, points={label: found.search.points[label] for label in reversed(tried)})
    assert list(run().search.points) == tried  # in every process that shares it, so that all choose the same in a tie
    from rkr.report import find_results
    from rkr.report.search_figures import search_history, search_importance

    results = find_results(search.folder)
    assert [path.suffix for path in search_history(results, tmp_path / "history")] == [".png", ".svg"]
    assert search_importance(results, tmp_path / "importance") == []  # of one result nothing can be said
    read["importance"] = {"strength": 1.0}
    next(tmp_path.glob("*/search-*.json")).write_text(json.dumps(read))
    assert [path.stem for path in search_importance(results, tmp_path / "importance")] == ["importance"] * 2


def test_bad_use(command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("tune", "digits", "--method", "si", "--out", str(tmp_path))
    for more, said in (
        (("--search", "bayes"), "--search must be one of grid, random, tpe, not 'bayes'"),
        (("--search", "tpe", "--pruner", "half"), "--pruner must be one of none, median, halving, not 'half'"),
        (("--search", "tpe", "--trials", "0"), "--trials must be at least 1, not 0"),
        (("--trials", "3"), "--range, --trials and --pruner are for --search grid, random or tpe"),
        (("--search", "tpe", "--range", "x=1:2"), "--grid: si has no option 'x'"),
    ):
        code, _, error = command(*words, *more)
        assert code == 2
        assert said in error
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = command(*words, "--search", "tpe")
    assert (code, error) == (2, "rkr: --search needs Optuna: pip install 'rkr[tune]'\n")
    assert not list(tmp_path.iterdir())

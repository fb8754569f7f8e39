"""Run folders: everything that was written is read, a torn end is left out, and anything else is refused by name."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rkr import FileError, UsageError
from rkr.capacity import Capacity
from rkr.experiment.results import Epoch, Result, Times, find_results, rank, read_result
from rkr.report import by_recipe, comparable
from rkr.report.groups import by_method


def edit(path: Path, line: int, change: dict[str, Any]) -> None:
    """Change fields of a line, 1 the first."""
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    path.write_text("\n".join(lines) + "\n")


def test_a_folder_is_read_as_it_was_written(run_folder):
    folder = run_folder(isolated=True, groups=[[5, 1], [0, 3], [2, 4]])
    result = read_result(str(folder))
    assert (result.folder, result.recipe, result.method, result.order, result.seed) == (folder, "toy", "rkr", "A", 0)
    assert result.tasks == ("toy-1", "toy-2", "toy-3")
    assert result.groups == ((5, 1), (0, 3), (2, 4))
    assert result.settings == {"epochs": 2}
    assert result.matrix == ((0.9,), (0.7, 0.8), (0.6, 0.75, 0.95))
    assert result.measures["top5"] == ((1.0,), (1.0, 1.0), (1.0, 1.0, 1.0))
    assert result.agnostic == (None, None, (0.3, 0.375, 0.475))
    assert result.proofs[1] == {"toy-1": "1-1", "toy-2": "2-2"}
    assert result.unchanged == (True, True, True)
    assert result.costs[2] == Capacity(1030, 1000, 7000, 123456, 30, 3000)
    assert len(result.epochs) == 6
    assert result.epochs[2:4] == (
        Epoch(2, "toy-2", "train", 0, 2.0, 0.5, 0.01),
        Epoch(2, "toy-2", "train", 1, 1.0, None, 0.01),
    )
    assert result.times[1] == Times(2, "toy-2", 20.0, 1.0, 3.0)
    assert (result.finished, result.done) == (True, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.seed = 1


def test_every_cut_of_the_results_reads_as_the_lines_that_are_whole(run_folder):
    folder = run_folder()
    path = folder / "results.jsonl"
    whole = path.read_bytes()
    full = read_result(folder)
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        lines = [json.loads(line) for line in whole[:cut].split(b"\n")[:-1]]
        with_last = len(lines) + (whole[cut : cut + 1] == b"\n")  # the object is whole, only its line end is missing
        lines = [json.loads(line) for line in whole.split(b"\n")[:with_last]]
        result = read_result(folder)
        assert result.matrix == full.matrix[: sum(line["event"] == "task" for line in lines)]
        assert len(result.epochs) == sum(line["event"] == "epoch" for line in lines)
        assert result.finished == (lines[-1:] == [{"event": "end", "tasks": 3}])


def test_a_torn_character_and_torn_times_are_left_out(run_folder):
    folder = run_folder()
    with open(folder / "times.jsonl", "ab") as file:
        file.write('{"task": "ü'.encode()[:-1])
    assert len(read_result(folder).times) == 3


def test_a_run_that_has_just_begun(run_folder):
    folder = run_folder()
    (folder / "results.jsonl").unlink()
    (folder / "times.jsonl").unlink()
    result = read_result(folder)
    assert (result.done, result.finished, result.times, result.epochs) == (0, False, (), ())


def test_the_later_time_of_a_task_holds(run_folder):
    folder = run_folder()
    with open(folder / "times.jsonl", "a") as file:
        line = {"number": 2, "task": "toy-2", "train_seconds": 7, "test_seconds": 8, "epoch_seconds": None}
        file.write(json.dumps(line) + "\n")
    assert [t.train_seconds for t in read_result(folder).times] == [10.0, 7.0, 30.0]


def test_a_loss_that_is_no_number_is_no_reason_to_refuse(run_folder):
    folder = run_folder()
    edit(folder / "results.jsonl", 1, {"loss": float("nan")})
    edit(folder / "results.jsonl", 2, {"loss": None})
    first, second, *_ = read_result(folder).epochs
    assert first.loss is not None
    assert first.loss != first.loss
    assert second.loss is None


def test_multiply_adds_need_not_be_counted(run_folder):
    folder = run_folder()
    cost = {"parameters": 1, "percent": 100, "bytes": 4, "multiply_adds": None}
    edit(folder / "results.jsonl", 9, {"cost": {**cost, "learning": {"parameters": 2, "percent": 200, "bytes": 9}}})
    assert read_result(folder).costs[2] == Capacity(1, 1, 4, None, 1, 5)


SIZE = {"parameters": 1, "percent": 100, "bytes": 4, "multiply_adds": 1}


# Lines 3, 6 and 9 are the tasks, line 10 the end.
@pytest.mark.parametrize(
    ("line", "change", "message"),
    [
        (1, {"event": "epok"}, "line 1: unknown event 'epok'"),
        (1, {"number": 2, "task": "toy-2"}, "line 1: epoch line of task 2 where task 1 is due"),
        (1, {"task": "toy-9"}, "line 1: the stream has no task 1 'toy-9'"),
        (1, {"number": 0}, "line 1: the stream has no task 0 'toy-1'"),
        (2, {"epoch": "1"}, """line 2: 'epoch' must be a whole number, 0 or more, not "1\""""),
        (2, {"loss": "1"}, """line 2: 'loss' must be a number, not "1\""""),
        (6, {"number": 1, "task": "toy-1"}, "line 6: task line of task 1 where task 2 is due"),
        (6, {"accuracy": [0.5]}, "line 6: 'accuracy' must be a list of 2 fractions from 0 to 1, not [0.5]"),
        (6, {"accuracy": [0.5, 50]}, "line 6: 'accuracy' must be a list of 2 fractions from 0 to 1, not [0.5, 50]"),
        (6, {"top5": [0.5, float("nan")]}, "line 6: 'top5' must be a list of 2 fractions from 0 to 1, not [0.5, NaN]"),
        (6, {"top5": 1}, "line 6: 'top5' must be a list, not 1"),
        (6, {"agnostic": [True, 1]}, "line 6: 'agnostic' must be a list of 2 fractions from 0 to 1, not [true, 1]"),
        (6, {"proof": {"toy-1": 1}}, "line 6: 'proof' must be an object of texts"),
        (6, {"unchanged": 1}, "line 6: 'unchanged' must be true, false or null, not 1"),
        (6, {"cost": {"parameters": 1, "multiply_adds": 1, "learning": {}}}, "line 6: 'cost': 'percent' is missing"),
        (6, {"cost": SIZE}, "line 6: 'cost': 'learning' is missing"),
        (
            6,
            {"cost": {**SIZE, "learning": SIZE | {"bytes": 3}}},
            "line 6: 'cost': 'learning': less than what is kept to use",
        ),
        (6, {"cost": None}, "line 6: 'cost': not a JSON object"),
        (10, {"tasks": 2}, "line 10: the run ends after 3 of 3 tasks"),
        (10, {"event": 1}, "line 10: 'event' must be text, not 1"),
    ],
)
def test_a_wrong_line_is_named(run_folder, line, change, message):
    path = run_folder() / "results.jsonl"
    edit(path, line, change)
    with pytest.raises(FileError) as error:
        read_result(path.parent)
    assert str(error.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines[:4], "{", *lines[4:]], "line 5 is not JSON"),
        (lambda lines: [*lines[:4], "", *lines[4:]], "line 5 is not JSON"),
        (lambda lines: [*lines[:4], "[]", *lines[4:]], "line 5: not a JSON object"),
        (lambda lines: [*lines, lines[0]], "line 11: a line after the end of the run"),
        (lambda lines: [*lines[:8], lines[-1]], "line 9: the run ends after 2 of 3 tasks"),
        (lambda lines: ['{"number": 1}'], "line 1: 'event' is missing"),
    ],
)
def test_lines_out_of_place_are_named(run_folder, change, message):
    path = run_folder() / "results.jsonl"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(FileError) as error:
        read_result(path.parent)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format": 4},
            ": format version 4 of rkr-results, but this version of rkr reads versions 1 to 3: upgrade rkr",
        ),
        ({"seed": -1}, ": 'seed' must be a whole number, 0 or more, not -1"),
        ({"order": None}, ": 'order' must be text, not null"),
        ({"stream": {"tasks": [], "order": []}}, ": 'stream': 0 tasks, but classes of 0"),
        ({"stream": {"tasks": [{"name": "a"}], "order": [[0], [1]]}}, ": 'stream': 1 tasks, but classes of 2"),
        ({"stream": {"tasks": [{"name": "a"}], "order": [["0"]]}}, ": 'stream': 'order' needs a list of class numbers"),
        ({"stream": {"tasks": [{}], "order": [[0]]}}, ": 'stream': task 1: 'name' is missing"),
    ],
)
def test_a_wrong_run_file_is_named(run_folder, change, message):
    path = run_folder() / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (path.parent / "results.jsonl").unlink()
    (path.parent / "times.jsonl").unlink()
    with pytest.raises(FileError) as error:
        read_result(path.parent)
    assert str(error.value).startswith(f"{path}{message}")


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(FileError, match=r"run\.json: cannot be read: No such file"):
        read_result(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(FileError, match=r"run\.json: not JSON"):
        read_result(tmp_path)
    with pytest.raises(FileError, match="no such folder"):
        find_results(tmp_path / "runs")


def test_runs_are_found_in_order(run_folder, tmp_path):
    for recipe, method, order in [
        ("b", "rkr", 10),
        ("b", "rkr", 9),
        ("b", "ewc", "B"),
        ("b", "ewc", "A"),
        ("a", "z", 0),
    ]:
        run_folder([[0.5]], recipe=recipe, method=method, order=order)
    found = find_results(tmp_path)
    assert [(r.recipe, r.method, r.order) for r in found] == [
        ("a", "z", "0"),
        ("b", "ewc", "A"),
        ("b", "ewc", "B"),
        ("b", "rkr", "9"),
        ("b", "rkr", "10"),
    ]
    assert find_results(found[0].folder) == found[:1]
    assert by_recipe(found) == {"a": found[:1], "b": found[1:]}
    assert by_method(found[1:3]) == {"ewc": found[1:3]}
    with pytest.raises(UsageError, match=r'order \("published, A to E" and "random"\)'):
        by_method(found[1:])
    published, random = comparable(found[1:]).values()
    assert (published, random) == (found[1:3], found[3:])


def test_only_comparable_runs_are_compared(a_result):
    one = a_result()
    with pytest.raises(UsageError, match="no results"):
        by_method([])
    with pytest.raises(UsageError, match="different recipes cannot be compared: other, toy"):
        by_method([one, a_result(recipe="other")])
    with pytest.raises(UsageError, match="different numbers of tasks"):
        by_method([one, a_result([[0.5]], order="B")])
    with pytest.raises(UsageError, match="duplicate run of rkr A"):
        by_method([one, one])


def test_the_report_needs_neither_the_engine_nor_the_learners():
    code = "import sys, rkr.report, rkr.report.figures; print([m for m in sys.modules if m.startswith('rkr.')])"
    code += "; assert 'torch' not in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "rkr.report.figures" in loaded
    for other in ("rkr.experiment.loop", "rkr.experiment.run", "rkr.methods", "rkr.data", "rkr.core"):
        assert other not in loaded


def test_runs_of_one_method_with_other_options_are_not_averaged(a_result: Callable[..., Result]) -> None:
    settings = [
        {"epochs": 2, "options": {"rank": rank, **extra}} for rank, extra in ((2, {}), (2, {"new": 1}), (4, {}))
    ]
    runs = [a_result(order=order, settings=s) for order, s in zip("ABC", settings, strict=True)]
    assert list(by_method(runs[:2])) == ["rkr"]
    with pytest.raises(UsageError, match=r"^rkr has rank=2 in .*A and rank=4 in .*C: runs with different options"):
        by_method(runs)


NOT_A_NAME = "must be a name without control characters"


@pytest.mark.parametrize("key", ["recipe", "method", "order"])
@pytest.mark.parametrize("name", ["", " ", "a\ud800b", "a\x00b", "a\nb", "\x9b31m", "\uffff"])
def test_names_that_cannot_be_printed(run_folder: Callable[..., Path], key: str, name: str) -> None:
    folder = run_folder()
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, key: name}))
    with pytest.raises(FileError, match=rf"run.json: '{key}' {NOT_A_NAME}"):
        read_result(folder)
    run["stream"]["tasks"][1]["name"] = name
    (folder / "run.json").write_text(json.dumps(run))
    with pytest.raises(FileError, match=rf"task 2: 'name' {NOT_A_NAME}"):
        read_result(folder)


def test_numbers_that_no_table_can_hold(run_folder: Callable[..., Path]) -> None:
    folder = run_folder()
    run = json.loads((folder / "run.json").read_text())
    for key in ("seed", "order"):
        (folder / "run.json").write_text(json.dumps({**run, key: 10**30}))
        with pytest.raises(FileError, match=f"'{key}' must be at most 9223372036854775807, not 1000"):
            read_result(folder)
    (folder / "run.json").write_text(json.dumps({**run, "seed": 2**63 - 1}))
    assert read_result(folder).seed == 2**63 - 1
    lines = (folder / "results.jsonl").read_text()
    for percent in ("NaN", "Infinity", "-Infinity", "1e300", "0", "-1", "1" + "0" * 400):
        (folder / "results.jsonl").write_text(lines.replace('"percent": 101.0', f'"percent": {percent}'))
        with pytest.raises(FileError, match=r"line 3: 'cost': 'percent' must be a number above 0, not"):
            read_result(folder)
    (folder / "results.jsonl").write_text(lines.replace('"loss": 2.0', '"loss": NaN'))
    assert math.isnan(read_result(folder).epochs[0].loss or 0)  # training may diverge
    times = (folder / "times.jsonl").read_text()
    (folder / "times.jsonl").write_text(times.replace('"test_seconds": 1.0', '"test_seconds": NaN'))
    with pytest.raises(FileError, match="line 1: 'test_seconds' must be a number of seconds, not NaN"):
        read_result(folder)


def test_orders_of_many_digits_are_names() -> None:
    assert rank("7") == (False, 7, "7")
    assert rank("9" * 5000) == (True, 0, "9" * 5000)

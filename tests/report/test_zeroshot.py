"""Zero-shot runs in tables, figures and on the results page: H in the place of accuracy, U and S beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from results_page import page
from rich.console import Console
from rich.table import Table

from rkr import UsageError
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import Result, find_results, read_result
from rkr.report import (
    accuracy_table,
    comparable,
    summary_json,
    summary_table,
    zero_shot_table,
)
from rkr.report.figures import write_figures
from rkr.report.html.data import grouped
from rkr.report.summary import zero_shot_cells

MATRIX = [[0.5], [0.4, 0.6], [0.3, 0.6, 0.7]]  # ends with 0.5333 on average
OTHER = [[0.5], [0.5, 0.5], [0.5, 0.5, 0.4]]  # 0.4667
KEPT = [[0.6], [0.6, 0.5], [0.6, 0.5, 0.8]]

ReadRun = Callable[..., Result]


def cells(table: Table) -> list[list[str]]:
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def printed(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return " ".join(console.export_text().split())


def runs(a_result: ReadRun, **options: Any) -> list[Result]:
    """Two seeds of a method that forgets, and one of a method that does not."""
    options = {"zero_shot": True, "order": "fixed", **options}
    return [
        a_result(MATRIX, method="sft", **options),
        a_result(OTHER, method="sft", seed=1, **options),
        a_result(KEPT, method="rkr", isolated=True, **options),
    ]


def test_orders_with_another_data_set_first_are_no_repetitions(a_result: ReadRun) -> None:
    """Each is shown by itself, beside the paper's row for it."""
    every = [*runs(a_result, recipe="gzsl-first-task"), *runs(a_result, recipe="gzsl-first-task", order="first-CUB")]
    groups = comparable(every)
    assert list(groups) == ["gzsl-first-task fixed", "gzsl-first-task first-CUB"]
    assert [[run.order for run in group] for group in groups.values()] == [["fixed"] * 3, ["first-CUB"] * 3]
    assert [group.name for group in grouped(every)] == ["gzsl-first-task · fixed", "gzsl-first-task · first-CUB"]
    fixed, other = groups.values()
    assert "gzsl-first-task · 3 tasks" in printed(summary_table(fixed))
    assert "gzsl-first-task · first-CUB · 3 tasks" in printed(summary_table(other))
    assert "gzsl-first-task · first-CUB · after the last task" in printed(zero_shot_table(other))
    recipe = load_recipe("gzsl-first-task")
    assert [recipe.published_numbers(group[0].order)["rkr"][0] for group in (fixed, other)] == [47.83, 47.91]
    assert recipe.published_numbers("0") == {}  # the paper has none of a random order
    again = [*runs(a_result, recipe="again", order=0), *runs(a_result, recipe="again", order=1)]
    assert list(comparable(again)) == ["again"]


def test_reading(a_result: ReadRun) -> None:
    first, second, _ = runs(a_result)
    assert first.measure == "H"
    assert first.matrix == ((0.5,), (0.4, 0.6), (0.3, 0.6, 0.7))
    assert first.measures["U"][-1] == pytest.approx((0.2, 0.5, 0.6))
    assert first.measures["S"][-1] == pytest.approx((0.35, 0.65, 0.75))
    assert [notes["classifier_epochs"] for notes in first.notes] == [10, 20, 30]
    assert (first.label, second.label) == ("fixed", "fixed seed 1")
    plain = a_result()
    assert plain.measure == "accuracy"
    assert [dict(notes) for notes in plain.notes] == [{}, {}, {}]


def test_zero_shot_table(a_result: ReadRun) -> None:
    found = runs(a_result)
    table = zero_shot_table(found)
    assert cells(table) == [
        ["method", *(f"toy-{n}\n{name}" for n in (1, 2, 3) for name in "USH")],
        ["sft", "30.0", "45.0", "40.0", "45.0", "60.0", "55.0", "45.0", "60.0", "55.0"],
        ["rkr", "50.0", "65.0", "60.0", "40.0", "55.0", "50.0", "70.0", "85.0", "80.0"],
    ]
    assert "toy · after the last task" in printed(table)
    spread = zero_shot_cells(found)["sft"]["toy-1 H"]
    assert spread.mean == pytest.approx(0.4)
    assert spread.n == 2
    assert spread.std == pytest.approx(0.2 / 2**0.5)  # of the sample: divided by n - 1
    assert zero_shot_cells(found)["rkr"]["toy-1 H"].std is None


def test_unfinished_runs_are_in_no_average(a_result: ReadRun) -> None:
    going_on = a_result(MATRIX[:2], tasks=3, method="l2", order="fixed", zero_shot=True)
    assert list(zero_shot_cells([*runs(a_result), going_on])) == ["sft", "rkr"]
    assert zero_shot_cells([going_on]) == {}
    assert cells(zero_shot_table([going_on])) == [["method"]]
    assert cells(summary_table([going_on])) == [["method", "runs", "H"], ["l2 fixed", "–", "2 of 3 tasks"]]


def test_the_summary_s_column_is_called_h(a_result: ReadRun) -> None:
    table = summary_table(runs(a_result), {"rkr": (47.83, None)})
    header, *rows = cells(table)
    assert header[:4] == ["method", "runs", "H", "paper"]
    assert "accuracy" not in header
    by_method = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    # 53.33 and 46.67: half their difference is s / √2, so the half-width is 12.706 * 3.333.
    assert by_method["sft"]["H"] == "50.00 ± 42.35"
    assert by_method["sft"]["forgetting"] == "+5.00"  # (0.5 - 0.3 + 0.6 - 0.6) / 2 and nothing
    assert by_method["rkr"]["H"] == "63.33"
    assert by_method["rkr"]["paper"] == "47.83"
    assert by_method["rkr"]["identical"] == "3/3"
    assert "mean H over all tasks after the last one, in %" in printed(table)
    assert "± 95 % confidence interval over runs" in printed(table)


def test_the_summary_for_machines(a_result: ReadRun) -> None:
    found = summary_json(runs(a_result))
    assert json.loads(json.dumps(found)) == found
    sft, rkr = found["methods"]
    assert (sft["measure"], rkr["measure"]) == ("H", "H")
    assert sft["runs"] == ["fixed", "fixed seed 1"]
    assert sft["accuracy_by_run"] == pytest.approx({"fixed": 160 / 3, "fixed seed 1": 140 / 3})
    assert sft["accuracy"]["mean"] == pytest.approx(50)
    assert sft["agnostic"] is None


def test_forward_transfer_is_from_original(a_result: ReadRun) -> None:
    options: dict[str, Any] = {"zero_shot": True, "order": "fixed"}
    alone = a_result([[0.5], [0.5, 0.45], [0.5, 0.45, 0.6]], method="original", isolated=True, **options)
    header, *rows = cells(summary_table([*runs(a_result), alone]))
    by_method = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert by_method["rkr"]["FWT"] == "+12.50"  # (0.5 - 0.45 + 0.8 - 0.6) / 2
    assert by_method["sft"]["FWT"] == "+12.50"  # of seed 0 alone: (0.6 - 0.45 + 0.7 - 0.6) / 2
    assert by_method["original"]["FWT"] == "–"


def test_the_matrix_of_a_run(a_result: ReadRun) -> None:
    table = accuracy_table(runs(a_result)[1])
    assert "order fixed seed 1" in printed(table)
    assert "H in %" in printed(table)
    assert cells(table)[-1] == ["3 toy-3", "50.0", "50.0", "40.0", "46.7"]


def test_figures(a_result: ReadRun, tmp_path: Path) -> None:
    written = write_figures(runs(a_result), tmp_path / "figures")
    assert written
    assert all(path.stat().st_size > 1000 for path in written)


def test_the_same_run_twice_is_refused(a_result: ReadRun) -> None:
    found = runs(a_result)
    with pytest.raises(UsageError, match="duplicate run of sft fixed"):
        zero_shot_table([*found, found[0]])


# ---------------------------------------------------------------------------------------------------------
# The page


def settings(method: str, validation: bool = False, steps: Any = None) -> dict[str, Any]:
    recipe = load_recipe("gzsl-local")
    found = (recipe.on_validation() if validation else recipe).resolved(method, "fixed")
    if steps is not None:
        found["options"]["classifier"] = {**found["options"]["classifier"], "steps": steps}
    return found


def test_a_section_of_the_page(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    chosen = {"aPascal": 1200, "CUB": 34, "FLO": 5}
    options: dict[str, Any] = {"zero_shot": True, "order": "fixed", "recipe": "gzsl-local"}
    for seed, matrix in ((0, MATRIX), (1, OTHER)):
        run_folder(matrix, method="sft", seed=seed, settings=settings("sft", steps=chosen), **options)
    run_folder(KEPT, method="rkr", isolated=True, settings=settings("rkr", steps=chosen), **options)
    run_folder(MATRIX[:1], tasks=3, method="l2", settings=settings("l2", steps=chosen), **options)
    text = page(find_results(tmp_path / "runs"))
    lines = text.splitlines()
    assert "## gzsl-local" in lines
    assert any(line.startswith("| method | runs | H |") for line in lines)
    assert any(line.startswith("| sft | 2 | 50.00 ± 42.35 |") for line in lines)
    table = lines.index("After the last task, mean over runs (standard deviation):")
    assert lines[table + 2] == "| method | " + " | ".join(f"toy-{n} {m}" for n in (1, 2, 3) for m in "USH") + " |"
    assert "| rkr | 50.0 | 65.0 | 60.0 | 40.0 | 55.0 | 50.0 | 70.0 | 85.0 | 80.0 |" in lines
    (sft,) = [line for line in lines[table:] if line.startswith("| sft | 30.0")]
    assert sft.startswith("| sft | 30.0 (14.1) | 45.0 (14.1) | 40.0 (14.1) | 45.0 (7.1) |")
    assert "Classifiers: aPascal 1,200, CUB 34, FLO 5 steps." in lines
    assert any(line.startswith("H on each task after the last one") for line in lines)
    assert any(line.startswith("| sft | fixed seed 1 | 50.0 | 50.0 | 40.0 |") for line in lines)
    assert "Unfinished, not part of any mean: l2 fixed (1 of 3 tasks)." in lines


def test_runs_on_the_validation_part_have_a_section_too(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"zero_shot": True, "order": "fixed", "recipe": "gzsl-local-validation"}
    folder = run_folder(KEPT, method="original", settings=settings("original", validation=True), **options)
    assert read_result(folder).settings["recipe"] == "gzsl-local-validation"
    text = page(find_results(tmp_path / "runs"))
    assert "## gzsl-local-validation" in text
    assert "tests on what is held out of training" in text
    assert "Classifiers: steps with the best H on this test." in text

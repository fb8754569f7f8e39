"""Tables: the right number in the right cell, and runs that are not finished kept apart."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from rkr import UsageError
from rkr.experiment.metrics import spread
from rkr.report import accuracy_table, added_by_a_task, summary_json, summary_table, summary_tables
from rkr.report.summary import COLUMNS, points, size, summarise, summary_cells

ISOLATED = [[0.8], [0.8, 0.7], [0.8, 0.7, 0.6]]


def cells(table: Table) -> list[list[str]]:
    """The header and the rows as plain text."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def printed(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return " ".join(console.export_text().split())


def test_the_accuracy_matrix_in_percent(a_result):
    table = accuracy_table(a_result())
    assert cells(table) == [
        ["after learning", "1", "2", "3", "mean"],
        ["1 toy-1", "90.0", "", "", "90.0"],
        ["2 toy-2", "70.0", "80.0", "", "75.0"],
        ["3 toy-3", "60.0", "75.0", "95.0", "76.7"],
        ["task-agnostic", "30.0", "37.5", "47.5", "38.3"],
    ]
    assert "toy · rkr · order A" in printed(table)
    assert "unfinished" not in printed(table)


def test_the_accuracy_matrix_of_a_run_that_goes_on(a_result):
    table = accuracy_table(a_result([[0.9], [0.7, 0.8]], tasks=3, agnostic=False))
    assert cells(table)[1:] == [["1 toy-1", "90.0", "", "", "90.0"], ["2 toy-2", "70.0", "80.0", "", "75.0"]]
    assert "unfinished: 2 of 3 tasks" in printed(table)
    assert cells(accuracy_table(a_result([], tasks=2))) == [["after learning", "1", "2", "mean"]]


def test_names_are_not_markup(a_result):
    assert "[red]m" in printed(accuracy_table(a_result(method="[red]m")))
    assert "[red]m" in printed(summary_table([a_result(method="[red]m")]))


def summary_results(a_result):
    """Two orders of a method that forgets, one of a method that does not, each task alone, and a run that goes on."""
    worse = [[0.9], [0.7, 0.8], [0.5, 0.7, 0.9]]  # average 0.7, forgets 0.4 and 0.1
    return [
        a_result(method="ewc", order="A"),  # average 2.3 / 3, forgets 0.3 and 0.05
        a_result(worse, method="ewc", order="B", agnostic=False),
        a_result(ISOLATED, method="rkr", order="A", isolated=True),
        a_result([[0.5]], tasks=3, method="rkr", order="B", isolated=True),
        a_result([[0.5], [0.5, 0.6], [0.5, 0.6, 0.7]], method="separate", order="A", agnostic=False, isolated=True),
    ]


def test_the_summary_has_a_row_for_each_method(a_result, two_orders):
    table = summary_table(summary_results(a_result), {"rkr": (69.58, 0.55), "ewc": (53.72, None), "apd": (60.74, None)})
    header, *rows = cells(table)
    by_method = {row[0]: dict(zip(header, row, strict=True)) for row in rows if row[0] != "rkr B"}
    assert list(by_method) == ["ewc", "rkr", "separate"]
    # Mean of 76.67 and 70: 73.33. For two values half the difference is s / √2, so the half-width is 12.706 * 3.333.
    assert by_method["ewc"] == {
        "method": "ewc",
        "runs": "2",
        "accuracy": "73.33 ± 42.35",
        "paper": "53.72",
        "forgetting": "+21.25",
        "BWT": "-21.25",
        "FWT": "+22.50",  # order A alone has a network for each task: (0.8 - 0.6 + 0.95 - 0.7) / 2
        "agnostic": "38.33",
        "AOPD": "6.67",  # 10, 5 and 5 points
        "MOPD": "10.00",
        "capacity": "103.0 %",
        "capacity to learn": "106.0 %",
        "bytes": "7 kB",
        "s/epoch": "3",
        "identical": "0/6",
    }
    assert by_method["rkr"] == {
        "method": "rkr",
        "runs": "1",
        "accuracy": "70.00",
        "paper": "69.58 ± 0.55",
        "forgetting": "0.00",
        "BWT": "0.00",
        "FWT": "0.00",
        "agnostic": "35.00",
        "AOPD": "–",
        "MOPD": "–",
        "capacity": "103.0 %",
        "capacity to learn": "106.0 %",
        "bytes": "7 kB",
        "s/epoch": "3",
        "identical": "3/3",
    }
    assert by_method["separate"]["FWT"] == "–"
    assert by_method["separate"]["paper"] == "–"
    assert rows[-1][:3] == ["rkr B", "–", "1 of 3 tasks"]
    assert set(rows[-1][3:]) == {"–"}


def test_columns_without_a_number_are_left_out(a_result):
    table = summary_table([a_result([[0.5]], agnostic=False)])
    assert cells(table) == [
        ["method", "runs", "accuracy", "capacity", "capacity to learn", "bytes", "s/epoch"],
        ["rkr", "1", "50.00", "101.0 %", "102.0 %", "5 kB", "1.5"],
    ]
    assert "95 %" not in printed(table)


def test_only_unfinished_runs(a_result):
    results = [a_result([[0.5]], tasks=3)]
    assert cells(summary_table(results)) == [
        ["method", "runs", "accuracy"],
        ["rkr A", "–", "1 of 3 tasks"],
    ]
    assert summary_json(results) == {
        "recipe": "toy",
        "tasks": 3,
        "methods": [],
        "unfinished": [{"method": "rkr", "run": "A", "done": 1}],
    }
    with pytest.raises(UsageError, match="no results"):
        summary_table([])


def test_forward_transfer_needs_the_same_classes(a_result):
    alone = a_result(ISOLATED, method="separate", groups=[[0, 2], [1, 3], [4, 5]])
    found = summary_json([a_result(), alone])
    assert [method["forward_transfer"] for method in found["methods"]] == [None, None]


def test_the_summary_for_machines(a_result, two_orders):
    found = summary_json(summary_results(a_result), {"rkr": (69.58, 0.55)})
    assert json.loads(json.dumps(found)) == found
    ewc, rkr, separate = found["methods"]
    assert [m["method"] for m in (ewc, rkr, separate)] == ["ewc", "rkr", "separate"]
    assert ewc["runs"] == ["A", "B"]
    assert ewc["accuracy"] == pytest.approx(
        {"mean": 73.33333, "std": 4.714045, "half_width": 42.354016, "n": 2}, rel=1e-6
    )
    assert ewc["accuracy_by_run"] == pytest.approx({"A": 230 / 3, "B": 70})
    assert ewc["forgetting"]["mean"] == pytest.approx(21.25)
    assert ewc["forward_transfer"] == {"mean": pytest.approx(22.5), "std": None, "half_width": None, "n": 1}
    assert (ewc["aopd"], ewc["mopd"]) == (pytest.approx(20 / 3), pytest.approx(10))
    assert ewc["paper"] is None
    assert rkr["paper"] == {"value": 69.58, "half_width": 0.55}
    assert rkr["accuracy"]["n"] == 1  # the run that goes on is not in it
    assert rkr["forgetting"]["mean"] == rkr["backward_transfer"]["mean"] == 0
    assert rkr["bit_identical"] == {"same": 3, "pairs": 3}
    assert (rkr["capacity"], rkr["capacity_to_learn"], rkr["bytes"], rkr["epoch_seconds"]) == (103, 106, 7000, 3)
    assert found["unfinished"] == [{"method": "rkr", "run": "B", "done": 1}]


def test_top5_where_it_says_something(a_result):
    run = a_result()
    assert "top-5" not in summary_cells(summarise([run]), COLUMNS)  # 100 % throughout
    five = replace(run, measures={**run.measures, "top5": ((1.0,), (1.0, 0.9), (0.9, 0.8, 1.0))})
    (cell,) = summary_cells(summarise([five]), COLUMNS)["top-5"]
    assert (cell.text, cell.value) == ("90.00", pytest.approx(0.9))


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_152_440, "12.2 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1 GB"),
    ],
)
def test_sizes(n, text):
    assert size(n) == text


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.00"), (-0.00001, "0.00"), (0.0123, "+1.23"), (-0.5, "-50.00")])
def test_differences_have_a_sign_unless_they_are_nothing(value, text):
    assert points(spread([value])) == text


def test_what_a_task_adds(a_result):
    text = added_by_a_task(a_result())
    costs = a_result().costs
    assert f"{costs[-1].percent - costs[-2].percent:.2f} %" in text
    assert f"{costs[-1].parameters - costs[-2].parameters:,} parameters" in text
    assert added_by_a_task(a_result([[0.5]])).startswith("the network and its first task take")
    grown = a_result([[0.5], [0.5, 0.5], [0.5, 0.5, 0.5]])
    first, second, third = grown.costs
    third = replace(third, parameters=first.parameters - 10, bytes=first.bytes)
    text = added_by_a_task(replace(grown, costs=(first, second, third)))
    sizes = [size(cost.bytes) for cost in (first, third)]
    assert text == (
        f"stored after the first task: {first.percent:.2f} % ({sizes[0]}); "
        f"after 3 tasks: {first.percent - 1:.2f} % ({sizes[1]})"
    )


def test_a_narrow_terminal_gets_two_tables_that_fit(a_result, two_orders):
    results = summary_results(a_result)
    paper = {"rkr": (69.58, 0.55)}
    (wide,) = summary_tables(results, paper, width=160)
    first, second = summary_tables(results, paper, width=80)
    assert cells(first)[0][1:] + cells(second)[0][1:] == [
        *("runs", "accuracy", "paper", "forgetting", "BWT", "FWT", "agnostic"),
        *("AOPD", "MOPD", "capacity", "capacity to learn", "bytes", "s/epoch", "identical"),
    ]
    for table, width in ((wide, 160), (first, 80), (second, 80)):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(table)
        text = console.export_text()
        assert all(name in text for name in cells(table)[0])  # no heading is broken over lines

"""Marks of runs that searched less than the authors of their method."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rkr import registry
from rkr.experiment.results import Result
from rkr.report import figures
from rkr.report.compare import compare, comparison_tables
from rkr.report.html.data import document, grouped, headline
from rkr.report.search import MARK, less_search, marked, search_note
from rkr.report.summary import summarise
from rkr.report.tables import summary_table


def settings(learner: str, **options: Any) -> dict[str, Any]:
    return {"learner": learner, "options": options}


def test_what_the_authors_searched() -> None:
    assert {name: dict(m.search) for name, m in registry.methods("images").items() if m.search} == {
        "rcl": {"trials": 50},
        "rps-net": {"candidates": 8},
    }


@pytest.mark.parametrize(
    ("learner", "options", "less"),
    [
        ("rcl", {"trials": 2, "parallel": 2}, "trials 2 of 50"),
        ("rcl", {"trials": 50}, ""),
        ("rcl", {"trials": 60}, ""),
        ("rcl", {}, ""),  # of a version that did not record it
        ("rps-net", {"candidates": 2}, "candidates 2 of 8"),
        ("rps-net", {"candidates": 8}, ""),
        ("rkr", {"trials": 2}, ""),
        ("my_package:Mine", {"trials": 2}, ""),
    ],
)
def test_less_search_is_told(a_result: Callable[..., Result], learner: str, options: dict[str, Any], less: str) -> None:
    run = a_result(method="mine", settings=settings(learner, **options))
    assert less_search(run) == less
    assert marked("mine", [run]) == (f"mine {MARK}" if less else "mine")
    assert search_note([run]) == (f"{MARK} less search than published: mine {less}" if less else "")


def runs(a_result: Callable[..., Result]) -> list[Result]:
    return [
        a_result(method="rcl", settings=settings("rcl", trials=10)),
        a_result(method="rkr", settings=settings("rkr", rank=2)),
    ]


def test_tables_mark_it(a_result: Callable[..., Result]) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(summary_table(runs(a_result)))
    text = console.export_text()
    assert f"rcl {MARK}" in text
    assert f"rkr {MARK}" not in text
    assert f"{MARK} less search than published: rcl trials 10 of 50" in text.replace("\n", " ")
    assert [s.name for s in summarise(runs(a_result))] == [f"rcl {MARK}", "rkr"]


def test_comparisons_mark_it(a_result: Callable[..., Result], tmp_path: Path) -> None:
    runs(a_result)
    found = compare([tmp_path / "runs" / "toy" / "rkr", tmp_path / "runs" / "toy"])
    assert [one.name for one in found.compared] == ["rkr", f"rcl {MARK}"]
    each, _ = comparison_tables(found)
    assert "rcl trials 10 of 50" in str(each.caption)


def test_the_page_marks_it(a_result: Callable[..., Result]) -> None:
    (group,) = grouped(runs(a_result))
    assert [cells[0].text for _, cells in headline(group).rows] == [f"rcl {MARK}", "rkr"]
    (recipe,) = document([group])["recipes"]
    assert [(method["name"], method["label"]) for method in recipe["methods"]] == [
        ("rcl", f"rcl {MARK}"),
        ("rkr", "rkr"),
    ]


def test_figures_mark_it(a_result: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    real = figures.write
    monkeypatch.setattr(figures, "write", lambda figure, path: (drawn.append(figure), real(figure, path))[1])
    figures.accuracy_over_tasks(runs(a_result), tmp_path / "lines")
    figures.accuracy_against_capacity(runs(a_result), tmp_path / "points")
    lines, points = (figure.axes[0] for figure in drawn)
    assert [line.get_label() for line in lines.lines] == [f"rcl {MARK}", "rkr"]
    assert [bars.get_label() for bars in points.containers] == [f"rcl {MARK}", "rkr"]
    assert all(axes.get_title("left").endswith(f"({MARK} less search than published)") for axes in (lines, points))


def test_figures_show_both_capacities(
    a_result: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line from what must be kept to use all tasks (103 %) to what must be kept to go on learning (106 %)."""
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "write", lambda figure, path: drawn.append(figure))
    figures.accuracy_against_capacity([a_result()], tmp_path / "points")
    (line,) = [line for line in drawn[0].axes[0].lines if line.get_marker() == "|"]
    assert line.get_xdata().tolist() == [103, 106]

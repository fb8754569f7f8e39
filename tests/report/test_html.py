"""The report page: the right numbers, nothing that escapes from a text, and a size that a mail can carry."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from rkr import FileError, UsageError
from rkr.cli import app
from rkr.experiment.results import Result
from rkr.report.figures import FIGURES
from rkr.report.html import page as page_module
from rkr.report.html import render, write_report
from rkr.report.html.data import _duration, details, document, grouped, headline, proofs, runs_table
from rkr.report.html.page import safe_json
from rkr.report.html.paper import published
from rkr.report.scan import Skipped, scan

RESULTS = Path(__file__).parents[2] / "results"
ISOLATED = [[0.8], [0.8, 0.7], [0.8, 0.7, 0.6]]
NASTY = ("<script>alert(1)</script>", "\"'><img src=x onerror=alert(2)>", "</script><b>&amp;{{ 7 * 7 }}", "a\u2028b")

Runs = Callable[..., Path]
ReadRun = Callable[..., Result]


class Page(HTMLParser):
    """What a browser would find: elements, the data, tables, headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[tuple[int, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
            return
        if "style" not in self._open:
            self.text += data
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data
        if self._open and re.fullmatch("h[1-6]", self._open[-1]):
            self.headings[-1] = (self.headings[-1][0], self.headings[-1][1] + data)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])

    def table(self, first: str, second: str) -> list[dict[str, str]]:
        """The rows, by column, of the first table that begins with these columns."""
        found = next(table for table in self.tables if table[0][:2] == [first, second])
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]


def page_of(results: list[Result], *skipped: Skipped) -> Page:
    return Page(render(grouped(results), skipped))


def several(a_result: ReadRun) -> list[Result]:
    """Two orders of a method that forgets, two of one that does not, and a run that goes on."""
    worse = [[0.9], [0.7, 0.8], [0.5, 0.7, 0.9]]
    return [
        a_result(method="ewc", order="A"),
        a_result(worse, method="ewc", order="B"),
        a_result(ISOLATED, method="rkr", order="A", isolated=True),
        a_result(ISOLATED, method="rkr", order="B", isolated=True),
        a_result([[0.5], [0.5, 0.6]], tasks=3, method="rkr", order="C", isolated=True),
    ]


def test_the_committed_results(tmp_path: Path) -> None:
    text = write_report([RESULTS], tmp_path, figures=False).page.read_text(encoding="utf-8")
    page = Page(text)
    assert {recipe["name"] for recipe in page.data["recipes"]} >= {"cifar100-lenet", "digits"}
    last = json.loads((RESULTS / "digits" / "rkr" / "fixed" / "results.jsonl").read_text().splitlines()[-2])
    digits = next(recipe for recipe in page.data["recipes"] if recipe["name"] == "digits")
    (rkr,) = [method for method in digits["methods"] if method["name"] == "rkr"]
    assert rkr["summary"]["accuracy"] == [pytest.approx(100 * fmean(last["accuracy"]), abs=1e-5), None, None, 1]
    assert rkr["look"] == ["#0072B2", "o", ""]
    assert rkr["cost"][-1] == [pytest.approx(last["cost"]["percent"], abs=1e-5), last["cost"]["bytes"]]
    run = next(run for run in digits["runs"] if run["method"] == "rkr")
    assert run["proof"][0] == [last["proof"]["digits-1"][:10], 1, 1, 1, 1]
    assert run["pairs"] == [10, 10]
    rows = [row for table in page.tables if table[0][:2] == ["method", "runs"] for row in table[1:]]
    shown = [row[2] for row in rows if row[0] == "rkr" and row[1] == "1" and len(row) > 4]
    assert f"{100 * fmean(last['accuracy']):.2f}" in shown
    assert page.headings.count((2, "digits")) == 1


def test_numbers_of_the_summary(a_result: ReadRun) -> None:
    rows = page_of(several(a_result)).table("method", "runs")
    # 76.67 and 70: half their difference is s / √2, so the half-width is 12.706 times 3.333; s itself is 4.71.
    assert rows[0] == {
        "method": "ewc",
        "runs": "2",
        "accuracy": "73.33 ± 42.35",
        "sd": "4.71",
        "forgetting": "+21.25",
        "BWT": "-21.25",
        "agnostic": "36.67",
        "capacity": "103.0 %",
        "capacity to learn": "106.0 %",
        "bytes": "7 kB",
        "s/epoch": "3",
        "identical": "0/6",
    }
    assert rows[1]["accuracy"] == "70.00 ± 0.00"
    assert rows[1]["identical"] == "6/6"
    assert rows[2] == {**dict.fromkeys(rows[0], "–"), "method": "rkr C, unfinished", "accuracy": "2 of 3 tasks"}
    none = page_of([a_result([[0.5]], tasks=3, recipe="begun")])
    assert none.table("method", "runs") == [{"method": "rkr A, unfinished", "runs": "–", "accuracy": "1 of 3 tasks"}]


def test_what_charts_are_drawn_from(a_result: ReadRun, two_orders: None) -> None:
    (recipe,) = document(grouped(several(a_result)))["recipes"]
    ewc, rkr = recipe["methods"]
    assert [mean for mean, _ in ewc["running"]] == pytest.approx([90, 75, (230 / 3 + 70) / 2], abs=1e-5)
    assert ewc["running"][2][1] == pytest.approx(12.7062 * 10 / 3, abs=1e-3)
    assert ewc["running"][0] == [90, 0]
    assert [mean for mean, _ in ewc["during"]] == pytest.approx([90, 80, 92.5])
    assert [mean for mean, _ in ewc["after"]] == pytest.approx([55, 72.5, 92.5])
    assert [[mean for mean, _ in row] for row in rkr["matrix"]] == [[80], [80, 70], [80, 70, 60]]
    assert ewc["cost"] == [[101, 5000], [102, 6000], [103, 7000]]
    assert (ewc["summary"]["capacity"], ewc["summary"]["toLearn"], ewc["label"]) == (103, 106, "ewc")
    assert ewc["summary"]["byRun"] == [["A", pytest.approx(230 / 3, abs=1e-5)], ["B", 70]]
    # From order A to B the three tasks differ by 10, 5 and 5 points.
    assert (ewc["summary"]["aopd"], ewc["summary"]["mopd"]) == pytest.approx((20 / 3, 10), abs=1e-5)
    assert [(run["label"], run["finished"], run["done"]) for run in recipe["runs"]][-1] == ("C", False, 2)
    changed = recipe["runs"][0]["proof"]
    assert changed == [["1-1", "1-2", "1-3"], ["2-2", "2-3"], ["3-3"]]
    assert recipe["runs"][2]["proof"] == [["1-1", 1, 1], ["2-2", 1], ["3-3"]]


def test_the_proof(a_result: ReadRun) -> None:
    broken = a_result(ISOLATED, method="broken", isolated=True)
    hashes = (broken.proofs[0], broken.proofs[1], {**broken.proofs[2], "toy-1": "other"})
    object.__setattr__(broken, "proofs", hashes)
    (group,) = grouped([*several(a_result), broken])
    rows = {method: [cell.text for cell in cells[1:]] for method, cells in proofs(group).rows}
    assert rows == {
        "rkr": ["3", "7/7", "✓ no forgetting"],
        "broken": ["1", "2/3", "✗ guaranteed, but outputs changed"],
        "ewc": ["2", "0/6", "not guaranteed by the method"],
    }


def test_zero_shot_tasks(a_result: ReadRun) -> None:
    runs = [a_result(ISOLATED, method="rkr", order="fixed", zero_shot=True, seed=seed) for seed in (0, 1)]
    (group,) = grouped(runs)
    (recipe,) = document([group])["recipes"]
    assert recipe["measure"] == "H"
    zero = recipe["methods"][0]["zero"]
    assert list(zero) == [f"toy-{i} {name}" for i in (1, 2, 3) for name in "USH"]
    assert zero["toy-1 U"] == [pytest.approx(70), 0, 0, 2]
    assert zero["toy-3 S"][0] == pytest.approx(65)
    page = page_of(runs)
    charts = [attributes["data-chart"] for tag, attributes in page.tags if tag == "figure"]
    assert charts == ["over", "tradeoff", "zero", "during", "matrix", "forgetting", "cost"]
    assert page.table("method", "runs")[0]["H"] == "70.00 ± 0.00"
    assert "top-5" not in page.table("method", "runs")[0]


def test_charts_that_cannot_be_drawn_are_left_out(a_result: ReadRun) -> None:
    def charts(*runs: Result) -> list[str | None]:
        return [attributes["data-chart"] for tag, attributes in page_of([*runs]).tags if tag == "figure"]

    everything = ["over", "tradeoff", "during", "matrix", "forgetting", "cost", "orders"]
    assert charts(*several(a_result)) == everything
    assert charts(a_result([[0.5]], tasks=2, recipe="begun")) == ["over", "matrix", "cost"]
    assert charts(a_result([[0.5]], recipe="one")) == ["over", "tradeoff", "during", "matrix", "cost"]


def test_searches_are_on_the_page(a_result: ReadRun, write_search: Callable[..., Path]) -> None:
    """Those of the recipe of the runs, and only what is there to draw; a damaged file hurts nothing."""

    def charts() -> list[str | None]:
        return [attributes["data-chart"] for tag, attributes in page_of([run]).tags if tag == "figure"]

    run = a_result(ISOLATED)
    assert charts()[-1] == "cost"
    path = write_search()
    assert charts()[-2:] == ["search", "importance"]
    (group,) = grouped([run])
    (search,) = document([group])["recipes"][0]["searches"]
    assert search["name"] == "ewc, tpe, seed 0"
    assert [(t["number"], t["value"], t["last"], t["options"]) for t in search["trials"]] == [
        (1, 61, 61, "strength = 1, bn = shared"),
        (2, None, 33.5, "strength = 10, bn = shared"),
        (3, 50, 50, "strength = 100, bn = shared"),
    ]
    assert search["importance"] == {"strength": 75, "bn": 25}
    write_search(importance={})
    assert charts()[-1] == "search"
    for changes in ({"recipe": "another"}, {"trials": []}, {"trials": 3}, {"importance": {"strength": float("nan")}}):
        write_search(**changes)
        assert charts()[-1] == "cost"
    path.write_text("[")
    assert charts()[-1] == "cost"


@pytest.fixture
def lenet() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((RESULTS / "cifar100-lenet" / "rkr" / "A" / "run.json").read_text())[
        "settings"
    ]
    return settings


def test_the_papers_numbers_are_for_its_own_schedule(a_result: ReadRun, lenet: dict[str, Any]) -> None:
    found = published(lenet)
    assert found.numbers["rkr"] == (69.58, 0.55)
    assert found.capacity["apd"] == 135.0
    assert found.changed == ()
    short = {**lenet, "training": {**lenet["training"], "epochs": 20, "milestones": [4, 8, 12, 16]}}
    less = {**lenet, "stream": {**lenet["stream"], "limit": 50}}
    assert published(short).changed[0] == "epochs 20 instead of 100"
    assert published(less).changed == ("at most 50 training images per class",)
    assert published(short).numbers == published(less).numbers == published({"recipe": "my own"}).numbers == {}
    assert published({**lenet, "network": {"name": "resnet18"}}).changed == ("network name resnet18 instead of lenet",)
    wide = {**lenet, "network": {"name": "lenet", "head": "fc", "arguments": {"classes": 10}}}
    assert published(wide).changed == ("network classes 10 instead of 100",)
    cut = {**lenet, "stream": {**lenet["stream"], "validation": 0.1, "first": 3}}
    assert published(cut).changed == ("stream validation 0.1 instead of 0.0", "stream first 3")

    runs = [a_result(ISOLATED, recipe="cifar100-lenet", settings=s, order=o) for s, o in ((lenet, "A"), (short, "B"))]
    full, quick = grouped(runs[::-1])
    assert (full.name, quick.name) == ("cifar100-lenet", "cifar100-lenet · 20 epochs")
    assert ["paper" in dict(headline(group).columns) for group in (full, quick)] == [True, False]
    page = page_of(runs)
    assert page.table("method", "runs")[0]["paper"] == "69.58 ± 0.55"
    assert page.table("method", "runs")[0]["verdict"] == "within the paper's interval"  # 70.00
    assert [len(recipe["paper"]) for recipe in page.data["recipes"]] == [10, 0]
    assert "Not the paper's settings (epochs 20 instead of 100" in page.text


def test_zero_shot_numbers_of_the_paper() -> None:
    recipe = {"recipe": "gzsl", "stream": {"kind": "zero-shot"}, "training": {"epochs": 100}}
    found = published(recipe)
    assert found.numbers["rkr"] == (47.83, None)  # of 40.46, 63.64, 48.36 and 38.87
    assert found.zero_shot["rkr"]["CUB U"] == 47.52
    assert found.capacity["rkr"] == 113
    first = {"recipe": "gzsl-first-task", "order": "first-CUB", **{k: recipe[k] for k in ("stream", "training")}}
    assert published(first).numbers["rkr"] == (47.91, None)  # of 52.46, 62.24, 39.08 and 37.87
    assert published(first).zero_shot["rkr"]["CUB H"] == 52.46  # which is learned first then
    assert published(first).zero_shot["rkr"]["APY H"] == 39.08
    by_rule = {**recipe, "options": {"classifier": {"steps": {"CUB": 3}}}, "classifier_steps": "validation"}
    assert published(by_rule).changed == ()
    in_epochs = {**recipe, "options": {"classifier": {"epochs": {"CUB": 3}}}, "classifier_epochs": "validation"}
    assert published(in_epochs).changed == ("classifier epochs validation",)  # the rule of earlier versions
    other = published({**recipe, "options": {"classifier": {"epochs": 7, "source": "images"}}})
    assert other.changed == (
        "classifier epochs 7",
        "classifier source images instead of attributes",
    )
    assert other.numbers == {}


def test_protocols_of_ones_own_recipe_are_told_apart(a_result: ReadRun) -> None:
    runs = [a_result(settings={"training": {"epochs": n}}, recipe=f"r{n}") for n in (1, 2)]
    for run in runs:
        object.__setattr__(run, "recipe", "mine")
    assert [group.name for group in grouped(runs)] == ["mine · schedule.epochs 1", "mine · schedule.epochs 2"]


def test_every_text_is_a_text(a_result: ReadRun) -> None:
    runs = [a_result(ISOLATED, method=name, isolated=True, settings={"options": {"note": name}}) for name in NASTY]
    text = render(grouped(runs), [Skipped(Path(NASTY[0]), NASTY[1])], title=NASTY[2])
    page = Page(text)
    assert {tag for tag, _ in page.tags} & {"img", "b", "iframe"} == set()
    assert len(page.scripts) == 2
    assert text.count("</script>") == 2
    assert [method["name"] for method in page.data["recipes"][0]["methods"]] == list(NASTY)
    assert [row["method"] for row in page.table("method", "runs")] == list(NASTY)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert NASTY[0] in page.text
    assert "49" not in next(text for level, text in page.headings if level == 1)
    assert json.loads(safe_json({"a": "</script><!--\u2028&"})) == {"a": "</script><!--\u2028&"}
    assert not set("<>&\u2028") & set(safe_json(["</script><!--\u2028&"]))


def test_one_file_that_loads_nothing(a_result: ReadRun) -> None:
    text = render(grouped(several(a_result)))
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any({"src", "action"} & set(attributes) for _, attributes in page.tags)
    assert all(a["href"].startswith("#") for tag, a in page.tags if tag == "a" and a["href"])
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text.replace("url(#", "")
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert text == render(grouped(several(a_result)))  # the same results, the same page


def test_structure_for_those_who_do_not_see_it(a_result: ReadRun) -> None:
    page = page_of(several(a_result), Skipped(Path("a"), "b"))
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    tags = [tag for tag, _ in page.tags]
    assert {"header", "main", "nav", "footer"} <= set(tags)
    assert next(a["href"] for tag, a in page.tags if tag == "a") == "#main"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for tag, attributes in page.tags:
        assert attributes.get("tabindex") in (None, "0")
        assert tag != "button" or attributes["type"] == "button"
        for name in ("href", "aria-labelledby"):
            if (attributes.get(name) or "").lstrip("#") and (name != "href" or tag == "a"):
                assert str(attributes[name]).lstrip("#") in ids
    switches = [attributes for tag, attributes in page.tags if "data-switch" in attributes]
    assert [switch["aria-pressed"] for switch in switches] == ["true", "true"]
    assert tags.count("figure") == sum("data-save" in attributes for _, attributes in page.tags) / 2


def test_runs_and_their_settings(a_result: ReadRun) -> None:
    one = {"training": {"epochs": 2, "milestones": [1, 2], "augment": {}}, "options": {"rank": 2}, "x": True}
    runs = [
        a_result(ISOLATED, order=2, settings=one),
        a_result([[0.5]], tasks=3, order=10, seed=3, settings={**one, "options": {"rank": 8}}),
    ]
    (group,) = grouped(runs)
    shared, (first, second) = details(group)
    training = {"epochs": "2", "milestones": "1, 2", "augment": "none"}
    assert shared == {"training": training, "x": "yes"}
    assert (first.settings, second.settings) == ({"options": {"rank": "2"}}, {"options": {"rank": "8"}})
    assert first.title == "rkr, order 2"
    assert second.title == "rkr, order 10 seed 3 – unfinished, 1 of 3 tasks"
    facts = dict(first.facts)
    assert facts["folder"] == str(runs[0].folder)
    assert facts["time"] == "1 min training, 3 s testing"  # 10 + 20 + 30 and three times 1
    assert facts["network"] == "1,000 parameters"
    table = runs_table(group)
    shown = [
        dict(zip([name for name, _ in table.columns], (c.text for c in cells), strict=True)) for _, cells in table.rows
    ]
    assert [row["state"] for row in shown] == ["finished", "unfinished, 1 of 3 tasks"]
    assert [row["accuracy"] for row in shown] == ["70.00", "–"]
    assert shown[0]["protocol"] == shown[1]["protocol"] == group.protocol.hash
    assert table.dim == {1}
    (copied,) = grouped([replace(runs[0], record={**runs[0].record, "same_as": "gzsl/rkr/fixed"})])
    assert runs_table(copied).rows[0][1][3].text == "finished; copied from gzsl/rkr/fixed"
    assert dict(details(copied)[1][0].facts)["state"] == "finished; copied from gzsl/rkr/fixed"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.25 s"), (59, "59 s"), (60, "1 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_folders_that_cannot_be_used_are_listed(run_folder: Runs, tmp_path: Path) -> None:
    run_folder(ISOLATED)
    run_folder([], tasks=3, order="B")
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{ half")
    shutil.copytree(tmp_path / "runs" / "toy" / "rkr" / "A", tmp_path / "runs" / "copy")
    report = write_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    assert report.runs == 1
    assert len(report.skipped) == 3
    rows = Page(report.page.read_text()).table("folder", "reason")
    assert {Path(row["folder"]).name for row in rows} >= {"broken", "B"}
    assert {row["reason"].split(" as ")[0] for row in rows} == {
        "run.json: not JSON",
        "no task learned yet",
        "same run",
    }
    with pytest.raises(UsageError, match=r"no run has finished a task .*not JSON"):
        write_report([broken], tmp_path / "report")
    with pytest.raises(FileError, match="no such folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        write_report([tmp_path / "runs"], tmp_path / "file")


def test_many_runs_make_a_small_page(run_folder: Runs, tmp_path: Path, lenet: dict[str, Any]) -> None:
    """13 methods in 5 orders of 10 tasks, and 200 runs of one method."""
    matrix = [[0.6 + 0.01234567 * (i - j) / 7 for j in range(i)] for i in range(1, 11)]
    orders = [[list(range(10 * i, 10 * i + 10)) for i in range(s, 10 + s)] for s in range(5)]
    for method in range(13):
        for order, groups in enumerate(orders):
            settings = {**lenet, "options": {**lenet["options"], "rank": method}}
            run_folder(matrix, method=f"method-{method}", order=order, groups=groups, settings=settings, isolated=True)
    for seed in range(200):
        run_folder(matrix, recipe="many", seed=seed, settings=lenet, isolated=True)
    found = scan(tmp_path / "runs")
    assert len(found.results) == 265
    groups_ = grouped(found.results)
    for group, runs in zip(groups_, (200, 65), strict=True):
        assert len(group.results) == runs
        assert len(render([group]).encode()) < 1_000_000
    both = render(groups_)
    assert len(both.encode()) < 5_000_000
    assert sum(len(recipe["runs"]) for recipe in Page(both).data["recipes"]) == 265


def test_the_command(run_folder: Runs, tmp_path: Path) -> None:
    run_folder(ISOLATED)
    other = run_folder(ISOLATED, method="ewc")
    shutil.move(other, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "run").mkdir()
    (tmp_path / "elsewhere" / "run" / "run.json").write_text("[]")
    out = tmp_path / "report"
    given = ["report", str(tmp_path / "runs"), str(tmp_path / "elsewhere"), "--out", str(out)]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"{out / 'index.html'}: 2 runs, 0." in done.output
    assert "not a JSON object" in done.output
    names = {path.name for path in (out / "figures").iterdir()}
    assert {f"toy-accuracy_over_tasks.{kind}" for kind in ("svg", "png")} <= names
    assert {path.suffix for path in (out / "tables").iterdir()} == {".md", ".csv", ".tex"}
    assert not [path for path in out.rglob("*") if path.name.startswith(".")]
    shutil.rmtree(out)
    CliRunner().invoke(app, [*given, "--no-figures"], catch_exceptions=False)
    assert {path.name for path in out.iterdir()} == {"index.html", "tables"}


def test_neither_torch_nor_the_engine_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys; from rkr.report.html import write_report; write_report([sys.argv[1]], sys.argv[2], figures=False);"
        "print([m for m in sys.modules if m == 'torch' or m == 'rkr.experiment.loop' or m.startswith('matplotlib')])"
    )
    command = [sys.executable, "-c", code, str(RESULTS), str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_recipe_that_is_not_in_the_paper(a_result: ReadRun) -> None:
    digits = json.loads((RESULTS / "digits" / "rkr" / "fixed" / "run.json").read_text())["settings"]
    short = {**digits, "training": {**digits["training"], "epochs": 3}}
    found = published(short)
    assert (found.printed, bool(found.changed), published(digits).changed) == (False, True, ())
    run = a_result(ISOLATED, recipe="digits", settings=short)
    page = page_of([run])
    assert [recipe["name"] for recipe in page.data["recipes"]] == ["digits · 3 epochs"]
    assert "the paper's schedule" not in page.text
    assert "Not the recipe's settings (epochs 3 instead of" in page.text
    named = a_result(ISOLATED, recipe="digits-3-epochs", settings=short)
    assert [group.name for group in grouped([named])] == ["digits-3-epochs"]  # it says so already
    other = a_result(ISOLATED, recipe="digits-13-epochs", settings=short)
    assert [group.name for group in grouped([other])] == ["digits-13-epochs · 3 epochs"]


def test_methods_are_counted_once(a_result: ReadRun) -> None:
    runs = [a_result(ISOLATED, recipe=recipe, method=method) for recipe, method in ("ab", "ac", "bb", "bd")]
    assert "4 runs of 3 methods in 2 recipes, all finished." in page_of(runs).text


def test_a_report_of_odd_folders(run_folder: Runs, tmp_path: Path) -> None:
    """Whatever lies there, the rest is shown, and every folder is either shown or left out with its reason."""
    names = ["_hidden", "$x^{$", "x" * 300, "ü" * 200, "a b", "a_b", "A_b"]
    for i, name in enumerate(names):
        run_folder(ISOLATED, order=i).rename(tmp_path / "runs" / str(i))
        run = json.loads((tmp_path / "runs" / str(i) / "run.json").read_text())
        (tmp_path / "runs" / str(i) / "run.json").write_text(json.dumps({**run, "method": name}))
    wrong: list[dict[str, Any]] = [{"settings": {"options": [1]}}, {"settings": {"network": "x"}}]
    wrong += [{"seed": 10**30}, {"method": "\ud800"}]
    for i, change in enumerate(wrong):
        folder = run_folder(ISOLATED, order=20 + i)
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**run, **change}))
    strange = {"training": {"milestones": 5, "lr": "x", "epochs": []}, "recipe": {}, "precision": [None]}
    long = run_folder(ISOLATED, recipe="long", settings=strange) / "run.json"
    long.write_text(long.read_text().replace('"long"', f'"{"r" * 300}"'))
    for recipe in ("my recipe", "my_recipe"):
        run_folder(ISOLATED, recipe=recipe)
    report = write_report([tmp_path / "runs"], tmp_path / "report")
    assert (report.runs, len(report.skipped)) == (10, 4)
    assert len(set(report.tables)) == len(report.tables) == 3 * (2 * 4 + 10)
    assert len(set(report.figures)) == len(report.figures) == 4 * 8
    assert all(path.is_file() for path in (*report.tables, *report.figures))
    shown = {method["name"] for recipe in Page(report.page.read_text()).data["recipes"] for method in recipe["methods"]}
    assert shown == {*names, "rkr"}


def test_one_method_with_two_options(run_folder: Runs, tmp_path: Path) -> None:
    for rank, order in ((2, "A"), (8, "B")):
        run_folder(ISOLATED, order=order, settings={"options": {"rank": rank}})
    report = write_report([tmp_path / "runs"], tmp_path / "report", figures=False)
    rows = Page(report.page.read_text()).table("method", "runs")
    assert [row["method"] for row in rows] == ["rkr (rank=2)", "rkr (rank=8)"]
    assert report.skipped == []


def test_what_fails_is_left_out(run_folder: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("by nothing")

    run_folder(ISOLATED, recipe="good")
    run_folder(ISOLATED, recipe="bad")
    monkeypatch.setitem(FIGURES, "during_after", broken)
    monkeypatch.setattr("rkr.report.export._tasks", broken)
    section = page_module._section
    monkeypatch.setattr(page_module, "_section", lambda group: broken() if group.name == "bad" else section(group))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    for what in ("figures/good-during_after", "figures/bad-during_after", "tables/good-tasks", "tables/bad-tasks"):
        assert f"skipped: {tmp_path / 'out' / what}: ZeroDivisionError: by nothing" in done.output
    assert "bad cannot be rendered: ZeroDivisionError: by nothing" in done.output
    page = Page((tmp_path / "out" / "index.html").read_text())
    assert [recipe["name"] for recipe in page.data["recipes"]] == ["good"]
    assert len(list((tmp_path / "out").rglob("*.svg"))) == 6


def test_many_methods_are_drawn_fast(run_folder: Runs, tmp_path: Path) -> None:
    """13 methods in 5 orders of 10 tasks, figures included."""
    matrix = [[0.6 + 0.01 * (i - j) for j in range(i)] for i in range(1, 11)]
    for method in range(13):
        for order in range(5):
            run_folder(matrix, method=f"method-{method}", order=order)
    began = time.process_time()
    write_report([tmp_path / "runs"], tmp_path / "report")
    assert time.process_time() - began < 15  # 5 on a slow core

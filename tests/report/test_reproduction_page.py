"""docs/results/reproduction.md from committed files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from reproduction_page import page
from results_page import BEGIN, END, readme

from rkr.errors import UsageError
from rkr.experiment.metrics import average
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import find_results, read_result
from rkr.methods import METHODS, ZERO_SHOT_METHODS
from rkr.report.reproduce import exhibit_names

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def rows_of(text: str, recipe: str) -> list[list[str]]:
    table = text.partition(f"Recipe `{recipe}`")[2].split("\n\n")[1]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_the_committed_page_is_that_of_the_committed_files() -> None:
    text = (ROOT / "docs" / "results" / "reproduction.md").read_text("utf-8")
    assert text == page(find_results(RESULTS))
    assert re.findall("^### (.*)$", text, re.MULTILINE) == [*exhibit_names(), "Classification", "Zero-shot tasks"]
    for methods in (METHODS, ZERO_SHOT_METHODS):
        for name, method in methods.items():
            assert method.learner.checked, name
            assert re.search(rf"^\* .*`{name}`.*{re.escape(method.learner.checked)}$", text, re.MULTILINE)
    for number in load_recipe("cifar100-lenet").paper:
        assert any(
            row[0].removesuffix(" †") == number.method
            and row[1] == number.metric
            and row[2].startswith(f"{number.value:.2f}")
            for row in rows_of(text, "cifar100-lenet")
        )


def test_rows_are_of_the_papers_schedule_where_there_are_runs(tmp_path: Path) -> None:
    for which in ("cifar100-lenet/rkr/A", "cifar100-lenet-20-epochs/rkr/A", "cifar100-lenet-20-epochs/rcl/A"):
        shutil.copytree(RESULTS / which, tmp_path / which)
    rows = rows_of(page(find_results(tmp_path)), "cifar100-lenet")
    long = 100 * average(read_result(tmp_path / "cifar100-lenet/rkr/A").matrix)
    short = 100 * average(read_result(tmp_path / "cifar100-lenet-20-epochs/rcl/A").matrix)
    (rkr,) = [row for row in rows if row[:2] == ["rkr", "average accuracy"]]
    assert rkr == [
        *("rkr", "average accuracy", "69.58 ± 0.55", f"{long:.2f}", f"{long - 69.58:+.2f}", "1", "100 epochs"),
        f"{long - 69.58:.2f} above",
    ]
    (rcl,) = [row for row in rows if row[:2] == ["rcl †", "average accuracy"]]
    assert rcl[3:7] == [f"{short:.2f}", f"{short - 55.26:+.2f}", "1", "20 epochs"]
    assert rcl[7].startswith("not comparable: different training.epochs")
    (apd,) = [row for row in rows if row[:2] == ["apd", "average accuracy"]]
    assert apd[3:] == ["–", "–", "–", "–", "not run"]


def test_tables_share_runs_with_the_same_settings(tmp_path: Path) -> None:
    """RKR on LeNet is in tables 1 and 3, in recipes of their own."""
    shutil.copytree(RESULTS / "cifar100-lenet" / "rkr", tmp_path / "cifar100-lenet" / "rkr")
    rows = rows_of(page(find_results(tmp_path)), "ablation-components-lenet")
    (rkr,) = [row for row in rows if row[:2] == ["rkr", "average accuracy"]]
    assert rkr[5:7] == ["1", "100 epochs"]
    about = tmp_path / "cifar100-lenet" / "rkr" / "A" / "run.json"
    found = json.loads(about.read_text())
    found["settings"]["options"]["rank"] = 3
    about.write_text(json.dumps(found))
    (rkr,) = [row for row in rows_of(page(find_results(tmp_path)), "ablation-components-lenet") if row[0] == "rkr"][:1]
    assert rkr[7] == "not run"


def test_the_readme_has_the_runs_at_the_papers_schedule(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text == readme(text, find_results(RESULTS))
    shutil.copytree(RESULTS / "cifar100-lenet", tmp_path / "cifar100-lenet")
    shutil.copytree(RESULTS / "cifar100-lenet-20-epochs" / "si", tmp_path / "cifar100-lenet-20-epochs" / "si")
    made = readme(f"before\n{BEGIN}\nold\n{END}\nafter", find_results(tmp_path))
    assert made.startswith(f"before\n{BEGIN}\nCIFAR-100 in 10 tasks, LeNet, 100 epochs a task")
    assert made.endswith(f"{END}\nafter")
    assert "\n| rkr |" in made
    assert "| si |" not in made
    assert "`si`" in made  # not run yet
    with pytest.raises(UsageError, match="no place for its table"):
        readme("nothing", find_results(tmp_path))

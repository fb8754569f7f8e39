"""The results page from committed files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib
from results_page import headline, page

from rkr.experiment.metrics import average
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import find_results, read_result

RESULTS = Path(__file__).parents[2] / "results"


def test_the_committed_page_is_that_of_the_committed_files() -> None:
    assert (RESULTS.parent / "docs" / "results" / "results.md").read_text() == page(find_results(RESULTS))


def test_the_figure_of_the_readme_is_made_of_the_committed_files() -> None:
    committed = (RESULTS.parent / "docs" / "images" / "headline.svg").read_bytes()
    made = headline(find_results(RESULTS))
    assert b"docs/images/headline.svg" in (RESULTS.parent / "README.md").read_bytes()
    assert b"<svg" in made
    if f"Matplotlib v{matplotlib.__version__}".encode() in committed:  # another version draws other bytes
        assert committed == made


def test_options_that_are_not_the_defaults_are_told(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "digits", tmp_path / "digits")
    assert "Non-default options" not in page(find_results(tmp_path))
    about = tmp_path / "digits" / "rkr" / "fixed" / "run.json"
    found = json.loads(about.read_text())
    found["settings"]["options"] |= {"rank": 3, "layout": "reshape"}
    about.write_text(json.dumps(found))
    assert "\nNon-default options: rkr: rank = 3, layout = reshape.\n" in page(find_results(tmp_path))


def test_methods_are_ranked_where_their_runs_are_alike(tmp_path: Path) -> None:
    """Not all have run in both orders: the ranking is of the one that most have, one run of each."""
    folder = RESULTS / "cifar100-lenet-20-epochs"
    for which in ("rkr/A", "rkr/B", "finetune/A", "finetune/B", "si/A"):
        shutil.copytree(folder / which, tmp_path / folder.name / which)
    text = page(find_results(tmp_path)).partition("One run of each in order A, best first:")[2]
    rows = [line.split(" | ")[:2] for line in text.split("\n\n")[1].splitlines()[2:]]
    wanted = {m: 100 * average(read_result(folder / m / "A").matrix) for m in ("rkr", "finetune", "si")}
    best_first = sorted(wanted.items(), key=lambda item: -item[1])
    assert rows == [[f"| {method}", f"{value:.2f}"] for method, value in best_first]


def test_training_times_are_those_of_a_usual_task(tmp_path: Path) -> None:
    """Of the fastest run, the median over later tasks: one that stood still does not count."""
    for method in ("rkr", "finetune"):
        shutil.copytree(RESULTS / "digits" / method, tmp_path / "digits" / method)
        path = tmp_path / "digits" / method / "fixed" / "times.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line, seconds in zip(lines, (99, 2, 900, 2, 4) if method == "rkr" else (1, 5, 5, 5, 5), strict=True):
            line["train_seconds"] = seconds
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page(find_results(tmp_path))
    assert "relative to RKR (3 seconds; median of each method's fastest run): finetune 1.7. " in text


def test_complete_and_open_runs(tmp_path: Path) -> None:
    for method in ("rkr", "finetune"):
        shutil.copytree(RESULTS / "digits" / method, tmp_path / "digits" / method)
    lines = (tmp_path / "digits" / "finetune" / "fixed" / "results.jsonl").read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if json.loads(line).get("number") == 3)
    (tmp_path / "digits" / "finetune" / "fixed" / "results.jsonl").write_text("".join(lines[:third]))
    text = page(find_results(tmp_path))
    (rkr,) = [line for line in text.splitlines() if line.startswith("| rkr | 1 |")]
    last = json.loads((tmp_path / "digits" / "rkr" / "fixed" / "results.jsonl").read_text().splitlines()[-2])
    assert f"{100 * sum(last['accuracy']) / 5:.2f}" in rkr
    assert "| finetune | 1 |" not in text  # no average of a run that goes on
    assert "finetune fixed (2 of 5 tasks)" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| finetune | fixed |")]
    assert row.count("–") == 3


def test_ridge_regression_alone_has_no_classifier(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    recipe = load_recipe("gzsl-local")
    settings = recipe.resolved("ridge", "fixed")
    assert "classifier" not in settings["options"]
    run = run_folder(method="ridge", zero_shot=True, settings=settings)
    text = page([read_result(run)])
    assert "After the last task, mean over runs" in text
    assert "Classifier epochs" not in text


def test_capacity_stands_beside_the_papers(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "cifar100-lenet-20-epochs" / "apd", tmp_path / "cifar100-lenet-20-epochs" / "apd")
    shutil.copytree(RESULTS / "cifar100-lenet-20-epochs" / "eft", tmp_path / "cifar100-lenet-20-epochs" / "eft")
    lines = [[cell.strip() for cell in line.split("|")] for line in page(find_results(tmp_path)).splitlines()]
    at = next(cells.index("capacity in paper") for cells in lines if "capacity in paper" in cells)
    apd, eft = (next(cells for cells in lines if cells[1:2] == [name] and len(cells) > at) for name in ("apd", "eft"))
    assert apd[at - 1 : at + 1] == ["130.2 %", "135 %"]
    assert eft[at - 1 : at + 1] == ["101.8 %", "–"]  # not in that table
    shutil.copytree(RESULTS / "digits", tmp_path / "other" / "digits")
    assert "| capacity in paper |" not in page(find_results(tmp_path / "other"))

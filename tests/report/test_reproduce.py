"""Every table and figure of the paper by name, and the paper's numbers beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rkr.errors import UsageError
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import load_recipe
from rkr.report.reproduce import Exhibit, Line, exhibit_names, load_exhibit, shown, state_of

PAPER = {
    "encoder-memory",
    "figure-cifar100",
    "figure-first-task",
    "figure-split-cifar",
    "forward-transfer",
    "mnist-first",
    "table-components",
    "table-gzsl",
    "table-gzsl-components",
    "table-gzsl-first-task",
    "table-gzsl-init",
    "table-gzsl-rank",
    "table-imagenet",
    "table-lenet",
    "table-rank",
}
TEN = [[0.6 + 0.01 * j for j in range(i + 1)] for i in range(10)]  # 64.5 % at the end


def lines(exhibit: Exhibit, out: Path, quick: bool = False) -> list[Line]:
    return list(shown(exhibit, out, quick).lines)


def found(rows: list[Line], **wanted: str) -> Line:
    (line,) = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    return line


Command = Callable[..., tuple[int, str, str]]


def test_every_table_and_figure_is_there() -> None:
    assert set(exhibit_names()) == PAPER
    for name in exhibit_names():
        exhibit = load_exhibit(name)
        for recipe in exhibit.recipes:
            load_recipe(recipe)
        assert exhibit.train == (name != "encoder-memory")
    with pytest.raises(UsageError, match="no table or figure named 'table-lennet'; did you mean 'table-lenet'"):
        load_exhibit("table-lennet")


def test_every_recipe_with_printed_numbers_belongs_to_one() -> None:
    from rkr.experiment.recipes import list_recipes

    used = {recipe for name in exhibit_names() for recipe in load_exhibit(name).recipes}
    assert {recipe.name for recipe in list_recipes() if recipe.paper} <= used


def test_the_runs_are_the_papers(tmp_path: Path) -> None:
    def specs(name: str, **options: bool) -> tuple[int, set[object], set[int]]:
        plans = load_exhibit(name).plans(tmp_path, **options)
        all_specs = [spec for plan in plans for spec in plan.specs]
        return len(all_specs), {spec.order for spec in all_specs}, {spec.seed for spec in all_specs}

    methods = len(load_recipe("cifar100-lenet").methods)
    assert specs("table-lenet") == (5 * methods, {"A", "B", "C", "D", "E"}, {0})
    assert specs("table-gzsl") == (7 * 5, {"fixed"}, {0, 1, 2, 3, 4})
    assert specs("table-gzsl-first-task") == (4 * 5, {"fixed", "first-AWA1", "first-CUB", "first-SUN"}, {0, 1, 2, 3, 4})
    assert specs("table-components") == (2 * 3 * 5, {"A", "B", "C", "D", "E", 0, 1, 2, 3, 4}, {0})
    assert specs("table-lenet", quick=True) == (methods, {"A"}, {0})
    assert load_exhibit("encoder-memory").plans(tmp_path) == []
    (quick,) = load_exhibit("table-lenet").plans(tmp_path, quick=True)
    assert quick.root.name == "cifar100-lenet-2-epochs-limit-500"


def test_the_paper_beside_ours(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    for order in "AB":
        run_folder(TEN, recipe="cifar100-lenet", method="rkr", order=order)
    run_folder(TEN[:4], tasks=10, recipe="cifar100-lenet", method="rkr", order="C")  # unfinished: in no mean
    rows = lines(load_exhibit("table-lenet"), tmp_path / "runs")
    line = found(rows, method="rkr", metric="average accuracy")
    assert (line.paper, line.half_width) == (69.58, 0.55)
    assert line.ours is not None
    assert (line.ours.mean, line.ours.n) == (pytest.approx(64.5), 2)
    assert line.difference == pytest.approx(64.5 - 69.58)
    assert line.verdict == "5.08 below"
    assert line.cells[3:7] == ("69.58 ± 0.55", "64.50 ± 0.00", "-5.08", "2")
    assert found(rows, method="rkr-lite", metric="average accuracy").verdict == "not run"
    counted = found(rows, method="rkr", metric="capacity")
    assert counted.ours is not None
    assert counted.ours.mean == pytest.approx(104.2916, abs=1e-3)
    assert (counted.verdict, counted.cells[6]) == ("same to the printed digit", "counted")


def test_a_quick_run_is_not_comparable(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    run_folder(TEN, recipe="cifar100-lenet-2-epochs-limit-500", method="rkr", order="A")
    rows = lines(load_exhibit("table-lenet"), tmp_path / "runs", quick=True)
    line = found(rows, method="rkr", metric="average accuracy")
    assert line.ours is not None
    assert line.verdict == "not comparable: different schedule"
    assert found(rows, method="rkr", metric="capacity").verdict == "same to the printed digit"


def test_printed_differences_become_numbers(tmp_path: Path) -> None:
    rows = lines(load_exhibit("forward-transfer"), tmp_path)
    assert found(rows, method="rkr-random").paper == pytest.approx(87.6 - 1.45)
    (line,) = lines(load_exhibit("mnist-first"), tmp_path)  # only a gap is printed
    assert (line.method, line.paper, line.verdict) == ("rkr", None, "not run")


def test_what_the_paper_only_draws(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    run_folder(TEN[:6], recipe="split-cifar-resnet32", method="rkr", order=0)
    line, *others = lines(load_exhibit("figure-split-cifar"), tmp_path / "runs")
    assert [(other.method, other.verdict) for other in others] == [("ccll", "not run"), ("hnet", "not run")]
    assert line.ours is not None
    assert (line.paper, line.ours.mean) == (None, pytest.approx(62.5))
    assert line.cells[3:] == ("–", "62.50", "–", "1", "no number in the paper")


def test_runs_that_are_not_the_papers(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Begun, damaged, or made with other settings than the recipe's: each is said."""
    settings = load_recipe("cifar100-lenet").resolved("rkr", "A")
    settings["network"]["name"], settings["training"]["epochs"] = "resnet18", 50
    run_folder(TEN, recipe="cifar100-lenet", method="rkr", order="A", settings=settings)
    run_folder(TEN[:3], tasks=10, recipe="cifar100-lenet", method="rkr-lite", order="A")
    (run_folder(TEN, recipe="cifar100-lenet", method="ewc", order="A") / "run.json").write_text("{")
    found_ = shown(load_exhibit("table-lenet"), tmp_path / "runs")
    rows = list(found_.lines)
    line = found(rows, method="rkr", metric="average accuracy")
    assert line.ours is not None
    assert line.verdict == "not comparable: different network.name, training.epochs"
    assert found(rows, method="rkr-lite", metric="average accuracy").verdict == "unfinished: 3 of 10 tasks"
    assert found(rows, method="ewc", metric="average accuracy").verdict == "not run"
    assert found(rows, method="apd", metric="capacity").verdict == "not run"  # which only training decides on
    assert len(found_.left_out) == 1
    assert "ewc" in found_.left_out[0]


def test_sizes_that_are_known_without_a_run(tmp_path: Path) -> None:
    rows = lines(load_exhibit("table-lenet"), tmp_path / "runs")
    for method in ("rkr", "rkr-lite", "ccll", "pgn"):
        assert found(rows, method=method, metric="capacity").verdict == "same to the printed digit"
    for method in ("apd", "den", "rcl"):  # which only training decides on
        assert found(rows, method=method, metric="capacity").verdict == "not run"


def test_tables_of_tasks(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    run_folder(TEN, recipe="imagenet-resnet18", method="rkr", order=0)
    rows = [line for line in lines(load_exhibit("table-imagenet"), tmp_path / "runs") if line.method == "rkr"]
    running = [line for line in rows if line.metric == "top-5 running mean"]
    assert [line.paper for line in running] == [90.2, 88.7, 88.1, 88.2, 86.6, 85.7, 85.0, 84.2, 83.8, 84.4]
    assert all(line.ours is not None and line.ours.mean == 100 for line in running)
    adds = found(rows, metric="multiply-adds")
    assert adds.ours is not None
    assert adds.ours.mean == pytest.approx(2.65e-4, rel=5e-3)
    assert found(rows, metric="parameters per task").verdict == "same to the printed digit"


def test_zero_shot_tables(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    matrix = [[0.5] * (i + 1) for i in range(4)]
    for order in ("fixed", "first-CUB"):
        run_folder(matrix, recipe="gzsl-first-task", method="rkr", order=order, zero_shot=True)
    rows = lines(load_exhibit("table-gzsl-first-task"), tmp_path / "runs")
    assert len(rows) == 4 * 3 * 4  # orders, measures, datasets
    h = [line for line in rows if line.metric == "H" and line.order == "first-CUB"]
    assert [line.paper for line in h] == [52.46, 62.24, 39.08, 37.87]
    assert all(line.ours is not None and line.ours.n == 1 for line in h)
    assert all(line.verdict == "not run" for line in rows if line.order == "first-SUN")


def test_another_classifier_is_not_the_papers(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Epochs that the recipe's rule chose are the recipe's; others, and other latents, are not."""
    matrix = [[0.5] * (i + 1) for i in range(4)]
    for method, changes, rule in (
        ("rkr", {"steps": {"APY": 3, "AWA1": 4, "CUB": 5, "SUN": 6}}, True),
        ("sft", {"steps": {"APY": 3, "AWA1": 4, "CUB": 5, "SUN": 6}}, False),
        ("l2", {"source": "images", "seen": 50}, True),
        ("lzsl", {"epochs": {"APY": 3, "AWA1": 4, "CUB": 5, "SUN": 6}}, False),
    ):
        settings = load_recipe("gzsl").resolved(method, "fixed")
        settings["options"]["classifier"] |= changes
        if "epochs" in changes:  # as earlier versions recorded it
            del settings["options"]["classifier"]["steps"]
        settings |= {"classifier_steps": "validation"} if rule else {}
        run_folder(matrix, recipe="gzsl", method=method, order="fixed", zero_shot=True, settings=settings)
    rows = lines(load_exhibit("table-gzsl"), tmp_path / "runs")
    verdicts = {
        name: {row.verdict for row in rows if (row.method, row.metric) == (name, "U")}
        for name in ("rkr", "sft", "l2", "lzsl")
    }
    assert not any("comparable" in said for said in verdicts["rkr"])
    assert verdicts["sft"] == {"not comparable: different classifier.steps"}
    assert verdicts["lzsl"] == {"not comparable: different classifier.steps, classifier.epochs"}
    assert verdicts["l2"] == {"not comparable: different classifier.seen, classifier.source"}


def test_memory_of_the_encoder(tmp_path: Path) -> None:
    rows = lines(load_exhibit("encoder-memory"), tmp_path)
    assert {line.metric for line in rows} == {"capacity"}
    counted = {(line.recipe, line.method): line for line in rows}
    assert len(counted) == 11
    wrong = [key for key, line in counted.items() if line.verdict != "same to the printed digit"]
    copies = [("gzsl", "l1"), ("gzsl", "l2"), ("gzsl", "lzsl")]  # printed with the previous encoder
    assert wrong == [*copies, ("gzsl-rank", "rkr-k4")]  # a misprint
    assert {(counted[key].paper, counted[key].verdict) for key in copies} == {(200, "100.00 below")}
    assert counted["gzsl-rank", "rkr-k4"].ours is not None
    assert counted["gzsl-rank", "rkr-k4"].verdict == "0.57 below"


def test_state(run_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RKR_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_folder(TEN, recipe="cifar100-lenet", method="rkr", order="A")
    run_folder(TEN[:2], tasks=10, recipe="cifar100-lenet", method="rkr", order="B")
    methods = len(load_recipe("cifar100-lenet").methods)
    state = state_of(load_exhibit("table-lenet"), tmp_path / "runs")
    assert (state.done, state.of, state.data) == (1, 5 * methods, "cifar100 will be downloaded, 169 MB")
    (tmp_path / "data" / "cifar-100-python").mkdir(parents=True)
    assert state_of(load_exhibit("table-lenet"), tmp_path, tmp_path / "data").data == "here"
    state = state_of(load_exhibit("table-gzsl"), tmp_path, tmp_path / "data")
    files = ", ".join(
        f"{name}/{file}.mat" for name in ("APY", "AWA1", "CUB", "SUN") for file in ("res101", "att_splits")
    )
    assert state.data == f"put {files} into xlsa17/data of the folder of data"
    assert (state.done, state.of) == (0, 7 * 5 + 7)  # those on validation classes choose for all seeds
    assert "imagenet/val/<class>" in state_of(load_exhibit("table-imagenet"), tmp_path).data


def test_the_command_lists(tmp_path: Path, command: Command) -> None:
    code, out, _ = command("reproduce", "--list", "--out", str(tmp_path), "--json")
    rows = json.loads(out)
    assert code == 0
    assert {row["name"] for row in rows} == PAPER
    assert all(row["done"] == 0 for row in rows)
    code, out, _ = command("reproduce", "--out", str(tmp_path))
    assert code == 0
    assert all(name in out for name in PAPER)


def test_the_command_runs_what_is_missing(
    tmp_path: Path,
    run_folder: Callable[..., Path],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each run that is not there is run; here a function that writes a result stands for it."""

    def run_plan(plan: Plan, *rest: object) -> bool:
        for spec in plan.specs:
            if not plan.folder(spec).exists():
                run_folder(TEN, recipe=plan.root.name, method=spec.method, order=spec.order)
                ran.append((spec.method, spec.order))
        return True

    ran: list[tuple[str, object]] = []
    monkeypatch.setattr("rkr.experiment.runner.run_plan", run_plan)
    monkeypatch.setattr("rkr.report.figures.accuracy_matrix", lambda *_: [])  # tested in test_figures.py
    words = ("reproduce", "table-lenet", "--quick", "--runs", "2", "--out", str(tmp_path / "runs"))
    code, out, _ = command(*words)
    assert code == 0
    assert {order for _, order in ran} == {"A", "B"}
    assert "quick: 2 epochs, at most 500 training samples per class" in out
    assert "not comparable: different schedule" in out
    assert (tmp_path / "runs" / "cifar100-lenet-2-epochs-limit-500" / "figures" / "accuracy_over_tasks.png").exists()
    before = list(ran)
    code, out, _ = command(*words, "--json")
    assert ran == before
    printed = json.loads(out.splitlines()[-1])
    assert (printed["name"], printed["quick"]) == ("table-lenet", {"epochs": 2, "limit": 500})
    assert printed["notes"] == list(load_exhibit("table-lenet").notes)
    assert any(line["method"] == "rkr" and line["ours"]["n"] == 2 for line in printed["lines"])
    code, _, err = command(*words[:2], "--runs", "0")
    assert (code, err) == (2, "rkr: --runs must be at least 1, not 0\n")


@pytest.mark.parametrize("name", sorted(PAPER))
def test_every_exhibit_can_be_shown_without_a_run(name: str, tmp_path: Path, command: Command) -> None:
    code, out, _ = command("reproduce", name, "--show", "--out", str(tmp_path))
    exhibit = load_exhibit(name)
    assert code == 0
    assert exhibit.title in " ".join(out.split())
    assert all(note in out for note in exhibit.notes)

"""`rkr compare`: methods beside each other, and what cannot be compared is refused by name."""

import json
import os
import subprocess
import sys

import pytest

from rkr import FileError, UsageError
from rkr.experiment.results import read_result
from rkr.report import comparison_json, comparison_tables
from rkr.report.compare import compare
from rkr.report.protocol import protocol
from rkr.report.scan import Skipped


def cells(table):
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.fixture
def toy(run_folder, tmp_path):
    """ewc forgets 0.1 in 3 orders, rkr nothing in 2 of these and another; a third method goes on."""
    for order, last in (("A", 0.5), ("B", 0.6), ("C", 0.7)):
        run_folder([[0.8], [0.7, last]], method="ewc", order=order)
    for order, last in (("A", 0.7), ("B", 0.9), ("D", 0.9)):
        run_folder([[0.8], [0.8, last]], method="rkr", order=order, isolated=True)
    run_folder([[0.8]], tasks=2, method="si")
    return tmp_path / "runs" / "toy"


def test_two_methods(toy):
    found = compare([toy / "ewc", toy / "rkr"])
    ewc, rkr = found.compared
    assert (ewc.name, rkr.name, ewc.to_first, found.measure) == ("ewc", "rkr", None, "accuracy")
    assert ewc.summary.by_run == pytest.approx((0.6, 0.65, 0.7))
    assert rkr.summary.by_run == pytest.approx((0.75, 0.85, 0.85))
    assert rkr.to_first is not None
    assert rkr.to_first.difference is not None
    assert rkr.to_first.difference.mean == pytest.approx((0.15 + 0.2) / 2)
    # Of two values half the difference is s / √2; t is 12.7062 and tan: p = 1 - 2 / π arctan(t).
    assert rkr.to_first.difference.half_width == pytest.approx(12.7062 * 0.025, rel=1e-4)
    assert rkr.to_first.p == pytest.approx(0.0903345, rel=1e-4)
    assert rkr.to_first.unpaired == ("ewc C", "rkr D")
    each, to_first = comparison_tables(found)
    assert cells(each) == [
        ["method", "runs", "accuracy", "forgetting", "agnostic", "capacity", "capacity to learn"],
        ["ewc", "3", "65.00 ± 12.42", "+10.00", "32.50", "102.0 %", "104.0 %"],
        ["rkr", "3", "81.67 ± 14.34", "0.00", "40.83", "102.0 %", "104.0 %"],
    ]
    assert cells(to_first) == [
        ["minus ewc", "difference", "p", "pairs", "unpaired"],
        ["rkr", "+17.50 ± 31.77", "0.09", "2", "ewc C, rkr D"],
    ]
    assert found.protocol.hash in str(each.caption)


def test_the_folder_of_a_recipe_and_a_first_one(toy):
    found = compare([toy])
    assert [one.name for one in found.compared] == ["ewc", "rkr"]
    assert found.skipped == (Skipped(toy / "si" / "A", "unfinished: 1 of 2 tasks"),)
    assert [one.name for one in compare([toy / "rkr", toy]).compared] == ["rkr", "ewc"]


def test_single_runs(toy):
    found = compare([toy / "ewc" / "A", toy / "ewc" / "B", toy / "rkr" / "A"])
    a, b, rkr = found.compared
    assert (a.name, b.name, rkr.name) == (f"ewc ({toy}/ewc/A)", f"ewc ({toy}/ewc/B)", "rkr")
    assert b.to_first is not None
    assert (b.to_first.difference, b.to_first.unpaired) == (None, ("ewc A", "ewc B"))
    assert cells(comparison_tables(found)[1])[1:] == [
        [b.name, "–", "–", "0", "ewc A, ewc B"],
        ["rkr", "+15.00", "–", "1", "–"],
    ]


def test_one_method_in_two_places(toy, tmp_path):
    os.rename(toy / "rkr", tmp_path / "again")
    os.rename(toy / "ewc", toy / "rkr")
    for path in (toy / "rkr").glob("*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "rkr"}))
    names = [one.name for one in compare([toy / "rkr", tmp_path / "again"]).compared]
    assert names == [f"rkr ({toy}/rkr)", f"rkr ({tmp_path}/again)"]


def test_recipes_of_one_protocol_are_compared(run_folder, tmp_path):
    run_folder([[0.5]], recipe="a")
    run_folder([[0.7]], recipe="b", method="ewc")
    _, ewc = compare([tmp_path / "runs" / "a", tmp_path / "runs" / "b"]).compared
    assert ewc.to_first is not None
    assert ewc.to_first.difference is not None
    assert ewc.to_first.difference.mean == pytest.approx(0.2)


def test_class_incremental_accuracy_is_shown(toy):
    """Of a method that is tested so after every task: the first task is 0.5, then both are 0.375 and 0.25."""
    for path in (toy / "rkr").glob("*/results.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["event"] == "task":
                line["agnostic"] = [0.5] if line["number"] == 1 else [0.375, 0.25]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare([toy])
    each = cells(comparison_tables(found)[0])
    at = each[0].index("incremental")
    assert [row[at] for row in each[1:]] == ["–", "40.62"]
    assert comparison_json(found)["methods"][1]["incremental"]["mean"] == pytest.approx(40.625)


def test_zero_shot_tasks_are_compared_by_h(run_folder, tmp_path):
    for method, h in (("sft", 0.4), ("rkr", 0.5)):
        for seed in (0, 1):
            run_folder([[0.3], [0.3, h + seed / 10]], method=method, order="fixed", seed=seed, zero_shot=True)
    found = compare([tmp_path / "runs" / "toy" / "sft", tmp_path / "runs" / "toy" / "rkr"])
    assert found.measure == "H"
    each, to_first = comparison_tables(found)
    assert cells(each)[0] == ["method", "runs", "H", "forgetting", "capacity", "capacity to learn"]
    assert cells(each)[1][2] == "37.50 ± 31.77"
    assert cells(to_first)[1][1].startswith("+5.00 ± 0.00")


def test_other_protocols_are_refused_by_name(run_folder, tmp_path):
    a = run_folder(method="ewc", settings={"training": {"epochs": 100}})
    b = run_folder(method="rkr", settings={"training": {"epochs": 20}})
    with pytest.raises(UsageError) as error:
        compare([a, b])
    assert str(error.value) == (
        f"{a} and {b} cannot be compared: their protocols differ in schedule.epochs (100 and 20)"
    )


def test_nothing_to_compare(toy, tmp_path):
    with pytest.raises(UsageError, match=r"contains only ewc; give something to compare it with"):
        compare([toy / "ewc"])
    with pytest.raises(UsageError, match=r"no finished runs to compare \(.*si/A: unfinished: 1 of 2 tasks\)"):
        compare([toy / "ewc", toy / "si"])
    with pytest.raises(UsageError, match="all of its runs are in an earlier folder"):
        compare([toy, toy / "rkr"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty: no finished runs to compare \(it contains no runs\)"):
        compare([toy, tmp_path / "empty"])
    with pytest.raises(FileError, match="no such folder"):
        compare([toy, tmp_path / "none"])


def test_broken_runs_are_left_out_and_told(toy):
    (toy / "rkr" / "D" / "run.json").write_text("{")
    found = compare([toy / "ewc", toy / "rkr"])
    assert found.skipped == (Skipped(toy / "rkr" / "D", "run.json: not JSON"),)
    assert found.compared[1].summary.runs == ("A", "B")


def test_for_machines(toy):
    found = comparison_json(compare([toy]))
    assert json.loads(json.dumps(found)) == found
    assert found["measure"] == "accuracy"
    assert found["protocol"]["hash"] == protocol(read_result(toy / "rkr" / "A")).hash
    ewc, rkr = found["methods"]
    assert ewc["to_first"] is None
    assert ewc["accuracy"] == pytest.approx({"mean": 65, "std": 5, "half_width": 12.42069, "n": 3}, rel=1e-6)
    assert ewc["forgetting"]["mean"] == pytest.approx(10)
    assert ewc["agnostic"]["mean"] == pytest.approx(32.5)
    assert ewc["incremental"] is None
    assert rkr["to_first"]["difference"]["mean"] == pytest.approx(17.5)
    assert rkr["to_first"]["pairs"] == ["A", "B"]
    assert rkr["to_first"]["unpaired"] == ["ewc C", "rkr D"]
    assert found["skipped"] == [{"folder": str(toy / "si" / "A"), "reason": "unfinished: 1 of 2 tasks"}]


def test_the_command(toy):
    def rkr(*words):
        return subprocess.run([sys.executable, "-m", "rkr", "compare", *words], capture_output=True, text=True)

    shown = rkr(str(toy))
    assert shown.returncode == 0
    assert "+17.50 ± 31.77" in shown.stdout
    assert shown.stderr == f"skipped: {toy}/si/A: unfinished: 1 of 2 tasks\n"
    assert json.loads(rkr(str(toy), "--json").stdout)["methods"][1]["method"] == "rkr"
    refused = rkr(str(toy / "ewc"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("rkr: ")
    assert refused.stderr.count("\n") == 1


def test_options_are_named_apart(run_folder, tmp_path):
    two, eight = (tmp_path / name for name in ("two", "eight"))
    for folder, rank, matrix in ((two, 2, [[0.5]]), (eight, 8, [[0.75]])):
        run_folder(matrix, settings={"options": {"rank": rank}}).rename(folder)
    for folders in ([two, eight], [two, tmp_path]):
        first, second = compare(folders).compared
        assert (first.name, second.name) == ("rkr (rank=2)", "rkr (rank=8)")
        assert second.to_first.difference.mean == pytest.approx(0.25)

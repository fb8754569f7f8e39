"""`rkr.results`: a row for each task after each task, with the numbers of the run's files."""

import builtins
import json
import math
import subprocess
import sys

import pandas as pd
import pytest

import rkr
import rkr.experiment.results
from rkr import UsageError
from rkr.report.protocol import protocol

COLUMNS = [
    *("recipe", "method", "order", "seed", "protocol", "task", "task_number", "after", "after_number"),
    *("accuracy", "top5"),
    *("agnostic", "unchanged", "capacity_percent", "capacity_to_learn_percent"),
    *("bytes", "bytes_to_learn", "parameters", "multiply_adds"),
    *("finished", "folder", "commit", "train_seconds"),
]


def test_every_number_is_where_it_belongs(run_folder, tmp_path):
    folder = run_folder(seed=3, isolated=True)
    frame = rkr.results(tmp_path)
    assert list(frame.columns) == COLUMNS
    assert len(frame) == 1 + 2 + 3
    (row,) = frame[(frame.task == "toy-2") & (frame.after == "toy-3")].to_dict("records")
    assert row == {
        "recipe": "toy",
        "method": "rkr",
        "order": "A",
        "seed": 3,
        "protocol": protocol(rkr.experiment.results.read_result(folder)).hash,
        "task": "toy-2",
        "task_number": 2,
        "after": "toy-3",
        "after_number": 3,
        "accuracy": 0.75,
        "top5": 1.0,
        "agnostic": 0.375,
        "unchanged": True,
        "capacity_percent": 103.0,
        "capacity_to_learn_percent": 106.0,
        "bytes": 7000,
        "bytes_to_learn": 10000,
        "parameters": 1030,
        "multiply_adds": 123456,
        "finished": True,
        "folder": str(folder),
        "commit": row["commit"],
        "train_seconds": 30.0,
    }
    assert pd.isna(row["commit"])
    assert frame.agnostic.isna().tolist() == [True, True, True, False, False, False]
    assert frame.accuracy.tolist() == [0.9, 0.7, 0.8, 0.6, 0.75, 0.95]
    final = frame[frame.after_number == 3]
    assert final.accuracy.mean() == pytest.approx(2.3 / 3)


def test_a_task_is_unchanged_if_its_logits_are_those_of_when_it_was_learned(run_folder, tmp_path):
    folder = run_folder(method="ewc", isolated=False)
    frame = rkr.results(folder)
    assert frame.unchanged.tolist() == (frame.task_number == frame.after_number).tolist()
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        line["proof"] = {}
        if line["event"] == "task":
            line["cost"]["multiply_adds"] = None
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "times.jsonl").unlink()
    frame = rkr.results(str(folder))
    assert frame[["unchanged", "multiply_adds", "train_seconds"]].isna().all(axis=None)


def test_zero_shot_and_classification_in_one_frame(run_folder, tmp_path):
    run_folder([[0.5]], order=0)
    run_folder([[0.4]], recipe="gzsl", order="fixed", zero_shot=True)
    frame = rkr.results(tmp_path / "runs" / "toy", tmp_path / "runs" / "gzsl")
    assert [name for name in frame.columns if name not in COLUMNS] == ["H", "U", "S"]
    gzsl, toy = frame.to_dict("records")
    assert (gzsl["H"], gzsl["U"], gzsl["S"]) == pytest.approx((0.4, 0.3, 0.45))
    assert math.isnan(gzsl["accuracy"])
    assert (toy["accuracy"], math.isnan(toy["H"])) == (0.5, True)
    assert gzsl["protocol"] != toy["protocol"]
    alone = rkr.results(tmp_path / "runs" / "gzsl")
    assert "accuracy" not in alone.columns


def test_runs_that_go_on_and_folders_that_are_none(run_folder, tmp_path):
    run_folder([[0.5], [0.5, 0.6]], tasks=3, order="A")
    (run_folder(order="B") / "results.jsonl").unlink()
    frame = rkr.results(tmp_path)
    assert (len(frame), frame.finished.any()) == (3, False)
    assert frame.attrs["skipped"] == [(str(tmp_path / "runs/toy/rkr/B"), "no task learned yet")]
    broken = run_folder(order="C")
    (broken / "run.json").write_text("{")
    with pytest.warns(UserWarning, match=r"skipped 1 folders, such as .*C: run.json: not JSON") as warned:
        frame = rkr.results(tmp_path)
    assert warned[0].filename == __file__
    assert (str(broken), "run.json: not JSON") in frame.attrs["skipped"]


def test_no_runs_at_all(tmp_path):
    frame = rkr.results(tmp_path)
    assert (list(frame.columns), len(frame)) == (COLUMNS, 0)
    assert frame.accuracy.dtype == "float64"


def test_without_pandas_one_clear_error(tmp_path, monkeypatch):
    imported = builtins.__import__

    def refuse(name, *args, **options):
        if name == "pandas":
            raise ImportError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"rkr\.results needs pandas: pip install pandas"):
        rkr.results(tmp_path)


def test_the_name_is_a_function_whatever_is_imported():
    code = "import rkr.experiment.results, rkr; assert callable(rkr.results) and 'results' in dir(rkr); import sys; "
    code += "assert 'torch' not in sys.modules and 'pandas' not in sys.modules; import rkr.report.frame; "
    code += "assert rkr.results is rkr.report.frame.results"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "results" in rkr.__all__

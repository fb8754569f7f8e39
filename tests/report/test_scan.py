"""Folders that hold anything: runs are found, the rest is listed with its reason."""

import json
import os
import time

import pytest

from rkr import FileError
from rkr.report.scan import BEGUN, Skipped, scan

NEWER = "run.json: format version 7 of rkr-results, but this version of rkr reads versions 1 to 3: upgrade rkr"


def test_whole_runs_are_found_in_order(run_folder, tmp_path):
    for order in (10, 9):
        run_folder(order=order)
    run_folder(order=9, seed=3)
    found = scan(tmp_path)
    assert [run.label for run in found.results] == ["9", "9 seed 3", "10"]
    assert found.skipped == []
    assert scan(tmp_path / "runs" / "toy" / "rkr" / "9").results == found.results[:1]
    assert scan(tmp_path / "runs" / "toy" / "rkr", tmp_path, str(tmp_path)).results == found.results
    with pytest.raises(FileError, match="no such folder"):
        scan(tmp_path, tmp_path / "other")


def test_what_cannot_be_used_is_listed(run_folder, tmp_path):
    good = run_folder(order=0)
    reasons = {}
    for number, (file, content, reason) in enumerate(
        [
            ("run.json", b"{", "run.json: not JSON"),
            ("run.json", b"", "run.json: not JSON"),
            ("run.json", b"\xff\xfe", "run.json: not JSON"),
            ("run.json", b"[]", "run.json: not a JSON object"),
            ("run.json", b'{"name": "of another program"}', "run.json: 'format' is missing"),
            ("run.json", b'{"format": 7}', NEWER),
            ("run.json", b"[" * 100_000, "JSON is nested too deeply"),
            ("results.jsonl", b"{}\n{}\n", "results.jsonl: line 1: 'event' is missing"),
            ("results.jsonl", b"\x00\x01\n", "results.jsonl: line 1 is not JSON"),
            ("times.jsonl", b"[]\n", "times.jsonl: line 1: not a JSON object"),
            ("results.jsonl", b"", BEGUN),
        ],
        1,
    ):
        folder = run_folder(order=number)
        (folder / file).write_bytes(content)
        reasons[folder] = reason
    (run_folder(order=20) / "results.jsonl").unlink()
    reasons[tmp_path / "runs/toy/rkr/20"] = BEGUN
    (run_folder(order=21) / "run.json").unlink()
    reasons[tmp_path / "runs/toy/rkr/21"] = "results.jsonl without run.json"
    (tmp_path / "runs" / "figures").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("anything")
    found = scan(tmp_path)
    assert [run.folder for run in found.results] == [good]
    assert {item.path: item.reason for item in found.skipped} == reasons


def test_settings_of_any_shape_do_no_harm(run_folder, tmp_path):
    """Sections must be objects; the protocol takes the rest as it is."""
    folder = run_folder()
    run = json.loads((folder / "run.json").read_text())
    for settings in ({}, {"stream": {"options": 3}, "options": None}, {"x": [{"y": None}], "recipe": ["digits"]}):
        (folder / "run.json").write_text(json.dumps({**run, "settings": settings, "network": None}))
        assert len(scan(tmp_path).results) == 1
    for section, value in (("options", [1]), ("network", "x"), ("stream", 3), ("training", "fast")):
        (folder / "run.json").write_text(json.dumps({**run, "settings": {section: value}}))
        (left,) = scan(tmp_path).skipped
        assert left.reason == f"run.json: 'settings': '{section}': not a JSON object"
    deep = json.loads("[" * 50 + "]" * 50)
    (folder / "run.json").write_text(json.dumps({**run, "settings": {"x": deep}}))
    assert scan(tmp_path).skipped[0].reason == "run.json: 'settings': more than 20 levels"


def test_a_cut_line_is_a_run_that_goes_on(run_folder, tmp_path):
    path = run_folder() / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-60])
    (result,) = scan(tmp_path).results
    assert (result.done, result.finished) == (2, False)


def test_of_doubles_the_farthest_stays(run_folder, tmp_path):
    short = run_folder([[0.5]], tasks=3)
    os.rename(short, short.with_name("short"))
    whole = run_folder()
    os.rename(whole, whole.with_name("z"))
    twin = run_folder()
    found = scan(tmp_path)
    kept, other, _ = (twin, whole.with_name("z"), short)
    assert [run.folder for run in found.results] == [kept]  # of two whole ones the first by name
    assert found.skipped == [
        Skipped(short.with_name("short"), f"same settings as {kept}, but different results"),
        Skipped(other, f"same run as {kept}"),
    ]


def test_a_copy_from_before_the_end_is_the_same_run(run_folder, tmp_path):
    whole = run_folder()
    os.rename(whole, whole.with_name("whole"))
    short = run_folder([[0.9], [0.7, 0.8]], tasks=3)
    assert scan(tmp_path).skipped == [Skipped(short, f"same run as {whole.with_name('whole')}")]


def test_options_name_a_method_apart(run_folder, tmp_path):
    def add(order, **options):
        folder = run_folder(order=order, settings={"options": options})
        os.rename(folder, folder.with_name(f"{order}-{len(list(folder.parent.iterdir()))}"))

    add("A", rank=2, scale=True)
    add("B", rank=2.0, scale=True)
    assert {run.method for run in scan(tmp_path).results} == {"rkr"}
    add("A", rank=8, scale=True)
    add("C", scale=True)  # from before there was a rank
    found = scan(tmp_path)
    assert found.skipped == []
    assert [(run.method, run.order) for run in found.results] == [
        ("rkr", "C"),
        ("rkr (rank=2)", "A"),
        ("rkr (rank=2)", "B"),
        ("rkr (rank=8)", "A"),
    ]
    add("A", rank=8, scale=True, inner={"a": "x" * 100})
    add("D", rank=8, scale=True, inner={"a": "y" * 100})
    names = {run.method for run in scan(tmp_path).results}
    assert len(names) == 5
    assert max(map(len, names)) < 70


def test_options_under_other_protocols_need_no_other_name(run_folder, tmp_path):
    for epochs in (1, 2):
        run_folder(order=epochs, settings={"training": {"epochs": epochs}, "options": {"rank": epochs}})
    assert {run.method for run in scan(tmp_path).results} == {"rkr"}


def test_other_protocols_are_no_doubles(run_folder, tmp_path):
    first = run_folder(settings={"training": {"epochs": 2}})
    os.rename(first, first.with_name("other"))
    run_folder(settings={"training": {"epochs": 3}})
    assert len(scan(tmp_path).results) == 2


def test_links_are_followed_once(run_folder, tmp_path):
    run_folder()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "runs").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs")
    found = scan(elsewhere)
    assert len(found.results) == 1
    assert found.skipped == []
    assert len(scan(tmp_path).results) == 1
    assert scan(tmp_path).skipped == []


def test_a_folder_that_cannot_be_listed(run_folder, tmp_path, monkeypatch):
    run_folder()
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = scan(tmp_path)
    assert len(found.results) == 1
    assert found.skipped == [Skipped(tmp_path / "closed", "cannot be read: Permission denied")]


def test_many_epochs_are_read_fast(run_folder, tmp_path):
    """20 runs of 10 tasks of 100 epochs: a tenth of what must take a few seconds."""
    matrix = [[0.5] * i for i in range(1, 11)]
    for order in range(20):
        path = run_folder(matrix, order=order) / "results.jsonl"
        lines = path.read_text().splitlines()
        epochs = [json.loads(line) for line in lines if '"epoch"' in line][::2]
        many = []
        for line in lines:
            read = json.loads(line)
            if read["event"] == "task":
                first = epochs[read["number"] - 1]
                many += [json.dumps({**first, "epoch": e, "accuracy": 0.25}) for e in range(100)]
            if read["event"] != "epoch":
                many.append(line)
        path.write_text("\n".join(many) + "\n")
    began = time.process_time()
    found = scan(tmp_path)
    seconds = time.process_time() - began
    assert [len(run.epochs) for run in found.results] == [1000] * 20
    assert seconds < 2  # 0.15 on a slow core
    began = time.process_time()
    without = scan(tmp_path, epochs=False)
    assert time.process_time() - began < 1  # 0.03
    assert [run.matrix for run in without.results] == [run.matrix for run in found.results]
    assert [len(run.epochs) for run in without.results] == [0] * 20

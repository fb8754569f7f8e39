"""Folders of many tasks: read when used, gone from memory after a while; an index of lines; several processes."""

from __future__ import annotations

import builtins
import copy
import gc
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import Tensor, nn

import rkr
from rkr.core import add_task_file, drop_task, files, read_about, rename_task
from rkr.core import index as index_module
from rkr.core.index import INDEX, LOCK, Index


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.bn = nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.conv(x)).mean(dim=(2, 3)))


X = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def train(model: rkr.RectifiedModel, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.train()
    optimizer = torch.optim.SGD(model.task_parameters(), lr=0.5)
    F.cross_entropy(model(torch.randn(8, 1, 4, 4, generator=generator)), torch.arange(8) % 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def build(count: int = 6, **options: Any) -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(Tiny(), head="fc", **options)
    for n in range(count):
        model.add_task(f"t{n}", 2)
        train(model, n)
    return model


def answer(model: rkr.RectifiedModel, name: str) -> bytes:
    with torch.no_grad():
        return model(X, tasks=[name] * len(X)).numpy().tobytes()


def known(model: rkr.RectifiedModel) -> dict[str, tuple[str, bytes]]:
    """Fingerprint and answers of each task."""
    model.eval()
    return {name: (model.fingerprint(name), answer(model, name)) for name in model.tasks}


def load(folder: Path) -> rkr.RectifiedModel:
    return rkr.load(folder, Tiny()).eval()


def in_memory(model: rkr.RectifiedModel) -> list[str]:
    return [name for name in model.tasks if model.tasks.in_memory(name) is not None]


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and size of each file."""
    return {path.name: (path.stat().st_ino, path.stat().st_size) for path in folder.iterdir()}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of any size have a journal."""
    monkeypatch.setattr(index_module, "WHOLE", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build().save(tmp_path / "zoo")
    return tmp_path / "zoo"


def journal(folder: Path) -> Path:
    (path,) = folder.glob("zoo.*.jsonl")
    return path


# ---------------------------------------------------------------------------------------------------------
# Reading when used


def test_only_the_task_in_use_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, read, real = known(build()), [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), real(path))[1])
    model = load(folder)
    assert sorted(name.partition(".")[0] for name in read) == ["base", "t5"]
    assert (in_memory(model), len(model.tasks), list(model.tasks)) == (["t5"], 6, [f"t{n}" for n in range(6)])
    model.set_task("t2")
    model(X, tasks=["t0", "t2", "t0", "t2"])
    assert sorted(name.partition(".")[0] for name in read) == ["base", "t0", "t2", "t5"]
    assert known(model) == expected
    assert len(read) == 7  # each once


def test_what_works_with_tasks_in_memory_works_with_tasks_in_files(folder: Path, tmp_path: Path) -> None:
    eager = build()
    for use in (
        lambda m: m.merged("t1").state_dict()["conv.weight"].numpy().tobytes(),
        lambda m: str(m.cost()),
        lambda m: m.fingerprint("t3"),
        lambda m: {k: v.numpy().tobytes() for k, v in m.state_dict().items()},
        lambda m: [(t.name, t.number, t.classes) for t in m.tasks.values()],
        lambda m: [name for name, _ in m.tasks.items()],
        lambda m: m.tasks.last().name,
        lambda m: m(X, tasks=["t0", "t4", "t0", "t1"]).detach().numpy().tobytes(),
        lambda m: m.save_task("t2", tmp_path / "file") or (tmp_path / "file").read_bytes(),
        lambda m: (torch.manual_seed(1), m.add_task("new", 2, init="t1"), train(m), m.fingerprint("new"))[3],
        lambda m: (torch.manual_seed(1), m.add_task("next", 2), train(m), m.fingerprint("next"))[3],
        lambda m: (m.set_task("t0"), train(m, 9), m.fingerprint("t0"))[2],
        lambda m: (m.remove_task("t4"), list(m.tasks))[1],
        lambda m: (m.load_task(tmp_path / "file", name="t3"), known(m))[1],
    ):
        assert use(load(folder)) == use(copy.deepcopy(eager).eval())


@pytest.mark.parametrize("steps", [["half", "float"], ["double"], ["double", "float", "bfloat16"]], ids=str)
def test_conversions_reach_tasks_in_files(steps: list[str], folder: Path, tmp_path: Path) -> None:
    eager, lazy = build(), load(folder)
    lazy.tasks["t1"]
    lazy.to("cpu").float()  # changes nothing
    assert in_memory(lazy) == ["t1", "t5"]
    for step in steps:
        getattr(eager, step)()
        getattr(lazy, step)()
    assert in_memory(lazy) == ["t5"]
    prints = {name: eager.fingerprint(name) for name in eager.tasks}
    assert {name: lazy.fingerprint(name) for name in lazy.tasks} == prints
    assert lazy.tasks["t0"].get("conv.lm").dtype == eager.network.conv.weight.dtype
    assert lazy.tasks["t0"].get("bn.num_batches_tracked").dtype == torch.int64
    lazy.tasks.shrink(0)
    lazy.save(tmp_path / "converted")
    again = rkr.load(tmp_path / "converted", Tiny().to(eager.network.conv.weight.dtype))
    assert {name: again.fingerprint(name) for name in again.tasks} == prints
    lazy.tasks.shrink(0)
    assert {name: lazy.fingerprint(name) for name in lazy.tasks} == prints


def test_copies_read_from_the_same_files(folder: Path, tmp_path: Path) -> None:
    expected, model = known(build()), load(folder)
    clone = copy.deepcopy(model)
    assert in_memory(clone) == ["t5"]
    model.set_task("t1")
    train(model)
    assert known(clone) == expected
    buffer = io.BytesIO(pickle.dumps(load(folder)))  # self-contained
    shutil.rmtree(folder)
    assert known(pickle.load(buffer)) == expected


def test_state_dict_goes_into_a_model_with_tasks_in_files(folder: Path) -> None:
    model = build()
    for name in ("t0", "t3"):
        model.set_task(name)
        train(model, 5)
    lazy = load(folder)
    assert lazy.load_state_dict(model.state_dict()).missing_keys == []
    assert known(lazy) == known(model)


# ---------------------------------------------------------------------------------------------------------
# Leaving memory


def test_least_recently_used_tasks_leave_memory(folder: Path) -> None:
    model, expected = load(folder), known(build())
    size = model.cost().tasks[0].bytes
    assert size == sum(t.nbytes for t in model.tasks["t0"].tensors().values())
    assert len(in_memory(model)) == 6  # far below the bound
    model.tasks.memory = 3 * size
    gc.disable()  # no cycle holds a task
    try:
        for name in ("t1", "t2", "t3"):
            model.tasks[name]
        model.tasks.shrink()
        assert in_memory(model) == ["t1", "t2", "t3", "t5"][1:] or in_memory(model) == ["t2", "t3", "t5"]
        for name in ("t0", "t2", "t4"):
            model.tasks[name]
        assert in_memory(model) == ["t2", "t4", "t5"]
    finally:
        gc.enable()
    for _ in range(3):
        assert known(model) == expected
        assert len(in_memory(model)) <= 4


def test_changed_tasks_stay(folder: Path) -> None:
    """However they were changed: torch does not count the writes of BatchNorm, nor those to `.data`."""
    for change in (
        lambda m: train(m),
        lambda m: m.train()(torch.randn(4, 1, 4, 4)),
        lambda m: m.tasks["t1"].get("conv.f").data.add_(1),
        lambda m: m.tasks["t1"].get("conv.f").detach().numpy().__setitem__(0, 5),
        lambda m: m.tasks["t1"].about.update(accuracy=1),
        lambda m: m.tasks["t1"].about.update(wrong=object()),
        lambda m: m(X).sum().backward(),
    ):
        model = load(folder)
        model.set_task("t1")
        change(model)
        task = model.tasks["t1"]
        had = {key: t.clone() for key, t in task.tensors().items()}
        model.set_task("t2")
        model.eval()
        del task
        model.tasks.shrink(0)
        for name in ("t1", "t3"):
            model.tasks[name]
        model.tasks.shrink(0)
        assert "t1" in in_memory(model) or not had.keys() ^ model.tasks["t1"].tensors().keys()
        found = model.tasks["t1"].tensors()
        assert all(torch.equal(found[key], had[key]) for key in had)


def test_saved_tasks_can_leave_memory(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    model.add_task("new", 2)
    train(model)
    expected = known(model)
    model.set_task("t0")
    model.tasks.shrink(0)
    assert in_memory(model) == ["t0", "new"]
    model.save(tmp_path / "other")
    model.tasks.shrink(0)
    assert in_memory(model) == ["t0"]
    shutil.rmtree(folder)
    assert known(model) == expected
    made = build()  # by hand, without a folder
    made.save(tmp_path / "made")
    made.tasks.shrink(0)
    assert in_memory(made) == ["t5"]


def test_tensors_that_are_held_elsewhere_stay_the_tasks_own(folder: Path) -> None:
    """An optimiser, a reference to the task, one to a single parameter: what is written to them reaches the task."""
    model = load(folder)
    model.set_task("t1")
    optimizer = torch.optim.SGD(model.task_parameters(), lr=0.5)
    held = model.tasks["t2"]
    statistic = model.tasks["t3"].get("bn.running_mean")
    model.set_task("t4")
    for _ in range(3):
        model.tasks.shrink(0)
    assert in_memory(model) == ["t1", "t2", "t3", "t4"]
    assert model.tasks["t2"] is held
    assert model.tasks["t3"].get("bn.running_mean") is statistic
    model.set_task("t1")
    before = model.fingerprint("t1")
    model.train()
    F.cross_entropy(model(X), torch.tensor([0, 1, 0, 1])).backward()
    optimizer.step()
    assert model.fingerprint("t1") != before
    del optimizer, held, statistic
    model.eval().set_task("t0")
    model.tasks.shrink(0)
    assert in_memory(model) == ["t0", "t1"]


# ---------------------------------------------------------------------------------------------------------
# The index


def test_adding_a_task_writes_its_file_and_a_line(folder: Path, lines: None) -> None:
    model = load(folder)
    for n in range(6, 9):
        before = state_of(folder)
        model.add_task(f"t{n}", 2)
        train(model, n)
        model.save(folder)
        after = state_of(folder)
        assert {name for name in before if after.get(name) != before[name]} <= {journal(folder).name}
        (new,) = {*after} - {*before} - {journal(folder).name}
        assert new.startswith(f"t{n}.")
        assert journal(folder).read_bytes().count(b"\n") == n - 5
    assert after[journal(folder).name][1] < 500
    assert known(load(folder)) == known(model)


def test_journal_is_folded_into_the_index_when_it_is_long(folder: Path, lines: None, tmp_path: Path) -> None:
    path = shutil.copy(read_about(folder).tasks["t0"], tmp_path / "task")

    def length() -> int:
        return sum(found.read_bytes().count(b"\n") for found in folder.glob("zoo.*.jsonl"))

    sizes = []
    for n in range(10):
        add_task_file(folder, path, name=f"copy {n}")
        sizes.append(length())
    for _ in range(20):
        add_task_file(folder, path, name="copy 0", replace=True)
        sizes.append(length())
    assert sizes == [*range(1, 17), 0, *range(1, 14)]  # never longer than the list of 16 tasks
    assert list(load(folder).tasks) == [*(f"t{n}" for n in range(6)), *(f"copy {n}" for n in range(10))]


def test_small_folders_have_no_journal(folder: Path) -> None:
    model = load(folder)
    model.add_task("new", 2)
    model.save(folder)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".lock", ".safetensors"}


@pytest.mark.parametrize("whole", [1, 5, 256])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life_in_one_folder(whole: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the folder, read anew, is the model."""
    monkeypatch.setattr(index_module, "WHOLE", whole)
    chance, count = random.Random(seed), 5
    model = build(5)
    model.save(tmp_path)
    done = set()
    for step in range(30):
        names = list(model.tasks)
        name = chance.choice(names)
        action = chance.choice(
            ["add", "remove", "train", "again", "about", "rename", "drop", "copy", "reload", "shrink"]
        )
        if action == "add":
            model.add_task(f"t{count}", 2, init=name)
        elif action == "remove" and len(names) > 2:
            model.remove_task(name)
        elif action == "train":
            model.set_task(name)
            train(model, step)
        elif action == "again" and len(names) > 2:  # in its old name, but last
            model.save_task(name, tmp_path / "again")
            model.remove_task(name)
            model.load_task(tmp_path / "again")
        elif action == "about":
            model.about["step"] = model.tasks[name].about["step"] = step
        elif action == "rename":
            rename_task(tmp_path, name, f"t{count}")
            assert model.follow().names == {name, f"t{count}"}
        elif action == "drop" and len(names) > 2:
            drop_task(tmp_path, name)
            assert model.follow().removed == (name,)
        elif action == "copy":
            add_task_file(tmp_path, read_about(tmp_path).tasks[name], name=f"t{count}")
            assert model.follow().added == (f"t{count}",)
        elif action == "reload":
            model = load(tmp_path)
        elif action == "shrink":
            model.tasks.shrink(0)
        done.add(action)
        count += 1
        if model.task is None:
            model.set_task(next(iter(model.tasks)))
        model.save(tmp_path)
        found = load(tmp_path)
        assert known(found) == known(model)
        assert (found.task, found.about) == (model.task, model.about)
        assert [t.about for t in found.tasks.values()] == [t.about for t in model.tasks.values()]
        if action != "rename":
            assert list(found.tasks) == list(model.tasks)
    assert len(done) >= 9


def test_every_flipped_bit_of_a_journal_is_found(folder: Path, lines: None) -> None:
    for n in range(3):
        add_task_file(folder, read_about(folder).tasks["t0"], name=f"copy {n}")
    good, expected, chance = journal(folder).read_bytes(), Index.read(folder).tasks, random.Random(0)
    for i in range(len(good)):
        for bit in chance.sample(range(8), 2):
            journal(folder).write_bytes(good[:i] + bytes([good[i] ^ 1 << bit]) + good[i + 1 :])
            with pytest.raises(rkr.FileError, match=re.escape(journal(folder).name)):
                Index.read(folder)
    journal(folder).write_bytes(good)
    assert Index.read(folder).tasks == expected


def test_unfinished_line_does_not_count_and_is_removed(folder: Path, lines: None) -> None:
    """What a kill in the middle of a write leaves."""
    path = read_about(folder).tasks["t0"]
    add_task_file(folder, path, name="first")
    start = journal(folder).stat().st_size
    add_task_file(folder, path, name="second")
    good = journal(folder).read_bytes()
    for cut in range(start, len(good)):
        journal(folder).write_bytes(good[:cut])
        assert list(Index.read(folder).tasks)[6:] == ["first"]
    journal(folder).write_bytes(good[:-5])
    reader = Index.read(folder)
    add_task_file(folder, path, name="third")
    assert list(reader.newer().tasks)[6:] == list(load(folder).tasks)[6:] == ["first", "third"]
    for tail in (b"\0" * 30, b"x"):  # what some file systems leave after a power failure
        journal(folder).write_bytes(good + tail)
        assert list(Index.read(folder).tasks)[6:] == ["first", "second"]
    journal(folder).write_bytes(good[start:])
    with pytest.raises(rkr.FileError, match="the checksum of line 1 does not match"):
        load(folder)


WRONG_CHANGES: list[Any] = [
    {"put": "x"},
    {"put": "", "file": "x.safetensors"},
    {"put": 5, "file": "x.safetensors"},
    {"put": "x", "file": "../x.safetensors"},
    {"put": "x", "file": "x"},
    {"put": "x", "file": 5},
    {"drop": "x"},
    {"drop": ["x"]},
    {"drop": "t0", "file": "x.safetensors"},
    {"rename": "x", "to": "y", "file": "x.safetensors"},
    {"rename": "t0", "to": "t1", "file": "x.safetensors"},
    {"current": "x"},
    {"current": {}},
    {"about": []},
    {"other": 1},
    {},
    5,
    "put",
    None,
]


@pytest.mark.parametrize("op", WRONG_CHANGES, ids=json.dumps)
def test_wrong_change_with_a_valid_checksum_is_refused(op: Any, folder: Path) -> None:
    text = json.dumps([op]).encode()
    index = Index.read(folder)
    index.journal.write_bytes(index_module._sum_of(text, 0) + b" " + text + b"\n")
    with pytest.raises(rkr.FileError, match=r"\.jsonl: line 1 is invalid"):
        Index.read(folder)


@pytest.mark.parametrize("text", ["5", "{", "null", "[" * 100_000])
def test_wrong_line_with_a_valid_checksum_is_refused(text: str, folder: Path) -> None:
    index = Index.read(folder)
    index.journal.write_bytes(index_module._sum_of(text.encode(), 0) + b" " + text.encode() + b"\n")
    with pytest.raises(rkr.FileError, match=r"\.jsonl: line 1 is invalid"):
        Index.read(folder)


def test_journal_of_another_index_is_ignored_and_removed(folder: Path, lines: None) -> None:
    add_task_file(folder, read_about(folder).tasks["t0"], name="copy")
    old = (folder / INDEX).read_bytes(), journal(folder).read_bytes(), journal(folder)
    model = load(folder)
    model.remove_task("t1")
    model.tasks.read_all()
    model.stored = None
    model.save(folder)
    old[2].write_bytes(old[1])  # as if it could not be removed
    assert "t1" not in Index.read(folder).tasks
    drop_task(folder, "copy")
    model = build()
    model.save(folder)  # what `old` was the journal of
    assert (folder / INDEX).read_bytes() == old[0]
    assert list(Index.read(folder).tasks) == list(model.tasks)


def test_failed_append_leaves_the_old_state(folder: Path, lines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = read_about(folder).tasks["t0"]
    add_task_file(folder, path, name="first")
    good, real = journal(folder).read_bytes(), os.fsync

    def fail(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".jsonl"):
            raise OSError(28, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(rkr.FileError, match=r"jsonl: cannot be written: No space left on device"):
        add_task_file(folder, path, name="second")
    assert journal(folder).read_bytes() == good
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "WHOLE", 1)
    add_task_file(folder, path, name="third")
    assert list(load(folder).tasks)[6:] == ["first", "third"]


# ---------------------------------------------------------------------------------------------------------
# Several processes


def stats(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records calls of the operating system."""
    calls: list[Any] = []
    for place, name in ((os, "stat"), (os, "open"), (io, "open"), (builtins, "open"), (os, "scandir")):
        real = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *a, real=real, name=name, **k: (calls.append((name, a)), real(*a, **k))[1]
        )
    return calls


@pytest.mark.parametrize("whole", [1, 256])
def test_follow(whole: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "WHOLE", whole)
    model, other = load(folder), load(folder)
    known(model)
    assert not model.follow()
    with pytest.MonkeyPatch.context() as patch:
        calls = stats(patch)
        assert not model.follow()
    assert [name for name, _ in calls] == ["stat", "stat"]
    other.add_task("new", 2)
    train(other)
    other.remove_task("t1")
    other.set_task("t2")
    train(other, 7)
    other.about["x"] = 1
    other.save(folder)
    changes = model.follow()
    assert (changes.added, changes.replaced, changes.removed) == (("new",), ("t2",), ("t1",))
    assert known(model) == known(other)
    assert (model.task, model.about) == ("t5", {"x": 1})
    assert not model.follow()
    rename_task(folder, "t5", "five")
    assert (model.follow(), model.task) == (index_module.Changes(("five",), (), ("t5",)), None)
    model.set_task("t3")
    other.follow()
    other.set_task("t3")
    train(other, 8)
    other.save(folder)
    assert model.follow().replaced == ("t3",)
    assert (model.task, answer(model, "t3")) == ("t3", answer(other, "t3"))
    assert model.active.task is model.tasks["t3"]


def test_follow_keeps_what_was_trained_here(folder: Path) -> None:
    model, other = load(folder), load(folder)
    model.set_task("t0")
    train(model)
    model.add_task("mine", 2)
    mine = model.fingerprint("t0")
    other.set_task("t1")
    train(other)
    other.save(folder)
    assert model.follow().replaced == ("t1",)
    assert model.fingerprint("t0") == mine
    model.save(folder)
    assert load(folder).fingerprint("t0") == mine
    model.set_task("t2")
    train(model)
    drop_task(folder, "t2")
    clash(model, "t2")
    model.add_task("yours", 2)
    rename_task(folder, "t3", "yours")
    clash(model, "yours")


def clash(model: rkr.RectifiedModel, name: str) -> None:
    """Two have changed a task: nothing is taken over until this one is given up here."""
    before = known(model)
    with pytest.raises(rkr.FileError, match=f"has changed the task '{name}', and so has this model"):
        model.follow()
    assert known(model) == before
    model.remove_task(name)
    assert model.follow()
    assert set(model.tasks) == set(read_about(model.stored.index.folder).tasks)


def test_save_refuses_to_undo_the_work_of_another_process(folder: Path, tmp_path: Path) -> None:
    model, other = load(folder), load(folder)
    other.add_task("new", 2)
    other.save(folder)
    before = state_of(folder)
    model.set_task("t0")
    train(model)
    with pytest.raises(rkr.FileError, match=r"another process has changed it \(task 'new'\) since this model read it"):
        model.save(folder)
    assert state_of(folder) == before
    model.save(tmp_path / "elsewhere")
    assert known(load(tmp_path / "elsewhere")) == known(model)
    model = load(folder)
    other.set_task("t0")
    train(other)
    other.save(folder)
    model.follow()
    model.save(folder)
    assert known(load(folder)) == known(other)


def test_folder_with_another_base_cannot_be_followed(folder: Path) -> None:
    model = load(folder)
    torch.manual_seed(5)
    other = rkr.rectify(Tiny(), head="fc")
    other.add_task("t0", 2, train_base=False)
    other.save(folder)
    with pytest.raises(rkr.FileError, match="holds another base or other options now"):
        model.follow()
    with pytest.raises(rkr.FileError, match="another process has changed it"):
        model.save(folder)
    with pytest.raises(rkr.UsageError, match="no folder to follow"):
        build(1).follow()


def test_task_that_another_process_replaced_or_removed(folder: Path) -> None:
    """Before this one has read it, and without a call of `follow`."""
    model, other = load(folder), load(folder)
    other.set_task("t1")
    train(other)
    other.remove_task("t2")
    other.save(folder)
    assert model.fingerprint("t1") == other.fingerprint("t1")
    with pytest.raises(rkr.FileError, match=r"another process has removed the task 't2': model\.follow"):
        model.set_task("t2")
    assert model.follow().removed == ("t2",)
    assert known(model) == known(other)


ADD = """
import os, sys
from rkr.core import add_task_file, index
for whole, folder in zip((1, 256), sys.argv[2:]):
    index.WHOLE = whole
    for side in ("left", "right"):
        if os.fork() == 0:
            for n in range(25):
                add_task_file(folder, sys.argv[1], name=f"{side} {n}")
            os._exit(0)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]
"""


def test_two_processes_add_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    """To a folder whose journal is folded at once, and to one where that comes later."""
    shutil.copy(read_about(folder).tasks["t0"], tmp_path / "task")
    later = shutil.copytree(folder, tmp_path / "later")
    seen = {path: Index.read(path) for path in (folder, later)}
    words = [sys.executable, "-c", ADD, str(tmp_path / "task"), *map(str, seen)]
    with subprocess.Popen(words) as process:
        while process.poll() is None:
            for path, index in seen.items():
                seen[path] = index.newer()
                assert len(seen[path].tasks) >= len(index.tasks)
            time.sleep(0.002)
    assert process.returncode == 0
    expected = known(build())["t0"][1]
    for path in seen:
        model = load(path)
        names = list(model.tasks)
        for side in ("left", "right"):
            assert [name for name in names if name.startswith(side)] == [f"{side} {n}" for n in range(25)]
        assert len(names) == 56
        assert {answer(model, name) for name in names[6:]} == {expected}


def test_second_writer_waits_and_then_gives_up(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    model.add_task("new", 2)
    monkeypatch.setattr(index_module, "LOCK_SECONDS", 0.05)
    path, before = read_about(folder).tasks["t0"], state_of(folder)
    with FileLock(folder / LOCK):
        for write in (
            lambda: model.save(folder),
            lambda: add_task_file(folder, path, name="x"),
            lambda: drop_task(folder, "t0"),
            lambda: rename_task(folder, "t0", "x"),
        ):
            with pytest.raises(rkr.FileError, match="another process is writing to it: try again"):
                write()
        assert known(load(folder)) == known(build())  # readers need no lock
    assert state_of(folder) == before
    model.save(folder)
    assert "new" in load(folder).tasks


# ---------------------------------------------------------------------------------------------------------
# Folders without a network


def test_tasks_of_a_folder_are_added_renamed_and_dropped(folder: Path, tmp_path: Path) -> None:
    expected, model = known(build()), build()
    model.tasks["t1"].about = {"accuracy": 0.5}
    model.save_task("t1", tmp_path / "file")
    add_task_file(folder, tmp_path / "file", name="copy")
    add_task_file(folder, tmp_path / "file", replace=True)
    rename_task(folder, "t2", "zwei")
    rename_task(folder, "t5", "last")
    drop_task(folder, "t3")
    loaded = load(folder)
    assert list(loaded.tasks) == ["t0", "t1", "zwei", "t4", "last", "copy"]
    assert loaded.task == "last"
    found = known(loaded)
    for new, old in (("t0", "t0"), ("t1", "t1"), ("zwei", "t2"), ("t4", "t4"), ("last", "t5"), ("copy", "t1")):
        assert found[new] == expected[old]
    assert loaded.tasks["copy"].about == loaded.tasks["t1"].about == {"accuracy": 0.5}
    assert len(list(folder.glob("t3.*"))) == len(list(folder.glob("t2.*"))) == 0
    assert len(list(folder.iterdir())) == 6 + 3


def test_what_does_not_belong_to_a_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    before, path = state_of(folder), read_about(folder).tasks["t0"]
    torch.manual_seed(9)
    other = rkr.rectify(Tiny(), head="fc")
    other.add_task("x", 2, train_base=False)
    other.save_task("x", tmp_path / "other base")
    data = path.read_bytes()
    (tmp_path / "damaged").write_bytes(data[:-1] + b"?")
    build(1, layout="reshape").save_task("t0", tmp_path / "layout")
    unfrozen = rkr.rectify(Tiny(), head="fc")
    unfrozen.add_task("x", 2)
    unfrozen.save(tmp_path / "unfrozen")
    for action, message in (
        (lambda: add_task_file(folder, tmp_path / "other base"), "belongs to another base network"),
        (lambda: add_task_file(folder, tmp_path / "damaged"), "damaged"),
        (lambda: add_task_file(folder, tmp_path / "none"), "cannot be read"),
        (lambda: add_task_file(folder, path), "has a task named 't0' already"),
        (lambda: add_task_file(folder, path, name=""), "must be text"),
        (lambda: rename_task(folder, "t0", "t1"), "has a task named 't1' already"),
        (lambda: rename_task(folder, "x", "y"), "has no task named 'x'; tasks: 't0'"),
        (lambda: drop_task(folder, "x"), "has no task named 'x'; tasks: 't0'"),
        (lambda: drop_task(tmp_path / "nowhere", "x"), "not a saved model"),
        (lambda: drop_task(tmp_path / "unfrozen", "x"), "still being trained with its first task"),
    ):
        with pytest.raises(rkr.RkrError, match=message):
            action()
    assert {k: v for k, v in state_of(folder).items() if k != LOCK} == {k: v for k, v in before.items() if k != LOCK}
    assert not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------------------------------------------------
# Ten thousand


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """10,000 tasks: 20 files of their own, the others are links to one of them (whose task has another name)."""
    folder = tmp_path_factory.mktemp("many") / "zoo"
    build(20).save(folder)
    index = Index.read(folder)
    source, tasks = folder / index.tasks["t0"], dict(index.tasks)
    for n in range(20, 10_000):
        tasks[f"t{n}"] = f"t{n}.{n:016x}.safetensors"
        os.link(source, folder / tasks[f"t{n}"])
    index_module.write_index(folder, index.fields, tasks)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
def test_ten_thousand_tasks(ten_thousand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read, written and kept does not depend on the number of tasks, the index excepted."""
    folder = ten_thousand
    with pytest.MonkeyPatch.context() as patch:
        calls = stats(patch)
        model = load(folder)
        opened = [Path(a[0]).name.partition(".")[0] for name, a in calls if name == "open" and str(folder) in str(a[0])]
    assert sorted(opened) == ["base", "t19", "zoo"]
    assert len(model.tasks) == 10_000
    assert in_memory(model) == ["t19"]
    expected = known(build(20))
    for name in (f"t{n}" for n in range(20)):
        assert (model.fingerprint(name), answer(model, name)) == expected[name]
    with pytest.raises(rkr.FileError, match="contains the task 't0', not 't9999'"):
        model.set_task("t9999")
    before = state_of(folder)
    model.add_task("new", 2, init="t3")
    with pytest.MonkeyPatch.context() as patch:
        calls = stats(patch)
        model.save(folder)
        touched = {Path(a[0]).name for name, a in calls if name != "stat" and str(folder) in str(a[0])}
    after = state_of(folder)
    line = journal(folder)
    assert {*after} - {*before} == {line.name, *(name for name in after if name.startswith("new."))}
    assert all(after[name] == before[name] for name in before)
    assert line.stat().st_size < 300
    assert len(touched) <= 30  # the new file, the journal, the base, the lock, and the tasks in memory
    assert load(folder).fingerprint("new") == model.fingerprint("new")
    with pytest.MonkeyPatch.context() as patch:
        calls = stats(patch)
        assert not model.follow()
        assert len(calls) == 2
        add_task_file(folder, folder / Index.read(folder).tasks["t1"], name="newer")
        calls.clear()
        assert model.follow().added == ("newer",)
        assert len(calls) <= 6
    drop_task(folder, "newer")
    drop_task(folder, "new")


def test_files_module_reads_what_it_says() -> None:
    assert files.TASK.version == 1
    assert index_module.ZOO.version == 2

"""Free information beside the tensors: it comes back as it was, has no part in fingerprints, and is read alone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rkr
from rkr.core import files, read_about, read_task_about
from rkr.core.about import LIMIT
from rkr.core.index import INDEX, encode_index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.hidden(x)))


MODEL = {"backbone": {"name": "my_package:build", "arguments": {"width": 2}}, "mean": [0.5, 0.1 + 0.2], "größe": None}
TASK = {
    "pictures": 812,
    "accuracy": 0.9375,
    "settings": {"epochs": 10, "flip": True},
    "names": ["ä", "\n"],
    "big": 2**80,
}


def build() -> rkr.RectifiedModel:
    torch.manual_seed(0)
    model = rkr.rectify(Net(), head="fc")
    model.add_task("birds", ["wren", "öland goose"], train_base=False)
    model.add_task("numbers", 4)
    return model


def test_it_is_empty_at_first(tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Net())
    assert model.about == loaded.about == loaded.tasks["birds"].about == loaded.tasks["numbers"].about == {}


def test_it_comes_back_and_fingerprints_do_not_cover_it(tmp_path: Path) -> None:
    model = build()
    before = {name: model.fingerprint(name) for name in model.tasks}
    model.about = MODEL
    model.tasks["birds"].about.update(TASK)
    assert {name: model.fingerprint(name) for name in model.tasks} == before
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Net())
    assert loaded.about == MODEL
    assert loaded.tasks["birds"].about == TASK
    assert loaded.tasks["numbers"].about == {}
    assert {name: loaded.fingerprint(name) for name in loaded.tasks} == before
    loaded.tasks["birds"].about["pictures"] = 5
    loaded.about["more"] = [1]
    loaded.save(tmp_path)
    again = rkr.load(tmp_path, Net())
    assert (again.about, again.tasks["birds"].about) == ({**MODEL, "more": [1]}, {**TASK, "pictures": 5})


def test_it_travels_with_a_task_file(tmp_path: Path) -> None:
    model = build()
    model.tasks["birds"].about = TASK
    model.save_task("birds", tmp_path / "birds")
    other = build()
    other.remove_task("birds")
    assert other.load_task(tmp_path / "birds").about == TASK
    assert model.add_task("next", 2, init="birds").about == {}  # says how that task came to be, and no other


def test_folder_and_file_are_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    model.about = MODEL
    model.tasks["birds"].about = TASK
    model.save(tmp_path)
    monkeypatch.setattr(files, "decode_tensors", None)  # no tensor is read
    found = read_about(tmp_path)
    assert found.about == MODEL
    assert found.base == files.base_fingerprint(model)
    assert (found.head, found.current, found.options) == ("fc", "numbers", model.options)
    assert list(found.tasks) == ["birds", "numbers"]
    task = read_task_about(found.tasks["birds"])
    assert (task.name, task.about, task.base) == ("birds", TASK, found.base)
    assert (task.classes, task.class_names) == (2, ("wren", "öland goose"))
    assert (task.rank, task.layout, task.bytes) == (2, "axes", os.path.getsize(found.tasks["birds"]))
    assert read_task_about(found.tasks["numbers"]).class_names is None


def test_reading_a_file_that_is_no_task_is_refused(tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    task = read_about(tmp_path).tasks["birds"]
    data = task.read_bytes()
    for bad in (b"", data[:7], data[:100], data[:-1], b"{}" * 50, (2**62).to_bytes(8, "little") + data[8:]):
        task.write_bytes(bad)
        with pytest.raises(rkr.FileError, match="incomplete or damaged"):
            read_task_about(task)
    base = next(tmp_path.glob("base.*"))
    with pytest.raises(rkr.FileError, match="its format is 'rkr-base', not 'rkr-task'"):
        read_task_about(base)
    base.unlink()
    with pytest.raises(rkr.FileError, match=r"base\..*cannot be read"):
        read_about(tmp_path)


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
WRONG: list[tuple[Any, str]] = [
    ([1], "must be a dictionary, not list"),
    (None, "must be a dictionary, not NoneType"),
    ({1: 2}, "about of {} has the key 1: keys must be text"),
    ({"a": {2.0: 3}}, r"about['a'] of {} has the key 2.0"),
    ({"a": [0, (1, 2)]}, "about['a'][1] of {} is a tuple"),
    ({"a": {"b": torch.zeros(2)}}, "about['a']['b'] of {} is a Tensor"),
    ({"a": Path("x")}, "only dictionaries, lists, text, numbers"),
    ({"a": float("nan")}, "is nan, which JSON does not have"),
    ({"a": -float("inf")}, "is -inf, which JSON does not have"),
    ({"a": CYCLE}, "nested more than 50 deep"),
    ({"a": "x" * LIMIT}, f"takes {LIMIT + 9:,} bytes, but 1,000,000 is the limit"),
    ({"a": ["ü"] * 120_000}, "is the limit"),
    ({"a": 10**5000}, "cannot be written as JSON"),
]


@pytest.mark.parametrize(("about", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_is_not_json_or_too_large_is_refused(about: Any, message: str, tmp_path: Path) -> None:
    """Before anything is written."""
    model = build()
    model.save(tmp_path / "zoo")
    before = {path.name: path.read_bytes() for path in (tmp_path / "zoo").iterdir()}
    model.about = about
    with pytest.raises(rkr.UsageError) as error:
        model.save(tmp_path / "zoo")
    assert message.format("the model") in str(error.value)
    model.about, model.tasks["birds"].about = {}, about
    for save in (lambda: model.save(tmp_path / "zoo"), lambda: model.save_task("birds", tmp_path / "birds")):
        with pytest.raises(rkr.UsageError) as error:
            save()
        assert message.format("task 'birds'") in str(error.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "zoo").iterdir()} == before
    assert not (tmp_path / "birds").exists()


def test_just_below_the_limit(tmp_path: Path) -> None:
    model = build()
    model.about = {"a": "x" * (LIMIT - 9)}
    model.save(tmp_path)
    assert rkr.load(tmp_path, Net()).about == model.about


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"a": NaN}', "[" * 100_000, '{"a": "' + "x" * LIMIT + '"}'])
def test_wrong_text_in_a_task_file_is_refused(text: str, tmp_path: Path) -> None:
    model = build()
    model.save_task("birds", tmp_path / "birds")
    meta, tensors = files.decode(tmp_path / "birds", files.TASK)
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    (tmp_path / "birds").write_bytes(files.encode(tensors, {**rest, "about": text}))
    for read in (model.load_task, read_task_about):
        with pytest.raises(rkr.FileError, match="'about' is invalid"):
            read(tmp_path / "birds")


def test_files_of_the_previous_version_are_read(tmp_path: Path) -> None:
    """Version 1 of the index, and task files without the field."""
    model = build()
    model.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["version"] == "2"
    old = {key: value for key, value in index.items() if key not in ("about", "sha256")}
    (tmp_path / INDEX).write_bytes(encode_index({**old, "version": "1"}))
    task = tmp_path / index["tasks"][0]["file"]
    meta, tensors = files.decode(task, files.TASK)
    task.write_bytes(files.encode(tensors, {k: v for k, v in meta.items() if k not in ("crc32", "about")}))
    loaded = rkr.load(tmp_path, Net())
    assert loaded.about == loaded.tasks["birds"].about == {}
    assert read_about(tmp_path).about == read_task_about(task).about == {}
    assert loaded.fingerprint("birds") == model.fingerprint("birds")

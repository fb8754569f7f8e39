"""Files of older versions are read with the same bits, and files of newer or unknown versions are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rkr
from rkr.core import files
from rkr.core.index import encode_index
from rkr.data.features.parts import Parts
from rkr.errors import FileError
from rkr.experiment import state
from rkr.experiment.folder import RunFolder
from rkr.experiment.results import read_result
from rkr.experiment.state import load_state
from rkr.methods.learner_file import LEARNER
from rkr.versions import Format

OLD = Path(__file__).parent / "data" / "a2c0570"
EXPECTED = json.loads((OLD / "expected.json").read_text("utf-8"))
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old files, with the images and the recipe that the runs were made from."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    make.write_images(tmp_path / "images")
    (tmp_path / "tiny.toml").write_text(make.RECIPE)
    for path in tmp_path.rglob("run.json"):  # the only path in it
        record = json.loads(path.read_text())
        record["settings"]["stream"]["options"]["path"] = str((tmp_path / "images").resolve())
        path.write_text(json.dumps(record))
    return tmp_path


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def same(found: Tensor, stored: Tensor) -> bool:
    return found.dtype == stored.dtype and torch.equal(found, stored)


def test_the_stored_files_are_untouched() -> None:
    assert len(EXPECTED["tensors"]) == len(list(OLD.rglob("*.safetensors")))
    for name, sums in EXPECTED["tensors"].items():
        assert make.sums(OLD / name) == sums, name


@pytest.mark.parametrize("name", make.ZOOS)
def test_model_folder(name: str) -> None:
    model = rkr.load(OLD / name, make.Network()).eval()
    assert {task: model.fingerprint(task) for task in model.tasks} == EXPECTED["fingerprints"][name]
    assert model.tasks["zweite Übung"].class_names == ("cat", "dög")
    assert model.about == model.tasks["first"].about == {}
    index = json.loads((OLD / name / "zoo.json").read_text())
    for entry in index["tasks"]:
        stored = load_file(OLD / name / entry["file"])
        found = model.tensors.task_state(model.tasks[entry["name"]])
        assert set(found) == set(stored)
        assert all(same(found[key], stored[key]) for key in stored)
    base, network = load_file(OLD / name / index["base"]), model.network.state_dict()
    assert set(network) == set(base)
    assert all(same(network[key], base[key]) for key in base)
    answers = load_file(OLD / "answers.safetensors")
    for task in model.tasks:
        model.set_task(task)
        with torch.no_grad():
            found_answer = model(answers["x"])
        torch.testing.assert_close(found_answer, answers[f"{name}: {task}"], rtol=1e-5, atol=1e-6)


def plain(task: str) -> torch.nn.Module:
    """The network with a task's weights by equations 1 to 5 of the paper, from the tensors in the files of `zoo`."""
    index = json.loads((OLD / "zoo" / "zoo.json").read_text())
    own = load_file(OLD / "zoo" / next(entry["file"] for entry in index["tasks"] if entry["name"] == task))
    weights = load_file(OLD / "zoo" / index["base"])
    for key in [key for key in own if key.endswith(".lm")]:
        layer = key.removesuffix(".lm")
        packed = f"{layer}.in_proj_weight" in weights
        names = ("in_proj_weight", "in_proj_bias") if packed else ("weight", "bias")
        weight, bias = (f"{layer}.{name}" for name in names)
        product = own[key] @ own[f"{layer}.rm"]  # (W·C_in, H·C_out), or (H_in, H_out)
        if weights[weight].dim() == 4:
            o, i, h, w = weights[weight].shape
            product = product.view(w, i, h, o).permute(3, 1, 2, 0)
        else:
            product = product.t()
        scale = own.get(f"{layer}.f", torch.ones(len(weights[weight])))
        weights[weight] = (weights[weight] + product) * scale.view(-1, *[1] * (product.dim() - 1))
        weights[bias] = weights[bias] * scale
    weights |= {key: value for key, value in own.items() if key in weights}
    weights |= {f"fc.{name}": own[f"head.{name}"] for name in ("weight", "bias")}
    network = make.Network()
    network.fc = torch.nn.Linear(*reversed(own["head.weight"].shape))
    network.load_state_dict(weights)
    return network.eval()


@pytest.mark.parametrize("task", make.TASKS)
def test_answers_follow_from_the_tensors(task: str) -> None:
    model = rkr.load(OLD / "zoo", make.Network()).eval()
    model.set_task(task)
    x = load_file(OLD / "answers.safetensors")["x"]
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(task)(x), rtol=1e-5, atol=1e-6)


def test_task_file() -> None:
    model = rkr.load(OLD / "zoo", make.Network())
    model.remove_task("zweite Übung")
    model.load_task(OLD / "task.safetensors")
    assert model.fingerprint("zweite Übung") == EXPECTED["fingerprints"]["zoo"]["zweite Übung"]


@pytest.mark.parametrize("method", ["rkr", "ewc", "apd"])
def test_finished_run(method: str) -> None:
    folder = OLD / "runs" / "tiny" / method / "fixed"
    result = read_result(folder)
    assert result.finished
    learner = rkr.load_learner(folder)
    assert [task.name for task in learner.seen] == list(result.tasks)
    if method == "ewc":
        stored, found = load_file(folder / "model" / "learner.safetensors"), learner.state_dict()
        assert set(found) == set(stored)
        assert all(same(found[key], stored[key]) for key in stored)


def test_report(command: Command, old: Path) -> None:
    code, out, err = command("report", str(old / "runs"), "--out", str(old / "report"))
    assert code == 0, err
    assert "index.html: 3 runs" in out


@pytest.mark.parametrize("method", ["rkr", "ewc"])
def test_stopped_run_is_resumed(method: str, command: Command, old: Path) -> None:
    folder, whole = (old / kind / "tiny" / method / "fixed" for kind in ("stopped", "runs"))
    stored = load_file(folder / "state.safetensors")
    found = tensors_in(load_state(folder / "state.safetensors"))
    assert len(found) == len(stored)
    assert all(same(tensor, stored[str(number)]) for number, tensor in enumerate(found))
    before = (folder / "results.jsonl").read_bytes()
    options = ("--threads", "1", "--accelerator", "cpu", "--no-figures", "--out", str(old / "stopped"))
    code, _, err = command("run", str(old / "tiny.toml"), "--method", method, *options)
    assert code == 0, err
    assert (folder / "results.jsonl").read_bytes().startswith(before)
    resumed, finished = read_result(folder), read_result(whole)
    assert resumed.finished
    assert [e[:4] for e in resumed.epochs] == [e[:4] for e in finished.epochs]
    assert [e.loss for e in resumed.epochs] == pytest.approx([e.loss for e in finished.epochs], rel=1e-3)


def test_interrupted_features(old: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old)
    monkeypatch.syspath_prepend(old)
    (old / "pixels.py").write_text(make.PIXELS)
    settings = old / "features.mat.part" / "settings.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "torch": str(torch.__version__)}))
    code, out, err = command(*make.FEATURES)
    assert code == 0, err
    assert "resuming after 8 of 32 images" in out + err
    assert hashlib.sha256((old / "features.mat").read_bytes()).hexdigest() == EXPECTED["features"]


# ---------------------------------------------------------------------------------------------------------
# Versions


def restated(path: Path, version: Any) -> None:
    """Let a file state another version."""
    if path.name == "zoo.json":
        path.write_bytes(encode_index({**json.loads(path.read_text()), "version": version}))
    elif path.suffix == ".json":
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    else:
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        kind = LEARNER.name if path.name == "learner.safetensors" else header["__metadata__"]["format"]
        header["__metadata__"] = {**header.get("__metadata__", {}), "format": kind, "version": str(version)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def base_of(folder: Path) -> Path:
    return folder / json.loads((folder / "zoo.json").read_text())["base"]


FORMATS: dict[str, tuple[str, Callable[[Path], Path], Callable[[Path], Any]]] = {
    "rkr-task": (
        "1",
        lambda old: old / "task.safetensors",
        lambda old: rkr.load(old / "zoo", make.Network()).load_task(old / "task.safetensors"),
    ),
    "rkr-base": ("1", lambda old: base_of(old / "zoo"), lambda old: rkr.load(old / "zoo", make.Network())),
    "rkr-zoo": ("2", lambda old: old / "zoo" / "zoo.json", lambda old: rkr.load(old / "zoo", make.Network())),
    "rkr-state": (
        "1",
        lambda old: old / "stopped/tiny/rkr/fixed/state.safetensors",
        lambda old: RunFolder(old / "stopped/tiny/rkr/fixed").resume(),
    ),
    "rkr-results": (
        "3",
        lambda old: old / "runs/tiny/rkr/fixed/run.json",
        lambda old: read_result(old / "runs/tiny/rkr/fixed"),
    ),
    "rkr-learner": (
        "2",
        lambda old: old / "runs/tiny/ewc/fixed/model/learner.safetensors",
        lambda old: rkr.load_learner(old / "runs/tiny/ewc/fixed"),
    ),
    "rkr-features": (
        "1",
        lambda old: next((old / "features.mat.part").glob("*.safetensors")),
        lambda old: Parts(old / "features.mat").load(
            next((old / "features.mat.part").glob("*.safetensors")).stem, 8, 12
        ),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_newer_version_is_refused(name: str, old: Path) -> None:
    current, path_of, read = FORMATS[name]
    path, newer = path_of(old), int(current) + 1
    read(old)
    restated(path, newer if name == "rkr-results" else str(newer))
    with pytest.raises(FileError) as error:
        read(old)
    reads = "version 1" if current == "1" else f"versions 1 to {current}"
    expected = f"{path}: format version {newer} of {name}, but this version of rkr reads {reads}: upgrade rkr"
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("version", ["0", "", "one", "1.0", "-1", "01", "9" * 5000])
@pytest.mark.parametrize("name", FORMATS)
def test_unknown_version_is_refused(name: str, version: str, old: Path) -> None:
    _, path_of, read = FORMATS[name]
    restated(path_of(old), version)
    with pytest.raises(FileError, match=r"is unknown; this version of rkr reads") as error:
        read(old)
    assert str(path_of(old)) in str(error.value)


def test_resuming_refuses_newer_settings_and_parts(old: Path) -> None:
    for path, begin in (
        (old / "stopped/tiny/rkr/fixed/run.json", lambda: RunFolder(old / "stopped/tiny/rkr/fixed").begin({}, "", {})),
        (old / "features.mat.part/settings.json", lambda: Parts(old / "features.mat").begin({})),
    ):
        restated(path, 4)
        with pytest.raises(FileError, match=r"format version 4 of .* upgrade rkr"):
            begin()


def test_versions_are_upgraded_step_by_step() -> None:
    format_ = Format("rkr-test", 3, {1: lambda content: [*content, "to 2"], 2: lambda content: [*content, "to 3"]})
    assert format_.upgraded("file", "1", []) == ["to 2", "to 3"]
    assert format_.upgraded("file", 2, []) == ["to 3"]
    assert format_.upgraded("file", 3, []) == []
    for version in (None, True, 1.0, [1], 0):
        with pytest.raises(FileError, match=r"^file: format version .* is unknown"):
            format_.upgraded("file", version, [])


def test_a_new_version_of_one_format_leaves_the_others_readable(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(content: Any) -> Any:
        meta, tensors = content
        return {**meta, "task": "renamed"}, tensors

    model = rkr.load(old / "zoo", make.Network())
    monkeypatch.setattr(files, "TASK", Format("rkr-task", 2, {1: renamed}))
    assert model.load_task(old / "task.safetensors").name == "renamed"
    assert load_state(old / "stopped/tiny/rkr/fixed/state.safetensors")["begun"] == 2
    monkeypatch.setattr(state, "STATE", Format("rkr-state", 2))
    with pytest.raises(FileError, match="is unknown"):
        load_state(old / "stopped/tiny/rkr/fixed/state.safetensors")
    assert model.load_task(old / "task.safetensors").name == "renamed"

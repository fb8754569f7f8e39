"""Files: what is saved comes back bit for bit, what is wrong is refused, no kill or full disk harms what is there."""

import builtins
import contextlib
import errno
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr
from rkr.core import files
from rkr.core import index as index_module
from rkr.core import zoo as zoo_module
from rkr.core.index import INDEX, LOCK, encode_index
from rkr.networks import resnet18

FINGERPRINT = re.compile(r"[0-9a-f]{64}")
KINDS = {kind.name: kind for kind in (files.TASK, zoo_module.BASE)}


# ---------------------------------------------------------------------------------------------------------
# Networks and helpers


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(self.conv1(x)))


class Small(nn.Module):
    """Every kind of layer once, with a nested path."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Block(4, 6))
        self.norm = nn.LayerNorm(6)
        self.fc1 = nn.Linear(6, 7)
        self.fc = nn.Linear(7, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.layer1(F.relu(self.bn1(self.conv1(x))))  # (B, 6, 3, 3)
        return F.relu(self.fc1(self.norm(x.mean(dim=(2, 3)))))  # (B, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x))


class Headless(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class Tiny(nn.Module):
    """So small that every byte of its files can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.bn = nn.BatchNorm2d(2)
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.conv(x)).mean(dim=(2, 3)))


def train(model: rkr.RectifiedModel, seed: int = 0, optimizer: Any = None, steps: int = 2, clip: float = 0) -> Any:
    """A few steps on the task in use; returns the optimiser."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer or torch.optim.SGD(model.task_parameters(), lr=0.1, momentum=0.9)
    task = model.tasks[model.task]
    dtype = next(model.network.parameters()).dtype
    model.train()
    for _ in range(steps):
        x = torch.randn(8, 1, 6, 6, generator=generator).to(dtype)
        output = model(x)
        if task.classes is None:
            loss = output.square().mean()
        else:
            loss = F.cross_entropy(output, torch.randint(task.classes, (8,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.task_parameters(), clip)
        optimizer.step()
    return optimizer


def build(
    network: Callable[[], nn.Module] = Small,
    tasks: Mapping[str, Any] | None = None,
    seed: int = 0,
    head: str | None = "fc",
    **options: Any,
) -> rkr.RectifiedModel:
    """A model whose tasks, by default "a" with three and "b" with two named classes, are trained a little."""
    torch.manual_seed(seed)
    model = rkr.rectify(network(), head=head, **options)
    for i, (name, classes) in enumerate(({"a": 3, "b": ["cat", "dög"]} if tasks is None else tasks).items()):
        model.add_task(name, classes)
        train(model, seed + i)
    return model


def inputs(model: rkr.RectifiedModel) -> Tensor:
    x = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(99))
    return x.to(next(model.network.parameters()).dtype)


def logits(model: rkr.RectifiedModel, name: str) -> Tensor:
    """What a task answers, without disturbing which task is in use."""
    mode, x = model.training, inputs(model)
    model.eval()
    with torch.no_grad():
        result = model(x, tasks=[name] * len(x))
    model.train(mode)
    return result


def raw(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """Tensors as comparable bits."""
    return {
        key: (t.dtype, tuple(t.shape), t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for key, t in tensors.items()
    }


def snapshot(model: rkr.RectifiedModel) -> dict[str, Any]:
    """Everything about a model that a failed or repeated operation must leave alone, bit for bit."""
    return {
        "tasks": [(t.name, t.classes, t.class_names) for t in model.tasks.values()],
        "current": model.task,
        "frozen": model.base_frozen,
        "options": model.options,
        "head": model.head,
        "base": raw(model.network.state_dict()),
        "fingerprints": {name: model.fingerprint(name) for name in model.tasks},
        "states": {task.name: raw(model.tensors.task_state(task)) for task in model.tasks.values()},
        "logits": {name: raw({"": logits(model, name)}) for name in model.tasks},
        "trained": set(model.named_task_parameters()) if model.task is not None else None,
    }


def refused(action: Callable[[], Any], *words: str) -> str:
    """The action raises exactly `rkr.FileError`, and its message has all the words."""
    with pytest.raises(rkr.RkrError) as caught:
        action()
    assert type(caught.value) is rkr.FileError
    message = str(caught.value)
    for word in words:
        assert word in message
    return message


def load_all(folder: Path) -> rkr.RectifiedModel:
    """Load a model folder, and read all of its tasks: they are not read before they are used."""
    model = rkr.load(folder, Small())
    assert len(model.tasks.values()) == len(model.tasks)
    return model


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def named_files(folder: Path) -> set[str]:
    """The files that a model folder's index names, the index and the lock."""
    index = read_index(folder)
    return {INDEX, LOCK, index["base"], *(task["file"] for task in index["tasks"])}


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text("utf-8"))


def write_index(folder: Path, index: Any) -> None:
    """Replace the index, with a valid checksum if the format has one."""
    (folder / INDEX).write_bytes(encode_index(index))


def base_file(folder: Path) -> Path:
    return folder / read_index(folder)["base"]


def task_file(folder: Path, number: int = 0) -> Path:
    return folder / read_index(folder)["tasks"][number]["file"]


def rewrite(path: Path, kind: str, tensors: Mapping[str, Any] | None = None, **metadata: str | None) -> None:
    """Change a file's content (None removes) and give it valid checksums again."""
    meta, found = files.decode(path, KINDS[kind])
    new_meta = {k: v for k, v in {**meta, **metadata}.items() if v is not None and k not in ("crc32", "sha256")}
    new = {k: v for k, v in {**found, **(tensors or {})}.items() if v is not None}
    path.write_bytes(files.encode(new, new_meta))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[rkr.RectifiedModel, Path]:
    """A model and the file of its task "a"."""
    model, path = build(), tmp_path / "first-task.safetensors"
    model.save_task("a", path)
    return model, path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a saved model; only to be copied."""
    folder = tmp_path_factory.mktemp("template") / "zoo"
    build().save(folder)
    return folder


@pytest.fixture
def zoo(template: Path, tmp_path: Path) -> tuple[rkr.RectifiedModel, Path]:
    """The folder of a saved model, and another model of the same architecture that is in use."""
    shutil.copytree(template, tmp_path / "zoo")
    return build(tasks={"own": 4, "other": 2}, seed=5), tmp_path / "zoo"


# ---------------------------------------------------------------------------------------------------------
# One task, one file

SMALL_KEYS = {
    *(f"{conv}.{x}" for conv in ("conv1", "layer1.0.conv1", "fc1") for x in ("lm", "rm", "f")),
    *(
        f"{bn}.{x}"
        for bn in ("bn1", "layer1.0.bn1")
        for x in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ),
    "head.weight",
    "head.bias",
}


def test_task_file_has_the_users_module_paths(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    _, path = saved
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == SMALL_KEYS
        assert file.get_tensor("head.weight").shape == (3, 7)
        assert file.get_tensor("layer1.0.conv1.lm").shape == (3 * 4, 2)  # (W·C_in, K)
        assert file.get_tensor("layer1.0.conv1.rm").shape == (2, 3 * 6)  # (K, H·C_out)
        assert file.get_tensor("bn1.num_batches_tracked").dtype == torch.int64


def test_task_file_says_what_it_is(tmp_path: Path) -> None:
    model = build(rank=3, layout="reshape", ranks={"fc1": 1}, exclude=["conv1"])
    model.save_task("b", tmp_path / "b.safetensors")
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        meta = file.metadata()
    assert meta["format"] == "rkr-task"
    assert meta["version"] == str(files.TASK.version) == "1"
    assert meta["task"] == "b"
    assert meta["rank"] == "3"
    assert meta["layout"] == "reshape"
    assert json.loads(meta["class_names"]) == ["cat", "dög"]
    assert json.loads(meta["classes"]) == 2
    assert meta["base"] == files.base_fingerprint(model)
    options = json.loads(meta["options"])
    assert options["ranks"] == {"fc1": 1}
    assert options["exclude"] == ["conv1"]
    assert options["rank"] == 3


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "rank-5": {"rank": 5},
    "reshape": {"layout": "reshape"},
    "lite": {"rectify_weights": "conv", "scale_outputs": "linear"},
    "rectification-only": {"scale_outputs": False},
    "scaling-only": {"rectify_weights": False},
    "bn-stats": {"bn": "stats"},
    "bn-affine": {"bn": "affine"},
    "bn-frozen": {"bn": "frozen"},
    "norm-per-task": {"norm": "per_task"},
    "patterns": {"include": ["layer1.*", "fc1"], "ranks": {"layer1.*": 3}},
    "formula": {"kernels": "formula"},
    "float64": {"network": lambda: Small().double()},
    "headless": {"network": Headless, "head": None, "tasks": {"a": None, "b": None}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_task_round_trip_is_bit_identical(variant: str, tmp_path: Path) -> None:
    model = build(**VARIANTS[variant])
    before = snapshot(model)
    for name in "ab":
        model.save_task(name, tmp_path / name)
    assert snapshot(model) == before  # saving changes nothing
    for name in "ab":
        model.remove_task(name)
    for name in "ab":
        model.load_task(tmp_path / name)
    assert snapshot(model) == before


def test_loaded_task_is_selected_and_can_be_trained(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    other = model.fingerprint("b")
    task = model.load_task(path)
    assert model.task == "a"
    assert model.tasks["a"] is task
    before = model.fingerprint("a")
    train(model)
    assert model.fingerprint("a") != before
    assert model.fingerprint("b") == other
    model.load_task(path)
    assert model.fingerprint("a") == before
    assert list(model.tasks) == ["a", "b"]  # replaced in its place


def test_every_byte_of_the_base_counts(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    model.load_task(path)  # remembers the base
    for key, tensor in model.tensors.base_state().items():
        cell = tensor.data.view(-1) if tensor.is_contiguous() else tensor.data.movedim(1, -1).view(-1)
        kept = cell[-1].clone()
        cell[-1] = kept + 1  # no version counter sees it
        with pytest.raises(rkr.FileError, match="another base"):
            model.load_task(path)
        cell[-1] = kept
        model.load_task(path)
        assert model._base_known is not None, key
        assert model._base_known[1] == files.base_fingerprint(model)


def test_task_under_another_name(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    model.load_task(path, name="copy/..")
    assert list(model.tasks) == ["a", "b", "copy/.."]
    assert model.task == "copy/.."
    assert raw(model.tensors.task_state(model.tasks["copy/.."])) == raw(model.tensors.task_state(model.tasks["a"]))
    assert torch.equal(logits(model, "copy/.."), logits(model, "a"))


@pytest.mark.parametrize("name", ["", 5, b"a", ["a"]], ids=repr)
def test_loading_under_no_proper_name_is_refused(name: Any, tmp_path: Path) -> None:
    model = build(tasks={"a": 3})
    model.save_task("a", tmp_path / "a")
    before = snapshot(model)
    with pytest.raises(rkr.RkrError):
        model.load_task(tmp_path / "a", name=name)
    assert snapshot(model) == before


def test_resnet18_task_file_is_small(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = rkr.rectify(resnet18(classes=100), rank=2, head="fc")
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    model.add_task("vehicles and animals", names, train_base=False)
    with torch.no_grad():
        for p in model.task_parameters():
            p.add_(torch.randn_like(p), alpha=0.01)
    path = tmp_path / "task.safetensors"
    model.save_task("vehicles and animals", path)
    assert path.stat().st_size <= 320_000
    with safetensors.safe_open(path, "pt") as file:
        keys = set(file.keys())
    assert {"layer1.0.conv1.lm", "layer1.0.conv1.rm", "layer1.0.conv1.f", "bn1.running_mean", "head.weight"} <= keys
    assert len([k for k in keys if k.endswith(".lm")]) == 20  # every convolution, the stem and 3 shortcuts among them
    assert len([k for k in keys if k.endswith(".running_var")]) == 20
    fingerprint, x = model.fingerprint("vehicles and animals"), torch.randn(1, 3, 32, 32)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        model.remove_task("vehicles and animals")
        assert model.load_task(path).class_names == tuple(names)
        assert torch.equal(model.eval()(x), expected)
    assert model.fingerprint("vehicles and animals") == fingerprint


# ---------------------------------------------------------------------------------------------------------
# Names

NAMES = [
    *("a", "A", "a/b", "a\\b", "ä.b", "é", "e\u0301", "..", ".", "../../etc/passwd", "/", "~", " ", "\n", "\t", "\0"),
    *("train", "items", "forward", "tasks", "__class__", "previous", "random", "base", "zoo.json", "head", "None"),
    *("%", "%2E", "%25", "a.b", "a%2Eb", "*", "[0-9]", "?", "-rf", "con", "nul.txt", "{}", "{0}", "😀", "\u202e"),
    *("'", '"'),
    *("x" * 300 + "1", "x" * 300 + "2", "ü" * 5000, "😀" * 70, ".tmp", ".a.tmp", "0123456789abcdef.safetensors"),
]


def test_any_name_works(tmp_path: Path) -> None:
    model = build(Tiny, dict.fromkeys(NAMES, 2))
    before = snapshot(model)
    model.save(tmp_path / "zoo")
    assert listing(tmp_path) == {"zoo"}
    assert listing(tmp_path / "zoo") == named_files(tmp_path / "zoo")
    assert len(named_files(tmp_path / "zoo")) == len(NAMES) + 3
    loaded = rkr.load(tmp_path / "zoo", Tiny())
    assert list(loaded.tasks) == NAMES
    assert snapshot(loaded) == before
    for i, name in enumerate(NAMES):
        model.save_task(name, tmp_path / str(i))
        model.remove_task(name)
        assert model.load_task(tmp_path / str(i)).name == name
    assert model.task == NAMES[-1]
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["", None, 5], ids=repr)
def test_empty_name_is_refused(name: Any) -> None:
    model = build(Tiny)
    before = snapshot(model)
    with pytest.raises(rkr.UsageError, match="name"):
        model.add_task(name, 2)
    assert snapshot(model) == before


def test_name_that_no_file_can_hold_is_refused_before_it_is_too_late(tmp_path: Path) -> None:
    """A lone surrogate, as `os.listdir` gives for a folder name that is not UTF-8, cannot be encoded."""
    name = os.fsdecode(b"stra\xdfe")
    model = build(Tiny)
    model.save(tmp_path / "zoo")

    def add_and_save() -> None:
        model.add_task(name, 2)
        model.save(tmp_path / "zoo")

    with pytest.raises(rkr.RkrError):
        add_and_save()
    assert list(rkr.load(tmp_path / "zoo", Tiny()).tasks) == ["a", "b"]


@pytest.mark.parametrize("name", ["ö" * 121 + ".safetensors", "😀" * 60 + ".safetensors"], ids=["umlaut", "emoji"])
def test_file_name_as_long_as_the_file_system_allows(name: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    assert len(name.encode()) > 250
    path.with_name(name).write_bytes(path.read_bytes())  # the file system takes this name
    model.save_task("b", path.with_name(name))
    fingerprint = model.fingerprint("b")
    model.load_task(path.with_name(name))
    assert model.fingerprint("b") == fingerprint
    assert listing(path.parent) == {path.name, name}


# ---------------------------------------------------------------------------------------------------------
# A model, a folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_round_trip_is_bit_identical(variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    model = build(**options)
    model.set_task("a")
    before = snapshot(model)
    model.save(tmp_path / "deep" / "zoo")
    assert snapshot(model) == before
    torch.manual_seed(123)
    loaded = rkr.load(str(tmp_path / "deep" / "zoo"), options.get("network", Small)())
    assert snapshot(loaded) == before
    for key, merged in loaded.merged("b").state_dict().items():
        assert torch.equal(merged, model.merged("b").state_dict()[key])


def test_every_option_comes_back(tmp_path: Path) -> None:
    options = rkr.Options(
        rank=3,
        rectify_weights="conv",
        scale_outputs="linear",
        include=("*1*",),
        exclude=("fc1",),
        ranks={"layer1.*": 1, "conv*": 4},
        budget="paper",
        bn="per_task",
        norm="per_task",
        layout="reshape",
        init_gain=0.1 + 0.2,
        cache_bytes=12345,
        mixed="group",
        kernels="formula",
    )
    default = rkr.Options()
    assert all(getattr(options, name) != getattr(default, name) for name in options.to_json())
    model = build(options=options)
    model.save(tmp_path)
    assert rkr.load(tmp_path, Small()).options == model.options
    assert {**model.options.to_json(), "ranks": options.ranks} == options.to_json()


def test_order_current_task_and_class_names_come_back(tmp_path: Path) -> None:
    model = build(tasks={"z": 2, "a": ["ja", "nein", "vielleicht\n"], "m": 1, "b": 4})
    model.remove_task("a")
    model.add_task("a", ["x", "y"])
    model.set_task("m")
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Small())
    assert list(loaded.tasks) == ["z", "m", "b", "a"]
    assert loaded.task == "m"
    assert loaded.tasks["a"].class_names == ("x", "y")
    assert loaded.tasks["z"].class_names is None
    assert [t.classes for t in loaded.tasks.values()] == [2, 1, 4, 2]
    assert snapshot(loaded) == snapshot(model)


@pytest.mark.parametrize("case", ["no task", "none selected", "frozen without a task", "pretrained"])
def test_unusual_states_come_back(case: str, tmp_path: Path) -> None:
    model = build(tasks={})
    if case == "none selected":
        model.add_task("a", 2)
        model.remove_task(model.add_task("b", 2).name)
        assert model.task is None
    elif case == "frozen without a task":
        model.freeze_base()
    elif case == "pretrained":
        model.add_task("a", 2, train_base=False)
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Small())
    assert snapshot(loaded) == snapshot(model)
    assert loaded.base_frozen is (case != "no task")
    assert any(p.requires_grad for p in loaded.network.parameters()) is (case == "no task")


def test_files_leave_random_numbers_alone(tmp_path: Path) -> None:
    model, network = build(), Small()
    before = torch.get_rng_state()
    model.save(tmp_path / "zoo")
    model.save_task("a", tmp_path / "a")
    model.load_task(tmp_path / "a")
    model.fingerprint("a")
    rkr.load(tmp_path / "zoo", network)
    assert torch.equal(torch.get_rng_state(), before)


# Where a model that was saved while its base was being trained is loaded.
TARGETS: dict[str, Callable[[rkr.RectifiedModel], nn.Module]] = {
    "fresh": lambda model: Small(),
    "same": lambda model: model.network,
    "same, trained on": lambda model: (train(model, 7), model.network)[1],
    "same, frozen since": lambda model: (model.freeze_base(), model.network)[1],
}


@pytest.mark.parametrize("frozen", [False, True], ids=["first-task", "second-task"])
@pytest.mark.parametrize("target", TARGETS)
def test_training_goes_on_as_if_never_saved(target: str, frozen: bool, tmp_path: Path) -> None:
    tasks = {"a": 3, "b": 2} if frozen else {"a": 3}
    straight = build(tasks=tasks)
    train(straight, 1, steps=3)
    model = build(tasks=tasks)
    model.save(tmp_path)
    resumed = rkr.load(tmp_path, TARGETS[target](model))
    assert resumed.base_frozen is frozen
    train(resumed, 1, steps=3)
    assert snapshot(resumed) == snapshot(straight)
    for each in (straight, resumed):  # and so does the next task
        torch.manual_seed(3)
        each.add_task("c", 2)
        train(each, 2)
    assert snapshot(resumed) == snapshot(straight)


def test_layers_that_the_user_froze_stay_frozen_after_loading(tmp_path: Path) -> None:
    """The base is still being trained, but not all of it."""
    results = []
    for resume in (False, True):
        torch.manual_seed(0)
        network = Small()
        network.conv1.requires_grad_(False)
        model = rkr.rectify(network, head="fc")
        model.add_task("a", 3)
        if resume:
            model.save(tmp_path)
            model = rkr.load(tmp_path, Small())
        train(model, 1)
        results.append(snapshot(model))
    assert results[0] == results[1]


@pytest.mark.parametrize("tasks", [{"a": 3}, {"a": 3, "b": 2}], ids=["first-task", "second-task"])
@pytest.mark.parametrize("through", ["folder", "file"])
def test_optimizer_state_fits_after_loading(tasks: dict[str, int], through: str, tmp_path: Path) -> None:
    """torch's optimisers know parameters by position, and clipping sums over them: the order must come back too."""
    if through == "file" and len(tasks) == 1:
        tasks = {"z": 1, "a": 3}
    name = list(tasks)[-1]
    straight, model = build(tasks=tasks), build(tasks=tasks)
    adam = torch.optim.Adam(straight.task_parameters(groups=True), lr=0.01)
    train(straight, 1, adam, clip=0.1)
    train(straight, 2, adam, clip=0.1)

    adam = torch.optim.Adam(model.task_parameters(groups=True), lr=0.01)
    train(model, 1, adam, clip=0.1)
    order = list(model.named_task_parameters())
    if through == "folder":
        model.save(tmp_path)
        model = rkr.load(tmp_path, Small())
    else:
        model.save_task(name, tmp_path / "task")
        model.load_task(tmp_path / "task")
    assert list(model.named_task_parameters()) == order
    again = torch.optim.Adam(model.task_parameters(groups=True), lr=0.01)
    again.load_state_dict(adam.state_dict())
    train(model, 2, again, clip=0.1)
    assert snapshot(model) == snapshot(straight)


def test_first_task_keeps_its_order_of_parameters_when_the_base_is_frozen(tmp_path: Path) -> None:
    """The first task gets its normalisation when the base is frozen, later ones at once."""
    model = build()
    orders = {}
    for name in "ab":
        model.set_task(name)
        orders[name] = list(model.named_task_parameters())
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Small())
    for name in "ab":
        loaded.set_task(name)
        assert list(loaded.named_task_parameters()) == orders[name]


def test_network_that_is_rectified_already_is_taken_over(tmp_path: Path) -> None:
    old = build()
    old.save(tmp_path)
    before = snapshot(old)
    train(old)
    new = rkr.load(tmp_path, old.network)
    assert snapshot(new) == before
    assert new.network is old.network
    for call in (lambda: old(inputs(new)), lambda: old(inputs(new), tasks=["a"] * 3), lambda: old.merged("a")):
        with pytest.raises(rkr.UsageError, match="another rectified model"):
            call()
    assert snapshot(new) == before
    assert snapshot(rkr.load(tmp_path, new.network)) == before  # and again


@pytest.mark.parametrize("target", ["fresh", "same"])
def test_merged_network_has_the_same_trainable_parameters_after_loading(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Small()
    network.conv1.requires_grad_(False)
    flags = {key: p.requires_grad for key, p in network.named_parameters()}
    model = rkr.rectify(network, head="fc")
    model.add_task("a", 3, train_base=False)
    merged = {key: p.requires_grad for key, p in model.merged("a").named_parameters()}
    assert {k: v for k, v in merged.items() if not k.startswith("fc.")} == {
        k: v for k, v in flags.items() if not k.startswith("fc.")
    }
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, Small() if target == "fresh" else network)
    assert {key: p.requires_grad for key, p in loaded.merged("a").named_parameters()} == merged


@pytest.mark.parametrize("use", ["save", "save_task", "load_task", "add_task", "freeze_base"])
def test_model_that_lost_its_network_does_no_harm(use: str, tmp_path: Path) -> None:
    """Its tasks do not belong to the base that its network has now: to save them with that would falsify them."""
    old = build(tasks={"a": 3})
    old.save(tmp_path / "old")
    build(tasks={"first": 2}, seed=5).save(tmp_path / "new")
    new = rkr.load(tmp_path / "new", old.network)
    new.save_task("first", tmp_path / "first")
    before, good = snapshot(new), snapshot(rkr.load(tmp_path / "old", Small()))
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: old.save(tmp_path / "old"),
        "save_task": lambda: old.save_task("a", tmp_path / "a"),
        "load_task": lambda: old.load_task(tmp_path / "first"),
        "add_task": lambda: old.add_task("c", 2),
        "freeze_base": lambda: old.freeze_base(),
    }
    with pytest.raises(rkr.UsageError, match="another rectified model"):
        calls[use]()
    assert snapshot(new) == before
    assert not new.base_frozen
    assert snapshot(rkr.load(tmp_path / "old", Small())) == good


def test_removed_tasks_vanish_and_foreign_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    foreign = {"README.md", "x.safetensors", "a.deadbeef.safetensors", ".gitignore", "notes.tmp", "a.json"}
    folder.mkdir()
    for name in foreign:
        (folder / name).write_text(name)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.0123456789abcdef.safetensors").write_text("kept")
    (folder / ".cache.tmp").mkdir()
    model = build()
    model.save(folder)
    assert foreign | {"sub", ".cache.tmp"} <= listing(folder)
    file = task_file(folder)
    model.remove_task("a")
    model.save(folder)
    assert not file.exists()
    assert listing(folder) == foreign | {"sub", ".cache.tmp"} | named_files(folder)
    assert len(named_files(folder)) == 4
    assert all((folder / name).read_text() == name for name in foreign)
    assert (folder / "sub" / "b.0123456789abcdef.safetensors").read_text() == "kept"
    assert list(rkr.load(folder, Small()).tasks) == ["b"]


def test_temporary_files_of_other_programs_stay(tmp_path: Path) -> None:
    foreign = {".notes.tmp", ".~lock.tmp", ".x.safetensors.tmp"}
    for name in foreign:
        (tmp_path / name).write_text("not ours")
    build().save(tmp_path)
    assert foreign <= listing(tmp_path)


def test_saving_again_writes_only_what_changed(tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    before = {name: (tmp_path / name).stat().st_ino for name in named_files(tmp_path) - {INDEX, LOCK}}
    model.save(tmp_path)
    assert {name: (tmp_path / name).stat().st_ino for name in named_files(tmp_path) - {INDEX, LOCK}} == before
    model.set_task("b")
    train(model, 4)
    model.save(tmp_path)
    after = {name: (tmp_path / name).stat().st_ino for name in named_files(tmp_path) - {INDEX, LOCK}}
    assert len(before.items() & after.items()) == 2  # the base and "a"


def test_saving_again_repairs_a_damaged_folder(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    _, folder = zoo
    model = rkr.load(folder, Small())
    assert len(model.tasks.values()) == 2  # in memory
    for path in (base_file(folder), task_file(folder)):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(lambda: rkr.load(folder, Small()), base_file(folder).name)
    model.save(folder)
    assert snapshot(rkr.load(folder, Small())) == snapshot(model)
    assert listing(folder) == named_files(folder)


def test_one_folder_for_two_models_holds_the_last(tmp_path: Path) -> None:
    build().save(tmp_path)
    other = build(tasks={"own": 4}, seed=5, rank=1)
    other.save(tmp_path)
    assert snapshot(rkr.load(tmp_path, Small())) == snapshot(other)
    assert listing(tmp_path) == named_files(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Other people's networks


class TiedModule(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.conv


class TiedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(36, 36), nn.Linear(36, 36)
        self.decode.weight = self.encode.weight
        self.fc = nn.Linear(36, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.decode(F.relu(self.encode(x.flatten(1)))))


class Masked(Tiny):
    """A causal mask as many transformers keep it: infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


class OddBuffers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("short", torch.tensor([0.5], dtype=torch.bfloat16))
        self.register_buffer("steps", torch.arange(4).view(2, 2).t())


class OverlappingBuffers(Tiny):
    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(10.0)
        self.register_buffer("left", both[:6])
        self.register_buffer("right", both[4:])


@pytest.mark.parametrize("network", [TiedModule, TiedParameter, Masked, OddBuffers, OverlappingBuffers])
def test_other_peoples_networks_are_saved_and_loaded(network: type[nn.Module], tmp_path: Path) -> None:
    model = build(network, rank=1)
    before = snapshot(model)
    model.save(tmp_path)
    loaded = rkr.load(tmp_path, network())
    assert snapshot(loaded) == before
    if network is TiedParameter:
        assert loaded.network.decode._parameters["weight"] is loaded.network.encode._parameters["weight"]


def test_network_with_state_that_is_no_tensor_is_refused_clearly(tmp_path: Path) -> None:
    class Extra(Tiny):
        def get_extra_state(self) -> Any:
            return {"steps": 5}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(rkr.RkrError, match="_extra_state"):
        build(Extra).save(tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Strictness: files with valid checksums and wrong content

BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def spoiled(tensor: Tensor, value: float) -> Tensor:
    """A copy with one bad value at the end."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


# What is wrong with a task file: the change, and words of the message beside the file's name.
WRONG_TASKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing lm": ({"tensors": {"layer1.0.conv1.lm": None}}, ("layer1.0.conv1.lm", "missing")),
    "missing statistic": ({"tensors": {"bn1.running_var": None}}, ("bn1.running_var", "missing")),
    "missing head": ({"tensors": {"head.bias": None}}, ("head.bias", "missing")),
    "extra": ({"tensors": {"layer9.conv1.lm": torch.zeros(2)}}, ("layer9.conv1.lm",)),
    "extra empty": ({"tensors": {"": torch.zeros(0)}}, ("''",)),
    "base weight": ({"tensors": {"conv1.weight": torch.zeros(4, 1, 3, 3)}}, ("conv1.weight",)),
    "transposed": ({"tensors": {"fc1.lm": torch.zeros(2, 6)}}, ("fc1.lm", "(2, 6)", "(6, 2)")),
    "more dimensions": ({"tensors": {"fc1.f": torch.zeros(7, 1)}}, ("fc1.f", "(7, 1)", "(7,)")),
    "other head": ({"tensors": {"head.weight": torch.zeros(3, 8)}}, ("head.weight", "(3, 8)", "(3, 7)")),
    "more classes": ({"tensors": {"head.bias": torch.zeros(4)}}, ("head.bias", "(4,)", "(3,)")),
    "double": ({"tensors": {"fc1.f": torch.ones(7).double()}}, ("fc1.f", "float64", "float32")),
    "half": ({"tensors": {"fc1.f": torch.ones(7).half()}}, ("fc1.f", "float16", "float32")),
    "int": ({"tensors": {"fc1.f": torch.ones(7).int()}}, ("fc1.f", "int32", "float32")),
    "complex": ({"tensors": {"fc1.f": torch.ones(7).to(torch.complex64)}}, ("fc1.f", "complex64", "float32")),
    "float8": ({"tensors": {"fc1.f": torch.ones(7).to(torch.float8_e4m3fn)}}, ("fc1.f",)),
    "float count": ({"tensors": {"bn1.num_batches_tracked": torch.tensor(2.0)}}, ("bn1.num_batches_tracked", "int64")),
    "wrong layout": ({"layout": "reshape"}, ("'reshape'", "'axes'")),
    "no layout": ({"layout": None}, ("layout",)),
    "wrong format": ({"format": "pt"}, ("'pt'",)),
    "format of a base": ({"format": "rkr-base"}, ("'rkr-base'",)),
    "no format": ({"format": None}, ("None",)),
    "later version": ({"version": "2"}, ("version 2 of rkr-task", "reads version 1", "upgrade rkr")),
    "no version": ({"version": None}, ("version", "None")),
    "wrong base": ({"base": "0" * 64}, ("base", "000000000000")),
    "no base": ({"base": None}, ("base",)),
    "empty base": ({"base": ""}, ("base",)),
    "without classes": ({"classes": "null", "class_names": "null"}, ("head", "fc")),
    "classes not given": ({"classes": None}, ("classes",)),
    "classes no number": ({"classes": '"three"'}, ()),
    "classes a list": ({"classes": "[3]"}, ()),
    "classes fractional": ({"classes": "3.0"}, ()),
    "classes negative": ({"classes": "-3"}, ()),
    "classes not JSON": ({"classes": "{"}, ()),
    "classes without end": ({"classes": "[" * 100_000}, ()),
    "class names of other number": ({"class_names": '["x", "y"]'}, ()),
    "class names no list": ({"class_names": "5"}, ()),
    "class names a text": ({"class_names": '"xyz"'}, ()),
    "class names no texts": ({"class_names": "[1, 2, 3]"}, ()),
    "class names twice": ({"class_names": '["x", "y", "x"]'}, ()),
    "no class names": ({"class_names": None}, ("class_names",)),
    "empty name": ({"task": ""}, ()),
    "no name": ({"task": None}, ("task",)),
}


@pytest.mark.parametrize("case", WRONG_TASKS)
def test_wrong_task_file_is_refused(case: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    change, words = WRONG_TASKS[case]
    rewrite(path, "rkr-task", **change)
    before = snapshot(model)
    refused(lambda: model.load_task(path), str(path), *words)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "case",
    [
        *("missing lm", "extra", "transposed", "double", "wrong layout", "wrong format", "later version"),
        *("wrong base", "classes fractional", "class names of other number", "class names no list", "no name"),
    ],
)
def test_wrong_task_in_a_folder_hurts_only_itself(case: str, template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    shutil.copytree(template, folder)
    good = snapshot(load_all(folder))
    change, words = WRONG_TASKS[case]
    path = task_file(folder)
    rewrite(path, "rkr-task", **change)
    model = rkr.load(folder, Small())
    assert model.tasks.damaged == {}  # not known yet
    x = inputs(model)
    for use in (
        lambda: model.set_task("a"),
        lambda: model.tasks["a"],
        lambda: model(x, tasks=["b", "a", "b"]),
        lambda: model.merged("a"),
        lambda: model.fingerprint("a"),
        lambda: model.add_task("c", 2, init="a"),
        lambda: model.save_task("a", tmp_path / "a"),
        lambda: model.cost(),
        lambda: model.state_dict(),
        lambda: model.save(tmp_path / "copy"),
    ):
        message = refused(use, str(path), *words)
        assert model.tasks.damaged == {"a": message}
    assert model.task == "b"
    assert (list(model.tasks), len(model.tasks)) == (["a", "b"], 2)
    assert raw({"": logits(model, "b")}) == good["logits"]["b"]
    assert model.fingerprint("b") == good["fingerprints"]["b"]
    train(model)
    model.save(folder)  # the file of "a" is as it was
    assert rkr.load(folder, Small()).tasks.check() == {"a": message}
    model.remove_task("a")
    assert model.tasks.damaged == {}
    model.save(folder)
    assert list(load_all(folder).tasks) == ["b"]
    assert not path.exists()


def test_damaged_task_is_replaced_by_its_backup(zoo: tuple[rkr.RectifiedModel, Path], tmp_path: Path) -> None:
    _, folder = zoo
    shutil.copy(task_file(folder), tmp_path / "backup")
    good = snapshot(load_all(folder))
    task_file(folder).write_bytes(b"")
    model = rkr.load(folder, Small())
    assert list(model.tasks.check()) == ["a"]
    model.load_task(tmp_path / "backup")
    assert model.tasks.damaged == {}
    model.set_task("b")
    assert snapshot(model) == good
    model.save(folder)
    assert snapshot(load_all(folder)) == good


def test_damaged_task_in_use_leaves_none_in_use(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    _, folder = zoo
    task_file(folder, 1).write_bytes(b"")
    with pytest.warns(UserWarning, match=r"no task is in use, because the last one is damaged: .*b\.[0-9a-f]{16}"):
        model = rkr.load(folder, Small())
    assert (model.task, list(model.tasks), list(model.tasks.damaged)) == (None, ["a", "b"], ["b"])
    model.set_task("a")
    assert model.eval()(inputs(model)).shape == (3, 3)


@pytest.mark.parametrize("bad", BAD)
def test_task_that_is_not_finite_is_refused(bad: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    before, good = snapshot(model), path.read_bytes()
    _, tensors = files.decode(path, files.TASK)
    floats = [key for key, t in tensors.items() if t.is_floating_point()]
    assert len(floats) == len(SMALL_KEYS) - 2
    for key in floats:
        path.write_bytes(good)
        rewrite(path, "rkr-task", {key: spoiled(tensors[key], BAD[bad])})
        refused(lambda: model.load_task(path), str(path), repr(key), "finite")
    assert snapshot(model) == before


@pytest.mark.parametrize("change", ["value", "sign of zero", "other seed", "trained further", "other shape"])
def test_task_of_another_base_is_refused(change: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    _, path = saved
    model = build(seed=1 if change == "other seed" else 0, tasks={"own": 2})
    if change == "other shape":
        torch.manual_seed(0)
        network = Small()
        network.conv1 = nn.Conv2d(1, 4, 5, padding=2)
        model = rkr.rectify(network, head="fc")
    elif change != "trained further":
        model.add_task("more", 2)
    with torch.no_grad():
        weight = model.network.conv1._parameters["weight"]
        if change == "value":
            weight[0, 0, 0, 0] += 1
        if change == "sign of zero":
            weight[0, 0, 0, 0] = 0.0
            model.save_task("own", path)
            weight[0, 0, 0, 0] = -0.0
    before = snapshot(model)
    refused(lambda: model.load_task(path), str(path))
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "way", ["data", "numpy", "data replaced", "half and back", "load_state_dict", "inference mode"]
)
def test_base_that_changed_since_the_last_load_is_noticed(way: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    """However the base was written to: some ways leave no trace in torch's version counters."""
    model, path = saved
    model.load_task(path)
    weight = model.network.layer1[0].conv1._parameters["weight"]
    old = weight.detach().clone()
    if way == "data":
        weight.data[0, 0, 0, 0] += 1
    elif way == "numpy":
        weight.detach().numpy()[0, 0, 0, 0] += 1
    elif way == "data replaced":
        weight.data = weight.data.clone() + 1
    elif way == "half and back":
        model.half().float()
    elif way == "load_state_dict":
        model.network.load_state_dict({k: v + 1 for k, v in model.network.state_dict().items()})
    else:
        with torch.inference_mode():
            weight.add_(1)
    assert not torch.equal(model.network.layer1[0].conv1._parameters["weight"], old)
    before = snapshot(model)
    refused(lambda: model.load_task(path), str(path), "base")
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("maker", "reader", "word"),
    [
        ({}, {"network": Headless, "head": None, "tasks": {"x": None}}, "no head"),
        ({"network": Headless, "head": None, "tasks": {"a": None}}, {}, "head 'fc'"),
        ({"rank": 3}, {}, "conv1.lm"),
        ({"layout": "reshape"}, {}, "layout 'reshape'"),
        ({"bn": "stats"}, {}, "bn1.weight"),
        ({}, {"bn": "stats"}, "bn1.bias"),
        ({"scale_outputs": False, "bn": "per_task"}, {}, "conv1.f"),
        ({"exclude": ["layer1.*"]}, {}, "layer1.0.conv1.lm"),
        ({}, {"exclude": ["layer1.*"]}, "layer1.0.conv1.f"),
        ({"norm": "per_task"}, {}, "norm.bias"),
        ({}, {"head": "fc1", "tasks": {}}, "head.weight"),
        ({"network": lambda: Small().double()}, {}, "float64"),
    ],
)
def test_task_of_other_options_is_refused(
    maker: dict[str, Any], reader: dict[str, Any], word: str, tmp_path: Path
) -> None:
    build(**maker).save_task("a", tmp_path / "a")
    model = build(**reader)
    before = snapshot(model)
    refused(lambda: model.load_task(tmp_path / "a"), str(tmp_path / "a"), word)
    assert snapshot(model) == before


WRONG_BASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing": ({"tensors": {"layer1.0.conv1.weight": None}}, ("layer1.0.conv1.weight", "missing")),
    "missing head": ({"tensors": {"fc.bias": None}}, ("fc.bias", "missing")),
    "extra": ({"tensors": {"layer1.1.conv1.weight": torch.zeros(2)}}, ("layer1.1.conv1.weight",)),
    "mis-shaped": ({"tensors": {"conv1.weight": torch.zeros(4, 1, 9)}}, ("conv1.weight", "(4, 1, 9)", "(4, 1, 3, 3)")),
    "other head": ({"tensors": {"fc.weight": torch.zeros(6, 7)}}, ("fc.weight", "(6, 7)", "(5, 7)")),
    "wrong dtype": ({"tensors": {"fc1.bias": torch.zeros(7).double()}}, ("fc1.bias", "float64")),
    "float8": ({"tensors": {"fc1.bias": torch.zeros(7).to(torch.float8_e4m3fn)}}, ("fc1.bias",)),
    "nan": ({"tensors": {"fc1.bias": torch.full((7,), torch.nan)}}, ("fc1.bias", "finite")),
    "inf": ({"tensors": {"conv1.weight": torch.full((4, 1, 3, 3), torch.inf)}}, ("conv1.weight", "finite")),
    "infinite statistic": (
        {"tensors": {"bn1.running_var": torch.full((4,), torch.inf)}},
        ("bn1.running_var", "finite"),
    ),
    "other content": ({"tensors": {"fc1.bias": torch.zeros(7)}}, ("fingerprint",)),
    "other fingerprint": ({"fingerprint": "0" * 64}, ("fingerprint",)),
    "no fingerprint": ({"fingerprint": None}, ("fingerprint",)),
    "wrong format": ({"format": "rkr-task"}, ("rkr-task",)),
    "wrong version": ({"version": "0"}, ("version", "'0'")),
}


@pytest.mark.parametrize("case", WRONG_BASES)
def test_wrong_base_file_is_refused(case: str, zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    model, folder = zoo
    change, words = WRONG_BASES[case]
    path = base_file(folder)
    rewrite(path, "rkr-base", **change)
    before = snapshot(model)
    refused(lambda: rkr.load(folder, model.network), str(path), *words)
    assert snapshot(model) == before


def test_base_file_of_another_folder_is_refused(zoo: tuple[rkr.RectifiedModel, Path], tmp_path: Path) -> None:
    _, folder = zoo
    build(seed=7).save(tmp_path / "other")
    base_file(folder).write_bytes(base_file(tmp_path / "other").read_bytes())
    with pytest.warns(UserWarning, match="belongs to another base network"):
        model = rkr.load(folder, Small())
    refused(lambda: model.set_task("a"), task_file(folder).name, "belongs to another base network")
    assert list(model.tasks.check()) == ["b", "a"]  # "b" was in use, and found first


def test_task_file_in_place_of_another_is_refused(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    """Whole and right in itself, but not what the folder says is there: "b" would answer as "a"."""
    _, folder = zoo
    task_file(folder, 1).write_bytes(task_file(folder, 0).read_bytes())
    with pytest.warns(UserWarning, match="contains the task 'a', not 'b'"):
        model = rkr.load(folder, Small())
    refused(lambda: model.set_task("b"), task_file(folder, 1).name, "contains the task 'a', not 'b'")


def test_refused_folder_leaves_a_plain_network_plain(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    _, folder = zoo
    network = Small()
    before, types = raw(network.state_dict()), [type(m) for m in network.modules()]
    rewrite(base_file(folder), "rkr-base", {"fc1.bias": None})
    refused(lambda: rkr.load(folder, network), base_file(folder).name, "fc1.bias")
    assert raw(network.state_dict()) == before
    assert [type(m) for m in network.modules()] == types
    assert all(p.requires_grad for p in network.parameters())
    rkr.rectify(network, head="fc").add_task("a", 2)  # still free
    refused(lambda: rkr.load(folder, nn.Linear(2, 2)), base_file(folder).name)


# ---------------------------------------------------------------------------------------------------------
# Strictness: the index


def put(**values: Any) -> Callable[[Any], Any]:
    return lambda index: {**index, **values}


def put_option(**values: Any) -> Callable[[Any], Any]:
    return lambda index: {**index, "options": {**index["options"], **values}}


def put_task(**values: Any) -> Callable[[Any], Any]:
    return lambda index: {**index, "tasks": [{**index["tasks"][0], **values}, index["tasks"][1]]}


def without(key: str) -> Callable[[Any], Any]:
    return lambda index: {k: v for k, v in index.items() if k != key}


WRONG_INDEXES: dict[str, Callable[[Any], Any]] = {
    **{f"without {key}": without(key) for key in ("format", "version", "options", "head", "base", "base_frozen")},
    **{f"without {key}": without(key) for key in ("current", "tasks", "about")},
    "extra key": put(foo=1),
    "a list": lambda index: [index],
    "null": lambda index: None,
    "a number": lambda index: 5,
    "wrong format": put(format="rkr-task"),
    "wrong version": put(version="3"),
    "about a list": put(about=[]),
    "about null": put(about=None),
    "about too large": put(about={"x": "y" * 1_000_001}),
    "version a number": put(version=1),
    "no such current": put(current="c"),
    "current a number": put(current=0),
    "current a list": put(current=["a"]),
    "tasks null": put(tasks=None),
    "tasks a text": put(tasks="ab"),
    "tasks a dict": put(tasks={}, current=None),
    "tasks texts": lambda index: {**index, "tasks": [t["file"] for t in index["tasks"]]},
    "task without file": lambda index: {**index, "tasks": [{"name": "a"}, {"name": "b"}]},
    "task with extra key": put_task(foo=1),
    "task twice": put_task(name="b"),
    "other name": put_task(name="c"),
    "empty name": put_task(name=""),
    "name a number": put_task(name=5),
    "name null": put_task(name=None),
    "name a list": put_task(name=[]),
    "file of another task": lambda index: put_task(file=index["tasks"][1]["file"])(index),
    "file of the base": lambda index: put_task(file=index["base"])(index),
    "base from a task": lambda index: {**index, "base": index["tasks"][0]["file"]},
    "base not frozen with two tasks": put(base_frozen=False),
    "frozen a text": put(base_frozen="false"),
    "frozen null": put(base_frozen=None),
    "frozen a number": put(base_frozen=1),
    "no such head": put(head="classifier"),
    "other head": put(head="fc1"),
    "no head": put(head=None),
    "head a number": put(head=5),
    "head a list": put(head=["fc"]),
    "head empty": put(head=""),
    "options null": put(options=None),
    "options a list": put(options=[]),
    "options empty": put(options={}),
    "unknown option": put_option(ranx=1),
    "other rank": put_option(rank=3),
    "rank a text": put_option(rank="2"),
    "rank zero": put_option(rank=0),
    "other layout": put_option(layout="reshape"),
    "unknown layout": put_option(layout="other"),
    "other bn": put_option(bn="frozen"),
    "other norm": put_option(norm="per_task"),
    "ranks a text": put_option(ranks="ab"),
    "ranks triples": put_option(ranks=[["a", 1, 2]]),
    "include numbers": put_option(include=[1]),
    "include nothing": put_option(include=[]),
    "include null": put_option(include=None),
    "fast a text": put_option(fast="yes"),
    "kernels unknown": put_option(kernels="quick"),
    "gain a text": put_option(init_gain="1"),
    "cache null": put_option(cache_bytes=None),
    "cache a fraction": put_option(cache_bytes=0.5),
}


FOUND_LATER = {"other rank", "other layout", "other name", "file of another task", "file of the base"}  # with a task


@pytest.mark.filterwarnings("ignore:no task is in use")
@pytest.mark.parametrize("case", WRONG_INDEXES)
def test_wrong_index_is_refused(case: str, zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    model, folder = zoo
    index = read_index(folder)
    changed = WRONG_INDEXES[case](index)
    assert json.dumps(changed) != json.dumps(index)
    write_index(folder, changed)
    if case in FOUND_LATER:
        refused(lambda: load_all(folder), str(folder))
    else:
        before = snapshot(model)
        refused(lambda: rkr.load(folder, model.network), str(folder))
        assert snapshot(model) == before


@pytest.mark.parametrize("which", ["base", "task"])
@pytest.mark.parametrize(
    "name",
    [
        *("../out.safetensors", "../../out.safetensors", "{}/out.safetensors", "..", ".", "", "/"),
        *("sub/in.safetensors", "./in.safetensors", "sub/../in.safetensors", "in.safetensors\0", "\0.safetensors"),
        *("\ud800.safetensors", "x" * 5000 + ".safetensors", 5, None, ["in.safetensors"]),
    ],
    ids=ascii,
)
def test_index_that_points_outside_is_refused(which: str, name: Any, zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    _, folder = zoo
    (folder / "sub").mkdir()
    source = base_file(folder) if which == "base" else task_file(folder)
    for target in ("../out", "../../out", "in", "sub/in"):  # whole files, so that only the way there is wrong
        shutil.copy(source, folder / f"{target}.safetensors")
    if isinstance(name, str):
        name = name.replace("{}", str(folder.parent))
    index = read_index(folder)
    write_index(folder, (put(base=name) if which == "base" else put_task(file=name))(index))
    refused(lambda: load_all(folder), str(folder))


def test_index_nested_without_end_is_refused(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    model, folder = zoo
    (folder / INDEX).write_text("[" * 100_000)
    refused(lambda: rkr.load(folder, model.network), INDEX)


# ---------------------------------------------------------------------------------------------------------
# Strictness: damaged files of all kinds


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def crafted(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def one_tensor(dtype: str, shape: list[int], size: int) -> bytes:
    meta = {"format": "rkr-task", "version": "1"}
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    return crafted({"__metadata__": meta, "fc1.f": tensor}) + bytes(size)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    **{f"first {n} bytes": lambda data, n=n: data[:n] for n in (0, 1, 7, 8, 9, 100)},
    "first half": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "twice": lambda data: data * 2,
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "random": lambda data: random.Random(0).randbytes(len(data)),
    "text": lambda data: b"this is not a safetensors file, nor an index\n",
    "html": lambda data: b"<!DOCTYPE html><html><body>404</body></html>",
    "git lfs pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    "pickle": lambda data: pickle.dumps({"fc1.f": [1.0]}),
    "end cut to zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "utf-16": lambda data: "{}".encode("utf-16"),
    "header too long": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "header of all": lambda data: (len(data) - 8).to_bytes(8, "little") + data[8:],
    "header null": lambda data: crafted(None),
    "header a list": lambda data: crafted([]),
    "header empty": lambda data: crafted({}),
    "header nested": lambda data: crafted(b"[" * 100_000),
    "metadata numbers": lambda data: crafted({"__metadata__": {"format": 1}}),
    "metadata null": lambda data: crafted({"__metadata__": None}),
    "no tensors": lambda data: crafted({"__metadata__": {"format": "rkr-task", "version": "1"}}),
    "huge empty shape": lambda data: one_tensor("F32", [0, 2**62, 2**62], 0),
    "shape beyond 64 bits": lambda data: one_tensor("F32", [0, 2**63], 0),
    "many dimensions": lambda data: one_tensor("F32", [1] * 100, 4),
    "unknown dtype": lambda data: one_tensor("F99", [2], 8),
    "float4": lambda data: one_tensor("F4", [8], 4),
    "offsets beyond the end": lambda data: one_tensor("F32", [2], 8)[:-4],
}
VICTIMS = ("task", "base", "folder's task", "index")


def damage(victim: str, tmp_path: Path) -> tuple[rkr.RectifiedModel, Path, Callable[[], Any]]:
    """A model in use, a file to damage, and the load that then must fail, if need be without touching that model."""
    model = build(seed=5)
    if victim == "task":
        model.save_task("a", tmp_path / "one-task")
        return model, tmp_path / "one-task", lambda: model.load_task(tmp_path / "one-task")
    folder = tmp_path / "zoo"
    build().save(folder)
    path = {"base": base_file, "folder's task": task_file, "index": lambda f: f / INDEX}[victim](folder)
    return model, path, lambda: load_all(folder) if victim == "folder's task" else rkr.load(folder, model.network)


@pytest.mark.parametrize("victim", VICTIMS)
def test_damaged_file_is_refused(victim: str, tmp_path: Path) -> None:
    model, path, load = damage(victim, tmp_path)
    before, good, wrong = snapshot(model), path.read_bytes(), {}
    for case, spoil in DAMAGE.items():
        path.write_bytes(spoil(good))
        try:
            load()
        except rkr.FileError as error:
            if path.name not in str(error):
                wrong[case] = str(error)
        except Exception as error:
            wrong[case] = repr(error)
        else:
            wrong[case] = "accepted"
        assert snapshot(model) == before, case
    assert wrong == {}
    path.write_bytes(good)
    load()


@pytest.mark.parametrize("victim", VICTIMS)
def test_file_that_is_not_there_or_no_file_is_refused(victim: str, tmp_path: Path) -> None:
    model, path, load = damage(victim, tmp_path)
    before = snapshot(model)
    path.unlink()
    refused(load, path.name)
    path.symlink_to(path.name)  # to itself
    refused(load, path.name)
    path.unlink()
    path.mkdir()
    refused(load, path.name)
    assert snapshot(model) == before


@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_pickle_is_refused_unopened(victim: str, save: Callable[..., None], tmp_path: Path) -> None:
    model, path, load = damage(victim, tmp_path)
    before, trace = snapshot(model), tmp_path / "trace"
    with path.open("wb") as file:
        save(Bomb(trace), file)
    refused(load, path.name)
    assert not trace.exists()
    assert snapshot(model) == before


def test_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    network = Small()
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "missing", "missing/deeper", "x" * 300, "nul\0byte"):
        refused(lambda name=name: rkr.load(tmp_path / name, network), name)


def test_path_with_a_null_byte_is_refused(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    bad = path.with_name("nul\0byte")
    before = snapshot(model)
    for action in (lambda: model.load_task(bad), lambda: model.save_task("a", bad), lambda: model.save(bad)):
        refused(action, "nul\0byte")
    assert snapshot(model) == before


def test_load_needs_a_network(zoo: tuple[rkr.RectifiedModel, Path]) -> None:
    _, folder = zoo
    for wrong in (None, Small, "network", Small().state_dict()):
        with pytest.raises(rkr.UsageError):
            rkr.load(folder, wrong)  # type: ignore[arg-type]


def flips(data: bytes, seed: int) -> Iterator[tuple[int, bytes]]:
    """The data with one random bit wrong, for every byte."""
    chance = random.Random(seed)
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1 << chance.randrange(8)
        yield i, bytes(changed)


def test_every_flipped_bit_of_a_task_file_is_found(tmp_path: Path) -> None:
    model, path = build(Tiny, rank=1), tmp_path / "task"
    model.save_task("b", path)
    before, good, prints = snapshot(model), path.read_bytes(), {n: model.fingerprint(n) for n in "ab"}
    for i, bad in flips(good, seed=1):
        path.write_bytes(bad)
        message = refused(lambda: model.load_task(path), str(path))
        assert {n: model.fingerprint(n) for n in model.tasks} == prints, i
        assert model.task == "b"
    assert "damaged" in message  # the last byte is a tensor's
    assert snapshot(model) == before


def test_flipped_bit_in_a_tensor_is_found_by_name(saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:start])
    del header["__metadata__"]
    for key, entry in header.items():
        place = start + entry["data_offsets"][1] - 1
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        refused(lambda: model.load_task(path), str(path), repr(key), "damaged")
    assert set(header) == SMALL_KEYS


def test_every_flipped_bit_of_a_base_file_is_found(tmp_path: Path) -> None:
    build(Tiny, rank=1).save(tmp_path)
    network, path = Tiny(), base_file(tmp_path)
    before = raw(network.state_dict())
    for _, bad in flips(path.read_bytes(), seed=2):
        path.write_bytes(bad)
        refused(lambda: rkr.load(tmp_path, network), path.name)
    assert raw(network.state_dict()) == before
    assert type(network.conv) is nn.Conv2d


def test_every_flipped_bit_of_an_index_is_found_or_harmless(tmp_path: Path) -> None:
    model = build(Tiny, rank=1)
    model.save(tmp_path)
    before, path = snapshot(model), tmp_path / INDEX
    good, wrong = path.read_bytes(), {}
    for i, bad in flips(good, seed=3):
        path.write_bytes(bad)
        try:
            found = snapshot(rkr.load(tmp_path, Tiny()))
        except rkr.FileError:
            continue
        except Exception as error:
            wrong[i] = repr(error)
        else:
            if found != before:
                wrong[i] = bad[max(0, i - 20) : i + 20].decode()
    assert wrong == {}


# ---------------------------------------------------------------------------------------------------------
# Diverged training


@pytest.mark.parametrize("bad", ["nan", "-inf"])
@pytest.mark.parametrize("where", ["factor", "statistic", "head", "base"])
def test_what_could_not_be_loaded_is_not_saved(bad: str, where: str, tmp_path: Path) -> None:
    """A diverged task must not replace the good file, nor make a whole folder unreadable."""
    model = build()
    model.save(tmp_path / "zoo")
    model.save_task("a", tmp_path / "a")
    good, file = snapshot(model), (tmp_path / "a").read_bytes()
    key = {"factor": "fc1.lm", "statistic": "bn1.running_var", "head": "head.bias", "base": "fc1.weight"}[where]
    with torch.no_grad():
        tensor = model.network.state_dict()[key] if where == "base" else model.tasks["a"].get(key)
        tensor.view(-1)[0] = BAD[bad]
    refused(lambda: model.save(tmp_path / "zoo"), key)
    if where != "base":
        refused(lambda: model.save_task("a", tmp_path / "a"), key, "a")
        assert (tmp_path / "a").read_bytes() == file
    assert snapshot(rkr.load(tmp_path / "zoo", Small())) == good
    assert listing(tmp_path) == {"zoo", "a"}


# ---------------------------------------------------------------------------------------------------------
# Atomicity. A helper process holds two states, A and B, and forks a child for every save that shall be killed.


def two_states() -> dict[str, rkr.RectifiedModel]:
    """Two models with the same base; B has trained "b" further and added "c"."""
    models = {name: build() for name in "AB"}
    train(models["B"], 9)
    models["B"].add_task("c", 4)
    return models


def save_state(model: rkr.RectifiedModel, kind: str, path: str) -> None:
    if kind == "journal":  # what makes A in the folder to B, as a line of the journal
        index_module.WHOLE = 1
        torch.manual_seed(3)
        loaded = rkr.load(path, Small())
        train(loaded, 9)
        loaded.remove_task("a")
        loaded.add_task("c", 4, init="random")
        loaded.save(path)
    elif kind == "folder":
        model.save(path)
    else:
        model.save_task("b", path)


class Torn:
    """A file whose writes can be cut in the middle."""

    def __init__(self, file: Any, step: Callable[[], None]) -> None:
        self.file, self.step = file, step

    def write(self, data: Any) -> int:
        half = len(data) // 2
        written = self.file.write(data[:half])
        self.file.flush()
        self.step()
        return written + self.file.write(data[half:])

    def __enter__(self) -> "Torn":
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def die_at(number: int) -> None:
    """From now on, let the process be killed before its n-th operation on the file system."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            step()
            return function(*args, **kwargs)

        return call

    for name in ("open", "fsync", "replace", "rename", "chmod", "unlink", "remove"):
        setattr(os, name, before(getattr(os, name)))

    def tear(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opened = function(file, mode, *args, **kwargs)
            return opened if mode in ("r", "rb") else Torn(opened, step)

        return call

    os.fdopen, io.open, builtins.open = tear(os.fdopen), tear(io.open), tear(builtins.open)


def serve() -> None:
    """The helper process: commands as JSON lines."""
    torch.set_num_threads(1)
    models = two_states()

    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "save":
            save_state(models[order["state"]], order["kind"], order["path"])
            say("saved")
        elif order["do"] == "fingerprints":
            model = rkr.load(order["path"], Small())
            say({name: model.fingerprint(name) for name in model.tasks})
        else:
            child = os.fork()
            if child == 0:
                try:
                    if order["do"] == "die":
                        die_at(order["step"])
                        save_state(models["B"], order["kind"], order["path"])
                    while order["do"] == "loop":
                        for model in models.values():
                            model.stored = None  # as one that has never seen the folder, so it replaces what is there
                            save_state(model, order["kind"], order["path"])
                finally:
                    os._exit(0)
            say(child)
            say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class Helper:
    """The other end."""

    def __init__(self) -> None:
        source = Path(rkr.__file__).parents[1]
        path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert self.hear() == "ready"

    def hear(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the helper process has ended"
        return json.loads(line)

    def say(self, **order: Any) -> Any:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.hear()


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    helper = Helper()
    yield helper
    helper.process.stdin.close()
    assert helper.process.wait(timeout=100) == 0


class States:
    """What A and B are, learned from saves that nobody killed."""

    def __init__(self, helper: Helper, kind: str, folder: Path) -> None:
        self.kind, self.path, self.clean = kind, folder / "saved", folder / "clean"
        helper.say(do="save", state="A", kind="folder", path=str(folder / "reference"))
        self.reader = rkr.load(folder / "reference", Small())
        if kind == "journal":
            helper.say(do="save", state="A", kind="folder", path=str(self.clean))
        helper.say(do="save", state="B", kind=kind, path=str(self.clean))
        self.b = self.read(self.clean)
        first = "folder" if kind == "journal" else kind
        helper.say(do="save", state="A", kind=first, path=str(self.clean) + "A")
        self.clean = folder / "cleanA"
        self.a = self.read(self.clean)
        assert self.a["states"]["b"] != self.b["states"]["b"]
        assert self.a["logits"]["b"] != self.b["logits"]["b"]
        self.reset()

    def read(self, path: Path) -> dict[str, Any]:
        if self.kind != "task":
            return snapshot(rkr.load(path, Small()))
        self.reader.load_task(path)
        return snapshot(self.reader)

    def reset(self) -> None:
        """Put A at the path."""
        if self.kind != "task":
            shutil.rmtree(self.path, ignore_errors=True)
            shutil.copytree(self.clean, self.path)
        else:
            for path in self.path.parent.glob(".*.tmp"):
                path.unlink()
            shutil.copy(self.clean, self.path)

    def now(self) -> str:
        """Which of the two the path holds; anything else is a failure."""
        found = self.read(self.path)
        assert found in (self.a, self.b)
        return "A" if found == self.a else "B"


@pytest.mark.parametrize("kind", ["task", "folder", "journal"])
def test_kill_at_every_step_leaves_old_or_new(kind: str, helper: Helper, tmp_path: Path) -> None:
    states, seen, leftovers = States(helper, kind, tmp_path), "", 0
    for step in range(1, 300):
        states.reset()
        helper.say(do="die", step=step, kind=kind, path=str(states.path))
        status = helper.hear()
        assert status in (-signal.SIGKILL, 0)
        seen += states.now()
        if kind != "task":
            leftovers += len(listing(states.path) - named_files(states.path))
            if step % 3 == 0 and kind == "folder":
                rkr.load(states.path, Small()).save(states.path)  # cleans up after the dead
                assert listing(states.path) == named_files(states.path)
                assert states.now() == seen[-1]
        else:
            leftovers += len(list(tmp_path.glob(".*.tmp")))
        if status == 0:
            break
    assert status == 0
    assert re.fullmatch("A{3,}B+", seen)  # old until one moment, new from then on
    assert leftovers > 0  # so the kills did hit


@pytest.mark.parametrize("kind", ["task", "folder"])
def test_kill_at_random_moments_leaves_old_or_new(kind: str, helper: Helper, tmp_path: Path) -> None:
    states, chance = States(helper, kind, tmp_path), random.Random(0)
    for _ in range(25):
        child = helper.say(do="loop", kind=kind, path=str(states.path))
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)  # a child that this test has started; the helper has not reaped it yet
        assert helper.hear() == -signal.SIGKILL
        states.now()
    helper.say(do="save", state="B", kind=kind, path=str(states.path))
    assert states.now() == "B"
    if kind == "folder":
        assert listing(states.path) == named_files(states.path)


# -- failing disks


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: what a full disk does, by the kernel's own hand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def failing(place: Any, name: str, code: int, at: int = 1) -> Iterator[None]:
    """The n-th call of a function of the operating system fails."""
    real, count = getattr(place, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, call)
        yield
    assert count >= at, "the failure was never reached"


FAILURES: dict[str, tuple[Callable[[], Any], int]] = {
    "full disk": (lambda: full_disk(1000), errno.EFBIG),
    "no byte left": (lambda: full_disk(0), errno.EFBIG),
    "fsync": (lambda: failing(os, "fsync", errno.EIO), errno.EIO),
    "rename": (lambda: failing(os, "replace", errno.ENOSPC), errno.ENOSPC),
    "temporary file": (lambda: failing(builtins, "open", errno.EROFS), errno.EROFS),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_save_of_a_task_leaves_the_old_file(failure: str, saved: tuple[rkr.RectifiedModel, Path]) -> None:
    model, path = saved
    old, before = path.read_bytes(), snapshot(model)
    model.set_task("a")
    train(model)
    changed = snapshot(model)
    fail, code = FAILURES[failure]
    with fail():
        refused(lambda: model.save_task("a", path), str(path), os.strerror(code))
    assert path.read_bytes() == old
    assert listing(path.parent) == {path.name}  # no temporary file
    assert snapshot(model) == changed
    model.load_task(path)
    assert model.fingerprint("a") == before["fingerprints"]["a"]


@pytest.mark.parametrize("failure", FAILURES)
def test_failed_save_of_a_model_leaves_the_old_folder(failure: str, tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    before = snapshot(model)
    train(model)
    model.add_task("c", 2)
    changed = snapshot(model)
    fail, code = FAILURES[failure]
    with fail():
        refused(lambda: model.save(tmp_path), str(tmp_path), os.strerror(code))
    assert snapshot(model) == changed
    assert snapshot(rkr.load(tmp_path, Small())) == before
    assert not list(tmp_path.glob(".*"))
    model.save(tmp_path)
    assert snapshot(rkr.load(tmp_path, Small())) == changed
    assert listing(tmp_path) == named_files(tmp_path)


def test_save_of_a_model_that_fails_at_any_file_leaves_the_old_folder(tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    before = snapshot(model)
    for name in "ab":
        model.set_task(name)
        train(model, 8)
    changed = snapshot(model)
    for at in (1, 2, 3):  # two tasks and the index at least
        with failing(os, "replace", errno.EIO, at):
            refused(lambda: model.save(tmp_path), str(tmp_path))
        assert snapshot(rkr.load(tmp_path, Small())) == before
        for path in tmp_path.glob("*.safetensors"):  # so that the next round has as much to write
            if path.name not in named_files(tmp_path):
                path.unlink()
        assert listing(tmp_path) == named_files(tmp_path)
    assert snapshot(model) == changed


def test_failed_removal_of_old_files_does_no_harm(tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    model.remove_task("a")
    with failing(os, "unlink", errno.EACCES):
        model.save(tmp_path)
    assert listing(tmp_path) > named_files(tmp_path)
    assert list(rkr.load(tmp_path, Small()).tasks) == ["b"]
    model.save(tmp_path)
    assert listing(tmp_path) == named_files(tmp_path)


def test_folders_on_the_way_are_made_and_files_in_the_way_are_not_touched(tmp_path: Path) -> None:
    model = build()
    model.save_task("a", tmp_path / "new" / "deeper" / "a.safetensors")
    assert model.load_task(tmp_path / "new" / "deeper" / "a.safetensors").name == "a"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    refused(lambda: model.save_task("a", tmp_path / "file" / "a"), "file")
    refused(lambda: model.save_task("a", tmp_path / "folder"), "folder")
    refused(lambda: model.save_task("a", ""))
    refused(lambda: model.save(tmp_path / "file"), "file")
    refused(lambda: model.save(tmp_path / "file" / "zoo"), "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert listing(tmp_path) == {"new", "file", "folder"}
    assert listing(tmp_path / "folder") == set()


@contextlib.contextmanager
def plain_user() -> Iterator[None]:
    """Root may do everything, so be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folder_without_permission(tmp_path: Path) -> None:
    model = build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_task("a", folder / "a")
        model.save(folder / "zoo")
        old, files_before = (folder / "a").read_bytes(), listing(folder / "zoo")
        before = snapshot(model)
        os.chmod(folder / "zoo", 0o555)
        os.chmod(folder, 0o555)
        denied = os.strerror(errno.EACCES)
        try:
            with plain_user():
                refused(lambda: model.save_task("b", folder / "a"), str(folder / "a"), denied)
                refused(lambda: model.save_task("b", folder / "new" / "b"), str(folder / "new"), denied)
                model.remove_task("a")
                refused(lambda: model.save(folder / "zoo"), str(folder / "zoo"), denied)
                model.load_task(folder / "a")
                assert snapshot(rkr.load(folder / "zoo", Small())) == before  # reading is allowed
        finally:
            os.chmod(folder, 0o755)
            os.chmod(folder / "zoo", 0o755)
        for path in (folder / "a", task_file(folder / "zoo"), base_file(folder / "zoo"), folder / "zoo" / INDEX):
            os.chmod(path, 0)
            with plain_user():
                if path.name == "a":
                    refused(lambda path=path: model.load_task(path), str(path), denied)
                else:
                    refused(lambda: load_all(folder / "zoo"), path.name, denied)
            os.chmod(path, 0o644)
        assert (folder / "a").read_bytes() == old
        assert listing(folder) == {"a", "zoo"}
        assert listing(folder / "zoo") == files_before


def test_files_get_the_users_permissions(tmp_path: Path) -> None:
    """The temporary file is private; what it becomes is as any file that the user makes."""
    model = build(Tiny)
    old = os.umask(0o027)
    try:
        model.save_task("a", tmp_path / "a")
        model.save(tmp_path / "zoo")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)
    for path in (tmp_path / "a", base_file(tmp_path / "zoo"), tmp_path / "zoo" / INDEX):
        assert path.stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------------------------------------------------
# Nothing unpickles


def test_nothing_in_the_package_unpickles() -> None:
    # data/unpickle.py is the reader of the CIFAR archives, which can build nothing but arrays; it has its own tests.
    # features/network.py reads weights from an installed package, whose code runs anyway, and as tensors only.
    apart = {("data", "unpickle.py"), ("features", "network.py")}
    sources = [p for p in Path(rkr.__file__).parent.rglob("*.py") if p.parts[-2:] not in apart]
    assert len(sources) > 10
    words = r"pickle\.load|import pickle|Unpickler|torch\.load\b|weights_only|allow_pickle|np\.load|numpy\.load"
    words += r"|\bjoblib|\bdill\b|\bshelve|\bmarshal|\beval\(|\bexec\("
    forbidden = re.compile(words)
    found = [
        f"{path}:{i}: {line}"
        for path in sources
        for i, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if forbidden.search(line.replace(".eval(", ""))
    ]
    assert found == []
    assert forbidden.search("x = torch.load(path)")  # the pattern itself works


def test_nothing_is_unpickled_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, lambda *args, name=name, **kwargs: calls.append(name))
    model = build()
    model.save(tmp_path / "zoo")
    model.save_task("a", tmp_path / "a")
    model.load_task(tmp_path / "a")
    assert list(rkr.load(tmp_path / "zoo", Small()).tasks) == ["a", "b"]
    assert calls == []


# ---------------------------------------------------------------------------------------------------------
# Fingerprints


def test_digest_covers_names_types_shapes_and_words() -> None:
    t = torch.arange(6.0)
    digests = [
        files.digest({"a": t}),
        files.digest({"b": t}),
        files.digest({"a": t.view(2, 3)}),
        files.digest({"a": t.view(3, 2)}),
        files.digest({"a": t.view(torch.int32)}),
        files.digest({"a": t, "b": t[:0]}),
        files.digest({"a": t[:3], "b": t[3:]}),
        files.digest({"a": t[:2], "b": t[2:]}),
        files.digest({"a": t[3:], "b": t[:3]}),
        files.digest({"a": t}, "w"),
        files.digest({"a": t}, "ab", "c"),
        files.digest({"a": t}, "a", "bc"),
        files.digest({}),
    ]
    assert len(set(digests)) == len(digests)
    assert all(FINGERPRINT.fullmatch(d) for d in digests)
    both = {"a": t.view(2, 3), "b": t}
    same = {"b": t.clone().requires_grad_(), "a": t.view(2, 3).t().contiguous().t()}
    assert files.digest(both) == files.digest(same)


def test_fingerprint_is_the_same_in_another_process(helper: Helper, tmp_path: Path) -> None:
    model = build()
    model.save(tmp_path)
    prints = {name: model.fingerprint(name) for name in model.tasks}
    assert all(FINGERPRINT.fullmatch(p) for p in prints.values())
    assert prints["a"] != prints["b"]
    assert helper.say(do="fingerprints", path=str(tmp_path)) == prints


def test_fingerprint_and_files_do_not_depend_on_the_memory_format(tmp_path: Path) -> None:
    model, other = build(), build()
    other.to(memory_format=torch.channels_last)
    weight = other.network.layer1[0].conv1._parameters["weight"]
    assert not weight.is_contiguous()
    for name in "ab":
        assert other.fingerprint(name) == model.fingerprint(name)
    other.save(tmp_path / "zoo")
    assert snapshot(rkr.load(tmp_path / "zoo", Small()))["fingerprints"] == snapshot(model)["fingerprints"]
    network = Small().to(memory_format=torch.channels_last)
    loaded = rkr.load(tmp_path / "zoo", network)
    assert raw(loaded.network.state_dict()) == raw(model.network.state_dict())
    assert not loaded.network.layer1[0].conv1._parameters["weight"].is_contiguous()  # the user's choice stays
    model.save_task("a", tmp_path / "a")
    other.load_task(tmp_path / "a")
    assert other.fingerprint("a") == model.fingerprint("a")


def flip_each(tensor: Tensor) -> Iterator[int]:
    """Change the lowest bit of one value at a time."""
    bits = tensor.detach().view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place in range(bits.numel()):
        index = torch.unravel_index(torch.tensor(place), bits.shape) if bits.dim() else ()
        bits[index] ^= 1
        yield place
        bits[index] ^= 1


@pytest.mark.parametrize("bn", ["per_task", "stats", "affine", "frozen"])
def test_fingerprint_changes_with_every_single_value(bn: str) -> None:
    model = build(Tiny, rank=1, bn=bn)
    first = {name: model.fingerprint(name) for name in "ab"}
    own = {
        "per_task": {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"},
        "stats": {"running_mean", "running_var", "num_batches_tracked"},
        "affine": {"weight", "bias"},
        "frozen": set(),
    }[bn]
    task = model.tasks["a"].tensors()
    assert {k for k in task if k.startswith("bn.")} == {f"bn.{name}" for name in own}
    assert set(task) >= {"conv.lm", "conv.rm", "conv.f", "head.weight", "head.bias"}
    changed, seen = 0, set(first.values())
    for tensor in task.values():
        for _ in flip_each(tensor):
            seen.add(model.fingerprint("a"))
            changed += 1
            assert model.fingerprint("b") == first["b"]
    shared = {
        key: tensor
        for key, tensor in model.network.state_dict().items()
        if not key.startswith("fc.") and not (key.startswith("bn.") and key[3:] in own)
    }
    assert {"conv.weight", "conv.bias"} <= set(shared)
    for tensor in shared.values():
        for _ in flip_each(tensor):
            seen |= {model.fingerprint("a"), model.fingerprint("b")}
            changed += 2
    assert changed > 30
    assert len(seen) == changed + 2  # all different from each other and from the first
    assert {name: model.fingerprint(name) for name in "ab"} == first


def test_fingerprint_does_not_depend_on_what_no_task_uses() -> None:
    """The network's own head, and normalisation that every task has for itself."""
    model = build(Tiny)
    before = model.fingerprint("a"), logits(model, "a")
    with torch.no_grad():
        for module in (model.network.fc, model.network.bn):
            for p in module._parameters.values():
                p.add_(1)
    assert model.fingerprint("a") == before[0]
    assert torch.equal(logits(model, "a"), before[1])


def test_fingerprint_outlives_the_freezing_of_the_base() -> None:
    model = build(tasks={"a": 3})
    before = model.fingerprint("a"), raw({"": logits(model, "a")})
    model.freeze_base()
    assert (model.fingerprint("a"), raw({"": logits(model, "a")})) == before


# ---------------------------------------------------------------------------------------------------------
# No forgetting, whatever happens


@pytest.mark.parametrize("seed", range(3))
def test_no_task_changes_unless_it_is_trained(seed: int, tmp_path: Path) -> None:
    """A random life of a model: after each step, all but the task that was meant have the same bits as before."""
    chance = random.Random(seed)
    model = build(tasks={"t0": 2}, seed=seed, cache_bytes=chance.choice([0, 1 << 30]))
    model.add_task("t1", 3)
    base, count = raw(files_base(model)), 2
    stored: dict[str, str] = {}

    def state() -> dict[str, Any]:
        return {name: (model.fingerprint(name), raw({"": logits(model, name)})) for name in model.tasks}

    before, done = state(), set()
    for step in range(40):
        names = list(model.tasks)
        name = chance.choice(names) if names else None
        action = chance.choice(["train", "train", "add", "remove", "set", "save", "reload", "save_task", "load_task"])
        meant: set[str] = set()
        if action == "train" and model.task is not None:
            meant = {model.task}
            train(model, step, steps=1)
        elif action == "add":
            meant, count = {f"t{count}"}, count + 1
            model.add_task(*meant, chance.randint(1, 4), init=chance.choice(["previous", "random", *names]))
        elif action == "remove" and len(names) > 2:
            meant = {name}
            model.remove_task(name)
        elif action == "set" and name is not None:
            model.set_task(name)
        elif action == "save":
            model.save(tmp_path / "zoo")
        elif action == "reload":
            model.save(tmp_path / "zoo")
            model = rkr.load(tmp_path / "zoo", chance.choice([Small(), model.network]))
        elif action == "save_task" and name is not None:
            model.save_task(name, tmp_path / name)
            stored[name] = model.fingerprint(name)
        elif action == "load_task" and stored:
            name = chance.choice(list(stored))
            meant = {name}
            model.load_task(tmp_path / name)
            assert model.fingerprint(name) == stored[name]
        done.add(action)
        after = state()
        assert {k: v for k, v in after.items() if k not in meant} == {k: v for k, v in before.items() if k not in meant}
        assert raw(files_base(model)) == base
        before = after
    assert len(done) == 8


def files_base(model: rkr.RectifiedModel) -> dict[str, Tensor]:
    """The network's tensors, heads excepted: nothing may move in them once the base is frozen."""
    return {key: t for key, t in model.network.state_dict().items() if not key.startswith("fc.")}


def test_load_reads_again_if_the_folder_was_saved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save by another process between reading the index and reading its files removes the old ones."""
    model = build(tasks={"a": 3})  # its base is being trained
    model.save(tmp_path)
    real, calls = zoo_module._load, []

    def overtaken(*arguments: Any) -> rkr.RectifiedModel:
        calls.append(1)
        if len(calls) == 1:
            train(model)
            model.save(tmp_path)
        return real(*arguments)

    monkeypatch.setattr(zoo_module, "_load", overtaken)
    assert snapshot(rkr.load(tmp_path, Small())) == snapshot(model)
    assert len(calls) == 2


if __name__ == "__main__":
    serve()

"""Methods, networks, datasets and layers from outside of the package: by dotted name, entry point and decorator.

The plug-in is the package in tests/plugin.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import rkr
from rkr import importing, registry
from rkr.core import adapters
from rkr.experiment.recipes import load_recipe
from rkr.experiment.results import read_result
from rkr.methods import METHODS
from rkr.methods.ewc import Ewc
from rkr.methods.finetune import Finetune
from rkr.report.looks import look_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Command = Callable[..., tuple[int, str, str]]
PLUGIN = Path(__file__).parent / "plugin"
DOTTED = {
    "source": "rkr_example.data:load",
    "network": "rkr_example.nets:build",
    "method": "rkr_example.methods:Averaging",
}
NAMED = {"source": "strips", "network": "strips-net", "method": "averaging"}


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Path) -> Iterator[None]:
    """Forget all plug-ins after a test."""
    tables = [*registry.METHODS.values(), registry.networks, registry.datasets]
    others = [dict(table._others) for table in tables]
    kept = list(sys.path), list(importing._folders), set(registry._tried), dict(adapters._LAYERS), set(sys.modules)
    look_of.__globals__["_registered"].cache_clear()
    yield
    for table, before in zip(tables, others, strict=True):
        table._others.clear()
        table._others.update(before)
    sys.path[:], importing._folders[:] = kept[0], kept[1]
    registry._tried.intersection_update(kept[2])
    adapters._LAYERS.clear()
    adapters._LAYERS.update(kept[3])
    for name in set(sys.modules) - kept[4]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    look_of.__globals__["_registered"].cache_clear()


def install(folder: Path, package: Path = PLUGIN) -> None:
    """What `pip install` writes: the modules, and their entry points from pyproject.toml."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    for module in package.glob("*/"):
        shutil.copytree(module, folder / module.name, ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"].items()
    text = "\n".join(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in named.items()) for group, named in points)
    (info / "entry_points.txt").write_text(text)
    importlib.invalidate_caches()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    install(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def recipe(folder: Path, names: dict[str, str], methods: str = "", name: str = "strips") -> Path:
    """A recipe of 3 tasks with 2 classes each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    methods = methods or f'[methods.mine]\nlearner = "{names["method"]}"\n[methods.rkr]'
    path.write_text(
        textwrap.dedent(f"""
        title = "strips"
        orders = ["fixed"]
        [stream]
        source = "{names["source"]}"
        tasks = 3
        options = {{ per_class = 12 }}
        [network]
        name = "{names["network"]}"
        HEAD
        hidden = 12
        [training]
        epochs = 2
        batch = 8
        lr = 0.05
        METHODS
        """)
        .replace("METHODS", methods)
        .replace("HEAD", 'head = "classifier.1"' if ":" in names["network"] else "")
    )
    return path


@pytest.mark.usefixtures("installed")
def test_by_dotted_name_and_by_entry_point(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways give the same results, bit for bit; the commands and `load_learner` take what was run."""
    runs = {}
    for way, names in (("dotted", DOTTED), ("named", NAMED)):
        path = recipe(tmp_path / way, names)
        code, _, err = command("run", str(path), "--out", str(tmp_path / way / "runs"), "--no-figures", "--json")
        assert (code, err) == (0, "")
        runs[way] = tmp_path / way / "runs" / "strips"
    for method in ("mine", "rkr"):
        texts = [(runs[way] / method / "fixed" / "results.jsonl").read_text() for way in runs]
        assert texts[0] == texts[1]
    record = json.loads((runs["named"] / "mine" / "fixed" / "run.json").read_text())
    assert record["plugins"] == dict.fromkeys(("method", "network", "dataset"), "rkr-example 0.3.0")
    assert record["settings"]["network"]["head"] == "classifier.1"  # as declared
    assert record["stream"]["input_shape"] == [2, 3, 5]
    record = json.loads((runs["dotted"] / "mine" / "fixed" / "run.json").read_text())
    assert record["settings"]["learner"] == DOTTED["method"]
    assert record["settings"]["options"] == {"share": 0.5}
    source = registry.datasets["strips"].load(per_class=12)
    images = (source.test.x.float() / 255 - 0.5) / 0.25
    for way, folder in runs.items():
        result = read_result(folder / "mine" / "fixed")
        learner = rkr.load_learner(folder / "mine" / "fixed")
        for number, wanted in enumerate(result.matrix[-1]):
            own = (source.test.y // 2) == number
            right = learner.predict(images[own], number).argmax(1) == source.test.y[own] - 2 * number
            assert float(right.double().mean()) == pytest.approx(wanted), way
        assert type(rkr.load_learner(folder / "rkr" / "fixed")).__name__ == "Rkr"
    monkeypatch.chdir(tmp_path)
    code, out, err = command("compare", str(runs["named"] / "mine"), str(runs["named"] / "rkr"))
    assert (code, err) == (0, "")
    assert "mine" in out
    code, _, err = command("report", str(runs["dotted"]), "--out", str(tmp_path / "report"))
    assert (code, err) == (0, "")
    assert "mine" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.usefixtures("installed")
def test_list(command: Command) -> None:
    code, out, err = command("list")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("  ")}
    origin = "[from rkr-example 0.3.0]"
    assert lines["averaging"] == f"the mean of old and new weights (Nobody et al., 2026) {origin}"
    assert lines["averaging-low"] == f"keeps more of the old weights {origin}"
    assert lines["strips-net"] == f"Two layers for flattened images. {origin}"
    assert lines["strips"] == f"Strips in noise. {origin}"
    assert not any("[from" in text for name, text in lines.items() if name not in ("averaging-low", *NAMED.values()))
    _, out, _ = command("list", "averaging")
    assert "\n  share = 0.5\n      How much of the new weights is kept, from 0 to 1.\n" in out
    _, out, _ = command("list", "averaging-low", "--json")
    assert json.loads(out) == {"images": {"share": 0.25}}
    _, out, _ = command("list", DOTTED["source"])
    assert out.startswith(f"{DOTTED['source']}: Strips in noise. [from {DOTTED['source']}]\n")
    assert out.endswith("  per_class = 20\n  noise = 60.0\n")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("names", [DOTTED, NAMED])
def test_cost(command: Command, names: dict[str, str]) -> None:
    """30x16 + 16 weights in the first layer and 16x6 + 6 in the head; rank 2 adds 2 (30 + 16), and 16 factors."""
    words = ("cost", names["network"], "--tasks", "3", "--json")
    if ":" in names["network"]:
        assert command(*words)[0] == 0
    code, out, _ = command(*words, "--method", names["method"])
    values = json.loads(out)
    assert code == 0
    assert [row["parameters"] for row in values["after"]] == [30 * 16 + 16 + 16 * 6 + 6] * 3
    code, out, _ = command(*words, "--method", "rkr", "--rank", "2")
    task = json.loads(out)["tasks"][0]
    assert (task["rectification"], task["scale"], task["head"]) == (2 * (30 + 16), 16, 16 * 2 + 2)


def test_cost_of_a_network_whose_head_has_another_name(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heads.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 6))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("cost", "heads:build", "--tasks", "2")
    for method in ("rkr", "finetune"):
        said = "rkr: --head: heads:build has no linear layer 'fc'; choose one of 1, 3\n"
        assert command(*words, "--method", method) == (2, "", said)
    code, out, _ = command(*words, "--head", "3", "--json")
    task = json.loads(out)["tasks"][0]
    assert (code, task["rectification"], task["scale"], task["head"]) == (0, 2 * (30 + 8), 8, 3 * 8 + 3)
    assert command("list", "heads:build")[1] == "heads:build: [from heads:build]\n\nIt has no options.\n"


def test_list_of_a_dotted_name(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function could be a network or a dataset. Docstrings that a class inherits do not describe it."""
    (tmp_path / "dotted.py").write_text(
        "import rkr\n"
        "from torch import nn\n"
        "def either(size=1): return None\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, size=2): super().__init__()\n"
        "@rkr.register.dataset('dots')\n"
        "def load(size=3): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):  # the second time they are known
        for name, sections, size in (
            ("either", "[network] or [stream.options]", 1),
            ("Net", "[network]", 2),
            ("load", "[stream.options]", 3),
        ):
            _, out, _ = command("list", f"dotted:{name}")
            assert out == f"dotted:{name}: [from dotted:{name}]\n\nIn a recipe, under {sections}:\n  size = {size}\n"
    assert json.loads(command("list", "dotted:either", "--json")[1]) == {"network": {"size": 1}, "dataset": {"size": 1}}


@pytest.mark.usefixtures("installed")
def test_tune(command: Command, tmp_path: Path) -> None:
    path = recipe(tmp_path, DOTTED)
    words = ("tune", str(path), "--method", "mine", "--tasks", "2", "--out", str(tmp_path / "runs"), "--json")
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    tuned = json.loads(out.splitlines()[-1])
    assert sorted(tuned["tried"]) == ["mine-share-0.5", "mine-share-1"]  # the method's own grid
    written = next((tmp_path / "runs").glob("*/*.toml"))
    assert f'learner = "{DOTTED["method"]}"' in written.read_text()


@pytest.mark.usefixtures("installed")
def test_an_interrupted_run_goes_on(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe(tmp_path, DOTTED, '[methods.mine]\nlearner = "rkr_example.methods:Averaging"\nshare = 0.75')
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert command("run", str(path), "--out", str(whole), "--no-figures")[0] == 0
    module: Any = sys.modules["rkr_example.methods"]

    def stop(self: rkr.Learner, progress: float) -> None:
        if self.task.number == 1 and progress:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(module.Averaging, "begin_epoch", stop)
        assert command("run", str(path), "--out", str(parts), "--no-figures")[0] == 130
    assert read_result(parts / "strips" / "mine" / "fixed").done == 1
    assert command("run", str(path), "--out", str(parts), "--no-figures")[0] == 0
    ends = [(out / "strips" / "mine" / "fixed" / "results.jsonl").read_bytes() for out in (whole, parts)]
    assert ends[0] == ends[1]


def test_workers_find_what_lies_beside_the_recipe(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in is not installed and not on PYTHONPATH; the recipe of a search lies elsewhere."""
    shutil.copytree(PLUGIN / "rkr_example", tmp_path / "own" / "rkr_example")
    path = recipe(tmp_path / "own", DOTTED)
    monkeypatch.chdir(tmp_path)
    words = ("--method", "mine", "--tasks", "2", "--workers", "2", "--out", str(tmp_path / "runs"))
    code, out, err = command("tune", str(path), *words)
    assert code == 0, err
    assert "chosen: share = " in out


def test_a_run_whose_plug_in_is_gone(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    install(folder)
    folders = {}
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        for way, names in (("dotted", DOTTED), ("named", NAMED)):
            path = recipe(tmp_path / way, names)
            words = ("--method", "mine", "--out", str(tmp_path / way), "--no-figures")
            assert command("run", str(path), *words)[0] == 0
            folders[way] = tmp_path / way / "strips" / "mine" / "fixed"
    for table in (*registry.METHODS.values(), registry.networks, registry.datasets):
        table._others.clear()
    for name in [name for name in sys.modules if name.startswith("rkr_example")]:
        del sys.modules[name]
    sys.path.remove(str(folder)) if str(folder) in sys.path else None
    registry._tried.clear()
    importlib.invalidate_caches()
    said = {
        "dotted": f"{DOTTED['method']}: there is no module 'rkr_example': install it, or add the folder that has it to "
        "PYTHONPATH",
        "named": "no method is called 'averaging': install rkr-example 0.3.0",
    }
    for way, text in said.items():
        with pytest.raises(rkr.UsageError) as caught:
            rkr.load_learner(folders[way])
        assert str(caught.value) == f"{folders[way]}: {text}"
    code, _, err = command("run", str(tmp_path / "dotted" / "strips.toml"), "--out", str(tmp_path / "dotted"))
    assert code == 2
    assert "there is no module 'rkr_example'" in err
    assert err.count("\n") == 1
    code, _, err = command("report", str(tmp_path / "dotted"), "--out", str(tmp_path / "report"))  # needs no code
    assert (code, err) == (0, "")


@pytest.mark.filterwarnings("always")
def test_a_plug_in_that_fails_to_import(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "broken"
    (package / "broken_plugin").mkdir(parents=True)
    (package / "broken_plugin" / "__init__.py").write_text("import nothing_of_that_name\n")
    (package / "pyproject.toml").write_text(
        '[project]\nname = "broken"\nversion = "1"\n'
        '[project.entry-points."rkr.methods"]\nbad = "broken_plugin:Bad"\newc = "json:dumps"\n'
        '[project.entry-points."rkr.datasets"]\nnumber = "math:pi"\n'
    )
    folder = tmp_path / "site-packages"
    folder.mkdir()
    install(folder)
    install(folder, package)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("rkr.cli._warned", set())
    code, out, err = command("list")
    assert code == 0
    assert err.splitlines() == [
        "rkr: plug-in broken 1: method 'bad' is left out (ModuleNotFoundError: No module named 'nothing_of_that_name')",
        "rkr: plug-in broken 1: method 'ewc' is left out (json:dumps must be a subclass of rkr.Learner, not 'dumps')",
        "rkr: plug-in broken 1: dataset 'number' is left out (3.141592653589793 must be a function, not float)",
    ]
    assert "averaging" in out
    assert METHODS["ewc"].origin == ""
    code, _, err = command("list", "ewc")
    assert (code, err) == (0, "")  # said once


@pytest.mark.usefixtures("installed")
def test_a_loss_that_is_no_outcome(command: Command, tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "from rkr.methods.finetune import Finetune\n"
        "class Bare(Finetune):\n    def loss(self, x, y): return super().loss(x, y).loss\n"
    )
    path = recipe(tmp_path, {**DOTTED, "method": "bare:Bare"})
    code, _, err = command("run", str(path), "--out", str(tmp_path / "runs"), "--no-figures")
    assert (code, err.strip().splitlines()[-1]) == (
        2,
        "rkr: Bare.loss must return rkr.methods.Outcome(loss, correct), not Tensor",
    )


def test_registering_by_hand() -> None:
    """A decorator in any module; names are taken once."""

    @rkr.register.method("by-hand", preset={"bn": "frozen"})
    class ByHand(Finetune):
        """As fine-tuning."""

    entry = METHODS["by-hand"]
    assert entry.learner is ByHand
    assert entry.options == {"bn": "frozen"}
    assert entry.summary == f"As fine-tuning. [from {importing.place(ByHand)}]"
    rkr.register.method("by-hand")(ByHand)  # the same class again, as when a notebook cell is run twice
    assert METHODS["by-hand"].options == {"bn": "shared"}
    with pytest.raises(rkr.UsageError, match=r"there is a method 'by-hand' already \(.*ByHand\)"):
        rkr.register.method("by-hand")(Finetune2)
    with pytest.raises(rkr.UsageError, match=r"there is a method 'ewc' already \(of the package\)"):
        rkr.register.method("ewc")(Finetune2)
    with pytest.raises(rkr.UsageError, match=r"a network cannot be called 'a b': use letters, digits"):
        rkr.register.network("a b")(lambda: None)
    with pytest.raises(rkr.UsageError, match=r"dict must be a subclass of rkr\.Learner, not 'dict'"):
        rkr.register.method("other")(dict)


def test_what_counts_as_an_option() -> None:
    """Options of a base class to which the rest is passed on; types that only type checkers know; no objects."""

    @rkr.register.method("passing-on")
    class PassingOn(Ewc):
        def __init__(self, make: Any, head: str, *, own: Nowhere = 3, layer: Any = torch.nn.ReLU, **rest: Any) -> None:  # type: ignore[name-defined]  # noqa: F821
            super().__init__(make, head, **rest)
            self.own = own

    entry = METHODS["passing-on"]
    assert entry.options == {"own": 3, **METHODS["ewc"].options}
    learner = entry.build(rkr.networks.small_cnn, "fc", own=4, strength=2)
    assert (learner.own, learner.strength) == (4, 2)
    with pytest.raises(rkr.UsageError, match=r'^strength must be a number, not "a"'):
        entry.build(rkr.networks.small_cnn, "fc", strength="a")
    with pytest.raises(rkr.UsageError, match=r"^layer: passing-on has no such option; choose one of own, strength"):
        entry.build(rkr.networks.small_cnn, "fc", layer=None)

    @rkr.register.method("passing-on-rkr")
    class PassingOnRkr(METHODS["rkr"].learner):  # type: ignore[misc]
        def __init__(self, make: Any, head: str, *, own: int = 3, **rest: Any) -> None:
            super().__init__(make, head, **rest)

    assert METHODS["passing-on-rkr"].options == {"own": 3, **METHODS["rkr"].options}
    with pytest.raises(rkr.UsageError, match=r"^rank must be at least 1, not 0"):
        METHODS["passing-on-rkr"].build(rkr.networks.small_cnn, "fc", rank=0)


class Finetune2(Finetune):
    """Another one."""


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        ({"method": "mine"}, {}, "methods.mine.learner: no method is called 'mine'; choose one of apd, averaging, "),
        ({"method": "own:"}, {}, "methods.mine.learner: give package.module:name, not 'own:'"),
        (
            {"method": "own:Nothing"},
            {},
            "methods.mine.learner: own:Nothing cannot be imported (AttributeError: module 'own' has no attribute "
            "'Nothing')",
        ),
        (
            {"method": "rkr.methods.zeroshot.alone:Base"},
            {},
            "methods.mine.learner: rkr.methods.zeroshot.alone:Base is a method for zero-shot tasks, not for images",
        ),
        ({"method": "own:build"}, {}, "methods.mine.learner: own:build must be a subclass of rkr.Learner, not 'build'"),
        (
            {"method": "rkr:Learner"},
            {},
            "methods.mine.learner: rkr:Learner must define predict, capacity, groups, loss",
        ),
        ({"network": "own:text"}, {}, "network: own:text must return a torch.nn.Module, not str"),
        ({"network": "own:fails"}, {}, "network: own:fails fails (RuntimeError: no such file)"),
        (
            {"network": "own:build"},
            {"hidden": "hiden"},
            "network.hiden: own:build has no such option; did you mean 'hidden'? Choose one of name, head, hidden",
        ),
        (
            {"network": "own:build"},
            {"hidden = 12": "hidden = 1.5"},
            "network.hidden: must be a whole number, not 1.5",
        ),
        (
            {"network": "own:build"},
            {"classifier.1": "classifier"},
            "network.head: own:build has no linear layer 'classifier'; choose one of 1",
        ),
        ({"network": "own.build"}, {}, "network.name: no network is called 'own.build'; did you mean 'own:build'?"),
        (
            {"source": "own:load"},
            {"per_class = 12": "names = 12"},
            "stream.options.names: must be a list in brackets, not 12",
        ),
        (
            {"source": "own:load"},
            {"per_class": "per_clas"},
            "stream.options.per_clas: own:load has no such option; did you mean 'per_class'? Choose one of per_class, "
            "names",
        ),
    ],
)
def test_messages(tmp_path: Path, names: dict[str, str], changes: dict[str, str], said: str) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build(hidden: int = 3): return nn.Sequential(nn.Flatten()).append(nn.Linear(30, hidden))\n"
        "def text(hidden=3): return 'network'\n"
        "def fails(hidden=3): raise RuntimeError('no such file')\n"
        "def load(per_class: int = 3, names: list[str] = ()): return {}\n"
    )
    install(tmp_path)
    sys.path.append(str(tmp_path))
    path = recipe(tmp_path, {**DOTTED, **names})
    text = path.read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    path.write_text(text)
    with pytest.raises(rkr.UsageError) as caught:
        load_recipe(path)
    assert said in str(caught.value)


def test_a_source_is_checked_when_it_is_loaded(command: Command, tmp_path: Path) -> None:
    """Shape and classes are not known before."""
    (tmp_path / "own.py").write_text("def load(per_class: int = 3): return {}\n")
    shutil.copytree(PLUGIN / "rkr_example", tmp_path / "rkr_example")
    words = ("--out", str(tmp_path / "runs"), "--no-figures")
    code, _, err = command("run", str(recipe(tmp_path, {**DOTTED, "source": "own:load"})), *words)
    assert (code, err) == (2, "rkr: source 'own:load' must return a rkr.data.Source, not dict\n")
    path = recipe(tmp_path, DOTTED)
    path.write_text(path.read_text().replace("hidden = 12", "inputs = 31"))
    code, _, err = command("run", str(path), *words)
    said = "rkr_example.nets:build fails on images of 2x3x5, which are those of rkr_example.data:load (RuntimeError: "
    assert code == 2
    assert err.startswith(f"rkr: {said}")
    assert err.count("\n") == 1
    path.write_text(path.read_text().replace("inputs = 31", "").replace("tasks = 3", "tasks = 4"))
    code, _, err = command("run", str(path), *words)
    assert code == 2
    assert err.startswith("rkr: 6 classes of strips cannot be split into 4 tasks of equal size; choose 1, 2, 3, 6")


def test_a_method_that_cannot_be_built(command: Command, tmp_path: Path) -> None:
    """It is named before anything is trained."""
    (tmp_path / "own.py").write_text(
        "from rkr.methods.finetune import Finetune\n"
        "class Short(Finetune):\n"
        "    def __init__(self, make): raise RuntimeError('two\\nlines')\n"
        "class Fails(Finetune):\n"
        "    def __init__(self, make, head): raise RuntimeError('two\\nlines')\n"
    )
    shutil.copytree(PLUGIN / "rkr_example", tmp_path / "rkr_example")
    for name, said in (
        ("Short", "TypeError: Short.__init__() takes 2 positional arguments but 3 were given"),
        ("Fails", "RuntimeError: two lines"),
    ):
        path = recipe(tmp_path, {**DOTTED, "method": f"own:{name}"})
        code, _, err = command("run", str(path), "--out", str(tmp_path / "runs"), "--no-figures")
        assert (code, err) == (2, f"rkr: methods.mine: own:{name} fails ({said})\n")
    assert not list(tmp_path.glob("runs/**/results.jsonl"))


def test_modules_that_hide_each_other(tmp_path: Path) -> None:
    names = {"source": "digits", "network": "same_name:build", "method": "finetune"}
    for hidden, folder in enumerate(("one", "two")):
        path = recipe(tmp_path / folder, names, "[methods.finetune]")
        path.write_text(path.read_text().replace("tasks = 3", "tasks = 5").replace("options = { per_class = 12 }", ""))
        (path.parent / "same_name.py").write_text(
            "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
            "    def forward(self, x): return self.classifier(x)\n"
            f"def build(hidden: int = {hidden}): return Net()\n"
        )
    load_recipe(tmp_path / "one" / "strips.toml")
    registry.networks._others.clear()
    with pytest.raises(rkr.UsageError, match=r"two/same_name\.py is hidden by .*one/same_name\.py, .* rename one"):
        load_recipe(tmp_path / "two" / "strips.toml")


@pytest.mark.usefixtures("installed")
def test_looks_are_assigned() -> None:
    """Registered names get looks of their own, without being imported; those of the package do not depend on them."""
    known = {name: look_of(name) for name in registry.names("method")}
    assert {"averaging", "averaging-low"} <= set(known)
    assert len(set(known.values())) == len(known)
    assert "rkr_example.methods" not in sys.modules


def test_declarations_agree_with_the_code() -> None:
    """What is read from the files is what the decorators say; settings are those of the classes."""
    for setting, table in registry.METHODS.items():
        for name, entry in table.items():
            assert entry.learner.setting == setting, name
            assert set(entry.preset) <= set(entry.options), name
            assert entry.description, name
            assert isinstance(entry.target, str)
    for name, network in registry.networks.items():
        assert callable(cast("ModuleType", network.object)), name
    for name, dataset in registry.datasets.items():
        sizes = [size for size in dataset.shape or () if isinstance(size, str)]
        assert set(sizes) <= set(dataset.options), name
    with torch.device("meta"):
        assert registry.networks["lenet"].build(classes=7).fc.out_features == 7

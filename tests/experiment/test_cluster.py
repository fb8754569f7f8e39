"""What a cluster is asked for and sent, without one. With one: test_cluster_faults.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from small_runs import few_digits

from rkr.data.sources import located
from rkr.errors import FileError, UsageError
from rkr.experiment.connection import IMPATIENT, Needs, connect, different, versions
from rkr.experiment.events import Progress, Started, TaskEnd, from_json
from rkr.experiment.execution import Execution, Interrupted, byte_count
from rkr.experiment.mirror import Changes, Mirror, contents, put
from rkr.experiment.queue import Queue, read_queue
from rkr.experiment.recipes.settings import ResourceSettings
from rkr.importing import importable, own_modules
from rkr.locks import own_folder
from rkr.report.queue import queue_words

# ---------------------------------------------------------------------------------------------------------
# Files that go and come back


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_followed(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    run = there / "recipe" / "rkr" / "fixed"
    (run / "model").mkdir(parents=True)
    for name in ("run.json", "results.jsonl", "state.safetensors", "model/1.safetensors", "model/zoo.lock"):
        (run / name).write_text(name)
    (there / "other.txt").write_text("not of the run")
    mirror = Mirror(there, "nothing yet")
    assert mirror.changes() == Changes({})
    mirror = Mirror(tmp_path / "there", "recipe/rkr/fixed")
    assert mirror.changes() == Changes({})  # they were sent there
    put(here, Changes(contents(there, ["recipe/rkr/fixed/**/*"])))
    assert tree(here / "recipe") == tree(there / "recipe")
    assert not (here / "other.txt").exists()
    with open(run / "results.jsonl", "a") as file:
        file.write("more")
    (run / "state.safetensors").unlink()
    (run / "lock").write_text("")
    (run / "candidates").mkdir()
    (run / "candidates" / "1-1-1.lock").write_text("")
    (run / ".rkr-1.tmp").write_text("half")
    changes = mirror.changes()
    assert changes.files == {"recipe/rkr/fixed/results.jsonl": b"results.jsonlmore"}
    assert changes.gone == ("recipe/rkr/fixed/state.safetensors",)
    put(here, changes)
    own = {name: text for name, text in tree(run).items() if "lock" not in name.split(".")[-1] and ".tmp" not in name}
    assert {**own, "model/zoo.lock": b"model/zoo.lock"} == tree(here / "recipe" / "rkr" / "fixed")
    assert mirror.changes() == Changes({})


def test_what_others_are_for_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two files leaves a state whose results are there."""
    order: list[str] = []
    monkeypatch.setattr("rkr.experiment.mirror.write_atomic", lambda path, data: order.append(path.name))
    names = ("state.safetensors", "results.jsonl", "model/1.safetensors", "run.json", "times.jsonl")
    put(tmp_path, Changes({f"r/{name}": b"" for name in names}))
    assert order == ["1.safetensors", "times.jsonl", "run.json", "results.jsonl", "state.safetensors"]


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
def test_nothing_is_written_elsewhere(tmp_path: Path, name: str) -> None:
    for changes in (Changes({name: b""}), Changes({}, (name,))):
        with pytest.raises(FileError, match="not a path below"):
            put(tmp_path / "runs", changes)
    assert not (tmp_path / "out").exists()


def test_data_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a node finds them again in a dataset directory."""
    monkeypatch.delenv("RKR_DATA", raising=False)
    monkeypatch.setattr("rkr.data.download.cache_folder", lambda: tmp_path / "cache")
    paths = ["cifar-100-python.tar.gz", "mnist/train-images-idx3-ubyte", "mnist/t10k-labels-idx1-ubyte"]
    paths += ["cifar-10-batches-py/data_batch_1", "data/CUB/res101.mat"]
    for need in ("cifar100", "cifar10", "mnist", "CUB/res101.mat"):
        assert located(need, tmp_path / "data") is None
    for path in paths:
        (tmp_path / "data" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / path).touch()
    found = {need: located(need, tmp_path / "data") for need in ("cifar100", "cifar10", "mnist", "CUB/res101.mat")}
    assert {need: sorted(files or ()) for need, files in found.items()} == {
        "cifar100": ["cifar-100-python.tar.gz"],
        "cifar10": ["cifar-10-batches-py/data_batch_1"],
        "mnist": ["mnist/t10k-labels-idx1-ubyte", "mnist/train-images-idx3-ubyte"],
        "CUB/res101.mat": ["xlsa17/data/CUB/res101.mat"],
    }
    for files in found.values():
        for name, path in (files or {}).items():
            (tmp_path / "node" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "node" / name).write_bytes(path.read_bytes())
    for need in found:
        assert located(need, tmp_path / "node")
    assert located("digits") == {}  # comes with a package


def test_modules_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_methods").mkdir()
    (tmp_path / "odd_methods" / "__init__.py").write_text("from odd_methods import inner\n")
    (tmp_path / "odd_methods" / "inner.py").write_text("VALUE = 3\n")
    (tmp_path / "unused.py").write_text("")
    importable(tmp_path)
    __import__("odd_methods")
    found = {name: text for name, text in own_modules().items() if (tmp_path / name).exists()}
    assert found == {
        "odd_methods/__init__.py": "from odd_methods import inner\n",
        "odd_methods/inner.py": "VALUE = 3\n",
    }


def test_folders_of_killed_jobs_are_removed(tmp_path: Path) -> None:
    """And those of jobs at work are not."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert killed.returncode == -9
    assert tree(left) == {"state": b"state"}
    with own_folder(tmp_path, "job-") as first:
        assert first.is_dir()
        assert not left.exists()
        with own_folder(tmp_path, "job-") as second:
            (second / "model").mkdir()
            assert first.is_dir()
        assert {path.name for path in tmp_path.iterdir()} == {first.name, f"{first.name}.lock"}
    assert not list(tmp_path.iterdir())


KILLED = """
import os, pathlib, sys
from rkr.locks import own_folder

with own_folder(pathlib.Path(sys.argv[1]), "job-") as folder:
    (folder / "state").write_text("state")
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""


# ---------------------------------------------------------------------------------------------------------
# Bad use


def test_what_runs_need() -> None:
    node = {"CPU": 16.0, "GPU": 2.0, "memory": 64e9}
    for needs, fits in (
        (Needs(), 16),
        (Needs(4), 4),
        (Needs(5), 3),
        (Needs(1, 0.5), 4),
        (Needs(1, 0.1), 16),
        (Needs(1, 3), 0),
        (Needs(1, 0, 10 * 10**9), 6),
    ):
        assert needs.fits(node) == fits
    assert Needs(1, 0.1).fits({"CPU": 16.0}) == 0
    assert Needs(2, 0.5, 10**9).options() == {"num_cpus": 2, "num_gpus": 0.5, "memory": 10**9}
    assert Needs(2).waiting().options() == {"num_cpus": 0.01, "num_gpus": 0.0}
    assert [byte_count(text) for text in (None, "4GB", "1.5 GiB", "500M", "7")] == [
        None,
        4 * 10**9,
        3 * 2**29,
        5 * 10**8,
        7,
    ]
    for wrong in ("x", "0GB", "4XB", "-1"):
        with pytest.raises(UsageError, match=f"--memory must be a size such as 4GB, not '{wrong}'"):
            byte_count(wrong)
    for given, said in (
        ({"gpus": 0.5}, "--gpus and --memory are for --cluster"),
        ({"cluster": "auto", "workers": 2}, "--workers: with --cluster"),
        ({"cluster": "auto", "gpus": 1.5}, "--gpus must be from 0 to 1, or a whole number, not 1.5"),
        ({"cluster": "auto", "gpus": -1.0}, "--gpus must be"),
    ):
        with pytest.raises(UsageError, match=said):
            Execution(**given)


def test_what_recipes_ask_for() -> None:
    """Options of the command come first; on this machine runs share what there is."""
    asked = ResourceSettings(threads=3, gpus=0.5, memory="2GB")
    for given, accelerator, found in (
        ({}, "auto", (3, 0.5, 2 * 10**9)),
        ({"threads": 1, "gpus": 2.0, "memory": 10**9}, "auto", (1, 2.0, 10**9)),
        ({"gpus": 0.0}, "auto", (3, 0.0, 2 * 10**9)),
        ({}, "cpu", (3, None, 2 * 10**9)),
    ):
        execution = Execution(cluster="auto", **given).asking(asked, accelerator)  # type: ignore[arg-type]
        assert (execution.threads, execution.gpus, execution.memory) == found
    assert Execution(cluster="auto").asking(ResourceSettings()) == Execution(cluster="auto")
    assert Execution().asking(asked) == Execution()


@pytest.mark.parametrize(
    ("words", "needs"),
    [((), Needs(2, 0.25, 3 * 10**9)), (("--threads", "1", "--gpus", "0.5", "--memory", "1GB"), Needs(1, 0.5, 10**9))],
)
@pytest.mark.parametrize("verb", ["run", "tune"])
def test_what_commands_ask_for(
    verb: str,
    words: tuple[str, ...],
    needs: Needs,
    tmp_path: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Needs] = []

    def asked(address: str, needs: Needs, accelerator: str) -> None:
        found.append(needs)
        raise UsageError(f"nothing is at {address}")

    monkeypatch.setattr("rkr.experiment.cluster.connect", asked)
    monkeypatch.setattr("rkr.cli.console.outlive", lambda cluster: None)  # no second process of the tests
    recipe = tmp_path / "few.toml"
    recipe.write_text(few_digits(("ewc",)) + '\n[resources]\nthreads = 2\ngpus = 0.25\nmemory = "3 GB"\n')
    given = (verb, str(recipe), "--method", "ewc", "--out", str(tmp_path / "runs"), "--cluster", "10.0.0.1:6379")
    assert command(*given, *words) == (2, "", "rkr: nothing is at 10.0.0.1:6379\n")
    assert found == [needs]


def pretend(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], facts: dict[str, str], init: Any) -> None:
    """A Ray with these nodes, whose versions are these."""
    ray = SimpleNamespace(
        init=init,
        is_initialized=lambda: False,
        shutdown=lambda: None,
        nodes=lambda: nodes,
        exceptions=SimpleNamespace(RayError=RuntimeError),
        get=lambda reference, timeout: reference,
        remote=lambda function: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: facts)),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
    )
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    for name, module in (("ray", ray), ("ray.util", ray), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]


def node(**resources: float) -> dict[str, Any]:
    about = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.7", "NodeManagerPort": 5, "NodeName": "gpu-7"}
    return {**about, "Resources": resources}


def test_clusters_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, before anything starts."""

    def nothing(**_: Any) -> None:
        pass

    def none(**_: Any) -> None:
        raise ConnectionError("Could not find any\nrunning Ray instance.")

    def other(**_: Any) -> None:
        raise RuntimeError("Version mismatch: the cluster has Ray 2.1,\n Python 3.9")

    own = versions()
    cases: list[tuple[Any, ...]] = [
        (
            "auto",
            Needs(),
            "auto",
            [node(CPU=4)],
            own,
            none,
            "no Ray cluster was found on this machine .*: Could not find",
        ),
        ("auto", Needs(), "auto", [node(CPU=4)], own, other, "Version mismatch: the cluster has Ray 2.1, Python 3.9$"),
        ("here", Needs(), "auto", [node(CPU=4)], own, nothing, "give auto, local, HOST:PORT or ray://HOST:PORT"),
        ("127.0.0.1:1", Needs(), "auto", [], own, nothing, r"no Ray cluster answers at 127\.0\.0\.1:1: is it"),
        (
            "auto",
            Needs(5),
            "auto",
            [node(CPU=4)],
            own,
            nothing,
            r"no room|no node has room .*\(5 CPU threads\).* 4 CPUs",
        ),
        ("auto", Needs(1, 1), "auto", [node(CPU=4)], own, nothing, "--gpus: no node of the cluster has a GPU"),
        ("auto", Needs(), "cuda", [node(CPU=4, GPU=1)], own, nothing, "--accelerator cuda: say with --gpus"),
        ("auto", Needs(1, 1), "cpu", [node(CPU=4, GPU=1)], own, nothing, "with --accelerator cpu none is used"),
    ]
    for key, said in (
        ("Python", "has Python 3.9.1, this machine has"),
        ("rkr", "has rkr 3.9.1"),
        ("torch", "has torch"),
    ):
        cases.append(("auto", Needs(), "auto", [node(CPU=4)], {**own, key: "3.9.1"}, nothing, f"node gpu-7 {said}"))
    cases.append(("auto", Needs(), "auto", [node(CPU=4)], {"missing": "No module named 'rkr'"}, nothing, "has no rkr"))
    for address, needs, accelerator, nodes, facts, init, said in cases:
        pretend(monkeypatch, nodes, facts, init)
        with pytest.raises(UsageError, match=said) as caught:
            connect(address, needs, accelerator)
        assert "\n" not in str(caught.value)
    pretend(monkeypatch, [node(CPU=4)], own, nothing)
    assert connect("auto", Needs()).room(Needs(2)) == 2
    assert list(different(own, own)) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"^--cluster needs Ray: pip install 'rkr\[cluster\]'$"):
        connect("auto", Needs())


@pytest.mark.parametrize("token", [True, False])
def test_the_token_of_this_machine_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bool) -> None:
    """`ray start` makes one; without it Ray's connections would be refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", *IMPATIENT):
        monkeypatch.setenv(name, "")  # to be restored at the end
        monkeypatch.delenv(name)
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    found: list[str | None] = []

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "ray":
                found.append(os.environ.get("RAY_AUTH_MODE"))
                raise ImportError(name)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(UsageError, match="--cluster needs Ray"):
        connect("10.0.0.1:6379", Needs())
    assert found == ["token" if token else None]
    assert os.environ["RAY_NUM_REDIS_GET_RETRIES"] == "2"


# ---------------------------------------------------------------------------------------------------------
# The queue


def test_events_name_the_node() -> None:
    event = Started("r", "f", ("a",), 1, 1, 0, False, 0, "gpu-7")
    assert from_json(event.to_json()) == event
    assert "node" not in Started("r", "f", ("a",), 1, 1, 0, False).to_json()


def test_the_queue_of_a_command(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    names = ("rkr", "ewc", "si", "lwf")
    runs = [(f"few {name} fixed", tmp_path / "few" / name / "fixed") for name in names]
    with Queue(tmp_path, runs) as queue:
        queue.told(Started(runs[0][0], "f", ("a", "b"), 3, 1, 0, False, 0, "gpu-7"))
        queue.told(Started(runs[1][0], "f", ("a", "b"), 3, 1, 0, False))
        queue.told(TaskEnd(runs[1][0], 1, "a", 2, (0.5,), None, None, 1.0))
        queue.told(Progress(runs[1][0], 2, "b", 0, 3, 1, 2, 0.5, None, 0.75, None))
        queue.told(Started(runs[1][0], "f", ("a", "b"), 3, 2, 0, True, 0, "gpu-8"))  # after it was lost
        queue.ended(runs[2][0], FileError("f: no room"))
        found = {entry.run.split()[1]: entry for entry in read_queue(tmp_path)}
        assert {name: entry.state for name, entry in found.items()} == {
            "rkr": "running",
            "ewc": "running",
            "si": "failed",
            "lwf": "waiting",
        }
        assert (found["rkr"].node, found["ewc"].node, found["ewc"].begun) == ("gpu-7", "gpu-8", 2)
        assert (found["ewc"].task, found["ewc"].done) == ((1, 2), 0.75)
        assert found["si"].reason == "f: no room"
        assert found["rkr"].folder == "few/rkr/fixed"
        code, out, _ = command("queue", str(tmp_path))
        assert code == 0
        assert "gpu-8" in out
        assert "f: no room" in out
        assert out.splitlines()[-1] == "2 running, 1 waiting, 1 failed"
        queue.ended(runs[0][0], None)
        queue.ended(runs[1][0], Interrupted())
    code, out, _ = command("queue", str(tmp_path), "--json")
    assert {entry["run"].split()[1]: entry["state"] for entry in json.loads(out)} == {
        "rkr": "finished",
        "ewc": "stopped",
        "si": "failed",
        "lwf": "stopped",
    }
    assert queue_words(read_queue(tmp_path)) == "1 failed, 2 stopped, 1 finished: repeat the command to resume them"
    assert command("queue", str(tmp_path / "none"))[0] == 2


def test_a_command_that_was_killed_runs_nothing(tmp_path: Path) -> None:
    queue = Queue(tmp_path, [("few rkr fixed", tmp_path / "few" / "rkr" / "fixed")])
    queue.__enter__()
    queue.told(Started("few rkr fixed", "f", ("a",), 1, 1, 0, False))
    assert [entry.state for entry in read_queue(tmp_path)] == ["running"]
    queue._held.release()  # as the end of the process does
    assert [entry.state for entry in read_queue(tmp_path)] == ["stopped"]
    folder = tmp_path / "few" / "rkr" / "fixed"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "results.jsonl").write_text('{"event": "end", "tasks": 1}\n')
    assert [entry.state for entry in read_queue(tmp_path)] == ["finished"]  # by another command since
    other = tmp_path / "few" / "ewc" / "fixed"
    other.mkdir(parents=True)
    (other / "run.json").write_text("{}")
    with FileLock(other / "lock"):
        assert next((e.folder, e.state) for e in read_queue(tmp_path)) == ("few/ewc/fixed", "running")
    assert next((e.folder, e.state) for e in read_queue(tmp_path)) == ("few/ewc/fixed", "stopped")


def test_old_queues_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkr.experiment.queue.KEPT", 3)
    for number in range(6):
        with Queue(tmp_path, [(f"r{number}", tmp_path / f"r{number}")]):
            pass
    assert len([name for name in os.listdir(tmp_path / ".queue") if name.endswith(".json")]) <= 4

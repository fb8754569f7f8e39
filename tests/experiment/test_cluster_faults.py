"""Runs on a Ray cluster whose processes are killed: the same bytes as from runs that nothing happens to."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import few_digits, outcome

from rkr.atomic import TEMPORARY
from rkr.data.download import find
from rkr.experiment.folder import RunFolder

pytest.importorskip("ray", reason="Ray is not installed")
if not Path("/proc").exists():
    pytest.skip("no /proc to find processes in", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SOURCE = str(Path(__file__).parents[2] / "src")
METHODS = ("rkr", "finetune", "ewc", "lwf")
EPOCHS = 24
BLOWS = [*["worker"] * 4, *["workers"] * 6, *["node"] * 3, *["command"] * 3]  # "workers" are both at once
KILLS = len(BLOWS) + BLOWS.count("workers")
SIZE = 100 << 20  # of each node's object store


class Nodes:
    """A head that does no jobs, and two nodes that do one each."""

    def __init__(self, jobs_on_head: int = 0) -> None:
        from helpers.clusters import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**self._args(jobs_on_head)})
        self.nodes = [self.cluster.add_node(**self._args(1)) for _ in range(2)]

    def _args(self, cpus: int) -> dict[str, Any]:
        return {"num_cpus": cpus, "object_store_memory": SIZE, "include_dashboard": False}

    def workers(self) -> list[int]:
        """Processes that do jobs: Ray calls them by the job's label."""
        raylets = {self._raylet(node) for node in self.nodes}
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent in raylets and title.startswith("ray::") and any(f"::{name} " in title for name in METHODS):
                found.append(int(path.name))
        return found

    @staticmethod
    def _raylet(node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)

    def kill_workers(self, draw: random.Random, count: int) -> int:
        """How many were killed: there may be fewer."""
        found = self.workers()
        chosen = draw.sample(found, min(count, len(found)))
        for process in chosen:
            os.kill(process, signal.SIGKILL)
        return len(chosen)

    def kill_node(self, draw: random.Random) -> None:
        node = draw.choice(self.nodes)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes.append(self.cluster.add_node(**self._args(1)))


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these clusters alone, and not in the user's home. Ray reads it once in a process."""
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: Path) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    from ray._raylet import Config

    Config.initialize("")  # read these anew
    (tmp_path / "hidden").mkdir()  # its import, of which nothing is used, takes longer than all that the runs do
    (tmp_path / "hidden" / "torchmetrics.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((SOURCE, str(tmp_path / "hidden"))))
    data = os.environ.get("RKR_DATA", "")
    monkeypatch.setenv("RKR_DATA", str(tmp_path / "none"))  # nodes have no data of their own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "nodes").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nodes"))  # of jobs
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # names of sockets are short
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # otherwise other work of the machine comes first
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # of 5 misses, until a node counts as lost
    made = Nodes()
    monkeypatch.setenv("RKR_DATA", data)  # of the commands
    yield made
    made.cluster.shutdown()


class Command:
    """`rkr run`, in a process of its own."""

    def __init__(self, recipe: Path, out: Path, *more: object, methods: tuple[str, ...] = METHODS) -> None:
        words = ["run", recipe, "--method", ",".join(methods), "--out", out, "--threads", 1, "--accelerator", "cpu"]
        self._out = open(out.parent / f"{out.name}-{time.monotonic_ns()}.log", "wb+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rkr", *map(str, words), "--json", "--no-figures", *map(str, more)],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        return Path(self._out.name).read_text()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        lines = [line for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [event for event in map(json.loads, lines) if event["event"] in kinds]

    def until(self, ready: Any, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while not ready() and self.process.poll() is None:
            assert time.monotonic() < end, self.text[-3000:]
            time.sleep(0.05)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "few.toml"
    path.write_text(few_digits(METHODS, augment=True))
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What runs leave that are executed here."""
    out = tmp_path_factory.mktemp("whole") / "runs"
    out.mkdir()
    command = Command(recipe, out, "--epochs", EPOCHS)
    assert command.process.wait() == 0, command.text
    return found(out)


def found(out: Path) -> dict[str, dict[str, bytes]]:
    return {method: outcome(out / f"few-{EPOCHS}-epochs" / method / "fixed") for method in METHODS}


def test_kills_at_random_moments(
    nodes: Nodes, recipe: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """Processes that do jobs, nodes and the command itself; states come back every 0.3 seconds."""
    draw, kills, rounds = random.Random(0), 0, 0
    plan = draw.sample(BLOWS, len(BLOWS))
    while plan:
        out = tmp_path / f"runs-{rounds}"
        out.mkdir()
        rounds += 1
        words = (recipe, out, "--epochs", EPOCHS, "--save-minutes", 0.005, "--cluster", nodes.cluster.address)
        command = Command(*words)
        seen = 0
        while command.process.poll() is None:
            command.until(lambda: len(command.events("epoch", "task")) > seen)  # noqa: B023
            time.sleep(draw.uniform(0, 1.0))
            if not plan or command.process.poll() is not None:
                command.process.wait()
                break
            seen, blow = len(command.events("epoch", "task")), plan.pop()
            if blow == "node":
                nodes.kill_node(draw)
                kills += 1
            elif blow == "command":
                command.process.kill()
                command.process.wait()
                for folder in (RunFolder(out / f"few-{EPOCHS}-epochs" / method / "fixed") for method in METHODS):
                    if not folder.finished:  # as if it had been writing what had come back
                        folder.model.mkdir(parents=True, exist_ok=True)
                        (folder.model / f"{TEMPORARY}half.tmp").write_bytes(b"half")
                command, seen, kills = Command(*words), 0, kills + 1
            else:
                wanted = 1 + (blow == "workers")
                done = nodes.kill_workers(draw, wanted)
                kills += done
                plan[:0] = ["worker"] * (wanted - done)
        assert command.process.returncode == 0, command.text[-3000:]
        assert found(out) == whole
    assert kills == KILLS >= 20
    left = list((tmp_path / "nodes").glob("rkr-job-*"))  # each job has removed those of killed ones
    assert len(left) <= 2 * len(nodes.nodes)  # a folder and its lock


def test_ctrl_c_and_going_on_without_a_cluster(
    nodes: Nodes, recipe: Path, whole: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """All runs save their states and come back; then the head is killed, which is told; then the runs go on here."""
    out = tmp_path / "runs"
    out.mkdir()
    words = (recipe, out, "--epochs", EPOCHS)
    address = nodes.cluster.address
    command = Command(*words, "--cluster", address)
    command.until(lambda: len({event["run"] for event in command.events("epoch")}) == 2)
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait() == 130, command.text
    stopped = command.events("stopped")
    assert 1 <= len(stopped) <= 2
    assert {str(path.parent) for path in out.rglob("state.safetensors")} >= {event["folder"] for event in stopped}
    assert {event["node"] for event in command.events("started")} != {None}
    again = Command(*words, "--save-minutes", 0.005, "--cluster", address)
    again.until(lambda: len(again.events("epoch")) > 4)
    nodes.cluster.remove_node(nodes.cluster.head_node, allow_graceful=False)
    assert again.process.wait(120) == 2, again.text
    assert f"the Ray cluster {address} is gone" in again.text.splitlines()[-1]
    here = Command(*words)
    assert here.process.wait() == 0, here.text
    assert any(event["resumed"] for event in here.events("started"))
    assert found(out) == whole


BESIDE = """
from torch import nn

class Flat(nn.Module):
    input_shape = (1, 28, 28)

    def __init__(self, classes=10):
        super().__init__()
        self.hidden, self.fc = nn.Linear(784, 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.hidden(x.flatten(1)).relu())
"""


@pytest.mark.skipif(find(["mnist"]) is None, reason="MNIST was not found ($RKR_DATA)")
def test_data_and_modules_are_sent(nodes: Nodes, tmp_path: Path) -> None:
    """What lies beside the recipe, and data that only this machine has: once to each node, and there they stay."""
    text = few_digits(("rkr", "finetune"), tasks=2).replace('source = "digits"', 'source = "mnist"')
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "few.toml").write_text(text.replace('name = "digits-net"', 'name = "beside_flat:Flat"'))
    (folder / "beside_flat.py").write_text(BESIDE)
    for name, words in (("there", ("--cluster", nodes.cluster.address)), ("here", ())):
        (tmp_path / name).mkdir()
        command = Command(folder / "few.toml", tmp_path / name, *words, methods=("rkr", "finetune"))
        assert command.process.wait() == 0, command.text[-3000:]
    for method in ("rkr", "finetune"):
        there, here = (outcome(tmp_path / name / "few" / method / "fixed") for name in ("there", "here"))
        assert there == here
    sent = {path.name for path in (tmp_path / "cache" / "rkr" / "sent").glob("*/mnist/*")}
    located = find(["mnist"])
    assert located is not None
    assert sent == {path.name for path in located.iterdir()}

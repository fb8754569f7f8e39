"""Ray Serve on a local cluster of two nodes: replicas answer alike, come back when killed, and learn of new tasks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import until
from helpers.zoos import CLASSES, make_zoo, picture, task_file

from rkr.errors import UsageError
from rkr.serve.client import Client, ServerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ray = pytest.importorskip("ray", reason="needs the extra cluster")
pytest.importorskip("ray.serve", reason="needs the extra cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Two nodes on this machine, a replica on each."""
    from helpers.clusters import Cluster
    from ray import serve

    from rkr.serve.cluster import Settings, start
    from rkr.serve.guard import Access
    from rkr.serve.limits import Limits

    folder = tmp_path_factory.mktemp("cluster") / "zoo"
    make_zoo(folder)
    paths = os.pathsep.join(p for p in sys.path if p)
    os.environ["PYTHONPATH"] = paths
    memory = 100_000_000
    head = {"num_cpus": 2, "object_store_memory": memory, "temp_dir": tempfile.mkdtemp(prefix="rkr-ray-", dir="/tmp")}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes.add_node(num_cpus=2, object_store_memory=memory)
        ray.init(nodes.address, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = Settings(folder, Limits(batch=1), Access(changes=True), threads=2)
        with pytest.raises(UsageError, match=r"--replicas 3: the cluster has room for 2 \(2 CPU threads each\)"):
            start(settings, nodes.address, 3, "127.0.0.1", port)
        start(settings, nodes.address, 2, "127.0.0.1", port, proxies="HeadOnly")
        yield f"http://127.0.0.1:{port}", folder
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(str(head["temp_dir"]), ignore_errors=True)


def processes() -> dict[int, str]:
    """Process and node of each replica."""
    from ray.util.state import list_actors

    actors = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    return {a.pid: a.node_id for a in actors if "Replica" in a.class_name}


def ask_once(url: str, data: bytes, task: str) -> str:
    """The task of an answer; empty if the replica does not know it yet."""
    try:
        return str(Client(url, retries=0).predict(data, task)[0]["task"])
    except ServerError as error:
        if error.status != 404:
            raise
        return ""


def test_replicas_answer_alike_and_come_back(cluster: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = cluster
    client, data = Client(url, retries=30), picture(tmp_path)
    before = processes()
    assert len(before) == len(set(before.values())) == 2
    answers = {task: [client.predict(data, task, top=3) for _ in range(20)] for task in CLASSES}
    assert all(found == many[0] for many in answers.values() for found in many)  # of both replicas, to the last bit

    client.add("ships", task_file(folder, "ships", tmp_path / "ships.safetensors"))
    until(lambda: all(ask_once(url, data, "ships") == "ships" for _ in range(20)), 60)  # all replicas have it

    wrong: list[Any] = []
    asked = 0
    over = threading.Event()

    def ask() -> None:
        nonlocal asked
        while not over.is_set():
            try:
                answer = client.predict(data, "birds", top=3)
            except ServerError as error:
                wrong.append(str(error))
                continue
            asked += 1
            if answer != answers["birds"][0]:
                wrong.append(answer)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    until(lambda: asked > 5, 120)
    killed = next(iter(before))
    os.kill(killed, signal.SIGKILL)
    until(lambda: len(now := processes()) == 2 and killed not in now, 300)
    seen = asked
    until(lambda: asked > seen + 20, 300)
    over.set()
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert [client.predict(data, "birds", top=3) for _ in range(20)] == [answers["birds"][0]] * 20

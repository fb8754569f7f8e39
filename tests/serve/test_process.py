"""`rkr serve` as a process: signals, kills, another process that learns, and the client."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import draw_classes
from helpers.servers import Served, served
from helpers.waiting import until
from helpers.zoos import CLASSES, make_zoo, picture, task_file
from PIL import Image

import rkr
from rkr.pictures.zoo import open_zoo
from rkr.serve.client import Client, ServerError

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """One server for all tests that do not end it."""
    folder = tmp_path_factory.mktemp("served") / "zoo"
    make_zoo(folder)
    with served(folder, "--allow-changes", "--max-batch", "1") as server:
        yield server, folder


def test_the_client_does_everything(shared: tuple[Served, Path], tmp_path: Path) -> None:
    server, folder = shared
    client = rkr.Client(server.url)
    file = tmp_path / "a.png"
    file.write_bytes(picture(tmp_path))
    (expected,) = open_zoo(folder, device="cpu").predict(file, task="birds", top=2)
    for given in (file, str(file), file.read_bytes(), Image.open(file), [file]):
        (found,) = client.predict(given, task="birds", top=2)
        assert [a["class"] for a in found["answers"]] == list(expected.classes)
        assert [a["probability"] for a in found["answers"]] == pytest.approx(list(expected.probabilities), abs=1e-6)
    assert client.predict(file, task="birds")[0]["picture"] == "a.png"
    assert client.predict(file, task="auto", false_alarms=0.01)[0]["task_probability"] > 0
    assert [task["name"] for task in client.tasks()] == list(CLASSES)
    added = client.add("ships", task_file(folder, "ships", tmp_path / "ships.safetensors"))
    assert (added["name"], added["classes"]) == ("ships", ["no", "yes"])
    assert client.task("ships")["bytes"] == added["bytes"]
    assert client.predict(file, task="ships")[0]["task"] == "ships"
    with pytest.raises(ServerError, match="already") as caught:
        client.add("ships", tmp_path / "ships.safetensors")
    assert caught.value.status == 409
    client.add("ships", tmp_path / "ships.safetensors", replace=True)
    client.drop("ships")
    with pytest.raises(ServerError, match="no task 'ships'") as caught:
        client.predict(file, task="ships")
    assert caught.value.status == 404
    with pytest.raises(rkr.FileError, match="nothing"):
        client.predict(tmp_path / "nothing.png")
    with pytest.raises(rkr.UsageError, match="path, bytes or an image"):
        client.predict([3])
    with pytest.raises(rkr.UsageError, match="http://"):
        Client("127.0.0.1:8000")
    with pytest.raises(ServerError, match="does not answer"):
        Client("http://127.0.0.1:9", retries=0).tasks()


def test_the_client_learns(shared: tuple[Served, Path], tmp_path: Path) -> None:
    server, folder = shared
    client, file = server.client(), picture(tmp_path)
    before = client.predict(file, task="birds", top=3)
    source = draw_classes(tmp_path / "colours", {"red": 12, "blue": 12})
    job = client.learn("colours", source)
    assert (job["state"], job["done"]) == ("learned", 1.0)
    assert client.learning("colours") == job
    assert client.predict(file, task="colours")[0]["task"] == "colours"
    assert client.predict(file, task="birds", top=3) == before
    with pytest.raises(ServerError, match="one class only"):
        client.learn("red", draw_classes(tmp_path / "red", {"red": 3}))
    client.drop("colours")
    assert "colours" not in open_zoo(folder, device="cpu").tasks


def test_a_task_that_rkr_learn_makes_is_served(command: Command, shared: tuple[Served, Path], tmp_path: Path) -> None:
    server, folder = shared
    client = server.client()
    source = draw_classes(tmp_path / "mine", {"red": 8, "blue": 8})
    assert command("learn", str(source), "--model", str(folder), "--epochs", "1", "--threads", "1")[0] == 0
    until(lambda: "mine" in [task["name"] for task in client.tasks()])
    assert client.predict(picture(tmp_path), task="mine")[0]["task"] == "mine"
    client.drop("mine")


def test_sigterm_finishes_what_was_accepted(tmp_path: Path) -> None:
    """Requests that would wait for a batch to fill are answered at once, and the process ends."""
    make_zoo(tmp_path / "zoo")
    data = picture(tmp_path)
    with served(tmp_path / "zoo", "--wait-ms", "600000", "--timeout", "600") as server:
        client, answers = server.client(retries=0, timeout=120), list[Any]()
        asking = [threading.Thread(target=lambda: answers.append(client.predict(data, "birds"))) for _ in range(4)]
        for thread in asking:
            thread.start()
        until(lambda: len(answers) == 4 or live(client)["waiting"] == 4)  # batches need not pay on this machine
        server.process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(60)
        server.process.wait(60)
        assert len(answers) == 4
        assert all(answer == answers[0] for answer in answers)
        with pytest.raises(ServerError):
            client.tasks()


def live(client: Client) -> dict[str, Any]:
    return client._ask("GET", "/v1/live")


def test_a_server_that_is_killed_while_it_learns_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    make_zoo(folder)
    source = draw_classes(tmp_path / "colours", {"red": 8, "blue": 8})
    with served(folder, "--allow-changes") as server:
        assert server.client().learn("colours", source, wait=False)["state"] in ("waiting", "learning")
        server.process.kill()
        server.process.wait()
    (left,) = (path for path in (folder / ".serving").iterdir() if path.is_dir())
    with served(folder, "--allow-changes") as server:
        client = server.client()
        job = client.learning("colours")
        assert (job["state"], job["error"]) == ("failed", "the server that learned it was ended")
        client.learn("colours", source)
        assert client.predict(picture(tmp_path), "colours")[0]["task"] == "colours"
        assert not left.exists()
    assert [path.suffix for path in (folder / ".serving").iterdir()] == [".json"]


def test_a_body_that_is_refused_gets_its_answer(shared: tuple[Served, Path]) -> None:
    """Though it is much larger than what a socket holds."""
    client = shared[0].client(retries=0)
    for ask, status in (
        (lambda: client.predict(bytes(40_000_000), "birds"), 413),
        (lambda: client._ask("POST", "/v1/tasks/birds/learn", bytes(40_000_000)), 409),
    ):
        with pytest.raises(ServerError) as caught:
            ask()
        assert caught.value.status == status


def test_connections_that_ask_for_nothing_are_closed(tmp_path: Path) -> None:
    make_zoo(tmp_path / "zoo")
    with served(tmp_path / "zoo", code="import rkr.serve.run; rkr.serve.run.IDLE = 0.5") as server:
        host, port = server.url.removeprefix("http://").split(":")
        silent, slow, asked = (socket.create_connection((host, int(port)), 60) for _ in range(3))
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        asked.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for one in (silent, slow):
            assert one.recv(100) == b""
            one.close()
        with asked.makefile("rb") as reply:
            assert b"200 OK" in reply.readline()
            assert reply.read().endswith(b'{"status": "ok"}\n')  # to the end: it is closed after a while, too
        asked.close()


def test_kill_and_restart_give_the_same_answers(tmp_path: Path) -> None:
    make_zoo(tmp_path / "zoo")
    data, found = [picture(tmp_path, seed) for seed in range(3)], []
    for how in (signal.SIGKILL, signal.SIGTERM):
        with served(tmp_path / "zoo", "--max-batch", "1") as server:
            client = server.client()
            found.append(
                ([client.predict(one, task, top=3) for one in data for task in CLASSES], [*map(str, client.tasks())])
            )
            server.process.send_signal(how)
            server.process.wait(20)
    assert found[0][0] == found[1][0]


def test_wrong_options_are_told(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "zoo"
    assert command("serve", str(folder))[0] == 2
    make_zoo(folder)
    token = tmp_path / "token"
    token.write_text("short")
    for words, said in [
        (("--host", "0.0.0.0"), "--token-file FILE, or say --insecure"),
        (("--token-file", str(token)), "at least 8"),
        (("--token-file", str(tmp_path / "none")), "No such file"),
        (("--port", "70000"), "--port must be 0 to 65535"),
        (("--max-batch", "0"), "limit batch"),
        (("--queue", "4"), "--queue must be at least --max-batch"),
        (("--replicas", "2"), "goes with --cluster"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--cache", "-1"), "--cache must be at least 0"),
        (("--device", "none"), "--device none cannot be used"),
        (("--cluster", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
    ]:
        code, out, err = command("serve", str(folder), *words)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = command("serve", str(folder), "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "choose another --port" in err


def test_a_missing_extra_is_told_in_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name in ("fastapi", "ray.serve") else find(name))
    code, out, err = command("serve", str(tmp_path))
    assert (code, out, err) == (2, "", "rkr: rkr serve needs fastapi: pip install 'rkr[serve]'\n")

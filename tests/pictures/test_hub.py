"""`rkr push` and `rkr pull` against a local stand-in for the Hub's HTTP interface. The real Hub is not asked."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import TINY, draw_classes

import rkr
from rkr.errors import FileError, UsageError
from rkr.pictures.hub import pull, push

pytest.importorskip("huggingface_hub")


class StandIn(BaseHTTPRequestHandler):
    """As much of the Hub as it takes to create a repository, to commit files and to download them."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, values: Any = None, data: bytes | None = None, **headers: str) -> None:
        body = json.dumps(values).encode() if data is None else data
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        body = self._body()
        self.asked.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values.get('organization') or 'me'}/{values['name']}"
            self.repositories.setdefault(name, {})
            self._answer(200, {"url": f"{self._root}/{name}", "name": name})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    assert entry["value"]["encoding"] == "base64"
                    content = base64.b64decode(entry["value"]["content"])
                    self.repositories[found[1]][entry["value"]["path"]] = content
            oid = "0" * 40
            self._answer(200, {"success": True, "commitUrl": f"{self._root}/{found[1]}/commit/{oid}", "commitOid": oid})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        else:
            self._answer(404, {"error": "not here"})

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self.path)
        files = self.repositories.get(found[1]) if found else None
        if found and files is None:
            self._answer(404, {}, X_Error_Code="RepoNotFound")
        elif found and files is not None and found[3] in files:
            data = files[found[3]]
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self._answer(200, data=data, ETag=etag, X_Repo_Commit="0" * 40)
        elif found:
            self._answer(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit="0" * 40)
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+(/revision/\w+)?", self.path):
            self._answer(200, {"id": "x", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        else:
            self._answer(404, {})

    do_HEAD = do_GET

    @property
    def _root(self) -> str:
        return f"http://{self.headers['Host']}"


@pytest.fixture
def hub() -> Iterator[tuple[str, type[StandIn]]]:
    handler = type("Handler", (StandIn,), {"repositories": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> rkr.Zoo:
    root = tmp_path_factory.mktemp("hub")
    draw_classes(root / "colours", {"red": 8, "green": 8, "blue": 8})
    rkr.learn(root / "colours", root / "zoo", backbone=TINY, epochs=1, batch=8)
    rkr.learn(root / "colours", root / "zoo", "second", epochs=1, batch=8)
    return rkr.open(root / "zoo")


def run(endpoint: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`rkr words` with a Hub at another address."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": path,
    }
    more |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    words = (sys.executable, "-m", "rkr", *words)
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **more})


def test_push_and_pull(zoo: rkr.Zoo, tmp_path: Path, hub: tuple[str, type[StandIn]]) -> None:
    endpoint, handler = hub
    done = run(endpoint, tmp_path / "home", "push", str(zoo.folder), "colours", "me/colours", "--licence", "mit")
    assert done.returncode == 0, done.stderr
    assert sorted(handler.repositories["me/colours"]) == ["README.md", "task.safetensors"]
    card = handler.repositories["me/colours"]["README.md"].decode()
    assert 'license: "mit"' in card
    assert "rkr pull me/colours --model zoo/" in card
    zoo.copy("second", tmp_path / "other")
    done = run(endpoint, tmp_path / "home", "pull", "me/colours", "--model", str(tmp_path / "other"), "--task", "paint")
    assert done.returncode == 0, done.stderr
    other = rkr.open(tmp_path / "other")
    assert list(other.tasks) == ["second", "paint"]
    assert other.model.fingerprint("paint") == zoo.model.fingerprint("colours")
    for name, message in (("me/nothing", "not found on the Hub"), ("nonsense", "is neither a folder nor OWNER/NAME")):
        done = run(endpoint, tmp_path / "home", "pull", name, "--model", str(tmp_path / "other"))
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr


def test_a_hub_that_cannot_be_reached(zoo: rkr.Zoo, tmp_path: Path) -> None:
    done = run("http://127.0.0.1:9", tmp_path, "push", str(zoo.folder), "colours", "me/colours")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be reached" in done.stderr


def test_the_base_is_compared_first(zoo: rkr.Zoo, tmp_path: Path) -> None:
    draw_classes(tmp_path / "shapes", {"disc": 6, "square": 6})
    other = rkr.learn(tmp_path / "shapes", tmp_path / "zoo", backbone=TINY, arguments={"width": 4}, epochs=1, batch=8)
    before = sorted(os.listdir(tmp_path / "zoo"))
    push(zoo, "colours", folder=tmp_path / "repository")
    with pytest.raises(FileError, match="belongs to another base network"):
        pull(str(tmp_path / "repository"), tmp_path / "zoo")
    assert sorted(os.listdir(tmp_path / "zoo")) == before
    assert list(rkr.open(tmp_path / "zoo").tasks) == list(other.tasks)
    with pytest.raises(FileError, match="belongs to another base network"):
        zoo.copy("colours", tmp_path / "zoo")


def test_other_people_s_functions_are_not_called(zoo: rkr.Zoo, tmp_path: Path) -> None:
    push(zoo, "colours", folder=tmp_path / "repository")
    with pytest.raises(UsageError, match=r"the function helpers.pictures:tiny, which is not called for you"):
        pull(str(tmp_path / "repository"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"network": {"backbone": "timm:x", "arguments": {"checkpoint_path": "/x"}}}, "could name files or addresses"),
        ({"network": {"backbone": "timm:x", "arguments": ["x"]}}, "could name files or addresses"),
        ({"network": {"backbone": "efficientnet-lite0"}, "preparation": {"size": "large"}}, "a preparation needs"),
        ({"network": {"backbone": "efficientnet-lite0"}, "preparation": []}, "a preparation needs"),
    ],
)
def test_records_of_other_people_are_checked(
    zoo: rkr.Zoo, tmp_path: Path, stated: dict[str, object], message: str
) -> None:
    other = rkr.open(zoo.folder)
    task = other.model.tasks["colours"]
    task.about = {**task.about, **stated}
    push(other, "colours", folder=tmp_path / "repository")
    with pytest.raises(UsageError, match=message):
        pull(str(tmp_path / "repository"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_bad_calls(zoo: rkr.Zoo, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="say where to"):
        push(zoo, "colours")
    with pytest.raises(UsageError, match="a repository is called OWNER/NAME"):
        push(zoo, "colours", "birds")
    with pytest.raises(UsageError, match="no task is named 'x'"):
        push(zoo, "x", folder=tmp_path)
    with pytest.raises(FileError, match=r"has no task.safetensors"):
        pull(str(tmp_path), tmp_path / "zoo")


def test_the_card_cannot_be_broken_by_names(tmp_path: Path) -> None:
    draw_classes(tmp_path / "p", {"red": 6, "green": 6})
    (tmp_path / "p/red").rename(tmp_path / "p/<script>|[x](y)")
    made = rkr.learn(tmp_path / "p", tmp_path / "zoo", "a: b\"'", backbone=TINY, epochs=1, batch=8)
    push(made, "a: b\"'", folder=tmp_path / "repository")
    card = (tmp_path / "repository/README.md").read_text()
    assert "<script>" not in card.replace("\\<script\\>", "")
    head = card.split("---")[1]
    assert all(json.loads(line.partition(": ")[2]) for line in head.strip().splitlines())

"""A small zoo, and servers of it in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import until
from helpers.zoos import make_zoo, picture

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from starlette.testclient import TestClient

from rkr.pictures.zoo import open_zoo
from rkr.serve.app import build_app
from rkr.serve.guard import Access
from rkr.serve.limits import Limits
from rkr.serve.server import Server

Serve = Callable[..., tuple[TestClient, Server]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A zoo with three tasks."""
    make_zoo(tmp_path / "zoo")
    return tmp_path / "zoo"


@pytest.fixture
def pictures(tmp_path: Path) -> list[bytes]:
    """Eight PNG files."""
    return [picture(tmp_path / "pictures", seed) for seed in range(8)]


@pytest.fixture
def serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a server of the zoo; by default one that can be changed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the processes that learn
    with ExitStack() as stack:

        def start(access: Access | None = None, **limits: Any) -> tuple[TestClient, Server]:
            said: list[dict[str, Any]] = []
            server = Server(
                open_zoo(folder, device="cpu"),
                Limits(**limits),
                access or Access(changes=True),
                threads=1,
                tell=lambda event, **fields: said.append({"event": event, **fields}),
            )
            server.said = said  # type: ignore[attr-defined]
            client = TestClient(build_app(server), "http://127.0.0.1", raise_server_exceptions=False)
            stack.enter_context(client)
            until(lambda: server.engine.ready)
            return client, server

        yield start

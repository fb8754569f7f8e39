"""`rkr serve` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rkr.serve.client import Client


@dataclass
class Served:
    """A server that runs.

    Attributes:
        process: Its process.
        url: Where it listens.
        lines: Its log.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[dict[str, Any]] = field(default_factory=list)

    def client(self, **options: Any) -> Client:
        """A client of it."""
        return Client(self.url, **options)


@contextlib.contextmanager
def served(folder: Path, *options: str, code: str = "", seconds: float = 300) -> Iterator[Served]:
    """Start a server on any free port, after some Python code, and wait until it answers."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    start = f"{code}\nfrom rkr.cli import main; main()"
    words = ["serve", str(folder), "--port", "0", "--threads", "1", "--json", *options]
    command = [sys.executable, "-c", start, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[dict[str, Any]] = []
    urls: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as log:
            for line in log:
                try:
                    lines.append(json.loads(line))
                except ValueError:
                    lines.append({"event": "other", "text": line})
                if lines[-1]["event"] == "listening":
                    urls.put(lines[-1]["url"])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        try:
            url = urls.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"the server did not start: {lines}") from None
        found = Served(process, url, lines)
        end = time.monotonic() + seconds
        while not found.client().ready():
            assert time.monotonic() < end
            time.sleep(0.05)
        yield found
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)

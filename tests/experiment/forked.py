"""Processes to kill, started by a fork server that has everything imported."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Process:
    """A process that the fork server has started."""

    def __init__(self, server: Server, pid: int, files: Path) -> None:
        self.server, self.pid, self._files = server, pid, files
        self._code: int | None = None

    @property
    def stdout(self) -> str:
        return self._read("out")

    @property
    def stderr(self) -> str:
        return self._read("err")

    def _read(self, which: str) -> str:
        path = Path(f"{self._files}.{which}")
        return path.read_text() if path.exists() else ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        whole = self.stdout[: self.stdout.rfind("\n") + 1]
        return [event for event in map(json.loads, whole.splitlines()) if event["event"] == kind]

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self.server.ask({"poll": self.pid})
        return self._code

    def wait(self, seconds: float = 600) -> int:
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {seconds} s: {self.stdout[-2000:]}{self.stderr[-2000:]}")
            time.sleep(0.005)
        assert self._code is not None
        return self._code

    def until(self, ready: Callable[[], object], seconds: float = 600) -> None:
        """Wait for something, or for the process's end."""
        end = time.monotonic() + seconds
        while not ready() and self.poll() is None:
            assert time.monotonic() < end, self.stderr
            time.sleep(0.002)

    def signal(self, number: int, group: bool = False) -> None:
        if self.poll() is None:
            (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> int:
        """kill -9; the exit code, which is another than -9 if it was too late."""
        self.signal(signal.SIGKILL)
        return self.wait()


class Server:
    """Starts processes that have everything imported."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        source = str(HERE.parents[1] / "src")
        paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, do: str, environment: dict[str, str] | None = None, **job: Any) -> Process:
        self._count += 1
        files = self._folder / str(self._count)
        outputs = {"stdout": f"{files}.out", "stderr": f"{files}.err", "environment": environment or {}}
        return Process(self, self.ask({"do": do, **outputs, **job}), files)

    def cli(self, *words: object, **job: Any) -> Process:
        """`rkr words`."""
        return self.start("cli", argv=[str(word) for word in words], **job)

    def together(self, count: int, do: str, kill_others: bool = False, **job: Any) -> list[Process]:
        """Several processes with the environment that torchrun gives them, all waited for.

        Like torchrun, ends the others when the first process fails, if that is expected; a fault is the first one's.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
        fault = {"fault": job.pop("fault")} if "fault" in job else {}
        crew = [
            self.start(do, {**shared, "RANK": str(n), "LOCAL_RANK": str(n)}, **job, **({} if n else fault))
            for n in range(count)
        ]
        crew[0].wait()
        for process in crew[1:]:
            if kill_others:
                process.kill()
            process.wait()
        return crew

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

"""The executor of this machine: processes that do jobs, one after another.

`concurrent.futures` has the threads and futures, but not the processes: those of its ProcessPoolExecutor are all
ended if one of them is killed, cannot be told to save their state and stop, pass nothing on before the result, and go
on when the process that started them is killed.

A process reads a job a line from its standard input, and writes its events and its result as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

from rkr.errors import RkrError
from rkr.experiment.events import Event
from rkr.experiment.execution import STOPPED, Interrupted
from rkr.experiment.executors import Executor, Lost, Told, error_from, error_json
from rkr.experiment.jobs import Job, Site, perform
from rkr.importing import search_path

END_SECONDS = 10.0


class Worker:
    """A process that does jobs. It has a session of its own, so that Ctrl-C reaches it once, through this process."""

    def __init__(self, threads: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from rkr.experiment.workers import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": search_path()},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def do(self, job: Job, told: Told) -> Any:
        """Do a job: its result, or what it raised. `Lost` if the process has ended."""
        from rkr.experiment.display import relay

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, which is seen below
            print(json.dumps(job.to_json()), file=self._process.stdin, flush=True)
        answers: list[dict[str, Any]] = []
        for line in self._process.stdout:
            relay([line], lambda event: told(job, event), lambda text: answers.append(_answer(text)))
            if answers and answers[-1]:
                if "error" in answers[-1]:
                    raise error_from(answers[-1]["error"])
                return answers[-1]["result"]
        code = self._process.wait()
        if code in (STOPPED, -signal.SIGINT, -signal.SIGTERM):  # by the signal itself: it had nothing to save yet
            raise Interrupted
        words = self._last_words()
        raise Lost(f"ended with code {code}" + (f": {words}" if words else ""))

    def stop(self) -> None:
        """Let its job save its state and end."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let it end; it is killed if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # what was to be written cannot be read any more
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    @property
    def ended(self) -> bool:
        """Whether it can do no more jobs."""
        return self._process.poll() is not None

    def _last_words(self) -> str:
        """The last line that it wrote of an error."""
        with contextlib.suppress(ValueError):  # closed
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


class Workers(Executor):
    """Processes of this machine.

    Args:
        count: How many at once. They start with the first jobs and last until the executor is closed.
        threads: CPU threads of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        self._count, self._threads = count, threads
        self._pool = ThreadPoolExecutor(count)  # a thread listens to each process
        self._idle: list[Worker] = []
        self._at_work: dict[Job, Worker] = {}
        self._stopped: set[Job | None] = set()  # None: all
        self._lock = threading.RLock()  # a signal's handler may stop a job amid the start of another

    @property
    def capacity(self) -> int:
        return self._count

    def submit(self, job: Job, told: Told) -> Future[Any]:
        return self._pool.submit(self._do, job, told)

    def _do(self, job: Job, told: Told) -> Any:

        with self._lock:
            if self._stopped & {None, job}:
                raise Interrupted
            worker = self._idle.pop() if self._idle else None
        worker = worker or Worker(self._threads)
        with self._lock:
            self._at_work[job] = worker
            if self._stopped & {None, job}:  # while it was being started, so nobody has told it
                worker.stop()
        try:
            return worker.do(job, told)
        finally:
            with self._lock:
                del self._at_work[job]
                if not worker.ended:
                    self._idle.append(worker)
            if worker.ended:
                worker.close()

    def stop(self, job: Job | None = None) -> None:
        with self._lock:
            self._stopped.add(job)
            for each, worker in self._at_work.items():
                if job in (None, each):
                    worker.stop()

    def close(self, kill: bool = False) -> None:
        with self._lock:
            self._stopped.add(None)
            workers = [*self._at_work.values(), *self._idle]
        for worker in workers if kill else ():
            worker.kill()
        self._pool.shutdown()
        for worker in self._idle:
            worker.close()
        self._idle.clear()


def _answer(line: str) -> dict[str, Any]:
    """The result in a line, if it is one."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.keys() & {"result", "error"} else {}


# ---------------------------------------------------------------------------------------------------------
# In the process


def main() -> None:
    """Do the jobs that come, until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    at_work = threading.Event()

    def listen() -> None:
        # Not from `sys.stdin`: Python cannot end while a thread waits within its buffer.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                jobs.put(line)
        jobs.put(None)
        if at_work.is_set():  # the process that started this one has ended
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    site = Site(crew=Workers)
    while (line := jobs.get()) is not None:
        at_work.set()
        _answer_to(Job.from_json(json.loads(line)), site, out)
        at_work.clear()


def _answer_to(job: Job, site: Site, out: TextIO) -> None:
    """Do a job and write its result."""
    from rkr.experiment.display import JsonLines

    tell = JsonLines(out)

    def watch(event: Event) -> None:
        try:
            tell(event)
        except BrokenPipeError:  # the process that started this one has ended, seen here before its lines have ended
            os.kill(os.getpid(), signal.SIGTERM)

    site.watch = watch
    try:
        answer = {"result": perform(job, site)}
    except (Interrupted, RkrError) as error:
        answer = {"error": error_json(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": error_json(error)}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(answer), file=out, flush=True)

"""Worker processes: each runs the same command and writes its events to standard output."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Generic, TypeVar

from rkr.errors import RkrError
from rkr.importing import search_path

if TYPE_CHECKING:
    from typing_extensions import Self

    from rkr.experiment.events import Event, Watch
    from rkr.experiment.loop import CandidateKey

STOPPED = 130  # exit code of a run that was interrupted and can go on
DONE = "done"  # what a process says after each candidate
END_SECONDS = 10.0
MARK = "RKR_WORKER"  # in the environment of such a process

J = TypeVar("J")


class Worker:
    """A process whose events are passed on here.

    Args:
        command: What it runs.
        threads: Of its computing.
        asked: Whether it waits for lines on its standard input.

    It has a session of its own, so that Ctrl-C reaches it once, through this process.
    """

    def __init__(self, command: Sequence[str], threads: int, asked: bool = False) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if asked else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": search_path(), MARK: "1"},
            start_new_session=True,
        )
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._said.extend, args=(_there(self._process.stderr),), daemon=True)
        self._listener.start()

    def relay(self, watch: Watch) -> bool:
        """Tell its events until it says that it is done (True), or until it ends."""
        from rkr.experiment.display import relay

        done = False

        def lines() -> Iterator[str]:
            nonlocal done
            for line in _there(self._process.stdout):
                if line.strip() == DONE:
                    done = True
                    return
                yield line

        relay(lines(), watch)
        return done

    def ask(self, line: str) -> None:
        """Write a line to its standard input; if it has ended, `relay` tells."""
        with contextlib.suppress(OSError, ValueError):
            print(line, file=_there(self._process.stdin), flush=True)

    def stop(self) -> None:
        """Let it save its state and end."""
        self._process.send_signal(signal.SIGTERM)
        self._dismiss()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """Let one that waits for lines end."""
        self._dismiss()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self.end()

    def end(self) -> tuple[int, str]:
        """Wait for its end: its exit code, and the last that it said of an error."""
        code = self._process.wait()
        self._listener.join()
        self._dismiss()
        for file in (self._process.stdout, self._process.stderr):
            _there(file).close()
        last = next((line for line in reversed(self._said) if line.strip()), f"ended with code {code}")
        return code, last.strip().removeprefix("rkr: ")

    def _dismiss(self) -> None:
        """No more lines will come."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what was to be written cannot be read any more
                self._process.stdin.close()


def asked_lines() -> Iterable[bytes]:
    """What the process that started this one asks, as it comes.

    Not from `sys.stdin`: Python cannot end while a thread waits within its buffer.
    """
    return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)


def was_stopped(code: int) -> bool:
    """Whether a process was interrupted; by the signal itself if it had nothing to save yet."""
    return code in (STOPPED, -signal.SIGINT, -signal.SIGTERM)


class Pool(Generic[J]):
    """Processes that do jobs for this one, several at once.

    Args:
        count: How many at once.
        start: Makes the process for a job.
        lasting: Whether processes stay for other jobs: each job is a line of JSON, and they say `DONE` after it.
        harmless: Exit codes after which further jobs are begun.
    """

    def __init__(
        self, count: int, start: Callable[[J], Worker], lasting: bool = False, harmless: Container[int] = ()
    ) -> None:
        self._count, self._start, self._lasting, self._harmless = count, start, lasting, harmless
        self._workers: dict[int, Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in list(self._workers.values()):
            worker.close()
        self._workers.clear()

    def do(
        self, jobs: Sequence[J], told: Callable[[J, Event], None], asked: Callable[[], bool]
    ) -> Iterator[tuple[J, int | None, str]]:
        """Do jobs, and yield each one that has ended.

        With it come the exit code of its process, None if that stays, and the last that it said of an error.

        Args:
            jobs: No further one is begun after an exit code that is not harmless.
            told: Gets their events, from any thread.
            asked: Whether to stop: then no further one is begun, and those at work save their states and end.
        """
        waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        ended: queue.SimpleQueue[tuple[J, int | None, str] | None] = queue.SimpleQueue()  # None: a thread has ended
        over, stopping = threading.Event(), threading.Event()

        def work(place: int) -> None:
            with contextlib.suppress(queue.Empty):
                while not over.is_set():
                    job = waiting.get_nowait()
                    try:
                        code, said = serve(place, job)
                    except Exception as error:
                        code, said = 1, str(error)
                    if code is not None and code not in self._harmless:
                        over.set()
                    ended.put((job, code, said))
            ended.put(None)

        def serve(place: int, job: J) -> tuple[int | None, str]:
            worker = self._workers.get(place)
            if worker is None:
                worker = self._workers[place] = self._start(job)
                if stopping.is_set():  # while it was being started, so nobody has told it
                    worker.stop()
            if self._lasting:
                worker.ask(json.dumps(job))
            if worker.relay(lambda event: told(job, event)):
                return None, ""
            self._workers.pop(place, None)
            return worker.end()

        left = min(self._count, len(jobs))
        crew = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(left)]
        try:
            for member in crew:
                member.start()
            while left:
                with contextlib.suppress(queue.Empty):
                    one = ended.get(timeout=0.1)
                    left -= one is None
                    if one is not None:
                        yield one
                if not stopping.is_set() and asked():
                    over.set()
                    stopping.set()
                    for worker in list(self._workers.values()):
                        worker.stop()
        except BaseException:
            over.set()
            for worker in list(self._workers.values()):
                worker.kill()
            for member in crew:
                member.join(END_SECONDS)
            raise


class Helpers(Pool["CandidateKey"]):
    """Processes that train a run's candidates. They start with the first candidate and last until the run ends.

    Args:
        command: Runs `Run.help` of the same run, with lines from the standard input, and says `DONE` after each.
        count: How many, at most.
        threads: Of each.
    """

    def __init__(self, command: Sequence[str], count: int, threads: int) -> None:
        self._command = command
        super().__init__(count, lambda key: Worker(command, threads, asked=True), lasting=True)

    def train(
        self, keys: Sequence[CandidateKey], told: Callable[[CandidateKey, Event], None], asked: Callable[[], bool]
    ) -> Iterator[CandidateKey]:
        """Train candidates, and yield each one that is done; several at once.

        Args:
            keys: Which candidates.
            told: Called with their events, from any thread.
            asked: Whether to stop: then raises `Interrupted` when all states are saved.
        """
        from rkr.experiment.loop import Interrupted

        errors: list[str] = []
        over = False  # a process has ended or must end

        def stop() -> bool:
            nonlocal over
            over = over or asked()
            return over

        for key, code, said in self.do(keys, told, stop):
            if code is None:
                yield key
                continue
            if not was_stopped(code) and not over:
                errors.append(f"{_name(key)}: its process {_what(code, said)}; run the same command again to resume")
            over = True
        if errors:
            raise RkrError("; ".join(errors))
        if over:
            raise Interrupted


def _name(key: CandidateKey) -> str:
    return f"task {key.number + 1}, round {key.round + 1}, candidate {key.place + 1}"


def _what(code: int, said: str) -> str:
    return said if said == f"ended with code {code}" else f"failed: {said}"


def _there(file: IO[str] | None) -> IO[str]:
    assert file is not None
    return file

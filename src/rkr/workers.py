"""Other processes at work for this one: each runs the same command, and tells its events on its standard output."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

from rkr.errors import RkrError

if TYPE_CHECKING:
    from rkr.engine.events import Event, Watch
    from rkr.engine.loop import Spot

STOPPED = 130  # exit code of a run that was interrupted and can go on
DONE = "done"  # what a process says after each candidate
END_SECONDS = 10.0


class Worker:
    """A process whose events are told here.

    Args:
        command: What it runs.
        threads: Of its computing.
        asked: Whether it waits for lines on its standard input. Then it has a session of its own too, so that Ctrl-C
            reaches it through this process only.
    """

    def __init__(self, command: Sequence[str], threads: int, asked: bool = False) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if asked else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=asked,
        )
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._said.extend, args=(_there(self._process.stderr),), daemon=True)
        self._listener.start()

    def relay(self, watch: Watch) -> bool:
        """Tell its events until it says that it is done (True), or until it ends."""
        from rkr.display import relay

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


class Processes:
    """Trains candidates of a run in processes, which start with the first of them and stay until the run is over.

    Args:
        command: Runs `Run.help` of the same run, with lines from the standard input, and says `DONE` after each.
        count: How many, at most.
        threads: Of each.
    """

    def __init__(self, command: Sequence[str], count: int, threads: int) -> None:
        self._command, self._count, self._threads = command, count, threads
        self._workers: dict[int, Worker] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in list(self._workers.values()):
            worker.close()
        self._workers.clear()

    def train(
        self, spots: Sequence[Spot], told: Callable[[Spot, Event], None], asked: Callable[[], bool]
    ) -> Iterator[Spot]:
        """Train candidates, and yield each one that is done; see `rkr.engine.candidates.Crew`."""
        from rkr.engine.loop import Interrupted

        waiting: queue.SimpleQueue[Spot] = queue.SimpleQueue()
        for spot in spots:
            waiting.put(spot)
        done: queue.SimpleQueue[Spot | None] = queue.SimpleQueue()  # None: a thread has ended
        errors: list[str] = []
        interrupted, over = threading.Event(), threading.Event()

        def work(place: int) -> None:
            try:
                while not over.is_set():
                    spot = waiting.get_nowait()
                    worker = self._workers.get(place)
                    if worker is None:
                        worker = self._workers[place] = Worker(self._command, self._threads, asked=True)
                        if over.is_set():  # while it was being started, so nobody has told it
                            worker.stop()
                    worker.ask(json.dumps(spot))
                    if worker.relay(lambda event, spot=spot: told(spot, event)):  # type: ignore[misc]
                        done.put(spot)
                        continue
                    self._workers.pop(place, None)
                    code, said = worker.end()
                    if was_stopped(code) or over.is_set():
                        interrupted.set()
                    else:
                        errors.append(f"{_name(spot)}: its process {_what(code, said)}; the same command goes on")
                    return
            except queue.Empty:
                pass
            except Exception as error:
                errors.append(f"candidates: {error}")
            finally:
                done.put(None)

        left = min(self._count, len(spots))
        crew = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(left)]
        try:
            for member in crew:
                member.start()
            while left:
                with contextlib.suppress(queue.Empty):
                    trained = done.get(timeout=0.1)
                    left -= trained is None
                    if trained is not None:
                        yield trained
                if not over.is_set() and (asked() or errors or interrupted.is_set()):
                    over.set()
                    for worker in list(self._workers.values()):
                        worker.stop()
        except BaseException:
            over.set()
            for worker in list(self._workers.values()):
                worker.kill()
            for member in crew:
                member.join(END_SECONDS)
            raise
        if errors:
            raise RkrError("; ".join(errors))
        if over.is_set():
            raise Interrupted


def _name(spot: Spot) -> str:
    return f"task {spot.number + 1}, round {spot.round + 1}, candidate {spot.place + 1}"


def _what(code: int, said: str) -> str:
    return said if said == f"ended with code {code}" else f"failed: {said}"


def _there(file: IO[str] | None) -> IO[str]:
    assert file is not None
    return file

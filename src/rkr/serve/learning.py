"""Tasks that are learned in the background: `rkr learn` in a process of its own, one after the other.

A crash or a lack of memory there does not touch the server, and its answers are not slowed down by Python's lock. What
is told of a job lies in a file in the model folder, so that all replicas of a cluster know it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rkr.core.zoo import read_about
from rkr.errors import FileError, RkrError
from rkr.importing import search_path
from rkr.locks import is_locked, lock_of, own_folder
from rkr.pictures.learn import prepare
from rkr.pictures.zoo import lesson_folder
from rkr.serve.decode import remove, unpack
from rkr.serve.limits import Busy, Limits, NotFound, Refused, without

JOBS = ".serving"  # folder within a zoo with a file for each job, and a folder of each server that is at work
KEPT = 100  # jobs that are told of after they have ended
GRACE = 3.0  # seconds that a process has to stop
State = Literal["waiting", "learning", "learned", "failed", "cancelled"]
COMMAND = "import os; hasattr(os, 'nice') and os.nice(10); from rkr.cli import main; main()"


@dataclass
class Job:
    """A task that is learned, or was.

    Attributes:
        task: Its name.
        state: Where it stands.
        done: Share of the training that is done, 0 to 1.
        doing: What is being done, in words.
        accuracy: On the validation part, of the last epoch or, at the end, of the task.
        seconds_left: Estimated.
        error: Why it failed.
        started: When it was asked for, in seconds since 1970.
    """

    task: str
    state: State = "waiting"
    done: float = 0.0
    doing: str = "waiting for other tasks"
    accuracy: float | None = None
    seconds_left: float | None = None
    error: str | None = None
    started: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self.state in ("learned", "failed", "cancelled")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


class Learning:
    """The jobs of a model folder.

    Args:
        folder: The zoo.
        limits: Bounds.
        threads: For each process.
        tell: Gets what belongs into the log.
        learned: Called when a task was added to the folder.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        threads: int | None,
        tell: Callable[..., None],
        learned: Callable[[], object],
    ) -> None:
        self._folder, self._limits, self._threads = folder, limits, threads
        self._tell, self._learned = tell, learned
        self._waiting: deque[tuple[Job, Path, Path]] = deque()
        self._running: tuple[Job, subprocess.Popen[str] | None] | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._folders, self._own = contextlib.ExitStack(), Path()  # empty: there is none yet
        self._thread = threading.Thread(target=self._run, name="rkr-learning", daemon=True)
        self._thread.start()

    # -- from other threads -------------------------------------------------------------------------------

    def work(self) -> Path:
        """A new folder for what comes with a request."""
        return Path(tempfile.mkdtemp(dir=self._place()))

    def check(self, task: str) -> None:
        """Raise Refused if a task of this name cannot be learned now."""
        with self._changed:
            names = [job.task for job, *_ in self._waiting] + ([self._running[0].task] if self._running else [])
            if self._stopping:
                raise Busy("the server is shutting down", 5)
            if task in names:
                raise Refused(409, f"the task {task!r} is being learned already")
            if len(self._waiting) >= self._limits.jobs:
                raise Busy(f"{len(self._waiting)} tasks are waiting to be learned already: try again later", 60)

    def add(self, task: str, upload: Path, work: Path) -> Job:
        """Learn a task from a zip file. It is checked and unpacked now; the folder `work` is removed at the end."""
        self.check(task)
        pictures = work / "pictures"
        try:
            source = unpack(upload, pictures, self._limits)
            upload.unlink()
            prepare(source, self._folder, task, None, None, None, {})
        except FileError as error:
            raise Refused(422, without(str(error), work, "the zip file")) from error
        except RkrError as error:
            if isinstance(error, Refused):
                raise
            raise Refused(409 if "already" in str(error) else 422, without(str(error), work, "the zip file")) from error
        job = Job(task, started=time.time())
        with self._changed:
            self.check(task)
            self._waiting.append((job, source, work))
            self._note(job)
            self._changed.notify()
        return job

    def job(self, task: str) -> Job:
        """The last job of a task."""
        found = _read(self._path(task))
        if found is None:
            raise NotFound(f"no task {task!r} was learned here")
        return found

    def jobs(self) -> list[Job]:
        """All jobs that are known, the last one first."""
        return sorted(self._known(), key=lambda job: job.started, reverse=True)

    def cancel(self, task: str) -> Job:
        """Stop learning a task."""
        with self._changed:
            for entry in list(self._waiting):
                if entry[0].task == task:
                    self._waiting.remove(entry)
                    self._end(entry[0], "cancelled", entry[2])
                    return entry[0]
            running = self._running
            if running is not None and running[0].task == task:
                running[0].state = "cancelled"
                self._note(running[0])
        if running is None or running[0].task != task:
            job = self.job(task)
            if job.over:
                raise Refused(409, f"the task {task!r} is not being learned: it is {job.state}")
            raise Refused(409, f"the task {task!r} is being learned by another process: ask that one")
        if running[1] is not None:
            running[1].terminate()
        return running[0]

    def close(self) -> None:
        """Stop learning."""
        with self._changed:
            self._stopping = True
            for job, _, work in self._waiting:
                self._end(job, "cancelled", work)
            self._waiting.clear()
            running = self._running
            self._changed.notify()
        if running is not None and running[1] is not None:
            running[0].state = "cancelled"
            running[1].terminate()
        self._thread.join(GRACE + 0.5)
        self._folders.close()

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                job, source, work = self._waiting.popleft()
                job.state, job.doing = "learning", "starting"
                self._running = (job, None)
                self._note(job)
            try:
                self._learn(job, source)
            except Exception as error:
                job.state, job.error = "failed", " ".join(str(error).split())
            with self._changed:
                self._running = None
                self._end(job, job.state, work)

    def _learn(self, job: Job, source: Path) -> None:
        rank = str(read_about(self._folder).options.rank)  # all tasks share it
        words = ["learn", str(source), "--model", str(self._folder), f"--task={job.task}", "--rank", rank, "--json"]
        if self._threads is not None:
            words += ["--threads", str(self._threads)]
        environment = {**os.environ, "PYTHONPATH": search_path()}
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which stops its processes itself
        ) as process:
            with self._changed:
                self._running = (job, process)
                if job.state == "cancelled":
                    process.terminate()
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
            reader.start()
            noted = 0.0
            assert process.stdout is not None
            for line in process.stdout:
                if self._stopping:
                    break
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    _take(job, json.loads(line))
                if time.monotonic() - noted > 0.5:
                    noted = time.monotonic()
                    self._note(job)
            try:
                process.wait(GRACE if self._stopping else None)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join(1)
        if job.state == "cancelled":
            remove(lesson_folder(self._folder, job.task))
        elif process.returncode == 0:
            job.state, job.done, job.doing, job.seconds_left = "learned", 1.0, "", 0.0
            self._learned()
        else:
            last = next((line for line in reversed(said) if line.strip()), f"it ended with {process.returncode}")
            job.state, job.error = "failed", without(last.strip().removeprefix("rkr: "), source, "the zip file")

    def _end(self, job: Job, state: State, work: Path) -> None:
        job.state, job.doing, job.seconds_left = state, "", None
        self._note(job)
        self._tell("learning", task=job.task, state=state, **({"message": job.error} if job.error else {}))
        remove(work)

    # -- files --------------------------------------------------------------------------------------------

    def _place(self) -> Path:
        """The folder for unfinished files. If this process is killed, the next one removes it."""
        with self._changed:
            if not self._own.name:
                self._own = self._folders.enter_context(own_folder(self._folder / JOBS))
            return self._own

    def _path(self, task: str) -> Path:
        return self._folder / JOBS / f"{hashlib.sha256(task.encode('utf-8', 'replace')).hexdigest()[:32]}.json"

    def _note(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # it is only told less
            place = self._place()
            with tempfile.NamedTemporaryFile("w", dir=place, delete=False) as file:
                json.dump({"server": place.name, **job.to_json()}, file)
            os.replace(file.name, self._path(job.task))
            ended = sorted((j for j in self._known() if j.over), key=lambda j: j.started)
            for old in ended[:-KEPT]:
                self._path(old.task).unlink(missing_ok=True)

    def _known(self) -> Iterator[Job]:
        folder = self._folder / JOBS
        for path in folder.glob("*.json") if folder.is_dir() else ():
            job = _read(path)
            if job is not None:
                yield job


def _read(path: Path) -> Job | None:
    try:
        values = json.loads(path.read_text("utf-8"))
        server = path.with_name(values.pop("server", "none"))
        job = Job(**values)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if not (job.over or is_locked(lock_of(server))):
        job.state, job.doing, job.error = "failed", "", "the server that learned it was ended"
    return job


def _take(job: Job, event: dict[str, Any]) -> None:
    """Take over what an event of `rkr learn --json` says."""
    kind = event["event"]
    if kind == "preparing":
        job.doing = f"reading {event['what']}: {event['count']} of {event['total']}"
    elif kind == "progress":
        job.done, job.seconds_left = float(event["done"]), event["seconds_left"]
        job.doing = f"epoch {event['epoch'] + 1} of {event['epochs']}"
    elif kind == "epoch" or kind == "learned":
        job.accuracy = event["accuracy"]

"""The executor of a Ray cluster.

Ray chooses the nodes. Jobs whose process or node is lost go on elsewhere from the last state that came back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rkr.errors import RkrError, UsageError
from rkr.experiment.connection import Connection, Needs, connect
from rkr.experiment.events import Event
from rkr.experiment.execution import Execution, Interrupted
from rkr.experiment.executors import Executor, Lost, Told, error_from
from rkr.experiment.folder import RunFolder
from rkr.experiment.jobs import Job
from rkr.experiment.mirror import Changes, contents, put
from rkr.experiment.remote import Mailbox, Parcel, serve
from rkr.importing import own_modules

WAITING = 4  # jobs that wait at Ray: one can begin at once when another ends, and a cluster that grows sees them
ATTEMPTS = 5  # at a job without a new state
PAUSE = 0.1  # seconds between two looks
ROOM_SECONDS = 5.0  # between two questions how many jobs fit
ANSWER_SECONDS = 30.0
LARGEST = 4 << 30  # bytes of data to send


@dataclass(eq=False)
class _Entry:
    """A job that was submitted."""

    job: Job
    told: Told
    future: Future[Any]
    held: ExitStack = field(default_factory=ExitStack)  # the lock of its folder
    begun: bool = False
    name: str = ""  # of the attempt
    reference: Any = None  # of what will come out of it
    idle: int = 0  # attempts since the last state
    heard: bool = False  # it is at work, not waiting at Ray
    stopping: bool = False
    cancelled: bool = False  # as it had not begun, as far as was known
    has_data: bool = False


class Cluster(Executor):
    """Jobs on a Ray cluster.

    All that Ray is asked for happens in one thread. Files that come back are written before the future is done.

    Args:
        connection: The cluster.
        needs: What each job needs.
        count: How many jobs at once; None: as many as fit.
    """

    def __init__(self, connection: Connection, needs: Needs, count: int | None = None) -> None:
        self._connection, self._needs, self._count = connection, needs, count
        self._ray = connection.ray
        self._task = self._ray.remote(serve)
        self._entries: list[_Entry] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._killed = False
        self._data: dict[str, tuple[str, Any]] = {}
        self._modules = own_modules()
        self._capacity = self._room() if count is None else count
        self._mailbox = self._new_mailbox()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_head, daemon=True).start()
        if count is None:
            threading.Thread(target=self._watch_room, daemon=True).start()

    @classmethod
    def connected(cls, execution: Execution, accelerator: str = "auto") -> Cluster:
        """Connect to the cluster of an execution. Raises UsageError if it cannot be used."""
        needs = Needs(execution.threads or 1, execution.gpus or 0.0, execution.memory)
        return cls(connect(execution.cluster or "auto", needs, accelerator), needs)

    def threads(self, execution: Execution, processes: int) -> int:
        return self._needs.threads

    @property
    def capacity(self) -> int:
        """How many jobs fit on the cluster at once."""
        return self._capacity

    @property
    def slots(self) -> int:
        return self.capacity + (WAITING if self._count is None else 0)

    def submit(self, job: Job, told: Told) -> Future[Any]:
        entry = _Entry(job, told, Future())
        with self._lock:
            self._entries.append(entry)
        return entry.future

    def stop(self, job: Job | None = None) -> None:
        with self._lock:
            for entry in self._entries:
                entry.stopping = entry.stopping or job in (None, entry.job)
        # The thread tells the nodes: this may be a signal's handler.

    def close(self, kill: bool = False) -> None:
        self._killed = kill
        self._over.set()
        if not self._connection.lost:
            self._thread.join(ANSWER_SECONDS)
        self._connection.close()

    # -- the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        told: set[str] = set()  # attempts that know that they are to stop
        while not self._over.is_set():
            with self._lock:
                entries = list(self._entries)
            for entry in entries:
                if not entry.begun:
                    self._begin(entry)
            try:
                stopping = [e.name for e in entries if e.stopping and e.name and e.name not in told]
                if stopping:
                    told.update(stopping)
                    for entry in entries:
                        if entry.name in stopping and not entry.heard:
                            entry.cancelled = True
                            self._ray.cancel(entry.reference)
                    self._ask(self._mailbox.stop.remote(stopping))
                self._look()
            except Exception as error:
                if not self._over.is_set():
                    self._lose_all(error)
        if self._killed:
            for entry in self._entries:
                with contextlib.suppress(Exception):
                    self._ray.cancel(entry.reference, force=True)
        for entry in list(self._entries):
            self._end(entry, Interrupted())
        with contextlib.suppress(Exception):
            self._ray.kill(self._mailbox)

    def _ask(self, reference: Any) -> Any:
        return self._ray.get(reference, timeout=ANSWER_SECONDS)

    def _look(self) -> None:
        """Take what has come back, and end the jobs that are done."""
        with self._lock:
            running = {entry.reference: entry for entry in self._entries if entry.reference is not None}
        done: list[Any] = []
        if running:
            done, _ = self._ray.wait(list(running), num_returns=len(running), timeout=PAUSE)
        self._over.wait(PAUSE / 2)
        names = {entry.name: entry for entry in running.values()}
        for name, message in self._ask(self._mailbox.take.remote()):
            if name in names:  # not of an attempt that was given up
                self._received(names[name], message)
        for reference in done:
            self._done(running[reference], reference)

    def _received(self, entry: _Entry, message: Event | Changes) -> None:
        entry.heard = True
        if isinstance(message, Changes):
            if entry.job.root is not None and (message.files or message.gone):
                entry.idle = 0
                try:
                    put(entry.job.root, message)
                except RkrError as error:  # a full disk
                    self._ray.cancel(entry.reference, force=True)
                    self._end(entry, error)
            return
        if hasattr(message, "folder"):
            changed: dict[str, Any] = {"folder": str(entry.job.path)}
            message = dataclasses.replace(message, **changed)
        entry.told(entry.job, message)

    def _done(self, entry: _Entry, reference: Any) -> None:
        if entry.future.done():
            return
        errors = self._ray.exceptions
        try:
            answer = self._ask(reference)
        except errors.RayTaskError as error:
            if entry.cancelled:  # it had begun in the meantime
                self._end(entry, Interrupted())
                return
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._end(entry, RkrError(f"on the cluster: {lines[-1] if lines else error!r}"))
            return
        except errors.RayError as error:
            self._lost(entry, error)
            return
        if "lacks" in answer:
            self._send_data(entry, answer["lacks"])
        elif "error" in answer:
            self._end(entry, error_from(answer["error"]))
        else:
            self._end(entry, None, answer["result"])

    def _begin(self, entry: _Entry) -> None:
        """Give a job to Ray."""
        entry.begun = True
        try:
            if entry.stopping:
                raise Interrupted
            job = entry.job
            if job.locks and job.path is not None and not (folder := RunFolder(job.path)).finished:
                entry.held.enter_context(folder.locked())
                folder.tidy()  # of a command that was killed while it wrote what had come back
            self._send(entry)
        except (RkrError, Interrupted) as error:
            self._end(entry, error)

    def _send(self, entry: _Entry) -> None:
        job = entry.job
        files = {} if job.root is None else contents(job.root, job.reads)
        entry.name, entry.heard = secrets.token_hex(8), False
        data = {need: self._data[need] for need in job.needs if need in self._data}
        parcel = Parcel(entry.name, job.to_json(), files, self._modules, data, not entry.has_data)
        asked = self._needs.waiting() if job.waits else self._needs
        task = self._task.options(max_retries=0, name=job.label, **asked.options())
        entry.reference = task.remote(parcel, self._mailbox, Crew(self._connection, self._needs))

    def _send_data(self, entry: _Entry, lacks: list[str]) -> None:
        """Give a job to Ray again, with data that the node did not have. They are sent once to each node."""
        from rkr.data.sources import located

        try:
            given = entry.job.arguments.get("plan", {}).get("data")
            for need in lacks:
                paths = located(need, given)
                if need not in self._data and paths is not None:
                    size = sum(path.stat().st_size for path in paths.values())
                    if size > LARGEST:
                        raise UsageError(
                            f"{need}: {size / 1e9:.0f} GB are too much to send: "
                            "put it into the dataset directory ($RKR_DATA) of each node"
                        )
                    files = {name: path.read_bytes() for name, path in paths.items()}
                    digest = hashlib.sha256()
                    for name in sorted(files):
                        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
                    self._data[need] = digest.hexdigest()[:16], self._ray.put(files)
            entry.has_data = True  # what is not here either is downloaded there
            self._send(entry)
        except RkrError as error:
            self._end(entry, error)
        except OSError as error:
            self._end(entry, RkrError(f"data cannot be sent: {error}"))

    def _lost(self, entry: _Entry, error: Exception) -> None:
        """Its process or node is gone."""
        entry.reference, reason = None, " ".join(str(error).split())[:300] or type(error).__name__
        if entry.stopping:
            self._end(entry, Interrupted())
            return
        entry.idle += 1
        if entry.idle >= ATTEMPTS:
            self._end(entry, Lost(f"was lost {entry.idle} times without a new state, at last because: {reason}"))
            return
        self._send(entry)

    def _lose_all(self, error: Exception) -> None:
        """The mailbox is gone, and with it what was in it: all jobs go on from their last states."""
        if not self._connection.alive():
            self._fail(f"{' '.join(str(error).split())[:200]}")
            return
        with self._lock:
            entries = [entry for entry in self._entries if entry.reference is not None]
        try:
            self._mailbox = self._new_mailbox()
            for entry in entries:
                with contextlib.suppress(Exception):
                    self._ray.cancel(entry.reference, force=True)
                self._lost(entry, error)
        except Exception as again:
            self._fail(" ".join(str(again).split())[:200])

    def _new_mailbox(self) -> Any:
        return self._ray.remote(Mailbox).options(num_cpus=0, max_concurrency=1, **self._connection.near()).remote()

    def _watch_head(self) -> None:
        """Ray itself waits for a minute for a head that is gone, and then ends this process."""
        missed = 0
        while not self._over.wait(1.0):
            missed = 0 if self._connection.alive() else missed + 1
            if missed >= 3:
                self._fail("its head does not answer")
                return

    def _watch_room(self) -> None:
        """In a thread of its own: without a head Ray does not answer for a minute."""
        while not self._over.wait(ROOM_SECONDS):
            with contextlib.suppress(Exception):  # the cluster is gone, which is told elsewhere
                self._capacity = self._room()

    def _room(self) -> int:
        return max(1, self._connection.room(self._needs))

    def _fail(self, reason: str) -> None:
        """The cluster is gone."""
        self._connection.lost = True
        self._over.set()
        error = RkrError(
            f"the Ray cluster {self._connection.address} is gone ({reason}). The last states are here: start it again "
            "and repeat the command, or repeat it without --cluster"
        )
        for entry in list(self._entries):
            self._end(entry, error)

    def _end(self, entry: _Entry, error: BaseException | None, result: Any = None) -> None:
        with self._lock:
            if entry not in self._entries:
                return
            self._entries.remove(entry)
        entry.held.close()
        if error is None:
            entry.future.set_result(result)
        else:
            entry.future.set_exception(error)


@dataclass(frozen=True)
class Crew:
    """Makes the executor of a job's own jobs, on the node where it is done."""

    connection: Connection
    needs: Needs

    def __call__(self, count: int, threads: int) -> Cluster:
        return Cluster(self.connection.inner(), dataclasses.replace(self.needs, threads=threads), count)

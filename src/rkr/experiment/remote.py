"""What a node of a Ray cluster does: a job in a folder of its own, whose changes go back to where it came from.

Nothing is shared between the machines but what Ray sends.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from rkr.atomic import write_atomic
from rkr.errors import RkrError
from rkr.experiment.events import Event, Preparing, Progress, Started
from rkr.experiment.execution import Interrupted
from rkr.experiment.executors import Executor, error_json
from rkr.experiment.jobs import Job, Site, perform
from rkr.experiment.mirror import Changes, Mirror, put
from rkr.importing import importable
from rkr.locks import own_folder

FOLDER = "rkr-job-"
EVENT_SECONDS = 1.0  # between two events of progress
ASK_SECONDS = 0.5  # between two questions whether to stop

_kept: dict[str, tuple[Any, Any]] = {}  # of all jobs that this process does


class Mailbox:
    """An actor. Jobs put messages into it, which the process that gave them takes; it says which are to stop."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Any]] = []
        self._stopped: set[str] = set()

    def put(self, name: str, message: Any) -> None:
        """From a job."""
        self._messages.append((name, message))

    def take(self) -> list[tuple[str, Any]]:
        """All messages since it was last asked."""
        messages, self._messages = self._messages, []
        return messages

    def stop(self, names: list[str]) -> None:
        """These jobs are to stop."""
        self._stopped.update(names)

    def stopped(self, name: str) -> bool:
        """Whether a job is to stop."""
        return name in self._stopped


@dataclass(frozen=True)
class Parcel:
    """A job, and what comes with it.

    Attributes:
        name: Of this attempt at the job.
        job: As plain values.
        files: What the job reads, by paths below its root.
        modules: Python files of recipes' folders, by their paths.
        data: Data that it needs: a hash and a reference to the files, which are fetched once by each node.
        must_have: Whether to answer what is missing; else it is downloaded there.
    """

    name: str
    job: dict[str, Any]
    files: dict[str, bytes]
    modules: dict[str, str]
    data: dict[str, Any]
    must_have: bool


def serve(parcel: Parcel, mailbox: Any, crew: Callable[[int, int], AbstractContextManager[Executor]]) -> dict[str, Any]:
    """Do a job on this node: what came out, as plain values."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a job that asked for none takes none from others
    _take_modules(parcel.modules)
    job = Job.from_json(parcel.job)
    data = _taken_data(parcel.data)
    if parcel.must_have and (lacks := lacking(job, data)):
        return {"lacks": lacks}
    with own_folder(Path(tempfile.gettempdir()), FOLDER) as root:
        return _done(job, parcel, root, data, mailbox, crew)


def _done(
    job: Job,
    parcel: Parcel,
    root: Path,
    data: str | None,
    mailbox: Any,
    crew: Callable[[int, int], AbstractContextManager[Executor]],
) -> dict[str, Any]:
    import ray

    over = threading.Event()
    try:
        put(root, Changes(parcel.files))
        (root / job.folder).mkdir(parents=True, exist_ok=True)
        mirror = Mirror(root, job.folder)

        def saved() -> None:
            if job.folder:
                ray.get(mailbox.put.remote(parcel.name, mirror.changes()))

        def listen() -> None:
            while not over.wait(ASK_SECONDS):
                try:
                    stop = ray.get(mailbox.stopped.remote(parcel.name))
                except Exception:  # nobody waits for this job any more
                    os._exit(1)
                if stop and not over.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        threading.Thread(target=listen, daemon=True).start()
        site = Site(_teller(parcel.name, mailbox), root, data, crew, saved, _kept)
        try:
            answer = {"result": perform(job, site)}
        except (Interrupted, RkrError) as error:
            said = error_json(error)
            answer = {"error": {**said, "text": said["text"].replace(str(root), str(parcel.job["root"]))}}
        over.set()
        saved()
        return answer
    finally:
        over.set()


def _teller(name: str, mailbox: Any) -> Callable[[Event], None]:
    """Sends events; those of progress at most once a second."""
    node, last = node_name(), 0.0

    def tell(event: Event) -> None:
        nonlocal last
        if isinstance(event, Progress | Preparing):
            if time.monotonic() - last < EVENT_SECONDS:
                return
            last = time.monotonic()
        if isinstance(event, Started):
            event = replace(event, node=node)
        mailbox.put.remote(name, event)

    return tell


def node_name() -> str:
    """The name of this node: as the cluster's owner called it, else its address."""
    from rkr.experiment.connection import ray_module

    ray = ray_module()
    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            return called(node)
    return own[:8]


def called(node: Mapping[str, Any]) -> str:
    """The name of a node."""
    name, address = str(node.get("NodeName") or ""), str(node["NodeManagerAddress"])
    host = str(node.get("NodeManagerHostname") or address)
    return name if name and name != address else f"{host}:{node['NodeManagerPort']}"


def lacking(job: Job, data: str | None) -> list[str]:
    """What a job needs and this node does not have."""
    from rkr.data.sources import located

    given = job.arguments.get("plan", {}).get("data")
    return [need for need in job.needs if located(need, data or given) is None]


# ---------------------------------------------------------------------------------------------------------
# What is sent once to each node


def _take_modules(modules: Mapping[str, str]) -> None:
    """Let modules of recipes' folders be imported here."""
    if not modules:
        return
    digest = hashlib.sha256(repr(sorted(modules.items())).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rkr-modules-{os.getuid()}-{digest}"
    for name, text in modules.items():
        if not (folder / name).exists():
            write_atomic(folder / name, text.encode(), durable=False)
    importable(folder)


def _taken_data(data: Mapping[str, Any]) -> str | None:
    """The directory of data that was sent, each part once to a node."""
    import ray

    from rkr.data.download import cache_folder

    if not data:
        return None
    names = sorted((need, name) for need, (name, _) in data.items())
    folder = cache_folder() / "sent" / hashlib.sha256(repr(names).encode()).hexdigest()[:16]
    for need, (name, reference) in data.items():
        mark = folder / f".{name}"
        if mark.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not mark.exists():
                for path, content in ray.get(reference).items():
                    write_atomic(folder / path, content)
                write_atomic(mark, need.encode())
    return str(folder)

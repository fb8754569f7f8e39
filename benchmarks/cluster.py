"""What a cluster costs: the driver's time with many waiting runs, and what is sent, by workers that sleep.

The workers are threads of one actor, so that 64 of them need no 64 processors. The driver does what it always does:
each run tells events, and a state, results and a model come back from it after each task.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import resource
import secrets
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rkr.experiment.cluster import Cluster
from rkr.experiment.connection import Needs, connect
from rkr.experiment.events import Event, Finished, Progress, Started, TaskEnd
from rkr.experiment.executors import completed
from rkr.experiment.folder import RunFolder
from rkr.experiment.jobs import Job, Site
from rkr.experiment.queue import Queue

TASKS = 5
STATE, MODEL = 300_000, 60_000  # bytes; files of RKR with LeNet are about as large
USUAL = {"WORKERS": 64, "WAITING": 1000, "SECONDS": 10}  # environment variables CLUSTER_... change them


def sleep(site: Site, title: str, seconds: float, state: int) -> bool:
    """A run that trains nothing: events once a second, and a state, results and a model file after each task."""
    assert site.root is not None
    folder = RunFolder(site.root / title, site.saved)
    (folder.path / "model").mkdir(parents=True, exist_ok=True)
    site.watch(Started(title, str(folder.path), ("task",) * TASKS, 1, 1, 0, False))
    noise = os.urandom(MODEL)
    for number in range(1, TASKS + 1):
        end = time.monotonic() + seconds / TASKS
        while (left := end - time.monotonic()) > 0:
            site.watch(Progress(title, number, "task", 0, 1, 1, 2, 0.5, 0.5, number / TASKS, None))
            time.sleep(min(left, 1.0))
        folder.append(folder.results, {"event": "task", "number": number})
        (folder.path / "model" / f"{number}.safetensors").write_bytes(noise)
        (folder.path / "state.safetensors").write_bytes(os.urandom(state))
        site.saved()
        site.watch(TaskEnd(title, number, "task", TASKS, (0.5,), None, True, 1.0))
    folder.close(TASKS)
    site.watch(Finished(title, str(folder.path), seconds, False))
    return False


class Sleepers(Cluster):
    """The executor, with an actor of many threads in the place of Ray's worker processes."""

    def __init__(self, connection: Any, needs: Needs, workers: int) -> None:
        self._workers = workers
        super().__init__(connection, needs, workers)
        ray = connection.ray

        class Node:
            def serve(self, parcel: Any, mailbox: Any, crew: Any) -> Any:
                from rkr.experiment.remote import serve

                return serve(parcel, mailbox, crew)

        self.node = ray.remote(Node).options(num_cpus=0, max_concurrency=workers).remote()
        self._task = self

    def options(self, **ignored: Any) -> Sleepers:
        return self

    def remote(self, parcel: Any, mailbox: Any, crew: Any) -> Any:
        self.sent = getattr(self, "sent", 0) + len(pickle.dumps(parcel))
        return self.node.serve.remote(parcel, mailbox, crew)


def used() -> float:
    """CPU seconds of this process."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def measure(workers: int, waiting: int, seconds: float) -> dict[str, Any]:
    """The driver with so many workers at work and so many runs that wait for them."""
    token = Path(tempfile.mkdtemp()) / "token"
    token.write_text(secrets.token_hex(32))  # of this cluster alone, and not in the user's home
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_worker_niceness": "0"}
    import ray  # after that: it reads them once

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=500 << 20)
    executor = Sleepers(connect("local", Needs(1)), Needs(1), workers)
    with tempfile.TemporaryDirectory() as folder, executor:
        out, events, begun, took = Path(folder), 0, dict[str, float](), list[float]()
        titles = [f"run-{number}" for number in range(workers + waiting)]
        queue = Queue(out, [(title, out / title) for title in titles])
        lock = threading.Lock()

        def told(job: Job, event: Event) -> None:
            nonlocal events
            with lock:
                events += 1
                begun.setdefault(job.label, time.monotonic())
            queue.told(event)

        values = {"seconds": seconds, "state": STATE}
        jobs = [
            Job(t, "cluster:sleep", {"title": t, **values}, out, t, (f"{t}/**/*",), locks=True, waits=False)
            for t in titles
        ]
        warm = Job("warm", "cluster:sleep", {"title": "warm", "seconds": 0.0, "state": 1}, out, "warm")
        executor.submit(warm, lambda job, event: None).result()
        began, cpu = time.monotonic(), used()
        executor.sent = 0
        with queue:
            for job, future in completed(executor, jobs, told, lambda: False, lambda *_: False, len(jobs)):
                future.result()
                took.append(time.monotonic() - begun[job.label])
                queue.ended(job.label, None)
        wall, cpu = time.monotonic() - began, used() - cpu
        files = [path for path in out.rglob("*") if path.is_file() and ".queue" not in path.parts]
        count = len(jobs)
        back = TASKS * (STATE + MODEL) + sum(p.stat().st_size for p in (out / titles[0]).glob("*.jsonl"))
        assert all(RunFolder(out / title).finished for title in titles)
        return {
            "wall": wall,
            "ideal": seconds * count / workers,
            "an hour": 3600 * count / wall,
            "longer": statistics.median(took) - seconds,
            "cpu": cpu / count,
            "share": cpu / wall,
            "events": events / wall,
            "sent": executor.sent / count,
            "back": back,
            "files": len(files) / count,
        }


def run(only: str = "") -> None:
    """Print what a run costs the driver."""
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed (rkr[cluster]): no measurement of a cluster")
        return
    workers, waiting, seconds = (float(os.environ.get(f"CLUSTER_{name}", usual)) for name, usual in USUAL.items())
    found = measure(int(workers), int(waiting), seconds)
    print(
        f"cluster: {workers:.0f} simulated workers, {waiting:,.0f} more runs waiting, each of {seconds:g} s, "
        f"{TASKS} tasks, and {(STATE + MODEL) / 1e6:.2f} MB after each task\n"
        f"  driver: {1000 * found['cpu']:.0f} ms of CPU time a run, {found['share']:.1%} of a core at "
        f"{found['an hour']:,.0f} runs an hour and {found['events']:.0f} events a second\n"
        f"  each run: {found['sent'] / 1000:.1f} kB sent, {found['back'] / 1e6:.2f} MB back in {found['files']:.0f} "
        f"files, {found['longer']:.2f} s longer than its work (median)\n"
        f"  all: {found['wall']:.0f} s, of which {found['ideal']:.0f} s are sleep"
    )

"""The same application on a Ray cluster: `rkr serve --cluster`.

Each replica is a process with one copy of the base and an engine of its own. The task travels in the request, not as
Ray's model id, whose multiplexing would split batches by task. All replicas read one folder and follow it, so a task
that comes or goes anywhere is known to all within a second.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkr.errors import UsageError
from rkr.experiment.connection import Connection, Needs, NoCluster, connect
from rkr.importing import search_path
from rkr.serve.guard import Access
from rkr.serve.limits import Limits

NAME = "rkr"


@dataclass(frozen=True)
class Settings:
    """What a replica needs; sent to the machines of the cluster.

    Attributes:
        folder: The zoo, at the same place on every machine.
        limits: Bounds, for each replica.
        access: Who may do what.
        threads: Of each replica.
        cache: Bytes of merged weights, of each replica.
        device: Where to compute.
        json: Whether the log is written as JSON.
    """

    folder: Path
    limits: Limits
    access: Access
    threads: int | None = None
    cache: int | None = None
    device: str | None = None
    json: bool = False


def application(settings: Settings, replicas: int, needs: Needs) -> Any:
    """The application for `ray.serve.run`.

    Args:
        settings: For each replica.
        replicas: How many.
        needs: What each replica takes.
    """
    from ray import serve

    def build() -> Any:
        """In the replica's own process."""
        from rkr.pictures.zoo import open_zoo
        from rkr.serve.app import build_app
        from rkr.serve.log import Log
        from rkr.serve.server import Server

        zoo = open_zoo(settings.folder, device=settings.device)
        made = Server(
            zoo,
            settings.limits,
            settings.access,
            threads=settings.threads,
            cache=settings.cache,
            tell=Log(settings.json),
        )
        return build_app(made)

    @serve.ingress(build)
    class Replica:
        """Holds the application."""

        def check_health(self) -> None:
            """Ray replaces a replica that does not answer."""

    environment = {"env_vars": {"PYTHONPATH": search_path()}}
    options: dict[str, Any] = {
        "name": "Replica",
        "num_replicas": replicas,
        "ray_actor_options": {**needs.options(), "runtime_env": environment},
        "max_ongoing_requests": 4 * settings.limits.queue,  # the engine's own bound answers 503
        "health_check_period_s": 1,
        "health_check_timeout_s": 10,
        "graceful_shutdown_timeout_s": 8,
    }
    return serve.deployment(Replica, **options).bind()


def start(
    settings: Settings, address: str, replicas: int, host: str, port: int, *, proxies: str = "EveryNode"
) -> Connection:
    """Join a cluster, or make one of this machine, and serve there.

    Args:
        settings: For each replica.
        address: Of the cluster's head; "auto" for one that runs here, or else one of this machine.
        replicas: How many.
        host: Where the proxies listen.
        port: Where the proxies listen.
        proxies: Which machines listen: EveryNode or HeadOnly.
    """
    import torch

    if not settings.folder.is_dir():
        raise UsageError(f"{settings.folder} is not there; it must lie at the same place on every machine")
    needs = Needs(settings.threads or 1, float(torch.cuda.is_available()))
    try:
        connection = connect(address, needs, logs=True)
    except NoCluster:
        if address != "auto":
            raise
        connection = connect("local", needs, logs=True)
    room = connection.room(needs)
    if room < replicas:
        connection.close()
        raise UsageError(f"--replicas {replicas}: the cluster has room for {room} ({needs} each)")
    from ray import serve

    serve.start(proxy_location=proxies, http_options={"host": host, "port": port})
    serve.run(application(settings, replicas, needs), name=NAME, route_prefix="/")
    return connection


def run_cluster(
    settings: Settings, address: str, replicas: int, host: str, port: int, tell: Callable[..., None]
) -> None:
    """Serve on a cluster until a signal comes."""
    connection = start(settings, address, replicas, host, port)
    tell("listening", url=f"http://{host}:{port}", replicas=replicas)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    from ray import serve

    serve.shutdown()
    connection.close()

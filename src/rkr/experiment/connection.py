"""Connecting to a Ray cluster, and checking before anything starts that it can do the work."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rkr.errors import UsageError

CONNECT_SECONDS = 3.0
FACTS_SECONDS = 120.0
CLIENT = "ray://"
IMPATIENT = {"RAY_NUM_REDIS_GET_RETRIES": "2", "RAY_py_gcs_connect_timeout_s": "10"}  # Ray itself tries for ten minutes
WITH_TOKEN = {"RAY_AUTH_MODE": "token"}


@dataclass(frozen=True)
class Needs:
    """What a job needs of a node."""

    threads: int = 1
    gpus: float = 0.0
    memory: int | None = None
    light: bool = False

    def waiting(self) -> Needs:
        """What a job needs that waits for jobs of its own, which must find room beside it."""
        return dataclasses.replace(self, light=True)

    def options(self) -> dict[str, Any]:
        """As options of a task of Ray."""
        memory = {} if self.memory is None else {"memory": self.memory}
        return {"num_cpus": 0.01 if self.light else self.threads, "num_gpus": self.gpus, **memory}

    def fits(self, node: Mapping[str, float]) -> int:
        """How many such jobs a node with these resources can do at once."""
        room = [node.get("CPU", 0.0) / self.threads]
        room += [node.get("GPU", 0.0) / self.gpus] if self.gpus else []
        room += [node.get("memory", 0.0) / self.memory] if self.memory else []
        return int(min(room) + 1e-9)

    def __str__(self) -> str:
        parts = [f"{self.threads} CPU threads"]
        parts += [f"{self.gpus:g} GPU"] if self.gpus else []
        parts += [f"{self.memory / 1e9:g} GB of memory"] if self.memory else []
        return ", ".join(parts)


class NoCluster(UsageError):
    """There is none at an address."""


def ray_module() -> Any:
    """Ray. It is not typed."""
    import ray

    return ray


class Connection:
    """This process's connection to a cluster.

    Args:
        address: As it was given.
        head: Host and port that answer as long as the cluster is there; None: not watched.
        owner: Whether to disconnect at the end.
    """

    def __init__(self, address: str, head: tuple[str, int] | None, owner: bool) -> None:
        self.address, self._head, self._owner = address, head, owner
        self.lost = False

    @property
    def ray(self) -> Any:
        """The module."""
        return ray_module()

    def inner(self) -> Connection:
        """The connection of a process of the cluster itself."""
        return Connection(self.address, None, owner=False)

    def alive(self) -> bool:
        """Whether the cluster's head answers."""
        return not self.lost and (self._head is None or answers(*self._head))

    def room(self, needs: Needs) -> int:
        """How many such jobs fit on all nodes."""
        return sum(needs.fits(node["Resources"]) for node in self.ray.nodes() if node["Alive"])

    def near(self) -> dict[str, Any]:
        """Options that place an actor on this process's node, or on the head's if this one is none of the cluster."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        own = None
        if not self.address.startswith(CLIENT) or self._head is None:
            own = self.ray.get_runtime_context().get_node_id()
        else:
            heads = [n for n in self.ray.nodes() if n["Alive"] and "node:__internal_head__" in n["Resources"]]
            own = heads[0]["NodeID"] if heads else None
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(own, soft=True)} if own else {}

    def close(self) -> None:
        """Disconnect."""
        if self._owner and not self.lost:
            self.ray.shutdown()


def connect(address: str, needs: Needs, accelerator: str = "auto", logs: bool = False) -> Connection:
    """Connect to a cluster, or start one of this machine for "local". With `logs` its processes' lines are printed.

    Raises UsageError if there is none, if it has other versions, or if no node can do such jobs.
    """
    if address != "local" and "ray" not in sys.modules:  # which reads its settings once
        for name, value in (IMPATIENT | (WITH_TOKEN if _has_token() else {})).items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UsageError("--cluster needs Ray: pip install 'rkr[cluster]'") from None
    if needs.gpus and accelerator == "cpu":
        raise UsageError("--gpus: with --accelerator cpu none is used")
    if accelerator in ("cuda", "mps") and not needs.gpus:
        raise UsageError(
            f"--accelerator {accelerator}: say with --gpus how much of one each run gets, such as 0.5 or 1"
        )
    started = not ray.is_initialized()
    if started:
        _init(ray, address, logs)
    try:
        head = _head(ray, address)
        connection = Connection(address, head, owner=started)
        _check_resources(ray, needs)
        _check_versions(ray)
    except BaseException:
        if started:
            ray.shutdown()
        raise
    return connection


def _has_token() -> bool:
    """Whether this machine has a token. `ray start` uses one by itself, but a process that connects must be told to."""
    given = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return given or Path("~/.ray/auth_token").expanduser().exists()


def _init(ray: Any, address: str, logs: bool) -> None:
    quiet: dict[str, Any] = {"log_to_driver": logs, "logging_level": "ERROR", "namespace": "rkr"}
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_PROMPT_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # they are handled; it would print those of killed jobs
    where = address.removeprefix(CLIENT)
    if address not in ("auto", "local"):
        host, colon, port = where.rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise UsageError(f"--cluster: give auto, local, HOST:PORT or ray://HOST:PORT, not {address!r}")
        if not answers(host, int(port)):
            raise UsageError(f"--cluster: no Ray cluster answers at {address}: is it started, and is the port right?")
    _keep_quiet()
    try:
        with _no_words():
            if address == "local":
                ray.init(address="local", include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
    except ConnectionError as error:
        where = "on this machine ($RAY_ADDRESS or `ray start`)" if address == "auto" else f"at {address}"
        hint = (
            "" if "Could not find" in str(error) else " (if it is there: is its token known here, and is it the same?)"
        )
        raise NoCluster(f"--cluster: no Ray cluster was found {where}: {_first(error)}{hint}") from None
    except Exception as error:  # Ray has no common error class
        raise UsageError(f"--cluster {address}: {_first(error)}") from None


@contextlib.contextmanager
def _no_words() -> Iterator[None]:
    """Keep the native part of Ray from writing to the standard error output; what is wrong is raised as well."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _keep_quiet() -> None:
    """Keep Ray from printing what happens to its nodes on the standard output, which programs read.

    It has no setting for that. If Ray changes, it prints again.
    """
    with contextlib.suppress(ImportError):
        worker: Any = importlib.import_module("ray._private.worker")
        if hasattr(worker, "print_to_stdstream"):
            worker.print_to_stdstream = lambda *ignored, **also: None


def _first(error: BaseException) -> str:
    """An error of Ray on one line."""
    return " ".join(str(error).split())[:400]


def answers(host: str, port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), CONNECT_SECONDS):
        return True
    return False


def _head(ray: Any, address: str) -> tuple[str, int] | None:
    where = address.removeprefix(CLIENT)
    if not address.startswith(CLIENT):
        where = ray.get_runtime_context().gcs_address
    host, _, port = where.rpartition(":")
    return (host, int(port)) if host and port.isdecimal() else None


def _check_resources(ray: Any, needs: Needs) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if needs.gpus and not any(node.get("GPU") for node in nodes):
        raise UsageError("--gpus: no node of the cluster has a GPU; with --gpus 0 runs use none")
    if not any(needs.fits(node) for node in nodes):
        most = max((node.get("CPU", 0) for node in nodes), default=0)
        raise UsageError(f"--cluster: no node has room for a run ({needs}); the largest has {most:g} CPUs")


def _check_versions(ray: Any) -> None:
    """Raise UsageError if a node has other versions than this machine: the results would differ, or fail."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rkr.experiment.remote import called

    def facts() -> dict[str, str]:
        try:
            from rkr.experiment.connection import versions
        except ImportError as error:
            return {"missing": str(error)}
        return versions()

    task = ray.remote(facts)
    asked = {}
    for node in ray.nodes():
        if node["Alive"]:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[called(node)] = task.options(num_cpus=0, max_retries=1, scheduling_strategy=place).remote()
    own = versions()
    for name, reference in asked.items():
        try:
            found = ray.get(reference, timeout=FACTS_SECONDS)
        except ray.exceptions.RayError as error:
            raise UsageError(f"--cluster: node {name} does not answer: {_first(error)}") from None
        problem = "; ".join(different(own, found))
        if problem:
            raise UsageError(f"--cluster: node {name} {problem}: install the same versions there")


def different(own: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    """How the versions of a node differ from those here."""
    if "missing" in found:
        yield f"has no rkr ({found['missing']})"
        return
    for what, version in own.items():
        if found.get(what) != version:
            yield f"has {what} {found.get(what)}, this machine has {version}"


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """What must be the same everywhere for results to be."""
    import platform
    from importlib.metadata import version

    import rkr

    digest = hashlib.sha256()
    root = Path(rkr.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    rkr_version = f"{rkr.__version__} (source {digest.hexdigest()[:8]})"
    return {"rkr": rkr_version, "Python": platform.python_version(), "torch": version("torch")}

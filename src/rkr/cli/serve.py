"""`rkr serve`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rkr.cli.learn import Zoo
from rkr.cli.options import OUTPUT, RESOURCES, WHERE
from rkr.errors import FileError, UsageError

EXAMPLES = (
    "rkr serve zoo/",
    "rkr serve zoo/ --allow-changes --max-batch 32 --wait-ms 5 --threads 2",
    "rkr serve zoo/ --host 0.0.0.0 --token-file token.txt",
    "rkr serve zoo/ --cluster auto --replicas 4",
)
ACCESS, BATCHES = "Access", "Batches and limits"


def serve(
    model: Zoo,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=WHERE)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any free one.", rich_help_panel=WHERE)] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with a token that requests must carry.", rich_help_panel=ACCESS),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a token.", rich_help_panel=ACCESS)
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Let requests add, drop and learn tasks.", rich_help_panel=ACCESS)
    ] = False,
    max_batch: Annotated[
        int, typer.Option(help="Maximum number of pictures computed together.", rich_help_panel=BATCHES)
    ] = 32,
    wait_ms: Annotated[
        float, typer.Option(help="How long a picture waits for others to be computed with.", rich_help_panel=BATCHES)
    ] = 5.0,
    queue: Annotated[
        int, typer.Option(help="Pictures that may wait; beyond it requests get 503.", rich_help_panel=BATCHES)
    ] = 256,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a request fails.", rich_help_panel=BATCHES)
    ] = 30.0,
    max_upload: Annotated[
        int, typer.Option(metavar="MB", help="Largest zip file to learn from.", rich_help_panel=BATCHES)
    ] = 512,
    threads: Annotated[
        int | None, typer.Option(help="Threads for computing and decoding.", rich_help_panel=RESOURCES)
    ] = None,
    cache: Annotated[
        int, typer.Option(metavar="MB", help="Memory for merged weights of tasks.", rich_help_panel=RESOURCES)
    ] = 512,
    device: Annotated[
        str | None,
        typer.Option(help="Device: cpu, cuda or mps (default: a GPU if there is one).", rich_help_panel=RESOURCES),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve on a Ray cluster: the address of its head, or auto for the one that runs here (or a new one).",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="With --cluster: copies of the base.", rich_help_panel=RESOURCES)] = 1,
    json_: Annotated[bool, typer.Option("--json", help="Write the log as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Answer for all tasks of a model over HTTP, with a page to try them."""
    from rkr.serve.guard import LOOPBACK, Access
    from rkr.serve.limits import MB, Limits
    from rkr.serve.log import Log

    _check_extra(("fastapi", "uvicorn", "python_multipart", "prometheus_client"), "serve")
    token = _token(token_file)
    if host not in LOOPBACK and token is None and not insecure:
        raise UsageError(f"--host {host} can be reached by others: give --token-file FILE, or say --insecure")
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port must be 0 to 65535, not {port}")
    for option, value, least in (("replicas", replicas, 1), ("threads", threads, 1), ("cache", cache, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{option} must be at least {least}, not {value}")
    if replicas > 1 and cluster is None:
        raise UsageError("--replicas goes with --cluster")
    limits = Limits(batch=max_batch, wait=wait_ms / 1000, queue=queue, timeout=timeout, upload=max_upload * MB)
    access = Access(token, allow_changes, LOOPBACK if host in LOOPBACK else None)
    log = Log(json_)
    if cluster is not None:
        _check_extra(("ray.serve",), "cluster")
        from rkr.serve.cluster import Settings, run_cluster

        settings = Settings(model.absolute(), limits, access, threads, cache * MB, device, json_)
        run_cluster(settings, cluster, replicas, host, port, log)
        return
    from rkr.pictures.zoo import open_zoo
    from rkr.serve.run import run
    from rkr.serve.server import Server

    _check_device(device)
    zoo = open_zoo(model.absolute(), device=device)
    _check_free(host, port)
    run(Server(zoo, limits, access, threads=threads, cache=cache * MB, tell=log), host, port)


def _check_extra(modules: tuple[str, ...], extra: str) -> None:
    from importlib.util import find_spec

    for name in modules:
        try:
            there = find_spec(name) is not None
        except ImportError:
            there = False
        if not there:
            raise UsageError(f"rkr serve needs {name.partition('.')[0]}: pip install 'rkr[{extra}]'")


def _check_device(device: str | None) -> None:
    import torch

    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from None


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(token) < 8 or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(f"{path}: a token is one line of at least 8 printable ASCII characters without spaces")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        print(f"rkr: {path} can be read by others: chmod 600 {path}", file=sys.stderr)
    return token


def _check_free(host: str, port: int) -> None:
    """One clear line if the address cannot be had."""
    import socket

    family: Any = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"{host}:{port} cannot be listened at: {error.strerror or error}; choose another --port"
        ) from None

"""Serving over HTTP: throughput and latency with one and many tasks, beside one request at a time and a server of peft.

The load comes from this process, the servers are processes of their own; all on loopback, in turn within every round.
"""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from rkr.pictures.backbones import DEFAULT

ROUNDS = 3
SECONDS = float(os.environ.get("RKR_BENCH_SECONDS", "6"))  # of each measurement
TASKS = (1, 8, 100)
CLASSES = 10
NETWORKS = {"ResNet-18": ("served:resnet18", None), "EfficientNet-Lite0": (DEFAULT, 224)}


def resnet18() -> torch.nn.Module:
    """ResNet-18 for pictures of 32 pixels."""
    import rkr
    from rkr.pictures.preparation import Preparation

    network = rkr.networks.resnet18(classes=CLASSES)
    network.preparation = Preparation(32, 32)  # type: ignore[assignment]
    return network


def fill(folder: Path, backbone: str, size: int | None, tasks: int) -> None:
    """A zoo whose tasks have random factors."""
    from rkr.pictures.learn import new_zoo

    torch.manual_seed(0)
    zoo = new_zoo(folder, backbone, None, 2, size)
    for t in range(tasks):
        zoo.model.add_task(f"t{t}", CLASSES, init="random", train_base=False)
        with torch.no_grad():
            for name, p in zoo.model.named_task_parameters().items():
                if name.endswith(".rm"):
                    p.normal_(std=0.01)
    zoo.model.save(folder)


def ours(folder: str, batch: int, pipe: Any) -> None:
    """`rkr serve`, in a process."""
    from rkr.cli import main

    sys.path.append(str(Path(__file__).parent))
    read, write = os.pipe()
    os.dup2(write, 2)

    import threading

    def told() -> None:
        with os.fdopen(read) as lines:
            for line in lines:
                values = json.loads(line) if line.startswith("{") else {"event": ""}
                if values["event"] in ("listening", "ready"):
                    pipe.send(values)

    threading.Thread(target=told, daemon=True).start()
    words = ["rkr", "serve", folder, "--port", "0", "--threads", str(threads()), "--json", "--device", "cpu"]
    sys.argv = [*words, "--max-batch", str(batch), "--queue", "4096"]
    main()


def peft(folder: str, backbone: str, size: int | None, tasks: int, pipe: Any) -> None:
    """The same with peft: the base, LoRA of the same rank for each task, `adapter_names`, and the same batching."""
    torch.set_num_threads(threads())
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        pipe.send({"event": "missing", "error": str(error)})
        return
    import rkr.serve.server as app
    from rkr.pictures.zoo import open_zoo
    from rkr.serve.compute import Computer
    from rkr.serve.limits import Limits
    from rkr.serve.run import run

    sys.path.append(str(Path(__file__).parent))
    zoo = open_zoo(folder, device="cpu")
    network = zoo.model.merged("t0").eval()
    groups = {name for name, m in network.named_modules() if getattr(m, "groups", 1) > 1}
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    targets = [n for n, m in network.named_modules() if isinstance(m, kinds) and n not in groups]
    config = LoraConfig(r=2, target_modules=targets)
    model = get_peft_model(network, config, adapter_name="t0")
    for t in range(1, tasks):
        model.add_adapter(f"t{t}", config)
    model = model.to(memory_format=torch.channels_last).eval()

    class Lora(Computer):
        def measure(self, largest: int, task: str | None, seconds: float = 4.0) -> None:
            from rkr.serve.compute import _measured

            side = zoo.preparation.resize
            squares = torch.randint(0, 256, (largest, 3, side, side), dtype=torch.uint8)
            self.alone = _measured(lambda n: self(squares[:n], ["t0"] * n), largest, 2.0)
            self.together = _measured(lambda n: self(squares[:n], [f"t{i % tasks}" for i in range(n)]), largest, 2.0)

        @torch.no_grad()
        def __call__(self, squares: torch.Tensor, names: Any) -> list[torch.Tensor]:
            return list(model(self._inputs(squares), adapter_names=list(names)))

    def tell(event: str, **fields: Any) -> None:
        if event in ("listening", "ready"):
            pipe.send({"event": event, **fields})

    server = app.Server(zoo, Limits(queue=4096), threads=threads(), tell=tell)
    server.engine.computer = Lora(zoo)
    run(server, "127.0.0.1", 0)


def threads() -> int:
    return int(os.environ.get("RKR_BENCH_THREADS", "1"))


class Server:
    """A server in a process of its own."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, there), daemon=True)
        self.process.start()
        there.close()
        told: dict[str, Any] = {}
        while not {"listening", "ready"} <= set(told):
            values = here.recv()
            if values["event"] == "missing":
                raise ImportError(values["error"])
            told[values["event"]] = values
        self.port = int(told["listening"]["url"].rpartition(":")[2])
        self.measured = told["ready"]

    def memory(self) -> float:
        """Megabytes that are resident."""
        text = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu(self) -> float:
        """Seconds of CPU that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


def picture(side: int) -> bytes:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


async def one(reader: Any, writer: Any, task: str, data: bytes) -> int:
    """A request on a connection that is kept."""
    b = "boundary"
    head = f'--{b}\r\nContent-Disposition: form-data; name="task"\r\n\r\n{task}\r\n--{b}\r\n'
    head += 'Content-Disposition: form-data; name="pictures"; filename="a.jpg"\r\n\r\n'
    body = head.encode() + data + f"\r\n--{b}--\r\n".encode()
    lines = "POST /v1/predict HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: multipart/form-data; boundary={b}"
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(length)
    return int(answer[9:12])


def under_load(server: Server, tasks: int, data: bytes) -> tuple[float, float]:
    """Answers per second, and the server's milliseconds of CPU for each, which others on the machine do not change."""
    before = server.cpu()
    rate, done = asyncio.run(closed(server.port, tasks, data, 32))
    return rate, 1000 * (server.cpu() - before) / done


async def closed(port: int, tasks: int, data: bytes, connections: int) -> tuple[float, int]:
    """Answers per second with so many clients, each asking again when it is answered; and how many answers."""
    draws, done, end = random.Random(0), 0, time.perf_counter() + SECONDS

    async def client() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            status = await one(reader, writer, f"t{draws.randrange(tasks)}", data)
            assert status in (200, 503)
            done += status == 200  # a machine that is very slow refuses some
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    return done / (time.perf_counter() - began), max(done, 1)


async def opened(port: int, tasks: int, data: bytes, rate: float) -> tuple[float, float]:
    """Median and 99 % quantile of the milliseconds to an answer, for requests that come at random times."""
    draws, latencies, free = random.Random(0), list[float](), list[Any]()

    async def ask(due: float) -> None:
        pair = free.pop() if free else await asyncio.open_connection("127.0.0.1", port)
        assert await one(*pair, f"t{draws.randrange(tasks)}", data) == 200
        latencies.append(1000 * (time.perf_counter() - due))
        free.append(pair)

    asking, due = [], time.perf_counter()
    end = due + 2 * SECONDS
    while due < end:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.append(asyncio.ensure_future(ask(due)))
        due += draws.expovariate(rate)
    await asyncio.gather(*asking)
    for _, writer in free:
        writer.close()
    latencies.sort()
    return statistics.median(latencies), latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))]


def run(only: str = "") -> None:
    """Print all of it."""
    sys.path.append(str(Path(__file__).parent))
    print(f"serving over HTTP, {threads()} thread(s) for computing, load from another process, medians of {ROUNDS}")
    for name, (backbone, size) in NETWORKS.items():
        if only in name:
            with tempfile.TemporaryDirectory() as folder:
                network(name, backbone, size, Path(folder))


def network(name: str, backbone: str, size: int | None, folder: Path) -> None:
    """One network: all servers at once, asked in turn."""
    data = picture(size or 32)
    for tasks in TASKS:
        fill(folder / str(tasks), backbone, size, tasks)
    servers = {f"{tasks} tasks": (Server(ours, str(folder / str(tasks)), 32), tasks) for tasks in TASKS}
    servers["one at a time"] = (Server(ours, str(folder / "8"), 1), 8)
    try:
        servers["peft, 8 tasks"] = (Server(peft, str(folder / "8"), backbone, size, 8), 8)
    except (ImportError, EOFError) as error:
        print(f"  peft cannot: {error or type(error).__name__}")
    found: dict[str, list[tuple[float, float]]] = {key: [] for key in servers}
    try:
        for server, tasks in servers.values():
            under_load(server, tasks, data)
        for _ in range(ROUNDS):
            for key, (server, tasks) in servers.items():
                found[key].append(under_load(server, tasks, data))
        rates = {key: statistics.median(rate for rate, _ in values) for key, values in found.items()}
        costs = {key: statistics.median(cost for _, cost in values) for key, values in found.items()}
        for key, (server, _) in servers.items():
            spread = f"{min(found[key])[0]:.1f} to {max(found[key])[0]:.1f}"
            print(
                f"{name:18} {key:14} {rates[key]:7.1f} answers/s ({spread}), {costs[key]:6.1f} ms of CPU each; "
                f"x one at a time {rates[key] / rates['one at a time']:.2f} "
                f"(CPU {costs['one at a time'] / costs[key]:.2f}), "
                f"{server.memory():.0f} MB, batches of {server.measured['size']}",
                flush=True,
            )
        share, cpu = rates["100 tasks"] / rates["1 tasks"], costs["1 tasks"] / costs["100 tasks"]
        print(f"{name:18} 100 tasks / 1 task {share:.2f} (CPU {cpu:.2f})")
        server, tasks = servers["8 tasks"]
        median, p99 = asyncio.run(opened(server.port, tasks, data, 0.7 * rates["8 tasks"]))
        print(f"{name:18} at 70 % load: median {median:.1f} ms, p99 {p99:.1f} ms, ratio {p99 / median:.2f}", flush=True)
        files = sum(p.stat().st_size for p in (folder / "100").glob("t*.safetensors")) / 1e6
        base = sum(p.stat().st_size for p in (folder / "100").glob("base.*")) / 1e6
        more = servers["100 tasks"][0].memory() - servers["1 tasks"][0].memory()
        print(f"{name:18} base {base:.0f} MB, 100 task files {files:.0f} MB; 100 tasks take {more:.0f} MB more")
    finally:
        for server, _ in servers.values():
            server.close()

"""Time and memory as the number of tasks grows to 1,000 in memory and 10,000 in a folder (ResNet-18, rank 2)."""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import alone, interleaved
from serving import trained_like
from steps import SETTINGS, plain

import rkr
from rkr.core.index import Index, write_index
from rkr.experiment.jobs import Site

MARKS = (2, 10, 100, 1000)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def grown(tasks: int, report: bool = False) -> rkr.RectifiedModel:
    """A model with that many tasks; tells at each mark what the tasks since the last one cost."""
    model = rkr.rectify(plain(SETTINGS[0], True), rank=2, head="fc", cache_bytes=200 << 20).eval()
    model.add_task("t0", 10)
    model.freeze_base()
    trained_like(model)
    held, begun, last = resident(), time.process_time(), 1
    for n in range(2, tasks + 1):
        model.add_task(f"t{n - 1}", 10)
        trained_like(model)
        if report and n in MARKS:
            spent, used = time.process_time() - begun, resident() - held
            print(
                f"{n:5} tasks: a task takes {spent / (n - last) * 1e3:.1f} ms to add "
                f"and {used / (n - last) / 1e3:.0f} kB of memory (tensors {model.cost().tasks[-1].bytes / 1e3:.0f} kB)",
                flush=True,
            )
            held, begun, last = resident(), time.process_time(), n
    return model


def between(model: rkr.RectifiedModel, *names: str) -> Callable[[], None]:
    """Switch from one task to the next, all with merged weights in the cache."""
    x = torch.zeros(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for name in names:
            model.set_task(name)
            model(x)
    turn = {"n": 0}

    def switch() -> None:
        turn["n"] += 1
        model.set_task(names[turn["n"] % len(names)])

    return switch


MANY, WHOLE = 10_000, 20  # tasks in a folder; those with a file of their own, the others are links to one of them


def clock(action: Callable[[], object], timer: Callable[[], float] = time.process_time) -> float:
    """Seconds of CPU time, or of another clock."""
    begun = timer()
    action()
    return timer() - begun


def folder(few: Path, many: Path) -> None:
    """A folder with 10,000 tasks, made from one with a few."""
    many.mkdir()
    index = Index.read(few)
    tasks = dict(index.tasks)
    for name in (index.fields["base"], *tasks.values()):
        os.link(few / name, many / name)
    for n in range(WHOLE, MANY):
        tasks[f"t{n}"] = f"t{n}.{n:016x}.safetensors"
        os.link(few / tasks["t0"], many / tasks[f"t{n}"])
    write_index(many, index.fields, tasks)


def written(path: Path, action: Callable[[], object]) -> tuple[float, int, int]:
    """Elapsed seconds of a call, and the files in a folder that it writes or changes and the bytes that they gain."""

    def state() -> dict[str, tuple[int, int]]:
        return {entry.name: (entry.inode(), entry.stat().st_size) for entry in os.scandir(path)}

    before = state()
    spent = clock(action, time.perf_counter)
    changed = {name: found for name, found in state().items() if before.get(name) != found}
    grown = sum(found[1] - before.get(name, (0, 0))[1] for name, found in changed.items())
    return spent, len(changed), grown


def opened(site: Site, path: str) -> tuple[float, float]:
    """Seconds to open a folder, and the memory of this process, which has done nothing else."""
    torch.set_num_threads(1)
    network = plain(SETTINGS[0], True)
    begun = time.process_time()
    model = rkr.load(path, network)
    spent, held = time.process_time() - begun, resident()
    assert len(model.tasks) > 0
    return spent, held


def opening(path: Path) -> tuple[float, float]:
    """The same in a process of its own: the best of three."""
    runs = [alone("growth:opened", path=str(path)) for _ in range(3)]
    return min(spent for spent, _ in runs), min(held for _, held in runs)


def stored() -> None:
    """Opening, using and extending a folder of 10,000 tasks."""
    x = torch.zeros(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        few, many = Path(temporary) / "few", Path(temporary) / "many"
        grown(WHOLE).save(few)
        folder(few, many)
        (opened_few, base), (opened, held) = opening(few), opening(many)
        model = rkr.load(many, plain(SETTINGS[0], True)).eval()
        names = [f"t{n}" for n in range(WHOLE - 2)]  # the last one is in use
        first = statistics.median(clock(lambda name=name: model.set_task(name)) for name in names)  # type: ignore[misc]
        answer = statistics.median(clock(lambda name=name: (model.set_task(name), model(x))) for name in names[:6])  # type: ignore[misc]
        print(
            f"folder of {MANY:,} tasks: opens in {opened:.2f} s (of {WHOLE}: {opened_few:.2f} s) and takes "
            f"{(held - base) / 2**20:.0f} MiB more than one of {WHOLE}; "
            f"first use of a task {first * 1e3:.1f} ms, its weights are merged and answer in {answer * 1e3:.1f} ms"
        )
        model.add_task("new", 10, init="t0")
        trained_like(model)
        spent, count, size = written(many, lambda: model.save(many))
        small = rkr.load(few, plain(SETTINGS[0], True))
        small.add_task("new", 10)
        trained_like(small)
        spent_few, *_ = written(few, lambda: small.save(few))
        idle = statistics.median(clock(model.follow) for _ in range(100))
        print(
            f"one task more: saved in {spent:.2f} s elapsed (of {WHOLE}: {spent_few:.2f} s), {count} files, {size:,} "
            f"bytes written; asking whether another process changed anything {idle * 1e6:.0f} µs"
        )


def run(only: str = "") -> None:
    """Print the growth in memory, the switch early and late, and the growth of a folder."""
    print("growth on ResNet-18")
    many, few = grown(MARKS[-1], report=True), grown(2)
    times = interleaved(
        {
            "of 2": between(few, "t0", "t1"),
            "first of 1,000": between(many, "t0", "t1"),
            "last of 1,000": between(many, "t998", "t999"),
        },
        rounds=101,
        inner=10,
    )
    row = "  ".join(f"{name} {t * 1e3:.3f} ms" for name, t in times.items())
    ratio = times["last of 1,000"] / times["first of 1,000"]
    print(f"switch to a cached task: {row}  last/first {ratio:.2f}; cache {many.active.cache.nbytes / 2**20:.0f} MiB")
    stored()

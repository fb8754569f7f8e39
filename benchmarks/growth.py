"""Time and memory as the number of tasks grows to 1,000 (ResNet-18, rank 2)."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch
from measure import interleaved
from serving import trained_like
from steps import SETTINGS, plain

import rkr

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


def run(only: str = "") -> None:
    """Print the growth, then the switch early and late."""
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

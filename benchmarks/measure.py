"""Fair timing on shared machines: one process, interleaved repetitions, medians, CPU time of one thread."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable


def interleaved(cases: dict[str, Callable[[], object]], rounds: int, inner: int = 1) -> dict[str, float]:
    """Median CPU seconds of each case. Every round runs every case once, so that all see the same machine."""
    for run in cases.values():
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in cases.items():
                start = time.process_time()
                for _ in range(inner):
                    run()
                times[name].append((time.process_time() - start) / inner)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}

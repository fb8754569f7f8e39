"""Fair timing on shared machines: interleaved repetitions, medians, CPU time of one thread."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rkr.experiment.execution import Execution
from rkr.experiment.executors import Executor
from rkr.experiment.jobs import Job
from rkr.experiment.workers import Workers
from rkr.importing import importable


def interleaved(cases: dict[str, Callable[[], object]], rounds: int, inner: int = 1) -> dict[str, float]:
    """Median CPU seconds of each case. Every round runs every case once, so that all see the same machine.

    A case that returns a float says itself how long it took, as one of another process must.
    """
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
                said = [run() for _ in range(inner)]
                took = time.process_time() - start
                own = [seconds for seconds in said if isinstance(seconds, float)]
                times[name].append((sum(own) if own else took) / inner)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def alone(call: str, cluster: str | None = None, **arguments: Any) -> Any:
    """Have a job done in a process that does nothing else, here or on a cluster, and that inherits nothing."""
    importable(Path(__file__).parent)
    executor: Executor = Workers(1, 1)
    if cluster is not None:
        from rkr.experiment.cluster import Cluster

        executor = Cluster.connected(Execution(threads=1, cluster=cluster))
    with executor:
        return executor.submit(Job(call, call, arguments), lambda job, event: None).result()


def in_its_own_process(build: Callable[..., Callable[[], Any]], *arguments: Any) -> Callable[[], Any]:
    """What `build` makes, a measurement, in another process, which waits while others measure.

    The engine's memory settings (see `keep_freed_memory`) hold for a whole process; other programs do not have them.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_measure_on_demand, args=(there, build, arguments), daemon=True)
    process.start()
    there.close()

    def measure() -> Any:
        here.send(None)
        answer = here.recv()
        if isinstance(answer, str):
            raise ImportError(answer)
        return answer

    measure()  # warms up, and raises what is to be raised
    return measure


def _measure_on_demand(pipe: Any, build: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        measure = build(*arguments)
    except ImportError as error:
        pipe.send(str(error))
        return
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        pipe.send(measure())

"""The runs of a plan, one after the other or several at once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rkr.errors import RkrError, UsageError
from rkr.experiment.plan import Job, Plan
from rkr.experiment.recipes.settings import Order
from rkr.experiment.workers import MARK, STOPPED, Pool, Processes, Worker, was_stopped

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from rkr.data import Stream
    from rkr.experiment.events import Watch

__all__ = ["PRECISIONS", "STOPPED", "How", "help_run", "run_plan"]


PRECISIONS = ("32-true", "bf16-mixed")  # Fabric scales the loss of 16-mixed, which learners' steps know nothing of


@dataclass(frozen=True)
class How:
    """How runs are computed. Of these only precision and the kind of device change results, so they are recorded."""

    workers: int = 1
    threads: int | None = None
    accelerator: str = "auto"
    precision: str | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if self.precision not in (None, *PRECISIONS):
            raise UsageError(f"--precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if not self.save_minutes >= 0:
            raise UsageError(f"--save-minutes must be at least 0, not {self.save_minutes}")


def run_plan(plan: Plan, how: How, watch: Watch, more: bool = False) -> bool:
    """Do all runs of a plan. False if they were interrupted, and can go on; or if `more` was to come after them."""
    for method in plan.methods:
        plan.recipe.method(method)
    if how.workers > 1 and len(plan.jobs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--workers: the processes of torchrun share every run; give either torchrun or --workers")
    if MARK not in os.environ:  # else the process that started this one has done both
        _try_methods(plan)
        if plan.before is not None:
            return _after_validation(plan, plan.before, how, watch, more)
    return _all_runs(plan, how, watch, more)


def _after_validation(plan: Plan, before: Plan, how: How, watch: Watch, more: bool) -> bool:
    """Do the runs that a plan needs first, then its own; of a method that diverges in the first, none."""
    from rkr.experiment.folder import RunFolder
    from rkr.experiment.loop import Diverged

    diverged: Diverged | None = None
    lost: set[str] = set()
    try:
        if not _all_runs(before, how, watch, more=True):
            return False
    except Diverged as error:
        diverged = error
        lost = {job.method for job in before.jobs if not RunFolder(before.folder(job)).finished}
    rest = dataclasses.replace(plan, methods=tuple(name for name in plan.methods if name not in lost))
    if rest.methods and not _all_runs(rest, how, watch, more):
        return False
    if diverged is not None:
        raise Diverged(f"on validation classes, so that {', '.join(sorted(lost))} cannot be tested: {diverged}")
    return True


def _all_runs(plan: Plan, how: How, watch: Watch, more: bool) -> bool:
    """See `run_plan`."""
    if how.workers == 1 or len(plan.jobs) == 1:  # then other workers train candidates, if the method has some
        return _one_by_one(plan, how, watch, more)
    return _at_once(plan, how, watch)


def _try_methods(plan: Plan) -> None:
    """Build every method that has runs to do, so that what it refuses is refused before anything is trained.

    Zero-shot recipes were tried when they were read.
    """
    from rkr.experiment.folder import RunFolder

    recipe = plan.recipe
    for name in () if recipe.zero_shot else plan.methods:
        chosen = recipe.method(name)
        if all(RunFolder(plan.folder(job)).finished for job in plan.jobs if job.method == name):
            continue
        try:
            chosen.method.build(recipe.build_network, recipe.network.head, **chosen.options)
        except UsageError as error:
            raise UsageError(f"methods.{name}: {error}") from error


def _one_by_one(plan: Plan, how: How, watch: Watch, more: bool = False) -> bool:
    import torch

    from rkr.experiment.display import Quiet, TensorBoard, both
    from rkr.experiment.loop import Diverged
    from rkr.experiment.processes import make_fabric
    from rkr.experiment.run import Run

    if how.threads is not None:
        torch.set_num_threads(how.threads)
    fabric = make_fabric(how.accelerator, how.precision)
    failed: dict[Job, RkrError] = {}
    shares = _shares(plan, how.workers)
    streams: dict[Order, Stream] = {}
    for job in plan.jobs:
        if job.order not in streams:
            streams.clear()  # one at a time is in memory, for all methods that come in this order
            streams[job.order] = plan.stream(job.order)
        experiment = plan.experiment(job, streams[job.order], **_computed(how, fabric))
        curves = TensorBoard() if how.tensorboard and fabric.is_global_zero else Quiet()
        with curves, _crew(plan, how, job, shares[job]) as crew:
            told = both(watch, curves)
            twins = plan.twins(job)
            run = Run(experiment, plan.folder(job), fabric, told, how.save_minutes, how.threads, crew, twins)
            try:
                done = run.execute()
            except RkrError as error:
                if len(plan.jobs) == 1:
                    raise
                failed[job] = error
                if not isinstance(error, Diverged):
                    _raise(plan, failed, plan.jobs[: plan.jobs.index(job) + 1])
                continue
        if not done or (run.stop_wanted and (more or job != plan.jobs[-1])):
            return False
    _raise(plan, failed, plan.jobs)
    return True


def help_run(plan: Plan, how: How, watch: Watch, lines: Iterable[str | bytes], answer: Callable[[], None]) -> bool:
    """Train candidates for the one run of a plan, which another process executes. False if it was interrupted."""
    import torch

    from rkr.experiment.processes import make_fabric
    from rkr.experiment.run import Run

    if how.threads is not None:
        torch.set_num_threads(how.threads)
    fabric = make_fabric(how.accelerator, how.precision)
    (job,) = plan.jobs
    experiment = plan.experiment(job, plan.stream(job.order), **_computed(how, fabric))
    return Run(experiment, plan.folder(job), fabric, watch, how.save_minutes, how.threads).help(lines, answer)


def _computed(how: How, fabric: Fabric) -> dict[str, str]:
    """What is recorded of how a run is computed."""
    return {"precision": how.precision or PRECISIONS[0], "device": fabric.device.type}


def _shares(plan: Plan, workers: int) -> dict[Job, int]:
    """How many workers each run gets: one, and those that no run needs are for candidates, where there are some."""
    from rkr.methods import Learner

    shares = dict.fromkeys(plan.jobs, 1)
    with_candidates = [j for j in plan.jobs if plan.recipe.method(j.method).method.learner.rounds is not Learner.rounds]
    for _, job in zip(range(workers - len(plan.jobs)), itertools.cycle(with_candidates), strict=False):
        shares[job] += 1
    return shares


def _threads(how: How, processes: int) -> int:
    """Of each of so many processes."""
    return how.threads or max(1, (os.cpu_count() or 1) // processes)


def _crew(plan: Plan, how: How, job: Job, workers: int) -> AbstractContextManager[Processes | None]:
    """The processes that train a run's candidates, if it has several workers."""
    if workers == 1:
        return nullcontext()
    threads = _threads(how, workers)
    command = _command(plan, dataclasses.replace(how, tensorboard=False), job, threads)
    return Processes([*command, "--helper"], workers, threads)


def _at_once(plan: Plan, how: How, watch: Watch) -> bool:
    """Each run in a process of its own, `workers` at a time; what they tell is told here."""
    from rkr.experiment.loop import Diverged
    from rkr.experiment.signals import signals

    workers, shares = min(how.workers, len(plan.jobs)), _shares(plan, how.workers)
    ended: dict[Job, int | None] = {}
    failed: dict[Job, RkrError] = {}
    asked = threading.Event()

    def start(job: Job) -> Worker:
        threads = _threads(how, workers if shares[job] == 1 else how.workers)
        return Worker(_command(plan, how, job, threads, shares[job]), threads)

    with signals(asked.set), Pool(workers, start, harmless=(0, Diverged.exit_code)) as pool:
        for job, code, said in pool.do(plan.jobs, lambda job, event: watch(event), asked.is_set):
            ended[job] = code
            if code == Diverged.exit_code:
                failed[job] = Diverged(said)
            elif code and not was_stopped(code):
                failed[job] = RkrError(said)
    stopped = asked.is_set() or any(code is not None and was_stopped(code) for code in ended.values())
    if not stopped or not all(isinstance(error, Diverged) for error in failed.values()):
        _raise(plan, failed, ended)
    return not stopped


def _raise(plan: Plan, failed: Mapping[Job, RkrError], begun: Container[Job]) -> None:
    """One error for all runs that failed, if some did; that of divergence if all others are complete."""
    from rkr.experiment.loop import Diverged

    said = [f"{job.name}: {error}" for job, error in failed.items()]
    skipped = [job.name for job in plan.jobs if job not in begun]
    if skipped:
        said.append(f"skipped: {', '.join(skipped)}")
    if failed:
        kind = Diverged if all(isinstance(error, Diverged) for error in failed.values()) else RkrError
        raise kind("; ".join(said))


def _command(plan: Plan, how: How, job: Job, threads: int, workers: int = 1) -> list[str]:
    options: dict[str, Any] = {
        "--method": job.method,
        "--order": job.order,
        "--seed": job.seed,
        "--out": plan.out,
        "--epochs": plan.epochs,
        "--limit": plan.limit,
        "--data": plan.data,
        "--threads": threads,
        "--accelerator": how.accelerator,
        "--precision": how.precision,
        "--save-minutes": how.save_minutes,
        "--workers": workers if workers > 1 else None,
    }
    command = [sys.executable, "-m", "rkr", "run", plan.given, "--json", "--no-figures"]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    asked = ["--validation"] * plan.on_validation + ["--tensorboard"] * how.tensorboard
    return command + asked

"""Executes the runs of a plan, one after the other or several at once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rkr.errors import RkrError, UsageError
from rkr.experiment.execution import Execution
from rkr.experiment.plan import Plan
from rkr.experiment.workers import MARK, STOPPED, Helpers, Pool, Worker, was_stopped

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from rkr.data import Stream
    from rkr.experiment.events import Watch
    from rkr.experiment.spec import RunSpec

__all__ = ["STOPPED", "Execution", "help_run", "run_plan"]


def run_plan(plan: Plan, execution: Execution, watch: Watch, more: bool = False) -> bool:
    """Execute all runs of a plan.

    Returns:
        False if the runs were interrupted and can be resumed. If `more` plans follow, also False if the user asked to
        stop while the last run ended.
    """
    if execution.workers > 1 and len(plan.specs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--workers: the processes of torchrun share every run; give either torchrun or --workers")
    if MARK not in os.environ:  # in a worker, the process that started it has done both
        _check_methods(plan)
        if plan.before is not None:
            return _after_validation(plan, plan.before, execution, watch, more)
    return _all_runs(plan, execution, watch, more)


def _after_validation(plan: Plan, before: Plan, execution: Execution, watch: Watch, more: bool) -> bool:
    """Execute the validation runs of a plan, then its own. Methods that diverge in validation are skipped."""
    from rkr.experiment.folder import RunFolder
    from rkr.experiment.loop import Diverged

    diverged: Diverged | None = None
    lost: set[str] = set()
    try:
        if not _all_runs(before, execution, watch, more=True):
            return False
    except Diverged as error:
        diverged = error
        lost = {spec.method for spec in before.specs if not RunFolder(before.folder(spec)).finished}
    rest = dataclasses.replace(plan, methods=tuple(name for name in plan.methods if name not in lost))
    if rest.methods and not _all_runs(rest, execution, watch, more):
        return False
    if diverged is not None:
        raise Diverged(f"on validation classes, so {', '.join(sorted(lost))} cannot be tested: {diverged}")
    return True


def _all_runs(plan: Plan, execution: Execution, watch: Watch, more: bool) -> bool:
    """See `run_plan`."""
    if execution.workers == 1 or len(plan.specs) == 1:  # spare workers train candidates
        return _one_by_one(plan, execution, watch, more)
    return _at_once(plan, execution, watch)


def _check_methods(plan: Plan) -> None:
    """Build every method that has unfinished runs, on the meta device, so that errors come before any training.

    Zero-shot recipes do the same when they are read.
    """
    import torch

    from rkr.experiment.folder import RunFolder

    unfinished = (
        {} if plan.recipe.zero_shot else {s.method: s for s in plan.specs if not RunFolder(plan.folder(s)).finished}
    )
    for name, spec in unfinished.items():
        try:
            with torch.device("meta"):
                spec.learner.build(spec.make, spec.head, **spec.options)
        except UsageError as error:
            raise UsageError(f"methods.{name}: {error}") from error


def _one_by_one(plan: Plan, execution: Execution, watch: Watch, more: bool = False) -> bool:
    from rkr.experiment.display import Quiet, TensorBoard, both
    from rkr.experiment.loop import Diverged
    from rkr.experiment.run import Run

    fabric = _fabric(plan, execution)
    failed: dict[RunSpec, RkrError] = {}
    shares = _shares(plan, execution.workers)
    stream: Stream | None = None
    loaded = None
    for number, spec in enumerate(plan.specs, 1):
        if stream is None or loaded != spec.order:
            stream = None  # free its memory before the next is loaded
            stream, loaded = plan.stream(spec.order), spec.order
        curves = TensorBoard() if execution.tensorboard and fabric.is_global_zero else Quiet()
        with curves, _helpers(plan, execution, spec, shares[spec]) as helpers:
            run = Run(
                plan.resolve(spec, fabric.device.type),
                stream,
                plan.folder(spec),
                fabric,
                both(watch, curves),
                execution,
                helpers,
                plan.similar(spec),
            )
            try:
                done = run.execute()
            except RkrError as error:
                if len(plan.specs) == 1:
                    raise
                failed[spec] = error
                if not isinstance(error, Diverged):
                    _raise(plan, failed, plan.specs[:number])
                continue
        if not done or (run.stop_wanted and (more or number < len(plan.specs))):
            return False
    _raise(plan, failed, plan.specs)
    return True


def help_run(
    plan: Plan, execution: Execution, watch: Watch, lines: Iterable[str | bytes], answer: Callable[[], None]
) -> bool:
    """Train candidates for the one run of a plan, which another process executes. False if it was interrupted."""
    from rkr.experiment.run import Run

    fabric = _fabric(plan, execution)
    (spec,) = plan.specs
    run = Run(
        plan.resolve(spec, fabric.device.type), plan.stream(spec.order), plan.folder(spec), fabric, watch, execution
    )
    return run.help(lines, answer)


def _fabric(plan: Plan, execution: Execution) -> Fabric:
    import torch

    from rkr.experiment.processes import make_fabric

    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    return make_fabric(plan.accelerator, plan.precision)


def _shares(plan: Plan, workers: int) -> dict[RunSpec, int]:
    """Workers of each run: one, and spare workers go to runs of methods that have candidates."""
    from rkr.methods import Learner

    shares = dict.fromkeys(plan.specs, 1)
    with_candidates = [spec for spec in plan.specs if spec.learner.learner.rounds is not Learner.rounds]
    for _, spec in zip(range(workers - len(plan.specs)), itertools.cycle(with_candidates), strict=False):
        shares[spec] += 1
    return shares


def _threads(execution: Execution, processes: int) -> int:
    """Threads of each of several processes."""
    return execution.threads or max(1, (os.cpu_count() or 1) // processes)


def _helpers(plan: Plan, execution: Execution, spec: RunSpec, workers: int) -> AbstractContextManager[Helpers | None]:
    """The processes that train a run's candidates, if it has several workers."""
    if workers == 1:
        return nullcontext()
    threads = _threads(execution, workers)
    command = _command(plan, dataclasses.replace(execution, tensorboard=False), spec, threads)
    return Helpers([*command, "--helper"], workers, threads)


def _at_once(plan: Plan, execution: Execution, watch: Watch) -> bool:
    """Execute each run in its own process, `workers` at a time, and pass on the events."""
    from rkr.experiment.loop import Diverged
    from rkr.experiment.signals import signals

    workers, shares = min(execution.workers, len(plan.specs)), _shares(plan, execution.workers)
    ended: dict[RunSpec, int | None] = {}
    failed: dict[RunSpec, RkrError] = {}
    asked = threading.Event()

    def start(spec: RunSpec) -> Worker:
        threads = _threads(execution, workers if shares[spec] == 1 else execution.workers)
        return Worker(_command(plan, execution, spec, threads, shares[spec]), threads)

    with signals(asked.set), Pool(workers, start, harmless=(0, Diverged.exit_code)) as pool:
        for spec, code, said in pool.do(plan.specs, lambda spec, event: watch(event), asked.is_set):
            ended[spec] = code
            if code == Diverged.exit_code:
                failed[spec] = Diverged(said)
            elif code and not was_stopped(code):
                failed[spec] = RkrError(said)
    stopped = asked.is_set() or any(code is not None and was_stopped(code) for code in ended.values())
    if not stopped or not all(isinstance(error, Diverged) for error in failed.values()):
        _raise(plan, failed, ended)
    return not stopped


def _raise(plan: Plan, failed: Mapping[RunSpec, RkrError], begun: Container[RunSpec]) -> None:
    """Raise one error for all failed runs, if any: `Diverged` if divergence is the only reason."""
    from rkr.experiment.loop import Diverged

    said = [f"{spec.name}: {error}" for spec, error in failed.items()]
    skipped = [spec.name for spec in plan.specs if spec not in begun]
    if skipped:
        said.append(f"skipped: {', '.join(skipped)}")
    if failed:
        kind = Diverged if all(isinstance(error, Diverged) for error in failed.values()) else RkrError
        raise kind("; ".join(said))


def _command(plan: Plan, execution: Execution, spec: RunSpec, threads: int, workers: int = 1) -> list[str]:
    """The command line of a worker process."""
    options: dict[str, Any] = {
        "--method": spec.method,
        "--order": spec.order,
        "--seed": spec.seed,
        "--out": plan.out,
        "--epochs": plan.epochs,
        "--limit": plan.limit,
        "--data": plan.data,
        "--threads": threads,
        "--accelerator": plan.accelerator,
        "--precision": plan.precision,
        "--save-minutes": execution.save_minutes,
        "--workers": workers if workers > 1 else None,
    }
    command = [sys.executable, "-m", "rkr", "run", plan.given, "--json", "--no-figures"]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    asked = ["--validation"] * plan.on_validation + ["--tensorboard"] * execution.tensorboard
    return command + asked

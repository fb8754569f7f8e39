"""Executes the runs of a plan, one after the other or several at once."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING

from rkr.errors import RkrError, UsageError
from rkr.experiment.execution import Diverged, Execution, Interrupted
from rkr.experiment.executors import Executor, completed, make_executor
from rkr.experiment.jobs import Job, run_job
from rkr.experiment.plan import Plan
from rkr.experiment.queue import Queue

if TYPE_CHECKING:
    from rkr.experiment.events import Event, Watch
    from rkr.experiment.spec import RunSpec

__all__ = ["Execution", "run_plan"]


def run_plan(plan: Plan, execution: Execution, watch: Watch, more: bool = False) -> bool:
    """Execute all runs of a plan.

    Returns:
        False if the runs were interrupted and can be resumed. If `more` plans follow, also False if the user asked to
        stop while the last run ended.
    """
    check_torchrun(execution, len(plan.specs))
    check_methods(plan)
    execution = execution.asking(plan.recipe.resources, plan.accelerator)
    with make_executor(execution, len(plan.specs), plan.accelerator) as executor:
        if plan.before is not None:
            return _after_validation(plan, plan.before, executor, execution, watch, more)
        return _all_runs(plan, executor, execution, watch, more)


def check_torchrun(execution: Execution, runs: int) -> None:
    """Raise UsageError if runs are to be executed elsewhere and shared by the processes of torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for name, given in (("--workers", execution.workers > 1 and runs > 1), ("--cluster", execution.cluster)):
            if given:
                raise UsageError(f"{name}: the processes of torchrun share every run; give either torchrun or {name}")


def _after_validation(
    plan: Plan, before: Plan, executor: Executor, execution: Execution, watch: Watch, more: bool
) -> bool:
    """Execute the validation runs of a plan, then its own. Methods that diverge in validation are skipped."""
    from rkr.experiment.folder import RunFolder

    diverged: Diverged | None = None
    lost: set[str] = set()
    try:
        if not _all_runs(before, executor, execution, watch, more=True):
            return False
    except Diverged as error:
        diverged = error
        lost = {spec.method for spec in before.specs if not RunFolder(before.folder(spec)).finished}
    rest = dataclasses.replace(plan, methods=tuple(name for name in plan.methods if name not in lost))
    if rest.methods and not _all_runs(rest, executor, execution, watch, more):
        return False
    if diverged is not None:
        raise Diverged(f"on validation classes, so {', '.join(sorted(lost))} cannot be tested: {diverged}")
    return True


def check_methods(plan: Plan) -> None:
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


def _all_runs(plan: Plan, executor: Executor, execution: Execution, watch: Watch, more: bool) -> bool:
    """See `run_plan`."""
    from rkr.experiment.signals import signals

    slots = max(execution.workers, executor.capacity)
    shares = shares_of(plan, 1 if execution.gpus else slots)  # a run that waits would keep its share of a GPU
    jobs = {}
    for spec in plan.specs:
        processes = min(slots, len(plan.specs)) if shares[spec] == 1 else slots
        threads = executor.threads(execution, processes)
        own = execution.threads if execution.cluster is None and executor.capacity == 1 else threads
        jobs[run_job(plan, execution, spec, own, shares[spec], threads)] = spec
    failed: dict[RunSpec, RkrError] = {}
    ended: set[RunSpec] = set()
    asked, stopped = threading.Event(), False
    queue = Queue(plan.out, [(spec.title, plan.folder(spec)) for spec in plan.specs])

    def told(job: Job, event: Event) -> None:
        queue.told(event)
        watch(event)

    with signals(asked.set), queue:
        for job, future in completed(executor, jobs, told, asked.is_set, is_diverged):
            spec = jobs[job]
            ended.add(spec)
            queue.ended(spec.title, future.exception())
            try:
                if future.result():  # a stop was asked for at its end
                    asked.set()
            except Interrupted:
                stopped = True
            except RkrError as error:
                if len(plan.specs) == 1:
                    raise
                failed[spec] = error
    stopped = stopped or (asked.is_set() and (more or len(ended) < len(jobs)))
    if not stopped or not all(isinstance(error, Diverged) for error in failed.values()):
        _raise(plan, failed, ended)
    return not stopped


def is_diverged(job: Job, error: BaseException) -> bool:
    """Whether other runs may still succeed after an error."""
    return isinstance(error, Diverged)


def shares_of(plan: Plan, workers: int) -> dict[RunSpec, int]:
    """Workers of each run: one, and spare workers go to runs of methods that have candidates."""
    from rkr.methods import Learner

    shares = dict.fromkeys(plan.specs, 1)
    with_candidates = [spec for spec in plan.specs if spec.learner.learner.rounds is not Learner.rounds]
    for _, spec in zip(range(workers - len(plan.specs)), itertools.cycle(with_candidates), strict=False):
        shares[spec] += 1
    return shares


def _raise(plan: Plan, failed: Mapping[RunSpec, RkrError], begun: Container[RunSpec]) -> None:
    """Raise one error for all failed runs, if any: `Diverged` if divergence is the only reason.

    What is wrong with a recipe's own parts is wrong for all runs, and is said once.
    """
    if len(failed) == 1 and isinstance(error := next(iter(failed.values())), UsageError):
        raise error
    said = [f"{spec.name}: {error}" for spec, error in failed.items()]
    skipped = [spec.name for spec in plan.specs if spec not in begun]
    if skipped:
        said.append(f"skipped: {', '.join(skipped)}")
    if failed:
        kind = Diverged if all(isinstance(error, Diverged) for error in failed.values()) else RkrError
        raise kind("; ".join(said))

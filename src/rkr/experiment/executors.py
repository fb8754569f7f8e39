"""Executors do jobs elsewhere, and pass on their events: on this machine, or on a cluster.

They follow `concurrent.futures`. What they add is that a job tells events while it is done and can be stopped, which
lets it save its state. Who uses one does not know which one it is.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment.execution import Diverged, Execution, Interrupted
from rkr.experiment.jobs import Job, Site, perform

if TYPE_CHECKING:
    from typing_extensions import Self

    from rkr.experiment.events import Event

Told = Callable[[Job, "Event"], None]


class Lost(RkrError):
    """The process that did a job has ended before it."""


class Executor(ABC):
    """Does jobs, several at once. A context manager: what is at work when an exception leaves it is ended at once."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many jobs are done at once."""

    @property
    def slots(self) -> int:
        """How many jobs to submit at once."""
        return self.capacity

    def threads(self, execution: Execution, processes: int) -> int:
        """CPU threads of each job, where so many are done at once."""
        return execution.threads_of(processes)

    @abstractmethod
    def submit(self, job: Job, told: Told) -> Future[Any]:
        """Do a job. `told` gets its events, from any thread.

        The future's exception is `Interrupted` if the job was stopped, `Lost` if its process has died, and else what
        the job has raised.
        """

    @abstractmethod
    def stop(self, job: Job | None = None) -> None:
        """Let a job, or all of them, save their state and end."""

    @abstractmethod
    def close(self, kill: bool = False) -> None:
        """Free all resources. Jobs at work are ended at once with `kill`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=kind is not None)


class Here(Executor):
    """Does jobs in this process, while they are submitted."""

    capacity = 1

    def __init__(self) -> None:
        self._site = Site()
        self._at: Job | None = None

    def submit(self, job: Job, told: Told) -> Future[Any]:
        from rkr.experiment.workers import Workers

        future: Future[Any] = Future()
        self._at = job
        try:
            self._site.watch, self._site.crew = (lambda event: told(job, event)), Workers
            future.set_result(perform(job, self._site))
        except (Interrupted, RkrError) as error:
            future.set_exception(error)
        finally:
            self._at = None
        return future

    def stop(self, job: Job | None = None) -> None:
        """From within an event of the job: afterwards there is none."""
        if self._at is not None and job in (None, self._at):
            signal.raise_signal(signal.SIGTERM)

    def close(self, kill: bool = False) -> None:
        self._site.kept.clear()


def make_executor(execution: Execution, jobs: int = 1, accelerator: str = "auto") -> Executor:
    """The executor for so many jobs. Raises UsageError if the cluster cannot be used."""
    if execution.cluster is not None:
        from rkr.experiment.cluster import Cluster

        return Cluster.connected(execution, accelerator)
    workers = min(execution.workers, jobs)
    if workers == 1:
        return Here()
    from rkr.experiment.workers import Workers

    return Workers(workers, execution.threads_of(workers))


def completed(
    executor: Executor,
    jobs: Iterable[Job],
    told: Told,
    asked: Callable[[], bool],
    harmless: Callable[[Job, BaseException], bool],
    most: int | None = None,
) -> Iterator[tuple[Job, Future[Any]]]:
    """Do jobs and yield each one that has ended.

    Args:
        executor: Where.
        jobs: They are submitted when there is room. None is after an error, except harmless ones.
        told: Gets their events, from any thread.
        asked: Whether to stop: then no more are submitted, and those at work save their states and end.
        harmless: Whether further jobs are begun after the error of a job.
        most: How many to submit at once; None: those that the executor wants.
    """
    waiting, at_work = iter(jobs), dict[Future[Any], Job]()
    over = stopped = False
    while True:
        while not over and len(at_work) < (most or executor.slots) and not (over := asked()):
            job = next(waiting, None)
            if job is None:
                break
            future = executor.submit(job, told)
            at_work[future] = job
            if future.done():
                break
        if not at_work:
            return
        for future in wait(at_work, timeout=0.1, return_when=FIRST_COMPLETED).done:
            error = future.exception()
            over = over or (error is not None and not harmless(at_work[future], error))
            yield at_work.pop(future), future
        if not stopped and asked():
            over = stopped = True
            executor.stop()


# ---------------------------------------------------------------------------------------------------------
# Errors from one process to another


def error_json(error: BaseException) -> dict[str, str]:
    """An error as plain values."""
    kind = type(error).__name__
    known = isinstance(error, RkrError) or kind == "Interrupted"
    return {"kind": kind if known else "RkrError", "text": str(error) if known else f"{kind}: {error}"}


def error_from(values: dict[str, str]) -> Exception:
    """The error that `error_json` has described."""

    kinds: dict[str, type[Exception]] = {c.__name__: c for c in (Diverged, Interrupted, UsageError, FileError, Lost)}
    return kinds.get(values["kind"], RkrError)(*([values["text"]] if values["text"] else []))

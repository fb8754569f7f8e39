"""How runs are executed: settings that do not change results."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rkr.errors import RkrError, UsageError

STOPPED = 130  # exit code of a command that was interrupted and can go on


class Interrupted(Exception):
    """A stop was requested, and the state is saved."""


class Diverged(RkrError):
    """The loss is infinite or NaN. Other runs may still succeed."""

    exit_code = 3  # of the command


@dataclass(frozen=True)
class Execution:
    """Settings that affect only the speed of runs, so they are not recorded.

    Attributes:
        workers: Processes at once.
        threads: CPU threads of each process. Default: cores / workers.
        save_minutes: Minutes between checkpoints of a run.
        tensorboard: Write curves for TensorBoard.
        cluster: Address of a Ray cluster; None: this machine.
        gpus: Share of a GPU for each run on a cluster.
        memory: Bytes of memory for each run on a cluster; None: not asked for.
    """

    workers: int = 1
    threads: int | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False
    cluster: str | None = None
    gpus: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if not self.save_minutes >= 0:
            raise UsageError(f"--save-minutes must be at least 0, not {self.save_minutes}")
        if self.cluster is None and (self.gpus or self.memory):
            raise UsageError("--gpus and --memory are for --cluster; on this machine runs share what there is")
        if self.cluster is not None and self.workers > 1:
            raise UsageError(
                "--workers: with --cluster as many runs are executed at once as fit; "
                "--threads, --gpus and --memory say what each of them needs"
            )
        if not (self.gpus >= 0 and (self.gpus <= 1 or self.gpus == int(self.gpus))):
            raise UsageError(f"--gpus must be from 0 to 1, or a whole number, not {self.gpus}")

    def threads_of(self, processes: int) -> int:
        """CPU threads of each of so many processes."""
        return self.threads or max(1, (os.cpu_count() or 1) // processes)


DEFAULT = Execution()

"""How runs are executed: settings that do not change results."""

from __future__ import annotations

from dataclasses import dataclass

from rkr.errors import UsageError


@dataclass(frozen=True)
class Execution:
    """Settings that affect only the speed of runs, so they are not recorded.

    Attributes:
        workers: Processes at once.
        threads: CPU threads of each process. Default: cores / workers.
        save_minutes: Minutes between checkpoints of a run.
        tensorboard: Write curves for TensorBoard.
    """

    workers: int = 1
    threads: int | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if not self.save_minutes >= 0:
            raise UsageError(f"--save-minutes must be at least 0, not {self.save_minutes}")


DEFAULT = Execution()

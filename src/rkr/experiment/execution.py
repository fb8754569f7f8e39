"""How runs are executed: settings that do not change results."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rkr.errors import RkrError, UsageError

if TYPE_CHECKING:
    from rkr.experiment.recipes.settings import ResourceSettings

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
        gpus: GPUs of each run on a cluster, or a share of one; None: what the recipe says, else none.
        memory: Bytes of memory for each run on a cluster; None: what the recipe says, else not asked for.
    """

    workers: int = 1
    threads: int | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False
    cluster: str | None = None
    gpus: float | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if not self.save_minutes >= 0:
            raise UsageError(f"--save-minutes must be at least 0, not {self.save_minutes}")
        if self.cluster is None and (self.gpus is not None or self.memory is not None):
            raise UsageError("--gpus and --memory are for --cluster; on this machine runs share what there is")
        if self.cluster is not None and self.workers > 1:
            raise UsageError(
                "--workers: with --cluster as many runs are executed at once as fit; "
                "--threads, --gpus and --memory say what each of them needs"
            )
        if self.gpus is not None and not is_gpus(self.gpus):
            raise UsageError(f"--gpus {GPUS}, not {self.gpus:g}")

    def asking(self, resources: ResourceSettings, accelerator: str = "auto") -> Execution:
        """With what a recipe asks of a cluster, where no option says otherwise."""
        if self.cluster is None:
            return self
        gpus = None if accelerator == "cpu" else resources.gpus
        return replace(
            self,
            threads=resources.threads if self.threads is None else self.threads,
            gpus=gpus if self.gpus is None else self.gpus,
            memory=resources.bytes if self.memory is None else self.memory,
        )

    def threads_of(self, processes: int) -> int:
        """CPU threads of each of so many processes."""
        return self.threads or max(1, (os.cpu_count() or 1) // processes)


GPUS = "must be from 0 to 1, or a whole number"


def is_gpus(number: float) -> bool:
    """Whether a cluster can be asked for so many: several jobs share one, and one job has whole ones."""
    return 0 <= number <= 1 or (number > 1 and number == number // 1)


def byte_count(text: str | None) -> int | None:
    """Parse "4GB", "500 MB" or a number of bytes."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    count = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")) if found else 0
    if not count:
        raise UsageError(f"--memory must be a size such as 4GB, not {text!r}")
    return count


DEFAULT = Execution()

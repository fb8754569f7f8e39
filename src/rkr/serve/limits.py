"""What a server accepts, and the errors it answers with."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path

from rkr.errors import RkrError, UsageError

MB = 1_000_000


@dataclass(frozen=True)
class Limits:
    """Bounds on what a server accepts and keeps.

    Attributes:
        batch: Most pictures that are computed together.
        wait: Seconds that a picture waits for others to be computed with.
        queue: Pictures that are accepted and not yet answered; beyond it requests get 503.
        timeout: Seconds after which a request that is not answered gets 503.
        upload_timeout: Seconds in which a request's body must arrive.
        pictures: Of one request.
        body: Bytes of a request, but for those that learn.
        upload: Bytes of a request with a zip file to learn from.
        uploads: Bytes of all bodies that are being received at a time.
        pixels: Of one picture, width times height.
        files: In a zip file.
        unpacked: Bytes of all files in a zip file together.
        classes: In a zip file.
        jobs: Tasks that wait to be learned.
        task: Bytes of a task file.
    """

    batch: int = 32
    wait: float = 0.005
    queue: int = 256
    timeout: float = 30.0
    upload_timeout: float = 60.0
    pictures: int = 64
    body: int = 32 * MB
    upload: int = 512 * MB
    uploads: int = 1024 * MB
    pixels: int = 50 * MB
    files: int = 20_000
    unpacked: int = 2048 * MB
    classes: int = 1000
    jobs: int = 4
    task: int = 256 * MB

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.type == "float" else 1
            kinds = (int, float) if field.type == "float" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value < math.inf:
                raise UsageError(f"the limit {field.name} must be a number of at least {least}, not {value!r}")
        if self.queue < self.batch:
            raise UsageError(f"--queue must be at least --max-batch ({self.batch}), not {self.queue}")


class Refused(RkrError):
    """A request that is answered with an error.

    Attributes:
        status: Of HTTP.
        after: Seconds until it is worth trying again.
    """

    def __init__(self, status: int, message: str, after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.after = status, after


class NotFound(Refused):
    """There is no such task, or not any more."""

    def __init__(self, message: str) -> None:
        super().__init__(404, message)


class Busy(Refused):
    """Too much is waiting already."""

    def __init__(self, message: str, after: float) -> None:
        super().__init__(503, message, max(1, math.ceil(after)))


def without(message: str, path: Path, name: str) -> str:
    """A message that does not tell where something lies on this machine."""
    return " ".join(message.replace(f"{path}{os.sep}", "").replace(str(path), name).split())

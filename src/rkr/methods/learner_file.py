"""`learner.safetensors`: what a method has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rkr.atomic import write_atomic
from rkr.core.files import decode, encode
from rkr.versions import Format

LEARNER = Format("rkr-learner", 2, {1: lambda content: content})  # version 1 has neither format, version nor checksums
FILE = "learner.safetensors"


def write_learner(folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write the tensors of a learner."""
    write_atomic(folder / FILE, encode(tensors, {**LEARNER.stated, **(metadata or {})}))


def read_learner(folder: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a learner."""
    return decode(folder / FILE, LEARNER, unversioned=True)

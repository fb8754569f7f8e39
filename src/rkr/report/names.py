"""Names of runs as names of files, and as texts that fit into a figure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

LONGEST = 80  # bytes of a stem before it is cut: file systems have room for 255, with what comes before and after it


def file_stem(name: str) -> str:
    """What a file of that name is called: no spaces or signs; a long name is cut, with a hash of all of it."""
    stem = re.sub(r"[^\w.-]+", "_", name).strip("_")
    if len(stem.encode()) <= LONGEST:
        return stem
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{stem.encode()[:LONGEST].decode(errors='ignore')}-{digest}"


def file_stems(names: Iterable[str]) -> list[str]:
    """Stems of which no two are the same, not even to a file system that takes "A" for "a"."""
    taken: set[str] = set()
    stems = []
    for name in names:
        stem = file_stem(name)
        while stem.casefold() in taken:
            stem += "_"  # names that differ only in what a file cannot be called
        taken.add(stem.casefold())
        stems.append(stem)
    return stems


def shortened(name: str, longest: int) -> str:
    """The name, its middle left out if it is longer: names that begin alike tend to differ at the end."""
    if len(name) <= longest:
        return name
    end = longest // 3
    return f"{name[: longest - end - 1]}…{name[-end:]}"

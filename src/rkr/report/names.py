"""Names of runs as file names and figure labels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

LONGEST = 80  # bytes; file systems allow 255, including prefix and extension


def file_stem(name: str) -> str:
    """A file name without spaces and special characters. Long names are cut and end in a hash of the full name."""
    stem = re.sub(r"[^\w.-]+", "_", name).strip("_")
    if len(stem.encode()) <= LONGEST:
        return stem
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{stem.encode()[:LONGEST].decode(errors='ignore')}-{digest}"


def file_stems(names: Iterable[str]) -> list[str]:
    """Distinct file names, even on case-insensitive file systems."""
    taken: set[str] = set()
    stems = []
    for name in names:
        stem = file_stem(name)
        while stem.casefold() in taken:
            stem += "_"  # names that differ only in special characters
        taken.add(stem.casefold())
        stems.append(stem)
    return stems


def shortened(name: str, longest: int) -> str:
    """Cut the middle of a long name, since names with a common start tend to differ at the end."""
    if len(name) <= longest:
        return name
    end = longest // 3
    return f"{name[: longest - end - 1]}…{name[-end:]}"

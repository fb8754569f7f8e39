"""Finding runs in folders that hold anything: what cannot be used is listed with its reason, and nothing is raised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rkr.errors import FileError
from rkr.experiment.results import RESULTS, RUN, Result, rank, read_result
from rkr.report.groups import named_apart
from rkr.report.protocol import canonical, protocol

BEGUN = "nothing learned yet"


@dataclass(frozen=True)
class Skipped:
    """A folder that looks like a run but is not used."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Scan:
    """The runs that were found, by recipe, method, order and seed, and the folders that were left out, by path."""

    results: list[Result]
    skipped: list[Skipped]


def scan(root: str | os.PathLike[str], *more: str | os.PathLike[str], epochs: bool = True) -> Scan:
    """Read all runs at or below some folders: every folder with a `run.json`.

    Left out are folders that cannot be read or are damaged, those of other programs, runs that have learned no task
    yet, and doubles: of runs with the same recipe, method, options, order, seed and protocol the one that is farthest
    stays. Runs of a method with different options are named apart: "rkr (rank=2)", "rkr (rank=8)".
    FileError only if one of the given folders is none. Without `epochs` runs have none, and are read much faster.
    """
    found = collect(root, *more, epochs=epochs)
    results = named_apart(found.results)
    return Scan(sorted(results, key=_place), found.skipped)


def collect(root: str | os.PathLike[str], *more: str | os.PathLike[str], epochs: bool = True) -> Scan:
    """As `scan`, with methods called as their runs call them."""
    skipped: list[Skipped] = []
    found: dict[tuple[object, ...], list[Result]] = {}
    for folder in _folders([Path(root), *map(Path, more)], skipped):
        try:
            result = read_result(folder, epochs)
        except FileError as error:
            skipped.append(Skipped(folder, str(error).removeprefix(f"{folder}{os.sep}")))
            continue
        except RecursionError:
            skipped.append(Skipped(folder, "JSON that is nested too deeply"))
            continue
        if not result.done:
            skipped.append(Skipped(folder, BEGUN))
            continue
        options = canonical(result.options)
        key = (result.recipe, result.method, options, result.order, result.seed, protocol(result).hash)
        found.setdefault(key, []).append(result)
    results = []
    for same in found.values():
        kept = max(same, key=lambda result: (result.finished, result.done))
        results.append(kept)
        skipped += [Skipped(left.folder, _double(left, kept)) for left in same if left is not kept]
    return Scan(sorted(results, key=_place), sorted(skipped, key=lambda item: str(item.path)))


def _place(result: Result) -> tuple[object, ...]:
    return result.recipe, result.method, rank(result.order), result.seed, str(result.folder)


def _double(left: Result, kept: Result) -> str:
    """What one of two runs with the same settings is: a copy, finished or not, or a run that came out otherwise."""
    same = all(rows[: kept.done] == kept.measures[name][: left.done] for name, rows in left.measures.items())
    return f"the same run as {kept.folder}" if same else f"same settings as {kept.folder}, but other results"


def _folders(roots: list[Path], skipped: list[Skipped]) -> Iterator[Path]:
    """Each folder that looks like a run once, however many links and roots lead to it."""

    def unreadable(error: OSError) -> None:
        skipped.append(Skipped(Path(error.filename), f"cannot be read: {error.strerror or error}"))

    met: set[str] = set()
    for root in roots:
        if not root.is_dir():
            raise FileError(f"{root}: no such folder")
        for name, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
            real = os.path.realpath(name)
            if real in met:
                folders.clear()
                continue
            met.add(real)
            folders.sort()
            if RUN in files:
                yield Path(name)
            elif RESULTS in files:
                skipped.append(Skipped(Path(name), f"{RESULTS} without {RUN}"))

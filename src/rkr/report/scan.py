"""Find runs in arbitrary folders. Runs that cannot be used are listed with a reason instead of raising an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rkr.errors import FileError
from rkr.experiment.results import RESULTS, RUN, Result, rank, read_result
from rkr.report.groups import named_apart
from rkr.report.protocol import canonical, protocol

BEGUN = "no task learned yet"


@dataclass(frozen=True)
class Skipped:
    """A run folder that is not used."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Scan:
    """The runs, sorted by recipe, method, order and seed, and the skipped folders, sorted by path."""

    results: list[Result]
    skipped: list[Skipped]


def scan(root: str | os.PathLike[str], *more: str | os.PathLike[str], epochs: bool = True) -> Scan:
    """Read all runs at or below some folders: every folder with a `run.json`.

    Skipped are unreadable, damaged and foreign folders, runs that have not finished a task, and duplicates: of runs
    with equal recipe, method, options, order, seed and protocol, the most complete one is kept. Runs of a method with
    different options are renamed, such as "rkr (rank=2)" and "rkr (rank=8)". Raises FileError only if one of the given
    folders does not exist. `epochs=False` leaves out the epochs and is much faster.
    """
    found = collect(root, *more, epochs=epochs)
    results = named_apart(found.results)
    return Scan(sorted(results, key=_place), found.skipped)


def collect(root: str | os.PathLike[str], *more: str | os.PathLike[str], epochs: bool = True) -> Scan:
    """As `scan`, but with the original method names."""
    skipped: list[Skipped] = []
    found: dict[tuple[object, ...], list[Result]] = {}
    for folder in _folders([Path(root), *map(Path, more)], skipped):
        try:
            result = read_result(folder, epochs)
        except FileError as error:
            skipped.append(Skipped(folder, str(error).removeprefix(f"{folder}{os.sep}")))
            continue
        except RecursionError:
            skipped.append(Skipped(folder, "JSON is nested too deeply"))
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
    """Why a duplicate is skipped: it is a copy, or a run with the same settings and different results."""
    same = all(rows[: kept.done] == kept.measures[name][: left.done] for name, rows in left.measures.items())
    return f"same run as {kept.folder}" if same else f"same settings as {kept.folder}, but different results"


def _folders(roots: list[Path], skipped: list[Skipped]) -> Iterator[Path]:
    """Yield every run folder once, even if several roots or links lead to it."""

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

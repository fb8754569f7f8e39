"""`rkr compare`: a summary of methods or runs, and paired statistics of each against the first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rkr.errors import UsageError
from rkr.experiment.results import Result
from rkr.report.groups import named_apart
from rkr.report.protocol import Protocol, protocol, require_one_protocol
from rkr.report.scan import Skipped, collect
from rkr.report.search import marked, search_note
from rkr.report.statistics import Paired, paired
from rkr.report.summary import COLUMNS, NOTHING, Summary, points, progress, summarise, summary_cells
from rkr.report.tables import LOOK, caption, spread_json


@dataclass(frozen=True)
class Compared:
    """The finished runs of one method in one folder."""

    name: str  # the method, with its folder if several have the same name
    summary: Summary
    to_first: Paired | None  # this minus the first; None for the first


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. The others are compared with the first."""

    protocol: Protocol
    compared: tuple[Compared, ...]
    skipped: tuple[Skipped, ...]  # includes unfinished runs
    search: str = ""  # what marks of names mean

    @property
    def measure(self) -> str:
        """The measure that is compared: "accuracy", or "H" for zero-shot tasks."""
        return self.compared[0].summary.measure


def compare(folders: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Compare all runs in some folders: single runs, methods or whole recipes.

    Each run counts for the first folder that contains it, so `runs/x/rkr runs/x` compares all methods of x with rkr.
    Raises UsageError if the protocols differ or if there is nothing to compare.
    """
    skipped: dict[Path, Skipped] = {}
    groups: list[tuple[Path, list[Result]]] = []
    taken: set[Path] = set()
    scans = [(folder, collect(folder, epochs=False)) for folder in map(Path, folders)]
    apart = named_apart([result for _, found in scans for result in found.results])
    for folder, found in scans:
        here, apart = apart[: len(found.results)], apart[len(found.results) :]
        skipped |= {item.path: item for item in found.skipped}
        methods: dict[tuple[str, str], list[Result]] = {}
        again = False
        for result in here:
            real = result.folder.resolve()
            if real in taken:
                again = True
            elif result.finished:
                taken.add(real)
                methods.setdefault((result.recipe, result.method), []).append(result)
            else:
                skipped[result.folder] = Skipped(result.folder, f"unfinished: {progress(result)}")
        if not methods:
            left = [f"{item.path}: {item.reason}" for item in skipped.values() if item.path.is_relative_to(folder)]
            why = "all of its runs are in an earlier folder" if again else "; ".join(left) or "it contains no runs"
            raise UsageError(f"{folder}: no finished runs to compare ({why})")
        groups += [(folder, runs) for runs in methods.values()]
    if len(groups) < 2:
        raise UsageError(f"{groups[0][0]}: contains only {groups[0][1][0].method}; give something to compare it with")
    require_one_protocol([run for _, runs in groups for run in runs])
    first = groups[0][1]
    return Comparison(
        protocol=protocol(first[0]),
        compared=tuple(
            Compared(marked(name, runs), summarise(runs)[0], None if runs is first else paired(first, runs))
            for name, (_, runs) in zip(_names(groups), groups, strict=True)
        ),
        skipped=tuple(skipped.values()),
        search=search_note(run for _, runs in groups for run in runs),
    )


def _names(groups: Sequence[tuple[Path, list[Result]]]) -> list[str]:
    """The method, with its folder (or the folder of a single run) if several methods have the same name."""
    methods = [runs[0].method for _, runs in groups]
    return [
        f"{method} ({runs[0].folder if len(runs) == 1 else folder})" if methods.count(method) > 1 else method
        for method, (folder, runs) in zip(methods, groups, strict=True)
    ]


def comparison_tables(comparison: Comparison) -> list[Table]:
    """A table of the methods, and a table of their differences from the first."""
    measure, first = comparison.measure, comparison.compared[0]
    names = ("runs", measure, "forgetting", "agnostic", "incremental", "capacity", "capacity to learn")
    found = summary_cells([one.summary for one in comparison.compared], names)
    each = Table(
        caption=caption(
            f"mean {measure} over all tasks after the last one, in %, ± 95 % confidence interval over runs",
            *(COLUMNS[name].short for name in found),
            comparison.search,
            f"protocol {comparison.protocol.hash}",
        ),
        **LOOK,
    )
    each.add_column("method", overflow="fold")
    for name in found:
        each.add_column(name, justify="right", no_wrap=True)
    for i, one in enumerate(comparison.compared):
        each.add_row(Text(one.name), *(column[i].text for column in found.values()))
    to_first = Table(
        caption=caption(
            "paired over the same orders and seeds: points, ± 95 % confidence interval, p of the paired t-test"
        ),
        **LOOK,
    )
    to_first.add_column(Text(f"minus {first.name}"), overflow="fold")
    for name in ("difference", "p", "pairs", "unpaired"):
        to_first.add_column(name, justify="right", overflow="fold")
    for one in comparison.compared[1:]:
        assert one.to_first is not None
        to_first.add_row(Text(one.name), *map(Text, _cells(one.to_first)))
    return [each, to_first]


def _cells(found: Paired) -> tuple[str, str, str, str]:
    unpaired = ", ".join(found.unpaired) or NOTHING
    if found.difference is None:
        return NOTHING, NOTHING, "0", unpaired
    half = found.difference.half_width
    difference = points(found.difference) + ("" if half is None else f" ± {100 * half:.2f}")
    p = NOTHING if found.p is None else f"{found.p:.2g}" if found.p >= 1e-4 else "< 0.0001"
    return difference, p, str(found.difference.n), unpaired


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON: accuracies (or H) in percent, differences in points, None if not available."""
    methods = []
    for one in comparison.compared:
        s, found = one.summary, one.to_first
        methods.append(
            {
                "name": one.name,
                "method": s.method,
                "runs": list(s.runs),
                "accuracy": spread_json(s.accuracy),
                **{key: spread_json(value) for key, value in s.metrics.items()},
                "capacity": s.capacity,
                "capacity_to_learn": s.capacity_to_learn,
                "to_first": None
                if found is None
                else {
                    "difference": spread_json(found.difference),
                    "p": found.p,
                    "pairs": list(found.pairs),
                    "unpaired": list(found.unpaired),
                },
            }
        )
    return {
        "measure": comparison.measure,
        "protocol": {"hash": comparison.protocol.hash, "fields": dict(comparison.protocol.fields)},
        "methods": methods,
        "skipped": [{"folder": str(item.path), "reason": item.reason} for item in comparison.skipped],
    }

"""Tables as files: Markdown and LaTeX with rounded numbers, CSV with full precision.

CSV files contain fractions and leave unknown values empty. LaTeX tables need the package booktabs.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rkr.atomic import write_atomic
from rkr.errors import FileError
from rkr.experiment.metrics import Spread
from rkr.experiment.results import Result
from rkr.report.groups import comparable
from rkr.report.names import file_stems
from rkr.report.summary import METRICS, NOTHING, Paper, Summary, summarise, summary_cells, zero_shot_cells


@dataclass(frozen=True)
class Sheet:
    """A table as printed text and as raw values. The first column is text."""

    name: str  # file name without extension
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    raw_header: Sequence[str]
    raw_rows: Sequence[Sequence[Any]]


def write_tables(
    results: Sequence[Result],
    folder: str | os.PathLike[str],
    papers: Mapping[str, Paper] | None = None,
    failed: Callable[[Path, Exception], None] | None = None,
) -> list[Path]:
    """Write the tables of each recipe as .md, .csv and .tex files, and return their paths.

    For each recipe and protocol: a summary of the methods, the final accuracy on each task of each run, U, S and H of
    zero-shot tasks, and the accuracy matrix of each run. `papers` holds the paper's numbers by recipe. If a table
    cannot be made, `failed` is called with its path and the error; without `failed`, the error is raised.
    """
    folder = Path(folder)
    written: list[Path] = []
    sheets = [
        sheet
        for name, runs in comparable(results).items()
        for sheet in _sheets(name, runs, (papers or {}).get(runs[0].recipe, {}))
    ]
    for stem, (_, make) in zip(file_stems(name for name, _ in sheets), sheets, strict=True):
        try:
            sheet = make()
            if sheet is None:
                continue
            for extension, text in (("md", markdown(sheet)), ("csv", comma_separated(sheet)), ("tex", latex(sheet))):
                path = folder / f"{stem}.{extension}"
                write_atomic(path, text.encode("utf-8", "replace"), durable=False)
                written.append(path)
        except FileError:
            raise
        except Exception as error:
            if failed is None:
                raise
            failed(folder / stem, error)
    return written


# ---------------------------------------------------------------------------------------------------------
# The tables


def _sheets(name: str, runs: Sequence[Result], paper: Paper) -> Iterator[tuple[str, Callable[[], Sheet | None]]]:
    """The name of each table and a function that makes it, or returns None if the table is empty."""
    yield f"{name}-summary", lambda: _summary(f"{name}-summary", summarise(runs, paper))
    begun = [run for run in runs if run.done]
    if begun:
        yield f"{name}-tasks", lambda: _tasks(f"{name}-tasks", begun)
    if begun and begun[0].measure == "H" and any(run.finished for run in runs):
        yield f"{name}-zero-shot", lambda: _zero_shot(f"{name}-zero-shot", zero_shot_cells(runs))
    for run in begun:
        label = f"{name}-matrix-{run.method}-{run.label}"
        yield label, partial(_matrix, label, run)


def _summary(name: str, summaries: Sequence[Summary]) -> Sheet | None:
    if not summaries:
        return None
    cells = summary_cells(summaries)
    raw_header = ["method", "measure", "runs"]
    raw_header += [f"{key}{of}" for key in ("accuracy", *METRICS) for of in ("", "_std", "_half_width")]
    raw_header += ["paper_percent", "paper_half_width_percent", "aopd", "mopd", "capacity_percent"]
    raw_header += ["capacity_to_learn_percent", "bytes", "epoch_seconds", "identical_pairs", "pairs"]
    raw_rows = []
    for s in summaries:
        row: list[Any] = [s.method, s.measure, len(s.runs)]
        for value in (s.accuracy, *s.metrics.values()):
            row += [None] * 3 if value is None else [value.mean, value.std, value.half_width]
        row += [None, None] if s.paper is None else s.paper
        row += [None, None] if s.robustness is None else [s.robustness.mean, s.robustness.worst]
        raw_rows.append([*row, s.capacity, s.capacity_to_learn, s.bytes, s.epoch_seconds, *s.unchanged])
    printed = [[s.name, *(column[i].text for column in cells.values())] for i, s in enumerate(summaries)]
    return Sheet(name, ["method", *cells], printed, raw_header, raw_rows)


def _tasks(name: str, runs: Sequence[Result]) -> Sheet:
    """The final accuracy on each task, one row per run. Tasks are named if they are the same in all runs."""
    n = len(runs[0].tasks)
    same = all(run.tasks == runs[0].tasks for run in runs)
    tasks = list(runs[0].tasks) if same else [f"task {number}" for number in range(1, n + 1)]
    rows = [
        [run.method, run.label, *(f"{100 * a:.1f}" for a in run.matrix[-1]), *[NOTHING] * (n - run.done)]
        for run in runs
    ]
    raw = [[run.method, run.order, run.seed, run.finished, *run.matrix[-1], *[None] * (n - run.done)] for run in runs]
    return Sheet(name, ["method", "order", *tasks], rows, ["method", "order", "seed", "finished", *tasks], raw)


def with_deviation(value: Spread) -> str:
    """Format a mean in percent with its standard deviation in parentheses."""
    return f"{100 * value.mean:.1f}" + ("" if value.std is None else f" ({100 * value.std:.1f})")


def _zero_shot(name: str, cells: Mapping[str, Mapping[str, Spread]]) -> Sheet:
    """U, S and H of each dataset after the last task: mean over runs (standard deviation)."""
    raw = [
        [method, *which.rsplit(" ", 1), value.n, value.mean, value.std, value.half_width]
        for method, row in cells.items()
        for which, value in row.items()
    ]
    rows = [[method, *map(with_deviation, row.values())] for method, row in cells.items()]
    header = ["method", *next(iter(cells.values()))]
    return Sheet(name, header, rows, ["method", "task", "measure", "runs", "mean", "std", "half_width"], raw)


def _matrix(name: str, run: Result) -> Sheet:
    n = len(run.tasks)
    rows, raw = [], []
    for task, row in zip(run.tasks, run.matrix, strict=False):
        rows.append([task, *(f"{100 * a:.1f}" for a in row), *[""] * (n - len(row)), f"{100 * fmean(row):.1f}"])
        raw.append([task, *row, *[None] * (n - len(row)), fmean(row)])
    return Sheet(name, ["after", *run.tasks, "mean"], rows, ["after", *run.tasks, "mean"], raw)


# ---------------------------------------------------------------------------------------------------------
# Formats


def markdown(sheet: Sheet) -> str:
    """The table in GitHub-flavoured Markdown."""

    def line(cells: Sequence[str]) -> str:
        escaped = (re.sub(r"([\\|<`])", r"\\\1", " ".join(cell.split())) for cell in cells)
        return f"| {' | '.join(escaped)} |"

    rule = "|---|" + "--:|" * (len(sheet.header) - 1)
    return "\n".join([line(sheet.header), rule, *map(line, sheet.rows)]) + "\n"


def comma_separated(sheet: Sheet) -> str:
    """The raw values as CSV, in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(sheet.raw_header)
    writer.writerows(sheet.raw_rows)
    return text.getvalue()


def latex(sheet: Sheet) -> str:
    """The table as a booktabs tabular."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_tex, cells)) + r" \\"

    columns = "l" + "r" * (len(sheet.header) - 1)
    lines = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(sheet.header)]
    return "\n".join([*lines, r"\midrule", *map(line, sheet.rows), r"\bottomrule", r"\end{tabular}"]) + "\n"


_TEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
        **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
        **{"[": "{[}", "*": "{*}"},  # at the start of a row, they would be read as an argument of \\
        **{"±": r"$\pm$", "·": r"\textperiodcentered{}", "–": "--"},
    }
)


def _tex(cell: str) -> str:
    text = " ".join(cell.split()).translate(_TEX)
    return re.sub(r"^-(?=\d)", "$-$", text)

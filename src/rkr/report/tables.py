"""Tables for people, and the same numbers for machines. Accuracies are in percent, their differences in points.

`paper` is what the paper reports for a method: the value and its 95 % half-width if there is one, both in percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rkr.report import metrics
from rkr.report.metrics import OrderRobustness, Spread, spread
from rkr.report.results import Result, Top, by_method

Paper = Mapping[str, tuple[float, float | None]]

ALONE = ("separate", "original")  # methods that train a network for each task alone: forward transfer is from them
NOTHING = "–"
LOOK: dict[str, Any] = {"header_style": "bold", "box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}


@dataclass(frozen=True)
class Summary:
    """The finished runs of one method, in fractions; None is what they cannot tell."""

    method: str
    measure: str  # "accuracy", or "H" of zero-shot tasks
    runs: tuple[str, ...]  # their orders and seeds
    by_run: tuple[float, ...]  # average accuracy of each run
    accuracy: Spread
    paper: tuple[float, float | None] | None  # in percent
    forgetting: Spread | None
    backward_transfer: Spread | None
    forward_transfer: Spread | None
    agnostic: Spread | None
    robustness: OrderRobustness | None
    capacity: float  # percent
    bytes: int
    epoch_seconds: float | None
    unchanged: tuple[int, int]


def summarise(results: Sequence[Result], paper: Paper | None = None, top: Top = 1) -> list[Summary]:
    """A summary of each method that has finished runs, in the order of the results; unfinished runs are left out."""
    methods = by_method(results)
    alone = {run.label: run for method in ALONE for run in methods.get(method, ()) if run.finished}
    summaries = []
    for method, runs in methods.items():
        finished = [run for run in runs if run.finished]
        if finished:
            summaries.append(_summary(method, finished, {} if method in ALONE else alone, paper or {}, top))
    return summaries


def _summary(method: str, runs: Sequence[Result], alone: Mapping[str, Result], paper: Paper, top: Top) -> Summary:
    def forward(run: Result) -> float | None:
        reference = alone.get(run.label)
        if reference is None or reference.groups != run.groups:
            return None
        return metrics.forward_transfer(run.rows(top), metrics.during(reference.rows(top)))

    averages = [metrics.average(run.rows(top)) for run in runs]
    inferred = [row for run in runs if (row := run.agnostic[-1]) is not None]
    seconds = [[t.epoch_seconds for t in run.times if t.epoch_seconds is not None] for run in runs]
    medians = [median(values) for values in seconds if values]
    pairs = [metrics.unchanged_pairs(run) for run in runs]
    return Summary(
        method=method,
        measure=runs[0].measure,
        runs=tuple(run.label for run in runs),
        by_run=tuple(averages),
        accuracy=spread(averages),
        paper=paper.get(method),
        forgetting=_spread(metrics.forgetting(run.rows(top)) for run in runs),
        backward_transfer=_spread(metrics.backward_transfer(run.rows(top)) for run in runs),
        forward_transfer=_spread(map(forward, runs)),
        agnostic=_spread(fmean(row) for row in inferred),
        robustness=metrics.order_robustness(runs, top),
        capacity=fmean(run.costs[-1].percent for run in runs),
        bytes=round(fmean(run.costs[-1].bytes for run in runs)),
        epoch_seconds=fmean(medians) if medians else None,
        unchanged=(sum(same for same, _ in pairs), sum(of for _, of in pairs)),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


# ---------------------------------------------------------------------------------------------------------
# Tables


def accuracy_table(result: Result, top: Top = 1) -> Table:
    """The accuracy matrix of a run: a row after each task, a column for each task."""
    table = Table(
        title=Text(f"{result.recipe} · {result.method} · order {result.label}"),
        caption=_caption(
            f"{_named(result.measure, top)} in %", "" if result.finished else f"not finished: {_progress(result)}"
        ),
        **LOOK,
    )
    table.add_column("after learning", overflow="fold")
    for number in range(1, len(result.tasks) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)

    def add(label: str, row: Sequence[float], newest: str) -> None:
        cells = [Text(f"{100 * value:.1f}") for value in row]
        cells[-1].stylize(newest)
        missing = [Text("")] * (len(result.tasks) - len(row))
        table.add_row(Text(label), *cells, *missing, Text(f"{100 * fmean(row):.1f}"))

    for number, (task, row) in enumerate(zip(result.tasks, result.rows(top), strict=False), 1):
        add(f"{number} {task}", row, "bold")
    if result.agnostic and (inferred := result.agnostic[-1]) is not None:
        table.add_section()
        add("task inferred", inferred, "")
    return table


def added_by_a_task(result: Result) -> str:
    """What a further task cost, in words: by the paper's count, and all that is stored, its head included."""
    first, last, more = result.costs[0], result.costs[-1], result.done - 1
    if not more:
        return f"the network with its first task takes {_size(first.bytes)}"
    steps = {(b.parameters - a.parameters, b.bytes - a.bytes) for a, b in pairwise(result.costs)}
    percent, parameters = (last.percent - first.percent) / more, round((last.parameters - first.parameters) / more)
    stored = _size(round((last.bytes - first.bytes) / more))
    return f"a task adds {percent:.2f} % ({parameters:,} parameters), {stored} with its head" + (
        "" if len(steps) == 1 else ", in the mean over tasks"
    )


WIDE = 135  # columns that all of a summary takes
COST = ("capacity", "bytes", "s/epoch", "identical", "AOPD", "MOPD")


def summary_tables(results: Sequence[Result], paper: Paper | None = None, top: Top = 1, width: int = 80) -> list[Table]:
    """The summary as one table, or where that is too wide as two: accuracies, then costs and proofs."""
    if width >= WIDE:
        return [summary_table(results, paper, top)]
    return [summary_table(results, paper, top, without=COST), summary_table(results, paper, top, only=COST)]


def summary_cells(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """The columns of a summary by name, a cell for each method; empty columns are left out."""
    columns: dict[str, Callable[[Summary], str]] = {
        "runs": lambda s: str(len(s.runs)),
        _column(summaries): lambda s: _plus_minus(100 * s.accuracy.mean, s.accuracy.half_width, 100),
        "paper": lambda s: NOTHING if s.paper is None else _plus_minus(*s.paper),
        "forgets": lambda s: _points(s.forgetting),
        "BWT": lambda s: _points(s.backward_transfer),
        "FWT": lambda s: _points(s.forward_transfer),
        "inferred": lambda s: NOTHING if s.agnostic is None else f"{100 * s.agnostic.mean:.2f}",
        "AOPD": lambda s: NOTHING if s.robustness is None else f"{100 * s.robustness.mean:.2f}",
        "MOPD": lambda s: NOTHING if s.robustness is None else f"{100 * s.robustness.worst:.2f}",
        "capacity": lambda s: f"{s.capacity:.1f} %",
        "bytes": lambda s: _size(s.bytes),
        "s/epoch": lambda s: NOTHING if s.epoch_seconds is None else f"{s.epoch_seconds:.3g}",
        "identical": lambda s: f"{s.unchanged[0]}/{s.unchanged[1]}" if s.unchanged[1] else NOTHING,
    }
    cells = {name: [cell(summary) for summary in summaries] for name, cell in columns.items()}
    return {name: column for name, column in cells.items() if any(cell != NOTHING for cell in column)}


def summary_table(
    results: Sequence[Result],
    paper: Paper | None = None,
    top: Top = 1,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> Table:
    """One row for each method over its finished runs, then the unfinished runs; empty columns are left out."""
    summaries = summarise(results, paper, top)
    cells = summary_cells(summaries)
    cells = {name: column for name, column in cells.items() if name not in without and (only is None or name in only)}
    unfinished = [result for result in results if not result.finished]
    if not summaries:
        cells = {"runs": [], results[0].measure: []}

    several = any(len(summary.runs) > 1 for summary in summaries)
    shown = results[0].measure
    table = Table(
        title=Text(f"{results[0].recipe} · {len(results[0].tasks)} tasks"),
        caption=_caption(
            f"mean {_named(results[0].measure, top)} over all tasks at the end, in %" if shown in cells else "",
            "± 95 % confidence over runs" if several and shown in cells else "",
            "BWT: backward transfer" if "BWT" in cells else "",
            "FWT: forward transfer" if "FWT" in cells else "",
            "AOPD, MOPD: average and maximum disparity between orders" if "AOPD" in cells else "",
            "inferred: without being told the task" if "inferred" in cells else "",
            "identical: answers of old tasks, bit for bit, after each later one" if "identical" in cells else "",
        ),
        **LOOK,
    )
    table.add_column("method", overflow="fold")
    for name in cells:
        table.add_column(name, justify="right", overflow="fold")
    for i, summary in enumerate(summaries):
        table.add_row(Text(summary.method), *(Text(column[i]) for column in cells.values()))
    if summaries and unfinished:
        table.add_section()
    for result in unfinished:
        known = {shown: _progress(result)}
        row = [Text(known.get(name, NOTHING)) for name in cells]
        table.add_row(Text(f"{result.method} {result.label}"), *row, style="dim")
    return table


def summary_json(results: Sequence[Result], paper: Paper | None = None, top: Top = 1) -> dict[str, Any]:
    """The numbers of `summary_table` as plain values: accuracies in percent, differences in points, None if unknown."""
    methods = []
    for s in summarise(results, paper, top):
        methods.append(
            {
                "method": s.method,
                "runs": list(s.runs),
                "measure": s.measure,
                "accuracy": _json(s.accuracy),
                "accuracy_by_run": {run: 100 * a for run, a in zip(s.runs, s.by_run, strict=True)},
                "paper": None if s.paper is None else {"value": s.paper[0], "half_width": s.paper[1]},
                "forgetting": _json(s.forgetting),
                "backward_transfer": _json(s.backward_transfer),
                "forward_transfer": _json(s.forward_transfer),
                "task_inferred": _json(s.agnostic),
                "aopd": None if s.robustness is None else 100 * s.robustness.mean,
                "mopd": None if s.robustness is None else 100 * s.robustness.worst,
                "capacity": s.capacity,
                "bytes": s.bytes,
                "epoch_seconds": s.epoch_seconds,
                "bit_identical": {"same": s.unchanged[0], "pairs": s.unchanged[1]},
            }
        )
    return {
        "recipe": results[0].recipe,
        "tasks": len(results[0].tasks),
        "top": top,
        "methods": methods,
        "unfinished": [{"method": r.method, "run": r.label, "done": r.done} for r in results if not r.finished],
    }


# ---------------------------------------------------------------------------------------------------------
# Zero-shot tasks: three figures each, as the paper prints them


def zero_shot_cells(results: Sequence[Result]) -> dict[str, dict[str, Spread]]:
    """For each method that has finished runs, "CUB U", "CUB S", "CUB H", ... at the end, over its runs."""
    cells: dict[str, dict[str, Spread]] = {}
    for method, runs in by_method(results).items():
        finished = [run for run in runs if run.finished]
        for task in sorted(finished[0].tasks) if finished else ():
            for name in ("U", "S", "H"):
                values = [run.measures[name][-1][run.tasks.index(task)] for run in finished]
                cells.setdefault(method, {})[f"{task} {name}"] = spread(values)
    return cells


def zero_shot_table(results: Sequence[Result]) -> Table:
    """U, S and H of every data set after the last one, a row for each method."""
    cells = zero_shot_cells(results)
    table = Table(
        title=Text(f"{results[0].recipe} · after the last task"),
        caption=_caption("U, S: mean accuracy of unseen and seen classes in %; H: their harmonic mean"),
        **LOOK,
    )
    table.add_column("method", overflow="fold")
    for name in next(iter(cells.values()), {}):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for method, row in cells.items():
        table.add_row(Text(method), *(Text(f"{100 * value.mean:.1f}") for value in row.values()))
    return table


# ---------------------------------------------------------------------------------------------------------
# Cells


def _column(summaries: Sequence[Summary]) -> str:
    """What the column of the measure that counts is called."""
    return summaries[0].measure if summaries else "accuracy"


def _named(measure: str, top: Top) -> str:
    return f"top-{top} accuracy" if measure == "accuracy" else measure


def _json(value: Spread | None) -> dict[str, Any] | None:
    if value is None:
        return None
    percent = {"mean": value.mean, "std": value.std, "half_width": value.half_width}
    return {key: None if v is None else 100 * v for key, v in percent.items()} | {"n": value.n}


def _plus_minus(value: float, half_width: float | None, unit: float = 1) -> str:
    return f"{value:.2f}" if half_width is None else f"{value:.2f} ± {unit * half_width:.2f}"


def _points(value: Spread | None) -> str:
    """A difference with its sign; what rounds to nothing has none."""
    if value is None:
        return NOTHING
    rounded = round(100 * value.mean, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def _size(n: int) -> str:
    size, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _progress(result: Result) -> str:
    return f"{result.done} of {len(result.tasks)} tasks"


def _caption(*parts: str) -> Text:
    return Text("; ".join(part for part in parts if part), style="dim")

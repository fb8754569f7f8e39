"""Terminal tables, and the same numbers as JSON. Accuracies are in percent, differences in percentage points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rkr.experiment.metrics import Spread
from rkr.experiment.results import Result
from rkr.report.protocol import ANOTHER_FIRST
from rkr.report.search import search_note
from rkr.report.summary import (
    COLUMNS,
    NOTHING,
    PRINTED,
    Paper,
    in_percent,
    own_optimizers,
    progress,
    size,
    summarise,
    summary_cells,
    zero_shot_cells,
)

LOOK: dict[str, Any] = {"header_style": "bold", "box": box.SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}


def caption(*parts: str) -> Text:
    """The caption of a table: the non-empty parts."""
    return Text("; ".join(part for part in parts if part), style="dim")


def spread_json(value: Spread | None) -> dict[str, Any] | None:
    """A spread in percent, as JSON."""
    if value is None:
        return None
    percent = in_percent(value)
    return {"mean": percent.mean, "std": percent.std, "half_width": percent.half_width, "n": percent.n}


def _named(measure: str) -> str:
    return "top-1 accuracy" if measure == "accuracy" else measure


def accuracy_table(result: Result) -> Table:
    """The accuracy matrix of a run: one row per task learned, one column per task tested."""
    table = Table(
        title=Text(f"{result.recipe} · {result.method} · order {result.label}"),
        caption=caption(f"{_named(result.measure)} in %", "" if result.finished else f"unfinished: {progress(result)}"),
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

    for number, (task, row) in enumerate(zip(result.tasks, result.matrix, strict=False), 1):
        add(f"{number} {task}", row, "bold")
    if result.agnostic and (agnostic := result.agnostic[-1]) is not None:
        table.add_section()
        add("task-agnostic", agnostic, "")
    return table


def added_by_a_task(result: Result) -> str:
    """The cost of one more task as text: parameters counted as in the paper, and bytes including its head."""
    first, last, more = result.costs[0], result.costs[-1], result.done - 1
    if not more:
        return f"the network and its first task take {size(first.bytes)}"
    steps = {(b.parameters - a.parameters, b.bytes - a.bytes) for a, b in pairwise(result.costs)}
    if len(steps) > 1:  # growing networks, copies from the second task on, replay memories
        start, end = (f"{cost.percent:.2f} % ({size(cost.bytes)})" for cost in (first, last))
        return f"stored after the first task: {start}; after {result.done} tasks: {end}"
    percent, parameters = (last.percent - first.percent) / more, (last.parameters - first.parameters) // more
    stored = size((last.bytes - first.bytes) // more)
    return f"each task adds {percent:.2f} % ({parameters:,} parameters), {stored} including its head"


WIDE = 154  # characters that the complete summary needs
COST = ("capacity", "capacity to learn", "bytes", "s/epoch", "identical", "AOPD", "MOPD")


def summary_tables(results: Sequence[Result], paper: Paper | None = None, width: int = 80) -> list[Table]:
    """The summary as one table, or as two if the terminal is too narrow: accuracies, then costs and proofs."""
    if width >= WIDE:
        return [summary_table(results, paper)]
    return [summary_table(results, paper, without=COST), summary_table(results, paper, only=COST)]


def summary_table(
    results: Sequence[Result],
    paper: Paper | None = None,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> Table:
    """One row per method over its finished runs, then the unfinished runs. Empty columns are left out."""
    summaries = summarise(results, paper)
    wanted = [name for name in PRINTED if name not in without and (only is None or name in only)]
    cells = summary_cells(summaries, wanted)
    unfinished = [result for result in results if not result.finished]
    if not summaries:
        cells = {"runs": [], results[0].measure: []}

    several = any(len(summary.runs) > 1 for summary in summaries)
    shown, tasks = results[0].measure, len(results[0].tasks)
    table = Table(
        title=Text(f"{_heading(results)} · {tasks} {'task' if tasks == 1 else 'tasks'}"),
        caption=caption(
            f"mean {_named(results[0].measure)} over all tasks after the last one, in %" if shown in cells else "",
            "± 95 % confidence interval over runs" if several and shown in cells else "",
            *(COLUMNS[name].short for name in cells),
            search_note(run for summary in summaries for run in results if run.method == summary.method),
            f"own optimiser: {own}" if shown in cells and (own := own_optimizers(results)) else "",
        ),
        **LOOK,
    )
    table.add_column("method", overflow="fold")
    for name in cells:
        table.add_column(name, justify="right", overflow="fold")
    for i, summary in enumerate(summaries):
        table.add_row(Text(summary.name), *(Text(column[i].text) for column in cells.values()))
    if summaries and unfinished:
        table.add_section()
    for result in unfinished:
        known = {shown: progress(result)}
        row = [Text(known.get(name, NOTHING)) for name in cells]
        table.add_row(Text(f"{result.method} {result.label}"), *row, style="dim")
    return table


def _heading(results: Sequence[Result]) -> str:
    """The recipe, and the order if the experiment compares orders."""
    recipe, order = results[0].recipe, results[0].order
    return f"{recipe} · {order}" if order.startswith(ANOTHER_FIRST) else recipe


def summary_json(results: Sequence[Result], paper: Paper | None = None) -> dict[str, Any]:
    """The numbers of `summary_table` as JSON: accuracies in percent, differences in points, None if not available."""
    methods = []
    for s in summarise(results, paper):
        methods.append(
            {
                "method": s.method,
                "runs": list(s.runs),
                "measure": s.measure,
                "accuracy": spread_json(s.accuracy),
                "accuracy_by_run": {run: 100 * a for run, a in zip(s.runs, s.by_run, strict=True)},
                "paper": None if s.paper is None else {"value": s.paper[0], "half_width": s.paper[1]},
                **{key: spread_json(value) for key, value in s.metrics.items()},
                "aopd": None if s.robustness is None else 100 * s.robustness.mean,
                "mopd": None if s.robustness is None else 100 * s.robustness.worst,
                "capacity": s.capacity,
                "capacity_to_learn": s.capacity_to_learn,
                "bytes": s.bytes,
                "epoch_seconds": s.epoch_seconds,
                "bit_identical": {"same": s.unchanged[0], "pairs": s.unchanged[1]},
            }
        )
    return {
        "recipe": results[0].recipe,
        "tasks": len(results[0].tasks),
        "methods": methods,
        "unfinished": [{"method": r.method, "run": r.label, "done": r.done} for r in results if not r.finished],
    }


# ---------------------------------------------------------------------------------------------------------
# Zero-shot tasks: three numbers each, as in the paper


def zero_shot_table(results: Sequence[Result]) -> Table:
    """U, S and H of every dataset after the last task, one row per method."""
    cells = zero_shot_cells(results)
    table = Table(
        title=Text(f"{_heading(results)} · after the last task"),
        caption=caption("U, S: mean per-class accuracy on unseen and seen classes in %; H: their harmonic mean"),
        **LOOK,
    )
    table.add_column("method", overflow="fold")
    for name in next(iter(cells.values()), {}):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for method, row in cells.items():
        table.add_row(Text(method), *(Text(f"{100 * value.mean:.1f}") for value in row.values()))
    return table

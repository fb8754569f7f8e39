"""The finished runs of a method in a few numbers, and how each of them is printed: once, for all tables.

Numbers are fractions here, and in percent (their differences in points) where they are printed. `paper` is what the
paper reports for a method: the value and its 95 % half-width if there is one, both in percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rkr.experiment import metrics
from rkr.experiment.metrics import OrderRobustness, Spread, spread
from rkr.experiment.results import Result
from rkr.report.groups import by_method
from rkr.report.statistics import verdict

Paper = Mapping[str, tuple[float, float | None]]

ALONE = ("separate", "original")  # methods that train a network for each task alone: forward transfer is from them
NOTHING = "–"


@dataclass(frozen=True)
class Summary:
    """The finished runs of one method, in fractions; None is what they cannot tell."""

    method: str
    measure: str  # "accuracy", or "H" of zero-shot tasks
    runs: tuple[str, ...]  # their orders and seeds
    by_run: tuple[float, ...]  # average accuracy of each run
    accuracy: Spread
    paper: tuple[float, float | None] | None  # in percent
    top5: Spread | None
    forgetting: Spread | None
    backward_transfer: Spread | None
    forward_transfer: Spread | None
    agnostic: Spread | None
    incremental: Spread | None
    robustness: OrderRobustness | None
    capacity: float  # percent
    bytes: int
    epoch_seconds: float | None
    unchanged: tuple[int, int]


def summarise(results: Sequence[Result], paper: Paper | None = None) -> list[Summary]:
    """A summary of each method that has finished runs, in the order of the results; unfinished runs are left out."""
    methods = by_method(results)
    alone = {run.label: run for method in ALONE for run in methods.get(method, ()) if run.finished}
    summaries = []
    for method, runs in methods.items():
        finished = [run for run in runs if run.finished]
        if finished:
            summaries.append(_summary(method, finished, {} if method in ALONE else alone, paper or {}))
    return summaries


def _summary(method: str, runs: Sequence[Result], alone: Mapping[str, Result], paper: Paper) -> Summary:
    def forward(run: Result) -> float | None:
        reference = alone.get(run.label)
        if reference is None or reference.groups != run.groups:
            return None
        return metrics.forward_transfer(run.matrix, metrics.during(reference.matrix))

    averages = [metrics.average(run.matrix) for run in runs]
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
        top5=_spread(metrics.average(run.measures["top5"]) for run in runs if "top5" in run.measures),
        forgetting=_spread(metrics.forgetting(run.matrix) for run in runs),
        backward_transfer=_spread(metrics.backward_transfer(run.matrix) for run in runs),
        forward_transfer=_spread(map(forward, runs)),
        agnostic=_spread(fmean(row) for row in inferred),
        incremental=_spread(map(metrics.incremental, runs)),
        robustness=metrics.order_robustness(runs),
        capacity=fmean(run.costs[-1].percent for run in runs),
        bytes=round(fmean(run.costs[-1].bytes for run in runs)),
        epoch_seconds=fmean(medians) if medians else None,
        unchanged=(sum(same for same, _ in pairs), sum(of for _, of in pairs)),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def zero_shot_cells(results: Sequence[Result]) -> dict[str, dict[str, Spread]]:
    """For each method that has finished runs, "CUB U", "CUB S", "CUB H", ... at the end, over its runs."""
    cells: dict[str, dict[str, Spread]] = {}
    for method, runs in by_method(results).items():
        finished = [run for run in runs if run.finished]
        own = finished[0].tasks if finished else ()
        for task in sorted(own, key=results[0].tasks.index):
            for name in ("U", "S", "H"):
                values = [run.measures[name][-1][run.tasks.index(task)] for run in finished]
                cells.setdefault(method, {})[f"{task} {name}"] = spread(values)
    return cells


# ---------------------------------------------------------------------------------------------------------
# How they are printed


@dataclass(frozen=True)
class Cell:
    """A text, and the value by which its column is sorted."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Column:
    """What a column of a summary says, and its cell of a method."""

    explanation: str
    cell: Callable[[Summary], Cell]


def plus_minus(value: float, half_width: float | None) -> str:
    return f"{value:.2f}" if half_width is None else f"{value:.2f} ± {half_width:.2f}"


def in_percent(value: Spread) -> Spread:
    std, half = (None if of is None else 100 * of for of in (value.std, value.half_width))
    return Spread(100 * value.mean, std, half, value.n)


def points(value: Spread | None) -> str:
    """A difference with its sign; what rounds to nothing has none."""
    if value is None:
        return NOTHING
    rounded = round(100 * value.mean, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def size(n: int) -> str:
    """Of so many bytes."""
    value, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def progress(result: Result) -> str:
    """How far a run is."""
    return f"{result.done} of {len(result.tasks)} tasks"


def _measure(s: Summary) -> Cell:
    percent = in_percent(s.accuracy)
    return Cell(plus_minus(percent.mean, percent.half_width), s.accuracy.mean)


def _percent(value: float | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(f"{100 * value:.2f}", value)


def _mean(value: Spread | None) -> Cell:
    return _percent(None if value is None else value.mean)


def _points(value: Spread | None) -> Cell:
    return Cell(points(value), None if value is None else value.mean)


def _identical(s: Summary) -> Cell:
    same, of = s.unchanged
    return Cell(f"{same}/{of}", same / of) if of else Cell(NOTHING)


COLUMNS = {
    "runs": Column("finished runs: orders and seeds", lambda s: Cell(str(len(s.runs)), len(s.runs))),
    "accuracy": Column(
        "mean accuracy over all tasks after the last one, the task given, in %; ± 95 % interval over runs",
        lambda s: _measure(s) if s.measure == "accuracy" else Cell(NOTHING),
    ),
    "H": Column(
        "mean over all tasks, after the last one, of the harmonic mean of unseen and seen classes, in %; "
        "± 95 % interval over runs",
        lambda s: _measure(s) if s.measure == "H" else Cell(NOTHING),
    ),
    "sd": Column("sample standard deviation over runs, in points", lambda s: _percent(s.accuracy.std)),
    "paper": Column(
        "what the paper prints, in %",
        lambda s: Cell(NOTHING) if s.paper is None else Cell(plus_minus(*s.paper), s.paper[0]),
    ),
    "verdict": Column(
        "our mean and interval beside the paper's, the difference in points",
        lambda s: Cell(NOTHING) if s.paper is None else Cell(verdict(in_percent(s.accuracy), *s.paper)),
    ),
    "top-5": Column("as accuracy, the right class among the five most likely, in %", lambda s: _mean(s.top5)),
    "forgets": Column(
        "what was lost of the best accuracy on each earlier task, in points", lambda s: _points(s.forgetting)
    ),
    "BWT": Column(
        "backward transfer: what later tasks did to earlier ones, in points", lambda s: _points(s.backward_transfer)
    ),
    "FWT": Column(
        "forward transfer: what earlier tasks did for later ones, against a network for each task alone, in points",
        lambda s: _points(s.forward_transfer),
    ),
    "inferred": Column("accuracy without being told the task, in %", lambda s: _mean(s.agnostic)),
    "incremental": Column(
        "mean, over the tasks so far after each task, of the accuracy without being told the task, in %",
        lambda s: _mean(s.incremental),
    ),
    "AOPD": Column(
        "mean over groups of classes of the disparity between orders, in points",
        lambda s: _percent(None if s.robustness is None else s.robustness.mean),
    ),
    "MOPD": Column(
        "maximum over groups of classes of the disparity between orders, in points",
        lambda s: _percent(None if s.robustness is None else s.robustness.worst),
    ),
    "capacity": Column(
        "parameters after the last task by the paper's count; the plain network is 100 %",
        lambda s: Cell(f"{s.capacity:.1f} %", s.capacity),
    ),
    "bytes": Column("all that must be kept to use every task", lambda s: Cell(size(s.bytes), s.bytes)),
    "s/epoch": Column(
        "median seconds of an epoch",
        lambda s: Cell(NOTHING) if s.epoch_seconds is None else Cell(f"{s.epoch_seconds:.3g}", s.epoch_seconds),
    ),
    "identical": Column(
        "(task, later task) pairs for which the task's test logits are the same to the last bit", _identical
    ),
}

PRINTED = tuple(name for name in COLUMNS if name not in ("sd", "verdict", "top-5"))  # in the terminal and in files


def summary_cells(summaries: Sequence[Summary], names: Iterable[str] = PRINTED) -> dict[str, list[Cell]]:
    """The named columns of a summary, a cell for each method; those that say nothing are left out.

    Top-5 accuracy says nothing where it is 100 % throughout, as with five classes or fewer.
    """
    cells = {name: [COLUMNS[name].cell(summary) for summary in summaries] for name in names}
    if all(s.top5 is None or s.top5.mean == 1 for s in summaries):
        cells.pop("top-5", None)
    return {name: column for name, column in cells.items() if any(cell.text != NOTHING for cell in column)}

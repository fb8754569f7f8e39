"""The summary of each method over its finished runs, and the columns that every table prints it in.

Values are fractions here. Tables show accuracies in percent and differences in percentage points. `paper` maps a method
to the value that the paper reports and its 95 % half-width (or None), both in percent.

To add a metric, add it to `METRICS`: all tables, JSON and CSV files and the report page pick it up from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from rkr.capacity import RULE
from rkr.experiment import metrics
from rkr.experiment.metrics import OrderRobustness, Spread, spread
from rkr.experiment.results import Result
from rkr.report.groups import by_method
from rkr.report.search import marked
from rkr.report.statistics import verdict

Paper = Mapping[str, tuple[float, float | None]]

SEPARATE = ("separate", "original")  # methods that train one network per task: the reference for forward transfer
NOTHING = "–"


@dataclass(frozen=True)
class Metric:
    """A value of each finished run. Tables show its mean over the runs of a method."""

    column: str  # the table header
    explanation: str
    formula: str  # in terms of A[i, j], the accuracy on task j after learning task i of T
    value: Callable[[Result, Result | None], float | None]  # of a run, given the run of SEPARATE in the same order
    signed: bool = False  # a difference, printed in points with its sign
    short: str = ""  # the explanation below terminal tables


def _top5(run: Result, separate: Result | None) -> float | None:
    return metrics.average(run.measures["top5"]) if "top5" in run.measures else None


def _forward_transfer(run: Result, separate: Result | None) -> float | None:
    if separate is None or separate.groups != run.groups:
        return None
    return metrics.forward_transfer(run.matrix, metrics.during(separate.matrix))


def _agnostic(run: Result, separate: Result | None) -> float | None:
    row = run.agnostic[-1]
    return None if row is None else fmean(row)


METRICS = {  # by their key in JSON and CSV files
    "top5": Metric(
        "top-5",
        "top-5 accuracy, in %",
        "The mean over j of the top-5 accuracy on task j after the last task.",
        _top5,
    ),
    "forgetting": Metric(
        "forgetting",
        "mean drop from the best accuracy on each earlier task, in points",
        "The mean over j < T of max A[i, j] over i < T, minus A[T, j].",
        lambda run, _: metrics.forgetting(run.matrix),
        signed=True,
    ),
    "backward_transfer": Metric(
        "BWT",
        "backward transfer: mean effect of later tasks on earlier ones, in points",
        "Backward transfer: the mean over j < T of A[T, j] − A[j, j].",
        lambda run, _: metrics.backward_transfer(run.matrix),
        signed=True,
        short="BWT: backward transfer",
    ),
    "forward_transfer": Metric(
        "FWT",
        "forward transfer: mean effect of earlier tasks on later ones, relative to one network per task, in points",
        "Forward transfer: the mean over j > 1 of A[j, j] minus the accuracy of a network trained on task j only "
        "(separate or original, same order).",
        _forward_transfer,
        signed=True,
        short="FWT: forward transfer",
    ),
    "agnostic": Metric(
        "agnostic",
        "task-agnostic accuracy: the method also infers the task, in %",
        "Task-agnostic accuracy: as accuracy, but the method also infers the task.",
        _agnostic,
        short="agnostic: the method infers the task",
    ),
    "incremental": Metric(
        "incremental",
        "average incremental accuracy: mean of the task-agnostic accuracy after each task, in %",
        "Average incremental accuracy: the mean over i of the task-agnostic accuracy on tasks 1 to i.",
        lambda run, _: metrics.incremental(run),
        short="incremental: mean of agnostic after each task",
    ),
}


@dataclass(frozen=True)
class Summary:
    """The finished runs of one method, in fractions. None means not available."""

    method: str
    name: str  # as tables show it: marked if less was searched than published
    measure: str  # "accuracy", or "H" for zero-shot tasks
    runs: tuple[str, ...]  # orders and seeds
    by_run: tuple[float, ...]  # average accuracy of each run
    accuracy: Spread
    paper: tuple[float, float | None] | None  # in percent
    metrics: Mapping[str, Spread | None]  # by their key in METRICS
    robustness: OrderRobustness | None
    capacity: float  # percent, to use all tasks
    capacity_to_learn: float | None  # percent, to use them and to go on learning
    bytes: int  # to use all tasks
    epoch_seconds: float | None
    unchanged: tuple[int, int]


def summarise(results: Sequence[Result], paper: Paper | None = None) -> list[Summary]:
    """One summary per method that has finished runs, in the order of the results."""
    methods = by_method(results)
    separate = {run.label: run for method in SEPARATE for run in methods.get(method, ()) if run.finished}
    summaries = []
    for method, runs in methods.items():
        finished = [run for run in runs if run.finished]
        if finished:
            summaries.append(_summary(method, finished, {} if method in SEPARATE else separate, paper or {}))
    return summaries


def _summary(method: str, runs: Sequence[Result], separate: Mapping[str, Result], paper: Paper) -> Summary:
    averages = [metrics.average(run.matrix) for run in runs]
    values = {
        key: [value for run in runs if (value := metric.value(run, separate.get(run.label))) is not None]
        for key, metric in METRICS.items()
    }
    seconds = [[t.epoch_seconds for t in run.times if t.epoch_seconds is not None] for run in runs]
    medians = [median(of_run) for of_run in seconds if of_run]
    pairs = [metrics.unchanged_pairs(run) for run in runs]
    to_learn = [percent for run in runs if (percent := run.costs[-1].percent_to_learn) is not None]
    return Summary(
        method=method,
        name=marked(method, runs),
        measure=runs[0].measure,
        runs=tuple(run.label for run in runs),
        by_run=tuple(averages),
        accuracy=spread(averages),
        paper=paper.get(method),
        metrics={key: spread(found) if found else None for key, found in values.items()},
        robustness=metrics.order_robustness(runs),
        capacity=fmean(run.costs[-1].percent for run in runs),
        capacity_to_learn=fmean(to_learn) if len(to_learn) == len(runs) else None,
        bytes=round(fmean(run.costs[-1].bytes for run in runs)),
        epoch_seconds=fmean(medians) if medians else None,
        unchanged=(sum(same for same, _ in pairs), sum(of for _, of in pairs)),
    )


def spreads(rows: Iterable[Sequence[float]]) -> list[Spread]:
    """The spread over runs at each position, given one row per run."""
    return [spread(column) for column in zip(*rows, strict=True)]


def zero_shot_cells(results: Sequence[Result]) -> dict[str, dict[str, Spread]]:
    """U, S and H of each dataset after the last task, for each method with finished runs: {method: {"CUB U": ...}}."""
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
# Columns


@dataclass(frozen=True)
class Cell:
    """The printed text, and the value that the column is sorted by."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Column:
    """A column of the summary."""

    explanation: str
    cell: Callable[[Summary], Cell]
    short: str = ""  # the explanation below terminal tables
    formula: str = ""  # the definition on the report page; "" repeats the explanation


def plus_minus(value: float, half_width: float | None) -> str:
    return f"{value:.2f}" if half_width is None else f"{value:.2f} ± {half_width:.2f}"


def in_percent(value: Spread) -> Spread:
    std, half = (None if of is None else 100 * of for of in (value.std, value.half_width))
    return Spread(100 * value.mean, std, half, value.n)


def points(value: Spread | None) -> str:
    """Format a difference in points with its sign. Values that round to zero have no sign."""
    if value is None:
        return NOTHING
    rounded = round(100 * value.mean, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"


def size(n: int) -> str:
    """Format a number of bytes."""
    value, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def own_optimizers(results: Iterable[Result]) -> str:
    """The methods that were trained with an optimiser of their own, and its settings; "" if there are none."""
    said = {}
    for run in results:
        own = run.options.get("training")
        if isinstance(own, Mapping) and own:
            said[run.method] = ", ".join(f"{name} {_plain(value)}" for name, value in own.items())
    return "; ".join(f"{method}: {settings}" for method, settings in said.items())


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def progress(result: Result) -> str:
    """The progress of a run, such as "2 of 3 tasks"."""
    return f"{result.done} of {len(result.tasks)} tasks"


def _measure(s: Summary) -> Cell:
    percent = in_percent(s.accuracy)
    return Cell(plus_minus(percent.mean, percent.half_width), s.accuracy.mean)


def _percent(value: float | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(f"{100 * value:.2f}", value)


def _metric(key: str, metric: Metric) -> Column:
    def cell(s: Summary) -> Cell:
        value = s.metrics[key]
        if metric.signed:
            return Cell(points(value), None if value is None else value.mean)
        return _percent(None if value is None else value.mean)

    return Column(metric.explanation, cell, metric.short, metric.formula)


def _capacity(percent: float) -> Cell:
    return Cell(f"{percent:.1f} %", percent)


def _identical(s: Summary) -> Cell:
    same, of = s.unchanged
    return Cell(f"{same}/{of}", same / of) if of else Cell(NOTHING)


COLUMNS = {
    "runs": Column("number of finished runs (orders and seeds)", lambda s: Cell(str(len(s.runs)), len(s.runs))),
    "accuracy": Column(
        "mean accuracy over all tasks after the last one, with the task given, in %; ± is the 95 % confidence interval",
        lambda s: _measure(s) if s.measure == "accuracy" else Cell(NOTHING),
        formula="The mean over j of A[T, j], with the task given.",
    ),
    "H": Column(
        "mean over all tasks, after the last one, of the harmonic mean of unseen and seen accuracy, in %; ± is the "
        "95 % confidence interval",
        lambda s: _measure(s) if s.measure == "H" else Cell(NOTHING),
        formula="On zero-shot tasks, the harmonic mean of U and S: the mean per-class accuracy on unseen (U) and seen "
        "(S) classes.",
    ),
    "sd": Column("sample standard deviation over runs, in points", lambda s: _percent(s.accuracy.std)),
    "paper": Column(
        "the value reported in the paper, in %",
        lambda s: Cell(NOTHING) if s.paper is None else Cell(plus_minus(*s.paper), s.paper[0]),
    ),
    "verdict": Column(
        "our mean and interval compared with the paper's, difference in points",
        lambda s: Cell(NOTHING) if s.paper is None else Cell(verdict(in_percent(s.accuracy), *s.paper)),
    ),
    **{metric.column: _metric(key, metric) for key, metric in METRICS.items()},
    "AOPD": Column(
        "average order-normalized performance disparity: mean over class groups, in points; from five orders on",
        lambda s: _percent(None if s.robustness is None else s.robustness.mean),
        "AOPD, MOPD: average and maximum disparity between five orders or more",
        "The mean over class groups of the difference between the best and the worst order. From five orders on: the "
        "difference grows with their number.",
    ),
    "MOPD": Column(
        "maximum order-normalized performance disparity: maximum over class groups, in points; from five orders on",
        lambda s: _percent(None if s.robustness is None else s.robustness.worst),
        formula="The maximum over class groups of the difference between the best and the worst order.",
    ),
    "capacity": Column(
        "what must be kept to use all tasks; the original network is 100 %",
        lambda s: _capacity(s.capacity),
        formula=f"{RULE} Heads are within the network's 100 %, four bytes of stored samples count as one parameter.",
    ),
    "capacity to learn": Column(
        "what must be kept to use all tasks and to go on learning: importances, exemplars, ...; the original network "
        "is 100 %",
        lambda s: Cell(NOTHING) if s.capacity_to_learn is None else _capacity(s.capacity_to_learn),
        "capacity: kept to use all tasks; capacity to learn: and to go on learning",
    ),
    "bytes": Column("storage needed to use every task", lambda s: Cell(size(s.bytes), s.bytes)),
    "s/epoch": Column(
        "median seconds per epoch",
        lambda s: Cell(NOTHING) if s.epoch_seconds is None else Cell(f"{s.epoch_seconds:.3g}", s.epoch_seconds),
    ),
    "identical": Column(
        "(task, later task) pairs where the test logits of the task are bit-identical to those when it was learned",
        _identical,
        "identical: outputs of earlier tasks that stay bit-identical",
    ),
}

PRINTED = tuple(name for name in COLUMNS if name not in ("sd", "verdict", "top-5"))  # in the terminal and in files


def summary_cells(summaries: Sequence[Summary], names: Iterable[str] = PRINTED) -> dict[str, list[Cell]]:
    """The cells of each named column, one per method. Empty columns are left out.

    Top-5 accuracy is left out where it is always 100 %, as with five classes or fewer.
    """
    cells = {name: [COLUMNS[name].cell(summary) for summary in summaries] for name in names}
    if all((top5 := s.metrics["top5"]) is None or top5.mean == 1 for s in summaries):
        cells.pop("top-5", None)
    return {name: column for name, column in cells.items() if any(cell.text != NOTHING for cell in column)}

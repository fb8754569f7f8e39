"""Figures for print from results, each as PNG and as SVG; the same results give the same bytes of SVG.

They are as wide as a column of a paper or as both, so that they need not be scaled and their letters stay at 7 to 9
points. Letters of SVG files are outlines: they look the same wherever the file goes, with no font to be installed or
embedded, and the layout that was computed for them holds. Colours and markers are those of `rkr.report.looks`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from rkr.atomic import write_atomic
from rkr.errors import FileError, UsageError
from rkr.experiment import metrics
from rkr.experiment.results import Result
from rkr.report.groups import by_method
from rkr.report.looks import look_of
from rkr.report.names import file_stems, shortened
from rkr.report.summary import Paper, summarise

SINGLE, DOUBLE = 3.3, 6.9  # inches: one column of a paper, and both
PALE, GREY = 0.25, "#404040"  # how much of its colour a pale bar has; the colour of what is of no method
NAME, LABEL = 40, 26  # characters of a name in a title; of a line in a legend
DPI = 300
ANNOTATED = 20  # more tasks than this leave no room for numbers in the matrix
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 3,
    "text.parse_math": False,  # a name may have a $ in it
    "svg.fonttype": "path",
    "svg.hashsalt": "rkr",
}


def accuracy_over_tasks(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """Mean accuracy over the tasks so far, after each task: a line for each method, a 95 % band over its runs.

    Bands are drawn from three runs on: of two, Student's interval is as wide as the figure.
    A run that is not finished has a thin line of its own with hollow marks and is no part of its method's mean.
    """
    methods = by_method(results)
    tasks = len(results[0].tasks)
    with _figure((DOUBLE, 3.2)) as figure:
        axes = figure.add_subplot()
        lines: list[tuple[float, Any]] = []  # by where they end, so that the legend is in the order of the lines
        several = False
        for method, runs in methods.items():
            dashes = look_of(method).dashes
            look = {**_look(method), "linestyle": (0, dashes) if dashes else "-"}
            means = [[100 * value for value in metrics.running_mean(r.matrix)] for r in runs if r.finished]
            if means:
                spreads = [metrics.spread(column) for column in zip(*means, strict=True)]
                x, y = range(1, tasks + 1), np.array([s.mean for s in spreads])
                (line,) = axes.plot(x, y, label=method, **look)
                lines.append((y[-1], line))
                if len(means) >= metrics.FOR_A_BAND:
                    several = True
                    half = np.array([s.half_width for s in spreads], dtype=float)
                    low, high = np.clip(y - half, 0, 100), np.clip(y + half, 0, 100)
                    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            for run in runs:
                if not run.finished and run.done:
                    y = np.array(metrics.running_mean(run.matrix)) * 100
                    label = f"{method}, order {run.label}, not finished"
                    open_: dict[str, Any] = {"linewidth": 0.7, "markerfacecolor": "white"}
                    (line,) = axes.plot(range(1, run.done + 1), y, label=label, **look, **open_)
                    lines.append((y[-1], line))
        if not lines:
            raise UsageError("no run has learned a task yet")
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(f"mean {results[0].measure} on them (%)")
        bands = " (bands: 95 % confidence over runs)" if several else ""
        axes.set_title(shortened(results[0].recipe, NAME) + bands, loc="left")
        _percents(axes)
        axes.set_xlim(0.7, tasks + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        axes.grid(axis="y")
        ranked = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
        _legend(figure, ranked, [str(line.get_label()) for line in ranked])
        return _write(figure, path)


def during_after(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """Accuracy on each task right after learning it and at the end: a panel for each method, means over its runs."""
    methods = {m: [r for r in runs if r.finished] for m, runs in by_method(results).items()}
    methods = {method: runs for method, runs in methods.items() if runs}
    if not methods:
        raise UsageError("no run is finished")
    tasks = results[0].tasks
    columns = min(len(methods), 2 if len(methods) <= 6 else 3)
    rows = math.ceil(len(methods) / columns)
    width = (SINGLE if columns == 1 else DOUBLE) / columns
    with _figure((columns * width, 0.6 + (1.7 if columns < 3 else 1.35) * rows)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        x = np.arange(1, len(tasks) + 1)
        for axes, (method, runs) in zip(grid.flat, methods.items(), strict=False):
            colour = look_of(method).colour
            for shift, pale, measure in ((-0.2, True, metrics.during), (0.2, False, metrics.after)):
                of_runs = zip(*(measure(run.matrix) for run in runs), strict=True)
                heights = [100 * fmean(values) for values in of_runs]
                axes.bar(x + shift, heights, 0.36, color=(colour, PALE if pale else 1), edgecolor=colour, linewidth=0.6)
            said = f", mean of {len(runs)} runs" if len(runs) > 1 else ""
            axes.set_title(shortened(method, int(11 * width) - len(said)) + said, loc="left")
            axes.set_ylim(0, 100)
            axes.grid(axis="y")
            axes.tick_params(axis="x", length=0)
        _hide(grid, len(methods))
        names = all(run.tasks == tasks for runs in methods.values() for run in runs)
        if names and max(map(len, tasks)) * len(tasks) <= 12 * width:
            grid[0, 0].set_xticks(x, tasks)
            figure.supxlabel("task", fontsize=8)
        else:
            bins = 12 if columns < 3 else 6
            grid[0, 0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=bins, min_n_ticks=1))
            figure.supxlabel("task, in the order of learning", fontsize=8)
        if columns == 3:
            grid[0, 0].set_yticks([0, 50, 100])  # ticks of many panels take most of the time
        figure.supylabel(f"{results[0].measure} (%)", fontsize=8)
        handles = [Patch(facecolor=(GREY, alpha), edgecolor=GREY) for alpha in (PALE, 1)]
        figure.legend(handles, ["right after learning", "after all tasks"], loc="outside upper right", ncols=2)
        return _write(figure, path)


def accuracy_matrix(result: Result, path: str | os.PathLike[str]) -> list[Path]:
    """The accuracy matrix of a run as a heat map: a row after each task, a column for each task."""
    rows = result.matrix
    if not rows:
        raise UsageError(f"{result.folder}: no task has been learned yet")
    low, high = _range([value for row in rows for value in row])
    n = len(rows)
    width = SINGLE if n <= 10 else DOUBLE
    with _figure((width, 0.86 * width)) as figure:
        axes = figure.add_subplot()
        mesh = _heat(axes, rows, low, high, numbers=True)
        axes.invert_yaxis()
        _ticks(axes, n, result.tasks[:n])
        axes.set_xlabel("tested on task")
        axes.set_ylabel("after learning task")
        progress = "" if result.finished else f", {result.done} of {len(result.tasks)} tasks"
        recipe, method = shortened(result.recipe, NAME), shortened(result.method, NAME)
        title = f"{recipe}: {method}, order {shortened(result.label, NAME)}{progress}"
        axes.set_title(textwrap.fill(title, int(11 * width)), loc="left")  # wrapped here, or a $ begins a formula
        _colour_bar(figure, mesh, axes, result.measure)
        return _write(figure, path)


def accuracy_matrices(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """The accuracy matrix of every method side by side on one scale, means over its finished runs at each place."""
    methods = {m: [r.matrix for r in runs if r.finished] for m, runs in by_method(results).items()}
    methods = {method: matrices for method, matrices in methods.items() if matrices}
    if not methods:
        raise UsageError("no run is finished")
    means = {
        method: [[fmean(values) for values in zip(*places, strict=True)] for places in zip(*matrices, strict=True)]
        for method, matrices in methods.items()
    }
    low, high = _range([value for rows in means.values() for row in rows for value in row])
    columns = min(len(methods), 4)
    rows = math.ceil(len(methods) / columns)
    width = SINGLE if columns == 1 else DOUBLE
    with _figure((width, 0.5 + rows * (width - 0.9) / columns)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, (method, matrix) in zip(grid.flat, means.items(), strict=False):
            mesh = _heat(axes, matrix, low, high, numbers=len(methods) == 1)
            n = len(methods[method])
            said = f", mean of {n}" if n > 1 else ""
            axes.set_title(shortened(method, int(14 * width / columns) - len(said)) + said, loc="left")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True, nbins=6 if columns < 3 else 4, min_n_ticks=1))
        _hide(grid, len(methods))
        grid[0, 0].invert_yaxis()
        figure.supxlabel("tested on task", fontsize=8)
        figure.supylabel("after learning task", fontsize=8)
        _colour_bar(figure, mesh, grid, results[0].measure)
        return _write(figure, path)


def _range(values: Sequence[float]) -> tuple[int, int]:
    """The tens, in percent, between which fractions lie."""
    low, high = 10 * math.floor(10 * min(values)), 10 * math.ceil(10 * max(values))
    return low, max(high, low + 10)


def _heat(axes: Axes, rows: Sequence[Sequence[float]], low: int, high: int, numbers: bool) -> QuadMesh:
    n = len(rows)
    values = np.full((n, n), np.nan)
    for i, row in enumerate(rows):
        values[i, : i + 1] = [100 * value for value in row]
    edges = np.arange(n + 1) + 0.5
    shown = np.ma.masked_invalid(values)
    mesh = axes.pcolormesh(edges, edges, shown, cmap="viridis", vmin=low, vmax=high, edgecolors="white", linewidth=0.6)
    if numbers and n <= ANNOTATED:
        for i, row in enumerate(rows, 1):
            for j, value in enumerate(row, 1):
                colour = "white" if 100 * value < low + 0.6 * (high - low) else "black"
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=7)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return mesh


def _colour_bar(figure: Figure, mesh: QuadMesh, axes: Any, measure: str) -> None:
    bar = figure.colorbar(mesh, ax=axes, label=f"{measure} (%)", shrink=0.7, aspect=24)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    bar.outline.set_visible(False)


def accuracy_against_capacity(
    results: Sequence[Result],
    path: str | os.PathLike[str],
    paper: Paper | None = None,
    capacity: Mapping[str, float] | None = None,
) -> list[Path]:
    """The trade-off: every method a point with its 95 % interval; the paper's values, where it has both, are hollow.

    `paper` has the paper's accuracy and half-width for a method, `capacity` its capacity, all in percent.
    """
    summaries = summarise(results)
    if not summaries:
        raise UsageError("no run is finished")
    dots = [
        (s.method, s.capacity, 100 * s.accuracy.mean, s.accuracy.half_width and 100 * s.accuracy.half_width, "full")
        for s in summaries
    ]
    dots += [
        (f"{method} (paper)", capacity[method], value, half, "none")
        for method, (value, half) in (paper or {}).items()
        if capacity and method in capacity
    ]
    with _figure((DOUBLE, 3.2)) as figure:
        axes = figure.add_subplot()
        points = []
        for label, x, y, half, fill in dots:
            look = _look(label.removesuffix(" (paper)"))
            point = axes.errorbar(
                x,
                y,
                None if half is None else [[min(half, y)], [min(half, 100 - y)]],
                linestyle="none",
                fillstyle=fill,
                markersize=5.5,
                capsize=2,
                elinewidth=0.9,
                label=label,
                **look,
            )
            points.append((y, label, point))
        reach = [x for _, x, *_ in dots] + [100.0]
        if max(reach) / min(reach) >= 1.5:
            # Close above 100 % lies what matters, and other methods have several times as much.
            axes.set_xscale("function", functions=(_above, _from_above))
            ticks = [50, 100, 101, 102, 105, 110, 120, 150, 200, 500, 1000, 2000, 5000, 10000]
            axes.set_xticks([tick for tick in ticks if min(reach) <= tick <= max(reach)])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("capacity (%; the plain network is 100)")
        axes.set_ylabel(f"{results[0].measure} at the end (%)")
        axes.set_title(shortened(results[0].recipe, NAME), loc="left")
        axes.grid(axis="y")
        _percents(axes)
        points.sort(key=lambda entry: -entry[0])
        _legend(figure, [point for *_, point in points], [label for _, label, _ in points])
        return _write(figure, path)


def _above(capacity: Any) -> Any:
    return np.sign(capacity - 100) * np.log10(1 + np.abs(capacity - 100))


def _from_above(place: Any) -> Any:
    return 100 + np.sign(place) * (10 ** np.abs(place) - 1)


def write_report_figures(
    results: Sequence[Result],
    folder: str | os.PathLike[str],
    prefix: str = "",
    paper: Paper | None = None,
    capacity: Mapping[str, float] | None = None,
    failed: Callable[[Path, Exception], None] | None = None,
) -> list[Path]:
    """The figures that a report has of one recipe: those of its methods, none of single runs.

    `failed` is told of a figure that cannot be drawn, and the others are written; without it the error is raised.
    """
    folder, written = Path(folder), []
    figures: dict[str, Callable[[Path], list[Path]]] = {}
    if any(result.done for result in results):
        figures["accuracy_over_tasks"] = partial(accuracy_over_tasks, results)
    if any(result.finished for result in results):
        figures["accuracy_against_capacity"] = lambda path: accuracy_against_capacity(results, path, paper, capacity)
        figures["during_after"] = partial(during_after, results)
        figures["accuracy_matrices"] = partial(accuracy_matrices, results)
    for name, draw in figures.items():
        path = folder / f"{prefix}{name}"
        try:
            written += draw(path)
        except FileError:
            raise
        except Exception as error:
            if failed is None:
                raise
            failed(path, error)
    return written


def write_figures(results: Sequence[Result], folder: str | os.PathLike[str]) -> list[Path]:
    """All figures that the results of one recipe allow; the files that were written."""
    folder, written = Path(folder), []
    if any(result.done for result in results):
        written += accuracy_over_tasks(results, folder / "accuracy_over_tasks")
    if any(result.finished for result in results):
        written += accuracy_against_capacity(results, folder / "accuracy_against_capacity")
        written += during_after(results, folder / "during_after")
    begun = [result for result in results if result.done]
    names = file_stems(f"accuracy_matrix-{result.method}-{result.label}" for result in begun)
    for result, name in zip(begun, names, strict=True):
        written += accuracy_matrix(result, folder / name)
    return written


def _look(method: str) -> dict[str, Any]:
    look = look_of(method)
    return {"color": look.colour, "marker": look.marker}


def _percents(axes: Axes) -> None:
    """No room below 0 and above 100 %, but for what stands at the edge."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))
    for line in axes.lines:
        line.set_clip_on(False)


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend to the right of everything, whole whatever the names are: long ones take several lines."""
    legend = figure.legend(handles, ["-"] * len(labels), loc="outside right center")
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(_lines(label))  # set here, or "_a" is left out
    lines = sum(_lines(label).count("\n") + 1 for label in labels)
    figure.set_figheight(max(3.2, 0.17 * lines))


def _lines(label: str) -> str:
    return textwrap.fill(shortened(label, 3 * LABEL - 8), LABEL)


def _hide(grid: Any, used: int) -> None:
    """Show as many panels of a grid; the lowest of each column has the numbers of the tasks."""
    columns = grid.shape[1]
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < used)
        axes.tick_params(labelbottom=number < used <= number + columns)


def _ticks(axes: Axes, n: int, tasks: Sequence[str]) -> None:
    """Task numbers on both axes; on the rows also their names, unless they end in the number or there are many."""
    if n <= ANNOTATED:
        axes.set_xticks(range(1, n + 1))
        labels = [str(i) if name.endswith(f"-{i}") else f"{name}  {i}" for i, name in enumerate(tasks, 1)]
        axes.set_yticks(range(1, n + 1), labels)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


@contextlib.contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in our style, whatever style the user has set; pyplot's global state is not touched."""
    with matplotlib.style.context(["default", STYLE]):
        yield Figure(figsize=size, dpi=DPI, layout="constrained")


def _write(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write `path`.png and `path`.svg, each by a rename, so that a reader never meets half a file."""
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        path = path.with_suffix("")
    written = []
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine("none")  # what was found holds for both files, and takes as long as drawing them
    for kind in ("png", "svg"):
        content = io.BytesIO()
        # Not by savefig, which draws everything once more to see how large it is.
        if kind == "png":
            FigureCanvasAgg(figure).print_png(content)  # type: ignore[no-untyped-call]
        else:
            figure.set_dpi(72)  # SVG counts in points
            FigureCanvasSVG(figure).print_svg(content, metadata={"Date": None})  # type: ignore[no-untyped-call]
        target = path.with_name(f"{path.name}.{kind}")
        write_atomic(target, content.getvalue(), durable=False)
        written.append(target)
    return written

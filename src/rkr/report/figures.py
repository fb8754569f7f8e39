"""Figures for papers, as PNG and SVG. The same results give identical SVG files.

Figures are one or two columns of a paper wide, so they need no scaling and text stays at 7 to 9 points. Text in SVG
files is drawn as outlines: it looks the same everywhere and needs no fonts. Colours and markers come from
`rkr.report.looks`.
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
from rkr.report.search import MARK, less_search, marked
from rkr.report.summary import Paper, spreads, summarise

SINGLE, DOUBLE = 3.3, 6.9  # inches: one and two columns of a paper
PALE, GREY = 0.25, "#404040"  # opacity of pale bars; colour of what belongs to no method
NAME, LABEL = 40, 26  # characters of a name in a title and of a line in a legend
DPI = 300
ANNOTATED = 20  # with more tasks, numbers do not fit into the matrix
STYLE = {
    "font.family": "DejaVu Sans",  # included in matplotlib, so figures are the same on every machine
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
    "text.parse_math": False,  # names may contain $
    "svg.fonttype": "path",
    "svg.hashsalt": "rkr",
}


Draw = Callable[[Sequence[Result], Path], list[Path]]
FIGURES: dict[str, Draw] = {}
"""Figures of a recipe's finished runs, by the name of their files. `figure` adds one."""


def figure(name: str) -> Callable[[Draw], Draw]:
    """Add a figure that every report, and every `rkr run`, draws from the results of a recipe with finished runs."""

    def add(draw: Draw) -> Draw:
        FIGURES[name] = draw
        return draw

    return add


def accuracy_over_tasks(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """Mean accuracy over the tasks learned so far: one line per method with a 95 % confidence band over its runs.

    Bands need at least three runs: with two, Student's interval is as wide as the figure. Unfinished runs are thin
    lines with hollow markers and are not part of the mean.
    """
    methods = by_method(results)
    tasks = len(results[0].tasks)
    with drawing((DOUBLE, 3.2)) as figure:
        axes = figure.add_subplot()
        lines: list[tuple[float, Any]] = []  # with their last value: the legend follows the order of the lines
        several = False
        for method, runs in methods.items():
            dashes = look_of(method).dashes
            look = {**_look(method), "linestyle": (0, dashes) if dashes else "-"}
            found = spreads(metrics.running_mean(run.matrix) for run in runs if run.finished)
            if found:
                x, y = range(1, tasks + 1), np.array([100 * s.mean for s in found])
                (line,) = axes.plot(x, y, label=marked(method, runs), **look)
                lines.append((y[-1], line))
                if found[0].n >= metrics.FOR_A_BAND:
                    several = True
                    half = 100 * np.array([s.half_width for s in found], dtype=float)
                    low, high = np.clip(y - half, 0, 100), np.clip(y + half, 0, 100)
                    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            for run in runs:
                if not run.finished and run.done:
                    y = np.array(metrics.running_mean(run.matrix)) * 100
                    label = f"{method}, order {run.label}, unfinished"
                    open_: dict[str, Any] = {"linewidth": 0.7, "markerfacecolor": "white"}
                    (line,) = axes.plot(range(1, run.done + 1), y, label=label, **look, **open_)
                    lines.append((y[-1], line))
        if not lines:
            raise UsageError("no run has finished a task yet")
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(f"mean {results[0].measure} on tasks learned (%)")
        bands = " (bands: 95 % confidence intervals over runs)" if several else ""
        axes.set_title(shortened(results[0].recipe, NAME) + bands + _marks(results), loc="left")
        _percents(axes)
        axes.set_xlim(0.7, tasks + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        axes.grid(axis="y")
        ranked = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
        _legend(figure, ranked, [str(line.get_label()) for line in ranked])
        return write(figure, path)


@figure("during_after")
def during_after(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """Accuracy on each task right after learning it and after all tasks: one panel per method, means over its runs."""
    methods = _finished(results)
    tasks = results[0].tasks
    columns = min(len(methods), 2 if len(methods) <= 6 else 3)
    rows = math.ceil(len(methods) / columns)
    width = (SINGLE if columns == 1 else DOUBLE) / columns
    with drawing((columns * width, 0.6 + (1.7 if columns < 3 else 1.35) * rows)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        x = np.arange(1, len(tasks) + 1)
        for axes, (method, runs) in zip(grid.flat, methods.items(), strict=False):
            colour = look_of(method).colour
            for shift, pale, measure in ((-0.2, True, metrics.during), (0.2, False, metrics.after)):
                heights = [100 * s.mean for s in spreads(measure(run.matrix) for run in runs)]
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
            figure.supxlabel("task, in learning order", fontsize=8)
        if columns == 3:
            grid[0, 0].set_yticks([0, 50, 100])  # drawing ticks in many panels is slow
        figure.supylabel(f"{results[0].measure} (%)", fontsize=8)
        handles = [Patch(facecolor=(GREY, alpha), edgecolor=GREY) for alpha in (PALE, 1)]
        figure.legend(handles, ["right after learning", "after all tasks"], loc="outside upper right", ncols=2)
        return write(figure, path)


def accuracy_matrix(result: Result, path: str | os.PathLike[str]) -> list[Path]:
    """The accuracy matrix of a run as a heat map: one row per task learned, one column per task tested."""
    rows = result.matrix
    if not rows:
        raise UsageError(f"{result.folder}: no task learned yet")
    low, high = _range([value for row in rows for value in row])
    n = len(rows)
    width = SINGLE if n <= 10 else DOUBLE
    with drawing((width, 0.86 * width)) as figure:
        axes = figure.add_subplot()
        mesh = _heat(axes, rows, low, high, numbers=True)
        axes.invert_yaxis()
        _ticks(axes, n, result.tasks[:n])
        axes.set_xlabel("tested on task")
        axes.set_ylabel("after learning task")
        progress = "" if result.finished else f", {result.done} of {len(result.tasks)} tasks"
        recipe, method = shortened(result.recipe, NAME), shortened(result.method, NAME)
        title = f"{recipe}: {method}, order {shortened(result.label, NAME)}{progress}"
        axes.set_title(
            textwrap.fill(title, int(11 * width)), loc="left"
        )  # wrapped here because matplotlib would parse $ as math
        _colour_bar(figure, mesh, axes, result.measure)
        return write(figure, path)


def accuracy_matrices(results: Sequence[Result], path: str | os.PathLike[str]) -> list[Path]:
    """The accuracy matrices of all methods on one colour scale, each the mean over the finished runs."""
    methods = _finished(results)
    means = {
        method: [[s.mean for s in spreads(rows)] for rows in zip(*(run.matrix for run in runs), strict=True)]
        for method, runs in methods.items()
    }
    low, high = _range([value for rows in means.values() for row in rows for value in row])
    columns = min(len(methods), 4)
    rows = math.ceil(len(methods) / columns)
    width = SINGLE if columns == 1 else DOUBLE
    with drawing((width, 0.5 + rows * (width - 0.9) / columns)) as figure:
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
        return write(figure, path)


def _finished(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The finished runs of each method."""
    methods = {method: [run for run in runs if run.finished] for method, runs in by_method(results).items()}
    methods = {method: runs for method, runs in methods.items() if runs}
    if not methods:
        raise UsageError("no finished runs")
    return methods


def _range(values: Sequence[float]) -> tuple[int, int]:
    """The multiples of 10 % that enclose some fractions."""
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
    """Accuracy against capacity: one point per method with its 95 % confidence interval. Hollow points are the paper's.

    A line leads from what must be kept to use all tasks to what must be kept to go on learning too. `paper` holds the
    paper's accuracy and half-width of each method, `capacity` its capacity, all in percent.
    """
    summaries = summarise(results)
    if not summaries:
        raise UsageError("no finished runs")
    dots = [
        (
            s.method,
            s.name,
            s.capacity,
            100 * s.accuracy.mean,
            s.accuracy.half_width and 100 * s.accuracy.half_width,
            "full",
        )
        for s in summaries
    ]
    to_learn = {s.method: s.capacity_to_learn for s in summaries if s.capacity_to_learn is not None}
    dots += [
        (method, f"{method} (paper)", capacity[method], value, half, "none")
        for method, (value, half) in (paper or {}).items()
        if capacity and method in capacity
    ]
    with drawing((DOUBLE, 3.2)) as figure:
        axes = figure.add_subplot()
        points = []
        for method, label, x, y, half, fill in dots:
            look = _look(method)
            further = to_learn.get(method, x)
            if fill == "full" and further > x:
                axes.plot([x, further], [y, y], color=look["color"], linewidth=0.9, marker="|", markevery=[1])
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
        reach = [x for _, _, x, *_ in dots] + [*to_learn.values(), 100.0]
        if max(reach) / min(reach) >= 1.5:
            # Most methods are just above 100 %, some at several times that.
            axes.set_xscale("function", functions=(_above, _from_above))
            ticks = [50, 100, 101, 102, 105, 110, 120, 150, 200, 500, 1000, 2000, 5000, 10000]
            axes.set_xticks([tick for tick in ticks if min(reach) <= tick <= max(reach)])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("capacity to use all tasks, and to go on learning (line), in % of the original network")
        axes.set_ylabel(f"final {results[0].measure} (%)")
        axes.set_title(shortened(results[0].recipe, NAME) + _marks(results), loc="left")
        axes.grid(axis="y")
        _percents(axes)
        points.sort(key=lambda entry: -entry[0])
        _legend(figure, [point for *_, point in points], [label for _, label, _ in points])
        return write(figure, path)


def _marks(results: Sequence[Result]) -> str:
    return f" ({MARK} less search than published)" if any(map(less_search, results)) else ""


def _above(capacity: Any) -> Any:
    return np.sign(capacity - 100) * np.log10(1 + np.abs(capacity - 100))


def _from_above(place: Any) -> Any:
    return 100 + np.sign(place) * (10 ** np.abs(place) - 1)


def write_figures(
    results: Sequence[Result],
    folder: str | os.PathLike[str],
    prefix: str = "",
    paper: Paper | None = None,
    capacity: Mapping[str, float] | None = None,
    failed: Callable[[Path, Exception], None] | None = None,
    each_run: bool = True,
) -> list[Path]:
    """Write all figures that the results of one recipe allow, and return their paths.

    Accuracy matrices are drawn for each run, or as means over the runs of each method if `each_run` is false. If a
    figure cannot be drawn, `failed` is called with its path and the error; without `failed`, the error is raised.
    """
    from rkr.report import search_figures  # noqa: F401  # it adds its own

    folder, written = Path(folder), []
    figures: dict[str, Callable[[Path], list[Path]]] = {}
    begun = [result for result in results if result.done]
    if begun:
        figures["accuracy_over_tasks"] = lambda path: accuracy_over_tasks(results, path)
    if any(result.finished for result in results):
        figures["accuracy_against_capacity"] = lambda path: accuracy_against_capacity(results, path, paper, capacity)
        figures |= {name: partial(draw, results) for name, draw in FIGURES.items()}
        if not each_run:
            figures["accuracy_matrices"] = lambda path: accuracy_matrices(results, path)
    if each_run:
        names = file_stems(f"accuracy_matrix-{result.method}-{result.label}" for result in begun)
        figures |= {name: partial(accuracy_matrix, result) for name, result in zip(names, begun, strict=True)}
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


def _look(method: str) -> dict[str, Any]:
    look = look_of(method)
    return {"color": look.colour, "marker": look.marker}


def _percents(axes: Axes) -> None:
    """Limit the axis to 0 to 100 %, without clipping markers at the edge."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0), min(high, 100))
    for line in axes.lines:
        line.set_clip_on(False)


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend to the right of the figure. Long names are wrapped."""
    legend = figure.legend(handles, ["-"] * len(labels), loc="outside right center")
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(_lines(label))  # set afterwards because matplotlib skips labels that start with _
    lines = sum(_lines(label).count("\n") + 1 for label in labels)
    figure.set_figheight(max(3.2, 0.17 * lines))


def _lines(label: str) -> str:
    return textwrap.fill(shortened(label, 3 * LABEL - 8), LABEL)


def _hide(grid: Any, used: int) -> None:
    """Hide unused panels of a grid, and label only the lowest panel of each column."""
    columns = grid.shape[1]
    for number, axes in enumerate(grid.flat):
        axes.set_visible(number < used)
        axes.tick_params(labelbottom=number < used <= number + columns)


def _ticks(axes: Axes, n: int, tasks: Sequence[str]) -> None:
    """Task numbers on both axes. Rows also show the task names, unless they end in the number or there are too many."""
    if n <= ANNOTATED:
        axes.set_xticks(range(1, n + 1))
        labels = [str(i) if name.endswith(f"-{i}") else f"{name}  {i}" for i, name in enumerate(tasks, 1)]
        axes.set_yticks(range(1, n + 1), labels)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


@contextlib.contextmanager
def drawing(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in our style, independent of the user's style and of pyplot's global state."""
    with matplotlib.style.context(["default", STYLE]):
        yield Figure(figsize=size, dpi=DPI, layout="constrained")


def write(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write `path`.png and `path`.svg atomically."""
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        path = path.with_suffix("")
    written = []
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)
    figure.set_layout_engine("none")  # reuse the layout for both files: it takes as long as drawing them
    for kind in ("png", "svg"):
        content = io.BytesIO()
        # Faster than savefig, which draws everything twice.
        if kind == "png":
            FigureCanvasAgg(figure).print_png(content)  # type: ignore[no-untyped-call]
        else:
            figure.set_dpi(72)  # SVG uses points
            FigureCanvasSVG(figure).print_svg(content, metadata={"Date": None})  # type: ignore[no-untyped-call]
        target = path.with_name(f"{path.name}.{kind}")
        write_atomic(target, content.getvalue(), durable=False)
        written.append(target)
    return written

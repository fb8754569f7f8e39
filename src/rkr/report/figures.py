"""Figures from results, each as PNG and as SVG; the same results give the same bytes of SVG."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rkr.errors import FileError, UsageError
from rkr.report import metrics
from rkr.report.results import Result, Top, by_method

# Okabe & Ito's palette, told apart by colour-blind readers; its yellow is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
PALE, STRONG = "#A6CBE3", "#0072B2"
ANNOTATED = 20  # more tasks than this leave no room for numbers in the matrix
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.hashsalt": "rkr",
}


def accuracy_over_tasks(results: Sequence[Result], path: str | os.PathLike[str], top: Top = 1) -> list[Path]:
    """Mean accuracy over the tasks so far, after each task: a line for each method, a 95 % band over its orders.

    A run that is not finished has a dashed line of its own and is no part of its method's mean.
    """
    methods = by_method(results)
    tasks = len(results[0].tasks)
    with _figure((7.2, 3.8)) as figure:
        axes = figure.add_subplot()
        lines: list[tuple[float, Any]] = []  # by where they end, so that the legend is in the order of the lines
        several = False
        for i, (method, runs) in enumerate(methods.items()):
            look: dict[str, Any] = {
                "color": COLOURS[i % len(COLOURS)],
                "marker": MARKERS[i // len(COLOURS) % len(MARKERS)],
            }
            means = [[100 * value for value in metrics.running_mean(r.rows(top))] for r in runs if r.finished]
            if means:
                spreads = [metrics.spread(column) for column in zip(*means, strict=True)]
                x, y = range(1, tasks + 1), np.array([s.mean for s in spreads])
                (line,) = axes.plot(x, y, label=method, **look)
                lines.append((y[-1], line))
                if len(means) > 1:
                    several = True
                    half = np.array([s.half_width for s in spreads], dtype=float)
                    axes.fill_between(x, y - half, y + half, color=look["color"], alpha=0.15, linewidth=0)
            for run in runs:
                if not run.finished and run.done:
                    y = np.array(metrics.running_mean(run.rows(top))) * 100
                    label = f"{method}, order {run.label}, not finished"
                    (line,) = axes.plot(range(1, run.done + 1), y, "--", label=label, **look)
                    lines.append((y[-1], line))
        if not lines:
            raise UsageError("no run has learned a task yet")
        axes.set_xlabel("tasks learned")
        axes.set_ylabel(f"mean {_accuracy(results[0], top)} on them (%)")
        axes.set_title(results[0].recipe + (" (bands: 95 % confidence over orders)" if several else ""), loc="left")
        axes.set_xlim(0.7, tasks + 0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        axes.grid(axis="y")
        ranked = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
        axes.legend(handles=ranked, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return _write(figure, path)


def during_after(results: Sequence[Result], path: str | os.PathLike[str], top: Top = 1) -> list[Path]:
    """Accuracy on each task right after learning it and at the end: a panel for each method, means over its orders."""
    methods = {m: [r for r in runs if r.finished] for m, runs in by_method(results).items()}
    methods = {method: runs for method, runs in methods.items() if runs}
    if not methods:
        raise UsageError("no run is finished")
    tasks = results[0].tasks
    columns = min(len(methods), 2)
    rows = math.ceil(len(methods) / columns)
    width = max(3.4, min(0.34 * len(tasks) + 1, 7.0))
    with _figure((columns * width, 0.6 + 2.1 * rows)) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        x = np.arange(1, len(tasks) + 1)
        for axes, (method, runs) in zip(grid.flat, methods.items(), strict=False):
            for shift, colour, label, measure in (
                (-0.2, PALE, "right after learning", metrics.during),
                (0.2, STRONG, "after all tasks", metrics.after),
            ):
                of_runs = zip(*(measure(run.rows(top)) for run in runs), strict=True)
                axes.bar(x + shift, [100 * fmean(values) for values in of_runs], 0.38, color=colour, label=label)
            axes.set_title(method + (f", mean of {len(runs)} orders" if len(runs) > 1 else ""), loc="left")
            axes.set_ylim(0, 100)
            axes.grid(axis="y")
            axes.tick_params(axis="x", length=0, labelbottom=True)
        for axes in grid.flat[len(methods) :]:
            axes.set_visible(False)
        names = all(run.tasks == tasks for runs in methods.values() for run in runs)
        if names and max(map(len, tasks)) * len(tasks) <= 12 * width:
            grid[0, 0].set_xticks(x, tasks)
            figure.supxlabel("task", fontsize=9)
        else:
            grid[0, 0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
            figure.supxlabel("task, in the order of learning", fontsize=9)
        figure.supylabel(f"{_accuracy(results[0], top)} (%)", fontsize=9)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=2)
        return _write(figure, path)


def accuracy_matrix(result: Result, path: str | os.PathLike[str], top: Top = 1) -> list[Path]:
    """The accuracy matrix of a run as a heat map: a row after each task, a column for each task."""
    rows = result.rows(top)
    if not rows:
        raise UsageError(f"{result.folder}: no task has been learned yet")
    n = len(rows)
    values = np.full((n, n), np.nan)
    for i, row in enumerate(rows):
        values[i, : i + 1] = [100 * value for value in row]
    low, high = 10 * math.floor(np.nanmin(values) / 10), 10 * math.ceil(np.nanmax(values) / 10)
    high = max(high, low + 10)
    size = min(2.2 + 0.42 * n, 9.0)
    with _figure((size + 1.3, size)) as figure:
        axes = figure.add_subplot()
        edges = np.arange(n + 1) + 0.5
        shown = np.ma.masked_invalid(values)
        mesh = axes.pcolormesh(
            edges, edges, shown, cmap="viridis", vmin=low, vmax=high, edgecolors="white", linewidth=0.8
        )
        if n <= ANNOTATED:
            for i, row in enumerate(rows, 1):
                for j, value in enumerate(row, 1):
                    colour = "white" if 100 * value < low + 0.6 * (high - low) else "black"
                    axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_aspect("equal")
        axes.invert_yaxis()
        _ticks(axes, n, result.tasks[:n])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        axes.set_xlabel("tested on task")
        axes.set_ylabel("after learning task")
        progress = "" if result.finished else f", {result.done} of {len(result.tasks)} tasks"
        axes.set_title(f"{result.recipe}: {result.method}, order {result.label}{progress}", loc="left")
        bar = figure.colorbar(mesh, ax=axes, label=f"{_accuracy(result, top)} (%)", shrink=0.8)
        bar.outline.set_visible(False)
        return _write(figure, path)


def write_figures(results: Sequence[Result], folder: str | os.PathLike[str], top: Top = 1) -> list[Path]:
    """All figures that the results of one recipe allow; the files that were written."""
    folder, written = Path(folder), []
    if any(result.done for result in results):
        written += accuracy_over_tasks(results, folder / "accuracy_over_tasks", top)
    if any(result.finished for result in results):
        written += during_after(results, folder / "during_after", top)
    for result in results:
        if result.done:
            name = re.sub(r"[^\w.-]+", "_", f"accuracy_matrix-{result.method}-{result.label}")
            written += accuracy_matrix(result, folder / name, top)
    return written


def _accuracy(result: Result, top: Top) -> str:
    return result.measure if top == 1 else "top-5 accuracy"


def _ticks(axes: Axes, n: int, tasks: Sequence[str]) -> None:
    """Task numbers on both axes; on the rows also their names, unless they end in the number or there are many."""
    if n <= ANNOTATED:
        axes.set_xticks(range(1, n + 1))
        labels = [name if name.endswith(f"-{i}") else f"{name}  {i}" for i, name in enumerate(tasks, 1)]
        axes.set_yticks(range(1, n + 1), labels)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


@contextlib.contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in our style, whatever style the user has set; pyplot's global state is not touched."""
    with matplotlib.style.context(["default", STYLE]):
        yield Figure(figsize=size, layout="constrained")


def _write(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write `path`.png and `path`.svg, each by a rename, so that a reader never meets half a file."""
    path = Path(path)
    if path.suffix in (".png", ".svg"):
        path = path.with_suffix("")
    written = []
    for kind in ("png", "svg"):
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
        target = path.with_name(f"{path.name}.{kind}")
        temporary = path.with_name(f".rkr-{secrets.token_hex(8)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content.getvalue())
            os.replace(temporary, target)
        except OSError as error:
            raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        written.append(target)
    return written

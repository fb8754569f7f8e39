"""Figures of searches for options: how results came in, and which options matter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import MaxNLocator

from rkr.experiment.results import Result
from rkr.report.figures import DOUBLE, GREY, SINGLE, drawing, figure, write
from rkr.report.searches import searches


@figure("search_history")
def search_history(results: Sequence[Result], path: Path) -> list[Path]:
    """The result of each trial in the order of the search, and the best so far; trials that were stopped are hollow."""
    found = searches(results)
    if not found:
        return []
    with drawing((DOUBLE, 2.2 * len(found))) as drawn:
        for place, search in enumerate(found, 1):
            axes = drawn.add_subplot(len(found), 1, place)
            axes.step([n for n, _ in search.finished], search.best, where="post", color=GREY, label="best so far")
            axes.plot(*zip(*search.finished, strict=True), "o", color="#0072B2", label="trial")
            if search.stopped:
                axes.plot(*zip(*search.stopped, strict=True), "o", color="#0072B2", mfc="white", label="stopped early")
            axes.set_title(search.name, loc="left")
            axes.set_xlabel("trial")
            axes.set_ylabel(f"validation {results[0].measure} (%)")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        return write(drawn, path)


@figure("search_importance")
def search_importance(results: Sequence[Result], path: Path) -> list[Path]:
    """How much of the differences between trials each option explains (functional ANOVA, by Optuna)."""
    found = [search for search in searches(results) if search.importance]
    if not found:
        return []
    with drawing((SINGLE, 1.6 * len(found))) as drawn:
        for place, search in enumerate(found, 1):
            axes = drawn.add_subplot(len(found), 1, place)
            names = sorted(search.importance, key=search.importance.__getitem__)
            axes.barh(names, [search.importance[name] for name in names], color="#0072B2")
            axes.set_xlim(0, 100)
            axes.set_title(search.name, loc="left")
            axes.set_xlabel("importance (%)")
        return write(drawn, path)

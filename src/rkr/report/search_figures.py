"""Figures of searches for options: how results came in, and which options matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from rkr.experiment.results import Result
from rkr.report.figures import DOUBLE, GREY, SINGLE, drawing, figure, write


def searches(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What `rkr tune --search` has written beside the runs of a recipe."""
    folders = dict.fromkeys(result.folder.parent.parent.parent for result in results)
    found = []
    for path in (path for folder in folders for path in sorted(folder.glob("search-*.json"))):
        try:
            read = json.loads(path.read_text())
            if any(trial["value"] is not None for trial in read["trials"]):
                found.append(read)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


@figure("search_history")
def search_history(results: Sequence[Result], path: Path) -> list[Path]:
    """The result of each trial in the order of the search, and the best so far; trials that were stopped are hollow."""
    found = searches(results)
    if not found:
        return []
    with drawing((DOUBLE, 2.2 * len(found))) as drawn:
        for place, search in enumerate(found, 1):
            axes = drawn.add_subplot(len(found), 1, place)
            done = [(t["number"] + 1, 100 * t["value"]) for t in search["trials"] if t["value"] is not None]
            best = [max(value for _, value in done[:count]) for count in range(1, len(done) + 1)]
            early = [
                (t["number"] + 1, 100 * list(t["after_task"].values())[-1])
                for t in search["trials"]
                if t["value"] is None and t["after_task"]
            ]
            axes.step([n for n, _ in done], best, where="post", color=GREY, label="best so far")
            axes.plot(*zip(*done, strict=True), "o", color="#0072B2", label="trial")
            if early:
                axes.plot(
                    *zip(*early, strict=True), "o", color="#0072B2", markerfacecolor="white", label="stopped early"
                )
            axes.set_title(f"{search['method']}, {search['sampler']}, seed {search['seed']}", loc="left")
            axes.set_xlabel("trial")
            axes.set_ylabel(f"validation {results[0].measure} (%)")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        return write(drawn, path)


@figure("search_importance")
def search_importance(results: Sequence[Result], path: Path) -> list[Path]:
    """How much of the differences between trials each option explains (functional ANOVA, by Optuna)."""
    found = [search for search in searches(results) if search.get("importance")]
    if not found:
        return []
    with drawing((SINGLE, 1.6 * len(found))) as drawn:
        for place, search in enumerate(found, 1):
            axes = drawn.add_subplot(len(found), 1, place)
            names = sorted(search["importance"], key=search["importance"].get)
            axes.barh(names, [100 * search["importance"][name] for name in names], color="#0072B2")
            axes.set_xlim(0, 100)
            axes.set_title(f"{search['method']}, {search['sampler']}, seed {search['seed']}", loc="left")
            axes.set_xlabel("importance (%)")
        return write(drawn, path)

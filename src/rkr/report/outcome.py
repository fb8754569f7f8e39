"""What `rkr run` prints and draws when its runs are complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rkr.experiment.results import read_result
from rkr.report.groups import comparable
from rkr.report.scan import scan
from rkr.report.tables import accuracy_table, added_by_a_task, summary_json, summary_tables, zero_shot_table

if TYPE_CHECKING:
    from rich.table import Table

    from rkr.experiment.plan import Plan
    from rkr.experiment.spec import RunSpec


def draw(root: Path) -> Path:
    """Draw all runs of a recipe and return the folder. Groups of runs that are not comparable get subfolders."""
    from rkr.report.figures import write_figures  # imports matplotlib

    figures = root / "figures"
    groups = comparable(scan(root).results)
    for name, runs in groups.items():
        write_figures(runs, figures / (name if len(groups) > 1 else ""))
    return figures


class Outcome:
    """The results of complete runs of a plan, next to the paper's numbers if the schedule is the paper's."""

    def __init__(self, plan: Plan, specs: Sequence[RunSpec]) -> None:
        self.plan, self.specs = plan, specs
        self.results = [read_result(plan.folder(spec)) for spec in specs]
        shortened = plan.epochs is not None or plan.limit is not None
        self._groups = [
            (runs, {} if shortened else plan.recipe.published_numbers(runs[0].order))
            for runs in comparable(self.results).values()
        ]

    def json_lines(self) -> Iterator[str]:
        """One summary event per group of comparable runs."""
        for runs, paper in self._groups:
            yield json.dumps({"event": "summary", **summary_json(runs, paper)})

    def tables(self, width: int, matrices: bool = False) -> Iterator[Table]:
        """Summaries for a console of `width` columns. With `matrices`, the accuracy matrix of each run comes first."""
        if matrices:
            for result in self.results:
                yield accuracy_table(result)
        for runs, paper in self._groups:
            yield from summary_tables(runs, paper, width=width)
            if self.plan.recipe.zero_shot:
                yield zero_shot_table(runs)

    def lines(self, figures: Path | None = None) -> Iterator[str]:
        """What a task adds to the network for each run, and where the files are."""
        for result in self.results:
            yield f"{result.method} {result.label}: {added_by_a_task(result)}"
        if figures is not None:
            yield f"figures: {figures}"
        for spec in self.specs:
            yield f"{spec.method} {spec.label}: results and model in {self.plan.folder(spec)}"

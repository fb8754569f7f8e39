"""The report: one self-contained HTML file, with tables and figures as separate files next to it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rkr
from rkr.atomic import write_atomic
from rkr.errors import UsageError
from rkr.experiment.results import Result
from rkr.report.export import write_tables
from rkr.report.html.data import Group, details, document, grouped, headline, proofs, runs_table
from rkr.report.names import file_stem
from rkr.report.scan import Skipped, scan
from rkr.report.search import search_note
from rkr.report.searches import searches
from rkr.report.summary import COLUMNS, own_optimizers

SCRIPTS = ("draw.js", "charts.js", "page.js")
TITLE = "Continual learning results"


@dataclass(frozen=True)
class Report:
    """The files that were written, and what was skipped."""

    page: Path
    tables: list[Path]
    figures: list[Path]
    runs: int
    skipped: list[Skipped]


def write_report(
    roots: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], figures: bool = True, title: str = TITLE
) -> Report:
    """Write index.html, tables/ and figures/ from all runs at or below some folders.

    Recipes, tables and figures that fail are listed in `skipped`; everything else is written.
    """
    found = scan(roots[0], *roots[1:], epochs=False)
    if not found.results:
        where = ", ".join(str(root) for root in roots)
        reasons = "; ".join(f"{skipped.path}: {skipped.reason}" for skipped in found.skipped[:3])
        raise UsageError(f"{where}: no run has finished a task" + (f" ({reasons})" if reasons else ""))
    out = Path(out)
    groups = grouped(found.results)
    page = out / "index.html"
    skipped = list(found.skipped)
    write_atomic(page, _rendered(groups, skipped, title).encode("utf-8", "replace"), durable=False)

    def failed(path: Path, error: Exception) -> None:
        skipped.append(Skipped(path, _reason(error)))

    tables, drawn = [], []
    for group, own in zip(groups, _own_names(groups), strict=True):
        folder = out / "tables" / own if own else out / "tables"
        recipe, known = group.results[0].recipe, group.published
        tables += write_tables(group.results, folder, {recipe: known.numbers}, failed)
        if figures:
            from rkr.report.figures import write_figures  # slow to import

            prefix = file_stem(recipe) + (f"-{own}-" if own else "-")
            drawn += write_figures(
                group.results, out / "figures", prefix, known.numbers, known.capacity, failed, each_run=False
            )
    return Report(page, tables, drawn, len(found.results), skipped)


def _own_names(groups: Sequence[Group]) -> list[str]:
    """A suffix for the file names of groups whose recipes share a name; empty if the name is unique."""
    stems = [file_stem(group.results[0].recipe).casefold() for group in groups]
    names: list[str] = []
    for group, stem in zip(groups, stems, strict=True):
        name = "" if stems.count(stem) == 1 else group.protocol.hash
        while name and name in names:
            name += "_"
        names.append(name)
    return names


def _rendered(groups: Sequence[Group], skipped: list[Skipped], title: str) -> str:
    """Render the page. Groups that cannot be rendered are left out and added to `skipped`."""
    try:
        return render(groups, skipped, title)
    except Exception as error:
        if len(groups) == 1:
            skipped.append(Skipped(groups[0].results[0].folder, f"cannot be rendered: {_reason(error)}"))
            return render([], skipped, title)
    shown = []
    for group in groups:
        try:
            render([group])
            shown.append(group)
        except Exception as error:
            skipped.append(Skipped(group.results[0].folder, f"{group.name} cannot be rendered: {_reason(error)}"))
    return render(shown, skipped, title)


def _reason(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) and text else f"{type(error).__name__}: {text}"[:300]


def render(groups: Sequence[Group], skipped: Sequence[Skipped] = (), title: str = TITLE) -> str:
    """Render the page. The same results give the same page."""
    environment = Environment(
        loader=PackageLoader("rkr.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = '"use strict";\n(() => {\n' + "\n".join(_static(name) for name in SCRIPTS) + "\n})();\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    results = [result for group in groups for result in group.results]
    return environment.get_template("report.html.jinja").render(
        title=title,
        version=rkr.__version__,
        counts=_counts(groups, results, skipped),
        sections=[_section(group) for group in groups],
        skipped=[(str(item.path), item.reason) for item in skipped],
        glossary=GLOSSARY,
        css=Markup(_static("page.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        data=Markup(safe_json(document(groups))),
    )


def safe_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode()


def _static(name: str) -> str:
    return files("rkr.report.html").joinpath("static", name).read_text(encoding="utf-8")


def _counts(groups: Sequence[Group], results: Sequence[Result], skipped: Sequence[Skipped]) -> str:
    unfinished = sum(not result.finished for result in results)
    parts = [
        _number(len(results), "run"),
        f"of {_number(len({result.method for result in results}), 'method')}",
        f"in {_number(len(groups), 'recipe')}",
    ]
    text = " ".join(parts)
    text += f", {unfinished} unfinished" if unfinished else ", all finished"
    return text + (f"; {_number(len(skipped), 'folder')} skipped." if skipped else ".")


def _number(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _section(group: Group) -> Mapping[str, Any]:
    shared, described = details(group)
    runs = group.results
    several = len({(run.order, run.seed) for run in runs if run.finished}) > 1
    return {
        "name": group.name,
        "title": group.published.title,
        "about": group.published.about,
        "changed": group.published.changed,
        "printed": group.published.printed,
        "tasks": len(runs[0].tasks),
        "methods": list(dict.fromkeys(run.method for run in runs)),
        "runs": len(runs),
        "unfinished": sum(not run.finished for run in runs),
        "paper": bool(group.published.numbers) and any(run.finished for run in runs),
        "meta": _meta(group),
        "headline": headline(group),
        "headline_note": _headline_note(group, several),
        "charts": _charts(runs),
        "proofs": proofs(group),
        "table": runs_table(group),
        "shared": shared,
        "details": described,
    }


def _meta(group: Group) -> str:
    """A one-line summary of the protocol."""
    fields = group.protocol.fields
    schedule = {name.removeprefix("schedule."): v for name, v in fields.items() if name.startswith("schedule.")}
    parts = [_number(len(group.results[0].tasks), "task")]
    if fields.get("network.name"):
        parts.append(str(fields["network.name"]))
    if "epochs" in schedule:
        parts.append(f"{schedule['epochs']} epochs per task")
    if "lr" in schedule:
        milestones = schedule.get("milestones")
        steps = ", ".join(map(str, milestones)) if isinstance(milestones, list) else ""
        steps = f" × {schedule.get('gamma')} at {steps}" if steps else ""
        parts.append(f"{schedule.get('optimizer', '')} {schedule['lr']}{steps}".strip())
    if "batch" in schedule:
        parts.append(f"batch {schedule['batch']}")
    return ", ".join(parts) + f"; protocol {group.protocol.hash}"


def _headline_note(group: Group, several: bool) -> str:
    measure = "accuracy" if group.results[0].measure == "accuracy" else "H"
    if not any(run.finished for run in group.results):
        return "No run is finished yet."
    parts = [f"Mean {measure} over all tasks after the last one, in %, with the task given."]
    if several:
        parts.append("± is the 95 % confidence interval over runs (Student's t).")
    if set(group.published.numbers) & {run.method for run in group.results if run.finished}:
        parts.append("The column “paper” shows the values reported in the paper for this recipe.")
    if note := search_note(run for run in group.results if run.finished):
        parts.append(f"{note}.")
    if own := own_optimizers(run for run in group.results if run.finished):
        parts.append(f"With an optimiser of their own: {own}.")
    parts.append("Click a header to sort. All columns are defined at the end of the page.")
    return " ".join(parts)


# ---------------------------------------------------------------------------------------------------------
# Charts


@dataclass(frozen=True)
class Chart:
    """A chart of the page. The function of the same key in the CHARTS of charts.js draws it.

    A chart with the key of a metric in `METRICS` needs no function: it has a bar for each method.
    """

    key: str
    title: str  # {measure} is Accuracy or H
    caption: str
    shown: Callable[[Sequence[Result]], bool] = lambda runs: True
    wide: bool = False


def _finished(runs: Sequence[Result]) -> list[Result]:
    return [run for run in runs if run.finished]


CHARTS = (
    Chart(
        "over",
        "{measure} over tasks",
        "Mean over the tasks learned so far. Bands are 95 % confidence intervals (three or more runs). Thin lines with "
        "hollow markers are unfinished runs.",
    ),
    Chart(
        "tradeoff",
        "{measure} against capacity",
        "Up and to the left is better. Points are at what must be kept to use all tasks; lines lead to what must be "
        "kept to go on learning too. Error bars are 95 % confidence intervals over runs. Hollow points are the paper's "
        "values.",
        lambda runs: bool(_finished(runs)),
    ),
    Chart(
        "zero",
        "Unseen and seen classes",
        "After the last task: mean per-class accuracy on unseen and seen classes, and their harmonic mean.",
        lambda runs: runs[0].measure == "H" and bool(_finished(runs)),
        wide=True,
    ),
    Chart(
        "during",
        "During and after",
        "{measure} on each task right after learning it and after all tasks, averaged over runs. The difference is "
        "forgetting.",
        lambda runs: bool(_finished(runs)),
        wide=True,
    ),
    Chart(
        "matrix",
        "{measure} matrix",
        "One row per task learned, one column per task tested. A task that is not forgotten keeps its colour down its "
        "column.",
    ),
    Chart(
        "forgetting",
        "Forgetting",
        "The mean drop from the best to the final value on earlier tasks. Error bars are 95 % confidence intervals.",
        lambda runs: any(run.done > 1 for run in _finished(runs)),
    ),
    Chart(
        "cost",
        "Cost per task",
        "The network and all tasks learned so far: parameters counted as in the paper, and all bytes that must be "
        "stored.",
    ),
    Chart(
        "orders",
        "Order robustness",
        "One marker per run: the closer together, the less the order matters. The table lists the average and maximum "
        "disparity of class groups (AOPD, MOPD) if all orders have the same groups.",
        lambda runs: len({run.order for run in _finished(runs)}) > 1,
    ),
    Chart(
        "search",
        "Search: results of trials",
        "Trials in the order of the search, on validation samples; the line is the best so far. Hollow markers are "
        "trials that were stopped early, at their last task.",
        lambda runs: bool(searches(runs)),
    ),
    Chart(
        "importance",
        "Search: which options matter",
        "The share of each option in how the results of trials differ (functional ANOVA, by Optuna).",
        lambda runs: any(search.importance for search in searches(runs)),
    ),
)


def _charts(runs: Sequence[Result]) -> list[Chart]:
    """The charts that the runs allow. The last one takes the full width if it has no neighbour."""
    measure = "H" if runs[0].measure == "H" else "Accuracy"
    charts = [
        replace(chart, title=chart.title.format(measure=measure), caption=chart.caption.format(measure=measure))
        for chart in CHARTS
        if chart.shown(runs)
    ]
    if len(list(takewhile(lambda chart: not chart.wide, reversed(charts)))) % 2:
        charts[-1] = replace(charts[-1], wide=True)
    return charts


GLOSSARY = [
    *(
        (name, column.formula or f"{column.explanation[0].upper()}{column.explanation[1:]}.")
        for name, column in COLUMNS.items()
        if name not in ("runs", "sd", "paper", "verdict")
    ),
    ("accuracy over tasks", "The mean over j ≤ i of A[i, j], for each i."),
    ("during, after", "A[j, j] and A[T, j]."),
]

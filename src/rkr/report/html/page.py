"""The report: one HTML file that holds everything it needs, and beside it the tables and figures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
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
from rkr.report.summary import COLUMNS

SCRIPTS = ("draw.js", "charts.js", "page.js")
TITLE = "Continual learning results"


@dataclass(frozen=True)
class Chart:
    """A chart of the page; the script draws it by its key."""

    key: str
    title: str
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Report:
    """What was written, and what was not used."""

    page: Path
    tables: list[Path]
    figures: list[Path]
    runs: int
    skipped: list[Skipped]


def write_report(
    roots: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], figures: bool = True, title: str = TITLE
) -> Report:
    """Write index.html, tables/ and figures/ from all runs at or below some folders.

    Whatever is in the folders, as much is written as can be: a recipe, table or figure that fails is in `skipped`.
    """
    found = scan(roots[0], *roots[1:], epochs=False)
    if not found.results:
        where = ", ".join(str(root) for root in roots)
        reasons = "; ".join(f"{skipped.path}: {skipped.reason}" for skipped in found.skipped[:3])
        raise UsageError(f"{where}: no run that has learned a task" + (f" ({reasons})" if reasons else ""))
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
            from rkr.report.figures import write_report_figures  # matplotlib takes its time

            prefix = file_stem(recipe) + (f"-{own}-" if own else "-")
            drawn += write_report_figures(group.results, out / "figures", prefix, known.numbers, known.capacity, failed)
    return Report(page, tables, drawn, len(found.results), skipped)


def _own_names(groups: Sequence[Group]) -> list[str]:
    """What tells the files of groups apart whose recipes are called the same; empty for one that is called as none."""
    stems = [file_stem(group.results[0].recipe).casefold() for group in groups]
    names: list[str] = []
    for group, stem in zip(groups, stems, strict=True):
        name = "" if stems.count(stem) == 1 else group.protocol.hash
        while name and name in names:
            name += "_"
        names.append(name)
    return names


def _rendered(groups: Sequence[Group], skipped: list[Skipped], title: str) -> str:
    """The page, without the groups that cannot be shown; those are added to `skipped`."""
    try:
        return render(groups, skipped, title)
    except Exception as error:
        if len(groups) == 1:
            skipped.append(Skipped(groups[0].results[0].folder, f"cannot be shown: {_reason(error)}"))
            return render([], skipped, title)
    shown = []
    for group in groups:
        try:
            render([group])
            shown.append(group)
        except Exception as error:
            skipped.append(Skipped(group.results[0].folder, f"{group.name} cannot be shown: {_reason(error)}"))
    return render(shown, skipped, title)


def _reason(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) and text else f"{type(error).__name__}: {text}"[:300]


def render(groups: Sequence[Group], skipped: Sequence[Skipped] = (), title: str = TITLE) -> str:
    """The page as text: the same results give the same page."""
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
    """JSON that ends no script element, whatever texts are in it."""
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
        "charts": _charts(group),
        "proofs": proofs(group),
        "table": runs_table(group),
        "shared": shared,
        "details": described,
    }


def _meta(group: Group) -> str:
    """The protocol in one line, as far as the settings tell it."""
    fields = group.protocol.fields
    schedule = {name.removeprefix("schedule."): v for name, v in fields.items() if name.startswith("schedule.")}
    parts = [_number(len(group.results[0].tasks), "task")]
    if fields.get("network.name"):
        parts.append(str(fields["network.name"]))
    if "epochs" in schedule:
        parts.append(f"{schedule['epochs']} epochs a task")
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
        return "No run is finished yet, so there is no mean."
    parts = [f"Mean {measure} over all tasks after the last one, in %, the task given"]
    parts.append(
        "± is the 95 % interval over runs by Student's t" if several else "one run of a method has no interval"
    )
    if set(group.published.numbers) & {run.method for run in group.results if run.finished}:
        parts.append("“paper” is what the paper prints for this recipe")
    return "; ".join(parts) + ". Headers sort; all columns are explained at the end of the page."


def _charts(group: Group) -> list[Chart]:
    """The charts that the runs allow."""
    runs = group.results
    zero_shot = runs[0].measure == "H"
    finished = [run for run in runs if run.finished]
    measure = "H" if zero_shot else "Accuracy"
    charts = [
        Chart(
            "over",
            f"{measure} over tasks",
            "Mean over the tasks so far, after each task. Bands are 95 % intervals, from three runs on; thin lines "
            "with hollow marks are runs that are not finished.",
        )
    ]
    if finished:
        hollow = " Hollow points are the paper's." if group.published.capacity else ""
        text = f"Up and to the left is better. Error bars are 95 % intervals over runs.{hollow}"
        charts.append(Chart("tradeoff", f"{measure} against capacity", text))
    if zero_shot and finished:
        text = "After the last task: mean accuracy of unseen and of seen classes, and their harmonic mean."
        charts.append(Chart("zero", "Unseen and seen classes", text, wide=True))
    if finished:
        text = (
            "Each task right after learning it and at the end; means over runs. The difference is what was forgotten."
        )
        charts.append(Chart("during", "During and after", text, wide=True))
    text = "A row after each task, a column for each task. A column that keeps its colour is a task that is kept."
    charts.append(Chart("matrix", f"{measure} matrix", text))
    if any(run.done > 1 for run in finished):
        text = "The best that earlier tasks had minus what they have at the end, their mean; bars are 95 % intervals."
        charts.append(Chart("forgetting", "Forgetting", text))
    text = "The network and all tasks so far: parameters by the paper's count, and all bytes that must be kept."
    several = len({run.order for run in finished}) > 1
    charts.append(Chart("cost", "Cost per task", text, wide=not several))
    if several:
        text = (
            "A mark for each run; the closer they are, the less the order matters. The table has the average and the "
            "maximum disparity of a group of classes (AOPD, MOPD) where all orders have the same groups."
        )
        charts.append(Chart("orders", "Order robustness", text))
    return charts


GLOSSARY = [
    ("accuracy", "Mean of A[T, j] over j, the task given."),
    ("H, U, S", "Of zero-shot tasks: mean accuracy of unseen (U) and of seen classes (S), and their harmonic mean H."),
    ("accuracy over tasks", "Mean of A[i, j] over j ≤ i, for each i."),
    ("during, after", "A[j, j] and A[T, j]."),
    ("forgets", "Mean over j < T of the maximum over i < T of A[i, j], minus A[T, j]."),
    ("BWT", "Backward transfer: mean over j < T of A[T, j] − A[j, j]."),
    (
        "FWT",
        "Forward transfer: mean over j > 1 of A[j, j] minus the accuracy of a network that learned task j alone "
        "(separate or original, same order).",
    ),
    ("AOPD, MOPD", "Mean and maximum over class groups of the difference between the best and the worst order."),
    *(
        (name, f"{COLUMNS[name].explanation}.")
        for name in ("inferred", "incremental", "top-5", "capacity", "bytes", "s/epoch", "identical")
    ),
]

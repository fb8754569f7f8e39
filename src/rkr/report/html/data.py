"""The content of the report page: the text of its tables, and one JSON document for its charts.

All statistics are computed here; the scripts of the page only draw. Accuracies are in percent, differences in points.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from rkr.experiment import metrics
from rkr.experiment.metrics import Spread
from rkr.experiment.results import Result, is_number
from rkr.report.groups import by_method, by_recipe, by_studied_order
from rkr.report.html.paper import Published, published
from rkr.report.looks import look_of
from rkr.report.protocol import Protocol, differences, group_by_protocol, protocol
from rkr.report.search import marked
from rkr.report.searches import Search, searches
from rkr.report.summary import (
    COLUMNS,
    NOTHING,
    Cell,
    Summary,
    progress,
    spreads,
    summarise,
    summary_cells,
    zero_shot_cells,
)

HASH = 10  # displayed characters of a hash
LONG = 200  # longer settings are cut

Json = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Comparable runs: one recipe and one protocol. A changed schedule counts as another recipe."""

    name: str
    results: list[Result]
    published: Published
    protocol: Protocol


@dataclass(frozen=True)
class Table:
    """A table of the page. Each row belongs to a method."""

    columns: Sequence[tuple[str, str]]  # name and explanation
    rows: list[tuple[str, list[Cell]]] = field(default_factory=list)
    dim: set[int] = field(default_factory=set)  # rows that are not part of any mean

    def numeric(self, column: int) -> bool:
        """Whether a column contains numbers and is right-aligned."""
        return any(isinstance(cells[column].value, (int, float)) for _, cells in self.rows)


# ---------------------------------------------------------------------------------------------------------
# Groups


def grouped(results: Sequence[Result]) -> list[Group]:
    """Group runs by recipe and protocol. Groups with the unchanged recipe come first."""
    groups: list[Group] = []
    for recipe, runs in by_recipe(results).items():
        found = []
        for shared, all_orders in group_by_protocol(runs):
            for order, same in by_studied_order(all_orders).items():
                known = published({**same[0].settings, "order": same[0].order})
                changed = _changed(same[0]) if known.changed else ""
                found.append(Group(" · ".join(filter(None, (recipe, changed, order))), same, known, shared))
        groups += sorted(found, key=lambda group: bool(group.published.changed))
    return [_unique(group, groups) for group in groups]


def _changed(run: Result) -> str:
    """A short description of a changed schedule, without what the name of the recipe already says."""
    epochs, limit = (
        _mapping(run.settings.get("training")).get("epochs"),
        _mapping(run.settings.get("stream")).get("limit"),
    )
    said = [f"{epochs} epochs"] if epochs is not None else []
    said += [f"limit {limit}"] if limit is not None else []
    named = f" {re.sub(r'[^0-9a-z]+', ' ', run.recipe.lower())} "
    return ", ".join(words for words in said if f" {words} " not in named) if said else "changed"


def _unique(group: Group, groups: Sequence[Group]) -> Group:
    """Make the name of a group unique by adding how its protocol differs, or its hash."""
    others = [other for other in groups if other is not group and other.name == group.name]
    if not others:
        return group
    fields = differences(group.protocol, others[0].protocol)
    said = "; ".join(f"{name} {_text(own)}" for name, (own, _) in fields.items())
    if len(others) > 1 or len(said) > 60:
        said = f"protocol {group.protocol.hash}"
    return replace(group, name=f"{group.name} · {said}")


# ---------------------------------------------------------------------------------------------------------
# The data of the charts


def document(groups: Sequence[Group]) -> Json:
    """The data of all charts."""
    return {"recipes": [_recipe(group) for group in groups]}


def _recipe(group: Group) -> Json:
    runs = group.results
    summaries = {s.method: s for s in summarise(runs, group.published.numbers)}
    methods = by_method(runs)
    tasks = runs[0].tasks if all(run.tasks == runs[0].tasks for run in runs) else None
    zero = zero_shot_cells(runs) if runs[0].measure == "H" else {}
    return {
        "name": group.name,
        "measure": runs[0].measure,
        "n": len(runs[0].tasks),
        "tasks": None if tasks is None else list(tasks),
        "methods": [_method(name, own, summaries.get(name), zero.get(name)) for name, own in methods.items()],
        "runs": [_run(run) for run in runs],
        "paper": [
            {
                "method": method,
                "look": _look(method),
                "value": value,
                "half": half,
                "capacity": group.published.capacity.get(method),
            }
            for method, (value, half) in group.published.numbers.items()
        ],
        "paperZero": group.published.zero_shot,
        "searches": [_search(search) for search in searches(runs)],
    }


def _search(search: Search) -> Json:
    return {
        "name": search.name,
        "look": _look(search.name),
        "trials": [
            {"number": t.number, "value": t.value, "last": t.last, "options": t.words}
            for t in search.trials
            if t.value is not None or t.last is not None
        ],
        "importance": dict(search.importance),
    }


def _method(name: str, runs: Sequence[Result], summary: Summary | None, zero: Mapping[str, Spread] | None) -> Json:
    finished = [run for run in runs if run.finished]
    begun = finished or sorted(runs, key=lambda run: -run.done)[:1]
    described: Json = {
        "name": name,
        "label": marked(name, finished),
        "look": _look(name),
        "finished": len(finished),
        "banded": len(finished) >= metrics.FOR_A_BAND,
        "running": _columns([metrics.running_mean(run.matrix) for run in finished]),
        "during": _columns([metrics.during(run.matrix) for run in finished]),
        "after": _columns([metrics.after(run.matrix) for run in finished]),
        "matrix": [_columns(rows) for rows in zip(*(run.matrix for run in finished), strict=True)],
        "cost": [
            [round(fmean(c.percent for c in costs), 6), round(fmean(c.bytes for c in costs))]
            for costs in zip(*(run.costs for run in begun), strict=True)
        ],
        "zero": {key: _spread(value) for key, value in (zero or {}).items()},
        "summary": None,
    }
    if summary is not None:
        described["summary"] = {
            "accuracy": _spread(summary.accuracy),
            **{key: _spread(value) for key, value in summary.metrics.items()},
            "capacity": round(summary.capacity, 6),
            "toLearn": None if summary.capacity_to_learn is None else round(summary.capacity_to_learn, 6),
            "aopd": None if summary.robustness is None else _percent(summary.robustness.mean),
            "mopd": None if summary.robustness is None else _percent(summary.robustness.worst),
            "byRun": [[run, _percent(a)] for run, a in zip(summary.runs, summary.by_run, strict=True)],
        }
    return described


def _run(run: Result) -> Json:
    return {
        "method": run.method,
        "label": run.label,
        "finished": run.finished,
        "done": run.done,
        "tasks": list(run.tasks[: run.done]),
        "matrix": [[_percent(a) for a in row] for row in run.matrix],
        "guaranteed": _guarantees(run),
        "pairs": list(metrics.unchanged_pairs(run)),
        "proof": _proof(run),
    }


def _proof(run: Result) -> list[list[Any]]:
    """For each task, its hash when it was learned, then for each later task 1 if unchanged, or else the new hash."""
    lists: list[list[Any]] = []
    for j, task in enumerate(run.tasks[: run.done]):
        then = run.proofs[j].get(task)
        later = [proof.get(task) for proof in run.proofs[j + 1 :]]
        same = [1 if hash_ == then else hash_ and hash_[:HASH] for hash_ in later] if then is not None else []
        lists.append([then and then[:HASH], *same])
    return lists


def _guarantees(run: Result) -> bool:
    """Whether the method guarantees that outputs of earlier tasks stay unchanged, and records whether they did."""
    return any(unchanged is not None for unchanged in run.unchanged)


def _look(method: str) -> list[str]:
    look = look_of(method)
    return [look.colour, look.marker, " ".join(f"{1.8 * length:g}" for length in look.dashes)]


def _columns(rows: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Mean and half-width at each position."""
    return [_spread(found)[:2] for found in spreads(rows)]


def _spread(value: Spread | None) -> list[Any]:
    """Mean, half-width, standard deviation and n."""
    if value is None:
        return [None, None, None, 0]
    half = None if value.half_width is None else _percent(value.half_width)
    return [_percent(value.mean), half, None if value.std is None else _percent(value.std), value.n]


def _percent(fraction: float) -> float:
    return round(100 * fraction, 6)


# ---------------------------------------------------------------------------------------------------------
# Tables


HEADLINE = tuple(name for name in COLUMNS if name not in ("AOPD", "MOPD"))  # shown with their chart


def headline(group: Group) -> Table:
    """One row per method over its finished runs, then the unfinished runs. Empty columns are left out."""
    runs, measure = group.results, group.results[0].measure
    summaries = summarise(runs, group.published.numbers)
    cells = summary_cells(summaries, HEADLINE) or {"runs": [], measure: []}
    table = Table([("method", ""), *((name, COLUMNS[name].explanation) for name in cells)])
    for i, s in enumerate(summaries):
        table.rows.append((s.method, [Cell(s.name, s.method), *(column[i] for column in cells.values())]))
    for run in runs:
        if not run.finished:
            table.dim.add(len(table.rows))
            told = {measure: Cell(progress(run))}
            label = f"{run.method} {run.label}, unfinished"
            table.rows.append((run.method, [Cell(label, label), *(told.get(name, Cell(NOTHING)) for name in cells)]))
    return table


def proofs(group: Group) -> Table:
    """For each method, the number of (task, later task) pairs with bit-identical outputs."""
    table = Table(
        [
            ("method", ""),
            ("runs", "number of runs, including unfinished ones"),
            ("identical pairs", COLUMNS["identical"].explanation),
            ("verdict", ""),
        ]
    )
    for method, runs in by_method(group.results).items():
        found = [metrics.unchanged_pairs(run) for run in runs]
        same, of = (sum(column) for column in zip(*found, strict=True))
        if not of:
            continue
        if any(_guarantees(run) for run in runs):
            said = "✓ no forgetting" if same == of else "✗ guaranteed, but outputs changed"
        else:
            said = "not guaranteed by the method"
        cells = [Cell(method, method), Cell(str(len(runs)), len(runs)), Cell(f"{same}/{of}", same / of), Cell(said)]
        table.rows.append((method, cells))
    table.rows.sort(key=lambda row: not any(_guarantees(run) for run in group.results if run.method == row[0]))
    return table


RUNS = ("method", "order", "seed", "state", "result", "time", "commit", "protocol", "folder")


def runs_table(group: Group) -> Table:
    """All runs with their progress, result, code version and location."""
    measure = group.results[0].measure
    table = Table([("method", ""), *((measure if name == "result" else name, "") for name in RUNS[1:])])
    for run in group.results:
        about = run.record
        seconds = sum(t.train_seconds + t.test_seconds for t in run.times)
        mean = 100 * metrics.average(run.matrix) if run.finished else None
        if not run.finished:
            table.dim.add(len(table.rows))
        cells = [
            Cell(run.method, run.method),
            Cell(run.order, float(run.order) if is_number(run.order) else run.order),
            Cell(str(run.seed), run.seed),
            Cell(_state(run)),
            Cell(NOTHING) if mean is None else Cell(f"{mean:.2f}", mean),
            Cell(_duration(seconds), seconds) if run.times else Cell(NOTHING),
            Cell(str(about.get("commit") or NOTHING)),
            Cell(protocol(run).hash),
            Cell(str(run.folder)),
        ]
        table.rows.append((run.method, cells))
    return table


# ---------------------------------------------------------------------------------------------------------
# Settings: those that all runs share, and those of each run


@dataclass(frozen=True)
class Details:
    """The description of one run."""

    method: str
    title: str
    finished: bool
    facts: list[tuple[str, str]]
    settings: Json  # those that the runs do not share


def details(group: Group) -> tuple[Json, list[Details]]:
    """The settings that all runs share, and the description of each run."""
    flat = [dict(_flat(run.settings)) for run in group.results]
    shared = {
        path: text for path, text in flat[0].items() if all(other.get(path) == text for other in flat) and path[0]
    }
    described = []
    for run, settings in zip(group.results, flat, strict=True):
        own = {path: text for path, text in settings.items() if path not in shared}
        title = f"{run.method}, order {run.label}" + ("" if run.finished else f" – unfinished, {progress(run)}")
        described.append(Details(run.method, title, run.finished, _facts(run), _tree(own)))
    return _tree(shared), described


def _state(run: Result) -> str:
    """Whether a run is finished, and the run that it was copied from, if any."""
    if not run.finished:
        return f"unfinished, {progress(run)}"
    source = run.record.get("same_as")
    return f"finished; copied from {source}" if isinstance(source, str) else "finished"


def _facts(run: Result) -> list[tuple[str, str]]:
    about = run.record
    machine, versions, network = (_mapping(about.get(key)) for key in ("machine", "versions", "network"))
    train, test = sum(t.train_seconds for t in run.times), sum(t.test_seconds for t in run.times)
    facts = [
        ("folder", str(run.folder)),
        ("state", _state(run) + ("" if run.finished else "; not part of any mean")),
        ("seed", str(run.seed)),
        ("order", run.order),
        ("tasks", ", ".join(run.tasks)),
        ("commit", str(about.get("commit") or "unknown")),
        ("machine", ", ".join(f"{key} {value}" for key, value in machine.items()) or "unknown"),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions.items()) or "unknown"),
        ("network", f"{network['parameters']:,} parameters" if type(network.get("parameters")) is int else "unknown"),
        ("time", f"{_duration(train)} training, {_duration(test)} testing" if run.times else "unknown"),
        ("protocol", protocol(run).hash),
        ("data", str(_mapping(about.get("stream")).get("sha256") or "unknown")),
    ]
    return [(name, text if len(text) <= 2 * LONG else text[: 2 * LONG] + "…") for name, text in facts]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _flat(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], str]]:
    for key, value in settings.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path)
        else:
            yield path, _text(value)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        text = {None: "none", True: "yes", False: "no"}[value]
    elif isinstance(value, (list, tuple)):
        text = ", ".join(_text(item) for item in value) or "none"
    elif isinstance(value, Mapping):
        text = "none" if not value else json.dumps(value)
    else:
        text = str(value)
    return text if len(text) <= LONG else text[:LONG] + "…"


def _tree(flat: Mapping[tuple[str, ...], str]) -> Json:
    tree: Json = {}
    for path, text in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = text
    return tree


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

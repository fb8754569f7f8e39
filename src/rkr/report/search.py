"""Marks of runs whose method searched less than its authors did."""

from __future__ import annotations

from collections.abc import Iterable

from rkr import registry
from rkr.experiment.results import Result

MARK = "†"


def less_search(run: Result) -> str:
    """How much less was searched, such as "trials 2 of 50"; "" if it was no less."""
    known = registry.methods("zero-shot" if run.measure == "H" else "images")
    learner = str(run.settings.get("learner", run.method))
    if learner not in known.declared():
        return ""
    options = run.options
    less = [
        f"{name} {options[name]} of {published}"
        for name, published in known[learner].search.items()
        if type(options.get(name)) is int and options[name] < published
    ]
    return ", ".join(less)


def marked(method: str, runs: Iterable[Result]) -> str:
    """The name of a method, with a mark if one of its runs searched less than published."""
    return f"{method} {MARK}" if any(map(less_search, runs)) else method


def search_note(runs: Iterable[Result]) -> str:
    """What the marks mean; "" if there are none."""
    said = dict.fromkeys(f"{run.method} {less}" for run in runs if (less := less_search(run)))
    return f"{MARK} less search than published: {'; '.join(said)}" if said else ""

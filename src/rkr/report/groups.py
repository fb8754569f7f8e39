"""Group runs by recipe, protocol, method and options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rkr.errors import UsageError
from rkr.experiment.fields import UNPRINTABLE
from rkr.experiment.results import Result
from rkr.report.protocol import ANOTHER_FIRST, canonical, group_by_protocol, require_one_protocol


def by_recipe(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group runs by recipe."""
    recipes: dict[str, list[Result]] = {}
    for result in results:
        recipes.setdefault(result.recipe, []).append(result)
    return recipes


def comparable(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Group runs by recipe and protocol: one table or figure shows one group.

    A group is named after its recipe, followed by the protocol hash if the recipe has several protocols, and by the
    order if the experiment compares orders.
    """
    groups: dict[str, list[Result]] = {}
    for recipe, runs in by_recipe(results).items():
        found = group_by_protocol(runs)
        for protocol, same in found:
            name = recipe if len(found) == 1 else f"{recipe} ({protocol.hash})"
            groups |= {f"{name} {order}".rstrip(): part for order, part in by_studied_order(same).items()}
    return groups


def by_studied_order(runs: Sequence[Result]) -> dict[str, list[Result]]:
    """Group runs by order if the experiment compares which dataset comes first; otherwise one group named "".

    Random orders and the published orders of image tasks are repetitions and are averaged.
    """
    if not any(run.order.startswith(ANOTHER_FIRST) for run in runs):
        return {"": list(runs)}
    return {order: [run for run in runs if run.order == order] for order in dict.fromkeys(run.order for run in runs)}


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group runs by method, after checking that they share recipe, protocol and task count, without duplicates."""
    if not results:
        raise UsageError("no results")
    recipes = sorted({result.recipe for result in results})
    if len(recipes) > 1:
        raise UsageError(f"runs of different recipes cannot be compared: {', '.join(recipes)}")
    if len({len(result.tasks) for result in results}) > 1:
        raise UsageError(f"runs of {recipes[0]} have different numbers of tasks")
    require_one_protocol(results)
    methods: dict[str, list[Result]] = {}
    for result in results:
        runs = methods.setdefault(result.method, [])
        if any((run.order, run.seed) == (result.order, result.seed) for run in runs):
            raise UsageError(f"{result.folder}: duplicate run of {result.method} {result.label}")
        if runs:
            _require_same_options(runs[0], result)
        runs.append(result)
    return methods


def _require_same_options(a: Result, b: Result) -> None:
    """Refuse to average runs with different options. An option that only one run has was added in a later version."""
    old, new = a.options, b.options
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise UsageError(
                f"{a.method} has {name}={old[name]!r} in {a.folder} and {name}={new[name]!r} in {b.folder}: "
                "runs with different options cannot be averaged; rename one of the methods"
            )


def named_apart(results: Sequence[Result]) -> list[Result]:
    """Rename runs of one method with different options: "rkr (rank=2)" and "rkr (rank=8)".

    Names contain only options whose values differ between runs of one recipe and protocol. Runs without such an option
    keep the plain name.
    """
    renamed: dict[int, Result] = {}
    for runs in by_recipe(results).values():
        for _, same in group_by_protocol(runs):
            methods: dict[str, list[Result]] = {}
            for run in same:
                methods.setdefault(run.method, []).append(run)
            for own in methods.values():
                for run, name in zip(own, _names(own), strict=True):
                    renamed[id(run)] = run if name == run.method else replace(run, method=name)
    return [renamed[id(run)] for run in results]


def _names(runs: Sequence[Result]) -> list[str]:
    """The names of runs of one method, by their options."""
    of_runs = [flat_options(run.options) for run in runs]
    values: dict[str, set[str]] = {}
    for options in of_runs:
        for option, value in options.items():
            values.setdefault(option, set()).add(value)
    differing = [option for option in values if len(values[option]) > 1]
    names = []
    for run, options in zip(runs, of_runs, strict=True):
        said = ", ".join(f"{option}={options[option]}" for option in differing if option in options)
        if len(said) > 60 or UNPRINTABLE.search(said):
            said = f"options {hashlib.sha256(said.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
        names.append(f"{run.method} ({said})" if said else run.method)
    return names


def flat_options(options: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Flatten nested options to paths such as "inner.rank". Values are JSON, except for strings."""
    flat: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_options(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value if isinstance(value, str) else canonical(value)
    return flat

"""Which runs are shown together, and which may be compared at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rkr.errors import UsageError
from rkr.experiment.results import UNPRINTABLE, Result
from rkr.report.protocol import ANOTHER_FIRST, canonical, group_by_protocol, require_one_protocol


def by_recipe(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The runs of each recipe."""
    recipes: dict[str, list[Result]] = {}
    for result in results:
        recipes.setdefault(result.recipe, []).append(result)
    return recipes


def comparable(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The runs in groups that may be compared, one recipe and protocol each: what a table or figure shows together.

    A group is called like its recipe. If that has runs of several protocols, the hash of each is in the name, and the
    order if it is what is studied.
    """
    groups: dict[str, list[Result]] = {}
    for recipe, runs in by_recipe(results).items():
        found = group_by_protocol(runs)
        for protocol, same in found:
            name = recipe if len(found) == 1 else f"{recipe} ({protocol.hash})"
            groups |= {f"{name} {order}".rstrip(): part for order, part in by_studied_order(same).items()}
    return groups


def by_studied_order(runs: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs by their order, if some have another data set first; else all together, under "".

    What comes first is then the experiment, and a mean over it would say nothing. Orders by a seed, or the published
    ones of images, are repetitions.
    """
    if not any(run.order.startswith(ANOTHER_FIRST) for run in runs):
        return {"": list(runs)}
    return {order: [run for run in runs if run.order == order] for order in dict.fromkeys(run.order for run in runs)}


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs of each method, checked to be comparable: one recipe and protocol, as many tasks, no run twice."""
    if not results:
        raise UsageError("there are no results")
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
            raise UsageError(f"{result.folder}: {result.method} {result.label} is there twice")
        if runs:
            _require_same_options(runs[0], result)
        runs.append(result)
    return methods


def _require_same_options(a: Result, b: Result) -> None:
    """A method's name does not tell its options. One that only one run knows came with a later version."""
    old, new = a.options, b.options
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            raise UsageError(
                f"{a.method} has {name} {old[name]!r} in {a.folder}, but {new[name]!r} in {b.folder}: "
                "runs with different options are not averaged; give one of them another name"
            )


def named_apart(results: Sequence[Result]) -> list[Result]:
    """The runs, those of one method with different options renamed: "rkr (rank=2)" and "rkr (rank=8)".

    Only options that runs of one recipe and protocol have with different values are in the names; a run which was made
    before there was such an option has the plain one.
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
    """What the runs of a method are called, by their options."""
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
    """Options within options by their path, such as "inner.rank", the values as JSON; texts as they are."""
    flat: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_options(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value if isinstance(value, str) else canonical(value)
    return flat

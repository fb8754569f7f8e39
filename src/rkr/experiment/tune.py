"""Choosing hyper-parameters on validation samples, never on the test.

Every value of a grid is a method of its own in a recipe that is tested on what is held out of training, on the first
tasks only. These are ordinary runs, so they resume, run several at once, and can be looked at like all others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkr.atomic import write_atomic
from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment import metrics
from rkr.experiment.execution import Diverged
from rkr.experiment.folder import RunFolder
from rkr.experiment.plan import Plan, choose_orders
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.recipes.settings import MethodSettings, ResourceSettings
from rkr.experiment.recipes.write import recipe_text, toml_text
from rkr.experiment.results import read_result
from rkr.experiment.runner import Execution, run_plan
from rkr.methods.ranges import Linear, Log

if TYPE_CHECKING:
    from rkr.experiment.events import Watch

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Tuning:
    """What is searched, and where its files lie."""

    recipe: Recipe
    method: str
    points: Mapping[str, Mapping[str, Any]]  # name of the method -> its options from the grid
    asked: Sequence[str]  # those to run; others are of earlier searches in the same folder, and are ranked with them
    given: Mapping[str, Any]  # the method's section so far
    folder: Path
    grid: Grid = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The recipe that is run."""
        return self.folder / f"{self.folder.name}.toml"

    def chosen(self, plan: Plan) -> Path:
        """Where the best values are written: a file for each schedule, limit and order."""
        return self.file_of(plan, "chosen", "toml")

    def file_of(self, plan: Plan, what: str, suffix: str) -> Path:
        """A file for each schedule, limit and order."""
        order, epochs, limit = plan.orders[0], plan.epochs, plan.limit
        words = [what, *([] if epochs is None else [f"{epochs}-epochs"])]
        words += [*([] if limit is None else [f"limit-{limit}"]), str(order)]
        return self.folder / f"{'-'.join(words)}.{suffix}"


def tuning(recipe: Recipe, method: str, tasks: int, out: Path, grid: Grid | None = None, points: bool = True) -> Tuning:
    """Make the recipe of a search: the grid of the method on validation samples of the first tasks.

    Without `points` they are added later, by `with_point`.
    """
    chosen = recipe.method(method)
    grid = dict(grid or chosen.method.learner.grid)
    if not grid:
        known = ", ".join(sorted(chosen.method.options)) or "none"
        raise UsageError(
            f"{method} has no grid of its own: name one with --grid OPTION=VALUE,...; its options: {known}"
        )
    for name in grid:
        if name not in chosen.method.options:
            known = ", ".join(sorted(chosen.method.options)) or "none"
            raise UsageError(f"--grid: {method} has no option {name!r}; its options: {known}")
    if not 1 <= tasks <= recipe.stream.tasks:
        raise UsageError(f"--tasks: give 1 to {recipe.stream.tasks}, the tasks of {recipe.name}, not {tasks}")
    held_out = recipe.on_validation()
    name = f"{recipe.name}-tune-{method}-{tasks}-tasks"
    tried = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if points else []
    asked = {point_label(method, point): point for point in tried}
    methods = {label: _with_options(chosen, point) for label, point in asked.items()}
    stream = held_out.stream.with_changes(first=tasks)
    title = f"{method} on validation samples: {recipe.title}"
    made = held_out.model_copy(update={"name": name, "title": title, "stream": stream, "methods": methods})
    earlier = {key: own for key, own in _tried_before(made, out / name).items() if key not in methods}
    for label, own in earlier.items():
        options = own.options
        asked[label] = {k: v for k, v in options.items() if k in grid or v != chosen.options.get(k)}
    made = made.model_copy(update={"methods": {**methods, **earlier}})
    given = {**({} if chosen.learner == method else {"learner": chosen.learner}), **chosen.options}
    given |= {"training": chosen.training} if chosen.training else {}
    return Tuning(made, method, asked, tuple(methods), given, out / name, grid)


def with_point(search: Tuning, point: Mapping[str, Any]) -> tuple[Tuning, str]:
    """A search that tries other options too, and the name of the method that has them."""
    label = point_label(search.method, point)
    base = MethodSettings.checked({"setting": search.recipe.setting, **_base(search)})
    methods = {**search.recipe.methods, label: _with_options(base, point)}
    recipe = search.recipe.model_copy(update={"methods": methods})
    asked = tuple(dict.fromkeys((*search.asked, label)))
    points = {**search.points, label: dict(point)}
    return dataclasses.replace(search, recipe=recipe, points=points, asked=asked), label


def _base(search: Tuning) -> dict[str, Any]:
    given = dict(search.given)
    learner, training = given.pop("learner", search.method), given.pop("training", {})
    return {"learner": learner, "options": given, "training": training}


def _with_options(chosen: MethodSettings, point: Mapping[str, Any]) -> MethodSettings:
    return MethodSettings.checked({**dict(chosen), "options": {**chosen.options, **point}})


def point_label(method: str, point: Mapping[str, Any]) -> str:
    """The name of a method with options of a search."""
    return "-".join([method, *(f"{option}-{_short(value)}" for option, value in point.items())])


def _tried_before(recipe: Recipe, folder: Path) -> Mapping[str, MethodSettings]:
    """The methods of an earlier search in this folder, if all but its grid was the same."""
    file = folder / f"{folder.name}.toml"
    try:
        earlier = load_recipe(str(file)) if file.exists() else None
    except RkrError:  # of another version, or damaged: it is written anew
        return {}
    alone: dict[str, Any] = {"methods": {}, "paper": (), "resources": ResourceSettings()}
    if earlier is None or earlier.model_copy(update=alone) != recipe.model_copy(update=alone):
        return {}
    return earlier.methods


def search_plan(
    search: Tuning, order: str | None, epochs: int | None, data: str | None, limit: int | None = None
) -> Plan:
    """Write the recipe, so that other processes can read it, and plan its runs."""
    search.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(search.file, recipe_text(search.recipe).encode())
    loaded = load_recipe(str(search.file))
    orders = choose_orders(loaded, 1 if order is None else None, () if order is None else (order,))
    methods = tuple(search.asked)
    return Plan(loaded, str(search.file), methods, orders, search.folder, epochs=epochs, limit=limit, data=data)


def run_search(plan: Plan, execution: Execution, watch: Watch) -> tuple[Plan, list[str]] | None:
    """Run it. A value with which training diverges is none to choose, and no reason to stop: it is left out.

    What is left of the plan, and the methods that diverged; None if it was interrupted.
    """
    diverged: list[str] = []
    while plan.methods:
        try:
            return (plan, diverged) if run_plan(plan, execution, watch) else None
        except Diverged:  # which has not kept the others from being completed
            diverged += [spec.method for spec in plan.specs if not RunFolder(plan.folder(spec)).finished]
            kept = tuple(method for method in plan.methods if method not in diverged)
            plan = dataclasses.replace(plan, methods=kept)
    raise RkrError(f"training diverged with every value: {', '.join(diverged)}")


def outcome(search: Tuning, plan: Plan) -> dict[str, float]:
    """The mean accuracy (or H) over tasks at the end of each run, in percent; the best first.

    Runs of earlier searches with the same schedule, limit and order are among them.
    """
    every = dataclasses.replace(plan, methods=tuple(search.points))
    folders = {spec.method: every.folder(spec) for spec in every.specs}
    found = {
        name: 100 * metrics.average(read_result(folder).matrix)
        for name, folder in folders.items()
        if RunFolder(folder).finished
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def write_chosen(
    search: Tuning, plan: Plan, found: Mapping[str, float], diverged: Sequence[str] = (), pruned: Sequence[str] = ()
) -> str:
    """Write the best values as the section of a recipe, with all that was tried, and return them in words."""
    best, equal = next(iter(found)), as_good(found)
    training = plan.recipe.training if plan.epochs is None else plan.recipe.training.scaled_to(plan.epochs)
    few = "" if plan.limit is None else f", at most {plan.limit} training samples of a class"
    header = [
        f"# Chosen on validation samples of the first {plan.recipe.stream.first} tasks, order {plan.orders[0]}, "
        f"{training.epochs} epochs a task{few}:",
        "# mean over tasks after the last one, in %.",
        *(f"# {name}: {value:.2f}" for name, value in found.items()),
        *(f"# {name}: training diverged" for name in diverged),
        *(f"# {name}: stopped early, as it was worse than others" for name in pruned),
        *(["# as good as the first: " + ", ".join(equal)] if equal else []),
        *(
            f"# {option}: the best value is at the edge of what was tried"
            for option in at_an_edge(search, found, diverged)
        ),
    ]
    section = toml_text({"methods": {search.method: {**search.given, **search.points[best]}}})
    path = search.chosen(plan)
    try:
        write_atomic(path, "\n".join([*header, "", section]).encode())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    return ", ".join(f"{option} = {value}" for option, value in search.points[best].items())


def as_good(found: Mapping[str, float]) -> list[str]:
    """Others with the very result of the first, which is chosen because it comes first."""
    best = next(iter(found))
    return [name for name, value in found.items() if value == found[best] and name != best]


def at_an_edge(search: Tuning, found: Mapping[str, float], diverged: Sequence[str] = ()) -> list[str]:
    """Options of which only the lowest, or only the highest, of several values that were tried is the best."""
    best, edges = [next(iter(found)), *as_good(found)], []
    for option in search.points[best[0]]:
        values = {search.points[name][option] for name in (*found, *diverged) if option in search.points[name]}
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        chosen = {search.points[name].get(option) for name in best}
        if numbers and len(values) > 1 and chosen in ({min(values)}, {max(values)}):
            edges.append(option)
    return edges


def outcome_json(
    search: Tuning, found: Mapping[str, float], diverged: Sequence[str], pruned: Sequence[str] = ()
) -> dict[str, Any]:
    """The outcome of a search as an event."""
    best = search.points[next(iter(found))]
    more = {"pruned": pruned} if pruned else {}
    return {"event": "tuned", "method": search.method, "chosen": best, "tried": found, "diverged": diverged, **more}


def outcome_lines(
    search: Tuning,
    plan: Plan,
    found: Mapping[str, float],
    diverged: Sequence[str],
    chosen: str,
    pruned: Sequence[str] = (),
) -> Iterator[str]:
    """The outcome of a search as text; `chosen` comes from `write_chosen`."""
    yield from (f"{name}: {value:.2f} %" for name, value in found.items())
    yield from (f"{name}: training diverged" for name in diverged)
    yield from (f"{name}: stopped early" for name in pruned)
    yield f"chosen: {chosen} (recipe section written to {search.chosen(plan)})"
    if equal := as_good(found):
        yield f"equally good: {', '.join(equal)}. The first value tried was chosen."
    if not any(found.values()):
        yield "All results are 0, so nothing can be chosen. Train for more epochs or on more samples."
    for option in at_an_edge(search, found, diverged):
        yield f"{option}: the best value is at the edge of the grid. Try values beyond it with --grid."


def parsed_ranges(words: Sequence[str]) -> Grid:
    """From "strength=0.1:100:log" and the like."""
    found: dict[str, Sequence[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        parts = [part.strip() for part in values.split(":")]
        ends = [_number(part) for part in parts[:2]]
        kind = Log if parts[2:] == ["log"] else Linear
        numbers = len(ends) == 2 and all(isinstance(e, int | float) and not isinstance(e, bool) for e in ends)
        if not (equals and name and numbers and parts[2:] in ([], ["log"])):
            raise UsageError(
                f"--range: give an option, its lowest and its highest value, such as l1=1e-4:1e-2:log, not {word!r}"
            )
        low, high = ends
        if not low < high or (kind is Log and low <= 0):  # type: ignore[operator]
            raise UsageError(f"--range: {name}: from {low} to {high} is no range" + (" for log" if kind is Log else ""))
        found[name.strip()] = kind((low, high))
    return found


def parsed_grid(words: Sequence[str]) -> Grid | None:
    """From "strength=0.1,1,10" and the like; numbers, true, false and none where they are some."""
    found: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--grid: give an option and its values, such as strength=0.1,1,10, not {word!r}")
        found.setdefault(name.strip(), []).extend(
            _number(value.strip()) for value in values.split(",") if value.strip()
        )
    return found or None


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("+", "")


_WORDS = {"true": True, "false": False, "none": None}


def _number(text: str) -> int | float | str | None:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text

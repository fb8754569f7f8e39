"""Choosing hyper-parameters on validation samples, never on the test.

Every value of a grid is a method of its own in a recipe that is tested on what is held out of training, on the first
tasks only. These are ordinary runs, so they resume, run several at once, and can be looked at like all others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkr.atomic import write_atomic
from rkr.engine.folder import RunFolder
from rkr.engine.loop import Diverged
from rkr.errors import FileError, RkrError, UsageError
from rkr.experiments import How, Plan, choose_orders, run_plan
from rkr.recipes import Recipe, load_recipe
from rkr.recipes.settings import MethodSettings
from rkr.recipes.write import recipe_text, toml_text
from rkr.report import metrics, read_result

if TYPE_CHECKING:
    from rkr.engine.events import Watch

Grid = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Tuning:
    """What is searched, and where its files lie."""

    recipe: Recipe
    method: str
    grid: Grid
    points: Mapping[str, Mapping[str, Any]]  # name of the method -> its options from the grid
    given: Mapping[str, Any]  # the method's section so far
    folder: Path

    @property
    def file(self) -> Path:
        """The recipe that is run."""
        return self.folder / f"{self.folder.name}.toml"

    def chosen(self, plan: Plan) -> Path:
        """Where the best values are written: a file for each schedule and order."""
        order, epochs = plan.orders[0], plan.epochs
        words = ["chosen", *([] if epochs is None else [f"{epochs}-epochs"]), str(order)]
        return self.folder / f"{'-'.join(words)}.toml"


def tuning(recipe: Recipe, method: str, tasks: int, out: Path, grid: Grid | None = None) -> Tuning:
    """Make the recipe of a search: the grid of the method on validation samples of the first tasks."""
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
    held_out = recipe.on_validation()
    name = f"{recipe.name}-tune-{method}-{tasks}-tasks"
    points: dict[str, dict[str, Any]] = {}
    methods: dict[str, MethodSettings] = {}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        label = "-".join([method, *(f"{option}-{_short(value)}" for option, value in point.items())])
        points[label] = point
        methods[label] = MethodSettings.checked(
            {"learner": chosen.learner, "options": {**chosen.options, **point}, "zero_shot": recipe.zero_shot}
        )
    stream = held_out.stream.with_changes(first=tasks)
    title = f"{method} on validation samples: {recipe.title}"
    made = held_out.model_copy(update={"name": name, "title": title, "stream": stream, "methods": methods})
    learner = {} if chosen.learner == method else {"learner": chosen.learner}
    return Tuning(made, method, grid, points, {**learner, **chosen.options}, out / name)


def search_plan(search: Tuning, order: str | None, epochs: int | None, data: str | None) -> Plan:
    """Write the recipe, so that other processes can read it, and plan its runs."""
    search.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(search.file, recipe_text(search.recipe).encode())
    loaded = load_recipe(str(search.file))
    orders = choose_orders(loaded, None, () if order is None else (order,))
    methods = tuple(search.points)
    return Plan(loaded, str(search.file), methods, orders, search.folder, epochs=epochs, data=data)


def run_search(plan: Plan, how: How, watch: Watch) -> tuple[Plan, list[str]] | None:
    """Run it. A value with which training diverges is none to choose, and no reason to stop: it is left out.

    What is left of the plan, and the methods that diverged; None if it was interrupted.
    """
    diverged: list[str] = []
    while plan.methods:
        try:
            return (plan, diverged) if run_plan(plan, how, watch) else None
        except Diverged:  # which has not kept the others from being completed
            diverged += [job.method for job in plan.jobs if not RunFolder(plan.folder(job)).finished]
            kept = tuple(method for method in plan.methods if method not in diverged)
            plan = dataclasses.replace(plan, methods=kept)
    raise RkrError(f"training diverged with every value: {', '.join(diverged)}")


def outcome(search: Tuning, plan: Plan) -> dict[str, float]:
    """The mean accuracy (or H) over tasks at the end of each run, in percent; the best first."""
    found = {job.method: 100 * metrics.average(read_result(plan.folder(job)).matrix) for job in plan.jobs}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def write_chosen(search: Tuning, plan: Plan, found: Mapping[str, float], diverged: Sequence[str] = ()) -> str:
    """Write the best values as the section of a recipe, with all that was tried, and return them in words."""
    best = next(iter(found))
    training = plan.recipe.training if plan.epochs is None else plan.recipe.training.scaled_to(plan.epochs)
    header = [
        f"# Chosen on validation samples of the first {plan.recipe.stream.first} tasks, order {plan.orders[0]}, "
        f"{training.epochs} epochs a task:",
        "# mean over tasks after the last one, in %.",
        *(f"# {name}: {value:.2f}" for name, value in found.items()),
        *(f"# {name}: training diverged" for name in diverged),
        *(f"# {option}: the best value is at the edge of what was tried" for option in at_an_edge(search, best)),
    ]
    section = toml_text({"methods": {search.method: {**search.given, **search.points[best]}}})
    path = search.chosen(plan)
    try:
        write_atomic(path, "\n".join([*header, "", section]).encode())
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    return ", ".join(f"{option} = {value}" for option, value in search.points[best].items())


def at_an_edge(search: Tuning, best: str) -> list[str]:
    """Options whose best value is the lowest or the highest of several that were tried."""
    point = search.points[best]
    numbers = {name: values for name, values in search.grid.items() if all(isinstance(v, int | float) for v in values)}
    return [name for name, v in numbers.items() if len(v) > 1 and point[name] in (min(v), max(v))]


def parsed_grid(words: Sequence[str]) -> Grid | None:
    """From "strength=0.1,1,10" and the like; numbers where they are some."""
    found: dict[str, list[Any]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name or not values:
            raise UsageError(f"--grid: give an option and its values, such as strength=0.1,1,10, not {word!r}")
        found[name.strip()] = [_number(value.strip()) for value in values.split(",") if value.strip()]
    return found or None


def _short(value: Any) -> str:
    return f"{value:g}".replace("+", "") if isinstance(value, float) else str(value)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text

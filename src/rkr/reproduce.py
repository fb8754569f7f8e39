"""Every table and figure of the paper by name: what it takes, what is done, and the paper's numbers beside ours.

An exhibit is a file in `paper/`: which recipes it is made of, how many runs the paper has, and what is odd about it.
The printed numbers themselves stand in the recipes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from rkr.core.model import RectifiedModel
from rkr.errors import FileError, UsageError
from rkr.experiments import Plan, choose_orders
from rkr.recipes import Recipe, load_recipe
from rkr.recipes.load import parsed
from rkr.recipes.messages import choose, in_words
from rkr.recipes.settings import List, PaperNumber, Positive, Settings
from rkr.report import Result, find_results, metrics
from rkr.report.metrics import Spread, spread
from rkr.report.protocol import require_one_protocol
from rkr.report.statistics import verdict

if TYPE_CHECKING:
    from rkr.tasks.download import Data

FOLDER = Path(__file__).parent / "paper"
COUNTED = ("capacity", "parameters per task", "multiply-adds")  # known without training


class Quick(Settings):
    """How much shorter `--quick` is."""

    epochs: Positive
    limit: Positive  # training samples of a class


class Exhibit(Settings):
    """A table or figure of the paper, as its file holds it."""

    name: str  # of the file
    title: str
    where: str
    recipes: Annotated[tuple[str, ...], List, Field(min_length=1)]
    figure: bool = False
    train: bool = True
    runs: Positive  # of every method, in the paper
    minutes: int  # about, for the longest run of the paper's schedule on one core
    quick: Quick
    notes: Annotated[tuple[str, ...], List] = ()

    def plans(self, out: Path, data: str | None = None, runs: int | None = None, quick: bool = False) -> list[Plan]:
        """What is to be run: all methods of the recipes, in the first orders or with as many seeds."""
        if not self.train:
            return []
        made = []
        for name in self.recipes:
            recipe = load_recipe(name)
            wanted = runs or (1 if quick else self.runs)
            listed = len(recipe.orders)
            # A zero-shot recipe has one order and is repeated with other seeds; its table of orders has all of them.
            orders = choose_orders(recipe, listed if recipe.zero_shot else min(wanted, listed), ())
            seeds = tuple(range(wanted)) if recipe.zero_shot else ()
            changes = self.quick if quick else None
            made.append(
                Plan(
                    recipe,
                    name,
                    tuple(recipe.methods),
                    orders,
                    out,
                    epochs=changes.epochs if changes else None,
                    seeds=seeds,
                    limit=changes.limit if changes else None,
                    data=data,
                )
            )
        return made


def exhibit_names() -> list[str]:
    """All of them, in the paper's order as far as file names tell."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_exhibit(name: str) -> Exhibit:
    """One by its name."""
    if name not in exhibit_names():
        raise UsageError(f"the paper has no {name!r}{choose(name, exhibit_names())}")
    path = FOLDER / f"{name}.toml"
    with in_words(Exhibit, path.name):
        return Exhibit.model_validate({"name": name, **parsed(path, path.name)})


# ---------------------------------------------------------------------------------------------------------
# What is there


@dataclass(frozen=True)
class State:
    """How far an exhibit is."""

    done: int  # runs
    of: int
    data: str  # "here", "downloads itself", or what is missing


def state_of(exhibit: Exhibit, out: Path, data: Data = None) -> State:
    """Look at run folders and data, without loading either."""
    from rkr.tasks import missing_data

    plans = exhibit.plans(out)
    done = sum(_finished(plan.folder(job)) for plan in plans for job in plan.jobs)
    lacks = [missing_data(plan.recipe.stream.needs, data) for plan in plans]
    return State(done, sum(len(plan.jobs) for plan in plans), next((lack for lack in lacks if lack), "here"))


def _finished(folder: Path) -> bool:
    """By the last bytes alone: results can be long."""
    try:
        with open(folder / "results.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 100))
            return b'{"event": "end"' in file.read()
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------
# The paper beside ours


@dataclass(frozen=True)
class Line:
    """One printed number, and what came out. All in percent."""

    recipe: str
    method: str
    metric: str
    task: str  # where the number is of one task; "" else
    order: str  # where it is of one order; "" else
    paper: float
    half_width: float | None  # of the paper's 95 % interval
    ours: Spread | None
    verdict: str

    @property
    def difference(self) -> float | None:
        return None if self.ours is None else self.ours.mean - self.paper

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of a table: recipe, method, number, paper, ours, difference, n, verdict."""
        number = " ".join(filter(None, [self.metric, self.task, self.order]))
        digits = 2 if self.paper >= 1 or self.paper == 0 else 5
        paper = f"{self.paper:.{digits}f}" + ("" if self.half_width is None else f" ± {self.half_width:.2f}")
        if self.ours is None or self.difference is None:
            return (self.recipe, self.method, number, paper, "–", "–", "–", self.verdict)
        ours = f"{self.ours.mean:.{digits}f}"
        ours += "" if self.ours.half_width is None else f" ± {self.ours.half_width:.2f}"
        n = "counted" if self.metric in COUNTED else str(self.ours.n)
        return (self.recipe, self.method, number, paper, ours, f"{self.difference:+.{digits}f}", n, self.verdict)

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return {**asdict(self), "difference": self.difference}


def lines(exhibit: Exhibit, out: Path, quick: bool = False) -> list[Line]:
    """All printed numbers of an exhibit with the runs that are complete."""
    found: list[Line] = []
    plans = {plan.recipe.name: plan for plan in exhibit.plans(out, quick=quick)}
    for name in exhibit.recipes:
        recipe = load_recipe(name)
        runs = _runs(plans[name].root) if name in plans else []
        for number in recipe.paper:
            if exhibit.train or number.metric == "capacity":
                found += _compared(recipe, number, runs, quick)
    return found


def _runs(root: Path) -> list[Result]:
    try:
        return [result for result in find_results(root) if result.finished]
    except FileError:
        return []


def _compared(recipe: Recipe, number: PaperNumber, runs: Sequence[Result], quick: bool) -> Iterator[Line]:
    printed = recipe.published(number.method, number.metric, number.order)
    if printed is None:
        return
    own = [run for run in runs if run.method == number.method and number.order in (None, run.order)]
    if number.order is None and len(recipe.orders) > 1 and recipe.zero_shot:
        own = [run for run in own if run.order == str(recipe.orders[0])]
    values = printed if isinstance(printed, tuple) else (printed,)
    for i, value in enumerate(values):
        ours = _ours(recipe, number, own, i)
        half_width = number.spread if number.over is None else None
        why = "other schedule" if quick and number.metric not in COUNTED else ""
        if ours is None:
            said = "not run"
        elif number.metric in COUNTED and round(ours.mean, _decimals(value)) == value:
            said = "the same to the printed digit"
        else:
            said = verdict(ours, value, half_width, comparable=not why, why=why)
        task = own[0].tasks[i] if own and len(values) > 1 else str(i + 1) if len(values) > 1 else ""
        yield Line(recipe.name, number.method, number.metric, task, number.order or "", value, half_width, ours, said)


def _decimals(value: float) -> int:
    """How many of a printed number there are; 113.0 has none."""
    mantissa, _, exponent = repr(value).removesuffix(".0").partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def _ours(recipe: Recipe, number: PaperNumber, runs: Sequence[Result], i: int) -> Spread | None:
    """What we have for a printed number; `i` is the task where it is of one."""
    if number.metric in COUNTED:
        counted = _counted(recipe.name, number.method)
        return None if counted is None or number.metric not in counted else spread([counted[number.metric]])
    if not runs:
        return None
    require_one_protocol(runs)
    return spread([100 * _measured(run, number.metric, i) for run in runs])


def _measured(run: Result, metric: str, i: int) -> float:
    if metric == "average accuracy":
        return metrics.average(run.matrix)
    if metric == "top-5 running mean":
        return fmean(run.measures["top5"][i])
    return run.measures[metric][-1][i]  # U, S, H of a data set at the end


@cache
def _counted(name: str, method: str) -> Mapping[str, float] | None:
    """Capacity, parameters, multiply-adds: a learner makes room for all tasks, and is counted; None if there is none.

    Parameters and multiply-adds are what tasks add to the network, so they are known of methods that rectify.
    """
    import warnings

    import torch

    from rkr.learners.learner import SeenTask

    recipe = load_recipe(name)
    try:
        chosen = recipe.method(method)
    except UsageError:
        return None
    tasks, zero_shot = recipe.stream.tasks, recipe.zero_shot
    has_classifier = "classifier" in chosen.method.options
    options = {**chosen.options, "classifier": {"epochs": 1}} if has_classifier else chosen.options
    attributes, unseen = (torch.zeros(2, 2), (1,)) if zero_shot else (None, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the base was not trained: it is only counted
        learner = chosen.method.build(recipe.build_network, recipe.network.head, **options)
        for number in range(tasks):
            learner.begin(SeenTask(number, f"task {number}", ("a", "b"), 2 * number, attributes, unseen))
    capacity = learner.capacity().percent
    counted = {"capacity": capacity}
    if isinstance(model := getattr(learner, "model", None), RectifiedModel):
        counted["parameters per task"] = (capacity - 100) / tasks
        macs = model.cost(recipe.takes).multiply_adds
        counted["multiply-adds"] = 0.0 if macs is None else macs.paper_percent
    return counted

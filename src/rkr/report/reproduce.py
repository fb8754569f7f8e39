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
from rkr.errors import UsageError
from rkr.experiment import metrics
from rkr.experiment.metrics import Spread, spread
from rkr.experiment.plan import Plan, choose_orders
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.recipes.load import parsed
from rkr.experiment.recipes.messages import choose, in_words
from rkr.experiment.recipes.settings import List, PaperNumber, Positive, Settings
from rkr.experiment.results import Result
from rkr.report.protocol import classifier_of, require_one_protocol
from rkr.report.scan import scan
from rkr.report.statistics import verdict

if TYPE_CHECKING:
    from rkr.data.download import Data

FOLDER = Path(__file__).parent / "paper"
COUNTED = ("capacity", "parameters per task", "multiply-adds")  # known without training


class Quick(Settings):
    """How much shorter `--quick` is."""

    epochs: Positive
    limit: Positive  # training samples of a class
    minutes: int  # about, for the longest run on one core


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

    done: int  # runs, those on validation classes among them
    of: int
    data: str  # "here", "downloads itself", or what is missing


def state_of(exhibit: Exhibit, out: Path, data: Data = None, quick: bool = False) -> State:
    """Look at run folders and data, without loading either."""
    from rkr.data import missing_data
    from rkr.experiment.folder import RunFolder

    plans = [each for plan in exhibit.plans(out, quick=quick) for each in (plan.before, plan) if each is not None]
    done = sum(RunFolder(plan.folder(spec)).finished for plan in plans for spec in plan.specs)
    lacks = [missing_data(plan.recipe.stream.needs, data) for plan in plans]
    return State(done, sum(len(plan.specs) for plan in plans), next((lack for lack in lacks if lack), "here"))


# ---------------------------------------------------------------------------------------------------------
# The paper beside ours


@dataclass(frozen=True)
class Line:
    """One number: what the paper prints, and what came out. All in percent."""

    recipe: str
    method: str
    metric: str
    task: str  # where the number is of one task; "" else
    order: str  # where it is of one order; "" else
    paper: float | None  # None where the paper has a figure without numbers
    half_width: float | None  # of the paper's 95 % interval
    ours: Spread | None
    verdict: str

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of a table: recipe, method, number, paper, ours, difference, n, verdict."""
        number = " ".join(filter(None, [self.metric, self.task, self.order]))
        n = "–" if self.ours is None else "counted" if self.metric in COUNTED else str(self.ours.n)
        ours = None if self.ours is None else self.ours.mean
        ours_half = None if self.ours is None else self.ours.half_width
        difference = self._shown(self.difference, sign="+")
        paper, own = self._shown(self.paper, self.half_width), self._shown(ours, ours_half)
        return (self.recipe, self.method, number, paper, own, difference, n, self.verdict)

    def _shown(self, value: float | None, half_width: float | None = None, sign: str = "") -> str:
        """A number, with as many decimals as its kind needs."""
        if value is None:
            return "–"
        digits = 5 if self.metric == "multiply-adds" else 4 if self.metric == "parameters per task" else 2
        text = f"{value:{sign}.{digits}f}"
        if float(text) == 0:
            text = text.replace("-", "").replace("+", "")
        return text if half_width is None else f"{text} ± {half_width:.{digits}f}"

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return {**asdict(self), "difference": self.difference}


@dataclass(frozen=True)
class Shown:
    """An exhibit with what there is."""

    lines: tuple[Line, ...]
    left_out: tuple[str, ...]  # run folders that cannot be read, with the reason


def shown(exhibit: Exhibit, out: Path, quick: bool = False) -> Shown:
    """All printed numbers of an exhibit, and those that the paper draws without printing them, with complete runs."""
    found: list[Line] = []
    left_out: list[str] = []
    plans = {plan.recipe.name: plan for plan in exhibit.plans(out, quick=quick)}
    for name in exhibit.recipes:
        recipe, plan = load_recipe(name), plans.get(name)
        runs: list[Result] = []
        if plan is not None and plan.root.is_dir():
            seen = scan(plan.root)
            runs = seen.results
            left_out += [f"{skipped.path}: {skipped.reason}" for skipped in seen.skipped]
        beside = _Beside(recipe, plan, runs)
        printed = [number for number in recipe.paper if exhibit.train or number.metric == "capacity"]
        for number in printed:
            found += beside.lines(number)
        if exhibit.train:
            main = "H" if recipe.zero_shot else "average accuracy"
            known = {number.method for number in printed if number.metric in (main, "top-5 running mean")}
            found += [beside.drawn(method) for method in recipe.methods if method not in known]
    return Shown(tuple(found), tuple(left_out))


class _Beside:
    """The runs of a recipe, beside the numbers that the paper prints for it."""

    def __init__(self, recipe: Recipe, plan: Plan | None, runs: Sequence[Result]) -> None:
        self.recipe, self.plan, self.runs = recipe, plan, runs

    def lines(self, number: PaperNumber) -> Iterator[Line]:
        """The lines of a printed number, one for each task where it is of tasks."""
        recipe = self.recipe
        printed = recipe.published(number.method, number.metric, number.order)
        if printed is None:
            return
        own = [run for run in self.runs if run.method == number.method and number.order in (None, run.order)]
        if number.order is None and len(recipe.orders) > 1 and recipe.zero_shot:
            own = [run for run in own if run.order == str(recipe.orders[0])]
        values = printed if isinstance(printed, tuple) else (printed,)
        half_width = number.spread if number.over is None else None
        for i, value in enumerate(values):
            ours = self._ours(number, own, i)
            said = self._verdict(number, own, ours, value, half_width)
            task = own[0].tasks[i] if own and len(values) > 1 else str(i + 1) if len(values) > 1 else ""
            order = number.order or ""
            yield Line(recipe.name, number.method, number.metric, task, order, value, half_width, ours, said)

    def drawn(self, method: str) -> Line:
        """What the paper shows in a figure only: ours, without a number beside it."""
        own = [run for run in self.runs if run.method == method]
        number = PaperNumber(method=method, value=0.0, where="a figure")
        ours = self._ours(number, own, 0)
        said = self._state(own) if ours is None else "the paper prints no number"
        return Line(self.recipe.name, method, number.metric, "", "", None, None, ours, said)

    def _ours(self, number: PaperNumber, runs: Sequence[Result], i: int) -> Spread | None:
        """What we have for a printed number; `i` is the task where it is of one."""
        counted = _counted(self.recipe.name, number.method) if number.metric in COUNTED else None
        if counted is not None:
            return spread([counted[number.metric]]) if number.metric in counted else None
        finished = [run for run in runs if run.finished]
        if not finished or number.metric in COUNTED[1:]:
            return None
        if number.metric == "capacity":  # of a method whose training decides on it
            return spread([run.costs[-1].percent for run in finished])
        require_one_protocol(finished)
        return spread([100 * _measured(run, number.metric, i) for run in finished])

    def _verdict(
        self, number: PaperNumber, runs: Sequence[Result], ours: Spread | None, value: float, half_width: float | None
    ) -> str:
        if ours is None:
            return self._state(runs)
        if number.metric in COUNTED:
            same = round(ours.mean, _decimals(value)) == value
            return "the same to the printed digit" if same else verdict(ours, value)
        changed = next((fields for run in runs if run.finished and (fields := self._changed(run))), "")
        return verdict(ours, value, half_width, comparable=not changed, why=changed)

    def _state(self, runs: Sequence[Result]) -> str:
        """Why there is no number of ours."""
        begun = [f"{run.done} of {len(run.tasks)} tasks" for run in runs if not run.finished]
        if begun:
            return f"not finished: {', '.join(begun)}"
        return "not run"

    def _changed(self, run: Result) -> str:
        """What a run does otherwise than the recipe, and so the paper."""
        assert self.plan is not None
        if self.plan.epochs is not None or self.plan.limit is not None:
            return "other schedule"
        order = int(run.order) if run.order.isdecimal() else run.order
        wanted = self.recipe.resolved(run.method, order, seed=run.seed)
        parts = {part: (wanted[part], run.settings.get(part)) for part in ("stream", "network", "training")}
        parts["classifier"] = classifier_of(wanted), classifier_of(run.settings)
        found = []
        for part, (ours, there) in parts.items():
            if isinstance(there, dict):
                found += [f"{part}.{key}" for key, value in ours.items() if key in there and there[key] != value]
        return "other " + ", ".join(found) if found else ""


def _decimals(value: float) -> int:
    """How many of a printed number there are; 113.0 has none."""
    mantissa, _, exponent = repr(value).removesuffix(".0").partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def _measured(run: Result, metric: str, i: int) -> float:
    if metric == "average accuracy":
        return metrics.average(run.matrix)
    if metric == "top-5 running mean":
        return fmean(run.measures["top5"][i])
    return run.measures[metric][-1][i]  # U, S, H of a data set at the end


@cache
def _counted(name: str, method: str) -> Mapping[str, float] | None:
    """Capacity, parameters, multiply-adds: a learner makes room for all tasks, and is counted.

    None if only training decides on its size. Parameters and multiply-adds are what tasks
    add to the network, so they are known of methods that change its layers and freeze the rest.
    """
    from rkr.experiment.counting import begun

    recipe = load_recipe(name)
    chosen = recipe.method(method)
    if chosen.method.learner.learns_its_size:
        return None
    tasks, zero_shot = recipe.stream.tasks, recipe.zero_shot
    classes = 2
    if not zero_shot:  # as the network has: networks that grow count heads that become wider
        head = recipe.build_network().get_submodule(recipe.network.head)
        classes = max(1, len(head.get_parameter("weight")) // tasks)
    learner = begun(
        chosen.method,
        recipe.build_network,
        recipe.network.head,
        chosen.options,
        [classes] * tasks,
        zero_shot=zero_shot,
    )
    capacity = learner.capacity().percent
    counted = {"capacity": capacity}
    model = getattr(learner, "model", None)
    if isinstance(model, RectifiedModel) and not model.change.opens_base:
        counted["parameters per task"] = (capacity - 100) / tasks
        macs = model.cost(recipe.takes).multiply_adds
        counted["multiply-adds"] = 0.0 if macs is None else macs.paper_percent + macs.change_percent
    return counted

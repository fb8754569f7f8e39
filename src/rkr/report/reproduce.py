"""The tables and figures of the paper: what each needs, its progress, and our numbers next to the paper's.

Each table or figure is a file in `paper/` that lists its recipes, the number of runs in the paper and notes. The
paper's numbers are in the recipes.
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
from rkr.experiment.recipes.settings import List, PaperNumber, Positive
from rkr.experiment.results import Result
from rkr.report.protocol import classifier_of, require_one_protocol
from rkr.report.scan import scan
from rkr.report.statistics import verdict
from rkr.validation import Settings, choose, in_words

if TYPE_CHECKING:
    from rkr.data.download import Data

FOLDER = Path(__file__).parent / "paper"
COUNTED = ("capacity", "parameters per task", "multiply-adds")  # known without training


class Quick(Settings):
    """The schedule of `--quick`."""

    epochs: Positive
    limit: Positive  # training samples per class
    minutes: int  # approximate time of the longest run on one core


class Exhibit(Settings):
    """A table or figure of the paper, as read from its file."""

    name: str  # the file name without extension
    title: str
    where: str
    recipes: Annotated[tuple[str, ...], List, Field(min_length=1)]
    figure: bool = False
    train: bool = True
    runs: Positive  # per method in the paper
    minutes: int  # approximate time of the longest run with the paper's schedule on one core
    quick: Quick
    notes: Annotated[tuple[str, ...], List] = ()

    def plans(self, out: Path, data: str | None = None, runs: int | None = None, quick: bool = False) -> list[Plan]:
        """The plans of all recipes: every method in the first `runs` orders, or with `runs` seeds if zero-shot."""
        if not self.train:
            return []
        made = []
        for name in self.recipes:
            recipe = load_recipe(name)
            wanted = runs or (1 if quick else self.runs)
            listed = len(recipe.orders)
            # Zero-shot recipes run all their orders and are repeated with different seeds.
            orders = choose_orders(recipe, listed if recipe.zero_shot else min(wanted, listed), ())
            seeds = tuple(range(wanted)) if recipe.zero_shot else ()
            made.append(
                Plan(
                    recipe,
                    name,
                    tuple(recipe.methods),
                    orders,
                    out,
                    epochs=self.quick.epochs if quick else None,
                    seeds=seeds,
                    limit=self.quick.limit if quick else None,
                    data=data,
                )
            )
        return made


def exhibit_names() -> list[str]:
    """The names of all tables and figures, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_exhibit(name: str) -> Exhibit:
    """Load a table or figure by name."""
    if name not in exhibit_names():
        raise UsageError(f"no table or figure named {name!r}{choose(name, exhibit_names())}")
    path = FOLDER / f"{name}.toml"
    with in_words(Exhibit, path.name):
        return Exhibit.model_validate({"name": name, **parsed(path, path.name)})


# ---------------------------------------------------------------------------------------------------------
# Progress


@dataclass(frozen=True)
class State:
    """The progress of a table or figure."""

    done: int  # finished runs, including those on validation classes
    of: int
    data: str  # "here", "downloads itself", or what is missing


def state_of(exhibit: Exhibit, out: Path, data: Data = None, quick: bool = False) -> State:
    """Check run folders and datasets without loading them."""
    from rkr.data import missing_data
    from rkr.experiment.folder import RunFolder

    plans = [each for plan in exhibit.plans(out, quick=quick) for each in (plan.before, plan) if each is not None]
    done = sum(RunFolder(plan.folder(spec)).finished for plan in plans for spec in plan.specs)
    lacks = [missing_data(plan.recipe.stream.needs, data) for plan in plans]
    return State(done, sum(len(plan.specs) for plan in plans), next((lack for lack in lacks if lack), "here"))


# ---------------------------------------------------------------------------------------------------------
# Comparison with the paper


@dataclass(frozen=True)
class Line:
    """One number of the paper next to ours, both in percent."""

    recipe: str
    method: str
    metric: str
    task: str  # "" if the number covers all tasks
    order: str  # "" if the number covers all orders
    paper: float | None  # None if the paper shows only a figure
    half_width: float | None  # of the paper's 95 % confidence interval
    ours: Spread | None
    verdict: str
    counted: bool = False  # without training

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper

    @property
    def cells(self) -> tuple[str, ...]:
        """A table row: recipe, method, number, paper, ours, difference, n, verdict."""
        number = " ".join(filter(None, [self.metric, self.task, self.order]))
        n = "–" if self.ours is None else "counted" if self.counted else str(self.ours.n)
        ours = None if self.ours is None else self.ours.mean
        ours_half = None if self.ours is None else self.ours.half_width
        difference = self._shown(self.difference, sign="+")
        paper, own = self._shown(self.paper, self.half_width), self._shown(ours, ours_half)
        return (self.recipe, self.method, number, paper, own, difference, n, self.verdict)

    def _shown(self, value: float | None, half_width: float | None = None, sign: str = "") -> str:
        """Format a number with the decimals that its metric needs."""
        if value is None:
            return "–"
        digits = 5 if self.metric == "multiply-adds" else 4 if self.metric == "parameters per task" else 2
        text = f"{value:{sign}.{digits}f}"
        if float(text) == 0:
            text = text.replace("-", "").replace("+", "")
        return text if half_width is None else f"{text} ± {half_width:.{digits}f}"

    def to_json(self) -> dict[str, object]:
        """The line as JSON."""
        return {**asdict(self), "difference": self.difference}


@dataclass(frozen=True)
class Shown:
    """A table or figure of the paper with our numbers."""

    lines: tuple[Line, ...]
    left_out: tuple[str, ...]  # skipped run folders with reasons


def shown(exhibit: Exhibit, out: Path, quick: bool = False) -> Shown:
    """All numbers of a table or figure: those that the paper prints, and ours for methods that it only plots."""
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
        found += lines_of(exhibit, recipe, plan, runs)
    return Shown(tuple(found), tuple(left_out))


def lines_of(exhibit: Exhibit, recipe: Recipe, plan: Plan | None, runs: Sequence[Result]) -> list[Line]:
    """The lines of one recipe of a table or figure. Runs with other settings are not comparable, and their lines say
    how they differ."""
    comparison = _Comparison(recipe, plan, runs)
    found: list[Line] = []
    printed = [number for number in recipe.paper if exhibit.train or number.metric == "capacity"]
    for number in printed:
        found += comparison.lines(number)
    if exhibit.train:
        main = "H" if recipe.zero_shot else "average accuracy"
        known = {number.method for number in printed if number.metric in (main, "top-5 running mean")}
        found += [comparison.drawn(method) for method in recipe.methods if method not in known]
    return found


class _Comparison:
    """Compares the runs of a recipe with the numbers of the paper."""

    def __init__(self, recipe: Recipe, plan: Plan | None, runs: Sequence[Result]) -> None:
        self.recipe, self.plan, self.runs = recipe, plan, runs

    def lines(self, number: PaperNumber) -> Iterator[Line]:
        """The lines of a number in the paper, one per task if it has several values."""
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
            shown = (recipe.name, number.method, number.metric, task, order, value, half_width, ours, said)
            yield Line(*shown, counted=self._counts(number))

    def drawn(self, method: str) -> Line:
        """The line of a method that the paper only plots."""
        own = [run for run in self.runs if run.method == method]
        number = PaperNumber(method=method, value=0.0, where="a figure")
        ours = self._ours(number, own, 0)
        said = self._state(own) if ours is None else "no number in the paper"
        return Line(self.recipe.name, method, number.metric, "", "", None, None, ours, said)

    def _counts(self, number: PaperNumber) -> bool:
        """Whether a number is known without training."""
        return number.metric in COUNTED and _counted(self.recipe.name, number.method) is not None

    def _ours(self, number: PaperNumber, runs: Sequence[Result], i: int) -> Spread | None:
        """Our value for a number in the paper; `i` is the index of its task, if any."""
        counted = _counted(self.recipe.name, number.method) if number.metric in COUNTED else None
        if counted is not None:
            return spread([counted[number.metric]]) if number.metric in counted else None
        finished = [run for run in runs if run.finished]
        if not finished or number.metric in COUNTED[1:]:
            return None
        if number.metric == "capacity":  # methods whose size depends on training
            return spread([run.costs[-1].percent for run in finished])
        require_one_protocol(finished)
        return spread([100 * _measured(run, number.metric, i) for run in finished])

    def _verdict(
        self, number: PaperNumber, runs: Sequence[Result], ours: Spread | None, value: float, half_width: float | None
    ) -> str:
        if ours is None:
            return self._state(runs)
        changed = next((fields for run in runs if run.finished and (fields := self._changed(run))), "")
        if number.metric in COUNTED and (self._counts(number) or not changed):
            same = round(ours.mean, _decimals(value)) == value
            return "same to the printed digit" if same else verdict(ours, value)
        return verdict(ours, value, half_width, comparable=not changed, why=changed)

    def _state(self, runs: Sequence[Result]) -> str:
        """Why we have no number."""
        begun = [f"{run.done} of {len(run.tasks)} tasks" for run in runs if not run.finished]
        if begun:
            return f"unfinished: {', '.join(begun)}"
        return "not run"

    def _changed(self, run: Result) -> str:
        """How the settings of a run differ from the recipe, and so from the paper."""
        if self.plan is None:
            return ""
        if self.plan.epochs is not None or self.plan.limit is not None:
            return "different schedule"
        order = int(run.order) if run.order.isdecimal() else run.order
        wanted = self.recipe.resolved(run.method, order, seed=run.seed)
        parts = {part: (wanted[part], run.settings.get(part)) for part in ("stream", "network", "training")}
        parts["classifier"] = classifier_of(wanted), classifier_of(run.settings)
        found = []
        for part, (ours, there) in parts.items():
            if isinstance(there, dict):  # older runs lack some settings, but all of the classifier are known
                shared = ours.keys() & there.keys()
                keys = [key for key in {**ours, **there} if part == "classifier" or key in shared]
                found += [f"{part}.{key}" for key in keys if ours.get(key) != there.get(key)]
        return f"different {', '.join(found)}" if found else ""


def _decimals(value: float) -> int:
    """The number of decimals of a printed number; 113.0 has none."""
    mantissa, _, exponent = repr(value).removesuffix(".0").partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)


def _measured(run: Result, metric: str, i: int) -> float:
    if metric == "average accuracy":
        return metrics.average(run.matrix)
    if metric == "top-5 running mean":
        return fmean(run.measures["top5"][i])
    return run.measures[metric][-1][i]  # U, S or H of a dataset after the last task


@cache
def _counted(name: str, method: str) -> Mapping[str, float] | None:
    """Capacity, parameters and multiply-adds, counted on a learner with all tasks added but not trained.

    None if the size depends on training. Parameters and multiply-adds per task are only defined for methods that adapt
    the layers of a frozen network.
    """
    from rkr.experiment.counting import begun

    recipe = load_recipe(name)
    chosen = recipe.method(method)
    if chosen.method.learner.learns_its_size:
        return None
    tasks, zero_shot = recipe.stream.tasks, recipe.zero_shot
    classes = 2
    if not zero_shot:  # as many as the head of the network: growing networks count wider heads
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
    if isinstance(model, RectifiedModel) and not model.update.opens_base:
        counted["parameters per task"] = (capacity - 100) / tasks
        macs = model.cost(recipe.takes).multiply_adds
        counted["multiply-adds"] = 0.0 if macs is None else macs.paper_percent + macs.change_percent
    return counted

"""Plans: the runs that a command asks for, and the folder of each."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkr.errors import UsageError
from rkr.experiment.recipes import Recipe
from rkr.experiment.recipes.settings import Order

if TYPE_CHECKING:
    from rkr.data import Stream
    from rkr.experiment.spec import RunSpec

__all__ = ["PRECISIONS", "Plan", "choose_orders", "choose_seeds"]

PRECISIONS = ("32-true", "bf16-mixed")  # not 16-mixed: Fabric scales its loss, and learners' steps do not unscale it


@dataclass(frozen=True)
class Plan:
    """The runs that a command asks for: a recipe, its methods, orders and seeds, and where results go.

    Attributes:
        recipe: The recipe as in its file, or its validation version.
        given: How the user named it, for worker processes.
        methods: Names of the methods.
        orders: Orders of the tasks.
        out: Directory of all results.
        epochs, limit: Changes to the recipe; None: no change.
        seeds: Seeds of initial values and batches. Default: the recipe's seed.
        data: Dataset directory; None: the default places.
        on_validation: Whether the user asked for the validation version of the recipe.
        accelerator: What computes: "auto", "cpu", "cuda" or "mps".
        precision: One of `PRECISIONS`; None: the first.
    """

    recipe: Recipe
    given: str
    methods: tuple[str, ...]
    orders: tuple[Order, ...]
    out: Path
    epochs: int | None = None
    seeds: tuple[int, ...] = ()
    limit: int | None = None
    data: str | None = None
    on_validation: bool = False
    accelerator: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, *PRECISIONS):
            raise UsageError(f"--precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")

    @property
    def root(self) -> Path:
        """Directory of all runs of the recipe; changed recipes have their own."""
        changes = [f"{self.epochs}-epochs"] if self.epochs is not None else []
        changes += [f"limit-{self.limit}"] if self.limit is not None else []
        return self.out / "-".join([self.recipe.name, *changes])

    @cached_property
    def specs(self) -> tuple[RunSpec, ...]:
        """The runs: all methods of an order and seed before the next."""
        seeds = self.seeds or (self.recipe.training.seed,)
        return tuple(
            self._spec(self._changed(seed), method, order)
            for seed in seeds
            for order in self.orders
            for method in self.methods
        )

    def folder(self, spec: RunSpec) -> Path:
        """Folder of a run."""
        return self.root / spec.method / spec.label.replace(" ", "-")

    def similar(self, spec: RunSpec) -> list[Path]:
        """Folders of other recipes' runs of the same method, order and seed: one of them may be the same run."""
        own = self.folder(spec)
        return [path for path in sorted(self.out.glob(f"*/{glob.escape(spec.method)}/{own.name}")) if path != own]

    @property
    def before(self) -> Plan | None:
        """The plan to run first, if any. Zero-shot classifiers train for as long as is best on validation classes.

        All methods follow this rule, each with a validation run of its own, once for all seeds. One number of epochs
        for all methods would be unfair: how fast classifiers learn depends on how far apart a method's latents are.
        """
        having = tuple(n for n in self.methods if "classifier" in self.recipe.method(n).method.learner.recipe_options)
        if not self.recipe.chooses_steps or not having:
            return None
        return dataclasses.replace(
            self, recipe=self.recipe.on_validation(), methods=having, seeds=(), on_validation=True
        )

    def _chosen_steps(self, before: Plan, spec: RunSpec) -> dict[str, int]:
        """How long each task's classifier is trained, from the validation run."""
        from rkr.experiment.results import read_result

        run = next(run for run in before.specs if (run.method, run.order) == (spec.method, spec.order))
        result = read_result(before.folder(run), epochs=False)
        return {name: notes["classifier_steps"] for name, notes in zip(result.tasks, result.notes, strict=True)}

    def stream(self, order: Order) -> Stream:
        """Load the tasks in an order, the same for all methods and seeds."""
        stream = self.recipe.changed(limit=self.limit).stream(order, self.data)
        if not self.recipe.zero_shot:
            self.recipe.check_shape(stream.input_shape)
            return stream
        takes: Any = getattr(self.recipe.network.blank, "input_shape", ())
        if takes != stream.input_shape:
            wanted, there = ("x".join(map(str, shape)) for shape in (takes, stream.input_shape))
            settable = "in_features" in self.recipe.network.all_arguments
            advice = f"set network.in_features = {there}" if settable else "choose other features, or another network"
            raise UsageError(f"{self.given}: the network takes {wanted} features, the data have {there}: {advice}")
        return stream

    def resolve(self, spec: RunSpec, device: str) -> RunSpec:
        """Add what is known only when a run starts: the device and the length of classifier training."""
        recipe, settings = self._changed(spec.seed), {"precision": self.precision or PRECISIONS[0], "device": device}
        if self.before is not None and spec.method in self.before.methods:
            recipe = recipe.with_classifier(steps=self._chosen_steps(self.before, spec))
            settings["classifier_steps"] = "validation"  # the source of the numbers
        parameters = sum(p.numel() for p in self.recipe.network.blank.parameters())
        network = {"parameters": parameters, "arguments": recipe.network.all_arguments}  # defaults included
        origins = {entry.kind: entry.origin for entry in recipe.entries(spec.method) if entry.origin}
        about = {"network": network, **({"plugins": origins} if origins else {})}
        return self._spec(recipe, spec.method, spec.order, settings, about)

    def _changed(self, seed: int) -> Recipe:
        return self.recipe.changed(self.epochs, seed, self.limit)

    def _spec(self, recipe: Recipe, method: str, order: Order, settings: Any = (), about: Any = ()) -> RunSpec:
        from rkr.experiment.spec import RunSpec

        learner = recipe.method(method).method
        return RunSpec(
            recipe=self.root.name,
            method=method,
            order=order,
            learner=learner,
            options=recipe.options(method),
            make=recipe.build_network,
            head=recipe.network.head,
            training=recipe.training_of(method),
            agnostic=learner.learner.agnostic,
            settings={**recipe.resolved(method, order), **dict(settings)},
            about=dict(about),
        )


_WHOLE = re.compile("-?[0-9]{1,18}")  # a seed has no more digits


def choose_orders(recipe: Recipe, count: int | None, named: Sequence[str]) -> tuple[Order, ...]:
    """The first `count` orders of the recipe, or those named. Default: the first.

    If the paper has numbers for single orders, they are the experiment, not repetitions of it: then the default is all.
    """
    if named and count is not None:
        raise UsageError("give either --orders (how many) or --order (which)")
    if named:
        orders = tuple(dict.fromkeys(int(name) if _WHOLE.fullmatch(name) else name for name in named))
        for order in orders:
            recipe.stream.check_order(order)
        return orders
    if count is None:
        return recipe.orders if any(number.order for number in recipe.paper) else recipe.orders[:1]
    if not 1 <= count <= len(recipe.orders):
        have = "1 order" if len(recipe.orders) == 1 else f"{len(recipe.orders)} orders"
        raise UsageError(f"{recipe.name} has {have}: give no more, or name others with --order 0,1,...")
    return recipe.orders[:count]


def choose_seeds(recipe: Recipe, count: int | None, named: Sequence[str]) -> tuple[int, ...]:
    """The first `count` seeds (0, 1, ...), or those named. Default: the recipe's seed."""
    if named and count is not None:
        raise UsageError("give either --seeds (how many) or --seed (which)")
    if count is not None and count < 1:
        raise UsageError(f"--seeds must be at least 1, not {count}")
    for name in named:
        if not _WHOLE.fullmatch(name) or int(name) < 0:
            raise UsageError(f"--seed: a seed is an integer of at least 0, not {name!r}")
    if named:
        return tuple(dict.fromkeys(map(int, named)))
    return (recipe.training.seed,) if count is None else tuple(range(count))

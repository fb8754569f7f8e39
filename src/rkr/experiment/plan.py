"""What is to be run: a recipe's methods, orders and seeds, and the folder of each run."""

from __future__ import annotations

import dataclasses
import glob
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rkr.errors import RkrError, UsageError
from rkr.experiment.machine import commit, processor
from rkr.experiment.recipes import Recipe
from rkr.experiment.recipes.settings import Order

if TYPE_CHECKING:
    from rkr.data import Stream
    from rkr.experiment.spec import Experiment

__all__ = ["Job", "Plan", "choose_orders", "choose_seeds"]


class Job(NamedTuple):
    """One run."""

    method: str
    order: Order
    seed: int

    @property
    def label(self) -> str:
        """What tells it from other runs of the method."""
        return f"{self.order} seed {self.seed}" if self.seed else str(self.order)

    @property
    def name(self) -> str:
        """What tells it from other runs of the plan."""
        return f"{self.method} {self.label}"


@dataclass(frozen=True)
class Plan:
    """What the user asked for: a recipe, changed or not, its methods, orders and seeds, and where results go.

    Attributes:
        recipe: The recipe as it stands in its file, or on its validation part.
        given: How the user named it, for other processes.
        methods: Which methods run.
        orders: In which orders of tasks.
        out: Where run folders go.
        epochs, limit: Changes to the recipe, None for none.
        seeds: Of initial values and batches; the recipe's own if there are none.
        data: Where data sets lie, None for the usual places.
        on_validation: Whether the user asked for the validation part of the recipe.
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

    @property
    def root(self) -> Path:
        """Folder of all runs of the recipe; changed ones have their own."""
        changes = [f"{self.epochs}-epochs"] if self.epochs is not None else []
        changes += [f"limit-{self.limit}"] if self.limit is not None else []
        return self.out / "-".join([self.recipe.name, *changes])

    @property
    def jobs(self) -> list[Job]:
        """The single runs, all methods of an order and seed before the next."""
        seeds = self.seeds or (self.recipe.training.seed,)
        return [Job(method, order, seed) for seed in seeds for order in self.orders for method in self.methods]

    def folder(self, job: Job) -> Path:
        """Where a run goes."""
        return self.root / job.method / job.label.replace(" ", "-")

    def twins(self, job: Job) -> Iterator[Path]:
        """Where other recipes' complete runs of the method lie, one of which may be the very same.

        What is damaged is none of them: it would spread.
        """
        own = self.folder(job)
        for path in sorted(self.out.glob(f"*/{glob.escape(job.method)}/{own.name}")):
            if path != own and _is_whole(path):
                yield path

    @property
    def before(self) -> Plan | None:
        """What must be run first: zero-shot classifiers are trained for as long as is best on validation classes.

        One rule serves all methods, each in a run of its own without these classes, once for all seeds. One number for
        all would not do: how fast classifiers learn depends on how far apart the latents of a method lie.
        """
        having = tuple(n for n in self.methods if "classifier" in self.recipe.method(n).method.learner.recipe_options)
        if not self.recipe.chooses_epochs or not having:
            return None
        return dataclasses.replace(
            self, recipe=self.recipe.on_validation(), methods=having, seeds=(), on_validation=True
        )

    def _chosen_epochs(self, method: str, order: Order) -> dict[str, int]:
        """The epochs of each task's classifier, from the run that was made for it."""
        from rkr.experiment.results import read_result

        assert self.before is not None
        job = next(job for job in self.before.jobs if (job.method, job.order) == (method, order))
        result = read_result(self.before.folder(job), epochs=False)
        return {name: notes["classifier_epochs"] for name, notes in zip(result.tasks, result.notes, strict=True)}

    def stream(self, order: Order) -> Stream:
        """Load the data: the tasks in an order, the same for all methods and seeds."""
        return self.recipe.changed(limit=self.limit).stream(order, self.data)

    def experiment(self, job: Job, stream: Stream, **settings: str) -> Experiment:
        """Build one run on the `stream` of its order; `settings` are to be recorded with those of the recipe."""
        import torch

        import rkr
        from rkr.data import Augment
        from rkr.experiment.spec import Experiment

        method, order, seed = job
        recipe = self.recipe.changed(self.epochs, seed, self.limit)
        chosen, training = recipe.method(method), recipe.training
        if self.before is not None and method in self.before.methods:
            recipe = recipe.with_classifier(epochs=self._chosen_epochs(method, order))
            settings["classifier_epochs"] = "validation"  # where the numbers are from
        if recipe.zero_shot and recipe.takes != stream.input_shape:  # networks for images were tried on theirs
            wanted, there = ("x".join(map(str, shape)) for shape in (recipe.takes, stream.input_shape))
            settable = "in_features" in recipe.network.all_arguments
            advice = f"set network.in_features = {there}" if settable else "choose other features, or another network"
            raise UsageError(f"{self.given}: the network takes {wanted} features, the data have {there}: {advice}")
        augment = Augment(**training.augment.model_dump()) if any(training.augment.model_dump().values()) else None
        about = {
            "recipe": self.root.name,
            "method": method,
            "order": str(order),
            "seed": training.seed,
            "stream": stream.describe(),
            "network": {
                "parameters": sum(p.numel() for p in recipe.build_network().parameters()),
                "arguments": recipe.network.all_arguments,  # settings have those that the recipe gives
            },
            "versions": {"rkr": rkr.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": {"processor": processor(), "threads": torch.get_num_threads()},
            "commit": commit(),
        }
        return Experiment(
            label=f"{self.root.name} {method} {job.label}",
            stream=stream,
            make=recipe.build_network,
            head=recipe.network.head,
            method=chosen.method,
            options=recipe.options(method),
            schedule=training,
            augment=augment,
            seed=training.seed,
            channels_last=training.memory_format == "channels_last",
            agnostic=chosen.method.learner.agnostic,
            settings={**recipe.resolved(method, order), **settings},
            about=about,
        )


_WHOLE = re.compile("-?[0-9]{1,18}")  # more digits are no seed


def choose_orders(recipe: Recipe, count: int | None, named: Sequence[str]) -> tuple[Order, ...]:
    """The first `count` orders of the recipe, or those named, or else the first one.

    If the paper prints numbers of single orders, they are no repetitions but the experiment: then all of them.
    """
    if named and count is not None:
        raise UsageError("give either --orders, how many, or --order, which")
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
    """The seeds 0, 1, ... up to `count`, or those named, or else the recipe's own."""
    if named and count is not None:
        raise UsageError("give either --seeds, how many, or --seed, which")
    if count is not None and count < 1:
        raise UsageError(f"--seeds must be at least 1, not {count}")
    for name in named:
        if not _WHOLE.fullmatch(name) or int(name) < 0:
            raise UsageError(f"--seed: a seed is a whole number of at least 0, not {name!r}")
    if named:
        return tuple(dict.fromkeys(map(int, named)))
    return (recipe.training.seed,) if count is None else tuple(range(count))


def _is_whole(run: Path) -> bool:
    """Whether a run is complete, and all of its results and what it has learned can be read."""
    import torch

    from rkr.experiment.learned import load_learner
    from rkr.experiment.results import read_result

    try:
        result = read_result(run)
        if not result.finished or result.done < len(result.tasks):
            return False
        with torch.random.fork_rng(devices=()):  # networks are built with random weights first
            load_learner(run)
    except RkrError:
        return False
    return True

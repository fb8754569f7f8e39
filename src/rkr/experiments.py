"""From a recipe to its runs: one folder for each method and order, one after the other or several at once."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rkr.errors import RkrError, UsageError
from rkr.machine import commit, processor
from rkr.recipes import Recipe
from rkr.recipes.settings import Order
from rkr.workers import MARK, STOPPED, Pool, Processes, Worker, was_stopped

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from rkr.engine import Experiment
    from rkr.engine.events import Watch
    from rkr.tasks import Stream

__all__ = ["PRECISIONS", "STOPPED", "How", "Job", "Plan", "choose_orders", "choose_seeds", "help_run", "run_plan"]


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

    def twins(self, job: Job) -> list[Path]:
        """Where other recipes' runs of the method lie, one of which may be the very same."""
        return sorted(self.out.glob(f"*/{glob.escape(job.method)}/{self.folder(job).name}"))

    @property
    def before(self) -> Plan | None:
        """What must be run first: zero-shot classifiers are trained for as long as is best on validation classes.

        One rule serves all methods, each in a run of its own without these classes, once for all seeds. One number for
        all would not do: how fast classifiers learn depends on how far apart the latents of a method lie.
        """
        having = tuple(n for n in self.methods if "classifier" in self.recipe.method(n).method.learner.as_in_recipe)
        if not self.recipe.chooses_epochs or not having:
            return None
        return dataclasses.replace(
            self, recipe=self.recipe.on_validation(), methods=having, seeds=(), on_validation=True
        )

    def _chosen_epochs(self, method: str, order: Order) -> dict[str, int]:
        """The epochs of each task's classifier, from the run that was made for it."""
        from rkr.report import read_result

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
        from rkr.engine import Experiment
        from rkr.tasks import Augment

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
            agnostic=chosen.method.learner.untold,
            settings={**recipe.resolved(method, order), **settings},
            about=about,
        )


PRECISIONS = ("32-true", "bf16-mixed")  # Fabric scales the loss of 16-mixed, which learners' steps know nothing of


@dataclass(frozen=True)
class How:
    """How runs are computed. Of these only precision and the kind of device change results, so they are recorded."""

    workers: int = 1
    threads: int | None = None
    accelerator: str = "auto"
    precision: str | None = None
    save_minutes: float = 5.0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers must be at least 1, not {self.workers}")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads must be at least 1, not {self.threads}")
        if self.precision not in (None, *PRECISIONS):
            raise UsageError(f"--precision must be one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if not self.save_minutes >= 0:
            raise UsageError(f"--save-minutes must be at least 0, not {self.save_minutes}")


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


def run_plan(plan: Plan, how: How, watch: Watch, more: bool = False) -> bool:
    """Do all runs of a plan. False if they were interrupted, and can go on; or if `more` was to come after them."""
    for method in plan.methods:
        plan.recipe.method(method)
    if how.workers > 1 and len(plan.jobs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--workers: the processes of torchrun share every run; give either torchrun or --workers")
    if MARK not in os.environ:  # else the process that started this one has done both
        _try_methods(plan)
        if plan.before is not None:
            return _after_validation(plan, plan.before, how, watch, more)
    return _all_runs(plan, how, watch, more)


def _after_validation(plan: Plan, before: Plan, how: How, watch: Watch, more: bool) -> bool:
    """Do the runs that a plan needs first, then its own; of a method that diverges in the first, none."""
    from rkr.engine.folder import RunFolder
    from rkr.engine.loop import Diverged

    diverged: Diverged | None = None
    lost: set[str] = set()
    try:
        if not _all_runs(before, how, watch, more=True):
            return False
    except Diverged as error:
        diverged = error
        lost = {job.method for job in before.jobs if not RunFolder(before.folder(job)).finished}
    rest = dataclasses.replace(plan, methods=tuple(name for name in plan.methods if name not in lost))
    if rest.methods and not _all_runs(rest, how, watch, more):
        return False
    if diverged is not None:
        raise Diverged(f"on validation classes, so that {', '.join(sorted(lost))} cannot be tested: {diverged}")
    return True


def _all_runs(plan: Plan, how: How, watch: Watch, more: bool) -> bool:
    """See `run_plan`."""
    if how.workers == 1 or len(plan.jobs) == 1:  # then other workers train candidates, if the method has some
        return _one_by_one(plan, how, watch, more)
    return _at_once(plan, how, watch)


def _try_methods(plan: Plan) -> None:
    """Build every method that has runs to do, so that what it refuses is refused before anything is trained.

    Zero-shot recipes were tried when they were read.
    """
    from rkr.engine.folder import RunFolder

    recipe = plan.recipe
    for name in () if recipe.zero_shot else plan.methods:
        chosen = recipe.method(name)
        if all(RunFolder(plan.folder(job)).finished for job in plan.jobs if job.method == name):
            continue
        try:
            chosen.method.build(recipe.build_network, recipe.network.head, **chosen.options)
        except UsageError as error:
            raise UsageError(f"methods.{name}: {error}") from error


def _one_by_one(plan: Plan, how: How, watch: Watch, more: bool = False) -> bool:
    import torch

    from rkr.display import Quiet, TensorBoard, both
    from rkr.engine import Run
    from rkr.engine.loop import Diverged
    from rkr.engine.processes import make_fabric

    if how.threads is not None:
        torch.set_num_threads(how.threads)
    fabric = make_fabric(how.accelerator, how.precision)
    failed: dict[Job, RkrError] = {}
    shares = _shares(plan, how.workers)
    streams: dict[Order, Stream] = {}
    for job in plan.jobs:
        if job.order not in streams:
            streams.clear()  # one at a time is in memory, for all methods that come in this order
            streams[job.order] = plan.stream(job.order)
        experiment = plan.experiment(job, streams[job.order], **_computed(how, fabric))
        curves = TensorBoard() if how.tensorboard and fabric.is_global_zero else Quiet()
        with curves, _crew(plan, how, job, shares[job]) as crew:
            told = both(watch, curves)
            twins = plan.twins(job)
            run = Run(experiment, plan.folder(job), fabric, told, how.save_minutes, how.threads, crew, twins)
            try:
                done = run.execute()
            except RkrError as error:
                if len(plan.jobs) == 1:
                    raise
                failed[job] = error
                if not isinstance(error, Diverged):
                    _raise(plan, failed, plan.jobs[: plan.jobs.index(job) + 1])
                continue
        if not done or (run.stop_wanted and (more or job != plan.jobs[-1])):
            return False
    _raise(plan, failed, plan.jobs)
    return True


def help_run(plan: Plan, how: How, watch: Watch, lines: Iterable[str | bytes], answer: Callable[[], None]) -> bool:
    """Train candidates for the one run of a plan, which another process executes. False if it was interrupted."""
    import torch

    from rkr.engine import Run
    from rkr.engine.processes import make_fabric

    if how.threads is not None:
        torch.set_num_threads(how.threads)
    fabric = make_fabric(how.accelerator, how.precision)
    (job,) = plan.jobs
    experiment = plan.experiment(job, plan.stream(job.order), **_computed(how, fabric))
    return Run(experiment, plan.folder(job), fabric, watch, how.save_minutes, how.threads).help(lines, answer)


def _computed(how: How, fabric: Fabric) -> dict[str, str]:
    """What is recorded of how a run is computed."""
    return {"precision": how.precision or PRECISIONS[0], "device": fabric.device.type}


def _shares(plan: Plan, workers: int) -> dict[Job, int]:
    """How many workers each run gets: one, and those that no run needs are for candidates, where there are some."""
    from rkr.learners import Learner

    shares = dict.fromkeys(plan.jobs, 1)
    with_candidates = [j for j in plan.jobs if plan.recipe.method(j.method).method.learner.rounds is not Learner.rounds]
    for _, job in zip(range(workers - len(plan.jobs)), itertools.cycle(with_candidates), strict=False):
        shares[job] += 1
    return shares


def _threads(how: How, processes: int) -> int:
    """Of each of so many processes."""
    return how.threads or max(1, (os.cpu_count() or 1) // processes)


def _crew(plan: Plan, how: How, job: Job, workers: int) -> AbstractContextManager[Processes | None]:
    """The processes that train a run's candidates, if it has several workers."""
    if workers == 1:
        return nullcontext()
    threads = _threads(how, workers)
    command = _command(plan, dataclasses.replace(how, tensorboard=False), job, threads)
    return Processes([*command, "--helper"], workers, threads)


def _at_once(plan: Plan, how: How, watch: Watch) -> bool:
    """Each run in a process of its own, `workers` at a time; what they tell is told here."""
    from rkr.engine.loop import Diverged
    from rkr.engine.signals import signals

    workers, shares = min(how.workers, len(plan.jobs)), _shares(plan, how.workers)
    ended: dict[Job, int | None] = {}
    failed: dict[Job, RkrError] = {}
    asked = threading.Event()

    def start(job: Job) -> Worker:
        threads = _threads(how, workers if shares[job] == 1 else how.workers)
        return Worker(_command(plan, how, job, threads, shares[job]), threads)

    with signals(asked.set), Pool(workers, start, harmless=(0, Diverged.exit_code)) as pool:
        for job, code, said in pool.do(plan.jobs, lambda job, event: watch(event), asked.is_set):
            ended[job] = code
            if code == Diverged.exit_code:
                failed[job] = Diverged(said)
            elif code and not was_stopped(code):
                failed[job] = RkrError(said)
    stopped = asked.is_set() or any(code is not None and was_stopped(code) for code in ended.values())
    if not stopped or not all(isinstance(error, Diverged) for error in failed.values()):
        _raise(plan, failed, ended)
    return not stopped


def _raise(plan: Plan, failed: Mapping[Job, RkrError], begun: Container[Job]) -> None:
    """One error for all runs that failed, if some did; that of divergence if all others are complete."""
    from rkr.engine.loop import Diverged

    said = [f"{job.name}: {error}" for job, error in failed.items()]
    skipped = [job.name for job in plan.jobs if job not in begun]
    if skipped:
        said.append(f"skipped: {', '.join(skipped)}")
    if failed:
        kind = Diverged if all(isinstance(error, Diverged) for error in failed.values()) else RkrError
        raise kind("; ".join(said))


def _command(plan: Plan, how: How, job: Job, threads: int, workers: int = 1) -> list[str]:
    options: dict[str, Any] = {
        "--method": job.method,
        "--order": job.order,
        "--seed": job.seed,
        "--out": plan.out,
        "--epochs": plan.epochs,
        "--limit": plan.limit,
        "--data": plan.data,
        "--threads": threads,
        "--accelerator": how.accelerator,
        "--precision": how.precision,
        "--save-minutes": how.save_minutes,
        "--workers": workers if workers > 1 else None,
    }
    command = [sys.executable, "-m", "rkr", "run", plan.given, "--json", "--no-figures"]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    asked = ["--validation"] * plan.on_validation + ["--tensorboard"] * how.tensorboard
    return command + asked

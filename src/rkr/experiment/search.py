"""Searching for options by Optuna: its samplers choose what to try, its pruners what to give up early.

A trial is an ordinary run on validation samples, so it resumes and can be looked at like all others. What was tried is
kept in a journal in the folder of the search, which several processes may share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from filelock import FileLock

from rkr.atomic import write_atomic
from rkr.errors import FileError, RkrError, UsageError
from rkr.experiment import metrics
from rkr.experiment.events import Event, TaskEnd, Watch
from rkr.experiment.execution import Diverged, Execution, Interrupted
from rkr.experiment.executors import Executor, completed, make_executor
from rkr.experiment.folder import RunFolder
from rkr.experiment.jobs import Job, run_job
from rkr.experiment.plan import Plan
from rkr.experiment.queue import Queue
from rkr.experiment.results import read_result
from rkr.experiment.runner import check_methods, check_torchrun
from rkr.experiment.samples import derived
from rkr.experiment.signals import signals
from rkr.experiment.tune import Tuning, point_label, with_point
from rkr.locks import is_locked
from rkr.methods.ranges import Linear, Log, whole

Sampler = Literal["grid", "random", "tpe"]
Pruner = Literal["none", "median", "halving"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
PRUNERS: tuple[Pruner, ...] = get_args(Pruner)
TRIALS = 20
DIGITS = 4  # of numbers that are drawn


@dataclass(frozen=True)
class Strategy:
    """How options are searched.

    Attributes:
        sampler: One of `SAMPLERS`.
        trials: How many in all, those of earlier commands included. Default: the whole grid, or `TRIALS`.
        pruner: One of `PRUNERS`: which trials to stop after a task.
        seed: Of the sampler.
    """

    sampler: str = "tpe"
    trials: int | None = None
    pruner: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("search", self.sampler, SAMPLERS), ("pruner", self.pruner, PRUNERS)):
            if value not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}, not {value!r}")
        if self.trials is not None and self.trials < 1:
            raise UsageError(f"--trials must be at least 1, not {self.trials}")


def require_optuna() -> Any:
    """Optuna, quiet. Raises UsageError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UsageError("--search needs Optuna: pip install 'rkr[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass
class Found:
    """What came out of a search, besides the results of its runs."""

    search: Tuning
    plan: Plan
    diverged: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)


class Study:
    """Optuna's study of a search: asks for trials, and tells what came out.

    Args:
        search: What is searched.
        plan: How its runs are made.
        strategy: How it is searched.
    """

    def __init__(self, search: Tuning, plan: Plan, strategy: Strategy) -> None:
        self._optuna = require_optuna()
        self.search, self.plan, self.strategy = search, plan, strategy
        self._space = {name: self._distribution(name, values) for name, values in search.grid.items()}
        self._journal = search.file_of(plan, "search", "journal")
        search.folder.mkdir(parents=True, exist_ok=True)
        backends = importlib.import_module("optuna.storages.journal")
        storage = self._optuna.storages.JournalStorage(
            backends.JournalFileBackend(str(self._journal), lock_obj=backends.JournalFileOpenLock(str(self._journal)))
        )
        self._study = self._optuna.create_study(
            storage=storage,
            study_name=self._name(),
            direction="maximize",
            load_if_exists=True,
            pruner=self._pruner(),
        )
        self._claims = FileLock(f"{self._journal}.claims", thread_local=False)
        self._own = f"{self._journal.name}.{secrets.token_hex(4)}.lock"
        self._alive = FileLock(search.folder / self._own, thread_local=False)
        self._alive.acquire()

    def close(self) -> None:
        """Give up the trials that are not done: another process may go on with them."""
        self._alive.release()
        (self.search.folder / self._own).unlink(missing_ok=True)

    def _name(self) -> str:
        """A study for each space: Optuna cannot change one."""
        space = {name: repr(distribution) for name, distribution in self._space.items()}
        return f"{self.strategy.sampler} {self.strategy.seed} {json.dumps(space, sort_keys=True)}"

    def _distribution(self, name: str, values: Sequence[Any]) -> Any:
        kinds = self._optuna.distributions
        ranged = isinstance(values, Log | Linear) and len(set(values)) > 1 and self.strategy.sampler != "grid"
        if not ranged:
            return kinds.CategoricalDistribution(tuple(dict.fromkeys(values)))
        kind = kinds.IntDistribution if whole(values) else kinds.FloatDistribution
        return kind(min(values), max(values), log=isinstance(values, Log))

    def _pruner(self) -> Any:
        pruners = self._optuna.pruners
        if self.strategy.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=3)
        if self.strategy.pruner == "halving":
            return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        return pruners.NopPruner()

    def _sampler(self, number: int) -> Any:
        """A new one for each trial, with a seed of its own: a search that was interrupted goes on as if it was not."""
        samplers, seed = self._optuna.samplers, derived(self.strategy.seed, "trial", number) % 2**32
        if self.strategy.sampler == "grid":
            grid = {name: list(dict.fromkeys(values)) for name, values in self.search.grid.items()}
            return samplers.GridSampler(grid, seed=self.strategy.seed)
        return samplers.RandomSampler(seed) if self.strategy.sampler == "random" else samplers.TPESampler(seed=seed)

    @property
    def limit(self) -> int:
        """How many trials in all."""
        points = math.prod(len(set(values)) for values in self.search.grid.values())
        if self.strategy.sampler == "grid":
            return min(points, self.strategy.trials or points)
        return self.strategy.trials or TRIALS

    def ask(self) -> Any | None:
        """The next trial: one that nobody goes on with, or a new one; None if there are enough."""
        with self._claims, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is experimental
            states = self._optuna.trial.TrialState
            trials = self._study.get_trials(deepcopy=False)
            for frozen in trials:
                owner = frozen.user_attrs.get("owner")
                if frozen.state == states.RUNNING and not (owner and is_locked(self.search.folder / owner)):
                    trial = self._optuna.trial.Trial(self._study, frozen._trial_id)
                    break
            else:
                if sum(frozen.state != states.FAIL for frozen in trials) >= self.limit:
                    return None
                self._study.sampler = self._sampler(len(trials))
                trial = self._study.ask(self._space)
            trial.set_user_attr("owner", self._own)
            return trial

    def point(self, trial: Any) -> dict[str, Any]:
        """The options of a trial."""
        return {name: _rounded(trial.params[name]) for name in self.search.grid}

    def report(self, trial: Any, number: int, accuracy: float) -> bool:
        """Tell the mean accuracy after a task. Whether to stop the trial."""
        if number not in self._study.trials[trial.number].intermediate_values:
            trial.report(accuracy, number)
        return bool(trial.should_prune())

    def tell(self, trial: Any, value: float | None, why: str = "") -> None:
        """A trial is over; without a value it was given up."""
        if why:
            trial.set_user_attr("why", why)
        state = self._optuna.trial.TrialState
        self._study.sampler = self._optuna.samplers.RandomSampler(0)  # that of grids ends a loop that there is not
        if value is None:
            self._study.tell(trial, state=state.FAIL if why == "elsewhere" else state.PRUNED)
        else:
            self._study.tell(trial, value)
        self._write()

    def _write(self) -> None:
        """The trials as JSON, for reports."""
        trials = [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "options": self.point(trial),
                "value": trial.value,
                "after_task": {str(step): value for step, value in trial.intermediate_values.items()},
                **({"why": trial.user_attrs["why"]} if "why" in trial.user_attrs else {}),
            }
            for trial in self._study.get_trials(deepcopy=False)
        ]
        known = {"method": self.search.method, "sampler": self.strategy.sampler, "seed": self.strategy.seed}
        known["recipe"] = self.plan.root.name
        text = json.dumps({**known, "trials": trials, "importance": self._importance()}, indent=1)
        write_atomic(self._journal.with_suffix(".json"), (text + "\n").encode())

    def _importance(self) -> dict[str, float]:
        """The share of each option in how results differ, if they do."""
        complete = self._optuna.trial.TrialState.COMPLETE
        if len({trial.value for trial in self._study.get_trials(deepcopy=False, states=[complete])}) < 2:
            return {}
        with contextlib.suppress(RuntimeError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = self._optuna.importance.FanovaImportanceEvaluator(seed=0)
            return dict(self._optuna.importance.get_param_importances(self._study, evaluator=kind))
        return {}

    def labels(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """The options of all trials, and the trials."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.params:
                yield self.point(trial), trial


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def run_trials(
    search: Tuning,
    make_plan: Callable[[Tuning], Plan],
    strategy: Strategy,
    execution: Execution,
    watch: Watch,
) -> Found | None:
    """Run a search until it has enough trials. None if it was interrupted: the same command goes on.

    Args:
        search: What is searched.
        make_plan: Writes the recipe of a search and plans its runs.
        strategy: How it is searched.
        execution: How runs are executed.
        watch: Called with all events.
    """
    require_optuna()
    check_torchrun(execution, 2)
    first = with_point(search, {name: next(iter(values)) for name, values in search.grid.items()})[0]
    execution = execution.asking(search.recipe.resources)
    with make_executor(execution, execution.workers) as executor:  # nothing is written if there is no cluster
        check_methods(make_plan(first))
        study = Study(search, make_plan(first), strategy)
        try:
            trials = Trials(study, executor, execution, make_plan, watch)
            return trials.found() if trials.run() else None
        finally:
            study.close()


class Trials:
    """The trials of a study, executed."""

    def __init__(
        self,
        study: Study,
        executor: Executor,
        execution: Execution,
        make_plan: Callable[[Tuning], Plan],
        watch: Watch,
    ) -> None:
        self._study, self._executor, self._execution, self._make_plan = study, executor, execution, make_plan
        self._watch, self._search = watch, study.search
        self._plan = study.plan
        self._lock = threading.RLock()
        self._at_work: dict[Job, list[Any]] = {}  # its trials: the same options may be drawn twice
        self._folders: dict[Job, Path] = {}
        self._titles: dict[Job, str] = {}
        self._pruned: set[Job] = set()
        self._queue = Queue(study.plan.out, ())

    def run(self) -> bool:
        """Until there are enough. False if it was interrupted."""
        asked, stopped = threading.Event(), False
        errors: list[RkrError] = []
        with signals(asked.set), self._queue:
            for job, future in completed(
                self._executor, self._jobs(), self._told, asked.is_set, self._harmless, self._executor.capacity
            ):
                error = future.exception()
                self._queue.ended(self._titles[job], None if job in self._pruned else error)
                if isinstance(error, Interrupted) and job not in self._pruned:
                    stopped = True
                elif error is not None and not self._harmless(job, error):
                    errors.append(RkrError(f"{job.label}: {error}"))
                else:
                    if error is None and future.result():
                        asked.set()
                    self._tell(job, error)
        if errors:
            raise errors[0]
        return not (stopped or asked.is_set())

    def _harmless(self, job: Job, error: BaseException) -> bool:
        return isinstance(error, Diverged) or job in self._pruned

    def _jobs(self) -> Iterator[Job]:
        while (trial := self._study.ask()) is not None:
            point = self._study.point(trial)
            label = point_label(self._search.method, point)
            with self._lock:
                same = next((trials for job, trials in self._at_work.items() if job.label.split()[0] == label), None)
                if same is not None:
                    same.append(trial)
                    continue
            self._search, _ = with_point(self._search, point)
            self._plan = self._make_plan(dataclasses.replace(self._search, asked=(label,)))
            (spec,) = self._plan.specs
            folder = self._plan.folder(spec)
            if is_locked(folder / "lock"):
                self._study.tell(trial, None, "elsewhere")
                continue
            threads = self._executor.threads(self._execution, self._executor.capacity)
            own = self._execution.threads if self._execution.workers == 1 and not self._execution.cluster else threads
            job = run_job(self._plan, self._execution, spec, own)
            with self._lock:
                self._at_work[job], self._folders[job], self._titles[job] = [trial], folder, spec.title
            self._queue.add(spec.title, folder)
            self._before(trial, folder)
            yield job

    def _before(self, trial: Any, folder: Path) -> None:
        """Report what the run of a trial has learned earlier."""
        with contextlib.suppress(FileError):
            for number, row in enumerate(read_result(folder, epochs=False).matrix, 1):
                self._study.report(trial, number, fmean(row[:number]))

    def _told(self, job: Job, event: Event) -> None:
        self._queue.told(event)
        self._watch(event)
        if isinstance(event, TaskEnd) and event.number < event.tasks:
            with self._lock:
                stop = [self._study.report(t, event.number, fmean(event.accuracy)) for t in self._at_work[job]]
                if all(stop):
                    self._pruned.add(job)
                    self._executor.stop(job)

    def _tell(self, job: Job, error: BaseException | None) -> None:
        with self._lock:
            trials, folder = self._at_work.pop(job), self._folders[job]
            for trial in trials:
                if error is None:
                    self._before(trial, folder)
                    self._study.tell(trial, metrics.average(read_result(folder, epochs=False).matrix))
                else:
                    self._study.tell(trial, None, "diverged" if isinstance(error, Diverged) else "pruned")

    def found(self) -> Found:
        """What came out, of all processes."""
        search, why = self._search, dict[str, str]()
        for point, trial in self._study.labels():
            search, label = with_point(search, point)
            why[label] = trial.user_attrs.get("why", "")
        points = {**{label: search.points[label] for label in why}, **search.points}  # the first one wins a tie
        search = dataclasses.replace(search, points=points)
        plan = self._make_plan(search)
        unfinished = [spec.method for spec in plan.specs if not RunFolder(plan.folder(spec)).finished]
        found = Found(search, plan)
        found.diverged = [name for name in unfinished if why.get(name) == "diverged"]
        found.pruned = [name for name in unfinished if why.get(name) == "pruned"]
        if len(unfinished) == len(plan.specs):
            raise RkrError(f"training diverged with every value: {', '.join(found.diverged)}")
        return found

"""Jobs: a run, or a candidate of a run, as plain values that can be sent to another process or machine.

A job names the function that does it. The function gets a `Site`, which says where it is done, and the arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rkr.errors import RkrError
from rkr.experiment.execution import Execution, Interrupted
from rkr.experiment.plan import Plan
from rkr.experiment.recipes import Recipe
from rkr.experiment.recipes.write import recipe_text
from rkr.importing import imported

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from rkr.data import Stream
    from rkr.experiment.events import Event, Watch
    from rkr.experiment.executors import Executor
    from rkr.experiment.loop import CandidateKey
    from rkr.experiment.run import Run
    from rkr.experiment.spec import RunSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, eq=False)
class Job:
    """What an executor is given.

    Attributes:
        label: Its name in errors, such as "rkr A".
        call: The dotted name of the function that does it.
        arguments: Plain values: they are sent as JSON.
        root: Directory of results.
        folder: What the job writes, below `root`; "" if nothing.
        reads: Patterns of the files below `root` that it starts from.
        locks: Whether nobody else may write to the folder meanwhile.
        needs: The data that it loads: see `rkr.data.missing_data`.
        waits: Whether it mostly waits for jobs of its own.
    """

    label: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    root: Path | None = None
    folder: str = ""
    reads: tuple[str, ...] = ()
    locks: bool = False
    needs: tuple[str, ...] = ()
    waits: bool = False

    @property
    def path(self) -> Path | None:
        """The folder of the run that it belongs to."""
        return None if self.root is None else self.root / self.folder

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "root": None if self.root is None else str(self.root)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        root = values["root"]
        lists = {name: tuple(values[name]) for name in ("reads", "needs")}
        return cls(**{**values, **lists, "root": None if root is None else Path(root)})


def no_crew(count: int, threads: int) -> AbstractContextManager[Executor]:
    raise RkrError("jobs of this job cannot be executed here")


@dataclass
class Site:
    """Where a job is done.

    Attributes:
        watch: Called with its events.
        root: The directory of results there.
        data: A dataset directory that is searched first.
        crew: Makes an executor for jobs of the job, from their number and the threads of each.
        saved: Called when files of the job belong together, so that it could go on from them.
        kept: What several jobs of the process use: the stream and the device.
    """

    watch: Watch = lambda event: None
    root: Path | None = None
    data: str | None = None
    crew: Callable[[int, int], AbstractContextManager[Executor]] = no_crew
    saved: Callable[[], None] = lambda: None
    kept: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def once(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """Something that is made anew only if its key differs from that of the job before."""
        if name not in self.kept or self.kept[name][0] != key:
            self.kept.pop(name, None)  # free its memory first
            self.kept[name] = key, make()
        return self.kept[name][1]


def perform(job: Job, site: Site) -> Any:
    """Do a job here. Raises `Interrupted` if it was stopped and can go on."""
    return imported(job.call)(site, **job.arguments)


# ---------------------------------------------------------------------------------------------------------
# Runs


def run_job(
    plan: Plan, execution: Execution, spec: RunSpec, threads: int | None = None, share: int = 1, each: int = 1
) -> Job:
    """The job of a run of a plan.

    Args:
        plan: The plan.
        execution: How it is executed.
        spec: The run.
        threads: Of its process; None: as many as PyTorch takes.
        share: How many of its candidates are trained at once, in processes of their own if several.
        each: Threads of each of those.
    """
    own = _relative(plan, plan.folder(spec))
    others = [_relative(plan, path) for path in plan.similar(spec)]
    if plan.before is not None:
        others += [_relative(plan, plan.before.folder(run)) for run in plan.before.specs if run.method == spec.method]
    return Job(
        spec.name,
        "rkr.experiment.jobs:execute_run",
        {**_arguments(plan, execution, spec, threads), "share": share, "each": each},
        plan.out,
        own,
        tuple(f"{folder}/**/*" for folder in dict.fromkeys([own, *others])),
        True,
        plan.recipe.stream.needs,
        waits=share > 1,
    )


def _relative(plan: Plan, folder: Path) -> str:
    return folder.relative_to(plan.out).as_posix()


def _arguments(plan: Plan, execution: Execution, spec: RunSpec, threads: int | None) -> dict[str, Any]:
    changes = {name: getattr(plan, name) for name in ("given", "epochs", "limit", "data", "on_validation")}
    chosen = {"method": spec.method, "order": spec.order, "seed": spec.seed}
    device = {"accelerator": plan.accelerator, "precision": plan.precision}
    how = {"threads": threads, "save_minutes": execution.save_minutes, "tensorboard": execution.tensorboard}
    recipe = {"name": plan.recipe.name, "recipe": recipe_text(plan.recipe), "out": str(plan.out)}
    return {"plan": {**recipe, **changes, **chosen, **device}, "how": how}


@lru_cache(maxsize=4)
def _recipe(name: str, text: str) -> Recipe:
    return Recipe.model_validate({"name": name, **tomllib.loads(text)})


def _plan(given: Mapping[str, Any], site: Site) -> Plan:
    values = dict(given)
    recipe = _recipe(values.pop("name"), values.pop("recipe"))
    out, data = Path(values.pop("out")), values.pop("data")
    one: dict[str, Any] = {
        "methods": (values.pop("method"),),
        "orders": (values.pop("order"),),
        "seeds": (values.pop("seed"),),
    }
    return Plan(recipe, out=site.root or out, data=site.data or data, **one, **values)


def _fabric(plan: Plan, threads: int | None, site: Site) -> Fabric:
    import torch

    from rkr.experiment.processes import make_fabric

    if threads is not None:
        torch.set_num_threads(threads)
    made: Fabric = site.once(
        "fabric", (plan.accelerator, plan.precision), lambda: make_fabric(plan.accelerator, plan.precision)
    )
    return made


def _made(site: Site, plan: Mapping[str, Any], how: Mapping[str, Any], watch: Watch, helpers: Any = None) -> Run:
    from rkr.experiment.run import Run

    made = _plan(plan, site)
    (spec,) = made.specs
    fabric = _fabric(made, how["threads"], site)
    resolved = made.resolve(spec, fabric.device.type)
    key = (plan["recipe"], plan["name"], spec.order, made.limit, made.data)
    stream: Stream = site.once("stream", key, lambda: made.stream(spec.order))
    execution = Execution(threads=how["threads"], save_minutes=how["save_minutes"], tensorboard=how["tensorboard"])
    return Run(
        resolved, stream, made.folder(spec), fabric, watch, execution, helpers, made.similar(spec), saved=site.saved
    )


def execute_run(site: Site, plan: Mapping[str, Any], how: Mapping[str, Any], share: int, each: int) -> bool:
    """Execute a run. Returns whether a stop was requested at its end; raises `Interrupted` if it came before."""
    from rkr.experiment.display import Quiet, TensorBoard, both

    with contextlib.ExitStack() as stack:
        helpers = None
        if share > 1:
            crew = stack.enter_context(site.crew(share, each))
            helpers = Helpers(crew, _candidate_job(site, plan, {**how, "threads": each}))
        curves = stack.enter_context(TensorBoard() if how["tensorboard"] else Quiet())
        run = _made(site, plan, how, both(site.watch, curves), helpers)
        if not run.execute():
            raise Interrupted
        return run.stop_wanted


# ---------------------------------------------------------------------------------------------------------
# Candidates


def _candidate_job(site: Site, plan: Mapping[str, Any], how: Mapping[str, Any]) -> Callable[[CandidateKey], Job]:
    made = _plan(plan, site)
    (spec,) = made.specs
    own = _relative(made, made.folder(spec))
    others = () if made.before is None else tuple(_relative(made, made.before.folder(s)) for s in made.before.specs)
    arguments = {"plan": {**plan, "out": str(made.out)}, "how": {**how, "tensorboard": False}}

    def job(key: CandidateKey) -> Job:
        reads = (f"{own}/state.safetensors", f"{own}/candidates/{key.file}", *(f"{other}/*" for other in others))
        return Job(
            candidate_name(key),
            "rkr.experiment.jobs:train_candidate",
            {**arguments, "key": list(key)},
            made.out,
            own,
            reads,
            needs=made.recipe.stream.needs,
        )

    return job


def train_candidate(site: Site, plan: Mapping[str, Any], how: Mapping[str, Any], key: Sequence[int]) -> None:
    """Train a candidate of a run that another process executes."""
    from rkr.experiment.loop import CandidateKey

    _made(site, plan, how, site.watch).train_candidate(CandidateKey(*key))


class Helpers:
    """Trains candidates by an executor, for `Run`.

    Args:
        executor: Where.
        job: Makes the job of a candidate.
    """

    def __init__(self, executor: Executor, job: Callable[[CandidateKey], Job]) -> None:
        self._executor, self._job = executor, job

    def train(
        self, keys: Sequence[CandidateKey], told: Callable[[CandidateKey, Event], None], asked: Callable[[], bool]
    ) -> Iterator[CandidateKey]:
        """Train candidates, and yield each one that is done; several at once.

        Args:
            keys: Which candidates.
            told: Called with their events, from any thread.
            asked: Whether to stop: then raises `Interrupted` when all states are saved.
        """
        from rkr.experiment.executors import completed

        jobs = {self._job(key): key for key in keys}
        errors: list[str] = []
        over = False
        for job, future in completed(
            self._executor, jobs, lambda job, event: told(jobs[job], event), asked, lambda *_: False
        ):
            try:
                future.result()
            except Interrupted:
                over = True
            except RkrError as error:
                errors.append(f"{job.label}: its process {_what(error)}; run the same command again to resume")
            else:
                yield jobs[job]
        if errors:
            raise RkrError("; ".join(errors))
        if over or asked():
            raise Interrupted


def candidate_name(key: CandidateKey) -> str:
    return f"task {key.number + 1}, round {key.round + 1}, candidate {key.place + 1}"


def _what(error: RkrError) -> str:
    from rkr.experiment.executors import Lost

    return str(error) if isinstance(error, Lost) else f"failed: {error}"

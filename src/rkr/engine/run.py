"""The one loop: every method, every network, every stream is trained, tested, saved and resumed here."""

from __future__ import annotations

import hashlib
import math
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from rkr.engine.evaluate import Evaluator, Row
from rkr.engine.events import EpochEnd, Failed, Finished, Progress, Started, Stopped, TaskEnd, Watch
from rkr.engine.folder import RunFolder
from rkr.engine.processes import gather, keep_freed_memory, nothing_of_its_own, over_whole_batches, sum_gradients
from rkr.errors import RkrError
from rkr.learners import Learner, MakeNetwork, Method
from rkr.learners.learner import Phase, ReadSamples, SeenTask
from rkr.tasks import Augment, Batches, Stream
from rkr.tasks.task import Samples, joined

PROGRESS_SECONDS = 0.25
DIVERGED = "training diverged"  # how the error begins
SAME_SIGNAL_SECONDS = 1.0


class Schedule(Protocol):
    """How long and how fast to learn. The rate is `lr` times `gamma` for every milestone (an epoch) that has passed."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def milestones(self) -> Sequence[int]: ...
    @property
    def gamma(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def amsgrad(self) -> bool: ...
    @property
    def sampling(self) -> str: ...


@dataclass(frozen=True)
class Experiment:
    """All that decides a run's results.

    Attributes:
        label: What displays call it: "cifar100-lenet rkr A".
        stream: The tasks.
        make: Builds the network.
        head: Name of its classification layer.
        method: How the tasks are learned.
        options: Of the method.
        schedule: Of every task.
        augment: Of training images.
        seed: Of initial values, batches and augmentation.
        channels_last: The memory layout of the network.
        agnostic: When to test without telling the task: after the "last" task, after "every" one, or "never".
        settings: All of this as JSON: what tells one run from another.
        about: More for the record.
    """

    label: str
    stream: Stream
    make: MakeNetwork
    head: str
    method: Method
    options: dict[str, Any]
    schedule: Schedule
    augment: Augment | None = None
    seed: int = 0
    channels_last: bool = True
    agnostic: str = "last"
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Position:
    """Where a run is: before batch `batch` of epoch `epoch` of phase `phase` of task `number`."""

    number: int = 0
    phase: int = 0
    epoch: int = 0
    batch: int = 0


class _Interrupted(Exception):
    """The user wants to stop; the state is saved."""


class Run:
    """Runs an experiment in a folder, from the beginning or from where it was."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        fabric: Fabric,
        watch: Watch = lambda event: None,
        save_minutes: float = 5.0,
        decode_workers: int | None = None,
    ) -> None:
        self.experiment, self.fabric = experiment, fabric
        self.folder = RunFolder(folder)
        self._watch = watch if fabric.is_global_zero else lambda event: None
        self._save_seconds = 60 * save_minutes
        self._decode_workers = decode_workers
        self._evaluator = Evaluator(experiment.stream, fabric, decode_workers)
        self._at = _Position()
        self._learner: Learner
        self._optimizer: Optimizer | None = None
        self._sums = torch.zeros(3, dtype=torch.float64)  # of the epoch so far: loss, hits, images
        self._task_seconds = 0.0  # training time of the task in earlier sessions
        self._stop = False
        self._last_save = self._last_progress = self._began = time.monotonic()
        self._done_at_start = 0.0

    def execute(self) -> bool:
        """Run to the end. False if it was interrupted, and can go on."""
        label, path = self.experiment.label, str(self.folder.path)
        try:
            with self._held(), self._signals():
                return self._execute()
        except _Interrupted:
            self._watch(Stopped(label, path, self._at.number + 1, self._at.epoch))
            return False
        except RkrError as error:
            self._watch(Failed(label, path, str(error)))
            raise

    @property
    def stop_wanted(self) -> bool:
        """Whether the user asked to stop, be it that the run was at its end anyway."""
        return self._stop

    # -- the loop -----------------------------------------------------------------------------------------

    def _execute(self) -> bool:
        e, tasks = self.experiment, self.experiment.stream.tasks
        if self.fabric.is_global_zero:
            self.folder.begin(e.settings, e.about)
        self.fabric.barrier()
        if self.folder.finished:
            if self.fabric.is_global_zero:
                self.folder.drop_state()
            self._watch(Finished(e.label, str(self.folder.path), 0.0, True))
            return True
        _be_deterministic()
        keep_freed_memory()
        self._seed("learner")
        self._learner = e.method.build(self._network_maker(), e.head, **e.options)
        state = self._resume()
        self._began = self._last_save = time.monotonic()
        self._done_at_start = self._done()
        names = tuple(task.name for task in tasks)
        at = self._at
        self._watch(
            Started(
                e.label, str(self.folder.path), names, e.schedule.epochs, at.number + 1, at.epoch, state is not None
            )
        )
        while at.number < len(tasks):
            if len(self._learner.seen) == at.number:
                self._begin(at.number)
            self._learn(state)
            state = None
            self._finish_task()
        self._watch(Finished(e.label, str(self.folder.path), time.monotonic() - self._began, False))
        return True

    def _learn(self, state: dict[str, Any] | None) -> None:
        """Train the task at hand, from the position at hand."""
        learner, at = self._learner, self._at
        started = time.monotonic()
        self._epoch_seconds: list[float] = []
        phases = learner.phases()
        while at.phase < len(phases):
            phase = phases[at.phase]
            self._seed("phase", at.number, at.phase)
            learner.prepare(phase, self._in_order())
            if self._optimizer is None or not phase.same_optimizer:
                self._optimizer = self._make_optimizer(phase)
            if state is not None and state["optimizer"] is not None:  # it was saved amid this phase
                learner.load_state_dict(state["learner"])  # again, as `prepare` may write to it
                _load_optimizer(self._optimizer, state["optimizer"])
                _set_rng(state["rng"][self.fabric.global_rank % len(state["rng"])])
            state = None
            batches = self._batches()
            while at.epoch < self._epochs(phase):
                self._train_epoch(phase, batches, started)
            at.phase, at.epoch = at.phase + 1, 0
        self._task_seconds += time.monotonic() - started
        self._optimizer = None

    def _train_epoch(self, phase: Phase, batches: Batches, started: float) -> None:
        learner, optimizer, at, fabric = self._learner, self._optimizer, self._at, self.fabric
        assert optimizer is not None
        lr = self._rate(phase, at.epoch)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        learner.train()
        learner.begin_epoch(at.epoch / self._epochs(phase))
        epoch_began = time.monotonic()
        for x, y in batches.iter_from(at.epoch, at.batch):
            size = batches.size(at.batch)
            share = len(y) / size
            if not share:  # a small last batch: this process takes part in the sums, with nothing of its own
                x, y = x.new_zeros(1, *x.shape[1:]), y.new_full((1,), learner.task.start)
            with fabric.autocast(), nothing_of_its_own(not share):
                outcome = learner.loss(x, y)
            loss = outcome.loss if fabric.world_size == 1 else outcome.loss * share
            optimizer.zero_grad(set_to_none=True)
            fabric.backward(loss)
            sum_gradients(fabric, trained)
            learner.before_step(optimizer)
            optimizer.step()
            learner.after_step()
            correct = outcome.correct if outcome.correct is not None else outcome.loss.new_tensor(math.nan)
            parts = torch.stack([outcome.loss.detach().double() * (share * size), correct.double() * (share > 0)])
            self._sums[:2] += parts.to(self._sums.device)
            self._sums[2] += share * size
            at.batch += 1
            self._between_batches(len(batches), started)
        if at.batch < len(batches):
            raise RkrError(f"task {learner.task.name!r}: batches ran out before the epoch's end")
        self._end_epoch(lr, phase, time.monotonic() - epoch_began)

    def _between_batches(self, batches: int, started: float) -> None:
        now = time.monotonic()
        stop, save = self._agreed(self._stop, now - self._last_save > self._save_seconds)
        if stop or save:
            self._save(self._task_seconds + now - started)
        if stop:
            raise _Interrupted
        if now - self._last_progress > PROGRESS_SECONDS:
            self._last_progress = now
            loss, hits, images = self._sums.tolist()
            epoch, epochs = self._counted()
            done = self._done((epoch + self._at.batch / batches) / epochs)
            gained = done - self._done_at_start
            left = (now - self._began) * (1 - done) / gained if gained > 0 else None
            self._watch(
                Progress(
                    self.experiment.label,
                    self._at.number + 1,
                    self._learner.task.name,
                    epoch,
                    epochs,
                    self._at.batch,
                    batches,
                    loss / max(images, 1),
                    None if math.isnan(hits) else hits / max(images, 1),
                    done,
                    left,
                )
            )

    def _end_epoch(self, lr: float, phase: Phase, seconds: float) -> None:
        at, name = self._at, self._learner.task.name
        if self.fabric.world_size > 1:
            sums = self._sums.to(self.fabric.device)
            dist.all_reduce(sums)
            self._sums = sums.cpu()
        loss, hits, images = self._sums.tolist()
        loss, accuracy = loss / images, None if math.isnan(hits) else hits / images
        if not math.isfinite(loss):
            raise RkrError(
                f"{DIVERGED}: the loss of task {name!r} is {loss} in epoch {at.epoch + 1}; choose a lower learning rate"
            )
        line = {"event": "epoch", "number": at.number + 1, "task": name, "phase": phase.name, "epoch": at.epoch}
        self._append(self.folder.results, {**line, "loss": loss, "accuracy": accuracy, "lr": lr})
        label, (epoch, epochs) = self.experiment.label, self._counted()
        self._watch(EpochEnd(label, at.number + 1, name, epoch, epochs, loss, accuracy, lr, seconds))
        self._epoch_seconds.append(seconds)
        self._sums.zero_()
        at.epoch, at.batch = at.epoch + 1, 0

    def _finish_task(self) -> None:
        """Test, record, export, save."""
        e, learner, at, began = self.experiment, self._learner, self._at, time.monotonic()
        task, tasks = learner.task, len(e.stream.tasks)
        learner.eval()
        self._seed("end", at.number)  # the same in every process
        held_out = e.stream.tasks[at.number].training.validation
        validation = None
        if held_out is not None:
            rows = torch.arange(len(held_out))
            validation = self._in_order(held_out.take(rows, held_out.y + task.start))
        learner.end(self._in_order(), validation)
        row = self._evaluator.row(learner, at.number + 1)
        last = at.number + 1 == tasks
        agnostic = None
        if e.agnostic == "every" or (e.agnostic == "last" and last):
            agnostic = self._evaluator.agnostic(learner, at.number + 1)
        unchanged = self._unchanged(row)
        capacity = learner.capacity()
        cost = {
            "parameters": capacity.parameters,
            "percent": capacity.percent,
            "bytes": capacity.bytes,
            "multiply_adds": capacity.multiply_adds,
        }
        line = {"event": "task", "number": at.number + 1, "task": task.name, "classes": task.classes}
        line |= {**row.measures, "agnostic": agnostic, "tested": row.tested}
        line |= {"proof": row.proof, "unchanged": unchanged, "cost": cost}
        notes = learner.notes()
        self._append(self.folder.results, {**line, "notes": notes} if notes else line)
        tested = time.monotonic() - began
        times = {"number": at.number + 1, "task": task.name, "train_seconds": round(self._task_seconds, 3)}
        epoch_seconds = round(statistics.median(self._epoch_seconds), 3) if self._epoch_seconds else None
        self._append(self.folder.times, {**times, "test_seconds": round(tested, 3), "epoch_seconds": epoch_seconds})
        if self.fabric.is_global_zero:
            learner.export(self.folder.model)
        seconds, measure = self._task_seconds + tested, next(iter(row.measures))
        at.number, at.phase, at.epoch, at.batch = at.number + 1, 0, 0, 0
        self._task_seconds = 0.0
        if not last:
            self._save(0.0)
        elif self.fabric.is_global_zero:
            self.folder.close(tasks)
        self._watch(TaskEnd(e.label, at.number, task.name, tasks, row.main, agnostic, unchanged, seconds, measure))
        self._stop = self._agreed(self._stop, False)[0]
        if self._stop and not last:
            raise _Interrupted

    def _unchanged(self, row: Row) -> bool | None:
        """Whether every earlier task answers bit for bit as when it was learned."""
        if not self._learner.isolating:
            return None
        first: dict[str, str] = {}
        for line in self.folder.lines():
            if line["event"] == "task":
                first = {**line["proof"], **first}
        return all(row.proof[name] == proof for name, proof in first.items())

    # -- state --------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        training = self.experiment.stream.tasks[number].training
        start = sum(task.classes for task in self._learner.seen)
        self._seed("task", number)
        attributes = None if training.attributes is None else training.attributes.to(self.fabric.device)
        seen = SeenTask(number, training.name, training.class_names, start, attributes, training.unseen)
        self._learner.begin(seen)

    def _save(self, task_seconds: float) -> None:
        sums, rng = gather(self.fabric, self._sums), gather(self.fabric, _get_rng())
        if self.fabric.is_global_zero:
            at = self._at
            self.folder.save(
                {
                    "position": [at.number, at.phase, at.epoch, at.batch],
                    "begun": len(self._learner.seen),
                    "learner": self._learner.state_dict(),
                    "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
                    "rng": rng,
                    "sums": torch.stack(sums),  # of each process: adding them now would change last bits
                    "task_seconds": task_seconds,
                }
            )
        self.fabric.barrier()
        self._last_save = time.monotonic()

    def _resume(self) -> dict[str, Any] | None:
        """Go to the last saved state, if there is one."""
        if self.fabric.is_global_zero:
            state = self.folder.resume()
        self.fabric.barrier()
        if not self.fabric.is_global_zero:
            state = self.folder.resume()
        if state is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tasks are added before anything is trained: the values come after
            for number in range(state["begun"]):
                self._begin(number)
        self._learner.load_state_dict(state["learner"])
        self._at = _Position(*state["position"])
        if isinstance(state["rng"][0], Tensor):  # states were of one process once
            state["rng"] = [state["rng"]]
        sums = state["sums"].reshape(-1, 3)
        if len(sums) == self.fabric.world_size:
            self._sums = sums[self.fabric.global_rank].clone()
        elif self.fabric.is_global_zero:  # there were more processes, or fewer
            self._sums = sums.sum(0)
        self._task_seconds = state["task_seconds"]
        return state

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        if self.fabric.is_global_zero:
            self.folder.append(path, line)

    # -- pieces -------------------------------------------------------------------------------------------

    def _network_maker(self) -> MakeNetwork:
        """What builds networks for the learner: a function that does not hold this run, which has test images."""
        make, fabric = self.experiment.make, self.fabric
        layout = torch.channels_last if self.experiment.channels_last else torch.contiguous_format

        def made() -> torch.nn.Module:
            network = make().to(fabric.device, memory_format=layout)  # type: ignore[call-overload]
            return over_whole_batches(network) if fabric.world_size > 1 else network

        return made

    def _make_optimizer(self, phase: Phase) -> Optimizer:
        s, groups = self.experiment.schedule, self._learner.groups()
        lr = self._rate(phase, 0)
        if s.optimizer == "adam":
            # Fused: the plain one spends most of its time on large temporary tensors.
            fused = self.fabric.device.type in ("cpu", "cuda")
            adam: dict[str, Any] = {"betas": s.betas, "eps": s.eps, "amsgrad": s.amsgrad, "fused": fused}
            return Adam(groups, lr=lr, weight_decay=s.weight_decay, **adam)
        return SGD(groups, lr=lr, momentum=s.momentum, weight_decay=s.weight_decay)

    def _counted(self) -> tuple[int, int]:
        """The epoch at hand and all epochs of the task, counted through its phases."""
        lengths = [self._epochs(phase) for phase in self._learner.phases()]
        return sum(lengths[: self._at.phase]) + self._at.epoch, sum(lengths)

    def _epochs(self, phase: Phase) -> int:
        if phase.epochs is not None:
            return phase.epochs
        return max(1, round(self.experiment.schedule.epochs * phase.share))

    def _rate(self, phase: Phase, epoch: int) -> float:
        s = self.experiment.schedule
        passed = sum(epoch >= milestone * phase.share for milestone in s.milestones)
        return (s.lr if phase.lr is None else phase.lr) * phase.lr_factor * s.gamma**passed

    def _batches(self) -> Batches:
        """The training samples that the learner wants, in random order and augmented."""
        e = self.experiment
        seed = derived(e.seed, "batches", self._at.number, self._at.phase)
        afresh = e.schedule.sampling == "afresh"
        rank, world = self.fabric.global_rank, self.fabric.world_size
        samples = _rehearsed(self._learner, self._trainings())
        return self._reader()(samples, seed=seed, augment=e.augment, rank=rank, world=world, afresh=afresh)

    def _trainings(self) -> list[Samples]:
        """Of every task so far."""
        return [task.training.train for task in self.experiment.stream.tasks[: self._at.number + 1]]

    def _in_order(self, part: Samples | None = None) -> ReadSamples:
        """A pass over a part, or over what the learner wants at that time, without holding this run and its tests.

        All of it in every process, not a share: what learners keep of it must be the same everywhere.
        """
        read, learner, trainings = self._reader(), self._learner, self._trainings()
        return lambda: read(_rehearsed(learner, trainings) if part is None else part).iter_from(0)

    def _reader(self) -> Callable[..., Batches]:
        e, device, workers = self.experiment, self.fabric.device, self._decode_workers
        mean, std = e.stream.mean, e.stream.std
        return partial(Batches, batch=e.schedule.batch, mean=mean, std=std, device=device, workers=workers)

    def _done(self, of_task: float = 0.0) -> float:
        """Share of the run that is done, in training epochs."""
        return (self._at.number + of_task) / len(self.experiment.stream.tasks)

    def _seed(self, *words: str | int) -> None:
        """Draw from a seed of one purpose from here on."""
        torch.manual_seed(derived(self.experiment.seed, *words))

    def _agreed(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """What the first process wants, for all of them."""
        if self.fabric.world_size == 1:
            return stop, save
        flags = torch.tensor([stop, save], device=self.fabric.device)
        dist.broadcast(flags, 0)
        return bool(flags[0]), bool(flags[1])

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Nobody writes to a complete run, so several processes may find it so at once."""
        if self.fabric.is_global_zero and not self.folder.finished:
            with self.folder.locked():
                yield
        else:
            yield

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and a polite kill stop after the batch at hand, with the state saved; a second one stops at once.

        Within a second it is the same one: a terminal tells every process, and torchrun tells them once more.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        first = 0.0

        def stop(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if not self._stop:
                self._stop, first = True, time.monotonic()
            elif time.monotonic() - first > SAME_SIGNAL_SECONDS:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def derived(seed: int, *words: str | int) -> int:
    """A seed for one purpose, independent of those for others."""
    text = " ".join(map(str, ("rkr", seed, *words)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _rehearsed(learner: Learner, trainings: Sequence[Samples]) -> Samples:
    """The training samples that a learner wants, labels counted over all tasks."""
    parts: list[Samples] = []
    for number, index in learner.rehearse([len(t) for t in trainings]).items():
        rows = torch.arange(len(trainings[number])) if index is None else index.cpu()
        parts.append(trainings[number].take(rows, trainings[number].y[rows] + learner.seen[number].start))
    return joined(parts)


def _be_deterministic() -> None:
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state, its tensors in the memory layout of their parameters, which files do not keep."""
    optimizer.load_state_dict(state)
    for p, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                values[key] = torch.empty_like(p, dtype=value.dtype).copy_(value)


def _get_rng() -> list[Tensor]:
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *gpu]


def _set_rng(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])

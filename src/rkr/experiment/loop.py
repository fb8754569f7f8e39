"""The training loop: phases, epochs and batches of a task, from any position.

It trains every method, network and stream. Whole runs (`rkr.experiment.run`) and candidates
(`rkr.experiment.candidates`) differ only in where they save states and result lines.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from rkr.data import Batches, Stream
from rkr.data.task import Samples
from rkr.errors import RkrError, UsageError
from rkr.experiment.events import EpochEnd, Progress, Watch
from rkr.experiment.execution import Diverged, Execution, Interrupted
from rkr.experiment.folder import RunFolder
from rkr.experiment.processes import gather, over_whole_batches, placeholder_batch, sum_gradients
from rkr.experiment.samples import derived, rehearsed
from rkr.experiment.spec import RunSpec
from rkr.methods import Learner, MakeNetwork
from rkr.methods.learner import Outcome, Phase, ReadSamples, SeenTask

if TYPE_CHECKING:
    from lightning_fabric import Fabric

PROGRESS_SECONDS = 0.25


@dataclass
class Position:
    """Where training is: before batch `batch` of epoch `epoch` of phase `phase` of task `number`."""

    number: int = 0
    phase: int = 0
    epoch: int = 0
    batch: int = 0


class CandidateKey(NamedTuple):
    """Identifies a candidate: the task, the round and the place in the round, all counted from 0."""

    number: int
    round: int
    place: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.number + 1}-{self.round + 1}-{self.place + 1}.safetensors"


class Loop:
    """Trains a learner on a task. Subclasses decide where states and result lines go, and when to stop."""

    def __init__(
        self, spec: RunSpec, stream: Stream, folder: RunFolder, fabric: Fabric, watch: Watch, execution: Execution
    ) -> None:
        self.spec, self.stream, self.folder, self.fabric, self.execution = spec, stream, folder, fabric, execution
        self._watch: Watch = watch if fabric.is_global_zero else lambda event: None
        self._at = Position()
        self._learner: Learner
        self._optimizer: Optimizer | None = None
        self._sums = torch.zeros(3, dtype=torch.float64)  # of the epoch so far: loss, hits, images
        self._task_seconds = 0.0  # training time of the task in earlier sessions
        self._epoch_seconds: list[float] = []
        self._last_save = self._last_progress = self._began = time.monotonic()
        self._done_at_start = 0.0
        self._words: tuple[str | int, ...] = ()  # part of all seeds of training
        self._mark: dict[str, Any] = {}  # part of all events of training
        self._kept_back: Tensor | None = None  # numbers of the task's training samples that are left out

    # -- what subclasses decide ---------------------------------------------------------------------------

    def _save(self, task_seconds: float) -> None:
        """Save the state."""
        raise NotImplementedError

    def _record(self, line: dict[str, Any]) -> None:
        """Record the line of an epoch."""
        raise NotImplementedError

    def _asked(self) -> bool:
        """Whether the user asked to stop."""
        raise NotImplementedError

    def _done(self, of_task: float = 0.0) -> float:
        """The completed share of all training, given that of the task's."""
        raise NotImplementedError

    def _enough(self) -> bool:
        """Whether to end the phase before all of its epochs are over."""
        return False

    # -- the loop -----------------------------------------------------------------------------------------

    def _learn(self, state: dict[str, Any] | None) -> None:
        """Train the current task, from the current position."""
        learner, at = self._learner, self._at
        started = time.monotonic()
        self._epoch_seconds = []
        while at.phase < len(phases := learner.phases()):  # they may depend on earlier phases
            phase = phases[at.phase]
            self._seed("phase", at.number, at.phase, *self._words)
            learner.prepare(phase, self._in_order())
            if self.fabric.world_size > 1:  # noise and dropout are of a process's own samples
                self._seed("steps", at.number, at.phase, self.fabric.global_rank, *self._words)
            if self._optimizer is None or not phase.same_optimizer:
                self._optimizer = self._make_optimizer(phase)
            if state is not None and state["optimizer"] is not None:  # it was saved during this phase
                learner.load_state_dict(state["learner"])  # again, as `prepare` may write to it
                _load_optimizer(self._optimizer, state["optimizer"])
                _set_rng(state["rng"][self.fabric.global_rank % len(state["rng"])])
            state = None
            batches = self._batches()
            while at.epoch < self._epochs(phase) and not self._enough():
                self._train_epoch(phase, batches, started)
                if at.epoch == self._epochs(phase):
                    self._save_or_stop(started, save=True)  # the method's next step can take long
            at.phase, at.epoch = at.phase + 1, 0
        self._task_seconds += time.monotonic() - started
        self._optimizer = None

    def _train_epoch(self, phase: Phase, batches: Batches, started: float) -> None:
        learner, optimizer, at, fabric = self._learner, self._optimizer, self._at, self.fabric
        assert optimizer is not None
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        learner.train()
        learner.begin_epoch(at.epoch / self._epochs(phase))
        epoch_began = time.monotonic()
        for x, y in batches.iter_from(at.epoch, at.batch):
            lr = self._rate(phase, at.epoch + at.batch / len(batches))
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)
            size = learner.whole_batch = batches.size(at.batch)
            share = len(y) / size
            if not share:  # a small last batch: this process joins the sums with a placeholder
                x, y = x.new_zeros(1, *x.shape[1:]), y.new_full((1,), learner.task.start)
            with fabric.autocast(), placeholder_batch(not share):
                outcome = learner.loss(x, y)
            if not isinstance(outcome, Outcome):
                raise UsageError(
                    f"{type(learner).__name__}.loss must return rkr.methods.Outcome(loss, correct), "
                    f"not {type(outcome).__name__}"
                )
            loss = outcome.loss if fabric.world_size == 1 else outcome.loss * share
            optimizer.zero_grad(set_to_none=True)
            fabric.backward(loss)
            sum_gradients(fabric, trained)
            learner.before_step(optimizer)
            optimizer.step()
            learner.after_step()
            self._sums[:2] += loss_and_hits(outcome) * torch.tensor([share * size, share > 0], dtype=torch.float64)
            self._sums[2] += share * size
            at.batch += 1
            self._between_batches(len(batches), started)
        if at.batch < len(batches):
            raise RkrError(f"task {learner.task.name!r}: batches ran out before the epoch's end")
        self._end_epoch(self._rate(phase, at.epoch), phase, time.monotonic() - epoch_began)

    def _between_batches(self, batches: int, started: float) -> None:
        now = time.monotonic()
        self._save_or_stop(started, save=now - self._last_save > 60 * self.execution.save_minutes)
        if now - self._last_progress > PROGRESS_SECONDS:
            self._last_progress = now
            loss, hits, images = self._sums.tolist()
            epoch, epochs = self._counted()
            done = self._done((epoch + self._at.batch / batches) / epochs)
            self._watch(
                Progress(
                    self.spec.title,
                    self._at.number + 1,
                    self._learner.task.name,
                    epoch,
                    epochs,
                    self._at.batch,
                    batches,
                    loss / max(images, 1),
                    None if math.isnan(hits) else hits / max(images, 1),
                    done,
                    self._left(done),
                    **self._mark,
                )
            )

    def _save_or_stop(self, started: float, save: bool) -> None:
        stop, save = self._agreed(self._asked(), save)
        if stop or save:
            self._save(self._task_seconds + time.monotonic() - started)
        if stop:
            raise Interrupted

    def _end_epoch(self, lr: float, phase: Phase, seconds: float) -> None:
        at, name = self._at, self._learner.task.name
        if self.fabric.world_size > 1:
            sums = self._sums.to(self.fabric.device)
            dist.all_reduce(sums)
            self._sums = sums.cpu()
        loss, hits, images = self._sums.tolist()
        loss, accuracy = loss / images, None if math.isnan(hits) else hits / images
        if not math.isfinite(loss):
            where = f"the loss of task {name!r} is {loss} in epoch {at.epoch + 1}"
            raise Diverged(f"training diverged: {where}; choose a lower learning rate, or other options of the method")
        line = {"event": "epoch", "number": at.number + 1, "task": name, "phase": phase.name, "epoch": at.epoch}
        self._record({**line, "loss": loss, "accuracy": accuracy, "lr": lr})
        label, (epoch, epochs) = self.spec.title, self._counted()
        self._watch(EpochEnd(label, at.number + 1, name, epoch, epochs, loss, accuracy, lr, seconds, **self._mark))
        self._epoch_seconds.append(seconds)
        self._sums.zero_()
        at.epoch, at.batch = at.epoch + 1, 0

    # -- the learner and its state ------------------------------------------------------------------------

    def _build(self, begun: int = 0) -> None:
        """Build a new learner and begin `begun` tasks, with the same random values in every process."""
        spec = self.spec
        self._seed("learner")
        self._learner = spec.learner.build(self._network_maker(), spec.head, **spec.options)
        self._learner.expects([len(task.training.class_names) for task in self.stream.tasks])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tasks are added before anything is trained: the values come after
            for number in range(begun):
                self._begin(number)

    def _begin(self, number: int) -> None:
        training = self.stream.tasks[number].training
        start = sum(task.classes for task in self._learner.seen)
        self._seed("task", number)
        device = self.fabric.device
        attributes = None if training.attributes is None else training.attributes.to(device)
        scaling = None if training.scaling is None else (training.scaling[0].to(device), training.scaling[1].to(device))
        seen = SeenTask(number, training.name, training.class_names, start, attributes, training.unseen, scaling)
        self._learner.begin(seen)

    def _adopt(self, key: CandidateKey, candidate: Any) -> None:
        """Adopt a candidate, with the same random values in every process."""
        self._seed("adopt", *key)
        self._learner.adopt(candidate)

    def _state(self, task_seconds: float) -> dict[str, Any]:
        """The position of training, from all processes."""
        sums, rng = gather(self.fabric, self._sums), gather(self.fabric, _get_rng())
        at = self._at
        return {
            "position": [at.number, at.phase, at.epoch, at.batch],
            "begun": len(self._learner.seen),
            "learner": self._learner.state_dict(),
            "optimizer": None if self._optimizer is None else self._optimizer.state_dict(),
            "rng": rng,
            "sums": torch.stack(sums),  # of each process: adding them now would change last bits
            "task_seconds": task_seconds,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore a state; the learner has begun the same tasks."""
        self._learner.load_state_dict(state["learner"])
        self._at = Position(*state["position"])
        sums = state["sums"].reshape(-1, 3)
        if len(sums) == self.fabric.world_size:
            self._sums = sums[self.fabric.global_rank].clone()
        elif self.fabric.is_global_zero:  # the number of processes has changed
            self._sums = sums.sum(0)
        self._task_seconds = state["task_seconds"]

    # -- pieces -------------------------------------------------------------------------------------------

    def _network_maker(self) -> MakeNetwork:
        """Builds networks for the learner: a function without a reference to this run, which holds test samples."""
        make, fabric = self.spec.make, self.fabric
        layout = torch.channels_last if self.spec.training.memory_format == "channels_last" else torch.contiguous_format

        def made() -> torch.nn.Module:
            network = make().to(fabric.device, memory_format=layout)  # type: ignore[call-overload]
            return over_whole_batches(network) if fabric.world_size > 1 else network

        return made

    def _make_optimizer(self, phase: Phase) -> Optimizer:
        s, groups = self.spec.training, self._learner.groups()
        lr = self._rate(phase, 0)
        if s.optimizer == "adam":
            # Fused: the plain one spends most of its time on large temporary tensors.
            fused = self.fabric.device.type in ("cpu", "cuda")
            adam: dict[str, Any] = {"betas": s.betas, "eps": s.eps, "amsgrad": s.amsgrad, "fused": fused}
            return Adam(groups, lr=lr, weight_decay=s.weight_decay, **adam)
        return SGD(groups, lr=lr, momentum=s.momentum, weight_decay=s.weight_decay)

    def _counted(self) -> tuple[int, int]:
        """The current epoch and the number of epochs of the task, counted through its phases."""
        lengths = [self._epochs(phase) for phase in self._learner.phases()]
        return sum(lengths[: self._at.phase]) + self._at.epoch, sum(lengths)

    def _epochs(self, phase: Phase) -> int:
        if phase.epochs is not None:
            return phase.epochs
        return max(1, round(self.spec.training.epochs * phase.share))

    def _rate(self, phase: Phase, epoch: float) -> float:
        """The learning rate of a batch; `epoch` has the share of the epoch that is over."""
        s = self.spec.training
        passed = sum(int(epoch) >= milestone * phase.share for milestone in s.milestones)
        return s.lr * phase.lr_factor * s.gamma**passed

    def _batches(self) -> Batches:
        """The training samples that the learner selects, in random order and augmented."""
        spec = self.spec
        seed = derived(spec.seed, "batches", self._at.number, self._at.phase, *self._words)
        afresh = spec.training.sampling == "afresh"
        rank, world = self.fabric.global_rank, self.fabric.world_size
        samples = rehearsed(self._learner, self._trainings(), self._kept_back)
        return self._reader()(samples, seed=seed, augment=spec.augment, rank=rank, world=world, afresh=afresh)

    def _trainings(self) -> list[Samples]:
        """The training samples of every task so far."""
        return [task.training.train for task in self.stream.tasks[: self._at.number + 1]]

    def _in_order(self, part: Samples | None = None) -> ReadSamples:
        """Read a part of the samples, or those that the learner selects.

        Keeps no reference to test samples. Every process reads all of it, because what learners keep must be equal in
        all processes.
        """
        read, learner, trainings, kept_back = self._reader(), self._learner, self._trainings(), self._kept_back
        return lambda: read(rehearsed(learner, trainings, kept_back) if part is None else part).iter_from(0)

    def _reader(self) -> Callable[..., Batches]:
        mean, std, device, workers = self.stream.mean, self.stream.std, self.fabric.device, self.execution.threads
        return partial(Batches, batch=self.spec.training.batch, mean=mean, std=std, device=device, workers=workers)

    def _left(self, done: float) -> float | None:
        """Seconds left at the speed so far; None for methods with candidates, whose tasks differ in length."""
        if type(self._learner).rounds is not Learner.rounds:
            return None
        gained = done - self._done_at_start
        return (time.monotonic() - self._began) * (1 - done) / gained if gained > 0 else None

    def _seed(self, *words: str | int) -> None:
        """Seed the random generator for one purpose."""
        torch.manual_seed(derived(self.spec.seed, *words))

    def _agreed(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """The decision of the first process, for all of them."""
        if self.fabric.world_size == 1:
            return stop, save
        flags = torch.tensor([stop, save], device=self.fabric.device)
        dist.broadcast(flags, 0)
        return bool(flags[0]), bool(flags[1])


def loss_and_hits(outcome: Outcome) -> Tensor:
    """Loss and hits of a batch, in float64 (2,) on the CPU, in one transfer. Hits are NaN if they have no meaning."""
    loss = outcome.loss.detach()
    kind = torch.promote_types(loss.dtype, torch.float32)  # exact for counts; Apple's GPUs have no float64
    hits = loss.new_tensor(math.nan) if outcome.correct is None else outcome.correct
    return torch.stack([loss.to(kind), hits.to(kind)]).cpu().double()


def be_deterministic() -> None:
    """Make computations repeatable bit for bit."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state. Tensors get the memory layout of their parameters, which files do not store."""
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

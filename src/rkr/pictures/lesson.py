"""One lesson: the training loop for one new task of a zoo.

The loop is that of experiments (`rkr.experiment.loop`). A lesson decides what it leaves open: it begins from a linear
probe of the base, validates after each epoch, keeps the best state, stops early, and saves to a folder of its own, so
that the same command goes on after a kill. The zoo is not touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from rkr.core import RectifiedModel
from rkr.core.features import base_features
from rkr.core.files import base_fingerprint
from rkr.data import Augment, Pictures, Stream, Task, Training
from rkr.errors import FileError, UsageError
from rkr.experiment.events import Preparing, Started, Stopped, TaskEnd, Watch
from rkr.experiment.execution import Execution, Interrupted
from rkr.experiment.folder import RunFolder
from rkr.experiment.loop import Loop, be_deterministic
from rkr.experiment.processes import keep_freed_memory
from rkr.experiment.recipes.settings import TrainingSettings
from rkr.experiment.samples import derived
from rkr.experiment.spec import RunSpec
from rkr.experiment.state import load_state, save_state
from rkr.methods.learner import Phase, SeenTask
from rkr.pictures.learner import PictureLearner, fit_probe, repeated
from rkr.pictures.preparation import Preparation
from rkr.pictures.settings import Settings

if TYPE_CHECKING:
    from lightning_fabric import Fabric

BATCH = 64  # of passes without gradients
WARM_UP = 0.2  # share of the training in which the learning rate rises
DECAYS = (0.1, 0.03, 0.01)  # of the linear probe, by validation; the first of equals
SAVE_MINUTES = 1.0  # also saved after each epoch


@dataclass(frozen=True, eq=False)
class LessonSpec(RunSpec):
    """What the loop needs to know of a lesson."""

    zoom: float = 0.0

    @property
    def title(self) -> str:
        """What displays call the run."""
        return self.recipe

    @property
    def augment(self) -> Augment:
        """Random resized crops and flips."""
        return Augment(pad=0, flip=True, zoom=self.zoom)


@dataclass(frozen=True)
class Learned:
    """What came out of a lesson.

    Attributes:
        accuracy: On the validation part; None without one.
        probe: Accuracy of the linear probe that training began from.
        kept: "trained", or "probe" if the trained task was worse on the validation part.
        epochs: Epochs that were trained.
        seconds: Of training and validation, over all sessions.
        features: The base's features of all pictures, training part first, as `rkr.core.infer` needs them.
        y: Their classes.
    """

    accuracy: float | None
    probe: float | None
    kept: str
    epochs: int
    seconds: float
    features: Tensor
    y: Tensor


class Lesson(Loop):
    """Teaches one task to a zoo's model, in memory.

    Args:
        model: The zoo's model. The new task is added to it.
        task: Its name.
        classes: Names of its classes.
        train: Pictures of the training part.
        held_out: Pictures of the validation part.
        settings: How it is trained.
        preparation: How pictures are normalised.
        folder: Where the state is kept.
        fabric: Device and precision.
        watch: Called with every event.
        execution: Settings that do not change the results.
    """

    def __init__(
        self,
        model: RectifiedModel,
        task: str,
        classes: tuple[str, ...],
        train: Pictures,
        held_out: Pictures,
        settings: Settings,
        preparation: Preparation,
        folder: Path,
        fabric: Fabric,
        watch: Watch,
        execution: Execution | None = None,
    ) -> None:
        training = Training(task, classes, train, held_out if len(held_out) else None)
        stream = Stream(
            task,
            (Task(training, held_out if len(held_out) else train),),
            preparation.mean,
            preparation.std,
            (tuple(range(len(classes))),),
        )
        schedule = TrainingSettings(epochs=settings.epochs, batch=settings.batch, lr=settings.lr, seed=settings.seed)
        assert model.head is not None
        spec = LessonSpec(
            task, "learn", "fixed", cast(Any, None), {}, lambda: model.network, model.head, schedule, zoom=settings.zoom
        )
        super().__init__(
            spec, stream, RunFolder(folder), fabric, watch, execution or Execution(save_minutes=SAVE_MINUTES)
        )
        self._model, self._settings, self._classes = model, settings, classes
        self._learner: PictureLearner = PictureLearner(model, settings)
        self._file = folder / "state.safetensors"
        self._identity = identity(model, stream, settings)
        self._stop = False
        self._examples: list[tuple[Tensor, Tensor]] = []  # features and labels for the probe, of each part
        self._probe: dict[str, Tensor] = {}  # the state from which training begins
        self._decay = DECAYS[1]  # of the probe
        self._best: dict[str, Tensor] = {}
        self._best_figures: tuple[float, float] | None = None  # accuracy and negative loss on the validation part
        self._since = 0  # epochs since then
        self._history: list[dict[str, Any]] = []
        self._earlier, self._session = 0.0, time.monotonic()

    def stop(self) -> None:
        """Ask the lesson to stop after the batch at hand."""
        self._stop = True

    def check_stop(self) -> None:
        """Leave if a stop was asked for: nothing is lost."""
        if self._stop:
            raise Interrupted

    def run(self) -> Learned:
        """Learn the task. `Interrupted` if a stop was asked for."""
        be_deterministic()
        keep_freed_memory()
        learner, settings, name = self._learner, self._settings, self.stream.tasks[0].name
        training = self.stream.tasks[0].training
        state = self._resumed()
        self._seed("task", 0)
        learner.begin(SeenTask(0, name, self._classes, 0))
        self._model.to(self.fabric.device)
        learner.rows = repeated(training.train.y, settings.balance, derived(settings.seed, "balance"))
        try:
            features, y = self._features()
            probe = self._start(features, y)
            self._probe = {key: tensor.clone() for key, tensor in learner.state_dict().items()}
            if state is not None:
                self._restore(state)
            self._tell_start(state is not None)
            self._learn(state)
            self.check_stop()
            return self._finish(features, y, probe)
        except Interrupted:
            self._watch(Stopped(self.spec.title, str(self.folder.path), 1, self._at.epoch))
            raise

    # -- before and after training -------------------------------------------------------------------------

    def _features(self) -> tuple[Tensor, Tensor]:
        """The base's features of the training part, then of the validation part: float32 (N, D).

        Those of random crops and mirror images join them in `_examples`, from which the probe learns.
        """
        parts = self._parts()
        count = sum(map(len, parts))
        crops = self._learner.crops(count)
        how = {"seed": derived(self._settings.seed, "crops"), "augment": self.spec.augment}
        passes = [(part, epoch, how if epoch else {}) for epoch in range(crops + 1) for part in parts]
        found: list[tuple[Tensor, Tensor]] = []
        done = 0
        self._model.eval()
        for part, epoch, more in passes:
            batches = []
            for x, y in self._reader()(part, batch=BATCH, **more).iter_from(epoch):
                self.check_stop()
                with self.fabric.autocast():
                    batches.append((base_features(self._model, x), y))
                done += len(y)
                self._watch(Preparing(self.spec.title, "features", done, count * (crops + 1)))
            found.append(_joined(batches))
        self._examples = [_joined(found[k :: len(parts)]) for k in range(len(parts))]
        return _joined(found[: len(parts)])

    def _parts(self) -> list[Pictures]:
        training = self.stream.tasks[0].training
        parts = [training.train] if training.validation is None else [training.train, training.validation]
        return [part for part in parts if isinstance(part, Pictures)]

    def _start(self, features: Tensor, y: Tensor) -> float | None:
        """Begin from a linear probe, the decay chosen on the validation part. Its accuracy there."""
        if not self._learner.takes_probe:
            if not self._settings.rank:
                raise UsageError("--rank 0 needs a network whose classification layer is a Linear with a bias")
            return None
        n = len(self.stream.tasks[0].training.train)
        best: tuple[float, Tensor, Tensor] | None = None
        for decay in DECAYS if len(features) > n else DECAYS[1:2]:
            weight, bias = self._fitted(*self._examples[0], decay)
            hits = (F.linear(features[n:], weight, bias).argmax(1) == y[n:]).sum().item()
            if best is None or hits > best[0]:
                best, self._decay = (hits, weight, bias), decay
        assert best is not None
        self._learner.start_head(*best[1:])
        return best[0] / (len(features) - n) if len(features) > n else None

    def _fitted(self, features: Tensor, y: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        """A linear probe, small classes repeated as in an epoch."""
        rows = repeated(y.cpu(), self._settings.balance, derived(self._settings.seed, "balance"))
        if rows is not None:
            features, y = features[rows.to(features.device)], y[rows.to(y.device)]
        return fit_probe(features, y, len(self._classes), decay)

    def _finish(self, features: Tensor, y: Tensor, probe: float | None) -> Learned:
        """The best state; if the probe was better, that one, fitted anew to all pictures."""
        learner = self._learner
        accuracy, kept = probe, "probe"
        if self._settings.rank:
            if self._best:
                learner.load_state_dict(self._best)
            figures = self._validated()
            accuracy, kept = None if figures is None else figures[0], "trained"
            if probe is not None and accuracy is not None and accuracy < probe:
                learner.load_state_dict(self._probe)
                accuracy, kept = probe, "probe"
        if kept == "probe":  # its decay is chosen, so the validation part is of no more use otherwise
            learner.start_head(*self._fitted(*_joined(self._examples), self._decay))
        learner.eval()
        seconds, title = self._seconds(), self.spec.title
        shown = () if accuracy is None else (accuracy,)
        self._watch(TaskEnd(title, 1, learner.task.name, 1, shown, None, None, seconds))
        return Learned(accuracy, probe, kept, len(self._history), seconds, features, y)

    def _validated(self) -> tuple[float, float] | None:
        """Accuracy and negative loss on the validation part."""
        part = self.stream.tasks[0].training.validation
        if part is None:
            return None
        self._learner.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad(), self.fabric.autocast():
            for x, y in self._reader()(part, batch=BATCH).iter_from(0):
                logits = self._learner.predict(x)
                hits = (logits.argmax(1) == y).sum()
                sums += torch.stack([hits.double(), -F.cross_entropy(logits, y, reduction="sum").double()]).cpu()
        accuracy, loss = (sums / len(part)).tolist()
        return accuracy, loss

    # -- what the loop leaves open -------------------------------------------------------------------------

    def _end_epoch(self, lr: float, phase: Phase, seconds: float) -> None:
        """Validate, and keep the best state: of equals the later one, whose learning rate was lower."""
        super()._end_epoch(lr, phase, seconds)
        figures = self._validated()
        if figures is not None:
            self._history[-1]["validation"] = figures[0]
            if self._best_figures is None or figures >= self._best_figures:
                self._best_figures, self._since = figures, 0
                self._best = {key: tensor.clone() for key, tensor in self._learner.state_dict().items()}
            else:
                self._since += 1
        self._save(0.0)

    def _enough(self) -> bool:
        return self._since >= self._settings.patience

    def _rate(self, phase: Phase, epoch: float) -> float:
        done, highest = epoch / self._settings.epochs, self._settings.lr
        if done < WARM_UP:
            return highest * max(done, 1e-3) / WARM_UP
        return highest * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2

    def _make_optimizer(self, phase: Phase) -> Optimizer:
        return AdamW(self._learner.groups(), lr=self._settings.lr, weight_decay=self._settings.weight_decay)

    def _record(self, line: dict[str, Any]) -> None:
        self._history.append(line)

    def _asked(self) -> bool:
        return self._stop

    def _done(self, of_task: float = 0.0) -> float:
        return of_task

    # -- state ---------------------------------------------------------------------------------------------

    def _save(self, task_seconds: float) -> None:
        state = self._state(task_seconds)
        more = {"best": self._best, "figures": self._best_figures, "since": self._since, "history": self._history}
        save_state(self._file, {**state, **more, "identity": self._identity, "seconds": self._seconds()})
        self._last_save = time.monotonic()

    def _resumed(self) -> dict[str, Any] | None:
        """The saved state, if it is of the same lesson."""
        if not self._file.exists():
            return None
        try:
            state = load_state(self._file)
        except FileError:
            return None  # written by another version
        if state.get("identity") != self._identity:
            return None
        return cast("dict[str, Any]", state)

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        figures = state["figures"]
        self._best = state["best"]
        self._best_figures = None if figures is None else (figures[0], figures[1])
        self._since, self._history, self._earlier = state["since"], state["history"], state["seconds"]

    def _seconds(self) -> float:
        return self._earlier + time.monotonic() - self._session

    def _tell_start(self, resumed: bool) -> None:
        self._began = self._last_save = time.monotonic()
        at, title, epochs = self._at, self.spec.title, self._settings.epochs
        self._done_at_start = at.epoch / epochs
        folder, names = str(self.folder.path), (self.stream.tasks[0].name,)
        self._watch(Started(title, folder, names, epochs, 1, at.epoch, resumed, len(self._history)))


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Features and labels, one after the other."""
    features, y = zip(*found, strict=True)
    return torch.cat(features), torch.cat(y)


def identity(model: RectifiedModel, stream: Stream, settings: Settings) -> str:
    """A hash of everything that decides what is learned: pictures, base, settings."""
    parts = [base_fingerprint(model), stream.describe()["sha256"], model.options.to_json(), settings.to_json()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

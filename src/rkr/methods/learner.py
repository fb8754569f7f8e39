"""The base of all methods: a module with hooks that the training loop calls in the same order for every method.

    for each task:  begin(task)                       make room: a head, factors, a network, ...
                    for each phase:  prepare(phase, train)
                        groups()                      what to optimise
                        for each epoch:  begin_epoch(progress)
                            for each batch:  loss(x, y), before_step(optimizer), after_step()
                    end(train, validation)            importance weights, memories, freezing, ...
    at any time:    predict(x, number)                logits over the classes of one task

Before `loss` the loop sets `whole_batch`, the number of samples of the batch over all processes. Epochs are in training
mode, `end` and `predict` in evaluation mode. Some methods
apply their penalty only in `before_step` and `after_step`: skip these hooks and no penalty applies.

A method may try several variants of a task, its candidates, and keep the best. `rounds` says so, and then the phases
are not of the learner itself, but of a new learner for each candidate: it has begun the same tasks, got the learner's
state and adopted the candidate.

    for each task with rounds:  begin(task)
                    for each round:  propose(number)  the candidates
                        each, on a learner of its own:  adopt(candidate), then phases, epochs and batches as above
                        score(candidate, accuracy)    of each, from its accuracy on held-out samples
                        observe(number, candidates, scores)
                    adopt(winner)                     and its trained state is loaded
                    end(train, validation)

A learner is an `nn.Module`, so its state is its `state_dict`: parameters, and buffers for anything else that it
remembers. To resume, the loop builds a new learner, calls `begin` for the same tasks, and loads
that state; a method whose shape also depends on other things, such as adopted candidates, overrides `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.capacity import Capacity
from rkr.core import multiply_adds, norm_parameters
from rkr.methods.learner_file import read_learner, write_learner

MakeNetwork = Callable[[], nn.Module]
ReadSamples = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Reads samples in order, without augmentation."""


@dataclass(frozen=True)
class SeenTask:
    """The part of a task that a learner knows.

    Labels number the classes of all tasks; those of this task begin at `start`.
    """

    number: int  # 0, 1, ...
    name: str
    class_names: tuple[str, ...]
    start: int
    attributes: Tensor | None = None  # (C, A): descriptions of the classes in zero-shot learning
    unseen: tuple[int, ...] = ()  # classes without training samples, counted within the task
    scaling: tuple[Tensor, Tensor] | None = None  # (D,) each: what was taken from features, and what divided them

    @property
    def classes(self) -> int:
        """How many classes it has."""
        return len(self.class_names)

    @property
    def labels(self) -> slice:
        """Its range in the classes of all tasks."""
        return slice(self.start, self.start + self.classes)


class Outcome(NamedTuple):
    """A batch's mean loss and number of correctly classified samples (None if that has no meaning)."""

    loss: Tensor
    correct: Tensor | None


@dataclass(frozen=True)
class Phase:
    """One pass of training within a task."""

    name: str = "train"
    epochs: int | None = None  # None: of the recipe's epochs this share, its milestones in proportion
    share: float = 1.0
    lr_factor: float = 1.0
    same_optimizer: bool = False  # continues with the optimiser of the previous phase, which must train the same groups


class Learner(nn.Module):
    """Base of all methods.

    Args:
        make: Builds a new, randomly initialised network.
        head: Name of the network's classification layer.

    Example:
        >>> import torch, rkr
        >>> from rkr.methods import SeenTask
        >>> class Frozen(rkr.Learner):
        ...     def begin(self, task: SeenTask) -> None:
        ...         super().begin(task)
        ...         self.network = self.make()
        ...     def predict(self, x: torch.Tensor, number: int) -> torch.Tensor:
        ...         return self.network(x)[:, self.seen[number].labels]
        >>> learner = Frozen(lambda: rkr.networks.small_cnn(classes=4), "fc")
        >>> learner.begin(SeenTask(0, "first", ("cat", "dog"), start=0))
        >>> learner.predict(torch.rand(5, 1, 8, 8), 0).shape
        torch.Size([5, 2])
    """

    setting: ClassVar[str] = "images"
    """What it learns: one of `rkr.registry.SETTINGS`."""

    passes_on: ClassVar[Any] = None
    """The class whose fields are further options, if the constructor accepts them as `**options`."""

    isolating: ClassVar[bool] = False
    """Whether earlier tasks' outputs stay bit-identical. Every run checks it."""

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Options without a published value, with the values that `rkr tune` tries: see `rkr.methods.ranges`."""

    augment_options: ClassVar[Sequence[str]] = ()
    """Options whose default comes from the recipe's augmentation."""

    recipe_options: ClassVar[Sequence[str]] = ()
    """Options that a section of the recipe sets for all methods."""

    own_training: ClassVar[Mapping[str, Any]] = {}
    """The optimiser that the method's authors chose: keys of a recipe's section [training], in place of the recipe's.
    `[methods.<name>.training]` of a recipe overrides it. Epochs, batches and augmentation are always the recipe's."""

    agnostic: ClassVar[str] = "last"
    """When to run task-agnostic evaluation: after the "last" task, after "every" task (class-incremental methods), or
    "never"."""

    checked: ClassVar[str] = ""
    """What the implementation was checked against: the authors' code, the paper's equations or printed counts."""

    differs: ClassVar[Sequence[str]] = ()
    """Deliberate differences from that, as sentences."""

    unrecorded: ClassVar[Mapping[str, Any]] = {}
    """Options that were added in later versions, with the values that earlier versions used."""

    loadable: ClassVar[bool] = True
    """Whether `rkr.load_learner` can load what was learned."""

    learns_its_size: ClassVar[str] = ""
    """If the capacity depends on training: a description of the capacity before training."""

    holds_out: float = 0.1
    """Share of the training samples on which candidates are compared, if the recipe has no validation split."""

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__()
        self.make, self.head = make, head
        self.seen: list[SeenTask] = []
        self.whole_batch = 0  # samples of the batch at hand over all processes, set before `loss`; 0: there is one

    # -- hooks --------------------------------------------------------------------------------------------

    def expects(self, classes: Sequence[int]) -> None:
        """Check the number of classes of each task.

        Methods raise UsageError here, before training, if they cannot learn them.
        """

    def begin(self, task: SeenTask) -> None:
        """Prepare for a task. Subclasses call this once."""
        self.seen.append(task)

    def phases(self) -> Sequence[Phase]:
        """The training phases of the task."""
        return (Phase(),)

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        """Prepare for a phase. `train` reads the samples that `rehearse` has selected so far."""

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        """Which training images of which tasks (by number) to train on; None for all of a task's.

        Args:
            images: How many training images each task has.
        """
        return {self.task.number: None}

    def groups(self) -> list[dict[str, Any]]:
        """The optimiser groups of the phase."""
        raise NotImplementedError

    def begin_epoch(self, progress: float) -> None:
        """An epoch begins or is resumed. `progress` is the completed share of the phase, 0 to 1."""

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        """The loss of a batch. Labels `y` number the classes of all tasks."""
        raise NotImplementedError

    def before_step(self, optimizer: Optimizer) -> None:
        """Called when the gradients of `loss` are summed over all processes, before the optimiser's step."""

    def after_step(self) -> None:
        """Called after the optimiser's step."""

    def rounds(self) -> int:
        """Number of rounds of candidates of the current task; 0 to train without candidates."""
        return 0

    def propose(self, number: int) -> list[Any]:
        """The candidates of round `number` (0, 1, ...) of the current task, as JSON values."""
        raise NotImplementedError

    def adopt(self, candidate: Any) -> None:
        """Become a candidate: create its parameters and draw their values.

        The learner is in the state after `begin` of the task and `propose` and `observe` of the rounds so far. After
        all rounds the winner is adopted and its trained state is loaded. That state is complete, so changes that
        `observe` made after the winner's training began are lost.
        """
        raise NotImplementedError

    def score(self, candidate: Any, accuracy: float) -> float:
        """The score of a trained candidate, from its accuracy (0 to 1) on held-out samples with the task given.

        The highest of all rounds wins, the first of equals. Called on the learner itself, which has not adopted the
        candidate. A candidate whose training diverged scores -inf.
        """
        return accuracy

    def observe(self, number: int, candidates: list[Any], scores: list[float]) -> None:
        """Called after round `number`, to improve later proposals."""

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        """Called after a task is trained.

        `train` reads the samples that `rehearse` selects; `validation` is None without a validation split.
        """

    def predict(self, x: Tensor, number: int) -> Tensor:
        """Logits over the classes of task `number` (0, 1, ...)."""
        raise NotImplementedError

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Task number and class within the task, for samples whose task is unknown: the most confident task wins.

        Every task computes a softmax over its own classes, and the highest probability wins (Hendrycks & Gimpel, ICLR
        2017). Class-incremental methods have rules of their own.
        """
        found = [self.predict(x, task.number).float().softmax(1).max(1) for task in self.seen]
        confidence = torch.stack([values for values, _ in found])  # (T, B)
        answers = torch.stack([labels for _, labels in found])
        task = confidence.argmax(0)  # (B,): the first of equals
        return task, answers.gather(0, task[None])[0]

    def capacity(self) -> Capacity:
        """What must be kept between tasks, counted by `rkr.capacity.RULE`."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """Further facts to record about the task just learned, as JSON."""
        return {}

    def export(self, folder: Any) -> None:
        """Write what was learned to a folder, for use outside experiments."""
        write_learner(folder, self.state_dict())

    def restore(self, folder: Any) -> None:
        """Load what `export` wrote. The same tasks have begun."""
        self.load_state_dict(read_learner(folder)[1])

    # -- for subclasses -----------------------------------------------------------------------------------

    @property
    def task(self) -> SeenTask:
        """The task being learned."""
        return self.seen[-1]

    def classified(self, logits: Tensor, y: Tensor) -> Outcome:
        """Cross-entropy over the classes of the task being learned."""
        y = y - self.task.start
        return Outcome(F.cross_entropy(logits, y), (logits.detach().argmax(1) == y).sum())


# ---------------------------------------------------------------------------------------------------------
# Pieces


def plain_size(network: nn.Module) -> Capacity:
    """The capacity of a plain network with its own head, with multiply-adds if it has an `input_shape`."""
    shape, parameters = getattr(network, "input_shape", None), sum(p.numel() for p in network.parameters())
    macs = None if shape is None else multiply_adds(network, shape)[0]
    return Capacity(parameters, parameters, nbytes(network), macs)


def decay_groups(network: nn.Module, leave_out: set[int] = frozenset()) -> list[dict[str, Any]]:  # type: ignore[assignment]
    """All trainable parameters, those of normalisation layers without weight decay, as `RectifiedModel` groups them."""
    norms = {id(p) for p in norm_parameters(network)}
    chosen = [p for p in network.parameters() if p.requires_grad and id(p) not in leave_out]
    return [
        {"params": [p for p in chosen if id(p) not in norms]},
        {"params": [p for p in chosen if id(p) in norms], "weight_decay": 0.0},
    ]


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode. Restore each layer's mode on exit."""
    modes = [(layer, layer.training) for layer in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


def nbytes(module: nn.Module) -> int:
    """Memory of a module's parameters and buffers."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.nbytes for t in tensors.values())

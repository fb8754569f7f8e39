"""What every method is: a module with a few hooks, which the engine calls in the same order for all of them.

    for each task:  begin(task)                       make room: a head, factors, a network, ...
                    for each phase:  prepare(phase, train)
                        groups()                      what to optimise
                        for each epoch:  begin_epoch(progress)
                            for each batch:  loss(x, y), before_step(optimizer), after_step()
                    end(train, validation)            importance weights, memories, freezing, ...
    at any time:    predict(x, number)                logits over the classes of one task

A method may try several variants of a task, its candidates, and keep the best. `rounds` says so, and then the phases
are not of the learner itself, but of a new learner for each candidate: it has begun the same tasks, got the learner's
state and adopted the candidate.

    for each task with rounds:  begin(task)
                    for each round:  propose(number)  the candidates
                        each, on a learner of its own:  adopt(candidate), then phases, epochs and batches as above
                        worth(candidate, accuracy)    of each, from its accuracy on held-out samples
                        judge(number, candidates, worths)
                    adopt(winner)                     and its trained state is loaded
                    end(train, validation)

A learner is an `nn.Module`, so its state is its `state_dict`: parameters, and buffers for anything else that it
remembers. To go on after an interruption the engine makes a new learner, calls `begin` for the same tasks, and loads
that state; a method whose shape depends on more than the tasks, as on candidates that it adopted for earlier ones,
overrides `load_state_dict`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn
from torch.optim import Optimizer

from rkr.atomic import write_atomic
from rkr.core.cost import multiply_adds
from rkr.errors import UsageError

MakeNetwork = Callable[[], nn.Module]
ReadSamples = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""A pass over a part of the task's samples, in order and without augmentation."""


@dataclass(frozen=True)
class SeenTask:
    """A task as its learner knows it. Labels count classes over all tasks, so this task's begin at `start`."""

    number: int  # 0, 1, ...
    name: str
    class_names: tuple[str, ...]
    start: int
    attributes: Tensor | None = None  # (C, A): what is known of the classes besides samples, in zero-shot learning
    unseen: tuple[int, ...] = ()  # classes without training samples, counted within the task

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def labels(self) -> slice:
        """Its classes among those of all tasks."""
        return slice(self.start, self.start + self.classes)


class Outcome(NamedTuple):
    """A batch's mean loss, and how many samples were classified rightly (None if that has no meaning)."""

    loss: Tensor
    correct: Tensor | None


@dataclass(frozen=True)
class Phase:
    """One pass of training within a task. None: as the recipe says."""

    name: str = "train"
    epochs: int | None = None
    lr: float | None = None
    share: float = 1.0  # of the recipe's epochs; its milestones move in proportion
    lr_factor: float = 1.0
    same_optimizer: bool = False  # goes on with the optimiser of the phase before, which must train the same groups


@dataclass(frozen=True)
class Capacity:
    """What must be kept to use every task learned so far.

    Attributes:
        parameters: By the paper's count: heads lie within the plain network's 100 %, statistics are not counted.
        network: Parameters of the plain network: 100 %.
        bytes: Of everything, heads and statistics and memories of samples included.
        multiply_adds: For one sample of the last task.
    """

    parameters: int
    network: int
    bytes: int
    multiply_adds: int | None

    @property
    def percent(self) -> float:
        """The paper's "capacity"."""
        return 100 * self.parameters / self.network


class Learner(nn.Module):
    """Base of all methods.

    Args:
        make: Builds a new, randomly initialised network.
        head: Name of the network's classification layer.
    """

    isolating: ClassVar[bool] = False
    """Whether the method promises that earlier tasks answer bit for bit as before. The engine checks it."""

    grid: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Options that no paper settles, and the values that `rkr tune` tries."""

    learns_its_size: ClassVar[bool] = False
    """Whether training decides on the capacity, so that it is not known before."""

    holds_out: float = 0.1
    """Share of the training samples on which candidates are compared, where the recipe has no validation part."""

    def __init__(self, make: MakeNetwork, head: str) -> None:
        super().__init__()
        self.make, self.head = make, head
        self.seen: list[SeenTask] = []

    # -- hooks --------------------------------------------------------------------------------------------

    def begin(self, task: SeenTask) -> None:
        """Make room for a task. Subclasses call this first."""
        self.seen.append(task)

    def phases(self) -> Sequence[Phase]:
        """The passes in which the task is trained."""
        return (Phase(),)

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        """A phase begins. `train` reads what `rehearse` asked for until now."""

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        """Which training images of which tasks (by number) to train on; None for all of a task's.

        Args:
            images: How many training images each task has.
        """
        return {self.task.number: None}

    def groups(self) -> list[dict[str, Any]]:
        """Optimiser groups of what the phase trains."""
        raise NotImplementedError

    def begin_epoch(self, progress: float) -> None:
        """An epoch begins, or goes on after an interruption; `progress` is the share of the phase before it, 0 to 1."""

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        """The loss of a batch; `y` counts classes over all tasks."""
        raise NotImplementedError

    def before_step(self, optimizer: Optimizer) -> None:
        """The gradients of `loss` are there, over all processes, and the optimiser is about to move by them."""

    def after_step(self) -> None:
        """The optimiser has moved."""

    def rounds(self) -> int:
        """How many rounds of candidates the task at hand has; 0: it is trained as it is."""
        return 0

    def propose(self, number: int) -> list[Any]:
        """The candidates of round `number` (0, 1, ...) of the task at hand, as JSON values."""
        raise NotImplementedError

    def adopt(self, candidate: Any) -> None:
        """Become a candidate: make room for it, draw its new values.

        The learner is as `begin` of the task, and `propose` and `judge` of the rounds so far, have left it. The winner
        is adopted after all rounds; then its trained state is loaded, which is its learner's whole state: what `judge`
        has learned since that candidate began does not outlast the task.
        """
        raise NotImplementedError

    def worth(self, candidate: Any, accuracy: float) -> float:
        """What a trained candidate is worth, from its accuracy (0 to 1) on held-out samples, the task given.

        The highest of all rounds wins, the first of equals. It is asked of the learner itself, which has not adopted
        the candidate. One whose training diverged is worth -inf without being asked.
        """
        return accuracy

    def judge(self, number: int, candidates: list[Any], worths: list[float]) -> None:
        """Round `number` is over: learn from it how to propose."""

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        """The task is learned. `train` reads what `rehearse` asks for; `validation` is there if the recipe has it."""

    def predict(self, x: Tensor, number: int) -> Tensor:
        """Logits over the classes of task `number` (0, 1, ...)."""
        raise NotImplementedError

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Task number and class within the task, of samples whose task is not told: the most confident task answers.

        Every task computes a softmax over its own classes, and the highest probability wins (Hendrycks & Gimpel, ICLR
        2017). Methods made for class-incremental learning answer by their own rule.
        """
        found = [self.predict(x, task.number).float().softmax(1).max(1) for task in self.seen]
        confidence = torch.stack([values for values, _ in found])  # (T, B)
        answers = torch.stack([labels for _, labels in found])
        task = confidence.argmax(0)  # (B,): the first of equals
        return task, answers.gather(0, task[None])[0]

    def capacity(self) -> Capacity:
        """What it takes to keep what was learned."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """What else is worth recording of the task just learned, as JSON."""
        return {}

    def export(self, folder: Any) -> None:
        """Write what was learned to a folder, for use outside of experiments."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {key: value.detach().cpu().contiguous() for key, value in self.state_dict().items()}
        write_atomic(folder / "learner.safetensors", encode_tensors(state))

    # -- for subclasses -----------------------------------------------------------------------------------

    @property
    def task(self) -> SeenTask:
        """The task being learned."""
        return self.seen[-1]

    def classified(self, logits: Tensor, y: Tensor) -> Outcome:
        """Cross-entropy over the classes of the task being learned."""
        y = y - self.task.start
        return Outcome(F.cross_entropy(logits, y), (logits.detach().argmax(1) == y).sum())


class TaskHead(nn.Module):
    """The classification layers of several tasks in the place of one. Computes the one in use, or all side by side.

    With `bare` it passes on the features that go into it.
    """

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        self.use: int | None = None
        self.bare = False
        self.features = original.in_features
        self._make: Callable[[int], nn.Linear] = lambda classes: nn.Linear(
            original.in_features, classes, original.bias is not None
        ).to(original.weight)

    def add(self, classes: int) -> None:
        """A new head, which is used from now on."""
        self.heads.append(self._make(classes))
        self.use = len(self.heads) - 1

    def forward(self, features: Tensor) -> Tensor:
        if self.bare:
            return features
        if self.use is None:
            return torch.cat([head(features) for head in self.heads], 1)  # (B, classes of all tasks)
        return self.heads[self.use](features)


BN = ("shared", "frozen", "per_task")
ONE_PASS = ("shared", "frozen")


class TaskNorm(nn.Module):
    """The batch normalisation of several tasks in the place of one: each has its own statistics and parameters."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([original])
        self.use = 0

    def add(self) -> None:
        """A new one that starts where the last is, and is used from now on."""
        self.norms.append(copy.deepcopy(self.norms[-1]))
        self.use = len(self.norms) - 1
        for earlier in self.norms[:-1]:
            earlier.requires_grad_(False)

    def train(self, mode: bool = True) -> TaskNorm:
        """Only the newest is trained."""
        super().train(False)
        self.training = mode
        self.norms[-1].train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[self.use](x)


class OneNetwork(Learner):
    """A single plain network with a head for each task: what fine-tuning, penalties and memories have in common.

    Args:
        make: Builds the network.
        head: Its classification layer.
        bn: Batch normalisation: "shared" by all tasks, whose statistics follow the newest one; "frozen" after the first
            task; or "per_task".
    """

    bn_choices: ClassVar[tuple[str, ...]] = BN
    """Without "per_task" where a pass has samples or heads of several tasks: it cannot serve each with its own."""

    def __init__(self, make: MakeNetwork, head: str, *, bn: str = "shared") -> None:
        super().__init__(make, head)
        if bn not in self.bn_choices:
            raise UsageError(f"bn must be one of {', '.join(self.bn_choices)}, not {bn!r}")
        self.bn = bn
        self.network = make()
        self._plain = plain_size(self.network)
        put_task_head(self.network, head)
        self._norms = put_task_norms(self.network) if bn == "per_task" else []
        if bn == "frozen":
            self._norms = [m for m in self.network.modules() if isinstance(m, BATCH_NORMS)]

    @property
    def heads(self) -> TaskHead:
        """The network's classification layers."""
        return cast("TaskHead", self.network.get_submodule(self.head))

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.heads.add(task.classes)
        if not task.number:
            return
        for norm in self._norms:
            if isinstance(norm, TaskNorm):
                norm.add()
            else:
                norm.requires_grad_(False)

    def train(self, mode: bool = True) -> OneNetwork:
        """Statistics that are frozen do not move."""
        super().train(mode)
        if self.bn == "frozen" and len(self.seen) > 1:
            for norm in self._norms:
                norm.eval()
        return self

    def shared(self) -> list[nn.Parameter]:
        """The parameters that all tasks use: what penalties hold back."""
        own = {id(p) for p in self.heads.parameters()}
        own |= {id(p) for norm in self._norms for p in norm.parameters()}
        return [p for p in self.network.parameters() if id(p) not in own]

    def select(self, number: int | None) -> None:
        """Compute with a task's head and normalisation; None: with all heads side by side."""
        self.heads.use = number
        for norm in self._norms:
            if isinstance(norm, TaskNorm):
                norm.use = len(self.seen) - 1 if number is None else number

    def groups(self) -> list[dict[str, Any]]:
        own = self.heads.heads[self.task.number]
        others = {id(p) for p in self.heads.parameters()} - {id(p) for p in own.parameters()}
        return decay_groups(self.network, leave_out=others)

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        self.select(self.task.number)
        return self.classified(self.network(x), y)

    def predict(self, x: Tensor, number: int) -> Tensor:
        self.select(number)
        return self.network(x)

    def extra_bytes(self) -> int:
        """What a method keeps between tasks beside the network: anchors, importances, old networks, samples."""
        return 0

    def capacity(self) -> Capacity:
        """All that is kept, in numbers of 4 bytes; heads lie within the network's 100 %, as the paper counts."""
        plain, norms = self._plain.parameters, [norm for norm in self._norms if isinstance(norm, TaskNorm)]
        own = sum(p.numel() for norm in norms for later in norm.norms[1:] for p in later.parameters())
        extra = self.extra_bytes()
        return Capacity(plain + own + extra // 4, plain, nbytes(self.network) + extra, self._plain.multiply_adds)


# ---------------------------------------------------------------------------------------------------------
# Pieces


@dataclass(frozen=True)
class PlainSize:
    """The plain network, with its own head."""

    parameters: int
    multiply_adds: int | None


def plain_size(network: nn.Module) -> PlainSize:
    """Count a network; multiply-adds where it tells its `input_shape`."""
    shape = getattr(network, "input_shape", None)
    macs = None if shape is None else multiply_adds(network, shape)[0]
    return PlainSize(sum(p.numel() for p in network.parameters()), macs)


def put_task_head(network: nn.Module, head: str) -> TaskHead:
    """Exchange a network's classification layer for one that holds a head for each task."""
    original = network.get_submodule(head)
    assert isinstance(original, nn.Linear)
    made = TaskHead(original)
    parent, _, leaf = head.rpartition(".")
    setattr(network.get_submodule(parent), leaf, made)
    return made


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def put_task_norms(network: nn.Module) -> list[nn.Module]:
    """Exchange a network's batch normalisation for one that tasks have for themselves."""
    found: list[nn.Module] = []
    for path, layer in list(network.named_modules()):
        if isinstance(layer, BATCH_NORMS):
            parent, _, leaf = path.rpartition(".")
            found.append(TaskNorm(layer))
            setattr(network.get_submodule(parent), leaf, found[-1])
    return found


def decay_groups(network: nn.Module, leave_out: set[int] = frozenset()) -> list[dict[str, Any]]:  # type: ignore[assignment]
    """All trainable parameters, those of normalisation layers without weight decay, as `RectifiedModel` groups them."""
    norms = {id(p) for m in network.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()}
    chosen = [p for p in network.parameters() if p.requires_grad and id(p) not in leave_out]
    return [
        {"params": [p for p in chosen if id(p) not in norms]},
        {"params": [p for p in chosen if id(p) in norms], "weight_decay": 0.0},
    ]


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode; then every layer is in the mode that it was in, be it not its network's."""
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

"""What is traced in each style, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkr.core.export.example import Example
from rkr.core.export.program import BATCH, CLASSES
from rkr.core.merging import plain_copy
from rkr.core.mixed import assemble, class_dim, logits_of
from rkr.core.portable.network import PortableNetwork, plain_state
from rkr.core.state import TaskState, is_statistic

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


class Case(NamedTuple):
    """A call of the exported network, and what it must return."""

    example: Example
    extra: dict[str, Any]
    expected: Any


class Merged:
    """One task as a plain network.

    Attributes:
        network: What is traced.
        extra: Its arguments beside those of the network, by name.
        sizes: Their sizes that may change.
        hint: What may be wrong if the traced network does not answer as the model does.
    """

    network: nn.Module
    hint = ""

    def __init__(self, model: RectifiedModel, tasks: Sequence[TaskState], example: Example) -> None:
        self.model, self.tasks = model, tasks
        self.batch = example.repeated(example.batch + 3)  # another size than what is traced
        self.extra: dict[str, Any] = {}
        self.sizes: dict[str, Any] = {}
        self.prepare(example)

    def prepare(self, example: Example) -> None:
        """Make the network and its arguments."""
        self.network = plain_copy(self.model, self.tasks[0]).cpu().eval()

    def cases(self) -> Iterator[Case]:
        """A batch of another size, and one sample."""
        yield from self.with_one(Case(self.batch, {}, self.answer(self.tasks[0])))

    def answer(self, task: TaskState) -> Any:
        """What a task answers for the whole batch."""
        network = plain_copy(self.model, task).cpu().eval()
        with torch.no_grad():
            return logits_of(network(*self.batch.args, **self.batch.kwargs))

    def with_one(self, case: Case) -> Iterator[Case]:
        """A case, and its first sample by itself."""
        yield case
        batch = self.batch.batch
        leaves = [leaf for leaf in pytree.tree_leaves(case.expected) if isinstance(leaf, Tensor)]
        if all(leaf.dim() and len(leaf) == batch for leaf in leaves):
            extra = {name: value[:1] if isinstance(value, Tensor) else value for name, value in case.extra.items()}
            yield Case(case.example.first(), extra, pytree.tree_map(lambda t: t[:1], case.expected))


class All(Merged):
    """All tasks, and the task of each sample."""

    network: PortableNetwork

    def prepare(self, example: Example) -> None:
        self.network = PortableNetwork(self.model, self.tasks)
        self.extra = {"task": torch.arange(example.batch) % len(self.tasks)}
        self.sizes = {"task": {0: BATCH}}

    def cases(self) -> Iterator[Case]:
        """Every task answers for one sample at least, in batches of several tasks."""
        batch, count = self.batch.batch, len(self.tasks)
        for start in range(0, count, batch):
            index = (start + torch.arange(batch)) % count
            answers = {i: self.answer(self.tasks[i]) for i in set(index.tolist())}
            parts = [pytree.tree_map(lambda t, n=n: t[n : n + 1], answers[i]) for n, i in enumerate(index.tolist())]
            rows = list(torch.arange(batch).split(1))
            case = Case(self.batch, {"task": index}, assemble(parts, rows, class_dim(self.model)))
            yield from self.with_one(case) if start == 0 else [case]

    @property
    def hint(self) -> str:  # type: ignore[override]
        read = ", ".join(map(repr, self.network.tasks.read))
        why = f"it reads {read} in place of calling the layer, or its" if read else "its"
        return f': {why} samples depend on each other; export one task, style="merged", or use style="adapter"'


class Adapter(Merged):
    """A task's tensors are inputs."""

    network: PortableNetwork

    def prepare(self, example: Example) -> None:
        self.network = PortableNetwork(self.model, None)
        self.probe = probe(self.model)
        tensors = plain_state(self.model, self.probe)
        self.extra = {"tensors": tensors}
        heads = {"head.weight", "head.bias"}
        self.sizes = {"tensors": {key: {0: CLASSES} if key in heads else None for key in tensors}}

    def cases(self) -> Iterator[Case]:
        """A task with other tensors than those of any task: files of tasks come later."""
        yield from self.with_one(Case(self.batch, self.extra, self.answer(self.probe)))


def probe(model: RectifiedModel) -> TaskState:
    """A task like the model's first, all of whose tensors differ from the base's."""
    like = next(iter(model.tasks.values()))
    classes = None if like.classes is None else max(like.classes, 2)  # a size of 1 is traced as fixed
    task = TaskState("probe", classes)
    random = torch.Generator().manual_seed(0)
    weights = {layer.rm: layer for layer in model.weight_layers()}
    for key, tensor in model.tensors.task_state(like).items():
        t = tensor.detach().cpu()
        if key in ("head.weight", "head.bias") and classes is not None:
            t = torch.cat([t, t])[:classes]
        noise = torch.randn(t.shape, generator=random).to(t.dtype)
        if key in weights:  # so that R is about a tenth of W
            lm = model.tensors.task_state(like)[weights[key].lm]
            t = noise * (weights[key].weight.detach().std() / (lm.detach().std() + 1e-6)).cpu() / (10 * len(t) ** 0.5)
        elif is_statistic(key):
            t = t * (1 + 0.1 * noise.abs()) if t.is_floating_point() else t
        else:
            t = t + 0.1 * noise * (t.abs().mean() + 0.1)
        task.put(key, t.to(tensor))
    return task

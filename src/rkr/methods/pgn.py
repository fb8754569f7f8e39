"""PGN, progressive neural networks (Rusu et al., 2016): a column per task, connected to all earlier columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import BATCH_NORMS, Adapter, TargetLayer, TaskState, convolve, join
from rkr.errors import UsageError
from rkr.methods.growth.growth import Growth
from rkr.methods.growth.widths import Space
from rkr.methods.learner import MakeNetwork, SeenTask
from rkr.methods.shared.growing import Growing, over
from rkr.registry import register

LATERALS = ("linear", "adapter")


class Columns(Growth):
    """Columns side by side in one network.

    What a column's layer takes from earlier ones are its lateral connections: part of its weight if they are linear,
    U ReLU(V α h + c) with adapters (equation 2), where V brings all earlier columns down to the width of the task's own
    and α has a number for each of them. A task computes with the adapters of all columns up to its own.
    """

    def __init__(self, network: nn.Module, head: str, need: str) -> None:
        super().__init__(network, head, need)
        self.columns: list[TaskState] = []  # the tasks in order, which the model keeps
        self._units = slice(None)  # of a layer: those that are computed now

    # In training the units of earlier columns are computed apart, without gradients, which nothing of them needs; and
    # their normalisation is that of their own task.

    def passed(self, site: Adapter, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        if not task.number or not site.module.training:
            return super().passed(site, task, x, plain)
        space = self.spaces.out.get(site.path)
        old = self._old(space, task)
        y = self._of(slice(None, old), plain, x.detach()).detach()
        if space is not None:
            y = torch.cat([y, self._of(slice(old, None), plain, x)], site.channel_dim)
        return self.output(site, task, x, y)

    def normalised(self, site: TargetLayer, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        module = site.module
        if not task.number or not module.training:
            return plain(x)
        assert isinstance(module, BATCH_NORMS)
        space = self.spaces.out.get(site.path)
        old = self._old(space, task)
        names = ("running_mean", "running_var", "weight", "bias")
        with torch.no_grad():
            mean, var, weight, bias = (None if t is None else t[:old] for t in (site.own(task, n) for n in names))
            settled = F.batch_norm(x[:, :old], mean, var, weight, bias, mean is None, 0.0, module.eps)
        if space is None:
            return settled
        return torch.cat([settled, self._of(slice(old, None), plain, x[:, old:])], 1)

    def _old(self, space: Space | None, task: TaskState) -> int | None:
        """How many units are earlier columns'. They come first. None: all, as they cannot grow."""
        return None if space is None else int((self.times(space)[0] < task.number).sum())

    def _of(self, units: slice, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A layer's own forward for some of its units."""
        self._units = units
        try:
            return plain(x)
        finally:
            self._units = slice(None)

    def weight(self, site: Adapter, task: TaskState) -> Tensor:
        return super().weight(site, task)[self._units]

    def bias(self, site: Adapter, task: TaskState) -> Tensor | None:
        bias = super().bias(site, task)
        return None if bias is None else bias[self._units]

    def norm(self, site: TargetLayer, task: TaskState, name: str) -> Tensor | None:
        tensor = super().norm(site, task, name)
        return tensor[self._units] if tensor is not None and tensor.dim() else tensor

    def multiply_adds(self, site: Adapter, values: int) -> int:
        """Of the adapters of all columns: V for every pixel that goes in, U for every one that comes out."""
        total = 0
        for task in self.columns[1:]:
            reduce, into = site.own(task, "reduce"), site.own(task, "into")
            if reduce is not None and into is not None:
                pixels = values // site.weight.shape[0]
                strides = torch.Size(getattr(site.module, "stride", ())).numel()
                total += reduce.numel() * pixels * strides + into.numel() * pixels
        return total

    def output(self, site: Adapter, task: TaskState, x: Tensor, y: Tensor) -> Tensor:
        space = self.spaces.out.get(site.path)
        if space is None:
            return y
        born = self.times(space)[0]
        for number in range(1, task.number + 1):
            lateral = self._lateral(site, self.columns[number], x)
            if lateral is not None:
                start, end = (int((born < n).sum()) for n in (number, number + 1))  # its own units
                y = torch.cat([y[:, :start], y[:, start:end] + lateral, y[:, end:]], 1)
        return y

    def _lateral(self, site: Adapter, task: TaskState, x: Tensor) -> Tensor | None:
        """The output of the adapter of a task's column, if it has one here."""
        reduce, into, alpha, bias = (site.own(task, name) for name in ("reduce", "into", "alpha", "reduce_bias"))
        if reduce is None or into is None or alpha is None:
            return None
        count = reduce.shape[1]  # inputs that come from earlier columns: the first ones
        space = self.spaces.into[site.path]
        column = self.times(space)[0].repeat_interleave(space.takers[site.path])[:count]
        earlier = x[:, :count] * alpha[column].view(1, -1, *[1] * (x.dim() - 2))
        if x.dim() == 2:
            return F.linear(F.relu(F.linear(earlier, reduce, bias)), into)
        assert isinstance(site.module, nn.Conv2d)
        return convolve(site.module, F.relu(F.conv2d(earlier, reduce, bias)), into, None)


@register.method("pgn", "PGN: a thin column for each task beside all earlier ones", citation="Rusu et al., 2016")
class ProgressiveNetwork(Growing):
    """Train a column, freeze it with its batch normalisation, and add a new one for the next task.

    The first column is the network itself. Later ones are thin: otherwise parameters grow quadratically with the number
    of columns, and thin columns give the published size (171 % on LeNet). A head uses the features of its own column
    and of all earlier ones.

    Args:
        make: Builds the network.
        head: Its classification layer.
        ratio: Width of a later column, as a share of the network's; at least one unit in a layer.
        lateral: Connections from earlier columns: "linear", or through an "adapter" with a hidden layer.
    """

    checked = "The paper's equations 1 and 2, and the columns of joansj/hat, mammoth and avalanche."
    differs = (
        "Later columns are thin, as the published size implies; adapters are an option (`lateral`).",
        "Dropout, if a network has some, acts on earlier columns too while a new one is trained.",
    )

    isolating = True

    def __init__(self, make: MakeNetwork, head: str, *, ratio: float = 0.061, lateral: str = "linear") -> None:
        if not 0 < ratio <= 1:
            raise UsageError(f"ratio must be above 0 and at most 1, not {ratio}")
        if lateral not in LATERALS:
            raise UsageError(f"lateral must be one of {', '.join(LATERALS)}, not {lateral!r}")
        network = make()
        if lateral == "adapter" and any(isinstance(m, nn.Conv1d | nn.Conv3d) for m in network.modules()):
            raise UsageError('PGN has adapters for 2-dimensional convolutions only: choose lateral = "linear"')
        super().__init__(make, head, Columns(network, head, "PGN"))
        self.ratio, self.lateral = ratio, lateral

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        growth = self.growth
        assert isinstance(growth, Columns)
        growth.columns.append(self.model.tasks[task.name])
        if not task.number:
            return
        spaces = self.growth.spaces.growing
        self.growth.grow(self.model, {space.name: max(1, round(self.ratio * space.width)) for space in spaces})
        with torch.no_grad():
            for site in self.layers():
                rows, columns = self.born(site)
                absent = rows < columns  # earlier columns take nothing from later ones
                if self.lateral == "adapter":
                    absent = absent | ((rows > columns) & bool(site.path in self.growth.spaces.into))
                site.weight.masked_fill_(over(absent, site.weight), 0)
                if self.lateral == "adapter" and site.path in self.growth.spaces.into:
                    self._add_adapter(site)
        self.model.set_task(task.name)

    def _add_adapter(self, site: Adapter) -> None:
        state, number = self.model.tasks[self.task.name], self.task.number
        rows, columns = self.born(site)
        outputs, own = int((rows == number).sum()), int((columns == number).sum())
        earlier = columns.numel() - own
        own //= self.growth.spaces.into[site.path].takers[site.path]  # as wide as the task's own column
        kernel = site.weight.shape[2:]
        shapes: dict[str, tuple[int, ...]] = {
            "reduce": (own, earlier, *[1] * len(kernel)),
            "reduce_bias": (own,),
            "into": (outputs, own, *kernel),
        }
        for name, shape in shapes.items():
            fan = shapes[name.partition("_")[0]][1:]
            bound = torch.Size(fan).numel() ** -0.5
            state.put(join(site.path, name), torch.empty(shape).uniform_(-bound, bound).to(site.weight))
        state.put(join(site.path, "alpha"), torch.empty(number).uniform_(0, 0.1).to(site.weight))

    def held(self, site: Adapter) -> Tensor | None:
        number = self.task.number
        if not number:
            return None
        rows, columns = self.born(site)
        held = (rows < number).expand(-1, columns.shape[1])
        if self.lateral == "adapter" and site.path in self.growth.spaces.into:
            held = held | (columns < number)
        return held

    def used(self, site: Adapter) -> int:
        """None for absent connections: those from later columns, or those that an adapter replaces."""
        rows, columns = self.born(site)
        present = rows >= columns
        if self.lateral == "adapter" and site.path in self.growth.spaces.into:
            present = rows == columns
        return int(present.sum()) * site.weight[0, 0].numel()

    def norm_numbers(self, key: str, tensor: Tensor, number: int) -> int:
        """A column's own units. Copies of units of earlier columns are not counted."""
        if not number:
            return tensor.numel()
        space = self.growth.spaces.out.get(key.rpartition(".")[0])
        return 0 if space is None else int((self.growth.times(space)[0] == number).sum())

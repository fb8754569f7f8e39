"""What tasks cost: parameters, percent of the network, bytes, multiply-adds.

Everything is counted on the live modules. The paper's percentages (its K and component tables) count LM, RM, F and
the affine parameters of BatchNorm, against all parameters of the network with its own head; a task's head is inside
that 100 %. Statistics and heads are counted separately, so no cost is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkr.core.adapters import registered
from rkr.core.exchange import original_class
from rkr.core.state import TaskState
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


@dataclass(frozen=True)
class TaskCost:
    """One task.

    Attributes:
        name: The task.
        rectification: Numbers in LM and RM; of other methods, all that a task keeps at layers.
        scale: Numbers in F.
        norm: Affine parameters of normalisation layers.
        statistics: Running statistics of normalisation layers.
        head: Numbers in the task's own classification layer.
        percent: LM, RM, F and affine parameters in percent of the network: the paper's figure.
        percent_stored: All that the task stores, head and statistics included, in percent of the network.
        bytes: Memory of all that the task stores.
    """

    name: str
    rectification: int
    scale: int
    norm: int
    statistics: int
    head: int
    percent: float
    percent_stored: float
    bytes: int

    @property
    def parameters(self) -> int:
        """The numbers that `percent` counts."""
        return self.rectification + self.scale + self.norm


@dataclass(frozen=True)
class MultiplyAdds:
    """Multiply-adds of one sample, and what F adds where it is not folded into the weights.

    Attributes:
        network: The plain network's convolutions and linear layers.
        paper: The paper's convention: one multiply for each scaled convolution channel, as if folded into the filter.
        per_output: One multiply for each scaled value: the cost of really scaling the outputs.
        change: What another method's update adds, which does not fold into weights; 0 for RKR.
    """

    network: int
    paper: int
    per_output: int
    change: int = 0

    @property
    def paper_percent(self) -> float:
        """`paper` in percent of the network."""
        return 100 * self.paper / max(self.network, 1)

    @property
    def change_percent(self) -> float:
        """`change` in percent of the network."""
        return 100 * self.change / max(self.network, 1)

    @property
    def per_output_percent(self) -> float:
        """`per_output` in percent of the network."""
        return 100 * self.per_output / max(self.network, 1)


@dataclass(frozen=True)
class Shared:
    """A module with parameters that all tasks share, frozen."""

    name: str
    type: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Cost:
    """The cost of a model; print it for a table.

    Attributes:
        network: Parameters of the network, its own head included: 100 %.
        network_bytes: Their memory, with buffers.
        tasks: One entry per task, in order.
        multiply_adds: Per sample, or None if the input's shape is not known.
        shared: Modules that are not rectified and stay as they are.
        ranks: K of each layer that the options rectify, in the order of the network.

    Example:
        >>> import rkr
        >>> model = rkr.rectify(rkr.networks.lenet(classes=100), rank=2, head="fc")
        >>> task = model.add_task("first", classes=10)
        >>> cost = model.cost()
        >>> f"{cost['first'].percent:.4f} % of {cost.network:,} parameters"
        '0.4292 % of 3,038,110 parameters'
    """

    network: int
    network_bytes: int
    tasks: tuple[TaskCost, ...]
    multiply_adds: MultiplyAdds | None
    shared: tuple[Shared, ...]
    ranks: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TaskCost:
        for task in self.tasks:
            if task.name == name:
                return task
        raise UsageError(f"no task is named {name!r}")

    @property
    def percent(self) -> float:
        """The paper's figure for the task added last: percent of the network."""
        return self.tasks[-1].percent if self.tasks else 0.0

    @property
    def total_percent(self) -> float:
        """Network and all tasks, in percent of the network: the paper's "capacity"."""
        return 100 + sum(t.percent for t in self.tasks)

    @property
    def total_bytes(self) -> int:
        """Memory of network and tasks."""
        return self.network_bytes + sum(t.bytes for t in self.tasks)

    def __str__(self) -> str:
        rows = [("", "LM, RM", "F", "norm", "%", "head", "statistics", "% stored", "bytes")]
        rows += [
            (
                t.name,
                f"{t.rectification:,}",
                f"{t.scale:,}",
                f"{t.norm:,}",
                f"{t.percent:.4f}",
                f"{t.head:,}",
                f"{t.statistics:,}",
                f"{t.percent_stored:.4f}",
                f"{t.bytes:,}",
            )
            for t in self.tasks
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        count = "1 task" if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        lines.append(
            f"network {self.network:,} parameters, {self.network_bytes:,} bytes; with {count} "
            f"{self.total_percent:.2f} %, {self.total_bytes:,} bytes"
        )
        if len(set(self.ranks.values())) > 1:
            lines.append("ranks: " + ", ".join(f"{path} {rank}" for path, rank in self.ranks.items()))
        macs = self.multiply_adds
        if macs is None:
            lines.append("multiply-adds: give cost() an example input or its shape, such as cost((3, 32, 32))")
        else:
            lines.append(
                f"multiply-adds {macs.network:,}; F adds {macs.paper_percent:.1e} % by the paper's count "
                f"(per channel), {macs.per_output_percent:.4f} % per output value, 0 when merged"
            )
        for s in self.shared:
            lines.append(
                f"shared and frozen: {s.name or 'the network itself'} ({s.type}, {s.parameters:,}): {s.reason}"
            )
        return "\n".join(lines)


def measure(model: RectifiedModel, example: Tensor | Sequence[int] | None = None) -> Cost:
    """Count everything on a model."""
    network = sum(p.numel() for p in model.network.parameters())
    tasks = tuple(_task_cost(model, model.tasks[name], network) for name in model.tasks)
    state = {id(t): t for t in (*model.network.parameters(), *model.network.buffers())}
    return Cost(
        network,
        sum(t.nbytes for t in state.values()),
        tasks,
        _multiply_adds(model, example),
        tuple(_shared(model)),
        _ranks(model),
    )


def _ranks(model: RectifiedModel) -> dict[str, int]:
    """K of each layer; 0 where the options give none, even if nothing else changes the layer either."""
    options, layers = model.options, {layer.path: layer for layer in model.weight_layers()}
    found = {}
    for path, module in model.network.named_modules():
        layer = layers.get(path)
        if layer is not None and layer.rectified and options.rectifies(layer.family):
            found[path] = layer.rank or 0
        elif layer is None and path != model.head and options.named_rank(path) == 0 and registered(module) is not None:
            found[path] = 0
    return found


def _task_cost(model: RectifiedModel, task: TaskState, network: int) -> TaskCost:
    counts = dict.fromkeys(("rectification", "scale", "norm", "statistics", "head"), 0)
    layers = {layer.path: layer for layer in model.layers}
    state = model.tensors.task_state(task)
    for key, tensor in state.items():
        path, _, name = key.rpartition(".")
        layer = model.tensors.head if key in ("head.weight", "head.bias") else layers.get(path)
        group = "rectification" if layer is None else layer.cost_group(name)
        counts[group] += tensor.numel()
    percent = 100 * (counts["rectification"] + counts["scale"] + counts["norm"]) / network
    stored = 100 * sum(counts.values()) / network
    nbytes = sum(t.nbytes for t in state.values())
    return TaskCost(task.name, **counts, percent=percent, percent_stored=stored, bytes=nbytes)


def _shared(model: RectifiedModel) -> list[Shared]:
    own = {id(layer.module): set(layer.covered()) for layer in model.layers}
    found = []
    for path, module in model.network.named_modules():
        left = [p for n, p in module._parameters.items() if p is not None and n not in own.get(id(module), set())]
        if left:
            kind = original_class(module).__name__
            found.append(Shared(path, kind, sum(p.numel() for p in left), _reason(module)))
    return found


def _reason(module: nn.Module) -> str:
    """Why parameters of a module are shared by all tasks."""
    kind = registered(module)
    if kind is None or not kind[1].takes(module):
        return "not a layer that can be rectified"
    return kind[1].unchanged_because


def _multiply_adds(model: RectifiedModel, example: Tensor | Sequence[int] | None) -> MultiplyAdds | None:
    if example is None:
        example = getattr(model.network, "input_shape", None)
    if example is None:
        return None
    with model.without_task():
        products, outputs = multiply_adds(model.network, example)
    layers = model.weight_layers()
    scaled = [layer for layer in layers if layer.scaled and layer.rectified]
    return MultiplyAdds(
        products,
        sum(layer.paper_multiplies() for layer in scaled),
        sum(outputs.get(layer.module, 0) for layer in scaled),
        sum(layer.update.multiply_adds(layer, outputs.get(layer.module, 0)) for layer in layers),
    )


def multiply_adds(
    network: nn.Module, example: Tensor | Sequence[int], run: Callable[[Tensor], Any] | None = None
) -> tuple[int, dict[nn.Module, int]]:
    """Multiply-adds of a network's layers for one sample, and the number of values that each layer returns.

    Runs the sample, an input or its shape without the batch, and counts at each layer from its output's shape. `run`
    runs the network, by default by calling it.
    """
    reference = next(iter(network.parameters()))
    if not isinstance(example, Tensor | Sequence):
        raise UsageError(f"cost needs an example input or its shape, such as (3, 32, 32), not {example!r}")
    if isinstance(example, Tensor):
        x = example[:1].to(reference.device)
    else:
        x = torch.zeros(1, *example, dtype=reference.dtype, device=reference.device)
    outputs: dict[nn.Module, int] = {}  # values that each layer returns
    products = 0

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal products
        kind = registered(module)
        assert kind is not None
        for layer, values, count in kind[1].multiply_adds(module, args, kwargs, output):
            outputs[layer] = outputs.get(layer, 0) + values
            products += count

    hooks = [
        module.register_forward_hook(record, with_kwargs=True)
        for module in network.modules()
        if registered(module) is not None
    ]
    modes = {m: m.training for m in network.modules()}
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would bypass the hooks
    try:
        network.eval()
        with torch.no_grad():
            (run or network)(x)
    except Exception as error:
        raise UsageError(f"the network does not run on an input of shape {tuple(x.shape[1:])}: {error}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return products, outputs

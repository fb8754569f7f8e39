"""A traced copy of a whole network."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rkr.core.adapters.base import TargetLayer
from rkr.core.merging import bare_copy
from rkr.core.mixed import logits_of
from rkr.core.portable.attention import PortableAttention
from rkr.core.portable.tasks import Tasks
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel
    from rkr.core.state import TaskState


class PortableNetwork(nn.Module):
    """A copy of a network, on the CPU and in evaluation mode, that `torch.export` can trace.

    Call it like the network, with one more argument by keyword:

    * `task`: (B) int64, the position in `tasks` of each sample's task. Rows are padded with -inf beyond its classes.
    * `tensors`, if it has no tasks of its own: the tensors of one task, by their names in its file.

    Args:
        model: The model. It stays as it is.
        tasks: The tasks that become part of the graph. None: a task's tensors are inputs.
    """

    def __init__(self, model: RectifiedModel, tasks: Sequence[TaskState] | None) -> None:
        super().__init__()
        states = None if tasks is None else [plain_state(model, task) for task in tasks]
        self.tasks = Tasks(states)
        self.network = build(model, self.tasks)
        self.argument = "tensors" if tasks is None else "task"
        if self.argument in inspect.signature(model.network.forward).parameters:
            raise UsageError(f"the network's forward has an argument {self.argument!r} already, which export needs")
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(self.argument)
        tasks = self.tasks
        if self.argument == "tensors":
            tasks.given = given
        else:
            first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            if first is not None and given.shape[0] != first.shape[0]:
                raise UsageError(f"task must have one number for each of the {first.shape[0]} samples")
            tasks.index = given
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it reads weights, and no graph has it
        try:
            output = self.network(*args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            tasks.index, tasks.given = None, {}
        return logits_of(output)


def plain_state(model: RectifiedModel, task: TaskState) -> dict[str, Tensor]:
    """What a task computes with in evaluation mode, on the CPU, by the names in its file."""
    state = model.tensors.task_state(task)
    return {key: t.detach().cpu() for key, t in state.items() if not key.endswith("num_batches_tracked")}


def build(model: RectifiedModel, tasks: Tasks) -> nn.Module:
    """A copy of the model's network whose layers compute with these tasks."""
    network, layers = bare_copy(model)
    network.cpu().requires_grad_(False).eval()
    replaced: dict[int, nn.Module] = {}
    for layer in layers:
        portable = layer.portable(tasks)
        if portable is not None:
            portable.settle()
            replaced[id(layer.module)] = portable
    for path, module in network.named_modules():
        if _reads_its_projection(module, replaced):
            layer = TargetLayer(path, module, layers[0].active, model.options, model.update)
            replaced[id(module)] = PortableAttention(layer, tasks)
    for module in list(network.modules()):
        _replace_children(module, replaced)
    return replaced.get(id(network), network)


def _reads_its_projection(module: nn.Module, replaced: Mapping[int, nn.Module]) -> bool:
    """Whether this is attention of which only the output projection is rectified, whose weight it reads."""
    plain = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    return plain and id(module) not in replaced and id(module.out_proj) in replaced


def _replace_children(module: nn.Module, replaced: Mapping[int, nn.Module]) -> None:
    for name, child in module._modules.items():
        if id(child) in replaced:
            module._modules[name] = replaced[id(child)]

"""Normalisation layers: a task's own affine parameters and running statistics, as the options say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core.adapters.base import NeedsGrouping, TargetLayer, join
from rkr.core.buffers import own_buffers
from rkr.core.options import Options
from rkr.core.portable import Portable, Tasks
from rkr.core.portable.norm import PortableNorm
from rkr.core.state import STATISTICS, Active, TaskState, is_statistic
from rkr.core.updates import LayerUpdate

if TYPE_CHECKING:
    from rkr.core.mixed import MixedBatch

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
TORCHS_FORWARD = nn.modules.batchnorm._BatchNorm.forward
OTHER_NORMS = tuple(getattr(nn, name) for name in ("LayerNorm", "GroupNorm", "RMSNorm") if hasattr(nn, name))


class NormLayer(TargetLayer):
    """LayerNorm, GroupNorm or RMSNorm with `Options.norm="per_task"`: each task has its own affine parameters."""

    properties: ClassVar[tuple[str, ...]] = ("weight", "bias")
    trains_base_tensors = True
    per_sample = True
    unchanged_because = "its affine parameters stay as the first task left them, by the options"

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        super().__init__(path, module, active, options, update)
        self.affine = options.norm == "per_task"  # whether each task has its own affine parameters
        self.stats = False  # whether each task has its own running statistics
        self._keys = {name: join(path, name) for name in ("weight", "bias", *STATISTICS)}

    def chosen(self) -> bool:
        return self.affine

    def own(self, task: TaskState, name: str) -> Tensor | None:
        return task.get(self._keys[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self._keys[name]: tuple(tensor.shape) for name, tensor in self._base().items()}

    def expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {self._keys[name]: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._base().items()}

    def draw(self) -> dict[str, Tensor]:
        return {self._keys[name]: tensor.detach().clone() for name, tensor in self._base().items()}

    def _base(self) -> dict[str, Tensor]:
        """The base's tensors that each task has for itself."""
        names = (("weight", "bias") if self.affine else ()) + (STATISTICS if self.stats else ())
        found = ((name, self.base_tensor(name)) for name in names)
        return {name: tensor for name, tensor in found if tensor is not None}

    def state(self, task: TaskState) -> dict[str, Tensor]:
        """The task's tensors; while the task trains the base they are the base's own."""
        found = {}
        for name, base in self._base().items():
            own = self.own(task, name)
            found[self._keys[name]] = base if own is None else own
        return found

    def replaced(self) -> Iterable[str]:
        return self._base()

    def covered(self) -> Iterable[str]:
        return ("weight", "bias") if self.affine else ()

    def decays(self, name: str) -> bool:
        return False

    def read(self, name: str) -> Tensor | None:
        active = self.active
        if active.mixed is not None and (self.affine or self.stats):
            raise NeedsGrouping(self.path)
        return self.base_tensor(name) if active.task is None else self.update.norm(self, active.task, name)

    def merged_tensors(self, task: TaskState) -> dict[str, Tensor | None]:
        return {name: self.own(task, name) for name in self._base()}

    def portable(self, tasks: Tasks) -> Portable | None:
        return PortableNorm(self, tasks) if self._base() else None

    def cost_group(self, name: str) -> str:
        return "statistics" if is_statistic(name) else "norm"


class BatchNormLayer(NormLayer):
    """BatchNorm or InstanceNorm, by `Options.bn`. Shared statistics do not move once the base is frozen."""

    properties = ("weight", "bias", *STATISTICS)

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        super().__init__(path, module, active, options, update)
        self.affine = options.bn_affine
        self.stats = options.bn_stats and module._buffers.get("running_mean") is not None
        self._names = tuple(self._keys.values())
        kind = type(update)
        self._unchanged = kind.norm is LayerUpdate.norm and kind.normalised is LayerUpdate.normalised

    def chosen(self) -> bool:
        return True

    def _shared_buffers(self) -> dict[str, Tensor]:
        """Without statistics: `forward` protects those that tasks share."""
        return {name: b for name, b in super()._shared_buffers().items() if name not in STATISTICS}

    def freeze(self) -> None:
        super().freeze()
        self.module.train(self.module.training)  # shared statistics go to evaluation mode

    def overrides(self) -> tuple[str, ...]:
        return ("forward", "train")

    def train(self, mode: bool = True) -> Any:
        """Shared statistics, which earlier tasks depend on, stay as they are once the base is frozen."""
        shared = self.active.base_frozen and not self.stats
        return self.original.train(self.module, mode and not shared)  # type: ignore[attr-defined]

    def forward(self, input: Tensor) -> Tensor:
        """The output with the task's tensors."""
        active = self.active
        if active.mixed is not None:
            return self.mixed(active.mixed, input)
        task = active.task
        if task is None:
            return self._plain(input)
        is_torchs = self._unchanged and self.original.forward is TORCHS_FORWARD  # type: ignore[attr-defined]
        if is_torchs and (self.stats or not (active.base_frozen and self.module.training)):
            return self._direct(input, task)
        return self.update.normalised(self, task, input, self._plain)

    def _direct(self, input: Tensor, task: TaskState) -> Tensor:
        """What torch's BatchNorm computes, each tensor read once: reading attributes takes longer than computing."""
        module: Any = self.module
        module._check_input_dim(input)
        own, statistics, base, shared = task._parameters, task._buffers, module._parameters, module._buffers
        weight, bias, mean, var, tracked = self._names
        w, b, m, v = own.get(weight), own.get(bias), statistics.get(mean), statistics.get(var)
        if w is None:
            w = base.get("weight")
        if b is None:
            b = base.get("bias")
        if m is None:
            m = shared.get("running_mean")
        if v is None:
            v = shared.get("running_var")
        training, share = module.training, module.momentum or 0.0
        if training:
            count = statistics.get(tracked)
            if count is None:
                count = shared.get("num_batches_tracked")
            if not module.track_running_stats:
                m = v = None
            elif count is not None:
                count.add_(1)
                if module.momentum is None:
                    share = 1 / float(count)
        return F.batch_norm(input, m, v, w, b, training or (m is None and v is None), share, module.eps)

    def _plain(self, input: Tensor) -> Tensor:
        """The module's own forward."""
        module: Any = self.module
        forward = self.original.forward  # type: ignore[attr-defined]
        if module.training and self.active.base_frozen and not self.stats and not torch.compiler.is_compiling():
            with own_buffers(module):  # a user has set `training` directly
                return forward(module, input)
        return forward(module, input)

    def mixed(self, batch: MixedBatch, input: Tensor) -> Tensor:
        """Each sample with its task's statistics and affine parameters: one multiply-add for each value."""
        batch.check(self.path, input)
        module: Any = self.module
        mean, var, weight, bias = (
            self._stacked(batch, name) for name in ("running_mean", "running_var", "weight", "bias")
        )
        if module.training or mean is None or var is None:
            raise NeedsGrouping(self.path)
        scale = torch.rsqrt(var + module.eps)
        if weight is not None:
            scale = scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        shape = (len(input), -1, *[1] * (input.dim() - 2))
        return torch.addcmul(shift[batch.index].view(shape), input, scale[batch.index].view(shape))

    def _stacked(self, batch: MixedBatch, name: str) -> Tensor | None:
        base = self.base_tensor(name)
        found = [base if own is None else own for own in (self.own(task, name) for task in batch.tasks)]
        return None if any(t is None for t in found) else torch.stack(found)  # type: ignore[arg-type]


def norm_parameters(network: nn.Module) -> Iterable[nn.Parameter]:
    """The affine parameters of normalisation layers, including other packages' such as transformers' RMSNorms."""
    for module in network.modules():
        if isinstance(module, (*BATCH_NORMS, *OTHER_NORMS)) or "norm" in type(module).__name__.lower():
            yield from (p for p in module._parameters.values() if p is not None)

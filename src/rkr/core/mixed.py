"""One batch, a task per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.core.layers import NeedsGrouping, Site, effective_for, join
from rkr.core.tasks import Task
from rkr.errors import UsageError


@dataclass(eq=False)
class MixedBatch:
    """A batch sorted by task, computed in one pass ("layer" strategy, inference only).

    A linear layer multiplies by the shared base once and adds each sample's own low-rank part, so its large weight is
    read once and not once for each task. A convolution runs task by task with merged weights.
    """

    tasks: list[Task]
    counts: list[int]
    index: Tensor  # (B) position in `tasks` of each sample's task
    _stacks: dict[str, Tensor] = field(default_factory=dict)

    def linear(self, site: Site, x: Tensor) -> Tensor:
        """`(x W' + b + (x LM_t) RM_t) · F_t`: the factors of all tasks side by side, each sample keeps its own."""
        self._check(site, x)
        per_sample = x[0, ..., 0].numel()
        index = self.index if per_sample == 1 else self.index.repeat_interleave(per_sample)
        rows = x.reshape(-1, x.shape[-1])  # (N, I)
        y = F.linear(rows, site.weight, site.bias)
        if site.rank is not None:
            lms, rms = (torch.cat(self._all(key), dim) for key, dim in ((site.lm, 1), (site.rm, 0)))
            u = (rows @ lms).view(len(rows), len(self.tasks), site.rank)  # (N, T, K)
            own = F.one_hot(index, len(self.tasks)).to(u).unsqueeze(-1)  # (N, T, 1)
            y = y.addmm_((u * own).flatten(1), rms)
        if site.scaled:
            y = y.mul_(torch.stack(self._all(site.f))[index])
        return y.view(*x.shape[:-1], y.shape[-1])

    def conv(self, site: Site, x: Tensor, convolve: Callable[..., Tensor]) -> Tensor:
        """Each task's samples with its merged weight."""
        self._check(site, x)
        parts = zip(x.split(self.counts), self.tasks, strict=True)
        return torch.cat([convolve(part, *effective_for(site, task)) for part, task in parts])

    def batch_norm(self, site: Site, x: Tensor) -> Tensor:
        """Each sample with its task's statistics and affine parameters: one multiply-add per value."""
        self._check(site, x)
        module: Any = site.module
        mean, var, weight, bias = (
            self._norm_stack(site, name) for name in ("running_mean", "running_var", "weight", "bias")
        )
        if module.training or mean is None or var is None:
            raise NeedsGrouping(site.path)
        scale = torch.rsqrt(var + module.eps)
        if weight is not None:
            scale = scale * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        shape = (len(x), -1, *[1] * (x.dim() - 2))
        return torch.addcmul(shift[self.index].view(shape), x, scale[self.index].view(shape))

    def head(self, site: Site, x: Tensor) -> Tensor:
        """Each task's own classification layer, rows padded with -inf to the widest."""
        self._check(site, x)
        if site.weight.dim() != 2:
            raise NeedsGrouping(site.path)
        width = max(t.get("head.weight").shape[0] for t in self.tasks)  # type: ignore[union-attr]
        out = x.new_full((*x.shape[:-1], width), -torch.inf)
        for part, rows, task in zip(out.split(self.counts), x.split(self.counts), self.tasks, strict=True):
            weight = task.get("head.weight")
            part[..., : weight.shape[0]] = F.linear(rows, weight, task.get("head.bias"))  # type: ignore[union-attr, arg-type]
        return out

    def _check(self, site: Site, x: Tensor) -> None:
        if x.dim() < 2 or x.shape[0] != len(self.index):
            raise NeedsGrouping(site.path)

    def _all(self, key: str) -> list[Tensor]:
        return [task.get(key) for task in self.tasks]  # type: ignore[misc]

    def _norm_stack(self, site: Site, name: str) -> Tensor | None:
        key = join(site.path, name)
        if key not in self._stacks:
            base = site.base_tensor(name)
            found = [base if own is None else own for own in self._all(key)]
            if any(t is None for t in found):
                return None
            self._stacks[key] = torch.stack(found)  # type: ignore[arg-type]
        return self._stacks[key]


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Samples in a call: the first dimension of its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    raise UsageError("a batch with tasks needs a tensor input whose first dimension is the batch")


def take(value: Any, rows: Tensor, size: int) -> Any:
    """The given rows of every batched tensor in a (nested) argument; anything else as it is."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.shape[0] == size else value
    if isinstance(value, tuple | list):
        return type(value)(take(v, rows, size) for v in value)
    if isinstance(value, dict):
        return {k: take(v, rows, size) for k, v in value.items()}
    return value


def logits_of(output: Any) -> Any:
    """The logits of an output object that has them (transformers' models), else the output."""
    return getattr(output, "logits", output)


def assemble(outputs: list[Any], rows: list[Tensor]) -> Any:
    """Put the outputs of the groups back in the order of the batch, classes padded with -inf."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(assemble(list(part), rows) for part in zip(*outputs, strict=True))
    if isinstance(first, dict):
        return {key: assemble([o[key] for o in outputs], rows) for key in first}
    if not isinstance(first, Tensor):
        raise UsageError(
            f"a mixed batch needs a network that returns tensors, not {type(first).__name__}: "
            "call the model once for each task instead"
        )
    widths = {o.shape[1:] for o in outputs}
    if len(widths) > 1:
        width = max(o.shape[1] for o in outputs)
        outputs = [_pad(o, width) for o in outputs]
    joined = torch.cat(outputs)
    order = torch.cat(rows)
    out = torch.empty_like(joined)
    out[order] = joined
    return out


def _pad(x: Tensor, width: int) -> Tensor:
    """(B, C, ...) to (B, width, ...), filled with -inf."""
    missing = x.new_full((x.shape[0], width - x.shape[1], *x.shape[2:]), -torch.inf)
    return torch.cat([x, missing], 1)

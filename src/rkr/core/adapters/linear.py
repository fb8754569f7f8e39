"""Fully connected layers: `nn.Linear`, and layers that store their weight as (inputs, outputs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import kernels, ways
from rkr.core.adapters.base import Adapter, MultiplyAdds, autocasts, first_input
from rkr.core.portable.linear import PortableLinear
from rkr.core.rectification import scaled
from rkr.core.state import TaskState

if TYPE_CHECKING:
    from rkr.core.mixed import MixedBatch


class LinearAdapter(Adapter):
    """`y = x W' + b` with W (outputs, inputs)."""

    per_sample = standard = one_product = True
    portable_layer = PortableLinear

    def apply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, self.canonical(weight), bias)

    def rectify_input(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """`(x W' + b + (x LM) RM) · F`: W + R is not built for few rows, and its gradient never."""
        weight = self.weight
        if autocasts(input.device):
            return self.formula(input, lm, rm, f)
        if ways.few_rows(self.options.kernels, input):
            return self._thin(input, lm, rm, f)
        many = ways.merges_linear(input.numel(), weight.numel())
        return kernels.factored_linear(input, self.canonical(weight), self.bias, lm, rm, f, many)

    def formula(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if ways.few_rows(self.options.kernels, input):
            return self._thin(input, lm, rm, f)
        return super().formula(input, lm, rm, f, *args, **kwargs)

    def infer(self, input: Tensor, task: TaskState | None, *args: Any, **kwargs: Any) -> Tensor:
        """A compiled graph has no cache: it would merge the weight again at every call."""
        if task is not None and torch.compiler.is_compiling() and ways.few_rows(self.options.kernels, input):
            return self._thin(input, *self.factors(task))
        return super().infer(input, task, *args, **kwargs)

    def _thin(self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None) -> Tensor:
        """The same in plain operations: neither `W + R` nor its gradient is built."""
        y = F.linear(input, self.canonical(self.weight), self.bias)
        return scaled(y if lm is None or rm is None else y + input @ lm @ rm, f, -1)

    def mixed(self, batch: MixedBatch, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`(x W' + b + (x LM_t) RM_t) · F_t`: the factors of all tasks side by side, each sample keeps its own."""
        batch.check(self.path, input)
        tasks, per_sample = batch.tasks, input[0, ..., 0].numel()
        index = batch.index if per_sample == 1 else batch.index.repeat_interleave(per_sample)
        rows = input.reshape(-1, input.shape[-1])  # (N, I)
        y = F.linear(rows, self.canonical(self.weight), self.bias)
        if self.rank is not None:
            lms, rms = torch.cat(batch.all(self.lm), 1), torch.cat(batch.all(self.rm), 0)
            u = (rows @ lms).view(len(rows), len(tasks), self.rank)  # (N, T, K)
            own = F.one_hot(index, len(tasks)).to(u).unsqueeze(-1)  # (N, T, 1)
            y = y.addmm_((u * own).flatten(1), rms)
        if self.scaled:
            y = y.mul_(torch.stack(batch.all(self.f))[index])
        return y.view(*input.shape[:-1], y.shape[-1])

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        return [(module, output.numel(), output.numel() * first_input(args, kwargs).shape[-1])]


class TransposedLinearAdapter(LinearAdapter):
    """`y = x W + b` with W (inputs, outputs), such as `Conv1D` of transformers (GPT-2)."""

    standard = False

    def canonical(self, weight: Tensor) -> Tensor:
        return weight.t()

    def stored(self, weight: Tensor) -> Tensor:
        return weight.t()

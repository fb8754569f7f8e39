"""Networks that become wider with their tasks: the base of progressive, expanding and searched networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from rkr.capacity import Capacity
from rkr.core import Adapter, Options, is_statistic, multiply_adds
from rkr.methods.growth.growth import Growth, layout_of
from rkr.methods.learner import MakeNetwork, Phase, ReadSamples, nbytes
from rkr.methods.shared.changed import Changed


class Growing(Changed):
    """A network that grows, each task with its own batch normalisation and head (`growth/growth.py`).

    Entries of weights that a task must not change are restored after every step, because weight decay changes even
    entries without a gradient.

    Args:
        make: Builds the network.
        head: Its classification layer.
        growth: How it grows.
    """

    def __init__(self, make: MakeNetwork, head: str, growth: Growth) -> None:
        super().__init__(make, head, growth, Options(bn="per_task"))
        network = self.model.network
        self._first = sum(p.numel() for s in self.layers() for p in network.get_submodule(s.path).parameters())
        weight = network.get_submodule(head)._parameters["weight"]
        assert weight is not None
        self._features = weight.shape[1]  # that the head takes at first
        self._held: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # weight, where it is held, its values there

    @property
    def growth(self) -> Growth:
        """How it grows: a part of the model, so that its state is there once."""
        return cast("Growth", self.model.update)

    def sides(self, site: Adapter, of_units: Mapping[str, Tensor], fixed: Any) -> tuple[Tensor, Tensor]:
        """What is known of units, by space, for a layer's outputs (O, 1) and inputs (1, I).

        Where they belong to no space, as pixels do, which never grow: `fixed`.
        """
        out, into = self.growth.spaces.out.get(site.path), self.growth.spaces.into.get(site.path)
        rows, columns = (torch.full((n,), fixed, device=site.weight.device) for n in site.weight.shape[:2])
        if out is not None:
            rows = of_units[out.name]
        if into is not None:
            columns = of_units[into.name].repeat_interleave(into.takers[site.path])
        return rows[:, None], columns[None]

    def born(self, site: Adapter) -> tuple[Tensor, Tensor]:
        """The tasks with which a layer's outputs and inputs came, as (O, 1) and (1, I)."""
        return self.sides(site, {space.name: self.growth.times(space)[0] for space in self.growth.spaces.growing}, 0)

    def held(self, site: Adapter) -> Tensor | None:
        """Which entries of a layer's weight, as (O, I), the task at hand must not move; None: it may move all."""
        return None

    def held_bias(self, site: Adapter) -> Tensor | None:
        """Which entries of a layer's bias it must not move; by default those of units whose weights are all held."""
        where = self.held(site)
        return None if where is None else where.all(1)

    def prepare(self, phase: Phase, train: ReadSamples) -> None:
        self._held = []
        for site in self.layers():
            for parameter, where in ((site.weight, self.held(site)), (site.bias, self.held_bias(site))):
                if parameter is not None and where is not None:
                    self._hold(parameter, where)

    def _hold(self, parameter: Tensor, where: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._held.append((parameter, over(where, parameter), parameter.detach().clone()))

    def after_step(self) -> None:
        with torch.no_grad():
            for parameter, where, values in self._held:
                torch.where(where, values, parameter, out=parameter)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take the sizes of the state first: they tell of growth that the tasks alone do not."""
        resize(self, state_dict)
        found = super().load_state_dict(state_dict, strict, assign)
        for phase_held in self._held:  # held entries of a state are those that it was saved with
            phase_held[2].copy_(phase_held[0].detach())
        return found

    # -- cost ---------------------------------------------------------------------------------------------

    def used(self, site: Adapter) -> int:
        """How many entries of a layer's weight some task computes with."""
        return site.weight.numel()

    def norm_numbers(self, key: str, tensor: Tensor, number: int) -> int:
        """How many numbers of a task's affine parameters to count."""
        return tensor.numel()

    def capacity(self) -> Capacity:
        """All weights, the affine parameters of each task's normalisation, and what heads are wider by."""
        plain, grown = self._plain.parameters, -self._first
        for site in self.layers():
            grown += self.used(site) + (0 if site.bias is None else site.bias.numel())
        norms = {site.path for site in self.model.norm_layers()}
        for number, task in enumerate(self.model.tasks.values()):
            for key, tensor in task.tensors().items():
                if key == "head.weight":
                    grown += max(0, tensor.shape[1] - self._features) * tensor[:, :1].numel()
                elif key.rpartition(".")[0] in norms and not is_statistic(key):
                    grown += self.norm_numbers(key, tensor, number)
                elif key != "head.bias" and not is_statistic(key):
                    grown += tensor.numel()  # what the method itself keeps for the task
        return Capacity(plain + grown, plain, nbytes(self.model), self._multiply_adds())

    def _multiply_adds(self) -> int | None:
        shape = getattr(self.model.network, "input_shape", None)
        if shape is None:
            return None
        self.model.set_task(self.task.name)
        network = self.model.network
        found, values = multiply_adds(network, shape, self.model)
        found += sum(site.update.multiply_adds(site, values.get(site.module, 0)) for site in self.layers())
        head: Any = network.get_submodule(self.head)
        of_class = values[head] // self.task.classes * head.weight[0].numel()
        classes = head._parameters["weight"].shape[0]  # of the plain network, as other methods are counted
        return found + (classes - self.task.classes) * of_class


def over(where: Tensor, parameter: Tensor) -> Tensor:
    """A mask of a parameter's first dimensions, for all that lies in the others."""
    return where.view(*where.shape, *[1] * (parameter.dim() - where.dim()))


def resize(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give parameters and buffers the shapes that a state has for them."""
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                value = state.get(f"{prefix}.{name}" if prefix else name)
                if tensor is None or value is None or value.shape == tensor.shape:
                    continue
                fresh = torch.empty(value.shape, dtype=tensor.dtype, device=tensor.device)
                if fresh.dim() == 4:
                    fresh = fresh.contiguous(memory_format=layout_of(tensor))
                made: Any = nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
                table[name] = made

"""Growth: a network that becomes wider with its tasks, each of which computes with the units that existed for it.

A unit is a channel of a convolution or an output of a linear layer; units that must be added together form a space
(`widths.py`). The weights of all units are in the network's own parameters, which grow at their ends. Every unit has a
task of birth and, if a copy has replaced it, a task of death: task t computes with the units born by t and not dead at
t. So earlier tasks do not see later units. A unit's slot, which its copies inherit, is the unit of another space that a
shortcut without weights ties it to.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rkr.core import Adapter, LayerUpdate, RectifiedModel, TaskState
from rkr.methods.growth.widths import Space, find_spaces

NEVER = 1 << 30
SLOTS = 1 << 20  # of one task's new units


class Growth(LayerUpdate, nn.Module):
    """The update of a growing network: layers and normalisation of a task, sliced to the units that it has.

    Args:
        network: The plain network.
        head: Its classification layer.
        need: Name of the method, for messages.
    """

    opens_base = True

    def __init__(self, network: nn.Module, head: str, need: str) -> None:
        super().__init__()
        self.spaces = find_spaces(network, head, need)
        device = next(network.parameters()).device
        for i, space in enumerate(self.spaces.growing):
            self.register_buffer(f"born{i}", torch.zeros(space.width, dtype=torch.long, device=device))
            self.register_buffer(f"dead{i}", torch.full((space.width,), NEVER, device=device))
            self.register_buffer(f"slot{i}", torch.arange(space.width, device=device))
        self._head = head
        self._index = {space.name: i for i, space in enumerate(self.spaces.growing)}
        self._known: dict[tuple[str, int], Tensor] = {}  # cached units, which every layer needs at every step

    def _put(self, name: str, space: Space, values: Tensor) -> None:
        """Replace the record of a space's units."""
        self._known.clear()
        self.register_buffer(f"{name}{self._index[space.name]}", values)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self._known.clear()
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> Growth:
        self._known.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # -- units --------------------------------------------------------------------------------------------

    def times(self, space: Space) -> tuple[Tensor, Tensor]:
        """Birth and death of a space's units, in tasks."""
        i = self._index[space.name]
        return self.get_buffer(f"born{i}"), self.get_buffer(f"dead{i}")

    def slots(self, space: Space) -> Tensor:
        """Of a space's units: equal ones of two spaces are tied where a shortcut appends zeros."""
        return self.get_buffer(f"slot{self._index[space.name]}")

    def units(self, space: Space, number: int) -> Tensor:
        """The units of task `number`, as positions in the space."""
        found = self._known.get((space.name, number))
        if found is None:
            born, dead = self.times(space)
            found = self._known[space.name, number] = ((born <= number) & (dead > number)).nonzero()[:, 0]
        return found

    def widths(self, number: int) -> dict[str, int]:
        """The number of units of task `number`, by space."""
        return {space.name: len(self.units(space, number)) for space in self.spaces.growing}

    # -- what a task computes with ------------------------------------------------------------------------

    def weight(self, layer: Adapter, task: TaskState) -> Tensor:
        return self._cut(layer, task, layer.weight, True)

    def bias(self, layer: Adapter, task: TaskState) -> Tensor | None:
        return None if layer.bias is None else self._cut(layer, task, layer.bias, False)

    def _cut(self, layer: Adapter, task: TaskState, whole: Tensor, inputs: bool) -> Tensor:
        """The part of a weight or bias that a task uses; cached when gradients are off."""
        picked = self.picked(layer, task.number, inputs)
        if torch.is_grad_enabled() and whole.requires_grad:
            return cut(whole, picked)
        cache, place, lengths = layer.active.cache, (layer, inputs), tuple(map(len, picked))
        found = cache.get(task, place, (whole,), lengths)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = cut(whole, picked).clone(), None
            cache.put(task, place, (whole,), *found, lengths)
        return found[0]

    def picked(self, layer: Adapter, number: int, inputs: bool = True) -> tuple[Tensor, ...]:
        """The outputs and inputs of a layer that task `number` uses."""
        found = [self._positions(self.spaces.out.get(layer.path), number, layer.weight.shape[0])]
        if inputs:
            space = self.spaces.into.get(layer.path)
            values = 1 if space is None else space.takers[layer.path]
            found.append(self._positions(space, number, layer.weight.shape[1], values))
        return tuple(found)

    def _positions(self, space: Space | None, number: int, size: int, values: int = 1) -> Tensor:
        if space is None:
            return torch.arange(size)
        return _spread(self.units(space, number), values)

    def run(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], task: TaskState | None) -> Any:
        """Run the network. Where it pads channels with zeros, the units of each task keep their positions."""
        if not self.spaces.pads or task is None:
            return network(*args, **kwargs)
        return _Runner(network, self, task.number).run(*args)

    def carry(self, x: Tensor, before: Space, after: Space, number: int) -> Tensor:
        """Place the channels of one space into another: every task's units at the beginning of that task's.

        A copy has the position of its origin.
        """
        taken, places = self.tied(before, after, number)
        out = x.new_zeros(x.shape[0], len(self.units(after, number)), *x.shape[2:])
        out[:, places] = x[:, taken]
        return out

    def tied(self, before: Space, after: Space, number: int) -> tuple[Tensor, Tensor]:
        """The units of a task in one space, and their positions in another."""
        sources, targets = (self.slots(space)[self.units(space, number)] for space in (before, after))
        taken, places = (sources[:, None] == targets).nonzero(as_tuple=True)
        return taken, places

    # -- growing ------------------------------------------------------------------------------------------

    def grow(self, model: RectifiedModel, more: Mapping[str, int]) -> None:
        """Add units to spaces for the newest task, with torch's initial weights. Existing units do not move."""
        self._widen(model, {name: [None] * count for name, count in more.items() if count})

    def split(self, model: RectifiedModel, units: Mapping[str, Sequence[int]]) -> None:
        """Copy units of the newest task.

        The copies replace the originals in that task, which computes as before. Earlier tasks continue to use the
        originals, whose old weights can then be restored.
        """
        self._widen(model, {name: list(origins) for name, origins in units.items() if origins})

    def remove(self, model: RectifiedModel, units: Mapping[str, Sequence[int]]) -> None:
        """Remove units that the newest task added. No other task has them."""
        task = model.tasks.last()
        assert task is not None
        number = task.number
        gone = {name: list(found) for name, found in units.items() if found}
        before = {space.name: self.units(space, number) for space in self.spaces.growing}
        modules, left = dict(model.network.named_modules()), {}
        with torch.no_grad():
            for space in self.spaces.growing:
                if space.name in gone:
                    left[space.name] = self._take_away(modules, space, gone[space.name], number)
            self.fit_unused(model.network, number)
            for key, (space, dim, values) in self._own(model).items():
                kept = task.get(key)
                if kept is not None and kept.dim() and space.name in gone:
                    stays = left[space.name][before[space.name]].nonzero()[:, 0]
                    task.put(key, kept.index_select(dim, _spread(stays, values)).contiguous())
        task.trainable(model.task == task.name)
        model.refresh()

    def _take_away(self, modules: dict[str, nn.Module], space: Space, gone: Sequence[int], number: int) -> Tensor:
        """Remove units from a space and its layers. Returns a mask of the units that remain."""
        born, i = self.times(space)[0], self._index[space.name]
        stays = torch.ones_like(born, dtype=torch.bool)
        stays[list(gone)] = False
        assert bool((born[~stays] == number).all())
        for name in ("born", "dead", "slot"):
            self._put(name, space, self.get_buffer(f"{name}{i}")[stays])
        rows = stays.nonzero()[:, 0]
        for path in space.makers:
            for name, tensor in modules[path]._parameters.items():
                if tensor is not None:
                    modules[path]._parameters[name] = _like(tensor, cut(tensor.detach(), [rows]).clone())
        for path, values in space.takers.items():
            if path != self._head:
                tensor = modules[path]._parameters["weight"]
                assert tensor is not None
                every = torch.arange(len(tensor), device=rows.device)
                picked = [every, _spread(rows, values)]
                modules[path]._parameters["weight"] = _like(tensor, cut(tensor.detach(), picked).clone())
        return stays

    def _widen(self, model: RectifiedModel, new: Mapping[str, Sequence[int | None]]) -> None:
        """Append units to spaces. With an origin (a unit's position), the new unit is a copy that replaces it."""
        task = model.tasks.last()
        assert task is not None
        number = task.number
        before = {space.name: self.units(space, number) for space in self.spaces.growing}
        paths = dict(model.network.named_modules())
        with torch.no_grad():
            for space in self.spaces.growing:
                if space.name in new:
                    self._append_units(paths, space, new[space.name], number)
        after = {space.name: self.units(space, number) for space in self.spaces.growing}
        self.fit_unused(model.network, number)
        self._refit(model, task, before, after, new)
        model.refresh()

    def _append_units(
        self, modules: dict[str, nn.Module], space: Space, origins: Sequence[int | None], number: int
    ) -> None:
        born, dead = self.times(space)
        old = len(born)
        copies = {old + k: origin for k, origin in enumerate(origins) if origin is not None}
        slots = self.slots(space)
        first = max([number * SLOTS - 1, *slots[slots // SLOTS == number].tolist()]) + 1
        fresh_slots = first + torch.arange(len(origins), device=slots.device)
        for place, origin in copies.items():
            fresh_slots[place - old] = slots[origin]
        self._put("slot", space, torch.cat([slots, fresh_slots]))
        self._put("born", space, torch.cat([born, born.new_full((len(origins),), number)]))
        dead = torch.cat([dead, dead.new_full((len(origins),), NEVER)])
        dead[list(copies.values())] = number
        self._put("dead", space, dead)
        for path in space.makers:
            parameters = modules[path]._parameters
            weight = parameters["weight"]
            assert weight is not None
            bound = weight[0].numel() ** -0.5
            for name, tensor in parameters.items():
                if tensor is not None:
                    fresh = torch.empty(len(origins), *tensor.shape[1:]).uniform_(-bound, bound).to(tensor)
                    for place, origin in copies.items():
                        fresh[place - old] = tensor[origin]
                    parameters[name] = _joined(tensor, fresh, 0)
        for path, values in space.takers.items():
            if path == self._head:
                continue
            weight = modules[path]._parameters["weight"]
            assert weight is not None
            fresh = weight.new_empty(weight.shape[0], len(origins) * values, *weight.shape[2:])
            bound = (weight[0].numel() + fresh[0].numel()) ** -0.5
            fresh.copy_(torch.empty(fresh.shape).uniform_(-bound, bound))
            for place, origin in copies.items():
                fresh[:, (place - old) * values : (place - old + 1) * values] = weight[
                    :, origin * values : (origin + 1) * values
                ]
            modules[path]._parameters["weight"] = _joined(weight, fresh, 1)

    def fit_unused(self, network: nn.Module, number: int) -> None:
        """Resize the network's own normalisation and head, which no task uses, to the shapes that a new task needs."""
        for space in self.spaces.growing:
            width = len(self.units(space, number))
            for path in space.norms:
                module: Any = network.get_submodule(path)
                for table in (module._parameters, module._buffers):
                    for name, tensor in table.items():
                        if tensor is not None and tensor.dim():
                            neutral = tensor.new_full((width,), float(name in ("weight", "running_var")))
                            table[name] = _like(tensor, neutral)
                module.num_features = width
            if self._head in space.takers:
                module = network.get_submodule(self._head)
                weight = module._parameters["weight"]
                inputs = width * space.takers[self._head]
                module._parameters["weight"] = _like(weight, weight.new_zeros(len(weight), inputs, *weight.shape[2:]))

    def _refit(
        self,
        model: RectifiedModel,
        task: TaskState,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        new: Mapping[str, Sequence[int | None]],
    ) -> None:
        """Resize the task's own tensors (normalisation, head) to its units; copies have their origin's values."""
        assert task.classes is not None
        norms = [layer for layer in model.norm_layers() if layer.path in self.spaces.out]
        fresh = {key: tensor for layer in norms for key, tensor in layer.draw().items()}
        if self._head in self.spaces.into:
            fresh["head.weight"] = model.tensors.new_head(task.classes, "random")["head.weight"]
        for key, (space, dim, values) in self._own(model).items():
            kept = task.get(key)
            if kept is None or not kept.dim() or space.name not in new:
                continue
            places = {int(u): k for k, u in enumerate(before[space.name])}
            first = len(self.times(space)[0]) - len(new[space.name])
            origin = {first + k: unit for k, unit in enumerate(new[space.name])}
            parts = []
            for at, unit in enumerate(after[space.name].tolist()):
                source = unit if unit in places else origin[unit]
                table, place = (fresh[key], at) if source is None else (kept, places[source])
                parts.append(table.narrow(dim, place * values, values))
            task.put(key, torch.cat(parts, dim).detach().clone())
        task.trainable(model.task == task.name)

    def _own(self, model: RectifiedModel) -> dict[str, tuple[Space, int, int]]:
        """Tensors of a task with entries per unit: the space, the dimension, and the values per unit."""
        norms = [layer for layer in model.norm_layers() if layer.path in self.spaces.out]
        found = {key: (self.spaces.out[layer.path], 0, 1) for layer in norms for key in layer.shapes()}
        into = self.spaces.into.get(self._head)
        return found if into is None else {**found, "head.weight": (into, 1, into.takers[self._head])}


class _Runner(fx.Interpreter):
    """Runs the network's graph; padding of channels follows the task's units."""

    def __init__(self, network: nn.Module, growth: Growth, number: int) -> None:
        super().__init__(network, graph=growth.spaces.graph)
        self._growth, self._number = growth, number

    def run_node(self, n: fx.Node) -> Any:
        ends = self._growth.spaces.pads.get(n)
        if ends is None:
            return super().run_node(n)
        (x, *_), _ = self.fetch_args_kwargs_from_env(n)
        return self._growth.carry(x, *ends, self._number)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not F.dropout:
            return super().call_function(target, args, kwargs)
        bound = inspect.signature(F.dropout).bind(*args, **kwargs)
        if "training" in bound.arguments:  # the graph has the mode in which it was traced
            bound.arguments["training"] = self.module.training
        return F.dropout(*bound.args, **bound.kwargs)


def cut(whole: Tensor, picked: Sequence[Tensor]) -> Tensor:
    """The given rows and columns of a tensor, in its memory format."""
    layout = layout_of(whole)  # which indexing does not keep
    for dim, positions in enumerate(picked):
        count = len(positions)
        if count == whole.shape[dim]:
            continue
        if int(positions[-1]) == count - 1:  # the first ones: the indices are sorted
            whole = whole.narrow(dim, 0, count)
        else:
            whole = whole.index_select(dim, positions.to(whole.device))
    return whole.contiguous(memory_format=layout)


def _spread(units: Tensor, values: int) -> Tensor:
    """The positions of units' values, given the number of values per unit."""
    return (units[:, None] * values + torch.arange(values, device=units.device)).flatten()


def layout_of(weight: Tensor) -> torch.memory_format:
    """The memory format of a convolution's weight, even if it is a slice of a larger one."""
    channels_last = weight.dim() == 4 and weight.stride(1) < weight.stride(3)
    return torch.channels_last if channels_last else torch.contiguous_format


def _joined(tensor: Tensor, fresh: Tensor, dim: int) -> Any:
    """A parameter or buffer that has grown at its end."""
    joined = torch.cat([tensor.detach(), fresh], dim)
    if joined.dim() == 4:
        joined = joined.contiguous(memory_format=layout_of(tensor))
    return _like(tensor, joined)


def _like(tensor: Tensor, values: Tensor) -> Any:
    """The values as a parameter or buffer, like the given tensor."""
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values

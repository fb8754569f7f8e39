"""The base classes of target layers: what a network with tasks asks of each layer that tasks change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rkr.core import kernels, ways
from rkr.core.buffers import SharedBuffers
from rkr.core.options import Options
from rkr.core.portable import LowRank, Portable, PortableByWeight, Tasks
from rkr.core.rectification import formula, lm_std
from rkr.core.state import Active, Ready, TaskState, is_statistic
from rkr.core.updates import LayerUpdate, Rectification
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.mixed import MixedBatch

MultiplyAdds = tuple[nn.Module, int, int]
"""Of one call: the layer, the values that it returns, and its multiply-adds."""


class NeedsGrouping(Exception):
    """Raised inside a mixed batch by a layer that computes one task at a time."""


def join(path: str, name: str) -> str:
    """Dotted name; the root module's path is empty."""
    return f"{path}.{name}" if path else name


def autocasts(device: torch.device) -> bool:
    """Whether mixed precision is on for this type of device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd must record what is computed from these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_channels_last(x: Tensor) -> bool:
    """Whether a tensor is in channels_last and in no other order."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class TargetLayer:
    """A layer of the network that tasks change.

    The user's module stays where it is, with its parameters and keys. Only its class is exchanged for a subclass
    (`exchange.py`): the attributes in `properties` then return the tensors of the task in use, and the methods in
    `overrides()` call those of this object.

    This class changes nothing; subclasses say what tasks have at a layer and how the layer computes with it.

    Args:
        path: Name of the module in the network.
        module: The user's module.
        active: Which task is in use.
        options: The options of the model.
        update: How tasks update layers.
    """

    properties: ClassVar[tuple[str, ...]] = ()
    """Attributes of the module that return the task's tensors: see `read`."""

    trains_base_tensors: ClassVar[bool] = False
    """Whether a task that trains the base uses the base's own tensors here, and gets its copies afterwards."""

    one_product: ClassVar[bool] = False
    """Whether a mixed batch multiplies by the layer's weight once for all tasks, which makes one pass worth while."""

    per_sample: ClassVar[bool] = False
    """Whether modules of this kind compute each entry of dimension 0 (the batch) from that entry alone."""

    standard: ClassVar[bool] = False
    """Whether any `LayerUpdate` applies: the weight is (outputs, inputs, *kernel), used by calling the module only."""

    unchanged_because: ClassVar[str] = "left out by the options"
    """Why modules of this kind are listed as shared in `model.cost()`, if they are."""

    original: type  # the module's class before it was exchanged
    registered: type  # the class of modules that this class of layers is registered for

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        self.path, self.module, self.active, self.options, self.update = path, module, active, options, update
        self.rank: int | None = None  # K; None if the weight is not rectified
        self.scaled = False  # whether outputs are scaled by F
        self.original = self.registered = type(module)
        self.buffers = SharedBuffers(module, self._shared_buffers)

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether a module of the registered class can be a target layer."""
        return True

    def chosen(self) -> bool:
        """Whether the options and the update make this module a target layer."""
        return True

    # -- the base's tensors, and a task's -----------------------------------------------------------------

    @property
    def weight(self) -> Tensor:
        """The base weight."""
        return self.module._parameters["weight"]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base bias."""
        return self.module._parameters.get("bias")

    def base_tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer of the base."""
        value = self.module._parameters.get(name)
        return value if value is not None else self.module._buffers.get(name)

    def own(self, task: TaskState, name: str) -> Tensor | None:
        """A tensor that a task has at this layer, or None."""
        return task.get(join(self.path, name))

    def tensor(self, task: TaskState, name: str) -> Tensor:
        """A tensor that every task has at this layer."""
        found = self.own(task, name)
        assert found is not None
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that a task has here, by their names in task files."""
        return {}

    def expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of the tensors in the file of a task with this number of classes."""
        return {key: (shape, self.weight.dtype) for key, shape in self.shapes().items()}

    def draw(self) -> dict[str, Tensor]:
        """New tensors for a task that starts as the base network."""
        return {}

    def replaced(self) -> Iterable[str]:
        """Parameters and buffers of the module that each task has for itself, so that they are not the base's."""
        return ()

    def covered(self) -> Iterable[str]:
        """Parameters of the module that tasks change in some way."""
        return ()

    def _shared_buffers(self) -> dict[str, Tensor]:
        """Buffers that no task has for itself."""
        own = {key.rpartition(".")[2] for key in self.shapes()}
        return {name: b for name, b in self.module._buffers.items() if b is not None and name not in own}

    def decays(self, name: str) -> bool:
        """Whether weight decay is right for a tensor of the task."""
        return name not in self.update.undecayed

    def freeze(self) -> None:
        """The base is fixed from now on."""
        self.buffers.keep()

    # -- what the module computes -------------------------------------------------------------------------

    def overrides(self) -> tuple[str, ...]:
        """Methods of the module that call the method of the same name of this object."""
        return ()

    def read(self, name: str) -> Tensor | None:
        """An attribute of the module for the task in use."""
        raise NotImplementedError

    def task_in_use(self) -> TaskState | None:
        """The task in use; None if there is none yet."""
        if self.active.mixed is not None:
            raise NeedsGrouping(self.path)
        return self.active.task

    def merged_tensors(self, task: TaskState) -> dict[str, Tensor | None]:
        """The module's parameters and buffers with the task's tensors folded in, for a plain copy of the network."""
        return {}

    def fit(self, module: nn.Module, task: TaskState) -> None:
        """Set attributes of the plain copy that depend on the task."""

    def portable(self, tasks: Tasks) -> Portable | None:
        """The layer in a traced copy of the network (`rkr.core.portable`); None if tasks do not change it."""
        return None

    # -- cost ---------------------------------------------------------------------------------------------

    def cost_group(self, name: str) -> str:
        """The column of `model.cost()` that counts a tensor of the task."""
        return "statistics" if is_statistic(name) else "scale" if name == "f" else "rectification"

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        """What one call of the plain module costs."""
        return []

    def paper_multiplies(self) -> int:
        """Multiplies that the paper counts for F: one for each scaled channel of a convolution."""
        return 0


class Adapter(TargetLayer):
    """A layer whose weight tasks rectify: `y = ((W + R) * x + b) · F` with `R = LM·RM` (equations 1 to 5).

    Subclass this, or the adapter of a similar layer, to rectify layers of your own:

        class MyAdapter(rkr.core.adapters.Adapter):
            def canonical(self, weight):  # the weight as (outputs, inputs, *kernel)
                return weight.t()

            def stored(self, weight):  # the reverse of `canonical`
                return weight.t()

            def apply(self, input, weight, bias):  # what the module's `forward` computes
                return input @ weight + bias

        rkr.register.layer(MyLayer, adapter=MyAdapter)

    What you write depends on the layer:

    * Weight and bias have other names than "weight" and "bias": set `weight_name`, `bias_name` and `properties`.
    * The weight is not stored as (outputs, inputs, *kernel): write `canonical` and `stored`. Both must be made of
      differentiable operations, and only move values. `F` has one value for each of the outputs.
    * `apply` computes the module's output from a weight as it is stored. It then replaces the module's `forward`, and
      each task computes with its own weight. Without it the module's own `forward` runs, and reads the task's weight
      from `self.weight`; that is right for every module, and a little slower.
    * `channel_dim` is the dimension of the output that has the channels or features; the last by default.
    * `family` says which options apply: "linear" or "conv" (`Options.rectify_weights`, `Options.scale_outputs`).
    * `rectify_input` may compute the training step in a faster way than through the whole weight.
    * `portable_layer` may give a faster form for export than one in which each task's weight is built in the graph.
    * `takes` may refuse some modules, and `multiply_adds` tells what a call costs.

    Everything else follows: initial values, merging and its cache, mixed batches, task files and cost. The adapter must
    hold no state between calls.
    """

    properties: ClassVar[tuple[str, ...]] = ("weight", "bias")
    weight_name: ClassVar[str] = "weight"
    bias_name: ClassVar[str] = "bias"
    family: ClassVar[str] = "linear"
    channel_dim: int = -1
    same_methods: ClassVar[tuple[str, ...]] = ("forward",)
    """Methods that a subclass of the registered class must not override, or `apply` would not be what it computes."""

    groups: ClassVar[bool] = True
    """Whether a training step may make the layer's whole weight."""

    convolves: ClassVar[bool] = False
    """Whether the layer is a convolution."""

    portable_layer: ClassVar[type[LowRank]] = PortableByWeight
    """What the layer becomes in a traced network, if it computes what this class's `apply` says."""

    apply: ClassVar[Callable[..., Tensor] | None] = None
    """`apply(self, input, weight, bias, *args, **kwargs)`: the module's output for a weight as it is stored."""

    def __init__(self, path: str, module: nn.Module, active: Active, options: Options, update: LayerUpdate) -> None:
        super().__init__(path, module, active, options, update)
        self.rank = (options.rank_of(path) or None) if options.rectifies(self.family) else None
        self.scaled = options.scales(self.family)
        self.rectified = type(update) is Rectification  # whether fast paths compute what the update says
        self.lm, self.rm, self.f = (join(path, name) for name in ("lm", "rm", "f"))

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        weight = module._parameters.get(cls.weight_name)
        return weight is not None and weight.is_floating_point()

    def chosen(self) -> bool:
        return self.options.selects(self.path) and self.update.applies(self)

    # -- tensors ------------------------------------------------------------------------------------------

    @property
    def weight(self) -> Tensor:
        return self.module._parameters[self.weight_name]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.module._parameters.get(self.bias_name)

    def canonical(self, weight: Tensor) -> Tensor:
        """A weight as (outputs, inputs, *kernel)."""
        return weight

    def stored(self, weight: Tensor) -> Tensor:
        """The reverse of `canonical`: a weight as the module stores it."""
        return weight

    @property
    def shape(self) -> torch.Size:
        """(outputs, inputs, *kernel)."""
        return self.canonical(torch.empty_like(self.weight, device="meta")).shape

    def lm_std(self, fan: int) -> float:
        """Standard deviation of a new LM with `fan` rows."""
        return lm_std(fan)

    def initial(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A new task's LM, RM and F, where they are not what `Rectification` draws."""
        return tensors

    def factors(self, task: TaskState) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """LM, RM and F of a task."""
        p = task._parameters
        return p.get(self.lm), p.get(self.rm), p.get(self.f)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {join(self.path, name): shape for name, shape in self.update.shapes(self).items()}

    def draw(self) -> dict[str, Tensor]:
        return {join(self.path, name): tensor for name, tensor in self.update.draw(self).items()}

    def covered(self) -> Iterable[str]:
        return self.weight_name, self.bias_name

    # -- the merged weight --------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor | None:
        task = self.task_in_use()
        if name == self.weight_name:
            if task is None:
                return self.weight
            return self.merged(task)[0] if self.rectified else self.update.weight(self, task)
        if task is None or self.bias is None:
            return self.bias
        if not self.rectified or needs_grad(self.bias, self.factors(task)[2]):
            return self.update.bias(self, task)
        return self.merged(task)[1]

    def merged(self, task: TaskState, pack: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """The weight `(W + R)·F` and the bias `b·F` of a task.

        Without gradients the result is cached; with gradients it has the same bits. With `pack` the weight is kept in
        the form that it returns.
        """
        w, b = self.weight, self.bias
        ready = self.active.ready
        if ready is not None and not ready.cached:
            made = ready.find(self.path)
            if made is not None:
                return made
        if autocasts(w.device):  # weights are merged in full precision, so that the cache serves every precision
            with torch.autocast(w.device.type, enabled=False):
                return self.merged(task, pack)
        lm, rm, f = self.factors(task)
        fast, layout = not self.by_formula(), self.options.layout
        if needs_grad(w, b, lm, rm, f):
            if not torch.compiler.is_compiling():
                self.active.cache.drop(task)
            if fast and layout == "axes":
                weight = self.stored(kernels.merged_weight(self.canonical(w), lm, rm, f))
                return weight, self.update.bias(self, task)
            return self.update.weight(self, task), self.update.bias(self, task)
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.update.weight(self, task), self.update.bias(self, task)
        cache, sources = self.active.cache, (w, b, lm, rm, f)
        place = self.path if pack is None else (self.path, "packed")  # the same in replicas
        found = cache.get(task, place, sources)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                if fast:
                    weight = self.stored(kernels.merge(self.canonical(w), lm, rm, f, layout))
                else:
                    weight = self.update.weight(self, task)
                if weight is w:
                    weight = w.clone()
                found = weight if pack is None else pack(weight), self.update.bias(self, task)
            cache.put(task, place, sources, *found)
        return found

    def portable(self, tasks: Tasks) -> Portable | None:
        made = next(cls for cls in type(self).__mro__ if "portable_layer" in vars(cls))
        same = self.is_plain and type(self).apply is made.apply  # type: ignore[attr-defined]
        thin = same and (self.options.layout == "axes" or len(self.shape) == 2)
        return (self.portable_layer if thin else PortableByWeight)(self, tasks)

    def merged_tensors(self, task: TaskState) -> dict[str, Tensor | None]:
        return dict(zip((self.weight_name, self.bias_name), self.merged(task), strict=True))

    # -- the module's forward -----------------------------------------------------------------------------

    def overrides(self) -> tuple[str, ...]:
        return ("forward",) if self.is_plain or not self.rectified else ()

    @property
    def is_plain(self) -> bool:
        """Whether the module computes what `apply` says."""
        same = (getattr(self.original, m, None) is getattr(self.registered, m, None) for m in self.same_methods)
        return self.apply is not None and all(same)

    def by_formula(self) -> bool:
        """Whether to compute by plain operations: see `ways.py`."""
        return ways.by_formula(self.options.kernels)

    @property
    def can_group(self) -> bool:
        """Whether merged weights for a training step can be made together with those of other layers."""
        return self.groups and (self.options.layout == "axes" or self.weight.dim() == 2)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output for the task in use."""
        active = self.active
        if active.ready is not None:
            found = self._ready(active.ready, input)
            if found is not None:
                return self.apply(input, *found, *args, **kwargs)  # type: ignore[misc]
        self.check_input(input)
        if not self.rectified:
            return self._updated(input)
        if active.mixed is not None:
            return self.mixed(active.mixed, input, *args, **kwargs)
        if self.module.training and torch.is_grad_enabled():
            lm, rm, f = self.factors(active.task_to_train())
            if self.by_formula():
                return self.formula(input, lm, rm, f, *args, **kwargs)
            y = self.rectify_input(input, lm, rm, f, *args, **kwargs)
            if y is not None:
                return y
        return self.infer(input, active.task, *args, **kwargs)

    def _ready(self, ready: Ready, input: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The merged weight and bias that are ready for this pass and input."""
        packs = ready.packs is not None and input.dim() == 4 and self.convolves and is_channels_last(input)
        key = (self.path, input.shape) if packs else self.path
        found = ready.find(key)
        if found is None:
            if not ready.cached or self.active.task is None:
                return None
            self.check_input(input)
            found = self.merged(self.active.task, self.packing(input) if packs else None)
            ready.put(key, found)
        weight = found[0]
        if input.dtype is not weight.dtype or input.device != weight.device:
            self.check_input(input)
        return found

    def formula(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output by the paper's equations, in plain operations."""

        def layer(weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.apply(input, self.stored(weight), bias, *args, **kwargs)  # type: ignore[misc]

        weight = self.canonical(self.weight)
        return formula(weight, self.bias, lm, rm, f, layer, self.options.layout, self.channel_dim)

    def rectify_input(
        self, input: Tensor, lm: Tensor | None, rm: Tensor | None, f: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """The output in training, without the gradient of the whole weight; None where merging is better."""
        return None

    def infer(self, input: Tensor, task: TaskState | None, *args: Any, **kwargs: Any) -> Tensor:
        """The output with the merged weight of a task."""
        weight, bias = (self.weight, self.bias) if task is None else self.merged(task, self.packing(input))
        return self.apply(input, weight, bias, *args, **kwargs)  # type: ignore[misc]

    def packing(self, input: Tensor) -> Callable[[Tensor], Tensor] | None:
        """How to reorder merged weights once for inputs like this one."""
        return None

    def mixed(self, batch: MixedBatch, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The output for a batch that is sorted by task: each task's samples with its merged weight."""
        if args or kwargs:
            raise NeedsGrouping(self.path)
        batch.check(self.path, input)
        parts = zip(input.split(batch.counts), batch.tasks, strict=True)
        return torch.cat([self.infer(part, task) for part, task in parts])

    def check_input(self, input: Tensor) -> None:
        """Raise a clear error for an input that the weight does not fit."""
        w = self.weight
        if input.dtype is not w.dtype and not autocasts(input.device):
            raise UsageError(
                f"layer {self.path!r} got {input.dtype}, but the network is {w.dtype}: "
                f"convert the input with x.to({w.dtype})"
            )
        self.check_device(input)

    def check_device(self, input: Tensor) -> None:
        """Raise a clear error for an input on another device."""
        device = self.weight.device
        if input.device != device:
            raise UsageError(
                f"layer {self.path!r} got an input on {input.device}, but the network is on {device}: "
                f"move the input with x.to({str(device)!r}), or the model with model.to({str(input.device)!r})"
            )

    # -- other methods' updates ---------------------------------------------------------------------------

    def _updated(self, input: Tensor) -> Tensor:
        task = self.task_in_use()
        return self._plain(input) if task is None else self.update.passed(self, task, input, self._plain)

    def _plain(self, input: Tensor) -> Tensor:
        if self.apply is not None and self.is_plain:
            return self.apply(input, self.read(self.weight_name), self.read(self.bias_name))
        return self.original.forward(self.module, input)  # type: ignore[attr-defined]

    # -- cost ---------------------------------------------------------------------------------------------

    @classmethod
    def multiply_adds(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> list[MultiplyAdds]:
        """By default the whole weight is used once for each position of the output."""
        weight: Tensor = getattr(module, cls.weight_name)
        positions = output.numel() // output.shape[cls.channel_dim]
        return [(module, output.numel(), positions * weight.numel())]


class BuffersOnly(TargetLayer):
    """A module that tasks do not change, but whose buffers they share: what a call writes there does not last."""


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a call, by position or as `input`."""
    return args[0] if args else kwargs["input"]

"""`rectify`: a network, and its tasks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from rkr.core import cost, files, layers, mixed
from rkr.core.layers import Site, join
from rkr.core.options import Options
from rkr.core.tasks import Active, MergeCache, Task, TaskTable, clone_state
from rkr.errors import UsageError

NO_DECAY_SUFFIX = "f"


def rectify(network: nn.Module, rank: int | None = None, head: str | None = None, **options: Any) -> RectifiedModel:
    """Give a network a sequence of tasks (paper, section "Rectification-based Knowledge Retention").

    The network is changed in place: it keeps its parameters and keys, and its layers compute with the task in use.

    Args:
        network: Any module.
        rank: K. 2 by default.
        head: Name of the classification layer, which each task has for itself. None for networks without one.
        options: Any other field of `Options`; or ``options=Options(...)`` for all of them at once.
    """
    if not isinstance(network, nn.Module):
        raise UsageError(f"rectify needs a torch.nn.Module, not {type(network).__name__}")
    given = options.pop("options", None)
    if given is not None:
        if options or rank is not None:
            raise UsageError("give either options=Options(...) or single options, not both")
        if not isinstance(given, Options):
            raise UsageError(f"options must be an rkr.Options, not {type(given).__name__}")
        chosen = given
    else:
        if rank is not None:
            options["rank"] = rank
        chosen = Options.from_json(options)
    return RectifiedModel(network, chosen, head)


class RectifiedModel(nn.Module):
    """A network with tasks. Made by `rectify` or `load`; call it like the network itself.

    Attributes:
        network: The user's own module. Its `state_dict` is the base: trained with the first task, then frozen.
        tasks: The tasks by name, in order.
        options: The options it was made with.
        head: Name of the classification layer, or None.
    """

    def __init__(self, network: nn.Module, options: Options, head: str | None, attach: bool = True) -> None:
        super().__init__()
        active = Active(cache=MergeCache(options.cache_bytes))
        if attach and any(layers.is_exchanged(m) for m in network.modules()):
            raise UsageError(
                "this network is rectified already: use the model that rectify returned, rkr.load, or "
                "model.merged(task)"
            )
        sites = find_sites(network, options, head, active)
        self.network = network
        self.tasks = TaskTable()
        self.options = options
        self.head = head
        self._active = active
        self._sites = sites
        self._frozen = False
        self._trained_flags = {n: p.requires_grad for n, p in network.named_parameters()}
        self._layer_strategy: bool | None = None
        if attach:
            self._attach()

    # -- tasks --------------------------------------------------------------------------------------------

    @property
    def task(self) -> str | None:
        """Name of the task in use."""
        return None if self._active.task is None else self._active.task.name

    @property
    def base_frozen(self) -> bool:
        """Whether the base is fixed for good: from the second task on, or from the first with `train_base=False`."""
        return self._frozen

    def add_task(
        self,
        name: str,
        classes: int | Sequence[str] | None = None,
        *,
        init: str = "previous",
        train_base: bool | None = None,
        head_init: Literal["random", "network"] = "random",
    ) -> Task:
        """Add a task and select it.

        Args:
            name: Free text, unique in the model.
            classes: Number of classes, or their names. None only for networks without a head.
            init: Where LM, RM, F and the normalisation state start: "previous" task, "random" (as the first task
                starts: R = 0, F = 1, LM drawn anew), or a task's name.
            train_base: Whether the base network is trained too. By default only with the first task; False
                there keeps a pretrained base as it is. Later tasks can never train it.
            head_init: "random", or "network" to start from the network's own classification layer.
        """
        if not isinstance(name, str) or not name:
            raise UsageError(f"a task's name must be text, not {name!r}")
        if name in self.tasks:
            raise UsageError(
                f"there is a task named {name!r} already: choose another name, or remove_task it first"
            )
        source = self._source(init)
        first = len(self.tasks) == 0 and not self._frozen
        if train_base and not first:
            raise UsageError(
                f"the base network cannot be trained with task {name!r}: earlier tasks depend on it. "
                "Only the first task may use train_base=True."
            )
        count, names = _class_list(classes, self.head)
        task = Task(name, count, names)
        open_base = first and train_base is not False
        if not open_base:
            self.freeze_base()
        for site in self._sites:
            if site.kind == "head":
                continue
            if site.kind == "norm" and open_base:
                continue  # the base's own normalisation is trained; freeze_base hands it to the task
            for key, tensor in site.draw().items():
                kept = None if source is None else source.get(key)
                task.put(key, tensor if kept is None else kept.detach().clone())
        if count is not None:
            for key, tensor in self._new_head(count, head_init).items():
                task.put(key, tensor)
        self.tasks.put(task)
        self.set_task(name)
        self._apply_modes()
        return task

    def set_task(self, name: str) -> None:
        """Use a task from now on. Costs the same however many tasks there are."""
        self._select(self.tasks[name])

    def remove_task(self, name: str) -> None:
        """Forget a task. The others are untouched; if it was in use, none is."""
        task = self.tasks.remove(name)
        self._active.cache.drop(task)
        if self._active.task is task:
            self._active.task = None

    @overload
    def task_parameters(self, groups: Literal[False] = False) -> Iterator[nn.Parameter]: ...

    @overload
    def task_parameters(self, groups: Literal[True]) -> list[dict[str, Any]]: ...

    def task_parameters(self, groups: bool = False) -> Iterator[nn.Parameter] | list[dict[str, Any]]:
        """What to optimise for the task in use: its own parameters and, while the base is trained, the base's.

        With `groups=True`: optimiser groups, the second without weight decay for F and normalisation (decay would
        pull scaling factors to 0, where 1 is neutral).
        """
        named = self.named_task_parameters()
        if not groups:
            return iter(named.values())
        norms = {id(p) for s in self.network.modules() if _is_norm(s) for p in s._parameters.values()}
        norm_paths = {s.path for s in self._sites if s.kind == "norm"}
        plain, free = [], []
        for key, p in named.items():
            path, _, last = key.rpartition(".")
            undecayed = id(p) in norms or path in norm_paths or (last == NO_DECAY_SUFFIX and key not in self._base_keys())
            (free if undecayed else plain).append(p)
        return [{"params": plain}, {"params": free, "weight_decay": 0.0}]

    def named_task_parameters(self) -> dict[str, nn.Parameter]:
        """`task_parameters` by name: the task's as in its file, the base's as in the network."""
        task = self._active.require()
        named = {k: p for k, p in task._parameters.items() if p is not None}
        if self._is_open(task):
            own_head = {p for n, p in self.network.named_parameters() if n in self._head_keys()}
            for key, p in self.network.named_parameters():
                if p.requires_grad and p not in own_head:
                    named[key] = p
        return named

    def freeze_base(self) -> None:
        """Fix the base network for good. Happens by itself when the second task comes."""
        if self._frozen:
            return
        for p in self.network.parameters():
            p.requires_grad_(False)
            p.grad = None
        self._frozen = True
        for task in self.tasks.values():  # at most one: the task with which the base was trained
            for key, tensor in clone_state(self._norm_state(task)).items():
                task.put(key, tensor)
            task.trainable(task is self._active.task)
        self._apply_modes()

    # -- computing ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, tasks: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Run the network for the task in use, or for a batch with one task per sample.

        Args:
            args: Passed to the network.
            tasks: A task's name for each sample of the batch. The result is one tensor, each row padded with -inf
                beyond its task's classes.
            kwargs: Passed to the network.
        """
        self._check_owner()
        if tasks is not None:
            return self._forward_mixed(args, kwargs, tasks)
        self._active.require()
        return self.network(*args, **kwargs)

    def merged(self, name: str) -> nn.Module:
        """A plain copy of the user's network that computes what the task computes, with the same keys.

        It has no trace of this package: rectification and scale are folded into weights and biases.
        """
        task = self.tasks[name]
        self._check_owner()
        plain = copy.deepcopy(self.network, {id(self._active): Active()})
        modules = dict(plain.named_modules())
        with torch.no_grad():
            for site in self._sites:
                module = modules[site.path]
                layers.restore(module)
                if site.kind == "norm":
                    for key in site.shapes():
                        own = task.get(key)
                        if own is not None:
                            layers_tensor = key.rpartition(".")[2]
                            _base_dict(module, layers_tensor)[layers_tensor].copy_(own)  # type: ignore[union-attr]
                elif site.kind == "head":
                    self._put_head(module, task)
                else:
                    weight, bias = layers.effective_for(site, task)
                    module._parameters[site.weight_name].copy_(weight)  # type: ignore[union-attr]
                    if bias is not None:
                        module._parameters[site.bias_name].copy_(bias)  # type: ignore[union-attr]
        for key, p in plain.named_parameters():
            p.requires_grad_(self._trained_flags.get(key, True))
        return plain

    def cost(self, example: Tensor | Sequence[int] | None = None) -> cost.Cost:
        """Parameters, percent, bytes and multiply-adds, for each task and in total.

        Args:
            example: An input, or its shape without the batch, for the multiply-adds. By default the network's
                `input_shape`, if it has that attribute.
        """
        return cost.measure(self, example)

    # -- proof and files ----------------------------------------------------------------------------------

    def fingerprint(self, name: str) -> str:
        """A hash of everything the task computes with: base, factors, normalisation, head.

        Equal fingerprints mean equal answers. It stays the same over training of other tasks, saving and loading,
        devices and processes.
        """
        return files.task_fingerprint(self, self.tasks[name])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the base and all tasks to a folder. A kill at any moment leaves the old state or the new one."""
        files.save_model(self, folder)

    def save_task(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write one task to one safetensors file, atomically."""
        files.save_task(self, self.tasks[name], path)

    def load_task(self, path: str | os.PathLike[str], name: str | None = None) -> Task:
        """Read a task from its file and select it. A task with the same name is replaced.

        Anything wrong with the file raises `rkr.FileError`, and the model stays as it was.

        Args:
            path: A file written by `save_task`.
            name: Another name for the task than the one in the file.
        """
        task = files.load_task(self, path, name)
        self._insert(task)
        return task

    # -- inner workings -----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RectifiedModel:
        """As for any module; what earlier tasks depend on stays in evaluation mode once the base is frozen."""
        super().train(mode)
        if self._active.task is not None:
            # Training code may write to `.data`, which no version counter sees.
            self._active.cache.drop(self._active.task)
        self._apply_modes()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> RectifiedModel:
        self._active.cache.clear()
        super()._apply(fn, recurse)
        return self

    def _attach(self) -> None:
        """Let the network's layers compute with this model's tasks; another model that had it loses it."""
        for module in self.network.modules():
            if layers.is_exchanged(module):
                layers.restore(module)
        for site in self._sites:
            layers.exchange(site)

    def _restore_tasks(self, tasks: Sequence[Task], current: str | None, frozen: bool) -> None:
        """Take over the tasks of a saved model, and whether its base was still being trained."""
        for task in tasks:
            self.tasks.put(task)
        if frozen:
            self.freeze_base()
        else:  # the base's own normalisation is trained with the first task
            for task in tasks:
                for key in self._norm_state(task):
                    task.discard(key)
        if current is not None:
            self.set_task(current)

    def _apply_modes(self) -> None:
        """Shared modules with buffers must not move once other tasks rely on them."""
        if not self._frozen:
            return
        own_stats = {id(s.module) for s in self._sites if s.kind == "norm" and s.stats}
        for module in self.network.modules():
            if module._buffers and id(module) not in own_stats:
                module.training = False

    def _is_open(self, task: Task) -> bool:
        """Whether the base is being trained with this task."""
        return not self._frozen and self.tasks.last() is task

    def _select(self, task: Task) -> None:
        old = self._active.task
        if old is not None and old is not task:
            old.trainable(False)
        task.trainable(True)
        self._active.task = task
        self._active.cache.touch(task)

    def _insert(self, task: Task) -> None:
        """Put a complete task into the model and select it."""
        old = self.tasks[task.name] if task.name in self.tasks else None
        self.freeze_base()
        if old is not None:
            self._active.cache.drop(old)
        self.tasks.put(task)
        self._select(task)

    def _source(self, init: str) -> Task | None:
        if init == "previous":
            return self.tasks.last()
        if init == "random" and init not in self.tasks:
            return None
        if init not in self.tasks:
            known = ", ".join(repr(n) for n in self.tasks) or "none yet"
            raise UsageError(
                f'init must be "previous", "random" or the name of a task, not {init!r}; tasks: {known}'
            )
        return self.tasks[init]

    def _head_keys(self) -> tuple[str, ...]:
        return () if self.head is None else (join(self.head, "weight"), join(self.head, "bias"))

    def _base_keys(self) -> set[str]:
        return set(self._trained_flags)

    def _head_site(self) -> Site | None:
        return next((s for s in self._sites if s.kind == "head"), None)

    def _new_head(self, count: int, init: str) -> dict[str, Tensor]:
        site = self._head_site()
        assert site is not None
        w, b = site.weight, site.bias
        if init == "network":
            if w.shape[0] != count:
                raise UsageError(
                    f"the network's own head has {w.shape[0]} classes, the task {count}: use head_init='random'"
                )
            return clone_state({"head.weight": w} | ({} if b is None else {"head.bias": b}))
        if init != "random":
            raise UsageError(f"head_init must be 'random' or 'network', not {init!r}")
        weight = torch.empty(count, *w.shape[1:])
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        found = {"head.weight": weight.to(w)}
        if b is not None:
            bound = w[0].numel() ** -0.5
            found["head.bias"] = torch.empty(count).uniform_(-bound, bound).to(b)
        return found

    def _put_head(self, module: Any, task: Task) -> None:
        weight, bias = task.get("head.weight"), task.get("head.bias")
        assert weight is not None
        module.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone())
        module.__dict__["out_channels" if "out_channels" in module.__dict__ else "out_features"] = len(weight)

    def _norm_state(self, task: Task) -> dict[str, Tensor]:
        """The task's normalisation tensors; while the base is trained they are the base's own."""
        found: dict[str, Tensor] = {}
        for site in self._sites:
            if site.kind == "norm":
                for key in site.shapes():
                    own = task.get(key)
                    tensor = own if own is not None else site.base_tensor(key.rpartition(".")[2])
                    assert tensor is not None
                    found[key] = tensor
        return found

    def _task_state(self, task: Task) -> dict[str, Tensor]:
        """Everything that belongs to a task, as its file holds it."""
        return {**task.tensors(), **self._norm_state(task)}

    def _expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of a task's tensors in this model."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for site in self._sites:
            if site.kind == "head":
                assert classes is not None
                found["head.weight"] = ((classes, *site.weight.shape[1:]), site.weight.dtype)
                if site.bias is not None:
                    found["head.bias"] = ((classes,), site.weight.dtype)
                continue
            for key, shape in site.shapes().items():
                dtype = site.weight.dtype if site.kind != "norm" else None
                if dtype is None:
                    base = site.base_tensor(key.rpartition(".")[2])
                    assert base is not None
                    dtype = base.dtype
                found[key] = (shape, dtype)
        return found

    def _base_state(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What tasks share: the network's tensors without its head and without what each task has for itself."""
        state = self.network.state_dict() if state is None else state
        own = set(self._head_keys()) | {k for s in self._sites if s.kind == "norm" for k in s.shapes()}
        return {k: v for k, v in state.items() if k not in own}

    def _check_owner(self) -> None:
        if self._sites and getattr(self._sites[0].module, "_rkr", None) is not self._sites[0]:
            raise UsageError(
                "this model's network was given to another rectified model: use that one, or load this one again "
                "with a network of its own"
            )

    def _forward_mixed(self, args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> Any:
        size = mixed.batch_size(args, kwargs)
        if isinstance(names, str) or len(names) != size:
            got = f"the single name {names!r}" if isinstance(names, str) else f"{len(names)} names"
            raise UsageError(
                f"tasks must have one name for each of the {size} samples, not {got}: "
                "pass a list as long as the batch, or use set_task for a batch of one task"
            )
        known = {name: self.tasks[name] for name in dict.fromkeys(names)}
        if not known:
            raise UsageError("a batch with tasks needs at least one sample")
        position = {name: i for i, name in enumerate(known)}
        device = next(iter(self.network.parameters())).device
        index = torch.tensor([position[n] for n in names])
        counts = torch.bincount(index, minlength=len(known)).tolist()
        order = torch.argsort(index, stable=True)
        old = self._active.task
        try:
            if self._use_layers(len(known)):
                batch = mixed.MixedBatch(list(known.values()), counts, index[order].to(device))
                try:
                    result = self._by_layer(args, kwargs, batch, order.to(device), size)
                except layers.NeedsGrouping:
                    self._layer_strategy = False
                else:
                    if self._layer_strategy:
                        return result
                    grouped = self._by_group(args, kwargs, known, counts, order.to(device), size)
                    self._layer_strategy = _agree(result, grouped)
                    return grouped
            return self._by_group(args, kwargs, known, counts, order.to(device), size)
        finally:
            self._active.task = old
            self._active.mixed = None

    def _use_layers(self, tasks: int) -> bool:
        """Whether to try the "layer" strategy: it must help, and not have failed before on this network."""
        if self.options.mixed == "group" or self._layer_strategy is False or torch.is_grad_enabled():
            return False
        if any(s.module.training for s in self._sites) or tasks == 1 or self.options.layout != "axes":
            return False
        if self.options.mixed == "layer":
            return True
        sizes = {kind: 0 for kind in ("linear", "conv", "projection")}
        for site in self._sites:
            if site.kind in sizes:
                sizes[site.kind] += site.weight.numel()
        return sizes["linear"] > sizes["conv"] + sizes["projection"]

    def _by_layer(self, args: Any, kwargs: Any, batch: mixed.MixedBatch, order: Tensor, size: int) -> Any:
        self._active.mixed = batch
        args, kwargs = (mixed.take(v, order, size) for v in (tuple(args), dict(kwargs)))
        output = mixed.logits_of(self.network(*args, **kwargs))
        self._active.mixed = None
        return mixed.assemble([output], [order])

    def _by_group(
        self, args: Any, kwargs: Any, tasks: Mapping[str, Task], counts: list[int], order: Tensor, size: int
    ) -> Any:
        self._active.mixed = None
        rows = list(order.split(counts))
        outputs = []
        for task, picked in zip(tasks.values(), rows, strict=True):
            self._active.task = task
            self._active.cache.touch(task)
            part, named = (mixed.take(v, picked, size) for v in (tuple(args), dict(kwargs)))
            outputs.append(mixed.logits_of(self.network(*part, **named)))
        return mixed.assemble(outputs, rows)


def find_sites(network: nn.Module, options: Options, head: str | None, active: Active) -> list[Site]:
    """The places of a network that tasks change. Checks everything before anything is touched."""
    modules = dict(network.named_modules())
    lazy = next((n for n, p in network.named_parameters() if is_lazy(p)), None)
    if lazy is not None:
        raise UsageError(f"parameter {lazy!r} has no shape yet: run the network once before rectify")
    if head is not None:
        _check_head(modules, head)
    elif not modules:
        raise UsageError("the network has no modules")
    sites = []
    for path, module in modules.items():
        site = _site_of(path, module, options, head, active)
        if site is not None:
            sites.append(site)
    if not any(s.rank is not None or s.scaled for s in sites):
        raise UsageError(
            "nothing to rectify: no Linear or convolution layer passes the options "
            f"(include={list(options.include)}, exclude={list(options.exclude)}, "
            f"rectify_weights={options.rectify_weights!r}, scale_outputs={options.scale_outputs!r})"
        )
    keys = [key for s in sites if s.kind != "head" for key in s.shapes()]
    clash = next((k for k in keys if k in ("head.weight", "head.bias")), None)
    if clash is not None:
        raise UsageError(f"the name {clash!r} means a task's head in task files: rename the layer 'head'")
    return sites


def _site_of(
    path: str, module: nn.Module, options: Options, head: str | None, active: Active
) -> Site | None:
    if path == head:
        return Site(path, module, active, "head", options)
    if parametrize.is_parametrized(module):
        return None
    if isinstance(module, layers.BATCH_NORMS):
        has_stats = module._buffers.get("running_mean") is not None
        return Site(
            path, module, active, "norm", options, affine=options.bn_affine, stats=options.bn_stats and has_stats
        )
    if isinstance(module, layers.OTHER_NORMS):
        return Site(path, module, active, "norm", options, affine=True) if options.norm == "per_task" else None
    kind = weight_kind(module)
    if kind is None or not options.selects(path):
        return None
    family = "conv" if kind == "conv" else "linear"
    rank = options.rank_of(path) if options.rectifies(family) else None
    scaled = options.scales(family)
    return Site(path, module, active, kind, options, rank, scaled) if rank or scaled else None


def weight_kind(module: nn.Module) -> str | None:
    """"linear", "conv" or "projection" for modules whose weight can be rectified, else None."""
    if isinstance(module, nn.MultiheadAttention):
        name, kind = "in_proj_weight", "projection"
    elif isinstance(module, nn.Linear):
        name, kind = "weight", "linear"
    elif isinstance(module, layers.CONVS) and not getattr(module, "transposed", False):
        name, kind = "weight", "conv"
    else:
        return None
    weight = module._parameters.get(name)
    return kind if weight is not None and weight.is_floating_point() else None


def _check_head(modules: Mapping[str, nn.Module], head: str) -> None:
    found = modules.get(head)
    candidates = [n for n, m in modules.items() if isinstance(m, (nn.Linear, *layers.CONVS))]
    if found is None:
        hint = f"; the last one is {candidates[-1]!r}" if candidates else ""
        raise UsageError(f"the network has no module named {head!r} to be its head{hint}")
    if not isinstance(found, (nn.Linear, *layers.CONVS)) or "weight" not in found._parameters:
        raise UsageError(
            f"the head {head!r} is a {type(found).__name__}: it must be a Linear or convolution layer"
        )


def _class_list(classes: int | Sequence[str] | None, head: str | None) -> tuple[int | None, list[str] | None]:
    if head is None:
        if classes is not None:
            raise UsageError("this model has no head, so its tasks take no classes: leave `classes` out")
        return None, None
    if classes is None:
        raise UsageError("say how many classes the task has: add_task(name, classes=10)")
    if isinstance(classes, str) or isinstance(classes, bool):
        raise UsageError(f"classes must be a number or a list of names, not {classes!r}")
    if isinstance(classes, int):
        if classes < 1:
            raise UsageError(f"a task needs at least 1 class, not {classes}")
        return classes, None
    names = [str(c) for c in classes]
    if not names:
        raise UsageError("a task needs at least 1 class, not an empty list")
    if len(set(names)) != len(names):
        raise UsageError("the names of a task's classes must differ from each other")
    return len(names), names


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, (*layers.BATCH_NORMS, *layers.OTHER_NORMS))


def _base_dict(module: nn.Module, name: str) -> dict[str, Tensor | None]:
    return module._parameters if module._parameters.get(name) is not None else module._buffers  # type: ignore[return-value]


def _agree(a: Any, b: Any) -> bool:
    """Whether two results of a mixed batch are the same up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_agree, a, b))
    return False


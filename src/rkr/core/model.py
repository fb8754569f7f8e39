"""Networks with tasks: `rectify`, `load` and `RectifiedModel`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from rkr.core import checks, cost, files, inferring, merging, mixed, statistics, zoo
from rkr.core.adapters import Adapter, NormLayer, TargetLayer
from rkr.core.adapters.norm import norm_parameters
from rkr.core.arguments import check_name, class_list
from rkr.core.budget import with_ranks
from rkr.core.buffers import lent_buffers
from rkr.core.conventions import counting, forward_like, with_classes
from rkr.core.exchange import exchange, is_exchanged, restore
from rkr.core.find import find_layers
from rkr.core.index import Changes
from rkr.core.infer import FALSE_ALARMS, Rule
from rkr.core.options import Options
from rkr.core.passes import Passes, as_when_frozen
from rkr.core.rowwise import is_rowwise
from rkr.core.state import Active, MergeCache, TaskState, clone_state, version_key
from rkr.core.table import TaskTable
from rkr.core.tensors import Tensors
from rkr.core.updates import LayerUpdate, Rectification
from rkr.core.views import Replicas, View
from rkr.errors import UsageError


def rectify(network: nn.Module, rank: int | None = None, head: str | None = None, **options: Any) -> RectifiedModel:
    """Give a network a sequence of tasks (paper, section "Rectification-based Knowledge Retention").

    The network is changed in place: it keeps its parameters and keys, and its layers compute with the task in use.

    Args:
        network: Any module.
        rank: The rank K, 2 by default.
        head: Name of the classification layer, which each task has for itself. None for networks without one.
        options: Any other field of `Options`; or ``options=Options(...)`` for all of them at once.

    Returns:
        The model. It has no tasks yet.

    Raises:
        UsageError: `network` is no module or is rectified already, or an option or a name is wrong.

    Example:
        >>> import torch, rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(classes=10), rank=2, head="fc")
        >>> task = model.add_task("digits", classes=10)
        >>> model(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 10])
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


@torch.inference_mode(False)
def load(folder: str | os.PathLike[str], network: nn.Module) -> RectifiedModel:
    """Read a model that `RectifiedModel.save` wrote into a network of the same architecture.

    Everything is read and checked before the network is changed. If the network is rectified already, for instance by
    the model that was saved, the new model takes it over.

    Args:
        folder: A folder that `RectifiedModel.save` wrote.
        network: A network of the same architecture. Its values do not matter.

    Returns:
        The model, with the tasks of the folder. A task's file is read when the task is first used.

    Raises:
        FileError: The folder is missing, damaged, of a newer version, or does not fit the network.

    Example:
        >>> import rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(classes=10), head="fc")
        >>> task = model.add_task("digits", classes=10)
        >>> model.save("digits-zoo")
        >>> list(rkr.load("digits-zoo", rkr.networks.small_cnn(classes=10)).tasks)
        ['digits']
    """
    return zoo.load(folder, network, RectifiedModel)


class RectifiedModel(nn.Module):
    """A network with tasks. Made by `rectify` or `load`; call it like the network itself.

    Attributes:
        network: The user's own module. Its `state_dict` is the base: trained with the first task, then frozen.
        tasks: The tasks by name, in order.
        options: The options it was made with.
        head: Name of the classification layer, or None.
        update: How a task updates each layer. Methods other than RKR have their own.
        layers: The target layers, in the order of the network.
        tensors: Which tensors belong to the base, and which to a task.
        active: The task in use, and its merged weights.
        about: Free information that is saved with the model, as JSON: how to build the network, for instance. Each
            task has its own, `model.tasks[name].about`, which travels with its file. Fingerprints do not cover it.

    Example:
        >>> import torch, rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(classes=10), head="fc")
        >>> for name in ("low", "high"):
        ...     task = model.add_task(name, classes=5)
        ...     model(torch.randn(8, 1, 8, 8)).logsumexp(1).sum().backward()
        ...     torch.optim.SGD(model.task_parameters(groups=True), lr=0.01).step()
        >>> x = torch.randn(2, 1, 8, 8)
        >>> model.eval()(x, tasks=["low", "high"]).shape
        torch.Size([2, 5])
        >>> model.task
        'high'
    """

    def __init__(
        self,
        network: nn.Module,
        options: Options,
        head: str | None,
        attach: bool = True,
        update: LayerUpdate | None = None,
    ) -> None:
        super().__init__()
        self.update = update or Rectification()
        active = Active(cache=MergeCache(options.cache_bytes))
        if attach and any(is_exchanged(m) for m in network.modules()):
            raise UsageError(
                "this network is rectified already: use the model that rectify returned, rkr.load, or "
                "model.merged(task)"
            )
        layers = find_layers(network, options, self.update, head, active)
        allotted = with_ranks(options, layers, sum(p.numel() for p in network.parameters()))
        if allotted is not options:
            options, layers = allotted, find_layers(network, allotted, self.update, head, active)
        self.network = network
        self.tasks = TaskTable(self._read_task, active.cache.drop)
        self.stored: zoo.Stored | None = None  # the folder that it comes from
        self.options = options
        self.head = head
        self.about: dict[str, Any] = {}
        self.active = active
        self.layers: Sequence[TargetLayer] = layers
        self.tensors = Tensors(network, layers)
        self._weight_layers = [layer for layer in layers if isinstance(layer, Adapter)]
        self._places = checks.places(network, layers)
        self.replicas = Replicas()
        self.passes = Passes()
        self._base_at_start: Any = None  # version of the base when the task that trains it was added
        self.user_requires_grad = {n: p.requires_grad for n, p in network.named_parameters()}
        self._base_known: tuple[Any, str] | None = None  # checksums and fingerprint of the base at the last check
        self._counting: list[Any] | None = None  # see `counting`; None: not known yet
        self.rule: tuple[int, Rule] | None = None  # how tasks are inferred: see `inferring.rule_of`
        self._rowwise: bool | None = None  # see `is_rowwise`; None: not known yet
        self.register_load_state_dict_post_hook(_keep_what_was_loaded)  # type: ignore[no-untyped-call]
        self.__dict__["forward"] = forward_like(self, network)
        if attach:
            self.attach()

    # -- tasks --------------------------------------------------------------------------------------------

    @property
    def task(self) -> str | None:
        """Name of the task in use."""
        return None if self.active.task is None else self.active.task.name

    @property
    def base_frozen(self) -> bool:
        """Whether the base is frozen: from the second task on, or from the first with `train_base=False`."""
        return self.active.base_frozen

    @torch.inference_mode(False)  # its tensors will be trained
    def add_task(
        self,
        name: str,
        classes: int | Sequence[str] | None = None,
        *,
        init: str = "previous",
        train_base: bool | None = None,
        head_init: Literal["random", "network"] = "random",
    ) -> TaskState:
        """Add a task and select it.

        Args:
            name: Free text, unique in the model.
            classes: Number of classes, or their names. None only for networks without a head.
            init: Where LM, RM, F and the normalisation state start: "previous" task, "random" (as the first task
                starts: R = 0, F = 1, LM drawn anew), or a task's name.
            train_base: Whether the base network is trained too. By default only with the first task; False
                there keeps a pretrained base as it is. Later tasks can never train it.
            head_init: "random", or "network" to start from the network's own classification layer.

        Returns:
            The task, which is `model.tasks[name]` as well.

        Raises:
            UsageError: There is a task with this name, or an argument does not fit the model.
        """
        check_name(name)
        self.check_layers()
        if name in self.tasks:
            raise UsageError(f"there is a task named {name!r} already: choose another name, or remove_task it first")
        source = self._source(init)
        always_open = self.update.opens_base
        first = len(self.tasks) == 0 and not self.base_frozen
        if train_base and not first and not always_open:
            raise UsageError(
                f"the base network cannot be trained with task {name!r}: earlier tasks depend on it. "
                "Only the first task may use train_base=True."
            )
        count, names = class_list(classes, self.head)
        task = TaskState(name, count, names)
        head = {} if count is None else self.tensors.new_head(count, head_init)
        open_base = first and train_base is not False and not always_open
        if not open_base and not always_open:
            if len(self.tasks) and not self.base_frozen and not self._base_has_changed():
                warnings.warn(
                    "the base network was not trained since its first task was added, and is frozen now: train that "
                    "task before adding another, or add it with train_base=False",
                    stacklevel=2,
                )
            self.freeze_base()
        for layer in self.layers:
            if layer.trains_base_tensors and open_base:
                continue  # freeze_base copies the base's tensors to the task
            for key, tensor in layer.draw().items():
                kept = None if source is None else source.get(key)
                task.put(key, tensor if kept is None else _inherited(kept, tensor))
        for key, tensor in head.items():
            task.put(key, tensor)
        self.tasks.put(task)
        self.set_task(name)
        if open_base:
            self._base_at_start = version_key(*self.network.parameters())
        return task

    def set_task(self, name: str) -> None:
        """Use a task from now on. The cost does not depend on the number of tasks.

        Only the task in use takes gradients; those of the task before are dropped, so that an optimiser which still
        holds its parameters cannot move them.

        Args:
            name: The task's name.

        Raises:
            UsageError: No task has this name.
        """
        self._select(self.tasks[name])

    def remove_task(self, name: str) -> None:
        """Remove a task. The others do not change; if it was in use, no task is in use afterwards.

        A base that was trained with the task stays as it is, because files of the task may depend on it.

        Args:
            name: The task's name.

        Raises:
            UsageError: No task has this name.
        """
        task = self.tasks.in_memory(name)
        if not self.base_frozen and not self.update.opens_base and self._base_has_changed():
            self.freeze_base()
        self.tasks.remove(name)
        if task is not None and self.active.task is task:
            self.active.task = None

    @overload
    def task_parameters(self, groups: Literal[False] = False) -> Iterator[nn.Parameter]: ...

    @overload
    def task_parameters(self, groups: Literal[True]) -> list[dict[str, Any]]: ...

    def task_parameters(self, groups: bool = False) -> Iterator[nn.Parameter] | list[dict[str, Any]]:
        """Parameters to optimise for the task in use: the task's and, while the base is trained, the base's.

        With `groups=True`: optimiser groups, the second without weight decay for F and normalisation (decay would
        pull scaling factors to 0, where 1 is neutral).

        Args:
            groups: Whether to return optimiser groups.

        Returns:
            An iterator of parameters, or a list of two groups for an optimiser.

        Raises:
            UsageError: No task is in use.
        """
        named = self.named_task_parameters()
        if not groups:
            return iter(named.values())
        norms = {id(p) for p in norm_parameters(self.network)}
        of_task = {id(p) for p in self.active.require()._parameters.values()}
        layers = {layer.path: layer for layer in self.layers}
        plain: list[nn.Parameter] = []
        free: list[nn.Parameter] = []
        for key, p in named.items():
            path, _, last = key.rpartition(".")
            own = id(p) in of_task and path in layers
            decays = id(p) not in norms and (not own or layers[path].decays(last))
            (plain if decays else free).append(p)
        return [{"params": plain}, {"params": free, "weight_decay": 0.0}]

    def named_task_parameters(self) -> dict[str, nn.Parameter]:
        """Name the parameters that `task_parameters` returns.

        Returns:
            The task's under the names of its file, the base's under those of the network.
        """
        task = self.active.require()
        # In the order of the network; what else the task has comes last.
        keys = dict.fromkeys((*self.tensors.expected(task.classes), *task._parameters))
        named = {k: p for k in keys if (p := task._parameters.get(k)) is not None}
        if self._trains_base(task):
            for key, p in self.network.named_parameters():
                if p.requires_grad:
                    named[f"network.{key}" if key in named else key] = p
        return named

    @torch.inference_mode(False)
    def freeze_base(self) -> None:
        """Fix the base network permanently. `add_task` calls this when you add the second task."""
        if self.base_frozen:
            return
        self.check_layers()
        for p in self.network.parameters():
            p.requires_grad_(False)
            p.grad = None
        self.active.base_frozen = True
        self.replicas.clear()
        for layer in self.layers:
            layer.freeze()
        for task in self.tasks.values():  # at most one: the task with which the base was trained
            for key, tensor in clone_state(self.tensors.norm_state(task)).items():
                task.put(key, tensor)
            task.trainable(task is self.active.task)

    # -- computing ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, labels: Any = None, tasks: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Run the network for the task in use, or for a batch with one task per sample.

        Args:
            args: Passed to the network.
            labels: Passed to the network, unless None. transformers' models compute the loss from them, here for the
                task's number of classes.
            tasks: A task's name for each sample of the batch. The result is one tensor, each row padded with -inf
                beyond its task's classes. Tensors among the arguments, also within lists and dictionaries, are
                taken apart by task if their first dimension is that of the first one; others go to every task.
            kwargs: Passed to the network.

        Returns:
            What the network returns, with the task's own head.

        Raises:
            UsageError: No task is in use, a task is unknown, a layer was replaced after `rectify`, or types or devices
                do not match.
        """
        self.check_owner()
        if not all(modules.get(name) is module for modules, name, module in self._places):
            self.check_layers()
        if labels is not None:
            kwargs["labels"] = labels
        try:
            with self.replicas.one_at_a_time(), nullcontext() if self._is_frozen() else as_when_frozen(self.network):
                if tasks is not None:
                    return mixed.run(self, args, kwargs, tasks)
                return self.run(args, kwargs, self.active.require())
        except RuntimeError as error:
            checks.explain(self, (*args, *kwargs.values()), error)
            raise

    def for_task(self, name: str) -> View:
        """One task as a function that several threads may call at once, whatever task the model itself uses.

        It answers with the same bits as the model in evaluation mode. Each thread has gradients on unless it turns
        them off (`torch.no_grad`). Meanwhile tasks may be added, trained and removed, other than those that are called.

        Args:
            name: The task's name.

        Returns:
            The function, which takes what the network's `forward` takes.

        Raises:
            UsageError: No task has this name.
        """
        self.check_layers()
        self.tasks.in_memory(name)  # there is one
        return View(self, name)

    def estimate_statistics(self, batches: Iterable[Any]) -> int:
        """Estimate the running statistics of the task in use anew, by one pass over inputs of the task.

        To be called after training: BatchNorm's momentum can leave the statistics near those of the base. Other tasks
        and all parameters stay as they are.

        Args:
            batches: Inputs; of tuples the first element is taken, mappings are passed as keyword arguments.

        Returns:
            The number of layers.
        """
        return statistics.estimate(self, batches)

    def describe_task(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Describe the task in use, so that `infer` can tell it from others. To be called after training.

        The description is made from the base's own features, takes at most a third of the task's bytes, and is kept in
        the task's `about`, so that it travels with its file. Other tasks and all tensors stay as they are.

        Args:
            batches: Training samples of the task and their classes, counted from 0: one pass, without augmentation.
        """
        inferring.describe_task(self, batches)

    def infer(self, x: Tensor, false_alarms: float = FALSE_ALARMS) -> inferring.Answers:
        """Answer without being told the task: task and class of each sample, and whether it is unlike all tasks.

        One pass of the base proposes tasks, whatever their number; at most four are computed, and one answers. Every
        task needs a description (`describe_task`).

        Args:
            x: Samples, (B, ...).
            false_alarms: Share of the tasks' own samples that may be called unlike all tasks.

        Returns:
            The `names` of the tasks, and for each sample `task`, `label`, `probability`, and `none`: whether it is
            unlike all tasks.

        Raises:
            UsageError: A task has no description.
        """
        self.check_owner()
        return inferring.infer(self, x, false_alarms)

    def merged(self, name: str) -> nn.Module:
        """A plain copy of your network that computes what the task computes, with the same keys.

        It does not depend on this package: rectification and scale are folded into weights and biases.

        Args:
            name: The task's name.

        Returns:
            The copy. `torch.export`, `torch.jit` and `torch.compile` take it.

        Raises:
            UsageError: No task has this name, or its method does not fold into plain weights.
        """
        task = self.tasks[name]
        self.check_layers()
        if not self.is_rectification:
            raise UsageError(f"{type(self.update).__name__} does not fold into plain weights: use the model itself")
        return merging.plain_copy(self, task)

    def cost(self, example: Tensor | Sequence[int] | None = None) -> cost.Cost:
        """Parameters, percent, bytes and multiply-adds, for each task and in total.

        Args:
            example: An input, or its shape without the batch, for the multiply-adds. By default the network's
                `input_shape`, if it has that attribute.

        Returns:
            The cost. Print it for a table.
        """
        return cost.measure(self, example)

    # -- proof and files ----------------------------------------------------------------------------------

    def fingerprint(self, name: str) -> str:
        """A hash of everything the task computes with: base, factors, normalisation, head.

        Equal fingerprints mean equal answers, provided that the network's `state_dict` holds all it computes with
        (buffers with `persistent=False` are not in it). It stays the same over training of other tasks, saving and
        loading, devices and processes.

        Args:
            name: The task's name.

        Returns:
            64 hexadecimal digits.
        """
        return files.task_fingerprint(self, self.tasks[name])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the base and all tasks to a folder. If the process is killed, the old or the new state is there.

        In the folder that the model was loaded from or last saved to, only what has changed is written. If another
        process has changed that folder meanwhile, it is an error: see `follow`.

        Args:
            folder: The folder. It is made if necessary.

        Raises:
            FileError: The folder cannot be written, or another process has changed it.
        """
        zoo.save(self, folder)

    def follow(self) -> Changes:
        """Take over what other processes have changed in the folder that this model was loaded from or saved to.

        Two calls of `stat` if they have changed nothing. Tasks that were trained here and not saved stay as they are;
        if another process has changed the same ones, it is an error.

        Returns:
            Names of the tasks that were added, replaced and removed; false if there are none.
        """
        return zoo.follow(self)

    def save_task(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write one task to one safetensors file, atomically.

        Args:
            name: The task's name.
            path: The file. An existing one is replaced.

        Raises:
            FileError: The file cannot be written.
        """
        files.save_task(self, self.tasks[name], path)

    @torch.inference_mode(False)
    def load_task(self, path: str | os.PathLike[str], name: str | None = None) -> TaskState:
        """Read a task from its file and select it. A task with the same name is replaced.

        Anything wrong with the file raises `rkr.FileError`, and the model stays as it was.

        Args:
            path: A file written by `save_task`.
            name: Another name for the task than the one in the file.

        Returns:
            The task.

        Raises:
            FileError: The file is missing, damaged, or of a task for another base.
        """
        if name is not None:
            check_name(name)
        self.check_owner()
        task = files.load_task(self, path, name)
        self._insert(task)
        return task

    # -- inner workings -----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RectifiedModel:
        """As for any module. Nothing that earlier tasks depend on changes in either mode."""
        self.check_layers()
        changes = mode != self.training
        super().train(mode)
        if changes:
            self.active.cache.clear()
        return self

    def _read_task(self, name: str) -> TaskState:
        with torch.inference_mode(False):
            return zoo.read_stored(self, name)

    def weight_layers(self) -> list[Adapter]:
        """The target layers whose weights tasks update."""
        return self._weight_layers

    def norm_layers(self) -> list[NormLayer]:
        """The normalisation layers of which tasks have their own tensors, or whose statistics they share."""
        return [layer for layer in self.layers if isinstance(layer, NormLayer)]

    @property
    def is_rectification(self) -> bool:
        """Whether tasks update layers as RKR does, so that they fold into plain weights."""
        return type(self.update) is Rectification

    def is_rowwise(self) -> bool:
        """Whether it is proved that each sample's output depends on that sample alone."""
        if self._rowwise is None:
            self._rowwise = is_rowwise(self.network, self.head)
        return self._rowwise

    @contextmanager
    def without_task(self) -> Iterator[None]:
        """Compute with the base network."""
        task, self.active.task = self.active.task, None
        try:
            yield
        finally:
            self.active.task = task

    def refresh(self) -> None:
        """Drop all that is derived from the model: cached merged weights, and replicas of the network for views.

        Only needed after a write to a task's `.data`, which torch does not report, or a change of the network's modules
        themselves, such as a new hook.
        """
        self.active.cache.clear()
        self.replicas.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__["forward"] = forward_like(self, self.network)

    def _apply(self, fn: Any, recurse: bool = True) -> RectifiedModel:
        self.refresh()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def attach(self) -> None:
        """Let the network's layers compute with this model's tasks, instead of those of another model."""
        self.replicas.clear()
        for module in self.network.modules():
            if is_exchanged(module):
                restore(module)
        for layer in self.layers:
            exchange(layer)
        for p in self.tensors.unused_head():
            p.requires_grad_(False)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], task: TaskState | None) -> Any:
        """One pass of the network as the update runs it. `task` is None for a mixed batch."""
        active = self.active
        active.ready = None if torch.compiler.is_compiling() else self.passes.prepare(self, task, args, kwargs)
        try:
            with lent_buffers(self.layers):
                if "labels" not in kwargs:
                    return self.update.run(self.network, args, kwargs, task)
                if self._counting is None:
                    self._counting = counting(self.network)
                with with_classes(self._counting, task):
                    return self.update.run(self.network, args, kwargs, task)
        finally:
            active.ready = None

    def restore_tasks(self, tasks: Sequence[TaskState]) -> None:
        """Take over the tasks of a saved model whose base was being trained, its own normalisation included."""
        for task in tasks:
            self.tasks.put(task)
            for key in self.tensors.norm_state(task):
                task.discard(key)

    def _base_has_changed(self) -> bool:
        """Whether the base was written to since the task that trains it was added."""
        return self._base_at_start != version_key(*self.network.parameters())

    def _trains_base(self, task: TaskState) -> bool:
        """Whether the base is being trained with this task."""
        return not self.base_frozen and self.tasks.is_last(task)

    def _select(self, task: TaskState) -> None:
        old = self.active.task
        if old is not None and old is not task:
            old.trainable(False)
        task.trainable(True)
        self.active.task = task
        self.active.cache.touch(task)

    def _insert(self, task: TaskState) -> None:
        """Put a complete task into the model and select it."""
        self.freeze_base()
        self.tasks.put(task)
        self._select(task)

    def _source(self, init: str) -> TaskState | None:
        if init == "previous":
            return self.tasks.last()
        if init == "random":
            return None
        if init not in self.tasks:
            known = ", ".join(repr(n) for n in self.tasks) or "none yet"
            raise UsageError(f'init must be "previous", "random" or the name of a task, not {init!r}; tasks: {known}')
        return self.tasks[init]

    def _is_frozen(self) -> bool:
        """Whether a pass computes as it will after the base is frozen. A compiled graph cannot see to it."""
        return self.base_frozen or torch.is_grad_enabled() or torch.compiler.is_compiling()

    def check_layers(self) -> None:
        """Check that target layers were not replaced, and that no module with buffers was added after `rectify`."""
        checks.check_layers(self)

    def check_owner(self) -> None:
        """Check that the network still computes with this model's tasks."""
        checks.check_owner(self)


def _keep_what_was_loaded(model: nn.Module, _: Any) -> None:
    """After `load_state_dict`: shared buffers keep the values that were loaded."""
    assert isinstance(model, RectifiedModel)
    if model.base_frozen:
        for layer in model.layers:
            layer.buffers.keep()
    model.refresh()


def _inherited(kept: Tensor, fresh: Tensor) -> Tensor:
    """A new task's initial tensor: an earlier task's, with new values where the network has grown since."""
    if kept.shape == fresh.shape:
        return kept.detach().clone()
    fresh[tuple(map(slice, kept.shape))] = kept.detach()
    return fresh

"""Which tensors belong to the base that all tasks share, and which to each task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rkr.core.sites import Site, join
from rkr.core.state import TaskState, clone_state
from rkr.errors import UsageError


class Ownership:
    """Tells what of a network, at the places where it computes with tasks, is whose.

    Args:
        network: The user's module.
        sites: Where it computes with a task's tensors.
    """

    def __init__(self, network: nn.Module, sites: Sequence[Site]) -> None:
        self.network, self.sites = network, sites

    @property
    def head(self) -> Site | None:
        """The classification layer."""
        return next((s for s in self.sites if s.kind == "head"), None)

    def head_keys(self) -> set[str]:
        """The head's parameters under all their names in the network."""
        site = self.head
        modules = self.network.named_modules(remove_duplicate=False)
        return {
            join(path, name)
            for path, module in modules
            if site is not None and module is site.module
            for name in module._parameters
        }

    def unused_head(self) -> list[nn.Parameter]:
        """The parameters of the network's own head, which no task uses, unless they are tied to something else."""
        site = self.head
        if site is None:
            return []
        others = (m for m in self.network.modules() if m is not site.module)
        elsewhere = {id(p) for module in others for p in module._parameters.values()}
        return [p for p in site.module._parameters.values() if p is not None and id(p) not in elsewhere]

    def new_head(self, count: int, init: str) -> dict[str, Tensor]:
        """A task's head as it starts: "random", or a copy of the "network"'s own."""
        site = self.head
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

    def norm_state(self, task: TaskState) -> dict[str, Tensor]:
        """The task's normalisation tensors; while the base is trained they are the base's own."""
        found: dict[str, Tensor] = {}
        for site in self.sites:
            if site.kind == "norm":
                for key in site.shapes():
                    own = task.get(key)
                    tensor = own if own is not None else site.base_tensor(key.rpartition(".")[2])
                    assert tensor is not None
                    found[key] = tensor
        return found

    def task_state(self, task: TaskState) -> dict[str, Tensor]:
        """Everything that belongs to a task, as its file holds it."""
        return {**task.tensors(), **self.norm_state(task)}

    def expected(self, classes: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and types of a task's tensors in this model."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for site in self.sites:
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

    def base_state(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What tasks share: the network's tensors without its head and without what each task has for itself."""
        if state is None:
            self.restore_shared()
            state = self.network.state_dict()
        odd = next((k for k, v in state.items() if not isinstance(v, Tensor)), None)
        if odd is not None:
            raise UsageError(f"the network's state {odd!r} is not a tensor, so it cannot be hashed or saved")
        own = self.head_keys() | {k for s in self.sites if s.kind == "norm" for k in s.shapes()}
        return {k: v for k, v in state.items() if k not in own}

    def restore_shared(self) -> None:
        """Put buffers that all tasks share back, whatever has moved them."""
        for site in self.sites:
            site.buffers.restore()

"""Sites: the places of a network that compute with a task's tensors, and how they are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from rkr.core.buffers import SharedBuffers
from rkr.core.changes import Change
from rkr.core.options import Options
from rkr.core.state import STATISTICS, Active, TaskState
from rkr.errors import UsageError

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
WEIGHTS = ("linear", "conv", "attention")
OTHER_NORMS = tuple(getattr(nn, name) for name in ("LayerNorm", "GroupNorm", "RMSNorm") if hasattr(nn, name))


@dataclass(eq=False)
class Site:
    """One place in the network that computes with the task's tensors."""

    path: str
    module: nn.Module
    active: Active
    kind: str  # "linear", "conv", "attention" (of attention), "norm", "head" or "pinned" (shared, with buffers)
    options: Options
    change: Change
    rank: int | None = None  # of a rectification; None: the weight is not rectified
    scaled: bool = False  # by F
    affine: bool = False  # norm: each task has its own affine parameters
    stats: bool = False  # norm: each task has its own running statistics

    def __post_init__(self) -> None:
        self.buffers = SharedBuffers(self.module, self._shared_buffers)
        self.lm, self.rm, self.f = (join(self.path, name) for name in ("lm", "rm", "f"))
        self.weight_name, self.bias_name = (
            ("in_proj_weight", "in_proj_bias") if self.kind == "attention" else ("weight", "bias")
        )

    @property
    def weight(self) -> Tensor:
        """The base weight."""
        return self.module._parameters[self.weight_name]  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base bias."""
        return self.module._parameters.get(self.bias_name)

    def own(self, task: TaskState, name: str) -> Tensor | None:
        """A tensor that a task keeps here, if it has one."""
        return task.get(join(self.path, name))

    def tensor(self, task: TaskState, name: str) -> Tensor:
        """One that it has for certain."""
        found = self.own(task, name)
        assert found is not None
        return found

    def factors(self, task: TaskState) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """LM, RM and F of a task here."""
        p = task._parameters
        return p.get(self.lm), p.get(self.rm), p.get(self.f)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a task keeps here, the head's excepted."""
        if self.kind in ("head", "pinned"):
            return {}
        if self.kind == "norm":
            names = (("weight", "bias") if self.affine else ()) + (STATISTICS if self.stats else ())
            found = {name: self.base_tensor(name) for name in names}
            return {join(self.path, n): tuple(t.shape) for n, t in found.items() if t is not None}
        return {join(self.path, name): shape for name, shape in self.change.shapes(self).items()}

    def base_tensor(self, name: str) -> Tensor | None:
        """A parameter or buffer of the base at this place."""
        value = self.module._parameters.get(name)
        return value if value is not None else self.module._buffers.get(name)

    def _shared_buffers(self) -> dict[str, Tensor]:
        """Those that no task has for itself. (Shared statistics of BatchNorm are seen to by `layers`.)"""
        own = {key.rpartition(".")[2] for key in self.shapes()} | set(STATISTICS if self.kind == "norm" else ())
        return {name: b for name, b in self.module._buffers.items() if b is not None and name not in own}

    def draw(self) -> dict[str, Tensor]:
        """New tensors for a task that starts as the base network."""
        if self.kind == "norm":
            return {
                key: self.base_tensor(key.rpartition(".")[2]).detach().clone()  # type: ignore[union-attr]
                for key in self.shapes()
            }
        if self.kind in ("head", "pinned"):
            return {}
        return {join(self.path, name): tensor for name, tensor in self.change.draw(self).items()}


def norm_parameters(network: nn.Module) -> Iterator[nn.Parameter]:
    """The affine parameters of normalisation layers, others' own included, such as transformers' RMSNorms."""
    for module in network.modules():
        if isinstance(module, (*BATCH_NORMS, *OTHER_NORMS)) or "norm" in type(module).__name__.lower():
            yield from (p for p in module._parameters.values() if p is not None)


def join(path: str, name: str) -> str:
    """Dotted name; the root module's path is empty."""
    return f"{path}.{name}" if path else name


def find_sites(network: nn.Module, options: Options, change: Change, head: str | None, active: Active) -> list[Site]:
    """The places of a network that tasks change. Checks everything before anything is touched."""
    modules = dict(network.named_modules())
    lazy = next((n for n, t in (*network.named_parameters(), *network.named_buffers()) if is_lazy(t)), None)
    if lazy is not None:
        raise UsageError(f"{lazy!r} has no shape yet: run the network once before rectify")
    if head is not None:
        head = _check_head(network, modules, head)
    sites = []
    for path, module in modules.items():
        site = _site_of(path, module, options, change, head, active)
        if site is None and any(b is not None for b in module._buffers.values()):
            site = Site(path, module, active, "pinned", options, change)
        if site is not None:
            sites.append(site)
    if not any(s.kind in WEIGHTS for s in sites):
        raise UsageError(
            "nothing to rectify: no Linear or convolution layer passes the options "
            f"(include={list(options.include)}, exclude={list(options.exclude)}, "
            f"rectify_weights={options.rectify_weights!r}, scale_outputs={options.scale_outputs!r})"
        )
    _check_patterns(options, [name for name, module in modules.items() if weight_kind(module) is not None])
    keys = [key for s in sites for key in s.shapes()]
    clash = next((k for k in keys if k in ("head.weight", "head.bias")), None)
    if clash is not None:
        raise UsageError(f"the name {clash!r} means a task's head in task files: rename the layer 'head'")
    return sites


def _check_patterns(options: Options, layers: list[str]) -> None:
    """A pattern that matches no layer is a typing error."""
    for name in ("include", "exclude", "ranks"):
        for pattern in getattr(options, name):
            if not any(fnmatchcase(path, pattern) for path in layers):
                some = ", ".join(map(repr, layers[:6])) + (", ..." if len(layers) > 6 else "")
                raise UsageError(f"{name}: no layer matches {pattern!r}; layers: {some}")


def _site_of(
    path: str, module: nn.Module, options: Options, change: Change, head: str | None, active: Active
) -> Site | None:
    if path == head:
        return Site(path, module, active, "head", options, change)
    if parametrize.is_parametrized(module):
        return None
    if isinstance(module, BATCH_NORMS):
        has_stats = module._buffers.get("running_mean") is not None
        return Site(
            path,
            module,
            active,
            "norm",
            options,
            change,
            affine=options.bn_affine,
            stats=options.bn_stats and has_stats,
        )
    if isinstance(module, OTHER_NORMS):
        return Site(path, module, active, "norm", options, change, affine=True) if options.norm == "per_task" else None
    kind = weight_kind(module)
    if kind is None or not options.selects(path):
        return None
    family = "conv" if kind == "conv" else "linear"
    rank = options.rank_of(path) if options.rectifies(family) else None
    site = Site(path, module, active, kind, options, change, rank, options.scales(family))
    return site if change.applies(site) else None


def weight_kind(module: nn.Module) -> str | None:
    """ "linear", "conv" or "attention" for modules whose weight can be rectified, else None."""
    if isinstance(module, nn.MultiheadAttention):
        name, kind = "in_proj_weight", "attention"
    elif isinstance(module, nn.Linear):
        name, kind = "weight", "linear"
    elif isinstance(module, CONVS) and not getattr(module, "transposed", False):
        name, kind = "weight", "conv"
    else:
        return None
    weight = module._parameters.get(name)
    return kind if weight is not None and weight.is_floating_point() else None


def _check_head(network: nn.Module, modules: Mapping[str, nn.Module], head: str) -> str:
    """The head's first name in the network, if there is such a layer."""
    found = dict(network.named_modules(remove_duplicate=False)).get(head) if isinstance(head, str) else None
    candidates = [n for n, m in modules.items() if isinstance(m, (nn.Linear, *CONVS))]
    if found is None:
        hint = f"; the last one is {candidates[-1]!r}" if candidates else ""
        raise UsageError(f"the network has no module named {head!r} to be its head{hint}")
    if not isinstance(found, (nn.Linear, *CONVS)) or "weight" not in found._parameters:
        raise UsageError(f"the head {head!r} is a {type(found).__name__}: it must be a Linear or convolution layer")
    return next(name for name, module in modules.items() if module is found)

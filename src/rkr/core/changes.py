"""Changes: what a task does to the layers of a network.

A network with tasks (`RectifiedModel`) looks after everything that methods have in common: each task's tensors,
normalisation and head, where a new task starts, what is frozen, what it costs. A `Change` says the rest of it:

    y = output(weight_t * x + bias_t)

RKR's is `Rectification`. Methods that generate, decompose, calibrate or grow weights have changes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rkr.core.rectification import factor_shapes, lm_std, rectified_weight, scaled
from rkr.core.state import TaskState

if TYPE_CHECKING:
    from rkr.core.sites import Site


class Change:
    """The network as it is; subclasses override what they change.

    Tensors that a task keeps at a layer have short names here ("lm", "gate"); task files have them as "<layer>.<name>".
    """

    opens_base: ClassVar[bool] = False
    """Whether the base goes on learning with every task; else it is frozen after the first."""

    undecayed: ClassVar[frozenset[str]] = frozenset()
    """Tensors without weight decay."""

    # -- what a task keeps --------------------------------------------------------------------------------

    def applies(self, site: Site) -> bool:
        """Whether a layer ("linear", "conv" or "attention") is changed at all."""
        return site.kind != "attention"  # whose forward reads weights without calling layers

    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a task keeps at a layer."""
        return {}

    def draw(self, site: Site) -> dict[str, Tensor]:
        """These tensors for a task that starts anew."""
        w = site.weight
        return {name: torch.zeros(s, dtype=w.dtype, device=w.device) for name, s in self.shapes(site).items()}

    # -- what it computes with them -----------------------------------------------------------------------

    def weight(self, site: Site, task: TaskState) -> Tensor:
        """The layer's weight for a task."""
        return site.weight

    def bias(self, site: Site, task: TaskState) -> Tensor | None:
        """The layer's bias for a task."""
        return site.bias

    def passed(self, site: Site, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """What leaves the layer; `plain` is its own forward, with the task's weight and bias."""
        return self.output(site, task, x, plain(x))

    def output(self, site: Site, task: TaskState, x: Tensor, y: Tensor) -> Tensor:
        """What leaves the layer, of its input x and of y = weight * x + bias."""
        return y

    def norm(self, site: Site, task: TaskState, name: str) -> Tensor | None:
        """A tensor of a normalisation layer ("weight", "running_mean", ...): the task's own, or the base's."""
        own = site.own(task, name)
        return own if own is not None else site.base_tensor(name)

    def normalised(self, site: Site, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """What leaves a BatchNorm; `plain` is the layer's own forward, with the task's tensors."""
        return plain(x)

    def multiply_adds(self, site: Site, values: int) -> int:
        """What `output` adds for a sample at a layer that puts out so many values."""
        return 0

    def run(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], task: TaskState | None) -> Any:
        """The network's output."""
        return network(*args, **kwargs)

    def head(self, site: Site, task: TaskState, name: str) -> Tensor | None:
        """The "weight" or "bias" of the task's head."""
        return task.get(f"head.{name}")


class Rectification(Change):
    """W_t = W + LM·RM and O_t = O·F (equations 1 to 5), F folded into weight and bias.

    `layers.py` and `kernels.py` compute the same faster.
    """

    undecayed = frozenset({"f"})

    def applies(self, site: Site) -> bool:
        return site.rank is not None or site.scaled

    def shapes(self, site: Site) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if site.rank is not None:
            shapes["lm"], shapes["rm"] = factor_shapes(site.weight.shape, site.rank)
        if site.scaled:
            shapes["f"] = (site.weight.shape[0],)
        return shapes

    def draw(self, site: Site) -> dict[str, Tensor]:
        """R = 0 and F = 1: a new task starts as the base network."""
        tensors = super().draw(site)
        if site.rank is not None:
            lm = tensors["lm"]
            std = site.options.init_gain * lm_std("conv" if site.kind == "conv" else "linear", lm.shape[0])
            tensors["lm"] = torch.randn(lm.shape).mul_(std).to(lm)
        if site.scaled:
            tensors["f"].fill_(1)
        return tensors

    def weight(self, site: Site, task: TaskState) -> Tensor:
        lm, rm, f = site.factors(task)
        return scaled(rectified_weight(site.weight, lm, rm, site.options.layout), f, 0)

    def bias(self, site: Site, task: TaskState) -> Tensor | None:
        f = site.factors(task)[2]
        return site.bias if site.bias is None or f is None else site.bias * f

"""CCLL (Singh et al., "Calibrating CNNs for Lifelong Learning", NeurIPS 2020): feature maps calibrated for each task.

There is no public code. The sizes follow from the published memory figures: 12 numbers per convolution channel (a 3x3
kernel, a gate weight, two of batch normalisation) and 1 per fully connected unit. Whether maps are calibrated before or
after batch normalisation, and what a unit's number does, is not published; both are options.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import Adapter, LayerUpdate, Options, TargetLayer, TaskState
from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork
from rkr.methods.shared.changed import Changed
from rkr.methods.shared.graph import norm_after
from rkr.registry import register


class Calibration(LayerUpdate):
    """A spatial and then a channel-wise calibration of every convolution's output, one number for every unit.

    Args:
        after: Convolutions that are calibrated after a BatchNorm, by the BatchNorm's name; others directly.
        unit: Meaning of the number of a fully connected unit: its "scale", or the weight of a "gate".
    """

    undecayed = frozenset({"unit"})

    def __init__(self, after: dict[str, str] | None = None, unit: str = "scale") -> None:
        self._after = after or {}
        self._later = set(self._after.values())  # convolutions that wait for it
        self._unit = unit

    def shapes(self, site: Adapter) -> dict[str, tuple[int, ...]]:
        channels = site.weight.shape[0]
        if not site.convolves:
            return {"unit": (channels,)}
        if site.weight.dim() != 4:
            raise UsageError(f"CCLL calibrates 2-dimensional convolutions, but {site.path!r} is none")
        return {"spatial": (channels, 1, 3, 3), "channel": (channels,)}

    def draw(self, site: Adapter) -> dict[str, Tensor]:
        """The identity, with gates of 1/2, which batch normalisation absorbs."""
        tensors = super().draw(site)
        if "unit" in tensors and self._unit == "scale":
            tensors["unit"].fill_(1)
        return tensors

    def output(self, site: Adapter, task: TaskState, x: Tensor, y: Tensor) -> Tensor:
        if not site.convolves:
            unit = site.tensor(task, "unit")
            return y * (unit if self._unit == "scale" else torch.sigmoid(unit * y))
        if site.path in self._later:
            return y
        return calibrated(y, site.tensor(task, "spatial"), site.tensor(task, "channel"))

    def normalised(self, site: TargetLayer, task: TaskState, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        y = plain(x)
        conv = self._after.get(site.path)
        spatial, channel = (task.get(f"{conv}.{name}") for name in ("spatial", "channel"))
        return y if spatial is None or channel is None else calibrated(y, spatial, channel)

    def multiply_adds(self, site: Adapter, values: int) -> int:
        """A 3x3 kernel and the gate per value of a map, one factor per unit."""
        return 10 * values if site.convolves else values


def calibrated(maps: Tensor, spatial: Tensor, channel: Tensor) -> Tensor:
    """M* = M + A with A a 3x3 convolution of each channel; M** = M* · σ(w GAP(M*)), for maps (B, C, H, W)."""
    maps = maps + F.conv2d(maps, spatial, padding=1, groups=maps.shape[1])
    gate = torch.sigmoid(channel[:, None, None] * maps.mean((2, 3), keepdim=True))  # (B, C, 1, 1)
    return maps * gate


@register.method(
    "ccll", "CCLL: every layer's output is calibrated for each task", citation="Singh et al., NeurIPS 2020"
)
class Ccll(Changed):
    """A frozen base, and for each task a calibration of every layer's output, batch normalisation and a head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Initial calibration of a new task: "previous" (that of the previous task) or "random" (neutral).
        where: Whether to calibrate a convolution's output "before" or "after" its batch normalisation.
        unit: The number of a fully connected unit: its "scale" (1 at first), or the weight w of a "gate" σ(w y),
            which without a following batch normalisation shrinks signals layer by layer.
    """

    checked = "The paper's printed counts, which are reproduced exactly; there is no public code."
    differs = (
        "On which side of batch normalisation maps are calibrated (`where`) and what the one number of a unit does "
        "(`unit`) is not known.",
    )

    isolating = True

    def __init__(
        self, make: MakeNetwork, head: str, *, init: str = "previous", where: str = "before", unit: str = "scale"
    ) -> None:
        for name, value, allowed in (("where", where, ("before", "after")), ("unit", unit, ("scale", "gate"))):
            if value not in allowed:
                raise UsageError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
        after: dict[str, str] = {}
        if where == "after":
            network = make()
            pairs = norm_after(network, "CCLL").items()
            after = {norm: layer for layer, norm in pairs if isinstance(network.get_submodule(layer), nn.Conv2d)}
        super().__init__(make, head, Calibration(after, unit), Options(bn="per_task"), init)

"""EFT (Verma et al., "Efficient Feature Transformations", CVPR 2021): grouped convolutions on every layer's output."""

from __future__ import annotations

from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import Adapter, LayerUpdate, Options, TaskState
from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork
from rkr.methods.shared.changed import Changed
from rkr.registry import register

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Transformation(LayerUpdate):
    """A convolution's output y becomes a 3x3 convolution of y in groups, plus a 1x1 convolution in groups.

    Args:
        spatial: Channels in a group of the 3x3 convolution.
        pointwise: Channels in a group of the 1x1 convolution.
    """

    undecayed = frozenset({"unit"})

    def __init__(self, spatial: int, pointwise: int) -> None:
        self._spatial, self._pointwise = spatial, pointwise

    def shapes(self, site: Adapter) -> dict[str, tuple[int, ...]]:
        channels = site.weight.shape[0]
        if not site.convolves:
            return {"unit": (channels,)}
        if site.weight.dim() != 4:
            raise UsageError(f"EFT transforms 2-dimensional convolutions, but {site.path!r} is none")
        return {
            "spatial": (channels, group_size(channels, self._spatial), 3, 3),
            "spatial_bias": (channels,),
            "pointwise": (channels, group_size(channels, self._pointwise), 1, 1),
            "pointwise_bias": (channels,),
        }

    def draw(self, site: Adapter) -> dict[str, Tensor]:
        """As torch initialises convolutions.

        So the first task, which trains the network too, starts far from the plain network.
        """
        tensors = super().draw(site)
        if "unit" in tensors:
            tensors["unit"].fill_(1)
            return tensors
        for name in ("spatial", "pointwise"):
            bound = tensors[name][0].numel() ** -0.5
            for key in (name, f"{name}_bias"):
                tensors[key] = torch.empty(tensors[key].shape).uniform_(-bound, bound).to(tensors[key])
        return tensors

    def output(self, site: Adapter, task: TaskState, x: Tensor, y: Tensor) -> Tensor:
        if not site.convolves:
            return y * site.tensor(task, "unit")
        parts = []
        for name, padding in (("spatial", 1), ("pointwise", 0)):
            weight, bias = site.tensor(task, name), site.tensor(task, f"{name}_bias")
            parts.append(F.conv2d(y, weight, bias, padding=padding, groups=y.shape[1] // weight.shape[1]))
        return parts[0] + parts[1]

    def multiply_adds(self, site: Adapter, values: int) -> int:
        shapes = self.shapes(site)
        if "unit" in shapes:
            return values
        return values * (9 * shapes["spatial"][1] + shapes["pointwise"][1])


def group_size(channels: int, wanted: int) -> int:
    """Channels per group: as requested, or the next smaller divisor."""
    return next(size for size in range(min(wanted, channels), 0, -1) if channels % size == 0)


@register.method("eft", "EFT: grouped convolutions on every layer's output", citation="Verma et al., CVPR 2021")
class Eft(Changed):
    """A frozen base, and for each task a transformation of layers' outputs, batch normalisation and a head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Initial transformation of a new task: "previous" (that of the previous task) or "random".
        spatial: Channels per group of the 3x3 convolution, or the next smaller divisor of a layer's channels.
        pointwise: Channels in a group of the 1x1 convolution.
        stem: Whether the first convolution has a transformation too. The authors' ResNet-18 creates one and never calls
            it; their VGG-16 has one behind every convolution.
    """

    checked = "The authors' code (vkverma01/EFT)."
    differs = (
        "Groups have 8 and 16 channels, or the next smaller number that divides the layer's.",
        "The first convolution is not transformed, as in the authors' ResNet-18, which creates a transformation and "
        "never calls it; their VGG-16 has one there (`stem = true`).",
        "Every task is taken as its last epoch leaves it (there: the best epoch on the test).",
    )

    isolating = True
    unrecorded: ClassVar[dict[str, Any]] = {"stem": True}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        init: str = "previous",
        spatial: int = 8,
        pointwise: int = 16,
        stem: bool = False,
    ) -> None:
        if spatial < 1 or pointwise < 1:
            raise UsageError(f"spatial and pointwise must be at least 1, not {spatial} and {pointwise}")
        network = make()
        convolutions = (path for path, layer in network.named_modules() if isinstance(layer, CONVOLUTIONS))
        exclude = () if stem else tuple(islice(convolutions, 1))
        options = Options(bn="per_task", exclude=exclude)
        super().__init__(lambda: network, head, Transformation(spatial, pointwise), options, init)
        self.make = make

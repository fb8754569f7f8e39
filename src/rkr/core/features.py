"""Features: what comes into the classification layer, or out of the last convolution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


@contextmanager
def head_input(model: RectifiedModel) -> Iterator[list[Tensor]]:
    """Catch what comes into the classification layer: the features (B, D), one entry for each pass."""
    if model.head is None:
        raise UsageError("this model has no head, so no features come into it: name the classification layer, head=...")
    caught: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any) -> None:
        x = inputs[0]
        caught.append(x.flatten(2).mean(2) if x.dim() > 2 else x)

    handle = model.network.get_submodule(model.head).register_forward_pre_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()


@torch.no_grad()
def base_features(model: RectifiedModel, x: Tensor) -> Tensor:
    """The base's own features of a batch: float32 (B, D). The task in use does not matter."""
    with model.without_task(), head_input(model) as caught:
        model.run((x,), {}, None)
    return caught[-1].float()


@torch.no_grad()
def base_maps(model: RectifiedModel, x: Tensor, most: int) -> Tensor:
    """The base's maps of its last convolution, averaged over the finest square grid with at most `most` values: (B, D).

    Linear layers of a base that was trained on one task keep what tells that task's classes apart; the maps before them
    keep more of what tells others apart. They are caught where they come, flattened, into the first linear layer
    behind the last convolution. If this is the classification layer, as in a ResNet, they are its features.
    Networks without such a layer have the features of `base_features` as well.
    """
    channels, maps = 0, None

    def convolved(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal channels, maps
        channels, maps = output.shape[1] if output.dim() > 2 else 0, None

    def flattened(module: nn.Module, inputs: Any) -> None:
        nonlocal maps
        if channels and maps is None and inputs[0].dim() == 2 and inputs[0].shape[1] % channels == 0:
            maps = inputs[0]

    handles = []
    for path, module in model.network.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and path != model.head:
            handles.append(module.register_forward_hook(convolved))
        elif isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(flattened))
    try:
        features = base_features(model, x)
    finally:
        for handle in handles:
            handle.remove()
    if maps is None:
        return features
    positions = maps.shape[1] // channels
    size = isqrt(positions) if isqrt(positions) ** 2 == positions else 1
    grid = max(min(size, isqrt(most // channels)), 1)
    maps = maps.float().unflatten(1, (channels, size, -1))  # (B, C, size, size), or (B, C, 1, positions)
    return F.adaptive_avg_pool2d(maps, grid).flatten(1)

"""Features: what comes into the classification layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
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

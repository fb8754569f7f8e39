"""Estimates a task's normalisation statistics anew, from one pass over samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rkr.core.adapters.norm import BatchNormLayer
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel


@torch.inference_mode(False)
@torch.no_grad()
def estimate(model: RectifiedModel, batches: Iterable[Any]) -> int:
    """Replace the running statistics of the task in use by the mean over `batches` of each batch's statistics.

    Training moves running statistics by a momentum, often 0.1 or 0.01 a step, so after a short training they are still
    near those of the base, and evaluation computes with other statistics than training did. The mean over one pass
    has no momentum and no memory of the base. Only normalisation is in training mode: dropout and the like are off.
    """
    task = model.active.require()
    layers = [layer for layer in model.norm_layers() if isinstance(layer, BatchNormLayer) and layer.stats]
    before = {key: value.clone() for layer in layers for key, value in _statistics(layer).items()}
    seen = 0
    try:
        with _only_norms_training(model, layers):
            for layer in layers:
                _reset(layer)
            for batch in batches if layers else ():
                x = batch[0] if isinstance(batch, list | tuple) else batch
                model(**x) if isinstance(x, Mapping) else model(x)
                seen += 1
        if layers and not seen:
            raise UsageError("estimate_statistics needs at least one batch")
    except BaseException:
        for layer in layers:
            for key, value in _statistics(layer).items():
                value.copy_(before[key])
        raise
    model.active.cache.drop(task)
    return len(layers)


def _statistics(layer: BatchNormLayer) -> dict[str, Tensor]:
    """The statistics that the task in use computes with."""
    state = layer.state(layer.active.require())
    return {key: value for key, value in state.items() if key.rpartition(".")[2] not in ("weight", "bias")}


def _reset(layer: BatchNormLayer) -> None:
    """Start a cumulative mean."""
    for key, value in _statistics(layer).items():
        value.fill_(1 if key.endswith("running_var") else 0)


@contextmanager
def _only_norms_training(model: RectifiedModel, layers: Iterable[BatchNormLayer]) -> Iterator[None]:
    """Batch statistics for these layers, with a cumulative mean; evaluation mode for everything else."""
    modes = [(module, module.training) for module in model.modules()]
    norms: list[Any] = [layer.module for layer in layers]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    try:
        for norm in norms:
            norm.training = True
            norm.momentum = None  # for torch: the mean of all batches since the reset
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode

"""Models whose tasks all differ, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rkr


def differ(model: rkr.RectifiedModel, size: float = 0.2) -> None:
    """Change all tensors of every task, as training would."""
    with torch.no_grad():
        for task in model.tasks.values():
            for key, tensor in model.tensors.task_state(task).items():
                if not tensor.is_floating_point():
                    continue
                noise = size * torch.randn_like(tensor)
                if key.endswith(".rm"):
                    noise = noise / 4
                tensor.add_(noise.abs() if key.endswith("running_var") else noise)
    model.refresh()


def model_of(network: nn.Module, classes: Mapping[str, int | None], **options: Any) -> rkr.RectifiedModel:
    """A model in evaluation mode with these tasks, which all differ."""
    model = rkr.rectify(network, **options)
    for name, count in classes.items():
        model.add_task(name, count, train_base=False)
    differ(model)
    return model.eval()


def rows(model: rkr.RectifiedModel, names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    """Row i of what task `names[i]` answers, each task by itself, padded with -inf to the widest task of the model."""
    found = []
    current = model.task
    for i, name in enumerate(names):
        model.set_task(name)
        with torch.no_grad():
            output = model(*args, **kwargs)
        row = getattr(output, "logits", output)[i]
        found.append(row)
    if current is not None:
        model.set_task(current)
    counts = [task.classes for task in model.tasks.values()]
    if model.head is None or None in counts:
        return torch.stack(found)
    dim = -1 if model.tensors.head is None or model.tensors.head.class_dim == -1 else 0
    width = max(count for count in counts if count is not None)
    padded = []
    for row in found:
        behind = [0] * (2 * (row.dim() - 1)) if dim == 0 else []
        padded.append(F.pad(row, (*behind, 0, width - row.shape[dim]), value=-torch.inf))
    return torch.stack(padded)


def agree(got: Tensor, want: Tensor, tolerance: float) -> None:
    """Assert equal shapes, -inf in the same places, and values as near as a part of the largest."""
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(finite, got.isfinite())
    assert torch.equal(got[~finite], want[~finite])
    assert float((got - want)[finite].abs().max()) <= tolerance * float(want[finite].abs().max())

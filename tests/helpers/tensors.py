"""Comparing states bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's state."""
    return {key: value.clone() for key, value in module.state_dict().items()}


def changes(before: Mapping[str, Tensor], module: nn.Module) -> set[str]:
    """Names of the tensors of a snapshot that are not bit for bit as they were."""
    now = module.state_dict()
    return {key for key, value in before.items() if not torch.equal(value, now[key])}


def assert_same(before: Mapping[str, Tensor], module: nn.Module) -> None:
    """Assert that a module has the state of a snapshot: the same names in the same order, and the same bits."""
    assert list(module.state_dict()) == list(before)
    assert changes(before, module) == set()

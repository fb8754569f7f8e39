"""Cutting images in two, class by class, by a seed."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rkr.errors import UsageError


def generator(*words: object) -> torch.Generator:
    """A generator of its own for every combination of words."""
    mixed = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))  # torch's CPU generator takes 32 bits


def shuffled_class(y: Tensor, label: int, *words: object) -> Tensor:
    """Where the images of a class are, in an order that the words and the class decide."""
    where = (y == label).nonzero().squeeze(1)
    return where[torch.randperm(len(where), generator=generator(*words, label))]


def balanced_cut(y: Tensor, fraction: float, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Indices that stay and indices that are cut off, both ascending: the same share of every class.

    At least one image of each class stays. A class's cut depends on the seed and that class's images only.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"{what} must be a share from 0 to below 1, not {fraction}")
    off = []
    for label in y.unique().tolist():
        order = shuffled_class(y, label, "rkr cut", what, seed)
        off.append(order[: min(round(fraction * len(order)), len(order) - 1)])
    cut = torch.zeros(len(y), dtype=torch.bool)
    if off:
        cut[torch.cat(off)] = True
    return (~cut).nonzero().squeeze(1), cut.nonzero().squeeze(1)

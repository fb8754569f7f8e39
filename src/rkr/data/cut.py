"""Seeded, class-balanced splits."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rkr.errors import UsageError


def generator(*words: object) -> torch.Generator:
    """A random generator seeded by a hash of the words."""
    mixed = hashlib.sha256(" ".join(map(str, words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed[:4], "little"))  # torch's CPU generator takes 32 bits


def shuffled_class(y: Tensor, label: int, *words: object) -> Tensor:
    """Indices of a class's images, shuffled by a seed from the words and the label."""
    where = (y == label).nonzero().squeeze(1)
    return where[torch.randperm(len(where), generator=generator(*words, label))]


def balanced_cut(y: Tensor, fraction: float, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Split indices into kept and cut off, both ascending, with the same fraction of every class.

    At least one image of each class is kept. The split of a class depends only on the seed and its own images.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"{what} must be a fraction of at least 0 and less than 1, not {fraction}")
    off = []
    for label in y.unique().tolist():
        order = shuffled_class(y, label, "rkr cut", what, seed)
        off.append(order[: min(round(fraction * len(order)), len(order) - 1)])
    cut = torch.zeros(len(y), dtype=torch.bool)
    if off:
        cut[torch.cat(off)] = True
    return (~cut).nonzero().squeeze(1), cut.nonzero().squeeze(1)

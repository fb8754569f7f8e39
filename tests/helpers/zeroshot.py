"""Small zero-shot tasks and a small network for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from rkr.methods import Learner
from rkr.methods.learner import SeenTask
from rkr.networks import CadaVae

FEATURES, LATENT = 8, 4
CLASSES, UNSEEN, ATTRIBUTES = (5, 4, 6), ((3, 4), (0,), (1, 4)), (5, 7, 3)  # of each task
CLASSIFIER: dict[str, Any] = {"epochs": 2, "seen": 6, "unseen": 9, "batch": 8}


def small_vae() -> CadaVae:
    """A network with `FEATURES` inputs and `LATENT` latent dimensions."""
    return CadaVae(FEATURES, LATENT, encoder=10, decoder=9, attribute_encoder=7, attribute_decoder=6)


def seen_tasks() -> list[SeenTask]:
    """Three tasks with random attributes."""
    found, start = [], 0
    for number, (classes, unseen, width) in enumerate(zip(CLASSES, UNSEEN, ATTRIBUTES, strict=True)):
        attributes = torch.rand(classes, width, generator=torch.Generator().manual_seed(number))
        names = tuple(f"{number}{i}" for i in range(classes))
        found.append(SeenTask(number, f"t{number}", names, start, attributes, unseen))
        start += classes
    return found


def features(task: SeenTask, n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (n, FEATURES) and labels of seen classes, which count over all tasks."""
    draw = torch.Generator().manual_seed(100 * task.number + seed)
    seen = torch.tensor([c for c in range(task.classes) if c not in task.unseen])
    return torch.rand(n, FEATURES, generator=draw), seen[torch.randint(len(seen), (n,), generator=draw)] + task.start


def adam(learner: Learner, lr: float = 0.01) -> Adam:
    """The optimizer of zero-shot runs."""
    return Adam(learner.groups(), lr=lr, amsgrad=True)

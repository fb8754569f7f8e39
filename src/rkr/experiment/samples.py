"""The samples that learners are trained on, and those that candidates are compared on. Never test samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from rkr.data import Training
from rkr.data.task import Samples, joined
from rkr.errors import UsageError
from rkr.methods import Learner


def derived(seed: int, *words: str | int) -> int:
    """A seed for one purpose, independent of other seeds."""
    text = " ".join(map(str, ("rkr", seed, *words)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def rehearsed(learner: Learner, trainings: Sequence[Samples], kept_back: Tensor | None = None) -> Samples:
    """The training samples that a learner selects, with labels over all tasks.

    Args:
        learner: Chooses by number, so numbers mean the same samples whether or not some are kept back.
        trainings: The training samples of every task so far.
        kept_back: Numbers of samples of the newest task that are left out.
    """
    parts: list[Samples] = []
    for number, index in learner.rehearse([len(t) for t in trainings]).items():
        rows = torch.arange(len(trainings[number])) if index is None else index.cpu()
        if kept_back is not None and number == len(trainings) - 1:
            rows = rows[~torch.isin(rows, kept_back)]
        parts.append(trainings[number].take(rows, trainings[number].y[rows] + learner.seen[number].start))
    return joined(parts)


def held_out(training: Training, share: float, seed: int) -> tuple[Samples, Tensor | None]:
    """The samples that candidates are compared on, labels counted within the task: the validation part if there is one.

    Else a random share of the training samples; their numbers, ascending, come second, as nothing is trained on them.
    """
    if training.validation is not None and len(training.validation):
        return training.validation, None
    if not 0 < share < 1:
        raise UsageError(f"holds_out must be a share between 0 and 1, not {share}")
    count = len(training.train)
    if count < 2:
        raise UsageError(f"task {training.name!r} has 1 training sample: none can be held out to compare candidates on")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    rows = order[: min(max(round(share * count), 1), count - 1)].sort().values
    return training.train.take(rows), rows

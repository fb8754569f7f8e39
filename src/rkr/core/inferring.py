"""Answers without being told the task: the base proposes tasks, a few are computed, and one of them answers.

1. One pass of the base, whatever the number of tasks: the maps of its last convolution say how probable each class of
   each task is (`infer.py`).
2. The most probable tasks are computed, for each sample its own. The probability of a class by the base is multiplied
   by that which its task gives it, and the highest product answers. A sample with one task that is nearly certain is
   computed for that task only.

So a sample costs 1 + `CANDIDATES` passes at most. Answers of a task that is told do not depend on any of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rkr.core.features import base_maps
from rkr.core.infer import Description, Rule, Shared, describe, embed, tensor_bytes
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

KEY = "infer"  # of the description in `task.about`, and of the shared covariance in `model.about`
WIDTH = 256  # values that features are expanded to if they are fewer
# Values of maps at most, and features up to which the covariance is kept whole: its 850 kB must fit into `model.about`.
WIDEST = 800
SHARE = 3  # a description takes at most one part in three of its task's bytes
CANDIDATES = 4  # tasks that are computed for a sample
CERTAIN = 0.99  # probability by the base from which on no other task is computed


@dataclass(frozen=True, eq=False)
class Answers:
    """What `RectifiedModel.infer` returns.

    Attributes:
        names: The tasks, in the order of the model.
        task: The place in `names` of each sample's task, int64 (B,).
        label: The class within the task, int64 (B,).
        probability: Of the task, (B,).
        none: Whether the sample is unlike all tasks, bool (B,): then task and label are the best guess still.
    """

    names: tuple[str, ...]
    task: Tensor
    label: Tensor
    probability: Tensor
    none: Tensor


def describe_task(model: RectifiedModel, batches: Iterable[tuple[Tensor, Tensor]]) -> Description:
    """Describe the task in use by the base's features of its training samples, and keep that in its `about`.

    The covariance that all tasks share is refined as well, in the model's `about`.
    """
    task = model.active.require()
    if task.classes is None:
        raise UsageError("this model has no head, so its tasks cannot be inferred: name its classification layer")
    size = sum(t.nbytes for t in model.tensors.task_state(task).values())
    shared = shared_of(model)
    # All tasks have the width of the first: so fine a grid that its class means fit into its file.
    fitting = min(tensor_bytes(size // SHARE) // (2 * task.classes), WIDEST)
    most = max(fitting, WIDTH) if shared is None else len(shared.covariance)
    found, labels = [], []
    with _evaluating(model):
        for x, y in batches:
            found.append(base_maps(model, x, most).cpu())
            labels.append(y.cpu())
    if not found:
        raise UsageError(f"no samples of task {task.name!r} to describe it by")
    features, y = torch.cat(found), torch.cat(labels)
    width = max(features.shape[1], WIDTH)
    description = describe(features, y, task.classes, limit=size // SHARE, width=width)
    if width <= WIDEST:
        shared = Shared.refined(shared, task.name, embed(features, width), y, task.classes)
        model.about[KEY] = shared.to_json()
    task.about[KEY], model.rule = description.to_json(), None
    return description


def shared_of(model: RectifiedModel) -> Shared | None:
    """The covariance that all tasks share, if it is kept."""
    values = model.about.get(KEY)
    return None if values is None else Shared.from_json(values)


def rule_of(model: RectifiedModel) -> Rule:
    """The rule for all tasks of a model, built once for the same tasks."""
    if model.rule is None or model.rule[0] != model.tasks.changes:
        found, changes = {}, model.tasks.changes
        for name in model.tasks:
            values = model.tasks[name].about.get(KEY)
            if values is None:
                raise UsageError(
                    f"the task {name!r} has no description by which it could be inferred: select it and call "
                    "describe_task with its training samples"
                )
            found[name] = Description.from_json(values)
        model.rule = changes, Rule(found, shared_of(model))
    return model.rule[1]


@torch.no_grad()
def infer(model: RectifiedModel, x: Tensor, false_alarms: float, candidates: int = CANDIDATES) -> Answers:
    """Task and class of samples (B, ...)."""
    if candidates < 1:
        raise UsageError(f"candidates must be at least 1, not {candidates}")
    before = model.active.task
    with _evaluating(model):
        rule = rule_of(model)
        features = base_maps(model, x, rule.width)
        if max(features.shape[1], WIDTH) != rule.width:
            raise UsageError(
                f"tasks are described by {rule.width} values, and this network gives {features.shape[1]}: select each "
                "task and call describe_task with its training samples again"
            )
        none = rule.none(features, false_alarms)
        by_class = rule.by_class(features)  # of each task (B, C)
        evidence = torch.stack([own.logsumexp(1) for own in by_class], 1)  # (B, T)
        best = evidence.topk(min(candidates, evidence.shape[1]), 1)
        computed = torch.zeros_like(evidence, dtype=torch.bool).scatter_(1, best.indices, True)
        sure = best.values[:, 0] > torch.tensor(CERTAIN).log()
        computed[sure] = torch.zeros_like(computed[sure]).scatter_(1, best.indices[sure, :1], True)
        highest, mass = torch.full_like(evidence, -torch.inf), torch.full_like(evidence, -torch.inf)
        label = torch.zeros_like(evidence, dtype=torch.int64)
        try:
            for number in computed.any(0).nonzero()[:, 0].tolist():
                rows = computed[:, number].nonzero()[:, 0]
                model.set_task(rule.names[number])
                own = model(x[rows.to(x.device)]).float().log_softmax(1).cpu()
                by_base = by_class[number][rows]
                if by_base.shape != own.shape:  # means of groups of classes: the base knows only the task
                    by_base = evidence[rows, number, None] - torch.tensor(float(own.shape[1])).log()
                own = own + by_base
                highest[rows, number], label[rows, number] = own.max(1)
                mass[rows, number] = own.logsumexp(1)
        finally:
            if before is not None:
                model.set_task(before.name)
    task = highest.argmax(1)
    # What the base gives to the tasks that were computed is divided among them anew.
    share = torch.where(computed, evidence, -torch.inf).logsumexp(1).exp()
    probability = mass.softmax(1).gather(1, task[:, None])[:, 0] * share
    return Answers(rule.names, task, label.gather(1, task[:, None])[:, 0], probability, none)


class _evaluating:
    """Evaluation mode, and afterwards what it was."""

    def __init__(self, model: RectifiedModel) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.modes = [(module, module.training) for module in self.model.modules()]
        if self.model.training or any(mode for _, mode in self.modes):
            self.model.eval()

    def __exit__(self, *error: object) -> None:
        for module, mode in self.modes:
            module.training = mode

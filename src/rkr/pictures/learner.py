"""The learner of a task of pictures: what the training loop calls, for one new task of a zoo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.core import RectifiedModel
from rkr.methods.learner import Learner, Outcome, Phase, SeenTask
from rkr.pictures.settings import Settings

CROPS = 2  # random crops of each picture from which the probe learns, beside the centre
EXAMPLES = 10_000  # of the probe, with crops: for more pictures there are fewer crops, or none


class PictureLearner(Learner):
    """Trains the factors, the normalisation and the head of one new task; the base and other tasks are frozen.

    Its state is the new task alone.

    Args:
        model: The zoo's model.
        settings: How the task is trained.
    """

    isolating = True

    def __init__(self, model: RectifiedModel, settings: Settings) -> None:
        assert model.head is not None
        super().__init__(lambda: model.network, model.head)
        self.model, self.settings = model, settings
        self.rows: Tensor | None = None  # training pictures of an epoch, some repeated; None: each once

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.model.add_task(task.name, classes=task.class_names, init="random", train_base=False)

    def phases(self) -> Sequence[Phase]:
        return (Phase("learn"),) if self.settings.rank else ()

    def rehearse(self, images: Sequence[int]) -> Mapping[int, Tensor | None]:
        return {self.task.number: self.rows}

    def groups(self) -> list[dict[str, Any]]:
        decayed, free = self.model.task_parameters(groups=True)
        named = self.model.named_task_parameters()
        factors = {id(p) for key, p in named.items() if key.rpartition(".")[2] in ("lm", "rm")}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in decayed["params"] if id(p) in factors], "lr_factor": self.settings.factor_lr},
            {"params": [p for p in decayed["params"] if id(p) not in factors]},
            free,
        ]
        return [group for group in groups if group["params"]]

    def train(self, mode: bool = True) -> PictureLearner:
        """The base's statistics stay in use while the weights are trained.

        Those of batches of 32 pictures are so noisy that a task was 12 to 16 points worse, even with statistics
        estimated anew afterwards; statistics of the task estimated before training were 3 points worse.
        """
        super().train(mode)
        for layer in self.model.norm_layers():
            layer.module.training = False
        return self

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        logits = self.model(x).float()
        loss = F.cross_entropy(logits, y, label_smoothing=self.settings.smoothing)
        return Outcome(loss, (logits.detach().argmax(1) == y).sum())

    def predict(self, x: Tensor, number: int = 0) -> Tensor:
        return self.model(x).float()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The tensors of the new task."""
        task = self.model.tasks[self.task.name]
        return {key: tensor.detach() for key, tensor in task.tensors().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Restore the new task."""
        task = self.model.tasks[self.task.name]
        with torch.no_grad():
            for key, tensor in task.tensors().items():
                tensor.copy_(state_dict[key])
        self.model.refresh()

    def start_head(self, weight: Tensor, bias: Tensor) -> None:
        """Start from a linear probe of the base."""
        task = self.model.tasks[self.task.name]
        with torch.no_grad():
            for key, value in (("head.weight", weight), ("head.bias", bias)):
                tensor = task.get(key)
                if tensor is not None:
                    tensor.copy_(value.view_as(tensor))
        self.model.refresh()

    @property
    def takes_probe(self) -> bool:
        """Whether a linear probe can be the head: one Linear layer with a bias."""
        head = self.model.network.get_submodule(self.head)
        return isinstance(head, nn.Linear) and head.bias is not None

    def crops(self, pictures: int) -> int:
        """How many random crops of each picture the probe learns from, beside the centre."""
        return max(0, min(CROPS, EXAMPLES // pictures - 1)) if self.takes_probe else 0


def repeated(y: Tensor, balance: float, seed: int) -> Tensor | None:
    """Numbers of training pictures for an epoch: those of small classes several times, up to `balance` of the largest.

    Without it a class with few pictures hardly moves its row of the head. Repeating them all the way to the largest
    class would learn the few by heart, so they are brought to a share of it only. None: every picture once.
    """
    counts = torch.bincount(y)
    wanted = (balance * int(counts.max())) if len(counts) else 0
    rows = [torch.arange(len(y))]
    generator = torch.Generator().manual_seed(seed)
    for label, count in enumerate(counts.tolist()):
        missing = int(wanted) - count
        if not count or missing <= 0:
            continue
        own = (y == label).nonzero().squeeze(1)
        whole, rest = divmod(missing, count)
        rows += [own] * whole + [own[torch.randperm(count, generator=generator)[:rest]]]
    return torch.cat(rows) if len(rows) > 1 else None


def fit_probe(features: Tensor, y: Tensor, classes: int, decay: float) -> tuple[Tensor, Tensor]:
    """A linear probe: multinomial logistic regression on standardised features, by L-BFGS. Weight (C, D), bias (C,).

    `decay` is the penalty on the weights of standardised features.
    """
    mean, std = features.mean(0), features.std(0) + 1e-3
    z = (features - mean) / std
    with torch.enable_grad():
        w = torch.zeros(classes, z.shape[1], device=z.device, requires_grad=True)
        b = torch.zeros(classes, device=z.device, requires_grad=True)
        optimizer = torch.optim.LBFGS([w, b], max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            value = F.cross_entropy(F.linear(z, w, b), y) + decay / 2 * w.square().sum()
            value.backward()
            return float(value.detach())

        optimizer.step(loss)
    weight = w.detach() / std
    return weight, b.detach() - weight @ mean

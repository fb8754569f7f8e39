"""The last step of CADA-VAE: a linear classifier of latents, trained on samples drawn from the latent space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from rkr.errors import UsageError

VALIDATION = "validation"


@dataclass(frozen=True)
class ClassifierOptions:
    """How the classifier of every task is trained.

    How many epochs it is trained for decides between seen and unseen classes: many favour the seen ones. The number is
    never chosen on test samples.

    Attributes:
        epochs: For each task by name, or one number for all. "validation" chooses the best H on the task's validation
            samples, of at most `longest` epochs.
        longest: See there.
        seen, unseen: Latents drawn for each class.
        source: What latents of seen classes are drawn from: their "attributes" (LZSL and the paper), or "images", as
            CADA-VAE does, which has no earlier tasks. Unseen classes have only attributes.
        batch, lr, betas: Of Adam.
    """

    epochs: dict[str, int] | int | str = VALIDATION
    longest: int = 100
    seen: int = 200
    unseen: int = 400
    source: str = "attributes"
    batch: int = 32
    lr: float = 1e-3
    betas: tuple[float, float] = (0.5, 0.999)

    def __post_init__(self) -> None:
        numbers = self.epochs.values() if isinstance(self.epochs, dict) else [self.epochs]
        if self.epochs != VALIDATION and not all(type(n) is int and n >= 1 for n in numbers):
            raise UsageError(
                f"classifier.epochs must be whole numbers of at least 1 or 'validation', not {self.epochs!r}"
            )
        if self.source not in ("attributes", "images"):
            raise UsageError(f"classifier.source must be 'attributes' or 'images', not {self.source!r}")
        if self.epochs == {}:
            raise UsageError("classifier.epochs must have a number for each task, not none")
        if not self.lr > 0:
            raise UsageError(f"classifier.lr must be greater than 0, not {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"classifier.betas must be two numbers from 0 to below 1, not {list(self.betas)}")
        for name in ("longest", "seen", "unseen", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"classifier.{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ClassifierOptions:
        """From plain values; UsageError for a name that is none of these."""
        if not isinstance(values, dict):
            raise UsageError(f"classifier must be a table of options, not {values!r}")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"classifier has no option {unknown[0]!r}; its options: {', '.join(sorted(known))}")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    def epochs_of(self, task: str) -> int | None:
        """For how long a task's classifier is trained; None: to be chosen on validation samples."""
        if isinstance(self.epochs, dict):
            if task not in self.epochs:
                raise UsageError(
                    f"classifier.epochs has no number for task {task!r}, only for {', '.join(self.epochs)}"
                )
            return self.epochs[task]
        return None if self.epochs == VALIDATION else int(self.epochs)


@torch.no_grad()
def train_classifier(
    head: nn.Linear,
    z: Tensor,
    y: Tensor,
    options: ClassifierOptions,
    epochs: int,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Train a linear layer by softmax regression on latents `z` (N, latent) and labels `y`, from a new start.

    Batches are shuffled, and a smaller last one is left out. The gradient of so small a model is written out and Adam
    called as a function: a step through autograd and an optimiser takes three and a half times as long.
    """
    nn.init.xavier_uniform_(head.weight, gain=0.5)
    nn.init.zeros_(head.bias)
    # Rows are [z, 1], so that weight and bias are one matrix and a step is one product.
    joint = torch.cat([head.weight, head.bias[:, None]], 1)  # (C, latent + 1)
    z = torch.cat([z, z.new_ones(len(z), 1)], 1)
    batch = min(options.batch, len(z))
    whole = len(z) // batch * batch
    minus_one = z.new_full((batch, 1), -1.0)
    gradient, mean, square = (torch.zeros_like(joint) for _ in range(3))
    count = torch.zeros((), device=z.device)
    fused = z.device.type in ("cpu", "cuda")
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(z)).to(z.device)[:whole]
        for x, labels in zip(z[order].split(batch), y[order, None].split(batch), strict=True):
            error = torch.softmax(x @ joint.T, 1)  # (B, C); minus one-hot labels: the gradient of the logits
            error.scatter_add_(1, labels, minus_one)
            torch.addmm(gradient, error.T, x, beta=0, alpha=1 / batch, out=gradient)
            adam(
                [joint],
                [gradient],
                [mean],
                [square],
                [],
                [count],
                fused=fused,
                amsgrad=False,
                beta1=options.betas[0],
                beta2=options.betas[1],
                lr=options.lr,
                weight_decay=0.0,
                eps=1e-8,
                maximize=False,
            )
        head.weight.copy_(joint[:, :-1])
        head.bias.copy_(joint[:, -1])
        after_epoch(epoch)

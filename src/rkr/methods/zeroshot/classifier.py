"""The last step of CADA-VAE: a linear classifier of latents, trained on samples drawn from the latent space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim.adam import adam

from rkr.errors import UsageError
from rkr.validation import Options, problem, sentence, wrong

VALIDATION: Literal["validation"] = "validation"


Positive = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Length = Annotated[dict[str, Positive], Field(min_length=1)] | Positive | Literal["validation"]


class ClassifierOptions(Options):
    """How the classifier of every task is trained.

    The length of training is a trade-off: long training favours seen classes over unseen ones. The length is never
    chosen on test samples. It is chosen in steps, because an epoch has fewer of them on validation classes.

    Attributes:
        steps: Steps of Adam, for each task by name, or one number for all. "validation" chooses the best H on
            validation samples.
        epochs: A number of epochs in place of one of steps.
        longest: Maximum number of epochs if H decides, which is measured after each.
        seen, unseen: Latents drawn for each class.
        source: What latents of seen classes are drawn from: their "attributes" (LZSL and the paper), or "images", as
            CADA-VAE does, which has no earlier tasks. Unseen classes have only attributes.
        batch, lr, betas: Of Adam.
    """

    steps: Length = VALIDATION
    epochs: Length = VALIDATION
    longest: Positive = 100
    seen: Positive = 200
    unseen: Positive = 400
    source: Literal["attributes", "images"] = "attributes"
    batch: Positive = 32
    lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.5, 0.999)

    @model_validator(mode="after")
    def _one_length(self) -> ClassifierOptions:
        if VALIDATION not in (self.steps, self.epochs):
            raise problem("epochs", "give either steps or epochs, not both")
        return self

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ClassifierOptions:
        """Create from plain values."""
        if not isinstance(values, dict):
            raise UsageError(f"classifier must be a table of options, not {values!r}")
        found = wrong(cls, values)
        if found is not None:
            raise UsageError("classifier." + sentence(*found))
        return cls(**values)

    def steps_of(self, task: str, latents: int) -> int | None:
        """How long a task's classifier is trained on so many latents; None: to be chosen on validation samples."""
        for name, length, times in (("steps", self.steps, 1), ("epochs", self.epochs, self.steps_in_epoch(latents))):
            if isinstance(length, dict) and task not in length:
                raise UsageError(f"classifier.{name} has no number for task {task!r}, only for {', '.join(length)}")
            found = length[task] if isinstance(length, dict) else length
            if found != VALIDATION:
                return found * times
        return None

    def steps_in_epoch(self, latents: int) -> int:
        """Number of whole batches."""
        return latents // min(self.batch, latents)


@torch.no_grad()
def train_classifier(
    head: nn.Linear,
    z: Tensor,
    y: Tensor,
    options: ClassifierOptions,
    steps: int,
    after_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Train a linear layer by softmax regression on latents `z` (N, latent) and labels `y`, from a new start.

    `after_epoch` is called after every epoch, and after the last step. Batches are shuffled, and a smaller last one is
    left out. The gradient of so small a model is written out and Adam called as a function: a step through autograd and
    an optimiser takes three and a half times as long.
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
    in_epoch = whole // batch
    for epoch in range(1, -(-steps // in_epoch) + 1):
        left = steps - (epoch - 1) * in_epoch
        order = torch.randperm(len(z)).to(z.device)[: min(whole, left * batch)]
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

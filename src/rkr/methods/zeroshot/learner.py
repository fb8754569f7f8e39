"""The base of all methods for generalised zero-shot learning: CADA-VAE on each task, then a classifier of its latents.

A task is a dataset with its own classes. Its autoencoder of attributes and its classifier belong to the task alone and
never change afterwards; tasks share the encoder of images, which later tasks may spoil. Methods differ in how they
prevent that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from rkr.capacity import Capacity
from rkr.data.measures import harmonic_mean, unseen_and_seen
from rkr.errors import UsageError
from rkr.methods.learner import Learner, MakeNetwork, Outcome, ReadSamples, SeenTask, nbytes, plain_size
from rkr.methods.zeroshot.classifier import ClassifierOptions, train_classifier
from rkr.networks.interfaces import AlignedVae, AttributeVae, Gaussian, is_aligned_vae
from rkr.registry import register

SCALING = ("low_", "width_")  # buffers of each task, by its number: what is taken from features, and divides them


@register.method("sft", "sequential fine-tuning of the network, nothing against forgetting")
class ZeroShot(Learner):
    """Sequential fine-tuning: every task continues to train the encoder, without protection of earlier tasks.

    Other methods change what `begin` does with the network, add to the loss, or have encoders of their own.

    Args:
        make: Builds the network.
        head: Not used: the network has no classification layer.
        classifier: Fields of `ClassifierOptions`.
    """

    checked = "The authors' code of CADA-VAE (edgarschnfld/CADA-VAE-PyTorch), trained on one dataset after the other."
    differs = (
        "Features are scaled by the training features of the dataset (there: each part by itself); `scaler` chooses.",
    )

    setting = "zero-shot"
    recipe_options = ("classifier",)
    agnostic = "never"  # features of each task are scaled in a way of its own

    def __init__(self, make: MakeNetwork, head: str = "", *, classifier: dict[str, Any] | None = None) -> None:
        super().__init__(make, head)
        self.classifier_options = ClassifierOptions.from_json(classifier or {})
        self.network = make()
        if not is_aligned_vae(self.network):
            raise UsageError(f"{type(self.network).__name__} is not for zero-shot tasks: see rkr.networks.interfaces")
        self._plain = plain_size(self.vae.encoder)
        self.attribute_vaes = nn.ModuleList()
        self.classifiers = nn.ModuleList()
        self._progress = 0.0
        self._notes: dict[str, Any] = {}

    # -- what methods change ------------------------------------------------------------------------------

    def encode(self, x: Tensor, number: int) -> Gaussian:
        """Mean and log-variance of images, by the encoder that a test of task `number` uses."""
        return self.vae.encoder(x)

    def extra_loss(self, x: Tensor, visual: Gaussian) -> Tensor | None:
        """The method's addition to the loss of a batch, on the scale of a sum over the batch."""
        return None

    @property
    def kept_encoders(self) -> int:
        """Number of encoders of images that must be kept."""
        return 1

    # -- hooks --------------------------------------------------------------------------------------------

    @property
    def vae(self) -> AlignedVae:
        """The network."""
        return cast("AlignedVae", self.network)

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        if task.attributes is None or not task.unseen:
            raise UsageError(
                f"task {task.name!r} has no unseen classes with attributes: this method is for zero-shot learning"
            )
        self.classifier_options.steps_of(task.name, 1)  # fail now, not after hours of training
        device = next(self.network.parameters()).device
        self.attribute_vaes.append(self.vae.attribute_vae(task.attributes.shape[1]))
        self.classifiers.append(nn.Linear(self.vae.latent, task.classes).to(device))
        for done in (*self.attribute_vaes[:-1], *self.classifiers):
            done.requires_grad_(False)
        for name, value in zip(SCALING, task.scaling or (), strict=False):
            self.register_buffer(f"{name}{task.number}", value.clone())

    @property
    def attribute_vae(self) -> AttributeVae:
        """Of the task being learned."""
        return cast("AttributeVae", self.attribute_vaes[-1])

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [*self.network.parameters(), *self.attribute_vaes[-1].parameters()]}]

    def begin_epoch(self, progress: float) -> None:
        self._progress = progress

    def loss(self, x: Tensor, y: Tensor) -> Outcome:
        """CADA-VAE's loss, which is a sum over the batch, divided by the batch: the engine's losses are means."""
        assert self.task.attributes is not None
        a = self.task.attributes[y - self.task.start]  # (B, A)
        visual = self.encode(x, self.task.number)
        total = self.vae.loss(visual, x, self.attribute_vae, a, self._progress)
        extra = self.extra_loss(x, visual)
        return Outcome((total if extra is None else total + extra) / len(x), None)

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        """Train the task's classifier on latents of all its classes."""
        z, y = self._latents(train)
        head = cast("nn.Linear", self.classifiers[-1])
        steps = self.classifier_options.steps_of(self.task.name, len(z))
        if steps is not None:
            train_classifier(head, z, y, self.classifier_options, steps)
            self._notes = {"classifier_steps": steps}
            return
        if validation is None:
            raise UsageError(
                f"task {self.task.name!r} has no validation samples on which to choose how long its classifier is "
                "trained: set classifier.steps"
            )
        self._notes = self._choose_steps(head, z, y, validation)

    def predict(self, x: Tensor, number: int) -> Tensor:
        self._check(x, number)
        return self.classifiers[number](self.encode(x, number)[0])

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise UsageError("zero-shot tasks must be given: each has its own scaling of features")

    def scaled(self, x: Tensor, number: int) -> Tensor:
        """Features (B, D) as they were extracted, made what `predict` takes: by the task's training features."""
        self._check(x, number)
        low, width = self.get_buffer(f"low_{number}"), self.get_buffer(f"width_{number}")
        return (x.to(low) - low) / width

    def _check(self, x: Tensor, number: int) -> None:
        """Raise UsageError unless there is such a task, and features are as many as the network takes."""
        (features,) = self.vae.input_shape
        if not 0 <= number < len(self.seen):
            raise UsageError(f"there is no task {number}: tasks are numbered 0 to {len(self.seen) - 1}")
        if x.dim() != 2 or x.shape[1] != features:
            raise UsageError(f"features must be (samples, {features}), not {tuple(x.shape)}")

    def capacity(self) -> Capacity:
        """Of the encoder of images, which is all that tests and the paper's count need; bytes are of classifiers too.

        The scaling of features belongs to the data, as the means and deviations of images do.
        """
        n = self._plain.parameters
        stored = self.kept_encoders * nbytes(self.vae.encoder) + nbytes(self.classifiers)
        return Capacity(self.kept_encoders * n, n, stored, self._plain.multiply_adds).keeping(self.carried_on())

    def carried_on(self) -> list[Tensor]:
        """What the next task goes on with beside the encoder of images: the decoder."""
        own = {id(p) for p in self.vae.encoder.parameters()}
        return [p for p in self.network.parameters() if id(p) not in own]

    def notes(self) -> dict[str, Any]:
        return self._notes

    # -- pieces -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _latents(self, train: ReadSamples) -> tuple[Tensor, Tensor]:
        """Latents and labels for the classifier, the same number for each seen class and for each unseen one."""
        task, from_images = self.task, self.classifier_options.source == "images"
        assert task.attributes is not None
        z, y = self.latents_of_attributes(task.number, task.attributes, task.unseen, only_unseen=from_images)
        if not from_images:
            return z, y
        z_images, y_images = self._latents_of_images(train)
        return torch.cat([z_images, z]), torch.cat([y_images, y])

    @torch.no_grad()
    def latents_of_attributes(
        self, number: int, attributes: Tensor, unseen: Sequence[int], only_unseen: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Latents drawn for the classes of task `number`, described by `attributes` (C, A), and their labels."""
        options, vae = self.classifier_options, cast("AttributeVae", self.attribute_vaes[number])
        counts = torch.full((len(attributes),), 0 if only_unseen else options.seen)
        counts[list(unseen)] = options.unseen
        y = torch.arange(len(attributes)).repeat_interleave(counts).to(attributes.device)
        mu, logvar = vae.encoder(attributes)  # (C, latent) each
        return self.vae.sample((mu[y], logvar[y])), y

    def _latents_of_images(self, train: ReadSamples) -> tuple[Tensor, Tensor]:
        """One latent for each of the first images of every seen class; those of a class with fewer are repeated."""
        task, wanted = self.task, self.classifier_options.seen
        found = [(self.encode(x, task.number), y - task.start) for x, y in train()]
        mu, logvar = (torch.cat([gaussian[i] for gaussian, _ in found]) for i in range(2))
        labels = torch.cat([y for _, y in found])
        rows = []
        for label in labels.unique().tolist():
            own = (labels == label).nonzero()[:, 0]
            rows.append(own.repeat(-(-wanted // len(own)))[:wanted])
        index = torch.cat(rows)
        return self.vae.sample((mu[index], logvar[index])), labels[index]

    @torch.no_grad()
    def _choose_steps(self, head: nn.Linear, z: Tensor, y: Tensor, validation: ReadSamples) -> dict[str, Any]:
        """Train for the maximum length, and keep the classifier with the best H on validation samples."""
        task = self.task
        found = [(self.encode(x, task.number)[0], labels - task.start) for x, labels in validation()]
        latents = torch.cat([mu for mu, _ in found])
        labels = torch.cat([label for _, label in found]).cpu()
        curve: list[float] = []
        best = [head.weight.clone(), head.bias.clone()]

        def test(epoch: int) -> None:
            u, s = unseen_and_seen(head(latents).argmax(1).cpu(), labels, task.classes, task.unseen)
            curve.append(harmonic_mean(u, s))
            if curve[-1] > max(curve[:-1], default=-1.0) or not max(curve):  # zeros say nothing: the longest then
                best[:] = head.weight.clone(), head.bias.clone()

        in_epoch = self.classifier_options.steps_in_epoch(len(z))
        train_classifier(head, z, y, self.classifier_options, self.classifier_options.longest * in_epoch, test)
        head.weight.copy_(best[0])
        head.bias.copy_(best[1])
        chosen = curve.index(max(curve)) + 1 if max(curve) else len(curve)
        return {"classifier_steps": chosen * in_epoch, "validation_h": [round(h, 6) for h in curve]}

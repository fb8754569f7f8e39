"""RKR on CADA-VAE's encoder of images (paper, section "Generalized Zero-Shot Setting" and supplementary material)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from rkr.capacity import Capacity
from rkr.core import Options, RectifiedModel, rectify
from rkr.errors import UsageError
from rkr.methods.learner import MakeNetwork, SeenTask, nbytes
from rkr.methods.zeroshot.learner import ZeroShot
from rkr.networks.interfaces import Gaussian
from rkr.registry import register


@register.method("rkr", "rectification of rank 16 and scaling factors of the image encoder", preset={"rank": 16})
@register.method("rectify-only", "RKR without scaling factors", preset={"rank": 16, "scale_outputs": False})
@register.method("scale-only", "RKR without rectification", preset={"rank": 16, "rectify_weights": False})
@register.method("rkr-k1", "RKR of rank 1", preset={"rank": 1})
@register.method("rkr-k4", "RKR of rank 4", preset={"rank": 4})
@register.method("rkr-k32", "RKR of rank 32", preset={"rank": 32})
@register.method(
    "rkr-random", "RKR whose tasks start at random instead of the previous task", preset={"rank": 16, "init": "random"}
)
class ZeroShotRkr(ZeroShot):
    """The first task trains everything. Later tasks train factors of the encoder and their own parts.

    The decoder of images goes on from task to task; no test uses it, and it is not counted.

    Args:
        make: Builds the network.
        head: Not used.
        init: Where a new task's factors start: at the "previous" task's, or "random".
        decoder: "trained" by all tasks, as in fine-tuning, or "frozen" after the first task, which makes a step a third
            shorter.
        classifier: Fields of `ClassifierOptions`.
        options: Fields of `rkr.Options`, such as `rank`.
    """

    checked = (
        "The paper's supplementary material and its printed counts, which come out to the last digit; the "
        "autoencoder against the authors' code of CADA-VAE (edgarschnfld/CADA-VAE-PyTorch)."
    )
    differs = (
        "Epochs of classifiers are chosen on validation classes (there: fixed numbers, see `classifier.epochs`).",
    )

    isolating = True
    passes_on = Options

    def __init__(
        self,
        make: MakeNetwork,
        head: str = "",
        *,
        init: str = "previous",
        decoder: str = "trained",
        classifier: dict[str, object] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(make, head, classifier=classifier)
        if init not in ("previous", "random"):
            raise UsageError(f'init must be "previous" or "random", not {init!r}')
        if decoder not in ("trained", "frozen"):
            raise UsageError(f'decoder must be "trained" or "frozen", not {decoder!r}')
        self.init, self.decoder = init, decoder
        self.vae.encoder = rectify(self.vae.encoder, options=Options.from_json(options))

    @property
    def model(self) -> RectifiedModel:
        """The encoder of images."""
        return cast("RectifiedModel", self.vae.encoder)

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.model.add_task(task.name, init=self.init if task.number else "previous")
        if task.number and self.decoder == "frozen":
            self.vae.decoder.requires_grad_(False)

    def encode(self, x: Tensor, number: int) -> Gaussian:
        self.model.set_task(self.seen[number].name)
        return self.model(x)

    def groups(self) -> list[dict[str, Any]]:
        others = [*self.vae.decoder.parameters(), *self.attribute_vaes[-1].parameters()]
        others = [p for p in others if p.requires_grad]
        return [*self.model.task_parameters(groups=True), {"params": others}]

    def capacity(self) -> Capacity:
        cost = self.model.cost()
        own = sum(task.parameters for task in cost.tasks)
        stored = cost.total_bytes + nbytes(self.classifiers)
        used = Capacity(cost.network + own, cost.network, stored, self._plain.multiply_adds)
        return used.keeping(self.carried_on())

    def export(self, folder: Path) -> None:
        """The encoders as a model folder for `rkr.load`, one file a task; attribute encoders and classifiers beside."""
        self.model.save(folder)
        super().export(folder / "learner")

    def restore(self, folder: Path) -> None:
        super().restore(folder / "learner")

"""RKR, RKR-Lite and their ablations (paper, sections "Rectification-based Knowledge Retention" and "Ablations")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rkr.core import Options, load, ways
from rkr.methods.learner import MakeNetwork
from rkr.methods.shared.changed import Changed
from rkr.registry import register


@register.method("rkr", "rectification of rank 2 and scaling factors for every layer")
@register.method(
    "rkr-lite",
    "RKR-Lite: rectification of convolutions, scaling of fully connected layers",
    preset={"rectify_weights": "conv", "scale_outputs": "linear"},
)
@register.method("rectify-only", "RKR without scaling factors", preset={"scale_outputs": False})
@register.method("scale-only", "RKR without rectification", preset={"rectify_weights": False})
@register.method("rkr-k1", "RKR of rank 1", preset={"rank": 1})
@register.method("rkr-k4", "RKR of rank 4", preset={"rank": 4})
@register.method("rkr-k8", "RKR of rank 8", preset={"rank": 8})
@register.method(
    "rkr-random", "RKR whose tasks start at random instead of the previous task", preset={"init": "random"}
)
class Rkr(Changed):
    """A frozen base, and for each task a low-rank rectification of the weights, scaling factors and a head.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Where a new task's factors start: at the "previous" task's, or "random".
        options: Fields of `rkr.Options`, such as `rank` or `bn`.
    """

    checked = (
        "The paper's equations 1 to 5 and its printed counts, which come out to the last digit; there is no "
        "public code."
    )
    differs: ClassVar[Sequence[str]] = (
        "The paper does not tell batch size, momentum, weight decay, augmentation, initial values and what becomes "
        "of batch normalisation: docs/method/method.md has the decisions.",
    )

    isolating = True
    passes_on = Options

    def __init__(self, make: MakeNetwork, head: str, *, init: str = "previous", **options: Any) -> None:
        super().__init__(make, head, options=Options.from_json(options), init=init)

    def notes(self) -> dict[str, Any]:
        """How layers compute: options and device decide."""
        device = next(self.model.network.parameters()).device
        return {**super().notes(), **ways.described(self.model.options.kernels, device)}

    def export(self, folder: Any) -> None:
        """A model folder for `rkr.load`, one file a task."""
        self.model.save(folder)

    def restore(self, folder: Any) -> None:
        self.model = load(folder, self.make())

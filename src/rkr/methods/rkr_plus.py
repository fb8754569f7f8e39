"""RKR with its numbers where a new task needs them, and trained faster: docs/plus.md has what was tried."""

from __future__ import annotations

from typing import Any, ClassVar

from rkr.core import Adapter
from rkr.methods.learner import MakeNetwork
from rkr.methods.rkr import Rkr
from rkr.registry import register


@register.method("rkr-plus", "RKR with ranks by budget and a higher rate for LM and RM", preset={"budget": "paper"})
class RkrPlus(Rkr):
    """RKR at the same cost, with a rank for each layer and other training of LM and RM.

    Args:
        make: Builds the network.
        head: Its classification layer.
        init: Where a new task's factors start: at the "previous" task's, or "random".
        rate: Multiplies the learning rate of LM and RM.
        decay: Whether LM and RM have the recipe's weight decay.
        options: Fields of `rkr.Options`, such as `budget`.
    """

    checked = "Not published: RKR but for these options. Every run compares earlier answers bit for bit."
    differs = ()
    grid: ClassVar[dict[str, Any]] = {"rate": (1.0, 3.0, 10.0)}

    def __init__(
        self,
        make: MakeNetwork,
        head: str,
        *,
        init: str = "previous",
        rate: float = 3.0,
        decay: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(make, head, init=init, **options)
        self.rate, self.decay = rate, decay

    def groups(self) -> list[dict[str, Any]]:
        """As RKR, with LM and RM in a group of their own."""
        of_layers = {layer.path for layer in self.model.layers if isinstance(layer, Adapter)}
        named = self.model.named_task_parameters().items()
        paths = ((key.rpartition("."), p) for key, p in named)
        factors = [p for (path, _, last), p in paths if path in of_layers and last in ("lm", "rm")]
        own = {id(p) for p in factors}
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in own]} for g in super().groups()]
        return [*rest, {"params": factors, "lr_factor": self.rate, **({} if self.decay else {"weight_decay": 0.0})}]

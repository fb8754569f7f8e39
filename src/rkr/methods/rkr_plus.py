"""RKR with its numbers where a new task needs them, and trained faster: docs/plus.md has what was tried."""

from __future__ import annotations

from typing import Any, ClassVar

from rkr.methods.learner import MakeNetwork
from rkr.methods.rkr import Rkr
from rkr.registry import register


@register.method("rkr-plus", "RKR with ranks by budget and a higher rate for LM and RM", preset={"budget": "paper"})
class RkrPlus(Rkr):
    """RKR at the same cost, with a rank for each layer and other training of LM and RM.

    The first task trains the network alone.

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
        """As RKR, but LM and RM are in a group of their own, and the first task trains the base alone.

        So R = 0 and F = 1 there: the base is a plain network, and the next task's factors start from it.
        """
        of_layers = {f"{layer.path}.{name}": name for layer in self.layers() for name in ("lm", "rm", "f")}
        own = {key: p for key, p in self.model.named_task_parameters().items() if key in of_layers}
        factors = [p for key, p in own.items() if of_layers[key] != "f"]
        taken = {id(p) for p in (factors if self.model.base_frozen else own.values())}
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in taken]} for g in super().groups()]
        if not self.model.base_frozen:
            return rest
        return [*rest, {"params": factors, "lr_factor": self.rate, **({} if self.decay else {"weight_decay": 0.0})}]

"""RKR with its numbers where a new task needs them, and trained faster: docs/method/plus.md has what was tried."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rkr.capacity import Capacity
from rkr.methods.learner import MakeNetwork, ReadSamples, SeenTask
from rkr.methods.rkr import Rkr
from rkr.registry import register


@register.method("rkr-plus", "RKR with ranks by budget, and tasks inferred by features", preset={"budget": "paper"})
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
        rate: float = 1.0,
        decay: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(make, head, init=init, **options)
        self.rate, self.decay = rate, decay

    def begin(self, task: SeenTask) -> None:
        super().begin(task)
        self.register_buffer(f"description_{task.number}", torch.zeros(0, dtype=torch.uint8))
        if not task.number:
            self.register_buffer("shared", torch.zeros(0, dtype=torch.uint8))

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

    def end(self, train: ReadSamples, validation: ReadSamples | None = None) -> None:
        """Describe the task by the base's features, so that it can be inferred."""
        self.model.describe_task((x, y - self.task.start) for x, y in train())
        self._keep_description(self.task)

    def infer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """By the base's features and the most likely classes: `RectifiedModel.infer`."""
        found = self.model.infer(x)
        return found.task.to(x.device), found.label.to(x.device)

    def capacity(self) -> Capacity:
        """Descriptions are statistics: they count in bytes, and only for answers without being told the task."""
        found = super().capacity()
        kept = [
            self.get_buffer(name) for name, _ in self.named_buffers() if name.startswith(("description_", "shared"))
        ]
        return replace(found, bytes=found.bytes + sum(text.numel() for text in kept))

    def notes(self) -> dict[str, Any]:
        size = self.get_buffer(f"description_{self.task.number}").numel()
        return {"ranks": dict(self.model.cost().ranks), "description": size}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        names = ["shared", *(f"description_{task.number}" for task in self.seen)]
        for name in names:  # they differ in length
            if name in state_dict:
                self.register_buffer(name, torch.zeros_like(state_dict[name]))
        found = super().load_state_dict(state_dict, *args, **kwargs)
        abouts = [self.model.about, *(self.model.tasks[task.name].about for task in self.seen)]
        for name, about in zip(names, abouts, strict=True):
            text = bytes(self.get_buffer(name).tolist())
            if text:
                about["infer"] = json.loads(text)
        self.model.rule = None
        return found

    def restore(self, folder: Any) -> None:
        super().restore(folder)
        for task in self.seen:
            self._keep_description(task)

    def _keep_description(self, task: SeenTask) -> None:
        """Copy what is in the task's `about` to the state that a run saves."""
        texts = {f"description_{task.number}": self.model.tasks[task.name].about["infer"]}
        texts["shared"] = self.model.about.get("infer")
        for name, values in texts.items():
            text = b"" if values is None else json.dumps(values).encode()
            self.register_buffer(name, torch.tensor(list(text), dtype=torch.uint8))

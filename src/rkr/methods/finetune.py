"""Plain fine-tuning: one network, a head for each task, nothing against forgetting. The lower reference point."""

from __future__ import annotations

from rkr.methods.shared.one_network import OneNetwork
from rkr.registry import register


@register.method("finetune", "one network fine-tuned on each task, nothing against forgetting")
@register.method("finetune-bn", "fine-tuning whose tasks keep their batch normalisation", preset={"bn": "per_task"})
class Finetune(OneNetwork):
    """Train the whole network on each task in turn, without protection of earlier tasks."""

    checked = "A reference point by its definition."

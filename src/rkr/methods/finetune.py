"""Plain fine-tuning: one network, a head for each task, nothing against forgetting. The lower reference point."""

from __future__ import annotations

from rkr.methods.shared.one_network import OneNetwork


class Finetune(OneNetwork):
    """Train the whole network on each task in turn."""

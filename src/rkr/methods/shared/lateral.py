"""Connections from the layers of one network to the same layers of another, such as P&C's columns have."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkr.errors import UsageError


class Lateral(nn.Module):
    """The input of an active column's layer from the knowledge base: α ⊙ U ReLU(V h + c) (P&C, equation 1).

    h is the input of the same layer of the knowledge base; V reduces its width, U has the shape of the layer, and α is
    a factor per output, initially small.
    """

    def __init__(self, layer: nn.Module, reduction: int) -> None:
        super().__init__()
        self.reduce: nn.Module
        self.into: nn.Module
        if isinstance(layer, nn.Conv2d):
            width = max(1, layer.in_channels // reduction)
            self.reduce = nn.Conv2d(layer.in_channels, width, 1)
            shape: Any = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            self.into = nn.Conv2d(width, layer.out_channels, layer.kernel_size, bias=False, **shape)  # type: ignore[arg-type]
            size: tuple[int, ...] = (layer.out_channels, 1, 1)
        else:
            assert isinstance(layer, nn.Linear)
            width = max(1, layer.in_features // reduction)
            self.reduce = nn.Linear(layer.in_features, width)
            self.into = nn.Linear(width, layer.out_features, bias=False)
            size = (layer.out_features,)
        self.scale = nn.Parameter(torch.empty(size).uniform_(0, 0.1))
        self.to(layer.weight)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * self.into(F.relu(self.reduce(h)))


class Laterals(nn.ModuleDict):
    """A connection into every convolution and linear layer of a network but the first and the head.

    Args:
        network: That is helped.
        head: Its classification layer.
        reduction: Factor by which connections are narrower than their inputs.
    """

    def __init__(self, network: nn.Module, head: str, reduction: int) -> None:
        super().__init__()
        self._head = head
        for key, layer in self._sites(network).items():
            self[key] = Lateral(layer, reduction)

    def helped_answer(self, active: nn.Module, helper: nn.Module, x: Tensor) -> Tensor:
        """What the active network answers with the help of another of the same build, which stays as it is.

        Layers that a network calls several times are helped by the same calls of the other.
        """
        known: dict[str, deque[Tensor]] = defaultdict(deque)

        def remember(key: str, _: nn.Module, args: Any, named: dict[str, Any], y: Tensor) -> None:
            known[key].append((args[0] if args else named["input"]).clone())  # what comes next may write into it

        def help(key: str, _: nn.Module, args: Any, named: dict[str, Any], y: Tensor) -> Tensor:
            if not known[key]:
                raise UsageError(
                    f"layer {key!r} is called more often in training than in evaluation: P&C cannot help it"
                )
            return y + self[key](known[key].popleft())

        handles = [
            layer.register_forward_hook(partial(hook, key), with_kwargs=True)
            for network, hook in ((helper, remember), (active, help))
            for key, layer in self._sites(network).items()
        ]
        try:
            with torch.no_grad():
                helper(x)
            return active(x)
        finally:
            for handle in handles:
                handle.remove()

    def _sites(self, network: nn.Module) -> dict[str, nn.Module]:
        """The layers in order, without the first, which sees the sample itself."""
        inside, kinds = f"{self._head}.", (nn.Conv2d, nn.Linear)
        found = [(path, m) for path, m in network.named_modules() if isinstance(m, kinds)]
        sites = [(path, m) for path, m in found if path != self._head and not path.startswith(inside)]
        return {path.replace(".", "/"): m for path, m in sites[1:]}

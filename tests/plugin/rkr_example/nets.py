"""A network with a layer of its own kind, for images of any shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import rkr
from rkr.core.adapters import LinearAdapter


class InOut(nn.Module):
    """A linear layer whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class InOutAdapter(LinearAdapter):
    """Rectifies it as a Linear."""

    def canonical(self, weight: Tensor) -> Tensor:
        return weight.t()

    def stored(self, weight: Tensor) -> Tensor:
        return weight.t()


rkr.register.layer(InOut, InOutAdapter)


@rkr.register.network("strips-net", head="classifier.1")
def build(inputs: int = 30, hidden: int = 16, classes: int = 6) -> nn.Module:
    """Two layers for flattened images."""
    network = nn.Sequential()
    network.add_module("body", nn.Sequential(nn.Flatten(), InOut(inputs, hidden), nn.ReLU()))
    network.add_module("classifier", nn.Sequential(nn.Identity(), nn.Linear(hidden, classes)))
    return network

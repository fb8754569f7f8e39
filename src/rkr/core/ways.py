"""The one place that chooses how layers compute, by device and sizes (`Options.kernels`).

* **formula**: the paper's equations in plain tensor operations, layer by layer. They can be differentiated any number of
  times, vmapped and compiled, so this is also the way inside torch.func's transforms and `torch.compile`.
* **factored**: layer by layer, without the gradient of the whole weight (`kernels.py`). The least arithmetic: for CPUs.
* **grouped**: all layers of one shape at once, before the pass (`grouped.py`). The fewest calls: for accelerators, where
  each call is a kernel launch, and for small weights on CPUs if the batch is so small that calls take most of the time.

All of them give the same values up to rounding. Without gradients, every way uses cached merged weights.
"""

from __future__ import annotations

from typing import Any

import torch

# A training step of a CPU groups layers if its batch has at most so many samples, and weights at most so many numbers.
# Measured on LeNet, ResNet-32 and a network of two small convolutions: see docs/speed.md.
SMALL_BATCH = 16
SMALL_WEIGHT = 1 << 16

# The factored gradients are faster if the full weight gradient is at least this many times larger than the factors.
# Measured: slower for first layers with 3 input channels, faster for 16 channels, 3x3 kernels and rank 2 (ratio 12).
FACTORED_MIN_RATIO = 10


def largest_grouped(kernels: str, device: torch.device, samples: int) -> float:
    """In a training step, layers whose weight has at most so many numbers are grouped; 0 means none."""
    if kernels == "grouped":
        return float("inf")
    if kernels != "auto":
        return 0
    if device.type != "cpu":
        return float("inf")
    return SMALL_WEIGHT if samples <= SMALL_BATCH else 0


def factored_pays(weight: torch.Size, rank: int | None) -> bool:
    """Whether a convolution should form the gradients of LM and RM without the full weight gradient."""
    outputs, inputs, height, width = weight
    factors = (rank or 1) * (width * inputs + height * outputs)
    return outputs * inputs * height * width >= FACTORED_MIN_RATIO * factors


def merges_conv(inputs: int, weight: int) -> bool:
    """Whether a factored convolution merges its weight first: for many pixels, else it adds the low-rank part."""
    return 2 * inputs > weight


def merges_linear(inputs: int, weight: int) -> bool:
    """The same for a linear layer with so many numbers in its inputs: for many rows."""
    return inputs > 2 * weight


def compiles() -> bool:
    """Whether the code is being traced by `torch.compile`."""
    return torch.compiler.is_compiling()


def by_formula(kernels: str) -> bool:
    """Whether to compute by plain operations: by the options, in a compiled graph, or inside torch.func's transforms."""
    return kernels == "formula" or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def described(kernels: str, device: torch.device, batch: int) -> dict[str, Any]:
    """What `auto` comes to, for the record of a run."""
    largest = largest_grouped(kernels, device, batch)
    way = kernels if kernels != "auto" else "factored" if largest == 0 else "grouped"
    return {"kernels": way, "largest_grouped": None if largest in (0, float("inf")) else int(largest)}

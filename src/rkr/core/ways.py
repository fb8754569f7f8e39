"""The one place that chooses how layers compute, by device and sizes (`Options.kernels`).

* **formula**: the paper's equations in plain tensor operations, layer by layer. They can be differentiated any number
  of times, vmapped and compiled, so this is also the way inside torch.func's transforms and `torch.compile`.
* **factored**: layer by layer, without the gradient of the whole weight (`kernels.py`). The least arithmetic: for CPUs.
* **grouped**: all layers of one shape at once, before the pass (`grouped.py`). The fewest calls: for accelerators,
  where each call is a kernel launch, and for small weights on CPUs.
* **plain**: layer by layer in plain operations, with F merged into the weight, or for few rows of a linear layer
  without merging. The backward pass has no Python: on CPUs for small weights that have no group, and for few rows.

All of them give the same values up to rounding. Without gradients, every way uses cached merged weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A training step on a CPU groups weights of at most THIN_WEIGHT numbers, whose whole gradient is cheap; in batches of
# at most SMALL_BATCH samples those of at most SMALL_WEIGHT. Measured on ResNet-32: grouping its layers of 16 and 32
# channels takes a step of 64 samples from 1.31 to 1.24 x the floor, and one of 4 samples from 1.6 to 1.2 x full
# fine-tuning. One group must have at least MANY layers, then the others cost little more: without any, plain operations
# are faster.
SMALL_BATCH = 16
SMALL_WEIGHT = 1 << 16
THIN_WEIGHT = 10_000
MANY = 3

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
    return SMALL_WEIGHT if samples <= SMALL_BATCH else THIN_WEIGHT


def smallest_group(kernels: str, device: torch.device) -> int:
    """How many layers of one shape there must be, for all small layers to be grouped."""
    return MANY if kernels == "auto" and device.type == "cpu" else 1


def merges_plainly(kernels: str, weight: Tensor, samples: int) -> bool:
    """Whether a layer without a group merges its weight in plain operations."""
    if kernels != "auto" or weight.device.type != "cpu":
        return False
    return weight.numel() <= largest_grouped(kernels, weight.device, samples)


def few_rows(kernels: str, input: Tensor) -> bool:
    """Whether a linear layer computes its low-rank part in plain operations."""
    return kernels == "auto" and input.device.type == "cpu" and input.numel() <= SMALL_BATCH * input.shape[-1]


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


def by_formula(kernels: str) -> bool:
    """Whether to compute by plain operations: by the options, when compiled, or inside torch.func's transforms."""
    return kernels == "formula" or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def described(kernels: str, device: torch.device) -> dict[str, str]:
    """What `kernels` comes to on a device, in words for the record of a run."""
    if kernels != "auto":
        return {"kernels": kernels}
    if device.type != "cpu":
        return {"kernels": "auto: grouped"}
    few = f"in batches of at most {SMALL_BATCH} at most {SMALL_WEIGHT}"
    small = f"grouped, or plain if nowhere {MANY} share a shape, for weights of at most {THIN_WEIGHT} numbers, {few}"
    return {"kernels": f"auto: factored; {small}"}

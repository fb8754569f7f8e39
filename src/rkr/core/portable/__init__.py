"""A network with tasks as a plain module that can be traced: for `torch.export` and ONNX.

A rectified network computes with the task that the model has in use, and merges weights when they are needed. A traced
graph can do neither. In its traced form the task of each sample (or a task's tensors) is an input, the base's weight
is used as it is, and the rectification is two thin layers beside it: R = LM·RM is a product of matrices with K columns,
and for a convolution a kernel of 1 x w with K outputs before one of h x 1. No weight is merged in the graph.

Each adapter says what its layer becomes: `TargetLayer.portable`.
"""

from __future__ import annotations

from rkr.core.portable.base import LowRank, Portable, PortableByWeight
from rkr.core.portable.tasks import Tasks

__all__ = ["LowRank", "Portable", "PortableByWeight", "Tasks"]

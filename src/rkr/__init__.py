"""Teach neural networks new tasks without forgetting the old ones.

Rectification-based Knowledge Retention (RKR; Singh, Mazumder, Rai, Namboodiri, CVPR 2021) for any PyTorch network.
"""

from rkr import networks
from rkr.core.cost import Cost
from rkr.core.model import RectifiedModel, load, rectify
from rkr.core.options import Options
from rkr.errors import FileError, RkrError, UsageError

__version__ = "0.1.0"
__all__ = [
    "Cost",
    "FileError",
    "Options",
    "RectifiedModel",
    "RkrError",
    "UsageError",
    "load",
    "networks",
    "rectify",
]

"""Images of 2x3x5 whose class is the brightest strip. Neither their shape nor the number of classes is declared."""

from __future__ import annotations

import torch

from rkr.data import Images, Source


def load(per_class: int = 20, *, noise: float = 60.0) -> Source:
    """Strips in noise.

    Args:
        per_class: Images of each class, in training and in test.
        noise: Standard deviation, of 255.
    """
    draw = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(2):
        y = torch.arange(6).repeat(per_class)
        x = 100 + noise * torch.randn(len(y), 2, 3, 5, generator=draw)
        x[torch.arange(len(y)), y // 3, y % 3] += 80
        parts.append(Images(x.clamp(0, 255).to(torch.uint8), y))
    return Source("strips", tuple(f"strip {n}" for n in range(6)), *parts, (0.5, 0.5), (0.25, 0.25))

"""The handwritten digits of scikit-learn (UCI Optdigits, 1,797 images of 8x8 pixels). No download needed."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from rkr.data.cut import balanced_cut
from rkr.data.task import Images, Source
from rkr.errors import UsageError
from rkr.registry import register


@register.dataset(
    "digits",
    "1,797 handwritten digits 8x8, 10 classes; comes with scikit-learn, no download",
    classes=10,
    shape=(1, "size", "size"),
)
def load_digits(data: object = None, size: int = 8, test: float = 0.25, seed: int = 0) -> Source:
    """Load the digits at `size` pixels, with a fraction `test` of every class for testing. `data` is ignored."""
    # Slow to import, so only when needed.
    from sklearn.datasets import load_digits as bundled  # type: ignore[import-untyped]

    if size < 8:
        raise UsageError(f"size must be 8 pixels or more, not {size}")
    found = bundled()
    # Values are 0 to 16. Scale them to 0 to 255 as in the other sources.
    x = torch.from_numpy(np.asarray(found.images, np.float32))[:, None] * (255 / 16)
    if size > 8:
        x = F.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    images = Images(x.round().to(torch.uint8), torch.from_numpy(np.asarray(found.target, np.int64)))
    kept, off = balanced_cut(images.y, test, seed, "test")
    return Source("digits", tuple("0123456789"), images.take(kept), images.take(off), (0.3049,), (0.3757,))

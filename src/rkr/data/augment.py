"""Random crops, flips and rotations of a whole batch at once.

Everything random is drawn for a whole epoch before any image is touched, so that what happens to a sample depends
neither on where an epoch was resumed nor on the number of processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rkr.errors import UsageError


@dataclass(frozen=True)
class Augment:
    """What is done at random to training images; the usual recipe for CIFAR by default.

    Images in memory are padded and cropped back. Image files get a crop of random size and shape instead (`pad` is not
    used) and cannot be rotated.
    """

    pad: int = 4  # black pixels on each side before the crop
    flip: bool = True  # left-right, every second image
    rotate: float = 0.0  # up to so many degrees to either side, about the centre, nearest pixel, black outside

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UsageError(f"pad must be 0 or more pixels, not {self.pad}")
        if not 0 <= self.rotate <= 180:
            raise UsageError(f"rotate must be 0 to 180 degrees, not {self.rotate}")


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of one epoch; row i belongs to the i-th sample that the epoch visits."""

    dy: Tensor  # int64 (N,), 0..2 pad: first row of the crop in the padded image
    dx: Tensor  # int64 (N,)
    flip: Tensor  # bool (N,)
    angle: Tensor  # float32 (N,), radians, counter-clockwise

    @staticmethod
    def draw(n: int, augment: Augment, generator: torch.Generator) -> Draws:
        """Every number is drawn whether it is used or not: switching one thing off leaves the others as they were."""
        shift = torch.randint(0, 2 * augment.pad + 1, (2, n), generator=generator)
        flip = torch.rand(n, generator=generator) < 0.5
        angle = (torch.rand(n, generator=generator) * 2 - 1) * math.radians(augment.rotate)
        return Draws(shift[0], shift[1], flip if augment.flip else torch.zeros_like(flip), angle)

    def __getitem__(self, rows: slice) -> Draws:
        return Draws(self.dy[rows], self.dx[rows], self.flip[rows], self.angle[rows])

    def to(self, device: torch.device) -> Draws:
        return Draws(self.dy.to(device), self.dx.to(device), self.flip.to(device), self.angle.to(device))


def apply(x: Tensor, draws: Draws, augment: Augment) -> Tensor:
    """Crop, flip, rotate, in this order: uint8 (B, C, H, W) to the same; one gather, whatever is done."""
    b, c, h, w = x.shape
    border = max(augment.pad, 1)  # the padded image's first pixel is then black in any case
    padded = F.pad(x, (border,) * 4)  # (B, C, H + 2 border, W + 2 border)
    rows = torch.arange(h, device=x.device)[None, :, None]  # (1, H, 1)
    columns = torch.arange(w, device=x.device)[None, None, :]  # (1, 1, W)
    outside = None
    if augment.rotate:
        rows, columns = _rotated(draws.angle, h, w)  # (B, H, W) each
        outside = (rows < 0) | (rows >= h) | (columns < 0) | (columns >= w)
    columns = torch.where(draws.flip[:, None, None], w - 1 - columns, columns)
    rows = rows + (draws.dy + border - augment.pad)[:, None, None]
    columns = columns + (draws.dx + border - augment.pad)[:, None, None]
    source = rows * (w + 2 * border) + columns  # (B, H, W): which pixel of the padded image comes here
    if outside is not None:
        source = source.masked_fill(outside, 0)
    index = source.reshape(b, 1, h * w).expand(b, c, h * w)
    return padded.flatten(2).gather(2, index).view(b, c, h, w)


def _rotated(angle: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
    """For each pixel, the row and column that a rotation about the centre brings there, (B, H, W) each."""
    y = torch.arange(h, device=angle.device)[None, :, None] + 0.5 - h / 2  # pixel centres
    x = torch.arange(w, device=angle.device)[None, None, :] + 0.5 - w / 2
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    return (sin * x + cos * y + h / 2).floor().long(), (cos * x - sin * y + w / 2).floor().long()

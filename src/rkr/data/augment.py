"""Random crops, flips, rotations and zooms of whole batches.

All random numbers of an epoch are drawn before its first batch, so that the augmentation of a sample depends neither on
where an epoch is resumed nor on the number of processes.
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
    """Random augmentation of training images. The defaults are the usual ones for CIFAR.

    Images in memory are padded and cropped to their size. Image files get a random resized crop instead (`pad` is
    ignored) and cannot be rotated. Pictures get a random resized crop of at least `zoom` of their area, or without it
    one of their size; they are neither padded nor rotated.
    """

    pad: int = 4  # black pixels on each side before the crop
    flip: bool = True  # left-right, with probability 1/2
    rotate: float = 0.0  # maximum degrees to either side, about the centre; nearest pixel, black outside
    zoom: float = 0.0  # of pictures: smallest share of the area that a crop shows; 0 for none

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UsageError(f"pad must be 0 or more pixels, not {self.pad}")
        if not 0 <= self.rotate <= 180:
            raise UsageError(f"rotate must be 0 to 180 degrees, not {self.rotate}")
        if not 0 <= self.zoom <= 1:
            raise UsageError(f"zoom must be a share of 0 to 1, not {self.zoom}")


@dataclass(frozen=True, eq=False)
class Draws:
    """The random numbers of one epoch. Row i belongs to the i-th sample of the epoch."""

    dy: Tensor  # int64 (N,), 0..2 pad: first row of the crop in the padded image
    dx: Tensor  # int64 (N,)
    flip: Tensor  # bool (N,)
    angle: Tensor  # float32 (N,), radians, counter-clockwise

    @staticmethod
    def draw(n: int, augment: Augment, generator: torch.Generator) -> Draws:
        """Draw all numbers, used or not, so that switching one augmentation off does not change the others."""
        shift = torch.randint(0, 2 * augment.pad + 1, (2, n), generator=generator)
        flip = torch.rand(n, generator=generator) < 0.5
        angle = (torch.rand(n, generator=generator) * 2 - 1) * math.radians(augment.rotate)
        return Draws(shift[0], shift[1], flip if augment.flip else torch.zeros_like(flip), angle)

    def __getitem__(self, rows: slice) -> Draws:
        return Draws(self.dy[rows], self.dx[rows], self.flip[rows], self.angle[rows])

    def to(self, device: torch.device) -> Draws:
        return Draws(self.dy.to(device), self.dx.to(device), self.flip.to(device), self.angle.to(device))


def apply(x: Tensor, draws: Draws, augment: Augment) -> Tensor:
    """Crop, flip and rotate, in this order, with one gather: uint8 (B, C, H, W) to the same shape."""
    b, c, h, w = x.shape
    border = max(augment.pad, 1)  # pad at least 1, so that the first pixel is always black
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
    source = rows * (w + 2 * border) + columns  # (B, H, W): index into the padded image
    if outside is not None:
        source = source.masked_fill(outside, 0)
    index = source.reshape(b, 1, h * w).expand(b, c, h * w)
    return padded.flatten(2).gather(2, index).view(b, c, h, w)


RATIO = (3 / 4, 4 / 3)  # width / height of random resized crops


@dataclass(frozen=True, eq=False)
class Crops:
    """Boxes in pictures of one size, as shares of it. Row i belongs to the i-th picture of the epoch."""

    centre: Tensor  # float32 (N, 2): x and y, -1..1
    half: Tensor  # float32 (N, 2): half of width and height, 0..1; a negative width flips the picture

    @staticmethod
    def draw(n: int, augment: Augment, share: float, generator: torch.Generator) -> Crops:
        """Draw boxes of `zoom` to 1 of the area; without zoom, boxes whose sides are `share` of the picture's."""
        numbers = torch.rand(5, n, generator=generator)
        low, high = map(math.log, RATIO)
        if augment.zoom:
            side = (augment.zoom + (1 - augment.zoom) * numbers[0]).sqrt()
            ratio = (low + (high - low) * numbers[1]).mul(0.5).exp()
            half = torch.stack([side * ratio, side / ratio], 1).clamp(max=1)  # a box too wide is cut to the picture
        else:
            half = torch.full((n, 2), share)
        centre = (numbers[2:4].T * 2 - 1) * (1 - half)
        if augment.flip:
            half[:, 0] *= torch.where(numbers[4] < 0.5, -1.0, 1.0)
        return Crops(centre, half)

    def __getitem__(self, rows: slice) -> Crops:
        return Crops(self.centre[rows], self.half[rows])

    def cut(self, x: Tensor, size: int) -> Tensor:
        """The boxes, resized: uint8 (B, C, R, R) to float32 (B, C, S, S)."""
        theta = x.new_zeros(len(x), 2, 3, dtype=torch.float32)
        theta[:, 0, 0], theta[:, 1, 1] = self.half.to(x.device).unbind(1)
        theta[:, :, 2] = self.centre.to(x.device)
        grid = F.affine_grid(theta, [len(x), x.shape[1], size, size], align_corners=False)
        return F.grid_sample(x.float(), grid, padding_mode="border", align_corners=False)


def _rotated(angle: Tensor, h: int, w: int) -> tuple[Tensor, Tensor]:
    """For each pixel, the source row and column of a rotation about the centre, (B, H, W) each."""
    y = torch.arange(h, device=angle.device)[None, :, None] + 0.5 - h / 2  # pixel centres
    x = torch.arange(w, device=angle.device)[None, None, :] + 0.5 - w / 2
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    return (sin * x + cos * y + h / 2).floor().long(), (cos * x - sin * y + w / 2).floor().long()

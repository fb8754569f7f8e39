"""Decodes image files in worker processes, with the usual crops for ImageNet.

Each image has its own seed, so the result does not depend on the worker that decodes it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rkr.data.task import ImageFiles
from rkr.errors import FileError

Box = tuple[int, int, int, int]  # left, top, right, bottom
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the random crops: fraction of the area, width / height
RESIZE = 256 / 224  # for evaluation: shorter side after resizing / size of the crop


def decode_centre(path: str, size: int, resize: int | None = None) -> Tensor:
    """Resize the shorter side (256 for a crop of 224) and crop the centre: uint8 (3, size, size)."""
    image = _open(path)
    shorter = resize or round(size * RESIZE)
    width, height = (max(shorter, int(shorter * side / min(image.size))) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _pixels(image.crop((left, top, left + size, top + size)))


def decode_random(path: str, size: int, seed: int, flip: bool) -> Tensor:
    """Crop a random area, resize it, and flip it with probability 1/2 if `flip`: uint8 (3, size, size)."""
    image = _open(path)
    draws = random.Random(seed)
    box = random_box(*image.size, draws)
    pixels = _pixels(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return pixels.flip(2) if draws.random() < 0.5 and flip else pixels


def random_box(width: int, height: int, draws: random.Random) -> Box:
    """Draw a box of 8 to 100 % of the area, 3:4 to 4:3. After ten trials, take the largest centred box."""
    for _ in range(10):
        area = width * height * draws.uniform(*SCALE)
        ratio = math.exp(draws.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draws.randint(0, width - w), draws.randint(0, height - h)
            return (left, top, left + w, top + h)
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h)


def _open(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise FileError(f"{path}: cannot be read as an image ({error})") from error


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, H, W), a copy, channels_last


Order = tuple[int, int | None]  # index of an image, and the seed of its crop; None for the centre crop


class _Decoder(Dataset[tuple[Tensor | FileError, int]]):
    def __init__(self, files: ImageFiles, flip: bool) -> None:
        self.files, self.flip = files, flip

    def __getitem__(self, order: Order) -> tuple[Tensor | FileError, int]:
        i, seed = order
        try:
            if seed is None:
                pixels = decode_centre(self.files.path(i), self.files.size)
            else:
                pixels = decode_random(self.files.path(i), self.files.size, seed, self.flip)
        except FileError as error:
            return error, 0  # returned, not raised: the DataLoader would wrap it in a traceback
        return pixels, int(self.files.y[i])


def _collate(samples: list[tuple[Tensor | FileError, int]]) -> tuple[Tensor, Tensor] | FileError:
    images = []
    for pixels, _ in samples:
        if isinstance(pixels, FileError):
            return pixels
        images.append(pixels)
    return torch.stack(images), torch.tensor([label for _, label in samples])


class _Orders:
    """Sampler of batches. Lists are built lazily, because an epoch may have a million images."""

    def __init__(self, index: Tensor, seeds: Tensor | None, shares: Sequence[slice]) -> None:
        self.index, self.seeds, self.shares = index, seeds, shares

    def __iter__(self) -> Iterator[list[Order]]:
        for share in self.shares:
            images = self.index[share].tolist()
            seeds = [None] * len(images) if self.seeds is None else self.seeds[share].tolist()
            if images:
                yield list(zip(images, seeds, strict=True))


def decoded(
    files: ImageFiles, index: Tensor, seeds: Tensor | None, shares: Sequence[slice], flip: bool, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Decode images `index[share]` for each share: uint8 (B, 3, S, S), int64 (B,). Empty shares give empty batches.

    With `seeds`, one per entry of `index`, crops are random. Without, they are centre crops.
    """
    loader = DataLoader(
        _Decoder(files, flip),
        batch_sampler=_Orders(index, seeds, shares),
        num_workers=workers,
        collate_fn=_collate,
        generator=torch.Generator(),  # keeps the DataLoader from drawing from the global generator
    )
    ready = iter(loader)
    try:
        for share in shares:
            if share.start == share.stop:
                yield torch.empty(0, *files.shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
                continue
            found = next(ready)
            if isinstance(found, FileError):
                raise FileError(str(found))  # a new exception, to avoid a reference cycle with this frame
            yield found
    finally:
        del ready  # ends the workers now, not when the frame is garbage collected

"""Small pictures that are drawn, and small networks for them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import nn

from rkr.pictures.preparation import Preparation

TINY = "helpers.pictures:tiny"
COLOURS = {"red": (210, 40, 40), "green": (40, 190, 60), "blue": (50, 60, 210), "grey": (128, 128, 128)}
SHAPES = ("disc", "square", "stripes")


def tiny(width: int = 8) -> nn.Module:
    """A network for pictures of 32 pixels, with BatchNorm, a depthwise convolution and dropout."""
    network = nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * width, 10),
    )
    network.preparation = Preparation(32, 36)  # type: ignore[assignment]
    return network


def no_network() -> int:
    """Not a network."""
    return 3


def draw_picture(path: Path, colour: tuple[int, int, int], shape: str = "disc", seed: int = 0) -> Path:
    """One picture, of a size between 40 and 60 pixels."""
    draws = random.Random(f"{path.name} {seed} {colour} {shape}")
    size = (draws.randint(40, 60), draws.randint(40, 60))
    image = Image.new("RGB", size, tuple(draws.randint(0, 60) for _ in range(3)))
    drawer = ImageDraw.Draw(image)
    ink = tuple(min(255, max(0, c + draws.randint(-30, 30))) for c in colour)
    x, y, r = draws.randint(12, 24), draws.randint(12, 24), draws.randint(10, 18)
    box = (x - r / 2, y - r / 2, x + r, y + r)
    if shape == "disc":
        drawer.ellipse(box, fill=ink)
    elif shape == "square":
        drawer.rectangle(box, fill=ink)
    else:
        for k in range(0, size[0], 8):
            drawer.rectangle((k, 0, k + 3, size[1]), fill=ink)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def draw_classes(root: Path, counts: Mapping[str, int], seed: int = 0) -> Path:
    """Class folders named like colours or shapes."""
    for name, count in counts.items():
        for i in range(count):
            if name in COLOURS:
                draw_picture(root / name / f"{i}.png", COLOURS[name], SHAPES[i % 3], seed)
            else:
                draw_picture(root / name / f"{i}.png", list(COLOURS.values())[i % 4], name, seed)
    return root


def same_answers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit."""
    return a.dtype == b.dtype and torch.equal(a, b)

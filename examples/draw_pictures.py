"""Draws small pictures in class folders, for trying out `rkr learn` without data of your own.

python examples/draw_pictures.py photos
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (210, 40, 40), "green": (40, 190, 60), "blue": (50, 60, 210)}
SHAPES = ("disc", "stripes")


def draw_one(path: Path, colour: tuple[int, int, int], shape: str) -> Path:
    """Draw a disc or stripes in a colour on a dark background."""
    draws = random.Random(str(path))
    side = draws.randint(60, 90)
    image = Image.new("RGB", (side, side), (draws.randint(0, 50),) * 3)
    pen = ImageDraw.Draw(image)
    ink = tuple(min(255, max(0, part + draws.randint(-30, 30))) for part in colour)
    if shape == "disc":
        x, y, r = draws.randint(25, 35), draws.randint(25, 35), draws.randint(18, 25)
        pen.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    else:
        for left in range(draws.randint(0, 8), side, 16):
            pen.rectangle((left, 0, left + 9, side), fill=ink)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path


def draw_by_colour(root: Path, count: int) -> Iterable[Path]:
    """Draw `count` pictures of each colour."""
    for name, colour in COLOURS.items():
        for n in range(count):
            yield draw_one(root / name / f"{n}.png", colour, SHAPES[n % 2])


def draw_by_shape(root: Path, count: int) -> Iterable[Path]:
    """Draw `count` pictures of each shape."""
    for shape in SHAPES:
        for n in range(count):
            yield draw_one(root / shape / f"{n}.png", list(COLOURS.values())[n % 3], shape)


def draw(root: Path) -> None:
    """Two tasks: `colours` as class folders, and `shapes` as a table of paths and labels. Also pictures for testing."""
    list(draw_by_colour(root / "colours", 12))
    list(draw_by_colour(root / "colours-test", 4))
    rows = [f"shapes/{path.parent.name}/{path.name},{path.parent.name}" for path in draw_by_shape(root / "shapes", 12)]
    (root / "shapes.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    for colour in ("red", "blue"):
        draw_one(root / "new" / f"{colour}.png", COLOURS[colour], "disc")


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"))

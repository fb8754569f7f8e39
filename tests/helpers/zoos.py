"""Model folders whose tasks were never trained: quick to make, and every task answers otherwise."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from helpers.pictures import COLOURS, TINY, draw_picture
from rkr.core.infer import describe
from rkr.pictures.learn import new_zoo
from rkr.pictures.settings import RANK
from rkr.pictures.zoo import Zoo

CLASSES = {"birds": ("robin", "wren", "tit"), "cars": ("bus", "van"), "trees": ("elm", "fir", "oak", "yew")}


def add_random_task(zoo: Zoo, name: str, classes: Sequence[str], seed: int = 0) -> None:
    """A task with random factors and head, which can be inferred."""
    draw = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    task = zoo.model.add_task(name, classes=list(classes), init="random", train_base=False)
    with torch.no_grad():
        for key, p in zoo.model.named_task_parameters().items():
            p.add_(torch.randn(p.shape, generator=draw) * (0.5 if key.startswith("head") else 0.1))
    width = zoo.features(torch.zeros(1, 3, 36, 36, dtype=torch.uint8)).shape[1]
    y = torch.arange(8 * len(classes)) % len(classes)
    features = torch.rand(len(y), width, generator=draw)
    task.about = {
        "pictures": len(y),
        "accuracy": 0.75,
        "date": "2026-11-19T08:00:00+00:00",
        "infer": describe(features, y, len(classes)).to_json(),
    }


def make_zoo(folder: Path, names: Sequence[str] = tuple(CLASSES), backbone: str = TINY) -> Zoo:
    """A saved zoo of the small network with some tasks."""
    torch.manual_seed(0)
    zoo = new_zoo(folder, backbone, None, RANK, None)
    for name in names:
        add_random_task(zoo, name, CLASSES.get(name, ("no", "yes")))
    zoo.model.eval().save(folder)
    return zoo


def task_file(folder: Path, name: str, path: Path, classes: Sequence[str] = ("no", "yes"), seed: int = 0) -> Path:
    """The file of a new task for the zoo in a folder, which stays as it is."""
    from rkr.pictures.zoo import open_zoo

    zoo = open_zoo(folder, device="cpu")
    add_random_task(zoo, name, classes, seed)
    zoo.model.save_task(name, path)
    return path


def picture(folder: Path, seed: int = 0) -> bytes:
    """A PNG file."""
    colour = list(COLOURS.values())[seed % 4]
    return draw_picture(folder / f"picture-{seed}.png", colour, seed=seed).read_bytes()


def zipped(root: Path) -> bytes:
    """A folder as a zip file."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                file.write(path, str(path.relative_to(root)))
    return data.getvalue()

"""`rkr learn` against a linear probe and fine-tuning the whole network, on folders of pictures.

    python benchmarks/transfer.py photos/birds photos/flowers --classes 20 --train 20 --test 20 --seeds 3

For each seed the pictures of each class are divided anew. All see the same pictures; those for testing are only tested
on. The probe is `rkr learn --rank 0` without random crops; both end with all pictures. Fine-tuning starts from a probe,
with the crops, schedule and validation part of `rkr learn`, and its learning rate is chosen on the validation part.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import rkr
from rkr.data import Augment, Batches, Pictures
from rkr.pictures import backbones, learner
from rkr.pictures.cache import Squares
from rkr.pictures.dataset import list_pictures
from rkr.pictures.learn import check_pictures, parts, prepare
from rkr.pictures.learner import fit_probe
from rkr.pictures.lesson import BATCH, WARM_UP

RATES = (1e-4, 3e-4, 1e-3)  # of fine-tuning
DECAY = 0.03  # of the probe that fine-tuning starts from


def divided(folder: Path, classes: int, train: int, test: int, seed: int, into: Path) -> tuple[Path, Path]:
    """Two lists of pictures of some classes of a folder, as files: to learn from, and to test on."""
    of: dict[str, list[str]] = {}
    for picture in list_pictures(folder).pictures:
        of.setdefault(picture.label, []).append(str(Path(picture.path).resolve()))
    rows: tuple[list[tuple[str, str]], list[tuple[str, str]]] = [], []
    for label in sorted(of)[:classes]:
        random.Random(f"{seed} {label}").shuffle(of[label])
        rows[0].extend((path, label) for path in of[label][:train])
        rows[1].extend((path, label) for path in of[label][train : train + test])
    files = into / "train.csv", into / "test.csv"
    for file, lines in zip(files, rows, strict=True):
        with open(file, "w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows([("path", "label"), *lines])
    return files


def compared(train: Path, test: Path, folder: Path, seed: int, how: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy on the test pictures, in percent, of each; the task's size in percent; seconds of `rkr learn`."""
    with patch.object(learner, "CROPS", 0):
        probe = rkr.learn(train, folder / "probe", "t", rank=0, seed=seed, **how)
    cropped = rkr.learn(train, folder / "cropped", "t", rank=0, seed=seed, **how)
    began = time.perf_counter()
    learned = rkr.learn(train, folder / "learned", "t", seed=seed, **how)
    seconds = time.perf_counter() - began
    numbers = sum(t.numel() for t in learned.model.tasks["t"].tensors().values())
    return {
        "probe": 100 * probe.evaluate(test, "t").accuracy,
        "rkr learn --rank 0": 100 * cropped.evaluate(test, "t").accuracy,
        "rkr learn": 100 * learned.evaluate(test, "t").accuracy,
        "fine-tuning": 100 * fine_tuned(train, test, folder / "whole", seed, how),
        "size": 100 * numbers / sum(p.numel() for p in learned.model.network.parameters()),
        "seconds": seconds,
    }


def fine_tuned(train: Path, test: Path, folder: Path, seed: int, how: Mapping[str, Any]) -> float:
    """Accuracy of a whole network trained for the task, at the rate that is best on the validation part."""
    given = dict(how)
    backbone, size = given.pop("backbone", None), given.pop("size", None)
    request = prepare(train, folder, "t", backbone, None, size, {"seed": seed, **given})
    built = backbones.build(request.backbone, request.arguments, size=request.size)
    base = built.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    squares = Squares([p.path for p in request.listing.pictures], built.preparation)
    checked = check_pictures(request, squares, lambda event: None, [])
    part, held_out = parts(checked, squares, built.preparation)
    tests = list_pictures(test).pictures
    tested = Squares([p.path for p in tests], built.preparation)
    tested.load()
    y = torch.tensor([checked.classes.index(p.label) for p in tests])
    last = Pictures(tested, torch.arange(len(tests)), y, built.preparation.size)

    def batches(pictures: Pictures, **more: Any) -> Batches:
        return Batches(pictures, mean=built.preparation.mean, std=built.preparation.std, **{"batch": BATCH, **more})

    _set_head(base, built.head, nn.Identity())
    base.eval()
    with torch.no_grad():
        features = torch.cat([base(x).float() for x, _ in batches(part)])
    weight, bias = fit_probe(features, part.y, len(checked.classes), DECAY)
    head = nn.Linear(weight.shape[1], len(weight))
    head.weight.data, head.bias.data = weight, bias
    _set_head(base, built.head, head)
    best: tuple[tuple[float, float], nn.Module] | None = None
    for rate in RATES:
        network = copy.deepcopy(base)
        augment = Augment(pad=0, flip=True, zoom=request.settings.zoom)
        order = batches(part, batch=request.settings.batch, seed=seed, augment=augment)
        found = trained(network, order, batches(held_out), rate, request.settings)
        if best is None or found[0] > best[0]:
            best = found
    assert best is not None
    return tested_on(best[1], batches(last))[0]


def trained(
    network: nn.Module, order: Batches, held_out: Batches, rate: float, settings: Any
) -> tuple[tuple[float, float], nn.Module]:
    """Train all parameters; BatchNorm keeps the base's statistics. The best epoch, and its figures on validation."""
    free = [p for p in network.parameters() if p.dim() == 1]
    decayed = [p for p in network.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=settings.weight_decay)
    best, kept = tested_on(network, held_out), copy.deepcopy(network)
    for epoch in range(settings.epochs):
        network.train()
        for module in network.modules():
            module.training = module.training and not isinstance(module, nn.modules.batchnorm._BatchNorm)
        for k, (x, y) in enumerate(order.iter_from(epoch)):
            done = (epoch + k / len(order)) / settings.epochs
            rising = max(done, 1e-3) / WARM_UP
            falling = (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate * (rising if done < WARM_UP else falling)
            optimizer.zero_grad()
            F.cross_entropy(network(x).float(), y, label_smoothing=settings.smoothing).backward()
            optimizer.step()
        figures = tested_on(network, held_out)
        if figures >= best:
            best, kept = figures, copy.deepcopy(network)
    return best, kept


@torch.no_grad()
def tested_on(network: nn.Module, batches: Batches) -> tuple[float, float]:
    """Accuracy and negative loss."""
    network.eval()
    hits = loss = 0.0
    for x, y in batches.iter_from(0):
        logits = network(x).float()
        hits += int((logits.argmax(1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return hits / len(batches.samples), -loss / len(batches.samples)


def _set_head(network: nn.Module, name: str, head: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, head)


def table(found: Mapping[str, list[dict[str, float]]]) -> str:
    """Medians, and the lowest and highest of all seeds."""
    names = list(next(iter(found.values()))[0])
    lines = [f"| | n | {' | '.join(names)} |", f"|---|--:|{'--:|' * len(names)}"]
    for folder, runs in found.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            cells.append(f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {folder} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    for name, value in (("classes", 20), ("train", 20), ("test", 20), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--size", type=int)
    parser.add_argument("--backbone")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings, such as epochs=10")
    given = parser.parse_args()
    how = {key: value for key in ("size", "backbone") if (value := getattr(given, key)) is not None}
    how |= {key: json.loads(value) for key, _, value in (one.partition("=") for one in given.set)}
    found: dict[str, list[dict[str, float]]] = {}
    for folder in given.folders:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as temporary:
                place = Path(temporary)
                train, test = divided(folder, given.classes, given.train, given.test, seed, place)
                found.setdefault(folder.name, []).append(compared(train, test, place, seed, how))
            print(folder.name, seed, json.dumps(found[folder.name][-1]), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()

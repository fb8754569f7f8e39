"""Your own pictures: decoding, the frozen network, a training step, and inferring the task, for each picture."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from measure import interleaved
from PIL import Image

from rkr.core.infer import Rule, describe
from rkr.methods.learner import SeenTask
from rkr.pictures.backbones import DEFAULT, build
from rkr.pictures.learn import new_zoo
from rkr.pictures.learner import PictureLearner
from rkr.pictures.settings import RANK, Settings

BATCH = 16
CLASSES = 20
TASKS = 100


def photograph() -> bytes:
    """A JPEG of 500 x 375 pixels with some detail."""
    torch.manual_seed(0)
    coarse = torch.rand(1, 3, 24, 32)
    fine = torch.nn.functional.interpolate(coarse, (375, 500), mode="bicubic").clamp(0, 1)
    pixels = ((0.9 * fine + 0.1 * torch.rand_like(fine)) * 255).byte()[0].permute(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def run(network: str = "") -> None:
    if network and network not in DEFAULT:
        return
    zoo = new_zoo(Path("unused"), DEFAULT, None, RANK, None)
    data, settings = photograph(), Settings()
    squares = torch.stack([zoo.preparation.square(data)] * BATCH)
    x = zoo.preparation.normalised(zoo.preparation.centre(squares))
    y = torch.arange(BATCH) % CLASSES
    learner = PictureLearner(zoo.model, settings)
    learner.begin(SeenTask(0, "t", tuple(map(str, range(CLASSES))), 0))
    optimizer = torch.optim.AdamW(learner.groups(), lr=1e-6)
    plain = _plain()
    whole = torch.optim.AdamW(plain.parameters(), lr=1e-6)

    def step() -> None:
        learner.train()
        optimizer.zero_grad()
        learner.loss(x, y).loss.backward()
        optimizer.step()

    def fine_tuning() -> None:
        plain.train()
        for module in plain.modules():  # as in `rkr learn`: the statistics stay fixed
            module.training = module.training and not isinstance(module, torch.nn.BatchNorm2d)
        whole.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        whole.step()

    def forward() -> None:
        zoo.model.eval()
        zoo.features(squares)

    features = torch.rand(CLASSES * 10, 1280)
    labels = torch.arange(CLASSES).repeat(10)
    rule = Rule({f"t{i}": describe(features.roll(i, 1), labels, CLASSES) for i in range(TASKS)})
    cases = {
        "decoding a JPEG of 500 x 375": lambda: [zoo.preparation.square(data) for _ in range(BATCH)],
        "the frozen network": forward,
        "step of a task": step,
        "step of full fine-tuning": fine_tuning,
        f"inferring the task among {TASKS}": lambda: rule(features[:BATCH]),
    }
    found = interleaved(cases, rounds=5)
    print(f"Pictures, {DEFAULT} at {zoo.preparation.size} pixels, batch {BATCH}: CPU ms a picture")
    for name, seconds in found.items():
        print(f"  {name:<32} {1000 * seconds / BATCH:7.2f}")
    print(
        f"  a step of a task / of full fine-tuning  {found['step of a task'] / found['step of full fine-tuning']:.2f}"
    )


def _plain() -> torch.nn.Module:
    """The network with a head of its own, all of it trained."""
    network = build(DEFAULT).network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network._fc = torch.nn.Linear(1280, CLASSES)
    return network

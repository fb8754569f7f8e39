"""Writes one small file of every format, to be kept under tests/formats/data/<commit>/ for as long as rkr reads them.

The files of data/a2c0570 were written by that commit, from a checkout with its own environment, in an empty folder:

    PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 <checkout>/.venv/bin/python tests/formats/make.py a2c0570

When a format gets a new version, run this script with the last commit that wrote the old one and add its folder to
`test_old_files.py`. Never change files that are there.

zoo/, zoo-reshape/     model folders: zoo.json, the base and two tasks
task.safetensors       a task of zoo/ that was saved alone
answers.safetensors    an input and each task's logits
expected.json          SHA-256 of each tensor, fingerprints of each task, results of the runs
runs/.../rkr, ewc, apd finished runs of RECIPE
stopped/.../rkr, ewc   the same runs, stopped with Ctrl-C in their second task
features.mat.part/     what `rkr features` leaves when it is interrupted
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import rkr

ZOOS: dict[str, dict[str, Any]] = {
    "zoo": {"rank": 2, "norm": "per_task"},
    "zoo-reshape": {"rank": 1, "layout": "reshape", "bn": "stats", "ranks": {"fc1": 3}},
}
TASKS: dict[str, int | list[str]] = {"first": 3, "zweite Übung": ["cat", "dög"]}
CLASSES, TRAIN, TEST = 4, 8, 4  # of the images: classes, and images of each class

RECIPE = """\
title = "Four classes of tiny images in two tasks"
about = "for tests of file formats"
orders = ["fixed"]

[stream]
source = "folder"
tasks = 2
[stream.options]
path = "images"
size = 2
resident = true

[network]
name = "digits-net"
classes = 4
in_channels = 3
size = 2

[training]
epochs = 3
batch = 8
lr = 0.05
momentum = 0.9

[methods.rkr]
[methods.ewc]
[methods.apd]
"""

PIXELS = """\
import os

from torch import nn


class Pixels(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == int(os.environ.get("STOP_AT_CALL", "0")):
            raise KeyboardInterrupt
        return x.flatten(1)
"""
SLOW = """
import os, time, rkr.cli
real = os.fsync
os.fsync = lambda file: (time.sleep(0.1), real(file))
rkr.cli.main()
"""
FEATURES = ("features", "images/train", "--out", "features.mat", "--model", "pixels:Pixels", "--size", "2")
FEATURES += ("--batch", "2", "--threads", "1")


class Network(nn.Module):
    """A convolution, BatchNorm, attention, LayerNorm and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.fc1 = nn.Linear(4, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))  # (B, 4, 5, 5)
        x = x.flatten(2).transpose(1, 2)  # (B, 25, 4)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.fc(F.relu(self.fc1(x.mean(1))))  # (B, classes)


def build(options: dict[str, Any]) -> Any:
    """A model whose tasks have been trained for a few steps."""
    torch.manual_seed(0)
    model = rkr.rectify(Network(), head="fc", **options)
    for name, classes in TASKS.items():
        model.add_task(name, classes)
        optimizer = torch.optim.SGD(model.task_parameters(), lr=0.3, momentum=0.9)
        model.train()
        for _ in range(4):
            x = torch.randn(16, 1, 5, 5)
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.randint(2, (16,))).backward()
            optimizer.step()
    return model.eval()


def write_images(folder: Path) -> None:
    """Images of 2x2 pixels whose brightest one tells the class, the same on every machine."""
    draw = random.Random(0)
    for part, count in (("train", TRAIN), ("test", TEST)):
        for label in range(CLASSES):
            (folder / part / f"class {label}").mkdir(parents=True)
            for number in range(count):
                pixels = [[draw.randrange(160) + 95 * (place == label) for _ in range(3)] for place in range(4)]
                data = b"P6 2 2 255\n" + bytes(value for pixel in pixels for value in pixel)
                path = folder / part / f"class {label}" / f"{number:02}.ppm"
                path.write_bytes(data)
                os.utime(path, (1_600_000_000, 1_600_000_000))  # names of feature parts depend on it


def sums(path: Path) -> dict[str, str]:
    """SHA-256 of each tensor of a file."""
    found = load_file(path)
    return {
        key: hashlib.sha256(f"{t.dtype} {tuple(t.shape)} ".encode() + t.numpy().tobytes()).hexdigest()
        for key, t in found.items()
    }


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def main(out: Path) -> None:
    out.mkdir()
    expected: dict[str, Any] = {"fingerprints": {}, "tensors": {}}
    x = torch.randn(3, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    answers = {"x": x}
    for zoo, options in ZOOS.items():
        model = build(options)
        model.save(out / zoo)
        expected["fingerprints"][zoo] = {name: model.fingerprint(name) for name in TASKS}
        for name in TASKS:
            model.set_task(name)
            with torch.no_grad():
                answers[f"{zoo}: {name}"] = model(x)
        if zoo == "zoo":
            model.save_task("zweite Übung", out / "task.safetensors")
    save_file(answers, out / "answers.safetensors")

    write_images(Path("images"))
    Path("tiny.toml").write_text(RECIPE)
    Path("pixels.py").write_text(PIXELS)
    command = [sys.executable, "-m", "rkr"]
    run = [*command, "run", "tiny.toml", "--threads", "1", "--accelerator", "cpu", "--no-figures"]
    for method in ("rkr", "ewc", "apd"):
        subprocess.run([*run, "--method", method, "--out", str(out / "runs")], check=True)
    for method in ("rkr", "ewc"):
        folder = out / "stopped" / "tiny" / method / "fixed"
        slow = [sys.executable, "-c", SLOW, *run[3:], "--method", method, "--out", str(out / "stopped")]
        with subprocess.Popen([*slow, "--save-minutes", "0"]) as process:
            while process.poll() is None and b'"number": 2' not in _read(folder / "results.jsonl"):
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
        assert (folder / "state.safetensors").exists(), method
    shutil.rmtree(folder / "model")  # a resumed run writes it again
    stopped = subprocess.run([*command, *FEATURES], env={**os.environ, "STOP_AT_CALL": "8"}, check=False)
    assert stopped.returncode
    shutil.copytree("features.mat.part", out / "features.mat.part")
    subprocess.run([*command, *FEATURES], check=True)
    expected["features"] = hashlib.sha256(Path("features.mat").read_bytes()).hexdigest()

    for junk in ("lock", "times.jsonl", "*.md", "*.html", "*.csv"):
        for path in out.rglob(junk):
            path.unlink()
    for path in sorted(out.rglob("*.safetensors")):
        expected["tensors"][path.relative_to(out).as_posix()] = sums(path)
    (out / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())

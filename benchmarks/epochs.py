"""An epoch of LeNet on 10 classes of CIFAR-100: the engine against avalanche's Naive. And two runs at once."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import in_its_own_process
from torch import Tensor, nn

from rkr.data import Images, Source, Stream, load_source, split
from rkr.data.cifar import CIFAR100
from rkr.data.download import find
from rkr.experiment.events import EpochEnd, Event, Started, TaskEnd
from rkr.experiment.processes import make_fabric
from rkr.experiment.recipes import Recipe, load_recipe
from rkr.experiment.run import Run
from rkr.experiment.spec import RunSpec
from rkr.methods import METHODS

ROUNDS = 5
BAR = 2.0  # avalanche against RKR, at least
AVALANCHE = Path(sys.prefix) / "avalanche"  # where `make bench` puts it: on the path of no other program
OPERATORS: list[torch.library.Library] = []  # a declaration lives as long as its library

Measure = Callable[[], dict[str, float]]


def has_cifar() -> bool:
    return find((CIFAR100.file, CIFAR100.folder)) is not None


def two_tasks() -> Stream:
    """The first two tasks of CIFAR-100, or of random images."""
    if has_cifar():
        source = load_source("cifar100")
    else:
        print("CIFAR-100 was not found (--data or $RKR_DATA): random images of the same shape instead")
        parts = [Images(torch.randint(256, (n, 3, 32, 32)).byte(), torch.arange(n) % 100) for n in (50_000, 10_000)]
        names = tuple(f"class {i}" for i in range(100))
        source = Source("random", names, parts[0], parts[1], CIFAR100.mean, CIFAR100.std)
    stream = split(source, tasks=10, order="A")
    return replace(stream, tasks=stream.tasks[:2], order=stream.order[:2])


def engine(recipe: Recipe, stream: Stream, method: str) -> Measure:
    """A run of two tasks, one epoch each. The time of an epoch includes that of making room for its task."""
    spec = RunSpec(
        recipe=recipe.name,
        method=method,
        order="A",
        learner=METHODS[method],
        options={},
        make=recipe.build_network,
        head=recipe.network.head,
        training=recipe.training,
        agnostic="never",
    )
    fabric = make_fabric("cpu")

    def measure() -> dict[str, float]:
        times: dict[str, float] = {}
        began = 0.0

        def watch(event: Event) -> None:
            nonlocal began
            if isinstance(event, Started | TaskEnd):
                began = time.process_time()
            elif isinstance(event, EpochEnd):
                times[f"{method}, task {event.number}"] = time.process_time() - began

        with tempfile.TemporaryDirectory() as folder:
            Run(spec, stream, Path(folder) / "run", fabric, watch).execute()
        return times

    return measure


def naive(recipe: Recipe, stream: Stream) -> Measure:
    """avalanche as its users have it: PIL images and torchvision transforms in a DataLoader, a head for each task."""
    import_torchvision()
    from avalanche.benchmarks import nc_benchmark
    from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
    from avalanche.models import MultiHeadClassifier, MultiTaskModule
    from avalanche.training.plugins import EvaluationPlugin
    from avalanche.training.supervised import Naive
    from PIL import Image
    from torchvision import transforms

    class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
        """As torchvision's CIFAR100, which wants to have its own copy of the files."""

        def __init__(self, images: list[Any]) -> None:
            self.data = torch.cat([part.x for part in images]).permute(0, 2, 3, 1).contiguous().numpy()
            self.targets = torch.cat([part.y + 10 * number for number, part in enumerate(images)]).tolist()

        def __len__(self) -> int:
            return len(self.targets)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return Image.fromarray(self.data[index]), self.targets[index]

    class MultiHead(MultiTaskModule):
        """The same LeNet with avalanche's heads."""

        def __init__(self) -> None:
            super().__init__()
            body: Any = recipe.build_network()
            self.heads = MultiHeadClassifier(body.fc.in_features, 10)
            body.fc = nn.Identity()
            self.body = body

        def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
            return self.heads(self.body(x), task_labels)

    s, pad = recipe.training, recipe.training.augment.pad
    plain = [transforms.ToTensor(), transforms.Normalize(stream.mean, stream.std)]
    tasks: Any = nc_benchmark(
        Pictures([task.training.train for task in stream.tasks]),
        Pictures([task.test for task in stream.tasks]),
        n_experiences=2,
        task_labels=True,
        shuffle=False,
        class_ids_from_zero_in_each_exp=True,
        train_transform=transforms.Compose(
            [transforms.RandomCrop(32, padding=pad), transforms.RandomHorizontalFlip(), *plain]
        ),
        eval_transform=transforms.Compose(plain),
    )
    model = MultiHead()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=s.batch,
        train_epochs=1,
        evaluator=EvaluationPlugin(accuracy_metrics(epoch=True), loss_metrics(epoch=True), loggers=[]),
    )

    def measure() -> dict[str, float]:
        began = time.process_time()
        strategy.train(tasks.train_stream[0], num_workers=0, shuffle=True)
        return {"avalanche Naive": time.process_time() - began}

    return measure


def import_torchvision() -> None:
    """torchvision's compiled operators do not fit the CPU build of torch: declare them, as none of them is called."""
    if AVALANCHE.is_dir():
        sys.path.append(str(AVALANCHE))
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).with_name("_meta_registrations.py").read_text()
        OPERATORS.append(torch.library.Library("torchvision", "DEF"))
        for name in {*re.findall(r'register_meta\("(\w+)"', text), *re.findall(r'"torchvision::(\w+)"', text)}:
            OPERATORS[-1].define(f"{name}(Tensor x) -> Tensor")
        importlib.import_module("torchvision")


def run(only: str = "") -> None:
    """Print the seconds of an epoch."""
    if only not in "LeNet":
        return
    print("LeNet, an epoch of 5,000 images of a CIFAR-100 task of 10 classes: loading, augmentation, loss, step")
    recipe, stream = load_recipe("cifar100-lenet").changed(epochs=1), two_tasks()
    measures: list[Measure] = [engine(recipe, stream, method) for method in ("rkr", "finetune")]
    try:
        measures.append(in_its_own_process(naive, recipe, stream))
    except ImportError as error:
        print(f"without avalanche, which is not installed ({error})")
    rounds = []
    for number in range(ROUNDS + 1):
        times = {name: seconds for measure in measures for name, seconds in measure().items()}
        rounds += [times] if number else []  # the first is to warm up
    medians = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    theirs = medians.get("avalanche Naive")
    for name, seconds in medians.items():
        seen = [times[name] for times in rounds]
        row = f"{name:16} {seconds:5.2f} s ({min(seen):.2f} to {max(seen):.2f})"
        if theirs is not None and name != "avalanche Naive":
            ratios = [times["avalanche Naive"] / times[name] for times in rounds]
            row += f"  {statistics.median(ratios):.2f} x as fast as avalanche ({min(ratios):.2f} to {max(ratios):.2f})"
            row += f"  bar {BAR}" if name.startswith("rkr") else ""
        print(row, flush=True)


def workers(only: str = "") -> None:
    """Print the time of two orders at once, one thread each, against one after the other on all cores."""
    if only not in "LeNet":
        return
    if not has_cifar():
        print("two runs at once: left out, CIFAR-100 was not found (--data or $RKR_DATA)")
        return
    words = "run cifar100-lenet --method rkr --orders 2 --limit 50 --epochs 1"
    print(f"rkr {words}: --workers 2 against 1, on {os.cpu_count()} cores (wall time)")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    seen: dict[str, list[tuple[float, float]]] = {"1": [], "2": []}
    for _ in range(3):
        for count, times in seen.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "rkr", *words.split(), "--workers", count, "--out", folder]
                began, used = time.monotonic(), processor_seconds()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
                times.append((time.monotonic() - began, processor_seconds() - used))
    wall, cpu = ({n: statistics.median(t[i] for t in times) for n, times in seen.items()} for i in (0, 1))
    print(
        f"one after the other {wall['1']:.1f} s (CPU time {cpu['1']:.1f} s)  "
        f"at once {wall['2']:.1f} s (CPU time {cpu['2']:.1f} s)  ratio {wall['1'] / wall['2']:.2f}",
        flush=True,
    )


def processor_seconds() -> float:
    """CPU time of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

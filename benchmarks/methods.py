"""A training step of each method with its fifth task, against RKR's: LeNet, batch 128."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import interleaved
from torch import Tensor, nn

from rkr.experiment.processes import keep_freed_memory
from rkr.methods import METHODS, Learner
from rkr.methods.learner import SeenTask
from rkr.networks import lenet

TASKS, CLASSES, BATCH, ROUNDS = 5, 10, 128, 7
OPTIONS: dict[str, dict[str, Any]] = {"rcl": {"trials": 1, "parallel": 1}, "rps-net": {"candidates": 1}}
LEFT_OUT = {"rkr-k1", "rkr-k4", "rkr-k8", "rkr-random"}  # as RKR


def make() -> nn.Module:
    return lenet(TASKS * CLASSES).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def stepper(method: str) -> Callable[[], None]:
    """A step of the last task's longest phase, after a step of every phase before it."""
    torch.manual_seed(0)
    learner = METHODS[method].build(make, "fc", **OPTIONS.get(method, {}))
    x = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    for number in range(TASKS):
        names = tuple(f"{number}{i}" for i in range(CLASSES))
        learner.begin(SeenTask(number, f"task {number}", names, number * CLASSES))
        if learner.rounds():
            learner.adopt(learner.propose(0)[0])
        y = torch.arange(BATCH) % CLASSES + number * CLASSES

        def read(y: Tensor = y) -> Iterator[tuple[Tensor, Tensor]]:
            return iter([(x, y)])

        longest = max(learner.phases(), key=lambda phase: phase.share if phase.epochs is None else 0)
        for phase in learner.phases():
            learner.prepare(phase, read)
            step = training(learner, x, y)
            if number == TASKS - 1 and phase.name == longest.name:
                return step
            if phase.epochs != 0:
                step()
        learner.eval()
        learner.end(read)
    raise AssertionError(method)


def training(learner: Learner, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(learner.groups(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    learner.train()

    def step() -> None:
        optimizer.zero_grad()
        learner.loss(x, y).loss.backward()
        learner.before_step(optimizer)
        optimizer.step()
        learner.after_step()

    return step


def run(network: str = "") -> None:
    if network.lower() not in "lenet":
        return
    keep_freed_memory()
    print("training step of each method, LeNet, fifth task of 10 classes, batch 128, relative to RKR")
    times = interleaved({name: stepper(name) for name in METHODS if name not in LEFT_OUT}, ROUNDS)
    words = [f"{name} {seconds / times['rkr']:.2f}" for name, seconds in times.items()]
    print(f"{'  '.join(words)}  (rkr {1e3 * times['rkr']:.0f} ms)", flush=True)

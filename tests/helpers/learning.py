"""Small tasks and networks, and a training loop that calls the hooks of a learner as the engine does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import rkr
from rkr.methods import Learner
from rkr.methods.learner import ReadSamples, SeenTask

CLASSES = (3, 2, 4)
SAMPLES = 12  # of each task

Samples = tuple[Tensor, Tensor]
Draw = Callable[..., Samples]
"""Samples and labels of a task: called with the task, and `seed` and `n` by keyword."""


def seen_tasks(classes: Sequence[int] = CLASSES) -> list[SeenTask]:
    """Tasks "t0", "t1", ... with these numbers of classes."""
    found, start = [], 0
    for number, count in enumerate(classes):
        names = tuple(f"{number}{i}" for i in range(count))
        found.append(SeenTask(number, f"t{number}", names, start))
        start += count
    return found


def small_cnn(classes: int = sum(CLASSES)) -> nn.Module:
    """A small network for images of 4 x 4, with a head "fc"."""
    return rkr.networks.small_cnn(classes=classes, size=4)


def small_double_cnn(classes: int = sum(CLASSES)) -> nn.Module:
    """As `small_cnn`, in double precision."""
    return small_cnn(classes).double()


def noise(task: SeenTask, seed: int = 0, n: int = SAMPLES, dtype: torch.dtype = torch.float32) -> Samples:
    """Noise (n, 1, 4, 4) and random labels of a task, which count over all tasks."""
    draw = torch.Generator().manual_seed(100 * task.number + seed)
    x = torch.randn(n, 1, 4, 4, generator=draw, dtype=dtype)
    return x, torch.randint(task.classes, (n,), generator=draw) + task.start


def double_noise(task: SeenTask, seed: int = 0, n: int = SAMPLES) -> Samples:
    """As `noise`, in double precision."""
    return noise(task, seed, n, torch.float64)


def rehearsed(learner: Learner, draw: Draw = noise, seed: int = 0) -> Iterator[Samples]:
    """The samples that a learner asks for, task by task."""
    for number, rows in learner.rehearse([SAMPLES] * len(learner.seen)).items():
        x, y = draw(learner.seen[number], seed=seed)
        yield (x, y) if rows is None else (x[rows], y[rows])


def reader(learner: Learner, draw: Draw = noise) -> ReadSamples:
    """What the engine gives to `prepare` and `end`."""
    return lambda: rehearsed(learner, draw)


def sgd(learner: Learner, lr: float = 0.05, weight_decay: float = 5e-4) -> SGD:
    """SGD with momentum for what the phase trains."""
    return SGD(learner.groups(), lr=lr, momentum=0.9, weight_decay=weight_decay)


def step(learner: Learner, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    """One training step with all its hooks. Returns the loss."""
    outcome = learner.loss(x, y)
    optimizer.zero_grad(set_to_none=True)
    outcome.loss.backward()
    learner.before_step(optimizer)
    optimizer.step()
    learner.after_step()
    return outcome.loss.item()


@dataclass(frozen=True)
class Checkpoint:
    """What the engine saves between two steps. Without phases there is no optimizer."""

    phase: int
    step: int
    learner: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    rng: Tensor

    @classmethod
    def of(cls, learner: Learner, optimizer: Optimizer | None = None, phase: int = 0, step: int = 0) -> Checkpoint:
        states = learner.state_dict(), None if optimizer is None else optimizer.state_dict()
        return cls(phase, step, *copy.deepcopy(states), torch.get_rng_state())


def train(
    learner: Learner,
    steps: int = 3,
    *,
    draw: Draw = noise,
    make_optimizer: Callable[[Learner], Optimizer] = sgd,
    resume: Checkpoint | None = None,
    save: Callable[[Checkpoint], None] = lambda checkpoint: None,
    after_phase: Callable[[str], None] = lambda name: None,
) -> list[list[float]]:
    """Train the current task: all phases, `steps` steps each. Returns the losses of each phase.

    Args:
        learner: A learner that has begun the task.
        steps: Steps of a phase; a phase of 0 epochs has none.
        draw: Draws samples of a task.
        make_optimizer: Makes the optimizer of a phase.
        resume: Start from here. The learner must have loaded the checkpoint's state.
        save: Called with a checkpoint after every step.
        after_phase: Called with the name of each phase when it is over.
    """
    losses: list[list[float]] = []
    optimizer: Optimizer | None = None
    at = 0 if resume is None else resume.phase
    while at < len(phases := learner.phases()):  # which may depend on the phases before
        phase = phases[at]
        learner.prepare(phase, reader(learner, draw))
        if optimizer is None or not phase.same_optimizer:
            optimizer = make_optimizer(learner)
        first = 0
        if resume is not None and resume.optimizer is not None:
            learner.load_state_dict(resume.learner)  # again, because `prepare` may change the state
            optimizer.load_state_dict(copy.deepcopy(resume.optimizer))
            torch.set_rng_state(resume.rng)
            first = resume.step
        resume = None
        learner.train()
        losses.append([])
        for number in range(first, 0 if phase.epochs == 0 else steps):
            learner.begin_epoch(number / steps)
            found = list(rehearsed(learner, draw, seed=number % 2))
            x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
            losses[-1].append(step(learner, optimizer, x, y))
            save(Checkpoint.of(learner, optimizer, at, number + 1))
        after_phase(phase.name)
        at += 1
    return losses


def choose_candidate(learner: Learner) -> None:
    """Go through all rounds of candidates without training them, and adopt the best one of the last round."""
    best: Any = None
    for number in range(learner.rounds()):
        candidates = learner.propose(number)
        scores = [learner.score(candidate, 1 / (2 + place)) for place, candidate in enumerate(candidates)]
        learner.observe(number, candidates, scores)
        best = candidates[scores.index(max(scores))]
    if learner.rounds():
        learner.adopt(best)


def learn(learner: Learner, task: SeenTask, steps: int = 3, *, draw: Draw = noise, **how: Any) -> list[list[float]]:
    """Learn a task from `begin` to `end`. Returns the losses of each phase. `how`: see `train`."""
    learner.begin(task)
    choose_candidate(learner)
    losses = train(learner, steps, draw=draw, **how)
    learner.eval()
    learner.end(reader(learner, draw))
    return losses


@torch.no_grad()
def answers(learner: Learner, number: int, draw: Draw = noise) -> Tensor:
    """Logits of task `number` for 20 samples of the first task, in evaluation mode."""
    learner.eval()
    return learner.predict(draw(learner.seen[0], n=20)[0], number).clone()

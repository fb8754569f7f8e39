"""A training step of CADA-VAE: the first task's, which trains everything, against later ones of the methods."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import in_its_own_process, interleaved

import rkr
from rkr.experiment.processes import keep_freed_memory
from rkr.methods import ZERO_SHOT_METHODS
from rkr.methods.learner import SeenTask
from rkr.networks import CadaVae, VisualEncoder

BATCH, CLASSES, UNSEEN, ATTRIBUTES = 50, 200, 50, 312  # CUB
ROUNDS = 25
BAR = 0.60  # RKR against the plain step of the first task in plain torch, at most


def stepper(method: str, tasks: int, fused: bool = True, encoder: bool = True, **options: Any) -> Callable[[], None]:
    """A step of the last of some tasks, in the middle of the schedule, where all terms of the loss count.

    Without `encoder` images come encoded, and only what else a task trains is computed: no method can take less that
    trains the same.
    """
    torch.manual_seed(0)
    learner = ZERO_SHOT_METHODS[method].build(CadaVae, "", **options)
    names = tuple(map(str, range(CLASSES)))
    for number in range(tasks):
        attributes = torch.rand(CLASSES, ATTRIBUTES)
        unseen = tuple(range(CLASSES - UNSEEN, CLASSES))
        learner.begin(SeenTask(number, f"task {number}", names, 0, attributes, unseen))
    phase = learner.phases()[-1]
    learner.prepare(phase, lambda: iter(()))
    learner.begin_epoch(0.5)
    x, y = torch.rand(BATCH, 2048), torch.randint(CLASSES - UNSEEN, (BATCH,))
    groups = learner.groups()
    if not encoder:
        groups = [{"params": [*learner.vae.decoder.parameters(), *learner.attribute_vaes[-1].parameters()]}]
        encoded = torch.randn(BATCH, learner.vae.latent), torch.randn(BATCH, learner.vae.latent)
        learner.encode = lambda x, number: encoded
    optimizer = torch.optim.Adam(groups, lr=1.5e-4, amsgrad=True, fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        learner.loss(x, y).loss.backward()
        learner.before_step(optimizer)
        optimizer.step()

    return step


def step_of_plain_torch() -> Callable[[], float]:
    """CPU seconds of the plain step as torch does it by default: its own Adam, its own handling of memory."""
    step = stepper("sft", 1, fused=False)

    def measure() -> float:
        began = time.process_time()
        step()
        return time.process_time() - began

    return measure


def encoder_stepper(rectified: bool, fused: bool) -> Callable[[], None]:
    """A step of the image encoder by itself, without decoders and attributes: all that the rectification changes."""
    torch.manual_seed(0)
    encoder: torch.nn.Module = VisualEncoder()
    params = list(encoder.parameters())
    if rectified:
        encoder = model = rkr.rectify(encoder, rank=16)
        model.add_task("first")
        model.add_task("second")
        params = model.task_parameters()
    x = torch.rand(BATCH, 2048)
    optimizer = torch.optim.Adam(params, lr=1.5e-4, amsgrad=True, fused=fused)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        mu, logvar = encoder(x)
        (mu.square().sum() + logvar.square().sum()).backward()
        optimizer.step()

    return step


def run(network: str = "") -> None:
    if network.lower() not in "cada-vae":
        return
    warnings.simplefilter("ignore")
    keep_freed_memory()
    print("training step of CADA-VAE 2048-1560-64, attributes of CUB, batch 50")
    plain, ours = "plain torch", "the engine's plain step"
    cases: dict[str, Callable[[], object]] = {
        plain: in_its_own_process(step_of_plain_torch),
        ours: stepper("sft", 1),
        "rkr": stepper("rkr", 2),
        "all but the image encoder": stepper("sft", 1, encoder=False),
        "rkr, decoder frozen": stepper("rkr", 2, decoder="frozen"),
        "l2": stepper("l2", 2),
        "lzsl": stepper("lzsl", 2),
    }
    times = interleaved(cases, ROUNDS)
    for reference in (plain, ours):
        parts = [f"{name} {times[name] / times[reference]:.2f}" for name in cases]
        print(f"relative to {reference}:  {'  '.join(parts)}  ({1e3 * times[reference]:.1f} ms)", flush=True)
    print(f"bar: rkr at most {BAR} of {plain}", flush=True)
    for adam, fused in (("torch's default Adam", False), ("fused Adam", True)):
        alone = interleaved({kind: encoder_stepper(kind == "rkr", fused) for kind in ("plain", "rkr")}, ROUNDS)
        share = alone["rkr"] / alone["plain"]
        print(f"the image encoder alone, {adam}: rkr {share:.2f} of plain ({1e3 * alone['plain']:.1f} ms)", flush=True)

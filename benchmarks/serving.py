"""Serving: switching, rebuilding, loading, batches with several tasks, merged inference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleaved
from steps import SETTINGS, Setting, batch, lora_model, plain
from torch import Tensor, nn

import rkr

TASKS = 8


def trained_like(model: rkr.RectifiedModel) -> None:
    """Random RM and F, as if trained: with RM = 0 a merge would be nothing but a copy."""
    with torch.no_grad():
        for name, p in model.named_task_parameters().items():
            if name.endswith(".rm"):
                p.normal_(std=0.01)
            elif name.endswith(".f"):
                p.normal_(1.0, 0.1)


def served(setting: Setting, cl: bool, tasks: int = TASKS) -> rkr.RectifiedModel:
    model = rkr.rectify(plain(setting, cl), rank=setting.rank, head=setting.head)
    for t in range(tasks):
        model.add_task(f"t{t}", 10 if setting.head else None)
        trained_like(model)
    return model.eval()


def served_lora(setting: Setting, cl: bool, tasks: int = TASKS) -> nn.Module:
    model = lora_model(setting, cl)
    config = model.peft_config["default"]
    for t in range(tasks):
        model.add_adapter(f"t{t}", config)
    if cl:
        model = model.to(memory_format=torch.channels_last)
    return model.eval()


def switching(setting: Setting, folder: Path) -> None:
    """Switch, rebuild, load: ours against peft's, and against a plain copy of the weights."""
    ours, theirs = served(setting, True), served_lora(setting, True)
    x = batch(setting, True)[:1]
    turn = {"n": 0}

    def next_name() -> str:
        turn["n"] += 1
        return f"t{turn['n'] % TASKS}"

    with torch.no_grad():
        for t in range(TASKS):
            ours.set_task(f"t{t}")
            ours(x)

    sites = [s for s in ours.weight_layers() if s.rank is not None]
    weights = [s.weight for s in sites]

    def copy_weights() -> None:
        for w in weights:
            w.clone()

    def rebuild() -> None:
        from rkr.core import kernels

        task = ours.tasks["t0"]
        with torch.no_grad():
            for site in sites:
                kernels.merge(site.weight, *site.factors(task))

    def merge_cycle() -> None:
        theirs.set_adapter(next_name())
        theirs.merge_adapter()
        theirs.unmerge_adapter()

    path = folder / "task.safetensors"
    ours.save_task("t0", path)
    theirs.save_pretrained(str(folder / "lora"), selected_adapters=["t0"])

    def load_lora() -> None:
        theirs.load_adapter(str(folder / "lora" / "t0"), adapter_name="t0")

    times = interleaved(
        {
            "switch": lambda: ours.set_task(next_name()),
            "peft switch": lambda: theirs.set_adapter(next_name()),
            "copy of the weights": copy_weights,
            "rebuild": rebuild,
            "peft merge+unmerge": merge_cycle,
            "load": lambda: ours.load_task(path),
            "peft load": load_lora,
        },
        rounds=11,
    )
    row = "  ".join(f"{name} {t * 1e3:.3f} ms" for name, t in times.items())
    print(f"{setting.name:10} {row}  rebuild/copy {times['rebuild'] / times['copy of the weights']:.2f}", flush=True)


def mixed(setting: Setting, cl: bool) -> None:
    """A batch of 64 samples from 8 tasks, relative to the plain network."""
    ours = served(setting, cl)
    network = plain(setting, cl).eval()
    x = batch(setting, cl)
    x = x.repeat(-(-64 // len(x)), *[1] * (x.dim() - 1))[:64].contiguous(
        memory_format=torch.channels_last if cl and x.dim() == 4 else torch.contiguous_format
    )
    names = [f"t{i % TASKS}" for i in range(64)]
    theirs = served_lora(setting, cl)
    merged = ours.merged("t0").eval()
    ours.set_task("t0")

    def no_grad(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return torch.no_grad()(run)

    cases = {
        "plain": no_grad(lambda: network(x)),
        "merged": no_grad(lambda: merged(x)),
        "one task": no_grad(lambda: ours(x)),
        "mixed": no_grad(lambda: ours(x, tasks=names)),
        "peft mixed": no_grad(lambda: theirs(x, adapter_names=names)),
    }
    times = interleaved(cases, rounds=15 if setting.name == "ResNet-18" else 31)
    row = "  ".join(f"{name} {t / times['plain']:.2f}" for name, t in times.items())
    layout = "channels_last" if cl else "contiguous"
    print(f"{setting.name:10} {layout:13} {row}  (plain {times['plain'] * 1e3:.1f} ms)", flush=True)


def run(only: str = "") -> None:
    """Print all of it."""
    chosen = [s for s in SETTINGS if only in s.name]
    print(f"switching between {TASKS} tasks, rebuilding merged weights, loading a task file")
    with tempfile.TemporaryDirectory() as folder:
        for setting in chosen:
            switching(setting, Path(folder) / setting.name)
    print(f"inference on 64 samples, mixed = from {TASKS} tasks; relative to the plain network")
    for setting in chosen:
        for cl in (False, True) if setting.head else (False,):
            mixed(setting, cl)

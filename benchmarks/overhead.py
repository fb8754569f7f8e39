"""What a step costs besides arithmetic: small batches, single images, numbers of calls, torch.compile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from measure import interleaved
from steps import Setting, batch, cases, plain, stepper
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rkr
from rkr.experiment.processes import keep_freed_memory

SETTINGS = (
    Setting("ResNet-32", lambda: rkr.networks.resnet32(10), "fc", 4),
    Setting("LeNet", lambda: rkr.networks.lenet(10), "fc", 4),
    Setting("small_cnn", lambda: rkr.networks.small_cnn(10), "fc", 4),
)
COUNTED = (*SETTINGS[:2], Setting("ResNet-18", lambda: rkr.networks.resnet18(10, width=16), "fc", 4))
# Calls that compute nothing: views, memory.
FREE = {
    *("view", "_unsafe_view", "detach", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "unbind", "alias", "as_strided", "empty", "empty_like", "new_empty"),
}


class Calls(TorchDispatchMode):
    """Counts the calls that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def rectified(setting: Setting, cl: bool, kernels: str = "auto") -> rkr.RectifiedModel:
    model = rkr.rectify(plain(setting, cl), head=setting.head, kernels=kernels)
    for name in ("first", "second"):
        model.add_task(name, 10)
    return model


def training(setting: Setting, cl: bool) -> None:
    x, full, model = batch(setting, cl), plain(setting, cl), rectified(setting, cl)
    found = {
        "full": stepper(full, list(full.parameters()), x, setting),
        "rkr": stepper(model, list(model.task_parameters()), x, setting),
        **cases(setting, cl, "floor"),
    }
    times = interleaved(found, 25, inner=3 if setting.name == "ResNet-32" else 20)
    one = x[:1].clone(memory_format=torch.preserve_format)
    network, others = plain(setting, cl).eval(), cycle([plain(setting, cl).eval() for _ in range(2)])
    model.eval()

    def switch() -> None:
        model.set_task("first" if model.task == "second" else "second")
        model(one)

    with torch.no_grad():
        answers: dict[str, Callable[[], object]] = {
            "plain": lambda: network(one),
            "rkr": lambda: model(one),
            "switch": switch,
            "in turn": lambda: next(others)(one),
        }
        single = interleaved(answers, 41, inner=10 if setting.name == "ResNet-32" else 100)
    layout = "channels_last" if cl else "contiguous"
    more = [(single[a] - single[b]) * 1e3 for a, b in (("switch", "rkr"), ("in turn", "plain"))]
    print(
        f"{setting.name:10} {layout:13} step {times['rkr'] / times['full']:.2f} x full (floor"
        f" {times['floor'] / times['full']:.2f}, {times['full'] * 1e3:.2f} ms)"
        f"  one image {single['rkr'] / single['plain']:.2f} x plain ({single['plain'] * 1e3:.3f} ms)"
        f"  switching {more[0]:.3f} ms more (two plain networks in turn {more[1]:.3f})",
        flush=True,
    )


def calls(setting: Setting) -> None:
    x, labels = batch(setting, False), torch.arange(setting.batch)

    def counted(model: nn.Module) -> int:
        F.cross_entropy(model(x), labels).backward()
        model.zero_grad()
        with Calls() as found:
            F.cross_entropy(model(x), labels).backward()
        return found.found.total()

    base = counted(plain(setting, False))
    ways = {way: counted(rectified(setting, False, way)) for way in ("grouped", "factored", "formula")}
    row = "  ".join(f"{way} {n} ({n / base:.2f})" for way, n in ways.items())
    print(f"{setting.name:10} plain {base}  {row}", flush=True)


def compiled(setting: Setting) -> None:
    x = batch(setting, False)
    eager, traced = rectified(setting, False), rectified(setting, False)
    calls: Any = torch.compile(traced, fullgraph=True)
    both = {
        "eager": stepper(eager, list(eager.task_parameters()), x, setting),
        "compiled": stepper(calls, list(traced.task_parameters()), x, setting),
    }
    step = interleaved(both, 9)
    eager.eval()
    traced.eval()
    with torch.no_grad():
        answer = interleaved({"eager": lambda: eager(x), "compiled": lambda: calls(x)}, 9)
    print(
        f"{setting.name:10} step {step['compiled'] / step['eager']:.2f} x eager ({step['eager'] * 1e3:.2f} ms)"
        f"  answer {answer['compiled'] / answer['eager']:.2f} x eager ({answer['eager'] * 1e3:.2f} ms)",
        flush=True,
    )


def run(only: str = "") -> None:
    """Print all of it."""
    keep_freed_memory()
    print("small batches: a training step with 4 samples, one image, switching and then answering")
    for setting in SETTINGS:
        for cl in (False, True):
            if only in setting.name:
                training(setting, cl)
    print("calls that compute, forward and backward pass, relative to the plain network")
    for setting in COUNTED:
        if only in setting.name:
            calls(setting)
    print("torch.compile(model, fullgraph=True), 4 samples")
    for setting in COUNTED:
        if only in setting.name:
            compiled(setting)

"""What methods do once a task: the Fisher information and herding, against a Python loop over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from measure import interleaved
from torch import Tensor, nn

from rkr.experiment.processes import keep_freed_memory
from rkr.methods.shared.fisher import fisher
from rkr.methods.shared.memory import herd
from rkr.networks import lenet, small_cnn

SAMPLES, BATCH = 5000, 128  # of a task of CIFAR-100
LOOPED = 256  # of them that the loop takes, whose time is a multiple of theirs
ROUNDS = 3
BAR = 10  # times as fast as the loop, at least


def loop(network: nn.Module, parameters: Sequence[nn.Parameter], x: Tensor, y: Tensor) -> list[Tensor]:
    """The empirical Fisher information, one sample at a time."""
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        log_p = network(x[i : i + 1]).log_softmax(1)[0, y[i]]
        for total, grad in zip(sums, torch.autograd.grad(log_p, parameters), strict=True):
            total.add_(grad.square())
    return [total / len(x) for total in sums]


def herd_loop(features: Tensor, count: int) -> list[int]:
    """Herding with a look at every sample for each choice."""
    mean, total, chosen = features.mean(0), torch.zeros_like(features[0]), list[int]()
    for k in range(1, count + 1):
        left = [i for i in range(len(features)) if i not in chosen]
        best = min(left, key=lambda i: float(((total + features[i]) / k - mean).square().sum()))
        chosen.append(best)
        total = total + features[best]
    return chosen


def run(network: str = "") -> None:
    torch.manual_seed(0)
    keep_freed_memory()
    sizes: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "LeNet": (lambda: lenet(10), (3, 32, 32)),
        "small CNN": (small_cnn, (1, 8, 8)),
    }
    print(f"Fisher information of {SAMPLES:,} samples and herding, against a Python loop over samples")
    for name, (make, shape) in sizes.items():
        if network.lower() in name.lower():
            _compare(name, make(), torch.randn(SAMPLES, *shape), torch.randint(10, (SAMPLES,)))
    if network:
        return
    features = torch.nn.functional.normalize(torch.randn(500, 500), dim=1)
    assert herd(features, 20).tolist() == herd_loop(features, 20)
    cases = {"loop": lambda: herd_loop(features, 20), "batched": lambda: herd(features, 20)}
    _print("herding, 20 of 500 samples of 500 features", interleaved(cases, ROUNDS))


def _compare(name: str, network: nn.Module, x: Tensor, y: Tensor) -> None:
    network = network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=torch.channels_last)
    layers = [layer for layer in network.children() if not isinstance(layer, nn.BatchNorm2d)][:-1]  # as EWC does
    parameters = [p for layer in layers for p in layer.parameters()]
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    few = [(x[:LOOPED], y[:LOOPED])]
    found = fisher(network, parameters, lambda: iter(few), 0, "empirical")
    for a, b in zip(found, loop(network, parameters, *few[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-7)
    cases = {
        "loop": lambda: loop(network, parameters, *few[0]),
        "batched": lambda: fisher(network, parameters, lambda: iter(batches), 0, "empirical"),
        "plain": lambda: [
            torch.autograd.grad(nn.functional.cross_entropy(network(a), b), parameters) for a, b in batches
        ],
    }
    times = interleaved(cases, ROUNDS)
    times["loop"] *= len(x) / LOOPED
    _print(f"Fisher, {name}, {sum(p.numel() for p in parameters):,} parameters", times)


def _print(what: str, times: dict[str, float]) -> None:
    ratio, plain = times["loop"] / times["batched"], times.get("plain")
    most = "" if plain is None else f"; their mean gradient, which is the least work: {times['loop'] / plain:.1f} x"
    print(f"{what}: {ratio:.1f} x (bar {BAR} x{most}), {1e3 * times['batched']:.1f} ms", flush=True)

"""The diagonal of the Fisher information: how much the answers of a network depend on each of its parameters.

For a sample x with label c it is the square of ∂ log p(c | x) / ∂θ. Four estimators of its mean over samples are in
use, which give different numbers; papers and codes often do not say which one they mean:

"exact"      the expectation over labels that the network itself predicts: all classes, each with its probability
"sampled"    one label drawn from the network's prediction for each sample: the same in the mean, at one pass
"empirical"  the label of the data
"batched"    the square of the mean gradient of a batch, with labels of the data: no Fisher information at all, and
             smaller by about the size of the batch, but what several public implementations compute
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap

from rkr.errors import UsageError
from rkr.methods.learner import ReadSamples, evaluating

ESTIMATORS = ("exact", "sampled", "empirical", "batched")
AT_ONCE = 128 * 3072  # numbers of samples that go through the network at once: 128 images of CIFAR
FEWEST = 32  # samples that do, however large
IN_CACHE = 1 << 20  # numbers that a convolution may spread its inputs into
TRIED = 4  # samples on which fast ways are held against a loop over samples


def fisher(
    network: nn.Module,
    parameters: Sequence[nn.Parameter],
    samples: ReadSamples,
    start: int,
    estimator: str = "sampled",
    limit: int | None = None,
) -> list[Tensor]:
    """The mean over samples, for each parameter. The network computes in evaluation mode, so no statistics move.

    Parameters that take no gradient have none.

    Args:
        network: Gives logits over the classes of a task.
        parameters: Of the network.
        samples: A pass over the task's samples.
        start: Where the task's labels begin.
        estimator: See above.
        limit: Only so many samples, drawn at random: a pass may go class by class.
    """
    if estimator not in ESTIMATORS:
        raise UsageError(f"fisher must be one of {', '.join(ESTIMATORS)}, not {estimator!r}")
    sums = [torch.zeros_like(p) for p in parameters]
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    own, of_own = [parameters[i] for i in trained], [sums[i] for i in trained]
    seen, ways = 0, None
    with evaluating(network):
        for x, y in samples() if limit is None else _drawn(samples, limit):
            labels = y - start
            if estimator == "batched":
                _add_batched(network, own, x, labels, of_own)
            else:
                ways = ways or _find_ways(network, own, x[:TRIED])
                some = max(FEWEST, AT_ONCE // x[0].numel())
                for part, each in zip(x.split(some), labels.split(some), strict=True):
                    _add(network, own, ways, part, each, estimator, of_own)
            seen += len(x)
    return [total / max(seen, 1) for total in sums]


def _drawn(samples: ReadSamples, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    chosen = torch.randperm(sum(len(y) for _, y in samples()))[:limit].sort().values
    first = 0
    for x, y in samples():
        rows = chosen[(chosen >= first) & (chosen < first + len(y))].to(y.device) - first
        first += len(y)
        if len(rows):
            yield x[rows], y[rows]


def _add_batched(
    network: nn.Module, parameters: Sequence[nn.Parameter], x: Tensor, y: Tensor, sums: list[Tensor]
) -> None:
    loss = F.cross_entropy(network(x), y)
    grads = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    for total, each in zip(sums, grads, strict=True):
        if each is not None:
            total.add_(each.square(), alpha=len(x))


@dataclass(frozen=True)
class Ways:
    """How the squares of each parameter are computed, the fastest first."""

    layers: Sequence[nn.Module]  # whose parameters are by `PerSampleSquares`
    vectorised: Sequence[int]  # parameters that torch.func takes over all samples
    one_by_one: Sequence[int]


def _find_ways(network: nn.Module, parameters: Sequence[nn.Parameter], x: Tensor) -> Ways:
    """For each parameter the fastest way which, on a few samples, gives what a loop over them gives.

    What a layer does to its input is known by its kind, but not what the network does with the layer: it may call it
    twice, or compute with its weights and pass it by, as attention does.
    """
    with torch.no_grad():
        logits = network(x)
    # A sum of these that vanishes for no sample, however certain it is: log p's own gradient would, and show nothing.
    drawn = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))
    factors = [(drawn - drawn.mean(1, keepdim=True)).to(logits)]
    everything = list(range(len(parameters)))
    index = {id(p): i for i, p in enumerate(parameters)}
    expected, found, others = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
    _add_one_by_one(network, parameters, everything, x, factors, expected)

    def right(values: Sequence[Tensor], i: int) -> bool:
        return bool((values[i] - expected[i]).abs().max() <= 1e-3 * expected[i].abs().max())

    def shown(values: Sequence[Tensor], i: int) -> bool:
        return right(values, i) and bool(expected[i].any())

    layers = _known_layers(network, index)
    with PerSampleSquares(parameters, layers) as squares:
        total = (F.log_softmax(network(x), 1) * factors[0]).sum()
        layers = squares.forget_all_but_plain_calls(len(x))
        squares.add(total, len(x), found)
    layers = [
        layer for layer in layers if all(shown(found, index[id(p)]) for p in layer.parameters() if id(p) in index)
    ]
    known = {index[id(p)] for layer in layers for p in layer.parameters() if id(p) in index}
    left = [i for i in everything if i not in known]
    try:
        _add_vectorised(network, parameters, left, x, factors, others)
        vectorised = [i for i in left if right(others, i)]
    except (RuntimeError, ValueError):  # torch.func does not know all that a network may do
        vectorised = []
    one_by_one = [i for i in left if i not in vectorised]
    if one_by_one:
        names = {id(p): name for name, p in network.named_parameters()}
        said = ", ".join(names.get(id(parameters[i]), "?") for i in one_by_one[:3])
        warnings.warn(f"the Fisher information of {said} ... is computed sample by sample, which is slow", stacklevel=4)
    return Ways(layers, vectorised, one_by_one)


def _known_layers(network: nn.Module, index: dict[int, int]) -> list[nn.Module]:
    """Layers of a known kind that hold some of the parameters, and hold them alone."""
    users = Counter(id(p) for layer in network.modules() for p in layer.parameters(recurse=False))
    found = []
    for layer in network.modules():
        own = [id(p) for p in layer.parameters(recurse=False) if id(p) in index]
        if own and _knows(layer) and all(users[p] == 1 for p in own):  # a sum of two squares is no square of a sum
            found.append(layer)
    return found


def _add(
    network: nn.Module,
    parameters: Sequence[nn.Parameter],
    ways: Ways,
    x: Tensor,
    labels: Tensor,
    estimator: str,
    sums: list[Tensor],
) -> None:
    """Add the sum over some samples."""
    with PerSampleSquares(parameters, ways.layers) as squares:
        log_p = F.log_softmax(network(x), 1)  # (B, C)
        factors = _factors(log_p.detach().exp(), labels, estimator)
        for k, each in enumerate(factors if ways.layers else ()):
            squares.add((log_p * each).sum(), len(x), sums, keep=k < len(factors) - 1)
    _add_vectorised(network, parameters, ways.vectorised, x, factors, sums)
    _add_one_by_one(network, parameters, ways.one_by_one, x, factors, sums)


def _factors(p: Tensor, labels: Tensor, estimator: str) -> list[Tensor]:
    """Factors f of which a sample's part is the sum of (∂ Σ_c f_c log p_c)², each (B, C)."""
    classes = p.shape[1]
    if estimator == "exact":  # a class after the other, with the root of its probability
        return [p.sqrt() * F.one_hot(torch.tensor(c, device=p.device), classes) for c in range(classes)]
    if estimator == "sampled":
        labels = torch.multinomial(p, 1)[:, 0]
    return [F.one_hot(labels, classes).to(p)]


def _add_vectorised(
    network: nn.Module,
    parameters: Sequence[nn.Parameter],
    chosen: Sequence[int],
    x: Tensor,
    factors: Sequence[Tensor],
    sums: list[Tensor],
) -> None:
    """The squares of some parameters, by torch.func."""
    names = {id(p): name for name, p in network.named_parameters()}
    values = {names[id(parameters[i])]: parameters[i].detach() for i in chosen}
    if not values:
        return

    def total(own: dict[str, Tensor], sample: Tensor, factor: Tensor) -> Tensor:
        return (F.log_softmax(functional_call(network, own, (sample[None],)), 1)[0] * factor).sum()

    for factor in factors:
        grads = vmap(grad(total), in_dims=(None, 0, 0))(values, x, factor)  # each (B, *shape)
        for i, each in zip(chosen, grads.values(), strict=True):
            sums[i].add_(each.square().sum(0))


def _add_one_by_one(
    network: nn.Module,
    parameters: Sequence[nn.Parameter],
    chosen: Sequence[int],
    x: Tensor,
    factors: Sequence[Tensor],
    sums: list[Tensor],
) -> None:
    """The squares of some parameters, for any network."""
    own = [parameters[i] for i in chosen]
    for row in range(len(x) if own else 0):
        log_p = F.log_softmax(network(x[row : row + 1]), 1)[0]
        for k, factor in enumerate(factors):
            total = (log_p * factor[row]).sum()
            grads = torch.autograd.grad(total, own, retain_graph=k < len(factors) - 1, allow_unused=True)
            for i, each in zip(chosen, grads, strict=True):
                if each is not None:
                    sums[i].add_(each.square())


class PerSampleSquares:
    """Squares of the gradients of every sample, summed over a batch, in one backward pass.

    While it is entered, layers remember what goes into them; `add` takes the gradient of each layer's output, from
    which the gradient of each sample's weights is a product: of a linear layer g xᵀ, whose square is g² (x²)ᵀ and needs
    no gradient of a sample in memory.

    Args:
        parameters: Whose squares are wanted.
        layers: Linear layers, plain convolutions and batch normalisation that hold some of them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layers: Sequence[nn.Module]) -> None:
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self._layers = layers
        self._calls: list[tuple[nn.Module, Tensor, GradientEdge]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> PerSampleSquares:
        def remember(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            if output.requires_grad:
                # Not the output itself: what comes next may write into it.
                self._calls.append((layer, x.detach(), get_gradient_edge(output)))

        self._handles = [layer.register_forward_hook(remember, with_kwargs=True) for layer in self._layers]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._calls.clear()

    def forget_all_but_plain_calls(self, batch: int) -> list[nn.Module]:
        """The layers that were called once, with all samples side by side; calls of others are not remembered."""
        times = Counter(id(layer) for layer, _, _ in self._calls)
        self._calls = [c for c in self._calls if times[id(c[0])] == 1 and _samples(c[0], c[1]) == batch]
        return [layer for layer, _, _ in self._calls]

    def add(self, total: Tensor, batch: int, sums: list[Tensor], keep: bool = False) -> None:
        """Add the squares of the gradients of a sum over `batch` samples."""
        if not self._calls:
            return
        grads = torch.autograd.grad(total, [edge for _, _, edge in self._calls], retain_graph=keep, allow_unused=True)
        if len({id(layer) for layer, _, _ in self._calls}) < len(self._calls):
            raise UsageError("a layer is used twice in some passes only: its weights' Fisher information is not known")
        for (layer, x, _), g in zip(self._calls, grads, strict=True):
            if _samples(layer, x) != batch:
                raise UsageError("a layer takes samples apart in some passes only: the Fisher information is not known")
            if g is not None:
                for p, square in _squares(layer, x, g):
                    if id(p) in self._index:
                        sums[self._index[id(p)]].add_(square)


def _knows(layer: nn.Module) -> bool:
    """Whether its squares are known; subclasses may compute something else."""
    if isinstance(layer, nn.Conv2d):
        return type(layer).forward is nn.Conv2d.forward and layer.groups == 1 and layer.padding_mode == "zeros"
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
        return layer.running_mean is not None
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def _samples(layer: nn.Module, x: Tensor) -> int | None:
    """How many samples go into a layer at once; None if they do not have a dimension of their own."""
    own = 3 if isinstance(layer, nn.Conv2d) else 1  # dimensions of a sample, at least
    return len(x) if x.dim() > own else None


def _squares(layer: nn.Module, x: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each parameter of a layer, Σ_b (∂/∂θ of sample b)², from its input and the gradient of its output."""
    found: list[tuple[Tensor, Tensor]] = []
    if isinstance(layer, nn.Linear):
        if x.dim() == 2:
            found.append((layer.weight, g.square().T @ x.square()))  # (O, I)
            of_bias = g
        else:  # (B, ..., I): a sample's gradient is a sum over positions
            of_weight = torch.einsum("bpo,bpi->boi", g.flatten(1, -2), x.flatten(1, -2))
            found.append((layer.weight, of_weight.square().sum(0)))
            of_bias = g.flatten(1, -2).sum(1)
        if layer.bias is not None:
            found.append((layer.bias, of_bias.square().sum(0)))
    elif isinstance(layer, nn.Conv2d):
        found.append((layer.weight, _squares_of_kernel(layer, x, g)))
        if layer.bias is not None:
            found.append((layer.bias, g.sum((2, 3)).square().sum(0)))
    else:
        assert isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
        assert layer.running_mean is not None
        assert layer.running_var is not None
        shape = (1, -1) + (1,) * (x.dim() - 2)
        spread = (layer.running_var + layer.eps).sqrt()
        normalised = (x - layer.running_mean.view(shape)) / spread.view(shape)
        positions = tuple(range(2, x.dim()))
        of_weight, of_bias = g * normalised, g
        if positions:
            of_weight, of_bias = of_weight.sum(positions), of_bias.sum(positions)
        found += [(layer.weight, of_weight.square().sum(0)), (layer.bias, of_bias.square().sum(0))]
    return found


def _squares_of_kernel(layer: nn.Conv2d, x: Tensor, g: Tensor) -> Tensor:
    """Σ_b of the squared gradient of a kernel, (O, I, h, w).

    Inputs are spread over a row of the kernel only, (B, H, W', w I) with channels last; what the rows of the kernel see
    are slices of that. To spread them over the whole kernel would write `h` times as much.
    """
    (high, wide), step, height = layer.kernel_size, layer.stride[0], g.shape[2]
    square = layer.weight.new_zeros(high, layer.out_channels, wide * layer.in_channels)
    some = max(1, IN_CACHE // (x.shape[2] * g.shape[3] * square.shape[2]))  # samples at a time
    for own, of_output in zip(x.split(some), g.split(some), strict=True):
        rows = _spread_over_rows(layer, own)
        outputs = of_output.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)  # (B, O, P)
        for h, into in enumerate(square):
            first = h * layer.dilation[0]
            seen = rows[:, first : first + step * (height - 1) + 1 : step].flatten(1, 2)  # (B, P, w I)
            into += (outputs @ seen).square_().sum(0)
    return square.unflatten(2, (wide, layer.in_channels)).permute(1, 3, 0, 2)


def _spread_over_rows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What a row of the kernel sees at each position of a row of the output, (B, H, W', w I)."""
    x = F.pad(x.permute(0, 2, 3, 1), [0, 0, *_padding(layer)]).contiguous()
    apart = layer.dilation[1]
    x = x.unfold(2, apart * (layer.kernel_size[1] - 1) + 1, layer.stride[1])[..., ::apart]  # (B, H, W', I, w)
    return x.transpose(3, 4).flatten(3).contiguous()


def _padding(layer: nn.Conv2d) -> list[int]:
    """Left, right, top, bottom."""
    if isinstance(layer.padding, str):
        if layer.padding == "valid":
            return [0, 0, 0, 0]
        whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [whole[1] // 2, whole[1] - whole[1] // 2, whole[0] // 2, whole[0] - whole[0] // 2]
    return [layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]]

"""How a budget of numbers becomes a rank for each layer.

A task may cost so many numbers: LM, RM, F and the affine parameters of normalisation layers. F and the affine
parameters are the same whatever the ranks, so the rest is for LM and RM. It is spent rank by rank, in three steps:

1. One rank for each layer, the cheapest layers first.
2. More ranks for convolutions. The next rank goes to the one on which least would then be spent.
3. More ranks for the other layers, in the same way.

What does not fit what is left is passed over. LM and RM of a layer never have more numbers than its weight. Equals go
to the layer that comes first in the network.

The gradient of a fully connected layer at the start of a task has nearly all of its energy in one direction, and that
of a convolution is spread over many: hence the order of the steps. Within a step layers get about the same number of
numbers, so small layers get more ranks than large ones. If the k-th rank of a layer is worth 1/k, ranks are taken in
order of worth per number, and no allotment of the same cost is worth more.

Only shapes count: the allotment is known before anything is trained, the same on every machine, and no task changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from math import prod
from typing import TYPE_CHECKING

from rkr.core.adapters import Adapter, NormLayer, TargetLayer
from rkr.core.rectification import factor_shapes
from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.core.options import Options


def allot(costs: Sequence[int], most: Sequence[int], convolves: Sequence[bool], budget: int) -> list[int]:
    """The rank of each layer.

    Args:
        costs: Numbers in LM and RM for each rank of a layer.
        most: The highest rank of each layer.
        convolves: Whether a layer is a convolution.
        budget: Numbers to spend.
    """
    ranks, left, layers = [0] * len(costs), budget, range(len(costs))
    for top in ([1] * len(costs), [m if c else 1 for m, c in zip(most, convolves, strict=True)], most):
        while fitting := [i for i in layers if ranks[i] < min(top[i], most[i]) and costs[i] <= left]:
            chosen = min(fitting, key=lambda i: (ranks[i] + 1) * costs[i])  # the first of equals
            ranks[chosen] += 1
            left -= costs[chosen]
    return ranks


def with_ranks(options: Options, layers: Sequence[TargetLayer], network: int) -> Options:
    """The options with a rank for each layer, by the budget. Layers that `ranks` names keep the rank that it gives.

    Args:
        options: As the user gave them, or as `with_ranks` returned them: then they stay as they are.
        layers: The target layers for these options.
        network: Parameters of the network.
    """
    if options.budget is None:
        return options
    adapters = [layer for layer in layers if isinstance(layer, Adapter) and options.rectifies(layer.family)]
    open_ = [layer for layer in adapters if options.named_rank(layer.path) is None]
    if not open_:
        return options
    fixed = _apart_from_ranks(layers)
    if options.budget == "paper":
        budget = fixed + options.rank * sum(map(_cost, adapters))
    else:
        budget = int(options.budget if isinstance(options.budget, int) else options.budget * network)
    left = budget - fixed - sum((a.rank or 0) * _cost(a) for a in adapters if a not in open_)
    if left < 0:
        raise UsageError(
            f"budget: {budget:,} numbers a task are fewer than the {budget - left:,} that scaling factors, "
            "normalisation and the layers with ranks of their own need: give more, or scale fewer layers"
        )
    costs = [_cost(layer) for layer in open_]
    most = [prod(layer.shape) // cost for layer, cost in zip(open_, costs, strict=True)]
    found = allot(costs, most, [layer.family == "conv" for layer in open_], left)
    given = {escape(layer.path): rank for layer, rank in zip(open_, found, strict=True)}
    return options.with_changes(ranks={**options.ranks, **given})


def _cost(layer: Adapter) -> int:
    """Numbers in LM and RM for each rank."""
    return sum(map(prod, factor_shapes(layer.shape, 1)))


def _apart_from_ranks(layers: Sequence[TargetLayer]) -> int:
    """Numbers that a task has besides LM, RM, statistics and head."""
    found = 0
    for layer in layers:
        if isinstance(layer, NormLayer | Adapter):
            named = ((key.rpartition(".")[2], shape) for key, shape in layer.shapes().items())
            found += sum(prod(s) for name, s in named if layer.cost_group(name) in ("scale", "norm"))
    return found

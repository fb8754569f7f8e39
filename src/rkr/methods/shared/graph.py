"""Analyses of a network's graph, traced symbolically with layers kept whole."""

from __future__ import annotations

from torch import fx, nn

from rkr.core import BATCH_NORMS, CONVS, Tracer
from rkr.errors import UsageError


def traced(network: nn.Module, need: str) -> fx.Graph:
    """The graph of a network, or a UsageError that names who needs it."""
    try:
        return Tracer().trace(network)
    except Exception as error:  # a user's forward may fail in any way on a symbolic input
        raise UsageError(
            f"{need} needs a network whose forward can be traced (torch.fx): this one's cannot ({error})"
        ) from error


def norm_after(network: nn.Module, need: str) -> dict[str, str]:
    """Each convolution or linear layer whose output goes into a BatchNorm and nowhere else, and that BatchNorm."""
    modules = dict(network.named_modules())
    found: dict[str, str] = {}
    for node in traced(network, need).nodes:
        users = list(node.users)
        if node.op == "call_module" and len(users) == 1 and users[0].op == "call_module":
            layer, norm = str(node.target), str(users[0].target)
            if isinstance(modules[layer], (nn.Linear, *CONVS)) and isinstance(modules[norm], BATCH_NORMS):
                found[layer] = norm
    return found

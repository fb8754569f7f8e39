"""What a network's graph tells about it: traced symbolically, torch's own modules kept whole."""

from __future__ import annotations

from torch import fx, nn

from rkr.core.layers import original_class
from rkr.core.sites import BATCH_NORMS, CONVS
from rkr.errors import UsageError

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Tracer(fx.Tracer):
    """Looks into the user's own modules and containers, not into torch's layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, BATCH_NORMS):  # or a subclass, such as the one that normalises over processes
            return True
        return original_class(m).__module__.startswith("torch.nn") and not isinstance(m, _CONTAINERS)


def traced(network: nn.Module, need: str) -> fx.Graph:
    """The graph of a network; a clear word where its forward cannot be traced."""
    try:
        return Tracer().trace(network)
    except Exception as error:  # whatever a user's forward does with a symbolic input
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

"""A proof that a network computes every sample by itself, with the batch in the first dimension throughout.

Only then may one pass compute a batch with several tasks, each layer applying each sample's own factors. The network is
traced symbolically: data-dependent control flow stops the trace, and every recorded operation must be on the lists
below. Anything else counts as not proved, even if it would be correct.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rkr.core.adapters import adapter_for, registered
from rkr.core.adapters.norm import BATCH_NORMS
from rkr.core.exchange import original_class

_ACTIVATIONS = ("relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softplus", "hardswish")
_POOLS = tuple(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3))
_FUNCTIONS = {torch.relu, torch.tanh, torch.sigmoid, *(getattr(F, n) for n in (*_ACTIVATIONS, *_POOLS, "dropout"))}
_METHODS = {"relu", "tanh", "sigmoid", "contiguous"}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul}
_MODULES: tuple[type[nn.Module], ...] = (
    *(
        getattr(nn, name)
        for name in ("ReLU", "ReLU6", "GELU", "SiLU", "ELU", "LeakyReLU", "Tanh", "Sigmoid", "Hardswish")
    ),
    *(getattr(nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)),
    nn.Dropout,
    nn.Identity,
)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Tracer(fx.Tracer):
    """Records layers whole: torch's own, registered ones, and subclasses of BatchNorm.

    It looks into containers, the user's own modules and the user's subclasses of other layers, which may compute
    something else.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        cls, found = original_class(m), registered(m)
        if isinstance(m, BATCH_NORMS) or (found is not None and found[0] is cls):
            return True
        return cls.__module__.startswith("torch.nn") and not isinstance(m, _CONTAINERS)


def is_rowwise(network: nn.Module, head: str | None = None) -> bool:
    """Whether it is proved that each sample's output depends on that sample alone, layer by layer.

    And that the head's output is the network's: rows are padded there, which nothing else may see.
    """
    modules = dict(network.named_modules())
    try:
        graph = Tracer().trace(network)
    except Exception:  # whatever a user's forward does with a symbolic input: then there is no proof
        return False
    heads = [node for node in graph.nodes if node.op == "call_module" and node.target == head]
    last = all(user.op == "output" for node in heads for user in node.users)
    return last and all(_is_rowwise(node, modules) for node in graph.nodes)


def _is_rowwise(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Flatten):
            return module.start_dim >= 1
        kind = adapter_for(module)
        return isinstance(module, _MODULES) or (kind is not None and kind.per_sample)
    tensors = list(node.all_input_nodes)
    if node.target in _FUNCTIONS or (node.op == "call_method" and node.target in _METHODS):
        return len(tensors) == 1
    if node.target in _ARITHMETIC:  # with a number: two tensors might be aligned other than sample by sample
        return len(tensors) == 1
    if node.target in (torch.flatten, "flatten"):
        return _positive(node, "start_dim")
    if node.target in (torch.cat, torch.concat):
        return _positive(node, "dim")
    return False


def _positive(node: fx.Node, name: str) -> bool:
    """Whether the dimension that an operation works on is given, and is not the batch's."""
    value: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get(name)
    return isinstance(value, int) and value >= 1

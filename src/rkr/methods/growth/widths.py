"""Finds which layers of a network share their channels, and so must become wider together.

The network is traced symbolically and run once on an example. A *space* is a set of channels (or units): some layers
output them, normalisation layers act on them, and other layers take them as inputs. Adding two maps merges their
spaces. A shortcut that pads channels with zeros joins two spaces without making them one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rkr.core import BATCH_NORMS, CONVS, original_class
from rkr.errors import UsageError
from rkr.methods.shared.graph import traced


@dataclass
class Space:
    """Channels that belong together.

    Attributes:
        name: The first layer that makes them.
        width: Their number in the plain network.
        makers: Layers whose outputs they are.
        norms: Normalisation layers over them.
        takers: Layers whose inputs they are, and how many inputs of the layer belong to one channel.
    """

    name: str
    width: int
    makers: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    takers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Spaces:
    """The spaces of a network.

    Attributes:
        growing: Spaces that can become wider, in the order of the network.
        out: Space of each layer's or normalisation layer's outputs, for the growing ones.
        into: Space of each layer's inputs, for the growing ones.
        pads: Where a shortcut appends zeros: the graph's node, the space before and the one after.
        graph: The network's graph.
        keeps_zero: Whether a unit without inputs outputs 0.
    """

    growing: tuple[Space, ...]
    out: dict[str, Space]
    into: dict[str, Space]
    pads: dict[fx.Node, tuple[Space, Space]]
    graph: fx.Graph
    keeps_zero: bool


_SAME = {
    *(
        getattr(F, n)
        for n in ("relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "dropout", "hardswish", "softplus")
    ),
    *(getattr(F, f"{kind}_pool{n}d") for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)),
    *(torch.relu, torch.tanh, torch.sigmoid, operator.getitem),
}
_SAME_METHODS = {"relu", "tanh", "sigmoid", "contiguous", "mean", "to", "float", "double", "half", "bfloat16"}
_NOT_ZERO = {F.softplus, torch.sigmoid, "sigmoid", nn.Sigmoid}  # of 0
_JOINING = {operator.add, operator.iadd, operator.mul, torch.add, torch.mul}
_FLATTENING = {torch.flatten, "flatten"}
_SAME_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Hardswish),
    *(nn.Dropout, nn.Dropout2d, nn.Identity),
    *(getattr(nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)),
)


def find_spaces(network: nn.Module, head: str, need: str) -> Spaces:
    """The spaces of a network whose output layer is `head`. UsageError if the network cannot be analysed."""
    shape = getattr(network, "input_shape", None)
    if shape is None:
        raise UsageError(f"{need} needs a network with an attribute `input_shape`, such as (3, 32, 32)")
    graph = traced(network, need)
    finder = _Finder(network, graph, head, need)
    example = next(iter(network.parameters())).new_zeros(2, *shape)
    modes = [(m, m.training) for m in network.modules()]
    network.eval()
    try:
        with torch.no_grad():
            finder.run(example)
    finally:
        for module, mode in modes:
            module.training = mode
    return finder.result()


class _Finder(fx.Interpreter):
    """Runs the graph; notes for each node its space and how many values of its dimension 1 belong to one channel."""

    def __init__(self, network: nn.Module, graph: fx.Graph, head: str, need: str) -> None:
        super().__init__(network, graph=graph)
        self.extra_traceback = False  # messages without the position in the graph
        self._head, self._need = head, need
        self._shapes: dict[fx.Node, torch.Size] = {}
        self._at: dict[fx.Node, tuple[int, int]] = {}  # number of the space, values per channel
        self._parent: list[int] = []  # the space that each one is merged with, or itself
        self._width: list[int] = []
        self._fixed: set[int] = set()
        self._found: list[tuple[str, str, int, int]] = []  # role, layer, space, values of a channel
        self._pads: list[tuple[fx.Node, int, int]] = []
        self._loose: set[fx.Node] = set()  # tensors of the network outside of layers
        self._used: set[int] = set()  # weights of layers that were called

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            return value
        if not isinstance(value, Tensor) or value.dim() < 2:
            if n.all_input_nodes:
                self._refuse(n)
            if isinstance(value, Tensor) and value.numel() > 1:
                self._loose.add(n)
            return value
        self._shapes[n] = value.shape
        self._place(n, value.shape[1])
        return value

    def _place(self, n: fx.Node, size: int) -> None:
        sources = [m for m in n.all_input_nodes if m in self._at]
        if self._loose.intersection(n.all_input_nodes):
            self._refuse(n)
        if n.op == "placeholder":
            self._at[n] = self._new(size), 1
            self._fixed.add(self._at[n][0])
        elif n.op == "call_module":
            self._place_module(n, sources, size)
        elif n.target in _FLATTENING:
            space, values = self._at[sources[0]]
            dims = n.args[1:] or tuple(n.kwargs.values())
            if dims != (1,):
                self._refuse(n)
            self._at[n] = space, values * size // self._shapes[sources[0]][1]
        elif n.target is F.pad and size != self._shapes[sources[0]][1]:
            self._place_pad(n, sources[0], size)
        elif n.target in _JOINING and len(sources) == 2:
            (a, values), (b, others) = (self._at[m] for m in sources)
            if values != others or self._shapes[sources[0]][1] != self._shapes[sources[1]][1]:
                self._refuse(n)
            self._parent[self._root(b)] = self._root(a)
            if {a, b} & self._fixed:
                self._fixed.add(self._root(a))
            self._at[n] = a, values
        else:
            plain = n.target in _SAME or n.target is F.pad or n.target in _JOINING
            plain = plain or (n.op == "call_method" and n.target in _SAME_METHODS)
            plain = plain and len(sources) == 1 and _of_pixels(n, len(self._shapes[sources[0]]))
            if not plain or size != self._shapes[sources[0]][1]:
                self._refuse(n)
            self._at[n] = self._at[sources[0]]

    def _place_module(self, n: fx.Node, sources: list[fx.Node], size: int) -> None:
        path = str(n.target)
        module = self.fetch_attr(path)
        if len(sources) != 1:
            self._refuse(n)
        space, values = self._at[sources[0]]
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in self._used:
            raise UsageError(f"{self._need}: the weight of {path!r} is used twice, and cannot grow")
        self._used.add(id(weight))
        if isinstance(module, (nn.Linear, *CONVS)):
            if getattr(module, "groups", 1) != 1:
                raise UsageError(f"{self._need}: the convolution {path!r} has groups, and cannot grow")
            if weight is None or (size, self._shapes[sources[0]][1]) != tuple(weight.shape[:2]):
                self._refuse(n)  # its channels are not in dimension 1
            self._found.append(("taker", path, space, values))
            made = self._new(size)
            self._found.append(("maker", path, made, 1))
            if path == self._head:
                self._fixed.add(made)
            self._at[n] = made, 1
        elif isinstance(module, nn.modules.instancenorm._InstanceNorm):
            raise UsageError(f"{self._need}: {path!r} is an InstanceNorm, which knows one width only")
        elif isinstance(module, BATCH_NORMS):
            self._found.append(("norm", path, space, values))
            self._at[n] = space, values
        elif isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            self._at[n] = space, values * size // self._shapes[sources[0]][1]
        elif isinstance(module, _SAME_MODULES) and size == self._shapes[sources[0]][1]:
            self._at[n] = space, values
        else:
            self._refuse(n)

    def _place_pad(self, n: fx.Node, source: fx.Node, size: int) -> None:
        pad = list(n.args[1] if len(n.args) > 1 else n.kwargs["pad"])  # type: ignore[arg-type]
        channel = 2 * (len(self._shapes[source]) - 2)  # pairs count from the last dimension
        extra = size - self._shapes[source][1]
        if self._at[source][1] != 1 or any(pad[:channel]) or pad[channel : channel + 2] != [0, extra]:
            self._refuse(n)
        made = self._new(size)
        self._pads.append((n, self._at[source][0], made))
        self._at[n] = made, 1

    def _new(self, width: int) -> int:
        self._parent.append(len(self._parent))
        self._width.append(width)
        return len(self._parent) - 1

    def _root(self, space: int) -> int:
        while self._parent[space] != space:
            space = self._parent[space]
        return space

    def _refuse(self, n: fx.Node) -> None:
        what = n.target if n.op != "call_module" else original_class(self.fetch_attr(str(n.target))).__name__
        raise UsageError(f"{self._need} cannot see which channels go through {what!s} ({n.name}) of this network")

    def result(self) -> Spaces:
        fixed = {self._root(s) for s in self._fixed}
        spaces: dict[int, Space] = {}
        out: dict[str, Space] = {}
        into: dict[str, Space] = {}
        for role, path, number, _ in self._found:
            root = self._root(number)
            if role == "maker" and root not in fixed:
                out[path] = spaces.setdefault(root, Space(path, self._width[root]))
                out[path].makers.append(path)
        for role, path, number, values in self._found:
            space = spaces.get(self._root(number))
            if space is not None and role == "taker":
                into[path] = space
                space.takers[path] = values
            elif space is not None and role == "norm":
                out[path] = space
                space.norms.append(path)
        pads: dict[fx.Node, tuple[Space, Space]] = {}
        for node, before, after in self._pads:
            ends = spaces.get(self._root(before)), spaces.get(self._root(after))
            if ends[0] is None or ends[1] is None:
                self._refuse(node)
            else:
                pads[node] = ends[0], ends[1]
        calls = ((n, self.fetch_attr(str(n.target))) if n.op == "call_module" else (n, None) for n in self.graph.nodes)
        keeps_zero = not any(n.target in _NOT_ZERO or type(module) in _NOT_ZERO for n, module in calls)
        return Spaces(tuple(spaces.values()), out, into, pads, self.graph, keeps_zero)


def _of_pixels(n: fx.Node, dims: int) -> bool:
    """Whether an index or a mean does not affect samples and channels."""
    if n.target is operator.getitem:
        index = n.args[1]
        return isinstance(index, tuple) and index[:2] == (slice(None), slice(None))
    if n.target == "mean":
        over: Any = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
        return all(dim % dims > 1 for dim in ((over,) if isinstance(over, int) else over))
    return True

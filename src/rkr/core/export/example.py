"""An example call of a network: what is traced, and what exported files are compared on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rkr.core.mixed import batch_size, take
from rkr.errors import UsageError


@dataclass(frozen=True)
class Example:
    """Arguments of a network's `forward`.

    Attributes:
        args: By position.
        kwargs: By name, in the order of the signature.
        names: The names of `args`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]

    @classmethod
    def read(cls, network: nn.Module, given: Any) -> Example:
        """From what a user gives: an input, a tuple of arguments, a dictionary of them, or None."""
        if given is None:
            given = _from_shape(network)
        args = () if isinstance(given, Mapping) else tuple(given) if isinstance(given, tuple | list) else (given,)
        kwargs = dict(given) if isinstance(given, Mapping) else {}
        try:
            bound = inspect.signature(network.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"the example does not fit the network's forward: {error}") from None
        positional = [
            p.name
            for p in bound.signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = [*positional[: len(args)], *(f"input{i}" for i in range(len(positional), len(args)))]
        order = [*bound.signature.parameters, *kwargs]
        kwargs = {name: kwargs[name] for name in sorted(kwargs, key=order.index)}
        found = cls(args, kwargs, tuple(names))
        if not any(t.dim() for t in found.tensors()):
            raise UsageError("the example must be a tensor whose first dimension is the batch, or contain one")
        if found.batch == 0:
            raise UsageError("the example must have at least one sample")
        found = found._mapped(lambda t: t.detach().cpu())
        return found.repeated(2) if found.batch == 1 else found  # a batch of 1 is traced as a fixed size

    @property
    def batch(self) -> int:
        """Number of samples."""
        return batch_size(self.args, self.kwargs)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors."""
        return (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor))

    def named(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """All tensors by the names of a graph's inputs, in their order. `extra` are more arguments."""
        names = _names(dict(zip(self.names, self.args, strict=True)), "")
        more = {**_names(self.kwargs, ""), **{name: _names(value, "") or name for name, value in extra.items()}}
        leaves = pytree.tree_leaves((self.args, {**self.kwargs, **extra}))
        paths = pytree.tree_leaves((tuple(names.values()), more))
        return {name: leaf for name, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)}

    def repeated(self, size: int) -> Example:
        """A batch of another size. Samples that come again have noise added, so that no two are alike."""
        batch = self.batch
        index = torch.arange(size) % batch
        random = torch.Generator().manual_seed(0)

        def noisy(t: Tensor) -> Tensor:
            if not t.dim() or t.shape[0] != size or not t.is_floating_point() or size <= batch:
                return t
            noise = torch.randn(t[batch:].shape, generator=random).to(t) * t.float().std().to(t)
            return torch.cat([t[:batch], t[batch:] + noise])

        args, kwargs = take((self.args, self.kwargs), index, batch)
        return Example(args, kwargs, self.names)._mapped(noisy)

    def first(self) -> Example:
        """The first sample alone."""
        args, kwargs = take((self.args, self.kwargs), torch.tensor([0]), self.batch)
        return Example(args, kwargs, self.names)

    def _mapped(self, change: Any) -> Example:
        def mapped(leaf: Any) -> Any:
            return change(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(mapped, (self.args, self.kwargs))
        return Example(args, kwargs, self.names)


def _from_shape(network: nn.Module) -> Tensor:
    shape = getattr(network, "input_shape", None)
    if not isinstance(shape, Sequence):
        raise UsageError("give an example input: export(model, path, example=x)")
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def _names(value: Any, name: str) -> Any:
    """A structure of the same form with a name in the place of each leaf."""
    if isinstance(value, Mapping):
        return {key: _names(item, f"{name}_{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_names(item, f"{name}_{i}") for i, item in enumerate(value)]
    return name

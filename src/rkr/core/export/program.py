"""Tracing by `torch.export`."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from rkr.core.export.example import Example
from rkr.core.mixed import logits_of
from rkr.errors import UsageError

BATCH, CLASSES = Dim("batch"), Dim("classes")
Run = Callable[[Example, Mapping[str, Any]], list[Tensor]]
"""Runs an exported network on an example and more arguments. Returns all tensors of the output."""


class _Call(nn.Module):
    """A call of a network with the arguments of an example, which returns logits if there are any."""

    def __init__(self, network: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.network = network

        def forward(*args: Any, **kwargs: Any) -> Any:
            return logits_of(self.network(*args, **kwargs))

        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


@dataclass(frozen=True)
class Program:
    """A traced network.

    Attributes:
        exported: What `torch.export` returned.
        inputs: Names of the tensors that it takes, in their order.
        outputs: Names of the tensors that it returns.
        dynamic: The sizes that may change, by input.
    """

    exported: ExportedProgram
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dynamic: Mapping[str, Any]

    def run(self, example: Example, extra: Mapping[str, Any]) -> list[Tensor]:
        """The output's tensors."""
        output = self.exported.module()(*example.args, **example.kwargs, **extra)
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def trace(
    network: nn.Module, example: Example, extra: Mapping[str, Any], sizes: Mapping[str, Any], name: str
) -> Program:
    """Trace a network for any batch size.

    Args:
        network: The network in evaluation mode.
        example: What it is called with.
        extra: More arguments by name.
        sizes: Their sizes that may change.
        name: Of an output that is one tensor.
    """
    call = _Call(network, [*example.names, *example.kwargs, *extra]).eval()
    given = {**example.kwargs, **extra}
    with torch.no_grad():
        try:
            output = call(*example.args, **given)
        except UsageError:
            raise
        except Exception as error:  # whatever the user's network raises
            raise UsageError(f"the network does not run on the example: {error}") from error
        own = {**dict(zip(example.names, example.args, strict=True)), **example.kwargs}
        shapes = {**_sizes(own, example.batch), **sizes}
        try:
            exported = torch.export.export(call, example.args, given, dynamic_shapes=shapes)
        except UsageError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(f"torch.export cannot trace this network for any batch size: {reason[0]}") from error
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # names of files on this machine
    return Program(exported, tuple(example.named(extra)), tuple(_output_names(output, name)), shapes)


def _sizes(value: Any, batch: int) -> Any:
    """Which sizes of the tensors in a structure are the batch."""
    if isinstance(value, Tensor):
        return {0: BATCH} if value.dim() and value.shape[0] == batch else None
    if isinstance(value, Mapping):
        return {key: _sizes(item, batch) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([_sizes(item, batch) for item in value])
    return None


def _output_names(output: Any, name: str) -> list[str]:
    if isinstance(output, Tensor):
        return [name]
    if isinstance(output, Mapping):
        return [n for key, value in output.items() for n in _output_names(value, str(key))]
    if isinstance(output, tuple | list):
        return [n for i, value in enumerate(output) for n in _output_names(value, f"{name}_{i}")]
    return []


def pt2_bytes(program: Program, metadata: Mapping[str, Any]) -> bytes:
    """A file for `torch.export.load`."""
    buffer = io.BytesIO()
    torch.export.save(program.exported, buffer, extra_files={"rkr.json": json.dumps(metadata)})
    return buffer.getvalue()

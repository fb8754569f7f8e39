"""ONNX files, and onnxruntime."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rkr.core.export.example import Example
from rkr.core.export.program import Program, Run
from rkr.errors import UsageError


def require(*packages: str) -> None:
    """Raise a clear error unless all packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"export to ONNX needs packages that are not installed ({', '.join(missing)}): pip install 'rkr[onnx]'"
        )


def encode(program: Program, metadata: Mapping[str, Any], optional: frozenset[str]) -> bytes:
    """An ONNX file.

    Args:
        program: The traced network.
        metadata: Stored as JSON under the key "rkr", together with the opset.
        optional: Inputs that get a default value, NaN, because onnxruntime's `LoraAdapter` takes no others.
    """
    import onnx_ir as ir
    import onnx_ir.passes.common as common
    import onnxscript.optimizer

    with _quiet():
        exported = torch.onnx.export(
            program.exported, dynamic_shapes=dict(program.dynamic), dynamo=True, optimize=False, verbose=False
        )
        assert exported is not None
        model = exported.model
        # Most of torch's own optimisation looks for patterns that onnxruntime finds too, and is slow.
        ir.passes.Sequential(common.InlinePass())(model)
        onnxscript.optimizer.fold_constants(model)
        ir.passes.Sequential(
            common.RemoveUnusedNodesPass(),
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common.DeduplicateInitializersPass(),
            common.CommonSubexpressionEliminationPass(),
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
        )(model)
    graph = model.graph
    taken = {*program.inputs, *program.outputs}
    for node in graph.all_nodes():
        node.metadata_props.clear()  # names of files on this machine
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.name = f"{value.name}_" if value.name in taken else value.name
    for values, names in ((graph.inputs, program.inputs), (graph.outputs, program.outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    for value in graph.inputs:
        if value.name in optional:
            shape = [size if isinstance(size, int) else 1 for size in value.shape or ()]
            value.const_value = ir.tensor(torch.full(shape, torch.nan).numpy(), value.dtype, name=value.name)
            graph.register_initializer(value)
    graph.metadata_props.clear()
    graph.doc_string = None
    model.metadata_props.clear()
    model.metadata_props["rkr"] = json.dumps({**metadata, "opset": graph.opset_imports[""]})
    model.producer_name = "rkr"
    try:
        data: bytes = ir.to_proto(model).SerializeToString()
    except ValueError as error:
        raise UsageError(
            f"the ONNX file would be too large ({error}): its format holds up to 2 GB; export to a .pt2 file"
        ) from error
    return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without messages about operators of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def runner(data: bytes) -> Run:
    """Runs an ONNX file by onnxruntime."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of several classes without a common base
        raise UsageError(f"onnxruntime cannot run this network: {error}") from error

    def run(example: Example, extra: Mapping[str, Any]) -> list[Tensor]:
        feed = {name: t.contiguous().numpy() for name, t in example.named(extra).items()}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


def adapter_bytes(tensors: Mapping[str, Tensor], version: int) -> bytes:
    """A file for onnxruntime's `LoraAdapter`."""
    import onnxruntime

    adapter = onnxruntime.AdapterFormat()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(t.contiguous().numpy()) for name, t in tensors.items()}
    adapter.set_parameters(values)
    adapter.set_adapter_version(1)
    adapter.set_model_version(version)
    with tempfile.TemporaryDirectory() as folder:  # it writes to a path only
        path = Path(folder) / "adapter"
        adapter.export_adapter(str(path))
        return path.read_bytes()

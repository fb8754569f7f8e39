"""The state of a run in one safetensors file: nested dicts and lists of tensors and plain values, nothing pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rkr.atomic import write_atomic
from rkr.core.files import FORMAT_VERSION, decode, encode
from rkr.errors import FileError

KIND = "rkr-state"


def save_state(path: Path, state: Any) -> None:
    """Write a state; a kill at any moment leaves the old one or the new."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_take_apart(state, tensors))
    write_atomic(path, encode(tensors, {"format": KIND, "version": FORMAT_VERSION, "tree": tree}))


def load_state(path: Path) -> Any:
    """What `save_state` wrote."""
    meta, tensors = decode(path, KIND)
    try:
        return _put_together(json.loads(meta["tree"]), tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise FileError(f"{path}: its metadata is not complete ({error})") from error


# A tree as JSON: {"t": name} is a tensor, {"d": [[key, value], ...]} a dict whose keys may be numbers, {"l": [...]} a
# list or tuple, anything else itself.


def _take_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"t": name}
    if isinstance(value, dict):
        return {"d": [[key, _take_apart(v, tensors)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"l": [_take_apart(v, tensors) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state cannot hold {type(value).__name__}")


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return tensors[value["t"]]
    if "l" in value:
        return [_put_together(v, tensors) for v in value["l"]]
    return {key: _put_together(v, tensors) for key, v in value["d"]}

"""The state of a run in one safetensors file: nested dicts and lists of tensors and plain values.

Nothing is pickled. Versions: `rkr.versions`. An upgrade function gets and returns metadata and tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from rkr.atomic import write_atomic
from rkr.core.files import decode, encode
from rkr.errors import FileError
from rkr.versions import Format

STATE = Format("rkr-state", 1)


def save_state(path: Path, state: Any) -> None:
    """Write a state atomically: if the process is killed, either the old or the new file is there."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_flatten(state, tensors))
    write_atomic(path, encode(tensors, {**STATE.stated, "tree": tree}))


def load_state(path: Path) -> Any:
    """Read what `save_state` wrote."""
    meta, tensors = decode(path, STATE)
    try:
        return _rebuild(json.loads(meta["tree"]), tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise FileError(f"{path}: its metadata is incomplete ({error})") from error


# The tree as JSON: {"t": name} is a tensor, {"d": [[key, value], ...]} a dict (keys may be numbers), {"l": [...]} a
# list or tuple. Any other value stands for itself.


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return {"t": name}
    if isinstance(value, dict):
        return {"d": [[key, _flatten(v, tensors)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"l": [_flatten(v, tensors) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state cannot contain {type(value).__name__}")


def _rebuild(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return tensors[value["t"]]
    if "l" in value:
        return [_rebuild(v, tensors) for v in value["l"]]
    return {key: _rebuild(v, tensors) for key, v in value["d"]}

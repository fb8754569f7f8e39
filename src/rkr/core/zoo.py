"""Model folders ("zoos"): one base file, one file per task, and the index `zoo.json`.

File names contain a hash of the content, so a save never overwrites a file that the current index needs. The index is
replaced last, in one rename. Only then are files removed that it no longer lists.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import nn

from rkr.atomic import TEMPORARY, write_atomic
from rkr.core.about import ModelAbout, check_about, checked_about
from rkr.core.files import (
    SUFFIX,
    PathLike,
    as_path,
    base_fingerprint,
    check_finite,
    check_tensors,
    decode,
    digest,
    encode,
    encode_task,
    load_task,
    read_metadata,
    trained_keys,
)
from rkr.core.options import Options
from rkr.errors import FileError, RkrError, UsageError
from rkr.versions import Format

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

ZOO = Format("rkr-zoo", 2, {1: lambda index: {**index, "about": {}}})
BASE = Format("rkr-base", 1)
INDEX = "zoo.json"
RETRIES = 9  # how often a reader starts again because another process saved to the folder


def save(model: RectifiedModel, folder: PathLike) -> None:
    """Write a model folder."""
    model.check_owner()
    folder = as_path(folder)
    if os.path.exists(folder) and not folder.is_dir():
        raise FileError(f"{folder}: is a file, but save needs a folder")
    check_about(model.about, "the model")
    base = base_fingerprint(model)
    check_finite(folder, model.network.state_dict(), trained_keys(model.network))
    encoded = [encode_task(model, task, base, folder / task.name) for task in model.tasks.values()]
    network = encode(model.network.state_dict(), {**BASE.stated, "fingerprint": base})
    base_file = _write_by_content(folder, "base", network)
    tasks = [
        {"name": task.name, "file": _write_by_content(folder, task.name, data)}
        for task, data in zip(model.tasks.values(), encoded, strict=True)
    ]
    index = {
        **ZOO.stated,
        "about": model.about,
        "options": model.options.to_json(),
        "head": model.head,
        "base": base_file,
        "base_frozen": model.base_frozen,
        "current": model.task,
        "fixed": sorted(name for name, on in model.user_requires_grad.items() if not on),
        "tasks": tasks,
    }
    write_atomic(folder / INDEX, encode_index(index))
    _remove_unnamed(folder, {base_file, *(t["file"] for t in tasks)})


def encode_index(index: Any) -> bytes:
    """The text of `zoo.json`, with a checksum."""
    if isinstance(index, dict):
        index = {**index, "sha256": _index_sum(index)}
    return json.dumps(index, indent=1).encode()


def _index_sum(index: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _write_by_content(folder: Path, name: str, data: bytes) -> str:
    """Write data to a file whose name contains its hash, unless that file exists already."""
    short = quote(name, safe=" ")[:100]
    file = f"{short}.{hashlib.sha256(data).hexdigest()[:16]}{SUFFIX}"
    path = folder / file
    if not (path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data):
        write_atomic(path, data)
    return file


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove files of earlier saves, recognised by the form of their names."""
    for path in folder.glob(f"*.{'[0-9a-f]' * 16}{SUFFIX}"):
        if path.name not in named:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def load(folder: PathLike, network: nn.Module, build: Callable[..., RectifiedModel]) -> RectifiedModel:
    """Read a model folder. `build` makes a model that does not touch the network yet.

    If another process saves to the folder in the meantime and removes files of the old index, everything is read again.
    """
    if not isinstance(network, nn.Module):
        raise UsageError(f"load needs the network as a torch.nn.Module, not {type(network).__name__}")
    folder = as_path(folder)
    for _ in range(RETRIES):
        index = _read_index(folder)
        try:
            return _load(folder, index, network, build)
        except FileError:
            if _read_index(folder)["sha256"] == index["sha256"]:
                raise
    return _load(folder, _read_index(folder), network, build)


def _load(
    folder: Path, index: Mapping[str, Any], network: nn.Module, build: Callable[..., RectifiedModel]
) -> RectifiedModel:
    """Read and check everything, then change the network."""
    base_path = folder / index["base"]
    meta, base = decode(base_path, BASE)
    present = {k: (tuple(v.shape), v.dtype) for k, v in network.state_dict().items()}
    check_tensors(base_path, base, present)
    check_finite(base_path, base, trained_keys(network))
    try:
        model = build(network, index["options"], index["head"], attach=False)
    except (RkrError, TypeError) as error:
        raise FileError(f"{folder / INDEX}: does not fit this network: {error}") from error
    if digest(model.tensors.base_state(base), "rkr-base") != meta.get("fingerprint"):
        raise FileError(f"{base_path}: its tensors do not match its fingerprint")
    tasks = []
    for entry in index["tasks"]:
        task = load_task(model, folder / entry["file"], None, meta["fingerprint"])
        if task.name != entry["name"]:
            raise FileError(f"{folder / entry['file']}: contains the task {task.name!r}, not {entry['name']!r}")
        tasks.append(task)
    with torch.inference_mode(any(p.is_inference() for p in network.parameters())):  # as the network was built
        network.load_state_dict(base)
        fixed = set(index["fixed"])
        for name, p in network.named_parameters():
            p.requires_grad_(name not in fixed)
    model.about = index["about"]
    model.user_requires_grad = {n: p.requires_grad for n, p in network.named_parameters()}
    model.attach()
    model.restore_tasks(tasks, index["current"], index["base_frozen"])
    return model


def read_about(folder: PathLike) -> ModelAbout:
    """What a model folder says about itself, from its index and its base's header: quick, and no network is needed.

    Tensors are not checked. `rkr.core.read_task_about` tells the same of one of its task files.
    """
    folder = as_path(folder)
    for _ in range(RETRIES):
        index = _read_index(folder)
        try:
            meta, _ = read_metadata(folder / index["base"], BASE)
            break
        except FileError:
            if _read_index(folder)["sha256"] == index["sha256"]:
                raise
    else:
        raise FileError(f"{folder}: other processes save to it all the time: try again")
    if "fingerprint" not in meta:
        raise FileError(f"{folder / index['base']}: its metadata is incomplete ('fingerprint')")
    tasks = {task["name"]: folder / task["file"] for task in index["tasks"]}
    return ModelAbout(
        folder, index["about"], meta["fingerprint"], index["options"], index["head"], index["current"], tasks
    )


def _read_index(folder: Path) -> dict[str, Any]:
    """Read and check `zoo.json`."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder}: not a saved model: there is no {INDEX}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(index, dict) or index.get("format") != ZOO.name:
        raise FileError(f"{path}: not the index of a saved model")
    ZOO.check(path, index.get("version"))
    if index.get("sha256") != _index_sum(index):
        raise FileError(f"{path}: damaged: its checksum does not match")
    try:
        index = ZOO.upgraded(path, index["version"], index)
        index["options"] = _read_options(index["options"])
        _check_index(index)
    except (KeyError, TypeError, ValueError, RkrError) as error:
        raise FileError(f"{path}: incomplete or invalid: {error}") from error
    return index


_INDEX_TYPES: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "version": str,
    "about": dict,
    "options": Options,
    "head": (str, type(None)),
    "base": str,
    "base_frozen": bool,
    "current": (str, type(None)),
    "fixed": list,
    "tasks": list,
    "sha256": str,
}


def _check_index(index: Mapping[str, Any]) -> None:
    """Check types and consistency."""
    if set(index) != set(_INDEX_TYPES):
        raise ValueError(f"{sorted(set(index) ^ set(_INDEX_TYPES))[0]!r} is missing or unknown")
    for key, kind in _INDEX_TYPES.items():
        if not isinstance(index[key], kind):
            raise ValueError(f"{key!r} is {index[key]!r}")
    checked_about(index["about"])
    for task in index["tasks"]:
        if set(task) != {"name", "file"} or not all(isinstance(v, str) and v for v in task.values()):
            raise ValueError(f"the task {task!r} must have a name and a file")
    names = [task["name"] for task in index["tasks"]]
    if len(set(names)) != len(names):
        raise ValueError("two tasks have the same name")
    if index["current"] is not None and index["current"] not in names:
        raise ValueError(f"'current' is {index['current']!r}, which is not a task")
    if not index["base_frozen"] and len(names) > 1:
        raise ValueError("the base cannot be in training with more than one task")
    for file in (index["base"], *(task["file"] for task in index["tasks"])):
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise ValueError(f"{file!r} is not the name of a file in this folder")


def _read_options(values: Any) -> Options:
    default = Options().to_json()
    if not isinstance(values, dict) or not values:
        raise ValueError("'options' are missing")
    for key, value in values.items():
        if key not in default:
            raise ValueError(f"the option {key!r} is unknown")
        kind = type(default[key])
        if key in ("rectify_weights", "scale_outputs"):
            fits = isinstance(value, (bool, str))
        elif kind is tuple:
            fits = isinstance(value, list) and all(isinstance(v, str) for v in value)
        else:
            fits = isinstance(value, (int, float) if kind is float or key == "cache_bytes" else kind)
        if not fits:
            raise ValueError(f"the option {key!r} is {value!r}")
    return Options.from_json(values)

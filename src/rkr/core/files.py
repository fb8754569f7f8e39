"""Task files and model folders: safetensors only, written atomically, read strictly.

A task file holds the task's tensors under the user's own module paths, and as metadata all that is needed to refuse it
where it does not belong. Nothing is ever unpickled.

A model folder ("zoo") holds one base file, one file per task, and `zoo.json`, which names them. File names carry a
part of their content's hash, so a save never overwrites what the present `zoo.json` needs: it is replaced
last, in one rename, and only then are files removed that it no longer names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from rkr.core.options import Options
from rkr.core.tasks import Task
from rkr.errors import FileError, RkrError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

FORMAT_VERSION = "1"
INDEX = "zoo.json"
SUFFIX = ".safetensors"
Path_ = str | os.PathLike[str]

# ---------------------------------------------------------------------------------------------------------
# Hashes


def digest(tensors: Mapping[str, Tensor], *words: str) -> str:
    """SHA-256 of named tensors and words; the same on every device, in every memory format and process."""
    h = hashlib.sha256()
    for word in words:
        h.update(f"{len(word)}:{word};".encode())
    for key in sorted(tensors):
        t = tensors[key]
        h.update(f"{len(key)}:{key};{t.dtype};{tuple(t.shape)};".encode())
        h.update(_raw(t))
    return h.hexdigest()


def base_fingerprint(model: RectifiedModel) -> str:
    """Hash of all that tasks share."""
    return digest(model._base_state(), "rkr-base")


def task_fingerprint(model: RectifiedModel, task: Task) -> str:
    """Hash of all that a task computes with."""
    return digest(model._task_state(task), "rkr-task", base_fingerprint(model), model.options.layout)


def _raw(t: Tensor) -> memoryview:
    flat = t.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # bytes in row-major order


# ---------------------------------------------------------------------------------------------------------
# One file


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a kill at any moment leaves the old content or the new: temporary file, fsync, rename."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum for each tensor and one over everything."""
    plain = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
    sums = " ".join(f"{zlib.crc32(_raw(plain[key])):08x}" for key in sorted(plain))
    meta = {**metadata, "crc32": sums}
    meta["sha256"] = digest(plain, json.dumps(meta, sort_keys=True))
    return encode_tensors(plain, meta)


def decode(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file, every byte checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        tensors = decode_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: not a whole safetensors file, cut short or damaged ({error})") from error
    meta = header.get("__metadata__") or {}
    if meta.get("format") != kind:
        raise FileError(f"{path}: not a file of the kind {kind!r} (its format is {meta.get('format')!r})")
    if meta.get("version") != FORMAT_VERSION:
        raise FileError(
            f"{path}: format version {meta.get('version')!r}, but this package reads {FORMAT_VERSION!r}: "
            "install the version of rkr that wrote it"
        )
    keys = sorted(tensors)
    sums = meta.get("crc32", "").split(" ") if keys else []
    if len(sums) == len(keys):
        for key, expected in zip(keys, sums, strict=True):
            if f"{zlib.crc32(_raw(tensors[key])):08x}" != expected:
                raise FileError(f"{path}: {key!r} is damaged: its checksum does not match")
    stored = meta.pop("sha256", None)
    if stored != digest(tensors, json.dumps(meta, sort_keys=True)):
        raise FileError(f"{path}: damaged: the checksum over names and metadata does not match")
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FileError(f"{path}: {key!r} has values that are not finite (NaN or infinity)")
    return meta, tensors


def check_tensors(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Names, shapes and types must be exactly those expected."""
    for key, (shape, dtype) in expected.items():
        if key not in found:
            raise FileError(f"{path}: {key!r} is missing: the file was made for another network or other options")
        tensor = found[key]
        if tuple(tensor.shape) != tuple(shape):
            raise FileError(
                f"{path}: {key!r} has shape {tuple(tensor.shape)}, but this network needs {tuple(shape)}"
            )
        if tensor.dtype != dtype:
            raise FileError(f"{path}: {key!r} is {tensor.dtype}, but this network needs {dtype}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise FileError(f"{path}: {extra[0]!r} has no place in this network")


# ---------------------------------------------------------------------------------------------------------
# Tasks

_STORED_OPTIONS = ("rank", "ranks", "rectify_weights", "scale_outputs", "include", "exclude", "bn", "norm", "layout")


def encode_task(model: RectifiedModel, task: Task, base: str) -> bytes:
    """One task as the bytes of its file."""
    options = model.options.to_json()
    meta = {
        "format": "rkr-task",
        "version": FORMAT_VERSION,
        "task": task.name,
        "rank": str(model.options.rank),
        "layout": model.options.layout,
        "options": json.dumps({name: options[name] for name in _STORED_OPTIONS}),
        "classes": json.dumps(task.classes),
        "class_names": json.dumps(task.class_names),
        "base": base,
    }
    return encode(model._task_state(task), meta)


def save_task(model: RectifiedModel, task: Task, path: Path_) -> None:
    """Write a task file."""
    write_atomic(Path(path), encode_task(model, task, base_fingerprint(model)))


def load_task(model: RectifiedModel, path: Path_, name: str | None, base: str | None = None) -> Task:
    """Read a task file for this model; the model is not changed."""
    path = Path(path)
    meta, tensors = decode(path, "rkr-task")
    try:
        classes, class_names = json.loads(meta["classes"]), json.loads(meta["class_names"])
        title, layout, stored_base = name or meta["task"], meta["layout"], meta["base"]
    except (KeyError, ValueError) as error:
        raise FileError(f"{path}: its metadata is not complete ({error})") from error
    if layout != model.options.layout:
        raise FileError(f"{path}: made with layout {layout!r}, but this model has {model.options.layout!r}")
    if (classes is None) != (model.head is None):
        wanted = "has no head" if model.head is None else f"has the head {model.head!r}"
        raise FileError(f"{path}: the task has {classes or 'no'} classes, but this model {wanted}")
    check_tensors(path, tensors, model._expected(classes))
    if stored_base != (base or base_fingerprint(model)):
        raise FileError(
            f"{path}: made for another base network (fingerprint {stored_base[:12]}): "
            "rectify the network with the weights that the task was trained on"
        )
    task = Task(title, classes, class_names)
    device = next(iter(model.network.parameters())).device
    for key, tensor in tensors.items():
        task.put(key, tensor.to(device))
    return task


# ---------------------------------------------------------------------------------------------------------
# Models


def save_model(model: RectifiedModel, folder: Path_) -> None:
    """Write a model folder."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file; save needs a folder")
    base = base_fingerprint(model)
    network = encode(
        model.network.state_dict(), {"format": "rkr-base", "version": FORMAT_VERSION, "fingerprint": base}
    )
    base_file = _write_by_content(folder, "base", network)
    tasks = [
        {"name": task.name, "file": _write_by_content(folder, task.name, encode_task(model, task, base))}
        for task in model.tasks.values()
    ]
    index = {
        "format": "rkr-zoo",
        "version": FORMAT_VERSION,
        "options": model.options.to_json(),
        "head": model.head,
        "base": base_file,
        "base_frozen": model.base_frozen,
        "current": model.task,
        "tasks": tasks,
    }
    write_atomic(folder / INDEX, json.dumps(index, indent=1).encode())
    _remove_unnamed(folder, {base_file, *(t["file"] for t in tasks)})


def _write_by_content(folder: Path, name: str, data: bytes) -> str:
    """Write data under a name that carries its hash; nothing to do if it is there already."""
    short = quote(name, safe=" ")[:100]
    file = f"{short}.{hashlib.sha256(data).hexdigest()[:16]}{SUFFIX}"
    path = folder / file
    if not (path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data):
        write_atomic(path, data)
    return file


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove files of earlier saves: only such as this module writes, by the form of their names."""
    for path in folder.glob(f"*.{'[0-9a-f]' * 16}{SUFFIX}"):
        if path.name not in named:
            with contextlib.suppress(OSError):
                path.unlink()
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def load_model(folder: Path_, network: nn.Module) -> RectifiedModel:
    """Read a model folder into a network of the same architecture.

    Everything is read and checked before the network is touched. A network that is rectified already
    (by the model that was saved, say) is taken over.
    """
    from rkr.core.model import RectifiedModel

    folder = Path(folder)
    index = _read_index(folder)
    base_path = folder / index["base"]
    meta, base = decode(base_path, "rkr-base")
    present = {k: (tuple(v.shape), v.dtype) for k, v in network.state_dict().items()}
    check_tensors(base_path, base, present)
    model = RectifiedModel(network, index["options"], index["head"], attach=False)
    if digest(model._base_state(base), "rkr-base") != meta.get("fingerprint"):
        raise FileError(f"{base_path}: its content does not give the fingerprint that it states")
    tasks = [load_task(model, folder / t["file"], t["name"], meta["fingerprint"]) for t in index["tasks"]]
    network.load_state_dict(base)
    model._attach()
    model._restore_tasks(tasks, index["current"], index["base_frozen"])
    return model


def _read_index(folder: Path) -> dict[str, Any]:
    """The content of `zoo.json`, checked."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder}: not a saved model: it has no {INDEX}") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(index, dict) or index.get("format") != "rkr-zoo":
        raise FileError(f"{path}: not the index of a saved model")
    if index.get("version") != FORMAT_VERSION:
        raise FileError(f"{path}: format version {index.get('version')!r}, but this package reads {FORMAT_VERSION!r}")
    try:
        files = [index["base"], *(t["file"] for t in index["tasks"])]
        names = [t["name"] for t in index["tasks"]]
        index["options"] = Options.from_json(index["options"])
        complete = {"head", "base_frozen", "current"} <= set(index)
    except (KeyError, TypeError, RkrError) as error:
        raise FileError(f"{path}: not complete or not valid: {error}") from error
    outside = [f for f in files if not isinstance(f, str) or Path(f).name != f]
    if not complete or outside or (index["current"] is not None and index["current"] not in names):
        raise FileError(f"{path}: not complete or not valid")
    return index

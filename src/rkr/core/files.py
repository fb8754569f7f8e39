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
import secrets
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from rkr.core.options import Options
from rkr.core.tasks import Task, is_statistic, version_key
from rkr.errors import FileError, RkrError, UsageError

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

FORMAT_VERSION = "1"
INDEX = "zoo.json"
SUFFIX = ".safetensors"
TEMPORARY = ".rkr-"
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


def known_base_fingerprint(model: RectifiedModel) -> str:
    """`base_fingerprint`, not computed again while no base tensor was written to: loading a task stays cheap."""
    tensors = list(model._base_state().values())
    # Versions alone are not enough: writing to `.data` or through numpy leaves them as they are.
    key = version_key(*tensors), tuple(_bit_sum(t) for t in tensors)
    if model._known_base is None or model._known_base[0] != key:
        model._known_base = key, base_fingerprint(model)
    return model._known_base[1]


def _bit_sum(t: Tensor) -> int:
    """Changes with any single value; as cheap as reading the tensor once."""
    flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    return int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())


def task_fingerprint(model: RectifiedModel, task: Task) -> str:
    """Hash of all that a task computes with."""
    return digest(model._task_state(task), "rkr-task", base_fingerprint(model), model.options.layout)


def _raw(t: Tensor) -> Any:
    """A tensor's bytes in row-major order, as a buffer."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


# ---------------------------------------------------------------------------------------------------------
# One file


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a kill at any moment leaves the old content or the new: temporary file, fsync, rename."""
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    renamed = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        renamed = True
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if not renamed:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum for each tensor and one over everything."""
    plain = _apart(tensors)
    sums = " ".join(f"{zlib.crc32(_raw(plain[key])):08x}" for key in sorted(plain))
    meta = {**metadata, "crc32": sums}
    meta["sha256"] = digest(plain, json.dumps(meta, sort_keys=True))
    data = encode_tensors(plain, meta)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(meta.items()))  # safetensors writes them in random order
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory, as safetensors wants them."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[key] = plain
    return found


def decode(path: Path, kind: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file, every byte checked."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        tensors = decode_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
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
    return meta, tensors


def check_finite(path: Path_, tensors: Mapping[str, Tensor], keys: Iterable[str]) -> None:
    """Refuse NaN and infinity; buffers of the user's own, such as attention masks, are not among the keys."""
    for key in keys:
        tensor = tensors[key]
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FileError(f"{path}: {key!r} has values that are not finite (NaN or infinity)")


def _trained_keys(network: nn.Module) -> list[str]:
    """Parameters and normalisation statistics: what must be finite."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return [key for key in network.state_dict() if key in parameters or is_statistic(key)]


def check_tensors(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Names, shapes and types must be exactly those expected."""
    for key, (shape, dtype) in expected.items():
        if key not in found:
            raise FileError(f"{path}: {key!r} is missing: the file was made for another network or other options")
        tensor = found[key]
        if tuple(tensor.shape) != tuple(shape):
            raise FileError(f"{path}: {key!r} has shape {tuple(tensor.shape)}, but this network needs {tuple(shape)}")
        if tensor.dtype != dtype:
            raise FileError(f"{path}: {key!r} is {tensor.dtype}, but this network needs {dtype}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise FileError(f"{path}: {extra[0]!r} has no place in this network")


# ---------------------------------------------------------------------------------------------------------
# Tasks

_STORED_OPTIONS = ("rank", "ranks", "rectify_weights", "scale_outputs", "include", "exclude", "bn", "norm", "layout")


def encode_task(model: RectifiedModel, task: Task, base: str, path: Path_) -> bytes:
    """One task as the bytes of its file."""
    state = model._task_state(task)
    check_finite(path, state, state)
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
    return encode(state, meta)


def save_task(model: RectifiedModel, task: Task, path: Path_) -> None:
    """Write a task file."""
    model._check_owner()
    write_atomic(Path(path), encode_task(model, task, base_fingerprint(model), path))


def load_task(model: RectifiedModel, path: Path_, name: str | None, base: str | None = None) -> Task:
    """Read a task file for this model; the model is not changed."""
    path = Path(path)
    meta, tensors = decode(path, "rkr-task")
    try:
        classes, class_names = json.loads(meta["classes"]), json.loads(meta["class_names"])
        title, layout, stored_base = meta["task"], meta["layout"], meta["base"]
    except (KeyError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is not complete ({error})") from error
    if not title or not _proper_classes(classes, class_names):
        raise FileError(f"{path}: its metadata is not valid: name {title!r}, classes {classes!r}, {class_names!r}")
    if layout != model.options.layout:
        raise FileError(f"{path}: made with layout {layout!r}, but this model has {model.options.layout!r}")
    if (classes is None) != (model.head is None):
        wanted = "has no head" if model.head is None else f"has the head {model.head!r}"
        raise FileError(f"{path}: the task has {classes or 'no'} classes, but this model {wanted}")
    expected = model._expected(classes)
    check_tensors(path, tensors, expected)
    check_finite(path, tensors, tensors)
    if stored_base != (base or known_base_fingerprint(model)):
        raise FileError(
            f"{path}: made for another base network (fingerprint {stored_base[:12]}): "
            "rectify the network with the weights that the task was trained on"
        )
    task = Task(title if name is None else name, classes, class_names)
    device = next(iter(model.network.parameters())).device
    for key in expected:
        task.put(key, tensors[key].to(device))
    return task


def _proper_classes(classes: Any, names: Any) -> bool:
    if classes is None or names is None:
        return names is None and (classes is None or type(classes) is int)
    return (
        type(classes) is int
        and isinstance(names, list)
        and all(isinstance(n, str) for n in names)
        and len(set(names)) == len(names) == classes
    )


# ---------------------------------------------------------------------------------------------------------
# Models


def save_model(model: RectifiedModel, folder: Path_) -> None:
    """Write a model folder."""
    model._check_owner()
    folder = Path(folder)
    if os.path.exists(folder) and not folder.is_dir():
        raise FileError(f"{folder}: is a file; save needs a folder")
    base = base_fingerprint(model)
    check_finite(folder, model.network.state_dict(), _trained_keys(model.network))
    encoded = [encode_task(model, task, base, folder / task.name) for task in model.tasks.values()]
    network = encode(model.network.state_dict(), {"format": "rkr-base", "version": FORMAT_VERSION, "fingerprint": base})
    base_file = _write_by_content(folder, "base", network)
    tasks = [
        {"name": task.name, "file": _write_by_content(folder, task.name, data)}
        for task, data in zip(model.tasks.values(), encoded, strict=True)
    ]
    index = {
        "format": "rkr-zoo",
        "version": FORMAT_VERSION,
        "options": model.options.to_json(),
        "head": model.head,
        "base": base_file,
        "base_frozen": model.base_frozen,
        "current": model.task,
        "fixed": sorted(name for name, on in model._trained_flags.items() if not on),
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
    for path in folder.glob(f"{TEMPORARY}*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def load_model(folder: Path_, network: nn.Module) -> RectifiedModel:
    """Read a model folder into a network of the same architecture.

    Everything is read and checked before the network is touched. A network that is rectified already
    (by the model that was saved, say) is taken over.
    """
    from rkr.core.model import RectifiedModel

    if not isinstance(network, nn.Module):
        raise UsageError(f"load needs the network as a torch.nn.Module, not {type(network).__name__}")
    folder = Path(folder)
    index = _read_index(folder)
    base_path = folder / index["base"]
    meta, base = decode(base_path, "rkr-base")
    present = {k: (tuple(v.shape), v.dtype) for k, v in network.state_dict().items()}
    check_tensors(base_path, base, present)
    check_finite(base_path, base, _trained_keys(network))
    try:
        model = RectifiedModel(network, index["options"], index["head"], attach=False)
    except (RkrError, TypeError) as error:
        raise FileError(f"{folder / INDEX}: does not fit this network: {error}") from error
    if digest(model._base_state(base), "rkr-base") != meta.get("fingerprint"):
        raise FileError(f"{base_path}: its content does not give the fingerprint that it states")
    tasks = []
    for entry in index["tasks"]:
        task = load_task(model, folder / entry["file"], None, meta["fingerprint"])
        if task.name != entry["name"]:
            raise FileError(f"{folder / entry['file']}: holds the task {task.name!r}, not {entry['name']!r}")
        tasks.append(task)
    network.load_state_dict(base)
    model._attach()
    fixed = set(index["fixed"])
    for name, p in network.named_parameters():
        p.requires_grad_(name not in fixed)
    model._trained_flags = {n: p.requires_grad for n, p in network.named_parameters()}
    model._restore_tasks(tasks, index["current"], index["base_frozen"])
    return model


def _read_index(folder: Path) -> dict[str, Any]:
    """The content of `zoo.json`, checked."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder}: not a saved model: it has no {INDEX}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    if not isinstance(index, dict) or index.get("format") != "rkr-zoo":
        raise FileError(f"{path}: not the index of a saved model")
    if index.get("version") != FORMAT_VERSION:
        raise FileError(f"{path}: format version {index.get('version')!r}, but this package reads {FORMAT_VERSION!r}")
    if index.get("sha256") != _index_sum(index):
        raise FileError(f"{path}: damaged: its checksum does not match")
    try:
        index["options"] = _read_options(index["options"])
        _check_index(index)
    except (KeyError, TypeError, ValueError, RkrError) as error:
        raise FileError(f"{path}: not complete or not valid: {error}") from error
    return index


_INDEX_TYPES: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "version": str,
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
    """Types and agreement of the parts with each other."""
    if set(index) != set(_INDEX_TYPES):
        raise ValueError(f"{sorted(set(index) ^ set(_INDEX_TYPES))[0]!r} is missing or has no place here")
    for key, kind in _INDEX_TYPES.items():
        if not isinstance(index[key], kind):
            raise ValueError(f"{key!r} is {index[key]!r}")
    for task in index["tasks"]:
        if set(task) != {"name", "file"} or not all(isinstance(v, str) and v for v in task.values()):
            raise ValueError(f"the task {task!r} needs a name and a file")
    names = [task["name"] for task in index["tasks"]]
    if len(set(names)) != len(names):
        raise ValueError("two tasks have one name")
    if index["current"] is not None and index["current"] not in names:
        raise ValueError(f"'current' is {index['current']!r}, which is no task")
    if not index["base_frozen"] and len(names) > 1:
        raise ValueError("the base cannot be in training with more than one task")
    for file in (index["base"], *(task["file"] for task in index["tasks"])):
        if Path(file).name != file or not file.endswith(SUFFIX):
            raise ValueError(f"{file!r} is not the name of a file in this folder")


def _read_options(values: Any) -> Options:
    default = Options().to_json()
    if not isinstance(values, dict) or set(values) != set(default):
        raise ValueError("'options' does not have all options")
    for key, value in values.items():
        kind = type(default[key])
        if key in ("rectify_weights", "scale_outputs"):
            fits = isinstance(value, (bool, str))
        elif kind is tuple:
            fits = isinstance(value, list) and all(isinstance(v, str) for v in value)
        else:
            fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits:
            raise ValueError(f"the option {key!r} is {value!r}")
    return Options.from_json(values)

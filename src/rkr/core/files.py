"""Task files, and what all safetensors files of the package share: checksums, versions, atomic writes, strict reads.

A task file holds the task's tensors under the network's module paths. Its metadata identifies the base network and the
options, so a file for another network is refused. Nothing is unpickled. Versions: `rkr.versions`.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from rkr.atomic import write_atomic
from rkr.core.about import TaskAbout, check_about, read_about_text
from rkr.core.state import TaskState, is_statistic
from rkr.errors import FileError, UsageError
from rkr.versions import Format

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

TASK = Format("rkr-task", 1)
PathLike = str | os.PathLike[str]

# ---------------------------------------------------------------------------------------------------------
# Hashes


def digest(tensors: Mapping[str, Tensor], *words: str, raw: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of named tensors and words. It does not depend on the device, the memory format or the process.

    `raw` gives the bytes of the tensors if they are already in memory.
    """
    h = hashlib.sha256()
    for word in words:
        h.update(f"{len(word)}:{word};".encode())
    for key in sorted(tensors):
        t = tensors[key]
        h.update(f"{len(key)}:{key};{t.dtype};{tuple(t.shape)};".encode())
        h.update(raw_bytes(t) if raw is None else raw[key])
    return h.hexdigest()


def base_fingerprint(model: RectifiedModel) -> str:
    """Hash of everything that the tasks share."""
    return digest(model.tensors.base_state(), "rkr-base")


def task_fingerprint(model: RectifiedModel, task: TaskState, base: str | None = None) -> str:
    """Hash of everything that a task computes with. `base` is the base's fingerprint, if it is known."""
    return digest(model.tensors.task_state(task), "rkr-task", base or base_fingerprint(model), model.options.layout)


def known_base_fingerprint(model: RectifiedModel) -> str:
    """`base_fingerprint`, computed again only if the base has changed since the last call.

    Version counters do not see a write to `.data`, so every byte is read. A CRC-32 in memory order takes a third of
    the time of the fingerprint and misses a change with probability 2^-32.
    """
    state = model.tensors.base_state()
    now = {k: (v.dtype, v.shape, v.stride(), zlib.crc32(raw_bytes(_in_memory_order(v)))) for k, v in state.items()}
    if model._base_known is None or model._base_known[0] != now:
        model._base_known = now, digest(state, "rkr-base")
    return model._base_known[1]


def _in_memory_order(t: Tensor) -> Tensor:
    """A channels_last tensor with its channels as the last dimension, so its bytes are read without a copy."""
    return t if t.is_contiguous() or t.dim() < 3 else t.movedim(1, -1)


def raw_bytes(t: Tensor) -> Any:
    """A tensor's bytes in row-major order, as a buffer."""
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


# ---------------------------------------------------------------------------------------------------------
# One file


def as_path(path: PathLike) -> Path:
    """Convert to Path or raise UsageError."""
    try:
        return Path(path)
    except TypeError:
        raise UsageError(f"the name of a file or folder must be a path, not {path!r}") from None


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file with a checksum of each tensor and one of everything."""
    plain = _unshared(tensors)
    sums = " ".join(f"{zlib.crc32(raw_bytes(plain[key])):08x}" for key in sorted(plain))
    meta = {**metadata, "crc32": sums}
    meta["sha256"] = digest(plain, json.dumps(meta, sort_keys=True))
    data = encode_tensors(plain, meta)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(meta.items()))  # safetensors does not keep their order
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory, as safetensors requires."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        found[key] = plain
    return found


def decode(path: Path, kind: Format, unversioned: bool = False) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file, upgraded to the current version. Every byte is checked.

    With `unversioned`, a file that states no format is read as version 1, which has no checksums.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        tensors = decode_tensors(data)
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
    except (SafetensorError, *_INVALID) as error:
        raise FileError(f"{path}: not a valid safetensors file: incomplete or damaged ({error})") from error
    meta = header.get("__metadata__") or {}
    if unversioned and "format" not in meta:
        return kind.upgraded(path, 1, (meta, tensors))
    if meta.get("format") != kind.name:
        raise FileError(f"{path}: its format is {meta.get('format')!r}, not {kind.name!r}")
    kind.check(path, meta.get("version"))
    stored = meta.pop("sha256", None)
    spans = {key: header[key]["data_offsets"] for key in tensors}
    raw = {key: memoryview(data)[start + first : start + last] for key, (first, last) in spans.items()}
    if stored != digest(tensors, json.dumps(meta, sort_keys=True), raw=raw):
        raise FileError(f"{path}: {_damaged(tensors, meta.get('crc32', ''))}")
    return kind.upgraded(path, meta["version"], (meta, tensors))


_INVALID = (ArithmeticError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)  # raised by wrong headers


def _unreadable(path: Path, error: OSError | ValueError) -> FileError:
    return FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


def read_metadata(path: Path, kind: Format) -> tuple[dict[str, str], int]:
    """Metadata and size of a file, read from its header alone. Its tensors and checksums are not looked at."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= size - 8 else b""
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        header = json.loads(text)
        meta = header.pop("__metadata__", None) or {}
        whole = all(t["data_offsets"][1] <= size - 8 - length for t in header.values())
        if not whole or not all(isinstance(v, str) for v in meta.values()):
            raise ValueError("its header does not fit its size")
    except _INVALID as error:
        raise FileError(f"{path}: not a valid safetensors file: incomplete or damaged ({error})") from error
    if meta.get("format") != kind.name:
        raise FileError(f"{path}: its format is {meta.get('format')!r}, not {kind.name!r}")
    kind.check(path, meta.get("version"))
    return kind.upgraded(path, meta["version"], (meta, {}))[0], size


def _damaged(tensors: Mapping[str, Tensor], sums: str) -> str:
    """Which part of a file does not match its checksum."""
    keys, expected = sorted(tensors), sums.split(" ")
    if len(keys) == len(expected):
        for key, crc in zip(keys, expected, strict=True):
            if f"{zlib.crc32(raw_bytes(tensors[key])):08x}" != crc:
                return f"{key!r} is damaged: its checksum does not match"
    return "damaged: the checksum over names and metadata does not match"


def check_finite(path: PathLike, tensors: Mapping[str, Tensor], keys: Iterable[str]) -> None:
    """Refuse NaN and infinity in the given tensors. Other buffers, such as attention masks, may contain them."""
    floats = {key: tensors[key].detach() for key in keys if tensors[key].is_floating_point() and tensors[key].numel()}
    if not floats:
        return
    largest = torch._foreach_norm(list(floats.values()), torch.inf)  # one per tensor; NaN if it contains NaN
    if not bool(torch.stack([n.double() for n in largest]).isfinite().all()):
        bad = next(key for key, n in zip(floats, largest, strict=True) if not bool(n.isfinite()))
        raise FileError(f"{path}: {bad!r} has values that are not finite (NaN or infinity)")


def trained_keys(network: nn.Module) -> list[str]:
    """Parameters and normalisation statistics, which must be finite."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    return [key for key in network.state_dict() if key in parameters or is_statistic(key)]


def check_tensors(
    path: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Refuse tensors whose names, shapes or dtypes are not exactly as expected."""
    for key, (shape, dtype) in expected.items():
        if key not in found:
            raise FileError(f"{path}: {key!r} is missing: the file belongs to another network or other options")
        tensor = found[key]
        if tuple(tensor.shape) != tuple(shape):
            raise FileError(f"{path}: {key!r} has shape {tuple(tensor.shape)}, but this network needs {tuple(shape)}")
        if tensor.dtype != dtype:
            raise FileError(f"{path}: {key!r} is {tensor.dtype}, but this network needs {dtype}")
    extra = sorted(set(found) - set(expected))
    if extra:
        raise FileError(f"{path}: {extra[0]!r} does not belong to this network")


# ---------------------------------------------------------------------------------------------------------
# Tasks

_STORED_OPTIONS = ("rank", "ranks", "rectify_weights", "scale_outputs", "include", "exclude", "bn", "norm", "layout")


def encode_task(model: RectifiedModel, task: TaskState, base: str, path: PathLike) -> bytes:
    """The bytes of a task file."""
    state = model.tensors.task_state(task)
    check_finite(path, state, state)
    options = model.options.to_json()
    meta = {
        **TASK.stated,
        "task": task.name,
        "rank": str(model.options.rank),
        "layout": model.options.layout,
        "options": json.dumps({name: options[name] for name in _STORED_OPTIONS}),
        "classes": json.dumps(task.classes),
        "class_names": json.dumps(task.class_names),
        "base": base,
        "about": check_about(task.about, f"task {task.name!r}"),
    }
    return encode(state, meta)


def save_task(model: RectifiedModel, task: TaskState, path: PathLike) -> None:
    """Write a task file."""
    model.check_owner()
    write_atomic(as_path(path), encode_task(model, task, base_fingerprint(model), path))


def load_task(
    model: RectifiedModel,
    path: PathLike,
    name: str | None,
    base: str | None = None,
    cast: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> TaskState:
    """Read a task file for this model. The model is not changed.

    Args:
        model: The model.
        path: The file.
        name: Another name for the task than the one in the file.
        base: Fingerprint that the file must state; by default that of the model's base.
        cast: Converts tensors from how they were written to how the model is now.
    """
    path = as_path(path)
    meta, tensors = decode(path, TASK)
    stated = _stated(path, meta, 0)
    classes, layout, stored_base = stated.classes, stated.layout, stated.base
    if layout != model.options.layout:
        raise FileError(f"{path}: written with layout {layout!r}, but this model has {model.options.layout!r}")
    if (classes is None) != (model.head is None):
        wanted = "has no head" if model.head is None else f"has the head {model.head!r}"
        raise FileError(f"{path}: the task has {classes or 'no'} classes, but this model {wanted}")
    expected = model.tensors.expected(classes)
    converted = {key: cast(tensor) for key, tensor in tensors.items()}
    check_tensors(path, converted, expected)
    check_finite(path, tensors, tensors)
    if stored_base != (base or known_base_fingerprint(model)):
        raise FileError(
            f"{path}: belongs to another base network (fingerprint {stored_base[:12]}): "
            "rectify the network with the weights that the task was trained on"
        )
    task = TaskState(stated.name if name is None else name, classes, stated.class_names)
    task.about = stated.about
    device = next(iter(model.network.parameters())).device
    for key in expected:
        task.put(key, converted[key].to(device))
    return task


def read_task_about(path: PathLike) -> TaskAbout:
    """What a task file says about itself, from its header alone: quick, and its tensors are not checked."""
    path = as_path(path)
    return _stated(path, *read_metadata(path, TASK))


def _stated(path: Path, meta: Mapping[str, str], size: int) -> TaskAbout:
    """The metadata of a task file."""
    try:
        classes, class_names = json.loads(meta["classes"]), json.loads(meta["class_names"])
        name, layout, base, rank = meta["task"], meta["layout"], meta["base"], int(meta["rank"])
    except (KeyError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is incomplete ({error})") from error
    if not name or not _proper_classes(classes, class_names):
        raise FileError(f"{path}: its metadata is invalid: name {name!r}, classes {classes!r}, {class_names!r}")
    names = None if class_names is None else tuple(class_names)
    return TaskAbout(path, name, classes, names, read_about_text(path, meta.get("about")), base, rank, layout, size)


def _proper_classes(classes: Any, names: Any) -> bool:
    if classes is None or names is None:
        return names is None and (classes is None or type(classes) is int)
    return (
        type(classes) is int
        and isinstance(names, list)
        and all(isinstance(n, str) for n in names)
        and len(set(names)) == len(names) == classes
    )

"""Model folders ("zoos"): one base file, one file per task, and the index.

File names contain a hash of the content, so a save never overwrites a file that the current index needs. The index is
changed last, in one step. Only then are files removed that it no longer lists. Tasks are read when they are first used.
"""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor, nn

from rkr.atomic import write_atomic
from rkr.core.about import ModelAbout, check_about
from rkr.core.arguments import check_name
from rkr.core.files import (
    TASK,
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
    raw_bytes,
    read_metadata,
    read_task_about,
    trained_keys,
)
from rkr.core.index import INDEX, RETRIES, SUFFIX, Changes, Index, compare, locked, write_index
from rkr.core.state import TaskState
from rkr.errors import FileError, RkrError, UsageError
from rkr.versions import Format

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

BASE = Format("rkr-base", 1)


@dataclass
class Stored:
    """The folder that a model was loaded from or last saved to.

    Attributes:
        index: What the model knows to be there.
        base: Fingerprint of the base there.
        sums: Checksums of the network's tensors there.
    """

    index: Index
    base: str
    sums: dict[str, Any]


# ---------------------------------------------------------------------------------------------------------
# Saving


def save(model: RectifiedModel, folder: PathLike) -> None:
    """Write a model folder. In the one that the model comes from, only what has changed is written.

    Raise FileError if another process has changed that folder since, whose work would be lost.
    """
    model.check_owner()
    folder = as_path(folder)
    if os.path.exists(folder) and not folder.is_dir():
        raise FileError(f"{folder}: is a file, but save needs a folder")
    check_about(model.about, "the model")
    base = base_fingerprint(model)
    check_finite(folder, model.network.state_dict(), trained_keys(model.network))
    same_base = model.stored is not None and model.stored.base == base and not model.tasks.casts
    here = same_base and model.stored is not None and _is_same(model.stored.index.folder, folder)
    encoded = {}  # all, before anything is written
    for name in model.tasks:
        task = model.tasks.in_memory(name) if same_base else model.tasks[name]
        if task is not None and not (here and model.tasks.is_as_stored(name)):
            encoded[name] = encode_task(model, task, base, folder / name)
    with locked(folder):
        known = _known(model, folder)
        files = {name: _file_for(model, name, encoded.get(name), folder, known) for name in model.tasks}
        sums = _sums(model.network)
        fields = {
            "about": copy.deepcopy(model.about),
            "options": model.options,
            "head": model.head,
            "base": _base_file(model, folder, base, sums, known),
            "base_frozen": model.base_frozen,
            "current": model.task,
            "fixed": sorted(name for name, on in model.user_requires_grad.items() if not on),
        }
        index = _commit(folder, fields, files, known)
    model.stored = Stored(index, base, sums)
    model.tasks.written()
    if model.base_frozen:
        for name in encoded:
            task = model.tasks.in_memory(name)
            if task is not None:
                model.tasks.keep(task)
        model.tasks.shrink()


def _known(model: RectifiedModel, folder: Path) -> Index | None:
    """The folder's index if the model comes from there. Raise FileError if it has changed since."""
    if model.stored is None or not _is_same(model.stored.index.folder, folder):
        return None
    index = model.stored.index
    try:
        now = index.newer()
    except FileError:  # damaged or gone: written anew
        return None
    if (now.tasks, now.fields) != (index.tasks, index.fields):
        names = sorted(compare(index.tasks, now.tasks).names)
        what = f" (task {names[0]!r}" + (" and others)" if len(names) > 1 else ")") if names else ""
        raise FileError(
            f"{folder}: another process has changed it{what} since this model read it: call model.follow() before "
            "save, or save to another folder"
        )
    return now


def _is_same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _file_for(model: RectifiedModel, name: str, data: bytes | None, folder: Path, known: Index | None) -> str:
    """The file of a task in the folder, written if necessary."""
    stored = model.stored
    if data is None and stored is not None:
        path = stored.index.folder / stored.index.tasks[name]
        task = model.tasks.in_memory(name)
        if known is not None and (task is None or _is_intact(path)):
            return path.name
        if task is not None:  # the file is damaged, but its content is here
            data = encode_task(model, task, stored.base, path)
        elif _is_intact(path):
            data = path.read_bytes()
        else:
            read_stored(model, name)  # tells what is wrong with it
            data = path.read_bytes()
    assert data is not None
    return _write_by_content(folder, name, data)


def _base_file(model: RectifiedModel, folder: Path, base: str, sums: Mapping[str, Any], known: Index | None) -> str:
    """The file of the base in the folder, written if necessary."""
    if known is not None and model.stored is not None and model.stored.sums == sums:
        file: str = known.fields["base"]
        if _is_intact(folder / file):
            return file
    return _write_by_content(folder, "base", encode(model.network.state_dict(), {**BASE.stated, "fingerprint": base}))


def _commit(folder: Path, fields: dict[str, Any], files: dict[str, str], known: Index | None) -> Index:
    """Change the index: by what is new if it is the one that the model knows."""
    if known is None or any(known.fields[key] != fields[key] for key in fields if key not in ("about", "current")):
        return write_index(folder, fields, files)
    changes = compare(known.tasks, files)
    kept = [name for name in known.tasks if name in files]
    if list(files) != [*kept, *changes.added]:  # in another order
        return write_index(folder, fields, files)
    ops: list[dict[str, Any]] = [{"drop": name} for name in changes.removed]
    ops += [{"put": name, "file": files[name]} for name in (*changes.replaced, *changes.added)]
    ops += [{key: fields[key]} for key in ("current", "about") if known.fields[key] != fields[key]]
    return known.committed(ops)


def _sums(network: nn.Module) -> dict[str, Any]:
    """Changes whenever the base file would."""
    state: dict[str, Tensor] = network.state_dict()
    return {key: (t.dtype, t.shape, zlib.crc32(raw_bytes(t))) for key, t in state.items()}


def _write_by_content(folder: Path, name: str, data: bytes) -> str:
    """Write data to a file whose name contains its hash, unless that file exists already."""
    short = quote(name, safe=" ")[:100]
    file = f"{short}.{hashlib.sha256(data).hexdigest()[:16]}{SUFFIX}"
    path = folder / file
    if not (path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data):
        write_atomic(path, data)
    return file


def _is_intact(path: Path) -> bool:
    """Whether a file has the content that its name tells the hash of."""
    try:
        return path.suffixes[-2][1:] == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except (OSError, IndexError):
        return False


# ---------------------------------------------------------------------------------------------------------
# Loading


def load(folder: PathLike, network: nn.Module, build: Callable[..., RectifiedModel]) -> RectifiedModel:
    """Read a model folder. `build` makes a model that does not touch the network yet.

    If another process saves to the folder in the meantime and removes files of the old index, everything is read again.
    """
    if not isinstance(network, nn.Module):
        raise UsageError(f"load needs the network as a torch.nn.Module, not {type(network).__name__}")
    index = Index.read(as_path(folder))
    for _ in range(RETRIES):
        try:
            return _load(index, network, build)
        except FileError:
            newer = index.newer()
            if newer is index:
                raise
            index = newer
    return _load(index, network, build)


def _load(index: Index, network: nn.Module, build: Callable[..., RectifiedModel]) -> RectifiedModel:
    """Read and check the base, then change the network."""
    folder, fields = index.folder, index.fields
    base_path = folder / fields["base"]
    meta, base = decode(base_path, BASE)
    present = {k: (tuple(v.shape), v.dtype) for k, v in network.state_dict().items()}
    check_tensors(base_path, base, present)
    check_finite(base_path, base, trained_keys(network))
    try:
        model = build(network, fields["options"], fields["head"], attach=False)
    except (RkrError, TypeError) as error:
        raise FileError(f"{folder / INDEX}: does not fit this network: {error}") from error
    fingerprint = digest(model.tensors.base_state(base), "rkr-base")
    if fingerprint != meta.get("fingerprint"):
        raise FileError(f"{base_path}: its tensors do not match its fingerprint")
    model.stored = Stored(index, fingerprint, {})
    # While the base is trained, a part of its task is in the base.
    first = [] if fields["base_frozen"] else [read_stored(model, name) for name in index.tasks]
    with torch.inference_mode(any(p.is_inference() for p in network.parameters())):  # as the network was built
        network.load_state_dict(base)
        fixed = set(fields["fixed"])
        for name, p in network.named_parameters():
            p.requires_grad_(name not in fixed)
    model.stored.sums = _sums(network)
    model.about = copy.deepcopy(fields["about"])
    model.user_requires_grad = {n: p.requires_grad for n, p in network.named_parameters()}
    model.attach()
    if fields["base_frozen"]:
        model.freeze_base()
        for name in index.tasks:
            model.tasks.put_stored(name)
    else:
        model.restore_tasks(first)
    if fields["current"] is not None:
        try:
            model.set_task(fields["current"])
        except FileError as error:
            warnings.warn(f"no task is in use, because the last one is damaged: {error}", stacklevel=4)
    return model


def read_stored(model: RectifiedModel, name: str) -> TaskState:
    """Read a task from the folder that the model comes from."""
    assert model.stored is not None
    index = model.stored.index
    try:
        return _read_task(model, name, index.tasks[name])
    except FileError:
        newer = index.newer()
        file = newer.tasks.get(name)
        if file == index.tasks[name]:
            raise
        if file is None:
            raise FileError(
                f"{index.folder}: another process has removed the task {name!r}: model.follow() does so here"
            ) from None
        model.stored.index = replace(index, tasks={**index.tasks, name: file})
        return _read_task(model, name, file)


def _read_task(model: RectifiedModel, name: str, file: str) -> TaskState:
    assert model.stored is not None
    path = model.stored.index.folder / file
    task = load_task(model, path, None, model.stored.base, model.tasks.cast)
    if task.name != name:
        raise FileError(f"{path}: contains the task {task.name!r}, not {name!r}")
    return task


def follow(model: RectifiedModel) -> Changes:
    """Take over what other processes have changed in the model's folder. Quick if they have not."""
    if model.stored is None:
        raise UsageError("this model has no folder to follow: it was neither loaded nor saved")
    old, tasks = model.stored.index, model.tasks
    new = old.newer()
    if new is old:
        return Changes()
    if any(new.fields[key] != old.fields[key] for key in old.fields if key not in ("about", "current")):
        raise FileError(f"{old.folder}: holds another base or other options now: load it again with rkr.load")
    changes = compare(old.tasks, new.tasks)
    clash = [n for n in tasks if n in changes.names and (n not in old.tasks or not tasks.is_as_stored(n))]
    if clash:
        raise FileError(
            f"{old.folder}: another process has changed the task {clash[0]!r}, and so has this model: save_task it "
            "elsewhere and remove_task it, then follow"
        )
    current = model.task
    for name in changes.removed:
        if name in tasks:
            model.remove_task(name)
    model.stored.index = new
    for name in (*changes.replaced, *changes.added):
        tasks.put_stored(name)
    if model.about == old.fields["about"]:
        model.about = copy.deepcopy(new.fields["about"])
    if current in changes.replaced:
        assert current is not None
        model.active.task = None
        model.set_task(current)
    return changes


# ---------------------------------------------------------------------------------------------------------
# Folders without a network


def read_about(folder: PathLike) -> ModelAbout:
    """What a model folder says about itself, from its index and its base's header: quick, and no network is needed.

    Tensors are not checked. `rkr.core.read_task_about` tells the same of one of its task files.
    """
    index = Index.read(as_path(folder))
    for _ in range(RETRIES):
        try:
            return _about(index)
        except FileError:
            newer = index.newer()
            if newer is index:
                raise
            index = newer
    return _about(index)


def _about(index: Index) -> ModelAbout:
    fields, path = index.fields, index.folder / index.fields["base"]
    meta, _ = read_metadata(path, BASE)
    if "fingerprint" not in meta:
        raise FileError(f"{path}: its metadata is incomplete ('fingerprint')")
    tasks = {name: index.folder / file for name, file in index.tasks.items()}
    options, head, current = fields["options"], fields["head"], fields["current"]
    return ModelAbout(index.folder, fields["about"], meta["fingerprint"], options, head, current, tasks)


def add_task_file(folder: PathLike, path: PathLike, name: str | None = None, replace: bool = False) -> None:
    """Add a task file to a model folder. Its cost does not depend on the number of tasks.

    Args:
        folder: The model folder.
        path: A file written by `save_task`, or one of a model folder.
        name: Another name for the task than the one in the file.
        replace: Whether a task with the same name is replaced; an error otherwise.
    """
    folder, path = as_path(folder), as_path(path)
    stated, data = read_task_about(path), _named(path, name)
    name = stated.name if name is None else name
    _check_folder(folder)
    with locked(folder):
        index = _frozen(folder)
        if stated.base != _about(index).base:
            raise FileError(f"{path}: belongs to another base network (fingerprint {stated.base[:12]}) than {folder}")
        if stated.layout != index.fields["options"].layout or (stated.classes is None) != (
            index.fields["head"] is None
        ):
            raise FileError(f"{path}: belongs to a model with another layout or head than {folder}")
        if name in index.tasks and not replace:
            raise UsageError(f"{folder} has a task named {name!r} already: choose another name, or replace it")
        index.committed([{"put": name, "file": _write_by_content(folder, name, data)}])


def drop_task(folder: PathLike, name: str) -> None:
    """Remove a task from a model folder, with its file."""
    folder = as_path(folder)
    _check_folder(folder)
    with locked(folder):
        index = _frozen(folder)
        _file_in(index, name)
        index.committed([{"drop": name}])


def rename_task(folder: PathLike, old: str, new: str) -> None:
    """Give a task of a model folder another name. It keeps its place and all that it computes."""
    folder = as_path(folder)
    _check_folder(folder)
    with locked(folder):
        index = _frozen(folder)
        data = _named(_file_in(index, old), new)
        if new in index.tasks:
            raise UsageError(f"{folder} has a task named {new!r} already: choose another name")
        index.committed([{"rename": old, "to": new, "file": _write_by_content(folder, new, data)}])


def _check_folder(folder: Path) -> None:
    """There must be a model, before a lock is made."""
    Index.read(folder)


def _frozen(folder: Path) -> Index:
    """The index of a folder to which tasks can be added."""
    index = Index.read(folder)
    if not index.fields["base_frozen"]:
        raise UsageError(f"{folder}: its base is still being trained with its first task: load it and go on with that")
    return index


def _file_in(index: Index, name: str) -> Path:
    if name not in index.tasks:
        known = ", ".join(map(repr, list(index.tasks)[:8])) or "none"
        raise UsageError(f"{index.folder} has no task named {name!r}; tasks: {known}")
    return index.folder / index.tasks[name]


def _named(path: Path, name: str | None) -> bytes:
    """A task file, checked, with another name for its task."""
    meta, tensors = decode(path, TASK)
    if name is None or name == meta.get("task"):
        return path.read_bytes()
    check_name(name)
    return encode(tensors, {**meta, **TASK.stated, "task": name})

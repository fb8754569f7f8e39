"""Export of a model's tasks for other programs: ONNX files for onnxruntime, and files of `torch.export`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rkr.atomic import write_atomic
from rkr.core.export import onnx
from rkr.core.export.check import check
from rkr.core.export.example import Example
from rkr.core.export.program import pt2_bytes, trace
from rkr.core.export.styles import Adapter, All, Merged
from rkr.core.files import PathLike, as_path, base_fingerprint, task_fingerprint
from rkr.core.portable.network import plain_state
from rkr.core.state import TaskState
from rkr.errors import FileError, UsageError
from rkr.versions import Format

if TYPE_CHECKING:
    from rkr.core.model import RectifiedModel

EXPORT = Format("rkr-export", 1)
ENDINGS = {"onnx": ".onnx", "pt2": ".pt2"}
ADAPTER_ENDING = ".onnx_adapter"
_FORMS: dict[str, type[Merged]] = {"merged": Merged, "all": All, "adapter": Adapter}


@torch.inference_mode(False)
def export(
    model: RectifiedModel,
    path: PathLike,
    *,
    tasks: str | Sequence[str] | None = None,
    style: str = "merged",
    example: Tensor | Sequence[Any] | Mapping[str, Any] | None = None,
    format: str | None = None,
) -> Path:
    """Write tasks to a file that other programs run without this package: in evaluation mode, for any batch size.

    The file is run and compared with the model before it takes its place.

    Args:
        model: The model. It stays as it is.
        path: The file to write.
        tasks: A task's name, or several for `style="all"`. By default the task in use; for "all", every task.
        style: "merged": one task, as a plain network. "all": the base once and the tensors of every task; one more
            input, `task`, is the position of each sample's task (int64), and rows are padded with -inf beyond its
            classes. "adapter": the base once, and a task's tensors as inputs, named as in its file;
            `export_adapter` writes them for onnxruntime's `LoraAdapter`.
        example: An input of the network, its arguments as a tuple, or by name in a dictionary. By default noise of
            the network's `input_shape`, if it has that attribute. The first dimension is the batch; a few samples do.
        format: "onnx" (needs `pip install 'rkr[onnx]'`) or "pt2" (`torch.export`). By default by the path's ending.

    Returns:
        The path.

    Raises:
        UsageError: An argument is wrong, the network cannot be traced, or the file does not answer as the model does.
        FileError: The file cannot be written.

    Example:
        >>> import rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(classes=10), head="fc").eval()
        >>> task = model.add_task("digits", classes=10, train_base=False)
        >>> rkr.export(model, "digits.pt2").name
        'digits.pt2'
    """
    path, kind = _checked_path(path, format)
    chosen = _chosen(model, tasks, style)
    if kind == "onnx":
        onnx.require("onnx", "onnxscript", "onnxruntime")
    call = Example.read(model.network, example)
    form = _FORMS[style](model, chosen, call)
    program = trace(form.network, call, form.extra, form.sizes, "output" if model.head is None else "logits")
    metadata = {
        **EXPORT.stated,
        "style": style,
        "base": base_fingerprint(model),
        "tasks": [] if style == "adapter" else [_described(model, task) for task in chosen],
    }
    if kind == "onnx":
        data = onnx.encode(program, metadata, frozenset(form.extra.get("tensors", ())))
        run = onnx.runner(data)
    else:
        data, run = pt2_bytes(program, metadata), program.run
    for case in form.cases():
        check(run, case, form.hint)
    write_atomic(path, data)
    return path


def export_adapter(model: RectifiedModel, task: str, path: PathLike) -> Path:
    """Write a task's tensors for onnxruntime's `LoraAdapter`, to use with a file of `export(style="adapter")`.

    Its model version is the number that the first 7 hexadecimal digits of the base's fingerprint make: that of the
    exported file has to begin with the same ones.

    Args:
        model: The model. It stays as it is.
        task: The task's name.
        path: The file to write; its name ends in ".onnx_adapter".

    Returns:
        The path.

    Raises:
        UsageError: No task has this name, or onnxruntime is not installed.
        FileError: The file cannot be written.

    Example:
        >>> import rkr
        >>> model = rkr.rectify(rkr.networks.small_cnn(classes=10), head="fc").eval()
        >>> task = model.add_task("digits", classes=10, train_base=False)
        >>> rkr.export_adapter(model, "digits", "digits.onnx_adapter").name
        'digits.onnx_adapter'
    """
    path = _writable(as_path(path), ADAPTER_ENDING)
    _check_model(model)
    state = model.tasks[task]
    onnx.require("onnxruntime")
    write_atomic(path, onnx.adapter_bytes(plain_state(model, state), int(base_fingerprint(model)[:7], 16)))
    return path


def _checked_path(path: PathLike, format: str | None) -> tuple[Path, str]:
    """The path and its format, before anything takes time."""
    path = as_path(path)
    if format is not None and format not in ENDINGS:
        raise UsageError(f"format must be one of {', '.join(map(repr, ENDINGS))}, not {format!r}")
    kinds = [kind for kind, ending in ENDINGS.items() if path.suffix == ending]
    if format is None and not kinds:
        raise UsageError(f"{path}: its name must end in {' or '.join(ENDINGS.values())}")
    kind = format or kinds[0]
    return _writable(path, ENDINGS[kind]), kind


def _writable(path: Path, ending: str) -> Path:
    if path.suffix != ending:
        raise UsageError(f"{path}: the name of such a file must end in {ending}")
    if path.is_dir():
        raise FileError(f"{path}: cannot be written: it is a folder")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise FileError(f"{path}: cannot be written to {above}")
    return path


def _check_model(model: RectifiedModel) -> None:
    model.check_layers()
    if not model.is_rectification:
        raise UsageError(f"{type(model.update).__name__} cannot be exported: only RKR's rectification can")
    if len(model.tasks) == 0:
        raise UsageError("the model has no tasks to export: add one with add_task")


def _chosen(model: RectifiedModel, tasks: str | Sequence[str] | None, style: str) -> list[TaskState]:
    """The tasks to export."""
    if style not in _FORMS:
        raise UsageError(f"style must be one of {', '.join(map(repr, _FORMS))}, not {style!r}")
    _check_model(model)
    if style == "adapter":
        if tasks is not None:
            raise UsageError('style="adapter" holds no task: leave tasks= out, and write each with rkr.export_adapter')
        return []
    if tasks is None:
        names = list(model.tasks) if style == "all" or len(model.tasks) == 1 else [model.task]
        if names == [None]:
            raise UsageError("no task is in use: say which one to export, tasks=...")
    else:
        names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise UsageError("tasks is empty: name at least one")
    found = [model.tasks[name] for name in names]  # type: ignore[index]
    if len(set(names)) < len(names):
        raise UsageError(f"tasks names a task twice: {names}")
    if style == "merged" and len(found) > 1:
        raise UsageError(f'style="merged" exports one task, not {len(found)}: use style="all", or a file for each')
    return found


def _described(model: RectifiedModel, task: TaskState) -> dict[str, Any]:
    names = None if task.class_names is None else list(task.class_names)
    fingerprint = task_fingerprint(model, task)
    return {"name": task.name, "classes": task.classes, "class_names": names, "fingerprint": fingerprint}

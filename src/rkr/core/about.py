"""Free information beside the tensors: how to build the network, how a task came to be.

A model and each of its tasks have a dictionary `about`, which is saved with them. It holds JSON values only, so nothing
is unpickled, and has no part in fingerprints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkr.core.options import Options
from rkr.errors import FileError, UsageError

LIMIT = 1_000_000  # bytes of one dictionary in a file
DEPTH = 50  # of dictionaries and lists within each other


@dataclass(frozen=True)
class TaskAbout:
    """What a task file says about itself, without its tensors.

    Attributes:
        path: The file.
        name: The task's name.
        classes: Number of classes, or None without a head.
        class_names: Their names, if they have any.
        about: What was stored as `task.about`.
        base: Fingerprint of the base network that the task belongs to.
        rank: K.
        layout: The option of the same name.
        bytes: Size of the file.
    """

    path: Path
    name: str
    classes: int | None
    class_names: tuple[str, ...] | None
    about: dict[str, Any]
    base: str
    rank: int
    layout: str
    bytes: int


@dataclass(frozen=True)
class ModelAbout:
    """What a model folder says about itself, without any tensors.

    Attributes:
        path: The folder.
        about: What was stored as `model.about`.
        base: Fingerprint of the base network, as in the files of its tasks.
        options: The options of `rectify`.
        head: Name of the classification layer, or None.
        current: The task in use when the model was saved.
        tasks: The file of each task by name, in order; `read_task_about` reads one.
    """

    path: Path
    about: dict[str, Any]
    base: str
    options: Options
    head: str | None
    current: str | None
    tasks: Mapping[str, Path]


def check_about(about: Any, whose: str) -> str:
    """The text of a dictionary `about`. Raise UsageError if it is not JSON, or too large."""
    if not isinstance(about, dict):
        raise UsageError(f"about of {whose} must be a dictionary, not {type(about).__name__}")
    _check(about, "about", whose, 0)
    try:
        text = json.dumps(about, allow_nan=False)
    except ValueError as error:  # a whole number with thousands of digits
        raise UsageError(f"about of {whose} cannot be written as JSON: {error}") from None
    if len(text) > LIMIT:  # ASCII: as many bytes
        raise UsageError(
            f"about of {whose} takes {len(text):,} bytes, but {LIMIT:,} is the limit: store large data in files of "
            "its own, and their names here"
        )
    return text


def _check(value: Any, place: str, whose: str, depth: int) -> None:
    """Only what JSON gives back unchanged."""
    if depth > DEPTH:
        raise UsageError(f"about of {whose} is nested more than {DEPTH} deep: make it flatter")
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise UsageError(f"{place} of {whose} has the key {key!r}: keys must be text")
            _check(item, f"{place}[{key!r}]", whose, depth + 1)
    elif type(value) is list:
        for i, item in enumerate(value):
            _check(item, f"{place}[{i}]", whose, depth + 1)
    elif type(value) is float:
        if not abs(value) < float("inf"):
            raise UsageError(f"{place} of {whose} is {value}, which JSON does not have: use None or text")
    elif value is not None and type(value) not in (str, int, bool):
        raise UsageError(
            f"{place} of {whose} is a {type(value).__name__}: only dictionaries, lists, text, numbers, True, False and "
            "None can be stored"
        )


def read_about_text(path: Path, text: str | None) -> dict[str, Any]:
    """The dictionary from a file's metadata. Files of earlier versions have none."""
    if text is None:
        return {}
    try:
        if len(text) > LIMIT:
            raise ValueError(f"it has {len(text):,} bytes")
        return checked_about(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: its field 'about' is invalid: {error}") from error


def checked_about(value: Any) -> dict[str, Any]:
    """What was read as `about`. Raise ValueError if `check_about` would not have let it be written."""
    try:
        check_about(value, "the file")
    except UsageError as error:
        raise ValueError(str(error)) from error
    return dict(value)

"""Checks of what users pass to a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from torch import Tensor

from rkr.errors import UsageError


def check_name(name: object) -> None:
    """A task's name must be text that files can hold."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"a task's name must be text, not {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name {name!r} has characters that no file can hold") from None


def class_list(classes: int | Sequence[str] | None, head: str | None) -> tuple[int | None, list[str] | None]:
    """Number and names of a task's classes, from either."""
    if head is None:
        if classes is not None:
            raise UsageError(
                "this model has no head, so its tasks take no classes: leave `classes` out, or name the network's "
                "classification layer, rectify(network, head='fc')"
            )
        return None, None
    if classes is None:
        raise UsageError("say how many classes the task has: add_task(name, classes=10)")
    if isinstance(classes, str | bool | float | Tensor) or not isinstance(classes, Integral | Iterable):
        raise UsageError(f"classes must be a whole number or a list of names, not {classes!r}")
    if isinstance(classes, Integral):
        classes = int(classes)
        if classes < 1:
            raise UsageError(f"a task needs at least 1 class, not {classes}")
        return classes, None
    names = [str(c) for c in classes]
    if not names:
        raise UsageError("a task needs at least 1 class, not an empty list")
    if len(set(names)) != len(names):
        raise UsageError("the names of a task's classes must differ from each other")
    return len(names), names

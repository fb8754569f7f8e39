"""Importing what recipes, commands and run folders name: "my_package.module:Name"."""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
from pathlib import Path
from typing import Any

from rkr.errors import UsageError

_folders: list[str] = []  # of recipes and commands


def importable(folder: str | os.PathLike[str]) -> None:
    """Let dotted names be found in a folder, after everything else that can be imported."""
    path = str(Path(folder).absolute())
    if path not in sys.path:
        sys.path.append(path)
        importlib.invalidate_caches()
    if path not in _folders:
        _folders.append(path)


def search_path() -> str:
    """PYTHONPATH for processes that must find the same modules."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *_folders)))


def own_modules() -> dict[str, str]:
    """The Python files in the folders of recipes and commands that are imported so far: their paths and texts."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        for folder in _folders:
            place = Path(folder, *name.split("."))
            if file and Path(file) in (place.with_suffix(".py"), place / "__init__.py"):
                found[Path(file).relative_to(folder).as_posix()] = Path(file).read_text("utf-8")
    return found


def imported(name: str) -> Any:
    """The object of a dotted name, such as "my_package.module:Name"."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"give package.module:name, not {name!r}")
    top = module.partition(".")[0]
    try:
        found = importlib.import_module(module)
        made = operator.attrgetter(attribute)(found)
    except (Exception, SystemExit) as error:  # importing runs other people's code
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            raise UsageError(
                f"{name}: there is no module {top!r}: install it, or add the folder that has it to PYTHONPATH"
            ) from error
        said = " ".join(str(error).split())
        raise UsageError(f"{name} cannot be imported ({type(error).__name__}: {said})") from error
    _check_place(top)
    return made


def _check_place(top: str) -> None:
    """Raise UsageError if a recipe's folder has a module that is hidden by another of the same name.

    A copy is none: a node of a cluster may find a module that was sent to it in the directory of the command, too.
    """
    used = getattr(sys.modules.get(top), "__file__", None)
    for folder in _folders:
        for path in (Path(folder, f"{top}.py"), Path(folder, top, "__init__.py")):
            if used is not None and path.exists() and path.read_bytes() != Path(used).read_bytes():
                raise UsageError(f"{path} is hidden by {used}, which has the same name: rename one of them")


def place(made: Any) -> str:
    """The dotted name of a class or function."""
    return f"{made.__module__}:{made.__qualname__}" if hasattr(made, "__qualname__") else repr(made)


def docstring(made: Any) -> str:
    """A docstring; "" for a class that has none of its own."""
    own = made.__dict__.get("__doc__") if isinstance(made, type) else made.__doc__
    return inspect.cleandoc(own or "")


def first_line(made: Any) -> str:
    """The first line of a docstring."""
    return docstring(made).partition("\n")[0]

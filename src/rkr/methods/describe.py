"""Describes a method, its options and their values, from the docstrings."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from rkr.core import Options

if TYPE_CHECKING:
    from rkr.registry import Method

SECTION = re.compile(r"^(?:Args|Attributes):\n", re.MULTILINE)
AFTER = re.compile(r"^(?:Returns|Raises|Example):\n", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)
SEE = re.compile(r"[Ss]ee `OneNetwork`\.")  # the base class says it


def about(method: Method) -> str:
    """The first part of the learner's docstring."""
    return SECTION.split(inspect.getdoc(method.learner) or "")[0].strip()


def option_texts(method: Method) -> dict[str, tuple[object, str]]:
    """The value of each option and its text in the docstring."""
    said: dict[str, str] = {}
    for kind in (Options, *reversed(method.learner.__mro__)):
        for name, text in _entries(inspect.cleandoc(kind.__doc__ or "")).items():
            said[name] = SEE.sub(said.get(name, ""), text)
    own = {name: value for name, value in method.options.items() if name not in method.learner.recipe_options}
    return {name: (value, said.get(name, "")) for name, value in own.items()}


def _entries(text: str) -> dict[str, str]:
    """The entries of a docstring's argument list."""
    parts = SECTION.split(text)
    if len(parts) == 1:
        return {}
    pairs = iter(ENTRY.split(AFTER.split(parts[-1])[0])[1:])  # a name, its text, the next name, ...
    return {name: " ".join(found.replace("``", "").split()) for name, found in zip(pairs, pairs, strict=True)}

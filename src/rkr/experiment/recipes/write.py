"""Writes recipes that a program makes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rkr.experiment.recipes.recipe import Recipe


def recipe_text(recipe: Recipe) -> str:
    """A recipe as the TOML file that `load_recipe` reads; its name is that of the file."""
    values = recipe.model_dump(mode="json", exclude={"name", "paper"}, exclude_none=True)
    values = {name: value for name, value in values.items() if value != {}}
    values["network"] |= values["network"].pop("arguments")
    values["methods"] = {
        name: {"learner": method["learner"], **method["options"], **({"training": own} if own else {})}
        for name, method in values["methods"].items()
        for own in [method["training"]]
    }
    return toml_text(values)


def toml_text(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Plain values as TOML: first what is no table, then the tables; nothing for None."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if _is_plain(value)]
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = (*path, _key(key))
            plain = not value or any(map(_is_plain, value.values()))  # one that holds only tables is named by them
            lines += [*(["", f"[{'.'.join(inner)}]"] if plain else []), toml_text(value, inner).rstrip("\n")]
    return "\n".join(lines).lstrip("\n") + "\n"


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)

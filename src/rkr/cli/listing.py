"""The names that commands accept: recipes, methods, networks, datasets."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from rkr.errors import UsageError
from rkr.importing import docstring, imported
from rkr.registry import IN_WORDS, METHODS, Entry, Method, datasets, networks

SECTIONS = {"network": "[network]", "dataset": "[stream.options]"}  # of recipes


def everything() -> dict[str, dict[str, str]]:
    """All names of each kind, with a one-line description."""
    from rkr.experiment.recipes.load import titles

    return {
        "recipes": titles(),
        "methods": _summaries(METHODS["images"]),
        "zero-shot methods": _summaries(METHODS["zero-shot"]),
        "networks": _summaries(networks),
        "datasets": _summaries(datasets),
    }


def _summaries(table: Mapping[str, Entry]) -> dict[str, str]:
    return {name: entry.summary for name, entry in table.items()}


def in_words(name: str) -> str:
    """The file of a recipe, or the description and options of a method, network or dataset.

    Methods also list the values that `rkr tune` tries.
    """
    from rkr.experiment.recipes.load import SHIPPED, recipe_names

    if name in recipe_names():
        return (SHIPPED / f"{name}.toml").read_text().rstrip()
    if parts := _parts(name):
        sections = " or ".join(SECTIONS[entry.kind] for entry in parts)
        lines = [f"{name}: {parts[0].summary}", ""]
        if text := docstring(parts[0].object):
            lines += [text, ""]
        lines.append(f"In a recipe, under {sections}:" if parts[0].options else "It has no options.")
        lines += [f"  {key} = {json.dumps(value)}" for key, value in parts[0].options.items()]
        return "\n".join(lines)
    return "\n\n".join(_described(name, setting, method) for setting, method in _methods(name).items())


def options_of(name: str) -> dict[str, Any]:
    """The settings of a recipe, the options of a network or dataset, or those of a method for each setting."""
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.recipes.load import recipe_names
    from rkr.methods.describe import option_texts

    if name in recipe_names():
        return load_recipe(name).model_dump(mode="json")
    if parts := _parts(name):
        return {entry.kind: entry.options for entry in parts}
    found = {setting: option_texts(method) for setting, method in _methods(name).items()}
    own = {setting: method.learner.own_training for setting, method in _methods(name).items()}
    return {
        setting: {option: value for option, (value, _) in texts.items()}
        | ({"training": dict(own[setting])} if own[setting] else {})
        for setting, texts in found.items()
    }


def _parts(name: str) -> list[Entry]:
    """The network or dataset of a name. A function that is not registered could be either, a class only a network."""
    if _is_learner(name):
        return []
    found: list[Entry] = [table[name] for table in (networks, datasets) if name in table]
    if ":" not in name:
        return found[:1]
    registered: list[Entry] = [table[name] for table in (networks, datasets) if table.of(imported(name))]
    return registered or (found[:1] if isinstance(found[0].object, type) else found)


def _is_learner(name: str) -> bool:
    """Whether a dotted name is that of a method. As a class that makes a module it could be a network too."""
    made = imported(name) if ":" in name else None
    return isinstance(made, type) and hasattr(made, "setting")


def _methods(name: str) -> dict[str, Method]:
    """The methods with a name, by setting."""
    from rkr.experiment.recipes.load import recipe_names
    from rkr.validation import choose

    if _is_learner(name):
        setting = imported(name).setting
        return {IN_WORDS[setting]: METHODS[setting][name]}
    found = {IN_WORDS[setting]: table[name] for setting, table in METHODS.items() if name in table}
    if not found:
        names = dict.fromkeys((*METHODS["images"], *METHODS["zero-shot"], *recipe_names(), *networks, *datasets))
        raise UsageError(f"no method, recipe, network or dataset {name!r}{choose(name, names)}")
    return found


def _described(name: str, kind: str, method: Method) -> str:
    from rkr.methods.describe import about, option_texts

    options = option_texts(method)
    lines = [f"{name} (for {kind}): {method.summary}", "", about(method), ""]
    dotted = ":" in name
    section = "NAME" if dotted else name
    lines.append(f"In a recipe, under [methods.{section}]:" if options or dotted else "It has no options.")
    if dotted:
        lines.append(f"  learner = {json.dumps(name)}")
    for option, (value, text) in options.items():
        shown = "(none)" if value is None else json.dumps(value, ensure_ascii=False)
        lines += [f"  {option} = {shown}", textwrap.indent(textwrap.fill(text, 100), " " * 6)]
    if own := method.learner.own_training:
        lines.append(f"Its own optimiser, in place of the recipe's, under [methods.{section}.training]:")
        lines += [f"  {key} = {json.dumps(value)}" for key, value in own.items()]
    for option, values in method.learner.grid.items():
        if option in options:
            lines.append(f"`rkr tune` tries {option} = {', '.join(f'{value:g}' for value in values)}.")
    return "\n".join(lines)

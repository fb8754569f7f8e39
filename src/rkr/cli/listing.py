"""What there is to choose from: recipes, methods, networks, data sets."""

from __future__ import annotations

import inspect
import json
import textwrap
from typing import TYPE_CHECKING, Any

from rkr.errors import UsageError

if TYPE_CHECKING:
    from rkr.methods import Method


def everything() -> dict[str, dict[str, str]]:
    """For each kind all names, with a line for each."""
    from rkr.data import SOURCES
    from rkr.experiment.recipes import list_recipes
    from rkr.experiment.recipes.known import NETWORKS
    from rkr.methods import METHODS, ZERO_SHOT_METHODS

    return {
        "recipes": {recipe.name: recipe.title for recipe in list_recipes()},
        "methods": {name: method.description for name, method in METHODS.items()},
        "zero-shot methods": {name: method.description for name, method in ZERO_SHOT_METHODS.items()},
        "networks": {name: network.description for name, network in NETWORKS.items()},
        "datasets": {name: source.description for name, source in SOURCES.items()},
    }


def in_words(name: str) -> str:
    """The file of a recipe; of a method or network what it is, and all its options with their values.

    Of a method also what `rkr tune` tries.
    """
    from rkr.experiment.recipes.known import NETWORKS, network_arguments, network_builder
    from rkr.experiment.recipes.load import SHIPPED, recipe_names

    if name in recipe_names():
        return (SHIPPED / f"{name}.toml").read_text().rstrip()
    if name in NETWORKS:
        lines = [f"{name}: {NETWORKS[name].description}", "", inspect.getdoc(network_builder(name)) or "", ""]
        lines += ["In a recipe, under [network]:"]
        lines += [f"  {key} = {json.dumps(value)}" for key, value in network_arguments(name).items()]
        return "\n".join(lines)
    return "\n\n".join(_described(name, kind, method) for kind, method in _methods(name).items())


def options_of(name: str) -> dict[str, Any]:
    """The settings of a recipe, the options of a network, or those of a method for each kind of tasks."""
    from rkr.experiment.recipes import load_recipe
    from rkr.experiment.recipes.known import NETWORKS, network_arguments
    from rkr.experiment.recipes.load import recipe_names
    from rkr.methods.describe import option_texts

    if name in recipe_names():
        return load_recipe(name).model_dump(mode="json")
    if name in NETWORKS:
        return {"network": network_arguments(name)}
    found = {kind: option_texts(method) for kind, method in _methods(name).items()}
    return {kind: {option: value for option, (value, _) in texts.items()} for kind, texts in found.items()}


def _methods(name: str) -> dict[str, Method]:
    """The methods of a name, by the kind of tasks that they are for."""
    from rkr.data import SOURCES
    from rkr.experiment.recipes.known import NETWORKS
    from rkr.experiment.recipes.load import recipe_names
    from rkr.experiment.recipes.messages import choose
    from rkr.methods import METHODS, ZERO_SHOT_METHODS

    kinds = {"images": METHODS, "zero-shot tasks": ZERO_SHOT_METHODS}
    found = {kind: methods[name] for kind, methods in kinds.items() if name in methods}
    if not found:
        if name in SOURCES:
            raise UsageError(f"{name} is a data set: `rkr list` says what it is, and there is no more to it")
        names = dict.fromkeys((*METHODS, *ZERO_SHOT_METHODS, *recipe_names(), *NETWORKS))
        raise UsageError(f"no method, recipe or network {name!r}{choose(name, names)}")
    return found


def _described(name: str, kind: str, method: Method) -> str:
    from rkr.methods.describe import about, option_texts

    options = option_texts(method)
    lines = [f"{name} (for {kind}): {method.description}", "", about(method), ""]
    lines.append(f"In a recipe, under [methods.{name}]:" if options else "It has no options.")
    for option, (value, text) in options.items():
        shown = "(none)" if value is None else json.dumps(value, ensure_ascii=False)
        lines += [f"  {option} = {shown}", textwrap.indent(textwrap.fill(text, 100), " " * 6)]
    for option, values in method.learner.grid.items():
        if option in options:
            lines.append(f"`rkr tune` tries {option} = {', '.join(f'{value:g}' for value in values)}.")
    return "\n".join(lines)

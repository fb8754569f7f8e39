"""Recipes from files: those that come with the package, by name, and the user's own, by path."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from rkr.errors import UsageError
from rkr.experiment.recipes.recipe import Recipe
from rkr.importing import importable
from rkr.validation import choose, in_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SHIPPED = Path(__file__).parent


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def titles() -> dict[str, str]:
    """The title of each recipe that comes with the package, without checking it."""
    return {name: parsed(SHIPPED / f"{name}.toml", name)["title"] for name in recipe_names()}


def list_recipes() -> list[Recipe]:
    """All recipes that come with the package."""
    return [load_recipe(name) for name in recipe_names()]


def load_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe by its name, or from a TOML file, and check all that can be checked before a run."""
    given = os.fspath(name_or_path)
    if given in recipe_names():
        path = SHIPPED / f"{given}.toml"
        where = path.name
    elif given.endswith(".toml") or os.path.basename(given) != given:
        path = Path(given).expanduser()
        where = given
        importable(path.absolute().parent)  # for methods, networks and sources by dotted name
    else:
        raise UsageError(f"no recipe {given!r}{choose(given, recipe_names())}; or give the path of a .toml file")
    values = parsed(path, where)
    if "name" in values:
        raise UsageError(f"{where}: name: a recipe is called like its file; leave this key out")
    _place_folder(values, path)
    with in_words(Recipe, where):
        return Recipe.model_validate({"name": path.stem, **values})


def parsed(path: Path, where: str) -> dict[str, Any]:
    """The values of a TOML file; `where` is its name in errors."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: is not a text file in UTF-8") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at (?:line (\d+), column \d+|end of document)\)", str(error))
        line = place[1] if place and place[1] else max(1, len(text.splitlines()))
        what = str(error)[: place.start()].strip() if place else str(error)
        raise UsageError(f"{where}: line {line}: {what[:1].lower()}{what[1:]}") from None


def _place_folder(values: dict[str, Any], path: Path) -> None:
    """A folder of images is named from where the recipe lies, not from where the command is given."""
    stream = values.get("stream")
    options = stream.get("options") if isinstance(stream, dict) else None
    if isinstance(options, dict) and isinstance(options.get("path"), str):
        options["path"] = str((path.absolute().parent / Path(options["path"]).expanduser()).resolve())

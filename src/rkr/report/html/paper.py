"""The paper's numbers for a recipe, read from the recipe file without building its network."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rkr.experiment.recipes.load import SHIPPED, recipe_names
from rkr.experiment.recipes.recipe import Recipe
from rkr.experiment.recipes.settings import PaperNumber, ZeroShotSettings
from rkr.report.protocol import CLASSIFIER, classifier_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Numbers = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Published:
    """Title and description of a shipped recipe, and the paper's numbers in percent. Empty for other recipes."""

    title: str = ""
    about: str = ""
    numbers: Numbers = field(default_factory=dict)  # value and half-width; for zero-shot tasks, the mean H
    capacity: Mapping[str, float] = field(default_factory=dict)
    zero_shot: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # method -> "CUB H" -> value
    changed: tuple[str, ...] = ()  # how the run deviates from the recipe; then there are no numbers
    printed: bool = False  # whether the paper has numbers for the unchanged recipe


STREAM = {"kind": "split", "validation": 0.0, "part": "test", "first": None}  # the defaults of recipe files


def published(settings: Mapping[str, Any]) -> Published:
    """The published numbers of the recipe of a run, if its settings are those of the recipe."""
    name = settings.get("recipe")
    if not isinstance(name, str) or name not in recipe_names():
        return Published()
    values = tomllib.loads((SHIPPED / f"{name}.toml").read_text(encoding="utf-8"))
    title, about = str(values["title"]), str(values.get("about", ""))
    changed = tuple(_changes(settings, values))
    in_paper = bool(values.get("paper"))
    if changed:
        return Published(title, about, changed=changed, printed=in_paper)
    recipe = _unchecked(values)
    methods = dict.fromkeys(number.method for number in recipe.paper)
    found: dict[str, dict[str, float]] = {}
    order = str(settings.get("order", recipe.orders[0]))
    of_one_order = any(number.order == order for number in recipe.paper)
    tasks: tuple[str, ...] = ()
    if isinstance(recipe.stream, ZeroShotSettings):
        tasks = recipe.stream.ordered(order if of_one_order else "fixed")
    for method in methods if tasks else ():
        for metric in ("U", "S", "H"):
            printed = recipe.published(method, metric, order)
            if isinstance(printed, tuple):
                for task, value in zip(tasks, printed, strict=True):
                    found.setdefault(method, {})[f"{task} {metric}"] = value
    capacity = {method: _plain(recipe.published(method, "capacity")) for method in methods}
    return Published(
        title,
        about,
        recipe.published_numbers(order),
        {method: value for method, value in capacity.items() if value is not None},
        found,
        printed=in_paper,
    )


def _plain(value: float | tuple[float, ...] | None) -> float | None:
    return fmean(value) if isinstance(value, tuple) else value


def _unchecked(values: Mapping[str, Any]) -> Recipe:
    """The parts of the recipe that published numbers are computed from, without validation."""
    zero_shot = values["stream"].get("kind") == "zero-shot"
    stream = ZeroShotSettings.model_construct(datasets=tuple(values["stream"]["datasets"])) if zero_shot else None
    paper = tuple(PaperNumber.model_validate(number) for number in values.get("paper", ()))
    return Recipe.model_construct(orders=tuple(values["orders"]), stream=stream, paper=paper)


def _changes(settings: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The settings of a run that differ from the recipe file."""
    stream, training = settings.get("stream"), settings.get("training")
    if not isinstance(stream, Mapping) or not isinstance(training, Mapping):
        return ["unknown settings"]
    changes = []
    network = settings.get("network")
    built = {**network, **(network.get("arguments") or {})} if isinstance(network, Mapping) else {}
    for part, own in (("stream", stream), ("network", built)):
        for key, wanted in {**(STREAM if part == "stream" else {}), **values[part]}.items():
            if key in own and key not in ("limit", "seed") and own[key] != wanted:  # older runs lack some settings
                changes.append(f"{part} {_changed(key, own[key], wanted)}")
    for key, wanted in values["training"].items():
        here = training.get(key)
        if isinstance(wanted, Mapping) and isinstance(here, Mapping):
            wanted, here = dict(wanted), {name: here.get(name) for name in wanted}
        if key not in ("seed", "memory_format") and here != wanted and key in training:
            changes.append(_changed(key, here, wanted))
    given = values.get("classifier", {})
    classifier = {**({} if "epochs" in given else {"steps": "validation"}), **CLASSIFIER, **given}
    for key, own in classifier_of(settings).items():
        if own != classifier.get(key):
            changes.append(f"classifier {_changed(key, own, classifier.get(key))}")
    if stream.get("limit") is not None:
        changes.append(f"at most {stream['limit']} training images per class")
    return changes


def _changed(key: str, own: Any, wanted: Any) -> str:
    return f"{key} {_words(own)}" + ("" if wanted is None else f" instead of {_words(wanted)}")


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

"""What a recipe can name: networks, and the facts about data sets that allow a check without loading them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, ValidationError, create_model

from rkr.errors import UsageError
from rkr.experiment.recipes.messages import choose, explained_choice, problem

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Entry:
    """A network: the function of `rkr.networks` that builds it, and one line that says what it is."""

    function: str
    description: str


NETWORKS: dict[str, Entry] = {
    "lenet": Entry("lenet", "LeNet 20-50-800-500 with batch normalisation, 32x32 images; 3.0 million parameters"),
    "resnet18": Entry("resnet18", "ResNet-18, stem for 32x32 (cifar) or 224x224 (imagenet); 11.2 million parameters"),
    "resnet32": Entry("resnet32", "the CIFAR ResNet-32, 32x32 images; 0.46 million parameters"),
    "digits-net": Entry("small_cnn", "a small convolutional network for 8x8 digits"),
    "cada-vae": Entry("CadaVae", "CADA-VAE for image features and class attributes, for zero-shot recipes"),
}

CLASSES = {"cifar10": 10, "cifar100": 100, "mnist": 10, "imagenet": 1000, "digits": 10}


def network_builder(name: str) -> Callable[..., nn.Module]:
    """The function that builds a network."""
    from rkr import networks

    if name not in NETWORKS:
        raise UsageError(f"no network {name!r}{choose(name, NETWORKS)}")
    made: Callable[..., nn.Module] = getattr(networks, NETWORKS[name].function)
    return made


def network_arguments(name: str) -> dict[str, Any]:
    """Of the function that builds it, with their values; None for those that must be given."""
    known = inspect.signature(network_builder(name)).parameters
    return {key: None if p.default is p.empty else p.default for key, p in known.items()}


def source_options(source: str) -> dict[str, inspect.Parameter]:
    """What a recipe may set of a source's loader: its plain values, and for a folder where it lies."""
    from rkr.data import SOURCES

    found = inspect.signature(SOURCES[source].load, eval_str=True).parameters
    plain = {name: p for name, p in found.items() if p.annotation in (int, float, bool, str, str | None)}
    if source == "folder":
        path = inspect.Parameter("path", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
        plain = {"path": path, **plain}
    return plain


def image_shape(source: str, options: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of a source's images."""
    if source in ("cifar10", "cifar100"):
        return (3, 32, 32)
    if source == "mnist":
        return (1, 28, 28)
    size = options.get("size", source_options(source)["size"].default)
    return (1 if source == "digits" else 3, size, size)


def check_values(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any], prefix: str = "") -> None:
    """In a validator: refuse values of another type than a function's parameters have; their names are right."""
    fields: dict[str, Any] = {name: (parameters[name].annotation, ...) for name in given}
    model = create_model("Values", __config__=ConfigDict(strict=True, allow_inf_nan=False), **fields)
    try:
        model.model_validate(dict(given))
    except ValidationError as error:
        key, text = explained_choice(error.errors(), model)
        raise problem(prefix + key, text) from None

"""Pretrained networks by reference: the default, timm, torchvision, transformers, or a function of the user's.

A reference and its arguments build the same architecture on any machine. Weights are only fetched when a zoo is made:
afterwards they come from the zoo's own file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rkr.errors import FileError, UsageError
from rkr.importing import importable, imported
from rkr.pictures.preparation import FILTERS, Preparation

DEFAULT = "efficientnet-lite0"
DEFAULT_SIZE = 192  # 3/4 of the computing of 224, for which its weights were made; docs/method/pictures.md
FORMS = f"{DEFAULT}, timm:NAME, torchvision:NAME, transformers:NAME or package.module:function"


@dataclass(frozen=True)
class Built:
    """A network that was built from a reference.

    Attributes:
        network: Pictures to logits.
        head: Name of its classification layer.
        preparation: How its pictures are prepared.
        arguments: What it takes to build the same architecture again, as JSON.
        licence: Of the weights, if it is known.
    """

    network: nn.Module
    head: str
    preparation: Preparation
    arguments: dict[str, Any] = field(default_factory=dict)
    licence: str = ""


def build(
    reference: str, arguments: Mapping[str, Any] | None = None, *, pretrained: bool = True, size: int | None = None
) -> Built:
    """Build a network.

    Args:
        reference: One of `FORMS`.
        arguments: For the function that builds it; those in `Built.arguments` give the same architecture again.
        pretrained: With its weights. Without, nothing is downloaded.
        size: Height and width of the pictures; by default what the network was made for.
    """
    if not isinstance(reference, str) or not reference:
        raise UsageError(f"--backbone: give {FORMS}, not {reference!r}")
    kind, colon, name = reference.partition(":")
    given = dict(arguments or {})
    if not colon:
        if reference != DEFAULT:
            raise UsageError(f"--backbone: no network is called {reference!r}; give {FORMS}")
        return _lite0(given, pretrained, size)
    if not name:
        raise UsageError(f"--backbone {reference}: the name is missing; give {FORMS}")
    builder = _KINDS.get(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a function of the user's may draw its weights
        try:
            if builder is not None:
                built = builder(name, given, pretrained, size)
            else:
                built = _users(reference, given, pretrained, size)
        except (UsageError, FileError):
            raise
        except Exception as error:  # other people's code
            raise UsageError(f"--backbone {reference}: cannot be built ({_said(error)})") from error
    if built.head not in dict(built.network.named_modules()):
        raise UsageError(f"--backbone {reference}: it has no classification layer {built.head!r}; name it with --head")
    return built


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _module(name: str, what: str, install: str) -> Any:
    """Import a package that is not installed with rkr."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        raise UsageError(
            f"{what} needs {name}, which cannot be imported ({_said(error)}): pip install {install}"
        ) from None


# ---------------------------------------------------------------------------------------------------------
# The default


def _lite0(arguments: dict[str, Any], pretrained: bool, size: int | None) -> Built:
    """EfficientNet-Lite0, whose weights come inside a pip package."""
    from rkr.data.features.network import LITE0_MEAN, LITE0_STD, lite0

    size = size or arguments.get("size") or DEFAULT_SIZE
    if size % 32:
        raise UsageError(f"--size: {DEFAULT} needs a multiple of 32 pixels, not {size}")
    network = lite0(size, pretrained)
    preparation = Preparation(size, round(size * 8 / 7), LITE0_MEAN, LITE0_STD, "bicubic")
    return Built(network, "_fc", preparation, {"size": size}, "apache-2.0")


# ---------------------------------------------------------------------------------------------------------
# Libraries


def _timm(name: str, arguments: dict[str, Any], pretrained: bool, size: int | None) -> Built:
    timm = _module("timm", f"timm:{name}", "timm")
    network = timm.create_model(name, pretrained=pretrained, **arguments)
    config = timm.data.resolve_model_data_config(network)
    head = network.default_cfg.get("classifier")
    if not isinstance(head, str):
        raise UsageError(f"--backbone timm:{name}: it has {head!r} for a head; choose a network with one classifier")
    side = int(config["input_size"][-1])
    resize = max(side, round(side / float(config.get("crop_pct") or 1)))
    filter_ = str(config.get("interpolation", "bilinear"))
    preparation = Preparation(
        side, resize, tuple(config["mean"]), tuple(config["std"]), filter_ if filter_ in FILTERS else "bicubic"
    )
    licence = str(network.default_cfg.get("license") or "")
    return Built(network, head, _resized(preparation, size), arguments, licence)


def _torchvision(name: str, arguments: dict[str, Any], pretrained: bool, size: int | None) -> Built:
    models = _module("torchvision.models", f"torchvision:{name}", "torchvision")
    name, _, chosen = name.partition("@")  # mobilenet_v2@IMAGENET1K_V1
    known = models.get_model_weights(name)
    if chosen and chosen not in known.__members__:
        raise UsageError(f"torchvision:{name} has the weights {', '.join(known.__members__)}, not {chosen!r}")
    weights = known[chosen or "DEFAULT"]
    network = models.get_model(name, weights=weights if pretrained else None, **arguments)
    how = weights.transforms()
    side, resize = (int(v[0] if isinstance(v, list | tuple) else v) for v in (how.crop_size, how.resize_size))
    filter_ = str(getattr(how.interpolation, "value", "bilinear"))
    preparation = Preparation(side, max(side, resize), tuple(how.mean), tuple(how.std), filter_)
    return Built(network, last_layer(network), _resized(preparation, size), arguments, "bsd-3-clause")


class Logits(nn.Module):
    """A network of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C)."""
        return self.model(pixel_values=x).logits


def _transformers(name: str, arguments: dict[str, Any], pretrained: bool, size: int | None) -> Built:
    transformers = _module("transformers", f"transformers:{name}", "transformers")
    if pretrained:
        model = transformers.AutoModelForImageClassification.from_pretrained(name)
        processor = transformers.AutoImageProcessor.from_pretrained(name, backend="pil").to_dict()
        config = json.loads(json.dumps(model.config.to_dict()))  # keys that are numbers become text
        preparation = _resized(_from_processor(processor), size)
        config.pop("_name_or_path", None)
        arguments = {"config": config, "preparation": preparation.to_json()}
    else:
        config = dict(arguments["config"])
        config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForImageClassification.from_config(config)
        preparation = _resized(Preparation.from_json(arguments["preparation"]), size)
    network = Logits(model.float())
    return Built(network, last_layer(network), preparation, arguments)


def _from_processor(values: Mapping[str, Any]) -> Preparation:
    """What an image processor of transformers does, as far as it is resizing, cropping and normalising."""

    def side(size: Any) -> int | None:
        if isinstance(size, Mapping):
            return next((int(size[key]) for key in ("shortest_edge", "height") if size.get(key)), None)
        return int(size) if isinstance(size, int | float) else None

    resize = side(values.get("size")) or 224
    crop = side(values.get("crop_size")) if values.get("do_center_crop") else None
    if crop is None and values.get("crop_pct"):  # ConvNeXt's processor
        crop, resize = resize, round(resize / float(values["crop_pct"]))
    crop = crop or resize
    scale = float(values.get("rescale_factor") or 1 / 255) * 255
    norm = values.get("do_normalize", True)
    mean = tuple(v / scale for v in values.get("image_mean") or (0.5,) * 3) if norm else (0.0,) * 3
    std = tuple(v / scale for v in values.get("image_std") or (0.5,) * 3) if norm else (1.0,) * 3
    names = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
    filter_ = names.get(int(values.get("resample") or 2), "bilinear")
    return Preparation(crop, max(crop, resize), (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), filter_)


_KINDS: dict[str, Callable[[str, dict[str, Any], bool, int | None], Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}


# ---------------------------------------------------------------------------------------------------------
# Functions of users


def _users(reference: str, arguments: dict[str, Any], pretrained: bool, size: int | None) -> Built:
    """`package.module:function`, which returns a network.

    If the function has a parameter `pretrained`, it is told whether weights are needed. The network may have the
    attributes `head`, a name, and `preparation`, a `Preparation` or its values.
    """
    importable(os.getcwd())
    try:
        function = imported(reference)
    except UsageError as error:
        raise UsageError(f"--backbone {error}") from error
    if not callable(function):
        raise UsageError(f"--backbone {reference}: is not a function, but {type(function).__name__}")
    own = {key: value for key, value in arguments.items() if key not in ("head", "preparation")}
    if "pretrained" in _parameters(function):
        own["pretrained"] = pretrained
    network = function(**own)
    if not isinstance(network, nn.Module):
        raise UsageError(f"--backbone {reference}: must return a torch.nn.Module, not {type(network).__name__}")
    head = arguments.get("head") or getattr(network, "head_name", None) or last_layer(network)
    preparation = arguments.get("preparation") or getattr(network, "preparation", None) or Preparation()
    if not isinstance(preparation, Preparation):
        preparation = Preparation.from_json(preparation)
    preparation = _resized(preparation, size)
    own.pop("pretrained", None)
    return Built(network, head, preparation, {**own, "head": head, "preparation": preparation.to_json()})


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def last_layer(network: nn.Module) -> str:
    """The name of the last Linear or, if there is none, the last convolution: where classifiers have their head."""
    for kinds in (nn.Linear, (nn.Conv1d, nn.Conv2d)):
        names = [name for name, module in network.named_modules() if name and isinstance(module, kinds)]
        if names:
            return names[-1]
    raise UsageError(
        f"{type(network).__name__} has no Linear or convolution that could be its head: name it with --head"
    )


def _resized(preparation: Preparation, size: int | None) -> Preparation:
    return preparation if size is None or size == preparation.size else preparation.with_size(size)

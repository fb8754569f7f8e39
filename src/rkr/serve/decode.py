"""Pictures and zip files that come from strangers."""

from __future__ import annotations

import binascii
import io
import os
import shutil
import stat
import zipfile
import zlib
from base64 import b64decode
from pathlib import Path, PurePosixPath

from PIL import Image
from torch import Tensor

from rkr.errors import FileError
from rkr.pictures.dataset import SUFFIXES, TRAIN, VALIDATION
from rkr.pictures.preparation import Preparation
from rkr.serve.limits import Limits, Refused

# Pillow knows more, some of which start other programs.
Image.init()
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
DEPTH, NAME = 8, 200  # folders within each other in a zip file, and bytes of a name
CHUNK = 1 << 20


def decoded(data: bytes, preparation: Preparation, pixels: int, name: str) -> Tensor:
    """A picture as a square, uint8 (3, R, R), or Refused. Its size is looked at before it is decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            size, area = image.size, image.width * image.height
            if area <= pixels:
                return preparation.square(image)
    except FileError as error:
        why = str(error).removeprefix("the image: ")
        raise Refused(422, f"{name}: {why}") from error
    except Image.DecompressionBombError as error:
        raise Refused(422, f"{name} has more than {pixels:,} pixels") from error
    except Exception as error:  # damaged files raise many kinds of errors
        raise Refused(422, f"{name}: not a picture that can be read ({', '.join(FORMATS)})") from error
    raise Refused(422, f"{name}: {size[0]} x {size[1]} pixels are more than {pixels:,}")


def from_base64(text: str, name: str) -> bytes:
    """The content of a picture in JSON; a data URL is understood too."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(422, f"{name}: not base64") from error


def unpack(path: Path, target: Path, limits: Limits) -> Path:
    """Write the pictures of a zip file below a folder. Returns the folder that has the class folders.

    Paths that lead elsewhere, links and encrypted files are refused. What is no picture is left out. Sizes are counted
    while files are written, because a zip file may state anything.
    """
    try:
        with zipfile.ZipFile(path) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
            if len(entries) > limits.files:
                raise Refused(422, f"the zip file has {len(entries):,} files, {limits.files:,} is the limit")
            pictures = [(entry, parts) for entry in entries if _is_picture(parts := _parts(entry))]
            root = _root([parts for _, parts in pictures])
            _check_classes(pictures, root, limits)
            left = limits.unpacked
            for entry, parts in pictures:
                left -= _write(file, entry, target.joinpath(*parts), left, limits.unpacked)
    except Refused:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise Refused(422, f"the zip file cannot be read: {why}") from error
    return target / root if root else target


def _parts(entry: zipfile.ZipInfo) -> tuple[str, ...]:
    """The path of a file, checked."""
    name = entry.filename
    parts = PurePosixPath(name).parts
    bad = name.startswith("/") or "\\" in name or ":" in name or any(part in ("..", "/") for part in parts)
    if bad or not parts or not name.isprintable():
        raise Refused(422, f"the zip file has the path {name[:80]!r}: paths must stay in it")
    if len(parts) > DEPTH or any(len(os.fsencode(part)) > NAME for part in parts):
        raise Refused(422, f"the zip file has the path {name[:80]!r}...: it is too deep or too long")
    kind = entry.external_attr >> 16
    if kind and stat.S_IFMT(kind) not in (0, stat.S_IFREG):
        raise Refused(422, f"{name[:80]!r} in the zip file is a link or a special file: only pictures are taken")
    if entry.flag_bits & 1:
        raise Refused(422, "the zip file is encrypted")
    return parts


def _is_picture(parts: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
    return not hidden and parts[-1].lower().endswith(SUFFIXES)


def _root(paths: list[tuple[str, ...]]) -> str:
    """The one folder that everything is in, if there is one above the class folders."""
    tops = {parts[0] for parts in paths}
    if len(tops) != 1 or any(len(parts) < 3 for parts in paths):
        return ""
    (top,) = tops
    return "" if top.lower() in (*TRAIN, *VALIDATION) else top


def _check_classes(pictures: list[tuple[zipfile.ZipInfo, tuple[str, ...]]], root: str, limits: Limits) -> None:
    folders = {parts[1 if root else 0] for _, parts in pictures if len(parts) > (2 if root else 1)}
    if not folders:
        raise Refused(422, "the zip file has no pictures in class folders: they must be at <class>/<picture>")
    if len(folders) > limits.classes:
        raise Refused(422, f"the zip file has {len(folders):,} classes, {limits.classes:,} is the limit")


def _write(file: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, left: int, limit: int) -> int:
    if path.exists():
        raise Refused(422, f"the zip file has {entry.filename[:80]!r} twice")
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with file.open(entry) as source, open(path, "xb") as out:
        while chunk := source.read(CHUNK):
            written += len(chunk)
            if written > left:
                raise Refused(422, f"the zip file holds more than {limit:,} bytes")
            out.write(chunk)
    return written


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)

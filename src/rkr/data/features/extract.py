"""Computes features of images in class folders and writes them to a MATLAB file in the format of xlsa17.

Batches have fixed boundaries, and every few batches are saved. After an interruption, the same call resumes and writes
the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rkr.data.decode import decode_centre
from rkr.data.features.matfile import as_mat, check_fits
from rkr.data.features.network import LITE0_MEAN, LITE0_STD, Extractor, Three
from rkr.data.features.parts import PARTS, Parts
from rkr.data.features.progress import Watch
from rkr.data.imagefolder import MEAN, STD, classes_in, list_images
from rkr.data.task import ImageFiles
from rkr.errors import FileError, UsageError

CHUNK = 4  # batches per saved file: some seconds of work with 64 images each


@dataclass(frozen=True)
class Options:
    """How features are computed."""

    model: str | None = None  # package.module:function; None for EfficientNet-Lite0
    size: int = 224  # S of the centre crop; the shorter side is resized to 256/224 of it
    mean: Three | None = None  # of pixels in 0..1; None for the default network's, or ImageNet's with `model`
    std: Three | None = None
    batch: int = 64
    threads: int | None = None  # for decoding and computing; None for torch's default
    force: bool = False  # overwrite the file

    def __post_init__(self) -> None:
        for name, value in (("size", self.size), ("batch", self.batch), ("threads", self.threads)):
            if value is not None and value < 1:
                raise UsageError(f"--{name} must be at least 1, not {value}")
        for name, three in (("mean", self.mean), ("std", self.std)):
            if three is not None and (len(three) != 3 or not all(map(math.isfinite, three))):
                raise UsageError(f"--{name} needs three numbers, not {three}")
        if self.std is not None and min(self.std) <= 0:
            raise UsageError(f"--std must be greater than 0, not {self.std}")

    @property
    def normalisation(self) -> tuple[Three, Three]:
        """Mean and standard deviation of the pixels."""
        mean, std = (LITE0_MEAN, LITE0_STD) if self.model is None else (MEAN, STD)
        return self.mean or mean, self.std or std


def three_numbers(name: str, text: str) -> Three:
    """Parse an option such as 0.485,0.456,0.406."""
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{name}: give three numbers such as 0.485,0.456,0.406, not {text!r}") from None
    return red, green, blue


@dataclass(frozen=True)
class Summary:
    """Size of a feature file."""

    images: int
    classes: int
    width: int  # D


def extract(
    images: Path, out: Path, options: Options | None = None, watch: Watch = lambda done, total: None
) -> Summary:
    """Write the features of all images to `out`. Resumes an interrupted call.

    `features` (D, N) float32, `labels` (N, 1) from 1, `image_files` (N, 1) and `allclasses_names` (C, 1): sorted
    by class name, then by file name.
    """
    options = options or Options()
    _check_out(images, out)
    parts = Parts(out)
    if out.exists() and not options.force and not parts.path.exists():
        raise _exists(out)
    class_names = classes_in(images)
    files = list_images(images, class_names, options.size)
    _check_names(files)
    with parts.locked(), _threads(options.threads):
        mean, std = options.normalisation
        network = Extractor(options.model, options.size, mean, std)
        check_fits(len(files), network.width)
        settings = {
            "format": PARTS.version,
            "model": network.name,
            "images": hashlib.sha256("\0".join(_names(files)).encode()).hexdigest(),
            "size": options.size,
            "mean": mean,
            "std": std,
            "batch": options.batch,
            "chunk": CHUNK,
            "threads": torch.get_num_threads(),  # changes the rounding of sums
            "torch": str(torch.__version__),
            "network": network.fingerprint,
        }
        if options.force or not out.exists():
            parts.begin(settings)
            chunks = _chunks(files, options.batch)
            _compute(files, network, chunks, parts, options.batch, watch)
            features = _collected(chunks, network.width, parts)
            parts.publish(as_mat(features, files.y.numpy() + 1, _names(files), class_names))
        elif not parts.led_to_file(settings):
            raise _exists(out)
        parts.clear()
    return Summary(len(files), len(class_names), network.width)


# ---------------------------------------------------------------------------------------------------------
# Checks


def _check_out(images: Path, out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out: {out} is a directory; give a file name such as {out / 'features.mat'}")
    if not out.parent.is_dir():
        raise FileError(f"{out.parent}: directory not found; cannot write {out.name}")
    if out.resolve().is_relative_to(images.resolve()):
        raise UsageError(f"--out: {out} is inside the image directory; choose a path outside {images}")


def _exists(out: Path) -> UsageError:
    return UsageError(f"{out} exists: use --force to overwrite it, or another --out")


def _names(files: ImageFiles) -> list[str]:
    """Paths relative to the image directory, with forward slashes."""
    return [os.fsdecode(path) for path in files.paths.tolist()]


def _check_names(files: ImageFiles) -> None:
    for name in _names(files):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise FileError(f"{name!r}: file names must be UTF-8: rename the file") from None


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------
# Computing


@dataclass(frozen=True)
class Chunk:
    """Consecutive batches that are saved together."""

    images: range
    name: str  # contains a hash that changes when an image is replaced


def _chunks(files: ImageFiles, batch: int) -> list[Chunk]:
    step = batch * CHUNK
    ranges = [range(start, min(start + step, len(files))) for start in range(0, len(files), step)]
    return [Chunk(images, f"{number:06}-{_digest(files, images)}") for number, images in enumerate(ranges)]


def _digest(files: ImageFiles, images: range) -> str:
    """A hash of the images' sizes and modification times."""
    h = hashlib.sha256()
    for path in map(files.path, images):
        try:
            status = os.stat(path)
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
        h.update(f"{status.st_size} {status.st_mtime_ns};".encode())
    return h.hexdigest()[:16]


def _compute(
    files: ImageFiles, network: Extractor, chunks: list[Chunk], parts: Parts, batch: int, watch: Watch
) -> None:
    """Compute and save the missing chunks."""
    missing = [chunk for chunk in chunks if not parts.has(chunk.name)]
    done = len(files) - sum(len(chunk.images) for chunk in missing)
    watch(done, len(files))
    batches = [c.images[at : at + batch] for c in missing for at in range(0, len(c.images), batch)]
    with contextlib.closing(_decoded(files, batches)) as decoded:
        for chunk in missing:
            found: list[Tensor] = []
            for at in range(0, len(chunk.images), batch):
                found.append(network(next(decoded)))
                _check_finite(found[-1], chunk.images[at:], files, network)
                done += len(found[-1])
                watch(done, len(files))
            parts.save(chunk.name, torch.cat(found))


def _check_finite(features: Tensor, images: range, files: ImageFiles, network: Extractor) -> None:
    bad = (~features.isfinite().all(1)).nonzero()
    if len(bad):
        path = files.path(images[int(bad[0])])
        raise UsageError(f"{path}: {network.name} returns features that are NaN or infinite")


def _decoded(files: ImageFiles, batches: list[range]) -> Generator[Tensor, None, None]:
    """Decode batches, one ahead of the network: uint8 (B, 3, S, S).

    Uses threads, because Pillow releases the GIL, and because worker processes would keep the part folder locked for
    seconds after a kill.
    """
    pool = ThreadPoolExecutor(torch.get_num_threads(), "decode")
    waiting: deque[list[Future[Tensor]]] = deque()
    try:
        for images in batches:
            waiting.append([pool.submit(_decode, files.path(i), files.size) for i in images])
            if len(waiting) > 1:
                yield torch.stack([future.result() for future in waiting.popleft()])
        while waiting:
            yield torch.stack([future.result() for future in waiting.popleft()])
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(path: str, size: int) -> Tensor:
    try:
        return decode_centre(path, size)
    except FileError:
        raise
    except Exception as error:  # damaged files raise many kinds of errors
        raise FileError(f"{path}: cannot be read as an image ({error})") from error


def _collected(chunks: list[Chunk], width: int, parts: Parts) -> NDArray[np.float32]:
    """The features of all chunks: (N, D)."""
    whole = np.empty((chunks[-1].images.stop, width), dtype=np.float32)
    for chunk in chunks:
        images = chunk.images
        whole[images.start : images.stop] = parts.load(chunk.name, len(images), width).numpy()
    return whole

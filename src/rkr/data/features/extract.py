"""From a folder of class folders to one MATLAB file of features, in the layout of Xian et al.'s zero-shot data sets.

Images are computed in batches whose boundaries never move, and every few batches are saved: wherever the work is
interrupted, the same call goes on and ends with the same bytes.
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

CHUNK = 4  # batches in a file: with 64 images each, some seconds of work


@dataclass(frozen=True)
class Options:
    """How features are computed."""

    model: str | None = None  # package.module:function, or EfficientNet-Lite0
    size: int = 224  # S: the shorter side becomes 256/224 of it, and the centre is cut out
    mean: Three | None = None  # of pixels from 0 to 1; the default network's own, or ImageNet's for another
    std: Three | None = None
    batch: int = 64
    threads: int | None = None  # that decode and compute; torch's own number by default
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
        """Mean and standard deviation that are used."""
        mean, std = (LITE0_MEAN, LITE0_STD) if self.model is None else (MEAN, STD)
        return self.mean or mean, self.std or std


def three_numbers(name: str, text: str) -> Three:
    """The numbers of an option such as 0.485,0.456,0.406."""
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{name}: give three numbers such as 0.485,0.456,0.406, not {text!r}") from None
    return red, green, blue


@dataclass(frozen=True)
class Summary:
    """What a file holds."""

    images: int
    classes: int
    width: int  # D


def extract(
    images: Path, out: Path, options: Options | None = None, watch: Watch = lambda done, total: None
) -> Summary:
    """Write the features of all images to `out`; goes on where an earlier call was interrupted.

    `features` (D, N) float32, `labels` (N, 1) from 1, `image_files` (N, 1) and `allclasses_names` (C, 1): classes in
    the order of their names, images in that of their classes and then of their names.
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
            "threads": torch.get_num_threads(),  # sums may be rounded in another order with another number
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
# Before


def _check_out(images: Path, out: Path) -> None:
    if out.is_dir():
        raise UsageError(f"--out: {out} is a folder; give the name of a file, such as {out / 'features.mat'}")
    if not out.parent.is_dir():
        raise FileError(f"{out.parent}: there is no such folder to write {out.name} to")
    if out.resolve().is_relative_to(images.resolve()):
        raise UsageError(f"--out: {out} would lie among the images; choose a place outside {images}")


def _exists(out: Path) -> UsageError:
    return UsageError(f"{out} is there already: give --force to overwrite it, or another --out")


def _names(files: ImageFiles) -> list[str]:
    """Paths below the folder, with forward slashes."""
    return [os.fsdecode(path) for path in files.paths.tolist()]


def _check_names(files: ImageFiles) -> None:
    for name in _names(files):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise FileError(f"{name!r}: a file name that is not UTF-8 cannot be written: rename it") from None


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------
# Chunk by chunk


@dataclass(frozen=True)
class Chunk:
    """A few batches that are saved together."""

    images: range
    name: str  # changes when one of its images is replaced by another


def _chunks(files: ImageFiles, batch: int) -> list[Chunk]:
    step = batch * CHUNK
    ranges = [range(start, min(start + step, len(files))) for start in range(0, len(files), step)]
    return [Chunk(images, f"{number:06}-{_digest(files, images)}") for number, images in enumerate(ranges)]


def _digest(files: ImageFiles, images: range) -> str:
    """A hash of the images' sizes and times of change."""
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
    """Compute and save the chunks that are not there yet."""
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
        raise UsageError(f"{path}: {network.name} gives features that are not finite (NaN or infinity)")


def _decoded(files: ImageFiles, batches: list[range]) -> Generator[Tensor, None, None]:
    """Decode batch after batch, the next while one is in use: uint8 (B, 3, S, S).

    In threads, as Pillow decodes and resizes without the interpreter's lock. Worker processes would keep the part
    folder locked for seconds after a kill.
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
    except Exception as error:  # decoders of damaged files raise many kinds
        raise FileError(f"{path}: not an image that can be read ({error})") from error


def _collected(chunks: list[Chunk], width: int, parts: Parts) -> NDArray[np.float32]:
    """The features of all chunks: (N, D)."""
    whole = np.empty((chunks[-1].images.stop, width), dtype=np.float32)
    for chunk in chunks:
        images = chunk.images
        whole[images.start : images.stop] = parts.load(chunk.name, len(images), width).numpy()
    return whole

"""Where data lies, and how it gets there.

Data is looked for in the folder that the caller names, then in $RKR_DATA, then in the user's cache. What is nowhere is
downloaded from its official address into the first of them that can be written to. A download becomes visible under its
name only when it is whole and verified.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rkr.errors import FileError

Data = str | os.PathLike[str] | None
ATTEMPTS = 3  # for each address
TIMEOUT = 30.0  # seconds without a byte
STALE = 3600.0  # seconds after which a part file that nobody writes to is thrown away
CHUNK = 1 << 18


def cache_folder() -> Path:
    """The user's own place for data, such as ~/.cache/rkr."""
    return Path(platformdirs.user_cache_dir("rkr", appauthor=False))


def folders(data: Data = None) -> list[Path]:
    """Where data is looked for, first to last."""
    named = [data, os.environ.get("RKR_DATA") or None]
    return [*(Path(folder).expanduser() for folder in named if folder is not None), cache_folder()]


def find(names: Iterable[str], data: Data = None) -> Path | None:
    """The first of these paths that exists in the first folder that has one."""
    names = list(names)
    for folder in folders(data):
        for name in names:
            if (folder / name).exists():
                return folder / name
    return None


def is_cached(path: Path) -> bool:
    """Whether a file lies in the user's cache, and so is ours to replace."""
    return path.absolute().is_relative_to(cache_folder().absolute())


def place(data: Data = None) -> Path:
    """The folder to download into: the first that can be written to."""
    for folder in folders(data):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # the only sure way to know
                return folder
    raise FileError(f"no folder for data can be written to: {', '.join(map(str, folders(data)))}")


def download(urls: Sequence[str], target: Path, verify: Callable[[Path], None], what: str) -> Path:
    """Fetch a file from the first address that gives it whole; `verify` raises FileError on wrong content.

    Each address gets several attempts. The file is written under a temporary name, flushed to disk and renamed, so that
    a kill at any moment leaves no file or a whole one.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{target.parent}: cannot be made: {error.strerror or error}") from error
    _sweep(target)
    part = target.parent / f".{target.name}.{secrets.token_hex(8)}.part"
    reasons = []
    try:
        for url in urls:
            for attempt in range(ATTEMPTS):
                try:
                    _transfer(url, part, what)
                    verify(part)
                except (urllib.error.HTTPError, urllib.error.URLError) as error:
                    reasons.append(f"{url}: {error.reason}")
                    if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                        break  # it will not be there next time either
                    time.sleep(0.2 * attempt)
                except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
                    reasons.append(f"{url}: {error or type(error).__name__}")
                except FileError as error:
                    reasons.append(f"{url}: {str(error).replace(str(part), 'what came')}")
                else:
                    os.replace(part, target)
                    _flush_folder(target.parent)
                    return target
    except OSError as error:  # of the disk: those of the network were caught above
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    raise FileError(
        f"{what} could not be downloaded ({reasons[-1]}). Without a network, fetch {' or '.join(urls)} elsewhere "
        f"and put it at {target}"
    )


def _transfer(url: str, part: Path, what: str) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "rkr"})
    with urllib.request.urlopen(request, timeout=TIMEOUT) as answer, open(part, "wb") as file, _bar() as bar:
        length = answer.headers.get("Content-Length")
        total = int(length) if length else None
        if bar.disable:
            print(f"downloading {what} from {url}", file=sys.stderr, flush=True)
        line = bar.add_task(what, total=total)
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            bar.advance(line, len(chunk))
        size = file.tell()
        if total is not None and size != total:
            raise ConnectionError(f"the connection was cut after {size:,} of {total:,} bytes")
        file.flush()
        os.fsync(file.fileno())


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _sweep(target: Path) -> None:
    """Remove what killed downloads of this file left behind."""
    with contextlib.suppress(OSError):
        for part in target.parent.glob(f".{target.name}.*.part"):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def _flush_folder(folder: Path) -> None:
    if os.name != "nt":  # Windows cannot open folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

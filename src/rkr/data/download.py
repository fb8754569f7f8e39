"""Finding and downloading data.

Data is searched in the directory that the caller names, then in $RKR_DATA, then in the user cache. Missing data is
downloaded from its official URL into the first of these that is writable. A download gets its final name only when it
is complete and verified.
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
ATTEMPTS = 3  # per URL
TIMEOUT = 30.0  # seconds without a byte
STALE = 3600.0  # seconds without a write after which a partial download is deleted
CHUNK = 1 << 18


def cache_folder() -> Path:
    """The user cache, such as ~/.cache/rkr."""
    return Path(platformdirs.user_cache_dir("rkr", appauthor=False))


def folders(data: Data = None) -> list[Path]:
    """The directories that are searched, in order."""
    named = [data, os.environ.get("RKR_DATA") or None]
    return [*(Path(folder).expanduser() for folder in named if folder is not None), cache_folder()]


def find(names: Iterable[str], data: Data = None) -> Path | None:
    """The first of these paths that exists, searching directory by directory. None if there is none."""
    names = list(names)
    for folder in folders(data):
        for name in names:
            if (folder / name).exists():
                return folder / name
    return None


def is_cached(path: Path) -> bool:
    """Whether a file is in the user cache and may be replaced."""
    return path.absolute().is_relative_to(cache_folder().absolute())


def place(data: Data = None) -> Path:
    """The directory to download to: the first that is writable."""
    for folder in folders(data):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # the only reliable test
                return folder
    raise FileError(f"no dataset directory is writable: {', '.join(map(str, folders(data)))}")


def download(urls: Sequence[str], target: Path, verify: Callable[[Path], None], what: str) -> Path:
    """Download a file from the first URL that works; `verify` raises FileError if the content is wrong.

    Each URL is tried several times. The file is written under a temporary name, flushed to disk and renamed, so that a
    kill leaves either no file or a complete one.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{target.parent}: cannot be created: {error.strerror or error}") from error
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
                        break  # client errors are permanent
                    time.sleep(0.2 * attempt)
                except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
                    reasons.append(f"{url}: {error or type(error).__name__}")
                except FileError as error:
                    reasons.append(f"{url}: {str(error).replace(str(part), 'the download')}")
                else:
                    os.replace(part, target)
                    _flush_folder(target.parent)
                    return target
    except OSError as error:  # of the disk; network errors are handled above
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    raise FileError(
        f"{what} could not be downloaded ({reasons[-1]}). Download {' or '.join(urls)} on another machine "
        f"and save it as {target}"
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
    """Remove partial downloads of this file that were killed."""
    with contextlib.suppress(OSError):
        for part in target.parent.glob(f".{target.name}.*.part"):
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()


def _flush_folder(folder: Path) -> None:
    if os.name != "nt":  # Windows cannot open directories
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Lists labelled pictures (class folders, CSV, JSON lines) and divides them into training and validation."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rkr.data.cut import balanced_cut
from rkr.errors import FileError

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jfif")
TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation")
TEST = ("test", "testing")
PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "picture")
LABEL_COLUMNS = ("label", "class", "category", "target")
PART_COLUMNS = ("part", "split", "set")
Part = str  # "train", "validation", "test" or "" where the source does not say


@dataclass(frozen=True)
class Labelled:
    """One picture of a listing."""

    path: str
    label: str
    part: Part = ""


@dataclass(frozen=True)
class Listing:
    """The pictures of a task, before any of them is opened."""

    source: Path
    pictures: tuple[Labelled, ...]
    loose: tuple[str, ...] = ()  # pictures that belong to no class, which are left out

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, sorted."""
        return tuple(sorted({picture.label for picture in self.pictures}))

    @property
    def has_parts(self) -> bool:
        """Whether the source itself says which pictures are for validation."""
        return any(picture.part == "validation" for picture in self.pictures)

    def only(self, *parts: Part) -> Listing:
        """The pictures of some parts."""
        return replace(self, pictures=tuple(p for p in self.pictures if p.part in parts))


def list_pictures(source: str | os.PathLike[str]) -> Listing:
    """All labelled pictures of a folder, a CSV file or a file of JSON lines."""
    path = Path(source).expanduser()
    if path.is_dir():
        listing = _from_folder(path)
    elif path.is_file():
        suffix = path.suffix.lower()
        if suffix in (".csv", ".tsv", ".txt"):
            listing = Listing(path, tuple(_from_csv(path)))
        elif suffix in (".jsonl", ".ndjson", ".json"):
            listing = Listing(path, tuple(_from_json_lines(path)))
        else:
            raise FileError(f"{path}: give a folder of class folders, or a .csv or .jsonl file with paths and labels")
    else:
        raise FileError(f"{path}: not found; give a folder of class folders, or a .csv or .jsonl file")
    if not listing.pictures:
        raise FileError(f"{path}: no pictures found; they must be at {path}/<class>/<picture>")
    return listing


# ---------------------------------------------------------------------------------------------------------
# Folders


def _from_folder(root: Path) -> Listing:
    """Class folders, or class folders in train/ and val/. Pictures may lie at any depth below their class folder."""
    names = _subfolders(root)
    parts = {part: [n for n in names if n.lower() in known] for part, known in _PARTS.items()}
    if parts["train"] and len(parts["train"] + parts["validation"] + parts["test"]) == len(names):
        found: list[Labelled] = []
        for part, folders in parts.items():
            for folder in folders:
                found += _from_classes(root / folder, part)
        return Listing(root, tuple(found), tuple(_loose(root)))
    return Listing(root, tuple(_from_classes(root, "")), tuple(_loose(root)))


_PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


def _from_classes(folder: Path, part: Part) -> Iterator[Labelled]:
    for label in _subfolders(folder):
        for path in pictures_below(folder / label):
            yield Labelled(path, label, part)


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror or error}") from error


def _loose(folder: Path) -> list[str]:
    return [str(folder / name) for name in sorted(os.listdir(folder)) if _is_picture(name)]


def pictures_below(folder: Path) -> list[str]:
    """The pictures in a folder and the folders below it, sorted. Hidden ones are left out."""
    found: list[str] = []

    def refused(error: OSError) -> None:
        raise FileError(f"{error.filename}: cannot be read: {error.strerror or error}") from error

    for where, folders, names in os.walk(folder, onerror=refused, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(where, name) for name in sorted(names) if _is_picture(name)]
    return found


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


# ---------------------------------------------------------------------------------------------------------
# Lists


def _from_csv(path: Path) -> Iterator[Labelled]:
    text = _text(path)
    try:
        dialect: Any = csv.Sniffer().sniff(text[:4096], delimiters=",;\t")
    except csv.Error:
        dialect = csv.excel_tab if path.suffix.lower() == ".tsv" else csv.excel
    try:
        rows = [row for row in csv.reader(text.splitlines(), dialect) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise FileError(f"{path}: not a table that can be read: {error}") from error
    if not rows:
        raise FileError(f"{path}: is empty; it needs a line for each picture, path and label")
    header = [cell.strip().lower() for cell in rows[0]]
    if _column(header, PATH_COLUMNS) is not None and _column(header, LABEL_COLUMNS) is not None:
        rows = rows[1:]
    elif len(header) == 2 and header[0].endswith(SUFFIXES):
        header = ["path", "label"]
    else:
        raise FileError(f"{path}: its first line must name the columns path and label, not {', '.join(header)[:80]}")
    for number, row in enumerate(rows, 2):
        yield _labelled(path, f"line {number}", dict(zip(header, row, strict=False)))


def _from_json_lines(path: Path) -> Iterator[Labelled]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise FileError(f'{path}: line {number} must be an object such as {{"path": "a.jpg", "label": "cat"}}')
        yield _labelled(path, f"line {number}", {str(key).lower(): value for key, value in values.items()})


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: is not a text file in UTF-8") from error


def _column(names: Iterable[str], known: Sequence[str]) -> str | None:
    there = set(names)
    return next((name for name in known if name in there), None)


def _labelled(path: Path, where: str, values: Mapping[str, Any]) -> Labelled:
    file, label = (_value(values, known) for known in (PATH_COLUMNS, LABEL_COLUMNS))
    if not file or not label:
        raise FileError(f"{path}: {where} needs a path and a label")
    stated = _value(values, PART_COLUMNS).lower()
    part = next((name for name, known in _PARTS.items() if stated in known), "")
    if stated and not part:
        raise FileError(f"{path}: {where}: the part must be train, val or test, not {stated!r}")
    return Labelled(os.path.join(path.parent, os.path.expanduser(file)), label, part)


def _value(values: Mapping[str, Any], known: Sequence[str]) -> str:
    name = _column(values, known)
    value = None if name is None else values[name]
    return "" if value is None or isinstance(value, dict | list | bool) else str(value).strip()


# ---------------------------------------------------------------------------------------------------------
# Parts


@dataclass(frozen=True)
class Checked:
    """A listing of which every file was read.

    Attributes:
        classes: Names of the classes.
        rows: For each picture that is used, its number in the listing.
        y: Its class, int64 (N,).
        validation: Whether it belongs to the validation part, bool (N,).
        broken: Files that cannot be read as pictures, and why.
        copies: Files left out because another has the same content and class.
        contradictions: Files left out because the same content stands in several classes.
    """

    classes: tuple[str, ...]
    rows: Tensor
    y: Tensor
    validation: Tensor
    broken: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()

    def counts(self) -> list[int]:
        """Pictures of each class."""
        return torch.bincount(self.y, minlength=len(self.classes)).tolist()


def divide(listing: Listing, content: Sequence[str | FileError], share: float, seed: int) -> Checked:
    """Leave out what cannot be used, and divide the rest into a training and a validation part.

    Copies are found by content. Of pictures with the same content one is kept, in the validation part if the source
    says that one belongs there, so that nothing is trained on what is validated on.

    Args:
        listing: Pictures of the parts "train", "validation" and "".
        content: For each picture a hash of its file, or why it cannot be used.
        share: Of each class, for validation, if the source does not say.
        seed: Decides which pictures those are.
    """
    broken, copies, contradictions = [], [], []
    labels: dict[str, set[str]] = {}
    first: dict[str, int] = {}
    for number, (picture, found) in enumerate(zip(listing.pictures, content, strict=True)):
        if isinstance(found, FileError):
            broken.append((picture.path, str(found)))
            continue
        labels.setdefault(found, set()).add(picture.label)
        if found not in first or (picture.part == "validation" and listing.pictures[first[found]].part != "validation"):
            first[found] = number
    rows = []
    for number, (picture, found) in enumerate(zip(listing.pictures, content, strict=True)):
        if isinstance(found, FileError):
            continue
        if len(labels[found]) > 1:
            contradictions.append(picture.path)
        elif first[found] != number:
            copies.append(picture.path)
        else:
            rows.append(number)
    kept = [listing.pictures[row] for row in rows]
    training = Counter(picture.label for picture in kept if picture.part != "validation")
    if not kept:
        raise FileError(f"{listing.source}: none of its {len(content)} files can be used{_reason(broken)}")
    if len(training) < 2:
        raise FileError(
            f"{listing.source}: has {len(training)} class with pictures for training; a task needs two or more"
        )
    classes = tuple(sorted(training))
    for picture in kept:
        if picture.label not in training:
            raise FileError(f"{listing.source}: the class {picture.label!r} of the validation part is not in training")
    number_of = {name: number for number, name in enumerate(classes)}
    y = torch.tensor([number_of[picture.label] for picture in kept], dtype=torch.int64)
    if listing.has_parts:
        validation = torch.tensor([picture.part == "validation" for picture in kept])
    else:
        validation = torch.zeros(len(kept), dtype=torch.bool)
        validation[balanced_cut(y, share, seed, "validation")[1]] = True
    return Checked(classes, torch.tensor(rows), y, validation, tuple(broken), tuple(copies), tuple(contradictions))


def _reason(broken: Sequence[tuple[str, str]]) -> str:
    return f", for instance {broken[0][1]}" if broken else ""

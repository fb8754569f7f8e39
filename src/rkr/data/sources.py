"""Datasets by name: loading them, and what to do about those that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rkr.data.download import Data, find
from rkr.data.task import Source
from rkr.data.xlsa17 import FOLDERS as XLSA17_FOLDERS
from rkr.errors import UsageError
from rkr.registry import datasets


def load_source(name: str, data: Data = None, **options: Any) -> Source:
    """Load a dataset by name, from `data`, $RKR_DATA, the user's cache or its official address."""
    if name not in datasets:
        raise UsageError(f"no source {name!r}: choose one of {', '.join(datasets)}")
    known = datasets[name].options
    for option in options:
        if option not in known:
            raise UsageError(f"source {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}")
    source = datasets[name].load(data, **options)
    if not isinstance(source, Source):
        raise UsageError(f"source {name!r} must return a rkr.data.Source, not {type(source).__name__}")
    return source


def missing_data(needs: Sequence[str], data: Data = None) -> str:
    """What happens for lack of sources that are not there, or what to do about it; "" if all are.

    A need is a source's name, or a path such as "CUB/res101.mat" of a zero-shot dataset.
    """
    lacks: list[str] = []
    files: list[str] = []
    for need in needs:
        if need in datasets:
            entry = datasets[need]
            if entry.files and find(entry.files, data) is None:
                lacks.append(entry.without)
        elif find((f"{folder}/{need}" for folder in XLSA17_FOLDERS), data) is None:
            files.append(need)
    if files:
        lacks.append(f"put {', '.join(files)} into xlsa17/data of the folder of data")
    return "; ".join(lacks)

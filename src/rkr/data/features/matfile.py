"""Writes features as a reproducible MATLAB 5 file in the format of Xian et al. (res101.mat)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import savemat  # type: ignore[import-untyped]

from rkr.errors import UsageError

LARGEST = 2**31  # maximum bytes of a variable
HEADER = b"MATLAB 5.0 MAT-file, features by rkr".ljust(116)  # replaces SciPy's header text, which contains the time


def check_fits(images: int, width: int) -> None:
    """Raise UsageError if the features exceed the format's limit."""
    if 4 * width * images >= LARGEST:
        raise UsageError(
            f"{images} images with {width} features each do not fit into a MATLAB 5 file "
            f"(at most {(LARGEST - 1) // (4 * width)} images): split the classes into several directories"
        )


def as_mat(
    features: NDArray[np.float32], labels: NDArray[Any], image_files: Sequence[str], class_names: Sequence[str]
) -> bytes:
    """The bytes of the file. Features are (N, D), labels (N,) count from 1."""
    contents = {
        "features": features.T,
        "labels": labels.astype(np.int32)[:, None],
        "image_files": _cells(image_files),
        "allclasses_names": _cells(class_names),
    }
    file = io.BytesIO()
    savemat(file, contents)
    file.seek(0)
    file.write(HEADER)
    return file.getvalue()


def _cells(texts: Sequence[str]) -> NDArray[np.object_]:
    """A cell array (N, 1)."""
    cells = np.empty((len(texts), 1), dtype=object)
    cells[:, 0] = list(texts)
    return cells

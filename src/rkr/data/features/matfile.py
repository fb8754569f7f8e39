"""The MATLAB 5 file, in the layout of Xian et al.'s zero-shot data sets (res101.mat), the same bytes every time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.io import savemat  # type: ignore[import-untyped]

from rkr.errors import UsageError

LARGEST = 2**31  # bytes of a variable
HEADER = b"MATLAB 5.0 MAT-file, features by rkr".ljust(116)  # the format's text; SciPy's tells the time of writing


def check_fits(images: int, width: int) -> None:
    """Refuse what the format cannot hold, before anything is computed."""
    if 4 * width * images >= LARGEST:
        raise UsageError(
            f"{images} images with {width} features each do not fit a MATLAB 5 file, "
            f"at most {(LARGEST - 1) // (4 * width)} do: divide the classes among several folders"
        )


def as_mat(
    features: NDArray[np.float32], labels: NDArray[Any], image_files: Sequence[str], class_names: Sequence[str]
) -> bytes:
    """The file of features (N, D) and labels (N,), which count from 1."""
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

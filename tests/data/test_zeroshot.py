"""What every zero-shot dataset must be, whichever loader made it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rkr.data import ZeroShotSource
from rkr.errors import UsageError


@pytest.fixture
def source() -> ZeroShotSource:
    """Classes 0 and 1 are seen, 2 is not; two rows of each, of the seen ones one to train on."""
    return ZeroShotSource(
        name="mine",
        class_names=("a", "b", "c"),
        numbers=(1, 2, 3),
        features=torch.rand(6, 4),
        labels=torch.tensor([0, 0, 1, 1, 2, 2]),
        attributes=torch.eye(3),
        trainval=torch.tensor([0, 2]),
        test_seen=torch.tensor([1, 3]),
        test_unseen=torch.tensor([4, 5]),
    )


def test_parts(source: ZeroShotSource) -> None:
    assert (source.seen, source.unseen) == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"numbers": (1, 2)}, r"mine: class_names, numbers and attributes must have the same length, not \(3, 2, 3\)"),
        ({"attributes": torch.eye(4)}, r"not \(3, 3, 4\)"),
        ({"attributes": torch.full((3, 2), torch.nan)}, "mine: attributes has values that are NaN or infinite"),
        ({"features": torch.full((6, 4), torch.inf)}, "mine: features has values that are NaN or infinite"),
        ({"features": torch.rand(6, 4).double()}, r"features must be a tensor of torch.float32 .* it is torch.float64"),
        ({"features": torch.rand(6, 4).numpy()}, "features must be a tensor .* it is ndarray"),
        ({"labels": torch.zeros(6)}, "labels must be a tensor of torch.int64"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, "mine: there are 6 features, but 5 labels"),
        ({"labels": torch.tensor([0, 0, 1, 1, 3, 3])}, "mine: classes must be 0 to 2, each with rows in"),
        ({"class_names": ("a", "b", "c", "d"), "numbers": (1, 2, 3, 4), "attributes": torch.eye(4)}, "must be 0 to 3"),
        ({"test_unseen": torch.tensor([], dtype=torch.long)}, "mine: test_unseen must be a tensor .* not empty"),
        ({"test_unseen": torch.tensor([3, 4]), "test_seen": torch.tensor([1])}, "class 1 is both seen and unseen"),
        ({"trainval": torch.tensor([0])}, "mine: class 1 of test_seen has no rows in trainval"),
        ({"trainval": torch.tensor([0, 2, 3])}, "mine: a row is in two of trainval, test_seen and test_unseen"),
        ({"trainval": torch.tensor([0, 2, 2])}, "or twice in one"),
        ({"trainval": torch.tensor([-1, 2])}, "mine: rows must be 0 to 5, not -1 to 5"),
        ({"test_unseen": torch.tensor([4, 999])}, "mine: rows must be 0 to 5, not 0 to 999"),
    ],
)
def test_what_is_refused(source: ZeroShotSource, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(source, **changes)

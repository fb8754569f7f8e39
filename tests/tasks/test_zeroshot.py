"""What every zero-shot data set must be, whichever loader made it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rkr.errors import UsageError
from rkr.tasks import ZeroShotSource


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
        (
            {"numbers": (1, 2)},
            "mine: class_names, numbers and attributes must be of the same classes, not of 3, 2 and 3",
        ),
        ({"attributes": torch.eye(4)}, "not of 3, 3 and 4"),
        ({"labels": torch.zeros(5, dtype=torch.long)}, "mine: there are 6 features, but 5 labels"),
        ({"test_unseen": torch.tensor([], dtype=torch.long)}, "mine: test_unseen is empty"),
        ({"test_unseen": torch.tensor([3, 4])}, "mine: class 1 is both seen and unseen"),
        ({"trainval": torch.tensor([0])}, "mine: class 1 of test_seen has no rows in trainval"),
    ],
)
def test_what_is_refused(source: ZeroShotSource, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(source, **changes)

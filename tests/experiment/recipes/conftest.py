"""A sound recipe, and a way to write it to a file with something else in it."""

from collections.abc import Callable
from pathlib import Path

import pytest

BASE = """\
title = "Mine"
orders = [0, "A", "fixed"]

[stream]
kind = "split"
source = "cifar100"
tasks = 10

[network]
name = "lenet"
classes = 100

[training]
epochs = 100
lr = 0.01
momentum = 0.9
milestones = [20, 40, 60, 80]
gamma = 0.5
augment = { pad = 4, flip = true }

[methods.rkr]

[methods.mine]
learner = "rkr"
rank = 4

[[paper]]
method = "rkr"
value = 69.58
where = "table 1"
"""

Write = Callable[..., Path]


@pytest.fixture
def writer(tmp_path: Path) -> Callable[[str], Write]:
    """Makes a function that writes a recipe to my.toml, with some of its text exchanged."""

    def of(base: str) -> Write:
        def made(*changes: tuple[str, str]) -> Path:
            text = base
            for old, new in changes:
                assert old in text
                text = text.replace(old, new, 1)
            path = tmp_path / "my.toml"
            path.write_text(text)
            return path

        return made

    return of


@pytest.fixture
def write(writer: Callable[[str], Write]) -> Write:
    """Write my.toml, with some of its text exchanged."""
    return writer(BASE)

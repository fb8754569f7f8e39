"""A sound recipe, and a way to write it to a file with something else in it."""

from pathlib import Path

import pytest
from own_recipe import Write, writer

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


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write my.toml, with some of its text exchanged."""
    return writer(tmp_path, BASE)

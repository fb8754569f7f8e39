"""benchmarks/transfer.py: the comparison of `rkr learn` with a linear probe and fine-tuning."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import TINY, draw_classes

import rkr
from rkr.pictures.dataset import list_pictures


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    return importlib.import_module("transfer")


def test_the_same_pictures_for_all_and_none_of_the_tests(transfer: Any, tmp_path: Path) -> None:
    draw_classes(tmp_path / "colours", {"red": 12, "green": 12, "blue": 12})
    lists = [list_pictures(f) for f in transfer.divided(tmp_path / "colours", 3, 8, 4, 0, tmp_path)]
    learned, tested = ({p.path for p in one.pictures} for one in lists)
    assert (len(learned), len(tested), len(learned & tested)) == (24, 12, 0)
    again = list_pictures(transfer.divided(tmp_path / "colours", 3, 8, 4, 1, tmp_path)[1])
    assert {p.path for p in again.pictures} != tested


def test_the_figures(transfer: Any, tmp_path: Path) -> None:
    draw_classes(tmp_path / "colours", {"red": 12, "green": 12, "blue": 12})
    train, test = transfer.divided(tmp_path / "colours", 3, 8, 4, 0, tmp_path)
    found = transfer.compared(train, test, tmp_path, 0, {"backbone": TINY, "epochs": 2, "batch": 8})
    assert list(found) == ["probe", "rkr learn --rank 0", "rkr learn", "fine-tuning", "size", "seconds"]
    for key, folder in (("probe", "probe"), ("rkr learn --rank 0", "cropped"), ("rkr learn", "learned")):
        assert found[key] == 100 * rkr.open(tmp_path / folder).evaluate(test, "t").accuracy
    assert found["fine-tuning"] >= 50  # three colours; a third by chance
    assert "| colours | 2 | 1.5 (1.0 to 2.0) |" in transfer.table({"colours": [{"probe": 1.0}, {"probe": 2.0}]})

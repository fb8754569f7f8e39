"""The walk through in docs/tutorials/pictures.md runs as it stands, on small pictures that are drawn here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from helpers.pictures import draw_classes

import rkr
from rkr.pictures import backbones

TEXT = (Path(__file__).parents[2] / "docs" / "tutorials" / "pictures.md").read_text("utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("rkr ")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pictures of the walk, in the current folder. The network sees them at 64 pixels, to be quick."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backbones, "DEFAULT_SIZE", 64)
    draw_classes(tmp_path / "photos/colours", {"red": 10, "green": 10, "blue": 10})
    draw_classes(tmp_path / "photos/colours-test", {"red": 4, "green": 4, "blue": 4}, seed=5)
    draw_classes(tmp_path / "drawn", {"disc": 8, "stripes": 8})
    lines = [
        f"../{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted((tmp_path / "drawn").rglob("*.png"))
    ]
    (tmp_path / "photos/shapes.csv").write_text("\n".join(["path,label", *lines]))
    draw_classes(tmp_path / "pictures", {"red": 2, "blue": 2}, seed=7)
    return tmp_path


@pytest.mark.timeout(600)
def test_the_commands(here: Path, command: Command) -> None:
    assert len(COMMANDS) == 14
    for line in COMMANDS:
        code, _, err = command(*shlex.split(line)[1:])
        assert code == 0, f"{line}: {err}"
    assert list(rkr.open("zoo/").tasks) == ["paint"]
    prints = {rkr.open(folder).model.fingerprint("paint") for folder in ("zoo/", "other-zoo/", "new-zoo/")}
    assert len(prints) == 1
    assert Path("answers.csv").read_text().count("\n") == 5
    assert Path("confusion.png").stat().st_size > 1000


@pytest.mark.timeout(600)
def test_the_python_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert capsys.readouterr().out.startswith("pictures/blue/0.png")
    assert len(scope["answers"]) == 4

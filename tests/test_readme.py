"""The README's examples run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rkr

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text("utf-8"))
    assert len(links) >= 3
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_loop_of_comparison_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the penalty that it is about."""
    text = (README.parent / "docs" / "comparison.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert capsys.readouterr().out.startswith("tensor([")
    assert scope["learner"].penalty() > 0


def test_first_example_is_ten_lines_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = BLOCKS[0].strip().splitlines()
    assert len(lines) <= 11
    scope: dict[str, object] = {}
    exec(BLOCKS[0], scope)
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([1, 10])")
    assert "0.4292" in printed  # LeNet with rank 2, as the paper prints it


def test_second_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = rkr.networks.lenet(classes=100)
    model = rkr.rectify(network, rank=2, head="fc")
    model.add_task("animals", classes=10)
    model.add_task("vehicles", classes=7)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    scope = {"rkr": rkr, "model": model, "network": network, "x": x}
    exec(BLOCKS[-1].replace(", ...]", "]"), scope)
    y, plain = scope["y"], scope["plain"]
    assert isinstance(y, torch.Tensor)
    assert y.shape == (2, 10)
    assert torch.isneginf(y[1, 7:]).all()
    assert (tmp_path / "vehicles.safetensors").is_file()
    with torch.no_grad():
        assert isinstance(plain, torch.nn.Module)
        torch.testing.assert_close(plain.eval()(x)[0], y[0])

"""Several processes compute what one computes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import HERE, Server
from helpers.marks import slow
from safetensors.torch import load_file
from small_runs import outcome
from torch import nn


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def assert_close(one: list[dict[str, Any]], many: list[dict[str, Any]], test: int) -> None:
    assert len(one) == len(many)
    for a, b in zip(one, many, strict=True):
        assert a["event"] == b["event"]
        if a["event"] == "epoch":
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
            assert b["accuracy"] == pytest.approx(a["accuracy"], abs=1e-12)
        if a["event"] == "task":
            assert b["tested"] == a["tested"]
            assert b["accuracy"] == pytest.approx(a["accuracy"], abs=1 / test + 1e-9)
            assert b["top5"] == a["top5"]
            assert b["unchanged"] == a["unchanged"]
            assert b["cost"] == a["cost"]


# 19 images in batches of 8: the last is 3, shared 1 and 2. 17 images: the last is 1, shared 0 and 1.
@pytest.mark.parametrize(
    ("method", "train"),
    [
        ("rkr", 19),
        *((m, 17) for m in ("rkr", "two-phases", "ewc", "pc", "icarl", "hnet", "den")),
        *slow(("finetune", 19), *((m, 17) for m in ("finetune", "separate", "joint", "si", "eeil"))),
        *slow(*((m, 17) for m in ("lwf", "ccll", "apd", "pgn"))),  # candidates of rcl, rps-net: test_candidates.py
    ],
)
def test_two_processes_equal_one(server: Server, tmp_path: Path, method: str, train: int) -> None:
    job = {"method": method, "dtype": "float64", "dropout": 0.0, "train": train, "save_minutes": 1e9, "tasks": 2}
    if method == "two-phases":
        job |= {"weight_decay": 0.1}
    if method in ("icarl", "eeil"):
        job |= {"options": {"memory": 6}}
    one = server.start("run", folder=str(tmp_path / "1"), **job)
    assert one.wait() == 0, one.stderr
    crew = server.together(2, "run", folder=str(tmp_path / "2"), **job)
    assert [p.wait() for p in crew] == [0, 0], crew[0].stderr + crew[1].stderr
    assert crew[0].events("finished")
    assert crew[1].stdout == ""  # the first speaks for all
    assert_close(results(tmp_path / "1"), results(tmp_path / "2"), test=10)
    if method not in ("rkr", "separate", "joint"):
        models = [load_file(tmp_path / n / "model" / "learner.safetensors") for n in ("1", "2")]
        torch.testing.assert_close(models[0], models[1], rtol=1e-6, atol=1e-9)
    losses = [[line["loss"] for line in results(tmp_path / n) if line["event"] == "epoch"] for n in ("1", "2")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_three_processes(server: Server, tmp_path: Path) -> None:
    """Two of them have nothing of the last batch."""
    job = {"method": "rkr", "dtype": "float64", "dropout": 0.0, "train": 17, "save_minutes": 1e9, "tasks": 2}
    server.start("run", folder=str(tmp_path / "1"), **job).wait()
    crew = server.together(3, "run", folder=str(tmp_path / "3"), **job)
    assert [p.wait() for p in crew] == [0, 0, 0], crew[0].stderr
    assert_close(results(tmp_path / "1"), results(tmp_path / "3"), test=10)


@pytest.mark.parametrize("method", ["rkr", "two-phases"])
def test_two_processes_killed(server: Server, tmp_path: Path, method: str) -> None:
    """Within an epoch, with dropout: every process goes on with its own random numbers and its part of the sums."""
    job = {"method": method, "tasks": 2}
    crew = server.together(2, "run", folder=str(tmp_path / "whole"), **job)
    assert [p.wait() for p in crew] == [0, 0]
    environment: dict[str, Any] = {"fault": (31, "kill")}
    crew = server.together(2, "run", folder=str(tmp_path / "parts"), kill_others=True, **job, **environment)
    assert crew[0].wait() == -9
    crew = server.together(2, "run", folder=str(tmp_path / "parts"), **job)
    assert [p.wait() for p in crew] == [0, 0], crew[0].stderr
    assert crew[0].events("started")[0]["resumed"]
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_the_folder_of_two_processes_is_locked_too(server: Server, tmp_path: Path) -> None:
    holder = server.start("run", folder=str(tmp_path), method="rkr", epochs=500)
    holder.until((tmp_path / "results.jsonl").exists)
    crew = server.together(2, "run", folder=str(tmp_path), method="rkr", epochs=500, kill_others=True)
    assert "another process is executing this run" in crew[0].stderr
    assert holder.kill() == -9


NORMS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.BatchNorm2d(4), (9, 4, 3, 5)),
    (nn.BatchNorm2d(4, affine=False), (9, 4, 3, 5)),
    (nn.BatchNorm2d(4, momentum=None), (9, 4, 3, 5)),
    (nn.BatchNorm2d(4, track_running_stats=False), (9, 4, 3, 5)),
    (nn.BatchNorm1d(4), (9, 4)),
    (nn.BatchNorm1d(4), (9, 4, 6)),
    (nn.BatchNorm3d(4), (9, 4, 2, 3, 2)),
]


@pytest.mark.parametrize("shares", [[4, 5], [0, 9]])
@pytest.mark.parametrize(("layer", "shape"), NORMS[:1] + NORMS[4:5], ids=str)
def test_batch_norm(
    server: Server, tmp_path: Path, layer: nn.Module, shape: tuple[int, ...], shares: list[int]
) -> None:
    _compare_norm(server, tmp_path, layer.double(), torch.float64, shape, shares, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[4, 5], [1, 8], [0, 9], [2, 3, 4], [9, 0, 0]])
@pytest.mark.parametrize(("layer", "shape"), NORMS, ids=str)
def test_all_batch_norms(
    server: Server, tmp_path: Path, layer: nn.Module, shape: tuple[int, ...], shares: list[int]
) -> None:
    _compare_norm(server, tmp_path, layer.double(), torch.float64, shape, shares, 1e-12)


def test_batch_norm_in_mixed_precision(server: Server, tmp_path: Path) -> None:
    """Activations in bfloat16 and statistics in float32, as autocast has them: 315 values could not even be counted."""
    _compare_norm(server, tmp_path, nn.BatchNorm2d(4), torch.bfloat16, (9, 4, 5, 7), [4, 5], 2e-2)


def _compare_norm(
    server: Server,
    folder: Path,
    layer: nn.Module,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    shares: list[int],
    tolerance: float,
) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(layer)  # other tests have the same one
    for p in layer.parameters():
        nn.init.uniform_(p, 0.5, 2)
    x, weights = (3 * torch.randn(shape) + 1).to(dtype), torch.randn(shape).to(dtype)
    torch.save({"layer": layer, "x": x, "weights": weights}, folder / "given")
    crew = server.together(len(shares), "norm", source=str(folder / "given"), shares=shares, target=str(folder / "got"))
    assert [p.wait() for p in crew] == [0] * len(shares), crew[0].stderr
    got = [torch.load(folder / f"got.{rank}") for rank in range(len(shares))]
    x.requires_grad_()
    y = layer.train()(x)
    (y * weights).sum().backward()
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    kept = [g for g, share in zip(got, shares, strict=True) if share]
    torch.testing.assert_close(torch.cat([g["y"] for g in kept]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([g["x"] for g in kept]), x.grad, **close)
    for found in got:
        for name, p in layer.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=tolerance, atol=50 * tolerance)
        for name, buffer in layer.named_buffers():
            torch.testing.assert_close(found[f"state.{name}"], buffer, rtol=min(tolerance, 1e-4), atol=1e-4 * tolerance)


@pytest.mark.slow
def test_torchrun(server: Server, tmp_path: Path) -> None:
    """The command as users type it, from another process's launcher to its summary."""
    words = ["run", "digits", "--method", "rkr,finetune", "--epochs", "2", "--limit", "33", "--json"]
    words += ["--accelerator", "cpu", "--threads", "1", "--out"]
    one = server.cli(*words, tmp_path / "1")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rkr"]
    found = subprocess.run([*launcher, *words, str(tmp_path / "2")], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "Warning" not in found.stderr
    assert one.wait() == 0
    for method in ("rkr", "finetune"):
        first, second = (results(tmp_path / n / "digits-2-epochs-limit-33" / method / "fixed") for n in ("1", "2"))
        assert_close(first, second, test=80)
    assert json.loads(found.stdout.splitlines()[-1])["event"] == "summary"

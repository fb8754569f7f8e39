"""The scripts and notebooks in examples/ run as they stand."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import notebooks
import pages
import pytest

import rkr

EXAMPLES = pages.ROOT / "examples"


def run(*words: str, cwd: Path, **environment: str) -> str:
    """What a script prints."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(Path(rkr.__file__).parents[1]), "HF_HUB_OFFLINE": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with pages.in_empty_folder() as folder:
        runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
        assert (folder / "digits-zoo" / "zoo.json").is_file()
    out = capsys.readouterr().out
    assert all(float(found) > 95 for found in re.findall(r"^\w+: ([\d.]+) %", out, re.MULTILINE))
    assert out.endswith("answers of the first task are unchanged: True\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    out = run(str(EXAMPLES / "trainer.py"), cwd=tmp_path)
    accuracies = [float(found) for found in re.findall(r"^(?:low|high): ([\d.]+) %", out, re.MULTILINE)]
    assert len(accuracies) == 2
    assert min(accuracies) > 85


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_pictures(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    run(str(EXAMPLES / "draw_pictures.py"), "photos", cwd=tmp_path)
    out = run(str(EXAMPLES / "own_pictures.py"), cwd=tmp_path)
    assert out.startswith("colours: 3 classes from 36 pictures")
    assert re.search(r"^photos/new/red.png red \d+ %", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_serving_client(tmp_path: Path) -> None:
    for package in ("efficientnet_lite_pytorch", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    run(str(EXAMPLES / "draw_pictures.py"), "photos", cwd=tmp_path)
    rkr.learn(tmp_path / "photos/colours", model=tmp_path / "zoo", size=64, epochs=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "rkr", "serve", str(tmp_path / "zoo"), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
                break
            time.sleep(0.5)
        out = run(str(EXAMPLES / "serving_client.py"), url, "photos/new/red.png", "photos/new/blue.png", cwd=tmp_path)
    finally:
        server.terminate()
        server.wait(60)
    assert re.findall(r"^(?:.*/)?(\w+)\.png: (\w+|none of the tasks) \(", out, re.MULTILINE)[0][0] == "red"
    assert len(out.splitlines()) == 2


def test_own_method() -> None:
    with pages.in_empty_folder() as folder, contextlib.ExitStack() as stack:
        shutil.copytree(EXAMPLES / "own_method", folder, dirs_exist_ok=True)
        session = pages.Session(stack)
        out, code = session.command("rkr run digits.toml --no-figures --method smooth --epochs 1 --limit 20")
        assert code == 0, out
        assert re.search(r"^ *smooth +1 +\d", out, re.MULTILINE)
        listed, _ = session.command("rkr list rkr_smooth:Smooth")
        assert 'under [methods.NAME]:\n  learner = "rkr_smooth:Smooth"\n  smoothing = 0.1\n' in listed


def test_every_script_has_a_test() -> None:
    text = Path(__file__).read_text("utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []


@pytest.mark.parametrize("name", notebooks.SOURCES)
def test_notebooks_are_those_of_the_tutorials(name: str) -> None:
    page = pages.ROOT / notebooks.SOURCES[name]
    made = notebooks.notebook(page.read_text("utf-8"), page)
    assert (EXAMPLES / f"{name}.ipynb").read_text("utf-8") == made, "make notebooks"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", notebooks.SOURCES)
def test_notebooks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(Path(rkr.__file__).parents[1]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    found = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    nbformat.validate(found)
    assert not any(cell.get("outputs") for cell in found.cells)
    nbclient.NotebookClient(found, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in found.cells for o in cell.get("outputs", []))
    assert "Traceback" not in printed

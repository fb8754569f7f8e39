"""Downloads: whole or not at all, into the right place, with one clear message where it cannot be done."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rkr
from rkr.data import download as module
from rkr.data.download import cache_folder, download, find, folders, place


def fine(path: Path) -> None:
    pass


def test_folders(alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert folders() == [alone] == [cache_folder()]
    monkeypatch.setenv("RKR_DATA", str(tmp_path / "env"))
    assert folders("~/x") == [Path.home() / "x", tmp_path / "env", alone]
    (tmp_path / "env").mkdir()
    alone.mkdir(parents=True)
    (alone / "b").write_text("")
    assert find(["a", "b"]) == alone / "b"
    (tmp_path / "env" / "b").write_text("")
    assert find(["a", "b"]) == tmp_path / "env" / "b"
    (tmp_path / "env" / "a").write_text("")
    assert find(["a", "b"]) == tmp_path / "env" / "a"
    assert find(["c"]) is None


def test_place(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == alone
    assert place(tmp_path / "new" / "folder") == tmp_path / "new" / "folder"
    monkeypatch.setenv("RKR_DATA", "/proc/no-such-place")
    assert place("/proc/other") == alone  # cannot be written to, even by root
    (tmp_path / "file").write_text("")
    assert place(tmp_path / "file") == alone


def test_mirror(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.files["/good"] = b"content"
    urls = [server.address + "missing", server.address + "good"]
    assert download(urls, tmp_path / "deep" / "x", fine, "it").read_bytes() == b"content"
    assert server.requests == ["/missing", "/good"]  # a 404 is not tried again
    assert os.listdir(tmp_path / "deep") == ["x"]
    assert capsys.readouterr().err == f"downloading it from {urls[1]}\n"  # no bar where nobody can see it


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(rkr.FileError) as caught:
        download(["http://127.0.0.1:9/x.gz"], tmp_path / "x.gz", fine, "my data")
    message = str(caught.value)
    assert "my data could not be downloaded" in message
    assert "http://127.0.0.1:9/x.gz" in message
    assert str(tmp_path / "x.gz") in message
    assert "\n" not in message
    assert os.listdir(tmp_path) == []


def test_stalled_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(module, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(rkr.FileError, match="timed out"):
        download([f"http://127.0.0.1:{silent.getsockname()[1]}/x"], tmp_path / "x", fine, "it")
    assert os.listdir(tmp_path) == []


def test_disk_errors(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/x"] = b"content"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(rkr.FileError, match="No space left on device"):
        download([server.address + "x"], tmp_path / "x", fine, "it")
    assert os.listdir(tmp_path) == []


def test_old_parts_are_swept(server: Any, tmp_path: Path) -> None:
    server.files["/x"] = b"content"
    old, new = tmp_path / ".x.00.part", tmp_path / ".x.11.part"
    old.write_text("")
    new.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    download([server.address + "x"], tmp_path / "x", fine, "it")
    assert sorted(os.listdir(tmp_path)) == [".x.11.part", "x"]  # the new one may be another process's


def test_killed_download_leaves_nothing_under_its_name(server: Any, tmp_path: Path) -> None:
    server.files["/x"] = b"c" * (64 << 20)
    program = (
        "import sys, pathlib; from rkr.data.download import download\n"
        "download([sys.argv[1]], pathlib.Path(sys.argv[2]), lambda p: None, 'it')"
    )
    source = str(Path(rkr.__file__).parents[1])
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", program, server.address + "x", str(tmp_path / "x")],
            env={**os.environ, "PYTHONPATH": source},
        )
        while process.poll() is None and not any(part.stat().st_size for part in tmp_path.glob(".x.*.part")):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (tmp_path / "x").exists():  # it was quicker than the kill
            assert (tmp_path / "x").stat().st_size == 64 << 20
            (tmp_path / "x").unlink()
        for part in tmp_path.glob(".x.*.part"):
            part.unlink()
    assert download([server.address + "x"], tmp_path / "x", fine, "it").stat().st_size == 64 << 20

"""Damaged pictures, task files and zip files, and requests made from the OpenAPI description: only 4xx, never 5xx."""

from __future__ import annotations

import io
import random
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.servers import served
from helpers.zoos import CLASSES, picture, task_file
from PIL import Image

from rkr.pictures.zoo import open_zoo

Serve = Any
Mutate = Callable[[random.Random, bytes], bytes]


def flip(draws: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draws.choice((1, 2, 8, 64))):
        out[draws.randrange(len(out))] = draws.randrange(256)
    return bytes(out)


def head(draws: random.Random, data: bytes) -> bytes:
    """Changes where formats keep their sizes."""
    out = bytearray(data)
    for _ in range(draws.choice((1, 3, 10))):
        out[draws.randrange(min(64, len(out)))] = draws.choice((0, 1, 127, 128, 255, draws.randrange(256)))
    return bytes(out)


def cut(draws: random.Random, data: bytes) -> bytes:
    return data[: draws.randrange(len(data))]


def splice(draws: random.Random, data: bytes) -> bytes:
    a, b = sorted((draws.randrange(len(data)), draws.randrange(len(data))))
    return data[:a] + data[b:] if draws.random() < 0.5 else data[:b] + data[a:]


def noise(draws: random.Random, data: bytes) -> bytes:
    return data[: draws.randrange(16)] + draws.randbytes(draws.randrange(200))


MUTATIONS: tuple[Mutate, ...] = (flip, head, cut, splice, noise)


def seeds(folder: Path) -> list[bytes]:
    """A small picture in each format and of several modes."""
    image = Image.open(io.BytesIO(picture(folder)))
    found = []
    for kind, mode in [
        *(("PNG", mode) for mode in ("RGB", "RGBA", "P", "L", "1", "I;16", "LA")),
        *(("JPEG", mode) for mode in ("RGB", "L", "CMYK")),
        *(("GIF", "P"), ("BMP", "RGB"), ("WEBP", "RGBA"), ("TIFF", "RGB"), ("TIFF", "F"), ("PPM", "RGB")),
    ]:
        file = io.BytesIO()
        (image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)).save(file, kind)
        found.append(file.getvalue())
    return found


def fuzz(serve: Serve, folder: Path, tmp_path: Path, count: int, seed: int) -> None:
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    client, server = serve(pixels=2_000_000, upload_timeout=600.0)
    draws, statuses = random.Random(seed), Counter[int]()
    pictures, good = seeds(tmp_path), task_file(folder, "ships", tmp_path / "ships").read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for n, data in enumerate(pictures[:6]):
            file.writestr(f"{'ab'[n % 2]}/{n}.png", data)
    before = {path.name for path in folder.glob("*.safetensors")}
    for n in range(count):
        mutate = draws.choice(MUTATIONS)
        kind = draws.choices(("picture", "task", "zip"), (0.7, 0.25, 0.05))[0]
        if kind == "picture":
            data = mutate(draws, draws.choice(pictures))
            reply = client.post("/v1/predict", files=[("pictures", data)], data={"task": "birds"})
            allowed = reply.status_code == 200  # what still is a picture is answered
        elif kind == "task":
            data = mutate(draws, good)
            if data == good:  # a byte became what it was
                continue
            reply, allowed = client.put(f"/v1/tasks/fuzz-{n}", content=data), False
        else:
            data = mutate(draws, archive.getvalue())
            reply = client.post(f"/v1/tasks/fuzz-{n}/learn", content=data)
            allowed = reply.status_code in (202, 503)  # what still is a zip file of pictures is learned
        statuses[reply.status_code] += 1
        assert allowed or 400 <= reply.status_code < 500, (seed, n, kind, mutate.__name__, reply.text)
        assert allowed or list(reply.json()) == ["error"]
        if kind == "zip" and reply.status_code == 202:
            client.delete(f"/v1/tasks/fuzz-{n}/learn")
    print(dict(statuses))
    assert statuses[422] > count / 4
    assert statuses[500] == 0
    assert {path.name for path in folder.glob("*.safetensors")} == before
    assert list(open_zoo(folder, device="cpu").tasks) == list(server.engine.tasks) == list(CLASSES)
    assert [line for line in server.said if line["event"] == "error"] == []


def test_damaged_files_get_4xx(serve: Serve, folder: Path, tmp_path: Path) -> None:
    fuzz(serve, folder, tmp_path, 300, 1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_damaged_files_get_4xx(serve: Serve, folder: Path, tmp_path: Path) -> None:
    fuzz(serve, folder, tmp_path, 10_000, 2)


def bad_zip(**entries: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return data.getvalue()


def linked() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        entry = zipfile.ZipInfo("a/link.png")
        entry.external_attr = 0o120777 << 16
        file.writestr(entry, "/etc/passwd")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bad_zip(**{"../a.png": b"x"}), "must stay in it"),
        (bad_zip(**{"a/../../b.png": b"x"}), "must stay in it"),
        (bad_zip(**{"/etc/a.png": b"x"}), "must stay in it"),
        (bad_zip(**{"a\\b.png": b"x"}), "must stay in it"),
        (bad_zip(**{"c:/b.png": b"x"}), "must stay in it"),
        (bad_zip(**{"a/" * 20 + "b.png": b"x"}), "too deep"),
        (bad_zip(**{"a/" + "b" * 250 + ".png": b"x"}), "too long"),
        (linked(), "link"),
        (bad_zip(**{f"{n}/a.png": b"x" for n in range(6)}), "6 classes, 5 is the limit"),
        (bad_zip(**{f"a/{n}.png": b"x" for n in range(51)}), "51 files, 50 is the limit"),
        (bad_zip(**{"a/a.png": bytes(200_000), "b/b.png": b""}), "more than 100,000 bytes"),
        (bad_zip(**{"a.png": b"x"}), "class folders"),
        (bad_zip(**{"a/a.txt": b"x"}), "class folders"),
        (bad_zip(**{"a/a.png": b"x"}), "one class only"),
        (b"PK\x05\x06" + bytes(18), "class folders"),
        (b"nothing", "cannot be read"),
    ],
)
def test_hostile_zip_files_are_refused(serve: Serve, folder: Path, tmp_path: Path, data: bytes, said: str) -> None:
    client, _ = serve(classes=5, files=50, unpacked=100_000)
    reply = client.post("/v1/tasks/new/learn", content=data)
    assert reply.status_code == 422
    assert said in reply.json()["error"]
    assert not (tmp_path / "a.png").exists()
    assert not (folder / ".learning").exists()


@pytest.mark.slow
def test_requests_made_from_the_description_get_no_5xx(folder: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schemathesis.serializer.alias("application/zip", "application/octet-stream")
    statuses: Counter[int] = Counter()
    with served(folder, "--allow-changes") as server:
        for result in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations():

            @given(case=result.ok().as_strategy())
            @settings(
                max_examples=100,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def check(case: Any) -> None:
                reply = case.call()
                statuses[reply.status_code] += 1
                assert reply.status_code < 500, (case.method, case.formatted_path, reply.text)

            check()
        assert [line for line in server.lines if line["event"] in ("error", "other")] == []
    print(dict(statuses))
    assert sum(statuses.values()) >= 500

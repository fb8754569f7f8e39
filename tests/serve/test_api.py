"""The HTTP interface: answers, changes, errors, limits and headers."""

from __future__ import annotations

import base64
import io
import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import draw_classes
from helpers.waiting import until
from helpers.zoos import CLASSES, task_file, zipped
from PIL import Image
from starlette.testclient import TestClient

from rkr.pictures.preparation import Preparation
from rkr.pictures.zoo import open_zoo
from rkr.serve.guard import Access, sentence

Serve = Any


def form(*pictures: bytes, **values: Any) -> dict[str, Any]:
    files = [("pictures", (f"{n}.png", data, "image/png")) for n, data in enumerate(pictures)]
    return {"files": files, "data": {k: str(v) for k, v in values.items()}}


def fails(reply: Any, status: int, *said: str) -> None:
    """One clear sentence in JSON."""
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error"]
    error = reply.json()["error"]
    assert error.endswith((".", "!", "?"))
    assert "\n" not in error
    assert all(word.lower() in error.lower() for word in said), error
    assert "Traceback" not in error
    assert "/tmp" not in error


def test_answers_are_those_of_predict(serve: Serve, folder: Path, pictures: list[bytes]) -> None:
    client, _ = serve(batch=1)
    expected = open_zoo(folder, device="cpu").predict(pictures, task="birds", top=2)
    many = client.post("/v1/predict", **form(*pictures, task="birds", top=2))
    assert many.status_code == 200
    found = many.json()["predictions"]
    assert [one["picture"] for one in found] == [f"{n}.png" for n in range(8)]
    as_json = {"pictures": [base64.b64encode(p).decode() for p in pictures], "task": "birds", "top": 2}
    again = client.post("/v1/predict", json=as_json).json()["predictions"]
    assert [one["picture"] for one in again] == [f"picture {n}" for n in range(1, 9)]
    for one, other, right in zip(found, again, expected, strict=True):
        assert one["answers"] == other["answers"]
        assert [a["class"] for a in one["answers"]] == list(right.classes)
        assert [a["probability"] for a in one["answers"]] == pytest.approx(list(right.probabilities), abs=1e-6)
        assert one["task"] == "birds"
        assert "task_probability" not in one


def test_the_task_is_inferred(serve: Serve, folder: Path, pictures: list[bytes]) -> None:
    client, _ = serve()
    expected = open_zoo(folder, device="cpu").predict(pictures, task="auto")
    found = client.post("/v1/predict", **form(*pictures, task="auto")).json()["predictions"]
    assert [one["task"] for one in found] == [right.task for right in expected]
    assert [one["task_probability"] for one in found] == pytest.approx(
        [right.task_probability for right in expected], abs=1e-5
    )


def test_a_data_url_is_understood(serve: Serve, pictures: list[bytes]) -> None:
    client, _ = serve()
    plain = base64.b64encode(pictures[0]).decode()
    answers = [
        client.post("/v1/predict", json={"pictures": [text], "task": "cars"}).json()["predictions"][0]["answers"]
        for text in (plain, f"data:image/png;base64,{plain}")
    ]
    assert answers[0] == answers[1] != []


def test_tasks_are_listed(serve: Serve, folder: Path) -> None:
    client, server = serve()
    until(lambda: all(e.fingerprint for e in server.engine.tasks.values()))
    found = client.get("/v1/tasks").json()
    zoo = open_zoo(folder, device="cpu")
    assert [one["name"] for one in found["tasks"]] == list(CLASSES)
    birds = found["tasks"][0]
    assert birds["classes"] == list(CLASSES["birds"])
    assert birds["accuracy"] == 0.75
    assert birds["bytes"] == next(folder.glob("birds.*")).stat().st_size
    assert birds["fingerprint"] == zoo.model.fingerprint("birds")
    assert client.get("/v1/tasks/birds").json() == birds
    fails(client.get("/v1/tasks/ships"), 404, "no task 'ships'")


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"json": {"pictures": []}}, 422, "pictures"),
        ({"json": {"pictures": ["%%%"], "task": "birds"}}, 422, "picture 1: not base64"),
        ({"json": {"pictures": ["aGVsbG8="], "task": "birds"}}, 422, "not a picture"),
        ({"json": {"pictures": ["aGVsbG8="], "task": "ships"}}, 404, "'ships'"),
        ({"json": {"pictures": ["aGVsbG8="]}}, 422, "3 tasks"),
        ({"json": {"pictures": ["a"], "task": "birds", "top": 0}}, 422, "top"),
        ({"json": {"pictures": ["a"], "task": "birds", "top": True}}, 422, "top"),
        ({"json": {"pictures": ["a"], "tusk": "birds"}}, 422, "tusk"),
        ({"json": [1]}, 422, ""),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 422, "JSON"),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "multipart/form-data"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 4, ""),
        ({"data": {"task": "birds"}, "files": [("other", b"x")]}, 422, "'other'"),
        ({"data": {"tusk": "birds"}, "files": [("pictures", b"x")]}, 422, "'tusk'"),
        ({"data": {"top": "many"}, "files": [("pictures", b"x")]}, 422, "top"),
        ({"data": {"task": "birds"}, "files": [("pictures", b"")]}, 422, "not a picture"),
        ({"data": {"task": "birds"}, "files": [("pictures", b"x")] * 65}, 413, "64"),
        ({"json": {"pictures": ["aGVsbG8="] * 65, "task": "birds"}}, 413, "65 pictures, 64 is the limit"),
    ],
)
def test_wrong_requests_are_told_so(serve: Serve, given: dict[str, Any], status: int, said: str) -> None:
    client, _ = serve()
    reply = client.post("/v1/predict", **given)
    fails(reply, reply.status_code if status == 4 and 400 <= reply.status_code < 500 else status, said)


def test_what_the_queue_can_never_take_is_refused_for_good(serve: Serve, pictures: list[bytes]) -> None:
    client, _ = serve(batch=1, queue=4)
    fails(client.post("/v1/predict", **form(*pictures[:5], task="birds")), 413, "5 pictures, 4 is the limit")


def test_a_damaged_index_is_no_fault_of_the_server(serve: Serve, folder: Path, tmp_path: Path) -> None:
    client, _ = serve()
    file = task_file(folder, "ships", tmp_path / "ships").read_bytes()
    (folder / "zoo.json").write_bytes(b"{")
    fails(client.delete("/v1/tasks/birds"), 409, "zoo.json: cannot be read")
    fails(client.put("/v1/tasks/ships", content=file), 422, "zoo.json: cannot be read")


def test_unknown_places_and_methods(serve: Serve) -> None:
    client, _ = serve()
    fails(client.get("/v2/predict"), 404, "Not Found")
    fails(client.get("/v1/predict"), 405, "Method Not Allowed")
    fails(client.get("/../../etc/passwd"), 404)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_decompression_bomb_is_not_decoded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PNG of 100 kB that claims 30,000 x 30,000 pixels is refused by its header."""
    client, _ = serve()
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(100_000_000), 9)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    seen: list[object] = []
    monkeypatch.setattr(Preparation, "square", seen.append)
    fails(client.post("/v1/predict", **form(bomb, task="birds")), 422, "0.png has more than 50,000,000 pixels")
    assert seen == []


def test_pixels_are_bounded(serve: Serve, tmp_path: Path) -> None:
    client, _ = serve(pixels=1000)
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    fails(client.post("/v1/predict", **form(file.getvalue(), task="birds")), 422, "40 x 30 pixels", "1,000")


def test_formats_that_start_other_programs_are_not_read(serve: Serve) -> None:
    client, _ = serve()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    fails(client.post("/v1/predict", **form(eps, task="birds")), 422, "not a picture")


def test_bodies_are_bounded(serve: Serve) -> None:
    client, _ = serve(body=10_000, task=20_000, upload=30_000)
    fails(client.post("/v1/predict", **form(bytes(20_000), task="birds")), 413, "10,000 bytes")
    fails(client.put("/v1/tasks/x", content=bytes(20_001)), 413, "20,000 bytes")
    fails(client.post("/v1/tasks/x/learn", content=bytes(30_001)), 413, "30,000 bytes")

    def chunks() -> Any:
        yield from [bytes(1000)] * 30

    fails(client.put("/v1/tasks/x", content=chunks()), 413, "20,000 bytes")


def test_all_bodies_together_are_bounded(serve: Serve, pictures: list[bytes]) -> None:
    client, _ = serve(uploads=2000)
    reply = client.post("/v1/predict", content=bytes(3000), headers={"content-type": "application/json"})
    fails(reply, 503, "too much is being uploaded".capitalize())
    assert int(reply.headers["retry-after"]) >= 1


def test_overload_is_503_with_retry_after(serve: Serve, pictures: list[bytes]) -> None:
    client, server = serve(batch=2, queue=4)
    server.engine.accept(3)
    reply = client.post("/v1/predict", **form(*pictures[:2], task="birds"))
    fails(reply, 503, "4 is the limit")
    assert int(reply.headers["retry-after"]) >= 1
    server.engine.release(3)
    assert client.post("/v1/predict", **form(*pictures[:2], task="birds")).status_code == 200
    assert server.engine.accepted == 0


def test_what_takes_too_long_is_given_up(serve: Serve, pictures: list[bytes]) -> None:
    client, server = serve(timeout=0.3)
    go_on = threading.Event()
    compute = server.engine._compute
    server.engine._compute = lambda found: (go_on.wait(30), compute(found))  # type: ignore[method-assign]
    reply = client.post("/v1/predict", **form(pictures[0], task="birds"))
    fails(reply, 503, "within 0.3 seconds")
    assert "retry-after" in reply.headers
    go_on.set()
    until(lambda: server.engine.accepted == 0)


def test_tasks_are_put_replaced_and_dropped(serve: Serve, folder: Path, tmp_path: Path, pictures: list[bytes]) -> None:
    client, _ = serve()
    first = task_file(folder, "ships", tmp_path / "a").read_bytes()
    second = task_file(folder, "ships", tmp_path / "b", seed=9).read_bytes()
    asked = form(pictures[0], task="a/ship & more", top=2)
    fails(client.post("/v1/predict", **asked), 404)
    made = client.put("/v1/tasks/a%2Fship%20%26%20more", content=first)
    assert (made.status_code, made.json()["name"]) == (201, "a/ship & more")
    before = client.post("/v1/predict", **asked).json()
    assert before["predictions"][0]["task"] == "a/ship & more"
    fails(client.put("/v1/tasks/a%2Fship%20%26%20more", content=second), 409, "already")
    assert client.put("/v1/tasks/a%2Fship%20%26%20more?replace=true", content=second).status_code == 201
    after = client.post("/v1/predict", **asked).json()
    assert after != before
    assert "a/ship & more" in open_zoo(folder, device="cpu").tasks
    assert client.delete("/v1/tasks/a%2Fship%20%26%20more").status_code == 204
    fails(client.post("/v1/predict", **asked), 404)
    fails(client.delete("/v1/tasks/a%2Fship%20%26%20more"), 404)
    assert list(open_zoo(folder, device="cpu").tasks) == list(CLASSES)


def test_damaged_and_foreign_task_files_are_refused(serve: Serve, folder: Path, tmp_path: Path) -> None:
    client, server = serve(classes=3)
    good = task_file(folder, "ships", tmp_path / "a").read_bytes()
    bad = bytearray(good)
    bad[-3] ^= 1
    fails(client.put("/v1/tasks/ships", content=bytes(bad)), 422, "checksum")
    fails(client.put("/v1/tasks/ships", content=good[:-10]), 422, "damaged")
    fails(client.put("/v1/tasks/ships", content=b""), 422, "The file")
    fails(client.put("/v1/tasks/auto", content=good), 422, "auto")
    fails(client.put("/v1/tasks/%0A", content=good), 422, "printable")
    fails(client.put(f"/v1/tasks/{'x' * 201}", content=good), 422, "200 characters")
    many = task_file(folder, "ships", tmp_path / "b", list("abcd")).read_bytes()
    fails(client.put("/v1/tasks/ships", content=many), 422, "4 classes")
    base = next(folder.glob("base.*")).read_bytes()
    fails(client.put("/v1/tasks/ships", content=base), 422, "rkr-base")
    assert list(server.engine.tasks) == list(CLASSES)
    assert len(list(folder.glob("*.safetensors"))) == 4


def test_a_task_is_learned(serve: Serve, folder: Path, tmp_path: Path, pictures: list[bytes]) -> None:
    """From a zip file, in the background; earlier answers keep their bits."""
    client, _ = serve(batch=1)
    before = client.post("/v1/predict", **form(*pictures, task="birds", top=3)).json()
    draw_classes(tmp_path / "up" / "colours", {"red": 12, "blue": 12})
    asked = client.post("/v1/tasks/colours/learn", content=zipped(tmp_path / "up"))
    assert (asked.status_code, asked.json()["task"]) == (202, "colours")
    fails(client.post("/v1/tasks/colours/learn", content=b""), 409, "being learned")
    until(lambda: client.get("/v1/tasks/colours/learn").json()["state"] in ("learned", "failed"), 120)
    job = client.get("/v1/tasks/colours/learn").json()
    assert (job["state"], job["error"], job["done"]) == ("learned", None, 1.0)
    assert client.get("/v1/learning").json()["jobs"] == [job]
    entry = client.get("/v1/tasks/colours").json()
    assert entry["classes"] == ["blue", "red"]
    assert entry["accuracy"] == job["accuracy"]
    expected = open_zoo(folder, device="cpu").predict(pictures[0], task="colours", top=2)[0]
    found = client.post("/v1/predict", **form(pictures[0], task="colours", top=2)).json()["predictions"][0]
    assert [a["probability"] for a in found["answers"]] == list(expected.probabilities)
    assert client.post("/v1/predict", **form(*pictures, task="birds", top=3)).json() == before
    fails(client.post("/v1/tasks/colours/learn", content=b""), 409, "already")


def test_learning_is_stopped(serve: Serve, folder: Path, tmp_path: Path) -> None:
    client, _ = serve()
    data = zipped(draw_classes(tmp_path / "colours", {"red": 12, "blue": 12}))
    assert client.post("/v1/tasks/colours/learn", content=data).status_code == 202
    assert client.post("/v1/tasks/others/learn", content=data).status_code == 202
    assert client.delete("/v1/tasks/others/learn").json()["state"] == "cancelled"
    assert client.delete("/v1/tasks/colours/learn").json()["state"] == "cancelled"
    fails(client.delete("/v1/tasks/nothing/learn"), 404)
    until(lambda: not (folder / ".learning").exists(), 60)
    assert client.get("/v1/tasks/colours/learn").json()["state"] == "cancelled"
    assert list(open_zoo(folder, device="cpu").tasks) == list(CLASSES)


def test_changes_are_off_by_default(serve: Serve, folder: Path, tmp_path: Path) -> None:
    client, _ = serve(Access())
    data = task_file(folder, "ships", tmp_path / "a").read_bytes()
    for reply in (
        client.put("/v1/tasks/ships", content=data),
        client.delete("/v1/tasks/birds"),
        client.post("/v1/tasks/ships/learn", content=b""),
        client.delete("/v1/tasks/ships/learn"),
    ):
        fails(reply, 403, "--allow-changes")
    assert list(open_zoo(folder, device="cpu").tasks) == list(CLASSES)


def test_a_token_is_asked_for(serve: Serve, pictures: list[bytes]) -> None:
    client, _ = serve(Access(token="s3cret"))
    for headers in ({}, {"authorization": "Bearer s3cre"}, {"authorization": "Basic s3cret"}, {"authorization": "é"}):
        for path in ("/v1/tasks", "/metrics", "/v1/live", "/v1/learning"):
            reply = client.get(path, headers={k: v.encode("latin-1") for k, v in headers.items()})
            fails(reply, 401, "token")
            assert reply.headers["www-authenticate"] == "Bearer"
    asked = form(pictures[0], task="birds")
    fails(client.post("/v1/predict", **asked), 401)
    right = {"authorization": "Bearer s3cret"}
    assert client.post("/v1/predict", **asked, headers=right).status_code == 200
    assert [client.get(path).status_code for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json")] == [
        200
    ] * 5


def test_other_web_pages_cannot_ask(serve: Serve) -> None:
    """Neither across origins, nor by a name that they make point here."""
    client, _ = serve()
    fails(client.get("/v1/tasks", headers={"origin": "http://evil.example"}), 403, "other web pages")
    fails(client.get("/v1/tasks", headers={"origin": "http://["}), 403)
    fails(client.get("/v1/tasks", headers={"content-length": "9" * 5000}), 413)
    fails(client.get("/v1/tasks", headers={"sec-fetch-site": "cross-site"}), 403)
    fails(client.get("/v1/tasks", headers={"host": "evil.example"}), 421, "evil.example")
    for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
        assert client.get("/v1/tasks", headers={"host": host, "origin": f"http://{host}"}).status_code == 200
    assert "access-control-allow-origin" not in client.get("/v1/tasks").headers


@pytest.mark.parametrize("path", ["/", "/docs", "/v1/tasks", "/nowhere", "/metrics"])
def test_security_headers(serve: Serve, path: str) -> None:
    client, _ = serve()
    headers = client.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_openapi_is_complete(serve: Serve) -> None:
    """Every operation has a summary, a description, and answers with a schema; every field an example or a default."""
    client, _ = serve()
    found = client.get("/openapi.json").json()
    assert set(found["paths"]) == {
        *("/v1/predict", "/v1/tasks", "/v1/tasks/{name}", "/v1/tasks/{name}/learn", "/v1/learning", "/v1/live"),
        *("/healthz", "/readyz", "/metrics"),
    }
    for methods in found["paths"].values():
        for operation in methods.values():
            assert operation["summary"]
            assert operation["description"]
            assert operation["tags"]
            for status, reply in operation["responses"].items():
                assert status == "204" or reply["content"], status
    assert "example" in found["paths"]["/v1/predict"]["post"]["requestBody"]["content"]["application/json"]
    docs = client.get("/docs").text
    assert all(path in docs for path in found["paths"])
    assert "<script" not in docs
    assert "https://" not in docs


def test_metrics_count(serve: Serve, pictures: list[bytes]) -> None:
    client, _ = serve()
    client.post("/v1/predict", **form(*pictures[:3], task="birds"))
    client.post("/v1/predict", **form(pictures[0], task="ships"))
    text = client.get("/metrics").text
    assert 'rkr_requests_total{route="/v1/predict",status="200"} 1.0' in text
    assert 'rkr_requests_total{route="/v1/predict",status="404"} 1.0' in text
    assert "rkr_pictures_total 3.0" in text
    assert "rkr_tasks 3.0" in text
    assert "rkr_batch_pictures_sum 3.0" in text
    live = client.get("/v1/live").json()
    assert live["requests_per_second"] == 0.1
    assert live["pictures_per_second"] == 0.3
    assert live["tasks"] == 3
    assert live["median_ms"] > 0


def test_the_log_has_a_line_for_each_request(serve: Serve, pictures: list[bytes]) -> None:
    client, server = serve()
    client.post("/v1/predict", **form(*pictures[:2], task="birds"))
    client.get("/v1/tasks/x%0Ay")
    lines = [line for line in server.said if line["event"] == "request"]
    first, second = lines[-2:]
    assert {k: first[k] for k in ("method", "path", "status", "task", "pictures")} == {
        "method": "POST",
        "path": "/v1/predict",
        "status": 200,
        "task": "birds",
        "pictures": 2,
    }
    assert (second["path"], second["status"]) == ("/v1/tasks/x\ny", 404)
    json.dumps(lines)


def test_health(serve: Serve) -> None:
    client, server = serve()
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}
    assert client.get("/healthz").text.endswith("}\n")  # so that a terminal shows answers line by line
    server.engine.close()
    assert client.get("/healthz").status_code == 200
    fails(client.get("/readyz"), 503)


@pytest.mark.parametrize(
    ("message", "said"), [("a b\nc", "A b c."), ("JSON is x", "JSON is x."), ("", "Something is wrong."), ("é?", "É?")]
)
def test_errors_are_sentences(message: str, said: str) -> None:
    assert sentence(message) == said


def test_a_picture_that_is_asked_by_a_client_that_went_away_is_forgotten(serve: Serve, pictures: list[bytes]) -> None:
    """The connection is closed while the answer is awaited."""
    client, server = serve()
    assert isinstance(client, TestClient)
    asked = threading.Event()
    server.engine.submit, submit = lambda *a: (asked.set(), submit(*a))[1], server.engine.submit  # type: ignore
    import anyio

    from rkr.serve.app import build_app

    async def talk() -> list[Any]:
        body = json.dumps({"pictures": [base64.b64encode(pictures[0]).decode()], "task": "birds"}).encode()
        sent: list[Any] = []
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/predict", "headers": headers, "query_string": b""}
        await build_app(server)({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
        return sent

    sent = anyio.run(talk)
    assert sent[0]["status"] == 499
    assert server.engine.accepted == 0

"""JSON lines: whole, strict, not too many; and back to the same events."""

import dataclasses
import io
import json
import math
from typing import Any

import pytest

from rkr.experiment.display import JsonLines, relay
from rkr.experiment.events import CandidateEnd, EpochEnd, Progress, TaskEnd


def strict(line: str) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_round_trip(script: list[Any], play: Any, clock: Any) -> None:
    stream = io.StringIO()
    with JsonLines(stream, clock=clock) as watch:
        play(watch, script, 1.0)
    lines = stream.getvalue().splitlines()
    assert [strict(line)["event"] for line in lines] == [
        type(event).__name__.removesuffix("End").lower() for event in script
    ]
    back: list[Any] = []
    relay(lines, back.append)
    assert repr(back) == repr(script)  # NaN is not equal to itself, but reads the same
    assert sum(math.isnan(getattr(event, "loss", 0.0)) for event in back) == 5


def test_nan_is_null() -> None:
    stream = io.StringIO()
    watch = JsonLines(stream)
    nan, inf = float("nan"), float("inf")
    watch(Progress("a", 1, "x", 0, 1, 1, 1, -inf, nan, 0.5, inf))
    watch(TaskEnd("a", 2, "x", 2, (0.5, nan), None, None, 1.0))
    first, second = map(strict, stream.getvalue().splitlines())
    assert (first["loss"], first["accuracy"], first["seconds_left"]) == (None, None, None)
    assert (second["accuracy"], second["agnostic"]) == ([0.5, None], None)
    back: list[Any] = []
    relay(stream.getvalue().splitlines(), back.append)
    assert math.isnan(back[0].loss)
    assert back[0].accuracy is None
    assert back[0].seconds_left is None
    assert back[1].accuracy[0] == 0.5
    assert math.isnan(back[1].accuracy[1])
    assert back[1].agnostic is None


def test_progress_once_a_second(script: list[Any], clock: Any) -> None:
    """Per run, and nothing else is ever left out."""
    stream = io.StringIO()
    watch = JsonLines(stream, clock=clock)
    progress = next(event for event in script if isinstance(event, Progress))
    for _ in range(21):  # at 0, 0.25, ..., 5 s
        watch(progress)
        watch(dataclasses.replace(progress, run="b"))
        clock.now += 0.25
    runs = [strict(line)["run"] for line in stream.getvalue().splitlines()]
    assert runs == [progress.run, "b"] * 6
    stream = io.StringIO()
    watch = JsonLines(stream, clock=clock)
    for event in script:
        watch(event)
    kinds = [strict(line)["event"] for line in stream.getvalue().splitlines()]
    assert kinds == ["started", "progress", *["epoch", "epoch", "task"] * 2, "finished", "failed"]


def test_every_line_is_written_at_once(script: list[Any]) -> None:
    raw = io.BytesIO()
    watch = JsonLines(io.TextIOWrapper(raw, encoding="ascii"))
    watch(dataclasses.replace(script[-1], run="größe"))
    assert strict(raw.getvalue().decode())["run"] == "größe"


def test_relay_passes_on_what_is_no_event(script: list[Any]) -> None:
    other: list[str] = []
    back: list[Any] = []
    good = json.dumps(script[0].to_json())
    lines = [
        "Downloading ...\n",
        good + "\r\n",
        "3",
        "[1]",
        '{"a": 1}',
        '{"event": "unheard of", "run": "a"}',
        '{"event": ["progress"]}',
        '{"event": "failed", "run": "a"}',
        "[" * 100_000,
        "",
    ]
    relay(lines, back.append, other.append)
    assert back == [script[0]]
    assert other == [line.rstrip() for line in (*lines[:1], *lines[2:])]
    relay(lines, back.append)
    assert len(back) == 2


def test_relay_does_not_hide_errors_of_the_watch(script: list[Any]) -> None:
    def watch(event: Any) -> None:
        raise KeyError("watch")

    with pytest.raises(KeyError, match="watch"):
        relay([json.dumps(script[0].to_json())], watch)


def test_candidates() -> None:
    """Their events come back as they were; others have no word of them."""
    events = [
        Progress("a", 1, "x", 0, 3, 1, 2, 0.5, None, 0.25, 9.0, (1, 2), (3, 8)),
        EpochEnd("a", 1, "x", 0, 3, 0.5, None, 0.1, 2.0, (1, 2), (3, 8)),
        CandidateEnd("a", 1, "x", (1, 2), (3, 8), 0.8125, 0.75, 61.0),
        CandidateEnd("a", 1, "x", (1, 2), (4, 8), None, None, 1.0),
        EpochEnd("a", 1, "x", 0, 3, 0.5, None, 0.1, 2.0),
    ]
    stream = io.StringIO()
    for event in events:
        JsonLines(stream)(event)
    lines = [strict(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["progress", "epoch", "candidate", "candidate", "epoch"]
    assert lines[2]["candidate"] == [3, 8]
    assert lines[3]["score"] is None
    assert not {"round", "candidate"} & set(lines[4])
    back: list[Any] = []
    relay(stream.getvalue().splitlines(), back.append)
    assert back == events

"""Plain lines: which come when, word for word."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

from rkr.experiment.display import Plain, both, choose_display
from rkr.experiment.display.text import duration, encodable, number, one_line
from rkr.experiment.events import CandidateEnd, EpochEnd, Failed, Finished, Progress, Started, Stopped, TaskEnd


def test_a_whole_run(script: list[Any], play: Any, clock: Any, tmp_path: Path) -> None:
    stream = io.StringIO()
    with Plain(stream, clock=clock) as watch:
        play(watch, script, 2.0)  # an epoch takes 10 s: its line comes each time
    folder = tmp_path / "run"
    assert stream.getvalue().splitlines() == [
        f"digits lenet A: started: 2 tasks, schedule of 2 epochs: {folder}",
        "digits lenet A: task 1/2 (0-4), epoch 1/2: loss 0.5000, training accuracy 62.50 %, lr 0.1, 2:00 left",
        "digits lenet A: task 1/2 (0-4), epoch 2/2: loss 0.3333, training accuracy 62.50 %, lr 0.05, 1:20 left",
        "digits lenet A: task 1/2 (0-4): 75.00 %, mean 75.00 %, 1:01",
        "digits lenet A: task 2/2 (5-9), epoch 1/2: loss 0.2500, training accuracy 62.50 %, lr 0.1, 0:40 left",
        "digits lenet A: task 2/2 (5-9), epoch 2/2: loss nan, training accuracy 62.50 %, lr 0.05, 0:00 left",
        "digits lenet A: task 2/2 (5-9): 50.00 %, mean 62.50 %, task-agnostic mean 37.50 %, 1:01, "
        "earlier tasks bit-identical",
        f"digits lenet A: finished in 1:02:03: {folder}",
        "other: failed: no memory ?[31mleft",
    ]
    assert "\x1b" not in stream.getvalue()


def test_short_epochs_do_not_flood(script: list[Any], play: Any, clock: Any) -> None:
    stream = io.StringIO()
    play(Plain(stream, clock=clock), script, 0.9)  # 4.5 s an epoch
    lines = [line for line in stream.getvalue().splitlines() if "epoch " in line]
    assert not lines
    stream = io.StringIO()
    watch = Plain(stream, clock=clock)
    times = []
    for epoch in range(100):  # 3 s each
        clock.now += 3
        before = stream.tell()
        watch(EpochEnd("run", 1, "a", epoch, 100, 0.1, None, 0.1, 3.0))
        times += [clock.now] if stream.tell() > before else []
    assert len(times) == 24
    assert {round(b - a, 6) for a, b in pairwise(times)} == {12}


def test_long_epochs(clock: Any) -> None:
    """Every epoch that takes longer has its line, and there is a sign of life within one of many minutes."""
    stream = io.StringIO()
    watch = Plain(stream, clock=clock)
    watch(Started("run", "f", ("a",), 3, 1, 0, False))
    for second in range(1, 201):
        clock.now += 1
        watch(Progress("run", 1, "a", 0, 3, second, 200, 2.0, None, second / 600, 600.0 - second))
    watch(EpochEnd("run", 1, "a", 0, 3, 2.0, None, 0.5, 200.0))
    for second in range(1, 63):  # the line of 60 s would come just before that of the epoch
        clock.now += 1
        watch(Progress("run", 1, "a", 1, 3, second, 62, 2.0, None, 0.5, None))
    watch(EpochEnd("run", 1, "a", 1, 3, 2.0, None, 0.5, 62.0))
    watch(TaskEnd("run", 1, "a", 1, (), None, True, 262.0))
    assert stream.getvalue().splitlines() == [
        "run: started: 1 task, schedule of 3 epochs: f",
        "run: task 1/1 (a), epoch 1/3, batch 60/200: loss 2.0000, 9:00 left",
        "run: task 1/1 (a), epoch 1/3, batch 120/200: loss 2.0000, 8:00 left",
        "run: task 1/1 (a), epoch 1/3: loss 2.0000, lr 0.5, 6:40 left",
        "run: task 1/1 (a), epoch 2/3: loss 2.0000, lr 0.5",
        "run: task 1/1 (a): 4:22",
    ]


def test_ends() -> None:
    stream = io.StringIO()
    watch = Plain(stream)
    watch(Started("a", "f", ("x",), 7, 3, 6, True))
    watch(Stopped("a", "f", 3, 6))
    watch(Finished("a", "f", 0.0, True))
    watch(Finished("a", "f", 0.0, True, "other/rkr/fixed"))
    watch(Failed("a", "f", "the disk\nis full"))
    watch(TaskEnd("a", 2, "x", 2, (1.0, 0.0), None, False, 1.0))
    again = "the state is saved; run the same command again to resume"
    assert stream.getvalue().splitlines() == [
        "a: resumed at task 3, epoch 7: 1 task, schedule of 7 epochs: f",
        f"a: stopped at task 3, epoch 7: {again}",
        "a: already finished: f",
        "a: copied from other/rkr/fixed, the same run: f",
        "a: failed: the disk is full",
        "a: task 2/2 (x): 0.00 %, mean 50.00 %, 0:01, EARLIER TASKS CHANGED",
    ]


def test_a_stream_that_cannot_write_every_letter() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Plain(stream)(Finished("größe", "\udcff/f", 1.0, False))
    assert raw.getvalue() == b"gr\\xf6\\xdfe: finished in 0:01: ?/f\n"


def test_words() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 3599, 3600, 86399, 90000, -3, float("nan"))] == [
        *("0:00", "0:59", "1:00", "59:59", "1:00:00", "23:59:59", "1d 01h", "0:00", "?")
    ]
    assert [number(x) for x in (0.12345, 999.0, 12345.6, float("inf"))] == ["0.1235", "999.0000", "1.23e+04", "inf"]
    assert one_line(" a\tb\r\n\x07c\x1b") == "a b ?c?"
    assert encodable("ö✓", "latin-1") == "ö\\u2713"


def test_both(script: list[Any]) -> None:
    a: list[Any] = []
    b: list[Any] = []
    for event in script:
        both(a.append, b.append)(event)
    assert a == b == script


def test_piped_is_plain(script: list[Any]) -> None:
    stream = io.StringIO()
    with choose_display("auto", stream) as watch:
        for event in script:
            watch(event)
    assert "\x1b" not in stream.getvalue()
    assert "earlier tasks bit-identical" in stream.getvalue()


def test_candidates(clock: Any) -> None:
    """Which of how many is trained, and what came out; rounds only where there are several."""
    stream = io.StringIO()
    watch = Plain(stream, clock=clock)
    watch(Started("a", "f", ("x", "y"), 3, 1, 0, False))
    watch(EpochEnd("a", 1, "x", 0, 3, 0.5, None, 0.1, 20.0, (1, 2), (3, 8)))
    watch(CandidateEnd("a", 1, "x", (1, 2), (3, 8), 0.8125, 0.75, 61.0))
    watch(CandidateEnd("a", 1, "x", (2, 2), (8, 8), None, None, 1.0))
    watch(CandidateEnd("a", 2, "y", (1, 1), (1, 2), 0.5, 0.5, 1.0))
    watch(EpochEnd("a", 2, "y", 2, 3, 0.5, None, 0.1, 20.0))
    assert stream.getvalue().splitlines()[1:] == [
        "a: task 1/2 (x), round 1/2, candidate 3/8, epoch 1/3: loss 0.5000, lr 0.1",
        "a: task 1/2 (x), round 1/2, candidate 3/8: held-out accuracy 81.25 %, score 0.7500, 1:01",
        "a: task 1/2 (x), round 2/2, candidate 8/8: training diverged, 0:01",
        "a: task 2/2 (y), candidate 1/2: held-out accuracy 50.00 %, score 0.5000, 0:01",
        "a: task 2/2 (y), epoch 3/3: loss 0.5000, lr 0.1",
    ]

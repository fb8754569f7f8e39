"""The live display, as a terminal of 60 columns shows it."""

import dataclasses
import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rkr.errors import UsageError
from rkr.experiment.display import Live, Plain, choose_display
from rkr.experiment.display.live import _Row, layout
from rkr.experiment.events import (
    CandidateEnd,
    EpochEnd,
    Event,
    Failed,
    Finished,
    Preparing,
    Progress,
    Started,
    Stopped,
    TaskEnd,
)


class Screen:
    """What a terminal makes of rich's output: text, carriage return, cursor up, erase line, cursor on and off."""

    def __init__(self, written: str, width: int) -> None:
        self.lines, self.row, self.cursor = [""], 0, True
        self.drawn = 0  # lines erased: how often bars were drawn anew
        column = 0
        for code, final, other in re.findall(r"\x1b\[([?0-9;]*)([A-Za-z])|([^\x1b])", written):
            if other == "\n":
                self.row, column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif other == "\r":
                column = 0
            elif other:
                line = self.lines[self.row].ljust(column)
                self.lines[self.row] = line[:column] + other + line[column + 1 :]
                column += 1
                assert cell_len(self.lines[self.row]) <= width, self.lines[self.row]
            elif final == "A":
                self.row -= int(code or 1)
                assert self.row >= 0
            elif final == "K":
                self.lines[self.row] = ""
                self.drawn += 1
            elif code == "?25":
                self.cursor = final == "h"
            else:
                assert final == "m", (code, final)

    @property
    def text(self) -> list[str]:
        return "\n".join(self.lines).rstrip().splitlines()


def terminal(width: int = 60, **more: Any) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=20, force_terminal=True, _environ={"TERM": "xterm-256color"}, **more
    )


def screen(console: Console) -> Screen:
    assert isinstance(console.file, io.StringIO)
    return Screen(console.file.getvalue(), console.width)


def test_a_whole_run(script: list[Any], play: Any, clock: Any) -> None:
    console = terminal()
    folder = "/runs/digits-lenet-A"
    script = [dataclasses.replace(e, folder=folder) if hasattr(e, "folder") else e for e in script]
    seen = []
    with Live(console=console, clock=clock) as watch:
        for event in script:
            play(watch, [event], 1.0)
            seen.append(screen(console).text[-1])
        assert not screen(console).cursor
    assert [line.rstrip() for line in screen(console).text] == [
        "digits lenet A: task 1/2 (0-4): 75.00 %, mean 75.00 %, 1:01",
        "digits lenet A: task 2/2 (5-9): 50.00 %, mean 62.50 %,",
        "  task-agnostic mean 37.50 %, 1:01, earlier tasks",
        "  bit-identical ✓",
        "digits lenet A: finished in 1:02:03: /runs/digits-lenet-A",
        "other: failed: no memory ?[31mleft",
    ]
    assert screen(console).cursor
    assert screen(console).row == 6  # the next shell prompt comes right below
    bar = seen[script.index(next(e for e in script if isinstance(e, Progress) and e.done == 0.5))]
    assert bar == "digits lenet A ━━━━━━─────── t1/2 e2/2 loss 0.333 50.0% 1:20"
    assert seen[0] == "digits lenet A  " + "─" * 23 + "  task 1/2  epoch 1/2"
    assert any("testing" in line for line in seen)
    assert any("loss nan" in line for line in seen)


def test_words_where_there_is_room() -> None:
    row = _Row("run A", 10, 3, 50, 6, 0.1234, 0.8125, 0.25, 4985.0)
    (line,) = layout([row], 100)
    assert (
        line.plain
        == "run A  " + "━" * 7 + "─" * 20 + "  task 3/10  epoch 7/50  loss 0.123  training 81.2 %  1:23:05 left"
    )


def test_candidates(clock: Any) -> None:
    """Those under way in the bar, several if they are trained at once; a line for each that is done."""
    console = terminal(110)
    bars = []

    def seen() -> None:
        clock.now += 1
        watch(Progress("run", 1, "x", 0, 3, 1, 2, 0.5, None, 0.25, 9.0, (1, 2), (3, 8)))
        bars.append(screen(console).text[-1])

    with Live(console=console, clock=clock) as watch:
        watch(Started("run", "f", ("x", "y"), 3, 1, 0, False))
        seen()
        watch(Progress("run", 1, "x", 0, 3, 1, 2, 0.5, None, 0.25, 9.0, (1, 2), (4, 8)))
        seen()
        watch(CandidateEnd("run", 1, "x", (1, 2), (4, 8), 0.8125, 0.75, 61.0))
        seen()
        assert "run: task 1/2 (x), round 1/2, candidate 4/8: held-out accuracy 81.25 %, score 0.7500, 1:01" in (
            screen(console).text
        )
        clock.now += 1
        watch(EpochEnd("run", 1, "x", 2, 3, 0.5, None, 0.1, 0.0))  # of the winner
        bars.append(screen(console).text[-1])
    words = [re.search(r"task 1/2  (.*?)  loss", bar) for bar in bars]
    assert [found and found[1] for found in words] == [
        "round 1/2 candidate 3/8  epoch 1/3",
        "round 1/2 candidate 3,4/8  epoch 1/3",
        "round 1/2 candidate 3/8  epoch 1/3",
        "testing",
    ]
    row = _Row("run A", 10, 3, 50, 6, 0.1234, 0.8125, 0.25, 4985.0, round=(1, 1), candidates=8, trying=(2, 3))
    assert " t3/10 c2,3/8 e7/50 " in layout([row], 60)[0].plain
    assert all(cell_len(layout([row], width)[0].plain) <= width for width in range(1, 120))


def test_no_line_is_wider() -> None:
    long = _Row("split-cifar100-resnet18 rectification seed 12 A", 20, 20, 250, 249, 1234.5, 1.0, 0.999, 90000.0)
    wide = dataclasses.replace(long, label="図" * 40, loss=float("nan"), done=float("nan"), left=None, testing=True)
    assert layout([], 60) == []
    for width in range(1, 151):
        for rows in ([long], [wide], [_Row("a")], [long, wide, _Row("a")]):
            lines = layout(rows, width)
            assert len(lines) == len(rows)
            assert all(cell_len(line.plain) <= width for line in lines)
        assert layout([long], width, unicode=False)[0].plain.isascii()
        if width >= 60:
            line = layout([long], width)[0].plain
            assert all(word in line for word in ("20/20", "250/250", "loss 1.23e+03", "100.0", "1d 01h", "12 A"))


def test_several_runs(script: list[Any], clock: Any) -> None:
    """A line each while they run, in columns, and names that tell them apart."""
    console = terminal()
    names = [f"split-cifar100-lenet rectification {order}" for order in "ABC"]
    with Live(console=console, clock=clock) as watch:
        for name in names:
            watch(Started(name, "f", ("t",) * 10, 50, 1, 0, False))
        clock.now += 1
        for i, name in enumerate(names):
            watch(Progress(name, i + 1, "t", 9 * i, 50, 1, 2, 0.5, 0.25, i / 10, 100.0**i))
        clock.now += 1
        watch(EpochEnd(names[0], 1, "t", 0, 50, 0.5, 0.25, 0.1, 1.0))
        assert screen(console).text == [
            "…fication A ────────── t1/10  e1/50 loss 0.500 25.0%    0:01",
            "…fication B ━───────── t2/10 e10/50 loss 0.500 25.0%    1:40",
            "…fication C ━━──────── t3/10 e19/50 loss 0.500 25.0% 2:46:40",
        ]
        watch(Finished(names[1], "f", 60.0, False))
        watch(Stopped(names[2], "f", 3, 6))
        assert len(screen(console).text) == 5
    assert len(screen(console).text) == 5  # A did not tell its end: its bar stays


def test_ends(clock: Any) -> None:
    console = terminal(200)
    with Live(console=console, clock=clock) as watch:
        watch(Started("a", "f", ("x",), 7, 3, 6, True))
        watch(Stopped("a", "f", 3, 6))
        watch(Finished("[bold]b :smile:", "/f", 0.0, True))
        watch(Failed("c", "f", "the disk\nis full"))
        watch(TaskEnd("d", 2, "x", 2, (1.0, 0.0), None, False, 1.0))
        watch(Finished("d", "/f", 5.0, False))
    assert screen(console).text == [
        "a: resumed at task 3, epoch 7: 1 task, schedule of 7 epochs: f",
        "a: stopped at task 3, epoch 7: the state is saved; run the same command again to resume",
        "[bold]b :smile:: already finished: /f",
        "c: failed: the disk is full",
        "d: task 2/2 (x): 0.00 %, mean 50.00 %, 0:01, EARLIER TASKS CHANGED ✗",
        "d: finished in 0:05: /f",
    ]


def test_at_most_five_times_a_second(script: list[Any], clock: Any) -> None:
    console = terminal()
    progress = next(event for event in script if isinstance(event, Progress))
    with Live(console=console, clock=clock) as watch:
        for _ in range(1000):  # over 10 s
            watch(progress)
            clock.now += 0.01
        assert 45 <= screen(console).drawn <= 51


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_given_back(script: list[Any], error: type[BaseException], clock: Any) -> None:
    console = terminal()
    before = sys.stdout, sys.stderr
    with pytest.raises(error), Live(console=console, clock=clock) as watch:  # noqa: PT012
        for event in script[:4]:
            clock.now += 1
            watch(event)
        assert not screen(console).cursor
        raise error
    assert screen(console).cursor
    assert (sys.stdout, sys.stderr) == before
    assert "t1/2 e1/2" in screen(console).text[-1]
    assert screen(console).row == 1


def test_threads(script: list[Any]) -> None:
    """Runs that tell their events all at once: no line is lost or broken."""
    console = terminal(120)
    with Live(console=console) as watch:

        def tell(name: str) -> None:
            for event in script[:-1]:
                watch(dataclasses.replace(event, run=name))

        threads = [threading.Thread(target=tell, args=(f"run {i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    text = "\n".join(screen(console).text)
    for i in range(8):
        assert f"run {i}: task 1/2 (0-4): 75.00 %, mean 75.00 %, 1:01\n" in text
        assert f"run {i}: finished in 1:02:03" in text


def test_ascii(script: list[Any], clock: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=stream, width=120, height=20, force_terminal=True, _environ={"TERM": "xterm"})
    with Live(console=console, clock=clock) as watch:
        for event in script:
            clock.now += 1
            watch(dataclasses.replace(event, run="größe"))
    stream.flush()
    assert b"earlier tasks bit-identical ok" in re.sub(rb"\x1b\[[0-9;]*m", b"", raw.getvalue())
    assert b"gr\\xf6\\xdfe" in raw.getvalue()
    assert b"###" in raw.getvalue()


def test_live_into_a_file_writes_only_what_stays(script: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    stream = io.StringIO()
    with choose_display("live", stream) as watch:
        for event in script:
            watch(event)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().startswith("digits lenet A: task 1/2 (0-4): 75.00 %")


def test_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(choose_display(stream=Terminal()), Live)
    assert isinstance(choose_display("plain", Terminal()), Plain)
    assert isinstance(choose_display(stream=io.StringIO()), Plain)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_display(stream=Terminal()), Plain)
    quiet = io.StringIO()
    with choose_display("quiet", quiet) as watch:
        watch(Failed("a", "f", "x"))
    assert quiet.getvalue() == ""
    with pytest.raises(UsageError, match="auto, live, plain, json, quiet"):
        choose_display("loud")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_control_c_in_a_real_terminal(tmp_path: Path) -> None:
    """A process in a terminal of its own, interrupted: the cursor is back, and other output came above the bar."""
    import fcntl
    import signal
    import struct
    import termios

    program = """
import sys, time
from rkr.experiment.display import choose_display
from rkr.experiment.events import Progress, Started
with choose_display("auto") as watch:
    watch(Started("a", "f", ("t", "u"), 5, 1, 0, False))
    print("a word from elsewhere", file=sys.stderr)
    while True:
        watch(Progress("a", 1, "t", 2, 5, 1, 2, 0.5, 0.25, 0.25, 9.0))
        time.sleep(0.05)
"""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    source = str(Path(__file__).parents[3] / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [environment.get("PYTHONPATH")])])
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written, sent, deadline = b"", False, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            written += part
            if not part:
                break
            if not sent and b"0.500" in written:
                child.send_signal(signal.SIGINT)
                sent = True
        child.wait(timeout=30)
    finally:
        child.kill()
        os.close(ours)
    shown = Screen(written.decode(), 10_000)  # a traceback may be wider
    assert sent
    assert shown.cursor
    assert shown.text[0] == "a word from elsewhere"
    assert "t1/2 e3/5" in shown.text[1]
    assert shown.text[2].startswith("Traceback")
    assert shown.text[-1].strip() == "KeyboardInterrupt"


def test_events_are_all_known() -> None:
    """A new kind of event needs a place in the displays."""
    assert {kind.__name__ for kind in Event.__subclasses__()} == {
        *("Started", "Preparing", "Progress", "EpochEnd", "CandidateEnd", "TaskEnd", "Finished", "Stopped", "Failed")
    }


def test_what_is_done_before_training() -> None:
    file = io.StringIO()
    display = Live(
        console=Console(file=file, width=70, force_terminal=True, color_system=None), clock=iter(range(99)).__next__
    )
    with display as watch:
        watch(Preparing("birds", "pictures", 30, 120))
        assert "pictures 30/120" in file.getvalue()
        watch(Started("birds", "zoo", ("birds",), 6, 1, 0, False))
        watch(Progress("birds", 1, "birds", 0, 6, 1, 4, 0.5, 0.25, 0.1, None))
    last = file.getvalue().rpartition("pictures 30/120")[2]
    assert "epoch 1/6" in last


def test_plain_lines_before_training() -> None:
    file, now = io.StringIO(), [0.0]
    with Plain(file, every=10.0, clock=lambda: now[0]) as watch:
        for count in (1, 50, 90, 110):
            watch(Preparing("birds", "pictures", count, 120))
            now[0] += 6
    assert file.getvalue() == "birds: pictures 90/120\n"

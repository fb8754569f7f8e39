"""The sentences and numbers that displays for people share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rkr.experiment.events import CandidateEnd, EpochEnd, Event, Failed, Finished, Progress, Started, Stopped, TaskEnd


def one_line(text: str) -> str:
    """Text on one line without control characters: names and reasons come from files and from other packages."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def encodable(text: str, encoding: str | None) -> str:
    """Replace characters that a stream cannot encode, which must not end a run."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def percent(share: float, digits: int = 2) -> str:
    """0.8125 as "81.25 %"."""
    return f"{100 * share:.{digits}f} %"


def number(value: float, digits: int = 4) -> str:
    """A loss: 0.1234, or 1.23e+04 where that would be long."""
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """0:07, 1:02:03 or "2d 03h"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def of(n: int, total: int) -> str:
    """ "3/10", or "3" where the total is not known."""
    return f"{n}/{total}" if total else str(n)


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def started(event: Started) -> str:
    """How a run begins."""
    size = f"{_count(len(event.tasks), 'task')}, schedule of {_count(event.epochs, 'epoch')}"
    how = f"resumed at task {event.number}, epoch {event.epoch + 1}" if event.resumed else "started"
    return one_line(f"{event.run}: {how}: {size}: {event.folder}")


def candidate(event: Progress | EpochEnd | CandidateEnd | Stopped) -> str:
    """ "round 1/2, candidate 3/8", the round only if there are several; nothing where no candidate is trained."""
    if event.round is None or event.candidate is None:
        return ""
    one = f"candidate {of(*event.candidate)}"
    return f"round {of(*event.round)}, {one}" if event.round[1] > 1 else one


def candidate_end(event: CandidateEnd, tasks: int = 0) -> str:
    """A candidate's result: "run: task 3/10 (name), candidate 2/8: held-out accuracy 81.20 %, score 0.8120, 0:35"."""
    how = "training diverged"
    if event.accuracy is not None:
        score = "" if event.score is None else f", score {number(event.score)}"
        how = f"held-out accuracy {percent(event.accuracy)}{score}"
    where = f"task {of(event.number, tasks)} ({event.task}), {candidate(event)}"
    return one_line(f"{event.run}: {where}: {how}, {duration(event.seconds)}")


def task_end(event: TaskEnd) -> str:
    """A task's result without `proof`: "run: task 3/10 (name): 81.20 %, mean 79.90 %"."""
    parts = []
    if event.accuracy:
        what = "" if event.measure == "accuracy" else f"{event.measure} "
        parts.append(f"{what}{percent(event.accuracy[-1])}, mean {percent(mean(event.accuracy))}")
    if event.agnostic:
        parts.append(f"task-agnostic mean {percent(mean(event.agnostic))}")
    parts.append(duration(event.seconds))
    return one_line(f"{event.run}: task {of(event.number, event.tasks)} ({event.task}): {', '.join(parts)}")


def proof(event: TaskEnd) -> str:
    """The result of comparing outputs of earlier tasks; "" if there was nothing to compare."""
    if event.unchanged is None or (event.unchanged and event.number == 1):
        return ""
    return "earlier tasks bit-identical" if event.unchanged else "EARLIER TASKS CHANGED"


def ended(event: Event) -> str:
    """How a run ends."""
    if isinstance(event, Finished):
        how = "already finished" if event.already else f"finished in {duration(event.seconds)}"
        if event.same_as:
            how = f"copied from {event.same_as}, the same run"
        return one_line(f"{event.run}: {how}: {event.folder}")
    if isinstance(event, Stopped):
        where = candidate(event) or f"epoch {event.epoch + 1}"
        return one_line(
            f"{event.run}: stopped at task {event.number}, {where}: "
            "the state is saved; run the same command again to resume"
        )
    assert isinstance(event, Failed)
    return one_line(f"{event.run}: failed: {event.reason}")
